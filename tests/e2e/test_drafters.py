"""A drafter with layers of its own (EAGLE) on a real engine: they are stored and loaded, too.

The oracle is the engine's own prefix hit, as everywhere, but for the bytes of the drafter's layer.
What vLLM keeps there for the last tokens of a step depends on what follows them in the request,
without any connector too, so two arms cannot agree on it. Compared are the log probabilities, the
bytes of the model's own layers, and how many drafts were made and accepted.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from sidecar.demo.model import write_model
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    GENERATED_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    Oracle,
    counters,
    empty,
    fresh_salt,
    has_host_tier,
    same_output,
    words,
)
from tests.e2e.setups import SMALL, attached, in_steps, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec, Generation
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-drafters"),
]

ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens"
LAYERS: Final = 6
"""Layers of the fixture `model`; the drafter has one."""
STEP_TOKENS: Final = 128
WHOLE_TOKENS: Final = 5 * STEP_TOKENS
TOKENS: Final = 700
COMPUTED_BLOCKS: Final = (
    -(-(TOKENS + GENERATED_TOKENS) // BLOCK_TOKENS) - WHOLE_TOKENS // BLOCK_TOKENS
)


def write_eagle(folder: Path) -> None:
    """One layer with random weights that takes the model's hidden states beside each token."""
    import torch
    from safetensors.torch import load_file, save_file

    write_model(folder, layers=1, hidden=256, heads=4, kv_heads=4, seed=1)
    tensors = {
        name.removeprefix("model."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if name.startswith("model.layers.") and "input_layernorm" not in name
    }
    generator = torch.Generator().manual_seed(1)
    tensors["fc.weight"] = (torch.randn(256, 512, generator=generator) * 0.1).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["EagleLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))


def engine_args(drafter: Path) -> dict[str, Any]:
    """Options of an engine that drafts with it."""
    speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2}
    return {**SMALL, **in_steps(STEP_TOKENS), "speculative_config": speculative}


@pytest.fixture(scope="module")
def engine(
    folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    drafter = tmp_path_factory.mktemp("eagle")
    write_eagle(drafter)
    spec = EngineSpec(model, sidecar_in(folder).socket, engine_args(drafter))
    with EngineProcess(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def sidecar(folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
    with attached(folder, engine) as sidecar:
        yield sidecar


class Drafted(NamedTuple):
    """What the request that counts gave, and what was drafted for it."""

    generation: Generation
    blocks: Counter[str]
    """How often each content of the model's own layers is in a block that is not poison."""
    drafted: float
    accepted: float


def arm(engine: EngineProcess, before: Call, call: Call, *, forgotten: bool) -> Drafted:
    """Run both under a new salt; where `forgotten`, what the first one left must be loaded."""
    salt = fresh_salt()
    empty(engine)
    before.generate(engine, salt)
    if forgotten:
        empty(engine)
    drafted, accepted = engine.counter(DRAFTED), engine.counter(ACCEPTED)
    generation = call.generate(engine, salt)
    (worker,) = engine.digests(layers=LAYERS)
    return Drafted(
        generation,
        Counter(worker.values()),
        engine.counter(DRAFTED) - drafted,
        engine.counter(ACCEPTED) - accepted,
    )


@pytest.mark.promise("eagle")
def test_the_drafters_layer_is_loaded_too(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """vLLM drops the last block of its own hit, whose KV may be of another next token.

    So the prompt that the oracle's hit comes of is longer. Both are computed in equal steps.
    """
    call = Call(words(TOKENS, 1))
    own = call
    if has_host_tier(engine):
        # There what the engine drops is found, and must not be loaded behind the oracle's hit.
        own = replace(call, options={"kv_transfer_params": {"kvlake": {"read": False}}})
    oracle = arm(engine, call, own, forgotten=False)
    before = counters(sidecar)["bytes_loaded"]
    head = Call(call.prompt[: WHOLE_TOKENS + 20])
    measured = arm(engine, head, call, forgotten=True)
    assert oracle.generation.cached_tokens == measured.generation.cached_tokens == WHOLE_TOKENS
    assert same_output(measured.generation, oracle.generation)
    assert (measured.blocks & oracle.blocks).total() >= WHOLE_TOKENS // BLOCK_TOKENS
    # Behind them drafts that were rejected may lie where in the other arm there was nothing.
    assert (measured.blocks - oracle.blocks).total() <= COMPUTED_BLOCKS
    assert measured.drafted == oracle.drafted > 0
    assert measured.accepted == oracle.accepted
    loaded = counters(sidecar)["bytes_loaded"] - before
    assert loaded == WHOLE_TOKENS * KV_BYTES_PER_TOKEN * (LAYERS + 1) // LAYERS


@pytest.mark.promise("eagle")
def test_another_next_token_is_another_chunk(
    engine: EngineProcess, sidecar: SidecarProcess
) -> None:
    """Up to the chunk before it the prompts share; its last block too, but for that token.

    vLLM's own keys do not name that token: there the drafter's layer of it is the other prompt's.
    """
    salt = fresh_salt()
    head = words(2 * CHUNK_TOKENS, 2)
    Call([*head, *words(40, 3)]).generate(engine, salt)
    empty(engine)
    other = Call([*head, *words(40, 4)])
    generation = other.generate(engine, salt)
    named = 0 if has_host_tier(engine) else CHUNK_TOKENS
    assert generation.cached_tokens == len(head) - named
    Oracle(engine, other).check_close(generation)


@pytest.mark.promise("eagle")
def test_next_turn(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """What was drafted and accepted is found, and of the drafter, what it wrote for that."""
    salt = fresh_salt()
    first = Call(words(300, 5), max_tokens=100)
    answer = first.generate(engine, salt).tokens
    empty(engine)
    turn = Call([*first.prompt, *answer, *words(50, 6)])
    generation = turn.generate(engine, salt)
    # The last generated token was never computed.
    assert generation.cached_tokens == 398 // BLOCK_TOKENS * BLOCK_TOKENS
    Oracle(engine, turn).check_close(generation)
