"""Open stores of one engine, and the block references that they hold.

Invariant: a block with an open store has one reference of ours in vLLM's block pool, whatever
happens to its request (finished, aborted, preempted), until all ranks have reported. So no block is
reused while it may still be copied. Does not own what is stored (`store_planner.py`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from connector.plan import Store
from sidecar.protocol import StoreChunk, StoreJob
from tiers.kv.index import FLAG_HOST, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from connector.client import SidecarSession
    from connector.plan import StepReport
    from connector.scheduler.requests import RequestState
    from connector.scheduler.stats import Stats

BLOCKS_WAIT_SECONDS_MAX: Final = 0.5
"""How long the engine waits for blocks, without any store ending, before it preempts."""


class Part(NamedTuple):
    """The first `blocks` blocks of a chunk in one KV cache group, and their key."""

    group: int
    chunk: int
    blocks: int
    key: bytes
    block_id: int | None = None
    """The block of a state; blocks of other parts are in the request's block table."""


@dataclass(slots=True)
class _OpenStore:
    blocks: list[Any]
    keys: list[bytes]
    ranks_left: int


@dataclass(eq=False)
class Stores:
    """Makes store jobs, and keeps their blocks until they have ended.

    `block_pool` is vLLM's; `world_size` ranks report each store; `new_id` gives the next job's id.
    """

    block_pool: Any
    world_size: int
    stats: Stats
    new_id: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    jobs: dict[int, _OpenStore] = field(default_factory=dict[int, _OpenStore], init=False)
    keys: set[bytes] = field(default_factory=set[bytes], init=False)
    _distrusted: dict[int, Any] = field(default_factory=dict[int, Any], init=False)
    """Block id to the hash of what failed to load into it."""
    _blocks_awaited_since: float | None = field(default=None, init=False)

    def plan(
        self,
        session: SidecarSession,
        state: RequestState,
        parts: list[Part],
        block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> Store | None:
        """A job for those parts that are neither in host memory nor being stored.

        `block_ids` gives the request's block table of each group.
        """
        assert session.index is not None
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
            self.stats.stores_skipped += len(wanted)
            return None
        tables = block_ids()
        chunks = [] if self._distrusts(tables) else self._chunks(state, wanted, tables)
        if not chunks:
            return None
        job_id = self.new_id()
        held_blocks = [
            self.block_pool.blocks[block_id] for chunk in chunks for block_id in chunk.block_ids
        ]
        self.block_pool.touch(held_blocks)
        keys = [chunk.key for chunk in chunks]
        self.keys.update(keys)
        self.jobs[job_id] = _OpenStore(held_blocks, keys, self.world_size)
        self.stats.chunks_stored += len(chunks)
        params = state.request_params
        job = StoreJob(job_id, chunks, params.ttl_ms, params.stays)
        return Store(job, state.adapter_id, state.adapter.files)

    def _chunks(
        self, state: RequestState, parts: list[Part], tables: Sequence[Sequence[int]]
    ) -> list[StoreChunk]:
        """The parts of which all blocks are there."""
        chunks: list[StoreChunk] = []
        for part in parts:
            group = state.groups[part.group]
            first = part.chunk * group.geometry.blocks_per_chunk
            ids = list(tables[part.group][first : first + part.blocks])
            if part.block_id is not None:
                ids = [part.block_id]
            # vLLM puts its null block in place of blocks that no later token reads.
            gone = any(self.block_pool.blocks[block_id].is_null for block_id in ids)
            if len(ids) < part.blocks or gone:
                continue
            tokens = group.chain.tokens(part.chunk, part.blocks)
            parent = group.chain.parent(part.chunk)
            chunks.append(StoreChunk(part.key, parent, tokens, ids, state.tenant, part.group))
        return chunks

    def distrust(self, block_ids: Iterable[int]) -> None:
        """Store nothing of a request that has one of these blocks in its table.

        Their load failed after vLLM's prefix cache had shared them. While one request computes them
        again, maybe in several steps, others compute wrong KV on top of them. Ends when a block is
        freed or gets other content.
        """
        for block_id in block_ids:
            content = self.block_pool.blocks[block_id].block_hash
            if content is not None:
                self._distrusted[block_id] = content

    def _distrusts(self, tables: Sequence[Sequence[int]]) -> bool:
        blocks = self.block_pool.blocks
        for block_id, content in list(self._distrusted.items()):
            if blocks[block_id].block_hash != content:
                del self._distrusted[block_id]
        distrusted = self._distrusted.keys()
        return bool(distrusted) and not all(distrusted.isdisjoint(table) for table in tables)

    def ended(self, report: StepReport) -> None:
        """Take the stores that ended on ranks; after the last rank, free a job's blocks."""
        for job_id, ranks in report.ended.items():
            job = self.jobs.get(job_id)
            if job is None:
                continue
            job.ranks_left -= ranks
            if job.ranks_left <= 0:
                del self.jobs[job_id]
                self._blocks_awaited_since = None
                self.keys.difference_update(job.keys)
                # Tail first, as vLLM frees a request: the head of a prefix is more useful.
                self.block_pool.free_blocks(reversed(job.blocks))

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of open stores rather than preempt a request.

        They come back in milliseconds, unless the sidecar is stuck.
        """
        if not self.jobs:
            return False
        now = self.clock()
        if self._blocks_awaited_since is None:
            self._blocks_awaited_since = now
        return now - self._blocks_awaited_since < BLOCKS_WAIT_SECONDS_MAX
