"""Several `kvlake run` beside one sidecar: who joined it, and whether it is still there.

The first one starts the sidecar. Each further one joins it: it connects once, learns which process
listens, and holds a shared lock on a file beside the socket as long as it runs. The sidecar ends
when whoever started it is gone and nobody has that lock: the last one out. The kernel gives a lock
back however its holder ends.
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
LOOK_SECONDS: Final = 0.5
"""How often a sidecar looks whether somebody still needs it."""
UNSEEN_SECONDS: Final = 10.0
"""How often one is connected to whose process cannot be watched: in another PID namespace."""
CONNECT_SECONDS_MAX: Final = 5.0


class Joined:
    """A sidecar that somebody else started."""

    def __init__(self, attach_path: Path) -> None:
        """Raises `OSError` where none listens, or its folder takes no lock of this user."""
        self._attach_path = attach_path
        self.pid = listener(attach_path)
        """Its process; 0 if that is in another PID namespace."""
        self._pid_fd = os.pidfd_open(self.pid) if self.pid else None
        self._looked = time.monotonic()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._lock_fd = os.open(attach_path.with_name(LOCK), flags, 0o600)
            fcntl.flock(self._lock_fd, fcntl.LOCK_SH)
        except OSError:
            self._close_pid()
            raise

    @property
    def look_seconds(self) -> float:
        """How long until `there` can say something new."""
        return LOOK_SECONDS if self._pid_fd is not None else UNSEEN_SECONDS

    def there(self) -> bool:
        """Whether the sidecar still runs."""
        if self._pid_fd is not None:
            ended, _, _ = select.select([self._pid_fd], [], [], 0)
            return not ended
        now = time.monotonic()
        if now - self._looked < UNSEEN_SECONDS:
            return True
        self._looked = now
        try:
            listener(self._attach_path)
        except OSError:
            return False
        return True

    def leave(self) -> None:
        """Need it no more."""
        self._close_pid()
        os.close(self._lock_fd)

    def _close_pid(self) -> None:
        if self._pid_fd is not None:
            os.close(self._pid_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def needed(directory: Path) -> bool:
    """Whether somebody has joined the sidecar of this runtime directory."""
    return _refused(directory / LOCK, fcntl.LOCK_EX)


def locked(directory: Path) -> bool:
    """Whether a sidecar has the lock of this runtime directory, ready or not."""
    return _refused(directory / "lock", fcntl.LOCK_SH)


def _refused(path: Path, operation: int) -> bool:
    """Whether others have locks that keep this one from being had; false where there is no file."""
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
    """The process that listens; raises `OSError` where none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect(str(attach_path))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", peer)
    return int(pid)
