"""The report of a comparison: one JSON object, its table as text, and where kvlake is behind.

Invariant: the text is a function of the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.peers.arms import IN_THE_ENGINE, LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Report = dict[str, Any]
"""`rows`, `arms`, and how they were measured."""

OWN_ARMS: Final = ("kvlake", "kvlake-offloading")
COLUMNS: Final = (
    ("requests", "requests"),
    ("TTFT p50", "ttft_p50"),
    ("TTFT p99", "ttft_p99"),
    ("TPOT p99", "tpot_p99"),
    ("tokens/s", "rate"),
    ("computed", "computed"),
    ("own cache", "own"),
    ("loaded", "loaded"),
    ("of it store", "store"),
    ("cache CPU s", "cache_seconds"),
    ("engine CPU s", "engine_seconds"),
    ("MB moved", "bytes_moved"),
    ("failed", "failures"),
    ("differ", "differ"),
    ("differ, equal hit", "differ_equal_hit"),
)
"""Heading -> field of a row. Times are in milliseconds."""
COMPUTING: Final = "the engine computes the prompts"
STEP: Final = "the engine's step behind a hit in its own cache"
DISTANCE_HEADINGS: Final = (
    "",
    "what bounds it",
    "arm",
    "TTFT p50 of the limit",
    "more",
    "tokens/s of the limit",
    "part of it",
)
COMPARED: Final = (
    ("TTFT p50", "ttft_p50", "ms", False),
    ("TTFT p99", "ttft_p99", "ms", False),
    ("TPOT p99", "tpot_p99", "ms", False),
    ("throughput", "rate", "tokens/s", True),
    ("failed requests", "failures", "", False),
)
"""Heading, field, unit, and whether more is better."""
ANSWERED: Final = ("answered requests", "answered", "", True)
"""Compared where an arm of kvlake has no requests, and so no other figures."""
FAILED: Final = ("answered requests", "failed requests")


def scenarios_of(report: Report) -> list[str]:
    """Scenarios in the order in which they ran."""
    return list(dict.fromkeys(row["scenario"] for row in report["rows"]))


def rows_of(report: Report, scenario: str) -> list[dict[str, Any]]:
    """Rows of one scenario, an arm each."""
    return [row for row in report["rows"] if row["scenario"] == scenario]


def behind(report: Report) -> Iterator[dict[str, Any]]:
    """Each figure in which an arm of kvlake is not the best: failures, then the furthest behind."""
    found: list[dict[str, Any]] = []
    for scenario in scenarios_of(report):
        rows = [
            row | {"answered": max(0, row["requests"] - row["failures"])}
            for row in rows_of(report, scenario)
        ]
        known = (*OWN_ARMS, LIMIT)
        others = [row for row in rows if row["arm"] not in known and row["requests"]]
        for row in rows:
            if row["arm"] not in OWN_ARMS:
                continue
            for heading, field, unit, more in COMPARED if row["requests"] else (ANSWERED,):
                rated = [other for other in others if other[field] is not None]
                if row[field] is None or not rated:
                    continue
                pick: Callable[..., dict[str, Any]] = max if more else min
                best = pick(rated, key=lambda other: other[field])
                own, other = row[field], best[field]
                if own < other if more else own > other:
                    found.append(
                        {
                            "scenario": scenario,
                            "arm": row["arm"],
                            "figure": heading,
                            "unit": unit,
                            "value": own,
                            "best": other,
                            "best_arm": best["arm"],
                            "ratio": ratio(own, other, more=more),
                        }
                    )
    yield from sorted(found, key=lambda one: (one["figure"] not in FAILED, -one["ratio"]))


def distances(report: Report) -> Iterator[dict[str, Any]]:
    """How far each arm of kvlake is from the engine itself, in each scenario that says it."""
    for scenario in scenarios_of(report):
        rows = {row["arm"]: row for row in rows_of(report, scenario) if row["requests"]}
        limit = rows.get(LIMIT)
        for name in OWN_ARMS:
            own = rows.get(name)
            fields = ("ttft_p50", "rate")
            if own and limit and None not in (row[one] for row in (own, limit) for one in fields):
                yield {
                    "scenario": scenario,
                    "arm": name,
                    "bound": STEP if (limit["own"] or 0) > (limit["computed"] or 0) else COMPUTING,
                    "limit_ttft": limit["ttft_p50"],
                    "ttft": own["ttft_p50"],
                    "limit_rate": limit["rate"],
                    "rate": own["rate"],
                }


def distance_cells(one: dict[str, Any]) -> list[str]:
    """A distance to read, a cell for each of `DISTANCE_HEADINGS`."""
    return [
        one["scenario"],
        one["bound"],
        one["arm"],
        f"{one['limit_ttft']:,}",
        f"{one['ttft'] - one['limit_ttft']:+,.1f}",
        f"{one['limit_rate']:,}",
        f"{one['rate'] / one['limit_rate']:.2f}" if one["limit_rate"] else "-",
    ]


def ratio(own: float, best: float, *, more: bool) -> float:
    """How many times as bad as the best; the larger, the further behind."""
    worse, better = (best, own) if more else (own, best)
    return worse / better if better else float(worse + 1)


def behind_text(one: dict[str, Any]) -> str:
    """One line about a figure in which kvlake is behind."""
    unit = f" {one['unit']}" if one["unit"] else ""
    return (
        f"{one['scenario']}, {one['arm']}: {one['figure']} {one['value']:g}{unit}, "
        f"{one['best_arm']} {one['best']:g}{unit} ({one['ratio']:.2f} times)"
    )


def cells_of(report: Report, row: dict[str, Any]) -> list[str]:
    """An arm and its figures to read. A cache without a process has no processor seconds."""
    cells = [row["arm"], *(cell(row, field) for _, field in COLUMNS)]
    if report["arms"][row["arm"]]["cache"] == IN_THE_ENGINE:
        cells[1 + [field for _, field in COLUMNS].index("cache_seconds")] = "in engine"
    return cells


def cell(row: dict[str, Any], field: str) -> str:
    """A figure to read."""
    value = row[field]
    if value is None:
        return "-"
    if field == "bytes_moved":
        return f"{value / 1e6:,.0f}"
    return f"{value:,}"


def text_of(report: Report) -> str:
    """Where kvlake is behind, then all tables."""
    lines = ["kvlake is behind in:"]
    lines += [f"  {behind_text(one)}" for one in behind(report)] or ["  nothing"]
    lines += ["", "beside what the engine itself takes:"]
    lines += aligned([DISTANCE_HEADINGS, *map(distance_cells, distances(report))])
    for scenario in scenarios_of(report):
        lines += ["", scenario]
        table = [["", *(heading for heading, _ in COLUMNS)]]
        table += [cells_of(report, row) for row in rows_of(report, scenario) if row["requests"]]
        lines += aligned(table)
        for row in rows_of(report, scenario):
            if row["note"]:
                lines.append(f"  {row['arm']}: {row['note']}")
    return "\n".join(lines)


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Rows with columns of equal width."""
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return [
        "  "
        + row[0].ljust(widths[0])
        + "".join(f"  {one:>{width}}" for one, width in zip(row[1:], widths[1:], strict=True))
        for row in table
    ]
