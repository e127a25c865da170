"""The scheduler role: answers the calls of vLLM's scheduler; one instance per engine.

Owns what each request loads. Lookups read the shared index (`lookup.py`) without a message; the
sidecar is asked only for chunks that the object store alone has (`pending.py`). Does not own what
is stored (`stores.py`).

Invariants:

* `matched_tokens` takes microseconds, and may be repeated. Before a hit with an adapter it compares
  the adapter's files with those of its keys.
* A load covers exactly the blocks between vLLM's own hit and the end of the external one, in every
  KV cache group: with a window those that it still reads, with recurrent layers the state at the
  end.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from connector.client import Client, SidecarSession
from connector.events import TierEvent, TierEvents
from connector.identity.groups import CachedGroup, State, aligned
from connector.plan import IDLE_WAIT_MS, STORES_WAIT_MS, Load, StepPlan, StepReport
from connector.request_params import EXPECT, PARAMS
from connector.scheduler.lookup import HitFinder, keys_and_groups, pieces_of
from connector.scheduler.outcomes import PromptTokens
from connector.scheduler.pending import PendingLookups
from connector.scheduler.prefill import DECODE_TOKENS_MAX
from connector.scheduler.requests import PrefixCache, Requests, RequestState, Settings
from connector.scheduler.stats import Stats
from connector.scheduler.stores import StorePlanner, Stores
from connector.scheduler.traces import Tracer
from connector.vllm_workarounds import UncomputedBlocks
from sidecar.protocol import Lease, LoadChunk, LoadJob, LookupDone, Release, Use
from sidecar.protocol.prompts import PromptOutcome, Prompts, TokenRun

logger = logging.getLogger("vllm.kvlake")


class SchedulerRole:
    """The scheduler's end of the connector. `groups` and `block_pool` are vLLM's."""

    def __init__(
        self,
        client: Client,
        groups: Sequence[CachedGroup],
        settings: Settings,
        block_pool: Any,
        *,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self.client = client
        self._settings = settings
        self.clock = clock
        self.tracer = Tracer(clock=clock) if tracer is None else tracer
        geometries = self._geometries = [group.geometry for group in groups]
        # One sequence for all jobs: `tiers.kv.fence` revokes by order of id.
        self.new_id: Callable[[], int] = itertools.count(2).__next__
        self.stats = Stats()
        self.prefix_cache = PrefixCache(block_pool)
        self.requests = Requests(groups, settings, self.prefix_cache)
        self._finder = HitFinder(geometries)
        self.pending = PendingLookups(
            client, self._finder, self.stats, self.new_id, settings, clock
        )
        self.prompts = PromptTokens(self.pending.times, self.tracer)
        self.stores = Stores(
            block_pool, settings.world_size, self.stats, self.new_id, clock, self.tracer
        )
        self.planner = StorePlanner(
            client, self.requests, self.stores, self.prefix_cache, self.stats, settings
        )
        self.uncomputed_blocks = UncomputedBlocks(block_pool, len(groups))
        self.plan = StepPlan()
        self._idle = False
        """The last step computed nothing."""
        self.loading: set[str] = set()
        self._tiers = TierEvents()
        self._published_generation = self.prefix_cache.generation
        """The generation of vLLM's prefix cache when events were taken last."""
        self.retired = False
        self._weight_changes = 0

    # --- lookup --------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Hash the prompt, and ask for chunks that only the object store has."""
        session = None if self.retired else self._serving_session()
        self.stats.requests_uncached += session is None
        if self.retired:
            return
        state = self.requests.track(request)
        if state is None or session is None or not self._reads(state):
            return
        if state.request_params.expects_tokens:
            self.pending.expect(state, session)
            return
        # What vLLM holds itself need not come from the store; `matched_tokens` asks again once it
        # knows how far vLLM's own hit reaches.
        group = self._finder.main_group
        first_tokens = self._geometries[group].block_tokens
        vllm_holds_start = self.prefix_cache.blocks_at(request, first_tokens, [group])
        if not (request.skip_reading_prefix_cache or vllm_holds_start):
            self.pending.ask_store(state, session, 0)

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens beyond `local_tokens` that can be loaded; None while the store is being read."""
        if self.retired:
            return 0
        began = self.clock()
        state = self.requests.track(request)
        if state is None:
            return 0
        state.lookup_began = state.lookup_began or began
        matched = self._matched_tokens(state, local_tokens)
        state.lookup_seconds += self.clock() - began
        return matched

    def _matched_tokens(self, state: RequestState, local_tokens: int) -> int | None:
        request = state.request
        state.local_tokens = state.known_tokens = local_tokens
        state.found_tokens = 0
        session = self._serving_session()
        state.declined = self._declined(state, session)
        if session is None or state.declined is not None:
            return 0
        if self.pending.expecting(state, session, local_tokens):
            return None
        self.pending.ask_store(state, session, local_tokens)
        if state.lookup is not None:
            self._poll()
            if self.pending.reading(state):
                return None
        matched = self._finder.hit(state, session, local_tokens).end_tokens - local_tokens
        if matched < self._settings.load_tokens_min:
            state.found_tokens = local_tokens + matched
            return 0
        if not self._fits(local_tokens + matched):
            state.declined = PromptOutcome.REFUSED
            return 0
        if not self.requests.adapters.unchanged(request.lora_request, state.adapter):
            self.requests.void(state)
            state.declined = PromptOutcome.REFUSED
            return 0
        return matched

    def _declined(
        self, state: RequestState, session: SidecarSession | None
    ) -> PromptOutcome | None:
        """Why nothing may be loaded for a request, whatever the cache has."""
        reads = self._settings.reads and state.request_params.reads
        if not reads or state.request.skip_reading_prefix_cache:
            return PromptOutcome.NOT_ASKED
        if state.load_failed:
            return PromptOutcome.FAILED
        if state.void or self._begins_stale(state) or session is None or not self._reads(state):
            return PromptOutcome.REFUSED
        # The sidecar would refuse the message with all jobs of its step.
        full = len(self.loading) >= session.limits.jobs_inflight_max
        return PromptOutcome.REFUSED if full else None

    def _serving_session(self) -> SidecarSession | None:
        """The session, unless a rank has none: each load would fail there."""
        session = self.client.session
        return None if session is None or session.ranks_lack else session

    def _fits(self, end_tokens: int) -> bool:
        """Whether vLLM could start to load a hit that ends here if nothing else were running.

        With drafts vLLM keeps blocks free beside a load. If a load leaves it too few, it asks about
        the load for ever, and blocks all requests behind it.
        """
        drafts = self._settings.speculation.draft_tokens
        if not drafts:
            return True
        needed = 0
        for geometry in self._geometries:
            read = end_tokens // geometry.block_tokens - geometry.first_block(end_tokens)
            # The next token, the drafts, and what a drafter with layers writes ahead of them.
            kept_tokens = 1 + 2 * drafts
            needed += read - (-kept_tokens // geometry.block_tokens)
        # One block of the pool is the null block, which no request gets.
        return needed < self._settings.num_blocks

    def _reads(self, state: RequestState) -> bool:
        # Workers report the files of an adapter with their next step, so its first request is
        # computed: an adapter loaded before that may be of other files.
        return (
            self._settings.reads
            and state.request_params.reads
            and self.requests.adapters.confirmed(state.adapter_id, state.adapter)
        )

    def _misses(self, state: RequestState) -> bool:
        """Whether a request that starts without a load lacks as much as a load is worth."""
        reads = self._settings.reads and state.request_params.reads
        if not reads or state.request.skip_reading_prefix_cache:
            return False
        if state.local_tokens >= aligned(self._geometries, state.request.num_tokens - 1):
            # vLLM's own hits cannot end later: the last token is always computed.
            return False
        lacking = self._finder.longest(state) - state.local_tokens
        return lacking >= self._settings.load_tokens_min

    def _begins_stale(self, state: RequestState) -> bool:
        return state.local_tokens > 0 and self.prefix_cache.stale(state.request.lora_request)

    # --- load ----------------------------------------------------------------------------------

    def allocated(
        self, request: Any, block_ids: Callable[[], Sequence[Sequence[int]]], external_tokens: int
    ) -> None:
        """Plan the load of `external_tokens` after vLLM's own hit; `block_ids` gives the tables."""
        self.uncomputed_blocks.allocated(request)
        state = self.requests.get(request.request_id)
        if state is None:
            self.prompts.uncached(request)
            return
        state.scheduled_tokens = 0
        state.void |= self._begins_stale(state)
        self._use(state)
        if external_tokens <= 0:
            state.begins_tokens = state.local_tokens
            self.stats.requests_missed += not state.counted and self._misses(state)
            state.counted = True
            self._sort(state, state.local_tokens)
            # For example, vLLM's own hit has grown beyond what was read.
            self.pending.release(state)
            return
        session = self.client.session
        end_tokens = state.known_tokens = state.local_tokens + external_tokens
        chunks: list[LoadChunk] = []
        stored_tokens = 0
        runs: list[TokenRun] = []
        # What is before a window is not loaded, but not computed either.
        run = PromptOutcome.HOST
        for group, table in zip(state.groups, block_ids(), strict=True):
            geometry, main = group.geometry, group.group == self._finder.main_group
            per_chunk, keys = geometry.blocks_per_chunk, group.chain.keys
            for chunk, first, last in pieces_of(geometry, state.local_tokens, end_tokens):
                if last == per_chunk:
                    key = keys[chunk]
                else:
                    key = self._finder.loaded_key(group, session, chunk, last)
                start = chunk * per_chunk
                ids = list(table[start + first : start + last])
                chunks.append(LoadChunk(key, first, ids, group.group))
                if main:
                    stored = key in state.from_store_keys
                    stored_tokens += stored * len(ids) * geometry.block_tokens
                    outcome = PromptOutcome.STORE if stored else PromptOutcome.HOST
                    if outcome is not run:
                        runs.append(TokenRun(run, group.end_tokens(chunk, first)))
                        run = outcome
        load = state.load = Load(request.request_id, LoadJob(self.new_id(), chunks))
        state.hit_sources = (external_tokens - stored_tokens, stored_tokens)
        state.hit_runs = [*runs, TokenRun(run, end_tokens)]
        state.load_began = self.clock()
        self.tracer.planned(state, chunks)
        self._sort(state, end_tokens, loading=True)
        self.loading.add(request.request_id)
        self.plan.loads.append(load)
        if session is not None:
            # Without its lease the load is only more likely to miss, so a failed send is no fault.
            keys = [chunk.key for chunk in chunks]
            self.client.send(session, Lease(session.epoch, load.job.job_id, keys, state.tenant))
        # After the lease, so that chunks of both are pinned all the time.
        self.pending.release(state)

    def _use(self, state: RequestState) -> None:
        """Tell the sidecar, once, which chunks the prompt of a request has."""
        session = self.client.session
        if state.used or state.void or session is None:
            return
        state.used = True
        found = self._finder.prompt_chunks(state)
        if found:
            keys, groups = keys_and_groups(found)
            geometry = self._geometries[self._finder.main_group]
            num_tokens = aligned([geometry], state.prompt_tokens)
            self.client.send(session, Use(session.epoch, keys, num_tokens, groups))

    def _sort(self, state: RequestState, begin_tokens: int, *, loading: bool = False) -> None:
        """Note why a request computes its prompt from `begin_tokens` on."""
        if state.request.prefill_stats is not None:
            session, storing = self.client.session, self.stores.keys
            computed = self._finder.computed(state, session, begin_tokens, storing)
            self.prompts.scheduled(state.request, *computed, state, loading=loading)

    def hit_sources(self, request: Any) -> tuple[int, int]:
        """Tokens of the planned load by tier: from host memory, from the object store."""
        state = self.requests.get(request.request_id)
        return state.hit_sources if state is not None else (0, 0)

    def loads_ended(self, loaded: Iterable[str], failed: Iterable[str]) -> None:
        """Take the requests whose loads ended on all ranks; a failed load is not repeated."""
        failed = set(failed)
        for request_id in failed:
            # Another connector's load, too: vLLM may never find room for one more load beside the
            # blocks that such a request still has, and would block all requests behind it.
            if (state := self.requests.get(request_id)) is not None:
                state.load_failed = True
        for request_id in loaded:
            self.loading.discard(request_id)
            state = self.requests.get(request_id)
            if state is None or state.load is None:
                continue
            load, state.load = state.load, None
            state.load_seconds += self.clock() - state.load_began
            host, store = state.hit_sources
            if request_id in failed:
                self.stats.loads_failed += 1
                self.prompts.load_failed(request_id)
                if (session := self.client.session) is not None:
                    # The sidecar still waits for its lease if no rank sent it.
                    self.client.send(session, Release(session.epoch, [load.job.job_id], []))
            else:
                self.stats.requests_hit += not state.counted
                state.counted = True
                self.stats.tokens_loaded_host += host
                self.stats.tokens_loaded_store += store

    # --- a step --------------------------------------------------------------------------------

    def build_plan(
        self,
        scheduled: dict[str, int],
        block_ids_of: Callable[[str], Sequence[Sequence[int]]],
        states: Mapping[str, Sequence[State]] = MappingProxyType({}),
        preempted: Iterable[str] = (),
    ) -> StepPlan:
        """Jobs of a step that computes this many tokens of each `scheduled` request.

        `block_ids_of` gives a request's block table of each KV cache group. vLLM hands `states` of
        recurrent layers over with this step. `preempted` requests lost their blocks since the last.
        """
        self.uncomputed_blocks.step(scheduled, preempted)
        self._poll()
        prefills = [name for name, count in scheduled.items() if count > DECODE_TOKENS_MAX]
        known = [(self.requests.get(name), scheduled[name]) for name in prefills]
        work = [(one.request.num_computed_tokens, count) for one, count in known if one is not None]
        generating = len(scheduled) - len(prefills)
        if len(work) < len(known):
            # How far a prompt is that is not cached is not known, so the step says nothing.
            work, generating = [], 0
        self.pending.times.planned(self.clock(), work, generating=generating)
        self.prefix_cache.step()
        self.planner.step(scheduled, block_ids_of, states)
        plan, self.plan = self.plan, StepPlan()
        plan.stores = self.planner.take()
        self.requests.ended.clear()
        plan.retired = self.retired
        # Once: it ends at any moment, on the client's thread.
        session = self.client.session
        plan.epoch = 0 if session is None else session.epoch
        plan.weight_changes = self._weight_changes
        plan.waiting = bool(self.pending.pending or self.loading or self.stores.jobs)
        return plan

    def wait_idle(self, plan: StepPlan) -> None:
        """Wait a moment in a step without work, in the place of the worker.

        vLLM repeats such a step at once. While its worker waits, its scheduler spins on a core that
        the sidecar may need; while its scheduler waits, the worker spins on the core where it would
        compute. For loads the worker waits, which gets the answer. With several ranks the workers
        always wait, or all of them would spin.

        Not where other data-parallel ranks share experts: they wait for the dummy step that vLLM
        then runs. Not in the first such step: with asynchronous scheduling, vLLM has not taken the
        output of the step before it yet. Nor in one that brings the worker jobs.
        """
        if self._settings.steps_with_others:
            plan.idle = False
        again, self._idle = self._idle and plan.idle, plan.idle
        if not (again and plan.waiting) or self.loading or plan.stores:
            return
        stores = bool(self.stores.jobs)
        # In one process nobody spins, and the worker alone gets the answers to jobs.
        if self._settings.world_size > 1 or (stores and not self._settings.separate_worker):
            return
        self.client.wait(STORES_WAIT_MS if stores else IDLE_WAIT_MS)
        plan.idle = False

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], *, failed: bool = False
    ) -> dict[str, Any] | None:
        """Store what a finished request computed beyond its last full chunk, and forget it.

        `block_ids` cover its computed tokens in each KV cache group. Nothing is stored of a request
        that `failed`: blocks that it shares may be the cause.
        Returns parameters for the answer of a request that hands its prompt over.
        """
        self.uncomputed_blocks.ended(request.request_id)
        self.prompts.finished(request)
        state = self.requests.end(request.request_id)
        if state is None:
            return None
        self.pending.finished(state)
        if not failed:
            self.planner.finished(request, state, block_ids)
        session = self.client.session
        if not state.request_params.hand_over or state.void or session is None:
            return None
        num_tokens = self._finder.found_tokens(state, session, self.stores.keys)
        return {PARAMS: {EXPECT: num_tokens}} if num_tokens else None

    def stores_ended(self, report: StepReport) -> None:
        """Take what the workers reported."""
        self.stats.stores_failed += report.failed
        self.stats.stores_expired += report.stores_expired
        self.stats.loads_expired += report.loads_expired
        self.stores.ended(report)
        if (session := self.client.session) is not None:
            # Not kept for the next session: until they report, ranks are taken as attached.
            session.ranks_lack = bool(report.unattached)
        self.requests.adapters.loaded(report.adapters)
        if report.weights_changed:
            self.weights_changed()

    def reset(self) -> None:
        """Hide everything cached so far from this engine; what it stored before ages out."""
        self.requests.generation = os.urandom(16)
        for state in self.requests.unsent:
            state.void = True
        self.prefix_cache.connector_reset()
        if (session := self.client.session) is not None:
            # No request asks for those keys again.
            self.client.send(session, Release(session.epoch, [], [], pins=True))

    def weights_changed(self) -> None:
        """Make keys known to this engine alone: nothing identifies weights that were replaced."""
        if not self._weight_changes:
            logger.warning(
                "kvlake: the weights of this engine are replaced while it runs. Until it ends it "
                "shares nothing with other engines, and finds only what it stored since the last "
                "change. Reset vLLM's prefix cache after each change"
            )
        self._weight_changes += 1
        self.reset()

    def retire(self) -> None:
        """Cache nothing from now on: a rank can never share its memory, so no chunk is complete."""
        self.retired = True
        # In the middle of an engine's step, so do not wait for the thread.
        self.client.close(wait_seconds_max=0.0)

    def take_events(self) -> list[TierEvent]:
        """Events of the tiers since the last call."""
        # vLLM reports a reset of its cache before it asks us, and does not always call us for it.
        generation = self.prefix_cache.generation
        if generation is not self._published_generation:
            self._tiers.republish()
            self._published_generation = generation
        return self._tiers.take()

    def take_stats(self) -> dict[str, int]:
        """What was counted since the last call. The sidecar learns what became of each prompt."""
        self.pending.times.ended(self.clock())
        records, session = self.prompts.take_records(), self.client.session
        if records and session is not None:
            self.client.send(session, Prompts(session.epoch, records))
        self.stats.answers_stale, self.client.answers_stale = self.client.answers_stale, 0
        return self.stats.take()

    def _poll(self) -> None:
        for message in self._tiers.poll(self.client):
            if isinstance(message, LookupDone):
                self.pending.answered(message)
