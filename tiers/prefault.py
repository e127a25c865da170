"""Page tables filled ahead of use, without holding the GIL.

Owns the one system call for it. A copy into a page that this process has not mapped yet takes a
fault for every 4 KiB, which makes it three times slower. Does not own memory, nor when to do it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MADV_POPULATE_WRITE: Final = 23

_libc = ctypes.CDLL(None, use_errno=True)


def populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Map every page of `memory`, which starts on one. False on a kernel before 5.14.

    By hand: mmap.madvise() holds the GIL, and this takes milliseconds for every 16 MiB.
    Raises `OSError` where the memory cannot be had.
    """
    address, size_bytes = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.size)
    if _libc.madvise(address, size_bytes, _MADV_POPULATE_WRITE) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EINVAL:
        return False
    raise OSError(code, os.strerror(code))
