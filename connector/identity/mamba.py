"""Recurrent layers (Mamba, linear attention, gated delta nets, short convolutions), their states.

Such a layer keeps a state of constant size instead of keys and values of each token. In its cache
mode `align` vLLM leaves the state that a layer had at the end of a block in that block, and tells
connectors once of those that it keeps, by default where prompts end and where they part; later they
are found in its prefix cache (`stores.states_held`). A state is all that a hit needs of the layer,
so it is a chunk of one block, under a key over all tokens before it.

Owns which engines with such layers are served, and what makes states of one engine right in
another. A state is bytes here, a convolution's inputs and a matrix, of the rank's own part of the
layer, with a layout that only its kernels know. So nothing is ever made of it but a copy, and only
engines that are cut alike share it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


ALIGNED: Final = "align"
"""The mode in which a block holds the state behind its last token."""
State: TypeAlias = tuple[int, int, int]
"""A state of recurrent layers that the engine hands over: group, the block that it is in, and how
many tokens it is the state behind."""


def recurrent(spec: Any) -> bool:
    """Whether a KV cache group is one of recurrent layers."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return isinstance(spec, MambaSpec)


def mamba_unsupported_reason(vllm_config: Any, groups: Sequence[Any]) -> str:
    """Why the states of an engine's recurrent layers cannot be cached safely, or nothing."""
    specs = [group.kv_cache_spec for group in groups if recurrent(group.kv_cache_spec)]
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
        # Drafts that are rejected have changed the state, and blocks of it change places.
        return "speculative decoding with recurrent layers is not supported by this release"
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages > 1:
        return (
            f"pipeline_parallel_size={stages} with recurrent layers is not supported by this "
            "release"
        )
    # Where hits can end within a block of states, vLLM moves states of tails between blocks.
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
    """What wrote a state: the kind of layer, and the machine whose kernels lay it out."""
    kind = str(spec.mamba_type.name).lower().replace("_", "-")
    return f"state-{kind}-{_machine()}"


def _machine() -> str:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        capability: Any = current_platform.get_device_capability()
        return f"cuda-{capability.major}.{capability.minor}"
    # The kernels that are taken differ with these, and how they lay a state out may.
    flags = {
        name: bool(getattr(torch.cpu, f"_is_{name}_supported")())
        for name in ("avx512_bf16", "amx_tile")
    }
    architecture = current_platform.get_cpu_architecture().name.lower()
    found = [name.replace("_", "") for name, has in flags.items() if has]
    return "-".join(["cpu", architecture, *found])


def state_description(vllm_config: Any, spec: Any) -> dict[str, Any]:
    """What else makes states of engines of one model different, for the namespace."""
    config = vllm_config.mamba_config
    return {
        "model_dtype": str(vllm_config.model_config.dtype).removeprefix("torch."),
        # Of the part that one rank holds, so the number of ranks goes with them.
        "shapes": [[int(size) for size in shape] for shape in spec.shapes],
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in spec.dtypes],
        "heads": int(spec.num_heads),
        "replicated": bool(spec.tp_replicated),
        "tensors": int(vllm_config.parallel_config.tensor_parallel_size),
        "backend": str(config.backend.name),
        "rounding": bool(config.enable_stochastic_rounding),
    }


def state_settings(vllm_config: Any) -> dict[str, Any]:
    """The same as far as an engine's configuration tells, for one whose specs are not shown."""
    # Not at import: it reads the environment.
    from vllm.envs import VLLM_SSM_CONV_STATE_LAYOUT

    cache, config = vllm_config.cache_config, vllm_config.mamba_config
    return {
        # Transposed or not, a convolution's inputs are as many bytes.
        "convolutions": VLLM_SSM_CONV_STATE_LAYOUT or "SD",
        # Each makes them longer, which the padding of a page hides, whatever drafts.
        "drafts": int(vllm_config.num_speculative_tokens),
        "dtypes": [str(cache.mamba_cache_dtype), str(cache.mamba_ssm_cache_dtype)],
        "mode": str(cache.mamba_cache_mode),
        "backend": str(config.backend.name),
        "rounding": bool(config.enable_stochastic_rounding),
        "machine": _machine(),
    }


def states_of(block_state: Any) -> Mapping[str, Sequence[State]]:
    """What vLLM hands over with a step, by request.

    These blocks hold their states from the end of the step on, and are not written again; they are
    kept only if a reference is taken at once.
    """
    handed: Mapping[str, Sequence[State]] = (
        {} if block_state is None else block_state.boundary_state_offloads
    )
    return handed
