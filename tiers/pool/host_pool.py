"""The host pool: slots of fixed sizes in one named shared mapping that outlives its process.

Owns which ranges of the file (`file.py`) are allocated, and recording that (`table.py`). Does not
own the contents of slots, nor when one may be freed: the engine frees a slot only when no copy runs
on it. `<path>` is the memory, `<path>.lock` the record of its owner (`lock.py`).

Slots of one size form a class. Classes allocate *slabs* from the pool, runs of slots of one size; a
slab whose last slot is freed returns to the pool and can serve another class. `allocate` and `free`
are O(1), except for the first and last slot of a slab, which search the list of free extents.

A slot is allocated, filled, sealed, touched at each use, and freed. When a pool is opened again,
sealed slots stay allocated and `recovered` lists them; all others are free. Slots beyond a new end
are lost. A file of another version or boot, or one that contradicts itself, is replaced.

Invariants: slots never overlap and start on a page; all of the file is backed by memory before the
pool is handed out, so a full file system is an error at start and never a SIGBUS; a file without an
owner's record beside it is never removed. One thread, except for `populate`.
"""

import contextlib
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

from tiers.errors import PoolError
from tiers.kv.layout import Bytes
from tiers.kv.mapping import populate
from tiers.pool.file import (
    CONTRADICTION,
    Backing,
    MappedPool,
    as_pool_errors,
    create_mapping,
    map_existing,
    require_ours,
)
from tiers.pool.lock import (
    Owner,
    lock_path_of,
    owner_of,
    read_boot_id,
    remove_files,
    take_lock,
    write_owner,
)
from tiers.pool.numa import Placement
from tiers.pool.slabs import Extents, PoolStats, Slab, SlotClass
from tiers.pool.table import PAGE_BYTES, TAG_BYTES, PoolTable

CLASSES_MAX: Final = 4096
POPULATE_BYTES_PER_CALL: Final = 16 << 20

_SLAB_BYTES_MAX: Final = 16 << 20
"""Limit for slabs of small slots: the fewer slots, the sooner it is empty again."""
_SLABS_PER_POOL_MIN: Final = 16


class HostPool:
    """An open pool. Make one with `HostPool.open`."""

    def __init__(self, path: Path, lock_fd: int, mapped: MappedPool) -> None:
        shape = mapped.shape
        self.path = path
        self.size_bytes = shape.size_bytes
        self.resized_from_bytes = mapped.resized_from_bytes
        """Its size when it was taken over; `size_bytes` if that did not change."""
        self.emptied = ""
        """Why the file was replaced; empty if it was taken over or is new."""
        self.placement = Placement()
        """The NUMA nodes requested for its pages."""
        self._lock_fd = lock_fd
        self._map = mapped.owner
        self._file = mapped.file
        self._memory: Bytes | None = self._file[shape.table_bytes :]
        self._table = PoolTable(mapped.file, shape)
        self.recovered = self._table.sealed([])
        """Slots that were sealed when this process took the pool over."""
        self.extents = Extents(shape.size_bytes)
        self._records = Extents(shape.records_max)
        self._entries = list(range(shape.slabs_max - 1, -1, -1))
        self._classes: dict[int, SlotClass] = {}
        """By the bytes of a slot, which name the class."""
        self._sequence = 1
        # Every allocated slot, and its slab: only these can be freed.
        self._allocated: dict[int, Slab] = {}

    @classmethod
    def open(
        cls,
        path: Path,
        size_bytes: int,
        *,
        prefault: bool = True,
        threads: int = 1,
        placement: Placement | None = None,
        stop: threading.Event | None = None,
    ) -> "HostPool":
        """Become the owner of the pool at `path`, `size_bytes` large.

        Its directory exists, and should be on a tmpfs (/dev/shm). The size is rounded down to whole
        pages; the table adds 0.2 %, at least 512 KiB. `prefault` maps all pages of a new file now,
        in some `threads` (0.2 to 1.5 s per GiB), instead of at first use; a file that is taken over
        is mapped by `populate`. `placement` has the NUMA nodes for new pages, and is settled here.

        Raises `OpenStopped` soon after `stop` is set while a new file is mapped, and leaves none.
        Raises `PoolError` with the remedy if another process owns it, the file system has no room,
        or the file is not ours.
        """
        size_bytes -= size_bytes % PAGE_BYTES
        if size_bytes <= 0:
            raise PoolError(f"size_bytes={size_bytes}: a pool has at least {PAGE_BYTES} bytes")
        placement = placement or Placement()
        placement.settle()
        backing = Backing(prefault, threads, placement, stop)
        lock_path = lock_path_of(path)
        lock_fd = take_lock(lock_path)
        try:
            with as_pool_errors(path):
                pool = cls._open(path, size_bytes, lock_fd, backing)
        except BaseException:
            # A record without a pool, or an empty one, is useless.
            if not os.path.lexists(path) or owner_of(lock_fd) is None:
                lock_path.unlink(missing_ok=True)
            os.close(lock_fd)
            raise
        pool.placement = placement
        return pool

    @classmethod
    def _open(cls, path: Path, size_bytes: int, lock_fd: int, backing: Backing) -> "HostPool":
        there = os.path.lexists(path)
        if there:
            require_ours(path, owner_of(lock_fd))
        # Before the file is created: without an owner's record nobody would remove it.
        write_owner(lock_fd, Owner.current())
        emptied = ""
        if there:
            existing = map_existing(path, size_bytes, backing)
            if isinstance(existing, MappedPool):
                pool = cls(path, lock_fd, existing)
                if pool._recover():
                    return pool
                emptied = CONTRADICTION
                # Frees its memory before more is requested.
                del pool, existing
            else:
                emptied = existing
            path.unlink()
        mapped = create_mapping(path, size_bytes, backing)
        pool = cls(path, lock_fd, mapped)
        pool.emptied = emptied
        pool._table.format(read_boot_id())
        if backing.prefault and not mapped.populated:
            for start in pool.pieces():
                pool.populate(start)
        return pool

    def _recover(self) -> bool:
        """Take over the slabs and sealed slots in the file. False if it is damaged."""
        slabs = self._table.slabs()
        if slabs is None:
            return False
        ranges = [(slab.base, slab.slots * slab.slot_bytes) for slab in slabs]
        runs = [(slab.first_record, slab.slots) for slab in slabs]
        sizes = {slab.slot_bytes for slab in slabs}
        if len(sizes) > CLASSES_MAX or not (
            self.extents.claim(ranges) and self._records.claim(runs)
        ):
            return False
        self.recovered = self._table.sealed(slabs)
        if len(self.recovered):
            self._sequence = int(self.recovered.used.max())
        taken = {slab.entry for slab in slabs}
        self._entries = [entry for entry in self._entries if entry not in taken]
        sealed = set(self.recovered.offsets.tolist())
        for slab in slabs:
            slab.fresh = slab.slots
            for offset in range(slab.base, slab.base + slab.size_bytes, slab.slot_bytes):
                if offset in sealed:
                    self._allocated[offset] = slab
                    slab.used += 1
                else:
                    slab.freed.append(offset)
                    self._table.free_slot(slab.record_of(offset))
            self._classes[self.register_class(slab.slot_bytes)].add(slab)
            if not slab.used:
                self._remove_slab(slab)
        return True

    @property
    def memory(self) -> Bytes:
        """All slots, as bytes. A slot is `memory[offset : offset + slot_bytes]`."""
        if self._memory is None:
            raise PoolError(f"pool {self.path} is closed")
        return self._memory

    def register_class(self, slot_bytes: int) -> int:
        """The class of slots of `slot_bytes`: that number, rounded up to pages.

        Raises `PoolError` if the pool is smaller than one such slot, or has too many classes.
        """
        rounded = -(-slot_bytes // PAGE_BYTES) * PAGE_BYTES
        if not 0 < rounded <= self.size_bytes:
            raise PoolError(
                f"slot_bytes={slot_bytes}: the pool has {self.size_bytes} bytes; "
                "raise host.size or lower chunk_tokens"
            )
        if rounded in self._classes:
            return rounded
        if len(self._classes) == CLASSES_MAX:
            raise PoolError(
                f"slot_bytes={slot_bytes}: the pool has CLASSES_MAX={CLASSES_MAX} slot sizes "
                "already; stop engines whose sizes are not needed"
            )
        self._classes[rounded] = SlotClass(rounded)
        return rounded

    def keep_classes(self, kept: Collection[int]) -> None:
        """Forget all other classes that have no slab."""
        for slot_bytes, slot_class in list(self._classes.items()):
            if not slot_class.slabs and slot_bytes not in kept:
                del self._classes[slot_bytes]

    def allocate(self, slot_bytes: int) -> int | None:
        """Offset in bytes of a free slot of a class, its contents undefined; None without one."""
        slot_class = self._classes[slot_bytes]
        slab = next(iter(slot_class.open.values()), None) or self._add_slab(slot_class)
        if slab is None:
            return None
        offset = slab.take()
        slot_class.used += 1
        if slab.used == slab.slots:
            del slot_class.open[slab.base]
        self._allocated[offset] = slab
        self._table.open_slot(slab.record_of(offset))
        return offset

    def set_tag(self, offset: int, tag: bytes) -> None:
        """Tag a slot with its owner, at most TAG_BYTES bytes, once before it is sealed."""
        record = self._slab_of(offset).record_of(offset)
        assert len(tag) <= TAG_BYTES, tag
        assert self._table.is_open(record), "a tag is set before the slot is sealed"
        self._table.tag_slot(record, tag)

    def seal(self, offset: int) -> None:
        """Mark a slot as complete and constant: it may be recovered after a restart."""
        self._sequence += 1
        self._table.seal_slot(self._slab_of(offset).record_of(offset), self._sequence)

    def unseal(self, offset: int) -> None:
        """Mark a slot that is not free yet as not to be recovered."""
        self._table.open_slot(self._slab_of(offset).record_of(offset))

    def touch(self, offset: int, uses: int = 0) -> None:
        """Note a use of a sealed slot; the last four bits of its tag become `uses`."""
        self._sequence += 1
        self._table.touch_slot(self._slab_of(offset).record_of(offset), self._sequence, uses)

    def free(self, offset: int) -> None:
        """Free a slot. Raises `PoolError` for one that is not allocated."""
        slab = self._slab_of(offset)
        self._table.free_slot(slab.record_of(offset))
        del self._allocated[offset]
        slot_class = self._classes[slab.slot_bytes]
        slab.freed.append(offset)
        slab.used -= 1
        slot_class.used -= 1
        if slab.used:
            slot_class.open[slab.base] = slab
        else:
            self._remove_slab(slab)

    def class_of(self, offset: int) -> int:
        """Class of an allocated slot. Raises `PoolError` for any other."""
        return self._slab_of(offset).slot_bytes

    def stats(self) -> PoolStats:
        """The use of memory now."""
        classes = tuple(one.stats() for one in self._classes.values())
        used_bytes = sum(one.slot_bytes * one.slots_used for one in classes)
        free_bytes = sum(one.slot_bytes * one.slots_free for one in classes)
        return PoolStats(self.size_bytes, used_bytes, used_bytes + free_bytes, classes)

    def free_bytes(self) -> int:
        """Bytes in no allocated slot. The end of a free range may be too short for a slot."""
        used_bytes = sum(one.slot_bytes * one.used for one in self._classes.values())
        return self.size_bytes - used_bytes

    def pieces(self) -> range:
        """What `populate` takes, for all of the file."""
        return range(0, self._file.size, POPULATE_BYTES_PER_CALL)

    def populate(self, start: int) -> None:
        """Map the pages of one of the `pieces`, without the GIL.

        In any thread, while the pool is open. Raises `OSError`.
        """
        piece = self._file[start : start + POPULATE_BYTES_PER_CALL]
        # Small pages that an earlier release interleaved would all move to one node.
        if not populate(piece, collapse=len(self.placement.nodes) <= 1):
            # Kernels before 5.14: an access maps a page.
            piece[::PAGE_BYTES].max(initial=0)

    def close(self, *, keep: bool = False) -> tuple[int, ...]:
        """Release the lock, and the memory unless `keep` and a slot is sealed. Idempotent.

        No copy may run. The mapping ends with the last array over it. Returns the slots that were
        never freed; with `keep`, those that were never sealed either.
        """
        if self._memory is None:
            return ()
        unsealed = [
            offset
            for offset, slab in self._allocated.items()
            if self._table.is_open(slab.record_of(offset))
        ]
        keep = keep and len(unsealed) < len(self._allocated) and self.path.exists()
        leaked = tuple(sorted(unsealed if keep else self._allocated))
        self._memory = None
        self._allocated.clear()
        del self._table, self._file
        with contextlib.suppress(BufferError):
            self._map.close()
        try:
            if keep:
                write_owner(self._lock_fd, Owner(0))
            else:
                remove_files(self.path, self._lock_fd)
        finally:
            os.close(self._lock_fd)
        return leaked

    def remove_files(self) -> None:
        """Remove the files and do nothing else, for a process that ends at once."""
        if self._memory is not None:  # `close` closed the descriptor.
            remove_files(self.path, self._lock_fd)

    def _add_slab(self, slot_class: SlotClass) -> Slab | None:
        if not self._entries or not self.extents.fits(slot_class.slot_bytes):
            return None
        slab_bytes_max = min(_SLAB_BYTES_MAX, self.size_bytes // _SLABS_PER_POOL_MIN)
        slots_max = max(1, slab_bytes_max // slot_class.slot_bytes)
        run = self._records.take(1, slots_max)
        if run is None:
            return None
        first_record, records = run
        found = self.extents.take(slot_class.slot_bytes, records)
        base, slots = found or (0, 0)
        if slots < records:
            self._records.give(first_record + slots, records - slots)
        if found is None:
            return None
        slab = Slab(self._entries.pop(), base, slot_class.slot_bytes, slots, first_record)
        self._table.add_slab(slab)
        slot_class.add(slab)
        return slab

    def _remove_slab(self, slab: Slab) -> None:
        self._table.remove_slab(slab.entry)
        self._classes[slab.slot_bytes].remove(slab)
        self._entries.append(slab.entry)
        self._records.give(slab.first_record, slab.slots)
        self.extents.give(slab.base, slab.size_bytes)

    def _slab_of(self, offset: int) -> Slab:
        slab = self._allocated.get(offset)
        if slab is None:
            raise PoolError(
                f"offset={offset} is no allocated slot of {self.path}: it was freed before, or "
                "never allocated"
            )
        return slab
