"""What an earlier life of the sidecar left: unclaimed slots, and chunks that the store may lack.

At the start there are no realms: they come with the engines that attach. Until a worker says what
its rank's chunks look like, a restored slot is kept here, by what it holds. Owns that and the order
in which slots are given up: whoever needs room takes it from here first, since nobody may ever come
for them. Owns the interface to the host pool (`SlotAllocator`; `sidecar/data/pool_slots.py` is the
pool behind it, tests have their own). Does not own slots or the ledger (`host_tier.py`).

Invariant: a slot is here, or was claimed, or was given up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.commands import RestoredSlot
    from sidecar.core.directory import Chunk
    from tiers.kv.layout import ChunkLayout


class SlotAllocator(Protocol):
    """What the engine needs of the host pool."""

    def slot_class(self, layout: ChunkLayout) -> int:
        """The class of slots that hold one segment of this geometry."""
        ...

    def allocate(self, class_id: int) -> int | None:
        """A free slot's offset, or None."""
        ...

    def set_tag(self, offset: int, tag: bytes) -> None:
        """Note what a slot is that was just allocated; it comes back with the slot."""
        ...

    def seal(self, offset: int) -> None:
        """A slot is whole: it may come back after a restart."""
        ...

    def unseal(self, offset: int) -> None:
        """A slot is not to come back, though it is not free yet."""
        ...

    def touch(self, offset: int) -> None:
        """A sealed slot was used."""
        ...

    def free(self, offset: int) -> None:
        """Give a slot back."""
        ...

    def class_of(self, offset: int) -> int:
        """The class of an allocated slot."""
        ...

    def slot_bytes(self, class_id: int) -> int:
        """Bytes of one slot of a class."""
        ...

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots together."""
        ...

    def free_bytes(self) -> int:
        """Bytes of the slots that could be allocated now."""
        ...


class RestoredSlots:
    """Unclaimed slots."""

    def __init__(self, slots: SlotAllocator) -> None:
        self._slots = slots
        # Each in the order of last use.
        self._by_kind: dict[tuple[bytes, ChunkLayout], OrderedDict[int, RestoredSlot]] = {}
        self._by_class: dict[int, OrderedDict[int, RestoredSlot]] = {}
        # Each slot's class, in the order of places: slabs get empty one after the other.
        self._by_place: OrderedDict[int, int] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._by_place)

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_place)

    def holds(self, found: RestoredSlot) -> bool:
        """Whether a slot was neither claimed nor given up."""
        return found.slot in self._by_place

    def restore(self, found: tuple[RestoredSlot, ...]) -> None:
        """Take slots in, once and for all."""
        assert not self._by_place, "there is one restart in a life"
        for one in sorted(found, key=lambda one: one.used):
            class_id = self._slots.class_of(one.slot)
            self._by_kind.setdefault((one.namespace, one.geometry), OrderedDict())[one.slot] = one
            self._by_class.setdefault(class_id, OrderedDict())[one.slot] = one
            self.num_bytes += self._slots.slot_bytes(class_id)
        for slot in sorted(one.slot for one in found):
            self._by_place[slot] = self._slots.class_of(slot)

    def matching(self, namespace: bytes, layout: ChunkLayout, class_id: int) -> list[RestoredSlot]:
        """Slots for a rank: of its namespace and geometry, and stored by a realm of its chunk size.

        The class tells the chunk size: a slot is as large as a full chunk, whatever is in it. Keys
        would be right for another chunk size too, but hardly any would ever be asked for.
        """
        return [
            one
            for one in self._by_kind.get((namespace, layout.geometry), {}).values()
            if one.num_blocks <= layout.blocks_per_chunk and self._by_place[one.slot] == class_id
        ]

    def claim(self, found: RestoredSlot) -> None:
        """Take one slot out."""
        class_id = self._by_place.pop(found.slot)
        self.num_bytes -= self._slots.slot_bytes(class_id)
        del self._by_class[class_id][found.slot]
        del self._by_kind[found.namespace, found.geometry][found.slot]

    def give_up(self, class_id: int) -> int | None:
        """Take the slot out that helps to get one of `class_id`; None if there is none at all.

        Of the class, the one that was not used for longest; else the first in the pool, for a slab
        of another class is of use only when all of it is free.
        """
        found = next(iter(self._by_class.get(class_id, {}).values()), None)
        if found is None and self._by_place:
            slot, other = next(iter(self._by_place.items()))
            found = self._by_class[other][slot]
        if found is None:
            return None
        self.claim(found)
        return found.slot


class Backfill:
    """Restored chunks that the store may lack, in the order of offering; the newest is taken first.

    They are written when there is nothing else to write. What the store holds is known from its
    catalog only, so a chunk waits here until the catalog of its realm was read. A drain does not
    wait for what is offered, and a chunk that is evicted before its turn was promised to nobody.
    """

    def __init__(self) -> None:
        self._caught_up: set[int] = set()
        # Of realms whose catalog was not read yet, and of the others.
        self._unread: dict[int, dict[Chunk, None]] = {}
        self._ready: dict[Chunk, None] = {}

    def add(self, chunk: Chunk) -> None:
        """Offer a chunk."""
        if chunk.realm.realm_id in self._caught_up:
            self._ready[chunk] = None
        else:
            self._unread.setdefault(chunk.realm.realm_id, {})[chunk] = None

    def caught_up(self, realm_id: int) -> None:
        """The catalog of a realm was read to its end: what it does not name, the store lacks."""
        self._caught_up.add(realm_id)
        self._ready.update(self._unread.pop(realm_id, {}))

    def forget_realm(self, realm_id: int) -> None:
        """A realm without chunks is forgotten."""
        self._caught_up.discard(realm_id)
        self._unread.pop(realm_id, None)

    def take(self) -> Chunk | None:
        """The newest chunk that can be judged; it is no longer offered."""
        return self._ready.popitem()[0] if self._ready else None

    def forget(self, chunk: Chunk) -> None:
        """A chunk left the host tier."""
        self._ready.pop(chunk, None)
        self._unread.get(chunk.realm.realm_id, {}).pop(chunk, None)

    def withdraw(self) -> None:
        """Take all of them back."""
        self._unread.clear()
        self._ready.clear()
