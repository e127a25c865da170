"""What the first worker of an engine with vLLM's own offloading notes for the scheduler.

It notes the identity of the KV, or why no tier may have it: then vLLM's own tier works alone, or
nothing is copied at all.
"""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, ModelConfig, set_current_vllm_config
from vllm.config.mamba import MambaBackendEnum
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.prefill_prefix_lm_attention import (
    PrefillPrefixLMAttention,
)
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

from connector.identity.eligibility import (
    SINCE_VLLM_0_33,
    host_tier_chunks_unsupported_reason,
    host_tier_rows_unsupported_reason,
)
from connector.offloading.spec import (
    NoCopies,
    identity_note,
    leave_note,
    no_tier_reason,
    note_path,
    take_note,
)
from connector.offloading.workarounds import region_path
from tests import places
from tests.connector.configurations import BLOCK_TOKENS, spec_of, state_of, vllm_config, write_model
from tests.connector.offloading_engine import Engine, prompt
from tests.connector.weights import read_now

pytestmark = pytest.mark.usefixtures("warm_sidecars")


def test_an_engine_without_an_identity(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own tier works, and one log line says why there is no other."""
    folder = write_model(tmp_path)
    (folder / "model.safetensors").unlink()
    engine = Engine(folder, "/nowhere/attach.sock", attach_seconds=0)
    try:
        assert not engine.manager.secondary_tiers
        tokens = prompt(100)
        assert engine.run("a", tokens) == 0
        engine.forget(host_tier=False)
        assert engine.run("b", tokens) == 96
    finally:
        engine.close()


@pytest.mark.promise("media-not-hashed")
def test_images_that_vllm_does_not_hash(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tier cannot tell which blocks hold an image, so none leaves vLLM's own tier."""

    unhashed = {"media_cache_gb": 0, "prefix_caching": False}
    engine = Engine(model, "/nowhere/attach.sock", configured=unhashed, attach_seconds=0)
    engine.close()
    assert not engine.manager.secondary_tiers
    assert "--mm-processor-cache-gb 0" in caplog.text


@pytest.mark.promise("offloading-prefixless")
def test_an_engine_that_cannot_continue_from_a_prefix(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's host tier would load it too, which ends a pooling engine."""
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, pooling="MEAN")
    try:
        assert "MEAN" in caplog.text
        assert isinstance(engine.worker.connector_worker.worker, NoCopies)
        tokens = prompt(100)
        for name in ("a", "b"):
            assert engine.run(name, tokens) == 0
            engine.forget(host_tier=False)
        assert not region_path(engine.engine_id).exists()
    finally:
        engine.close()


@pytest.mark.promise("unknown-options")
def test_unknown_settings(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's own settings are known."""
    known: dict[str, Any] = {
        "blocks_per_chunk": 2,
        "eviction_policy": "arc",
        "offload_prompt_only": True,
    }
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, block_sizes=64, **known)
    engine.close()
    (line,) = [one.getMessage() for one in caplog.records if "has no effect" in one.message]
    assert line == (
        "kvlake: kv_connector_extra_config['block_sizes']=64 is unknown and has no effect; "
        "did you mean 'block_size'?"
    )


@pytest.mark.promise("offloading-stages")
def test_stages_of_different_numbers_of_layers(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's host tier takes the parts of all workers to be alike, so it is not made."""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,0")
    engine = Engine(model, "/nowhere/attach.sock", attach_seconds=0, configured={"stages": 2})
    try:
        assert "by no tier, because its pipeline stages hold different numbers" in caplog.text
        assert isinstance(engine.worker.connector_worker.worker, NoCopies)
        tokens = prompt(100)
        for name in ("a", "b"):
            assert engine.run(name, tokens) == 0
            engine.forget(host_tier=False)
        assert not region_path(engine.engine_id).exists()
    finally:
        engine.close()


@pytest.mark.promise("offloading-stages")
def test_stages_of_equal_numbers_of_layers(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal(num_groups: int = 1, **configured: Any) -> str:
        return host_tier_rows_unsupported_reason(vllm_config(model, **configured), num_groups)

    assert refusal() == refusal(3) == refusal(stages=2) == ""
    assert "2 groups" in refusal(2, stages=2)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,1")
    assert refusal(stages=2) == ""
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "0,2")
    assert "different numbers of layers" in refusal(stages=2)
    assert refusal(ranks=2) == ""


@pytest.mark.promise("offloading-windows")
@pytest.mark.skipif(SINCE_VLLM_0_33, reason="before vLLM 0.33")
def test_chunks_that_windows_leave_partly_written(model: Path) -> None:
    config, full = vllm_config(model), spec_of()
    window = spec_of(SlidingWindowSpec, sliding_window=64)
    local = spec_of(ChunkedLocalAttentionSpec, attention_chunk_size=4 * BLOCK_TOKENS)
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    for specs, blocks, sound in (
        ([full, window], 2, False),
        ([full, window], 1, True),
        ([full], 2, True),
        ([full, local], 2, True),
        ([full, local], 3, False),
    ):
        reason = host_tier_chunks_unsupported_reason(config, specs, blocks)
        assert ("leave out block_size" in reason) != sound
    # Then vLLM keeps all layers as it keeps full attention.
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert not host_tier_chunks_unsupported_reason(config, [full, window], 2)
    assert host_tier_chunks_unsupported_reason(config, [window], 2)


@pytest.mark.promise("offloading-prefix-match")
def test_hits_within_a_block_are_left_to_vllms_host_tier(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = vllm_config(model)
    note: dict[str, Any] = {}
    for state, unit in ((True, None), (True, BLOCK_TOKENS), (False, 8), (True, 8)):
        specs = [spec_of(), state_of()] if state else [spec_of()]
        places.patch(monkeypatch, "layer_specs_of", lambda _, specs=specs: specs)
        config.cache_config.prefix_match_unit = unit
        note = identity_note(config, BLOCK_TOKENS)
        assert ("identity" in note) == (not state or unit != 8)
    assert "leave out --prefix-match-unit" in note["refusal"]


@pytest.mark.promise("refuse-nodes")
def test_engine_whose_ranks_are_on_several_nodes_has_no_tier(model: Path) -> None:
    """VLLM's host tier is a file of each node, and its scheduler fills that of its own."""
    config = vllm_config(model)
    with set_current_vllm_config(config):
        assert not no_tier_reason(config, 1, 1)
        config.parallel_config.nnodes = 2
        assert "ranks are on 2 nodes" in no_tier_reason(config, 1, 1)


@pytest.mark.promise("offloading-prefixless")
def test_layers_that_attend_to_a_prompt_as_a_whole(model: Path) -> None:
    """Only a worker knows the layers."""
    config = vllm_config(model)
    with set_current_vllm_config(config):
        for kind in (Attention, PrefillPrefixLMAttention):
            options: dict[str, Any] = {
                "cache_config": config.cache_config,
                "prefix": f"layers.{kind.__name__}",
            }
            kind(2, 32, 1.0, num_kv_heads=2, **options)
            reason = no_tier_reason(config, 1, 1)
            assert ("Prefix-LM" in reason) == (kind is not Attention)


@pytest.mark.promise("offloading-recurrent")
def test_states_of_other_dtypes_and_kernels_are_not_shared(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float16 and bfloat16 have the same size, which is all that vLLM tells a tier."""

    def of(layout: str = "", drafts: int = 0, **changes: Any) -> str:
        ngrams = {"method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_max": 3}
        config = vllm_config(model, speculative=ngrams if drafts else None)
        monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
        if layout:
            monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        for name, value in changes.items():
            owner = config.cache_config if hasattr(config.cache_config, name) else None
            setattr(owner or config.mamba_config, name, value)
        return json.dumps(read_now(identity_note(config, BLOCK_TOKENS)["identity"]), sort_keys=True)

    changes: list[dict[str, Any]] = [
        {"mamba_ssm_cache_dtype": "float16"},
        {"mamba_ssm_cache_dtype": "bfloat16"},
        {"mamba_cache_dtype": "float16"},
        {"enable_stochastic_rounding": True},
        {"backend": MambaBackendEnum.FLASHINFER},
        {"layout": "DS"},
        # Drafters without layers of their own, which nothing else tells.
        {"drafts": 1},
        {"drafts": 2},
    ]
    assert len({of(), *(of(**one) for one in changes)}) == 1, "of a model without states"
    monkeypatch.setattr(ModelConfig, "has_inner_state", True)
    assert len({of(), *(of(**one) for one in changes)}) == len(changes) + 1
    assert of(layout="SD") == of(), "vLLM's own choice"


@pytest.mark.promise("offloading-adapters")
@pytest.mark.parametrize("allowed", [False, True])
def test_adapters_that_vllm_knows_by_their_path(model: Path, allowed: bool) -> None:
    """vLLM's block hash does not change if an adapter is trained further in its folder."""
    config = vllm_config(model, adapters_by_path=allowed)
    config.lora_config = LoRAConfig(lora_dtype="bfloat16")
    note = identity_note(config, BLOCK_TOKENS)
    assert ("identity" in note) == allowed
    assert ("adapters_by_path" in note.get("refusal", "")) != allowed
    if allowed:
        config.lora_config.target_modules = ["q_proj"]
        assert identity_note(config, BLOCK_TOKENS) != note


def test_blocks_that_kernels_split_are_told_apart(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernels may be others after a restart of the same command."""
    config = vllm_config(model)

    def of(*numbers: int) -> dict[str, Any]:
        layers = [SimpleNamespace(kv_cache=torch.zeros(number, 2, 4, 8)) for number in numbers]
        layers += [SimpleNamespace(kv_cache=[torch.zeros(8, 3)]), SimpleNamespace()]
        places.patch(monkeypatch, "layer_specs_of", lambda _: [])
        places.patch(monkeypatch, "_layers_of", lambda _: layers)
        note = identity_note(config, BLOCK_TOKENS, num_blocks=8)
        identity: dict[str, Any] = read_now(note["identity"])
        return identity

    assert "kernel_blocks" not in of(8, 8)
    assert of(8, 16)["kernel_blocks"] == [2]
    assert of(16) != of(32) != of(8)


class TestNotes:
    def test_a_note_is_taken_once(self) -> None:
        name = secrets.token_hex(8)
        leave_note(name, {"identity": {"a": 1}})
        leave_note(name, {"identity": {"b": 2}})
        assert take_note(name) == {"identity": {"b": 2}}
        assert "first worker" in take_note(name)["refusal"]

    def test_a_pipe_is_not_waited_for(self) -> None:
        name = secrets.token_hex(8)
        os.mkfifo(note_path(name))
        try:
            assert "is no file; remove it" in take_note(name)["refusal"]
        finally:
            note_path(name).unlink()

    def test_a_link_is_not_followed(self, tmp_path: Path) -> None:
        name = secrets.token_hex(8)
        target = tmp_path / "elsewhere"
        target.write_text("{}")
        place = note_path(name)
        place.symlink_to(target)
        assert "refusal" in take_note(name)
        leave_note(name, {"identity": {}})
        assert target.read_text() == "{}"
        assert not place.is_symlink()
        assert os.stat(place).st_mode & 0o777 == 0o600
        take_note(name)
