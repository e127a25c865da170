"""Recurrent layers (Mamba, linear attention, gated delta nets, short convolutions), their states.

Such a layer keeps a state of constant size instead of keys and values of each token. In its cache
mode `align` vLLM leaves the state at the end of a block in that block, and reports once to
connectors which it keeps, by default where prompts end and where they part; later they are found in
its prefix cache. A hit needs only the state, so a state is a chunk of one block, under a key over
all tokens before it.

A state is opaque bytes of one rank's part of the layer, whose layout only its kernels know. So it
is only copied, and only engines with the same ranks share it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.v1.kv_cache_interface import MambaSpec

from connector.identity.groups import State

ALIGNED: Final = "align"
"""The mode in which a block holds the state after its last token."""


def is_recurrent(spec: Any) -> bool:
    """Whether a KV cache group is one of recurrent layers."""
    return isinstance(spec, MambaSpec)


def mamba_unsupported_reason(vllm_config: Any, groups: Sequence[Any]) -> str:
    """Why the states of an engine's recurrent layers cannot be cached safely, or nothing."""
    specs = [group.kv_cache_spec for group in groups if is_recurrent(group.kv_cache_spec)]
    if not specs:
        return ""
    modes = {str(spec.mamba_cache_mode) for spec in specs}
    if "none" in modes:
        return (
            "its recurrent layers keep their last state alone (mamba_cache_mode='none'); "
            "start vLLM with --enable-prefix-caching"
        )
    if modes != {ALIGNED}:
        return (
            f"mamba_cache_mode={', '.join(sorted(modes))} is not supported by this release; "
            f"start vLLM with --mamba-cache-mode {ALIGNED}"
        )
    if vllm_config.speculative_config is not None or any(
        spec.num_speculative_blocks for spec in specs
    ):
        # Rejected drafts have changed the state, and vLLM swaps its blocks.
        return "speculative decoding with recurrent layers is not supported by this release"
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        return (
            f"pipeline_parallel_size={stages} with recurrent layers is not supported by this "
            "release"
        )
    # If hits can end within a block, vLLM moves states between blocks.
    sizes = {int(group.kv_cache_spec.block_size) for group in groups}
    unit = vllm_config.cache_config.prefix_match_unit
    if len(sizes) > 1 or (unit is not None and unit not in sizes):
        found = ", ".join(str(size) for size in sorted(sizes))
        return (
            f"its KV cache has blocks of {found} tokens and prefix_match_unit={unit}: with "
            "recurrent layers this release needs one size for all; leave out --prefix-match-unit "
            "and --mamba-block-size"
        )
    return ""


def state_encoding(spec: Any) -> str:
    """The kind of layer, and the machine whose kernels lay a state out."""
    kind = str(spec.mamba_type.name).lower().replace("_", "-")
    return f"state-{kind}-{_machine()}"


def _machine() -> str:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        capability: Any = current_platform.get_device_capability()
        return f"cuda-{capability.major}.{capability.minor}"
    # These choose the kernels, and so possibly the layout of a state.
    found = [
        name.replace("_", "")
        for name in ("avx512_bf16", "amx_tile")
        if getattr(torch.cpu, f"_is_{name}_supported")()
    ]
    return "-".join(["cpu", current_platform.get_cpu_architecture().name.lower(), *found])


def state_description(vllm_config: Any, spec: Any) -> dict[str, Any]:
    """What else makes the states of one model differ, for the namespace."""
    config = vllm_config.mamba_config
    return {
        "model_dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        # Shapes of one rank's part, so the number of ranks is needed too.
        "shapes": [[int(size) for size in shape] for shape in spec.shapes],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in spec.dtypes],
        "heads": int(spec.num_heads),
        "replicated": bool(spec.tp_replicated),
        "tensors": int(vllm_config.parallel_config.tensor_parallel_size),
        "backend": str(config.backend.name),
        "rounding": bool(config.enable_stochastic_rounding),
    }


def state_settings(vllm_config: Any) -> dict[str, Any]:
    """As `state_description`, for vLLM's offloading, which does not show the specs."""
    # Not at import: it reads the environment.
    from vllm.envs import VLLM_SSM_CONV_STATE_LAYOUT

    cache, config = vllm_config.cache_config, vllm_config.mamba_config
    return {
        # A convolution's inputs have as many bytes, transposed or not.
        "convolutions": VLLM_SSM_CONV_STATE_LAYOUT or "SD",
        # Each draft makes them longer, which the padding of a page hides.
        "drafts": int(vllm_config.num_speculative_tokens),
        "dtypes": [str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "mode": str(cache.mamba_cache_mode),
        "backend": str(config.backend.name),
        "rounding": bool(config.enable_stochastic_rounding),
        "machine": _machine(),
    }


def states_of(block_state: Any) -> Mapping[str, Sequence[State]]:
    """The states that vLLM reports with a step, by request.

    Their blocks hold them from the end of the step on, and are not written again. They stay only if
    a reference is taken at once.
    """
    return {} if block_state is None else block_state.boundary_state_offloads
