"""What a soak says at its end: pure functions of its samples.

Owns the tests and their limits. Invariants: each verdict has the number that it judged; growth is
judged within one life of a process, never across a restart.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Sample = dict[str, float]

SAMPLES_MIN: Final = 8
"""A life with fewer says nothing about growth."""
THROUGHPUT_LOSS_MAX: Final = 0.05
PAIRS_MAX: Final = 20_000

GROWTH_MAX: Final = {
    # By how much a quantity may grow over one life: a part of it, and an amount.
    "anonymous_bytes": (0.10, 24 << 20),
    "descriptors": (0.0, 8.0),
    "sockets": (0.0, 8.0),
    "mappings": (0.05, 24.0),
    "threads": (0.0, 4.0),
    "zombies": (0.0, 1.0),
}
SHARED_GROWTH_MAX: Final = {"shm.bytes": (0.01, 1 << 20), "shm.files": (0.0, 1.0)}


@dataclass(frozen=True)
class Verdict:
    """One question, its answer, and the number behind it."""

    name: str
    good: bool
    said: str


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes of all pairs. Outliers do not move it."""
    pairs = itertools.combinations(range(len(times)), 2)
    step = max(1, len(times) * (len(times) - 1) // 2 // PAIRS_MAX)
    slopes = [
        (values[late] - values[early]) / (times[late] - times[early])
        for early, late in itertools.islice(pairs, 0, None, step)
        if times[late] > times[early]
    ]
    return statistics.median(slopes) if slopes else 0.0


def growth(samples: Sequence[Sample], prefix: str, warm_seconds: float) -> list[Verdict]:
    """Whether anything of the processes `prefix` grew, in any of their lives."""
    verdicts: list[Verdict] = []
    lives: dict[float, list[Sample]] = {}
    for sample in samples:
        if f"{prefix}.life" in sample and f"{prefix}.descriptors" in sample:
            lives.setdefault(sample[f"{prefix}.life"], []).append(sample)
    for name, limits in GROWTH_MAX.items():
        verdicts.append(_grown(list(lives.values()), f"{prefix}.{name}", limits, warm_seconds))
    return verdicts


def shared_growth(samples: Sequence[Sample], warm_seconds: float) -> list[Verdict]:
    """Whether files in shared memory grew over the whole run."""
    return [
        _grown([list(samples)], name, limits, warm_seconds)
        for name, limits in SHARED_GROWTH_MAX.items()
    ]


def _grown(
    lives: list[list[Sample]], name: str, limits: tuple[float, float], warm_seconds: float
) -> Verdict:
    worst, allowed, judged = 0.0, 0.0, 0
    for life in lives:
        start = life[0]["time"] + warm_seconds
        kept = [one for one in life if one["time"] >= start and name in one]
        if len(kept) < SAMPLES_MIN:
            continue
        judged += 1
        times, values = [one["time"] for one in kept], [one[name] for one in kept]
        grown = slope(times, values) * (times[-1] - times[0])
        limit = max(limits[0] * statistics.median(values), limits[1])
        if not allowed or grown / limit > worst / allowed:
            worst, allowed = grown, limit
    if not judged:
        return Verdict(name, True, "no life was long enough to be judged")
    said = f"grew by {worst:,.0f} in the worst of {judged} lives (at most {allowed:,.0f})"
    return Verdict(name, worst <= allowed, said)


def throughput(windows: Sequence[Sample]) -> Verdict:
    """The last fifth against the first, both medians of windows, raw and by the machine's speed."""
    fifth = len(windows) // 5
    if fifth < 1:
        return Verdict("throughput", True, "the run was too short to be cut into fifths")
    first, last = windows[:fifth], windows[-fifth:]

    def median(part: Sequence[Sample], name: str) -> float:
        return statistics.median(one[name] for one in part)

    raw = median(last, "tokens_per_second") / max(median(first, "tokens_per_second"), 1e-9)
    # A machine that got slower needs longer for the calibration, by the same factor.
    speed = median(first, "calibration_seconds") / max(median(last, "calibration_seconds"), 1e-9)
    normalised = raw / max(speed, 1e-9)
    said = f"last fifth {raw:.3f} of the first, {normalised:.3f} by the speed of the machine"
    return Verdict("throughput", max(raw, normalised) >= 1 - THROUGHPUT_LOSS_MAX, said)


def none_of(name: str, found: Sequence[str]) -> Verdict:
    """Good if nothing was found; the first of them where there is."""
    said = "none" if not found else f"{len(found)}, first: {found[0][:300]}"
    return Verdict(name, not found, said)
