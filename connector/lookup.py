"""Reading the shared index for one request: how far a hit reaches, and under which keys.

Owns the arithmetic between tokens, chunks and pieces of a chunk. Sends nothing and decides
nothing; every method costs microseconds and reads the index as it is at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tiers.index import FLAG_HOST, FLAG_STORE, tags_of

if TYPE_CHECKING:
    from connector.client import Session
    from connector.requests import Geometry, RequestState


@dataclass(slots=True)
class Hit:
    """The external run beyond the engine's own hit, as the index shows it now."""

    end_tokens: int
    wanted: list[bytes]
    """Keys right behind the run that only the store holds."""
    first_wanted_tokens: int
    """Where the first of them begins."""
    wanted_tokens: int
    """Where the run would end with them."""


class HitFinder:
    """Looks requests up in the index of a session."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def hit(self, state: RequestState, session: Session, local_tokens: int) -> Hit | None:
        """The loadable run that begins in the chunk where `local_tokens` ends."""
        index = session.index
        if index is None:
            return None
        geometry = self._geometry
        keys = state.chain.keys
        first = local_tokens // geometry.chunk_tokens
        flags = index.lookup(self._tags(state, session)[first:])
        last = first + _leading(flags & FLAG_HOST)
        blocks, _ = self._partial(state, session, last, FLAG_HOST)
        end_tokens = last * geometry.chunk_tokens + blocks * geometry.block_tokens
        reach = last + _leading(flags[last - first :])
        wanted = keys[last:reach]
        wanted_tokens = reach * geometry.chunk_tokens
        tail_blocks, tail_key = self._partial(state, session, reach, FLAG_HOST | FLAG_STORE)
        if tail_key is not None and (wanted or tail_blocks > blocks):
            wanted = [*wanted, tail_key]
            wanted_tokens += tail_blocks * geometry.block_tokens
        first_wanted_tokens = last * geometry.chunk_tokens
        return Hit(max(end_tokens, local_tokens), wanted, first_wanted_tokens, wanted_tokens)

    def _partial(
        self, state: RequestState, session: Session, index: int, tiers: int
    ) -> tuple[int, bytes | None]:
        """The longest piece of chunk `index` that one of `tiers` holds under a key of its own."""
        assert session.index is not None
        blocks = min(state.chain.partial_blocks(index), self._geometry.blocks_per_chunk - 1)
        if blocks < 1:
            return 0, None
        tags = state.partial_tags.get(index)
        if tags is None or len(tags) != blocks:
            keys = [state.chain.partial(index, count) for count in range(blocks, 0, -1)]
            tags = state.partial_tags[index] = tags_of(keys, session.index_salt)
        found = np.flatnonzero(session.index.lookup(tags) & tiers)
        if not len(found):
            return 0, None
        best = blocks - int(found[0])
        return best, state.chain.partial(index, best)

    def loaded_key(
        self, state: RequestState, session: Session | None, chunk: int, blocks: int
    ) -> bytes:
        """Key under which the first `blocks` blocks of a chunk were found."""
        keys = state.chain.keys
        if blocks == self._geometry.blocks_per_chunk:
            return keys[chunk]
        if session is not None and session.index is not None:
            # vLLM may take fewer tokens than were offered; then a piece that lies within a full
            # or longer partial chunk is loaded from there.
            if chunk < len(keys):
                tag = tags_of([keys[chunk]], session.index_salt)
                if session.index.lookup(tag)[0] & FLAG_HOST:
                    return keys[chunk]
            longest, key = self._partial(state, session, chunk, FLAG_HOST)
            if key is not None and longest >= blocks:
                return key
        return state.chain.partial(chunk, blocks)

    def _tags(self, state: RequestState, session: Session) -> npt.NDArray[np.uint64]:
        keys = state.chain.keys
        if state.tags_salt != session.index_salt:
            state.tags_salt = session.index_salt
            state.tags = tags_of(keys, session.index_salt)
            state.partial_tags.clear()
        elif len(state.tags) < len(keys):
            fresh = tags_of(keys[len(state.tags) :], session.index_salt)
            state.tags = np.concatenate([state.tags, fresh])
        return state.tags


def _leading(flags: npt.NDArray[np.integer[Any]]) -> int:
    """How many entries are non-zero before the first zero."""
    zeros = np.flatnonzero(flags == 0)
    return int(zeros[0]) if len(zeros) else len(flags)
