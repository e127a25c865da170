"""Scheduler role: what is cached, what to load, what to store; one instance per engine.

Owns the decisions, and the talk with the sidecar. Reads the shared index directly (`lookup.py`), so
a lookup costs no message; the sidecar is asked only for chunks that the object store alone holds.
What is known of a request is in `requests.py`, what it waits for in `pending.py`; outstanding
stores are in `stores.py`.

Invariants:

* `matched_tokens` changes nothing that another call would see differently, and costs microseconds;
  before a hit of an adapter it looks whether that one's files are still the same.
* A load covers exactly the blocks between the engine's own hit and the end of the external one,
  in every KV cache group; of a group that reads a window, those that its window still reads, and
  of recurrent layers the state at that end.
* A block whose store is outstanding has one reference of ours in vLLM's block pool, whatever
  becomes of its request (finished, aborted, preempted), and loses it when all ranks reported.
* Tokens that were to be loaded but were not are never stored, whoever was to load them; nor are
  drafts, before they are known to be the request's own.
* A request whose tokens may change behind us (streaming input) or that has none (embeddings) is
  not cached at all.
"""

from __future__ import annotations

import logging
import os
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from connector.identity.speculative import NO_DRAFTS, Speculation
from connector.plan import Load, LoadPiece, StepPlan, StepReport
from connector.rate import PrefillRate
from connector.request_params import EXPECT, PARAMS
from connector.scheduler.lookup import HitFinder, pieces_kept, pieces_of
from connector.scheduler.pending import PendingLookups
from connector.scheduler.requests import GroupState, Requests, RequestState, Settings, Stats
from connector.scheduler.stores import (
    Part,
    Stores,
    blocks_cached,
    in_jobs,
    state_parts,
    states_held,
)
from connector.tier_events import TierEvents
from connector.vllm_workarounds import UncomputedBlocks
from sidecar.protocol import KEYS_PER_MESSAGE_MAX, Lease, LookupDone, Pin, Release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from connector.client import Client
    from connector.identity.groups import CachedGroup
    from connector.identity.mamba import State
    from connector.tier_events import TierEvent

logger = logging.getLogger("vllm.kvlake")


class SchedulerRole:
    """The scheduler's end of the connector.

    Args:
        client: a session with the sidecar that comes and goes.
        groups: the engine's KV cache groups, in vLLM's order.
        world_size: ranks that report each store.
        drafting: how the engine drafts tokens.
        num_blocks: blocks in the engine's pool, which count where it drafts.
    """

    def __init__(
        self,
        client: Client,
        groups: Sequence[CachedGroup],
        settings: Settings,
        world_size: int,
        *,
        speculation: Speculation = NO_DRAFTS,
        num_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self._speculation = speculation
        self._num_blocks = num_blocks
        geometries = self._geometries = [group.geometry for group in groups]
        # The group that says what an external hit is worth: one that reads all tokens, if any does.
        full = [number for number, each in enumerate(geometries) if each.attention.full]
        self._main = full[0] if full else 0
        self._several_groups = len(groups) > 1
        self._recurrent = [one for one, each in enumerate(geometries) if each.attention.recurrent]
        self._settings = settings
        self.clock = clock
        self.requests = Requests(
            groups,
            settings,
            ahead_tokens=speculation.ahead_tokens,
            cached_names=self._cached_names,
            world_size=world_size,
        )
        self._finder = HitFinder(geometries)
        self.rate = PrefillRate()
        self.waits = PendingLookups(
            client,
            self._finder,
            self.rate,
            self.new_id,
            load_tokens_min=settings.load_tokens_min,
            clock=clock,
        )
        self.stores = Stores(geometries, world_size, clock=clock)
        self.uncomputed_blocks = UncomputedBlocks()
        self.plan = StepPlan()
        self._next_id = 1
        self.loading: set[str] = set()
        self._world_size = world_size
        self._unsent: dict[int, RequestState] = {}
        """Whose the stores are that are planned and not sent yet."""
        self._block_pool: Any = None
        self._pool_names: Any = None
        """The pool's map of cached blocks, as it was when events were taken last."""
        self._planned_names: Any = None
        """The same, as it was in the last step."""
        self._stale_names: Any = None
        """The same, of before the connector was reset, where vLLM's own cache was not."""
        self._tiers = TierEvents()
        self.beside_others = settings.beside_others
        self._stale_told = 0
        self.retired = False
        self._weight_changes = 0
        self.stats = Stats()

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take vLLM's block pool, whose reference counts keep blocks of outstanding stores."""
        self._block_pool = block_pool
        self.stores.bind(block_pool)

    # --- lookup --------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Hash the prompt, and ask for what the object store alone holds."""
        session = None if self.retired else self.client.session
        self.stats.requests_uncached += session is None
        if self.retired:
            return
        state = self.requests.track(request)
        if state is None or session is None or not self._reads(state):
            return
        if state.request_params.expects_tokens:
            self.waits.expect(state, session)
            return
        # What the engine holds itself need not come from the store; `matched_tokens` asks again
        # once it knows how far the engine's own hit reaches.
        if not request.skip_reading_prefix_cache and not self._engine_holds_start(state):
            self.waits.ask_store(state, session, 0, self.stats)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None while the store is being read."""
        if self.retired:
            return 0
        state = self.requests.track(request)
        if state is None:
            return 0
        state.local_tokens = state.known_tokens = local_tokens
        if state.void or request.skip_reading_prefix_cache or self._begins_stale(state):
            return 0
        session = self.client.session
        if not self._reads(state) or state.load_failed or session is None:
            return 0
        if len(self.loading) >= session.limits.jobs_inflight_max:
            # The sidecar would refuse the message, and with it everything else of its step.
            return 0
        self.waits.leave_others(state, session)
        if self.waits.expecting(state, session, local_tokens, self.stats):
            return None
        if state.lookup is None:
            self.waits.ask_store(state, session, local_tokens, self.stats)
        if state.lookup is not None:
            self._poll()
            if self.waits.reading(state, self.stats):
                return None
        hit = self._finder.hit(state, session, local_tokens)
        matched = 0 if hit is None else hit.end_tokens - local_tokens
        if matched < self._settings.load_tokens_min or not self._fits(local_tokens + matched):
            return 0
        if not self.requests.adapters.unchanged(request.lora_request, state.adapter.files):
            self.requests.void(state)
            return 0
        return matched

    def _fits(self, end_tokens: int) -> bool:
        """Whether vLLM would ever begin to load a hit that ends here, were nothing else running.

        An engine that drafts keeps blocks for a step's drafts free beside a load, but not beside a
        request that it computes. A load that leaves it none is asked about for ever, and all that
        is queued behind it waits.
        """
        drafts = self._speculation.draft_tokens
        if not drafts:
            return True
        needed = 0
        for geometry in self._geometries:
            read = end_tokens // geometry.block_tokens - geometry.first_block(end_tokens)
            # The next token, the drafts, and what a drafter with layers writes ahead of them.
            kept_tokens = 1 + 2 * drafts
            needed += read - (-kept_tokens // geometry.block_tokens)
        # One block of the pool is the null block, which nobody is given.
        return needed < self._num_blocks

    def _reads(self, state: RequestState) -> bool:
        # An adapter that was loaded before its first request may be of other files. The workers
        # say so with their next step, so its first request is computed.
        return (
            self._settings.reads
            and state.request_params.reads
            and self.requests.adapters.confirmed(state.adapter_id, state.adapter.files)
        )

    def _misses(self, state: RequestState) -> bool:
        """Whether a request that begins without a load lacks what is worth one."""
        reads = self._settings.reads and state.request_params.reads
        if not reads or state.request.skip_reading_prefix_cache:
            return False
        return self._finder.lacks(state, state.local_tokens) >= self._settings.load_tokens_min

    def _engine_holds_start(self, state: RequestState) -> bool:
        """Whether the engine's own prefix cache has a request's first block."""
        first_tokens = state.groups[self._main].geometry.block_tokens
        held = blocks_cached(self._block_pool, state.request, first_tokens, [self._main])
        return held is not None

    # --- load ----------------------------------------------------------------------------------

    def allocated(
        self, request: Any, block_ids: Callable[[], Sequence[Sequence[int]]], external_tokens: int
    ) -> None:
        """Plan the load of `external_tokens` behind the engine's own hit into its new blocks.

        `block_ids` gives the request's block table of each KV cache group.
        """
        self.uncomputed_blocks.allocated(request)
        state = self.requests.get(request.request_id)
        if state is None:
            return
        state.scheduled_tokens = 0
        state.void |= self._begins_stale(state)
        if external_tokens <= 0:
            state.begins_tokens = state.local_tokens
            self.stats.requests_missed += not state.counted and self._misses(state)
            state.counted = True
            # Its own hit has grown, for example, past what it had read.
            self.waits.give_back(state)
            return
        tables = block_ids()
        session = self.client.session
        end_tokens = state.known_tokens = state.local_tokens + external_tokens
        pieces: list[LoadPiece] = []
        stored_tokens = 0
        for number, (group, table) in enumerate(zip(state.groups, tables, strict=True)):
            geometry = group.geometry
            for chunk, first, last in pieces_of(geometry, state.local_tokens, end_tokens):
                key = self._finder.loaded_key(group, session, chunk, last)
                start = chunk * geometry.blocks_per_chunk
                ids = list(table[start + first : start + last])
                pieces.append(LoadPiece(key, first, ids, number))
                if number == self._main and key in state.from_store_keys:
                    stored_tokens += len(ids) * geometry.block_tokens
        load = Load(self.new_id(), request.request_id, pieces)
        state.load = load
        state.hit_sources = (external_tokens - stored_tokens, stored_tokens)
        self.loading.add(request.request_id)
        self.plan.loads.append(load)
        if session is not None:
            # Without the lease the load is only more likely to miss, so a failed send is no fault.
            keys = [piece.key for piece in pieces]
            lease = Lease(session.epoch, load.job_id, keys, state.tenant)
            self.client.send(session, lease)
        # After the lease, so that what both pin is never without a pin in between.
        self.waits.give_back(state)

    def hit_sources(self, request: Any) -> tuple[int, int]:
        """Tokens of the planned load by tier: from host memory, from the object store."""
        state = self.requests.get(request.request_id)
        return state.hit_sources if state is not None else (0, 0)

    def loads_ended(self, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """All ranks finished these requests' loads; those that failed are not tried again."""
        failed = set(failed)
        for request_id in failed:
            # Of another connector's, too: beside the blocks that such a request still has reserved
            # vLLM may never find room for another load, and all that is queued behind it waits.
            if (state := self.requests.get(request_id)) is not None:
                state.load_failed = True
        for request_id in loaded:
            self.loading.discard(request_id)
            state = self.requests.get(request_id)
            if state is None or state.load is None:
                continue
            load, state.load = state.load, None
            host, store = state.hit_sources
            if request_id in failed:
                self.stats.loads_failed += 1
                self._release(load)
            else:
                self.stats.requests_hit += not state.counted
                state.counted = True
                self.stats.tokens_loaded_host += host
                self.stats.tokens_loaded_store += store

    def _release(self, load: Load) -> None:
        """End the lease of a load that failed: where no rank sent it, the sidecar waits for it."""
        session = self.client.session
        if session is not None:
            self.client.send(session, Release(session.epoch, [load.job_id], []))

    def blocks_failed(self, block_ids: Iterable[int]) -> None:
        """Another connector was to load these blocks, and did not: vLLM computes them again."""
        self.stores.distrust(block_ids)

    # --- store ---------------------------------------------------------------------------------

    def build_plan(
        self,
        scheduled: dict[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[State]] = MappingProxyType({}),
        preempted: Iterable[str] = (),
    ) -> StepPlan:
        """Jobs of the step being scheduled.

        Args:
            scheduled: request id to the number of tokens that it computes in this step.
            block_ids_of: all block ids of a scheduled request, in order, of each KV cache group.
            states: of recurrent layers, those that the engine hands over with this step.
            preempted: requests that lost their blocks since the last step.
        """
        self.uncomputed_blocks.step(scheduled, preempted, self._block_pool, len(self._geometries))
        self._poll()
        self.rate.step(self.clock(), sum(scheduled.values()))
        self._discard_void()
        self._planned_names = self._cached_names()
        if self._settings.writes:
            self._store_step(scheduled, block_ids_of, states)
        plan, self.plan = self.plan, StepPlan()
        self._unsent.clear()
        self.requests.ended.clear()
        plan.retired = self.retired
        plan.weight_changes = self._weight_changes
        plan.waiting = bool(self.waits.pending or self.loading or self.stores_outstanding)
        return plan

    def _discard_void(self) -> None:
        """Of what was planned since the last step, store nothing that is void by now."""
        void = {job_id for job_id, state in self._unsent.items() if state.void}
        if void:
            self.plan.stores = [one for one in self.plan.stores if one.job_id not in void]
            self.stores.ended(StepReport(dict.fromkeys(void, self._world_size)))

    def _store_step(
        self,
        scheduled: dict[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[State]],
    ) -> None:
        requests = [
            (state, num_tokens)
            for request_id, num_tokens in scheduled.items()
            if (state := self.requests.get(request_id)) is not None
        ]
        if self._speculation.leaves_out(one.request.num_computed_tokens + n for one, n in requests):
            for state, _ in requests:
                state.undrafted = True
        # Seen before the first of them is stored: requests of one step may share blocks.
        unknown = [
            state
            for state, _ in requests
            if not state.scheduled_tokens and state.request.num_computed_tokens > state.known_tokens
        ]
        self.beside_others |= bool(unknown)
        for state in unknown:
            # Of a block that vLLM's own cache has in part, for example.
            state.void |= self._shares_stale(state)
        for state, num_tokens in requests:
            begun = state.step_taken
            state.scheduled_tokens += num_tokens
            if self._waits_for_others and not begun:
                continue
            if state.request_params.writes and not (state.void or state.undrafted):
                handed = [
                    *states.get(state.request.request_id, ()),
                    *self._states_held(state),
                ]
                self._store_scheduled(state, num_tokens, block_ids_of, handed)

    @property
    def _waits_for_others(self) -> bool:
        """Whether to store of a request only after its first step, when all loads are known.

        Another connector may load while a step computes, into blocks that vLLM's prefix cache
        shares at once, and tell with the step's output which of them did not come. Of an engine
        with several groups vLLM takes no such word: that ends it.
        """
        return self.beside_others and not self._several_groups

    def _states_held(self, state: RequestState) -> list[State]:
        """States that a request begins with: the engine never hands these over again.

        Of what a sidecar lost, attention is stored again with every request that has it.
        """
        num_tokens, state.begins_tokens = state.begins_tokens, 0
        return states_held(self._block_pool, state.request, num_tokens, self._recurrent)

    def _store_scheduled(
        self,
        state: RequestState,
        num_tokens: int,
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        handed: Sequence[State],
    ) -> None:
        request = state.request
        # Draft tokens and placeholders are not known yet, so they are not counted as computed.
        ahead_tokens = self._speculation.ahead_tokens
        computed = min(request.num_computed_tokens + num_tokens, request.num_tokens - ahead_tokens)
        prompt_tokens = request.num_prompt_tokens - ahead_tokens
        prompt_done = not state.prompt_tail_done and computed >= prompt_tokens
        groups = state.attending
        if not (prompt_done or handed) and all(
            computed // group.geometry.chunk_tokens <= group.next_chunk for group in groups
        ):
            return
        self.requests.track(request)
        parts = state_parts(state.groups, handed)
        # A state is of use to a prompt that parts there only with the attention up to there. Where
        # it is behind generated tokens, the end of the request stores that.
        ends = {part.tokens_of(state.groups) for part in parts}
        for group in groups:
            parts += _full_parts(group, computed)
            tails = [_tail_part(group, end) for end in sorted(ends) if end <= prompt_tokens]
            if prompt_done:
                tail = _tail_part(group, prompt_tokens)
                # A later token of the same step may have completed its chunk.
                if tail is not None and tail.chunk >= group.next_chunk:
                    tails.append(tail)
            parts += dict.fromkeys(tail for tail in tails if tail is not None)
        state.prompt_tail_done |= prompt_done
        self._plan_store(state, parts, lambda: block_ids_of(request.request_id))

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, failed: bool = False
    ) -> dict[str, Any] | None:
        """Store what a finished request computed beyond its last full chunk, and forget it.

        `block_ids` cover its computed tokens in each KV cache group. Its blocks are
        freed right after this call; those of outstanding stores stay alive by our references.
        Of one that vLLM `failed` nothing is stored: what it shares with others may be why.
        Returns what the request's answer is to say, of one that hands its prompt over.
        """
        self.uncomputed_blocks.ended(request.request_id)
        state = self.requests.end(request.request_id)
        if state is None:
            return None
        self.waits.finished(state)
        if not failed:
            self._store_rest(request, state, block_ids)
        session = self.client.session
        if (
            not state.request_params.hand_over
            or state.void
            or session is None
            or session.index is None
        ):
            return None
        end_tokens = max(0, request.num_prompt_tokens - self._speculation.ahead_tokens)
        num_tokens = self._finder.found_tokens(state, session, end_tokens, self.stores.under_way)
        return {PARAMS: {EXPECT: num_tokens}} if num_tokens else None

    def _store_rest(
        self, request: Any, state: RequestState, block_ids: Sequence[Sequence[int]]
    ) -> None:
        if state.request_params.pin_ms and not state.void:
            self._pin_prompt(state)
        writes = self._settings.writes and state.request_params.writes and not state.undrafted
        # Aborted before it was scheduled: vLLM counts tokens that we, or another connector, have
        # yet to load.
        begun = state.step_taken if self._waits_for_others else bool(state.scheduled_tokens)
        if not begun or state.load is not None or state.void or not writes:
            return
        state.extend()
        computed = max(0, request.num_computed_tokens - state.in_flight_tokens)
        computed = min(computed, state.chain.decided_tokens)
        parts: list[Part] = []
        for group in state.attending:
            parts += _full_parts(group, computed)
            tail = _tail_part(group, computed)
            if tail is not None:
                parts.append(tail)
        self._plan_store(state, parts, lambda: block_ids)

    def _pin_prompt(self, state: RequestState) -> None:
        """Ask that what a hit of the whole prompt would load stays in host memory."""
        state.extend()
        keys: list[bytes] = []
        groups: list[int] = []
        end_tokens = max(0, state.request.num_prompt_tokens - self._speculation.ahead_tokens)
        for group in state.groups:
            chain = group.chain
            for piece in pieces_kept(group.geometry, end_tokens):
                keys.append(chain.key_of(piece.chunk, piece.end))
                groups.append(group.group)
        del keys[KEYS_PER_MESSAGE_MAX:], groups[KEYS_PER_MESSAGE_MAX:]
        session = self.client.session
        if not keys:
            return
        if session is None or not self.client.send(
            session,
            Pin(
                session.epoch,
                keys,
                state.request_params.pin_ms,
                state.tenant,
                groups if any(groups) else [],
            ),
        ):
            self.stats.pins_skipped += len(keys)

    def _plan_store(
        self,
        state: RequestState,
        parts: list[Part],
        block_ids: Callable[[], Sequence[Sequence[int]]],
    ) -> None:
        session = self.client.session
        if session is None:
            return
        for some in in_jobs(self._geometries, parts):
            store = self.stores.plan(session, state, some, block_ids, self.stats, self.new_id)
            if store is not None:
                store.adapter, store.adapter_files = state.adapter_id, state.adapter.files
                self.plan.stores.append(store)
                self._unsent[store.job_id] = state

    def stores_ended(self, report: StepReport) -> None:
        """Ranks reported ended stores: give the blocks back when the last rank did."""
        self.stats.stores_failed += report.failed
        self.stats.stores_expired += report.stores_expired
        self.stats.loads_expired += report.loads_expired
        self.stores.ended(report)
        self.requests.adapters.loaded(report.adapters)
        if report.weights_changed:
            self.weights_changed()

    @property
    def stores_outstanding(self) -> int:
        """Store jobs whose blocks are still held."""
        return self.stores.outstanding

    def blocks_coming_back(self) -> bool:
        """Whether to wait for blocks of outstanding stores rather than preempt a request."""
        return self.stores.blocks_coming_back()

    # --- the rest ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything cached so far: from now on keys are of a new generation.

        Other engines that share the tiers keep what they have; what this engine stored before
        ages out.
        """
        self.requests.generation = os.urandom(16)
        self.requests.void_all()
        names = self._cached_names()
        if names is not None and names is self._planned_names:
            # vLLM's own cache was not reset, and has blocks of before.
            self._stale_names = names
        session = self.client.session
        if session is not None:
            # Nobody will ask for those keys again.
            self.client.send(session, Release(session.epoch, [], [], pins=True))

    def weights_changed(self) -> None:
        """Weights are about to be replaced, or were: they are not those of the namespace any more.

        Nothing tells the new ones from others. So from now on keys are known to this engine alone.
        """
        if not self._weight_changes:
            logger.warning(
                "kvlake: the weights of this engine are replaced while it runs: until it ends it "
                "shares nothing with other engines, and finds only what it stored since the last "
                "change; reset vLLM's prefix cache after each change"
            )
        self._weight_changes += 1
        self.reset()

    def _cached_names(self) -> Any:
        """The block pool's map of cached blocks: vLLM makes a new one when it resets its cache."""
        return None if self._block_pool is None else self._block_pool.cached_block_hash_to_block

    def _shares_stale(self, state: RequestState) -> bool:
        """Whether vLLM's own cache has blocks of before a reset, or of another adapter, for it."""
        names = self._cached_names()
        if names is not self._stale_names:
            self._stale_names = None
        return names is not None and (names is self._stale_names or names is state.stale_names)

    def _begins_stale(self, state: RequestState) -> bool:
        """Whether a request goes on from such blocks, or from what did."""
        return self._shares_stale(state) and state.local_tokens > 0

    def retire(self) -> None:
        """From now on nothing is cached: a rank can never share its memory, so no chunk is whole.

        Stores that are under way end as the ranks report them.
        """
        self.retired = True
        # We are in the middle of an engine's step. The thread may wait for an answer, for seconds.
        self.client.close(wait_seconds_max=0.0)

    def take_events(self) -> list[TierEvent]:
        """What the tiers gained and lost since the last call."""
        # vLLM tells of a reset before it asks us, and calls no connector for it unless asked to.
        names = self._cached_names()
        if names is not self._pool_names:
            if self._pool_names is not None:
                self._tiers.cleared()
            self._pool_names = names
        return self._tiers.take()

    def take_stats(self) -> Stats:
        """Counts since the last call."""
        stats, self.stats = self.stats, Stats()
        stale = self.client.answers_stale
        stats.answers_stale, self._stale_told = stale - self._stale_told, stale
        return stats

    def close(self) -> None:
        """Detach from the sidecar."""
        self.client.close()

    def _poll(self) -> None:
        for message in self._tiers.poll(self.client):
            if isinstance(message, LookupDone):
                self.waits.answered(message)

    def new_id(self) -> int:
        """The id of the next job."""
        # One sequence for all jobs: `tiers.kv.fence` revokes by order of id.
        self._next_id += 1
        return self._next_id


def _full_parts(group: GroupState, computed_tokens: int) -> list[Part]:
    """The full chunks of a group that were not considered for storing yet; now they were."""
    full = computed_tokens // group.geometry.chunk_tokens
    parts = [
        Part(group.group, chunk, group.geometry.blocks_per_chunk, group.chain.keys[chunk])
        for chunk in range(group.next_chunk, full)
    ]
    group.next_chunk = max(group.next_chunk, full)
    return parts


def _tail_part(group: GroupState, num_tokens: int) -> Part | None:
    """The whole blocks of `num_tokens` behind the last full chunk."""
    chunk, tokens = divmod(num_tokens, group.geometry.chunk_tokens)
    blocks = tokens // group.geometry.block_tokens
    if not blocks:
        return None
    return Part(group.group, chunk, blocks, group.chain.partial(chunk, blocks))
