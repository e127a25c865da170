"""Loads under vLLM's own scheduler: failed, late, lost, aborted, and over several ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from vllm.v1.request import Request

from sidecar.protocol import (
    Lease,
    Outcome,
    Release,
    Submit,
)
from tests.connector.configurations import (
    request_of,
)
from tests.connector.engine import Engine
from tests.connector.prompts import (
    CACHED,
    PROMPT,
    counted,
    seen,
    total,
)


class TestLoads:
    def start(self, engine: Engine, max_tokens: int = 1) -> Request:
        """A request whose load is under way."""
        seen(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=max_tokens))
        engine.step()
        assert len([copy for copy in engine.sidecar.copies if copy.load]) == 1
        assert request.num_computed_tokens == CACHED
        return request

    @pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED])
    def test_a_failed_one_is_computed(self, engine: Engine, outcome: Outcome) -> None:
        taken = counted(engine)
        request = self.start(engine)
        engine.sidecar.run(engine.sidecar.copies[0], outcome)
        engine.finish(request)
        engine.settle()
        # Not tried again: what made it fail may still be there.
        assert engine.computed["a"] == len(PROMPT)
        assert total(taken, "loads_failed") == 1
        assert total(taken, "requests_hit") == 0
        assert total(taken, "requests_missed") == 2
        engine.check_idle()

    def test_one_that_no_rank_sends_gives_its_lease_back(self, engine: Engine) -> None:
        """A worker that has lost its session, or its weights, fails a load without a message."""
        seen(engine)
        engine.ranks[0].client.attach(None)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        (lease,) = engine.client.sent_of(Lease)
        released = [one.lease_ids for one in engine.client.sent_of(Release)]
        assert [lease.lease_id] in released

    def test_one_rank_failing_fails_it(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        request = self.start_on_two(engine)
        first, second = engine.sidecar.copies
        engine.sidecar.run(first, Outcome.FAILED)
        for _ in range(3):
            assert not engine.step().num_scheduled_tokens
        engine.sidecar.run(second)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        engine.check_idle()

    def start_on_two(self, engine: Engine) -> Request:
        seen(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert {copy.rank for copy in engine.sidecar.copies} == {0, 1}
        return request

    def test_it_is_over_when_every_rank_is(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        request = self.start_on_two(engine)
        engine.sidecar.run(engine.sidecar.copies[1])
        for _ in range(3):
            assert not engine.step().num_scheduled_tokens
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_a_lost_session_is_computed(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.sidecar.detach()
        engine.finish(request)
        assert engine.computed["a"] == len(PROMPT)
        engine.settle()
        engine.check_idle()

    def test_a_late_one_is_computed_and_cannot_run_any_more(self, engine: Engine) -> None:
        request = self.start(engine)
        (copy,) = engine.sidecar.copies
        engine.clock.now += 60
        engine.step()
        engine.step()
        # The sidecar wakes up with it now, when the blocks are in use again.
        engine.sidecar.run(copy)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        engine.check_idle()

    @pytest.mark.promise("abort")
    def test_aborted_meanwhile(self, engine: Engine) -> None:
        request = self.start(engine)
        stored = dict(engine.sidecar.parts)
        # Its chunks are evicted too, so that nothing keeps us from storing what never came.
        for key in stored:
            engine.sidecar.evict(key)
        engine.abort(request)
        for _ in range(3):
            engine.step()
        # vLLM holds the blocks until the load is over, whichever way.
        assert engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1
        assert len(engine.role.stores.jobs) == 0
        engine.settle()
        assert not engine.sidecar.parts
        engine.check_idle()

    def test_aborted_right_after(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.sidecar.run_all()
        engine.step(lambda: engine.abort(request))
        engine.settle()
        engine.check_idle()
        # What was loaded is there, whole.
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    def test_chunks_of_a_load_are_not_stored_again(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.ranks[0].client.sent.clear()
        engine.finish(request)
        engine.settle()
        assert not any(submit.stores for submit in engine.ranks[0].client.sent_of(Submit))
