"""A circuit breaker: stop using a store that fails, and notice when it works again.

Reads and writes have a breaker each: a full folder can still be read.

While CLOSED, all requests pass. `failures_max` failures in a row open the breaker. While OPEN,
nothing passes until the pause is over; then one request passes as a TRIAL. If it succeeds, the
breaker closes; if it fails, the next pause is twice as long, at most `pause_seconds_max`. A request
that started before the breaker opened can close it but not extend the pause. A missing or damaged
object is an answer, not a failure of the store.

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
        self.state = BreakerState.CLOSED
        self.opened = 0
        """How often it opened, failed trials not counted."""

    def passes(self, now: float) -> bool:
        """Whether a request may start now."""
        return self.state is BreakerState.CLOSED or self._until <= now

    def begin(self, now: float) -> None:
        """Note that a request started that `passes` allowed; while open, it is the trial."""
        if self.state is not BreakerState.CLOSED:
            self.state = BreakerState.TRIAL
            self._until = now + self._rules.pause_seconds_max

    def succeeded(self) -> None:
        """Note that the store answered."""
        self._failures = 0
        self._pause_seconds = min(self._rules.pause_seconds, self._rules.pause_seconds_max)
        self.state = BreakerState.CLOSED

    def abandoned(self, now: float) -> None:
        """Note that a started request was not sent: another one may be the trial."""
        if self.state is BreakerState.TRIAL:
            self.state = BreakerState.OPEN
            self._until = now

    def failed(self, now: float) -> None:
        """Note that the store did not answer, or refused."""
        if self.state is BreakerState.OPEN:
            # The request started before the breaker opened.
            return
        if self.state is BreakerState.TRIAL:
            self._pause_seconds = min(2 * self._pause_seconds, self._rules.pause_seconds_max)
        else:
            self._failures += 1
            if self._failures < self._rules.failures_max:
                return
            self.opened += 1
        self.state = BreakerState.OPEN
        self._until = now + self._pause_seconds
