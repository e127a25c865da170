"""Requests that are more than a prompt: adapters, outputs that are constrained, guessed tokens.

One engine has it all switched on at once: LoRA, structured outputs, and speculative decoding by
n-grams, whose drafts are rejected more often than not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PATIENT,
    Call,
    attach,
    check_equal,
    check_hit,
    empty,
    external_hit,
    fresh_salt,
    idle,
    own_hit,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

HIDDEN: Final = 256
LAYERS: Final = 6
RANK: Final = 8
ENGINE_ARGS: Final[dict[str, Any]] = {
    "num_gpu_blocks_override": 256,
    "max_model_len": 4096,
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": RANK,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens"


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of the fixture `model`, large enough to change every logit."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        for part in ("q_proj", "k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            down = torch.randn(RANK, HIDDEN, generator=generator) * 0.1
            up = torch.randn(HIDDEN, RANK, generator=generator) * 0.1
            tensors[f"{name}.lora_A.weight"] = down.to(torch.bfloat16)
            tensors[f"{name}.lora_B.weight"] = up.to(torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def adapters(folder: Path) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for number in (1, 2):
        place = folder / f"adapter-{number}"
        write_adapter(place, number)
        found.append((f"adapter-{number}", number, str(place)))
    return found


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[Engine]:
    socket = SidecarProcess(folder / "s", {}).socket
    with Engine(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def sidecar(folder: Path, engine: Engine) -> Iterator[SidecarProcess]:
    with SidecarProcess(folder / "s", {"host": {"size": "256MiB"}, "limits": PATIENT}) as sidecar:
        attach(engine, sidecar)
        yield sidecar
        empty(engine)
        sidecar.wait("everything ended", idle)


@pytest.fixture(autouse=True)
def _attached(sidecar: SidecarProcess) -> None:
    """Every case has it."""


def test_an_adapter_has_its_own_chunks(
    engine: Engine, adapters: list[tuple[str, int, str]]
) -> None:
    first, second = ({"adapter": one} for one in adapters)
    prompt = words(700, 1)
    with_first = check_hit(engine, Call(prompt, options=first))
    assert with_first.cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS
    salt = fresh_salt()
    outputs = [Call(prompt, options=first).generate(engine, salt)]
    for options in (second, {}):
        empty(engine)
        other = Call(prompt, options=options).generate(engine, salt)
        assert other.cached_tokens == 0
        outputs.append(other)
    assert len({json.dumps(one.logprobs[0], sort_keys=True) for one in outputs}) == 3
    empty(engine)
    again = Call(prompt, options=first).generate(engine, salt)
    assert again.cached_tokens == with_first.cached_tokens
    assert again.logprobs == with_first.logprobs


def test_constrained_outputs_share_with_others(engine: Engine) -> None:
    """They change which tokens are chosen, not what their KV is."""
    prompt = words(500, 2)
    constrained = Call(prompt, 24, {"regex": "(w1|w2)(w3|w4)(w5|w6){22}"})
    plain = Call(prompt, 24)
    oracle = own_hit(engine, constrained, before=[plain])
    measured = external_hit(engine, constrained, before=[plain])
    check_equal(measured, oracle)
    assert measured.generation.cached_tokens == 500 // BLOCK_TOKENS * BLOCK_TOKENS
    first, second, *others = measured.generation.tokens
    assert (first in (1, 2), second in (3, 4), set(others) <= {5, 6}) == (True, True, True)
    check_hit(engine, constrained)


def test_drafts_are_stored_once_they_are_known(engine: Engine) -> None:
    """A next turn loads what the last one generated: what was accepted, not what was rejected."""
    before = engine.counter(ACCEPTED), engine.counter(DRAFTED)
    # Five words of six can be guessed from those before, and the sixth often cannot.
    first = Call(words(400, 3), 198, {"regex": "((w1|w2)w5w6w7w8w9){33}"})
    answer = first.generate(engine, fresh_salt()).tokens
    accepted = engine.counter(ACCEPTED) - before[0]
    drafted = engine.counter(DRAFTED) - before[1]
    assert drafted > 0
    assert 0 < accepted < drafted
    assert len(answer) == 198
    turn = Call([*first.prompt, *answer, *words(50, 4)], max_tokens=40)
    generation = check_hit(engine, turn, before=[first])
    # The last generated token was never computed.
    assert generation.cached_tokens == (400 + 197) // BLOCK_TOKENS * BLOCK_TOKENS
    assert generation.cached_tokens > 2 * CHUNK_TOKENS
