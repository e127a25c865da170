"""Slots that an earlier run sealed, until they are claimed.

A restored slot stays here until a worker attaches whose namespace and geometry it has, or until its
memory is needed. Owns these slots, and the interface to the host pool (`SlotAllocator`, implemented
by `tiers/pool/host_pool.py`). Does not own the slots of chunks (`host_tier.py`).
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sidecar.core.commands import RestoredSlot
from tiers.kv.layout import ChunkLayout


class SlotAllocator(Protocol):
    """What the engine needs of the host pool.

    Slots are named by their byte offset, and a class of slots by their size in bytes. The pool has
    accepted each size before the engine hears of it.
    """

    def allocate(self, slot_bytes: int) -> int | None:
        """Allocate a slot of this class; None if none is free."""
        ...

    def set_tag(self, offset: int, tag: bytes) -> None:
        """Set the tag of a slot that was just allocated; it returns with the slot."""

    def seal(self, offset: int) -> None:
        """Mark a slot as complete: it returns after a restart."""

    def unseal(self, offset: int) -> None:
        """Mark a slot as not to return, though it is not free yet."""

    def touch(self, offset: int, uses: int) -> None:
        """Note the use of a sealed slot, which now had `uses` of them, up to 15."""

    def free(self, offset: int) -> None:
        """Free a slot."""

    def class_of(self, offset: int) -> int:
        """The class of an allocated slot."""
        ...

    @property
    def size_bytes(self) -> int:
        """Size of all slots together."""
        ...

    def free_bytes(self) -> int:
        """Size of the free slots together."""
        ...


class Moment(NamedTuple):
    """When a restored slot was sealed, or was last used after that."""

    at: int
    was_use: bool
    restored: RestoredSlot


class RestoredSlots:
    """Unclaimed slots."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        self._left = Counter[tuple[bytes, ChunkLayout]]()
        self._history = defaultdict[tuple[bytes, ChunkLayout], list[Moment]](list)
        # In the order of last use.
        self._by_class = defaultdict[int, OrderedDict[int, RestoredSlot]](OrderedDict)
        # The class of each slot, by offset: slabs become empty one after the other.
        self.by_offset: OrderedDict[int, int] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self.by_offset)

    def __contains__(self, restored: RestoredSlot) -> bool:
        return restored.slot in self.by_offset

    def restore(self, restored: tuple[RestoredSlot, ...]) -> None:
        """Add all slots, once, before any client can attach: it sorts them."""
        assert not self.by_offset, "called twice"
        for one in sorted(restored, key=lambda one: one.used):
            slot_bytes = self._slots.class_of(one.slot)
            kind = one.namespace, one.geometry
            self._left[kind] += 1
            self._history[kind].append(Moment(one.sealed, False, one))
            if one.used > one.sealed:
                self._history[kind].append(Moment(one.used, True, one))
            self._by_class[slot_bytes][one.slot] = one
            self.num_bytes += slot_bytes
        for history in self._history.values():
            history.sort(key=lambda moment: moment[:2])
        for slot in sorted(one.slot for one in restored):
            self.by_offset[slot] = self._slots.class_of(slot)

    def history(self, namespace: bytes, layout: ChunkLayout) -> Sequence[Moment]:
        """The stores and uses of this namespace and geometry, oldest first, as they were restored.

        Which slots of these are still there, and are of use, is what `fits` says.
        """
        return self._history.get((namespace, layout.geometry), ())

    def fits(self, restored: RestoredSlot, layout: ChunkLayout, slot_bytes: int) -> bool:
        """Whether a slot is unclaimed, and was stored with the same chunk size.

        The class implies the chunk size, because a slot always has the size of a full chunk. Keys
        of another chunk size would be valid, but almost none would ever be looked up.
        """
        same_class = self.by_offset.get(restored.slot) == slot_bytes
        return same_class and restored.num_blocks <= layout.blocks_per_chunk

    def claim(self, restored: RestoredSlot) -> None:
        """Remove a slot."""
        slot_bytes = self.by_offset.pop(restored.slot)
        self.num_bytes -= slot_bytes
        del self._by_class[slot_bytes][restored.slot]
        kind = restored.namespace, restored.geometry
        self._left[kind] -= 1
        if not self._left[kind]:
            del self._left[kind], self._history[kind]

    def give_up(self, slot_bytes: int) -> int | None:
        """Remove a slot to make room for one of `slot_bytes`; None if there is none.

        The least recently used of the class; else the first in the pool, because a slab of another
        class is of use only when it is entirely free.
        """
        if not self.by_offset:
            return None
        slot = next(iter(self._by_class.get(slot_bytes, ())), next(iter(self.by_offset)))
        self.claim(self._by_class[self.by_offset[slot]][slot])
        return slot
