"""Every prompt token is counted once, by its source or by why it was computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import Request

from sidecar.protocol import Lookup, Outcome
from sidecar.protocol.codec import decode_client, encode
from sidecar.protocol.prompts import PromptOutcome, PromptRecord, Prompts, TokenRun
from tests.connector.configurations import BLOCK_TOKENS, CHUNK_TOKENS, request_of
from tests.connector.double import LIMITS
from tests.connector.engine import Engine
from tests.connector.prompts import CACHED, FULL, PROMPT, TAIL_BLOCKS, chain_of, seen
from tiers.kv.index import GONE_EVICTED, GONE_EXPIRED, GONE_QUOTA

pytestmark = pytest.mark.promise("prompt-tokens")

REST = len(PROMPT) - CACHED
"""Behind the last whole block."""


def outcomes(engine: Engine, request: Request) -> dict[str, int]:
    """What the tokens of a request's prompt are counted as; every other one is none of it."""
    before = engine.outcomes.copy()
    if request.request_id not in engine.scheduler.requests:
        engine.add(request)
    engine.finish(request)
    engine.settle()
    found = dict(engine.outcomes - before)
    assert sum(found.values()) == request.num_prompt_tokens
    engine.check_idle()
    return found


def prompt(**params: Any) -> Request:
    request = request_of("a", PROMPT, max_tokens=1)
    request.kv_transfer_params = {"kvlake": params}
    return request


def test_a_prompt_that_nobody_had(engine: Engine) -> None:
    assert outcomes(engine, prompt()) == {PromptOutcome.NEW: CACHED, PromptOutcome.TAIL: REST}


def test_a_hit_in_host_memory(engine: Engine) -> None:
    seen(engine)
    assert outcomes(engine, prompt()) == {PromptOutcome.HOST: CACHED, PromptOutcome.TAIL: REST}


def test_a_hit_in_the_engine_itself(engine: Engine) -> None:
    engine.run(request_of("earlier", PROMPT, max_tokens=1))
    assert outcomes(engine, prompt()) == {PromptOutcome.LOCAL: CACHED, PromptOutcome.TAIL: REST}


def test_a_prompt_of_whole_blocks(make: Callable[..., Engine]) -> None:
    """VLLM counts its last token as loaded, although it computes it again."""
    engine = make(load_tokens_min=CHUNK_TOKENS)
    tokens = PROMPT[: FULL * CHUNK_TOKENS]
    seen(engine, tokens)
    assert outcomes(engine, request_of("a", tokens, max_tokens=1)) == {
        PromptOutcome.HOST: len(tokens)
    }
    # Behind its own hits, vLLM computes the last block.
    found = outcomes(engine, request_of("b", tokens, max_tokens=1))
    assert found == {
        PromptOutcome.LOCAL: len(tokens) - BLOCK_TOKENS,
        PromptOutcome.TAIL: BLOCK_TOKENS,
    }


def test_a_hit_in_the_store(engine: Engine) -> None:
    demoted(engine, first=1)
    assert outcomes(engine, prompt()) == {
        PromptOutcome.HOST: CHUNK_TOKENS,
        PromptOutcome.STORE: CACHED - CHUNK_TOKENS,
        PromptOutcome.TAIL: REST,
    }


def test_another_prompt_with_the_same_beginning(engine: Engine) -> None:
    seen(engine)
    tokens = [*PROMPT[: 2 * CHUNK_TOKENS], *range(500, 500 + CACHED - 2 * CHUNK_TOKENS)]
    assert outcomes(engine, request_of("a", tokens, max_tokens=1)) == {
        PromptOutcome.HOST: 2 * CHUNK_TOKENS,
        PromptOutcome.NEW: CACHED - 2 * CHUNK_TOKENS,
    }


@pytest.mark.parametrize(
    ("gone", "reason"),
    [
        (GONE_EVICTED, PromptOutcome.EVICTED),
        (GONE_EXPIRED, PromptOutcome.EXPIRED),
        (GONE_QUOTA, PromptOutcome.QUOTA),
        (0, PromptOutcome.NEW),
    ],
)
def test_a_chunk_that_left(engine: Engine, gone: int, reason: PromptOutcome) -> None:
    seen(engine)
    chain = chain_of(engine, PROMPT)
    engine.sidecar.evict(chain.keys[2], gone)
    # What is there behind the gap cannot be loaded, either.
    assert outcomes(engine, prompt()) == {
        PromptOutcome.HOST: 2 * CHUNK_TOKENS,
        reason: CACHED - 2 * CHUNK_TOKENS,
        PromptOutcome.TAIL: REST,
    }


@pytest.mark.parametrize(
    ("gone", "reason"),
    [(GONE_EVICTED, PromptOutcome.EVICTED), (0, PromptOutcome.NEW)],
)
def test_a_prompt_shorter_than_a_chunk(engine: Engine, gone: int, reason: PromptOutcome) -> None:
    tokens = PROMPT[: 2 * BLOCK_TOKENS + 3]
    seen(engine, tokens)
    engine.sidecar.evict(chain_of(engine, tokens).partial(0, 2), gone)
    assert outcomes(engine, request_of("a", tokens, max_tokens=1)) == {
        reason: 2 * BLOCK_TOKENS,
        PromptOutcome.TAIL: 3,
    }


def test_a_short_prompt_whose_read_is_late(engine: Engine) -> None:
    tokens = PROMPT[: CHUNK_TOKENS - 1]
    blocks = len(tokens) // BLOCK_TOKENS
    seen(engine, tokens)
    engine.sidecar.demote(chain_of(engine, tokens).partial(0, blocks))
    request = request_of("a", tokens, max_tokens=1)
    engine.add(request)
    engine.sidecar.receive()
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=0, outcome=Outcome.EXPIRED)
    assert outcomes(engine, request) == {
        PromptOutcome.LATE: blocks * BLOCK_TOKENS,
        PromptOutcome.TAIL: len(tokens) - blocks * BLOCK_TOKENS,
    }


def test_a_prompt_that_is_new_behind_a_chunk_that_left(engine: Engine) -> None:
    seen(engine, PROMPT[: 2 * CHUNK_TOKENS])
    engine.sidecar.evict(chain_of(engine, PROMPT).keys[1], GONE_EVICTED)
    assert outcomes(engine, prompt()) == {
        PromptOutcome.HOST: CHUNK_TOKENS,
        PromptOutcome.EVICTED: CHUNK_TOKENS,
        PromptOutcome.NEW: CACHED - 2 * CHUNK_TOKENS,
        PromptOutcome.TAIL: REST,
    }


def test_chunks_that_left_for_two_reasons(engine: Engine) -> None:
    seen(engine)
    chain = chain_of(engine, PROMPT)
    engine.sidecar.evict(chain.keys[1], GONE_EXPIRED)
    engine.sidecar.evict(chain.keys[2], GONE_QUOTA)
    assert outcomes(engine, prompt()) == {
        PromptOutcome.HOST: CHUNK_TOKENS,
        PromptOutcome.EXPIRED: CACHED - 2 * CHUNK_TOKENS,
        PromptOutcome.QUOTA: CHUNK_TOKENS,
        PromptOutcome.TAIL: REST,
    }


def test_fewer_tokens_than_a_load_is_worth(make: Callable[..., Engine]) -> None:
    engine = make(load_tokens_min=2 * CHUNK_TOKENS)
    seen(engine)
    tokens = [*PROMPT[:CHUNK_TOKENS], *range(500, 560)]
    assert outcomes(engine, request_of("a", tokens, max_tokens=1)) == {
        PromptOutcome.TOO_SHORT: CHUNK_TOKENS,
        PromptOutcome.NEW: 48,
        PromptOutcome.TAIL: 12,
    }


def demoted(engine: Engine, first: int = 0) -> None:
    """An earlier request left chunks, which from `first` on only the store has."""
    seen(engine)
    chain = chain_of(engine, PROMPT)
    for key in [*chain.keys[first:], chain.partial(FULL, TAIL_BLOCKS)]:
        engine.sidecar.demote(key)


@pytest.mark.parametrize(
    ("gone", "reason"),
    [(GONE_EVICTED, PromptOutcome.EVICTED), (0, PromptOutcome.NEW)],
)
def test_chunks_of_the_store_behind_one_that_left(
    engine: Engine, gone: int, reason: PromptOutcome
) -> None:
    """The store would have had them, and they are of no use without it."""
    demoted(engine, first=1)
    engine.sidecar.evict(chain_of(engine, PROMPT).keys[0], gone)
    assert outcomes(engine, prompt()) == {reason: CACHED, PromptOutcome.TAIL: REST}


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.EXPIRED, PromptOutcome.LATE),
        (Outcome.RECOMPUTED, PromptOutcome.PLANNER),
        (Outcome.PAUSED, PromptOutcome.STORE_AWAY),
        (Outcome.MISSING, PromptOutcome.STORE_AWAY),
        (Outcome.FULL, PromptOutcome.REFUSED),
    ],
)
def test_a_read_that_did_not_come(engine: Engine, outcome: Outcome, reason: PromptOutcome) -> None:
    demoted(engine)
    request = engine.add(prompt())
    engine.sidecar.receive()
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=2, outcome=outcome)
    assert outcomes(engine, request) == {
        PromptOutcome.STORE: 2 * CHUNK_TOKENS,
        reason: CACHED - 2 * CHUNK_TOKENS,
        PromptOutcome.TAIL: REST,
    }


def test_a_read_that_is_later_than_the_request_waits(engine: Engine) -> None:
    demoted(engine)
    request = engine.add(prompt())
    engine.clock.now += LIMITS.lookup_wait_ms_max / 1000 + 0.01
    engine.sidecar.receive()
    engine.sidecar.lookups.clear()
    assert outcomes(engine, request) == {PromptOutcome.LATE: CACHED, PromptOutcome.TAIL: REST}


def test_another_engine_that_is_late(engine: Engine) -> None:
    request = engine.add(prompt(expect_tokens=CACHED, wait_seconds=1))
    engine.step()
    engine.clock.now += 2
    assert outcomes(engine, request) == {PromptOutcome.LATE: CACHED, PromptOutcome.TAIL: REST}


def test_a_store_that_the_request_does_not_read(engine: Engine) -> None:
    demoted(engine)
    request = prompt(read="host")
    assert outcomes(engine, request) == {PromptOutcome.NOT_ASKED: CACHED, PromptOutcome.TAIL: REST}
    assert not engine.client.sent_of(Lookup)


def test_a_request_that_does_not_read(engine: Engine) -> None:
    seen(engine)
    request = prompt(read=False)
    assert outcomes(engine, request) == {PromptOutcome.NOT_ASKED: CACHED, PromptOutcome.TAIL: REST}


def test_the_same_prompt_twice_at_once(engine: Engine) -> None:
    """The second one comes while the first one's chunks are being stored."""
    first = engine.add(request_of("first", PROMPT, max_tokens=1))
    while not first.is_finished():
        engine.step()
    assert engine.role.stores.keys
    # Its own prefix cache has them, so the engine is to compute them all.
    for block in engine.pool.blocks:
        engine.pool.evict_blocks({block.block_id})
    before = engine.outcomes.copy()
    second = engine.add(prompt())
    while not second.is_finished():
        engine.step()
    assert dict(engine.outcomes - before) == {
        PromptOutcome.BEING_WRITTEN: CACHED,
        PromptOutcome.TAIL: REST,
    }
    engine.settle()
    engine.check_idle()


def test_an_id_that_cannot_be_printed(engine: Engine) -> None:
    """A client chose it; the sidecar would refuse the message with the other prompts."""
    engine.finish(engine.add(request_of("a\u00a0\u200bb", PROMPT, max_tokens=1)))
    engine.settle()
    (message,) = engine.client.sent_of(Prompts)
    assert decode_client(encode(message)) == message
    assert [one.request_id for one in message.prompts] == ["a??b"]


def test_without_a_sidecar(engine: Engine) -> None:
    engine.sidecar.detach()
    assert outcomes(engine, prompt()) == {PromptOutcome.REFUSED: CACHED, PromptOutcome.TAIL: REST}


def test_a_load_that_failed(engine: Engine) -> None:
    seen(engine)
    request = engine.add(prompt())
    engine.step()
    engine.sidecar.receive()
    for copy in list(engine.sidecar.copies):
        engine.sidecar.run(copy, Outcome.CORRUPT)
    assert outcomes(engine, request) == {PromptOutcome.FAILED: CACHED, PromptOutcome.TAIL: REST}


def test_a_load_that_failed_behind_a_hit_of_the_engine(engine: Engine) -> None:
    seen(engine)
    engine.run(request_of("beginning", PROMPT[: 2 * CHUNK_TOKENS], max_tokens=1))
    request = engine.add(prompt())
    engine.step()
    engine.sidecar.receive()
    for copy in list(engine.sidecar.copies):
        engine.sidecar.run(copy, Outcome.FAILED)
    found = outcomes(engine, request)
    assert found[PromptOutcome.FAILED] == CACHED - found[PromptOutcome.LOCAL]
    assert found[PromptOutcome.LOCAL] >= 2 * CHUNK_TOKENS - 1


def test_a_request_that_was_aborted_before_its_first_token_is_not_counted(engine: Engine) -> None:
    request = engine.add(prompt())
    engine.abort(request)
    engine.settle()
    assert not engine.outcomes
    engine.check_idle()


def test_a_request_whose_kv_has_no_key(engine: Engine) -> None:
    request = prompt()
    request.resumable = True
    before = engine.outcomes.copy()
    engine.add(request)
    for _ in range(4):
        engine.step()
    assert dict(engine.outcomes - before) == {PromptOutcome.REFUSED: len(PROMPT)}


def records(engine: Engine) -> list[PromptRecord]:
    return [record for message in engine.client.sent_of(Prompts) for record in message.prompts]


def test_the_record_of_a_request_that_waited(engine: Engine) -> None:
    demoted(engine, first=1)
    request = engine.add(prompt())
    engine.clock.now += 0.25
    tokens = outcomes(engine, request)
    earlier, record = records(engine)
    assert (earlier.request_id, record.request_id) == ("earlier", "a")
    assert earlier.tokens == {PromptOutcome.NEW: CACHED, PromptOutcome.TAIL: REST}
    chain = chain_of(engine, PROMPT)
    assert (earlier.missed, earlier.missed_token) == (chain.keys[0], 0)
    assert record.tokens == tokens
    assert record.read_us == 250_000
    assert record.missed == b""


def test_the_record_has_the_tokens_in_their_order(engine: Engine) -> None:
    demoted(engine, first=2)
    engine.run(request_of("beginning", PROMPT[: CHUNK_TOKENS + 1], max_tokens=1))
    request = engine.add(prompt())
    engine.step()
    engine.sidecar.receive()
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=2, outcome=Outcome.RECOMPUTED)
    outcomes(engine, request)
    record = records(engine)[-1]
    assert record.runs == [
        TokenRun(PromptOutcome.LOCAL, CHUNK_TOKENS),
        TokenRun(PromptOutcome.HOST, 2 * CHUNK_TOKENS),
        TokenRun(PromptOutcome.STORE, 3 * CHUNK_TOKENS),
        TokenRun(PromptOutcome.PLANNER, CACHED),
        TokenRun(PromptOutcome.TAIL, len(PROMPT)),
    ]
    assert record.missed_token == 3 * CHUNK_TOKENS
    assert record.missed_reason is PromptOutcome.PLANNER


@pytest.mark.parametrize(("gone", "reason"), [(0, "new"), (GONE_EVICTED, "evicted")])
def test_the_record_says_why_the_first_chunk_was_missed(
    engine: Engine, gone: int, reason: str
) -> None:
    """With both reasons in it, the sums do not tell."""
    seen(engine)
    chain = chain_of(engine, PROMPT)
    engine.sidecar.evict(chain.keys[1], gone)
    engine.sidecar.evict(chain.keys[2], GONE_EVICTED - gone)
    outcomes(engine, prompt())
    record = records(engine)[-1]
    assert {"new", "evicted"} <= set(record.tokens)
    assert (record.missed, record.missed_token) == (chain.keys[1], CHUNK_TOKENS)
    assert record.missed_reason == reason


def test_a_chunk_that_the_engine_has_the_beginning_of(engine: Engine) -> None:
    """What was missed begins where the engine's own cache ends, in the middle of the chunk."""
    begins = CHUNK_TOKENS + BLOCK_TOKENS
    engine.run(request_of("beginning", PROMPT[: begins + 1], max_tokens=1))
    chain = chain_of(engine, PROMPT)
    engine.sidecar.evict(chain.keys[0], 0)
    found = outcomes(engine, prompt())
    record = records(engine)[-1]
    assert (found["local"], record.missed) == (begins, chain.keys[1])
    assert (record.missed_token, record.missed_reason) == (begins, "new")


def test_the_record_of_a_read_that_was_late(engine: Engine) -> None:
    demoted(engine)
    request = engine.add(prompt())
    engine.clock.now += 0.62
    engine.sidecar.receive()
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=0, outcome=Outcome.EXPIRED)
    outcomes(engine, request)
    record = records(engine)[-1]
    limit_us = 1000 * LIMITS.lookup_wait_ms_max
    assert (record.late_us, record.late_limit_us) == (620_000, limit_us)


def test_the_record_of_an_answer_that_did_not_come(engine: Engine) -> None:
    demoted(engine)
    request = engine.add(prompt())
    engine.clock.now += LIMITS.lookup_wait_ms_max / 1000 + 0.25
    engine.sidecar.receive()
    engine.sidecar.lookups.clear()
    outcomes(engine, request)
    record = records(engine)[-1]
    limit_us = 1000 * LIMITS.lookup_wait_ms_max
    assert (record.late_us, record.late_limit_us) == (limit_us + 250_000, limit_us)


def test_the_record_of_another_engine_that_was_late(engine: Engine) -> None:
    request = engine.add(prompt(expect_tokens=CACHED, wait_seconds=1))
    engine.step()
    engine.clock.now += 2
    outcomes(engine, request)
    record = records(engine)[-1]
    assert (record.late_us, record.late_limit_us) == (2_000_000, 1_000_000)
    assert record.missed_reason is PromptOutcome.LATE


@pytest.mark.parametrize(
    ("handed", "saved_tokens"), [(0, CACHED), (CHUNK_TOKENS, CACHED - CHUNK_TOKENS), (CACHED, 0)]
)
def test_what_another_engine_computed_for_this_request_is_not_saved(
    engine: Engine, handed: int, saved_tokens: int
) -> None:
    seen(engine)
    times = engine.role.pending.times
    times.planned(engine.clock(), [(0, 1000)])
    engine.clock.now += 1
    times.ended(engine.clock())
    outcomes(engine, prompt(**({"expect_tokens": handed, "wait_seconds": 1} if handed else {})))
    record = records(engine)[-1]
    assert record.tokens[PromptOutcome.HOST] == CACHED
    assert record.saved_us == pytest.approx(1000 * saved_tokens, abs=1)


def test_a_wait_that_made_nothing_late_has_no_limit(engine: Engine) -> None:
    demoted(engine)
    request = engine.add(prompt())
    engine.clock.now += 0.1
    outcomes(engine, request)
    assert records(engine)[-1].late_limit_us == 0


def test_no_record_without_a_sidecar(engine: Engine) -> None:
    engine.sidecar.detach()
    outcomes(engine, prompt())
    engine.sidecar.attach()
    engine.run(request_of("b", [1, 2, 3], max_tokens=1))
    (record,) = records(engine)
    assert record.tokens == {PromptOutcome.TAIL: 3}
