"""A model that mixes sliding windows and full attention (gemma 3), on a real engine.

vLLM puts its layers into three KV cache groups whose pages lie over each other. What a hit gives is
compared with the engine's own hit of as many tokens, as for other models: log probabilities and
bytes. One engine serves most cases; sidecars take turns on its sockets.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.model import WORDS
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PATIENT,
    Call,
    Measured,
    Oracle,
    attach,
    blocks_of,
    counters,
    empty,
    external_hit,
    fresh_salt,
    idle,
    own_hit,
    same_output,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

WINDOW: Final = 128
GROUPS: Final = 3
ENGINE_ARGS: Final[dict[str, Any]] = {
    "num_gpu_blocks_override": 256,
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,
    "enable_chunked_prefill": True,
    "skip_tokenizer_init": True,
}


def write_gemma(folder: Path) -> None:
    """Six layers, two of them of full attention, with random weights fixed by a seed."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config: Any = Gemma3TextConfig(
        vocab_size=WORDS + 3,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        query_pre_attn_scalar=64,
        max_position_embeddings=32_768,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )
    config.initializer_range = 0.1
    make: Any = Gemma3ForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)


def sidecar_in(folder: Path, **sections: Any) -> SidecarProcess:
    config = {"host": {"size": "256MiB"}, "limits": PATIENT, **sections}
    return SidecarProcess(folder / "s", config)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tmp_path_factory.mktemp("gemma")
    write_gemma(model)
    spec = EngineSpec(str(model), sidecar_in(folder).socket, ENGINE_ARGS)
    with Engine(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture
def sidecar(folder: Path, engine: Engine) -> Iterator[SidecarProcess]:
    with sidecar_in(folder) as sidecar:
        attach(engine, sidecar)
        yield sidecar
        empty(engine)
        sidecar.wait("everything ended", idle)


def whole(tokens: int) -> int:
    """What is loaded of a prompt: whole blocks, and never its last token."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def blocks_read(tokens: int) -> int:
    """Blocks of a hit: all of full attention, and of each window those that it still reaches."""
    blocks = tokens // BLOCK_TOKENS
    return blocks + (GROUPS - 1) * min(blocks, -(-(WINDOW - 1) // BLOCK_TOKENS))


def check_bytes(measured: Measured, oracle: Measured) -> None:
    """Assert that what was loaded is what the engine had, and that nothing else was.

    The last block of each group is partly written. What else is in it is what was there before:
    vLLM uses the blocks of a window that moved on again at once, at other times in either arm.
    """
    assert measured.generation.cached_tokens == oracle.generation.cached_tokens
    for worker, expected in zip(measured.blocks, oracle.blocks, strict=True):
        assert (worker & expected).total() >= blocks_read(measured.generation.cached_tokens)
        assert (worker - expected).total() <= GROUPS


@pytest.mark.parametrize("tokens", [WINDOW - 3, WINDOW + BLOCK_TOKENS, 2 * CHUNK_TOKENS, 1500])
def test_host_hits(engine: Engine, sidecar: SidecarProcess, tokens: int) -> None:
    assert len(sidecar.status()["realms"]) == GROUPS
    before = counters(sidecar)
    for max_tokens in (40, 1):
        call = Call(words(tokens, tokens), max_tokens)
        oracle = own_hit(engine, call, before=[call])
        measured = external_hit(engine, call, before=[call])
        assert measured.generation.cached_tokens == whole(tokens)
        assert same_output(measured.generation, oracle.generation)
    check_bytes(measured, oracle)
    assert counters(sidecar)["loads_missing"] == before["loads_missing"]


def test_behind_the_engines_own_hit(engine: Engine, sidecar: SidecarProcess) -> None:
    prompt = words(1300, 1)
    head = Call([*prompt[:512], 7], max_tokens=1)
    call = Call(prompt)
    oracle = own_hit(engine, call, before=[head, call])
    measured = external_hit(engine, call, before=[head, call], local=[head])
    assert measured.generation.cached_tokens == oracle.generation.cached_tokens == whole(1300)
    assert same_output(measured.generation, oracle.generation)


def test_next_turn(engine: Engine, sidecar: SidecarProcess) -> None:
    first = Call(words(700, 2), max_tokens=300)
    answer = engine.generate(first.prompt, max_tokens=300, cache_salt=fresh_salt()).tokens
    salt = fresh_salt()
    empty(engine)
    engine.generate(first.prompt, max_tokens=300, cache_salt=salt)
    empty(engine)
    turn = [*first.prompt, *answer, *words(150, 3)]
    generation = engine.generate(turn, cache_salt=salt)
    # The last generated token was never computed.
    assert generation.cached_tokens == 999 // BLOCK_TOKENS * BLOCK_TOKENS
    # With the prompt as one, its windows' ends are where the engine keeps them too.
    Oracle(engine, Call(turn)).check_close(generation)


def test_a_shared_head_is_found_where_vllm_itself_keeps_no_windows(
    engine: Engine, sidecar: SidecarProcess
) -> None:
    """The engine keeps windows at the ends of prompts alone; host memory has them all along."""
    shared = words(3 * CHUNK_TOKENS + 50, 4)
    salt = fresh_salt()
    engine.generate([*shared, *words(300, 5)], cache_salt=salt)
    empty(engine)
    second = [*shared, *words(200, 6)]
    generation = engine.generate(second, cache_salt=salt)
    assert generation.cached_tokens == 3 * CHUNK_TOKENS
    Oracle(engine, Call(second)).check_close(generation)


def test_object_hit(folder: Path, engine: Engine) -> None:
    """An empty sidecar offers what another one left in the store: every group of it, or nothing."""
    place = folder / "store"
    place.mkdir()
    store = {"url": f"file://{place}", "refresh_seconds": "200ms", "recompute": "never"}
    call = Call(words(1500, 7), max_tokens=1)
    with sidecar_in(folder, store=store) as sidecar:
        attach(engine, sidecar)
        expected = own_hit(engine, call, before=[call])
        empty(engine)
        sidecar.wait("everything ended", idle)
        assert sidecar.drain() == 0
    with sidecar_in(folder, store=store) as sidecar:
        attach(engine, sidecar)

        def listed(status: dict[str, Any]) -> bool:
            chunks = sorted(realm["chunks_in_store"] for realm in status["realms"])
            # Six chunks of 256 tokens, or twelve of a window's 128.
            return len(chunks) == GROUPS and chunks[0] >= 6 and chunks[1] >= 12

        sidecar.wait("the catalogs are read", listed)
        empty(engine)
        generation = engine.generate(call.prompt, max_tokens=1, cache_salt=expected.salt)
        assert generation.cached_tokens == whole(1500)
        assert generation.logprobs == expected.generation.logprobs
        check_bytes(Measured(generation, blocks_of(engine), expected.salt), expected)
        # All of full attention, and of the windows their ends.
        assert counters(sidecar)["chunks_read"] == 6 + 2 * (GROUPS - 1)
        empty(engine)
        sidecar.wait("everything ended", idle)


def test_an_aborted_request_beside_others(engine: Engine, sidecar: SidecarProcess) -> None:
    """Loads of several requests run side by side, one is aborted, and each gets its own bytes."""
    calls = [Call(words(900 + 10 * number, 20 + number)) for number in range(4)]
    oracles = [Oracle(engine, call) for call in calls]
    for oracle in oracles:
        oracle.at(0)
    salt = fresh_salt()
    for call in calls:
        engine.generate(call.prompt, max_tokens=1, cache_salt=salt)
    empty(engine)
    loaded = counters(sidecar)["chunks_loaded"]
    handles = [engine.begin(call.prompt, cache_salt=salt) for call in calls]
    engine.abort(handles[2])
    generations = [engine.finish(handle) for handle in handles]
    for number in (0, 1, 3):
        assert generations[number].cached_tokens == whole(len(calls[number].prompt))
        oracles[number].check_close(generations[number])
    assert counters(sidecar)["chunks_loaded"] > loaded


def test_preemption(engine: Engine, sidecar: SidecarProcess) -> None:
    """More requests than the KV cache has room for: they are preempted, and load again."""
    calls = [Call(words(290 + 10 * number, 60 + number), max_tokens=300) for number in range(10)]
    oracles = [Oracle(engine, Call(call.prompt, max_tokens=1)) for call in calls]
    for oracle in oracles:
        oracle.at(0)
    loaded = counters(sidecar)["chunks_loaded"]
    salt = fresh_salt()
    handles = [
        engine.begin(call.prompt, max_tokens=call.max_tokens, cache_salt=salt) for call in calls
    ]
    generations = [engine.finish(handle) for handle in handles]
    # Nothing was stored before: only who was preempted can load.
    assert counters(sidecar)["chunks_loaded"] > loaded
    for oracle, generation in zip(oracles, generations, strict=True):
        assert len(generation.tokens) == 300
        oracle.check_close(generation)


def test_engine_restarted(folder: Path, engine: Engine, sidecar: SidecarProcess) -> None:
    """Another engine of the same model hits what the first one stored."""
    call = Call(words(1100, 8), max_tokens=1)
    expected = own_hit(engine, call, before=[call])
    with Engine(engine.spec, folder / "second-engine.log") as second:
        second.wait_ready()
        sidecar.wait("both are attached", lambda status: len(status["sessions"]) == 4)
        empty(second)
        generation = second.generate(call.prompt, max_tokens=1, cache_salt=expected.salt)
        assert generation.cached_tokens == whole(1100)
        assert same_output(generation, expected.generation)
        check_bytes(Measured(generation, blocks_of(second), expected.salt), expected)
        empty(second)
    sidecar.wait("it is gone", lambda status: len(status["sessions"]) == 2)


def test_two_ranks(folder: Path, engine: Engine, sidecar: SidecarProcess) -> None:
    """Each rank has its heads of every group, and loads them."""
    spec = replace(
        engine.spec,
        engine_args={**ENGINE_ARGS, "tensor_parallel_size": 2},
        threads_bind="0|1",
    )
    with Engine(spec, folder / "two-ranks.log") as ranks:
        ranks.wait_ready()
        sidecar.wait("all are attached", lambda status: len(status["sessions"]) == 5)
        call = Call(words(900, 9), max_tokens=1)
        before = counters(sidecar)
        oracle = own_hit(ranks, call, before=[call])
        measured = external_hit(ranks, call, before=[call])
        assert measured.generation.cached_tokens == whole(900)
        assert same_output(measured.generation, oracle.generation)
        assert measured.blocks[0] != measured.blocks[1], "ranks hold different heads"
        check_bytes(measured, oracle)
        assert counters(sidecar)["loads_missing"] == before["loads_missing"]
        empty(ranks)
    sidecar.wait("they are gone", lambda status: len(status["sessions"]) == 2)
