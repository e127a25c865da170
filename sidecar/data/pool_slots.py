"""Slots of the host pool as the engine asks for them: by geometry, not by size.

Owns the map from a rank's chunk geometry to the pool's slot class. Does not own slots (the pool)
nor what is in them (the engine). Invariant: a geometry is noted, and the pool has accepted its
slot size, before the engine hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tiers.kv.layout import ChunkLayout
    from tiers.pool.host_pool import HostPool


class PoolSlots:
    """The engine's `SlotAllocator` over a `HostPool`."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._classes: dict[ChunkLayout, int] = {}

    def note(self, layout: ChunkLayout, slot_bytes: int) -> None:
        """Register the slot size of a geometry. Raises `PoolError` where no slot of it fits."""
        if layout not in self._classes:
            self._classes[layout] = self._pool.register_class(slot_bytes)

    def keep(self, layouts: Collection[ChunkLayout]) -> None:
        """Forget all other geometries, and sizes of which nobody has a slot."""
        for layout in [layout for layout in self._classes if layout not in layouts]:
            del self._classes[layout]
        self._pool.keep_classes(set(self._classes.values()))

    def slot_class(self, layout: ChunkLayout) -> int:
        """See `SlotAllocator.slot_class`."""
        return self._classes[layout]

    def allocate(self, class_id: int) -> int | None:
        """See `SlotAllocator.allocate`."""
        return self._pool.allocate(class_id)

    def set_tag(self, offset: int, tag: bytes) -> None:
        """See `SlotAllocator.set_tag`."""
        self._pool.set_tag(offset, tag)

    def seal(self, offset: int) -> None:
        """See `SlotAllocator.seal`."""
        self._pool.seal(offset)

    def unseal(self, offset: int) -> None:
        """See `SlotAllocator.unseal`."""
        self._pool.unseal(offset)

    def touch(self, offset: int) -> None:
        """See `SlotAllocator.touch`."""
        self._pool.touch(offset)

    def free(self, offset: int) -> None:
        """See `SlotAllocator.free`."""
        self._pool.free(offset)

    def class_of(self, offset: int) -> int:
        """See `SlotAllocator.class_of`."""
        return self._pool.class_of(offset)

    def slot_bytes(self, class_id: int) -> int:
        """See `SlotAllocator.slot_bytes`."""
        return self._pool.slot_bytes(class_id)

    @property
    def size_bytes(self) -> int:
        """See `SlotAllocator.size_bytes`."""
        return self._pool.size_bytes

    def free_bytes(self) -> int:
        """See `SlotAllocator.free_bytes`."""
        return self._pool.stats().free_bytes
