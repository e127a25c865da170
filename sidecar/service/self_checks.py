"""Self checks: what the sidecar needs from its machine, checked again and again while it serves.

Owns the checks of the runtime directory, the sockets, the pool's files and the copy threads, and
making a removed socket again. Does not own any of these, nor what follows from a problem
(`watchdog.py`).

Invariants: a socket is made again only in a directory whose lock is ours, so two sidecars never
fight over one; a check costs a few `lstat` calls and changes nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import zmq

from sidecar.errors import StartError
from sidecar.logs import fields
from sidecar.service.watchdog import Problem
from sidecar.transport.attach_socket import listen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sidecar.service.dispatcher import Dispatcher
    from sidecar.service.handshake import Handshakes
    from sidecar.service.runtime_dir import RuntimeDirectory
    from sidecar.transport.job_socket import JobSocket

COPY_SECONDS_STUCK: Final = 10.0
"""A copy moves at most 64 MiB: tens of milliseconds, or a second on a machine that swaps."""
RANKS_SECONDS_MAX: Final = 60.0
"""An engine's ranks attach within moments of each other, once all of them have their memory."""

_logger = logging.getLogger("kvlake.server")


class FileMark:
    """Remembers which file a path named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity = _identity(path)

    def renew(self) -> None:
        """Remember the file that the path names now."""
        self._identity = _identity(self.path)

    def same(self) -> bool:
        """Whether the path still names that file."""
        return self._identity is not None and _identity(self.path) == self._identity


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class SelfChecks:
    """Checks of one sidecar that serves. Make it when all sockets and files exist."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        directory: RuntimeDirectory,
        handshakes: Handshakes,
        jobs: JobSocket,
    ) -> None:
        self._dispatcher = dispatcher
        self._directory = directory
        self._handshakes = handshakes
        self._jobs = jobs
        self._sockets = {FileMark(path): bind_again for path, bind_again in self._socket_files()}
        pool = dispatcher.pool.path
        self._pool = (FileMark(pool), FileMark(pool.with_name(f"{pool.name}.lock")))

    def _socket_files(self) -> Iterator[tuple[Path, Callable[[], None]]]:
        """Each socket that has a file, and how it is made again; sockets over TCP have none."""
        yield self._directory.attach_path, self._listen_again
        yield self._directory.jobs_path, self._jobs.bind_again
        events = self._dispatcher.event_sockets
        if events is not None:
            for socket in events.unix_sockets:
                yield socket.path, socket.bind_again

    def _listen_again(self) -> None:
        path = self._directory.attach_path
        self._handshakes.move_to(listen(path, self._directory.socket_mode))

    def check(self) -> Iterator[Problem]:
        """What is wrong now."""
        yield from self._check_files()
        dispatcher = self._dispatcher
        stuck = dispatcher.copies.stuck_seconds(time.monotonic())
        if stuck > COPY_SECONDS_STUCK:
            yield Problem("copies", f"every copy thread has been at its copy for {stuck:.0f} s")
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
                f"{first.name} serves without the cache: {first.message}{more}",
                serious=False,
            )
        watch = dispatcher.watch
        if watch is not None and watch.health.state != "ok":
            reason = f"the store is {watch.health.state}: {watch.health.reason}"
            yield Problem("store", reason, serious=False)

    def _check_files(self) -> Iterator[Problem]:
        if not self._directory.held():
            yield Problem(
                "runtime_directory",
                f"{self._directory.path} was removed, or another sidecar has it; restart this one",
            )
        for mark in self._sockets:
            if not mark.same():
                serves = mark.path in (self._directory.attach_path, self._directory.jobs_path)
                yield Problem(
                    "socket", f"{mark.path} was removed; nobody can connect to it", serious=serves
                )
        for mark in self._pool:
            if not mark.same():
                yield Problem(
                    "pool",
                    f"{mark.path} was removed: engines are served, but its memory is freed only "
                    "when this sidecar ends, and nothing of it outlives that",
                    serious=False,
                )

    def repair(self) -> None:
        """Make removed sockets again, where the directory is ours or can be locked again."""
        lost = [mark for mark in self._sockets if not mark.same()]
        if not lost:
            return
        try:
            if not self._directory.held():
                self._directory.retake()
            for mark in lost:
                mark.path.unlink(missing_ok=True)
                self._sockets[mark]()
                mark.renew()
                self._dispatcher.socket_stats.sockets_renewed += 1
                _logger.warning("a socket was removed, made again", extra=fields(path=mark.path))
        except (OSError, StartError, zmq.ZMQError) as error:
            # `check` reports it, and the next beat tries again.
            _logger.debug("a socket cannot be made again", extra=fields(error=error))
