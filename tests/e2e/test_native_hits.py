"""vLLM's own offloading on kvlake's tiers: hits, as in `test_hits.py`.

Its tests run here as they are, on an engine with `OffloadingConnector`; not those of loads that
are too short to pay, for vLLM weighs none. What vLLM's own metrics say of a hit is asked here.
"""

# pyright: reportUnusedImport=false, reportPrivateUsage=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.arms import KV_BYTES_PER_TOKEN, PATIENT, Call, attach, check_hit, words
from tests.e2e.native import CHUNK_TOKENS, NativeEngine
from tests.e2e.test_hits import (  # noqa: F401 (the tests, and what runs after each)
    BLOCKS,
    _nothing_runs_on,
    test_another_salt_finds_nothing,
    test_cold_loads_nothing,
    test_full_prompt_hit,
    test_hits_of_several_requests_at_once,
    test_host_hit,
    test_next_turn_continues_on_what_was_generated,
    test_own_prefix_hit_waits_for_no_message,
    test_partial_local_hit_plus_external,
    test_shared_prefix_of_another_prompt,
    test_the_oracle_sees_what_it_should,
    test_three_turns,
    test_without_a_salt,
)
from tests.harness.engine import EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("offloading", "offloading-spec", "suite-hits"),
]
NIGHTLY: Final = (
    "test_hits_of_several_requests_at_once",
    "test_next_turn_continues_on_what_was_generated",
    "test_shared_prefix_of_another_prompt",
    "test_three_turns",
    "test_without_a_salt",
)
"""Tests of another module that this one runs nightly."""

HITS: Final = "vllm:external_prefix_cache_hits"
CHUNK_HITS: Final = "vllm:kv_offload_tiering_chunk_hits"
READ_BYTES: Final = "vllm:kv_offload_tiering_read_bytes"
TIER: Final = "1:KVLakeTier"


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    config: dict[str, Any] = {
        "host": {"size": "512MiB"},
        "limits": PATIENT,
    }
    with SidecarProcess(folder / "s", config) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[EngineProcess]:
    engine_args = {
        "num_gpu_blocks_override": BLOCKS,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
        "enable_chunked_prefill": True,
    }
    spec = EngineSpec(model, sidecar.socket, engine_args)
    with NativeEngine(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach(engine, sidecar)
        yield engine


def test_vllms_metrics_tell_of_a_hit(engine: EngineProcess) -> None:
    """By the names in docs/how-to/vllm-offloading.md: tokens, chunks and bytes of one hit."""

    def tokens() -> list[float]:
        return [
            engine.counter(HITS),
            engine.counter(CHUNK_HITS, tier=TIER) * CHUNK_TOKENS,
            engine.counter(READ_BYTES, tier=TIER) / KV_BYTES_PER_TOKEN,
        ]

    before = tokens()
    found = check_hit(engine, Call(words(700, 21)))
    counted = [now - then for now, then in zip(tokens(), before, strict=True)]
    assert counted == [found.cached_tokens] * 3
