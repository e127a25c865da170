"""Settings of vLLM beyond weights, dtypes and geometry that change the KV of equal tokens.

Owns settings that are seldom given: how images are prepared and encoded, what a model is run as,
which of its positions are scaled. A setting that is not given is not in the description, so engines
without it share with those of earlier versions of kvlake. Settings that change only rounding
(kernels, attention backends of encoders) are left out on purpose, as the number of ranks is.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from connector.identity.weights import settings_digest

if TYPE_CHECKING:
    from collections.abc import Mapping

MEDIA_SETTINGS: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_dtype",
)
MODEL_SETTINGS: Final = ("quantization_config", "code_revision", "model_class_overrides")
ADAPTER_SETTINGS: Final = (
    "target_modules",
    "enable_moe_shared_loras",
    "enable_mixed_moe_lora_format",
    "enable_tower_connector_lora",
)


def engine_settings(vllm_config: Any) -> dict[str, Any]:
    """The settings that KV depends on, if given. Raises `OSError` for a file that one names."""
    # Not at import: it reads the environment.
    from vllm import __version__ as release
    from vllm.envs import VLLM_BATCH_INVARIANT

    model = vllm_config.model_config
    description = _given(model, MODEL_SETTINGS)
    if model.hf_config_path:
        config = Path(model.hf_config_path) / "config.json"
        commit = str(getattr(model.hf_config, "_commit_hash", None) or "")
        # The model's own code may be beside it.
        description["hf_config_path"] = (
            [settings_digest(config.parent)] if config.is_file() else [model.hf_config_path, commit]
        )
    if model.runner_type != "generate":
        description["runner"] = [str(model.runner_type), str(model.convert_type)]
    if model.architecture not in model.architectures:
        # For example Transformers' own classes in place of vLLM's.
        description["architecture"] = str(model.architecture)
    cache = vllm_config.cache_config
    if cache.cache_dtype != "auto":
        # With "auto" it is the dtype of the cache.
        description["dtype"] = str(model.dtype).removeprefix("torch.")
    if cache.kv_cache_dtype_skip_layers:
        description["unquantized_layers"] = sorted(cache.kv_cache_dtype_skip_layers)
    if (long := long_rope(model)) is not None:
        description["long_rope"] = long
    if vllm_config.lora_config is not None and vllm_config.lora_config.lora_dtype != model.dtype:
        description["lora_dtype"] = str(vllm_config.lora_config.lora_dtype)
    if VLLM_BATCH_INVARIANT:
        # It promises equal bits, which depend on kernels and on sums over ranks.
        parallel = vllm_config.parallel_config
        tensors = int(parallel.tensor_parallel_size)
        # Experts are divided over all ranks that run in step. Data-parallel ranks of a dense model
        # are independent, and have a data_parallel_size of 1.
        ranks = int(parallel.data_parallel_size) * tensors
        description["batch_invariant"] = {
            "tensors": tensors,
            "experts": [ranks, ranks > 1 and bool(parallel.enable_expert_parallel)],
            "release": release,
            "eager": bool(model.enforce_eager),
        }
    if model.multimodal_config and (media := media_settings(model.multimodal_config)):
        description["media"] = media
    return description


def adapter_settings(vllm_config: Any) -> dict[str, Any]:
    """How LoRA adapters are applied. Part of the keys of their requests only."""
    description = _given(vllm_config.lora_config, ADAPTER_SETTINGS)
    if "target_modules" in description:
        description["target_modules"].sort()
    if vllm_config.lora_config is not None and vllm_config.model_config.multimodal_config:
        # vLLM before 0.33 applies nothing of an adapter that was made for the text part alone.
        from vllm.lora.model_manager import LoRAModelManager

        if hasattr(LoRAModelManager, "_get_text_lora_names"):
            description["text_names"] = True
    return description


def media_settings(multimodal_config: Any) -> dict[str, Any]:
    """How images, audio and video are prepared and encoded. Raises `OSError` for unread scales.

    vLLM's hash of an image covers what its request says of this, not what the engine was given.
    """
    description = _given(multimodal_config, MEDIA_SETTINGS)
    if "video_pruning_rate" in description:
        method = getattr(multimodal_config, "video_pruning_method", "evs")
        description["video_pruning_method"] = str(method)
    if scales := multimodal_config.mm_encoder_fp8_scale_path:
        description["encoder_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return description


def long_rope(model: Any) -> bool | None:
    """Whether a LongRoPE model uses its long factors, by `max_model_len`; None for other models."""
    parameters: Mapping[str, Any] = getattr(model.hf_text_config, "rope_parameters", None) or {}
    # Either for the model, or for each kind of layer.
    for one in (parameters, *parameters.values()):
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            return int(model.max_model_len) > int(one["original_max_position_embeddings"])
    return None


def overrides_of(model: Any) -> Any:
    """`hf_overrides`; of a function, the whole configuration that it made."""
    if callable(model.hf_overrides):
        return {"made": plain(model.hf_config.to_dict())}
    return plain(model.hf_overrides)


def _given(config: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: plain(value) for name in names if (value := getattr(config, name, None))}


def plain(value: Any) -> Any:
    """A JSON-able copy of a configuration value; what JSON cannot hold becomes its repr."""
    return json.loads(json.dumps(value, sort_keys=True, default=repr))
