"""Pins: which session keeps which chunks from being evicted, and how much that is of each.

Owns the pins of leases and lookups, a session's chunks counted once however often it pins them,
and holds each session to its share of the memory that may be pinned: a client that looks up or
leases everything would otherwise leave no slot to evict for the others. Does not own why a chunk is
pinned, nor until when (`leases.py`, `lookups.py`).

Invariant: `chunk.pins` is the number of pins that are listed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from sidecar.core.directory import Chunk, Directory
    from sidecar.core.fair_share import Share


class _Held:
    """One session's pins of one chunk."""

    __slots__ = ("count", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.count = 0
        self.size_bytes = size_bytes


class Pins:
    """All pins, by session."""

    def __init__(
        self, directory: Directory, chunk_bytes: Callable[[Chunk], int], share: Share
    ) -> None:
        self._directory = directory
        self._chunk_bytes = chunk_bytes
        self._share = share
        self._held: dict[int, dict[Chunk, _Held]] = {}

    def fitting(self, session_id: int, chunks: Sequence[Chunk]) -> int:
        """How many of `chunks`, from the first on, a session may pin."""
        held = self._held.get(session_id, {})
        wanted_bytes = 0
        for number, chunk in enumerate(chunks):
            if chunk not in held:
                wanted_bytes += self._chunk_bytes(chunk)
                if not self._share.fits(session_id, wanted_bytes):
                    return number
        return len(chunks)

    def pin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Pin chunks that were found to fit."""
        held = self._held.setdefault(session_id, {})
        for chunk in chunks:
            one = held.get(chunk)
            if one is None:
                one = held[chunk] = _Held(self._chunk_bytes(chunk))
                self._share.take(session_id, one.size_bytes)
            one.count += 1
            self._directory.pin(chunk)
        if not held:
            del self._held[session_id]

    def unpin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Take one pin of each back."""
        for chunk in chunks:
            held = self._held[session_id]
            one = held[chunk]
            one.count -= 1
            if not one.count:
                del held[chunk]
                self._share.give(session_id, one.size_bytes)
                if not held:
                    del self._held[session_id]
            self._directory.unpin(chunk)

    def held_bytes(self) -> dict[int, int]:
        """What each session pins that pins anything."""
        return {
            session_id: sum(one.size_bytes for one in held.values())
            for session_id, held in self._held.items()
        }

    def counts(self) -> dict[Chunk, int]:
        """How often each pinned chunk is pinned."""
        counts: dict[Chunk, int] = {}
        for held in self._held.values():
            for chunk, one in held.items():
                counts[chunk] = counts.get(chunk, 0) + one.count
        return counts
