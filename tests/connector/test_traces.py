"""Spans of a traced request: which ones, how long, and what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from vllm.v1.request import Request

from connector.scheduler.traces import Attributes
from connector.vllm import emit_span
from sidecar.protocol import Outcome
from tests.connector.configurations import CHUNK_TOKENS, request_of
from tests.connector.engine import Engine
from tests.connector.prompts import CACHED, FULL, PROMPT, TAIL_BLOCKS, chain_of, seen

pytestmark = pytest.mark.promise("traces")

HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
BLOCK_BYTES = 1000
CACHED_BYTES = (FULL * CHUNK_TOKENS // 16 + TAIL_BLOCKS) * BLOCK_BYTES


@dataclass
class Spans:
    """Attributes and seconds of each span, by name."""

    attributes: dict[str, Attributes] = field(default_factory=dict[str, Attributes])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def emit(
        self, name: str, headers: Mapping[str, str], begin: int, end: int, attributes: Attributes
    ) -> None:
        assert headers is HEADERS
        assert name not in self.attributes
        assert attributes.pop("kvlake.request_id") == "a"
        self.attributes[name] = attributes
        self.seconds[name] = (end - begin) / 1e9


@pytest.fixture
def spans(engine: Engine) -> Spans:
    spans = Spans()
    tracer = engine.role.tracer
    tracer.emit, tracer.block_bytes, tracer.clock = spans.emit, [BLOCK_BYTES], engine.clock
    return spans


def traced(engine: Engine, request: Request | None = None) -> None:
    engine.finish(request or engine.add(prompt()))
    engine.settle()
    engine.check_idle()


def prompt() -> Request:
    return request_of("a", PROMPT, max_tokens=1, trace_headers=HEADERS)


def moved(tier: str, tokens: int, size: int, **reason: str) -> Attributes:
    named: Attributes = {f"kvlake.{name}": text for name, text in reason.items()}
    return {"kvlake.tier": tier, "kvlake.tokens": tokens, "kvlake.bytes": size, **named}


def test_a_prompt_that_is_stored(engine: Engine, spans: Spans) -> None:
    traced(engine)
    assert spans.attributes["kvlake.lookup"] == {
        "kvlake.tokens.new": CACHED,
        "kvlake.tokens.tail": len(PROMPT) - CACHED,
        "kvlake.reason": "new",
    }
    assert spans.attributes["kvlake.store"] == moved("host", CACHED, CACHED_BYTES)
    assert set(spans.attributes) == {"kvlake.lookup", "kvlake.store"}


def test_a_load_from_host_memory(engine: Engine, spans: Spans) -> None:
    seen(engine)
    assert not spans.attributes, "the earlier request is not traced"
    traced(engine)
    assert spans.attributes["kvlake.load"] == moved("host", CACHED, CACHED_BYTES)
    assert set(spans.attributes) == {"kvlake.lookup", "kvlake.load"}


def test_a_read_and_its_load(engine: Engine, spans: Spans) -> None:
    seen(engine)
    chain = chain_of(engine, PROMPT)
    keys = [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]
    for key in keys[1:]:
        engine.sidecar.demote(key)
    request = engine.add(prompt())
    engine.sidecar.receive()
    engine.clock.now += 0.25
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=len(keys))
    traced(engine, request)
    chunk_bytes = CHUNK_TOKENS // 16 * BLOCK_BYTES
    expected = moved("store", CACHED - CHUNK_TOKENS, CACHED_BYTES - chunk_bytes)
    assert spans.attributes["kvlake.read"] == expected
    assert spans.seconds["kvlake.read"] >= 0.25
    assert spans.attributes["kvlake.load"] == moved("host", CACHED, CACHED_BYTES)


def test_a_read_without_a_result(engine: Engine, spans: Spans) -> None:
    seen(engine)
    chain = chain_of(engine, PROMPT)
    for key in [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]:
        engine.sidecar.demote(key)
    request = engine.add(prompt())
    engine.sidecar.receive()
    engine.sidecar.answer(engine.sidecar.lookups[0], ready=0, outcome=Outcome.EXPIRED)
    traced(engine, request)
    assert spans.attributes["kvlake.read"] == moved("store", 0, 0, reason="late")
    assert spans.attributes["kvlake.lookup"]["kvlake.reason"] == "late"
    assert "kvlake.load" not in spans.attributes


def test_a_load_that_fails(engine: Engine, spans: Spans) -> None:
    seen(engine)
    request = engine.add(prompt())
    engine.step()
    engine.sidecar.receive()
    for copy in list(engine.sidecar.copies):
        engine.sidecar.run(copy, Outcome.CORRUPT)
    traced(engine, request)
    expected = moved("host", 0, CACHED_BYTES, reason="failed")
    assert spans.attributes["kvlake.load"] == expected


def test_a_request_without_headers(engine: Engine, spans: Spans) -> None:
    engine.run(request_of("a", PROMPT, max_tokens=1))
    assert not spans.attributes


def test_an_engine_that_is_not_traced(engine: Engine) -> None:
    engine.run(prompt())


def test_a_tracer_that_fails_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such exporter")

    monkeypatch.setattr("vllm.tracing.instrument_manual", fail)
    caplog.set_level("WARNING", "vllm.kvlake")
    for _ in range(3):
        emit_span("kvlake.load", HEADERS, 1, 2, {})
    assert caplog.text.count("spans of traced requests are lost") == 1
