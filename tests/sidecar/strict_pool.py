"""A pool of slabs and an eviction order for the engine's tests, which refuse every misuse."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tiers.policy.key import Left

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tiers.policy.key import CacheKey


class SlabSlots:
    """A pool of slabs of `slab_slots` slots; a slab serves one class until it is empty."""

    def __init__(self, slabs: int, slab_slots: int) -> None:
        self.slab_slots = slab_slots
        self.slab_class: list[int | None] = [None] * slabs
        self.used: set[int] = set()
        self.freed: list[int] = []
        self.sealed: dict[int, tuple[int, int]] = {}
        """Slot to when it was sealed and when it was used last."""
        self.tags: dict[int, bytes] = {}
        self._moment = 0
        self._classes: set[int] = set()

    def allocate(self, slot_bytes: int) -> int | None:
        assert slot_bytes > 0, "the size of a rank that is not known"
        self._classes.add(slot_bytes)
        for wanted in (slot_bytes, None):
            for slab, slab_class in enumerate(self.slab_class):
                if slab_class != wanted:
                    continue
                for slot in range(slab * self.slab_slots, (slab + 1) * self.slab_slots):
                    if slot not in self.used:
                        self.slab_class[slab] = slot_bytes
                        self.used.add(slot)
                        return slot
        return None

    def _next(self) -> int:
        self._moment += 1
        return self._moment

    def set_tag(self, offset: int, tag: bytes) -> None:
        assert offset in self.used
        assert offset not in self.sealed
        self.tags[offset] = tag

    def seal(self, offset: int) -> None:
        assert offset in self.used
        assert offset not in self.sealed
        moment = self._next()
        self.sealed[offset] = (moment, moment)

    def unseal(self, offset: int) -> None:
        assert offset in self.used
        self.sealed.pop(offset, None)

    def touch(self, offset: int, uses: int) -> None:
        self.sealed[offset] = (self.sealed[offset][0], self._next())
        assert 0 < uses < 16
        tag = self.tags.get(offset, bytes(16))
        self.tags[offset] = tag[:-1] + bytes([tag[-1] & 0x0F | uses << 4])

    def free(self, offset: int) -> None:
        self.sealed.pop(offset, None)
        self.tags.pop(offset, None)
        self.used.remove(offset)
        self.freed.append(offset)
        slab = offset // self.slab_slots
        if not any(slot // self.slab_slots == slab for slot in self.used):
            self.slab_class[slab] = None

    def class_of(self, offset: int) -> int:
        assert offset in self.used
        slab_class = self.slab_class[offset // self.slab_slots]
        assert slab_class is not None
        return slab_class

    @property
    def size_bytes(self) -> int:
        return len(self.slab_class) * self.slab_slots * max(self._classes, default=1)

    def free_bytes(self) -> int:
        return self.size_bytes - len(self.used) * max(self._classes, default=1)


class StrictLRU:
    """An eviction order that refuses every misuse."""

    by_last_use: bool = False

    def __init__(self) -> None:
        self.order: OrderedDict[CacheKey, CacheKey | None] = OrderedDict()
        self.refused: set[CacheKey] = set()
        """Not admitted."""

    def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
        assert num_tokens >= 0
        for key in keys:
            if key in self.order:
                self.order.move_to_end(key)

    def add(
        self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
    ) -> None:
        assert key not in self.order
        assert uses >= 0
        self.order[key] = parent
        if first:
            self.order.move_to_end(key, last=False)

    def remove(self, key: CacheKey, why: Left = Left.EVICTED) -> None:
        assert isinstance(why, Left)
        del self.order[key]

    def admits(self, key: CacheKey, parent: CacheKey | None) -> bool:
        assert key not in self.order
        assert parent != key
        return key not in self.refused

    def victims(self) -> Iterator[CacheKey]:
        for key in list(self.order):
            if key in self.order:
                yield key
