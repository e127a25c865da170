"""A user's cache folder in which another process reads weights, as `weights.lock` says."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest


class LockedWeights:
    """Holds the lock of a cache folder of its own, so that no digest is known before `release`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
        cache = folder / "kvlake"
        cache.mkdir(mode=0o700, parents=True)
        self._lock = os.open(cache / "weights.lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def release(self) -> None:
        """Let others read. May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
