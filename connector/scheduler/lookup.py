"""How far a hit of one request reaches, and under which keys its chunks are found.

What a hit needs of each group is in `identity/groups.py`. Sends nothing. Every method takes
microseconds and reads the shared index as it is at that moment.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from connector.client import SidecarSession
from connector.identity.groups import Geometry, aligned, longest_hit
from connector.scheduler.outcomes import Computed, Missed
from connector.scheduler.requests import GroupState, RequestState
from sidecar.protocol.prompts import PromptOutcome
from tiers.kv.index import (
    ANYWHERE,
    FLAG_HOST,
    FLAGS_MAX,
    GONE_EVICTED,
    GONE_EXPIRED,
    GONE_QUOTA,
    tags_of,
)

GONE: Final = {
    GONE_EVICTED: PromptOutcome.EVICTED,
    GONE_EXPIRED: PromptOutcome.EXPIRED,
    GONE_QUOTA: PromptOutcome.QUOTA,
}
_TIERS: Final = {
    tiers: bytes(flags & tiers != 0 for flags in range(FLAGS_MAX + 1))
    for tiers in (FLAG_HOST, ANYWHERE)
}
"""By tiers, a table from the flags of a chunk to 1 if one of these tiers holds it, and 0 if not."""


class Hit(NamedTuple):
    """The external run after vLLM's own hit, as the index shows it now."""

    end_tokens: int
    """Where the run in host memory ends."""
    wanted_tokens: int
    """Where it would end with what the object store has."""
    wanted: Sequence[tuple[int, bytes]] = ()
    """Group and key of what it lacks in host memory for that, in order."""
    held: Sequence[tuple[int, bytes]] = ()
    """The same of what host memory has of it, and must keep while the rest is read."""
    read_tokens: int = 0
    """Tokens that only a read of these brings: a missing state costs everything after it."""


class HitFinder:
    """Looks requests up in the index of a session."""

    def __init__(self, geometries: Sequence[Geometry]) -> None:
        self._geometries = geometries
        self._full = [one for one, each in enumerate(geometries) if each.attention.full]
        self._windowed = len(self._full) < len(geometries)
        self._recurrent = any(each.attention.recurrent for each in geometries)
        # The group whose run says what a hit is worth: one that reads all tokens, if any does.
        self.main_group = self._full[0] if self._full else 0

    def hit(self, state: RequestState, session: SidecarSession, local_tokens: int) -> Hit:
        """The run that can be loaded after `local_tokens`, and how the store extends it."""
        found = [
            _found(session, _tags(group, session)[local_tokens // group.geometry.chunk_tokens :])
            for group in state.groups
        ]
        pieces: _Pieces = {}
        end_tokens = self._reach(state, session, local_tokens, found, pieces, FLAG_HOST)
        wanted_tokens = self._reach(state, session, local_tokens, found, pieces, ANYWHERE)
        if wanted_tokens <= end_tokens:
            return Hit(end_tokens, end_tokens)
        held, wanted, first_tokens = self._wanted(state, session, local_tokens, wanted_tokens)
        read_tokens = wanted_tokens - min(first_tokens, end_tokens)
        return Hit(end_tokens, wanted_tokens, wanted, held, read_tokens)

    def found_tokens(
        self, state: RequestState, session: SidecarSession, storing: Collection[bytes]
    ) -> int:
        """How much of a prompt can be loaded, once the stores of these keys have ended."""
        end_tokens = ends = state.prompt_tokens
        reached = 0
        for group in state.groups:
            geometry = group.geometry
            pieces = pieces_kept(geometry, end_tokens)
            if geometry.attention.recurrent:
                # The next request has this prompt, or continues it, so a prompt of whole blocks
                # needs no state after its last one.
                del pieces[1:]
                if pieces:
                    ends = min(ends, (pieces[0].chunk + 1) * geometry.chunk_tokens)
            keys = [group.chain.key_of(piece.chunk, piece.end) for piece in pieces]
            held = session.holds(keys).tobytes() if keys else b""
            there = _leading(
                bytes(flags or key in storing for flags, key in zip(held, keys, strict=True)),
                ANYWHERE,
            )
            if group.group == self.main_group:
                last = pieces[there - 1] if there else Piece(0, 0, 0)
                reached = group.end_tokens(last.chunk, last.end)
            elif there < len(keys):
                # The tail of a window is needed, wherever the run ends.
                return 0
            if self._recurrent and there < len(keys):
                # The state is needed where the run ends, and there may be none before it.
                return 0
        return min(reached, ends)

    def prompt_chunks(self, state: RequestState) -> list[tuple[int, bytes]]:
        """Group and key of what a hit of a whole prompt needs, head first in each group."""
        found: list[tuple[int, bytes]] = []
        end_tokens = state.prompt_tokens
        for group in state.groups:
            number, chain, geometry = group.group, group.chain, group.geometry
            if number not in self._full:
                pieces = pieces_kept(geometry, end_tokens)
                found += [(number, chain.key_of(piece.chunk, piece.end)) for piece in pieces]
                continue
            last, tokens = divmod(end_tokens, geometry.chunk_tokens)
            found += [(number, key) for key in chain.keys[:last]]
            if blocks := tokens // geometry.block_tokens:
                found.append((number, chain.partial(last, blocks)))
        return found

    def computed(
        self,
        state: RequestState,
        session: SidecarSession | None,
        begin_tokens: int,
        storing: Collection[bytes],
    ) -> tuple[list[Computed], Missed]:
        """Why a request computes its prompt from `begin_tokens` on, without the tail.

        Also the first chunk that it lacks, if that was looked up. What is there behind a gap
        cannot be loaded, so it is computed for the reason of the gap.
        """
        longest = self.longest(state)
        if begin_tokens >= aligned(self._geometries, state.request.num_tokens - 1):
            # VLLM always computes the last token, so its own hits cannot end later.
            return [], Missed()
        declined = PromptOutcome.REFUSED if session is None else state.declined
        if declined is not None or session is None:
            return [Computed(longest, declined or PromptOutcome.REFUSED)], Missed()
        group = state.groups[self.main_group]
        per_chunk, keys = group.geometry.chunk_tokens, group.chain.keys
        first, last = begin_tokens // per_chunk, len(keys)
        tags = _tags(group, session)[first:]
        blocks = min(group.chain.partial_blocks(last), group.geometry.blocks_per_chunk - 1)
        if blocks > 0 and first <= last:
            # The piece behind the last full chunk, as one more of them.
            keys = [*keys, group.chain.partial(last, blocks)]
            tags = np.concatenate((tags, tags_of(keys[-1:], session.index_salt)))
        flags = np.frombuffer(_found(session, tags), np.uint8)
        expected = state.request_params.expects_tokens
        computed = [Computed(state.found_tokens, PromptOutcome.TOO_SHORT)]
        gap: PromptOutcome | None = None
        reason = PromptOutcome.NEW
        missed = Missed()
        edges = np.flatnonzero(flags[1:] != flags[:-1]) + 1
        for start, end in itertools.pairwise((0, *edges.tolist(), len(flags))):
            flag = int(flags[start]) if end else 0
            end_tokens = min((first + end) * per_chunk, group.end_tokens(last, blocks))
            if flag & FLAG_HOST:
                reason = gap or self._other_gap(state, session, begin_tokens)
            elif flag & ANYWHERE:
                reason = gap or state.store_reason
            else:
                reason = GONE.get(flag, PromptOutcome.NEW)
            if reason is PromptOutcome.NEW:
                done = sum(key in storing for key in keys[first + start : first + end])
                done_tokens = min((first + start + done) * per_chunk, end_tokens)
                computed.append(Computed(done_tokens, PromptOutcome.BEING_WRITTEN))
                computed.append(Computed(min(end_tokens, expected), PromptOutcome.LATE))
            computed.append(Computed(end_tokens, reason))
            if not flag & FLAG_HOST and gap is None and end:
                gap = reason
                token = max((first + start) * per_chunk, begin_tokens, state.found_tokens)
                why = next((one.reason for one in computed if one.end_tokens > token), reason)
                missed = Missed(keys[first + start], token, why)
        if gap in (None, PromptOutcome.NEW):
            computed.append(Computed(min(longest, expected), PromptOutcome.LATE))
        return [*computed, Computed(longest, reason if gap else PromptOutcome.NEW)], missed

    def longest(self, state: RequestState) -> int:
        """Where the longest possible hit of a request ends, if everything were there."""
        ends: list[int] = []
        for number in self._full or range(len(state.groups)):
            group = state.groups[number]
            last = len(group.chain.keys)
            blocks = min(group.chain.partial_blocks(last), group.geometry.blocks_per_chunk - 1)
            ends.append(group.end_tokens(last, blocks))
        if self._windowed:
            ends.append(state.request.num_tokens - 1)
        return aligned(self._geometries, min(ends))

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
        if blocks == group.geometry.blocks_per_chunk:
            return keys[chunk]
        if session is not None:
            # vLLM may take fewer tokens than were offered. Then a piece is loaded from the full or
            # longer chunk that has it.
            if chunk < len(keys) and session.holds([keys[chunk]])[0] & tiers:
                return keys[chunk]
            longest = _partial(group, session, chunk, {}, tiers)
            if longest >= blocks:
                return group.chain.partial(chunk, longest)
        return group.chain.partial(chunk, blocks)

    def _other_gap(
        self, state: RequestState, session: SidecarSession, begin_tokens: int
    ) -> PromptOutcome:
        """Why a run that the main group has cannot be loaded: what another group lacks."""
        for group in state.groups:
            flags = _found(
                session, _tags(group, session)[begin_tokens // group.geometry.chunk_tokens :]
            )
            there = _leading(flags, ANYWHERE)
            if there < len(flags):
                return GONE.get(flags[there], PromptOutcome.NEW)
        return PromptOutcome.TOO_SHORT

    def _reach(
        self,
        state: RequestState,
        session: SidecarSession,
        local_tokens: int,
        flags: list[bytes],
        pieces: "_Pieces",
        tiers: int,
    ) -> int:
        """Where the run in `tiers` ends; `flags` are those of the full chunks."""
        ends: list[int] = []
        for number in self._full:
            group = state.groups[number]
            last = local_tokens // group.geometry.chunk_tokens + _leading(flags[number], tiers)
            blocks = _partial(group, session, last, pieces, tiers)
            ends.append(group.end_tokens(last, blocks))
        if not self._windowed:
            return max(local_tokens, aligned(self._geometries, min(ends)))
        # The last token is always computed. vLLM takes a whole prompt and goes back by one token,
        # but its window may then begin in a block that it did not allocate.
        ends.append(state.request.num_tokens - 1)
        end_tokens = max(local_tokens, aligned(self._geometries, min(ends)))
        held = [
            self._held(group, session, local_tokens, end_tokens, chunks, pieces, tiers)
            for group, chunks in zip(state.groups, flags, strict=True)
        ]
        return longest_hit(self._geometries, held, local_tokens, end_tokens)

    def _held(
        self,
        group: GroupState,
        session: SidecarSession,
        local_tokens: int,
        end_tokens: int,
        flags: bytes,
        pieces: "_Pieces",
        tiers: int,
    ) -> npt.NDArray[np.bool_]:
        """Which blocks of a group can be loaded, from the one at `local_tokens` on.

        A chunk that is not held whole may be held in part: where the run ends, or, if no group
        attends fully, after the last chunk that is held.
        """
        geometry = group.geometry
        per_chunk = geometry.blocks_per_chunk
        first = local_tokens // geometry.chunk_tokens
        whole = np.frombuffer(flags.translate(_TIERS[tiers]), np.bool_)
        if self._full:
            chunk = end_tokens // geometry.chunk_tokens
        else:
            chunk = first + int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else first
        blocks = np.zeros((max(len(whole), chunk - first + 1), per_chunk), dtype=np.bool_)
        blocks[: len(whole)] = whole[:, np.newaxis]
        if not blocks[chunk - first, 0]:
            blocks[chunk - first, : _partial(group, session, chunk, pieces, tiers)] = True
        held: npt.NDArray[np.bool_] = blocks.ravel()
        return held[local_tokens // geometry.block_tokens - first * per_chunk :]

    def _wanted(
        self, state: RequestState, session: SidecarSession, local_tokens: int, end_tokens: int
    ) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]], int]:
        """Chunks that a hit of `end_tokens` needs, held and wanted, and where the latter begin.

        Wanted are, in each group, all from the first one on that is not in host memory.
        """
        held: list[tuple[int, bytes]] = []
        wanted: list[tuple[int, bytes]] = []
        begins = end_tokens
        # A window is of no use without the run that it is the tail of: full attention first.
        for group in sorted(state.groups, key=lambda group: group.group not in self._full):
            geometry = group.geometry
            pieces = list(pieces_of(geometry, local_tokens, end_tokens))
            keys = [
                self.loaded_key(group, session, piece.chunk, piece.end, tiers=ANYWHERE)
                for piece in pieces
            ]
            there = _leading(session.holds(keys).tobytes(), FLAG_HOST)
            if there < len(keys):
                begins = min(begins, pieces[there].chunk * geometry.chunk_tokens)
            held += [(group.group, key) for key in keys[:there]]
            wanted += [(group.group, key) for key in keys[there:]]
        return held, wanted, begins


class Piece(NamedTuple):
    """Blocks `first` to `end` (exclusive) of a chunk."""

    chunk: int
    first: int
    end: int


def pieces_of(geometry: Geometry, local_tokens: int, end_tokens: int) -> Iterator[Piece]:
    """What a hit of `end_tokens` loads of one group beyond vLLM's own hit of `local_tokens`."""
    per_chunk = geometry.blocks_per_chunk
    block = max(local_tokens // geometry.block_tokens, geometry.first_block(end_tokens))
    last_chunk, last = divmod(end_tokens // geometry.block_tokens, per_chunk)
    chunk, first = divmod(block, per_chunk)
    for whole in range(chunk, last_chunk):
        yield Piece(whole, first, per_chunk)
        first = 0
    if chunk <= last_chunk and first < last:
        yield Piece(last_chunk, first, last)


def pieces_kept(geometry: Geometry, end_tokens: int) -> list[Piece]:
    """What hits of a whole prompt of `end_tokens` need of one group.

    Of recurrent layers, first the state for the same prompt, whose last token is always computed,
    and then the one for a longer prompt.
    """
    if not geometry.attention.recurrent:
        return list(pieces_of(geometry, 0, end_tokens))
    blocks = [max(0, end_tokens - 1) // geometry.block_tokens, end_tokens // geometry.block_tokens]
    return [Piece(block - 1, 0, 1) for block in dict.fromkeys(blocks) if block]


def keys_and_groups(found: Sequence[tuple[int, bytes]]) -> tuple[list[bytes], list[int]]:
    """Keys, and the group of each as messages have them: left out where all are of group 0."""
    groups = [group for group, _ in found]
    return [key for _, key in found], groups if any(groups) else []


_Pieces: TypeAlias = dict[tuple[int, int], bytes]
"""Group and chunk to the flags of its pieces, longest first, as one lookup found them."""


def _found(session: SidecarSession, tags: npt.NDArray[np.uint64]) -> bytes:
    """The flags of each tag, a byte each: a short row costs less as bytes than as an array."""
    assert session.index is not None, "a scheduler's session has one"
    return session.index.lookup(tags).tobytes()


def _tags(group: GroupState, session: SidecarSession) -> npt.NDArray[np.uint64]:
    """Index tags of a group's full chunks."""
    keys = group.chain.keys
    if group.tags_salt != session.index_salt:
        group.tags_salt = session.index_salt
        group.tags = tags_of(keys, session.index_salt)
        group.partial_tags.clear()
    elif len(group.tags) < len(keys):
        new = tags_of(keys[len(group.tags) :], session.index_salt)
        group.tags = np.concatenate([group.tags, new])
    return group.tags


def _partial(
    group: GroupState, session: SidecarSession, chunk: int, pieces: _Pieces, tiers: int
) -> int:
    """Blocks of the longest piece of a chunk that `tiers` hold under its own key; 0 for none."""
    blocks = min(group.chain.partial_blocks(chunk), group.geometry.blocks_per_chunk - 1)
    if blocks < 1:
        return 0
    found = pieces.get((group.group, chunk))
    if found is None:
        tags = group.partial_tags.get(chunk)
        if tags is None or len(tags) != blocks:
            keys = [group.chain.partial(chunk, count) for count in range(blocks, 0, -1)]
            tags = group.partial_tags[chunk] = tags_of(keys, session.index_salt)
        found = pieces[group.group, chunk] = _found(session, tags)
    first = found.translate(_TIERS[tiers]).find(1)
    return blocks - first if first >= 0 else 0


def _leading(flags: bytes, tiers: int) -> int:
    """How many of these chunks `tiers` hold before the first that they do not."""
    held = flags.translate(_TIERS[tiers]).find(0)
    return held if held >= 0 else len(flags)
