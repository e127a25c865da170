"""Pins: which chunks each session protects from eviction, and how much memory that is.

A session's chunks count once, however often it pins them. Each session is limited to its share of
the memory that may be pinned: otherwise one client could pin everything, and leave the others no
slot to evict. Does not own why a chunk is pinned, nor until when (`leases.py`, `lookups.py`,
`request_pins.py`).

Invariant: `chunk.pins` is the number of pins that are listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sidecar.core.directory import Chunk, Directory
    from sidecar.core.fair_share import Share


@dataclass(slots=True)
class PinnedChunk:
    """One session's pins of one chunk."""

    size_bytes: int
    """When it was pinned first: more ranks may become known later."""
    count: int = 0


class Pins:
    """All pins."""

    def __init__(self, directory: Directory, share: Share) -> None:
        self._directory = directory
        self._share = share
        self.by_session: dict[int, dict[Chunk, PinnedChunk]] = {}

    def fitting(self, session_id: int, chunks: Sequence[Chunk]) -> int:
        """How many of `chunks`, from the first on, a session may pin."""
        own = self.by_session.get(session_id, {})
        wanted_bytes = 0
        for number, chunk in enumerate(chunks):
            if chunk not in own:
                wanted_bytes += chunk.realm.chunk_bytes
                if not self._share.fits(session_id, wanted_bytes):
                    return number
        return len(chunks)

    def pin(self, session_id: int, chunks: Sequence[Chunk]) -> None:
        """Pin chunks that fit."""
        if not chunks:
            return
        own = self.by_session.setdefault(session_id, {})
        for chunk in chunks:
            pinned = own.get(chunk)
            if pinned is None:
                pinned = own[chunk] = PinnedChunk(chunk.realm.chunk_bytes)
                self._share.take(session_id, pinned.size_bytes)
            pinned.count += 1
            chunk.pins += 1

    def unpin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Remove one pin of each chunk."""
        for chunk in chunks:
            own = self.by_session[session_id]
            pinned = own[chunk]
            pinned.count -= 1
            if not pinned.count:
                del own[chunk]
                self._share.give(session_id, pinned.size_bytes)
                if not own:
                    del self.by_session[session_id]
            self._directory.unpin(chunk)
