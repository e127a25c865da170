"""Two pipeline stages: each holds half of the layers, and a chunk is whole with both.

vLLM schedules a step ahead of the one that the stages compute.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    CHUNK_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    Measured,
    Oracle,
    blocks_of,
    check_equal,
    check_hit,
    counters,
    empty,
    own_hit,
    words,
)
from tests.e2e.two_ranks import cluster, listed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

TOKENS: Final = 1500
WHOLE_TOKENS: Final = 1472
CHUNKS: Final = 6
SECOND_STAGE: Final = "3-6.0-4.arrow"
"""What the objects of the second stage are called: its layers, and all KV heads."""


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[Engine]:
    socket = SidecarProcess(folder / "s", {}).socket
    engine_args = {
        "pipeline_parallel_size": 2,
        "num_gpu_blocks_override": 256,
        "max_model_len": 4096,
        # So that a prompt is several steps, of which two are under way at once.
        "max_num_batched_tokens": 512,
    }
    spec = EngineSpec(model, socket, engine_args, threads_bind="0|1")
    with Engine(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        engine.dummy_step()
        yield engine


def test_host_hit(folder: Path, engine: Engine) -> None:
    call = Call(words(TOKENS, 1))
    with cluster(folder, engine) as sidecar:
        before = counters(sidecar)["bytes_loaded"]
        generation = check_hit(engine, call)
        assert generation.cached_tokens == WHOLE_TOKENS
        # Both stages together loaded every byte once.
        loaded = counters(sidecar)["bytes_loaded"] - before
        assert loaded == WHOLE_TOKENS * KV_BYTES_PER_TOKEN


def test_partial_local_hit_plus_external(folder: Path, engine: Engine) -> None:
    prompt = words(TOKENS, 2)
    head = Call(prompt[: CHUNK_TOKENS + 97], max_tokens=1)
    with cluster(folder, engine):
        generation = check_hit(engine, Call(prompt), before=[head, Call(prompt)], local=[head])
        assert generation.cached_tokens == WHOLE_TOKENS


def test_requests_side_by_side(folder: Path, engine: Engine) -> None:
    """Loads, computing and aborts in steps that overlap; what a load left is given back."""
    calls = [Call(words(TOKENS, seed)) for seed in (7, 8, 9)]
    with cluster(folder, engine):
        oracles = [Oracle(engine, call) for call in calls]
        for oracle in oracles:
            oracle.at(0)
        empty(engine)
        salts = ["side-a", "side-b"]
        for salt in salts:
            handles = [engine.begin(call.prompt, cache_salt=salt) for call in calls]
            engine.abort(handles[1])
            engine.finish(handles[1])
            for at in (0, 2):
                oracles[at].check_close(engine.finish(handles[at]))
        empty(engine)
        for salt in salts:
            handles = [engine.begin(call.prompt, cache_salt=salt) for call in calls]
            engine.abort(handles[0])
            engine.finish(handles[0])
            for at in (1, 2):
                oracles[at].check_close(engine.finish(handles[at]))


def test_store_hit_of_an_empty_sidecar(folder: Path, engine: Engine) -> None:
    call = Call(words(TOKENS, 3))
    with cluster(folder, engine):
        expected = own_hit(engine, call, before=[call])
        assert expected.blocks[0] != expected.blocks[1], "stages hold different layers"
    # Not those of the catalog.
    segments = {path.name for path in (folder / "store").rglob("*-*.*-*.arrow")}
    assert segments == {"0-3.0-4.arrow", SECOND_STAGE}
    with cluster(folder, engine) as sidecar:
        listed(sidecar, CHUNKS)
        empty(engine)
        generation = engine.generate(call.prompt, cache_salt=expected.salt)
        check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
        assert generation.cached_tokens == WHOLE_TOKENS
        assert counters(sidecar)["chunks_read"] == CHUNKS


def test_a_chunk_of_which_one_stage_is_missing_is_no_hit(folder: Path, engine: Engine) -> None:
    """The run of loadable chunks ends before it."""
    call = Call(words(TOKENS, 4))
    before = set((folder / "store").rglob(SECOND_STAGE))
    with cluster(folder, engine):
        expected = own_hit(engine, call, before=[call])
    # All of the second stage's objects of this prompt but those of its first chunk.
    tokens = b"".join(token.to_bytes(4, "little") for token in call.prompt[:CHUNK_TOKENS])
    for path in set((folder / "store").rglob(SECOND_STAGE)) - before:
        if tokens not in path.read_bytes():
            path.unlink()
    with cluster(folder, engine) as sidecar:
        listed(sidecar, 1)
        empty(engine)
        generation = engine.generate(call.prompt, cache_salt=expected.salt)
        assert generation.cached_tokens == CHUNK_TOKENS


def test_sidecar_killed_during_a_load(folder: Path, engine: Engine) -> None:
    """Whatever one stage had loaded already, both compute; a successor cleans up and serves."""
    call = Call(words(TOKENS, 5))
    cold = own_hit(engine, call)
    with cluster(folder, engine) as sidecar:
        warm = own_hit(engine, call, before=[call])
        empty(engine)
        handle = engine.begin(call.prompt, cache_salt=warm.salt)
        time.sleep(0.005)
        sidecar.kill()
        generation = engine.finish(handle)
        expected = warm if generation.cached_tokens else cold
        assert generation.tokens == expected.generation.tokens
        assert generation.logprobs == expected.generation.logprobs
    with cluster(folder, engine):
        for _ in range(2):
            generation = engine.generate(call.prompt, cache_salt=warm.salt)
            empty(engine)
        assert generation.cached_tokens == WHOLE_TOKENS
