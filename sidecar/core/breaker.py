"""A circuit breaker: stop using a store that fails, and notice when it works again.

Reads and writes have a breaker each: a full folder can still be read.

While CLOSED, all requests pass. `failures_max` failures in a row open the breaker. While OPEN,
nothing passes until the pause is over; then one request passes as a TRIAL. If it succeeds, the
breaker closes; if it fails, the next pause is twice as long, at most `pause_seconds_max`. A request
that started before the breaker opened can close it, but its failure does not count. A missing or
damaged object is an answer, not a failure of the store.

Invariants: at most one trial runs at a time; a trial without a result ends after the longest pause,
so a lost report cannot disable the store for good.
"""

import enum
from dataclasses import dataclass


class BreakerState(enum.StrEnum):
    """Whether requests pass."""

    CLOSED = "closed"
    OPEN = "open"
    TRIAL = "trial"


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """When a breaker opens, and for how long."""

    failures_max: int = 5
    """Failures in a row that open it."""
    pause_seconds: float = 1.0
    """The first pause."""
    pause_seconds_max: float = 30.0


class Breaker:
    """The breaker of one direction."""

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._failures = 0
        self._pause_seconds = min(rules.pause_seconds, rules.pause_seconds_max)
        self._until = 0.0
        self._turn = 0
        """Counts openings and trials: what began in an earlier turn does not judge this one."""
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it opened, failed trials not counted."""

    def passes(self, now: float) -> bool:
        """Whether a request may start now."""
        return self.state is BreakerState.CLOSED or self._until <= now

    def begin(self, now: float) -> int:
        """Note that a request started that `passes` allowed; while open, it is the trial.

        Returns the turn in which it began, for the report on it.
        """
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.TRIAL
            self._turn += 1
            self._until = now + self._rules.pause_seconds_max
        return self._turn

    def succeeded(self) -> None:
        """Note that the store answered, whenever the request began."""
        self._failures = 0
        self._pause_seconds = min(self._rules.pause_seconds, self._rules.pause_seconds_max)
        self.state = BreakerState.CLOSED

    def abandoned(self, now: float, turn: int) -> None:
        """Note that the request of this turn was not sent: another one may be the trial."""
        if self.state is BreakerState.TRIAL and turn == self._turn:
            self.state = BreakerState.OPEN
            self._until = now

    def failed(self, now: float, turn: int) -> None:
        """Note that the store did not answer the request of this turn, or refused it."""
        if turn != self._turn:
            return
        if self.state is BreakerState.TRIAL:
            self._pause_seconds = min(2 * self._pause_seconds, self._rules.pause_seconds_max)
        else:
            self._failures += 1
            if self._failures < self._rules.failures_max:
                return
            self.opened += 1
        self.state = BreakerState.OPEN
        self._turn += 1
        self._until = now + self._pause_seconds
