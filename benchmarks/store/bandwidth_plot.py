"""The picture of `bandwidth_bench`: time to first token over bandwidth, both axes logarithmic.

Owns the drawing, as SVG by hand. Invariant: a function of the report; nothing is needed to make or
to see it.
"""

from __future__ import annotations

import math
from typing import Any, Final

WIDTH: Final = 720
HEIGHT: Final = 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 50
LINES: Final = (
    ("no_cache_ttft_ms", "no cache", "#d1602b"),
    ("kvlake_ttft_ms", "kvlake, prompt in the store only", "#1f6fb4"),
)


class _Axis:
    """A logarithmic scale from values to pixels."""

    def __init__(self, values: list[float], start: float, end: float) -> None:
        self._low, self._high = math.log10(min(values) / 1.2), math.log10(max(values) * 1.2)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self) -> list[float]:
        """1, 2 and 5 of every decade that is shown."""
        decades = range(math.floor(self._low), math.ceil(self._high) + 1)
        found = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
        return [one for one in found if self._low <= math.log10(one) <= self._high]


def svg(report: dict[str, Any]) -> str:
    """The picture of one report."""
    points: list[dict[str, float]] = report["points"]
    x = _Axis([one["megabytes_per_second"] for one in points], LEFT, WIDTH - RIGHT)
    times = [one[key] for one in points for key, _, _ in LINES]
    y = _Axis(times, HEIGHT - BOTTOM, TOP)
    title = f"Time to first token, {report['prompt_tokens']:,} tokens, over the store's bandwidth"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}">',
        '<g font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for tick in x.ticks():
        parts.append(_line(x.at(tick), TOP, x.at(tick), HEIGHT - BOTTOM))
        parts.append(_text(x.at(tick), HEIGHT - BOTTOM + 16, f"{tick:g}", "middle"))
    for tick in y.ticks():
        parts.append(_line(LEFT, y.at(tick), WIDTH - RIGHT, y.at(tick)))
        parts.append(_text(LEFT - 6, y.at(tick) + 4, f"{tick:g} ms", "end"))
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 12, "MB per second", "middle"))
    for number, (key, label, colour) in enumerate(LINES):
        places = [(x.at(one["megabytes_per_second"]), y.at(one[key])) for one in points]
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (across, down), one in zip(places, points, strict=True):
            told = f"{one[key]:g} ms at {one['reached_megabytes_per_second']:g} MB/s reached"
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3.5" fill="{colour}">'
                f"<title>{told}</title></circle>"
            )
        parts.append(f'<text x="{LEFT + 8 + 110 * number}" y="40" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</g></svg>"]) + "\n"


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
