"""The picture of a soak: panels above one another over the same time, as SVG by hand.

Owns the drawing. Invariant: a function of the samples; nothing is needed to make or to see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

Sample = dict[str, float]

WIDTH: Final = 900
PANEL: Final = 120
LEFT: Final = 70
COLOURS: Final = ("#1f6fb4", "#d1602b", "#3a9145")
MEBI: Final = 1 << 20

PANELS: Final[tuple[tuple[str, float, tuple[tuple[str, str], ...]], ...]] = (
    ("prompt tokens per second", 1, (("tokens_per_second", "all"),)),
    ("hit ratio", 1, (("hit_ratio", "cached / prompt tokens"),)),
    ("speed of the same work, engine without kvlake = 1", 1, (("pace.ratio", "rounds"),)),
    (
        "anonymous memory, MiB",
        MEBI,
        (("sidecar.anonymous_bytes", "sidecar"), ("engine.anonymous_bytes", "engine")),
    ),
    ("/dev/shm, MiB", MEBI, (("shm.bytes", "ours"),)),
    (
        "descriptors",
        1,
        (("sidecar.descriptors", "sidecar"), ("engine.descriptors", "engine")),
    ),
    ("mappings", 1, (("sidecar.mappings", "sidecar"), ("engine.mappings", "engine"))),
    ("tasks of the sidecar", 1, (("sidecar.tasks", "tasks"),)),
    ("threads", 1, (("sidecar.threads", "sidecar"), ("engine.threads", "engine"))),
    ("objects in the store", 1, (("store.objects", "there"), ("chunks.store", "known"))),
    ("slots", 1, (("slots.used", "used"), ("slots.free", "free"))),
)


def svg(samples: Sequence[Sample], events: Sequence[tuple[float, str]], title: str) -> str:
    """The picture; grey lines are what was done to the processes."""
    last = max((one["time"] for one in samples), default=1.0) or 1.0
    height = 30 + len(PANELS) * (PANEL + 24) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">',
        '<g font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="18" font-size="14">{title}</text>',
    ]
    for number, (name, unit, series) in enumerate(PANELS):
        top = 44 + number * (PANEL + 24)
        parts += _panel(samples, events, (name, unit, series), top, last)
    parts.append(
        f'<text x="{LEFT}" y="{height - 8}">minutes: 0 to {last / 60:.1f}</text></g></svg>'
    )
    return "\n".join(parts) + "\n"


def _panel(
    samples: Sequence[Sample],
    events: Sequence[tuple[float, str]],
    panel: tuple[str, float, tuple[tuple[str, str], ...]],
    top: int,
    last: float,
) -> list[str]:
    name, unit, series = panel
    values = [one[key] / unit for key, _ in series for one in samples if key in one]
    highest = max([*values, 1e-9]) * 1.1
    right = WIDTH - 10
    parts = [
        f'<text x="{LEFT}" y="{top - 5}">{name}</text>',
        f'<path d="M{LEFT},{top} v{PANEL} h{right - LEFT}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">{highest:,.4g}</text>',
        f'<text x="{LEFT - 6}" y="{top + PANEL}" text-anchor="end">0</text>',
    ]
    for moment, what in events:
        x = LEFT + moment / last * (right - LEFT)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{top + PANEL}" stroke="#ccc">'
            f"<title>{what}</title></line>"
        )
    for index, (key, label) in enumerate(series):
        colour = COLOURS[index]
        points = " ".join(
            f"{LEFT + one['time'] / last * (right - LEFT):.1f},"
            f"{top + PANEL - one[key] / unit / highest * PANEL:.1f}"
            for one in samples
            if key in one
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        x = right - 60 - 90 * (len(series) - 1 - index)
        parts.append(f'<text x="{x}" y="{top - 5}" fill="{colour}">{label}</text>')
    return parts
