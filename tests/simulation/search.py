"""Many seeds on many cores, up to the first failure; and a failure made short.

Owns running seeds in processes, and `shrink`. A seed's outcome does not depend on which process
runs it, nor on what ran before.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.simulation.life import Result, simulate

SEEDS_PER_TASK = 10
FAULTS_MAX = 14


@dataclass(slots=True)
class Summary:
    """What a run over seeds came to."""

    seeds: int = 0
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])
    failed: Result | None = None

    def add(self, result: Result) -> None:
        """Count one more life. Of several failures the first seed's is kept."""
        self.seeds += 1
        self.steps += result.steps
        self.seen.update(result.seen)
        if result.violation is not None and (self.failed is None or result.seed < self.failed.seed):
            self.failed = result


def _lives(seeds: list[int]) -> list[Result]:
    results: list[Result] = []
    for seed in seeds:
        result = simulate(seed)
        if result.violation is not None:
            # What caused it may be no record that travels between processes; its words are.
            result.violation.__cause__ = None
        results.append(replace(result, lines=[]))
        if result.violation is not None:
            break
    return results


def search(
    seeds: Iterable[int],
    *,
    workers: int = 0,
    told: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Run seeds until one fails, or all have run; `told` hears of the progress."""
    summary = Summary()
    with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        for results in pool.imap_unordered(_lives, _parts(seeds)):
            for result in results:
                summary.add(result)
            told(summary)
            if summary.failed is not None:
                break
    return summary


def _parts(seeds: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(seeds)
    while part := list(itertools.islice(rest, SEEDS_PER_TASK)):
        yield part


def shrink(seed: int, rule: str) -> frozenset[int]:
    """Numbers of the faults that a failure does not need: without them the rule breaks too."""
    without: frozenset[int] = frozenset()
    for number in range(FAULTS_MAX):
        tried = without | {number}
        if simulate(seed, without=tried).rule == rule:
            without = tried
    return without
