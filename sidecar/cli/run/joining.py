"""Several `kvlake run` beside one sidecar: which processes use it, and whether it still runs.

The first `run` starts the sidecar. Each further one joins it: it connects once to learn the
listening process, and holds a shared lock on a file beside the socket while it runs. The sidecar
ends when the process that started it has ended and nobody holds that lock. The kernel releases a
lock however its holder ends.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import time
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from pathlib import Path

LOCK: Final = "runs.lock"
POLL_SECONDS: Final = 0.5
"""How often a sidecar checks whether a `run` still needs it."""
UNWATCHED_POLL_SECONDS: Final = 10.0
"""How often to connect to a sidecar in another PID namespace, whose process cannot be watched."""
CONNECT_SECONDS_MAX: Final = 5.0


class JoinedSidecar:
    """A sidecar that another `run` started."""

    def __init__(self, attach_path: Path) -> None:
        """Raises `OSError` if none listens, or its directory takes no lock of this user."""
        self._attach_path = attach_path
        self.pid = listener(attach_path)
        """Its process; 0 in another PID namespace."""
        self._pid_fd = os.pidfd_open(self.pid) if self.pid else None
        self._checked = time.monotonic()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock_fd = os.open(attach_path.with_name(LOCK), flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        except OSError:
            self._close_pid()
            raise

    @property
    def poll_seconds(self) -> float:
        """How often to call `runs`."""
        return POLL_SECONDS if self._pid_fd is not None else UNWATCHED_POLL_SECONDS

    def runs(self) -> bool:
        """Whether the sidecar still runs."""
        if self._pid_fd is not None:
            ended, _, _ = select.select([self._pid_fd], [], [], 0)
            return not ended
        now = time.monotonic()
        if now - self._checked < UNWATCHED_POLL_SECONDS:
            return True
        self._checked = now
        try:
            listener(self._attach_path)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Release it."""
        self._close_pid()
        os.close(self._lock_fd)

    def _close_pid(self) -> None:
        if self._pid_fd is not None:
            os.close(self._pid_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def has_joined(directory: Path) -> bool:
    """Whether a `run` has joined the sidecar of this runtime directory."""
    return _is_held(directory / LOCK, fcntl.LOCK_EX)


def is_locked(directory: Path) -> bool:
    """Whether a sidecar, ready or not, has this runtime directory."""
    return _is_held(directory / "lock", fcntl.LOCK_SH)


def _is_held(path: Path, operation: int) -> bool:
    """Whether locks of others exclude this one; false if there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def listener(attach_path: Path) -> int:
    """The process that listens on a socket. Raises `OSError` if none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect(str(attach_path))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", peer)
    return int(pid)
