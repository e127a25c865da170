"""What is stored of each request, and when; open stores, and the block references that they hold.

`StorePlanner` chooses the chunks: full ones when a step completes them, the tail of a prompt,
states of recurrent layers with the attention up to them, and the rest at a request's end. `Stores`
makes jobs of them.

Invariants:

* Tokens that were to be loaded but were not are never stored, whichever connector was to load them.
* Draft tokens are not stored before they are accepted.
* Nothing of a void request is sent.
* A block with an open store has one reference of ours in vLLM's block pool, whatever happens to its
  request (finished, aborted, preempted), until all ranks have reported. So no block is reused while
  it may still be copied.
"""

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from connector.client import Client, SidecarSession
from connector.identity.groups import State
from connector.plan import BLOCK_ID_BYTES_MAX, OVERHEAD_BYTES_MAX, StepReport, Store, batches
from connector.scheduler.lookup import keys_and_groups, pieces_kept
from connector.scheduler.requests import GroupState, PrefixCache, Requests, RequestState, Settings
from connector.scheduler.stats import Stats
from connector.scheduler.traces import TOKEN_ID_BYTES, Tracer
from sidecar.protocol import FRAME_BYTES_MAX, KEYS_PER_MESSAGE_MAX, Pin, StoreChunk, StoreJob
from tiers.kv.index import FLAG_HOST

JOB_BYTES_MAX: Final = FRAME_BYTES_MAX // 4
"""Upper bound of one job: it cannot be split later, and fails with its message."""
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
    trace: Callable[[], None] | None


@dataclass(eq=False)
class Stores:
    """Makes store jobs, whose end `world_size` ranks report, and keeps their blocks until then."""

    block_pool: Any
    world_size: int
    stats: Stats
    new_id: Callable[[], int]
    clock: Callable[[], float] = time.monotonic
    tracer: Tracer = field(default_factory=Tracer)
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
        """A job for those parts that are neither in host memory nor being stored."""
        in_host = session.holds([part.key for part in parts]) & FLAG_HOST
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
        self.jobs[job_id] = _OpenStore(
            held_blocks, keys, self.world_size, self.tracer.storing(state, chunks)
        )
        self.stats.chunks_stored += len(chunks)
        params = state.request_params
        job = StoreJob(job_id, chunks, params.ttl_ms, params.stays)
        return Store(job, state.adapter_id, state.adapter)

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
                if job.trace is not None:
                    job.trace()

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of open stores, for milliseconds, rather than preempt."""
        if not self.jobs:
            return False
        now = self.clock()
        if self._blocks_awaited_since is None:
            self._blocks_awaited_since = now
        return now - self._blocks_awaited_since < BLOCKS_WAIT_SECONDS_MAX


@dataclass(slots=True, eq=False)
class StorePlanner:
    """Chooses what is stored of an engine's requests."""

    client: Client
    requests: Requests
    stores: Stores
    prefix_cache: PrefixCache
    stats: Stats
    settings: Settings
    others_load: bool = field(default=False, init=False)
    """Another connector was seen to load."""
    planned: list[tuple[RequestState, Store]] = field(
        default_factory=list["tuple[RequestState, Store]"], init=False
    )
    """Stores that were not sent yet."""

    def take(self) -> list[Store]:
        """The planned stores, to be sent now; those of requests that became void are dropped."""
        planned, self.planned = self.planned, []
        void = [store.job.job_id for state, store in planned if state.void]
        if void:
            self.stores.ended(StepReport(dict.fromkeys(void, self.settings.world_size)))
        return [store for state, store in planned if not state.void]

    def step(
        self,
        scheduled: Mapping[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[State]],
    ) -> None:
        """Plan the stores of a step; see `SchedulerRole.build_plan`."""
        if not self.settings.writes:
            return
        requests = [
            (state, num_tokens)
            for request_id, num_tokens in scheduled.items()
            if (state := self.requests.get(request_id)) is not None
        ]
        if self.settings.speculation.leaves_out(
            one.request.num_computed_tokens + n for one, n in requests
        ):
            for state, _ in requests:
                state.undrafted = True
        # Before the first of them is stored: requests of one step may share blocks.
        unknown = [
            state
            for state, _ in requests
            if not state.scheduled_tokens and state.request.num_computed_tokens > state.known_tokens
        ]
        self.others_load |= bool(unknown)
        for state in unknown:
            # For example, a block that vLLM's own cache has only in part.
            state.void |= self.prefix_cache.stale(state.request.lora_request)
        # Draft tokens and placeholders are not known yet, so they do not count as computed.
        ahead_tokens = self.settings.speculation.ahead_tokens
        for state, num_tokens in requests:
            request, waits = state.request, self._waits_for_others(state)
            begun = not waits or state.step_taken
            state.scheduled_tokens += num_tokens
            if not begun or state.void or state.undrafted or not state.request_params.writes:
                continue
            handed = states.get(request.request_id, ())
            if state.begins_tokens:
                handed = [*handed, *self._states_held(state)]
            computed = request.num_computed_tokens + num_tokens
            computed = min(computed, request.num_tokens - ahead_tokens)
            if handed or computed >= state.next_store_tokens:
                self._store_scheduled(state, computed, block_ids_of, handed)

    def _waits_for_others(self, state: RequestState) -> bool:
        """Whether to store of a request only after its first step, when all loads are known.

        Another connector may load during a step, into blocks that are shared at once, and the
        step's output says which of them failed. vLLM supports that for a single group only.
        """
        return (self.settings.beside_others or self.others_load) and len(state.groups) == 1

    def _states_held(self, state: RequestState) -> list[State]:
        """States that a request begins with: vLLM never hands them over again if they were lost."""
        end_tokens, state.begins_tokens = state.begins_tokens, 0
        recurrent = [one.group for one in state.groups if one.geometry.attention.recurrent]
        return self.prefix_cache.states_at(state.request, end_tokens, recurrent)

    def _store_scheduled(
        self,
        state: RequestState,
        computed: int,
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        handed: Sequence[State],
    ) -> None:
        request = state.request
        prompt_tokens = state.prompt_tokens
        prompt_done = not state.prompt_tail_done and computed >= prompt_tokens
        groups = state.attending
        self.requests.track(request)
        parts = _state_parts(state.groups, handed)
        # A state is of use to another prompt only with the attention up to it. Behind generated
        # tokens, the end of the request stores that.
        ends = sorted({state.groups[part.group].end_tokens(part.chunk, 1) for part in parts})
        for group in groups:
            parts += _full_parts(group, computed)
            tails = [part for end in ends if end <= prompt_tokens for part in _tail(group, end)]
            if prompt_done:
                # A later token of the same step may have completed its chunk.
                tail = _tail(group, prompt_tokens)
                tails += [part for part in tail if part.chunk >= group.next_chunk]
            parts += dict.fromkeys(tails)
        state.prompt_tail_done |= prompt_done
        next_ends = [group.end_tokens(group.next_chunk + 1, 0) for group in groups]
        if not state.prompt_tail_done:
            next_ends.append(prompt_tokens)
        state.next_store_tokens = min(next_ends, default=sys.maxsize)
        self._plan(state, parts, lambda: block_ids_of(request.request_id))

    def finished(
        self, request: Any, state: RequestState, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Plan to store what a request computed beyond its last full chunk, and pin its prompt."""
        if state.request_params.pin_ms and not state.void:
            self._pin_prompt(state)
        writes = self.settings.writes and state.request_params.writes and not state.undrafted
        # Before its first step vLLM counts tokens as computed that are yet to be loaded.
        begun = state.step_taken if self._waits_for_others(state) else bool(state.scheduled_tokens)
        if not begun or state.load is not None or state.void or not writes:
            return
        state.extend()
        computed = max(0, request.num_computed_tokens - state.in_flight_tokens)
        computed = min(computed, state.chain.decided_tokens)
        parts: list[Part] = []
        for group in state.attending:
            parts += _full_parts(group, computed) + _tail(group, computed)
        self._plan(state, parts, lambda: block_ids)

    def _pin_prompt(self, state: RequestState) -> None:
        """Ask the sidecar to keep in host memory what a hit of the prompt would load."""
        state.extend()
        found = [
            (group.group, group.chain.key_of(piece.chunk, piece.end))
            for group in state.groups
            for piece in pieces_kept(group.geometry, state.prompt_tokens)
        ]
        if not found:
            return
        keys, groups = keys_and_groups(found[:KEYS_PER_MESSAGE_MAX])
        session, pin_ms = self.client.session, state.request_params.pin_ms
        sent = session is not None and self.client.send(
            session, Pin(session.epoch, keys, pin_ms, state.tenant, groups)
        )
        if not sent:
            self.stats.pins_skipped += len(keys)

    def _plan(
        self,
        state: RequestState,
        parts: list[Part],
        block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        session = self.client.session
        if session is None or session.ranks_lack:
            return

        def bytes_max_of(part: Part) -> int:
            tokens = part.blocks * state.groups[part.group].geometry.block_tokens
            block_ids = BLOCK_ID_BYTES_MAX * part.blocks
            return OVERHEAD_BYTES_MAX + TOKEN_ID_BYTES * tokens + block_ids

        for job_parts in batches(parts, bytes_max_of, JOB_BYTES_MAX, KEYS_PER_MESSAGE_MAX):
            store = self.stores.plan(session, state, job_parts, block_ids)
            if store is not None:
                self.planned.append((state, store))


def _full_parts(group: GroupState, computed_tokens: int) -> list[Part]:
    """The full chunks of a group that were not considered for storing yet; now they were."""
    full = computed_tokens // group.geometry.chunk_tokens
    parts = [
        Part(group.group, chunk, group.geometry.blocks_per_chunk, group.chain.keys[chunk])
        for chunk in range(group.next_chunk, full)
    ]
    group.next_chunk = max(group.next_chunk, full)
    return parts


def _tail(group: GroupState, num_tokens: int) -> list[Part]:
    """The whole blocks of `num_tokens` after the last full chunk, if there are any."""
    chunk, tokens = divmod(num_tokens, group.geometry.chunk_tokens)
    blocks = tokens // group.geometry.block_tokens
    return [Part(group.group, chunk, blocks, group.chain.partial(chunk, blocks))] if blocks else []


def _state_parts(groups: Sequence[GroupState], states: Sequence[State]) -> list[Part]:
    """States as parts of their groups."""
    parts: list[Part] = []
    for number, block_id, num_tokens in states:
        chain = groups[number].chain
        blocks, rest = divmod(num_tokens, groups[number].geometry.block_tokens)
        # A state within a block follows no chunk, and keys of later tokens are not known yet.
        if rest == 0 and 0 < blocks <= len(chain.keys):
            parts.append(Part(number, blocks - 1, 1, chain.keys[blocks - 1], block_id))
    return parts
