"""Two tensor-parallel ranks: each holds half of the KV heads, and a chunk is whole with both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import Call, attach, check_equal, empty, external_hit, own_hit, words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

SESSIONS = 3
"""The scheduler and two workers."""
CALL = Call(words(1000, 71))


def config(folder: Path) -> dict[str, Any]:
    (folder / "store").mkdir(exist_ok=True)
    return {
        "host": {"size": "256MiB"},
        "store": {"url": f"file://{folder / 'store'}", "refresh_seconds": "100ms"},
        "limits": {
            "lookup_wait": "30s",
            "load_deadline": "60s",
            "lease_ttl": "60s",
            "store_deadline": "60s",
        },
    }


@pytest.fixture(scope="module")
def first(folder: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(folder / "s", config(folder)) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, first: SidecarProcess) -> Iterator[Engine]:
    engine_args = {
        "tensor_parallel_size": 2,
        "num_gpu_blocks_override": 256,
        "max_model_len": 4096,
    }
    spec = EngineSpec(model, first.socket, engine_args, threads_bind="0|1")
    with Engine(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach(engine, first, sessions=SESSIONS)
        yield engine


def test_host_hit_then_store_hit_of_an_empty_sidecar(
    engine: Engine, first: SidecarProcess, folder: Path
) -> None:
    oracle = own_hit(engine, CALL, before=[CALL])
    hit = external_hit(engine, CALL, before=[CALL])
    assert hit.generation.cached_tokens > 900
    check_equal(hit, oracle)
    assert len({str(counter) for counter in hit.blocks}) == 2, "ranks hold different heads"
    first.drain()
    segments = {path.name for path in (folder / "store").rglob("*.arrow")}
    assert segments == {"0-6.0-2.arrow", "0-6.2-4.arrow"}
    with SidecarProcess(folder / "s", config(folder)) as second:
        attach(engine, second, sessions=SESSIONS)
        second.wait("the store is listed", lambda s: s["tiers"]["store"]["chunks"] > 3)
        empty(engine)
        generation = engine.generate(CALL.prompt, cache_salt=hit.salt)
        assert generation.cached_tokens == oracle.generation.cached_tokens
        assert generation.logprobs == oracle.generation.logprobs
        assert second.status()["counters"]["chunks_read"] > 0
