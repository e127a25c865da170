"""What a hit needs of each KV cache group: against vLLM's own coordinator as the oracle, and under
vLLM's own scheduler with a model that checks what it reads.

Models that mix full attention, sliding windows, chunked local attention and recurrent layers, also
with blocks of several sizes.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from connector.identity.eligibility import attention_of
from connector.identity.groups import FULL, Attention, Geometry, chunk_tokens_of, longest_hit
from connector.vllm import KVLakeConnector
from sidecar.protocol import Outcome
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    kv_cache_config,
    request_of,
    spec_of,
    state_of,
    vllm_config,
    write_model,
)
from tests.connector.conversations import converse, prompt_of
from tests.connector.engine import Engine
from tests.releases import STATE_BEFORE, require_vllm


def window(tokens: int, block_tokens: int = BLOCK_TOKENS) -> AttentionSpec:
    return spec_of(SlidingWindowSpec, block_tokens, sliding_window=tokens)


def local(tokens: int) -> AttentionSpec:
    return spec_of(ChunkedLocalAttentionSpec, attention_chunk_size=tokens)


CHECKPOINTED = state_of(num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
"""As Mamba 2, whose kernels leave the state at a block's end within a step, too."""

MIXES: dict[str, list[KVCacheSpec]] = {
    "gemma": [window(96), window(96), spec_of()],
    "gpt-oss": [window(40), spec_of()],
    "llama4": [local(128), spec_of(), local(128)],
    "small window": [spec_of(), window(9)],
    "edge": [spec_of(), window(33)],
    "two windows": [window(48), spec_of(), window(200)],
    "window alone": [window(80)],
    "block sizes": [spec_of(), window(96, 32)],
    "larger full blocks": [spec_of(block_tokens=32), window(40)],
    "mamba": [state_of(), spec_of(), state_of()],
    "mamba 2": [spec_of(), CHECKPOINTED],
    "mamba alone": [state_of()],
    "mamba and a window": [state_of(), window(40), spec_of()],
}


@pytest.fixture(params=MIXES)
def specs(request: pytest.FixtureRequest) -> list[KVCacheSpec]:
    return MIXES[request.param]


@pytest.fixture
def engine(tmp_path: Path, specs: list[KVCacheSpec]) -> Iterator[Engine]:
    engine = Engine(write_model(tmp_path), specs=specs, num_blocks=400)
    yield engine
    engine.close()


def geometries_of(specs: list[KVCacheSpec]) -> list[Geometry]:
    found: list[Geometry] = []
    for spec in specs:
        attention = attention_of(spec)
        assert attention is not None
        tokens = chunk_tokens_of(CHUNK_TOKENS, spec.block_size, attention)
        found.append(Geometry(spec.block_size, tokens, attention))
    return found


def coordinator_hit(
    specs: list[KVCacheSpec], held: list[np.ndarray[Any, Any]], tokens: list[int]
) -> int:
    """How long vLLM's own hit would be, were these blocks in its own prefix cache."""
    coordinator = get_kv_cache_coordinator(
        kv_cache_config(1000, specs=specs),
        max_model_len=4096,
        max_in_flight_tokens=512,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=lcm(*(spec.block_size for spec in specs)),
        hash_block_size=BLOCK_TOKENS,
    )
    request: Request = request_of("r", tokens)
    pool = coordinator.block_pool
    for group, (spec, blocks) in enumerate(zip(specs, held, strict=True)):
        for index in np.flatnonzero(blocks):
            hashes = BlockHashListWithBlockSize(request.block_hashes, BLOCK_TOKENS, spec.block_size)
            key = make_block_hash_with_group_id(hashes[int(index)], group)
            (block,) = pool.get_new_blocks(1)
            pool.cached_block_hash_to_block.insert(key, block)
    return int(coordinator.find_longest_cache_hit(request.block_hashes, len(tokens) - 1)[1])


@pytest.mark.promise("recurrent", "windows-mixed")
@pytest.mark.parametrize("seed", range(12))
def test_a_hit_equals_that_of_vllms_coordinator(specs: list[KVCacheSpec], seed: int) -> None:
    """The same hit as if the engine held the loadable blocks itself."""
    chooser = random.Random(seed)
    tokens = [chooser.randrange(400) for _ in range(chooser.randrange(20, 420))]
    rate = chooser.choice([0.5, 0.8, 0.95, 1.0])
    held = [
        np.array([chooser.random() < rate for _ in range(len(tokens) // spec.block_size)], bool)
        for spec in specs
    ]
    if chooser.random() < 0.8:
        # Runs of some length: a prompt's head is rarely full of holes.
        for blocks in held:
            blocks[: chooser.randrange(len(blocks) + 1)] = True
    step = lcm(*(spec.block_size for spec in specs))
    end = (len(tokens) - 1) // step * step
    ours = longest_hit(geometries_of(specs), held, 0, end)
    assert ours == coordinator_hit(specs, held, tokens)


@pytest.mark.parametrize(
    ("attention", "block_tokens", "expected"),
    [
        (FULL, 16, 256),
        (Attention(window=1024), 16, 256),
        (Attention(window=128), 16, 128),
        (Attention(window=100), 16, 64),
        (Attention(window=4), 16, 16),
        (Attention(local=8192), 32, 256),
        (Attention(local=96), 16, 32),
        (Attention(local=40), 16, 16),
    ],
)
def test_a_chunk_is_no_longer_than_what_is_still_read(
    attention: Attention, block_tokens: int, expected: int
) -> None:
    assert chunk_tokens_of(256, block_tokens, attention) == expected


@pytest.mark.promise("chunked-local", "windows-alone")
@pytest.mark.parametrize("length", [32, 64, 65, 100, 129, 160, 256, 257, 300])
def test_host_hit(engine: Engine, length: int) -> None:
    """Everything that later tokens read is loaded, and the model checks it."""
    step = lcm(*(spec.block_size for spec in engine.specs))
    states = [spec for spec in engine.specs if isinstance(spec, MambaSpec)]
    if length % step == 0 and states and CHECKPOINTED not in states:
        require_vllm("0.32", STATE_BEFORE)
    engine.run(request_of("first", prompt_of(length, length), max_tokens=3))
    engine.forget()
    second = engine.run(request_of("second", prompt_of(length, length), max_tokens=40))
    whole = (length - (length % step == 0 and windowed(engine))) // step * step
    assert length + 39 - engine.computed["second"] == (whole if whole >= BLOCK_TOKENS else 0)
    assert second.num_output_tokens == 40
    engine.check_idle()


def windowed(engine: Engine) -> bool:
    return any(type(spec) is not FullAttentionSpec for spec in engine.specs)


def test_next_turn_and_a_branch(engine: Engine) -> None:
    """The next turn finds generated tokens; another request finds a shared head."""
    first = engine.run(request_of("first", prompt_of(150, 1), max_tokens=90))
    engine.forget()
    turn = [*first.all_token_ids, *prompt_of(60, 2)]
    engine.run(request_of("turn", turn, max_tokens=5))
    # The last generated token was never computed.
    step = lcm(*(spec.block_size for spec in engine.specs))
    assert len(turn) + 4 - engine.computed["turn"] == 239 // step * step
    engine.forget()
    branch = [*first.all_token_ids[:200], *prompt_of(100, 3)]
    engine.run(request_of("branch", branch, max_tokens=5))
    assert len(branch) + 4 - engine.computed["branch"] == 192
    engine.check_idle()


def test_hit_behind_the_engines_own(engine: Engine) -> None:
    prompt = prompt_of(300, 4)
    engine.run(request_of("first", prompt, max_tokens=1))
    engine.forget()
    engine.run(request_of("head", prompt[:130], max_tokens=1))
    engine.run(request_of("second", prompt, max_tokens=30))
    assert engine.computed["second"] <= 300 + 29 - 256
    engine.check_idle()


def test_a_missing_chunk_shortens_the_hit(engine: Engine) -> None:
    """Without the end of one group's window the hit is shorter and correct."""
    prompt = prompt_of(320, 5)
    engine.run(request_of("first", prompt, max_tokens=1))
    chooser = random.Random(6)
    for key in list(engine.sidecar.parts):
        if chooser.random() < 0.3:
            engine.sidecar.evict(key)
    engine.forget()
    engine.run(request_of("second", prompt, max_tokens=20))
    engine.check_idle()


def test_object_store_hit(engine: Engine) -> None:
    """One lookup asks for what every group lacks, which is then loaded."""
    prompt = prompt_of(300, 7)
    engine.run(request_of("first", prompt, max_tokens=1))
    engine.forget()
    for key in list(engine.sidecar.parts):
        engine.sidecar.demote(key)
    engine.run(request_of("second", prompt, max_tokens=20))
    step = lcm(*(spec.block_size for spec in engine.specs))
    assert 300 + 19 - engine.computed["second"] == 299 // step * step
    engine.check_idle()


def test_a_load_that_fails_is_computed(engine: Engine) -> None:
    prompt = prompt_of(300, 8)
    engine.run(request_of("first", prompt, max_tokens=1))
    engine.forget()
    second = engine.add(request_of("second", prompt, max_tokens=20))
    for _ in range(200):
        engine.sidecar.receive()
        for copy in list(engine.sidecar.copies):
            engine.sidecar.run(copy, Outcome.CORRUPT if copy.load else Outcome.OK)
        engine.step()
        if second.is_finished():
            break
    assert engine.computed["second"] == 319
    engine.settle()
    engine.check_idle()


def test_aborted_while_loading(engine: Engine) -> None:
    prompt = prompt_of(300, 9)
    engine.run(request_of("first", prompt, max_tokens=1))
    engine.forget()
    second = engine.add(request_of("second", prompt, max_tokens=20))
    engine.step()
    engine.sidecar.receive()
    assert any(copy.load for copy in engine.sidecar.copies)
    engine.abort(second)
    engine.settle()
    engine.check_idle()


@pytest.mark.promise("chunked-local", "failed-load", "recurrent", "windows-alone", "windows-mixed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_random_conversations_in_a_small_cache(
    tmp_path: Path, specs: list[KVCacheSpec], ranks: int
) -> None:
    """Preemption, eviction, shared heads, stores in flight: no wrong KV is read."""
    engine = Engine(
        write_model(tmp_path),
        specs=specs,
        ranks=ranks,
        num_blocks=24 * len(specs) + 40,
        batch_tokens=96,
    )
    converse(engine, len(specs))
    engine.close()


# --- what is not cached --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(CrossAttentionSpec),
        spec_of(SinkFullAttentionSpec, sink_len=4),
        spec_of(SlidingWindowMLASpec, sliding_window=64),
        spec_of(SlidingWindowSpec, sliding_window=64, extra_retained_tokens=2),
        state_of(mamba_cache_mode="none"),
        state_of(mamba_cache_mode="all"),
        SimpleNamespace(block_size=16),
        # Four places for each token.
        *(
            spec_of(SlidingWindowSpec, sliding_window=64, tokens_per_state=Fraction(1, 4))
            for one in fields(SlidingWindowSpec)
            if one.name == "tokens_per_state"
        ),
    ],
)
def test_unknown_kinds_have_no_attention(spec: Any) -> None:
    assert attention_of(spec) is None


@pytest.mark.promise("refuse-layers")
def test_a_model_with_an_unknown_group_is_served_without_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every call of vLLM is answered, and one log line gives the reason."""
    config = vllm_config(write_model(tmp_path))
    specs = [spec_of(), spec_of(SinkFullAttentionSpec, sink_len=4)]
    groups = kv_cache_config(specs=specs)
    with caplog.at_level(logging.WARNING, logger="vllm.kvlake"):
        scheduler = KVLakeConnector(config, KVConnectorRole.SCHEDULER, groups)
        worker = KVLakeConnector(config, KVConnectorRole.WORKER, groups)
        worker.register_kv_caches({})
    lines = [record.getMessage() for record in caplog.records]
    (line,) = [line for line in lines if line.startswith("kvlake")]
    assert "served without the cache" in line
    assert "2 groups, SinkFullAttentionSpec among them" in line
    request = request_of("r", prompt_of(100, 1))
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    step: Any = SimpleNamespace()
    worker.bind_connector_metadata(scheduler.build_connector_meta(step))
    worker.wait_for_save()
    assert not worker.get_transfer_results(set()).finished_recving
    assert scheduler.request_finished_all_groups(request, ([1], [2])) == (False, None)
