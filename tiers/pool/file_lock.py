"""Locks of whole files between processes (flock): taken for good, or only looked at.

Owns telling a lock that is held from one that somebody looks at. Does not own the files.

Invariant: a look keeps nobody from the lock. It holds the file shared for a moment, and a process
that wants the lock then tries again.
"""

from __future__ import annotations

import fcntl
import time
from typing import Final

TRIES_MAX: Final = 200
TRY_AGAIN_SECONDS: Final = 0.001


def take(fd: int) -> bool:
    """Lock an open file for this process alone; False where another process holds it."""
    for _ in range(TRIES_MAX):
        if _lock(fd, fcntl.LOCK_EX):
            return True
        if taken(fd):
            return False
        time.sleep(TRY_AGAIN_SECONDS)
    return False


def taken(fd: int) -> bool:
    """Whether another process holds an open file's lock. Takes nothing."""
    if not _lock(fd, fcntl.LOCK_SH):
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def _lock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
