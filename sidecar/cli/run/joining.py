"""Several `kvlake run` beside one sidecar: which processes use it, and whether it still runs.

The first `run` starts the sidecar. Each further one joins it: it holds a shared lock on a file
beside the socket while it runs. The sidecar ends when the process that started it has ended and
nobody holds that lock. It holds a lock itself, on its runtime directory. The kernel releases a lock
however its holder ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

LOCK: Final = "runs.lock"
POLL_SECONDS: Final = 0.5
"""How often a sidecar checks whether a `run` still needs it, and a `run` whether it still runs."""
CONNECT_SECONDS_MAX: Final = 5.0


def join(attach_path: Path) -> tuple[int, int]:
    """Join the sidecar that listens there: its process, and a descriptor; closing it leaves.

    Raises `OSError` if none listens, or its directory takes no lock of this user.
    """
    pid = listener(attach_path)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(attach_path.with_name(LOCK), flags, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return pid, fd


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
    """The process that listens on a socket; 0 in another PID namespace.

    Raises `OSError` if none does.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_SECONDS_MAX)
        connection.connect(str(attach_path))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", peer)
    return int(pid)
