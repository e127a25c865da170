"""One engine whose own KV events are joined with those of the tiers; and the order of its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contract.calls import FOLDER, SCHEDULER, WORKER, departure
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PATIENT,
    attach,
    empty,
    fresh_salt,
    whole_blocks,
    words,
)
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess
from tests.releases import has_vllm
from tests.sidecar.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-events")]


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    config: dict[str, Any] = {
        "host": {"size": "256MiB"},
        "events": {"enabled": True},
        "limits": PATIENT,
    }
    with SidecarProcess(folder / "s", config) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[EngineProcess]:
    calls = folder / "calls"
    calls.mkdir()
    connector = {
        "kv_connector": "RecordingConnector",
        "kv_connector_module_path": "tests.contract.recording",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": sidecar.socket},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder}/engine.sock",
        "replay_endpoint": f"ipc://{folder}/again.sock",
    }
    engine_args = {
        "num_gpu_blocks_override": 96,
        "max_model_len": 2048,
        "kv_events_config": events,
    }
    spec = EngineSpec(model, sidecar.socket, engine_args, connector=connector)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(calls))
        with EngineProcess(spec, folder / "engine.log") as engine:
            engine.wait_ready()
            attach(engine, sidecar)
            yield engine


@pytest.fixture
def subscribe(sidecar: SidecarProcess) -> Iterator[Any]:
    made: list[Subscriber] = []

    def make() -> Subscriber:
        events = sidecar.status()["events"]
        made.append(Subscriber(events["endpoint"], events["replay_endpoint"]))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


@pytest.mark.promise("events-engine")
def test_one_stream_of_engine_and_tiers(
    engine: EngineProcess, sidecar: SidecarProcess, subscribe: Any
) -> None:
    follower = subscribe()
    follower.recover()
    prompt = words(1000, 1)
    salt = fresh_salt()
    engine.generate(prompt, max_tokens=1, cache_salt=salt)

    def tokens_of(subscriber: Subscriber, medium: str) -> set[tuple[int, ...]]:
        return {
            tuple(event.token_ids)
            for place, held in subscriber.blocks.items()
            if place.medium == medium
            for event in held.values()
        }

    # The tail too, which is stored last: then nothing more is told of host memory.
    stored = prompt[: whole_blocks(1000)]
    chunks = {tuple(stored[at : at + CHUNK_TOKENS]) for at in range(0, len(stored), CHUNK_TOKENS)}
    follower.until(lambda: chunks <= tokens_of(follower, "CPU"))
    follower.until(lambda: len(follower.names("GPU")) == 1000 // BLOCK_TOKENS)
    late = subscribe()
    late.see()
    assert late.names("GPU") == follower.names("GPU")
    assert late.names("CPU") == follower.names("CPU")
    # The engine forgets its own, and says so with its next step; the tiers do not.
    empty(engine)
    engine.generate(words(2 * BLOCK_TOKENS, 2), max_tokens=1, cache_salt=salt)
    follower.until(lambda: len(follower.names("GPU")) == 2)
    assert chunks <= tokens_of(follower, "CPU")
    assert engine.generate(prompt, max_tokens=1, cache_salt=salt).cached_tokens == 992
    follower.until(lambda: len(follower.names("GPU")) == 2 + 1000 // BLOCK_TOKENS)
    replayed = subscribe()
    replayed.recover()
    assert replayed.replays == 1
    replayed.until(lambda: replayed.names("GPU") == follower.names("GPU"))
    owners = {place.owner.partition("/")[0] for place in follower.blocks if place.owner}
    assert owners == {"engine", "kvlake"}
    (joined,) = sidecar.status()["events"]["engines"]
    assert joined["gaps"] == 0


@pytest.mark.promise("vllm-call-order")
def test_the_order_of_calls(engine: EngineProcess, folder: Path) -> None:
    """Events of a run with a miss, stores, a hit, several requests at once and an abort."""
    prompts = [words(700, seed) for seed in range(20, 24)]
    salt = fresh_salt()
    for cached_tokens in (0, 672):
        handles = [engine.begin(prompt, max_tokens=4, cache_salt=salt) for prompt in prompts]
        engine.abort(handles.pop())
        for handle in handles:
            assert engine.finish(handle).cached_tokens == cached_tokens
        empty(engine)
    (scheduler,) = (folder / "calls").glob("scheduler-*")
    (worker,) = (folder / "calls").glob("worker-*")
    # vLLM 0.31 does not ask where a hit is from.
    of_a_hit = "get_external_cache_hit_sources" if has_vllm("0.32") else "update_state_after_alloc"
    for place, order, hit, last in (
        (scheduler, SCHEDULER, of_a_hit, "build_connector_meta "),
        (worker, WORKER, "start_load_kv", "build_connector_worker_meta "),
    ):
        calls = place.read_text()
        # The engine runs on: its last step may not be over.
        calls = calls[: calls.rindex(last) + len(last)]
        assert calls.count(last) > 10
        assert hit in calls.split()
        assert not departure(calls, order), departure(calls, order)
