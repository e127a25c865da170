"""Recurrent layers: which states are stored, what makes states differ, what is refused.

`test_groups.py` shows what a hit needs of them, and that no wrong state is read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import (
    KVCacheSpec,
    MambaSpec,
)

from connector.export import GroupTensors, MemfdAllocation, export
from connector.identity.groups import whole_blocks
from connector.identity.namespace import digest_of
from connector.identity.profile import EngineProfile
from connector.vllm import KVLakeConnector
from sidecar.protocol import Pin, Submit
from tests.connector.configurations import (
    BLOCK_TOKENS,
    kv_cache_config,
    request_of,
    spec_of,
    state_of,
    vllm_config,
)
from tests.connector.conversations import prompt_of
from tests.connector.engine import Engine
from tests.releases import STATE_BEFORE, has_vllm, require_vllm
from tiers.kv.copy import CopyPlan
from tiers.kv.keys import KeyChain, root_key
from tiers.kv.layout import Segment

PROMPT = prompt_of(300, 1)
SPECS: list[KVCacheSpec] = [spec_of(), state_of()]


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    """Full attention and recurrent layers."""
    return make(specs=SPECS)


@pytest.mark.promise("divergent-hits")
@pytest.mark.parametrize("divergent", [False, True])
def test_a_state_that_only_the_tiers_hold(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, divergent: bool
) -> None:
    """Why the divergent hits of a prompt are not used if vLLM still has its attention.

    With them vLLM asks what there is beyond its attention, and of what ends with it takes nothing.
    """
    engine.run(request_of("a", PROMPT, max_tokens=1))
    for block in engine.pool.blocks:
        if block.block_hash is not None and get_group_id(block.block_hash) == 1:
            assert engine.pool._maybe_evict_cached_block(block)  # noqa: SLF001 (of vLLM)
    monkeypatch.setattr(KVLakeConnector, "supports_divergent_local_hybrid_hits", divergent)
    request = engine.run(request_of("b", PROMPT, max_tokens=1))
    found = 0 if divergent else len(PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS
    assert engine.computed["b"] == len(PROMPT) - found
    if has_vllm("0.32"):  # Earlier ones do not ask which groups a load fills.
        assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0, 1)


def state_keys(engine: Engine, tokens: list[int]) -> list[bytes]:
    """Keys of the states behind each block of these tokens."""
    group = engine.connector._engine.groups[1]  # noqa: SLF001 (its public names are vLLM's)
    chain = KeyChain(root_key(digest_of(group.namespace)), BLOCK_TOKENS, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain.keys


def stored(engine: Engine, tokens: list[int]) -> list[int]:
    """How many tokens each stored state is behind."""
    keys = state_keys(engine, tokens)
    return [
        number * BLOCK_TOKENS for number, key in enumerate(keys, 1) if key in engine.sidecar.parts
    ]


def chunks_sent(engine: Engine) -> int:
    """Chunks that the engine had stored."""
    submits = engine.ranks[0].client.sent_of(Submit)
    return sum(len(store.chunks) for submit in submits for store in submit.stores)


class TestStores:
    @pytest.mark.promise("recurrent")
    def test_states_are_stored_where_steps_ended(self, make: Callable[..., Engine]) -> None:
        """One for a step of many blocks, because vLLM makes no others, and one at the end."""
        engine = make(specs=SPECS, batch_tokens=128)
        request = engine.run(request_of("a", PROMPT, max_tokens=30))
        assert stored(engine, list(request.all_token_ids)) == [128, 256, 288, 304, 320]
        engine.check_idle()

    def test_by_default_vllm_reports_only_states_at_ends_of_prompts(
        self, make: Callable[..., Engine]
    ) -> None:
        engine = make(specs=SPECS, batch_tokens=128, retention=0)
        request = engine.run(request_of("a", PROMPT, max_tokens=30))
        assert stored(engine, list(request.all_token_ids)) == [288]
        # The next turn computes the answer again, and finds the prompt.
        engine.forget()
        engine.run(request_of("b", list(request.all_token_ids), max_tokens=1))
        assert len(request.all_token_ids) - engine.computed["b"] == 288
        engine.check_idle()

    @pytest.mark.parametrize("retention", [0, None])
    def test_a_third_branch_hits_where_two_parted(
        self, make: Callable[..., Engine], retention: int | None
    ) -> None:
        """vLLM stops where the second one parts, in the middle of a chunk of attention."""
        engine = make(specs=SPECS, batch_tokens=128, retention=retention)
        head = PROMPT[:230]
        for number in range(3):
            if number == 2:
                engine.forget()
            prompt = [*head, *prompt_of(100, 10 + number)]
            engine.run(request_of(str(number), prompt, max_tokens=1))
        assert len(prompt) - engine.computed["2"] == 224
        engine.check_idle()

    @pytest.mark.promise("recurrent-block-end")
    def test_a_prompt_that_ends_with_a_block(self, engine: Engine) -> None:
        """The same prompt needs the state before its last block, a longer one that behind it."""
        engine.run(request_of("a", PROMPT[:64], max_tokens=1))
        engine.forget()
        engine.run(request_of("longer", PROMPT[:100], max_tokens=1))
        assert engine.computed["longer"] == 100 - 64
        require_vllm("0.32", STATE_BEFORE)
        assert stored(engine, PROMPT[:64]) == [48, 64]
        engine.forget()
        engine.run(request_of("again", PROMPT[:64], max_tokens=1))
        assert engine.computed["again"] == 64 - 48

    def test_attention_without_its_state_is_no_hit(self, engine: Engine) -> None:
        """Nothing is loaded that ends where the recurrent layers have no state."""
        engine.run(request_of("a", PROMPT, max_tokens=1))
        for key in state_keys(engine, PROMPT):
            engine.sidecar.evict(key)
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT)
        engine.check_idle()

    @pytest.mark.promise("recurrent")
    @pytest.mark.parametrize("lost", ["states", "everything"])
    def test_states_that_the_sidecar_lost_are_stored_again(self, engine: Engine, lost: str) -> None:
        """With the attention up to there; vLLM reports a state only once."""
        engine.run(request_of("a", PROMPT, max_tokens=1))
        states = state_keys(engine, PROMPT)
        for key in list(engine.sidecar.parts):
            if key in states or lost == "everything":
                engine.sidecar.evict(key)
        longer = [*PROMPT, *prompt_of(10, 2)]
        engine.run(request_of("b", longer, max_tokens=1))
        assert len(longer) - engine.computed["b"] == 288
        assert 288 in stored(engine, PROMPT)
        engine.check_idle()
        engine.forget()
        engine.run(request_of("c", PROMPT, max_tokens=1))
        assert len(PROMPT) - engine.computed["c"] == 288
        # What is there is not stored once more.
        before = chunks_sent(engine)
        engine.run(request_of("d", PROMPT, max_tokens=1))
        assert chunks_sent(engine) == before
        engine.check_idle()

    def test_a_pin_keeps_the_state(self, engine: Engine) -> None:
        request = request_of("a", PROMPT[:64], max_tokens=1)
        request.kv_transfer_params = {"kvlake": {"pin_seconds": 30}}
        engine.run(request)
        (pin,) = engine.client.sent_of(Pin)
        pinned = {key for key, group in zip(pin.keys, pin.groups, strict=True) if group == 1}
        assert pinned == set(state_keys(engine, PROMPT)[2:4])

    def test_a_prompt_for_another_engine_has_its_state(
        self, make: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        for without in (False, True):
            engine = make(specs=SPECS)
            finished = engine.connector.request_finished_all_groups

            def noted(*args: Any, ask: Any = finished) -> Any:
                told.append(ask(*args)[1])
                return False, None

            monkeypatch.setattr(engine.connector, "request_finished_all_groups", noted)
            request = request_of("a", PROMPT, max_tokens=4)
            request.kv_transfer_params = {"kvlake": {"hand_over": True}}
            engine.add(request)
            for _ in range(3):
                engine.step()
                engine.sidecar.run_all()
            for key in state_keys(engine, PROMPT) if without else ():
                engine.sidecar.evict(key)
            engine.finish(request)
            engine.settle()
        assert told == [{"kvlake": {"expect_tokens": 288}}, None]


class TestNamespaces:
    def of(self, model: Path, spec: MambaSpec, ranks: int = 1) -> dict[str, Any]:
        config = vllm_config(model, ranks=ranks)
        served = EngineProfile(config, kv_cache_config(ranks=ranks, specs=[spec_of(), spec]))
        assert not served.refusal
        description: dict[str, Any] = json.loads(served.groups[1].namespace)
        return description

    def test_all_that_changes_a_state_is_in_the_namespace(self, model: Path) -> None:
        first = state_of()
        others = [
            replace(first, shapes=((3, 8), (2, 4, 8))),
            replace(first, dtypes=(torch.bfloat16, torch.bfloat16)),
            replace(first, mamba_type=SimpleNamespace(name="GDN_ATTN")),
            replace(first, tp_replicated=True),
        ]
        found = [json.dumps(self.of(model, one)) for one in (first, *others)]
        assert len(set(found)) == len(found)

    @pytest.mark.promise("recurrent-other-tp")
    def test_engines_with_other_ranks_share_no_states(self, model: Path) -> None:
        assert self.of(model, state_of()) != self.of(model, state_of(), ranks=2)

    def test_a_state_is_not_taken_for_attention(self, model: Path) -> None:
        assert self.of(model, state_of())["encoding"].startswith("state-mamba2-cpu-")


@pytest.mark.promise("padded-pages")
def test_only_the_state_of_a_padded_page_is_copied() -> None:
    """Views as vLLM makes them: pages as large as those of attention, partly filled by states."""
    page_bytes, layers, blocks = 4096, 3, 5
    spec = state_of(page_size_padded=page_bytes)
    with MemfdAllocation() as allocation:
        buffer = torch.zeros(layers * blocks * page_bytes, dtype=torch.int8)
    pages = buffer.view(layers, blocks, page_bytes)
    pages[:] = torch.randint(-128, 127, pages.shape, dtype=torch.int8)
    views = [
        torch.as_strided(
            buffer,
            (blocks, 1, 1, spec.state_content_size_bytes),
            (page_bytes, page_bytes, page_bytes, 1),
            layer * blocks * page_bytes,
        )
        for layer in range(layers)
    ]
    segment = Segment(0, layers, 0, 1)
    exported = export([GroupTensors(views, segment, "state", BLOCK_TOKENS)], allocation)
    layout = exported.layouts[0]
    assert (layout.block_tokens, layout.entry_tokens) == (BLOCK_TOKENS, BLOCK_TOKENS)
    chunk = layout.chunk(1)
    assert chunk.payload_bytes(1) == layers * spec.state_content_size_bytes
    assert chunk.shape(1) == (1, layers, 1, 1, spec.state_content_size_bytes)
    before = buffer.clone()
    memory = np.zeros(exported.shared.size_bytes, dtype=np.uint8)
    memory[: buffer.numel()] = buffer.numpy().view(np.uint8)
    payload = np.zeros(chunk.payload_bytes(1), dtype=np.uint8)
    plan = CopyPlan(layout)
    plan.gather(memory, np.array([2]), payload)
    expected = pages[:, 2, : spec.state_content_size_bytes].reshape(-1).numpy().view(np.uint8)
    assert (payload == expected).all()
    plan.scatter(memory, np.array([4]), payload)
    after = memory[: buffer.numel()].view(np.int8).reshape(layers, blocks, page_bytes)
    changed = np.argwhere((after != before.view(layers, blocks, page_bytes).numpy()).any(axis=0))
    assert set(changed[:, 0].tolist()) <= {4}
    assert changed[:, 1].max() < spec.state_content_size_bytes
    exported.close()


@pytest.mark.parametrize(
    ("blocks", "expected"), [([16, 32], 256), ([528], 528), ([160, 160], 320), ([96], 288)]
)
def test_a_chunk_is_whole_blocks_of_any_size(blocks: list[int], expected: int) -> None:
    """vLLM makes the blocks of such models as large as a state."""
    assert whole_blocks(256, blocks) == expected


# --- what is refused -----------------------------------------------------------------------------


def reason(model: Path, caplog: pytest.LogCaptureFixture, specs: Any, change: Any = None) -> str:
    """What one line of the log says of an engine with these layers."""
    config, kv = vllm_config(model), kv_cache_config(specs=specs)
    if change is not None:
        change(config)
    with caplog.at_level(logging.WARNING, logger="vllm.kvlake"):
        connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv)
    assert connector.get_num_new_matched_tokens(request_of("a", PROMPT), 0) == (0, False)
    (line,) = [one.getMessage() for one in caplog.records if "without the cache" in one.message]
    return str(line)


@pytest.mark.promise("refuse-recurrent")
@pytest.mark.parametrize(
    ("specs", "said"),
    [
        ([spec_of(), state_of(mamba_cache_mode="none")], "--enable-prefix-caching"),
        ([spec_of(), state_of(mamba_cache_mode="all")], "--mamba-cache-mode align"),
        ([spec_of(), state_of(num_speculative_blocks=2)], "speculative decoding"),
        ([spec_of(), state_of(64)], "blocks of 16, 64 tokens"),
    ],
)
def test_unsafe_modes_are_refused(
    model: Path, caplog: pytest.LogCaptureFixture, specs: Any, said: str
) -> None:
    assert said in reason(model, caplog, specs)


@pytest.mark.promise("refuse-recurrent")
def test_stages_are_refused(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(config: Any) -> None:
        config.parallel_config.pipeline_parallel_size = 2

    assert "pipeline_parallel_size=2" in reason(model, caplog, [state_of()], change)


@pytest.mark.promise("refuse-recurrent")
def test_hits_within_a_block_are_refused(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def change(config: Any) -> None:
        config.cache_config.prefix_match_unit = 8

    assert "leave out --prefix-match-unit" in reason(model, caplog, SPECS, change)
