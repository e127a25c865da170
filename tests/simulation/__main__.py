"""`python -m tests.simulation`: run seeds, or replay one.

--seeds 10000 --first 0         run this many seeds on all cores, up to the first failure
--seed 123 --trace              replay one, event by event
--seed 123 --steps 500 --trace  only its first 500 steps
--seed 123 --shrink             leave out the faults that its failure does not need
--seed 123 --often 'abort'      replay one in which that fault comes more often; may be repeated
--mutations --seeds 100         break each promise on purpose: after how many seeds is it noticed?
--mutation NAME --seed 123      replay a seed with one of them broken
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Sequence

from tests.simulation.life import Result, simulate
from tests.simulation.mutation import Mutation
from tests.simulation.mutations import MUTATIONS, named
from tests.simulation.search import Summary, notice_all, search, shrink

TRACE_LINES = 40


def main() -> int:
    """Exit code 1 where a rule was broken."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__,
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--without", type=_numbers, default=frozenset())
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--mutation", type=named)
    parser.add_argument("--often", action="append", default=[], metavar="FAULT")
    parser.add_argument("--seen", action="store_true", help="print what was seen, and how often")
    options = parser.parse_args()
    if options.mutations or (options.mutation is not None and options.seed is None):
        return _mutate(options)
    if options.seed is None:
        return _search(options)
    with contextlib.ExitStack() as stack:
        if options.mutation is not None:
            stack.enter_context(options.mutation.applied())
        return _replay(options)


def _numbers(text: str) -> frozenset[int]:
    return frozenset(int(part) for part in text.split(",") if part)


def _mutate(options: argparse.Namespace) -> int:
    chosen = MUTATIONS if options.mutation is None else (options.mutation,)
    seeds = range(options.first, options.first + options.seeds)
    missed = 0
    for noticed in notice_all(chosen, seeds, workers=options.workers):
        result = noticed.result
        told = "NOT NOTICED" if result is None else f"{result.rule} (seed {result.seed})"
        print(f"{noticed.mutation.name}: {told}", flush=True)
        missed += result is None
        for one in noticed.unsound:
            print(f"  seed {one.seed} breaks a rule without it too: {one.violation}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations noticed within {len(seeds)} seeds")
    return 1 if missed else 0


def _search(options: argparse.Namespace) -> int:
    began = time.monotonic()
    shown = 0.0

    def told(summary: Summary) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown > 2.0:
            shown = now
            rate = summary.seeds / (now - began)
            print(f"{summary.seeds} of {options.seeds} seeds, {rate:.1f} a second", flush=True)

    seeds = range(options.first, options.first + options.seeds)
    summary = search(seeds, workers=options.workers, told=told)
    if options.seen:
        for name, count in sorted(summary.seen.items()):
            print(f"{count:10} {name}")
    if summary.failed is None:
        print(f"{summary.seeds} seeds, {summary.steps} steps: every rule held")
        return 0
    _tell(summary.failed)
    replayed = simulate(summary.failed.seed, trace=True)
    print(*replayed.lines[-TRACE_LINES:], sep="\n")
    return 1


def _replay(options: argparse.Namespace) -> int:
    without: frozenset[int] = options.without
    often = tuple(options.often) if options.mutation is None else options.mutation.often
    live = functools.partial(simulate, options.seed, often=often, trace=options.trace)
    result = live(steps_max=options.steps, without=without)
    if options.shrink and result.violation is not None:
        without = shrink(options.seed, result.rule, often)
        result = live(without=without)
    print(*result.lines, sep="\n")
    if result.violation is None:
        print(f"seed {result.seed}, {result.steps} steps: every rule held ({result.trace_hash})")
        return 0
    traceback.print_exception(result.violation)
    _tell(result, without, options.mutation, options.often)
    return 1


def _tell(
    result: Result,
    without: frozenset[int] = frozenset(),
    mutation: Mutation | None = None,
    often: Sequence[str] = (),
) -> None:
    broken = "" if mutation is None else f" --mutation '{mutation.name}'"
    broken += "".join(f" --often '{fault}'" for fault in often)
    left_out = f" --without {','.join(map(str, sorted(without)))}" if without else ""
    print(f"seed {result.seed} broke a rule after {result.steps} steps: {result.violation}")
    print(f"replay it: python -m tests.simulation --seed {result.seed}{broken}{left_out} --trace")


if __name__ == "__main__":
    sys.exit(main())
