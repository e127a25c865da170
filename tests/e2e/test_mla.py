"""MLA: every rank holds all of the KV, it is stored once, and engines of any TP read it.

One sidecar, an engine of one rank and one of two. The oracle is each engine's own prefix hit.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest
import torch

from tests.e2e.arms import (
    Call,
    Measured,
    attach,
    blocks_of,
    check_equal,
    check_hit,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    words,
)
from tests.e2e.setups import folder_store, listed, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.model import write_mla_model
from tiers.catalog.names import parse_name
from tiers.kv.layout import Segment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not torch.cpu._is_amx_tile_supported(),  # noqa: SLF001 (of torch)
        reason="without AMX vLLM's MLA on CPUs computes every prompt from its start",
    ),
    pytest.mark.promise("connector", "suite-mla"),
]

TOKENS: Final = 700
WHOLE_TOKENS: Final = 672
CHUNKS: Final = 3
LAYERS: Final = 2
SESSIONS: Final = 5
"""Two schedulers, and three workers."""


class Place(NamedTuple):
    """What the tests share."""

    sidecar: SidecarProcess
    bucket: Path
    one: EngineProcess
    two: EngineProcess


@pytest.fixture(scope="module")
def place(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A sidecar with a folder as its store, and both engines attached."""
    model = write_mla_model(
        tmp_path_factory.mktemp("mla"), layers=LAYERS, hidden=256, heads=4, latent=512
    )
    bucket = folder / "bucket"
    with contextlib.ExitStack() as stack:
        sidecar = stack.enter_context(sidecar_in(folder, store=folder_store(bucket)))
        engines: list[EngineProcess] = []
        for ranks, bind in ((1, "0"), (2, "0|1")):
            args = {
                "tensor_parallel_size": ranks,
                "num_gpu_blocks_override": 128,
                "max_model_len": 2048,
            }
            spec = EngineSpec(str(model), sidecar.socket, args, threads_bind=bind)
            engines.append(stack.enter_context(EngineProcess(spec, folder / f"engine{ranks}.log")))
        for engine in engines:
            engine.wait_ready()
        for engine in engines:
            attach(engine, sidecar, sessions=SESSIONS)
        yield Place(sidecar, bucket, engines[0], engines[1])


def segments_in(bucket: Path) -> dict[bytes, list[Segment]]:
    """What is in the store of each chunk."""
    found: dict[bytes, list[Segment]] = {}
    for path in bucket.rglob("*.arrow"):
        name = parse_name(str(path.relative_to(bucket)))
        if name is not None:
            found.setdefault(name.key, []).append(name.segment)
    return found


@pytest.mark.promise("host-hit", "mla-model", "two-ranks")
def test_a_hit_equals_the_engines_own_on_one_rank_and_on_two(place: Place) -> None:
    for seed, engine in enumerate((place.one, place.two)):
        generation = check_hit(engine, Call(words(TOKENS, 30 + seed)))
        assert generation.cached_tokens == WHOLE_TOKENS


@pytest.mark.promise("engine-restart", "mla", "mla-model")
@pytest.mark.parametrize("writer", [0, 1], ids=["TP1 stores", "TP2 stores"])
def test_what_one_stored_the_other_loads(place: Place, writer: int) -> None:
    ours, theirs = (place.one, place.two) if writer == 0 else (place.two, place.one)
    call, salt = Call(words(TOKENS, 40 + writer)), fresh_salt()
    sidecar = place.sidecar
    empty(ours)
    sidecar.wait("everything ended", idle)
    before, known = counters(sidecar), segments_in(place.bucket)
    computed = ours.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    held = blocks_of(ours)
    assert all(worker == held[0] for worker in held), "every rank holds the same"
    empty(ours)
    sidecar.wait("everything ended", idle)
    # Generated tokens make one more block: a tail of its own.
    stored = counters(sidecar)["chunks_stored"] - before["chunks_stored"]
    assert stored >= CHUNKS
    sidecar.wait(
        "all is written",
        lambda now: now["counters"]["chunks_written"] >= before["chunks_written"] + stored,
    )
    written = {k: v for k, v in segments_in(place.bucket).items() if k not in known}
    assert len(written) == stored
    assert all(one == [Segment(0, LAYERS, 0, 1)] for one in written.values()), "once each"
    empty(theirs)
    generation = theirs.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    found = Measured(generation, blocks_of(theirs), salt)
    assert generation.cached_tokens == WHOLE_TOKENS
    # What was loaded is, byte for byte, what the others computed.
    for worker in found.blocks:
        assert (worker & held[0]).total() >= WHOLE_TOKENS // 32
    for one, other in zip(generation.logprobs, computed.logprobs, strict=True):
        for token in one.keys() & other.keys():
            assert math.isclose(one[token], other[token], abs_tol=0.3)
    # Again: now it is the reader's own.
    again = theirs.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    assert again.cached_tokens == WHOLE_TOKENS
    assert (again.tokens, again.logprobs) == (generation.tokens, generation.logprobs)


@pytest.mark.promise("abort-of-load", "mla-model")
def test_aborts_of_a_load(place: Place) -> None:
    """One request at a time: of several at once vLLM's MLA on CPUs computes something else."""
    engine, call = place.one, Call(words(TOKENS, 50))
    expected = own_hit(engine, call, before=[call])
    for part in range(5):
        empty(engine)
        handle = engine.begin(call.prompt, cache_salt=expected.salt)
        time.sleep(part * expected.generation.ttft_ms / 4000)
        engine.abort(handle)
        engine.finish(handle)
    place.sidecar.wait("everything ended", idle)
    empty(engine)
    generation = call.generate(engine, expected.salt)
    check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
    assert generation.cached_tokens == WHOLE_TOKENS


@pytest.mark.promise("mla-model", "store-hit")
def test_the_store_serves_a_sidecar_that_knows_nothing(place: Place) -> None:
    engine, sidecar = place.one, place.sidecar
    call = Call(words(TOKENS, 60))
    expected = own_hit(engine, call, before=[call])
    empty(engine)
    sidecar.wait("everything ended", idle)
    assert sidecar.drain() == 0
    sidecar.start()
    attach(engine, sidecar, sessions=SESSIONS)
    listed(sidecar, place.bucket)
    empty(engine)
    generation = call.generate(engine, expected.salt)
    check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
    assert generation.cached_tokens == WHOLE_TOKENS
    assert counters(sidecar)["chunks_read"] >= CHUNKS
