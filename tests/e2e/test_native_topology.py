"""vLLM's own offloading with `canonical_layout`: an engine of one rank and one of two on a sidecar.

What either stored the other loads, as in `test_topology.py`: pages have the heads of all ranks, in
the same order however the model is cut. Compared are the bytes of each head with those of the
engine that computed them, and what is generated with the reader's own prefix hit.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    SESSIONS,
    Call,
    attach,
    close,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    same_output,
    whole_blocks,
    words,
)
from tests.e2e.native import NativeEngine
from tests.e2e.setups import SMALL, sidecar_in
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "suite-layouts"),
]

TOKENS: Final = 1500
WHOLE_TOKENS: Final = whole_blocks(TOKENS)
HEADS: Final = 4
COMPUTED_BLOCKS: Final = 2
"""Behind the hit: the prompt's end, and what is generated."""


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with sidecar_in(folder) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engines(
    folder: Path, model: str, sidecar: SidecarProcess
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    with contextlib.ExitStack() as stack:
        made: list[EngineProcess] = []
        for ranks, bind in ((1, "0"), (2, "0|1")):
            spec = EngineSpec(
                model,
                sidecar.socket,
                {**SMALL, "tensor_parallel_size": ranks},
                connector_extra={"canonical_layout": True},
                threads_bind=bind,
            )
            engine = stack.enter_context(NativeEngine(spec, folder / f"engine{ranks}.log"))
            made.append(engine.wait_ready())
        for engine in made:
            attach(engine, sidecar, sessions=2 * SESSIONS)
        yield made[0], made[1]
        for engine in made:
            empty(engine)
        sidecar.wait("everything ended", idle)


def heads_of(engine: EngineProcess) -> Counter[tuple[str, ...]]:
    """How often each content is in a block that is not poison: that of its heads, of all ranks."""
    ranks = engine.head_digests()
    return Counter(tuple(head for rank in ranks for head in rank[block]) for block in ranks[0])


@pytest.mark.promise("offloading-canonical")
@pytest.mark.parametrize("writer", [0, 1], ids=["TP1 stores", "TP2 stores"])
def test_what_one_stored_the_other_loads(
    sidecar: SidecarProcess, engines: tuple[EngineProcess, EngineProcess], writer: int
) -> None:
    ours, theirs = engines[writer], engines[1 - writer]
    call, salt = Call(words(TOKENS, 10 + writer)), fresh_salt()
    own = own_hit(theirs, call, before=[call])
    for engine in engines:
        empty(engine)
    assert len(sidecar.status()["realms"]) == 1
    computed = call.generate(ours, salt)
    held = heads_of(ours)
    assert computed.cached_tokens == 0
    assert {len(set(heads)) for heads in held} == {HEADS}
    empty(ours)
    before = counters(sidecar)["bytes_loaded"]
    found = call.generate(theirs, salt)
    assert found.cached_tokens == WHOLE_TOKENS
    assert counters(sidecar)["bytes_loaded"] - before == WHOLE_TOKENS * KV_BYTES_PER_TOKEN
    # What was loaded is, byte for byte, what the other engine computed.
    loaded = heads_of(theirs)
    assert (loaded & held).total() == WHOLE_TOKENS // BLOCK_TOKENS
    assert (loaded - held).total() == COMPUTED_BLOCKS
    # And it is the reader's own from now on.
    again = call.generate(theirs, salt)
    assert again.cached_tokens == WHOLE_TOKENS
    assert same_output(again, found)
    assert not loaded - heads_of(theirs)
    assert counters(sidecar)["bytes_loaded"] - before == WHOLE_TOKENS * KV_BYTES_PER_TOKEN
    # What either computes only rounding tells apart.
    assert close(found, computed)
    assert close(found, own.generation)
