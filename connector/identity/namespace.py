"""The namespace: what must be equal for KV bytes of one engine to be right in another.

Owns the reading of vLLM's configuration into a small JSON object, the description. Equal JSON means
equal bytes for equal tokens, so anything that could change the bytes is in it. It is put together
from the identity of the weights (`weights.py`), further settings, the geometry of a KV cache group,
and the encoding of its values. LoRA adapters are part of keys instead (`adapters.py`). Tokens per
block are in it only if blocks of one size cannot be made of blocks of another
(`tiers/kv/layout.py`).

A seldom setting (how images are encoded, what a model is run as) that is not given is not in it, so
engines without it share with those of earlier versions of kvlake. Settings that change only
rounding (kernels, attention backends of encoders) are left out on purpose, as the number of ranks
is.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from vllm.v1.kv_cache_interface import MLAAttentionSpec

from connector.identity.mamba import is_recurrent, state_description, state_encoding, state_settings
from connector.identity.weights import downloaded_folder, model_identity, settings_digest
from connector.options import samples_weights
from sidecar.protocol import MODEL_CHARACTERS_MAX
from tiers.kv.layout import BY_TOKEN, regroups

MEDIA_SETTINGS: Final = (
    "mm_processor_kwargs",
    "media_io_kwargs",
    "video_pruning_rate",
    "mm_encoder_attn_dtype",
)
MODEL_SETTINGS: Final = (
    "quantization_config",
    "code_revision",
    "model_class_overrides",
    # Such an engine may take longer prompts than the window, and then without it.
    "disable_sliding_window",
)
KERNEL_SETTINGS: Final = ("moe_backend", "linear_backend", "linear_backend_per_quant")
ADAPTER_SETTINGS: Final = (
    "target_modules",
    "enable_moe_shared_loras",
    "enable_mixed_moe_lora_format",
    "enable_tower_connector_lora",
)
_QUANTIZATION_VARIABLES: Final = {
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": "",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": "",
    "VLLM_MARLIN_INPUT_DTYPE": "",
    "VLLM_B12X_MOE_FP4_FORCE_A16": "0",
    "VLLM_CPU_INT4_W4A8": "1",
}
"""Weights or activations of another precision than the model's own settings say.

With what vLLM takes each for if it is not set.
"""
_KERNEL_VARIABLES: Final = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_MOE_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "1",
    "VLLM_DISABLED_KERNELS": "",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": "0",
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": "0",
}
"""The same of quantized models: some kernels quantize their weights again, or activations, too."""
LLAMA4_TUNED_FROM: Final = 32_768
"""Beyond this `max_model_len` Llama 4 scales its queries, unless told otherwise."""
_CUDA_BACKENDS_BY_TOKEN: Final = {
    *("auto", "FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN"),
    *("CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TRITON_MLA"),
}
_CACHE_DTYPES_BY_TOKEN: Final = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
_DTYPES_BY_TOKEN: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
"""With these the CUDA backends above keep K and V of a token side by side, scales elsewhere."""


def description_of(
    vllm_config: Any,
    *,
    block_tokens: int,
    blocks_per_chunk: int,
    spec: Any,
    layer_names: Sequence[str] = (),
    kv_heads: int = 0,
    drafter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The namespace of an engine's KV cache group, which `canonical_json` writes once `completed`.

    Head counts come from the model and not from the group's `spec`, so that ranks of a
    tensor-parallel engine agree. For recurrent layers the spec describes a rank's part, so engines
    with another `tensor_parallel_size` share no states. `layer_names` and `kv_heads`, over all
    ranks, are given if the engine has several groups; `drafter` if it has layers in the KV cache.

    Raises:
        WeightsUnknown: nothing tells the weights from others.
        OSError: the model's files are there and cannot be read.
    """
    model = vllm_config.model_config
    encoding = encoding_of(vllm_config, block_tokens, spec)
    description = _of_model(vllm_config) | {
        "format": 2,
        "layers": int(model.get_total_num_hidden_layers()),
        "chunk_tokens": block_tokens * blocks_per_chunk,
        "encoding": encoding,
    }
    if is_recurrent(spec):
        description |= {
            "block_tokens": block_tokens,
            "state": state_description(vllm_config, spec),
            "group": list(layer_names),
        }
        return description
    kv_dtype = str(spec.dtype).removeprefix("torch.")
    description |= {
        "kv_dtype": kv_dtype,
        "kv_heads": 1
        if isinstance(spec, MLAAttentionSpec)
        else int(model.get_total_num_kv_heads()),
        "head_size": [int(spec.head_size), int(getattr(spec, "head_size_v", spec.head_size))],
    }
    if not regroups(encoding, kv_dtype):
        description["block_tokens"] = block_tokens
    if layer_names:
        description |= {"group": list(layer_names), "kv_heads": kv_heads}
    if drafter:
        description["drafter"] = dict(drafter)
    return description


def served_as(model: str, name: str) -> str:
    """A name to display for a model in a folder, no identity; empty for a hub model."""
    if not Path(model).exists():
        return ""
    return "".join(one if one.isprintable() else "?" for one in name[-MODEL_CHARACTERS_MAX:])


def canonical_json(description: dict[str, Any]) -> bytes:
    """The bytes of a namespace (UTF-8, sorted keys): equal for equal descriptions."""
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def offloading_identity(vllm_config: Any, block_tokens: int) -> dict[str, Any]:
    """What the bytes depend on and vLLM's offloading interface does not tell.

    To be `completed`, and raises, as `description_of`.
    """
    model = vllm_config.model_config
    values = SimpleNamespace(dtype=model.dtype, head_size=int(model.get_head_size()))
    identity = _of_model(vllm_config) | {
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "encoding": encoding_of(vllm_config, block_tokens, values),
        # vLLM makes its block hashes with it, which are part of the keys.
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
    }
    if model.has_inner_state:
        # vLLM tells only how many bytes the states in the engine's blocks have.
        identity["states"] = state_settings(vllm_config)
    if adapters := adapter_settings(vllm_config):
        # The keys are vLLM's, which name an adapter but not how it is applied.
        identity["adapters"] = adapters
    return identity


def _of_model(vllm_config: Any) -> dict[str, Any]:
    """The model and how it is run, for all of its KV cache groups."""
    model = vllm_config.model_config
    hf_config = model.hf_text_config
    load_format = str(vllm_config.load_config.load_format)
    return {
        "model": model_identity(
            model,
            load_format,
            streamed_from=_streamed_from(vllm_config),
            sampled=samples_weights(vllm_config),
        ),
        # Random weights: their KV must never be taken for the model's.
        "dummy_weights": load_format == "dummy",
        "hf_overrides": overrides_of(model),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "rope": plain(getattr(hf_config, "rope_parameters", None)),
        "quantization": str(model.quantization),
        "max_position_embeddings": getattr(hf_config, "max_position_embeddings", None),
    } | engine_settings(vllm_config)


def _streamed_from(vllm_config: Any) -> str:
    """Where the weights are, if not in the model's folder."""
    model, load = vllm_config.model_config, vllm_config.load_config
    if str(load.load_format) == "tensorizer":
        extra: dict[str, Any] = load.model_loader_extra_config
        given = extra | (extra.get("tensorizer_config") or {})
        place = given.get("tensorizer_uri") or given.get("tensorizer_dir")
        if place and place != model.model:
            return str(place)
    return str(getattr(model, "model_weights", "") or "")


def digest_of(namespace: bytes) -> bytes:
    """The 32 bytes of a namespace in keys and object names."""
    return hashlib.sha256(namespace).digest()


def encoding_of(vllm_config: Any, block_tokens: int, spec: Any) -> str:
    """How values lie inside a (block, head), which depends on the attention kernels."""
    from vllm.platforms import current_platform

    if is_recurrent(spec):
        return state_encoding(spec)
    if current_platform.is_cuda():
        # These decide which backend serves, and so how it packs K and V.
        capability: Any = current_platform.get_device_capability()
        attention = vllm_config.attention_config
        backend = getattr(attention.backend, "name", "auto")
        encoding = f"cuda-{capability.major}.{capability.minor}-{backend}"
        kinds = {
            str(kind): str(getattr(one, "name", one))
            for kind, one in attention.backend_per_kind.items()
        }
        encoding += "".join(f"-{kind}={kinds[kind]}" for kind in sorted(kinds))
        by_token = (
            {backend, *kinds.values()} <= _CUDA_BACKENDS_BY_TOKEN
            and str(vllm_config.cache_config.cache_dtype) in _CACHE_DTYPES_BY_TOKEN
            and str(spec.dtype).removeprefix("torch.") in _DTYPES_BY_TOKEN
        )
        return encoding + BY_TOKEN * by_token
    architecture = current_platform.get_cpu_architecture().name.lower()
    if isinstance(spec, MLAAttentionSpec):
        # Both CPU backends for MLA store the latent vector of a token unchanged.
        return f"cpu-{architecture}-mla{BY_TOKEN}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # pyright: ignore[reportPrivateUsage]

    # As the backend does: by the model's dtype, also where the cache has another one.
    dtype, cache_dtype = vllm_config.model_config.dtype, str(vllm_config.cache_config.cache_dtype)
    isa = _get_attn_isa(dtype, block_tokens, spec.head_size, cache_dtype)
    # Up to 0.2.0, engines with an FP8 cache named it by the cache's dtype, and so wrongly.
    return f"cpu-{architecture}-{isa}" + "-fp8" * cache_dtype.startswith("fp8")


# --- settings beyond weights, dtypes and geometry ---------------------------------------------


def engine_settings(vllm_config: Any) -> dict[str, Any]:
    """The settings that KV depends on, if given.

    Raises:
        WeightsUnknown: the configuration is of a hub's repository, which may change.
        OSError: a file that one names cannot be read.
    """
    # Not at import: it reads the environment.
    from vllm import __version__ as release
    from vllm.envs import VLLM_BATCH_INVARIANT

    model = vllm_config.model_config
    description = _given(model, MODEL_SETTINGS)
    if model.hf_config_path:
        folder = Path(model.hf_config_path)
        if not folder.is_dir():
            folder = downloaded_folder(model.hf_config_path)
        # The model's own code may be in it, too.
        description["hf_config_path"] = [settings_digest(folder)]
    if model.runner_type != "generate":
        description["runner"] = [str(model.runner_type), str(model.convert_type)]
    if model.architecture not in model.architectures:
        # For example Transformers' own classes in place of vLLM's.
        description["architecture"] = str(model.architecture)
    if kernels := _kernel_settings(vllm_config):
        description["kernels"] = kernels
    if files := _quantization_files(model):
        description["quantization_files"] = files
    cache = vllm_config.cache_config
    if cache.cache_dtype != "auto":
        # With "auto" it is the dtype of the cache.
        description["dtype"] = str(model.dtype).removeprefix("torch.")
    if cache.kv_cache_dtype_skip_layers:
        description["unquantized_layers"] = sorted(cache.kv_cache_dtype_skip_layers)
    if model.architecture.startswith("Llama4"):
        description["attn_temperature_tuning"] = _tunes_temperature(model)
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
    if model.multimodal_config:
        description |= _of_media(model)
    return description


def _kernel_settings(vllm_config: Any) -> dict[str, Any]:
    """How kernels of a quantized model are chosen: some quantize its weights again, or more."""
    if vllm_config.model_config.quantization is None:
        return {}
    given = _given(getattr(vllm_config, "kernel_config", None), KERNEL_SETTINGS)
    return {name: value for name, value in given.items() if value != "auto"}


def _of_media(model: Any) -> dict[str, Any]:
    """The same of a model that takes images, audio or video."""
    description: dict[str, Any] = {}
    if media := media_settings(model.multimodal_config):
        description["media"] = media
    if model.config_format != "auto":
        # Mistral's own processor and Hugging Face's make other pixels of an image.
        description["config_format"] = str(model.config_format)
    return description


def _quantization_files(model: Any) -> dict[str, str]:
    """Digests of quantization settings that are neither in the model nor in its options."""
    variables = _QUANTIZATION_VARIABLES
    if model.quantization is not None:
        variables = variables | _KERNEL_VARIABLES
    given = {
        name: text
        for name, default in variables.items()
        if (text := os.environ.get(name, default)) != default
    }
    if isinstance(model.hf_overrides, dict):
        overrides = cast("dict[str, Any]", model.hf_overrides)
        given["torchao"] = str(overrides.get("quantization_config_file") or "")
    return {
        name: hashlib.sha256(_content_or_text(text)).hexdigest()
        for name, text in given.items()
        if text
    }


def _content_or_text(text: str) -> bytes:
    """What the file of this path holds, or the text itself if it is none: JSON, as vLLM takes."""
    try:
        return Path(text).read_bytes()
    except OSError:
        return text.encode()


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

    vLLM's hash of an image covers only what its request says of this.
    """
    description = _given(multimodal_config, MEDIA_SETTINGS)
    if "video_pruning_rate" in description:
        method = getattr(multimodal_config, "video_pruning_method", "evs")
        description["video_pruning_method"] = str(method)
    if scales := multimodal_config.mm_encoder_fp8_scale_path:
        description["encoder_scales"] = hashlib.sha256(Path(scales).read_bytes()).hexdigest()
    return description


def rope_parameters_of(model: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of the model, or of each kind of its layers."""
    parameters: Mapping[str, Any] = getattr(model.hf_text_config, "rope_parameters", None) or {}
    for one in (parameters, *parameters.values()):
        if isinstance(one, dict) and "rope_type" in one:
            yield one


def long_rope(model: Any) -> bool | None:
    """Whether a LongRoPE model uses its long factors, by its length; None for other models."""
    for one in rope_parameters_of(model):
        if one["rope_type"] == "longrope":
            return _length_of_layers(model) > int(one["original_max_position_embeddings"])
    return None


def _tunes_temperature(model: Any) -> bool:
    """Whether Llama 4 scales queries by position, by the length its layers were made for.

    As `Llama4ForCausalLM` of vLLM decides it: what a generation configuration says goes first.
    """
    given = model.try_get_generation_config() | (model.override_generation_config or {})
    tunes = _length_of_layers(model) > LLAMA4_TUNED_FROM
    return bool(given.get("attn_temperature_tuning", tunes))


def _length_of_layers(model: Any) -> int:
    """The `max_model_len` that layers were made for: vLLM fits -1 to the memory later."""
    if model.original_max_model_len == -1:
        return int(model.get_and_verify_max_len(-1))
    return int(model.max_model_len)


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
