"""Model folders whose weights are a few bytes, and the configuration of an engine that has one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.multimodal import MultiModalConfig

from connector.identity.file_digests import read_all
from connector.identity.namespace import canonical_json, description_of
from connector.identity.weights import completed, folder_identity, unread_stamps


def read_now(description: Any) -> Any:
    """A description with all digests, which are read now."""
    return completed(description, read_all(list(unread_stamps(description))))


def folder_digest(folder: Path, **options: Any) -> str:
    """The digest of a model's folder as it is now."""
    digest: str = read_now(folder_identity(folder, **options))
    return digest


def namespace_of(config: Any, **options: Any) -> bytes:
    """The namespace of an engine whose weights are read now."""
    return canonical_json(read_now(description_of(config, **options)))


TENSORS = {"model.embed": 5000, "model.layers.0.q": 64, "model.layers.1.q": 3000}


def write_weights(folder: Path, *, fill: int = 1, config: str = '{"a": 1}') -> Path:
    """A model folder with one safetensors file whose tensors hold `fill` (plus their place)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for index, (name, size) in enumerate(TENSORS.items()):
        offsets = [len(data), len(data) + size]
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
        data += bytes([(fill + index) % 256]) * size
    encoded = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return folder


def config_of(folder: Path, **changes: Any) -> Any:
    """The parts of a `VllmConfig` that are read."""
    values: dict[str, Any] = {
        "model": str(folder),
        "revision": None,
        "quantization": None,
        "layers": 2,
        "kv_heads": 8,
        "cache_dtype": "auto",
        "load_format": "auto",
        "hf_overrides": {},
        "rope": {"rope_theta": 10000.0},
        "architecture": "LlamaForCausalLM",
        "model_dtype": torch.bfloat16,
        "runner": "generate",
        "max_model_len": 2048,
        "skip_layers": [],
        "media": None,
        "lora_dtype": None,
        "quantization_config": None,
        "hf_config_path": None,
        "class_overrides": {},
        **changes,
    }
    text_config = SimpleNamespace(
        rope_parameters=values["rope"],
        max_position_embeddings=2048,
        to_dict=lambda: {"rms_norm_eps": values.get("made", 0.2)},
    )
    media, lora_dtype = values["media"], values["lora_dtype"]
    model = SimpleNamespace(
        model=values["model"],
        revision=values["revision"],
        quantization=values["quantization"],
        hf_overrides=values["hf_overrides"],
        hf_config=text_config,
        hf_text_config=text_config,
        architecture=values["architecture"],
        architectures=["LlamaForCausalLM"],
        dtype=values["model_dtype"],
        runner_type=values["runner"],
        convert_type="none",
        enforce_eager=values.get("eager", False),
        max_model_len=values["max_model_len"],
        original_max_model_len=values.get("asked", values["max_model_len"]),
        get_and_verify_max_len=lambda _: 131072,
        try_get_generation_config=dict[str, Any],
        override_generation_config=values.get("generation", {}),
        quantization_config=values["quantization_config"],
        disable_sliding_window=values.get("without_window", False),
        config_format=values.get("config_format", "auto"),
        hf_config_path=values["hf_config_path"],
        model_class_overrides=values["class_overrides"],
        multimodal_config=None if media is None else MultiModalConfig(**media),
        get_total_num_hidden_layers=lambda: values["layers"],
        get_total_num_kv_heads=lambda: values["kv_heads"],
    )
    extra = {"weights_digest": values.get("weights_digest", "full")}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        model_config=model,
        cache_config=SimpleNamespace(
            cache_dtype=values["cache_dtype"], kv_cache_dtype_skip_layers=values["skip_layers"]
        ),
        load_config=SimpleNamespace(
            load_format=values["load_format"],
            model_loader_extra_config=values.get("loader", {}),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=values.get("tensors", 1),
            data_parallel_size=values.get("data_ranks", 1),
            enable_expert_parallel=values.get("by_expert", False),
        ),
        kernel_config=SimpleNamespace(
            moe_backend=values.get("moe_backend", "auto"),
            linear_backend="auto",
            linear_backend_per_quant=values.get("per_quant"),
        ),
        lora_config=lora_dtype and SimpleNamespace(lora_dtype=lora_dtype),
    )
