"""Scheduler role: what is cached, what to load, what to store; one instance per engine.

Owns, per request, its key chain and what was decided for it, and, per store job, the references
that keep its source blocks alive. Reads the shared index directly, so a lookup costs no message;
the sidecar is asked only for chunks that the object store alone holds.

Invariants:

* `matched_tokens` changes nothing that another call would see differently, and costs microseconds.
* A load covers exactly the blocks between the engine's own hit and the end of the external one.
* A block whose store is outstanding has one reference of ours in vLLM's block pool, whatever
  becomes of its request (finished, aborted, preempted), and loses it when all ranks reported.
* Tokens that were to be loaded but were not are never stored.
* A request whose tokens may change behind us (streaming input) or that has none (embeddings) is
  not cached at all.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from connector.keys import KeyChain, MediaItem, root_key
from connector.namespace import adapter_identity
from connector.plan import Load, LoadPiece, StepPlan, StepReport, Store, StorePiece
from sidecar.protocol import (
    Events,
    Lease,
    Lookup,
    LookupDone,
    Release,
    RemovedEvent,
    StoredEvent,
)
from tiers.index import FLAG_HOST, FLAG_STORE, tags_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from connector.client import Client, Session

logger = logging.getLogger("vllm.kvlake")

EVENTS_KEPT_MAX: Final = 65_536
BLOCKS_WAIT_SECONDS_MAX: Final = 0.5
"""How long the engine waits, without any store ending, for blocks rather than preempt."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tokens per engine block and per full chunk."""

    block_tokens: int
    chunk_tokens: int

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a full chunk."""
        return self.chunk_tokens // self.block_tokens


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator decided in vLLM's configuration for this engine.

    `load_tokens_min`: a load shorter than this is not worth its extra scheduler step.
    """

    reads: bool
    writes: bool
    load_tokens_min: int = 64


@dataclass(slots=True)
class _Hit:
    """The external run beyond the engine's own hit, as the index shows it now."""

    end_tokens: int
    wanted: list[bytes]
    """Keys right behind the run that only the store holds."""
    wanted_tokens: int
    """Where the run would end with them."""


@dataclass(slots=True)
class _PendingLookup:
    lookup_id: int
    deadline: float
    session: Session


@dataclass(slots=True)
class _Request:
    request: Any
    chain: KeyChain
    tags: npt.NDArray[np.uint64]
    tags_salt: bytes = b""
    partial_tags: dict[int, npt.NDArray[np.uint64]] = field(
        default_factory=dict[int, npt.NDArray[np.uint64]]
    )
    """Chunk index to the tags of its pieces, longest first."""
    local_tokens: int = 0
    lookup: _PendingLookup | None = None
    asked_tokens: int = -1
    """The engine's own hit for which the store was last asked about."""
    from_store_keys: set[bytes] = field(default_factory=set[bytes])
    load: Load | None = None
    load_failed: bool = False
    void: bool = False
    """The cache was reset while this request ran: its KV is of the old weights."""
    next_chunk: int = 0
    """Chunks before this one were considered for storing."""
    prompt_tail_done: bool = False
    counted: bool = False
    """It is in the statistics as a hit or a miss."""
    hit_sources: tuple[int, int] = (0, 0)
    """Tokens of the last load from host memory, and through it from the object store."""


@dataclass(slots=True)
class _StoreJob:
    blocks: list[Any]
    keys: list[bytes]
    ranks_left: int


@dataclass(slots=True)
class Stats:
    """Counted since the last call of `take_stats`; names are those of the exported metrics.

    A request is a hit when its first load succeeded, and a miss when it was scheduled without.
    """

    requests_hit: int = 0
    requests_missed: int = 0
    tokens_loaded_host: int = 0
    tokens_loaded_store: int = 0
    loads_failed: int = 0
    lookups_sent: int = 0
    lookups_expired: int = 0
    chunks_stored: int = 0
    stores_skipped: int = 0
    stores_failed: int = 0


class SchedulerRole:
    """The scheduler's end of the connector.

    Args:
        client: a session with the sidecar that comes and goes.
        namespace_digest: 32 bytes, from `namespace.digest_of`.
        world_size: ranks that report each store.
    """

    def __init__(
        self,
        client: Client,
        namespace_digest: bytes,
        geometry: Geometry,
        settings: Settings,
        world_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._namespace_digest = namespace_digest
        self._geometry = geometry
        self._settings = settings
        self._world_size = world_size
        self._clock = clock
        self._generation = b""
        self._requests: dict[str, _Request] = {}
        self._lookups: dict[int, _Request] = {}
        self._plan = StepPlan()
        self._next_id = 1
        self._adapters: dict[tuple[str, str, int], str] = {}
        self._loading: set[str] = set()
        self._blocks_awaited_since: float | None = None
        self._store_jobs: dict[int, _StoreJob] = {}
        self._storing: set[bytes] = set()
        self._block_pool: Any = None
        self._stored: list[StoredEvent] = []
        self._removed: list[RemovedEvent] = []
        self.stats = Stats()

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, whose reference counts keep blocks of outstanding stores."""
        self._block_pool = block_pool

    # --- lookup --------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Hash the prompt, and ask for what the object store alone holds."""
        state = self._track(request)
        session = self._client.session
        if state is None or session is None or not self._settings.reads:
            return
        # What the engine holds itself need not come from the store; `matched_tokens` asks again
        # once it knows how far the engine's own hit reaches.
        if not request.skip_reading_prefix_cache and not self._engine_holds(request, 0):
            self._ask_store(state, session, 0)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None while the store is being read."""
        state = self._track(request)
        if state is None or state.void or request.skip_reading_prefix_cache:
            return 0
        state.local_tokens = local_tokens
        session = self._client.session
        if not self._settings.reads or state.load_failed or session is None:
            return 0
        if len(self._loading) >= session.limits.jobs_inflight_max:
            # The sidecar would refuse the message, and with it everything else of its step.
            return 0
        if state.lookup is None:
            self._ask_store(state, session, local_tokens)
        if state.lookup is not None:
            self._poll()
            if not self._lookup_over(state, session):
                return None
        hit = self._hit(state, session, local_tokens)
        matched = 0 if hit is None else hit.end_tokens - local_tokens
        return matched if matched >= self._settings.load_tokens_min else 0

    def _track(self, request: Any) -> _Request | None:
        """State of a request with its chain grown to all its tokens; None if it is not cached."""
        state = self._requests.get(request.request_id)
        if state is None:
            if request.prompt_embeds is not None or request.resumable:
                # Embeddings have no token ids to make a key of; the next input of a streaming
                # session replaces tokens that were hashed already.
                return None
            adapter = self._adapter(request.lora_request)
            if adapter is None:
                return None
            root = root_key(
                self._namespace_digest,
                salt=request.cache_salt or "",
                lora=adapter,
                generation=self._generation,
            )
            media = [
                MediaItem(item.identifier, item.mm_position.offset, item.mm_position.length)
                for item in request.mm_features
            ]
            geometry = self._geometry
            state = _Request(
                request=request,
                chain=KeyChain(root, geometry.chunk_tokens, geometry.block_tokens, media),
                tags=np.empty((0, 2), dtype=np.uint64),
            )
            self._requests[request.request_id] = state
        known = state.chain.num_tokens
        if request.num_tokens > known:
            state.chain.extend(request.all_token_ids[known:])
        return state

    def _adapter(self, lora: Any) -> str | None:
        """What tells a LoRA adapter's KV from others'; None if its files cannot be read."""
        if lora is None:
            return ""
        place = (lora.lora_name, lora.lora_path, lora.lora_int_id)
        identity = self._adapters.get(place)
        # One that is reloaded in place may have changed since it was last read.
        if identity is None or lora.load_inplace:
            try:
                identity = self._adapters[place] = adapter_identity(lora.lora_name, lora.lora_path)
            except OSError as error:
                logger.warning("kvlake: adapter %s is not cached: %s", lora.lora_name, error)
                return None
        return identity

    def _tags(self, state: _Request, session: Session) -> npt.NDArray[np.uint64]:
        keys = state.chain.keys
        if state.tags_salt != session.index_salt:
            state.tags_salt = session.index_salt
            state.tags = tags_of(keys, session.index_salt)
            state.partial_tags.clear()
        elif len(state.tags) < len(keys):
            fresh = tags_of(keys[len(state.tags) :], session.index_salt)
            state.tags = np.concatenate([state.tags, fresh])
        return state.tags

    def _hit(self, state: _Request, session: Session, local_tokens: int) -> _Hit | None:
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
        return _Hit(max(end_tokens, local_tokens), wanted, wanted_tokens)

    def _partial(
        self, state: _Request, session: Session, index: int, tiers: int
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

    def _ask_store(self, state: _Request, session: Session, local_tokens: int) -> None:
        """Have the sidecar read what lies behind the hit and in the store alone, if it pays."""
        if state.asked_tokens == local_tokens:
            return
        state.asked_tokens = local_tokens
        hit = self._hit(state, session, local_tokens)
        if hit is None or not hit.wanted:
            return
        # What counts is what it adds to what can be loaded at once.
        if hit.wanted_tokens - hit.end_tokens < self._settings.load_tokens_min:
            return
        lookup_id = self._new_id()
        wait_ms = session.limits.lookup_wait_ms_max
        if self._client.send(session, Lookup(session.epoch, lookup_id, hit.wanted, wait_ms)):
            self.stats.lookups_sent += 1
            state.from_store_keys.update(hit.wanted)
            deadline = self._clock() + wait_ms / 1000
            state.lookup = _PendingLookup(lookup_id, deadline, session)
            self._lookups[lookup_id] = state

    def _engine_holds(self, request: Any, token: int) -> bool:
        """Whether the engine's own prefix cache has the block that holds position `token`."""
        block = token // self._geometry.block_tokens
        if self._block_pool is None or block >= len(request.block_hashes):
            return False
        return self._block_pool.get_cached_block(request.block_hashes[block], [0]) is not None

    def _lookup_over(self, state: _Request, session: Session) -> bool:
        lookup = state.lookup
        if lookup is None:
            return True
        if lookup.session is not session or self._clock() >= lookup.deadline:
            self.stats.lookups_expired += 1
            self._forget_lookup(state)
            return True
        return False

    # --- load ----------------------------------------------------------------------------------

    def allocated(
        self, request: Any, block_ids: Callable[[], Sequence[int]], external_tokens: int
    ) -> None:
        """Plan the load of `external_tokens` behind the engine's own hit into its new blocks."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if external_tokens <= 0:
            self.stats.requests_missed += not state.counted
            state.counted = True
            return
        all_ids = block_ids()
        geometry = self._geometry
        first_block = state.local_tokens // geometry.block_tokens
        last_block = (state.local_tokens + external_tokens) // geometry.block_tokens
        pieces: list[LoadPiece] = []
        stored_tokens = 0
        block = first_block
        while block < last_block:
            chunk, inside = divmod(block, geometry.blocks_per_chunk)
            end = min(last_block, (chunk + 1) * geometry.blocks_per_chunk)
            key = self._loaded_key(state, chunk, end - chunk * geometry.blocks_per_chunk)
            pieces.append(LoadPiece(key, inside, list(all_ids[block:end])))
            if key in state.from_store_keys:
                stored_tokens += (end - block) * geometry.block_tokens
            block = end
        load = Load(self._new_id(), request.request_id, pieces)
        state.load = load
        state.hit_sources = (external_tokens - stored_tokens, stored_tokens)
        self._loading.add(request.request_id)
        self._plan.loads.append(load)
        session = self._client.session
        if session is not None:
            # Without the lease the load is only more likely to miss, so a failed send is no fault.
            keys = [piece.key for piece in pieces]
            self._client.send(session, Lease(session.epoch, load.job_id, keys))

    def _loaded_key(self, state: _Request, chunk: int, blocks: int) -> bytes:
        """Key under which the first `blocks` blocks of a chunk were found."""
        keys = state.chain.keys
        if blocks == self._geometry.blocks_per_chunk:
            return keys[chunk]
        session = self._client.session
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

    def hit_sources(self, request: Any) -> tuple[int, int]:
        """Tokens of the planned load by tier: from host memory, from the object store."""
        state = self._requests.get(request.request_id)
        return state.hit_sources if state is not None else (0, 0)

    def loads_ended(self, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """All ranks finished these requests' loads; those that failed are not tried again."""
        failed = set(failed)
        for request_id in loaded:
            self._loading.discard(request_id)
            state = self._requests.get(request_id)
            if state is None or state.load is None:
                continue
            state.load = None
            host, store = state.hit_sources
            if request_id in failed:
                state.load_failed = True
                self.stats.loads_failed += 1
            else:
                self.stats.requests_hit += not state.counted
                state.counted = True
                self.stats.tokens_loaded_host += host
                self.stats.tokens_loaded_store += store

    # --- store ---------------------------------------------------------------------------------

    def build_plan(
        self,
        scheduled: dict[str, int],
        block_ids_of: Callable[[str], Sequence[int]],
    ) -> StepPlan:
        """Jobs of the step being scheduled.

        Args:
            scheduled: request id to the number of tokens that it computes in this step.
            block_ids_of: all block ids of a scheduled request, in order.
        """
        self._poll()
        if self._settings.writes:
            for request_id, num_tokens in scheduled.items():
                state = self._requests.get(request_id)
                if state is not None and not state.void:
                    self._store_scheduled(state, num_tokens, block_ids_of)
        plan, self._plan = self._plan, StepPlan()
        return plan

    def _store_scheduled(
        self, state: _Request, num_tokens: int, block_ids_of: Callable[[str], Sequence[int]]
    ) -> None:
        request = state.request
        # Draft tokens and placeholders are not known yet, so they are not counted as computed.
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        geometry = self._geometry
        full = computed // geometry.chunk_tokens
        prompt_done = not state.prompt_tail_done and computed >= request.num_prompt_tokens
        if full <= state.next_chunk and not prompt_done:
            return
        self._track(request)
        pieces: list[tuple[int, int, bytes]] = [
            (chunk, geometry.blocks_per_chunk, state.chain.keys[chunk])
            for chunk in range(state.next_chunk, full)
        ]
        state.next_chunk = max(state.next_chunk, full)
        if prompt_done:
            state.prompt_tail_done = True
            tail, tokens = divmod(request.num_prompt_tokens, geometry.chunk_tokens)
            blocks = tokens // geometry.block_tokens
            if blocks and tail >= full:
                pieces.append((tail, blocks, state.chain.partial(tail, blocks)))
        self._store(state, pieces, lambda: block_ids_of(request.request_id))

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """Store what a finished request computed beyond its last full chunk, and forget it.

        `block_ids` cover its computed tokens. Its blocks are freed right after this call; those
        of outstanding stores stay alive by our references.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._release(state)
        if state.load is not None or state.void or not self._settings.writes:
            # Aborted while loading: vLLM already counts tokens that never came.
            return
        if request.num_tokens > state.chain.num_tokens:
            state.chain.extend(request.all_token_ids[state.chain.num_tokens :])
        geometry = self._geometry
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        computed = min(max(0, request.num_computed_tokens - in_flight), request.num_tokens)
        full, tokens = divmod(computed, geometry.chunk_tokens)
        pieces = [
            (chunk, geometry.blocks_per_chunk, state.chain.keys[chunk])
            for chunk in range(state.next_chunk, full)
        ]
        blocks = tokens // geometry.block_tokens
        if blocks:
            pieces.append((full, blocks, state.chain.partial(full, blocks)))
        self._store(state, pieces, lambda: block_ids)

    def _store(
        self,
        state: _Request,
        pieces: list[tuple[int, int, bytes]],
        block_ids: Callable[[], Sequence[int]],
    ) -> None:
        """Plan the store of `(chunk, blocks, key)` pieces that nobody holds or is storing."""
        session = self._client.session
        if not pieces or session is None or session.index is None or self._block_pool is None:
            return
        tags = tags_of([key for _, _, key in pieces], session.index_salt)
        in_host = session.index.lookup(tags) & FLAG_HOST
        wanted = [
            piece
            for piece, held in zip(pieces, in_host, strict=True)
            if not held and piece[2] not in self._storing
        ]
        if not wanted:
            return
        if len(self._store_jobs) >= session.limits.jobs_inflight_max:
            self.stats.stores_skipped += len(wanted)
            return
        all_ids = block_ids()
        job_id = self._new_id()
        per_chunk = self._geometry.blocks_per_chunk
        stores: list[StorePiece] = []
        for chunk, blocks, key in wanted:
            ids = list(all_ids[chunk * per_chunk : chunk * per_chunk + blocks])
            if len(ids) < blocks:
                continue
            tokens = state.chain.tokens(chunk, blocks)
            stores.append(StorePiece(key, state.chain.parent(chunk), tokens, ids))
        if not stores:
            return
        held_blocks = [
            self._block_pool.blocks[block_id] for piece in stores for block_id in piece.block_ids
        ]
        self._block_pool.touch(held_blocks)
        keys = [piece.key for piece in stores]
        self._storing.update(keys)
        self._store_jobs[job_id] = _StoreJob(held_blocks, keys, self._world_size)
        self._plan.stores.append(Store(job_id, stores))
        self.stats.chunks_stored += len(stores)

    def stores_ended(self, report: StepReport) -> None:
        """Ranks reported ended stores: give the blocks back when the last rank did."""
        self.stats.stores_failed += report.failed
        for job_id, ranks in report.ended.items():
            job = self._store_jobs.get(job_id)
            if job is None:
                continue
            job.ranks_left -= ranks
            if job.ranks_left <= 0:
                del self._store_jobs[job_id]
                self._blocks_awaited_since = None
                self._storing.difference_update(job.keys)
                # Tail first, as vLLM frees a request: the head of a prefix is the more useful.
                self._block_pool.free_blocks(reversed(job.blocks))

    @property
    def stores_outstanding(self) -> int:
        """Store jobs whose blocks are still held."""
        return len(self._store_jobs)

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of outstanding stores rather than preempt a request for some.

        They come back in milliseconds, except from a sidecar that is stuck.
        """
        if not self._store_jobs:
            return False
        now = self._clock()
        if self._blocks_awaited_since is None:
            self._blocks_awaited_since = now
        return now - self._blocks_awaited_since < BLOCKS_WAIT_SECONDS_MAX

    # --- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything cached so far: from now on keys are of a new generation.

        Other engines that share the tiers keep what they have; what this engine stored before
        ages out.
        """
        self._generation = os.urandom(16)
        for state in self._requests.values():
            state.void = True

    def take_events(self) -> tuple[list[StoredEvent], list[RemovedEvent]]:
        """What the tiers gained and lost since the last call."""
        stored, removed = self._stored, self._removed
        self._stored, self._removed = [], []
        return stored, removed

    def take_stats(self) -> Stats:
        """Counts since the last call."""
        stats, self.stats = self.stats, Stats()
        return stats

    def close(self) -> None:
        """Detach from the sidecar."""
        self._client.close()

    def _poll(self) -> None:
        for message in self._client.poll():
            if isinstance(message, LookupDone):
                self._lookup_done(message)
            elif isinstance(message, Events):
                self._stored.extend(message.stored)
                self._removed.extend(message.removed)
                # A reader of events that stopped reading must not make this process grow.
                del self._stored[:-EVENTS_KEPT_MAX]
                del self._removed[:-EVENTS_KEPT_MAX]

    def _lookup_done(self, message: LookupDone) -> None:
        state = self._lookups.get(message.lookup_id)
        if state is not None:
            self._forget_lookup(state)

    def _forget_lookup(self, state: _Request) -> None:
        if state.lookup is not None:
            self._lookups.pop(state.lookup.lookup_id, None)
            state.lookup = None

    def _release(self, state: _Request) -> None:
        # Only a lookup is given back: a load that runs on keeps its lease, which ends with it.
        lookup = state.lookup
        self._forget_lookup(state)
        if lookup is not None:
            release = Release(lookup.session.epoch, [], [lookup.lookup_id])
            self._client.send(lookup.session, release)

    def _new_id(self) -> int:
        # One sequence for all jobs: `tiers.fence` revokes by order of id.
        self._next_id += 1
        return self._next_id


def _leading(flags: npt.NDArray[np.integer[Any]]) -> int:
    """How many entries are non-zero before the first zero."""
    zeros = np.flatnonzero(flags == 0)
    return int(zeros[0]) if len(zeros) else len(flags)
