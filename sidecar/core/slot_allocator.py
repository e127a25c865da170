"""What decides asks the host pool for, and no more.

Owns the interface alone: `sidecar/data/pool_slots.py` is the pool behind it, tests have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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
