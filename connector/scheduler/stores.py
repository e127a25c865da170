"""Stores of one engine on their way: their jobs, and the block references that they hold.

Owns the invariant that a block whose store is outstanding has one reference of ours in vLLM's
block pool, whatever becomes of its request (finished, aborted, preempted), and loses it when all
ranks reported. So a block is never reused while a copy of it may still be read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from connector.plan import BLOCK_ID_BYTES, PIECE_BYTES, Store, StorePiece
from sidecar.protocol import FRAME_BYTES_MAX
from tiers.kv.index import FLAG_HOST, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from connector.client import SidecarSession
    from connector.identity.groups import Geometry
    from connector.identity.mamba import State
    from connector.plan import StepReport
    from connector.scheduler.requests import GroupState, RequestState, Stats

JOB_BYTES_MAX: Final = FRAME_BYTES_MAX // 4
"""How much of a message a job takes: it cannot be cut later, and fails with its message."""
TOKEN_ID_BYTES: Final = 4
BLOCKS_WAIT_SECONDS_MAX: Final = 0.5
"""How long the engine waits, without any store ending, for blocks rather than preempt."""


class Part(NamedTuple):
    """The first `blocks` blocks of a chunk, in one KV cache group, and the key they have."""

    group: int
    chunk: int
    blocks: int
    key: bytes
    block_id: int | None = None
    """Of a state, its block; of other parts the request's block table says which these are."""

    def tokens_of(self, groups: Sequence[GroupState]) -> int:
        """How many tokens there are up to its end."""
        geometry = groups[self.group].geometry
        return self.chunk * geometry.chunk_tokens + self.blocks * geometry.block_tokens


def in_jobs(geometries: Sequence[Geometry], parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Parts of a request in as few jobs as messages can hold."""
    job: list[Part] = []
    size_bytes = 0
    for part in parts:
        tokens = part.blocks * geometries[part.group].block_tokens
        part_bytes = PIECE_BYTES + TOKEN_ID_BYTES * tokens + BLOCK_ID_BYTES * part.blocks
        if job and size_bytes + part_bytes > JOB_BYTES_MAX:
            yield job
            job, size_bytes = [], 0
        job.append(part)
        size_bytes += part_bytes
    if job:
        yield job


def state_parts(groups: Sequence[GroupState], states: Sequence[State]) -> list[Part]:
    """The parts that a request's states are, in its groups."""
    parts: list[Part] = []
    for number, block_id, num_tokens in states:
        chain = groups[number].chain
        blocks, rest = divmod(num_tokens, groups[number].geometry.block_tokens)
        # One within a block is behind no chunk, and keys of tokens to come are not known yet.
        if rest == 0 and 0 < blocks <= len(chain.keys):
            parts.append(Part(number, blocks - 1, 1, chain.keys[blocks - 1], block_id))
    return parts


def blocks_cached(
    block_pool: Any, request: Any, num_tokens: int, groups: Sequence[int]
) -> Sequence[Any] | None:
    """The block that ends behind so many tokens in the engine's own prefix cache, of each group.

    Nothing where it lacks one of them.
    """
    if block_pool is None:
        return None
    # Hashes may be of smaller blocks: of a block it is that of its last part.
    last = num_tokens // block_pool.hash_block_size - 1
    hashes = request.block_hashes
    if not 0 <= last < len(hashes):
        return None
    blocks: Sequence[Any] | None = block_pool.get_cached_block(hashes[last], list(groups))
    return blocks


def states_held(
    block_pool: Any, request: Any, num_tokens: int, groups: Sequence[int]
) -> list[State]:
    """States behind so many tokens that the engine itself has kept, of groups of states.

    A cached block is not written again; it is kept only if a reference is taken at once.
    """
    blocks = blocks_cached(block_pool, request, num_tokens, groups) if groups else None
    return [
        (group, block.block_id, num_tokens)
        for group, block in zip(groups, blocks or (), strict=blocks is not None)
    ]


@dataclass(slots=True)
class _StoreJob:
    blocks: list[Any]
    keys: list[bytes]
    ranks_left: int


class Stores:
    """Plans stores, and keeps their blocks until they ended.

    Args:
        world_size: ranks that report each store.
    """

    def __init__(
        self,
        geometries: Sequence[Geometry],
        world_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._geometries = geometries
        self._world_size = world_size
        self.clock = clock
        self.jobs: dict[int, _StoreJob] = {}
        self.keys: set[bytes] = set()
        self._block_pool: Any = None
        self._distrusted: dict[int, Any] = {}
        self._blocks_awaited_since: float | None = None

    def bind(self, block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._block_pool = block_pool

    def plan(
        self,
        session: SidecarSession,
        state: RequestState,
        parts: list[Part],
        block_ids: Callable[[], Sequence[Sequence[int]]],
        stats: Stats,
        new_id: Callable[[], int],
    ) -> Store | None:
        """A job for those parts of chunks that nobody holds or is storing.

        `block_ids` gives the request's block table of each group.
        """
        if not parts or session.index is None or self._block_pool is None:
            return None
        tags = tags_of([part.key for part in parts], session.index_salt)
        in_host = session.index.lookup(tags) & FLAG_HOST
        wanted = [
            part
            for part, held in zip(parts, in_host, strict=True)
            if not held and part.key not in self.keys
        ]
        if not wanted:
            return None
        if len(self.jobs) >= session.limits.jobs_inflight_max:
            stats.stores_skipped += len(wanted)
            return None
        tables = block_ids()
        if self._distrusted and self._distrusts(tables):
            return None
        stores = self._pieces(state, wanted, tables)
        if not stores:
            return None
        job_id = new_id()
        held_blocks = [
            self._block_pool.blocks[block_id] for piece in stores for block_id in piece.block_ids
        ]
        self._block_pool.touch(held_blocks)
        keys = [piece.key for piece in stores]
        self.keys.update(keys)
        self.jobs[job_id] = _StoreJob(held_blocks, keys, self._world_size)
        stats.chunks_stored += len(stores)
        request_params = state.request_params
        return Store(job_id, stores, state.tenant, request_params.ttl_ms, request_params.stays)

    def _pieces(
        self, state: RequestState, parts: list[Part], tables: Sequence[Sequence[int]]
    ) -> list[StorePiece]:
        """The parts of which all blocks are there."""
        pieces: list[StorePiece] = []
        for part in parts:
            first = part.chunk * self._geometries[part.group].blocks_per_chunk
            if part.block_id is None:
                ids = list(tables[part.group][first : first + part.blocks])
            else:
                ids = [part.block_id]
            # What no token to come reads any more has lost its block to vLLM's null block.
            gone = any(self._block_pool.blocks[block_id].is_null for block_id in ids)
            if len(ids) < part.blocks or gone:
                continue
            chain = state.groups[part.group].chain
            tokens = chain.tokens(part.chunk, part.blocks)
            parent = chain.parent(part.chunk)
            pieces.append(StorePiece(part.key, parent, tokens, ids, part.group))
        return pieces

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Store nothing of a request that has one of these in its table.

        They were shared through the engine's prefix cache before it was known that they hold
        nothing, and stay in it while one of the requests computes them again, maybe in several
        steps: what others compute on top of them meanwhile is as worthless. So until they are
        given up or filled with something else.
        """
        if self._block_pool is None:
            return
        for block_id in block_ids:
            content = self._block_pool.blocks[block_id].block_hash
            if content is not None:
                self._distrusted[block_id] = content

    def _distrusts(self, tables: Sequence[Sequence[int]]) -> bool:
        blocks = self._block_pool.blocks
        for block_id, content in list(self._distrusted.items()):
            if blocks[block_id].block_hash != content:
                del self._distrusted[block_id]
        return any(not self._distrusted.keys().isdisjoint(table) for table in tables)

    def ended(self, report: StepReport) -> None:
        """Ranks reported ended stores: give the blocks back when the last rank did."""
        for job_id, ranks in report.ended.items():
            job = self.jobs.get(job_id)
            if job is None:
                continue
            job.ranks_left -= ranks
            if job.ranks_left <= 0:
                del self.jobs[job_id]
                self._blocks_awaited_since = None
                self.keys.difference_update(job.keys)
                # Tail first, as vLLM frees a request: the head of a prefix is the more useful.
                self._block_pool.free_blocks(reversed(job.blocks))

    def under_way(self, key: bytes) -> bool:
        """Whether a store of this chunk was begun and has not ended."""
        return key in self.keys

    @property
    def outstanding(self) -> int:
        """Store jobs whose blocks are still held."""
        return len(self.jobs)

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of outstanding stores rather than preempt a request for some.

        They come back in milliseconds, except from a sidecar that is stuck.
        """
        if not self.jobs:
            return False
        now = self.clock()
        if self._blocks_awaited_since is None:
            self._blocks_awaited_since = now
        return now - self._blocks_awaited_since < BLOCKS_WAIT_SECONDS_MAX
