"""What schedulers report of prompts: sums, the last ones, and how `kvlake explain` shows them."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sidecar.cli.explain import render
from sidecar.observe.benefit import MEANINGS
from sidecar.observe.prompts import PromptDocuments
from sidecar.protocol.codec import ProtocolError, decode_client, encode
from sidecar.protocol.prompts import (
    COUNT_MAX,
    LOADED,
    PROMPTS_PER_MESSAGE_MAX,
    RUNS_MAX,
    PromptOutcome,
    PromptRecord,
    Prompts,
    TokenRun,
)
from sidecar.service.dispatcher import Dispatcher
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
        (["r", {}, b"", 0, 0, 0, 0, 0, "nonsense"], "nonsense"),
        (["r", {}, b"", 0, 0, 0, 0, 0, None, 0, 0, [["new", 1]] * (RUNS_MAX + 1)], "length"),
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
                    "missed_reason": "evicted",
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
    assert "was not loaded, from token 3,072 on: evicted 41s before (chunk 5f5f" in first
    assert second.startswith("second  7 tokens, 1s ago, ? on ?")
    assert render({"prompts": []}) == "no prompt was reported yet"


def as_text(**fields: Any) -> list[str]:
    return render({"prompts": [{"request_id": "r", **fields}]}).splitlines()


def test_the_tokens_of_a_prompt_in_their_order() -> None:
    runs = [("local", 1536), ("host", 3072), ("evicted", 4032), ("new", 4096)]
    lines = as_text(
        tokens={"local": 1536, "host": 1536, "evicted": 960, "new": 64},
        runs=[{"outcome": outcome, "end_tokens": end} for outcome, end in runs],
    )
    assert [line.split()[:4] for line in lines[1:6]] == [
        ["FROM", "TO"],
        ["0", "1,536", "38%", "local"],
        ["1,536", "3,072", "38%", "host"],
        ["3,072", "4,032", "23%", "evicted"],
        ["4,032", "4,096", "2%", "new"],
    ]
    assert "TOKENS" not in "\n".join(lines)


def test_a_prompt_of_more_runs_than_are_reported() -> None:
    lines = as_text(
        tokens={"local": 64, "new": 100, "tail": 4},
        runs=[{"outcome": "local", "end_tokens": 64}],
    )
    assert lines[3].split()[:2] == ["64", "168"]
    assert "more runs than are reported" in lines[3]
    assert lines[4].startswith("TOKENS")
    assert lines[6].split()[0] == "100"


def test_a_wait_that_was_too_long() -> None:
    late = {"tokens": {"late": 640}, "late_limit_ms": 500.0}
    assert "late: 620 of 500 ms" in as_text(**late, late_ms=620.4)
    (line,) = [one for one in as_text(**late, late_ms=210.0) if one.startswith("late")]
    assert line.startswith("late: 210 of 500 ms; the sidecar ended the wait: computing")


def test_the_document_of_a_record() -> None:
    log = PromptLog(1)
    late = PromptOutcome.LATE
    report(
        log,
        PromptRecord(
            "r",
            {late: 64},
            bytes(32),
            missed_reason=late,
            late_us=620_000,
            late_limit_us=500_000,
            runs=[TokenRun(late, 64)],
        ),
    )
    documents = PromptDocuments(cast("Dispatcher", SimpleNamespace(prompts=log)))
    (found,) = documents.document(1)["prompts"]
    assert found["runs"] == [{"end_tokens": 64, "outcome": "late"}]
    assert (found["missed_token"], found["missed_reason"]) == (0, "late")
    assert (found["late_ms"], found["late_limit_ms"]) == (620.0, 500.0)
    assert "late: 620 of 500 ms" in render({"prompts": [found]})
