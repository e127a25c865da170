"""Many seeds on many cores, up to the first failure; and a failure made short.

Owns running seeds in processes, and `shrink`. A seed's outcome does not depend on which process
runs it, nor on what ran before.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from tests.simulation.faults import FAULTS_MAX
from tests.simulation.life import Result, simulate
from tests.simulation.mutation import Mutation

SEEDS_PER_TASK = 10
SEARCH_SECONDS_MAX = 1800
"""For a test. It computes all the time: minutes on two cores, and many more beside other work."""


@dataclass(slots=True)
class Summary:
    """What a run over seeds came to."""

    seeds: int = 0
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter[str])
    failed: Result | None = None

    def add(self, result: Result) -> None:
        """Count one more life. The failure of the first seed is kept."""
        self.seeds += 1
        self.steps += result.steps
        self.seen.update(result.seen)
        if result.violation is not None and (self.failed is None or result.seed < self.failed.seed):
            self.failed = result


def _lives(often: tuple[str, ...], seeds: list[int]) -> list[Result]:
    results: list[Result] = []
    for seed in seeds:
        result = simulate(seed, often=often)
        results.append(_portable(result))
        if result.violation is not None:
            break
    return results


def search(
    seeds: Iterable[int],
    *,
    often: tuple[str, ...] = (),
    workers: int = 0,
    told: Callable[[Summary], None] = lambda summary: None,
) -> Summary:
    """Run seeds until one fails, or all have run; `told` hears of the progress.

    `often` names kinds of faults that come more often in these lives.
    """
    summary = Summary()
    with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        for results in pool.imap_unordered(functools.partial(_lives, often), _parts(seeds)):
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


def shrink(seed: int, rule: str, often: Collection[str] = ()) -> frozenset[int]:
    """Numbers of the faults that a failure does not need: without them the rule breaks too."""
    without: frozenset[int] = frozenset()
    for number in range(FAULTS_MAX):
        tried = without | {number}
        if simulate(seed, without=tried, often=often).rule == rule:
            without = tried
    return without


@dataclass(slots=True)
class Noticed:
    """How a mutation fared: the first life in which a rule was broken that holds without it."""

    mutation: Mutation
    seeds: int = 0
    result: Result | None = None
    unsound: list[Result] = field(default_factory=list[Result])
    """Lives in which a rule is broken without the mutation too: they say nothing about it."""


def notice(mutation: Mutation, seeds: Iterable[int]) -> Noticed:
    """Live seeds with mutated code until a rule is broken that holds without the mutation.

    The seed that is known to notice it comes first.
    """
    noticed = Noticed(mutation)
    for seed in dict.fromkeys((mutation.seed, *seeds)):
        noticed.seeds += 1
        with mutation.applied():
            result = simulate(seed, often=mutation.often)
        if result.violation is None:
            continue
        sound = simulate(seed, often=mutation.often)
        if sound.violation is None:
            noticed.result = _portable(result)
            break
        noticed.unsound.append(_portable(sound))
    return noticed


def notice_at_once(mutations: Collection[Mutation], *, workers: int = 0) -> list[Noticed]:
    """Live each mutation in the life named beside it alone, on all cores.

    Mutations share lives: without a mutation, each of these is lived once.
    """
    with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        mutated = pool.map(_mutated, mutations, chunksize=1)
        broken = [
            (mutation.seed, mutation.often)
            for mutation, result in zip(mutations, mutated, strict=True)
            if result.violation is not None
        ]
        lives = dict.fromkeys(broken)
        sound = dict(zip(lives, pool.starmap(_sound, lives, chunksize=1), strict=True))
    return [
        _noticed(mutation, result, sound.get((mutation.seed, mutation.often)))
        for mutation, result in zip(mutations, mutated, strict=True)
    ]


def _mutated(mutation: Mutation) -> Result:
    with mutation.applied():
        return _portable(simulate(mutation.seed, often=mutation.often))


def _sound(seed: int, often: tuple[str, ...]) -> Result:
    return _portable(simulate(seed, often=often))


def _noticed(mutation: Mutation, result: Result, sound: Result | None) -> Noticed:
    if result.violation is None or sound is None:
        return Noticed(mutation, seeds=1)
    if sound.violation is not None:
        return Noticed(mutation, seeds=1, unsound=[sound])
    return Noticed(mutation, seeds=1, result=result)


def _portable(result: Result) -> Result:
    """A result that can travel between processes: what caused its violation may not."""
    if result.violation is not None:
        result.violation.__cause__ = None
    return replace(result, lines=[])


def notice_all(
    mutations: Iterable[Mutation], seeds: Iterable[int], *, workers: int = 0
) -> Iterator[Noticed]:
    """The same for many, on all cores, in their order."""
    with multiprocessing.get_context("spawn").Pool(workers or os.cpu_count()) as pool:
        yield from pool.imap(functools.partial(_notice, list(seeds)), mutations)


def _notice(seeds: list[int], mutation: Mutation) -> Noticed:
    return notice(mutation, seeds)
