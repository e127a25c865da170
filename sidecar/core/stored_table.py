"""What the store holds for one realm, in about 30 bytes per chunk.

Owns one entry per chunk (16 bytes of its key, the mask of segments in the store, the time of the
newest write), and the catalog's rows as columns (`ListedRows`, `StoredColumns`). Does not own what
follows from a row (`store_view.py`).

A table is 1024 shards by the first bits of the key, so that growing one takes a fraction of a
millisecond at ten million chunks. A shard is sorted numpy columns and a memtable: a dict of new
entries, merged into the columns once it exceeds a fraction of them. As in the shared index, half a
key identifies a chunk; a collision costs one read that fails verification.

Invariants: an entry is in the memtable or in the columns, never in both; finding one takes steps
logarithmic in their number, whatever the keys are.

Rejected: open addressing needs a third more memory, and a visit per entry to be filled.
"""

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
SHARD_BITS: Final = 10
SHARDS: Final = 1 << SHARD_BITS
FEW: Final = 12
"""Up to this many entries of a shard are added one by one: faster than by columns."""
MEMTABLE_MIN: Final = 8
MEMTABLE_SHARES: Final = range(16, 32)
"""A memtable has at most one entry for this many in the columns.

Shards differ in it, so that they are not all merged at the same time.
"""
MEMTABLE_ENTRY_BYTES: Final = 320
"""Heap memory of an entry of the memtable, rounded up."""
_SHARD_SHIFT: Final = np.uint64(64 - SHARD_BITS)
_TAG: Final = struct.Struct(">QQ")
_NOTHING: Final = (0, 0)

Keys = npt.NDArray[np.uint8]
"""Shape [n, 32]."""
Column = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint8]
"""Shape [n, width]: little-endian masks."""


class ListedRow(NamedTuple):
    """One row of the catalog."""

    key: bytes
    mask: int
    """Its ranks, as bits, or the bit of a segment of another parallel layout."""
    written_at: int
    """Microseconds since 1970, by the clock of the writer."""
    withdrawn: bool
    """The segments left the store, unless they were written later than this."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedRows:
    """Columns of `ListedRow`, of equal length and immutable."""

    keys: Keys
    masks: tuple[int, ...]
    """The distinct masks; `masks[mask_ids[i]]` is that of row i."""
    mask_ids: npt.NDArray[np.integer[Any]]
    written_at: Longs
    withdrawn: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[ListedRow]:
        columns = zip(
            key_list(self.keys),
            self.mask_ids.tolist(),
            self.written_at.tolist(),
            self.withdrawn.tolist(),
            strict=True,
        )
        for key, mask_id, written_at, withdrawn in columns:
            yield ListedRow(key, self.masks[mask_id], written_at, withdrawn)

    def take(self, chosen: slice | npt.NDArray[Any]) -> "ListedRows":
        """The rows of this slice, array of indexes, or boolean mask."""
        return ListedRows(
            self.keys[chosen],
            self.masks,
            self.mask_ids[chosen],
            self.written_at[chosen],
            self.withdrawn[chosen],
        )

    def within(self, known: int) -> "ListedRows":
        """The rows that name a bit of `known`, reduced to these bits."""
        masks = tuple(mask & known for mask in self.masks)
        part = replace(self, masks=masks)
        named = np.array(masks, dtype=object).astype(np.bool_)
        return part if named.all() else part.take(named[self.mask_ids])

    def sorted(self) -> "ListedRows":
        """The same rows in the order of their keys; rows of one key keep their order."""
        high, low = tags_of(self.keys)
        before, after = high[:-1], high[1:]
        if np.all((before < after) | ((before == after) & (low[:-1] <= low[1:]))):
            return self
        return self.take(np.lexsort((low, high)))


def key_list(keys: Keys) -> list[bytes]:
    """The rows of an array of keys."""
    joined = keys.tobytes()
    return [joined[at : at + KEY_BYTES] for at in range(0, len(joined), KEY_BYTES)]


class StoredColumns(NamedTuple):
    """One row per key, sorted by key."""

    keys: Keys
    high: Words
    low: Words
    masks: Masks
    written_at: Longs
    """Time of the newest write."""


def merged_by_key(rows: ListedRows, width: int) -> StoredColumns:
    """Rows, none of them withdrawn or with an empty mask, merged to one per key."""
    rows = rows.sorted()
    high, low = tags_of(rows.keys)
    masks = packed(list(rows.masks), width)[rows.mask_ids]
    written_at = np.maximum(rows.written_at, 1)
    new = np.ones(len(rows), dtype=np.bool_)
    new[1:] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    if new.all():
        return StoredColumns(rows.keys, high, low, masks, written_at)
    starts = np.flatnonzero(new)
    return StoredColumns(
        rows.keys[starts],
        high[starts],
        low[starts],
        np.bitwise_or.reduceat(masks, starts, axis=0),
        np.maximum.reduceat(written_at, starts),
    )


def tags_of(keys: Keys) -> tuple[Words, Words]:
    """The two words of each key by which entries are identified and sorted."""
    words = np.ascontiguousarray(keys[:, :TAG_BYTES]).view(">u8").astype(np.uint64)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])


def packed(masks: list[int], width: int) -> Masks:
    """Masks as rows of `width` bytes."""
    joined = b"".join([mask.to_bytes(width, "little") for mask in masks])
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(masks), width)


def distinct(masks: Masks) -> tuple[list[int], npt.NDArray[np.intp]]:
    """The distinct masks, and for each row the index of its mask."""
    if np.all(masks == masks[:1]):
        return [int.from_bytes(masks[:1].tobytes(), "little")], np.zeros(len(masks), dtype=np.intp)
    # As strings, which compare fast. They lose zeros at the end, which stand for nothing.
    rows = np.ascontiguousarray(masks).view(f"S{masks.shape[1]}").ravel()
    found, places = np.unique(rows, return_inverse=True)
    return [int.from_bytes(row, "little") for row in found.tolist()], places


def _tags(high: Words, low: Words) -> Iterator[bytes]:
    return map(_TAG.pack, high.tolist(), low.tolist())


class _Shard:
    """Columns sorted by tag, and the memtable. An entry of the columns with mask 0 is dead."""

    __slots__ = ("_share", "columns", "dead", "high", "low", "masks", "memtable", "times", "width")

    def __init__(self, width: int, share: int) -> None:
        self.width = width
        self._share = share
        self.memtable: dict[bytes, tuple[int, int]] = {}
        self.dead = 0
        empty: Words = np.zeros(0, dtype=np.uint64)
        self._put(empty, empty, np.zeros((0, width), np.uint8), np.zeros(0, np.int64))

    def _put(self, high: Words, low: Words, masks: Masks, times: Longs) -> None:
        self.columns = (high, low, masks, times)
        # Item access through a memoryview costs a third of that through a numpy array.
        self.high: memoryview[int] = cast("Any", high.data)
        self.low: memoryview[int] = cast("Any", low.data)
        self.masks: memoryview = masks.reshape(-1).data
        self.times: memoryview[int] = cast("Any", times.data)

    def widen(self, width: int) -> None:
        high, low, masks, times = self.columns
        self.width, more = width, width - self.width
        self._put(high, low, np.pad(masks, ((0, 0), (0, more))), times)

    @property
    def size_bytes(self) -> int:
        return len(self.high) * (24 + self.width) + len(self.memtable) * MEMTABLE_ENTRY_BYTES

    def find(self, tag: bytes) -> int:
        """The index of a tag in the columns, dead or not, or -1."""
        high, low = _TAG.unpack(tag)
        highs, lows = self.high, self.low
        at = bisect_left(highs, high)
        if at == len(highs) or highs[at] != high:
            return -1
        if lows[at] != low:
            # Tags with the same first word are sorted by the second.
            end = bisect_right(highs, high, at)
            at = bisect_left(lows, low, at, end)
            if at == end or lows[at] != low:
                return -1
        return at

    def get(self, tag: bytes) -> tuple[int, int]:
        entry = self.memtable.get(tag)
        if entry is not None:
            return entry
        at = self.find(tag)
        mask = 0 if at < 0 else self.mask(at)
        return (mask, self.times[at]) if mask else _NOTHING

    def mask(self, at: int) -> int:
        return int.from_bytes(self.masks[at * self.width : (at + 1) * self.width], "little")

    def set(self, tag: bytes, mask: int, time: int) -> int:
        """Set an entry, or remove it with mask 0; returns the change of the number of entries."""
        known = tag in self.memtable
        at = -1 if known else self.find(tag)
        if at >= 0:
            known = bool(self.mask(at))
            self.dead += known - bool(mask)
            self.times[at] = time
            start = at * self.width
            self.masks[start : start + self.width] = mask.to_bytes(self.width, "little")
        elif mask:
            self.memtable[tag] = (mask, time)
        else:
            self.memtable.pop(tag, None)
        self._merge_if_due()
        return bool(mask) - known

    def _merge_if_due(self) -> None:
        queued_max = max(MEMTABLE_MIN, len(self.high) // self._share)
        if len(self.memtable) > queued_max or self.dead * 4 > len(self.high):
            self._merge()

    def _merge(self) -> None:
        """Move the memtable into the columns, and drop the dead entries."""
        if self.dead:
            live = self.columns[2].any(axis=1)
            high, low, masks, times = self.columns
            self._put(high[live], low[live], masks[live], times[live])
            self.dead = 0
        if self.memtable:
            words = np.frombuffer(b"".join(self.memtable), dtype=">u8").astype(np.uint64)
            masks = packed([mask for mask, _ in self.memtable.values()], self.width)
            times = np.array([time for _, time in self.memtable.values()], dtype=np.int64)
            self.memtable = {}
            self._insert(words[::2], words[1::2], masks, times)

    def add(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """Add `masks` to the entries of these tags, sorted and unique; returns the masks before.

        The time of an entry is the later one of both.
        """
        if len(high) <= FEW:
            return self._add_each(high, low, masks, times)
        # Many entries move all columns in any case.
        many = len(high) * self._share > len(self.high)
        if many:
            self._merge()
        held = len(self.high)
        before: Masks = np.zeros(masks.shape, dtype=np.uint8)
        if not held:
            self._insert(high, low, masks, times)
            return before
        near = np.minimum(np.searchsorted(self.columns[0], high), held - 1)
        alike = self.columns[0][near] == high
        same = alike & (self.columns[1][near] == low)
        new = ~same
        if np.any(alike & new):
            # Tags with the same first word.
            return self._add_each(high, low, masks, times)
        before[same] = self._join(near[same], masks[same], times[same])
        if many:
            self._insert(high[new], low[new], masks[new], times[new])
        else:
            before[new] = self._add_each(high[new], low[new], masks[new], times[new])
        return before

    def _join(self, at: npt.NDArray[np.intp], masks: Masks, times: Longs) -> Masks:
        """Add to entries of the columns; returns their masks before."""
        _, _, all_masks, all_times = self.columns
        before: Masks = all_masks[at]
        dead = ~before.any(axis=1)
        all_masks[at] = before | masks
        all_times[at] = np.where(dead, times, np.maximum(all_times[at], times))
        self.dead -= int(np.count_nonzero(dead))
        return before

    def _add_each(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """`add`, one by one."""
        added, before = masks.tobytes(), list[int]()
        for index, (tag, time) in enumerate(zip(_tags(high, low), times.tolist(), strict=True)):
            mask = int.from_bytes(added[index * self.width : (index + 1) * self.width], "little")
            held, since = self.get(tag)
            self.set(tag, held | mask, max(time, since))
            before.append(held)
        return packed(before, self.width)

    def _insert(self, *added: Column) -> None:
        """Merge columns of new entries into columns that have no dead ones."""
        held: tuple[Column, ...] = self.columns
        joined: list[Any] = [np.concatenate(both) for both in zip(held, added, strict=True)]
        # Stable: it finds the runs that are sorted already.
        order = np.argsort(joined[0], kind="stable")
        high = joined[0][order]
        if np.any(high[1:] == high[:-1]):
            order = np.lexsort((joined[1], joined[0]))
        self._put(*(column[order] for column in joined))

    def entries(self) -> list[tuple[bytes, int]]:
        """Tag and mask of each entry that is not dead."""
        tags = _tags(*self.columns[:2])
        found = [(tag, mask) for at, tag in enumerate(tags) if (mask := self.mask(at))]
        return found + [(tag, mask) for tag, (mask, _) in self.memtable.items()]


class StoredChunks:
    """A table from key to (mask, time of the newest write), both positive."""

    def __init__(self, mask_bits: int) -> None:
        self._shards: list[_Shard | None] = [None] * SHARDS
        self._live = 0
        self.width = (mask_bits + 7) // 8
        """Bytes of a mask."""

    def widen(self, mask_bits: int) -> None:
        """Make room for masks of this many bits."""
        width = (mask_bits + 7) // 8
        if width > self.width:
            self.width = width
            for shard in filter(None, self._shards):
                shard.widen(width)

    def __len__(self) -> int:
        return self._live

    @property
    def size_bytes(self) -> int:
        """Size of all entries."""
        return sum(shard.size_bytes for shard in self._shards if shard is not None)

    def entry(self, key: bytes) -> tuple[int, int]:
        """Mask and time of `key`; zeros if there is no entry."""
        shard = self._shards[(key[0] << 8 | key[1]) >> (16 - SHARD_BITS)]
        return _NOTHING if shard is None else shard.get(key[:TAG_BYTES])

    def mask(self, key: bytes) -> int:
        """The mask of `key`; 0 if there is no entry."""
        return self.entry(key)[0]

    def set(self, key: bytes, mask: int, time: int) -> None:
        """Set an entry, or remove it with mask 0."""
        shard = self._open((key[0] << 8 | key[1]) >> (16 - SHARD_BITS))
        self._live += shard.set(key[:TAG_BYTES], mask, max(1, time))

    def add(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """Add non-empty masks to the entries of these tags (`tags_of`, sorted and unique).

        Times are positive; an entry keeps the latest. Returns the masks before.
        """
        starts = np.searchsorted(high >> _SHARD_SHIFT, np.arange(SHARDS + 1, dtype=np.uint64))
        before: Masks = np.empty_like(masks)
        for number in np.flatnonzero(np.diff(starts)).tolist():
            part = slice(int(starts[number]), int(starts[number + 1]))
            found = self._open(number).add(high[part], low[part], masks[part], times[part])
            before[part] = found
            self._live += len(found) - int(np.count_nonzero(found.any(axis=1)))
        return before

    def names(self) -> Iterator[tuple[bytes, int]]:
        """The first half of every key, and its mask, in no order.

        The table may change meanwhile: an entry that exists throughout is yielded once.
        """
        for shard in filter(None, self._shards):
            yield from shard.entries()

    def _open(self, number: int) -> _Shard:
        """A shard, created on first use."""
        shard = self._shards[number]
        if shard is None:
            share = MEMTABLE_SHARES[number % len(MEMTABLE_SHARES)]
            shard = self._shards[number] = _Shard(self.width, share)
        return shard
