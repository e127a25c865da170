"""The engine's `SlotAllocator` over a `HostPool`: slots by chunk geometry instead of by size.

Owns the map from a rank's chunk geometry to the pool's slot class. Does not own slots (the pool),
or what is in them (the engine). Invariant: a geometry is registered, and the pool has accepted its
slot size, before the engine hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from tiers.kv.layout import ChunkLayout
    from tiers.pool.host_pool import HostPool


class PoolSlots:
    """See `SlotAllocator`. All but the slot class of a geometry is the pool's own."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        self._classes: dict[ChunkLayout, int] = {}
        self.allocate = pool.allocate
        self.set_tag = pool.set_tag
        self.seal = pool.seal
        self.unseal = pool.unseal
        self.touch = pool.touch
        self.free = pool.free
        self.class_of = pool.class_of
        self.slot_bytes = pool.slot_bytes

    def register(self, layout: ChunkLayout, slot_bytes: int) -> None:
        """Register the slot size of a geometry. Raises `PoolError` where no slot of it fits."""
        if layout not in self._classes:
            self._classes[layout] = self._pool.register_class(slot_bytes)

    def keep(self, layouts: Collection[ChunkLayout]) -> None:
        """Forget all other geometries, and slot sizes without a slot in use."""
        for layout in [layout for layout in self._classes if layout not in layouts]:
            del self._classes[layout]
        self._pool.keep_classes(set(self._classes.values()))

    def slot_class(self, layout: ChunkLayout) -> int:
        """See `SlotAllocator.slot_class`."""
        return self._classes[layout]

    @property
    def size_bytes(self) -> int:
        """See `SlotAllocator.size_bytes`."""
        return self._pool.size_bytes

    def free_bytes(self) -> int:
        """See `SlotAllocator.free_bytes`."""
        return self._pool.stats().free_bytes
