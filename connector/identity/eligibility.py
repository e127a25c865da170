"""Which engines are cached: what is known of each kind of KV cache group, and what is refused.

An engine that cannot be cached safely is served without the cache, never wrongly; the reason is one
line in vLLM's log. Each role asks for itself, of vLLM's configuration alone; a worker that is shown
more of it than the scheduler tells it with its first step.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, Any, Final

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
from connector.identity.mamba import ALIGNED, mamba_unsupported_reason, recurrent
from connector.identity.nodes import nodes_refusal
from connector.identity.parallelism import ParallelLayout, Place
from connector.identity.speculative import WITHOUT_LAYERS, speculation_unsupported_reason
from sidecar.protocol import GROUPS_MAX
from tiers.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

SLEEP_IS_TOLD: Final = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""Whether this vLLM tells a connector before its memory goes; see `SleepMode`."""
_VARIANT_FROM_A_PREFIX: Final = ("FLASHINFER", "TRITON_MLA")
"""Backends with which vLLM turns its prefix caching off where it is to be batch invariant."""


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine cannot be cached safely, or nothing."""
    # Not at import: vLLM imports this module in its front end, which must not pick a platform.
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        return f"platform {current_platform.device_type!r} is not supported by this release"
    if vllm_config.model_config.enable_sleep_mode and not SLEEP_IS_TOLD:
        # Asleep, its memory goes, and what the sidecar mapped would no longer be the cache.
        return (
            "enable_sleep_mode is supported with vLLM 0.33 or later, which tells when memory goes"
        )
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    reason = faults_refusal(vllm_config) or nodes_refusal(vllm_config)
    reason = reason or mamba_unsupported_reason(vllm_config, groups)
    if reason or (reason := speculation_unsupported_reason(vllm_config)):
        return reason
    unknown = {
        type(group.kv_cache_spec).__name__
        for group in groups
        if attention_of(group.kv_cache_spec) is None
        or not getattr(group, "enable_kv_transfer", True)
    }
    if unknown or not 0 < len(groups) <= GROUPS_MAX:
        kinds = f", {', '.join(sorted(unknown))} among them" if unknown else ""
        return (
            f"its KV cache is of {len(groups)} groups{kinds}; this release knows full, "
            "sliding-window and chunked local attention, and recurrent layers"
        )
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if reason := prefix_refusal(vllm_config, specs):
        return reason
    if parallel.pipeline_parallel_size > 1 and len(groups) > 1:
        # A stage is shown its own layers of a group only, so which of the group's these are is
        # not known to it, nor what the group is to be called.
        return (
            f"pipeline_parallel_size={parallel.pipeline_parallel_size} is not supported by this "
            f"release for a KV cache of {len(groups)} groups"
        )
    for name in (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) > 1:
            return f"{name}={getattr(parallel, name)} is not supported by this release"
    latent = [isinstance(group.kv_cache_spec, MLAAttentionSpec) for group in groups]
    if any(latent) and len(groups) > 1:
        return "MLA beside groups of other kinds is not supported by this release"
    cut = cut_of(vllm_config)
    for group in groups:
        spec = group.kv_cache_spec
        # A worker is shown its own stage's layers, and asks for its own place when it shares them.
        place = Place(cut.stage_of(group.layer_names))
        num_heads = num_heads_of(vllm_config, spec)
        try:
            cut.segment(group.layer_names, num_heads, place, latent=any(latent))
        except LayoutError as error:
            return str(error)
    return ""


def chunk_refusal(chunk_tokens: int, block_sizes: Iterable[int], told: str) -> str:
    """Why chunks of so many tokens do not fit blocks of these sizes, or nothing.

    `told` is the setting with its value, as the operator gave it.
    """
    sizes = sorted(set(block_sizes))
    step = lcm(*sizes)
    if chunk_tokens % step == 0:
        return ""
    fitting = {chunk_tokens // step * step, whole_blocks(chunk_tokens, sizes)} - {0}
    blocks = " and ".join(map(str, sizes))
    return (
        f"{told} is not a multiple of the engine's block size, {blocks}; choose "
        f"{' or '.join(map(str, sorted(fitting)))}, or leave it out"
    )


def prefix_refusal(vllm_config: Any, specs: Iterable[Any]) -> str:
    """Why an engine cannot go on from the KV of a prefix, or nothing.

    vLLM turns its own prefix caching off then, and hands a connector the requests all the same.
    `specs` are those of the single layers.
    """
    # Not at import: vLLM imports this module in its front end, which must not pick a platform.
    from vllm.envs import VLLM_BATCH_INVARIANT
    from vllm.platforms import CpuArchEnum, current_platform

    specs = list(specs)
    model = vllm_config.model_config
    if current_platform.is_cpu():
        if current_platform.get_cpu_architecture() == CpuArchEnum.RISCV:
            return "vLLM's attention cannot go on from a cached prefix on RISC-V"
        latent = any(isinstance(spec, MLAAttentionSpec) for spec in specs)
        if latent and not vllm_config.scheduler_config.enable_chunked_prefill:
            # Its reference backend attends to the tokens of the step only.
            return "its MLA backend cannot go on from a cached prefix"
    if any(hasattr(spec, "rswa_window") for spec in specs):
        return (
            "its generated tokens are read through a window and its prompts as a whole (R-SWA), so "
            "that what was generated is no prefix of a prompt"
        )
    if any(getattr(spec, "non_causal", False) for spec in specs):
        return (
            "its prompts are attended to as a whole (Prefix-LM), so that the KV of a prefix is "
            "another one in each prompt"
        )
    if model.pooler_config is not None and not model.is_prefix_caching_supported:
        pooler = model.pooler_config
        return (
            f"with {pooler.seq_pooling_type}/{pooler.tok_pooling_type} pooling it needs what it "
            "computed of a whole prompt in one step"
        )
    if vllm_config.aux_output_config.enabled:
        return (
            "with enable_return_routed_experts each answer says which experts its tokens went "
            "through, which is not known of tokens that were loaded"
        )
    if model.is_diffusion:
        return (
            "it is a diffusion model, which may give out tokens before it has computed their KV "
            "for good"
        )
    if not VLLM_BATCH_INVARIANT:
        return ""
    backend = getattr(vllm_config.attention_config.backend, "name", "")
    caching = vllm_config.cache_config.enable_prefix_caching
    if backend in _VARIANT_FROM_A_PREFIX or not (backend or caching):
        # Which backend "auto" came to mean is said nowhere, but that it turned caching off is.
        return (
            "with VLLM_BATCH_INVARIANT=1 vLLM goes on from no cached prefix where the backend is "
            f"{' or '.join(_VARIANT_FROM_A_PREFIX)}, which this engine has, or no prefix caching; "
            "name another with --attention-backend"
        )
    return ""


def media_refusal(vllm_config: Any) -> str:
    """Why requests with images, audio or video cannot be cached, or nothing."""
    media = vllm_config.model_config.multimodal_config
    if (
        media is None
        or media.mm_processor_cache_gb > 0
        or vllm_config.cache_config.enable_prefix_caching
    ):
        return ""
    # vLLM needs no hash of them then, and makes none: `_process_mm_uuids` of its renderer.
    return (
        "with --mm-processor-cache-gb 0 and without prefix caching vLLM does not hash them, and "
        "calls them by numbers that begin anew with each process; leave one of the two on"
    )


def attention_of(spec: Any) -> Attention | None:
    """What layers of a KV cache group still read of their past; None of a kind not known here."""
    # Not subclasses: they may keep other things in a block than keys and values of its tokens.
    if type(spec) is FullAttentionSpec:
        return FULL
    if type(spec) is MLAAttentionSpec:
        # With several tokens in one state a block is no row of tokens.
        return FULL if spec.tokens_per_state == 1 and spec.page_size_padded is None else None
    if type(spec) is SlidingWindowSpec and not getattr(spec, "extra_retained_tokens", 0):
        return Attention(window=int(spec.sliding_window))
    if type(spec) is ChunkedLocalAttentionSpec:
        return Attention(local=int(spec.attention_chunk_size))
    if type(spec) is MambaSpec and spec.mamba_cache_mode == ALIGNED:
        return RECURRENT
    return None


def cut_of(vllm_config: Any) -> ParallelLayout:
    """How an engine cuts its model over ranks."""
    parallel = vllm_config.parallel_config
    return ParallelLayout(
        stages=int(parallel.pipeline_parallel_size),
        tensors=int(parallel.tensor_parallel_size),
        num_layers=int(vllm_config.model_config.get_total_num_hidden_layers()),
    )


def rows_refusal(vllm_config: Any, num_groups: int) -> str:
    """Why vLLM's host tier would mix up what an engine's workers put into it, or nothing.

    Each worker takes a row to be as many times its own part as there are workers. So all of them
    must have parts of the same size: each would find the rows somewhere else, and overwrite those
    of others.
    """
    cut = cut_of(vllm_config)
    if cut.stages == 1:
        return ""
    if num_groups > 1:
        return (
            f"pipeline_parallel_size={cut.stages} is not supported by this release for a KV cache "
            f"of {num_groups} groups"
        )
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and str(speculative.method) not in WITHOUT_LAYERS
    if drafts or not cut.is_even:
        return (
            "its pipeline stages hold different numbers of layers, and vLLM's host tier takes "
            "them to be alike"
        )
    return ""


def chunks_refusal(vllm_config: Any, specs: Iterable[Any], blocks_per_chunk: int) -> str:
    """Why vLLM's host tier would have chunks that were written in part only, or nothing.

    Up to vLLM 0.32, of a chunk of several blocks it looks at the last one alone: the others may
    have left a sliding window, or the attention chunk. `specs` are those of the single layers.
    """
    if blocks_per_chunk == 1 or SLEEP_IS_TOLD:
        return ""
    specs = list(specs)
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and any(
        isinstance(spec, FullAttentionSpec) for spec in specs
    ):
        # All of them are kept as full attention is.
        return ""
    if not any(
        isinstance(spec, SlidingWindowSpec)
        or (
            isinstance(spec, ChunkedLocalAttentionSpec)
            and spec.attention_chunk_size % (spec.block_size * blocks_per_chunk)
        )
        for spec in specs
    ):
        return ""
    return (
        f"it has local attention, and chunks of {blocks_per_chunk} blocks, of which vLLM before "
        "0.33 stores some in part: leave out block_size and blocks_per_chunk, which makes each "
        "block a chunk"
    )


def tails_refusal(vllm_config: Any, specs: Iterable[Any], block_tokens: int) -> str:
    """Why vLLM's offloading cannot have another tier below its own, or nothing.

    Hits within a block of recurrent layers it looks up behind what it has found already, and loads
    that though what it carries for them may have pushed it out. `specs` are those of the single
    layers, `block_tokens` the tokens of a block of theirs.
    """
    unit = vllm_config.cache_config.prefix_match_unit
    if unit is None or unit >= block_tokens or not any(recurrent(spec) for spec in specs):
        return ""
    return (
        f"prefix_match_unit={unit} with recurrent layers and blocks of {block_tokens} tokens is "
        "not supported by this release; leave out --prefix-match-unit"
    )


def faults_refusal(vllm_config: Any) -> str:
    """Why an engine that goes on after a step that failed cannot be served, or nothing."""
    if not vllm_config.parallel_config.enable_fault_tolerance:
        return ""
    # A step that fails on one rank takes along what it had to tell.
    return (
        "enable_fault_tolerance is not supported by this release: what a rank has to report of "
        "loads and stores may be lost with a step that failed"
    )


def num_heads_of(vllm_config: Any, spec: Any) -> int:
    """KV heads of a group's layers over all ranks; hybrid models may have several counts."""
    if isinstance(spec, MLAAttentionSpec):
        return 1
    if recurrent(spec):
        # A rank's part of a state is one piece, whatever it is of the layer.
        return int(spec.num_heads) * int(vllm_config.parallel_config.tensor_parallel_size)
    total = int(vllm_config.model_config.get_total_num_kv_heads())
    tp_size = int(vllm_config.parallel_config.tensor_parallel_size)
    # Where heads are replicated the product would count them twice; that is refused.
    return total if tp_size > total else int(spec.num_kv_heads) * tp_size
