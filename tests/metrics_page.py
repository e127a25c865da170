"""The page of all metrics, `docs/reference/all-metrics.md`, made from the tables in the code.

`make metrics-page` writes it; `tests/sidecar/test_metric_table.py` compares it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Final

from connector.scheduler import outcomes
from connector.scheduler.stats import Stats
from sidecar.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, name_of
from tests import places

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE: Final = places.ROOT / "docs" / "reference" / "all-metrics.md"
HEAD: Final = """# All metrics

`make metrics-page` writes this page from the code. Do not edit it. [Metrics](metrics.md) says which
ones to watch, and what to do.
"""
SIDECAR: Final = {
    "Gauges of the sidecar": (GAUGES, ""),
    "Counters of the sidecar": (COUNTERS, "_total"),
    "Histograms of the sidecar": (HISTOGRAMS, ""),
}


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sidecar(), *_engine()]) + "\n"


def _sidecar() -> Iterator[str]:
    for title, (table, suffix) in SIDECAR.items():
        yield from _table(title)
        for row, text in table.items():
            name, labels = name_of(row)
            yield _row(PREFIX + name + suffix, labels, text)
        yield ""
    yield "The sidecar also exports `process_*`, as every client of Prometheus does: CPU seconds,"
    yield "resident and virtual memory, open descriptors and their limit, and the start.\n"


def _engine() -> Iterator[str]:
    """The labels that vLLM adds to all of its metrics are not shown."""
    yield from _table("In the engine's own `/metrics`")
    for field in fields(Stats):
        yield _row(f"vllm:kvlake_{field.name}_total", [], field.metadata["help"])
    yield _row("vllm:kvlake_prompt_tokens_total", ["outcome", "reason"], outcomes.HELP)


def _table(title: str) -> Iterator[str]:
    yield f"## {title}\n"
    yield "| metric | labels | meaning |"
    yield "|---|---|---|"


def _row(name: str, labels: list[str], text: str) -> str:
    shown = ", ".join(f"`{label}`" for label in labels)
    return f"| `{name}` | {shown} | {text}. |"


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"{PAGE.relative_to(places.ROOT)} is written")
