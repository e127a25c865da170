"""Allocation of the host pool: slabs, slots of one size, and free ranges between slabs.

Owns the bookkeeping as numbers. Does not own memory, files or records (`host_pool.py`, `table.py`).
Invariants: ranges never overlap; `take` of a slot is O(1), `take` and `give` of an extent search
the list of free ones.
"""

import bisect
import itertools
from collections import OrderedDict
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Slots of one size. `slots_free` counts those in the slabs of the class."""

    slot_bytes: int
    slabs: int
    slots_used: int
    slots_free: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """How much of the pool is in allocated slots, and in slabs."""

    size_bytes: int
    used_bytes: int
    slab_bytes: int
    classes: tuple[ClassStats, ...]


@dataclass(slots=True, eq=False)
class Slab:
    """A run of equal slots. The first five fields are in the pool's file, too.

    `entry` is its index in the pool's table, `first_record` the record of its first slot there.
    `fresh` counts used slots before the first one never used.
    """

    entry: int
    base: int
    slot_bytes: int
    slots: int
    first_record: int
    used: int = 0
    fresh: int = 0
    freed: list[int] = field(default_factory=list[int])

    @property
    def size_bytes(self) -> int:
        """All of its slots."""
        return self.slots * self.slot_bytes

    def take(self) -> int:
        """The offset of a free slot; there must be one."""
        self.used += 1
        if self.freed:
            return self.freed.pop()
        self.fresh += 1
        return self.base + (self.fresh - 1) * self.slot_bytes

    def record_of(self, offset: int) -> int:
        """The record of one of its slots."""
        return self.first_record + (offset - self.base) // self.slot_bytes


@dataclass(slots=True, eq=False)
class SlotClass:
    """Slots of one size. `open` are its slabs with free slots, by the time that they got one."""

    slot_bytes: int
    # OrderedDict finds its first entry in O(1); a dict scans entries deleted before it.
    open: OrderedDict[int, Slab] = field(default_factory=OrderedDict[int, Slab])
    slabs: int = 0
    slots: int = 0
    used: int = 0

    def add(self, slab: Slab) -> None:
        """Add a slab."""
        if slab.used < slab.slots:
            self.open[slab.base] = slab
        self.slabs += 1
        self.slots += slab.slots
        self.used += slab.used

    def remove(self, slab: Slab) -> None:
        """Remove an empty slab."""
        self.open.pop(slab.base, None)
        self.slabs -= 1
        self.slots -= slab.slots

    def stats(self) -> ClassStats:
        """Its slots now."""
        return ClassStats(self.slot_bytes, self.slabs, self.used, self.slots - self.used)


class Extents:
    """Free ranges, sorted, with adjacent ones joined."""

    def __init__(self, size: int) -> None:
        self.starts = [0]
        self.sizes = [size]

    def take(self, unit: int, units_max: int) -> tuple[int, int] | None:
        """The first range with room for `units_max` units, else the units of the longest one."""
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

    def fits(self, unit: int) -> bool:
        """Whether a range has room for one unit."""
        return max(self.sizes, default=0) >= unit

    def give(self, start: int, size: int) -> None:
        """Return a range."""
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
        """Remove these (start, size) from one free range. False if they overlap or exceed it."""
        first = self.starts[0]
        edges = [(first, 0), *sorted(taken), (first + self.sizes[0], 0)]
        gaps = [
            (start + size, following - start - size)
            for (start, size), (following, _) in itertools.pairwise(edges)
        ]
        if any(size <= 0 for _, size in taken) or any(size < 0 for _, size in gaps):
            return False
        self.starts = [start for start, size in gaps if size]
        self.sizes = [size for _, size in gaps if size]
        return True
