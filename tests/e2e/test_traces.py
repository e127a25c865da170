"""A traced request of a real engine: what the cache did for it is in the caller's trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    empty,
    fresh_salt,
    words,
)
from tests.e2e.setups import SMALL, attached, folder_store, listed, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.spans import ENVIRONMENT, SpanSink, span_sink

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-figures", "traces")]


@pytest.fixture(scope="module")
def sink() -> Iterator[SpanSink]:
    with span_sink() as sink:
        yield sink


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sink: SpanSink) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar_in(folder).socket, SMALL | {"otlp_traces_endpoint": sink.url})
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        with EngineProcess(spec, folder / "engine.log") as engine:
            yield engine.wait_ready()


def test_spans_of_a_traced_request(folder: Path, engine: EngineProcess, sink: SpanSink) -> None:
    """All have the caller's trace id and span, as vLLM's own span of the request has."""
    call, caller = Call(words(1000, 7)), "00f067aa0ba902b7"
    store, salt = folder_store(folder / "bucket"), fresh_salt()

    def traced(number: int) -> str:
        trace_id = f"{number:032x}"
        headers = {"traceparent": f"00-{trace_id}-{caller}-01"}
        empty(engine)
        engine.generate(call.prompt, cache_salt=salt, trace_headers=headers)
        return trace_id

    with attached(folder, engine, store=store):
        first = sink.of(traced(1), "llm_request", "kvlake.lookup", "kvlake.store")
        second = sink.of(traced(2), "llm_request", "kvlake.lookup", "kvlake.load")
        engine.generate(call.prompt, cache_salt=salt)
    with attached(folder, engine, store=store) as sidecar:
        listed(sidecar, folder / "bucket")
        third = sink.of(traced(3), "llm_request", "kvlake.lookup", "kvlake.read", "kvlake.load")
    for found in (first, second, third):
        assert {span.parent_id for span in found.values()} == {caller}
        request = found.pop("llm_request")
        for span in found.values():
            name = str(span.attributes["kvlake.request_id"])
            assert name.startswith(f"{request.attributes['gen_ai.request.id']}-")
            assert request.begin <= span.begin <= span.end
        assert found["kvlake.lookup"].end <= request.end
    blocks = len(call.prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    size = {"kvlake.tokens": blocks, "kvlake.bytes": blocks * KV_BYTES_PER_TOKEN}
    assert first["kvlake.lookup"].attributes["kvlake.reason"] == "new"
    assert first["kvlake.lookup"].attributes["kvlake.tokens.new"] == blocks
    assert first["kvlake.store"].attributes.items() >= size.items()
    assert "kvlake.read" not in second
    for span in (second["kvlake.load"], third["kvlake.load"], third["kvlake.read"]):
        assert span.attributes.items() >= size.items()
    assert second["kvlake.lookup"].attributes["kvlake.tokens.host"] == blocks
    assert third["kvlake.lookup"].attributes["kvlake.tokens.store"] == blocks
    assert third["kvlake.read"].end <= third["kvlake.load"].begin
