"""vLLM's own offloading: a model of several KV cache groups (gemma 3), cut over two ranks, with an
adapter.

What chunks are and how ranks share their rows is vLLM's business; what comes back must be what the
engine had, on each rank and in each group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import adapters
from tests.e2e.arms import (
    Call,
    Measured,
    blocks_of,
    counters,
    empty,
    external_hit,
    own_hit,
    same_output,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import ENGINE_ARGS
from tests.e2e.native import CHUNK_TOKENS, NativeEngine
from tests.e2e.setups import attached, folder_store, listed, sidecar_in
from tests.e2e.test_hybrid import check_bytes, write_gemma
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [pytest.mark.engine, pytest.mark.promise("offloading", "suite-windows")]

RANKS: dict[str, Any] = {"tensor_parallel_size": 2, **adapters.ENGINE_ARGS}


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("gemma")
    write_gemma(model)
    socket = sidecar_in(folder).socket
    spec = EngineSpec(str(model), socket, {**ENGINE_ARGS, **RANKS}, threads_bind="0|1")
    with NativeEngine(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.mark.promise("offloading-groups")
def test_hits_of_all_groups_on_both_ranks(folder: Path, engine: EngineProcess) -> None:
    """From host memory, and from the object store for a sidecar that is empty."""
    call, bucket = Call(words(900, 1), max_tokens=1), folder / "store"
    with attached(folder, engine, store=folder_store(bucket)):
        oracle = own_hit(engine, call, before=[call])
        assert oracle.blocks[0] != oracle.blocks[1], "ranks hold different heads"
        measured = external_hit(engine, call, before=[call])
        assert measured.generation.cached_tokens == whole_blocks(900)
        assert same_output(measured.generation, oracle.generation)
        check_bytes(measured, oracle)
    with attached(folder, engine, store=folder_store(bucket)) as sidecar:
        listed(sidecar, bucket)
        empty(engine)
        generation = call.generate(engine, oracle.salt)
        again = Measured(generation, blocks_of(engine), oracle.salt)
        assert same_output(generation, oracle.generation)
        check_bytes(again, oracle)
        assert counters(sidecar)["chunks_read"] >= whole_blocks(900) // CHUNK_TOKENS


@pytest.mark.promise("offloading-groups", "suite-requests")
def test_an_adapter_has_its_own_chunks(folder: Path, engine: EngineProcess) -> None:
    adapters.write_adapter(folder / "adapter", 1)
    options = {"adapter": ("adapter", 1, str(folder / "adapter"))}
    call, plain = Call(words(700, 2), options=options), Call(words(700, 2))
    with attached(folder, engine):
        oracle = own_hit(engine, call, before=[call])
        measured = external_hit(engine, call, before=[call])
        assert measured.generation.cached_tokens == whole_blocks(700)
        assert same_output(measured.generation, oracle.generation)
        empty(engine)
        other = plain.generate(engine, measured.salt)
        assert other.cached_tokens == 0
        assert not same_output(other, measured.generation)
