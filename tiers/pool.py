"""The host pool: fixed slots in one named shared mapping.

Owns the file behind the mapping, the lock that makes one process its owner, and which ranges of it
are allocated. Does not own what the slots hold, nor when one may be freed: the engine frees a slot
only when no copy runs on it (rule 3 of the design).

Slots of one size form a class. Classes cut *slabs* from the pool, runs of slots of one size; a
slab whose last slot is freed goes back and can serve another class. `allocate` and `free` are
O(1), but for the first and last slot of a slab, which search the list of free extents.

Files: `<path>` is the memory, `<path>.lock` the record of the owner's pid, which the owner holds
locked (flock: the kernel drops it when the owner dies, also across pid namespaces). A pool whose
owner died is taken over: its file is replaced by an empty one. What was in it is given up, because
nothing says how far the copies had come that ran when the owner was killed.

Invariants: slots never overlap and start on a page; all of the file is backed by memory before the
pool is handed out, so that a full file system is an error at start and never a SIGBUS; a file
without an owner's record beside it is not ours and is never removed. One thread.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from tiers.errors import PoolError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

PAGE_BYTES: Final = 4096
CLASSES_MAX: Final = 4096

_SLAB_BYTES_MAX: Final = 16 << 20
"""A slab of small slots is no larger: the fewer slots it has, the sooner it is empty again."""
_SLABS_PER_POOL_MIN: Final = 16
_PREFAULT_BYTES_PER_CALL: Final = 64 << 20
_MADV_POPULATE_WRITE: Final = 23
_LOCK_MAGIC: Final = "kvlake pool of pid"
_LOCK_ATTEMPTS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Slots of one size. `slots_free` counts those in slabs that the class has now."""

    class_id: int
    slot_bytes: int
    slabs: int
    slots_used: int
    slots_free: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Where the pool's memory is: in allocated slots, in slabs, in neither."""

    size_bytes: int
    used_bytes: int
    slab_bytes: int
    classes: tuple[ClassStats, ...]


class _Slab:
    """A run of equal slots. Slots that were never used are counted, not listed."""

    __slots__ = ("base", "freed", "fresh", "slot_class", "slots", "used")

    def __init__(self, base: int, slots: int, slot_class: _SlotClass) -> None:
        self.base = base
        self.slots = slots
        self.slot_class = slot_class
        self.used = 0
        self.fresh = 0
        self.freed: list[int] = []

    def take(self) -> int:
        self.used += 1
        if self.freed:
            return self.freed.pop()
        self.fresh += 1
        return self.base + (self.fresh - 1) * self.slot_class.slot_bytes


class _SlotClass:
    """Slots of one size; `open` are its slabs with room, in the order in which they got it."""

    __slots__ = ("class_id", "open", "slabs", "slot_bytes", "slots", "used")

    def __init__(self, class_id: int, slot_bytes: int) -> None:
        self.class_id = class_id
        self.slot_bytes = slot_bytes
        # Ordered: its first is found in O(1), a dict steps over what was deleted in front of it.
        self.open: OrderedDict[int, _Slab] = OrderedDict()
        self.slabs = 0
        self.slots = 0
        self.used = 0


class _Extents:
    """Free ranges between the slabs, sorted, with neighbours joined."""

    def __init__(self, size_bytes: int) -> None:
        self._starts = [0]
        self._sizes = [size_bytes]

    def take(self, unit_bytes: int, units_max: int) -> tuple[int, int] | None:
        """The first range with room for `units_max` units, or else the longest one's units."""
        best, best_units = -1, 0
        for place, size in enumerate(self._sizes):
            units = min(size // unit_bytes, units_max)
            if units > best_units:
                best, best_units = place, units
                if units == units_max:
                    break
        if not best_units:
            return None
        start, taken = self._starts[best], unit_bytes * best_units
        if taken == self._sizes[best]:
            del self._starts[best], self._sizes[best]
        else:
            self._starts[best] += taken
            self._sizes[best] -= taken
        return start, best_units

    def give(self, start: int, size_bytes: int) -> None:
        """Put a range back."""
        place = bisect.bisect_left(self._starts, start)
        if place < len(self._starts) and start + size_bytes == self._starts[place]:
            size_bytes += self._sizes[place]
            del self._starts[place], self._sizes[place]
        if place and self._starts[place - 1] + self._sizes[place - 1] == start:
            self._sizes[place - 1] += size_bytes
        else:
            self._starts.insert(place, start)
            self._sizes.insert(place, size_bytes)


class HostPool:
    """An open pool. Make one with `HostPool.open`."""

    def __init__(self, path: Path, lock_fd: int, mapping: mmap.mmap) -> None:
        self.path = path
        self.size_bytes = len(mapping)
        self._lock_fd = lock_fd
        self._map = mapping
        self._memory: npt.NDArray[np.uint8] | None = np.frombuffer(mapping, dtype=np.uint8)
        self._extents = _Extents(self.size_bytes)
        self._classes: list[_SlotClass] = []
        self._class_ids: dict[int, int] = {}
        self._slab_bytes = 0
        # Every allocated slot, and its slab: what is not in here cannot be freed.
        self._allocated: dict[int, _Slab] = {}

    @classmethod
    def open(cls, path: Path, size_bytes: int, *, prefault: bool = True) -> HostPool:
        """Become the owner of the pool at `path`, empty and `size_bytes` large.

        Args:
            path: the file; its directory exists, and should be on a tmpfs (/dev/shm).
            size_bytes: rounded down to whole pages.
            prefault: map all pages now, which takes about 0.25 s per GiB, instead of at first use.

        Raises:
            PoolError: another process owns it, the file system has no room, or the file is not one
                of ours. The message says what to change.
        """
        size_bytes -= size_bytes % PAGE_BYTES
        if size_bytes <= 0:
            raise PoolError(f"size_bytes={size_bytes}: a pool has at least {PAGE_BYTES} bytes")
        lock_path = path.with_name(path.name + ".lock")
        lock_fd = _take_lock(lock_path)
        try:
            _remove_stale(path, lock_fd)
            _write_owner(lock_fd)
            mapping = _create_mapping(path, size_bytes, prefault=prefault)
            return cls(path, lock_fd, mapping)
        except BaseException as error:
            # A record without a pool, or an empty one, is of no use to anybody.
            if not os.path.lexists(path) or not _owner_of(lock_fd):
                lock_path.unlink(missing_ok=True)
            os.close(lock_fd)
            if isinstance(error, OSError):
                raise PoolError(
                    f"cannot create the pool {path}: {error}; choose another host.directory"
                ) from error
            raise

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """All of the pool, as bytes. A slot is `memory[offset : offset + slot_bytes]`."""
        if self._memory is None:
            raise PoolError(f"pool {self.path} is closed")
        return self._memory

    def register_class(self, slot_bytes: int) -> int:
        """The class of slots of `slot_bytes` (rounded up to pages); asking again gives the same.

        Raises:
            PoolError: the pool is smaller than one such slot, or has too many classes.
        """
        rounded = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        if not 0 < rounded <= self.size_bytes:
            raise PoolError(
                f"slot_bytes={slot_bytes}: the pool has {self.size_bytes} bytes; "
                "raise host.size or lower chunk_tokens"
            )
        known = self._class_ids.get(rounded)
        if known is not None:
            return known
        if len(self._classes) == CLASSES_MAX:
            raise PoolError(
                f"slot_bytes={slot_bytes}: the pool has CLASSES_MAX={CLASSES_MAX} slot sizes "
                "already; restart the sidecar to forget those that are no longer used"
            )
        class_id = self._class_ids[rounded] = len(self._classes)
        self._classes.append(_SlotClass(class_id, rounded))
        return class_id

    def allocate(self, class_id: int) -> int | None:
        """Byte offset of a free slot of a class, its bytes undefined; None if there is none."""
        if not 0 <= class_id < len(self._classes):
            raise PoolError(f"class_id={class_id} was never registered")
        slot_class = self._classes[class_id]
        slab = next(iter(slot_class.open.values()), None) or self._add_slab(slot_class)
        if slab is None:
            return None
        offset = slab.take()
        slot_class.used += 1
        if slab.used == slab.slots:
            del slot_class.open[slab.base]
        self._allocated[offset] = slab
        return offset

    def free(self, offset: int) -> None:
        """Give a slot back. Raises `PoolError` for one that is not allocated."""
        slab = self._slab_of(offset)
        del self._allocated[offset]
        slot_class = slab.slot_class
        slab.freed.append(offset)
        slab.used -= 1
        slot_class.used -= 1
        if slab.used:
            slot_class.open[slab.base] = slab
            return
        slot_class.open.pop(slab.base, None)
        slot_class.slabs -= 1
        slot_class.slots -= slab.slots
        slab_bytes = slab.slots * slot_class.slot_bytes
        self._slab_bytes -= slab_bytes
        self._extents.give(slab.base, slab_bytes)

    def class_of(self, offset: int) -> int:
        """Class of an allocated slot. Raises `PoolError` for one that is not."""
        return self._slab_of(offset).slot_class.class_id

    def slot_bytes(self, class_id: int) -> int:
        """Bytes of one slot of a class."""
        return self._classes[class_id].slot_bytes

    def stats(self) -> PoolStats:
        """What is used now."""
        classes = tuple(
            ClassStats(one.class_id, one.slot_bytes, one.slabs, one.used, one.slots - one.used)
            for one in self._classes
        )
        used_bytes = sum(one.slot_bytes * one.slots_used for one in classes)
        return PoolStats(self.size_bytes, used_bytes, self._slab_bytes, classes)

    def close(self, *, unlink: bool = True) -> tuple[int, ...]:
        """Give up the memory and the lock; returns the slots that were never freed. Idempotent.

        Call it when no copy runs. The mapping itself goes when the last array over it does.

        Args:
            unlink: remove the files. If not, their memory stays in use until the next owner
                empties them.
        """
        if self._memory is None:
            return ()
        leaked = tuple(sorted(self._allocated))
        self._memory = None
        self._allocated.clear()
        with contextlib.suppress(BufferError):
            self._map.close()
        try:
            if unlink:
                # The lock file last: without it, a pool file would be nobody's.
                self.path.unlink(missing_ok=True)
                self.path.with_name(self.path.name + ".lock").unlink(missing_ok=True)
        finally:
            os.close(self._lock_fd)
        return leaked

    def _add_slab(self, slot_class: _SlotClass) -> _Slab | None:
        slab_bytes_max = min(_SLAB_BYTES_MAX, self.size_bytes // _SLABS_PER_POOL_MIN)
        slots_max = max(1, slab_bytes_max // slot_class.slot_bytes)
        found = self._extents.take(slot_class.slot_bytes, slots_max)
        if found is None:
            return None
        base, slots = found
        slab = slot_class.open[base] = _Slab(base, slots, slot_class)
        slot_class.slabs += 1
        slot_class.slots += slots
        self._slab_bytes += slots * slot_class.slot_bytes
        return slab

    def _slab_of(self, offset: int) -> _Slab:
        slab = self._allocated.get(offset)
        if slab is None:
            raise PoolError(
                f"offset={offset} is no allocated slot of {self.path}: it was freed before, or "
                "never came from allocate"
            )
        return slab


def _take_lock(lock_path: Path) -> int:
    """Open and lock the owner's record, or raise `PoolError`."""
    try:
        return _lock_file(lock_path)
    except OSError as error:
        raise PoolError(
            f"cannot lock {lock_path}: {error}; choose another host.directory or runtime.name, or "
            "remove the file if it is not in use"
        ) from error


def _lock_file(lock_path: Path) -> int:
    for _ in range(_LOCK_ATTEMPTS_MAX):
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock_fd = os.open(lock_path, flags, 0o600)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # An owner that closed in between removed the file that we have just locked.
            record = os.fstat(lock_fd)
            if os.path.samestat(record, os.stat(lock_path)):
                if record.st_size and not _owner_of(lock_fd):
                    raise FileExistsError(errno.EEXIST, "it is no owner's record")  # noqa: TRY301
                return lock_fd
        except BlockingIOError as error:
            owner = _owner_of(lock_fd) or "unknown"
            os.close(lock_fd)
            raise PoolError(
                f"pool is in use: {lock_path} is locked by process {owner}; stop that sidecar, or "
                "give this one another runtime.name or host.directory"
            ) from error
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock_fd)
            raise
        os.close(lock_fd)
    raise PoolError(f"pool is in use: {lock_path} changed owners {_LOCK_ATTEMPTS_MAX} times")


def _remove_stale(path: Path, lock_fd: int) -> None:
    """Remove the memory of an owner that died. Its record says that the file is a pool."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file() or not _owner_of(lock_fd):
        raise PoolError(
            f"{path} exists and was not made by kvlake (no owner in {path.name}.lock); choose "
            "another host.directory or runtime.name, or remove it yourself"
        )
    path.unlink()


def _write_owner(lock_fd: int) -> None:
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{_LOCK_MAGIC} {os.getpid()}\n".encode(), 0)


def _owner_of(lock_fd: int) -> str:
    """Pid in an owner's record; empty where the file holds something else."""
    record = os.pread(lock_fd, 64, 0).decode(errors="replace").strip()
    magic, _, pid = record.rpartition(" ")
    return pid if magic == _LOCK_MAGIC and pid.isdigit() else ""


def _create_mapping(path: Path, size_bytes: int, *, prefault: bool) -> mmap.mmap:
    file_system = os.statvfs(path.parent)
    room = file_system.f_bavail * file_system.f_frsize
    no_room = (
        f"size_bytes={size_bytes}: the file system of {path.parent} has {room} bytes left; lower "
        f"host.size, choose another host.directory, or enlarge it "
        f"(mount -o remount,size=... {path.parent})"
    )
    # A tmpfs that is mounted without a limit reports no blocks at all.
    if room < size_bytes and file_system.f_blocks:
        raise PoolError(no_room)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
        if prefault:
            _prefault(mapping)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
            raise PoolError(no_room) from error
        raise
    finally:
        os.close(fd)
    return mapping


def _prefault(mapping: mmap.mmap) -> None:
    """Map every page, in pieces, so that other threads get a turn in between."""
    for start in range(0, len(mapping), _PREFAULT_BYTES_PER_CALL):
        length = min(_PREFAULT_BYTES_PER_CALL, len(mapping) - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14: touching a page maps it.
            np.frombuffer(mapping, dtype=np.uint8)[start : start + length : PAGE_BYTES].max()
