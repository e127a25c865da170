"""Features of vLLM that meet the cache: on vLLM's own scheduler, with a model that checks its KV.

`docs/evidence/traceability.md` says which of them were also run on a real engine.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from inspect import isfunction
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec

from connector.identity.profile import EngineProfile
from connector.scheduler.lookup import Hit, HitFinder
from connector.vllm import KVLakeConnector
from sidecar.protocol import Lookup, Pin, Release, Submit
from tests import places
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    kv_cache_config,
    request_of,
    spec_of,
    vllm_config,
)
from tests.connector.conversations import converse
from tests.connector.engine import Engine
from tests.connector.others import EmptyConnector
from tests.connector.prompts import counted, total
from tests.contract.base import OVERRIDDEN
from tests.contract.calls import SCHEDULER, departure

PROMPT = [number % 89 for number in range(300)]
CACHED = len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.promise("no-prefix-caching")
def test_prefix_caching_off_in_the_engine(make: Callable[..., Engine]) -> None:
    """Then kvlake is the only prefix cache there is."""
    engine = make(prefix_caching=False)
    engine.run(request_of("a", PROMPT, max_tokens=1))
    engine.run(request_of("b", PROMPT, max_tokens=1))
    assert engine.computed["b"] == len(PROMPT) - CACHED
    engine.check_idle()


@pytest.mark.promise("samples")
def test_several_samples_of_one_prompt(make: Callable[..., Engine]) -> None:
    """n > 1: vLLM makes a request of each sample, all of one prompt, at once."""
    engine = make()
    engine.run(request_of("earlier", PROMPT, max_tokens=1))
    engine.forget()
    samples = [engine.add(request_of(f"{n}_parent", PROMPT, max_tokens=8)) for n in range(4)]
    engine.finish(*samples)
    engine.settle()
    assert all(engine.computed[one.request_id] <= len(PROMPT) - CACHED + 8 for one in samples)
    engine.check_idle()


@pytest.mark.promise("priority-scheduling")
def test_priority_scheduling(make: Callable[..., Engine]) -> None:
    """A request of lower priority is preempted while its loads and stores run."""
    engine = make(policy="priority", num_blocks=42)
    low = engine.add(request_of("low", PROMPT, max_tokens=60, priority=9))
    engine.step()
    other = [number + 1 for number in PROMPT]
    high = engine.add(request_of("high", other, max_tokens=60, priority=0))
    engine.finish(low, high)
    engine.settle()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    engine.check_idle()


@pytest.mark.promise("withdrawn-blocks")
@pytest.mark.parametrize(
    "specs",
    [[spec_of()], [spec_of(), spec_of(SlidingWindowSpec, sliding_window=32)]],
    ids=["full", "windows"],
)
def test_blocks_that_were_not_computed_are_not_hit(
    make: Callable[..., Engine], specs: list[KVCacheSpec]
) -> None:
    """vLLM has named blocks of such a request by then that were not computed, and finds them."""
    evicted = 0
    for num_blocks in range(6 + 6 * len(specs), 12 + 6 * len(specs)):
        engine = make(policy="priority", num_blocks=num_blocks, specs=specs, batch_tokens=64)
        engine.scheduler.scheduler_config.long_prefill_token_threshold = 48
        engine.scheduler.adaptive_long_prefill_threshold = False
        evict_blocks = engine.pool.evict_blocks
        with (
            patch.object(engine.pool, "evict_blocks", side_effect=evict_blocks) as evicting,
            # Where stores are under way it waits for their blocks rather.
            patch.object(engine.role.stores, "blocks_coming_back", return_value=False),
        ):
            # It runs first, and takes several steps for its prompt.
            low = engine.add(request_of("low", PROMPT[:150], max_tokens=4, priority=9))
            engine.step()
            other = [number + 1 for number in PROMPT[:BLOCK_TOKENS]]
            high = engine.add(request_of("high", other, max_tokens=8))
            engine.finish(high, low)
            engine.settle()
        evicted += evicting.called
        # What the tiers have by now is right, too.
        engine.forget()
        engine.run(request_of("again", PROMPT[:150], max_tokens=4))
        engine.check_idle()
    assert evicted


@pytest.mark.promise("pipeline-parallel")
@pytest.mark.parametrize("ranks", [1, 2])
def test_pipeline_stages(make: Callable[..., Engine], ranks: int) -> None:
    """A step is scheduled while another is on its way; a chunk is whole with all stages."""
    engine = make(stages=2, ranks=ranks, num_blocks=70, batch_tokens=96)
    assert len(engine.ranks) == 2 * ranks
    engine.run(request_of("a", PROMPT, max_tokens=1))
    assert all(len(parts) == 2 * ranks for parts in engine.sidecar.parts.values())
    engine.forget()
    engine.run(request_of("b", PROMPT, max_tokens=1))
    assert engine.computed["b"] == len(PROMPT) - CACHED
    engine.forget()
    converse(engine, 7)


@pytest.mark.promise("vllm-call-order")
def test_the_order_of_calls(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Engine]) -> None:
    """vLLM's scheduler, over stores, a hit, requests at once, a preemption and an abort."""
    calls: list[str] = []

    def recorded(name: str, hook: Any) -> Any:
        def call(self: KVLakeConnector, *args: Any, **kwargs: Any) -> Any:
            if self.role is KVConnectorRole.SCHEDULER:
                calls.append(name)
            return hook(self, *args, **kwargs)

        return call

    any_time = {"has_pending_block_frees", "has_pending_push_work", "reset_cache", "shutdown"}
    for name, hook in list(vars(KVLakeConnector).items()):
        if name in OVERRIDDEN and name not in {"__init__", *any_time} and isfunction(hook):
            monkeypatch.setattr(KVLakeConnector, name, recorded(name, hook))
    engine = make(num_blocks=42)
    engine.run(request_of("earlier", PROMPT, max_tokens=4))
    engine.forget()
    other = [number + 1 for number in PROMPT]
    requests = [
        engine.add(request_of("a", PROMPT, max_tokens=60)),
        engine.add(request_of("b", other, max_tokens=60)),
        engine.add(request_of("c", [*PROMPT, 5, 6], max_tokens=60)),
    ]
    engine.step()
    engine.abort(requests[-1])
    engine.finish(*requests)
    engine.settle()
    assert sum(request.num_preemptions for request in requests) > 0
    wanted = {"bind_gpu_block_pool", "update_state_after_alloc", "update_connector_output"}
    assert wanted | {"build_connector_meta", "take_events"} <= set(calls)
    assert not departure(" ".join(calls), SCHEDULER), departure(" ".join(calls), SCHEDULER)


@pytest.mark.promise("beside-others")
def test_one_of_several_in_a_multi_connector(make: Callable[..., Engine]) -> None:
    """A hit, a load that fails and is computed, and every hook through vLLM's own wrapper."""
    engine = make(others=["EmptyConnector"], ranks=2)
    engine.run(request_of("a", PROMPT, max_tokens=1))
    engine.forget()
    engine.run(request_of("b", PROMPT, max_tokens=1))
    assert engine.computed["b"] == len(PROMPT) - CACHED
    engine.forget()
    request = engine.add(request_of("c", PROMPT, max_tokens=1))
    while not engine.role.loading:
        engine.step()
    engine.sidecar.detach()
    for _ in range(20):
        engine.clock.now += 60
        engine.step()
    engine.finish(request)
    engine.settle()
    assert engine.computed["c"] == len(PROMPT)
    assert EmptyConnector.finished == ["a", "b", "c"]
    engine.check_idle()


def wishing(name: str, request_params: Any, **options: Any) -> Any:
    request = request_of(name, PROMPT, max_tokens=1, **options)
    request.kv_transfer_params = {"kvlake": request_params}
    return request


class TestWishesOfARequest:
    """`kv_transfer_params={"kvlake": {...}}`."""

    @pytest.mark.promise("read-write")
    def test_write_false_stores_nothing(self, make: Callable[..., Engine]) -> None:
        engine = make()
        engine.run(wishing("a", {"write": False}))
        assert not engine.sidecar.parts
        engine.run(wishing("b", {"write": True}))
        engine.forget()
        engine.run(wishing("c", {"write": False}))
        assert engine.computed["c"] == len(PROMPT) - CACHED
        engine.check_idle()

    @pytest.mark.promise("read-write")
    def test_read_false_loads_nothing(self, make: Callable[..., Engine]) -> None:
        engine = make()
        engine.run(wishing("a", {}))
        engine.forget()
        engine.run(wishing("b", {"read": False}))
        assert engine.computed["b"] == len(PROMPT)
        engine.check_idle()

    @pytest.mark.promise("host-only")
    def test_read_host_waits_for_no_store(self, make: Callable[..., Engine]) -> None:
        """What of a prompt host memory has is loaded; what only the store has is not asked for."""
        engine = make()
        engine.run(wishing("a", {}))
        engine.forget()
        keys = list(engine.sidecar.parts)
        for key in keys[2:]:
            engine.sidecar.demote(key)
        engine.run(wishing("b", {"read": "host"}))
        assert engine.computed["b"] == len(PROMPT) - 2 * CHUNK_TOKENS
        assert not engine.client.sent_of(Lookup)
        engine.forget()
        for key in keys[2:]:
            engine.sidecar.evict(key)
        engine.run(wishing("c", {}))
        assert engine.client.sent_of(Lookup)
        assert engine.computed["c"] == len(PROMPT) - CACHED
        engine.check_idle()

    @pytest.mark.promise("ttl")
    def test_each_store_says_how_long_and_where(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        engine.run(wishing("a", {"write": "host", "ttl_seconds": 2.5}))
        engine.run(request_of("b", [1, *PROMPT], max_tokens=1))
        for rank in engine.ranks:
            jobs = [job for one in rank.client.sent_of(Submit) for job in one.stores]
            assert {(job.ttl_ms, job.stays) for job in jobs} == {(2500, True), (0, False)}
            of_a = [job for job in jobs if job.stays]
            keys = [chunk.key for job in of_a for chunk in job.chunks]
            assert len(keys) == -(-len(PROMPT) // CHUNK_TOKENS)

    @pytest.mark.promise("pin")
    def test_the_prompt_is_pinned_when_the_request_ends(self, make: Callable[..., Engine]) -> None:
        engine = make()
        engine.run(wishing("a", {"pin_seconds": 30}))
        (pin,) = engine.client.sent_of(Pin)
        assert (pin.duration_ms, pin.groups) == (30_000, [])
        assert set(pin.keys) == set(engine.sidecar.parts)
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert len(engine.client.sent_of(Pin)) == 1
        engine.check_idle()

    def test_of_several_groups_what_a_hit_would_load_is_pinned(
        self, make: Callable[..., Engine]
    ) -> None:
        window = spec_of(SlidingWindowSpec, sliding_window=2 * BLOCK_TOKENS)
        engine = make(specs=[spec_of(), window])
        engine.run(wishing("a", {"pin_seconds": 30}))
        (pin,) = engine.client.sent_of(Pin)
        groups = Counter(pin.groups)
        assert groups[0] == -(-len(PROMPT) // CHUNK_TOKENS)
        assert 0 < groups[1] < groups[0]
        assert set(pin.keys) <= set(engine.sidecar.parts)
        assert all(
            engine.sidecar.group_of[key] == group
            for key, group in zip(pin.keys, pin.groups, strict=True)
        )

    def test_a_reset_ends_the_pins(self, make: Callable[..., Engine]) -> None:
        engine = make()
        engine.run(wishing("a", {"pin_seconds": 30}))
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert [one.pins for one in engine.client.sent_of(Release)] == [True]

    def test_a_pin_without_a_sidecar_is_counted(self, make: Callable[..., Engine]) -> None:
        engine = make()
        engine.sidecar.detach()
        taken = counted(engine)
        engine.run(wishing("a", {"pin_seconds": 30}))
        skipped = total(taken, "pins_skipped") + engine.role.stats.pins_skipped
        assert skipped == -(-len(PROMPT) // CHUNK_TOKENS)

    @pytest.mark.promise("malformed-params")
    @pytest.mark.parametrize("request_params", ["no", {"read": "false"}, {"raed": False}])
    def test_what_is_not_understood_is_taken_as_less(
        self, make: Callable[..., Engine], request_params: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make()
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        engine.forget()
        for name in ("a", "b"):
            engine.run(wishing(name, request_params, salt=None))
            engine.forget()
            assert engine.computed[name] == len(PROMPT)
        assert caplog.text.count("is not understood") == 1

    def test_params_of_others_are_none_of_ours(self, make: Callable[..., Engine]) -> None:
        engine = make()
        request = request_of("a", PROMPT, max_tokens=1)
        request.kv_transfer_params = {"do_remote_prefill": True}
        engine.run(request)
        assert engine.sidecar.parts


class TestHandingOver:
    """Prefill here, decode there: `hand_over` and `expect_tokens`."""

    def handed(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, **request_params: Any) -> Any:
        """What a request's answer says of its prompt."""
        told: list[Any] = []
        finished = engine.connector.request_finished_all_groups

        def noted(*args: Any) -> Any:
            told.append(finished(*args))
            return told[-1]

        monkeypatch.setattr(engine.connector, "request_finished_all_groups", noted)
        engine.run(wishing("a", {"hand_over": True, **request_params}))
        (answer,) = told
        assert answer[0] is False
        return answer[1]

    def test_the_answer_says_what_is_being_stored(
        self, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told = self.handed(make(), monkeypatch)
        assert told == {"kvlake": {"expect_tokens": CACHED}}

    def test_it_promises_nothing_that_is_not_stored(
        self, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.handed(make(), monkeypatch, write=False) is None
        engine = make()
        engine.sidecar.detach()
        assert self.handed(engine, monkeypatch) is None

    def test_of_several_groups_too(
        self, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        window = spec_of(SlidingWindowSpec, sliding_window=2 * BLOCK_TOKENS)
        engine = make(specs=[spec_of(), window])
        told = self.handed(engine, monkeypatch)
        assert told == {"kvlake": {"expect_tokens": CACHED}}
        engine.forget()
        engine.run(wishing("b", told["kvlake"]))
        assert engine.computed["b"] == len(PROMPT) - CACHED
        assert not engine.role.pending.pending

    def missing_some(self, engine: Engine) -> dict[bytes, Any]:
        """A prompt of which the last chunks are still on their way; those."""
        engine.run(request_of("a", PROMPT, max_tokens=1))
        engine.forget()
        late = {key: engine.sidecar.parts[key] for key in list(engine.sidecar.parts)[3:]}
        for key in late:
            engine.sidecar.evict(key)
        return late

    @pytest.mark.promise("disaggregated")
    @pytest.mark.parametrize("tier", ["host", "store"])
    def test_what_is_expected_is_waited_for(self, make: Callable[..., Engine], tier: str) -> None:
        engine = make()
        late = self.missing_some(engine)
        request = engine.add(wishing("b", {"expect_tokens": CACHED, "wait_seconds": 30}))
        for _ in range(5):
            engine.step()
        assert not engine.computed["b"]
        (engine.sidecar.parts if tier == "host" else engine.sidecar.store).update(late)
        for key in late:
            engine.sidecar.tell_flags(key)
        engine.clock.now += 0.01
        engine.finish(request)
        engine.settle()
        assert engine.computed["b"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_many_that_wait_are_not_all_looked_up_in_each_step(
        self, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Any client may send them, and each cost every step a lookup for up to a minute."""
        engine, lookups = make(), 0
        hit = HitFinder.hit

        def counted(*given: Any) -> Hit:
            nonlocal lookups
            lookups += 1
            return hit(*given)

        monkeypatch.setattr(HitFinder, "hit", counted)
        wait = {"expect_tokens": CACHED, "wait_seconds": 60}
        requests = [engine.add(wishing(str(number), wait)) for number in range(50)]
        engine.step()
        seen_at_first, lookups = lookups, 0
        for _ in range(40):
            engine.clock.now += 0.005
            engine.step()
        assert seen_at_first >= 50
        # As often as if there were few of them, and each in its turn.
        assert 900 <= lookups <= 1100
        for request in requests:
            engine.abort(request)
        engine.settle()
        engine.check_idle()

    def test_and_no_longer_than_was_said(self, make: Callable[..., Engine]) -> None:
        engine = make()
        self.missing_some(engine)
        request = engine.add(wishing("b", {"expect_tokens": CACHED, "wait_seconds": 30}))
        engine.clock.now += 29
        engine.step()
        assert not engine.computed["b"]
        engine.clock.now += 2
        engine.finish(request)
        engine.settle()
        # What is there is loaded all the same.
        assert engine.computed["b"] == len(PROMPT) - 3 * CHUNK_TOKENS
        engine.check_idle()

    def test_more_than_there_can_be_is_not_waited_for(self, make: Callable[..., Engine]) -> None:
        """The other engine's blocks may be smaller, and end behind the last whole one here."""
        engine = make()
        engine.run(request_of("a", PROMPT, max_tokens=1))
        engine.forget()
        engine.run(wishing("b", {"expect_tokens": len(PROMPT), "wait_seconds": 60}))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    def test_an_abort_while_it_waits(self, make: Callable[..., Engine]) -> None:
        engine = make()
        request = engine.add(wishing("a", {"expect_tokens": CACHED, "wait_seconds": 60}))
        engine.step()
        engine.abort(request)
        engine.settle()
        engine.check_idle()
        assert not engine.role.pending.pending


@pytest.mark.promise("layer-by-layer")
def test_no_layer_waits_for_the_cache() -> None:
    """So CUDA graphs stay whole (docs/adr/0027)."""
    assert not KVLakeConnector.requires_piecewise_for_cudagraph({})


def test_ranks_that_are_engines_of_their_own_publish_each_for_itself(model: Path) -> None:
    """Each is rank 0 of one then; where it publishes goes by its number among all."""
    config = vllm_config(model)
    config.kv_events_config = KVEventsConfig(
        enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:5557"
    )
    config.parallel_config.data_parallel_index = 3
    assert config.parallel_config.data_parallel_rank == 0
    asked: list[Any] = []

    def attach(self: EngineProfile, *_: Any, **options: Any) -> None:
        asked.append(options)

    with patch.object(EngineProfile, "attach", attach), places.patched("Client", client := Mock()):
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(64, 1, ()))
        connector.bind_gpu_block_pool(Mock())
        _, make_attempt = client.call_args.args
        make_attempt()
    (options,) = asked
    assert options["events_endpoint"] == "tcp://127.0.0.1:5560"
