"""Restored chunks that the store may lack: written when there is nothing else to write.

Owns which they are. What the store holds is known from its catalog only, so a chunk waits here
until the catalog of its realm was read. Does not own the queue of writes (`writes.py`): a drain
does not wait for what is offered, and what is evicted before its turn was promised to nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sidecar.core.directory import Chunk


class Offers:
    """Chunks in the order in which they were offered; the newest is taken first."""

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
