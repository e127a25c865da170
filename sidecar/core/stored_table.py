"""What the store holds, for one realm, in some 30 bytes per chunk.

Owns one entry per chunk: 16 bytes of its key, the mask of segments that are in the store, and when
the newest of them was written; and what the bits of a mask stand for (`SegmentSources`). Does not
own what follows from an entry (`store_view.py`).

Sorted numpy columns, in 1024 shards by a key's first bits, so that making room in one takes a
fraction of a millisecond at ten million chunks. A few new entries wait in a dict, and are merged
into the columns when they are more than a fraction of them; many at once are merged at once
(`offer`). Half of a key tells two chunks apart (as in the shared index), and a pair that it does
not tell apart costs a read that is refused by its checks.

Invariants: pure, no randomness; an entry is in the dict or in the columns, never in both; whatever
the keys are, finding one takes a number of steps that is logarithmic in their number.

Rejected: open addressing, which is as fast for one entry but needs a third more memory, and cannot
be filled by columns without going from slot to slot for each.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import numpy.typing as npt

from tiers.kv.reshard import cover

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiers.kv.layout import Segment

SHARD_BITS: Final = 10
SHARDS: Final = 1 << SHARD_BITS
FEW: Final = 12
"""So many are offered to a shard in less time one by one than by columns."""
TAG_BYTES: Final = 16
HEAD_MIN: Final = 8
HEAD_SHARES: Final = range(16, 32)
"""Entries wait outside of the columns while they are fewer than one for so many within.

Shards differ in it, so that a refresh does not have all of them merged at once.
"""
HEAD_ENTRY_BYTES: Final = 320
"""What one that waits takes in Python's heap, rounded up."""
_SHARD_SHIFT: Final = np.uint64(64 - SHARD_BITS)
_TAG: Final = struct.Struct(">QQ")
_NOTHING: Final = (0, 0)

Column = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]
Longs = npt.NDArray[np.int64]
Masks = npt.NDArray[np.uint8]
"""Shape [n, width]: each mask little-endian, in as many bytes as the widest needs."""


def tags_of(keys: npt.NDArray[np.uint8]) -> tuple[Words, Words]:
    """The two words of each key (shape [n, 32]) by which entries are told apart, and sorted."""
    words = np.ascontiguousarray(keys[:, :TAG_BYTES]).view(">u8").astype(np.uint64)
    return np.ascontiguousarray(words[:, 0]), np.ascontiguousarray(words[:, 1])


def packed(masks: list[int], width: int) -> Masks:
    """Masks as rows of `width` bytes."""
    joined = b"".join([mask.to_bytes(width, "little") for mask in masks])
    return np.frombuffer(joined, dtype=np.uint8).reshape(len(masks), width)


def widened(masks: Masks, width: int) -> Masks:
    """The same masks in at least `width` bytes each."""
    if masks.shape[1] >= width:
        return masks
    result: Masks = np.zeros((len(masks), width), dtype=np.uint8)
    result[:, : masks.shape[1]] = masks
    return result


def distinct(masks: Masks) -> tuple[list[int], npt.NDArray[np.intp]]:
    """The masks that there are, and for each row which of them it is."""
    if masks.shape[1] > 8:
        rows = np.ascontiguousarray(masks).view(f"V{masks.shape[1]}").ravel()
        found, places = np.unique(rows, return_inverse=True)
        return [int.from_bytes(row.tobytes(), "little") for row in found], places
    words = widened(masks, 8).view("<u8").ravel()
    if np.all(words == words[:1]):
        return [int(word) for word in words[:1]], np.zeros(len(words), dtype=np.intp)
    values, places = np.unique(words, return_inverse=True)
    return values.tolist(), places


def _tags(high: Words, low: Words) -> Iterator[bytes]:
    return map(_TAG.pack, high.tolist(), low.tolist())


def _shard_of(key: bytes) -> int:
    return (key[0] << 8 | key[1]) >> (16 - SHARD_BITS)


class _Shard:
    """One part: columns sorted by tag, and a dict of what is not in them yet.

    An entry of the columns is dead while its mask is 0.
    """

    __slots__ = ("_share", "columns", "dead", "head", "high", "low", "masks", "times", "width")

    def __init__(self, width: int, share: int) -> None:
        self._share = share
        self.head: dict[bytes, tuple[int, int]] = {}
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
        self.width: int = masks.shape[1]

    @property
    def size_bytes(self) -> int:
        return len(self.high) * (24 + self.width) + len(self.head) * HEAD_ENTRY_BYTES

    def find(self, tag: bytes) -> int:
        """Where the columns have an entry, dead or not, or -1."""
        high, low = _TAG.unpack(tag)
        highs, lows = self.high, self.low
        at = bisect_left(highs, high)
        if at == len(highs) or highs[at] != high:
            return -1
        if lows[at] != low:
            # Keys that were made to be alike, and then in order of the other word.
            end = bisect_right(highs, high, at)
            at = bisect_left(lows, low, at, end)
            if at == end or lows[at] != low:
                return -1
        return at

    def get(self, tag: bytes) -> tuple[int, int]:
        held = self.head.get(tag)
        if held is not None:
            return held
        at = self.find(tag)
        mask = 0 if at < 0 else self.mask(at)
        return (mask, self.times[at]) if mask else _NOTHING

    def mask(self, at: int) -> int:
        return int.from_bytes(self.masks[at * self.width : (at + 1) * self.width], "little")

    def set(self, tag: bytes, mask: int, time: int) -> int:
        """Set an entry, or remove it with mask 0; returns by how many there are more now."""
        waits = tag in self.head
        at = -1 if waits else self.find(tag)
        if at >= 0:
            more = self._write(at, mask, time)
            if self.dead * 4 > len(self.high):
                self.settle()
            return more
        if not mask:
            self.head.pop(tag, None)
            return -waits
        self.head[tag] = (mask, time)
        self._settle_if_due()
        return not waits

    def _write(self, at: int, mask: int, time: int) -> int:
        more = bool(mask) - bool(self.mask(at))
        self.dead -= more
        self.times[at] = time
        self.masks[at * self.width : (at + 1) * self.width] = mask.to_bytes(self.width, "little")
        return more

    def _settle_if_due(self) -> None:
        if len(self.head) > max(HEAD_MIN, len(self.high) // self._share):
            self.settle()

    def widen(self, width: int) -> None:
        """Make room for wider masks."""
        if self.width < width:
            high, low, masks, times = self.columns
            self._put(high, low, widened(masks, width), times)

    def settle(self) -> None:
        """Take what waits into the columns, and the dead out of them."""
        if self.dead:
            live = self.columns[2].any(axis=1)
            high, low, masks, times = self.columns
            self._put(high[live], low[live], masks[live], times[live])
            self.dead = 0
        if not self.head:
            return
        words = np.frombuffer(b"".join(self.head), dtype=">u8").astype(np.uint64).reshape(-1, 2)
        order = np.lexsort((words[:, 1], words[:, 0]))
        masks = packed([mask for mask, _ in self.head.values()], self.width)
        times = np.array([time for _, time in self.head.values()], dtype=np.int64)
        self.head = {}
        self._insert(words[order, 0], words[order, 1], masks[order], times[order])

    def offer(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """Add `masks` to what these tags, sorted and unique, have; returns what they had.

        A time is the later one of both.
        """
        if len(high) <= FEW:
            return self._offer_each(high, low, masks, times)
        held = len(self.high)
        if self.head and len(high) * self._share > held:
            self.settle()
            held = len(self.high)
        before: Masks = np.zeros(masks.shape, dtype=np.uint8)
        where = np.searchsorted(self.columns[0], high)
        near = np.minimum(where, max(0, held - 1))
        alike = self.columns[0][near] == high if held else np.zeros(len(high), dtype=np.bool_)
        same = alike & (self.columns[1][near] == low) if held else alike
        if np.any(alike & ~same):
            return self._offer_each(high, low, masks, times)
        if same.any():
            before[same] = self._join(near[same], masks[same], times[same])
            if same.all():
                return before
            new = ~same
            high, low, masks, times = high[new], low[new], masks[new], times[new]
        else:
            new = ~same
        if self.head or len(high) * self._share < held:
            before[new] = self._wait(high, low, masks, times)
        else:
            if self.dead:
                self.settle()
            self._insert(high, low, masks, times)
        return before

    def _join(self, at: npt.NDArray[np.intp], masks: Masks, times: Longs) -> Masks:
        """Add to entries of the columns; returns what they had."""
        _, _, all_masks, all_times = self.columns
        before: Masks = all_masks[at]
        dead = ~before.any(axis=1)
        all_masks[at] = before | masks
        all_times[at] = np.where(dead, times, np.maximum(all_times[at], times))
        self.dead -= int(np.count_nonzero(dead))
        return before

    def _wait(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """Add to what waits; the columns have none of it. Returns what they had."""
        width, offered = masks.shape[1], masks.tobytes()
        before: list[int] = []
        for index, (tag, time) in enumerate(zip(_tags(high, low), times.tolist(), strict=True)):
            mask = int.from_bytes(offered[index * width : (index + 1) * width], "little")
            held, since = self.head.get(tag, _NOTHING)
            self.head[tag] = (held | mask, max(time, since))
            before.append(held)
        self._settle_if_due()
        return packed(before, width)

    def _offer_each(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """The same as `offer`, one by one: for few, or tags that were made to be alike."""
        width, offered = masks.shape[1], masks.tobytes()
        before: list[int] = []
        for index, (tag, time) in enumerate(zip(_tags(high, low), times.tolist(), strict=True)):
            mask = int.from_bytes(offered[index * width : (index + 1) * width], "little")
            at = -1 if tag in self.head else self.find(tag)
            if at >= 0:
                held = self.mask(at)
                self._write(at, held | mask, max(time, self.times[at]) if held else time)
            else:
                held, since = self.head.get(tag, _NOTHING)
                self.head[tag] = (held | mask, max(time, since))
            before.append(held)
        self._settle_if_due()
        return packed(before, width)

    def _insert(self, high: Words, low: Words, masks: Masks, times: Longs) -> None:
        """Merge sorted entries into columns that have none of them and no dead ones."""
        held: tuple[Column, ...] = self.columns
        where = np.searchsorted(held[0], high)
        near = np.minimum(where, max(0, len(held[0]) - 1))
        given: tuple[Column, ...] = (high, low, masks, times)
        if len(held[0]) and np.any(held[0][near] == high):
            # Keys that were made to be alike: their order is that of the second word.
            joined: list[Any] = [
                np.concatenate([before, added]) for before, added in zip(held, given, strict=True)
            ]
            order = np.lexsort((joined[1], joined[0]))
            self._put(*(column[order] for column in joined))
            return
        total = len(held[0]) + len(high)
        new = where + np.arange(len(high))
        old = np.ones(total, dtype=np.bool_)
        old[new] = False
        merged: list[Any] = []
        for before, added in zip(held, given, strict=True):
            column: Column = np.empty((total, *before.shape[1:]), dtype=before.dtype)
            column[old] = before
            column[new] = added
            merged.append(column)
        self._put(*merged)

    def entries(self) -> list[tuple[bytes, int]]:
        """Tag and mask of each that is not dead, now."""
        high, low, masks, _ = self.columns
        width, joined = self.width, masks.tobytes()
        values = [
            int.from_bytes(joined[at : at + width], "little") for at in range(0, len(joined), width)
        ]
        found = [(tag, mask) for tag, mask in zip(_tags(high, low), values, strict=True) if mask]
        return found + [(tag, mask) for tag, (mask, _) in self.head.items()]


class StoredChunks:
    """Key -> mask of ranks and time, both positive."""

    def __init__(self, world_size: int) -> None:
        self._width = (world_size + 7) // 8
        self._shards: list[_Shard | None] = [None] * SHARDS
        self._live = 0

    def __len__(self) -> int:
        return self._live

    @property
    def size_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(shard.size_bytes for shard in self._shards if shard is not None)

    def held(self, key: bytes) -> tuple[int, int]:
        """The mask of `key` and when the newest segment was written; zeros where nothing is."""
        shard = self._shards[_shard_of(key)]
        return _NOTHING if shard is None else shard.get(key[:TAG_BYTES])

    def get(self, key: bytes) -> int:
        """The mask of `key`, 0 where there is none."""
        return self.held(key)[0]

    def time(self, key: bytes) -> int:
        """When the newest segment of `key` was written; 0 where nothing is held."""
        return self.held(key)[1]

    def set(self, key: bytes, mask: int, time: int) -> None:
        """Set an entry, or remove it with mask 0."""
        shard = self._open(_shard_of(key), (mask.bit_length() + 7) // 8)
        self._live += shard.set(key[:TAG_BYTES], mask, max(1, time))

    def offer(self, high: Words, low: Words, masks: Masks, times: Longs) -> Masks:
        """Add masks, none of them 0, to the entries of these tags (`tags_of`, sorted and unique).

        Times are positive; an entry's is the latest. Returns the masks that they had before, in
        rows that may be wider than those given.
        """
        starts = np.searchsorted(high >> _SHARD_SHIFT, np.arange(SHARDS + 1, dtype=np.uint64))
        before: list[Masks] = []
        for number in np.flatnonzero(np.diff(starts)).tolist():
            part = slice(int(starts[number]), int(starts[number + 1]))
            shard = self._open(number, masks.shape[1])
            given = widened(masks[part], shard.width)
            found = shard.offer(high[part], low[part], given, times[part])
            before.append(found)
            self._live += len(found) - int(np.count_nonzero(found.any(axis=1)))
        return np.concatenate([widened(one, self._width) for one in before])

    def masks(self) -> Iterator[int]:
        """The mask of every entry, in no order."""
        for _, mask in self.names():
            yield mask

    def names(self) -> Iterator[tuple[bytes, int]]:
        """The first half of every key, and its mask, in no order.

        The table may change between two of them: what is there all the while is told once.
        """
        for number in range(SHARDS):
            shard = self._shards[number]
            if shard is not None:
                yield from shard.entries()

    def _open(self, number: int, width: int) -> _Shard:
        """A shard, made when it is first needed, that has masks of at least this width."""
        self._width = max(self._width, width)
        shard = self._shards[number]
        if shard is None:
            share = HEAD_SHARES[number % len(HEAD_SHARES)]
            shard = self._shards[number] = _Shard(self._width, share)
        shard.widen(width)
        return shard


FOREIGN_MAX: Final = 32
"""Segments of other cuts that a realm knows: those of 1, 2, 4, 8 and 16 ranks are 31."""

ANSWERS_MAX: Final = 4096


class SegmentSources:
    """What the bits of a realm's masks stand for, and what a mask can give each rank.

    A model is cut into segments by tensor and pipeline parallelism. Bit `r` of a mask below the
    world size is the segment of rank `r`; a bit above is a segment of another cut of the model that
    the catalog named. A rank's own segment is taken where the store has it. Else it is assembled
    from others that overlap it.

    Invariants: pure; a bit never changes what it stands for; answers depend on the mask only, so
    they are remembered, at most `ANSWERS_MAX` of them.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._own: list[Segment | None] = [None] * world_size
        self._foreign: list[Segment] = []
        self._full = (1 << world_size) - 1
        self._sources: dict[int, tuple[tuple[int, ...], ...]] = {}

    @property
    def known_mask(self) -> int:
        """Bits that stand for something."""
        return (1 << (self.world_size + len(self._foreign))) - 1

    def learn(self, rank: int, segment: Segment) -> None:
        """A rank's segment is known."""
        self._own[rank] = segment
        self._sources.clear()

    def learn_foreign(self, segments: Sequence[Segment]) -> None:
        """The segments of other cuts, by bit from `world_size` on; it only ever grows."""
        if len(segments) > len(self._foreign):
            self._foreign.extend(segments[len(self._foreign) : FOREIGN_MAX])
            self._sources.clear()

    def obtainable(self, mask: int) -> int:
        """Ranks whose segment can be had from the segments in `mask`, as bits."""
        own = mask & self._full
        if own == mask or own == self._full:
            return own
        return sum(1 << rank for rank, found in enumerate(self._answer(mask)) if found)

    def sources(self, mask: int, rank: int) -> tuple[int, ...]:
        """Bits of the segments to read for a rank's: itself, or what covers it; empty: none do."""
        return (rank,) if mask >> rank & 1 else self._answer(mask)[rank]

    def _answer(self, mask: int) -> tuple[tuple[int, ...], ...]:
        known = self._sources.get(mask)
        if known is None:
            if len(self._sources) >= ANSWERS_MAX:
                self._sources.clear()
            known = self._sources[mask] = tuple(
                self._cover(mask, rank) for rank in range(self.world_size)
            )
        return known

    def _cover(self, mask: int, rank: int) -> tuple[int, ...]:
        if mask >> rank & 1:
            return (rank,)
        target = self._own[rank]
        if target is None:
            return ()
        bits: dict[Segment, int] = {}
        for bit, segment in enumerate((*self._own, *self._foreign)):
            if segment is not None and mask >> bit & 1:
                bits.setdefault(segment, bit)
        found = cover(target, bits)
        return () if found is None else tuple(bits[segment] for segment in found)
