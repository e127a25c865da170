"""What a manager of vLLM's tiers learns of requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)

from connector.offloading.spec import NoTiers
from connector.offloading.workarounds import OffloadedRequests, guard_tiers


def requests_of(*names: str, preempted_are_new: bool = False) -> OffloadedRequests:
    requests = OffloadedRequests(preempted_are_new=preempted_are_new)
    for name in names:
        requests.added(ReqContext(req_id=name))
    return requests


def step(requests: OffloadedRequests, *new: str, preempted: tuple[str, ...] = ()) -> None:
    requests.step(ScheduleEndContext(list(new), preempted))


def test_a_request_that_continues_is_excluded_until_it_ends() -> None:
    requests = requests_of("a", "b", "c")
    step(requests, "a", "b")
    assert not requests.excluded("a")
    step(requests, "c", "a")
    step(requests)
    assert [requests.excluded(name) for name in "abc"] == [True, False, False]
    requests.finished(ReqContext(req_id="a"))
    # vLLM may use its name again.
    requests.added(ReqContext(req_id="a"))
    step(requests, "a")
    assert not requests.excluded("a")
    # It may hear of unknown requests.
    requests.finished(ReqContext(req_id="nobody"))
    step(requests, "nobody", preempted=("nobody",))
    assert not requests.excluded("nobody")


def test_a_request_that_continues_after_a_preemption_is_excluded() -> None:
    """vLLM's first model runner does not report a preempted request as new."""
    requests = requests_of("a")
    step(requests, "a")
    step(requests, preempted=("a",))
    assert not requests.excluded("a")
    step(requests, "a")
    assert requests.excluded("a")


def test_preempted_requests_that_are_new_again_are_not_excluded() -> None:
    requests = requests_of("a", preempted_are_new=True)
    step(requests, "a")
    step(requests, preempted=("a",))
    step(requests, "a")
    assert not requests.excluded("a")
    step(requests, "a")
    assert requests.excluded("a")
    # It stays excluded.
    step(requests, preempted=("a",))
    step(requests, "a")
    assert requests.excluded("a")


def test_a_reset_excludes_requests_with_kv() -> None:
    requests = requests_of("runs", "loads", "waits", "was preempted")
    step(requests, "runs", "was preempted")
    requests.loading([], ReqContext(req_id="loads"))
    step(requests, preempted=("was preempted",))
    requests.reset()
    requests.added(ReqContext(req_id="later"))
    left_out = [requests.excluded(name) for name in ("runs", "loads", "was preempted")]
    assert left_out == [True] * 3
    assert not requests.excluded("waits")
    assert not requests.excluded("later")


def test_the_lookup_of_a_running_request_waits_a_step() -> None:
    requests = requests_of("a", "b")
    assert not requests.must_wait("a")
    step(requests, "a")
    assert requests.must_wait("a")
    step(requests, preempted=("a",))
    # In which of these steps it is scheduled again need not be reported.
    for _ in range(3):
        assert not requests.must_wait("a")
        assert not requests.must_wait("a")
        step(requests)
        assert requests.must_wait("a")
        assert requests.must_wait("a")
        step(requests)
    # A request that was never preempted is looked up in every step.
    for _ in range(3):
        assert not requests.must_wait("b")
        step(requests)
    assert not requests.must_wait("nobody")


def test_a_preempted_request_may_run_again_without_a_lookup() -> None:
    """If less than a chunk is left to look up. The first runner does not report it."""
    for preempted_are_new in (False, True):
        requests = requests_of("a", preempted_are_new=preempted_are_new)
        step(requests, "a")
        step(requests, preempted=("a",))
        step(requests)
        assert requests.must_wait("a") is not preempted_are_new


def test_a_hit_is_the_first_once_until_a_preemption() -> None:
    requests = requests_of("a", "b")
    key = make_offload_key(b"key", 0)
    for name in ("a", "b"):
        assert requests.is_first_hit(name, key)
        assert not requests.is_first_hit(name, key)
    step(requests, "a", "b")
    step(requests, preempted=("a",))
    assert requests.is_first_hit("a", key)
    assert not requests.is_first_hit("b", key)
    assert not requests.is_first_hit("nobody", key)


class Tiers(NoTiers):
    """Has everything, and takes everything."""

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> Any:
        return [*keys]

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Nothing to remember."""


@pytest.mark.promise("offloading-weights")
def test_replaced_weights_stop_hits_and_stores(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Until a reset: a request may begin with KV of the old weights."""
    tiers = Tiers()
    requests = guard_tiers(tiers, preempted_are_new=False)
    key = make_offload_key(b"key", 0)

    def found_and_stored(name: str) -> tuple[bool, bool]:
        context = ReqContext(req_id=name)
        tiers.on_new_request(context)
        found = tiers.lookup(key, context) is LookupResult.HIT
        return found, tiers.prepare_store([key], context) == [key]

    assert found_and_stored("before") == (True, True)
    for _ in range(2):
        requests.weights_changed()
        assert found_and_stored("after") == (False, False)
        tiers.on_schedule_end(ScheduleEndContext(["running"], ()))
        found_and_stored("running")
        tiers.on_schedule_end(ScheduleEndContext(["running"], ()))
        tiers.reset_cache()
        assert found_and_stored("later") == (True, True)
        assert requests.excluded("running")
    assert caplog.text.count("are replaced while it runs") == 1


class ScriptedTiers(Tiers):
    """A double of the tiers that answers by a chunk's end."""

    def __init__(self, answers: dict[int, LookupResult]) -> None:
        self.answers = answers

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return self.answers[req_context.get_offload_key_position(key) or 0]


@pytest.mark.promise("offloading-long-prompt")
def test_a_window_before_a_gap_is_not_loaded_while_a_chunk_behind_it_is_pending() -> None:
    """vLLM's own scan: for the pending chunk, the host tier may have evicted one of the hit."""
    hit, pending, miss = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
    answers = {16: hit, 32: hit, 48: miss, 64: pending}
    tiers = ScriptedTiers(answers)
    guard_tiers(tiers, preempted_are_new=False)
    context = ReqContext(req_id="a")
    tiers.on_new_request(context)
    keys = [make_offload_key(bytes([end]), 1) for end in answers]
    for key, end in zip(keys, answers, strict=True):
        context.set_offload_key_position(key, end)
    scheduler: Any = object.__new__(OffloadingConnectorScheduler)
    scheduler.manager = tiers
    look_up = scheduler._sliding_window_lookup  # noqa: SLF001 (vLLM's own)
    assert look_up(keys, 2, context) is None
    tiers.on_schedule_end(ScheduleEndContext(["other"], ()))
    answers[64] = miss
    assert look_up(keys, 2, context) == 2
    # A prefix ends at a gap, whatever is pending before it.
    answers |= {16: pending, 32: miss}
    assert [tiers.lookup(key, context) for key in keys[:2]] == [pending, miss]
