"""The watchdog: whether engines can attach and be served now, and reporting it to systemd.

Owns the phase of the sidecar, the measurement of the event loop's lag, and the verdict that
`/readyz`, the metrics and systemd show. Does not own the checks that find problems, nor HTTP.

Invariants:

* Ready means: in phase SERVING, and no check found a serious problem, one that keeps engines from
  attaching or from being served. What only makes the cache worse (the store is away, the pool's
  file is gone) is a problem that does not make the sidecar unready.
* systemd's watchdog is fed from the loop, and only while the sidecar is ready, starting or
  draining: a loop or copies that hang end in a restart.
* A beat is a timer of the loop and no task: it measures the loop from before the first task is
  started until after the last has ended.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.service.systemd import Notifier

BEAT_SECONDS: Final = 0.5
LAG_SECONDS_MAX: Final = 1.0
"""An engine's lookup waits half a second by default: a loop this late answers none in time."""
EXTEND_SECONDS: Final = 30.0
EXTEND_EVERY_SECONDS: Final = 5.0

PROBLEMS: Final = (
    "starting", "draining", "loop", "runtime_directory", "socket", "copies", "pool", "ranks",
    "uncached", "store",
)  # fmt: skip
"""All codes of problems."""

_logger = logging.getLogger("kvlake.server")


class Phase(enum.StrEnum):
    """The phases of the sidecar, in order."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong now. `code` is stable; `reason` is written for an operator."""

    code: str
    reason: str
    serious: bool = True
    """Whether engines cannot attach or be served because of it."""


class Watchdog:
    """Checks the sidecar twice a second, from its creation on."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self.broke: Callable[[BaseException], None] | None = None
        """Receives an error of its own, which is a bug."""
        self._checks: list[Callable[[], Iterable[Problem]]] = []
        self._repairs: list[Callable[[], None]] = []
        self._calls: list[Callable[[], None]] = []
        self._phase = Phase.STARTING
        self._loop = asyncio.get_running_loop()
        self._seconds = BEAT_SECONDS
        if notifier.watchdog_seconds is not None:
            self._seconds = min(BEAT_SECONDS, notifier.watchdog_seconds / 3)
        self._due = self._loop.time()
        self._extended = float("-inf")
        self._status = ""
        """The last status sent to systemd."""
        self._logged: frozenset[str] = frozenset()
        """Codes of the problems in the last log line."""
        self.lag_seconds = 0.0
        """How late the last beat was."""
        self.lag_seconds_max = 0.0
        self._timer: asyncio.Handle = self._loop.call_soon(self._beat)

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Go on to a phase, and notify systemd."""
        self._phase = phase
        if phase is Phase.SERVING:
            problems = self.problems()
            self._status = _summary(problems)
            self._logged = _codes(problems)
            self._notifier.ready(self._status)
        elif phase is Phase.DRAINING:
            self._notifier.stopping("draining")
            self._extend()

    def add(self, check: Callable[[], Iterable[Problem]]) -> None:
        """Call `check` with each beat and for each answer about readiness."""
        self._checks.append(check)

    def repair(self, repair: Callable[[], None]) -> None:
        """Call `repair` with each beat of the serving phase."""
        self._repairs.append(repair)

    def each_beat(self, call: Callable[[], None]) -> None:
        """Call this with each beat, in every phase."""
        self._calls.append(call)

    def problems(self) -> list[Problem]:
        """Everything that is wrong now, serious problems first."""
        found = [problem for check in self._checks for problem in check()]
        if self._phase is Phase.STARTING:
            found.append(Problem("starting", "the host memory is being made ready"))
        if self._phase is Phase.DRAINING:
            found.append(Problem("draining", "the sidecar is stopping; no engine can attach"))
        if self.lag_seconds > LAG_SECONDS_MAX:
            found.append(
                Problem("loop", f"the event loop stood still for {self.lag_seconds:.1f} s")
            )
        return sorted(found, key=lambda problem: not problem.serious)

    def readiness(self, *, reasons: bool = True) -> tuple[bool, dict[str, object]]:
        """Whether engines can attach and be served now, and the document that says so.

        Without `reasons` the document has the codes of problems only.
        """
        problems = self.problems()
        ready = not any(problem.serious for problem in problems)
        state = self._phase.value
        if self._phase is Phase.SERVING:
            state = "unready" if not ready else "degraded" if problems else "ok"
        listed = [
            {"code": problem.code, "serious": problem.serious}
            | ({"reason": problem.reason} if reasons else {})
            for problem in problems
        ]
        return ready, {"state": state, "ready": ready, "problems": listed}

    def stop(self) -> None:
        """End the beats."""
        self._timer.cancel()

    def _beat(self) -> None:
        now = self._loop.time()
        self.lag_seconds = max(0.0, now - self._due)
        self.lag_seconds_max = max(self.lag_seconds, self.lag_seconds_max)
        try:
            for call in self._calls:
                call()
            if self._phase is Phase.SERVING:
                for repair in self._repairs:
                    repair()
            self._report(now)
        except BaseException as error:
            # The loop would only log it, and no beat would follow.
            if self.broke is None:
                raise
            self.broke(error)
            return
        self._due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._due, self._beat)

    def _report(self, now: float) -> None:
        problems = self.problems()
        if self._phase is not Phase.SERVING:
            self._notifier.alive()
            if now - self._extended >= EXTEND_EVERY_SECONDS:
                self._extend()
            return
        serious = any(problem.serious for problem in problems)
        if not serious:
            self._notifier.alive()
        summary = _summary(problems)
        if summary != self._status:
            self._status = summary
            self._notifier.status(summary)
        # Compared by code: the reasons of a store that is down differ with each request.
        if (codes := _codes(problems)) != self._logged:
            self._logged = codes
            level = logging.ERROR if serious else logging.INFO
            _logger.log(level, "not ready" if serious else "ready", extra=fields(why=summary))

    def _extend(self) -> None:
        self._extended = self._loop.time()
        self._notifier.extend(EXTEND_SECONDS)


def _codes(problems: list[Problem]) -> frozenset[str]:
    return frozenset(problem.code for problem in problems)


def _summary(problems: list[Problem]) -> str:
    return "; ".join(problem.reason for problem in problems) or "serving"
