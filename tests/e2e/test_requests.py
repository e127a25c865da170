"""Requests that are more than a prompt: adapters, outputs that are constrained, guessed tokens.

One engine has it all switched on at once: LoRA, structured outputs, and speculative decoding by
n-grams, whose drafts are rejected more often than not. At its end its weights are replaced.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.demo.model import WORDS, write_model
from tests.e2e import adapters
from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PREEMPTIONS,
    SESSIONS,
    Call,
    Measured,
    Oracle,
    attach,
    blocks_of,
    check_equal,
    check_hit,
    check_reloaded,
    counters,
    empty,
    external_hit,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    words,
)
from tests.e2e.setups import SMALL, attached, folder_store, listed, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-requests")]

ENGINE_ARGS: Final[dict[str, Any]] = {
    **SMALL,
    **adapters.ENGINE_ARGS,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
}
ACCEPTED: Final = "vllm:spec_decode_num_accepted_tokens"
DRAFTED: Final = "vllm:spec_decode_num_draft_tokens"


@pytest.fixture(scope="module")
def loras(folder: Path) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for number in (1, 2):
        place = folder / f"adapter-{number}"
        adapters.write_adapter(place, number)
        found.append((f"adapter-{number}", number, str(place)))
    return found


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = sidecar_in(folder).socket
    with EngineProcess(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def sidecar(folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
    with attached(folder, engine, store=folder_store(folder / "store")) as sidecar:
        yield sidecar


@pytest.fixture(autouse=True)
def _attached(sidecar: SidecarProcess) -> None:
    """Every case has it."""


@pytest.mark.promise("adapters", "host-hit", "lora")
def test_an_adapter_has_its_own_chunks(
    engine: EngineProcess, loras: list[tuple[str, int, str]]
) -> None:
    first, second = ({"adapter": one} for one in loras)
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


@pytest.mark.promise("adapters", "lora", "suite-changed-weights")
def test_an_adapter_whose_files_are_replaced(
    engine: EngineProcess, folder: Path, loras: list[tuple[str, int, str]]
) -> None:
    """vLLM reads them again once others have pushed it out. The rest of this runs nightly."""
    place = folder / "replaced"
    adapters.write_adapter(place, 3)
    call, salt = Call(words(700, 9), options={"adapter": ("replaced", 3, str(place))}), fresh_salt()
    before = call.generate(engine, salt)
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS
    shutil.rmtree(place)
    adapters.write_adapter(place, 4)
    for one in loras:
        Call(words(64, 8), options={"adapter": one}).generate(engine, fresh_salt())
    empty(engine)
    replaced = call.generate(engine, salt)
    assert replaced.cached_tokens == 0
    assert replaced.logprobs[0] != before.logprobs[0]


@pytest.mark.promise("abort-of-load", "lora", "preemption")
@pytest.mark.nightly
def test_requests_of_adapters_are_preempted_and_aborted(
    engine: EngineProcess, sidecar: SidecarProcess, loras: list[tuple[str, int, str]]
) -> None:
    """More of them than the KV cache has room for: they load again what is their adapter's own."""
    calls = [
        Call(words(650 + number, 50), max_tokens=150, options={"adapter": loras[number % 2]})
        for number in range(12)
    ]
    oracles = [Oracle(engine, Call(one.prompt, 1, one.options)) for one in calls]
    for oracle in oracles:
        oracle.at(0)
    loaded, preempted = counters(sidecar)["chunks_loaded"], engine.counter(PREEMPTIONS)
    salts = [fresh_salt() for _ in calls]
    handles = [one.begin(engine, salt) for one, salt in zip(calls, salts, strict=True)]
    engine.abort(handles.pop())
    generations = [engine.finish(handle) for handle in handles]
    assert engine.counter(PREEMPTIONS) > preempted
    # Nothing was stored under these salts before: only who was preempted can load. An engine with a
    # host tier of its own finds it there.
    assert has_host_tier(engine) or counters(sidecar)["chunks_loaded"] > loaded
    if not has_host_tier(engine):
        check_reloaded(engine, calls[: len(generations)], generations, salts)
    # The first position alone: asked for log probabilities of a prompt, an engine that drafts
    # and serves adapters fails by itself (an `einsum` over the adapters' layers).
    for oracle, generation in zip(oracles, generations, strict=False):
        assert len(generation.tokens) == 150
        oracle.check_close(generation)
    empty(engine)
    loaded = counters(sidecar)["chunks_loaded"]
    again = [
        Call(one.prompt, 1, one.options).begin(engine, salt)
        for one, salt in zip(calls[:4], salts, strict=False)
    ]
    engine.abort(again.pop(1))
    generations = [engine.finish(handle) for handle in again]
    assert counters(sidecar)["chunks_loaded"] > loaded
    for oracle, generation in zip((oracles[0], *oracles[2:4]), generations, strict=True):
        prompt = oracle.call.prompt
        assert generation.cached_tokens == len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
        oracle.check_close(generation)


@pytest.mark.promise("engine-restart", "lora", "store-hit")
def test_another_engine_and_the_store_know_an_adapter_by_its_files(
    folder: Path, engine: EngineProcess, sidecar: SidecarProcess, loras: list[tuple[str, int, str]]
) -> None:
    """Whatever its number is there."""
    _, _, place = loras[0]
    call = Call(words(700, 7), options={"adapter": loras[0]})
    expected = own_hit(engine, call, before=[call])
    empty(engine)
    with EngineProcess(engine.spec, folder / "second-engine.log") as second:
        second.wait_ready()
        attach(second, sidecar, sessions=2 * SESSIONS)
        empty(second)
        renamed = Call(call.prompt, options={"adapter": ("by another name", 7, place)})
        # The first request of an adapter is computed: only then it is known what vLLM loaded.
        first = Call(words(64, 8), options=renamed.options).generate(second, fresh_salt())
        assert first.cached_tokens == 0
        empty(second)
        generation = renamed.generate(second, expected.salt)
        check_equal(Measured(generation, blocks_of(second), expected.salt), expected)
        empty(second)
    sidecar.wait("everything ended", idle)
    assert sidecar.drain() == 0
    sidecar.start()
    attach(engine, sidecar)
    listed(sidecar, folder / "store")
    empty(engine)
    generation = call.generate(engine, expected.salt)
    check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
    assert counters(sidecar)["chunks_read"] > 0


def spelled(token: int) -> str:
    """The word that a token of the model is, or the character: behind the words are the bytes."""
    return f"w{token}" if token < WORDS - 256 else chr(token - (WORDS - 256))


@pytest.mark.promise("structured-outputs")
def test_constrained_outputs_share_with_others(engine: EngineProcess) -> None:
    """They change which tokens are chosen, not what their KV is."""
    prompt = words(500, 2)
    constrained = Call(prompt, 24, {"regex": "(w1|w2)(w3|w4)(w5|w6){22}"})
    plain = Call(prompt, 24)
    oracle = own_hit(engine, constrained, before=[plain])
    measured = external_hit(engine, constrained, before=[plain])
    check_equal(measured, oracle)
    assert measured.generation.cached_tokens == 500 // BLOCK_TOKENS * BLOCK_TOKENS
    text = "".join(map(spelled, measured.generation.tokens))
    # The last word may be cut off.
    assert re.fullmatch("(w1|w2)(w3|w4)(w5|w6)*w?", text), text
    check_hit(engine, constrained)


@pytest.mark.promise("ngram-drafts")
def test_drafts_are_stored_once_they_are_known(engine: EngineProcess) -> None:
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


@pytest.mark.promise("suite-changed-weights", "weights-replaced")
def test_weights_that_are_replaced_at_last(engine: EngineProcess, folder: Path) -> None:
    """From then on the engine is by itself, so this is its last test. The rest runs nightly."""
    other = write_model(folder / "other-model", layers=6, hidden=256, heads=4, kv_heads=4, seed=9)
    call, salt = Call(words(700, 10)), fresh_salt()
    before = call.generate(engine, salt)
    empty(engine)
    assert call.generate(engine, salt).cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS
    engine.rpc("reload_weights", weights_path=str(other))
    empty(engine)
    replaced = call.generate(engine, salt)
    assert replaced.cached_tokens == 0
    assert replaced.logprobs[0] != before.logprobs[0]
