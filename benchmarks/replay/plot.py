"""The picture of a replay: hit ratio over host memory, a field for each trace.

Owns the drawing, as SVG by hand, in light colours or in dark ones as the reader prefers. Invariant:
a function of the report.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING, Any, Final

from benchmarks.replay.report import millions

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

FIELD_WIDTH: Final = 420
FIELD_HEIGHT: Final = 340
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 44, 48
KEY_WIDTH: Final = 23
CHARACTER_WIDTH: Final = 6.3
ROW_HEIGHT: Final = 20
SHOWN: Final = ("policy", "reference", "bound")
"""Hit ratios in the sidecar would lie on those of its policies."""
COLOURS: Final = {
    "density": ("#0a58ca", "#6cb6ff"),
    "lru": ("#c2185b", "#ff7eb6"),
    "fifo": ("#8a6100", "#d9b36c"),
    "LRU": ("#8e2450", "#ffb3d4"),
    "ARC": ("#1b7f3b", "#7ee787"),
    "S3-FIFO": ("#7b3fb5", "#d2a8ff"),
    "SIEVE": ("#0b7f86", "#5fd7df"),
    "W-TinyLFU": ("#cf4a0a", "#ffa657"),
    "clairvoyant": ("#444444", "#c8c8c8"),
}
"""On white, and on a dark ground."""
OTHER_COLOUR: Final = ("#666666", "#aaaaaa")

_Row = dict[str, Any]


def svg(report: dict[str, Any]) -> str:
    """The picture of one report: of all requests, or else of the first part that it has."""
    part = "all" if "all" in report["parts"] else report["parts"][0]
    rows = [row for row in report["hits"] if row["part"] == part and row["level"] in SHOWN]
    names = list(dict.fromkeys(row["policy"] for row in rows))
    traces = [trace["name"] for trace in report["traces"]]
    own = {row["policy"] for row in rows if row["level"] == "policy"}
    width = FIELD_WIDTH * len(traces)
    legend, legend_height = _legend(names, own, width)
    height = FIELD_HEIGHT + legend_height
    of = "" if part == "all" else f", {part} half"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        _style(names),
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for number, trace in enumerate(traces):
        shown = [row for row in rows if row["trace"] == trace]
        parts.append(f'<g transform="translate({FIELD_WIDTH * number} 0)">')
        parts += _field(f"{trace}{of}", shown, names)
        parts.append("</g>")
    parts += legend
    return "\n".join([*parts, "</svg>"]) + "\n"


def _style(names: Sequence[str]) -> str:
    light = [".ground{fill:#ffffff}", "text{fill:#222222}", ".grid{stroke:#e2e2e2}"]
    dark = [".ground{fill:#0d1117}", "text{fill:#e6e6e6}", ".grid{stroke:#30363d}"]
    for number, name in enumerate(names):
        colours = COLOURS.get(name, OTHER_COLOUR)
        for rules, colour in zip((light, dark), colours, strict=True):
            rules.append(f".p{number}{{stroke:{colour}}}.d{number}{{fill:{colour}}}")
    return (
        f"<style>{''.join(light)}polyline,.key{{fill:none;stroke-width:1.7}}"
        ".wide{stroke-width:3}.dashed{stroke-dasharray:6 4}.dotted{stroke-dasharray:2 3}"
        f"@media (prefers-color-scheme: dark){{{''.join(dark)}}}</style>"
    )


def _line_class(number: int, name: str) -> str:
    shape = {"density": " wide", "clairvoyant": " dashed", "LRU": " dotted"}.get(name, "")
    return f"p{number}{shape}"


def _field(title: str, rows: Sequence[_Row], names: Sequence[str]) -> list[str]:
    sizes = sorted({row["tokens"] for row in rows})
    low, high = math.log(sizes[0]), math.log(sizes[-1])
    highest: float = max(row["hit_ratio"] for row in rows)
    top = math.ceil(10 * highest + 0.01) / 10
    right, bottom = FIELD_WIDTH - RIGHT, FIELD_HEIGHT - BOTTOM

    def across(tokens: int) -> float:
        share = (math.log(tokens) - low) / (high - low) if high > low else 0.5
        return LEFT + 8 + share * (right - LEFT - 16)

    def down(ratio: float) -> float:
        return bottom - ratio / top * (bottom - TOP)

    parts = [f'<text x="{LEFT}" y="26" font-size="13">{escape(title)}</text>']
    for tick in range(round(top * 10) + 1):
        y = down(tick / 10)
        parts.append(_grid(LEFT, y, right, y))
        parts.append(_text(LEFT - 6, y + 4, f"{10 * tick} %", "end"))
    for size in sizes:
        parts.append(_grid(across(size), TOP, across(size), bottom))
        parts.append(_text(across(size), bottom + 16, millions(size), "middle"))
    parts.append(_text((LEFT + right) / 2, bottom + 34, "tokens in host memory", "middle"))
    # The first is drawn last, over the others.
    for number, name in reversed(list(enumerate(names))):
        own = sorted(
            (row for row in rows if row["policy"] == name), key=lambda row: int(row["tokens"])
        )
        places = [(across(row["tokens"]), down(row["hit_ratio"])) for row in own]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="{_line_class(number, name)}" points="{path}"/>')
        for (x, y), row in zip(places, own, strict=True):
            told = f"{name}: {100 * row['hit_ratio']:.1f} % at {millions(row['tokens'])} tokens"
            parts.append(
                f'<circle class="d{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.5">'
                f"<title>{told}</title></circle>"
            )
    return parts


def _legend(names: Sequence[str], own: Collection[str], width: int) -> tuple[list[str], int]:
    """A line and a name for each policy, in as many rows as they need; and their height."""
    parts: list[str] = []
    x, y = float(LEFT), FIELD_HEIGHT + 14
    for number, name in enumerate(names):
        label = f"kvlake {name}" if name in own else name
        step = KEY_WIDTH + CHARACTER_WIDTH * len(label) + 16
        if x > LEFT and x + step > width:
            x, y = float(LEFT), y + ROW_HEIGHT
        line = f'x1="{x:.1f}" y1="{y}" x2="{x + KEY_WIDTH - 5:.1f}" y2="{y}"'
        parts.append(f'<line class="key {_line_class(number, name)}" {line}/>')
        parts.append(_text(x + KEY_WIDTH, y + 4, label, "start"))
        x += step
    return parts, y + ROW_HEIGHT - FIELD_HEIGHT


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
