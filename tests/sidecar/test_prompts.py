"""What schedulers report of prompts: sums, the last ones, and how `kvlake explain` shows them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sidecar.cli.explain import render
from sidecar.observe.benefit import MEANINGS
from sidecar.protocol.codec import ProtocolError, decode_client, encode
from sidecar.protocol.prompts import (
    COUNT_MAX,
    LOADED,
    PROMPTS_PER_MESSAGE_MAX,
    PromptOutcome,
    PromptRecord,
    Prompts,
)
from sidecar.service.prompts import PromptLog
from sidecar.sessions.session import Session

REALM = SimpleNamespace(realm_id=3, model_name="org/m", block_tokens=16, blocks_per_chunk=4)
SESSION = cast(
    "Session",
    SimpleNamespace(
        attach=SimpleNamespace(engine_id="engine", world_size=2),
        realm=REALM,
        realms=[REALM],
    ),
)


def record(name: str, **tokens: int) -> PromptRecord:
    return PromptRecord(name, {PromptOutcome(outcome): count for outcome, count in tokens.items()})


def report(log: PromptLog, *records: PromptRecord) -> None:
    message = decode_client(encode(Prompts(1, list(records))))
    assert isinstance(message, Prompts)
    log.add(SESSION, message, lambda realm_id, key: 41.0 if key else None)


def test_the_last_ones_newest_first() -> None:
    log = PromptLog(3)
    report(log, *(record(f"r{number}", host=number) for number in range(5)))
    assert [one.record.request_id for one in log.last(10)] == ["r4", "r3", "r2"]
    assert [one.record.request_id for one in log.last(1)] == ["r4"]
    assert [one.record.request_id for one in log.last(10, "r3")] == ["r3"]
    assert list(log.last(10, "r0")) == []
    report(log, record("cmpl-7-0-1a2b3c4d", host=0), record("cmpl-70-0-1a2b3c4d", host=0))
    assert [one.record.request_id for one in log.last(9, "cmpl-7")] == ["cmpl-7-0-1a2b3c4d"]
    log = PromptLog(3)
    report(log, *(record(f"r{number}", host=number) for number in range(5)))
    assert (log.prompts, log.tokens) == (5, Counter({PromptOutcome.HOST: 10}))
    assert log.tokens_by_model == {"org/m": log.tokens}
    (last,) = log.last(1)
    assert (last.engine_id, last.model, last.chunk_tokens) == ("engine", "org/m", 64)
    assert last.gone_seconds is None
    report(log, PromptRecord("r5", {PromptOutcome.EVICTED: 64}, bytes(32)))
    assert next(log.last(1)).gone_seconds == 41.0


def test_seconds_are_saved_and_spent() -> None:
    log = PromptLog(3)
    report(
        log, PromptRecord("a", {}, lookup_us=1000, read_us=200_000, load_us=99_000, saved_us=10**6)
    )
    assert log.seconds.saved == 1.0
    assert log.seconds.spent == pytest.approx(0.3)
    assert log.seconds.gpu == pytest.approx(1.4), "of two ranks"
    report(log, PromptRecord("b", {}, read_us=900_000))
    assert log.seconds.gpu == pytest.approx(-0.4)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (["r" * 257, {}], "length"),
        (["r\x1b[2J", {}], "request_id"),
        (["r", {"nonsense": 1}], "nonsense"),
        (["r", {"host": -1}], "int"),
        (["r", {"host": COUNT_MAX + 1}], "int"),
        (["r", {"host": 1}, bytes(33)], "length"),
        (["r", {"host": 1}, b"", 0, float("nan")], "int"),
    ],
)
def test_a_report_that_is_refused(prompt: Any, field: str) -> None:
    frame = msgspec.msgpack.encode({"type": "prompts", "epoch": 1, "prompts": [prompt]})
    with pytest.raises(ProtocolError, match=field):
        decode_client(frame)


def test_more_prompts_than_a_message_takes() -> None:
    with pytest.raises(ProtocolError, match="length"):
        decode_client(encode(Prompts(1, [record("r")] * (PROMPTS_PER_MESSAGE_MAX + 1))))


def test_every_outcome_is_explained() -> None:
    assert set(MEANINGS) == set(PromptOutcome)
    computed = {name for name, meaning in MEANINGS.items() if meaning.startswith("computed:")}
    assert computed == set(PromptOutcome) - set(LOADED)


def test_a_prompt_as_text() -> None:
    text = render(
        {
            "prompts": [
                {"request_id": "second", "tokens": {"tail": 7}, "seconds_ago": 1},
                {
                    "request_id": "cmpl-1",
                    "seconds_ago": 75,
                    "engine_id": "e1",
                    "model": "llama",
                    "tokens": {"host": 3072, "evicted": 960, "tail": 64},
                    "missed": "5f" * 16,
                    "missed_token": 3072,
                    "missed_gone_seconds": 41.2,
                    "lookup_ms": 0.06,
                    "read_ms": 0.0,
                    "load_ms": 12.4,
                },
            ]
        }
    )
    first, second = text.split("\n\n")
    assert first.splitlines()[0] == "cmpl-1  4,096 tokens, 1m15s ago, llama on e1"
    assert "3,072   75%" in first
    assert "960     23%  computed: they had left host memory" in first
    assert "begins at token 3,072" in first
    assert "left the cache 41s before" in first
    assert second.startswith("second  7 tokens, 1s ago, ? on ?")
    assert render({"prompts": []}) == "no prompt was reported yet"
