"""The circuit breaker: leave a store alone that fails, and find out by itself when it works again.

Owns the three states and the pauses of one direction (reads or writes have one each: a folder that
is full can be read). Does not own requests or the clock; it is told. Pure.

Closed, everything passes. After `failures_max` failures with no success between them it opens, and
nothing passes for a pause; then one request passes as a trial. A trial that succeeds closes it, one
that fails opens it again for twice the pause, up to `pause_seconds_max`. Requests that were under
way when it opened say nothing more about when to open, but any success closes it: whoever answers
is well.

What is no failure of the store (an object that is missing or damaged) counts as an answer.

Invariants: open, at most one trial runs at a time; a trial that nobody reports on is over after the
longest pause, so a lost report never leaves the store alone for good.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

PAUSE_FACTOR: Final = 2.0


class BreakerState(enum.StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    """All do."""
    OPEN = "open"
    """None does until the pause is over."""
    TRIAL = "trial"
    """One is under way to find out."""


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens, and for how long."""

    failures_max: int = 5
    """Failures in a row that open it."""
    pause_seconds: float = 1.0
    """How long it stays open the first time."""
    pause_seconds_max: float = 30.0
    """How long it stays open at most."""


class Breaker:
    """One direction's breaker."""

    def __init__(self, rules: BreakerRules) -> None:
        self._failures_max = rules.failures_max
        self._pause_seconds_first = min(rules.pause_seconds, rules.pause_seconds_max)
        self._pause_seconds_max = rules.pause_seconds_max
        self._failures = 0
        self._pause_seconds = self._pause_seconds_first
        self._until = 0.0
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it opened, not counting trials that failed."""

    def passes(self, now: float) -> bool:
        """Whether a request may be made now."""
        return self.state is BreakerState.CLOSED or self._until <= now

    def begin(self, now: float) -> None:
        """A request that `passes` allowed is made; open, it is the trial."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.TRIAL
            self._until = now + self._pause_seconds_max

    def succeeded(self) -> None:
        """The store answered."""
        self._failures = 0
        self._pause_seconds = self._pause_seconds_first
        self.state = BreakerState.CLOSED

    def abandoned(self, now: float) -> None:
        """A request that was begun was not made after all: another may be the trial."""
        if self.state is BreakerState.TRIAL:
            self.state = BreakerState.OPEN
            self._until = now

    def failed(self, now: float) -> None:
        """The store did not answer, or refused."""
        if self.state is BreakerState.OPEN:
            # It was under way when the breaker opened.
            return
        if self.state is BreakerState.TRIAL:
            self._pause_seconds = min(self._pause_seconds * PAUSE_FACTOR, self._pause_seconds_max)
        else:
            self._failures += 1
            if self._failures < self._failures_max:
                return
            self.opened += 1
        self.state = BreakerState.OPEN
        self._until = now + self._pause_seconds
