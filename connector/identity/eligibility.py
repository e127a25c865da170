"""Which engines may use the cache. Each function returns why one may not, or an empty string.

Each role decides for itself, from vLLM's configuration alone. vLLM shows a worker more of it: if
only the worker finds a reason, it reports that with its first step.
"""

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from math import lcm
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from connector.identity.groups import FULL, RECURRENT, Attention, whole_blocks
from connector.identity.mamba import ALIGNED, is_recurrent, mamba_unsupported_reason
from connector.identity.namespace import rope_parameters_of
from connector.identity.parallelism import parallel_layout_of
from connector.identity.speculative import WITHOUT_LAYERS, speculation_unsupported_reason
from sidecar.protocol import GROUPS_MAX
from tiers.errors import LayoutError

SINCE_VLLM_0_33: Final = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
_VARIANT_AFTER_A_PREFIX_HIT: Final = ("FLASHINFER", "TRITON_MLA")
"""Backends with which vLLM turns its prefix caching off if it is to be batch invariant."""


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot be cached safely, or nothing."""
    # Not at import: vLLM imports this module in its front end, which must not pick a platform.
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return f"platform {current_platform.device_type!r} is not supported by this release"
    if not SINCE_VLLM_0_33:
        # What the sidecar mapped would no longer be the cache once the engine has slept. vLLM lets
        # an engine sleep with the allocator alone.
        model = vllm_config.model_config
        if model.enable_sleep_mode or model.enable_cumem_allocator:
            setting = "enable_sleep_mode" if model.enable_sleep_mode else "enable_cumem_allocator"
            return f"{setting} needs vLLM 0.33 or later, which notifies connectors before sleep"
    groups = kv_cache_config.kv_cache_groups
    specs = (spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec))
    return (
        continuation_unsupported_reason(vllm_config)
        or nodes_unsupported_reason(vllm_config)
        or mamba_unsupported_reason(vllm_config, groups)
        or speculation_unsupported_reason(vllm_config)
        or _groups_unsupported_reason(groups)
        or prefix_unsupported_reason(vllm_config, specs)
        or _ranks_unsupported_reason(vllm_config, groups)
    )


def _groups_unsupported_reason(groups: Sequence[Any]) -> str:
    unknown = {
        type(group.kv_cache_spec).__name__
        for group in groups
        if attention_of(group.kv_cache_spec) is None
        or not getattr(group, "enable_kv_transfer", True)
    }
    if unknown or not 0 < len(groups) <= GROUPS_MAX:
        kinds = f", {', '.join(sorted(unknown))} among them" if unknown else ""
        return (
            f"its KV cache has {len(groups)} groups{kinds}; this release supports 1 to "
            f"{GROUPS_MAX} groups of full, sliding-window or chunked local attention and of "
            "recurrent layers"
        )
    latent = any(isinstance(group.kv_cache_spec, MLAAttentionSpec) for group in groups)
    if latent and len(groups) > 1:
        return "MLA beside groups of other kinds is not supported by this release"
    return ""


def _ranks_unsupported_reason(vllm_config: Any, groups: Sequence[Any]) -> str:
    if reason := _stages_unsupported_reason(vllm_config, len(groups)):
        return reason
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)} is not supported by this release"
    layout = parallel_layout_of(vllm_config)
    for group in groups:
        spec = group.kv_cache_spec
        # A worker is shown its own stage's layers, and asks for its own rank when it shares them.
        rank = layout.first_rank_of(group.layer_names)
        latent = isinstance(spec, MLAAttentionSpec)
        try:
            layout.segment(group.layer_names, num_heads_of(vllm_config, spec), rank, latent=latent)
        except LayoutError as error:
            return str(error)
    return ""


def _stages_unsupported_reason(vllm_config: Any, num_groups: int) -> str:
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 or num_groups == 1:
        return ""
    # A stage is shown only its own layers of a group, and cannot name the group by them.
    return (
        f"pipeline_parallel_size={stages} is not supported by this release for a KV cache of "
        f"{num_groups} groups"
    )


def nodes_unsupported_reason(vllm_config: Any) -> str:
    """Why ranks would not all attach to one sidecar, which completes chunks, or nothing."""
    parallel = vllm_config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        return (
            "with distributed_executor_backend='external_launcher' every rank schedules for "
            "itself, and they would not find the same hits; use 'mp'"
        )
    nodes = parallel.nnodes_within_dp
    if parallel.placement_group is not None:
        nodes = max(nodes, len(_ray_nodes(parallel.placement_group)))
    if nodes > 1:
        return (
            f"its ranks are on {nodes} nodes, and each node has its own sidecar; choose "
            "tensor_parallel_size and pipeline_parallel_size so that an engine fits on one node, "
            "and run one on each (data_parallel_size)"
        )
    return ""


def _ray_nodes(placement_group: Any) -> set[str]:
    """The nodes on which Ray has placed an engine's workers."""
    import vllm.envs
    from vllm.platforms import current_platform

    # Ray is installed where vLLM runs on it.
    table = import_module("ray.util").placement_group_table(placement_group)
    bundles: dict[int, dict[str, float]] = table["bundles"]
    # Others are there for processes without a device, such as the engine itself.
    numbers = [n for n, has in bundles.items() if has.get(current_platform.ray_device_key)]
    if chosen := vllm.envs.VLLM_RAY_BUNDLE_INDICES:
        numbers = [int(number) for number in chosen.split(",")]
    return {str(table["bundles_to_node_id"][number]) for number in numbers}


def chunk_tokens_unsupported_reason(
    chunk_tokens: int, block_sizes: Iterable[int], setting: str
) -> str:
    """Why chunks do not fit blocks of these sizes, or nothing; `setting` is as it was given."""
    sizes = sorted(set(block_sizes))
    step = lcm(*sizes)
    if chunk_tokens % step == 0:
        return ""
    fitting = {chunk_tokens // step * step, whole_blocks(chunk_tokens, sizes)} - {0}
    blocks = " and ".join(map(str, sizes))
    return (
        f"{setting} is not a multiple of the engine's block size, {blocks}; choose "
        f"{' or '.join(map(str, sorted(fitting)))}, or leave it out"
    )


def prefix_unsupported_reason(vllm_config: Any, specs: Iterable[Any]) -> str:
    """Why an engine cannot continue from the KV of a prefix, or nothing; `specs` are of layers.

    vLLM turns its own prefix caching off then, but still offers requests to a connector.
    """
    # Not at import: vLLM imports this module in its front end, which must not pick a platform.
    from vllm.platforms import CpuArchEnum, current_platform

    specs = list(specs)
    model = vllm_config.model_config
    if current_platform.is_cpu():
        if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
            return "vLLM's attention cannot continue from a cached prefix on RISC-V"
        latent = any(isinstance(spec, MLAAttentionSpec) for spec in specs)
        if latent and not vllm_config.scheduler_config.enable_chunked_prefill:
            # Its reference backend attends to the tokens of the step only.
            return "its MLA backend cannot continue from a cached prefix"
    if any(hasattr(spec, "rswa_window") for spec in specs):
        return (
            "its generated tokens are read through a window and its prompts as a whole (R-SWA), so "
            "that generated tokens are no prefix of a prompt"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return (
            "it attends to each prompt as a whole (Prefix-LM), so that the KV of a prefix differs "
            "between prompts"
        )
    if (pooler := model.pooler_config) is not None and not model.is_prefix_caching_supported:
        return (
            f"{pooler.seq_pooling_type}/{pooler.tok_pooling_type} pooling needs a whole prompt "
            "computed in one step"
        )
    if vllm_config.aux_output_config.enabled:
        return (
            "enable_return_routed_experts reports the experts of every token, which are not known "
            "for loaded tokens"
        )
    if model.is_diffusion:
        return "it is a diffusion model, which may emit tokens before their KV is final"
    if os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        return "VLLM_MOE_ROUTING_SIMULATION_STRATEGY sends each token to experts by chance"
    return _rope_unsupported_reason(model) or _batch_invariance_unsupported_reason(vllm_config)


def _rope_unsupported_reason(model: Any) -> str:
    """Why the KV of a token depends on the other requests of its step, or nothing.

    Transformers chooses the frequencies of all tokens of a step by the longest position among them
    (`dynamic_rope_update` in its `modeling_rope_utils.py`). vLLM's own layers do not.
    """
    for one in rope_parameters_of(model):
        kind = str(one["rope_type"])
        if kind == "longrope":
            length = int(one["original_max_position_embeddings"])
        elif "dynamic" in kind:
            length = int(getattr(model.hf_text_config, "max_position_embeddings", None) or 0)
        else:
            continue
        if model.max_model_len > length and model.using_transformers_backend():
            return (
                f"beyond {length} tokens Transformers scales the RoPE ({kind}) of all requests of "
                f"a step by the longest one; set --max-model-len {length}, or --model-impl vllm if "
                "vLLM has the model itself"
            )
    return ""


def _batch_invariance_unsupported_reason(vllm_config: Any) -> str:
    # Not at import: it reads the environment.
    from vllm.envs import VLLM_BATCH_INVARIANT

    if not VLLM_BATCH_INVARIANT:
        return ""
    backend = getattr(vllm_config.attention_config.backend, "name", "")
    caching = vllm_config.cache_config.enable_prefix_caching
    if backend in _VARIANT_AFTER_A_PREFIX_HIT or not (backend or caching):
        # vLLM does not say which backend "auto" chose, but that backend turned caching off.
        return (
            "with VLLM_BATCH_INVARIANT=1 vLLM continues from no cached prefix if the backend is "
            f"{' or '.join(_VARIANT_AFTER_A_PREFIX_HIT)}, or prefix caching is off; name another "
            "backend with --attention-backend"
        )
    return ""


def media_unsupported_reason(vllm_config: Any) -> str:
    """Why requests with images, audio or video cannot be cached, or nothing."""
    media = vllm_config.model_config.multimodal_config
    if (
        media is not None
        and (transfer := vllm_config.ec_transfer_config) is not None
        and transfer.is_ec_consumer
    ):
        # It names them by the model's name and the item, whatever weights and settings they had.
        return (
            "ec_transfer_config takes their embeddings from a process that may have other weights"
        )
    if (
        media is None
        or media.mm_processor_cache_gb > 0
        or vllm_config.cache_config.enable_prefix_caching
    ):
        return ""
    # vLLM needs no hash of them then, and makes none: `_process_mm_uuids` of its renderer.
    return (
        "with --mm-processor-cache-gb 0 and without prefix caching vLLM does not hash them, and "
        "gives them numbers that start over in each process; leave one of the two on"
    )


def continuation_unsupported_reason(vllm_config: Any) -> str:
    """Why an engine that continues after a failed step, or with more ranks, cannot be cached."""
    parallel = vllm_config.parallel_config
    if parallel.enable_fault_tolerance:
        return (
            "enable_fault_tolerance is not supported by this release: a failed step may lose what "
            "a rank reports of its loads and stores"
        )
    if parallel.enable_elastic_ep:
        return (
            "enable_elastic_ep is not supported by this release: vLLM gives ranks that it adds the "
            "weights of others, and says that they have random ones"
        )
    return ""


# --- vLLM's own offloading ---------------------------------------------------------------------


def host_tier_rows_unsupported_reason(vllm_config: Any, num_groups: int) -> str:
    """Why workers would overwrite each other's rows of vLLM's host tier, or nothing.

    Each worker takes all parts of a row to be as large as its own.
    """
    if reason := _stages_unsupported_reason(vllm_config, num_groups):
        return reason
    layout = parallel_layout_of(vllm_config)
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and str(speculative.method) not in WITHOUT_LAYERS
    if layout.stages == 1 or (layout.is_even and not drafts):
        return ""
    return (
        "its pipeline stages hold different numbers of layers, and vLLM's host tier takes them to "
        "be alike"
    )


def host_tier_chunks_unsupported_reason(
    vllm_config: Any, specs: Iterable[Any], blocks_per_chunk: int
) -> str:
    """Why vLLM's host tier would hold chunks that were only partly written, or nothing.

    Up to vLLM 0.32 it checks only the last block of a chunk. The others may have left a sliding
    window or an attention chunk.
    """
    if blocks_per_chunk == 1 or SINCE_VLLM_0_33:
        return ""
    specs = list(specs)
    full = any(isinstance(spec, FullAttentionSpec) for spec in specs)
    if full and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        # All of them are kept as full attention is.
        return ""
    local = [spec for spec in specs if isinstance(spec, ChunkedLocalAttentionSpec)]
    if not any(isinstance(spec, SlidingWindowSpec) for spec in specs) and not any(
        spec.attention_chunk_size % (spec.block_size * blocks_per_chunk) for spec in local
    ):
        return ""
    return (
        f"it has local attention and chunks of {blocks_per_chunk} blocks, some of which vLLM "
        "before 0.33 stores only in part; leave out block_size and blocks_per_chunk, so that each "
        "block is a chunk"
    )


def prefix_match_unsupported_reason(
    vllm_config: Any, specs: Iterable[Any], block_tokens: int
) -> str:
    """Why vLLM's offloading cannot have another tier below its host tier, or nothing.

    It looks up hits within a block of recurrent layers after other hits, and loads them even if
    what was carried for them evicted them.
    """
    unit = vllm_config.cache_config.prefix_match_unit
    if unit is None or unit >= block_tokens or not any(is_recurrent(spec) for spec in specs):
        return ""
    return (
        f"prefix_match_unit={unit} with recurrent layers and blocks of {block_tokens} tokens is "
        "not supported by this release; leave out --prefix-match-unit"
    )


# --- what of vLLM's configuration decides ------------------------------------------------------


_BY_TOKEN: Final = (
    *(FullAttentionSpec, MLAAttentionSpec),
    *(SlidingWindowSpec, ChunkedLocalAttentionSpec),
)
"""Kinds of layers whose blocks have a place for each token."""


def attention_of(spec: Any) -> Attention | None:
    """What layers of a KV cache group still read of their past; None if the kind is not known."""
    if type(spec) in _BY_TOKEN and getattr(spec, "tokens_per_state", 1) != 1:
        # A block is no row of tokens then.
        return None
    # Not subclasses: they may keep other things in a block than keys and values of its tokens.
    if type(spec) is FullAttentionSpec:
        return FULL
    if type(spec) is MLAAttentionSpec:
        return FULL if spec.page_size_padded is None else None
    if type(spec) is SlidingWindowSpec and not getattr(spec, "extra_retained_tokens", 0):
        return Attention(window=int(spec.sliding_window))
    if type(spec) is ChunkedLocalAttentionSpec:
        return Attention(local=int(spec.attention_chunk_size))
    if type(spec) is MambaSpec and spec.mamba_cache_mode == ALIGNED:
        return RECURRENT
    return None


def num_heads_of(vllm_config: Any, spec: Any) -> int:
    """KV heads of a group's layers over all ranks; hybrid models may have several counts."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    if is_recurrent(spec):
        # A rank's part of a state is one piece, whatever it is of the layer.
        return int(spec.num_heads) * tp_size
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    # Where heads are replicated the product would count them twice; that is refused.
    return total if tp_size > total else int(spec.num_kv_heads) * tp_size
