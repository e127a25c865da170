"""Scheduler role: what is cached, what to load, what to store; one instance per engine.

Owns the decisions, and the talk with the sidecar. Reads the shared index directly (`lookup.py`), so
a lookup costs no message; the sidecar is asked only for chunks that the object store alone holds.
What is known of a request is in `requests.py`, outstanding stores are in `storing.py`.

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
from typing import TYPE_CHECKING, Any, Final

from connector.lookup import HitFinder
from connector.plan import Load, LoadPiece, StepPlan, StepReport
from connector.rate import PrefillRate
from connector.requests import (
    Geometry,
    PendingLookup,
    Requests,
    RequestState,
    Settings,
    Stats,
)
from connector.storing import Stores
from sidecar.protocol import (
    Events,
    Lease,
    Lookup,
    LookupDone,
    Release,
    RemovedEvent,
    StoredEvent,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from connector.client import Client, Session

logger = logging.getLogger("vllm.kvlake")

EVENTS_KEPT_MAX: Final = 65_536
SESSIONS_ASKED_MAX: Final = 4
"""Sessions that one request asks in turn: a sidecar that comes and goes holds no request up."""


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
        self._geometry = geometry
        self._settings = settings
        self._clock = clock
        self._requests = Requests(namespace_digest, geometry)
        self._finder = HitFinder(geometry)
        self._rate = PrefillRate()
        self._stores = Stores(geometry, world_size, clock=clock)
        self._lookups: dict[int, RequestState] = {}
        self._plan = StepPlan()
        self._next_id = 1
        self._loading: set[str] = set()
        self._block_pool: Any = None
        self._stored: list[StoredEvent] = []
        self._removed: list[RemovedEvent] = []
        self._stale_told = 0
        self.stats = Stats()

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, whose reference counts keep blocks of outstanding stores."""
        self._block_pool = block_pool
        self._stores.bind(block_pool)

    # --- lookup --------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Hash the prompt, and ask for what the object store alone holds."""
        state = self._requests.track(request)
        session = self._client.session
        if state is None or session is None or not (self._settings.reads and state.reads):
            return
        # What the engine holds itself need not come from the store; `matched_tokens` asks again
        # once it knows how far the engine's own hit reaches.
        if not request.skip_reading_prefix_cache and not self._engine_holds(request, 0):
            self._ask_store(state, session, 0)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None while the store is being read."""
        state = self._requests.track(request)
        if state is None or state.void or request.skip_reading_prefix_cache:
            return 0
        state.local_tokens = local_tokens
        session = self._client.session
        reads = self._settings.reads and state.reads
        if not reads or state.load_failed or session is None:
            return 0
        if len(self._loading) >= session.limits.jobs_inflight_max:
            # The sidecar would refuse the message, and with it everything else of its step.
            return 0
        if state.lookup is not None and state.lookup.session is not session:
            # Nobody will answer: that sidecar is gone, or has forgotten us. The new one is asked.
            self._forget_lookup(state)
        if state.lookup is None:
            self._ask_store(state, session, local_tokens)
        if state.lookup is not None:
            self._poll()
            if not self._lookup_over(state):
                return None
        hit = self._finder.hit(state, session, local_tokens)
        matched = 0 if hit is None else hit.end_tokens - local_tokens
        return matched if matched >= self._settings.load_tokens_min else 0

    def _ask_store(self, state: RequestState, session: Session, local_tokens: int) -> None:
        """Have the sidecar read what lies behind the hit and in the store alone, if it pays."""
        if state.asked_session is not session:
            if state.asked_sessions >= SESSIONS_ASKED_MAX:
                return
            state.asked_session = session
            state.asked_sessions += 1
        elif state.asked_tokens == local_tokens:
            return
        state.asked_tokens = local_tokens
        hit = self._finder.hit(state, session, local_tokens)
        if hit is None or not hit.wanted:
            return
        # What counts is what it adds to what can be loaded at once.
        if hit.wanted_tokens - hit.end_tokens < self._settings.load_tokens_min:
            return
        lookup_id = self._new_id()
        wait_ms = session.limits.lookup_wait_ms_max
        lookup = Lookup(
            session.epoch,
            lookup_id,
            hit.wanted,
            wait_ms,
            state.tenant,
            hit.wanted_tokens - hit.first_wanted_tokens,
            self._rate.tokens_per_second,
        )
        if self._client.send(session, lookup):
            self.stats.lookups_sent += 1
            state.from_store_keys.update(hit.wanted)
            deadline = self._clock() + wait_ms / 1000
            state.lookup = PendingLookup(lookup_id, deadline, session)
            self._lookups[lookup_id] = state

    def _engine_holds(self, request: Any, token: int) -> bool:
        """Whether the engine's own prefix cache has the block that holds position `token`."""
        block = token // self._geometry.block_tokens
        if self._block_pool is None or block >= len(request.block_hashes):
            return False
        return self._block_pool.get_cached_block(request.block_hashes[block], [0]) is not None

    def _lookup_over(self, state: RequestState) -> bool:
        lookup = state.lookup
        if lookup is None:
            return True
        if self._clock() >= lookup.deadline:
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
        session = self._client.session
        geometry = self._geometry
        first_block = state.local_tokens // geometry.block_tokens
        last_block = (state.local_tokens + external_tokens) // geometry.block_tokens
        pieces: list[LoadPiece] = []
        stored_tokens = 0
        block = first_block
        while block < last_block:
            chunk, inside = divmod(block, geometry.blocks_per_chunk)
            end = min(last_block, (chunk + 1) * geometry.blocks_per_chunk)
            key = self._finder.loaded_key(
                state, session, chunk, end - chunk * geometry.blocks_per_chunk
            )
            pieces.append(LoadPiece(key, inside, list(all_ids[block:end])))
            if key in state.from_store_keys:
                stored_tokens += (end - block) * geometry.block_tokens
            block = end
        load = Load(self._new_id(), request.request_id, pieces)
        state.load = load
        state.hit_sources = (external_tokens - stored_tokens, stored_tokens)
        self._loading.add(request.request_id)
        self._plan.loads.append(load)
        if session is not None:
            # Without the lease the load is only more likely to miss, so a failed send is no fault.
            keys = [piece.key for piece in pieces]
            lease = Lease(session.epoch, load.job_id, keys, state.tenant)
            self._client.send(session, lease)

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
        self._rate.step(self._clock(), sum(scheduled.values()))
        if self._settings.writes:
            for request_id, num_tokens in scheduled.items():
                state = self._requests.get(request_id)
                if state is not None and state.writes and not state.void:
                    self._store_scheduled(state, num_tokens, block_ids_of)
        plan, self._plan = self._plan, StepPlan()
        plan.waiting = bool(self._lookups or self._loading or self.stores_outstanding)
        return plan

    def _store_scheduled(
        self, state: RequestState, num_tokens: int, block_ids_of: Callable[[str], Sequence[int]]
    ) -> None:
        request = state.request
        # Draft tokens and placeholders are not known yet, so they are not counted as computed.
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        geometry = self._geometry
        full = computed // geometry.chunk_tokens
        prompt_done = not state.prompt_tail_done and computed >= request.num_prompt_tokens
        if full <= state.next_chunk and not prompt_done:
            return
        self._requests.track(request)
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
        self._plan_store(state, pieces, lambda: block_ids_of(request.request_id))

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """Store what a finished request computed beyond its last full chunk, and forget it.

        `block_ids` cover its computed tokens. Its blocks are freed right after this call; those
        of outstanding stores stay alive by our references.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._release(state)
        writes = self._settings.writes and state.writes
        if state.load is not None or state.void or not writes:
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
        self._plan_store(state, pieces, lambda: block_ids)

    def _plan_store(
        self,
        state: RequestState,
        pieces: list[tuple[int, int, bytes]],
        block_ids: Callable[[], Sequence[int]],
    ) -> None:
        session = self._client.session
        if session is None:
            return
        store = self._stores.plan(session, state, pieces, block_ids, self.stats, self._new_id)
        if store is not None:
            self._plan.stores.append(store)

    def stores_ended(self, report: StepReport) -> None:
        """Ranks reported ended stores: give the blocks back when the last rank did."""
        self.stats.stores_failed += report.failed
        self.stats.stores_expired += report.stores_expired
        self.stats.loads_expired += report.loads_expired
        self._stores.ended(report)

    @property
    def stores_outstanding(self) -> int:
        """Store jobs whose blocks are still held."""
        return self._stores.outstanding

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of outstanding stores rather than preempt a request."""
        return self._stores.blocks_coming_back()

    # --- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything cached so far: from now on keys are of a new generation.

        Other engines that share the tiers keep what they have; what this engine stored before
        ages out.
        """
        self._requests.generation = os.urandom(16)
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
        stale = self._client.answers_stale
        stats.answers_stale, self._stale_told = stale - self._stale_told, stale
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

    def _forget_lookup(self, state: RequestState) -> None:
        if state.lookup is not None:
            self._lookups.pop(state.lookup.lookup_id, None)
            state.lookup = None

    def _release(self, state: RequestState) -> None:
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
