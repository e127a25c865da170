"""Turns: one arm runs, the others are paused. What a scenario needs to measure.

Invariant: outside of `turn` and `all_running` every arm is paused.
"""

from __future__ import annotations

import random
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.compare.peers.client import complete, reset_prefix_cache
from benchmarks.compare.peers.metrics import Counts, counts_of
from benchmarks.compare.peers.processes import ServerFailed
from benchmarks.compare.peers.rows import Row, differing, row_of
from sidecar.demo.model import WORDS

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from benchmarks.compare.peers.arms import Arm, ArmFactory
    from benchmarks.compare.peers.client import Answer

TEXT_WORDS: Final = WORDS - 256
"""Tokens that are words; the rest are bytes and special tokens."""
WAKE_SECONDS: Final = 0.05
SETTLE_SECONDS: Final = 0.2
"""What an arm gets after an answer, to finish what it stores."""
WARM_UP_TOKENS: Final = (4000, 512)
REFERENCE: Final = "vllm"


@dataclass
class Comparison:
    """The arms and the choices of a run."""

    arms: list[Arm]
    factory: ArmFactory
    folder: Path
    model: Path
    quick: bool = False
    trace: Path | None = None
    chooser: random.Random = field(default_factory=lambda: random.Random(20))

    def size(self, full: int, quick: int) -> int:
        """A number that is smaller in a quick run."""
        return quick if self.quick else full

    def tokens(self, count: int) -> list[int]:
        """A prompt that nobody has seen."""
        return [self.chooser.randrange(TEXT_WORDS) for _ in range(count)]

    @property
    def active(self) -> list[Arm]:
        """Arms that take part."""
        return [arm for arm in self.arms if not arm.trouble]

    def in_turn(self, number: int) -> list[Arm]:
        """The arms, in an order that changes from one round to the next."""
        active = self.active
        at = number % len(active) if active else 0
        return active[at:] + active[:at]


@contextmanager
def turn(arm: Arm, *, settle: bool = True) -> Generator[None]:
    """Let one arm run."""
    arm.resume()
    time.sleep(WAKE_SECONDS)
    try:
        yield
    finally:
        if settle:
            time.sleep(SETTLE_SECONDS)
        arm.pause()


def warm_up(comparison: Comparison, arm: Arm) -> None:
    """Run whatever runs for the first time: two prompts, and a hit of each."""
    for tokens in WARM_UP_TOKENS:
        prompt = comparison.tokens(tokens)
        for _ in range(2):
            complete(arm.url, prompt, 4)
            time.sleep(SETTLE_SECONDS)
            reset_prefix_cache(arm.url)


@contextmanager
def all_running(arms: Sequence[Arm]) -> Generator[None]:
    """Let all of them run, to start or restart them together."""
    for arm in arms:
        arm.resume()
    try:
        yield
    finally:
        for arm in arms:
            arm.pause()


def start_all(arms: Sequence[Arm]) -> None:
    """Start arms together, and pause them; one that fails gets its trouble noted."""
    for arm in arms:
        attempt(arm, arm.start)
    for arm in arms:
        if not arm.trouble:
            attempt(arm, arm.wait)
    for arm in arms:
        if not arm.trouble:
            arm.pause()


def attempt(arm: Arm, action: Callable[[], object]) -> bool:
    """Whether an action succeeds; if not, the arm takes part no longer."""
    try:
        action()
    except (ServerFailed, OSError) as error:
        lines = str(error).strip().splitlines()
        arm.trouble = f"{lines[0]} {lines[-1]}"[:200] if lines else type(error).__name__
        say(f"{arm.name}: {error}")
        arm.end()
        return False
    return True


def measured(
    comparison: Comparison, scenario: str, ask: Callable[[], dict[str, list[Answer]]]
) -> list[Row]:
    """Rows of requests one by one: `ask` returns the answers of each arm."""
    before: dict[str, Counts] = {}
    for arm in comparison.active:
        with turn(arm, settle=False):
            before[arm.name] = counts_of(arm)
    answers = ask()
    reference = [answer.text for answer in answers.get(REFERENCE, [])]
    rows: list[Row] = []
    for arm in comparison.arms:
        if arm.trouble:
            rows.append(Row(scenario, arm.name, note=arm.trouble))
            continue
        own = answers[arm.name]
        row = row_of(scenario, arm.name, own)
        if reference:
            row.differ = differing([answer.text for answer in own], reference)
        rows.append(row)
        with turn(arm, settle=False):
            counted = count_since(row, arm, before[arm.name], has_process=arm.cache is not None)
        if not counted:
            revive(comparison, arm)
    return rows


def count_since(row: Row, arm: Arm, before: Counts, *, has_process: bool) -> bool:
    """Add to a row what an arm's counters grew by; if they cannot be read, the row says so.

    What the load measured stays: a request that failed because the engine ended is a result.
    """
    try:
        row.count(counts_of(arm).since(before), has_process=has_process)
    except OSError as error:
        problem = f"its engine's metrics could not be read: {error}"[:200]
        row.note = f"{row.note}; {problem}" if row.note else problem
        return False
    return True


def revive(comparison: Comparison, arm: Arm) -> None:
    """Start an arm again whose engine or cache did not survive; its counters begin again."""
    say(f"{arm.name} is started again")
    arm.end()
    start_all([arm])
    if not arm.trouble:
        with turn(arm):
            attempt(arm, lambda: warm_up(comparison, arm))


def say(text: str) -> None:
    """Print progress."""
    print(text, file=sys.stderr, flush=True)
