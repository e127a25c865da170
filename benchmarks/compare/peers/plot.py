"""Pictures of a comparison: bars for each scenario and arm, one picture for each figure.

Owns the drawing, as SVG by hand, in light colours or in dark ones as the reader prefers. Invariant:
a function of the report.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, Final

from benchmarks.compare.peers.report import rows_of, scenarios_of

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 840
LABEL_WIDTH: Final = 150
VALUE_WIDTH: Final = 76
BAR_HEIGHT: Final = 13
GAP: Final = 12
TOP: Final = 62
KEY_STEP: Final = 156
COLOURS: Final = {
    "limit": ("#c8c8c8", "#5a5a5a"),
    "vllm": ("#777777", "#a8a8a8"),
    "offloading": ("#cf4a0a", "#ffa657"),
    "lmcache": ("#1b7f3b", "#7ee787"),
    "kvlake": ("#0a58ca", "#6cb6ff"),
    "kvlake-offloading": ("#7b3fb5", "#d2a8ff"),
}
"""On white, and on a dark ground."""
OTHER_COLOUR: Final = ("#8a6100", "#d9b36c")
PICTURES: Final = {
    "compare-ttft.svg": ("ttft_p50", "Time to first token, median, ms (shorter is better)"),
    "compare-rate.svg": ("rate", "Generated tokens per second (longer is better)"),
}
"""File name -> field of a row, and title."""


def svg(report: dict[str, Any], field: str, title: str) -> str:
    """Bars of one figure; each scenario has a scale of its own."""
    names = list(dict.fromkeys(row["arm"] for row in report["rows"]))
    parts: list[str] = []
    y = TOP
    for scenario in scenarios_of(report):
        rows = [row for row in rows_of(report, scenario) if row[field] is not None]
        if not rows:
            continue
        parts += bars(rows, names, field, y)
        y += BAR_HEIGHT * len(rows) + GAP
    size = f'viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}"'
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" '
                'font-size="11">'
            ),
            style(names),
            f'<rect class="ground" width="{WIDTH}" height="{y}"/>',
            f'<text x="12" y="22" font-size="14">{escape(title)}</text>',
            *key(names),
            *parts,
            "</svg>\n",
        ]
    )


def bars(rows: Sequence[dict[str, Any]], names: Sequence[str], field: str, top: int) -> list[str]:
    """The bars of one scenario."""
    longest = max(row[field] for row in rows) or 1.0
    middle = top + BAR_HEIGHT * len(rows) / 2 + 4
    scenario = escape(rows[0]["scenario"])
    parts = [f'<text x="{LABEL_WIDTH - 8}" y="{middle:.1f}" text-anchor="end">{scenario}</text>']
    for at, row in enumerate(rows):
        y = top + BAR_HEIGHT * at
        length = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) * row[field] / longest
        number = names.index(row["arm"])
        told = escape(f"{row['scenario']}, {row['arm']}: {row[field]:g}")
        parts.append(
            f'<rect class="a{number}" x="{LABEL_WIDTH}" y="{y}" width="{max(length, 1):.1f}" '
            f'height="{BAR_HEIGHT - 2}"><title>{told}</title></rect>'
        )
        x = LABEL_WIDTH + max(length, 1) + 5
        parts.append(f'<text x="{x:.1f}" y="{y + BAR_HEIGHT - 3}">{row[field]:g}</text>')
    return parts


def key(names: Sequence[str]) -> list[str]:
    """A square and a name for each arm."""
    parts: list[str] = []
    for number, name in enumerate(names):
        x = 12 + KEY_STEP * number
        parts.append(f'<rect class="a{number}" x="{x}" y="34" width="11" height="11"/>')
        parts.append(f'<text x="{x + 16}" y="44">{escape(name)}</text>')
    return parts


def style(names: Sequence[str]) -> str:
    """Colours of the ground, of text and of each arm."""
    light = [".ground{fill:#ffffff}", "text{fill:#222222}"]
    dark = [".ground{fill:#0d1117}", "text{fill:#e6e6e6}"]
    for number, name in enumerate(names):
        for rules, colour in zip((light, dark), COLOURS.get(name, OTHER_COLOUR), strict=True):
            rules.append(f".a{number}{{fill:{colour}}}")
    return f"<style>{''.join(light)}@media (prefers-color-scheme: dark){{{''.join(dark)}}}</style>"
