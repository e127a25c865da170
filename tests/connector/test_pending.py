"""Requests that wait for chunks of the object store, in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from connector.plan import IDLE_WAIT_MS, LOADS_WAIT_MS, STORES_WAIT_MS
from connector.scheduler.pending import SESSIONS_ASKED_MAX
from sidecar.protocol import (
    Lease,
    Lookup,
    LookupDone,
    Outcome,
    Release,
)
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    request_of,
)
from tests.connector.double import LIMITS
from tests.connector.engine import Engine
from tests.connector.prompts import (
    CACHED,
    FULL,
    PROMPT,
    TAIL_BLOCKS,
    chain_of,
    counted,
    seen,
    total,
)
from tiers.kv.keys import KeyChain


class TestStoreOnly:
    def demoted(self, engine: Engine, first: int = 0) -> KeyChain:
        """What an earlier request left, from chunk `first` on in the store alone."""
        seen(engine)
        chain = chain_of(engine, PROMPT)
        for key in [*chain.keys[first:], chain.partial(FULL, TAIL_BLOCKS)]:
            engine.sidecar.demote(key)
        return chain

    def test_asked_for_when_the_request_comes(self, engine: Engine) -> None:
        chain = self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        assert lookup.keys == [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]
        assert lookup.deadline_ms == LIMITS.lookup_wait_ms_max
        for _ in range(4):
            assert not engine.step().num_scheduled_tokens
        assert engine.role.matched_tokens(request, 0) is None
        engine.sidecar.receive()
        engine.sidecar.answer(lookup)
        taken = counted(engine)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - CACHED
        assert total(taken, "tokens_loaded_store") == CACHED
        assert total(taken, "tokens_loaded_host") == 0
        assert len(engine.client.sent_of(Lookup)) == 1
        engine.check_idle()

    def test_the_scheduler_waits_in_steps_without_work(self, engine: Engine) -> None:
        self.demoted(engine)
        (rank,) = engine.ranks

        def waited() -> tuple[int, int]:
            both = engine.client.waited_ms, rank.client.waited_ms
            engine.client.waited_ms = rank.client.waited_ms = 0
            return both

        waited()
        short = engine.add(request_of("b", PROMPT[: BLOCK_TOKENS - 1], max_tokens=1))
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.step().num_scheduled_tokens
        assert short.is_finished()
        assert waited() == (0, 0)
        # With asynchronous scheduling, vLLM may not have the output of the step before yet.
        engine.step()
        assert waited() == (0, IDLE_WAIT_MS)
        for _ in range(2):
            engine.step()
            assert waited() == (IDLE_WAIT_MS, 0)
        for lookup in list(engine.sidecar.lookups):
            engine.sidecar.answer(lookup)
        # The worker gets the answer to its load.
        for _ in range(2):
            engine.step()
            assert waited() == (0, LOADS_WAIT_MS)
        engine.finish(request)
        engine.settle()

    def stored(self, engine: Engine) -> tuple[int, int]:
        """How long scheduler and worker wait in a step without work while stores are open."""
        (rank,) = engine.ranks
        request = engine.add(request_of("b", PROMPT[::-1], max_tokens=1))
        while not request.is_finished():
            engine.step()
        engine.step()
        assert engine.role.stores.jobs
        before = engine.client.waited_ms, rank.client.waited_ms
        engine.step()
        return engine.client.waited_ms - before[0], rank.client.waited_ms - before[1]

    def test_the_scheduler_waits_while_stores_are_open(self, engine: Engine) -> None:
        assert self.stored(engine) == (STORES_WAIT_MS, 0)

    def test_in_one_process_the_worker_waits_for_its_jobs(self, engine: Engine) -> None:
        role = engine.role
        role._settings = replace(role._settings, separate_worker=False)  # noqa: SLF001 (vLLM's "uni")
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        before = engine.client.waited_ms
        engine.step()
        engine.step()
        assert engine.client.waited_ms > before
        for lookup in list(engine.sidecar.lookups):
            engine.sidecar.answer(lookup)
        engine.finish(request)
        engine.settle()
        assert self.stored(engine) == (0, IDLE_WAIT_MS)

    def test_of_several_ranks_the_workers_wait(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        before = [rank.client.waited_ms for rank in engine.ranks]
        for _ in range(3):
            engine.step()
        assert engine.client.waited_ms == 0
        waited = [rank.client.waited_ms for rank in engine.ranks]
        assert waited == [ms + 3 * IDLE_WAIT_MS for ms in before]
        engine.finish(request)
        engine.settle()

    def test_nobody_waits_where_other_ranks_step_with_this_one(self, engine: Engine) -> None:
        """A rank with one prompt to load slowed down each step of all ranks by 10 ms."""
        role = engine.role
        role._settings = replace(role._settings, steps_with_others=True)  # noqa: SLF001 (vLLM's)
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (rank,) = engine.ranks
        before = rank.client.waited_ms
        for _ in range(3):
            engine.step()
        for lookup in list(engine.sidecar.lookups):
            engine.sidecar.answer(lookup)
        for _ in range(3):
            engine.step()
        assert (engine.client.waited_ms, rank.client.waited_ms - before) == (0, 0)
        engine.finish(request)
        engine.settle()
        assert self.stored(engine) == (0, 0)

    def test_chunks_that_host_memory_has_are_asked_for_too(self, engine: Engine) -> None:
        chain = self.demoted(engine, first=2)
        taken = counted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        # So that they are not evicted for what is read.
        assert lookup.keys == [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]
        engine.finish(request)
        engine.settle()
        assert total(taken, "tokens_loaded_host") == 2 * CHUNK_TOKENS
        assert total(taken, "tokens_loaded_store") == CACHED - 2 * CHUNK_TOKENS
        source = engine.scheduler.connector_prefix_cache_stats
        assert source is not None

    def test_says_how_fast_the_engine_computes(self, engine: Engine) -> None:
        self.demoted(engine, first=2)
        engine.role.pending.times.planned(engine.clock.now, [(0, 512)])
        engine.clock.now += 1.0
        engine.role.pending.times.ended(engine.clock.now)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        assert (lookup.num_tokens, lookup.num_held) == (CACHED - 2 * CHUNK_TOKENS, 2)
        assert lookup.prefill_tokens_per_second == 512
        engine.finish(request)
        engine.settle()

    def test_an_answer_that_falls_short(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.sidecar.receive()
        engine.sidecar.answer(engine.sidecar.lookups[0], ready=2)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - 2 * CHUNK_TOKENS

    @pytest.mark.promise("engine-deadlines")
    def test_the_deadline(self, engine: Engine) -> None:
        self.demoted(engine, first=2)
        taken = counted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.clock.now += LIMITS.lookup_wait_ms_max / 1000 - 0.01
        engine.step()
        assert engine.role.matched_tokens(request, 0) is None
        engine.clock.now += 0.02
        # What there is by then is used, and the store is not asked again.
        assert engine.role.matched_tokens(request, 0) == 2 * CHUNK_TOKENS
        assert len(engine.client.sent_of(Lookup)) == 1
        engine.sidecar.lookups.clear()
        engine.finish(request)
        engine.settle()
        assert total(taken, "lookups_expired") == 1
        engine.check_idle()

    def test_a_session_that_ends_meanwhile(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.role.matched_tokens(request, 0) is None
        engine.sidecar.detach()
        assert engine.role.matched_tokens(request, 0) == 0
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_the_next_session_is_asked_again(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (first,) = engine.client.sent_of(Lookup)
        engine.sidecar.attach()
        assert engine.role.matched_tokens(request, 0) is None
        _, second = engine.client.sent_of(Lookup)
        assert second.epoch > first.epoch
        assert second.keys == first.keys
        engine.finish(request)
        assert engine.computed["a"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_a_restarting_sidecar_delays_nothing_for_ever(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        answers: list[int | None] = []
        for _ in range(SESSIONS_ASKED_MAX + 1):
            answers.append(engine.role.matched_tokens(request, 0))
            engine.sidecar.attach()
        assert answers == [None] * SESSIONS_ASKED_MAX + [0]
        assert len(engine.client.sent_of(Lookup)) == SESSIONS_ASKED_MAX
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_a_late_answer_is_ignored(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        engine.clock.now += 60
        engine.step()
        engine.client.inbox.append(LookupDone(lookup.epoch, lookup.lookup_id, 5, Outcome.OK))
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_a_request_that_ends_meanwhile_gives_it_back(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        (lookup,) = engine.client.sent_of(Lookup)
        engine.abort(request)
        assert engine.client.sent_of(Release) == [Release(lookup.epoch, [], [lookup.lookup_id])]
        engine.settle()
        engine.check_idle()

    def test_a_request_that_ends_with_its_answer_gives_it_back(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        engine.sidecar.receive()
        (lookup,) = engine.sidecar.lookups
        engine.sidecar.answer(lookup)
        assert engine.role.matched_tokens(request, 0) == CACHED
        # It is not scheduled yet: what was read for it stays.
        assert engine.sidecar.lookups_pinning() == {lookup.lookup_id}
        engine.abort(request)
        assert not engine.sidecar.lookups_pinning()
        engine.settle()
        engine.check_idle()

    def test_given_back_once_a_lease_has_it(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        engine.sidecar.receive()
        engine.sidecar.answer(engine.sidecar.lookups[0])
        engine.step()
        assert not engine.sidecar.lookups_pinning()
        kinds = [type(one) for one in engine.client.sent if isinstance(one, Lease | Release)]
        assert kinds == [Lease, Release]
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_given_back_where_the_own_hit_grew_past_it(self, make: Callable[..., Engine]) -> None:
        # Room for one of them at a time: the second waits, and finds what the first one loaded.
        engine = make(num_blocks=len(PROMPT) // BLOCK_TOKENS + 4)
        self.demoted(engine)
        requests = [engine.add(request_of(name, PROMPT, max_tokens=1)) for name in "ab"]
        engine.sidecar.receive()
        asked = {lookup.lookup_id for lookup in engine.sidecar.lookups}
        assert len(asked) == 2
        for lookup in list(engine.sidecar.lookups):
            engine.sidecar.answer(lookup)
        engine.finish(requests[0])
        engine.step()
        assert not engine.sidecar.lookups_pinning()
        engine.finish(requests[1])
        assert len(engine.client.sent_of(Lease)) == 1
        engine.settle()
        engine.check_idle()

    def test_not_to_another_run_of_the_sidecar(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        engine.sidecar.attach()
        engine.abort(request)
        assert not engine.client.sent_of(Release)
        engine.settle()
        engine.check_idle()

    def test_no_lookup_for_blocks_of_vllms_own_hit(self, engine: Engine) -> None:
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        for key in list(engine.sidecar.parts):
            engine.sidecar.demote(key)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not engine.client.sent_of(Lookup)

    def test_not_waited_for_a_little_more(self, make: Callable[..., Engine]) -> None:
        # All but the tail is in host memory: a read from the store to spare 32 tokens is none.
        engine = make(load_tokens_min=3 * BLOCK_TOKENS)
        self.demoted(engine, first=FULL)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not engine.client.sent_of(Lookup)
        assert engine.computed["a"] == len(PROMPT) - FULL * CHUNK_TOKENS

    def test_asked_once_though_the_queue_is_full(self, engine: Engine) -> None:
        self.demoted(engine)
        engine.client.accepting = False
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.role.matched_tokens(request, 0) == 0
        engine.finish(request)
        engine.client.accepting = True
        engine.settle()
        engine.check_idle()
