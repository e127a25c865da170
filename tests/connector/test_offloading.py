"""vLLM's own `OffloadingConnector` with `KVLakeOffloadingSpec`, on a real sidecar.

Hits, streaming input, resets, new weights, and random lives in a small cache. What the first worker
notes for the scheduler is in `test_offloading_notes.py`.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
import secrets
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.engine.core import EngineCore

from connector.offloading.spec import KVLakeOffloadingSpec, leave_note, note_path
from connector.offloading.workarounds import region_path
from tests import places
from tests.connector.configurations import request_of
from tests.connector.offloading_engine import Engine, engine_of, prompt, sidecar
from tests.e2e.settling import empty_host_tier
from tests.harness.sidecars import SidecarProcess
from tests.releases import has_vllm

__all__ = ["sidecar"]

pytestmark = pytest.mark.usefixtures("warm_sidecars")


def test_hits_from_both_tiers_and_in_another_engine(model: Path, sidecar: SidecarProcess) -> None:
    tokens = prompt(200)
    with engine_of(model, sidecar) as first, engine_of(model, sidecar) as second:
        assert first.run("a", tokens) == 0
        first.forget(host_tier=False)
        assert first.run("b", tokens) == 192
        first.forget()
        assert first.run("c", tokens) == 192
        assert second.run("d", tokens) == 192
        assert second.run("e", tokens, salt="tenant") == 0
        # What was generated is found by the next turn.
        longer = [*tokens, *[7] * 40]
        assert first.run("f", tokens, max_tokens=41) == 192
        second.forget()
        assert second.run("g", [*longer, 1, 2, 3]) == 240


def test_chunks_of_several_blocks(model: Path, sidecar: SidecarProcess) -> None:
    tokens = prompt(210)
    with engine_of(model, sidecar, block_size=64) as engine:
        assert engine.run("a", tokens) == 0
        engine.forget()
        # A load that begins in the middle of a chunk.
        assert engine.run("b", tokens[:100]) == 64
        assert engine.run("c", tokens) == 192


@pytest.mark.promise("streaming-input")
def test_streaming_input_is_stored_until_it_continues(model: Path, sidecar: SidecarProcess) -> None:
    """From then on vLLM mixes up its blocks (0.33 does not)."""
    tokens = prompt(300)
    with engine_of(model, sidecar) as engine:
        connector: Any = engine.scheduler.connector
        jobs = connector.connector_scheduler._jobs  # noqa: SLF001 (of vLLM)
        for host_tier in (False, True):
            salt = f"stream-{secrets.token_hex(4)}"
            stream = engine.add(request_of("s", tokens[:100], salt=salt, resumable=True))
            for start in (100, 200):
                # What is not in vLLM's host tier when the request continues is not carried.
                while stream.status != RequestStatus.WAITING_FOR_STREAMING_REQ or jobs:
                    engine.step()
                inputs = tokens[start : start + 100]
                engine.scheduler.add_request(request_of("s", inputs, salt=salt, resumable=True))
            engine.scheduler.add_request(request_of("s", [], salt=salt))
            engine.settle()
            said = list(stream.all_token_ids)
            # vLLM 0.33 says what it has scheduled once its host tier has it.
            stored = 192 if has_vllm("0.33") and not host_tier else 96
            for held in (stored, 304):
                # In vLLM's host tier, or in kvlake's.
                engine.forget(host_tier=host_tier)
                engine.computed.clear()
                assert engine.run("a", said, salt=salt) == held


@pytest.mark.promise("streaming-input")
def test_streaming_input_that_was_preempted_before_it_continues(
    model: Path, sidecar: SidecarProcess
) -> None:
    tokens, salt = prompt(300), f"stream-{secrets.token_hex(4)}"
    with engine_of(model, sidecar) as engine:
        stream = engine.add(request_of("s", tokens[:100], salt=salt, max_tokens=9, resumable=True))
        for _ in range(4):
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        while stream.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
            engine.step()
        engine.scheduler.add_request(request_of("s", tokens[100:], salt=salt, resumable=True))
        engine.scheduler.add_request(request_of("s", [], salt=salt))
        engine.settle()
        said = list(stream.all_token_ids)
        engine.forget()
        engine.computed.clear()
        assert engine.run("a", said, salt=salt) < 112


@pytest.mark.promise("offloading-reset")
def test_requests_that_run_during_a_reset_store_no_more(
    model: Path, sidecar: SidecarProcess
) -> None:
    """They continue with KV from before, perhaps of other weights."""
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        request = engine.add(request_of("a", tokens, max_tokens=60))
        while request.num_computed_tokens < 110:
            engine.step()
        # The engine's own cache cannot be reset while it is in use; what is offloaded can.
        assert not engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.settle()
        for host_tier in (False, True):
            engine.forget(host_tier=host_tier)
            assert engine.run("b", tokens) == 0
            engine.computed.clear()
            assert engine.scheduler.reset_prefix_cache(reset_connector=True)


@pytest.mark.promise("offloading-reset")
def test_requests_that_a_reset_preempted_are_loaded(model: Path, sidecar: SidecarProcess) -> None:
    """vLLM would load them in the same step, which ends the engine."""
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        request = engine.add(request_of("a", tokens, max_tokens=60))
        connector: Any = engine.scheduler.connector
        # The second one before another chunk was stored, of which alone is told that it runs again.
        for generated in (10, 12):
            while request.num_output_tokens < generated or connector.connector_scheduler._jobs:  # noqa: SLF001 (of vLLM)
                engine.step()
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        assert request.num_output_tokens == 60
        assert engine.computed["a"] < 100 + 60 + 2 * 32


def test_requests_that_a_reset_preempted_before_their_first_chunk_are_loaded(
    model: Path, sidecar: SidecarProcess
) -> None:
    """After the first preemption it continues without a lookup, which is not reported."""
    with engine_of(model, sidecar, block_size=64) as engine:
        request = engine.add(request_of("a", prompt(20), max_tokens=100))
        connector: Any = engine.scheduler.connector
        for generated in (3, 60):
            while request.num_output_tokens < generated or connector.connector_scheduler._jobs:  # noqa: SLF001 (of vLLM)
                engine.step()
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        assert request.num_output_tokens == 100


def test_preempted_requests_that_are_scheduled_as_new_are_stored(
    model: Path, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with vLLM's second model runner, which needs Triton: the note says so."""

    def leave(engine_id: str, note: dict[str, Any]) -> None:
        assert note["preempted_are_new"] is False
        leave_note(engine_id, note | {"preempted_are_new": True})

    places.patch(monkeypatch, "leave_note", leave)
    tokens = prompt(100)
    with engine_of(model, sidecar) as engine:
        engine.scheduler.use_v2_model_runner = True
        request = engine.add(request_of("a", tokens, max_tokens=60))
        while request.num_output_tokens < 5:
            engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.settle()
        engine.forget()
        assert engine.run("b", list(request.all_token_ids)) == 144


@pytest.mark.promise("offloading-spec")
def test_random_lives_in_a_small_cache(model: Path, sidecar: SidecarProcess) -> None:
    """Preemptions, aborts and reused blocks, with stores and loads in flight."""
    chooser = random.Random(5)
    stems = [[chooser.randrange(3) for _ in range(length)] for length in (48, 100, 130)]
    with engine_of(model, sidecar, num_blocks=24) as engine:
        requests: list[Request] = []
        for step in range(90):
            if chooser.random() < 0.2:
                stem = chooser.choice(stems)
                tail = [chooser.randrange(5) for _ in range(chooser.randrange(60))]
                tokens = [*stem[: chooser.randrange(1, len(stem) + 1)], *tail]
                length = chooser.choice((1, 20, 70))
                salt = f"life-{engine.engine_id}"
                requests.append(
                    engine.add(request_of(f"r{step}", tokens, max_tokens=length, salt=salt))
                )
            if chooser.random() < 0.03 and requests:
                victim = chooser.choice(requests)
                if not victim.is_finished():
                    status = RequestStatus.FINISHED_ABORTED
                    engine.scheduler.finish_requests(victim.request_id, status)
            if chooser.random() < 0.05:
                empty_host_tier(engine.manager.primary_tier)
            engine.step()
        engine.settle()
        assert all(request.is_finished() for request in requests)
        pool: Any = engine.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def test_no_file_outlives_the_start(model: Path, sidecar: SidecarProcess) -> None:
    with engine_of(model, sidecar) as engine:
        assert not region_path(engine.engine_id).exists()
        assert not note_path(engine.engine_id).exists()
        assert isinstance(engine.manager.secondary_tiers[-1].tier_type, str)


def test_no_file_outlives_a_start_that_fails(
    model: Path, sidecar: SidecarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the warm-up finds no memory: then vLLM ends the worker, and makes no scheduler."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("tests.connector.offloading_engine.Scheduler", fail)
    engine = object.__new__(Engine)
    with pytest.raises(RuntimeError, match="no memory"):
        Engine.__init__(engine, model, sidecar.socket)
    assert region_path(engine.engine_id).exists()
    engine.worker.shutdown()
    assert not region_path(engine.engine_id).exists()
    assert not note_path(engine.engine_id).exists()


@pytest.mark.promise("offloading-weights")
def test_weights_that_are_replaced(model: Path, sidecar: SidecarProcess) -> None:
    """KV of the old ones is not loaded, and KV of the new ones not shared."""
    tokens, other = prompt(200), prompt(200)
    with engine_of(model, sidecar) as first:
        assert first.run("a", tokens) == 0
        core: Any = object.__new__(EngineCore)
        core.model_executor = SimpleNamespace(collective_rpc=lambda *_: None)
        core.collective_rpc("reload_weights")
        first.weights = 1
        for host_tier in (False, True):
            first.forget(host_tier=host_tier)
            assert first.run("b", tokens) == 0
            first.computed.clear()
        assert first.scheduler.reset_prefix_cache(reset_connector=True)
        for own in (tokens, other):
            assert first.run("c", own) == 0
            first.forget()
            first.computed.clear()
            assert first.run("c", own) == 192
            first.computed.clear()
        with engine_of(model, sidecar) as second:
            assert second.run("d", tokens) == 192, "of the old ones, which it has"
            assert second.run("e", other) == 0


def test_vllm_asks_the_spec_for_its_metrics() -> None:
    """vLLM's front end asks without an engine."""
    names = KVLakeOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1})
    assert any("tiering" in name for name in names)
