"""Books of the host pool: slabs, slots of one size, and the free ranges between slabs.

Owns who has which range, in terms of numbers. Does not own memory, files or records
(`host_pool.py`, `table.py`). Invariants: ranges never overlap; `take` and `give` of a slot are
O(1), those of an extent search the list of free ones.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from dataclasses import dataclass


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
    """Where the pool's memory is: in allocated slots, in slabs, in neither.

    `slab_bytes` are those of all slabs together.
    """

    size_bytes: int
    used_bytes: int
    slab_bytes: int
    classes: tuple[ClassStats, ...]

    @property
    def free_bytes(self) -> int:
        """Bytes in no allocated slot; of each free range less than a slot is of no use."""
        return self.size_bytes - self.used_bytes


class Slab:
    """A run of equal slots. Slots that were never used are counted, not listed.

    `entry` is its place in the pool's table, `first_record` the record of its first slot there.
    """

    __slots__ = ("base", "entry", "first_record", "freed", "fresh", "slot_class", "slots", "used")

    def __init__(
        self, base: int, slots: int, slot_class: SlotClass, entry: int, first_record: int
    ) -> None:
        self.base = base
        self.slots = slots
        self.slot_class = slot_class
        self.entry = entry
        self.first_record = first_record
        self.used = 0
        self.fresh = 0
        self.freed: list[int] = []

    @property
    def size_bytes(self) -> int:
        """All of its slots."""
        return self.slots * self.slot_class.slot_bytes

    def take(self) -> int:
        """A free slot's offset; there must be one."""
        self.used += 1
        if self.freed:
            return self.freed.pop()
        self.fresh += 1
        return self.base + (self.fresh - 1) * self.slot_class.slot_bytes

    def record_of(self, offset: int) -> int:
        """Number of the record of one of its slots."""
        return self.first_record + (offset - self.base) // self.slot_class.slot_bytes


class SlotClass:
    """Slots of one size; `open` are its slabs with room, in the order in which they got it."""

    __slots__ = ("class_id", "open", "slabs", "slot_bytes", "slots", "used")

    def __init__(self, class_id: int, slot_bytes: int) -> None:
        self.class_id = class_id
        self.slot_bytes = slot_bytes
        # Ordered: its first is found in O(1), a dict steps over what was deleted in front of it.
        self.open: OrderedDict[int, Slab] = OrderedDict()
        self.slabs = 0
        self.slots = 0
        self.used = 0

    def add(self, slab: Slab) -> None:
        """Take a slab in."""
        if slab.used < slab.slots:
            self.open[slab.base] = slab
        self.slabs += 1
        self.slots += slab.slots
        self.used += slab.used

    def remove(self, slab: Slab) -> None:
        """Let an empty slab go."""
        self.open.pop(slab.base, None)
        self.slabs -= 1
        self.slots -= slab.slots

    def stats(self) -> ClassStats:
        """What it has now."""
        return ClassStats(
            self.class_id, self.slot_bytes, self.slabs, self.used, self.slots - self.used
        )


class Extents:
    """Free ranges, sorted, with neighbours joined."""

    def __init__(self, size: int) -> None:
        self.starts = [0]
        self.sizes = [size]

    def take(self, unit: int, units_max: int) -> tuple[int, int] | None:
        """The first range with room for `units_max` units, or else the longest one's units."""
        best, best_units = -1, 0
        for place, size in enumerate(self.sizes):
            units = min(size // unit, units_max)
            if units > best_units:
                best, best_units = place, units
                if units == units_max:
                    break
        if not best_units:
            return None
        start, taken = self.starts[best], unit * best_units
        if taken == self.sizes[best]:
            del self.starts[best], self.sizes[best]
        else:
            self.starts[best] += taken
            self.sizes[best] -= taken
        return start, best_units

    def give(self, start: int, size: int) -> None:
        """Put a range back."""
        place = bisect.bisect_left(self.starts, start)
        if place < len(self.starts) and start + size == self.starts[place]:
            size += self.sizes[place]
            del self.starts[place], self.sizes[place]
        if place and self.starts[place - 1] + self.sizes[place - 1] == start:
            self.sizes[place - 1] += size
        else:
            self.starts.insert(place, start)
            self.sizes.insert(place, size)

    def claim(self, taken: list[tuple[int, int]]) -> bool:
        """Take these (start, size) out of a whole range. False where two overlap or one is out."""
        end = self.starts[0] + self.sizes[0]
        free: list[tuple[int, int]] = []
        cursor = self.starts[0]
        for start, size in sorted(taken):
            if start < cursor or size <= 0 or start + size > end:
                return False
            if start > cursor:
                free.append((cursor, start - cursor))
            cursor = start + size
        if cursor < end:
            free.append((cursor, end - cursor))
        self.starts = [start for start, _ in free]
        self.sizes = [size for _, size in free]
        return True
