"""The watchdog: whether engines can attach and be served now, and reporting it to systemd.

Owns the phase of the sidecar, the event loop's lag, the verdict that `/readyz`, the metrics and
systemd show, and the checks while serving: the runtime directory, the sockets, the pool's files and
the copy threads. It makes a removed socket again. Does not own any of these, nor HTTP.

Invariants: ready means that the sidecar serves and no problem keeps engines from attaching or from
being served; what only makes the cache worse (the store is away) is no such problem. systemd's
watchdog is fed from the loop, and only while the sidecar is ready, starting or draining, so a loop
or copies that hang end in a restart. A beat is a timer of the loop and no task: it measures the
loop from before the first task is started until after the last has ended. A check costs a few
`lstat` calls and changes nothing. A socket is made again only in a directory whose lock is ours, so
two sidecars never fight over one.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

from sidecar.errors import StartError
from sidecar.logs import fields
from sidecar.service.dispatcher import Dispatcher
from sidecar.service.runtime_dir import RuntimeDirectory
from sidecar.service.systemd import Notifier
from sidecar.transport.unix_socket import UnixListener
from tiers.pool.lock import lock_path_of

BEAT_SECONDS: Final = 0.5
LAG_SECONDS_MAX: Final = 1.0
"""An engine's lookup waits half a second by default: a loop this late answers none in time."""
EXTEND_SECONDS: Final = 30.0
"""How much longer a start or a stop may take, counted from each beat."""
COPY_SECONDS_STUCK: Final = 10.0
"""A copy moves at most 64 MiB: tens of milliseconds, or a second on a machine that swaps."""
RANKS_SECONDS_MAX: Final = 60.0
"""An engine's ranks attach within moments of each other, once all of them have their memory."""

PROBLEMS: Final = (
    "starting", "draining", "loop", "runtime_directory", "socket", "copies", "pool", "ranks",
    "uncached", "store", "gpu",
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


class SelfChecks:
    """Checks of one sidecar that serves. Make it when all sockets and files exist."""

    def __init__(
        self, dispatcher: Dispatcher, directory: RuntimeDirectory, listeners: list[UnixListener]
    ) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._listeners = listeners
        pool = dispatcher.pool.path
        self._pool = (pool, lock_path_of(pool))
        paths = (*self._pool, *(one.path for one in listeners))
        self._files = {path: _identity(path) for path in paths}

    def _removed(self, path: Path) -> bool:
        identity = _identity(path)
        return identity is None or identity != self._files[path]

    def check(self) -> Iterator[Problem]:
        """What is wrong now."""
        yield from self._check_files()
        dispatcher = self._dispatcher
        stuck = dispatcher.copies.stuck_seconds(time.monotonic())
        if stuck > COPY_SECONDS_STUCK:
            yield Problem("copies", f"every copy thread has been at its copy for {stuck:.0f} s")
        if lost := [*dispatcher.gpus.lost.values()]:
            yield Problem(
                "gpu",
                f"{lost[0]}; until then its engines are served without the cache, and memory of "
                "those that ended stays allocated on it",
            )
        for engine_id, ranks, world_size in dispatcher.sessions.incomplete(RANKS_SECONDS_MAX):
            here = ", ".join(map(str, ranks))
            yield Problem(
                "ranks",
                f"of {world_size} ranks of engine {engine_id} only {here} attached here, so no "
                "chunk of it is ever loadable; the log of vLLM says why a rank is served without "
                "the cache; all ranks of an engine must be on one node",
                serious=False,
            )
        if uncached := dispatcher.uncached.all():
            first, *others = uncached
            more = f" ({len(others)} more: kvlake status)" if others else ""
            yield Problem(
                "uncached",
                f"engine {first.engine_id or '?'} (pid {first.pid}, uid {first.uid}) serves "
                f"without the cache: {first.message}{more}",
                serious=False,
            )
        store = dispatcher.store
        if store is not None and (health := store.watch.health).state != "ok":
            reason = f"the store is {health.state}: {health.reason}"
            yield Problem("store", reason, serious=False)

    def _check_files(self) -> Iterator[Problem]:
        directory = self._directory
        if not directory.held():
            yield Problem(
                "runtime_directory",
                f"{directory.path} was removed, or another sidecar has it; restart this one",
            )
        for path in (one.path for one in self._listeners):
            if self._removed(path):
                serves = path in (directory.attach_path, directory.jobs_path)
                yield Problem(
                    "socket", f"{path} was removed; nobody can connect to it", serious=serves
                )
        for path in self._pool:
            if self._removed(path):
                yield Problem(
                    "pool",
                    f"{path} was removed: engines are served, but its memory is freed only "
                    "when this sidecar ends, and nothing of it outlives that",
                    serious=False,
                )

    def repair(self) -> None:
        """Make a removed lock and removed sockets again, unless another sidecar has the lock."""
        try:
            if not self._directory.held():
                self._directory.retake()
                self._dispatcher.socket_stats.locks_renewed += 1
                _logger.warning(
                    "a lock was removed, made again", extra=fields(path=self._directory.lock_path)
                )
            for listener in [one for one in self._listeners if self._removed(one.path)]:
                listener.bind_again()
                self._files[listener.path] = _identity(listener.path)
                self._dispatcher.socket_stats.sockets_renewed += 1
                _logger.warning(
                    "a socket was removed, made again", extra=fields(path=listener.path)
                )
        except (OSError, StartError) as error:
            # `check` reports it, and the next beat tries again.
            _logger.debug("removed files cannot be made again", extra=fields(error=error))


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None


def _summary(problems: list[Problem]) -> str:
    return "; ".join(problem.reason for problem in problems) or "serving"
