"""A model that mixes short convolutions and full attention (LFM2), on a real engine.

Its convolutions keep a state, in vLLM's cache mode `align`: one KV cache group of attention and two
of states, whose pages lie over each other. What a hit gives is compared with the engine's own hit
of as many tokens, as for other models: log probabilities and bytes. One engine serves all cases;
sidecars take turns on its sockets.
"""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.model import WORDS
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    BLOCK_TOKENS,
    PATIENT,
    Call,
    Measured,
    attach,
    blocks_of,
    close,
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

HIDDEN: Final = 256
GROUPS: Final = 3
BATCH_TOKENS: Final = 512
ENGINE_ARGS: Final[dict[str, Any]] = {
    "num_gpu_blocks_override": 512,
    "max_model_len": 4096,
    "max_num_batched_tokens": BATCH_TOKENS,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}


def write_lfm2(folder: Path) -> None:
    """Six layers, two of them of full attention, with random weights fixed by a seed."""
    import torch
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config: Any = Lfm2Config(
        vocab_size=WORDS + 3,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32_768,
        layer_types=["conv", "conv", "full_attention"] * 2,
        initializer_range=0.1,
    )
    make: Any = Lfm2ForCausalLM
    make(config).to(torch.bfloat16).save_pretrained(folder)
    # vLLM reads these of a published model's configuration; transformers knows them no more.
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"conv_dim": HIDDEN, "block_dim": HIDDEN}
    path.write_text(json.dumps(described))


def sidecar_in(folder: Path, **sections: Any) -> SidecarProcess:
    config = {"host": {"size": "256MiB"}, "limits": PATIENT, **sections}
    return SidecarProcess(folder / "s", config)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = tmp_path_factory.mktemp("lfm2")
    write_lfm2(model)
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


def check_bytes(measured: Measured, oracle: Measured) -> None:
    """Assert that what was loaded is what the engine had: all of attention, and a state per group.

    The blocks that the request itself goes on in are not among them.
    """
    cached_tokens = measured.generation.cached_tokens
    assert cached_tokens == oracle.generation.cached_tokens
    (worker,), (expected,) = measured.blocks, oracle.blocks
    assert (worker & expected).total() >= cached_tokens // BLOCK_TOKENS + GROUPS - 1
    assert (worker - expected).total() <= GROUPS


@pytest.mark.parametrize("tokens", [160, 515, 1500])
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


@pytest.mark.parametrize("more", [20, 166])
def test_a_prompt_that_begins_with_another(
    engine: Engine, sidecar: SidecarProcess, more: int
) -> None:
    """Within the block of the other's end, and over several."""
    first = Call(words(1200, 20 + more), max_tokens=1)
    longer = Call([*first.prompt, *words(more, 21 + more)], max_tokens=1)
    oracle = own_hit(engine, longer, before=[first])
    measured = external_hit(engine, longer, before=[first])
    assert measured.generation.cached_tokens == oracle.generation.cached_tokens == whole(1200)
    assert same_output(measured.generation, oracle.generation)


def test_a_third_branch_finds_where_two_parted(engine: Engine, sidecar: SidecarProcess) -> None:
    """vLLM stops where the second one parts, in the middle of a chunk of attention.

    The engine itself reads there what the first one computed in another step, so all is equal but
    for rounding.
    """
    head = words(1100, 7)
    first, second, third = (Call([*head, *words(100, seed)], max_tokens=1) for seed in (8, 9, 10))
    oracle = own_hit(engine, third, before=[first, second])
    measured = external_hit(engine, third, before=[first, second])
    assert measured.generation.cached_tokens == oracle.generation.cached_tokens == whole(1100)
    assert close(measured.generation, oracle.generation)


def test_the_next_turn_finds_the_prompt(engine: Engine, sidecar: SidecarProcess) -> None:
    """And computes the answer again: vLLM hands over no states of generated tokens by default.

    It holds the answer's attention itself, and makes another step where that ends.
    """
    first = Call(words(1200, 11), max_tokens=100)
    answer = first.generate(engine, fresh_salt()).tokens
    turn = Call([*first.prompt, *answer, *words(50, 12)], max_tokens=1)
    oracle = own_hit(engine, turn, before=[first])
    measured = external_hit(engine, turn, before=[first])
    assert measured.generation.cached_tokens == oracle.generation.cached_tokens == whole(1200)
    assert close(measured.generation, oracle.generation)


def test_the_next_life_of_the_sidecar(folder: Path, engine: Engine) -> None:
    """States outlive it in host memory as attention does."""
    sidecar = sidecar_in(folder, host={"size": "256MiB", "after_stop": "keep"})
    call = Call(words(1500, 5), max_tokens=1)
    try:
        attach(engine, sidecar.start())
        expected = own_hit(engine, call, before=[call])
        empty(engine)
        sidecar.wait("everything ended", idle)
        assert sidecar.process is not None
        sidecar.process.send_signal(signal.SIGKILL)
        sidecar.process.wait(60)
        attach(engine, sidecar.start())
        empty(engine)
        check_same(engine, call, expected)
        empty(engine)
        sidecar.wait("everything ended", idle)
        sidecar.drain()
    finally:
        sidecar.kill()
        sidecar.remove_pool()


def test_object_hit(folder: Path, engine: Engine) -> None:
    """An empty sidecar offers what another one left in the store: every group of it, or nothing."""
    place = folder / "store"
    place.mkdir()
    store = {"url": f"file://{place}", "refresh_seconds": "200ms", "recompute": "never"}
    call = Call(words(1500, 6), max_tokens=1)
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
            # Six chunks of attention, and beside what attaching left the state at its end.
            return len(chunks) == GROUPS and chunks[0] >= 2 and chunks[-1] >= 6

        sidecar.wait("the catalogs are read", listed)
        empty(engine)
        check_same(engine, call, expected)
        # All of attention, and of the states those at the end.
        assert counters(sidecar)["chunks_read"] == 6 + GROUPS - 1
        empty(engine)
        sidecar.wait("everything ended", idle)


def check_same(engine: Engine, call: Call, expected: Measured) -> None:
    """Assert that a request under the salt of `expected` gives what that gave."""
    generation = engine.generate(call.prompt, max_tokens=1, cache_salt=expected.salt)
    assert generation.cached_tokens == whole(len(call.prompt))
    assert generation.logprobs == expected.generation.logprobs
    check_bytes(Measured(generation, blocks_of(engine), expected.salt), expected)
