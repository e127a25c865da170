"""The files of a pool: made, mapped, looked at from outside, removed.

Owns the file system's side of a pool: whose a file is, whether all of it is backed by memory, and
why one cannot be taken over. Does not own what is in it (`pool_table.py`) nor the lock
(`pool_lock.py`).

Invariant: a file that no owner's record vouches for, or that is another user's, is never changed.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.errors import PoolError
from tiers.pool_lock import (
    Owner,
    lock_path_of,
    owner_of,
    read_boot_id,
    read_owner,
    remove_files,
    take_lock,
)
from tiers.pool_table import PAGE_BYTES, PoolTable, TableShape, plausible, refusal, size_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_FILE_FLAGS: Final = os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pool's files say, without becoming their owner."""

    owner: Owner | None
    """None: there is no record, or none of ours."""
    file_bytes: int
    """0: there is no file."""
    unusable: str
    """Why the next owner would empty it; empty if it would take it over."""
    size_bytes: int = 0
    slots: dict[int, int] | None = None
    """Sealed slots by their size."""


def inspect_pool(path: Path) -> PoolReport:
    """Look at a pool, in use or not. Raises `OSError` for a file that cannot be read."""
    owner = read_owner(lock_path_of(path))
    try:
        fd = os.open(path, os.O_RDONLY | _FILE_FLAGS)
    except FileNotFoundError:
        return PoolReport(owner, 0, "")
    try:
        file_bytes = os.fstat(fd).st_size
        first: Bytes = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), dtype=np.uint8)
        unusable = refusal(first, file_bytes, read_boot_id())
        if unusable:
            return PoolReport(owner, file_bytes, unusable)
        shape = TableShape.of(size_of(first))
        mapping = mmap.mmap(fd, shape.table_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    table = PoolTable(np.frombuffer(mapping, dtype=np.uint8), shape)
    slabs = table.slabs()
    if slabs is None or not all(plausible(slab, shape) for slab in slabs):
        return PoolReport(owner, file_bytes, "its table of slabs contradicts itself")
    sizes, counts = np.unique(table.sealed(slabs).slot_bytes, return_counts=True)
    slots = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    return PoolReport(owner, file_bytes, "", shape.size_bytes, slots)


def remove_pool(path: Path) -> int:
    """Remove a pool that nobody uses; returns the bytes that are free now.

    Raises:
        PoolError: it is in use, or not ours.
    """
    if not os.path.lexists(path) and not os.path.lexists(lock_path_of(path)):
        return 0
    lock_fd = take_lock(lock_path_of(path))
    try:
        if not os.path.lexists(path):
            remove_files(path)
            return 0
        try:
            require_ours(path, lock_fd)
        except PoolError:
            if not os.fstat(lock_fd).st_size:
                # Made by taking the lock: it must not vouch for a file that is not ours.
                lock_path_of(path).unlink()
            raise
        file_bytes = path.stat().st_size
        remove_files(path)
        return file_bytes
    finally:
        os.close(lock_fd)


def require_ours(path: Path, lock_fd: int) -> None:
    """Raise `PoolError` for a file that no owner's record vouches for, or of another user."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or owner_of(lock_fd) is None:
        raise PoolError(
            f"{path} exists and was not made by kvlake (no owner in {path.name}.lock); choose "
            "another host.directory or runtime.name, or remove it yourself"
        )
    if found.st_uid != os.geteuid():
        raise PoolError(
            f"{path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}; choose another "
            "host.directory or runtime.name"
        )


def map_existing(path: Path, size_bytes: int) -> tuple[mmap.mmap | None, str]:
    """Map a file of ours, or say why it cannot be taken over."""
    shape = TableShape.of(size_bytes)
    fd = os.open(path, os.O_RDWR | _FILE_FLAGS)
    try:
        found = os.fstat(fd)
        first: Bytes = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), dtype=np.uint8)
        reason = refusal(first, found.st_size, read_boot_id())
        if reason:
            return None, reason
        if found.st_size != shape.file_bytes:
            return None, f"it was made for another host.size, with {found.st_size} bytes in all"
        if found.st_blocks * 512 < found.st_size:
            return None, "it has holes: not all of it is backed by memory"
        return mmap.mmap(fd, found.st_size), ""
    finally:
        os.close(fd)


def create_mapping(path: Path, size_bytes: int) -> mmap.mmap:
    """A new file, all of it backed by memory, mapped. Raises `PoolError` without room for it."""
    file_bytes = TableShape.of(size_bytes).file_bytes
    file_system = os.statvfs(path.parent)
    room = file_system.f_bavail * file_system.f_frsize
    no_room = (
        f"size_bytes={size_bytes} ({file_bytes} with its table): the file system of {path.parent} "
        f"has {room} bytes left; lower host.size, choose another host.directory, or enlarge it "
        f"(mount -o remount,size=... {path.parent})"
    )
    # A tmpfs that is mounted without a limit reports no blocks at all.
    if room < file_bytes and file_system.f_blocks:
        raise PoolError(no_room)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600)
    try:
        os.posix_fallocate(fd, 0, file_bytes)
        return mmap.mmap(fd, file_bytes)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise PoolError(no_room) from error
        raise
    finally:
        os.close(fd)
