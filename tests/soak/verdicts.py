"""What a soak says at its end: pure functions of its samples.

Owns the tests and their limits. Invariants: each verdict has the number that it judged; growth is
judged within one life of a process, never across a restart.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Sample = dict[str, float]

SAMPLES_MIN: Final = 8
"""A life with fewer says nothing about growth."""
THROUGHPUT_LOSS_MAX: Final = 0.05
THROUGHPUT_DOUBT_MAX: Final = 0.10
"""A run that cannot tell a loss of so much from none says nothing."""
HITS_LOSS_MAX: Final = 0.02
ROUNDS_MIN: Final = 6
"""Fewer at either end say nothing about throughput."""
THROUGHPUT_SECONDS_MIN: Final = 480.0
"""A shorter run has no time for as many."""
RESAMPLES: Final = 1000
PAIRS_MAX: Final = 20_000

GROWTH_MAX: Final = {
    # By how much a quantity may grow over one life: a part of it, and an amount.
    "anonymous_bytes": (0.10, 24 << 20),
    "shared_bytes": (0.05, 16 << 20),
    "descriptors": (0.0, 8.0),
    "sockets": (0.0, 8.0),
    "mappings": (0.05, 24.0),
    # Idle worker threads of the event loop are retired after seconds, and made again.
    "threads": (0.0, 12.0),
    "zombies": (0.0, 1.0),
}
TASKS_GROWTH_MAX: Final = (0.0, 8.0)
WHOLE_GROWTH_MAX: Final = {
    "shm.bytes": (0.01, 1 << 20),
    "shm.files": (0.0, 1.0),
    "runtime.files": (0.0, 1.0),
}


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
    limited = GROWTH_MAX | ({"tasks": TASKS_GROWTH_MAX} if prefix == "sidecar" else {})
    for name, limits in limited.items():
        verdicts.append(_grown(list(lives.values()), f"{prefix}.{name}", limits, warm_seconds))
    return verdicts


def whole_growth(samples: Sequence[Sample], warm_seconds: float) -> list[Verdict]:
    """Whether files grew over the whole run: in shared memory, beside the sockets."""
    return [
        _grown([list(samples)] if samples else [], name, limits, warm_seconds)
        for name, limits in WHOLE_GROWTH_MAX.items()
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
        return Verdict(name, False, "no life was long enough to be judged")
    said = f"grew by {worst:,.0f} in the worst of {judged} lives (at most {allowed:,.0f})"
    return Verdict(name, worst <= allowed, said)


def bounded(name: str, samples: Sequence[Sample], limit: float) -> Verdict:
    """Whether a quantity that is bounded was back below its limit in the last sample."""
    values = [one[name] for one in samples if name in one]
    if not values:
        return Verdict(name, False, "nobody asked")
    said = f"{values[-1]:,.0f} at the end (at most {limit:,.0f}), {max(values):,.0f} at most before"
    return Verdict(name, values[-1] <= limit, said)


def throughput(start: Sequence[float], end: Sequence[float], seconds: float) -> Verdict:
    """Whether the speed at the end is within 5% of the start's, and a loss of 10% out of question.

    The first is asked of the estimate, the second of its 95% bootstrap interval.

    Args:
        start: rounds at the start, each the speed of kvlake as a multiple of the reference's.
        end: rounds at the end.
        seconds: of the whole run. Only a short one may have too few, and then from its start on.
    """
    name = "throughput"
    if min(len(start), len(end)) < ROUNDS_MIN:
        counts = f"{len(start)} and {len(end)} rounds"
        said = f"not judged: {counts}, and fewer than {ROUNDS_MIN} tell nothing"
        short = seconds < THROUGHPUT_SECONDS_MIN and len(start) < ROUNDS_MIN
        return Verdict(name, short, said)
    before, after = [math.log(one) for one in start], [math.log(one) for one in end]
    chooser = random.Random(0)
    shifts = sorted(
        _shift(chooser.choices(before, k=len(before)), chooser.choices(after, k=len(after)))
        for _ in range(RESAMPLES)
    )
    low, high = (shifts[round(share * (RESAMPLES - 1))] for share in (0.025, 0.975))
    ratio, least = math.exp(_shift(before, after)), math.exp(low)
    said = (
        f"{ratio:.3f} of the start's (at least {1 - THROUGHPUT_LOSS_MAX:.2f}), 95% interval "
        f"{least:.3f} (at least {1 - THROUGHPUT_DOUBT_MAX:.2f}) to {math.exp(high):.3f}, "
        f"from {len(start)} and {len(end)} rounds at {statistics.median(start):.2f} and "
        f"{statistics.median(end):.2f} of the reference"
    )
    good = ratio >= 1 - THROUGHPUT_LOSS_MAX and least >= 1 - THROUGHPUT_DOUBT_MAX
    return Verdict(name, good, said)


def _shift(before: Sequence[float], after: Sequence[float]) -> float:
    """Hodges and Lehmann's: the median of all differences. A disturbed round does not move it."""
    return statistics.median(late - early for early in before for late in after)


def hits(start: Sequence[Sample], end: Sequence[Sample]) -> Verdict:
    """Whether the measured rounds loaded something, and as much at the end as at the start."""
    if not start or not end:
        return Verdict("hits", False, "no rounds were measured")
    first, last = (
        statistics.median(one["pace.hit_ratio"] for one in part) for part in (start, end)
    )
    said = f"{last:.1%} of the tokens of measured rounds at the end, {first:.1%} at the start"
    return Verdict("hits", last > 0 and last >= first - HITS_LOSS_MAX, said)


def none_of(name: str, found: Sequence[str]) -> Verdict:
    """Good if nothing was found; the first of them where there is."""
    said = "none" if not found else f"{len(found)}, first: {found[0][:300]}"
    return Verdict(name, not found, said)
