"""Memory that processes share by descriptor, and that cannot shrink while it is mapped.

Owns making such memory, the check that foreign memory is such, and which file systems are in
memory. Does not own mappings (`mapping.py`) or contents.

Invariant: a descriptor that passed `check_sealed` can be mapped and accessed over its whole checked
length as long as the mapping lasts. Accessing a page beyond the end of a truncated file is a
SIGBUS, which ends the process: one client could end the sidecar of all. The kernel enforces a seal
for every holder of the descriptor.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Final, Literal

from tiers.kv.layout import Bytes
from tiers.kv.mapping import map_shared, populate

SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE: Final = 0x10

MemoryFilesystem = Literal["tmpfs", "hugetlbfs", "ramfs"]
_MAGIC: Final[dict[int, MemoryFilesystem]] = {
    0x01021994: "tmpfs",
    0x958458F6: "hugetlbfs",
    0x858458F6: "ramfs",
}
"""TMPFS_MAGIC, HUGETLBFS_MAGIC and RAMFS_MAGIC of linux/magic.h."""
_STATFS_BYTES: Final = 256
"""Twice what `struct statfs` takes on any 64-bit Linux. Its first field is the magic number."""
_REMEDY: Final = (
    "make it with memfd_create(MFD_ALLOW_SEALING), set its size, and seal that; kvlake of this "
    "release does"
)

_libc = ctypes.CDLL(None, use_errno=True)


class NotSealed(ValueError):
    """This descriptor cannot be mapped safely; the message says why and names the remedy."""


def sealed_memfd(name: str, size_bytes: int) -> int:
    """A new memfd, close-on-exec, with a sealed size. The caller owns it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_only_memfd(name: str, size_bytes: int) -> tuple[mmap.mmap, Bytes, int]:
    """The only writable mapping of a new memfd, and a read-only descriptor for other processes.

    The mapping is that of `map_shared`. Raises `OSError` without memory for it.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # fallocate, not only truncate: a full tmpfs is an error here and a SIGBUS later.
        os.posix_fallocate(fd, 0, size_bytes)
        owner, memory = map_shared(fd, size_bytes)
        with contextlib.suppress(OSError):
            populate(memory)
        os.fchmod(fd, 0o400)
        # FUTURE_WRITE allows the mapping made above and refuses every later one, even to a
        # process that reopens the descriptor as root. Kernels before 5.1 have only the mode.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
        return owner, memory, os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(fd)


def check_sealed(what: str, fd: int, size_bytes: int) -> None:
    """Raise `NotSealed` unless `fd` is sealed memory of at least `size_bytes`.

    `what` names it in the message. Never blocks and allocates nothing, whatever `fd` is.
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
    # Huge pages take seals, too, but a hole punched in them may not be filled again.
    if memory_filesystem(fd) != "tmpfs":
        raise NotSealed(f"the {what} descriptor is not ordinary memory (hugetlb); {_REMEDY}")


def memory_filesystem(fd: int) -> MemoryFilesystem | None:
    """The memory file system of an open file or directory; None: it is on a disk.

    Through ctypes, since `os.statvfs` leaves the type out. Raises `OSError`.
    """
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(fd), answer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return _MAGIC.get(ctypes.c_uint32.from_buffer(answer).value)


def memory_kind(directory: Path) -> MemoryFilesystem | None:
    """The memory file system that a directory is on; None: it is on a disk. Raises `OSError`."""
    fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    try:
        return memory_filesystem(fd)
    finally:
        os.close(fd)
