"""The file of a pool: created, mapped, backed with memory, inspected, removed.

Owns whose a file is, its length, whether all of it is backed by memory and mapped ahead of use, and
why one cannot be taken over. Does not own the table in the file (`table.py`), or how memory is
mapped (`tiers/kv/mapping.py`).

Invariant: a file without an owner's record, or of another user, is never changed.
"""

import contextlib
import errno
import mmap
import os
import stat
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from tiers.errors import PoolError
from tiers.kv.layout import Bytes
from tiers.kv.mapping import map_shared, populate
from tiers.kv.memfd import memory_kind
from tiers.pool.lock import (
    Owner,
    check_lock,
    lock_path_of,
    owner_of,
    read_boot_id,
    read_owner,
    remove_files,
    require_creatable,
    take_lock,
)
from tiers.pool.numa import Placement
from tiers.pool.table import (
    PAGE_BYTES,
    PoolTable,
    TableShape,
    plausible,
    read_superblock,
    superblock,
)
from tiers.sizes import approximate_size

CONTRADICTION: Final = "its table of slabs contradicts itself"
PREFAULT_PIECE_BYTES: Final = 64 << 20

_FILE_FLAGS: Final = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


class OpenStopped(Exception):
    """A pool was not opened, because its caller stopped that. Its new file is removed."""


@dataclass(frozen=True, slots=True)
class Backing:
    """How the pages of a pool are allocated."""

    prefault: bool
    """Map the pages of a new file, too."""
    threads: int
    placement: Placement
    stop: threading.Event | None = None
    """Once it is set, no more of a new file is populated."""

    def populate(self, memory: Bytes) -> bool:
        """Allocate and map every page of `memory`; False if that is not possible.

        Raises `OpenStopped`.
        """
        starts = range(0, memory.size, PREFAULT_PIECE_BYTES)
        pieces = [memory[start : start + PREFAULT_PIECE_BYTES] for start in starts]
        with self.executor(self.threads) as threads:
            try:
                return all(threads.map(self._populate_piece, pieces))
            except OSError:
                threads.shutdown(cancel_futures=True)
                return False

    def _populate_piece(self, piece: Bytes) -> bool:
        if self.stop is not None and self.stop.is_set():
            raise OpenStopped
        return populate(piece)

    def executor(self, count: int) -> ThreadPoolExecutor:
        """New threads that allocate: the placement is a policy of each thread."""
        return ThreadPoolExecutor(count, "kvlake-prefault", self.placement.adopt)


@dataclass(frozen=True, slots=True)
class PoolReport:
    """What a pool's files say."""

    owner: Owner | None
    """None without a record of ours."""
    file_bytes: int
    """0 without a file."""
    unusable: str
    """Why the next owner would replace the file; empty if it would take it over."""
    size_bytes: int = 0
    slots: dict[int, int] | None = None
    """Sealed slots by their size."""


def inspect_pool(path: Path) -> PoolReport:
    """Inspect a pool, in use or not. Raises `OSError` for a file that cannot be read."""
    owner = read_owner(lock_path_of(path))
    try:
        fd = os.open(path, os.O_RDONLY | _FILE_FLAGS)
    except FileNotFoundError:
        return PoolReport(owner, 0, "")
    try:
        file_bytes = os.fstat(fd).st_size
        shape = read_superblock(os.pread(fd, PAGE_BYTES, 0), file_bytes, read_boot_id())
        if isinstance(shape, str):
            return PoolReport(owner, file_bytes, shape)
        mapping = mmap.mmap(fd, shape.table_bytes, access=mmap.ACCESS_READ)
    finally:
        os.close(fd)
    table = PoolTable(np.frombuffer(mapping, dtype=np.uint8), shape)
    slabs = table.slabs()
    if slabs is None:
        return PoolReport(owner, file_bytes, CONTRADICTION)
    sizes, counts = np.unique(table.sealed(slabs).slot_bytes, return_counts=True)
    slots = dict(zip(sizes.tolist(), counts.tolist(), strict=True))
    return PoolReport(owner, file_bytes, "", shape.size_bytes, slots)


def remove_pool(path: Path) -> int:
    """Remove a pool; returns the bytes freed. Raises `PoolError` if it is in use or not ours."""
    if not os.path.lexists(path) and not os.path.lexists(lock_path_of(path)):
        return 0
    lock_fd = take_lock(lock_path_of(path))
    try:
        file_bytes = 0
        if os.path.lexists(path):
            require_ours(path, owner_of(lock_fd))
            file_bytes = path.stat().st_size
        remove_files(path, lock_fd)
    except PoolError:
        if not os.fstat(lock_fd).st_size:
            # Created by taking the lock: it must not vouch for a file that is not ours.
            lock_path_of(path).unlink()
        raise
    finally:
        os.close(lock_fd)
    return file_bytes


def check_pool(path: Path, size_bytes: int) -> None:
    """Raise the `PoolError` that opening a pool would raise. Changes nothing, keeps no lock."""
    size_bytes -= size_bytes % PAGE_BYTES
    owner = check_lock(lock_path_of(path))
    with as_pool_errors(path):
        if not os.path.lexists(path):
            require_creatable(path)
            _require_room(path, TableShape.of(size_bytes), 0)
            return
        require_ours(path, owner)
        fd = os.open(path, os.O_RDWR | _FILE_FLAGS)
        try:
            found = os.fstat(fd)
            shapes = _fitting(fd, found, size_bytes)
        finally:
            os.close(fd)
        if isinstance(shapes, str):
            # It would be removed and created again.
            _require_room(path, TableShape.of(size_bytes), 0, found.st_blocks * 512)
        else:
            _require_room(path, shapes[1], found.st_size)


@contextlib.contextmanager
def as_pool_errors(path: Path) -> Generator[None]:
    """Turn any `OSError` into a `PoolError` while a pool is opened."""
    try:
        yield
    except OSError as error:
        raise PoolError(
            f"cannot create the pool {path}: {error}; choose another host.directory"
        ) from error


def require_ours(path: Path, owner: Owner | None) -> None:
    """Raise `PoolError` for a file without an owner's record, or of another user."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or owner is None:
        raise PoolError(
            f"{path} exists and was not made by kvlake (no owner in {path.name}.lock); choose "
            "another host.directory or runtime.name, or remove it yourself"
        )
    if found.st_uid != os.geteuid():
        raise PoolError(
            f"{path} belongs to uid {found.st_uid}, not to uid {os.geteuid()}; choose another "
            "host.directory or runtime.name"
        )


@dataclass(frozen=True, slots=True)
class MappedPool:
    """A pool's file, mapped as a whole."""

    owner: mmap.mmap
    file: Bytes
    shape: TableShape
    resized_from_bytes: int
    """Size of its slots before."""
    populated: bool = False
    """Whether all of its pages are mapped."""


def map_existing(path: Path, size_bytes: int, backing: Backing) -> MappedPool | str:
    """Resize and map a file of ours, or say why it cannot be taken over.

    Slabs beyond its end are lost. Raises `PoolError`, having lost nothing, without room to grow.
    """
    fd = os.open(path, os.O_RDWR | _FILE_FLAGS)
    try:
        found = os.fstat(fd)
        shapes = _fitting(fd, found, size_bytes)
        if isinstance(shapes, str):
            return shapes
        shape, wanted = shapes
        if wanted.file_bytes > found.st_size:
            # Backed before it is longer: a process killed in between would leave holes, and the
            # next one would discard the file.
            _require_room(path, wanted, found.st_size)
            _back(fd, path, wanted, found.st_size, backing)
        if wanted != shape:
            if wanted.size_bytes < shape.size_bytes and not _cut_slabs(fd, shape, wanted):
                return CONTRADICTION
            # One write within a page: a killed process has done all of it or nothing.
            os.pwrite(fd, superblock(wanted, read_boot_id()), 0)
        if wanted.file_bytes < found.st_size:
            os.ftruncate(fd, wanted.file_bytes)
        return MappedPool(*map_shared(fd, wanted.file_bytes), wanted, shape.size_bytes)
    finally:
        os.close(fd)


def _fitting(
    fd: int, found: os.stat_result, size_bytes: int
) -> tuple[TableShape, TableShape] | str:
    """A file's shape and its next one, or why it cannot be taken over."""
    shape = read_superblock(os.pread(fd, PAGE_BYTES, 0), found.st_size, read_boot_id())
    if isinstance(shape, str):
        return shape
    if found.st_blocks * 512 < found.st_size:
        return "it has holes: not all of it is backed by memory"
    wanted = shape.resized(size_bytes)
    if wanted is None:
        return (
            "when the file was first made, host.size was too far from this one (more than 16 times "
            f"as large or as small); a host.size of {shape.size_bytes} bytes, as before, would "
            "keep what is in it"
        )
    return shape, wanted


def create_mapping(path: Path, size_bytes: int, backing: Backing) -> MappedPool:
    """A new file, backed by memory and mapped. Raises `PoolError` without room for it."""
    shape = TableShape.of(size_bytes)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE_FLAGS, 0o600)
    try:
        _require_room(path, shape, 0)
        os.ftruncate(fd, shape.file_bytes)
        owner, file = map_shared(fd, shape.file_bytes)
        # Populating works from several threads, posix_fallocate holds the file's lock. It follows
        # for the pages that could not be populated, and says what is missing.
        populated = backing.prefault and backing.populate(file)
        if os.fstat(fd).st_blocks * 512 < shape.file_bytes:
            _back(fd, path, shape, 0, backing)
        return MappedPool(owner, file, shape, size_bytes, populated)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _require_room(
    path: Path, shape: TableShape, had_bytes: int, freed_bytes: int = 0, *, full: bool = False
) -> None:
    """Raise `PoolError` without room for the file's growth, `freed_bytes` being freed before.

    `full`: there is none, as the file system said. Also raises it for a hugetlbfs, where a file has
    whole huge pages only.
    """
    if memory_kind(path.parent) == "hugetlbfs":
        raise PoolError(
            f"host.directory={path.parent}: is a hugetlbfs, which takes whole huge pages only; "
            "choose a tmpfs such as /dev/shm, which needs no setting for huge pages"
        )
    file_system = os.statvfs(path.parent)
    room = file_system.f_bavail * file_system.f_frsize + freed_bytes
    # A tmpfs that is mounted without a limit reports no blocks at all.
    if not full and (room >= shape.file_bytes - had_bytes or not file_system.f_blocks):
        return
    raise PoolError(
        f"host.size={approximate_size(shape.size_bytes)} needs "
        f"{approximate_size(shape.file_bytes - had_bytes)} more on the file system of "
        f"{path.parent}, which has {approximate_size(room)} left; lower host.size, choose another "
        f"host.directory, or enlarge it (mount -o remount,size=... {path.parent})"
    )


def _back(fd: int, path: Path, shape: TableShape, had_bytes: int, backing: Backing) -> None:
    """Back the file with memory to its new end. Raises `PoolError` without room."""
    try:
        with backing.executor(1) as thread:
            more_bytes = shape.file_bytes - had_bytes
            thread.submit(os.posix_fallocate, fd, had_bytes, more_bytes).result()
    except OSError as error:
        os.ftruncate(fd, had_bytes)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            _require_room(path, shape, had_bytes, full=True)
        raise


def _cut_slabs(fd: int, shape: TableShape, wanted: TableShape) -> bool:
    """Remove the slabs that reach beyond a new end. False if the table contradicts itself."""
    table = PoolTable(np.frombuffer(mmap.mmap(fd, shape.table_bytes), dtype=np.uint8), shape)
    slabs = table.slabs()
    for slab in slabs or ():
        if not plausible(slab, wanted):
            table.remove_slab(slab.entry)
    return slabs is not None
