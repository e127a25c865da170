"""The watchdog: whether engines can attach and be served now, and reporting it to systemd.

Owns the phase of the sidecar, the measurement of the event loop's lag, and the verdict that
`/readyz`, the metrics and systemd show. Does not own the checks that find problems, nor HTTP.

Invariants: ready means that the sidecar serves and no problem keeps engines from attaching or from
being served; what only makes the cache worse (the store is away) is no such problem. systemd's
watchdog is fed from the loop, and only while the sidecar is ready, starting or draining, so a loop
or copies that hang end in a restart. A beat is a timer of the loop and no task: it measures the
loop from before the first task is started until after the last has ended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import TYPE_CHECKING, Final, Literal

from sidecar.logs import fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.service.systemd import Notifier

BEAT_SECONDS: Final = 0.5
LAG_SECONDS_MAX: Final = 1.0
"""An engine's lookup waits half a second by default: a loop this late answers none in time."""
EXTEND_SECONDS: Final = 30.0
"""How much longer a start or a stop may take, counted from each beat."""

PROBLEMS: Final = (
    "starting", "draining", "loop", "runtime_directory", "socket", "copies", "pool", "ranks",
    "uncached", "store",
)  # fmt: skip
"""All codes of problems."""

_logger = logging.getLogger("kvlake.server")


@dataclasses.dataclass(frozen=True, slots=True)
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
        self._check: Callable[[], Iterable[Problem]] = tuple
        self._repair: Callable[[], None] | None = None
        self._calls: list[Callable[[], None]] = []
        self._phase: Literal["starting", "serving", "draining"] = "starting"
        self._loop = asyncio.get_running_loop()
        self._seconds = BEAT_SECONDS
        if notifier.watchdog_seconds is not None:
            self._seconds = min(BEAT_SECONDS, notifier.watchdog_seconds / 3)
        self._due = self._loop.time()
        self._status = ""
        """The last status sent to systemd."""
        self._logged: set[str] = set()
        """Codes of the problems in the last log line."""
        self.lag_seconds = 0.0
        """How late the last beat was."""
        self.lag_seconds_max = 0.0
        self._timer: asyncio.Handle = self._loop.call_soon(self._beat)

    def serve(self, check: Callable[[], Iterable[Problem]], repair: Callable[[], None]) -> None:
        """Go on to serving.

        From now on each beat calls `repair` until the sidecar drains, and each answer about
        readiness calls `check`.
        """
        self._check, self._repair = check, repair
        self._phase = "serving"
        problems = self.problems()
        self._status = _summary(problems)
        self._logged = {problem.code for problem in problems}
        self._notifier.ready(self._status)

    def drain(self) -> None:
        """Go on to draining."""
        self._phase = "draining"
        self._repair = None
        self._notifier.stopping("draining")
        self._notifier.extend(EXTEND_SECONDS)

    def each_beat(self, call: Callable[[], None]) -> None:
        """Call this with each beat, in every phase."""
        self._calls.append(call)

    def problems(self) -> list[Problem]:
        """Everything that is wrong now, serious problems first."""
        found = list(self._check())
        if self._phase == "starting":
            found.append(Problem("starting", "the host memory is being made ready"))
        if self._phase == "draining":
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
        state: str = self._phase
        if state == "serving":
            state = "unready" if not ready else "degraded" if problems else "ok"
        listed = [dataclasses.asdict(problem) for problem in problems]
        if not reasons:
            for one in listed:
                del one["reason"]
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
            if self._repair is not None:
                self._repair()
            self._report()
        except BaseException as error:
            # The loop would only log it, and no beat would follow.
            if self.broke is None:
                raise
            self.broke(error)
            return
        self._due = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(self._due, self._beat)

    def _report(self) -> None:
        problems = self.problems()
        if self._phase != "serving":
            self._notifier.alive()
            self._notifier.extend(EXTEND_SECONDS)
            return
        serious = any(problem.serious for problem in problems)
        if not serious:
            self._notifier.alive()
        summary = _summary(problems)
        if summary != self._status:
            self._status = summary
            self._notifier.status(summary)
        # Compared by code: the reasons of a store that is down differ with each request.
        if (codes := {problem.code for problem in problems}) != self._logged:
            self._logged = codes
            level = logging.ERROR if serious else logging.INFO
            _logger.log(level, "not ready" if serious else "ready", extra=fields(why=summary))


def _summary(problems: list[Problem]) -> str:
    return "; ".join(problem.reason for problem in problems) or "serving"
