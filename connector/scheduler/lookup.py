"""Reading the shared index for one request: how far a hit reaches, and under which keys.

Owns the arithmetic between tokens, chunks and pieces of a chunk, in every KV cache group; what a
hit needs of each is in `identity/groups.py`. Sends nothing and decides nothing; every method costs
microseconds and reads the index as it is at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from connector.identity.groups import aligned, longest_hit
from tiers.kv.index import FLAG_HOST, FLAG_STORE, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from connector.client import SidecarSession
    from connector.identity.groups import Geometry
    from connector.scheduler.requests import GroupState, RequestState

    Under = Callable[[bytes], bool]


class WantedChunks(NamedTuple):
    """A chunk that only the store holds, or that is behind one."""

    group: int
    key: bytes


@dataclass(slots=True)
class Hit:
    """The external run beyond the engine's own hit, as the index shows it now."""

    end_tokens: int
    wanted: list[WantedChunks]
    """What the run lacks in host memory to reach further, of each group in order."""
    first_wanted_tokens: int
    """Where the first of them begins."""
    wanted_tokens: int
    """Where the run would end with them."""


class HitFinder:
    """Looks requests up in the index of a session."""

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        self._geometries = geometries
        self._full = [one for one, each in enumerate(geometries) if each.attention.full]
        self._windowed = len(self._full) < len(geometries)
        self._recurrent = any(each.attention.recurrent for each in geometries)

    def hit(self, state: RequestState, session: SidecarSession, local_tokens: int) -> Hit | None:
        """The run that can be loaded behind `local_tokens`, and the one that the store adds."""
        index = session.index
        if index is None:
            return None
        found = [
            index.lookup(self._tags(group, session)[first:])
            for group, first in zip(state.groups, self._first_chunks(local_tokens), strict=True)
        ]
        host = [flags & np.uint8(FLAG_HOST) for flags in found]
        end_tokens = self._reach(state, session, local_tokens, host, FLAG_HOST)
        anywhere = FLAG_HOST | FLAG_STORE
        wanted_tokens = self._reach(state, session, local_tokens, found, anywhere)
        if wanted_tokens <= end_tokens:
            return Hit(end_tokens, [], end_tokens, end_tokens)
        wanted, first_wanted_tokens = self._wanted(state, session, local_tokens, wanted_tokens)
        return Hit(end_tokens, wanted, first_wanted_tokens, wanted_tokens)

    def found_tokens(
        self, state: RequestState, session: SidecarSession, end_tokens: int, under_way: Under
    ) -> int:
        """How much of so many tokens can be loaded, with what is on its way."""
        assert session.index is not None
        reached, ends = 0, end_tokens
        for group, geometry in zip(state.groups, self._geometries, strict=True):
            pieces = pieces_kept(geometry, end_tokens)
            if geometry.attention.recurrent:
                # The request that it is for is this prompt itself, or one that goes on: of a
                # prompt of whole blocks there need be no state behind the last one.
                del pieces[1:]
                if pieces:
                    ends = min(ends, (pieces[0].chunk + 1) * geometry.chunk_tokens)
            keys = [group.chain.key_of(piece.chunk, piece.end) for piece in pieces]
            held = session.index.lookup(tags_of(keys, session.index_salt)) if keys else ()
            there = 0
            while there < len(keys) and (held[there] or under_way(keys[there])):
                there += 1
            if group.group == (self._full[0] if self._full else 0):
                last = pieces[there - 1] if there else Piece(0, 0, 0)
                reached = last.chunk * geometry.chunk_tokens + last.end * geometry.block_tokens
            elif there < len(keys):
                # Of a window its tail is wanted, wherever the run ends.
                return 0
            if self._recurrent and there < len(keys):
                # The state is wanted where the run ends, and there may be none before it.
                return 0
        return min(reached, ends)

    def longest(self, state: RequestState) -> int:
        """Where the longest hit of a request ends, were everything of it there."""
        ends: list[int] = []
        for number in self._full or range(len(self._geometries)):
            group, geometry = state.groups[number], self._geometries[number]
            last = len(group.chain.keys)
            blocks = min(group.chain.partial_blocks(last), geometry.blocks_per_chunk - 1)
            ends.append(last * geometry.chunk_tokens + blocks * geometry.block_tokens)
        if self._windowed:
            ends.append(state.request.num_tokens - 1)
        return aligned(self._geometries, min(ends))

    def lacks(self, state: RequestState, local_tokens: int) -> int:
        """Tokens behind the engine's own hit that a load could bring, were everything there.

        None where that hit ends as far as the engine's own hits do: the last token is computed.
        """
        if local_tokens >= aligned(self._geometries, state.request.num_tokens - 1):
            return 0
        return max(0, self.longest(state) - local_tokens)

    def _first_chunks(self, local_tokens: int) -> list[int]:
        return [local_tokens // geometry.chunk_tokens for geometry in self._geometries]

    def _reach(
        self,
        state: RequestState,
        session: SidecarSession,
        local_tokens: int,
        flags: list[npt.NDArray[np.uint8]],
        tiers: int,
    ) -> int:
        """How far `tiers` reach, where `flags` are those of the full chunks."""
        firsts = self._first_chunks(local_tokens)
        ends: list[int] = []
        for number in self._full:
            group, geometry = state.groups[number], self._geometries[number]
            last = firsts[number] + _leading(flags[number])
            blocks, _ = self._partial(group, session, last, tiers)
            ends.append(last * geometry.chunk_tokens + blocks * geometry.block_tokens)
        if not self._windowed:
            return max(local_tokens, aligned(self._geometries, min(ends)))
        # The last token is always computed. vLLM takes a whole prompt and goes back by one token,
        # but its window may then begin in a block that it did not allocate.
        ends.append(state.request.num_tokens - 1)
        end_tokens = max(local_tokens, aligned(self._geometries, min(ends)))
        held = [
            self._held(group, session, local_tokens, end_tokens, chunks, tiers)
            for group, chunks in zip(state.groups, flags, strict=True)
        ]
        return longest_hit(self._geometries, held, local_tokens, end_tokens)

    def _held(
        self,
        group: GroupState,
        session: SidecarSession,
        local_tokens: int,
        end_tokens: int,
        flags: npt.NDArray[np.uint8],
        tiers: int,
    ) -> npt.NDArray[np.bool_]:
        """Which blocks of a group can be loaded, from the one at `local_tokens` on.

        A chunk that is not held whole may be in pieces: looked for where the run ends, or, of a
        group that alone decides where that is, behind the last chunk that is held.
        """
        geometry = self._geometries[group.group]
        per_chunk = geometry.blocks_per_chunk
        first = local_tokens // geometry.chunk_tokens
        whole = flags != 0
        if self._full:
            chunk = end_tokens // geometry.chunk_tokens
        else:
            chunk = first + int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else first
        blocks = np.zeros((max(len(whole), chunk - first + 1), per_chunk), dtype=np.bool_)
        blocks[: len(whole)] = whole[:, np.newaxis]
        if not blocks[chunk - first, 0]:
            blocks[chunk - first, : self._partial(group, session, chunk, tiers)[0]] = True
        held: npt.NDArray[np.bool_] = blocks.ravel()
        return held[local_tokens // geometry.block_tokens - first * per_chunk :]

    def _wanted(
        self, state: RequestState, session: SidecarSession, local_tokens: int, end_tokens: int
    ) -> tuple[list[WantedChunks], int]:
        """Keys that a hit of `end_tokens` needs, and the token where the first of them begins.

        Of each group those from the first on that is not in host memory.
        """
        assert session.index is not None
        wanted: list[WantedChunks] = []
        begins = end_tokens
        # A window is of no use without the run that it is the tail of: full attention first.
        order = sorted(range(len(self._geometries)), key=lambda one: one not in self._full)
        for number in order:
            group, geometry = state.groups[number], self._geometries[number]
            pieces = list(pieces_of(geometry, local_tokens, end_tokens))
            anywhere = FLAG_HOST | FLAG_STORE
            keys = [
                self.loaded_key(group, session, piece.chunk, piece.end, tiers=anywhere)
                for piece in pieces
            ]
            in_host = session.index.lookup(tags_of(keys, session.index_salt)) & FLAG_HOST
            there = _leading(in_host)
            if there < len(keys):
                begins = min(begins, pieces[there].chunk * geometry.chunk_tokens)
            wanted += [WantedChunks(number, key) for key in keys[there:]]
        return wanted, begins

    def _partial(
        self, group: GroupState, session: SidecarSession, index: int, tiers: int
    ) -> tuple[int, bytes | None]:
        """The longest piece of chunk `index` that one of `tiers` holds under a key of its own."""
        assert session.index is not None
        geometry = self._geometries[group.group]
        blocks = min(group.chain.partial_blocks(index), geometry.blocks_per_chunk - 1)
        if blocks < 1:
            return 0, None
        tags = group.partial_tags.get(index)
        if tags is None or len(tags) != blocks:
            keys = [group.chain.partial(index, count) for count in range(blocks, 0, -1)]
            tags = group.partial_tags[index] = tags_of(keys, session.index_salt)
        found = np.flatnonzero(session.index.lookup(tags) & tiers)
        if not len(found):
            return 0, None
        best = blocks - int(found[0])
        return best, group.chain.partial(index, best)

    def loaded_key(
        self,
        group: GroupState,
        session: SidecarSession | None,
        chunk: int,
        blocks: int,
        *,
        tiers: int = FLAG_HOST,
    ) -> bytes:
        """Key under which the first `blocks` blocks of a chunk were found."""
        keys = group.chain.keys
        if blocks == self._geometries[group.group].blocks_per_chunk:
            return keys[chunk]
        if session is not None and session.index is not None:
            # vLLM may take fewer tokens than were offered; then a piece that lies within a full
            # or longer partial chunk is loaded from there.
            if chunk < len(keys):
                tag = tags_of([keys[chunk]], session.index_salt)
                if session.index.lookup(tag)[0] & tiers:
                    return keys[chunk]
            longest, key = self._partial(group, session, chunk, tiers)
            if key is not None and longest >= blocks:
                return key
        return group.chain.partial(chunk, blocks)

    def _tags(self, group: GroupState, session: SidecarSession) -> npt.NDArray[np.uint64]:
        keys = group.chain.keys
        if group.tags_salt != session.index_salt:
            group.tags_salt = session.index_salt
            group.tags = tags_of(keys, session.index_salt)
            group.partial_tags.clear()
        elif len(group.tags) < len(keys):
            fresh = tags_of(keys[len(group.tags) :], session.index_salt)
            group.tags = np.concatenate([group.tags, fresh])
        return group.tags


class Piece(NamedTuple):
    """Blocks `first` to `end` (exclusive) of a chunk."""

    chunk: int
    first: int
    end: int


def pieces_of(geometry: Geometry, local_tokens: int, end_tokens: int) -> Iterator[Piece]:
    """What a hit of `end_tokens` loads of one group, where `local_tokens` are there already."""
    per_chunk = geometry.blocks_per_chunk
    block = max(local_tokens // geometry.block_tokens, geometry.first_block(end_tokens))
    last = end_tokens // geometry.block_tokens
    while block < last:
        chunk, first = divmod(block, per_chunk)
        block = min(last, (chunk + 1) * per_chunk)
        yield Piece(chunk, first, block - chunk * per_chunk)


def pieces_kept(geometry: Geometry, end_tokens: int) -> list[Piece]:
    """What of one group a prompt of `end_tokens` tokens leaves to a hit of all of it.

    Of recurrent layers, first the state that the same prompt again needs, whose last token is
    always computed, and then the one that a longer prompt needs.
    """
    if not geometry.attention.recurrent:
        return list(pieces_of(geometry, 0, end_tokens))
    blocks = [max(0, end_tokens - 1) // geometry.block_tokens, end_tokens // geometry.block_tokens]
    return [Piece(block - 1, 0, 1) for block in dict.fromkeys(blocks) if block]


def _leading(flags: npt.NDArray[np.integer[Any]]) -> int:
    """How many entries are non-zero before the first zero."""
    zeros = np.flatnonzero(flags == 0)
    return int(zeros[0]) if len(zeros) else len(flags)
