"""Memory that processes share by descriptor, and that cannot shrink under whoever maps it.

Owns making such memory (`sealed_memfd`), the check that what somebody else made is such memory
(`check_sealed`), and keeping mappings out of core dumps. Does not own what is in it.

Invariant: a descriptor that passed `check_sealed` can be mapped and touched over its whole checked
length for as long as the mapping lasts. Touching a page beyond the end of a file that was cut short
is a SIGBUS, which ends the process that touched it: one client could end the sidecar of all.
A seal is the kernel's promise that it cannot happen, whoever holds the descriptor.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from typing import Final

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_TMPFS_MAGIC: Final = 0x01021994
_STATFS_BYTES: Final = 256
"""Twice what `struct statfs` takes on any 64-bit Linux."""

_libc = ctypes.CDLL(None, use_errno=True)


class NotSealed(ValueError):
    """This descriptor cannot be mapped safely; the message says why, and what would help."""


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A new memfd, close-on-exec, whose size is sealed for ever. The caller owns it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def keep_out_of_dumps(mapping: mmap.mmap) -> None:
    """Leave a mapping out of core dumps: they would hold prompts, and take as long as it is large.

    Where the kernel cannot, it stays in them.
    """
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_DONTDUMP)


def check_sealed(what: str, fd: int, size_bytes: int) -> None:
    """Raise `NotSealed` unless `fd` is sealed memory of at least `size_bytes`.

    `what` names it in the message. Never blocks, and allocates nothing whatever `fd` is.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise NotSealed(f"the {what} descriptor is not a memfd; {_REMEDY}")
    if found.st_size < size_bytes:
        raise NotSealed(
            f"the {what} descriptor has {found.st_size} bytes: must have at least {size_bytes}"
        )
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):
            raise
        # EINVAL: a file of a file system without seals. EBADF: opened with O_PATH.
        raise NotSealed(f"the {what} descriptor is not a memfd; {_REMEDY}") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise NotSealed(
            f"the {what} descriptor is not sealed against shrinking (F_SEAL_SHRINK), so its owner "
            f"could end this process at any time; {_REMEDY}"
        )
    # Of what takes seals, huge pages are left: a hole punched in those may not be filled again.
    if _file_system(fd) != _TMPFS_MAGIC:
        raise NotSealed(f"the {what} descriptor is not ordinary memory (hugetlb); {_REMEDY}")


_REMEDY: Final = (
    "make it with memfd_create(MFD_ALLOW_SEALING), set its size, and seal that; kvlake's connector "
    "of this release does"
)


def _file_system(fd: int) -> int:
    """The magic number of the file system that `fd` lies in (fstatfs(2))."""
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(fd), answer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return ctypes.c_long.from_buffer(answer).value
