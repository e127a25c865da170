"""Which file systems are in memory, as the kernel says (statfs).

Owns the call, made by hand since Python's `os.statvfs` leaves the type out.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from pathlib import Path

Kind = Literal["tmpfs", "hugetlbfs", "ramfs"]

_KINDS: Final[dict[int, Kind]] = {
    0x01021994: "tmpfs",
    0x958458F6: "hugetlbfs",
    0x858458F6: "ramfs",
}
"""TMPFS_MAGIC, HUGETLBFS_MAGIC and RAMFS_MAGIC of linux/magic.h."""
_STATFS_BYTES: Final = 256
"""More than `struct statfs` has on any machine. Its first field is the type."""

_libc = ctypes.CDLL(None, use_errno=True)


def memory_kind(directory: Path) -> Kind | None:
    """The kind of memory file system that a directory is on; None: it is on a disk.

    Raises `OSError` where it cannot be looked at.
    """
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(directory), answer) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(directory))
    return _KINDS.get(ctypes.c_uint32.from_buffer(answer).value)
