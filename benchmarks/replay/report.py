"""The report of a replay: one JSON object, and the same as text.

Invariant: the text is a function of the object.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Report = dict[str, Any]
"""`traces`, `hits`, `times`, `memory`, and how they were measured."""

LEVELS: Final = {
    "policy": "kvlake's policies: a set of keys",
    "reference": "policies from publications",
    "bound": "with knowledge of all requests to come",
    "sidecar": "kvlake's policies in the sidecar, without a store",
    "store": "kvlake's policies in the sidecar, with a store that has all chunks",
}
"""How a hit ratio came about -> a heading."""
NAME_WIDTH: Final = 14
COLUMN_WIDTH: Final = 16


def millions(tokens: int) -> str:
    """A number of tokens, to read."""
    return f"{tokens / 1e6:g}M"


def text_of(report: Report) -> str:
    """All tables."""
    lines: list[str] = []
    for trace in report["traces"]:
        lines.append(
            f"{trace['name']}: {trace['requests']:,} requests, {trace['chunks']:,} chunks of "
            f"{trace['tokens_per_chunk']} tokens, {trace['different_chunks']:,} different"
        )
        for part in report["parts"]:
            rows = [one for one in report["hits"] if one["trace"] == trace["name"]]
            lines += _hits(part, [one for one in rows if one["part"] == part])
        lines.append("")
        times = [one for one in report["times"] if one["trace"] == trace["name"]]
        lines += _section(
            "microseconds of the policy's calls for each requested chunk, by tokens of host memory",
            times,
            "tokens",
            millions,
            lambda row: f"{row['microseconds']:.2f}",
        )
        lines.append("")
    lines += _section(
        "bytes of the policy for each cached chunk, by chunks of host memory",
        report["memory"],
        "chunks",
        "{:,}".format,
        lambda row: f"{row['bytes_per_chunk']:.0f}",
    )
    return "\n".join(lines)


def _hits(part: str, rows: Sequence[Report]) -> list[str]:
    requests = {"all": "all requests"}.get(part, f"the {part} half of the requests")
    lines = ["", f"hits, % of the chunks of {requests}, by tokens of host memory"]
    for level, heading in LEVELS.items():
        lines += _section(
            f"- {heading}" + ("; + read from it" if level == "store" else ""),
            [row for row in rows if row["level"] == level],
            "tokens",
            millions,
            _ratio,
        )
    return lines


def _ratio(row: Report) -> str:
    hits = f"{100 * row['hit_ratio']:.1f}"
    return hits if row["level"] != "store" else f"{hits} + {100 * row['read_ratio']:.1f}"


def _section(
    heading: str,
    rows: Sequence[Report],
    column: str,
    column_name: Callable[[int], str],
    cell: Callable[[Report], str],
) -> list[str]:
    """A table with a line for each policy, if there are any."""
    if not rows:
        return []
    columns = sorted({row[column] for row in rows})
    lines = [heading, _line("", map(column_name, columns))]
    for policy in dict.fromkeys(row["policy"] for row in rows):
        cells = {row[column]: cell(row) for row in rows if row["policy"] == policy}
        lines.append(_line(policy, (cells.get(one, "") for one in columns)))
    return lines


def _line(name: str, cells: Iterable[str]) -> str:
    line = f"  {name:{NAME_WIDTH}}" + "".join(f"{cell:>{COLUMN_WIDTH}}" for cell in cells)
    return line.rstrip()
