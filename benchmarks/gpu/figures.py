"""Figures taken on a GPU: what was measured, what was asked, and whether it holds.

Owns their JSON under `benchmarks/results/`, one file for each device, and the table between the
markers of `docs/evidence/performance.md`, which is made of these files and of nothing else.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tests.gpu.real.preflight import Device

RESULTS: Final = Path("benchmarks/results")
PAGE: Final = Path("docs/evidence/performance.md")
BEGIN: Final = "<!-- GPU: made by `make gpu-test` and `make gpu-bench`, do not edit -->"
END: Final = "<!-- end of GPU -->"
NOT_YET: Final = "not yet run"


@dataclass(frozen=True)
class Figure:
    """One measurement. A bound is the most or the least that was asked, or neither."""

    part: str
    name: str
    value: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    beside: str = ""
    """What else is to be known of it."""

    @property
    def verdict(self) -> str:
        """Whether it holds; nothing where nothing was asked."""
        if self.at_least is None and self.at_most is None:
            return ""
        holds = (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )
        return "HOLDS" if holds else "FALLS SHORT"

    @property
    def asked(self) -> str:
        """The bound in words."""
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "" if self.at_most is None else f"≤ {self.at_most:g}"

    @property
    def shown(self) -> str:
        """The value with its unit."""
        size = abs(self.value)
        digits = 0 if size >= 100 else 1 if size >= 10 else 2
        return f"{self.value:.{digits}f} {self.unit}".strip()


@dataclass(frozen=True)
class Missing:
    """A part that was not measured, and why."""

    part: str
    reason: str


def write(
    folder: Path, device: Device, figures: list[Figure], missing: list[Missing], *, real: bool
) -> Path:
    """Leave the results; returns where. A rehearsal has none to leave."""
    assert real, "what a rehearsal measures means nothing"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"gpu-bench-{device.slug}.json"
    report = {
        "device": asdict(device),
        "figures": [asdict(one) | {"verdict": one.verdict} for one in figures],
        "missing": [asdict(one) for one in missing],
    }
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return path


def lines(figures: list[Figure], missing: list[Missing]) -> list[str]:
    """Rows of a table in Markdown."""
    rows = ["| | measured | asked | |", "|---|---|---|---|"]
    for one in figures:
        name = f"{one.part}: {one.name}" + (f" ({one.beside})" if one.beside else "")
        value = "no value" if math.isnan(one.value) else one.shown
        rows.append(f"| {name} | {value} | {one.asked} | {one.verdict} |")
    rows += [f"| {one.part} | not measured: {one.reason} | | |" for one in missing]
    return rows


def _about(device: dict[str, Any]) -> str:
    return (
        f"**{device['name']}**, {device['cores']} cores, driver {device['driver_version']}, "
        f"torch {device['torch']}."
    )


def verdict(case: dict[str, Any]) -> str:
    """What came of a case of `make gpu-test`, in a word."""
    if case["holds"]:
        return "HOLDS"
    return "SKIPPED" if case.get("skipped") else "FAILS"


def _of_tests(report: dict[str, Any]) -> list[str]:
    rows = ["| `make gpu-test` | | |", "|---|---|---|"]
    for case, found in report["cases"].items():
        said = str(found["said"] or found["reason"]).replace("|", "/").replace("\n", " ")[:300]
        rows.append(f"| {case.replace('_', ' ')} | {said} | {verdict(found)} |")
    return rows


def section(results: Path) -> str:
    """What the page says between its markers, from the files that there are."""
    parts: list[str] = []
    for path in sorted(results.glob("gpu-test-*.json")):
        report: dict[str, Any] = json.loads(path.read_text())
        parts += [_about(report["device"]), "", *_of_tests(report), ""]
    for path in sorted(results.glob("gpu-bench-*.json")):
        report = json.loads(path.read_text())
        figures = [
            Figure(**{key: value for key, value in one.items() if key != "verdict"})
            for one in report["figures"]
        ]
        missing = [Missing(**one) for one in report["missing"]]
        parts += [_about(report["device"]), "", *lines(figures, missing), ""]
    return "\n".join(parts).strip() or NOT_YET


def put_into(page: Path, results: Path) -> None:
    """Replace what stands between the markers of `page`."""
    before, marker, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert marker, f"{page} has lost its marker: {BEGIN}"
    assert end, f"{page} has lost its marker: {END}"
    page.write_text(f"{before}{BEGIN}\n\n{section(results)}\n\n{END}{after}")


if __name__ == "__main__":
    put_into(PAGE, RESULTS)
