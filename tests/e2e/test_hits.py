"""What a hit gives, against the engine's own prefix hit: log probabilities and KV bytes.

The whole module runs twice, once with prompts computed in one step and once in steps of at most
512 tokens (chunked prefill).
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    GENERATED_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    attach,
    blocks_of,
    check_equal,
    check_hit,
    check_told,
    chunk_tokens,
    counters,
    empty,
    external_hit,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    told,
    words,
)
from tests.e2e.setups import in_steps, sidecar_in
from tests.e2e.waiting import until
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("chunked-prefill", "connector", "suite-hits")]

BLOCKS = 512


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with sidecar_in(folder, host={"size": "512MiB"}) as sidecar:
        yield sidecar


@pytest.fixture(
    scope="module",
    params=[pytest.param(8192, marks=pytest.mark.nightly), 512],
    ids=["whole", "chunked"],
)
def engine(
    request: pytest.FixtureRequest, folder: Path, model: str, sidecar: SidecarProcess
) -> Iterator[EngineProcess]:
    engine_args = {
        "num_gpu_blocks_override": BLOCKS,
        "max_model_len": 4096,
        **in_steps(request.param),
    }
    spec = EngineSpec(model, sidecar.socket, engine_args)
    with EngineProcess(spec, folder / f"engine-{request.param}.log") as engine:
        engine.wait_ready()
        attach(engine, sidecar)
        yield engine


@pytest.fixture(autouse=True)
def _nothing_runs_on(sidecar: SidecarProcess) -> Iterator[None]:
    yield
    sidecar.wait("everything ended", idle)


def loaded_tokens(sidecar: SidecarProcess, before: dict[str, int]) -> int:
    return (counters(sidecar)["bytes_loaded"] - before["bytes_loaded"]) // KV_BYTES_PER_TOKEN


def prompts_named(sidecar: SidecarProcess) -> int:
    """Prompts whose chunks the sidecar has heard of."""
    last: int = json.loads(sidecar.get("/uses"))["last"]
    return last


def tokens_reported(sidecar: SidecarProcess) -> dict[str, int]:
    """Tokens of the prompt that was reported last, by where they came from."""
    prompts = json.loads(sidecar.get("/prompts?last=1"))["prompts"]
    return prompts[0]["tokens"] if prompts else {}


def test_the_oracle_sees_what_it_should(engine: EngineProcess) -> None:
    """Two cold runs are equal, their KV too; another prompt, or the same one cached, is not."""
    call = Call(words(1500, 2))
    first = own_hit(engine, call)
    again = own_hit(engine, call)
    assert first.generation.cached_tokens == 0
    check_equal(again, first)
    other = own_hit(engine, Call(words(1500, 3)))
    assert other.generation.logprobs != first.generation.logprobs
    assert not (other.blocks[0] & first.blocks[0]).total()
    hit = own_hit(engine, call, before=[call])
    assert hit.generation.cached_tokens == 1500 // BLOCK_TOKENS * BLOCK_TOKENS


def test_cold_loads_nothing(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    before = counters(sidecar)
    empty(engine)
    generation = engine.generate(words(1500, 4), cache_salt=fresh_salt())
    assert generation.cached_tokens == 0
    assert counters(sidecar)["chunks_loaded"] == before["chunks_loaded"]


def test_own_prefix_hit_waits_for_no_message(
    engine: EngineProcess, sidecar: SidecarProcess
) -> None:
    salt = fresh_salt()
    # What earlier tests stored has arrived: their blocks were given back.
    empty(engine)
    stored = counters(sidecar)["chunks_stored"]
    engine.generate(words(1024, 5), cache_salt=salt)
    # All of it: what is stored later would be sent beside the request that sends nothing.
    stored += 1024 // chunk_tokens(engine)
    sidecar.wait(
        "everything is stored", lambda status: status["counters"]["chunks_stored"] >= stored
    )
    if not has_host_tier(engine):
        until("the prompt is reported", lambda: sum(tokens_reported(sidecar).values()) == 1024)
    before, named = sidecar.status(), prompts_named(sidecar)
    # One token more, so that nothing new is worth storing.
    generation = engine.generate([*words(1024, 5), 7], max_tokens=1, cache_salt=salt)
    assert generation.cached_tokens == 1024
    # But our connector says afterwards, in one message, what became of its prompt.
    told = 0 if has_host_tier(engine) else 1
    reported = before["prompts"]["prompts"] + told
    sidecar.wait("the prompt is reported", lambda now: now["prompts"]["prompts"] >= reported)
    # And once which chunks the prompt has, which nothing waits for either.
    # The sidecar may get it after the engine has answered, between two of these questions.
    frames = before["sockets"]["frames_received"] + told - named
    sidecar.wait(
        "no other message came",
        lambda now: now["sockets"]["frames_received"] == frames + prompts_named(sidecar),
    )


@pytest.mark.promise("full-attention", "host-hit", "llama")
@pytest.mark.parametrize(
    "tokens",
    [
        *(65, 97, CHUNK_TOKENS - 1, CHUNK_TOKENS + 1, CHUNK_TOKENS + BLOCK_TOKENS + 5),
        *(2 * CHUNK_TOKENS + 1, 3000),
    ],
)
def test_host_hit(engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
    before, metrics = counters(sidecar), told(engine)
    generation = check_hit(engine, Call(words(tokens, 100 + tokens)))
    assert generation.cached_tokens == tokens // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaded_tokens(sidecar, before) == generation.cached_tokens
    check_told(engine, metrics, host=generation.cached_tokens)


@pytest.mark.parametrize("tokens", [20, BLOCK_TOKENS + 5])
def test_a_hit_too_short_to_pay_is_computed(
    engine: EngineProcess, sidecar: SidecarProcess, tokens: int
) -> None:
    before = counters(sidecar)
    call = Call(words(tokens, 200 + tokens))
    oracle = own_hit(engine, call)
    measured = external_hit(engine, call, before=[call])
    check_equal(measured, oracle)
    assert loaded_tokens(sidecar, before) == 0


def test_shared_prefix_of_another_prompt(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """The hit ends at the last full chunk that both prompts share."""
    shared = words(2 * CHUNK_TOKENS + 100, 6)
    first, second = Call(shared + words(400, 7)), Call(shared + words(300, 8))
    before = counters(sidecar)
    salt = fresh_salt()
    engine.generate(first.prompt, cache_salt=salt)
    empty(engine)
    generation = engine.generate(second.prompt, cache_salt=salt)
    chunk = chunk_tokens(engine)
    assert generation.cached_tokens == len(shared) // chunk * chunk
    assert loaded_tokens(sidecar, before) == generation.cached_tokens


@pytest.mark.parametrize("local_tokens", [CHUNK_TOKENS, 2 * CHUNK_TOKENS + 3 * BLOCK_TOKENS])
def test_partial_local_hit_plus_external(
    engine: EngineProcess, sidecar: SidecarProcess, local_tokens: int
) -> None:
    """The engine holds the head itself; the load starts there, also in the middle of a chunk."""
    prompt = words(1300, 9)
    head = Call([*prompt[:local_tokens], prompt[local_tokens]], max_tokens=1)
    call = Call(prompt)
    oracle = own_hit(engine, call, before=[head, call])
    salt_free = counters(sidecar)
    measured = external_hit(engine, call, before=[head, call], local=[head])
    check_equal(measured, oracle)
    assert measured.generation.cached_tokens == 1300 // BLOCK_TOKENS * BLOCK_TOKENS
    # The head came from the sidecar as well, by its own request.
    assert loaded_tokens(sidecar, salt_free) == measured.generation.cached_tokens
    assert counters(sidecar)["loads_missing"] == salt_free["loads_missing"]


@pytest.mark.parametrize("tokens", [3 * BLOCK_TOKENS, CHUNK_TOKENS, 4 * CHUNK_TOKENS])
def test_full_prompt_hit(engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
    """All tokens of a prompt are cached: its last one is computed again, to have something to
    sample from. That is a decoding step, so the oracle is one: the prompt's last token is what
    the engine generated behind the others."""
    head = words(tokens - 1, 300 + tokens)
    empty(engine)
    decoded = engine.generate(head, max_tokens=1 + GENERATED_TOKENS, cache_salt=fresh_salt())
    blocks = blocks_of(engine)
    prompt = [*head, decoded.tokens[0]]
    salt = fresh_salt()
    empty(engine)
    # Stored by the same requests as above: all but the last token computed in one step.
    engine.generate(head, max_tokens=1 + GENERATED_TOKENS, cache_salt=salt)
    empty(engine)
    before = counters(sidecar)
    generation = engine.generate(prompt, max_tokens=GENERATED_TOKENS, cache_salt=salt)
    assert generation.cached_tokens == tokens
    assert loaded_tokens(sidecar, before) == tokens
    assert generation.tokens == decoded.tokens[1:]
    assert generation.logprobs == decoded.logprobs[1:]
    (worker,), (expected,) = blocks_of(engine), blocks
    assert not worker - expected


@pytest.mark.parametrize("generated", [1, 40, pytest.param(300, marks=pytest.mark.nightly)])
def test_next_turn_continues_on_what_was_generated(
    engine: EngineProcess, sidecar: SidecarProcess, generated: int
) -> None:
    """The tail of a finished request is stored under its own key, and the next turn finds it."""
    first = Call(words(700, 10), max_tokens=generated)
    answer = engine.generate(first.prompt, max_tokens=generated, cache_salt=fresh_salt()).tokens
    second = Call([*first.prompt, *answer, *words(150, 11)])
    before = counters(sidecar)
    generation = check_hit(engine, second, before=[first])
    # The last generated token was sampled, but nothing was computed for it yet.
    computed = 700 + generated - 1
    assert generation.cached_tokens == computed // BLOCK_TOKENS * BLOCK_TOKENS
    assert loaded_tokens(sidecar, before) == generation.cached_tokens


def test_three_turns(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    calls = [Call(words(333, 12), max_tokens=50)]
    salt = fresh_salt()
    for turn in range(2):
        answer = engine.generate(
            calls[-1].prompt, max_tokens=calls[-1].max_tokens, cache_salt=salt
        ).tokens
        calls.append(Call([*calls[-1].prompt, *answer, *words(77, 13 + turn)], max_tokens=50))
    check_hit(engine, calls[-1], before=calls[:-1])


@pytest.mark.promise("cache-salt")
def test_another_salt_finds_nothing(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    prompt, tenant = words(1000, 16), fresh_salt()
    engine.generate(prompt, cache_salt=tenant)
    before = counters(sidecar)
    for other in (fresh_salt(), tenant + "x", tenant[:-1]):
        empty(engine)
        assert engine.generate(prompt, cache_salt=other).cached_tokens == 0
    assert loaded_tokens(sidecar, before) == 0
    empty(engine)
    assert engine.generate(prompt, cache_salt=tenant).cached_tokens == 992


def test_without_a_salt(engine: EngineProcess) -> None:
    """Requests without a salt share among themselves, and with nobody else."""
    # Never seen by this sidecar, whichever of its engines runs this: there is no salt to tell them.
    prompt = words(1020, random.randrange(1 << 30))
    assert engine.generate(prompt, cache_salt=fresh_salt()).cached_tokens == 0
    empty(engine)
    first = engine.generate(prompt)
    empty(engine)
    again = engine.generate(prompt)
    assert first.cached_tokens < again.cached_tokens == 1020 // BLOCK_TOKENS * BLOCK_TOKENS


def test_hits_of_several_requests_at_once(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Loads of many requests run side by side; each gets its own bytes."""
    calls = [Call(words(500 + 40 * i, 400 + i), max_tokens=1) for i in range(8)]
    salt = fresh_salt()
    empty(engine)
    for call in calls:
        engine.generate(call.prompt, max_tokens=1, cache_salt=salt)
    (expected,) = blocks_of(engine)
    empty(engine)
    before = counters(sidecar)
    handles = [engine.begin(call.prompt, max_tokens=1, cache_salt=salt) for call in calls]
    generations = [engine.finish(handle) for handle in handles]
    whole = [len(call.prompt) // BLOCK_TOKENS * BLOCK_TOKENS for call in calls]
    assert [generation.cached_tokens for generation in generations] == whole
    assert loaded_tokens(sidecar, before) == sum(whole)
    (worker,) = blocks_of(engine)
    # Batched, the last tokens are computed in other shapes: only loaded blocks must be equal.
    assert (worker & expected).total() >= sum(whole) // BLOCK_TOKENS


@pytest.mark.promise("prompt-tokens")
def test_every_prompt_token_was_counted_once(
    engine: EngineProcess, sidecar: SidecarProcess
) -> None:
    """Over all requests so far, by its source or by why it was computed."""
    call = Call(words(600, 98))
    own_hit(engine, call, before=[call])
    external_hit(engine, call, before=[call])
    name = "vllm:kvlake_prompt_tokens"
    assert engine.counter(name) == engine.counter("vllm:prompt_tokens") > 0
    for outcome in ("local", "host", "computed"):
        assert engine.counter(name, outcome=outcome) > 0
    by_source = "vllm:prompt_tokens_by_source"
    sources = {"local": "local_cache_hit", "host": "external_kv_transfer"}
    for outcome, source in sources.items():
        assert engine.counter(name, outcome=outcome) == engine.counter(by_source, source=source)
    # Reports come in order, and no other prompt has this length.
    answer = engine.generate(words(334, 99), cache_salt=fresh_salt())
    until("the prompt is reported", lambda: sum(tokens_reported(sidecar).values()) == 334)
    assert tokens_reported(sidecar) == {"new": 320, "tail": 14}
    assert answer.cached_tokens == 0
