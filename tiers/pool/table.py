"""The table at the front of a pool's file: identity, slabs, and the state of each slot.

Owns the format. A file is the table, then the slots; all numbers are little-endian::

    superblock  one page: magic, version, size of the slots, capacities, boot id, checksum
    slabs       32 bytes each: checksum (0: unused), base, slot size, slots, first record
    records     32 bytes each: state, last use, tag; one for each slot, a run for each slab
    slots       from the next page on

Does not own allocation (`host_pool.py`), nor the contents of slots (`kv/slot_image.py`).

A process killed between any two instructions leaves a readable table: shared memory has all stores
of a dead process in program order. Hence the invariants:

* A change is committed by one aligned store of eight bytes: the superblock's magic, a slab's
  checksum, a record's state. Everything that it commits was written before.
* A record's state is FREE, OPEN (allocated and incomplete: being filled, or found damaged), or
  the sequence number at which the slot was sealed. It leaves SEALED before a byte of the slot
  changes, and becomes SEALED after the last one did.
* A file is never shorter than its superblock says: it grows before, and shrinks after.
* Readers trust nothing in a table: every number is checked before it is used.
"""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from tiers.kv.layout import Bytes
from tiers.pool.slabs import Slab

Numbers = npt.NDArray[np.int64]

VERSION: Final = 3
"""Raised with every change of this format; other versions are not read."""

PAGE_BYTES: Final = 4096
TAG_BYTES: Final = 16
FREE: Final = 0
OPEN: Final = 1
SEALED_MIN: Final = 2
SEQUENCE_MAX: Final = 1 << 62
"""No pool counts this far; a larger number means damage."""

_MAGIC: Final = int.from_bytes(b"KVLKPOOL", "little")
_SUPERBLOCK: Final = struct.Struct("<QIIQQQ16sQ")
_ENTRY_BYTES: Final = 32
_RECORD_ITEMS: Final = _ENTRY_BYTES // 8
"""State, last use, and a tag of two."""
_SLABS_MIN: Final = 1024
_BYTES_PER_SLAB: Final = 1 << 20
"""A sixteenth of a usual slab: room for slabs in the gaps between others."""
_RECORDS_MIN: Final = 16_384
_BYTES_PER_RECORD: Final = 1 << 14
"""The smallest slot that can fill a pool; smaller ones run out of records first."""
RESIZE_FACTOR_MAX: Final = 16
"""Largest ratio between a table's capacities and those of a new pool of the size."""


@dataclass(frozen=True, slots=True)
class TableShape:
    """Capacities of a table. In a new pool they follow from the size of all slots."""

    size_bytes: int
    slabs_max: int
    records_max: int

    @classmethod
    def of(cls, size_bytes: int) -> "TableShape":
        """The shape of a new pool of `size_bytes`."""
        slabs_max = max(_SLABS_MIN, size_bytes // _BYTES_PER_SLAB)
        return cls(size_bytes, slabs_max, max(_RECORDS_MIN, size_bytes // _BYTES_PER_RECORD))

    def resized(self, size_bytes: int) -> "TableShape | None":
        """The same table with more or fewer slots; None if its capacities are too far off.

        A table made for a sixteenth of the size has a record for each 256 KiB.
        """
        fresh = TableShape.of(size_bytes)
        enough = (
            fresh.records_max <= RESIZE_FACTOR_MAX * self.records_max
            and fresh.slabs_max <= RESIZE_FACTOR_MAX * self.slabs_max
            and self.table_bytes <= RESIZE_FACTOR_MAX * fresh.table_bytes
        )
        return TableShape(size_bytes, self.slabs_max, self.records_max) if enough else None

    @property
    def table_bytes(self) -> int:
        """Bytes before the first slot."""
        entries = (self.slabs_max + self.records_max) * _ENTRY_BYTES
        return PAGE_BYTES + -(-entries // PAGE_BYTES) * PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return self.table_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class SealedSlots:
    """Slots that are sealed according to a file, in columns: one row for each slot."""

    offsets: Numbers
    slot_bytes: Numbers
    sealed: Numbers
    """Sequence number of its sealing."""
    used: Numbers
    """Sequence number of its last use, at least `sealed`."""
    tags: Bytes
    """TAG_BYTES for each, zeros where none was set."""

    def __len__(self) -> int:
        return len(self.offsets)


class PoolTable:
    """The table at the front of `file`, which is a mapping of the whole file as bytes."""

    def __init__(self, file: Bytes, shape: TableShape) -> None:
        self.shape = shape
        slabs_end = PAGE_BYTES + shape.slabs_max * _ENTRY_BYTES
        records_end = slabs_end + shape.records_max * _ENTRY_BYTES
        self._file = file
        slabs = file[PAGE_BYTES:slabs_end]
        self._slabs: npt.NDArray[np.uint64] = slabs.view("<u8").reshape(-1, 4)
        self._slab_counts: npt.NDArray[np.uint32] = slabs.view("<u4").reshape(-1, 8)
        records = file[slabs_end:records_end]
        words: npt.NDArray[np.uint64] = records.view("<u8").reshape(-1, 4)
        self._states, self._used = words[:, 0], words[:, 1]
        self._tags = records.reshape(-1, _ENTRY_BYTES)[:, 16:]
        # Item access through a memoryview takes a third of the time of a numpy array.
        self._items, self._bytes = words.reshape(-1).data, records.data

    def format(self, boot_id: bytes) -> None:
        """Make the zeros of a new file an empty table."""
        page = np.frombuffer(superblock(self.shape, boot_id), dtype=np.uint8)
        self._file[8 : len(page)] = page[8:]
        # Commits it.
        self._file[:8].view("<u8")[0] = _MAGIC

    def add_slab(self, slab: Slab) -> None:
        """Write an unused entry; its slots' records are all free afterwards."""
        first, last = slab.first_record, slab.first_record + slab.slots
        self._states[first:last] = FREE
        words, counts = self._slabs[slab.entry], self._slab_counts[slab.entry]
        words[1], words[2] = slab.base, slab.slot_bytes
        counts[6], counts[7] = slab.slots, slab.first_record
        words[0] = _slab_check(slab)

    def remove_slab(self, entry: int) -> None:
        """Make an entry unused."""
        self._slabs[entry, 0] = 0

    def slabs(self) -> list[Slab] | None:
        """Every slab; None if an entry is damaged or exceeds the pool. Slabs may overlap."""
        found: list[Slab] = []
        for entry in np.flatnonzero(self._slabs[:, 0]):
            check, base, slot_bytes = self._slabs[entry, :3].tolist()
            slab = Slab(int(entry), base, slot_bytes, *self._slab_counts[entry, 6:].tolist())
            if check != _slab_check(slab) or not plausible(slab, self.shape):
                return None
            found.append(slab)
        return found

    def open_slot(self, record: int) -> None:
        """The slot is allocated, incomplete and without a tag; its bytes may change."""
        items, first = self._items, _RECORD_ITEMS * record
        items[first] = OPEN
        items[first + 2] = items[first + 3] = 0

    def free_slot(self, record: int) -> None:
        """The slot holds nothing."""
        self._items[_RECORD_ITEMS * record] = FREE

    def seal_slot(self, record: int, sequence: int) -> None:
        """The slot is complete, including its checksums."""
        items, first = self._items, _RECORD_ITEMS * record
        items[first + 1] = sequence
        items[first] = sequence

    def touch_slot(self, record: int, sequence: int, uses: int) -> None:
        """The slot was used; `uses` are the last four bits of its tag."""
        self._items[_RECORD_ITEMS * record + 1] = sequence
        last = _ENTRY_BYTES * record + _ENTRY_BYTES - 1
        self._bytes[last] = self._bytes[last] & 0x0F | uses << 4

    def tag_slot(self, record: int, tag: bytes) -> None:
        """Tag a slot that is not sealed yet; `tag` has TAG_BYTES at most."""
        self._tags[record] = np.frombuffer(tag.ljust(TAG_BYTES, b"\0"), dtype=np.uint8)

    def is_open(self, record: int) -> bool:
        """Whether the slot is allocated and not sealed."""
        return bool(self._items[_RECORD_ITEMS * record] == OPEN)

    def sealed(self, slabs: list[Slab]) -> SealedSlots:
        """The sealed slots of these slabs, whose numbers were checked."""
        numbers = [(one.slots, one.slot_bytes, one.first_record, one.base) for one in slabs]
        columns = np.array(numbers, dtype=np.int64).reshape(-1, 4)
        counts = columns[:, 0]
        _, slot_bytes, records, offsets = np.repeat(columns, counts, axis=0).T
        places = np.arange(len(records)) - np.repeat(np.cumsum(counts) - counts, counts)
        records = records + places
        offsets = offsets + places * slot_bytes
        states, used = self._states[records], self._used[records]
        good = (states >= SEALED_MIN) & (states <= SEQUENCE_MAX) & (used <= SEQUENCE_MAX)
        sealed = states[good].astype(np.int64)
        return SealedSlots(
            offsets[good],
            slot_bytes[good],
            sealed,
            np.maximum(used[good].astype(np.int64), sealed),
            self._tags[records[good]],
        )


def plausible(slab: Slab, shape: TableShape) -> bool:
    """Whether an entry is valid by itself: its slots and records are within the pool."""
    return (
        slab.slots > 0
        and slab.slot_bytes > 0
        and (slab.base | slab.slot_bytes) % PAGE_BYTES == 0
        and slab.base + slab.slots * slab.slot_bytes <= shape.size_bytes
        and slab.first_record + slab.slots <= shape.records_max
    )


def superblock(shape: TableShape, boot_id: bytes) -> bytes:
    """The first bytes of a file with this table."""
    sizes = shape.size_bytes, shape.slabs_max, shape.records_max
    page = _SUPERBLOCK.pack(_MAGIC, VERSION, _ENTRY_BYTES, *sizes, boot_id, 0)
    return page[:-8] + xxhash.xxh3_64_intdigest(page[8:-8]).to_bytes(8, "little")


def read_superblock(page: bytes, file_bytes: int, boot_id: bytes) -> TableShape | str:
    """The shape of a pool whose file has this first page, or why it cannot be taken over.

    Magic and version have the same offset in every version. A file is longer than its pool if its
    owner was killed while it changed the size.
    """
    if len(page) < _SUPERBLOCK.size:
        return f"it has {file_bytes} bytes, too few for a pool"
    magic, version, entry_bytes, size_bytes, slabs_max, records_max, boot, check = (
        _SUPERBLOCK.unpack_from(page)
    )
    if magic != _MAGIC:
        return "its first page is no superblock: made by an older release, damaged, or unfinished"
    if version != VERSION:
        return f"its format has version {version}, this release reads version {VERSION}"
    shape = TableShape(size_bytes, slabs_max, records_max)
    if (
        check != xxhash.xxh3_64_intdigest(page[8 : _SUPERBLOCK.size - 8])
        or entry_bytes != _ENTRY_BYTES
        or size_bytes % PAGE_BYTES
        or shape.resized(size_bytes) is None
    ):
        return "its superblock is damaged"
    if shape.file_bytes > file_bytes:
        return f"it has {file_bytes} bytes, and its superblock says {shape.file_bytes}"
    if boot != boot_id:
        return "it is from before the machine was started last"
    return shape


def _slab_check(slab: Slab) -> int:
    fields = struct.pack("<QQII", slab.base, slab.slot_bytes, slab.slots, slab.first_record)
    # Never zero, which says that an entry is unused.
    return xxhash.xxh3_64_intdigest(fields) | 1
