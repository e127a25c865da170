"""Pages allocated and mapped ahead of use, without holding the GIL.

Owns the system calls for it, doing it from several threads, and on which NUMA nodes. A copy into a
page that this process has not mapped yet takes a fault for every 4 KiB, which makes it three times
slower. Does not own memory, nor when to do it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tiers.pool.numa import Placement

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PREFAULT_PIECE_BYTES: Final = 64 << 20
THREADS_DEFAULT_MAX: Final = 8
"""Clearing pages is bound by memory, not by cores; an engine beside us starts up too."""

MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)


def populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Map every page of `memory`, which starts on one. False on a kernel before 5.14.

    By hand: mmap.madvise() holds the GIL, and this takes milliseconds for every 16 MiB.
    Raises `OSError` where the memory cannot be had.
    """
    address, size_bytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size)
    if _libc.madvise(address, size_bytes, MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Backing:
    """How the pages of a pool come to be."""

    prefault: bool = True
    """Map the pages of a new file, too."""
    threads: int = 1
    placement: Placement = field(default_factory=Placement)

    def populate(self, memory: npt.NDArray[np.uint8]) -> bool:
        """Allocate and map every page of `memory`; False where that cannot be had."""
        starts = range(0, memory.size, PREFAULT_PIECE_BYTES)
        pieces = [memory[start : start + PREFAULT_PIECE_BYTES] for start in starts]
        with self._threads(self.threads) as threads:
            try:
                return all(threads.map(populate, pieces))
            except OSError:
                threads.shutdown(cancel_futures=True)
                return False

    def allocate(self, fd: int, offset: int, size_bytes: int) -> None:
        """Back a part of a file with memory, all of it or none. Raises `OSError`."""
        with self._threads(1) as thread:
            thread.submit(os.posix_fallocate, fd, offset, size_bytes).result()

    def _threads(self, count: int) -> ThreadPoolExecutor:
        # Threads of their own: the policy of placement is each thread's.
        return ThreadPoolExecutor(count, "kvlake-prefault", self.placement.adopt)


def default_threads() -> int:
    """Half of the cores that this process may use, at most THREADS_DEFAULT_MAX."""
    return min(THREADS_DEFAULT_MAX, max(1, len(os.sched_getaffinity(0)) // 2))
