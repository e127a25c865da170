"""Self checks: what the sidecar needs from its machine, checked again and again while it serves.

Owns the checks of the runtime directory, the sockets, the pool's files and the copy threads, and
making a removed socket again. Does not own any of these, nor what follows from a problem
(`watchdog.py`).

Invariants: a socket is made again only in a directory whose lock is ours, so two sidecars never
fight over one; a check costs a few `lstat` calls and changes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final

from sidecar.errors import StartError
from sidecar.logs import fields
from sidecar.service.watchdog import Problem
from tiers.pool.lock import lock_path_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sidecar.service.dispatcher import Dispatcher
    from sidecar.service.runtime_dir import RuntimeDirectory
    from sidecar.transport.unix_listener import UnixListener

COPY_SECONDS_STUCK: Final = 10.0
"""A copy moves at most 64 MiB: tens of milliseconds, or a second on a machine that swaps."""
RANKS_SECONDS_MAX: Final = 60.0
"""An engine's ranks attach within moments of each other, once all of them have their memory."""

_logger = logging.getLogger("kvlake.server")


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
        """Make removed sockets again, where the directory is ours or can be locked again."""
        lost = [one for one in self._listeners if self._removed(one.path)]
        if not lost:
            return
        try:
            if not self._directory.held():
                self._directory.retake()
            for listener in lost:
                listener.bind_again()
                self._files[listener.path] = _identity(listener.path)
                self._dispatcher.socket_stats.sockets_renewed += 1
                _logger.warning(
                    "a socket was removed, made again", extra=fields(path=listener.path)
                )
        except (OSError, StartError) as error:
            # `check` reports it, and the next beat tries again.
            _logger.debug("a socket cannot be made again", extra=fields(error=error))


def _identity(path: Path) -> tuple[int, int] | None:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None
