"""The section of the documentation that a replay fills.

Invariant: what is between the two marks is a function of the report alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from benchmarks.replay.report import millions

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from benchmarks.replay.report import Report

BEGIN: Final = "<!-- Eviction: made by `make replay`, do not edit -->"
END: Final = "<!-- end of eviction -->"
HIT_LEVELS: Final = ("policy", "reference", "bound")


def fill(page: Path, report: Report, picture: str) -> None:
    """Replace the section of a page. Raises `ValueError` if the page has no marks."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page}: has no section between {BEGIN!r} and {END!r}")
    page.write_text(f"{before}{BEGIN}\n\n{section(report, picture)}\n{END}{after}")


def section(report: Report, picture: str) -> str:
    """Tables of hits for each part, then the cost of kvlake's policies."""
    cells = [(trace["name"], tokens) for trace in report["traces"] for tokens in _sizes(report)]
    machine = report["machine"]
    about = f"{report['date']}, {machine['cpu']}, Python {machine['python']}"
    lines = [
        f"{about}, load average before {machine['load_before']:.1f}.",
        "Hits are in % of the chunks that prompts have; columns are traces, and tokens of host",
        "memory.",
        "",
    ]
    for part in report["parts"]:
        name = {"all": "All requests"}.get(part, f"The {part} half of each trace")
        rows = [row for row in report["hits"] if row["part"] == part and row["level"] in HIT_LEVELS]
        found = {(row["policy"], row["trace"], row["tokens"]): row["hit_ratio"] for row in rows}
        lines += [f"### {name}", ""]
        lines += _table(
            _columns(cells),
            (
                [policy, *(f"{100 * found[policy, *cell]:.1f}" for cell in cells)]
                for policy in dict.fromkeys(row["policy"] for row in rows)
            ),
        )
    if picture:
        lines += [f"![Hits over the size of host memory]({picture})", ""]
    lines += _costs(report, cells)
    return "\n".join(lines)


def _costs(report: Report, cells: Sequence[tuple[str, int]]) -> list[str]:
    times = {
        (row["policy"], row["trace"], row["tokens"]): row["microseconds"] for row in report["times"]
    }
    lines = [
        "### Cost",
        "",
        "Microseconds of the policy's calls for each chunk that a request asks for, the fastest of",
        "three replays:",
        "",
    ]
    lines += _table(
        _columns(cells),
        (
            [policy, *(f"{times[policy, *cell]:.1f}" for cell in cells)]
            for policy in dict.fromkeys(row["policy"] for row in report["times"])
        ),
    )
    decisions = {
        (row["policy"], row["trace"], row["tokens"]): row.get("loop_ms_p99", 0.0)
        for row in report["times"]
    }
    lines += [
        "Milliseconds that the sidecar's core takes to decide on a message of an engine (99%),",
        "without a store and without carrying out what it decides:",
        "",
    ]
    lines += _table(
        _columns(cells),
        (
            [policy, *(f"{decisions[policy, *cell]:.2f}" for cell in cells)]
            for policy in dict.fromkeys(row["policy"] for row in report["times"])
        ),
    )
    sizes = sorted({row["chunks"] for row in report["memory"]})
    if sizes:
        memory = {
            (row["policy"], row["chunks"]): row["bytes_per_chunk"] for row in report["memory"]
        }
        lines += ["Bytes of the policy for each chunk in host memory, by how many it holds:", ""]
        lines += _table(
            [f"{size:,}" for size in sizes],
            (
                [policy, *(f"{memory[policy, size]:.0f}" for size in sizes)]
                for policy in dict.fromkeys(row["policy"] for row in report["memory"])
            ),
        )
    return lines


def _columns(cells: Sequence[tuple[str, int]]) -> list[str]:
    """Names of traces without what all have, and sizes."""
    return [
        f"{trace.removeprefix('mooncake_').removesuffix('_trace')} {millions(tokens)}"
        for trace, tokens in cells
    ]


def _sizes(report: Report) -> list[int]:
    return sorted({row["tokens"] for row in report["hits"]})


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    head = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows), ""]
