"""What vLLM is told: a model's folder, a configuration, the specs of its KV cache, requests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.multimodal import MultiModalConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.request import Request

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS

init_none_hash(sha256)
_hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)


def write_model(folder: Path) -> Path:
    """A model folder whose weights nobody loads: enough for a configuration."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Nothing loads them here; they are what the model is known by.
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def vllm_config(
    model: Path,
    *,
    num_blocks: int = 256,
    ranks: int = 1,
    stages: int = 1,
    batch_tokens: int = 512,
    max_seqs: int = 16,
    kv_role: str = "kv_both",
    prefix_caching: bool = True,
    policy: str = "fcfs",
    others: Sequence[str] = (),
    failure_policy: str = "recompute",
    speculative: dict[str, Any] | None = None,
    media_cache_gb: float | None = None,
    adapters: dict[str, Any] | None = None,
    **extra: Any,
) -> VllmConfig:
    """A real configuration of a CPU engine with our connector.

    With `others`, classes of `tests.connector.others`, ours is the first in a `MultiConnector`,
    which is given `failure_policy`. `speculative` is what a user gives as `--speculative-config`.
    With `media_cache_gb` the model is said to take images, and that is `--mm-processor-cache-gb`.
    `adapters` are fields of a `LoRAConfig`.
    """
    transfer: dict[str, Any] = {
        "kv_connector": "KVLakeConnector",
        "kv_connector_module_path": "connector.vllm",
        "kv_role": kv_role,
        "kv_connector_extra_config": {
            "socket": "/nonexistent",
            "attach_seconds": 0,
            "chunk_tokens": CHUNK_TOKENS,
            "load_tokens_min": BLOCK_TOKENS,
            **extra,
        },
    }
    if others:
        place = {"kv_connector_module_path": "tests.connector.others", "kv_role": kv_role}
        children = [transfer, *({"kv_connector": name, **place} for name in others)]
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": failure_policy,
            "kv_connector_extra_config": {"connectors": children},
        }
    model_config = ModelConfig(
        model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048
    )
    parallel_config = ParallelConfig(
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        distributed_executor_backend="mp" if ranks * stages > 1 else None,
    )
    config = VllmConfig(
        model_config=model_config,
        cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=batch_tokens,
            max_num_seqs=max_seqs,
            max_model_len=2048,
            is_encoder_decoder=False,
            async_scheduling=False,
            policy=cast("Any", policy),
        ),
        parallel_config=parallel_config,
        speculative_config=SpeculativeConfig(
            target_model_config=model_config,
            target_parallel_config=parallel_config,
            **speculative,
        )
        if speculative
        else None,
        kv_transfer_config=KVTransferConfig(**transfer),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    if media_cache_gb is not None:
        model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=media_cache_gb)
    if adapters is not None:
        config.lora_config = LoRAConfig(lora_dtype=model_config.dtype, **adapters)
    return config


def spec_of(
    kind: type[AttentionSpec] = FullAttentionSpec, block_tokens: int = BLOCK_TOKENS, **own: Any
) -> AttentionSpec:
    """A group's spec of a rank that has one KV head."""
    return kind(block_size=block_tokens, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, **own)


def state_of(block_tokens: int = BLOCK_TOKENS, **own: Any) -> MambaSpec:
    """A group's spec of recurrent layers."""
    shapes, dtypes = ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32)
    mode = {"mamba_cache_mode": "align"}
    return MambaSpec(block_size=block_tokens, shapes=shapes, dtypes=dtypes, **(mode | own))


def kv_cache_config(
    num_blocks: int = 256,
    ranks: int = 1,
    specs: Sequence[KVCacheSpec] = (),
    stages: int = 1,
    *,
    retention: int | None = None,
) -> KVCacheConfig:
    """One group of full attention, or one of each spec; of blocks with different tokens too.

    With several stages: as the first sees it. `retention` is `--prefix-cache-retention-interval`:
    None for states wherever a step ends, 0 (vLLM's default) where prompts end and part.
    """
    groups = [
        KVCacheGroupSpec([f"layer.{number}.0", f"layer.{number}.1"], spec)
        for number, spec in enumerate(specs)
    ]
    spec = replace(spec_of(), num_kv_heads=2 // ranks)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=groups or [KVCacheGroupSpec(["layer.0", "layer.1"][: 2 // stages], spec)],
        prefix_cache_retention_interval=retention,
    )


def request_of(
    request_id: str,
    tokens: list[int],
    *,
    max_tokens: int = 4,
    salt: str | None = None,
    **fields: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(
        request_id, tokens, params, None, cache_salt=salt, block_hasher=_hasher, **fields
    )
