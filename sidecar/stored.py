"""What the store holds, for one realm, in some 40 bytes per chunk.

Owns one entry per chunk: 16 bytes of its key, the mask of ranks whose segment is in the store,
and when the newest of them was written. Does not own what an entry means to anybody.

Open addressing over numpy columns, in 256 tables by a byte of the key, so that growing one takes
milliseconds however many chunks there are. Keys are sha256 values, so their bytes are spread as
they are; half of one tells two chunks apart (as in the shared index), and a pair that it does not
tell apart costs a read that is refused by its checks.

Invariants: pure, no randomness; an entry is found while its table has at most `PROBES_MAX` other
entries before it. Keys made to collide are refused and counted rather than let it grow for ever.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARDS: Final = 256
SLOTS_FIRST: Final = 16
PROBES_MAX: Final = 256
_SHARD_BYTE: Final = 16
_TAG: Final = struct.Struct("<QQ")
_LOAD: Final = (3, 4)
_GROWTH: Final = (8, 5)


class _Shard:
    """One table. A slot is free while its time is 0, and dead while its mask is."""

    __slots__ = ("_mask_bytes", "high", "live", "low", "masks", "slots", "times", "used")

    def __init__(self, slots: int, mask_bytes: int) -> None:
        self.slots = slots
        self._mask_bytes = mask_bytes
        self.live = 0
        self.used = 0
        # Item access through a memoryview costs a third of that through a numpy array.
        self.low = np.zeros(slots, dtype=np.uint64).data
        self.high = np.zeros(slots, dtype=np.uint64).data
        self.times = np.zeros(slots, dtype=np.int64).data
        self.masks = np.zeros(slots * mask_bytes, dtype=np.uint8).data

    @property
    def size_bytes(self) -> int:
        return self.slots * (24 + self._mask_bytes)

    def find(self, low: int, high: int) -> int:
        """The slot of an entry, or the free one where it would go, or -1."""
        slot = low % self.slots
        lows, highs, times = self.low, self.high, self.times
        for _ in range(min(PROBES_MAX, self.slots)):
            if not times[slot] or (lows[slot] == low and highs[slot] == high):
                return slot
            slot += 1
            if slot == self.slots:
                slot = 0
        return -1

    def mask(self, slot: int) -> int:
        width = self._mask_bytes
        return int.from_bytes(self.masks[slot * width : slot * width + width], "little")

    def put(self, slot: int, low: int, high: int, mask: int, time: int) -> None:
        width = self._mask_bytes
        if not self.times[slot]:
            self.used += 1
            self.low[slot] = low
            self.high[slot] = high
        self.live += bool(mask) - bool(self.mask(slot))
        self.times[slot] = time
        self.masks[slot * width : slot * width + width] = mask.to_bytes(width, "little")

    def entries(self) -> Iterator[tuple[int, int, int, int]]:
        for slot in range(self.slots):
            mask = self.mask(slot) if self.times[slot] else 0
            if mask:
                yield self.low[slot], self.high[slot], mask, self.times[slot]


class StoredChunks:
    """Key -> mask of ranks and time, both positive."""

    def __init__(self, world_size: int) -> None:
        self._mask_bytes = (world_size + 7) // 8
        self._shards = [_Shard(SLOTS_FIRST, self._mask_bytes) for _ in range(SHARDS)]
        self._live = 0
        self.refused = 0
        """Entries that found no place among keys that collide."""

    def __len__(self) -> int:
        return self._live

    @property
    def size_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(shard.size_bytes for shard in self._shards)

    def get(self, key: bytes) -> int:
        """The mask of `key`, 0 where there is none."""
        low, high = _TAG.unpack_from(key)
        shard = self._shards[key[_SHARD_BYTE]]
        slot = shard.find(low, high)
        return shard.mask(slot) if slot >= 0 and shard.times[slot] else 0

    def time(self, key: bytes) -> int:
        """When the newest segment of `key` was written; 0 where nothing is held."""
        low, high = _TAG.unpack_from(key)
        shard = self._shards[key[_SHARD_BYTE]]
        slot = shard.find(low, high)
        return shard.times[slot] if slot >= 0 and shard.mask(slot) else 0

    def set(self, key: bytes, mask: int, time: int) -> bool:
        """Set an entry, or remove it with mask 0. False where it was refused."""
        low, high = _TAG.unpack_from(key)
        number = key[_SHARD_BYTE]
        shard = self._shards[number]
        slot = shard.find(low, high)
        if slot < 0 or not shard.times[slot]:
            if not mask:
                return True
            if (shard.used + 1) * _LOAD[1] > shard.slots * _LOAD[0]:
                shard = self._shards[number] = self._grown(shard)
                slot = shard.find(low, high)
            if slot < 0:
                self.refused += 1
                return False
        before = shard.live
        shard.put(slot, low, high, mask, max(1, time))
        self._live += shard.live - before
        return True

    def masks(self) -> Iterator[int]:
        """The mask of every entry, in no order."""
        for shard in self._shards:
            if shard.live:
                for _, _, mask, _ in shard.entries():
                    yield mask

    def names(self) -> Iterator[tuple[bytes, int]]:
        """The first half of every key, and its mask, in no order.

        The table may change between two of them: what is there all the while is told once.
        """
        for number in range(SHARDS):
            for low, high, mask, _ in list(self._shards[number].entries()):
                yield _TAG.pack(low, high), mask

    def _grown(self, shard: _Shard) -> _Shard:
        """A copy without dead entries and with room."""
        room = max(SLOTS_FIRST, shard.live * _GROWTH[0] // _GROWTH[1] * _LOAD[1] // _LOAD[0] + 4)
        larger = _Shard(room, self._mask_bytes)
        for low, high, mask, time in shard.entries():
            slot = larger.find(low, high)
            if slot < 0:
                self._live -= 1
                self.refused += 1
            else:
                larger.put(slot, low, high, mask, time)
        return larger
