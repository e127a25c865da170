"""A real engine whose chunks do not fit its blocks: its sidecar shows that it is not cached."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.arms import BLOCK_TOKENS, words
from tests.e2e.setups import SMALL, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-refused", "uncached-engines"),
]

CHUNK_TOKENS = 100
"""As `kvlake run` gives it to an engine, from `chunk.tokens: 100`."""


def uncached(status: dict[str, Any]) -> bool:
    """Whether an engine is listed. Ready is a sidecar all the same, unless its loop is late."""
    return bool(status["uncached"] and status["ready"])


def figure(sidecar: SidecarProcess) -> dict[str, float]:
    """`kvlake_engines_uncached`, by reason, without those that are 0."""
    pattern = re.compile(r'^kvlake_engines_uncached\{reason="(\w+)"\} (\S+)$', re.MULTILINE)
    found = pattern.findall(sidecar.get("/metrics"))
    return {reason: float(value) for reason, value in found if float(value)}


def test_an_engine_that_refused_itself_is_seen(folder: Path, model: str) -> None:
    extra = {"chunk_tokens": CHUNK_TOKENS, "chunk_tokens_from": "chunk.tokens"}
    sidecar = sidecar_in(folder)
    spec = EngineSpec(model, sidecar.socket, SMALL, connector_extra=extra)
    log = folder / "engine.log"
    with sidecar, EngineProcess(spec, log) as engine:
        engine.wait_ready()
        prompt = words(300, 1)
        assert [engine.generate(prompt).cached_tokens for _ in range(2)] == [0, 288]
        sidecar.wait("it is listed", uncached)
        status = sidecar.status()
        (one,) = status["uncached"]
        assert one["reason"] == "chunk_tokens"
        assert one["message"] == (
            f"chunk.tokens={CHUNK_TOKENS} of the sidecar's configuration is not a multiple of the "
            f"engine's block size, {BLOCK_TOKENS}; choose 96 or 128, or leave it out"
        )
        (line,) = [each for each in log.read_text().splitlines() if "kvlake:" in each]
        assert one["message"] in line
        assert figure(sidecar) == {"chunk_tokens": 1}
        assert not status["sessions"]
        assert "uncached" in [each["code"] for each in status["problems"]]
        assert engine.counter("vllm:kvlake_requests_uncached") == 2
        # A sidecar that takes over hears of it, too.
        assert sidecar.drain() == 0
        with sidecar.start():
            sidecar.wait("it is listed again", uncached)
            engine.stop()
            sidecar.wait("it is gone", lambda now: not now["uncached"])
            assert figure(sidecar) == {}
