"""Slots that an earlier life of the sidecar sealed, and that no realm has claimed yet.

At the start there are no realms: they come with the engines that attach. Until a worker says what
its rank's chunks look like, a restored slot is kept here, by what it holds. Owns that and the order
in which slots are given up: whoever needs room takes it from here first, since nobody may ever come
for them. Does not own slots or the ledger (`host_tier.py`).

Invariant: a slot is here, or was claimed, or was given up.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.core.commands import RestoredSlot
    from tiers.kv.layout import ChunkLayout


class Inventory:
    """Unclaimed slots. `class_of` tells a slot's class, `slot_bytes` the size of a class' slots."""

    def __init__(self, class_of: Callable[[int], int], slot_bytes: Callable[[int], int]) -> None:
        self._class_of = class_of
        self._slot_bytes = slot_bytes
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
            class_id = self._class_of(one.slot)
            self._by_kind.setdefault((one.namespace, one.geometry), OrderedDict())[one.slot] = one
            self._by_class.setdefault(class_id, OrderedDict())[one.slot] = one
            self.num_bytes += self._slot_bytes(class_id)
        for slot in sorted(one.slot for one in found):
            self._by_place[slot] = self._class_of(slot)

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
        self.num_bytes -= self._slot_bytes(class_id)
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
