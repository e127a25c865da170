"""Which ranks of an engine hold what, from vLLM's own specs: divided heads, and MLA."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from connector.export import GroupTensors, MemfdAllocation, export
from connector.identity.namespace import encoding_of
from connector.identity.parallelism import ParallelLayout
from connector.identity.profile import EngineProfile
from sidecar.protocol import Role
from sidecar.sessions.namespaces import Realms
from tests.connector.weights import namespace_of
from tests.offsets import offset_of
from tiers.errors import LayoutError
from tiers.kv.layout import Segment

LAYERS, BLOCKS, BLOCK_TOKENS, LATENT = 2, 4, 32, 576
MLA = MLAAttentionSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=LATENT, dtype=torch.bfloat16
)
GQA = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)


def config_of(
    tp_size: int,
    *,
    stages: int = 1,
    kv_heads: int = 128,
    chunked: bool = True,
    revision: str | None = "1",
) -> Any:
    """The parts of a `VllmConfig` that are read. DeepSeek's number of KV heads is not MLA's."""
    text = SimpleNamespace(rope_parameters=None, max_position_embeddings=2048)
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, engine_id="e"),
        aux_output_config=SimpleNamespace(enabled=False),
        parallel_config=SimpleNamespace(
            enable_fault_tolerance=False,
            enable_elastic_ep=False,
            tensor_parallel_size=tp_size,
            pipeline_parallel_size=stages,
            world_size=tp_size * stages,
            nnodes_within_dp=1,
            distributed_executor_backend="mp",
            placement_group=None,
        ),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=chunked),
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
        attention_config=SimpleNamespace(backend=None),
        model_config=SimpleNamespace(
            pooler_config=None,
            is_diffusion=False,
            enable_sleep_mode=False,
            enable_cumem_allocator=False,
            model="org/model",
            served_model_name="org/model",
            revision=revision,
            quantization=None,
            hf_overrides={},
            hf_config=text,
            hf_text_config=text,
            hf_config_path=None,
            multimodal_config=None,
            architecture="A",
            architectures=["A"],
            runner_type="generate",
            dtype=torch.bfloat16,
            get_total_num_hidden_layers=lambda: LAYERS,
            get_total_num_kv_heads=lambda: kv_heads,
        ),
    )


def engine_of(
    spec: Any, tp_size: int, *, beside: Any = None, layers: range = range(LAYERS), **changes: Any
) -> EngineProfile:
    names = [f"layer.{number}" for number in layers]
    specs = [spec] if beside is None else [spec, beside]
    groups = [KVCacheGroupSpec(layer_names=names, kv_cache_spec=one) for one in specs]
    caches: Any = SimpleNamespace(kv_cache_groups=groups, num_blocks=8)
    return EngineProfile(config_of(tp_size, **changes), caches)


def test_mla_is_one_head_that_every_rank_holds() -> None:
    attached: set[tuple[str, bytes]] = set()
    for tp_size in (1, 2, 4, 8):
        engine = engine_of(MLA, tp_size)
        assert engine.refusal == ""
        for rank in range(tp_size):
            assert engine.groups[0].segment(engine.parallel_layout, rank) == Segment(
                0, LAYERS, 0, 1
            )
        message = engine.attach(Role.SCHEDULER, 0)
        assert message.num_segments == 1
        assert message.world_size == message.replicas == tp_size
        attached.add((message.topology, message.namespace))
    assert len(attached) == 1, "engines of any number of ranks share"


def test_heads_are_divided_over_ranks() -> None:
    engine = engine_of(GQA, 4, kv_heads=4)
    assert engine.refusal == ""
    message = engine.attach(Role.SCHEDULER, 0)
    assert (message.replicas, message.num_segments, message.topology) == (1, 4, "tp4")


@pytest.mark.promise("pipeline-parallel")
def test_layers_are_divided_over_stages() -> None:
    """Each stage is shown its own layers; together they are the model, without overlaps."""
    # The scheduler is shown the first stage's.
    engine = engine_of(GQA, 2, stages=2, kv_heads=2, layers=range(1))
    assert engine.refusal == ""
    found: list[Segment] = []
    for stage in range(2):
        own = [f"layer.{stage}"]
        assert engine.parallel_layout.first_rank_of(own) == len(found)
        for _ in range(2):
            found.append(engine.parallel_layout.segment(own, 2, len(found)))
    assert found == [Segment(layer, 1, head, 1) for layer in range(LAYERS) for head in range(2)]
    message = engine.attach(Role.SCHEDULER, 0)
    assert (message.world_size, message.num_segments, message.topology) == (4, 4, "pp2tp2")
    assert engine.owner(0).endswith(f"/pp2tp2.b{BLOCK_TOKENS}")


def test_the_sidecar_gives_the_chunks_of_each_group_the_same_owner() -> None:
    engine = engine_of(GQA, 1, beside=replace(GQA, block_size=2 * BLOCK_TOKENS), kv_heads=1)
    realms = Realms()
    joined = realms.join(engine.attach(Role.SCHEDULER, 0).parts)
    owners = [engine.owner(group) for group in range(2)]
    assert owners == [realm.owner for realm in joined]
    assert len(set(owners)) == 2
    realms.close()


def test_a_rank_is_numbered_by_stage_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM numbers them."""
    from vllm.distributed import parallel_state

    stage = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: stage)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 2)
    assert ParallelLayout(stages=2, tensors=4, num_layers=LAYERS).this_rank() == 6


@pytest.mark.promise("pipeline-parallel")
def test_workers_of_all_stages_share_the_schedulers_namespace() -> None:
    """vLLM shows a worker the layers of its own stage, and the scheduler those of the first."""
    engines = [
        engine_of(GQA, 1, stages=2, kv_heads=1, layers=range(stage, stage + 1))
        for stage in range(2)
    ]
    assert [engine.refusal for engine in engines] == ["", ""]
    messages = [engine.attach(Role.SCHEDULER, 0) for engine in engines]
    assert messages[0].namespace == messages[1].namespace
    assert messages[0].topology == messages[1].topology


def test_stages_of_mla_hold_copies_of_their_own_layers() -> None:
    engine = engine_of(MLA, 4, stages=2, layers=range(1))
    assert engine.refusal == ""
    message = engine.attach(Role.SCHEDULER, 0)
    assert (message.world_size, message.num_segments, message.topology) == (8, 2, "pp2tp1")
    segment = engine.parallel_layout.segment(["layer.1"], 1, 7, latent=True)
    assert segment == Segment(1, 1, 0, 1)
    # Copies are ranks in a row, as the sidecar takes them.
    assert 7 // message.replicas == 1


def test_a_namespace_does_not_depend_on_stages() -> None:
    whole = engine_of(GQA, 1, kv_heads=1)
    cut = engine_of(GQA, 1, stages=2, kv_heads=1, layers=range(1))
    assert whole.groups[0].namespace == cut.groups[0].namespace


@pytest.mark.promise("refuse-stages")
@pytest.mark.parametrize(
    "names", [["layer.0"], [], ["layer.1", "layer.2"], ["draft"], ["layer.1.0"]]
)
def test_layers_of_another_stage_are_refused(names: list[str]) -> None:
    with pytest.raises(LayoutError, match="stage 1 of 2 was expected to hold layers 1 to 1"):
        ParallelLayout(stages=2, tensors=1, num_layers=LAYERS).segment(names, 1, 1)


@pytest.mark.promise("refuse-stages")
def test_stages_of_a_model_of_several_groups_are_refused() -> None:
    refusal = engine_of(GQA, 1, stages=2, kv_heads=1, layers=range(1), beside=GQA).refusal
    assert refusal.startswith("pipeline_parallel_size=2 is not supported")
    whole = engine_of(GQA, 1, stages=2, kv_heads=1).refusal
    assert "stage 0 of 2" in whole


@pytest.mark.promise("refuse-replicated-heads")
def test_more_ranks_than_heads_are_refused() -> None:
    # vLLM does not say of each layer how many heads it has in all: which ranks hold copies is not
    # known for sure.
    assert "copies of a head" in engine_of(GQA, 8, kv_heads=4).refusal


@pytest.mark.promise("refuse-mla")
def test_what_is_not_plain_mla_is_refused() -> None:
    assert "MLAAttentionSpec" in engine_of(replace(MLA, tokens_per_state=4), 2).refusal
    padded = replace(MLA, page_size_padded=MLA.page_size_bytes + 64)
    assert "MLAAttentionSpec" in engine_of(padded, 2).refusal
    assert "cached prefix" in engine_of(MLA, 2, chunked=False).refusal
    assert "beside groups" in engine_of(MLA, 2, beside=GQA).refusal


def test_weights_without_an_identity_are_refused() -> None:
    assert "--revision" in engine_of(GQA, 1, revision=None).refusal


def test_a_namespace_of_mla_has_one_head_and_no_block_size() -> None:
    def of(block_tokens: int) -> bytes:
        spec = replace(MLA, block_size=block_tokens)
        return namespace_of(
            config_of(1),
            block_tokens=block_tokens,
            blocks_per_chunk=256 // block_tokens,
            spec=spec,
        )

    assert b'"kv_heads":1,' in of(16)
    assert of(16) == of(64)
    assert encoding_of(config_of(1), 16, MLA).endswith("-mla+token")


@pytest.mark.parametrize("squeezed", [False, True])
def test_mla_is_exported_with_or_without_an_axis_of_heads(squeezed: bool) -> None:
    page_bytes = BLOCK_TOKENS * LATENT * 2
    with MemfdAllocation() as allocation:
        raw = torch.zeros(LAYERS * BLOCKS * page_bytes, dtype=torch.int8, device="cpu")
    names = [f"layer.{number}" for number in range(LAYERS)]
    tensor = KVCacheTensor(
        size=raw.numel(),
        layers=names,
        layer_stride=BLOCKS * page_bytes,
        block_stride=page_bytes,
    )
    views = create_kv_cache_views(raw, MLA, BLOCKS, KVCacheLayout.LBHNC, tensor)
    tensors = [view.squeeze(1) if squeezed else view for view in views]
    group = GroupTensors(tensors, Segment(0, LAYERS, 0, 1), "cpu-x86-mla+token")
    memory = export([group], allocation)
    assert memory.layouts[0].content_bytes == 2 * LATENT
    assert memory.layouts[0].block_tokens == BLOCK_TOKENS
    views[1][2, 0, 3] = torch.arange(LATENT).to(torch.bfloat16)
    start = offset_of(memory.layouts[0], 1, 2, 0, 3)
    held = raw[start : start + 2 * LATENT].view(torch.bfloat16)
    assert torch.equal(held, views[1][2, 0, 3])
    assert offset_of(memory.layouts[0], 1, 0, 0, 0) == BLOCKS * page_bytes
    memory.close()
