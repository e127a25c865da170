"""The namespace: what must be equal for KV bytes of one engine to be right in another.

Owns the reading of vLLM's configuration into a small JSON object. Equal JSON, equal bytes for
equal tokens; anything that could change the bytes is in it. Where the model is a folder, its
weights are identified by what the files hold (`config.json`, and of each safetensors file the
header and a sample of every tensor), not by the folder's name, so that the same model under two
paths is shared and two fine-tunes under one path are not. Tokens per block are in it only where
blocks of one size cannot be made of others (`tiers/packing.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from connector.processing import overrides_of, plain, processing_of
from connector.recurrent import recurrent, state_description, state_encoding
from tiers.packing import BY_TOKEN, regroups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SAMPLE_BYTES: Final = 1024
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.tensors")
_HEADER_BYTES_MAX: Final = 100 * 1024 * 1024

_CUDA_BACKENDS_BY_TOKEN: Final = (
    "auto",
    "FLASH_ATTN",
    "FLASHINFER",
    "FLEX_ATTENTION",
    "TRITON_ATTN",
    "CUTLASS_MLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "TRITON_MLA",
)
_CACHE_DTYPES_BY_TOKEN: Final = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
_DTYPES_BY_TOKEN: Final = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
"""With these the CUDA backends above keep K and V of a token side by side, scales elsewhere."""


def namespace_of(
    vllm_config: Any,
    *,
    block_tokens: int,
    blocks_per_chunk: int,
    spec: Any,
    layer_names: Sequence[str] = (),
    kv_heads: int = 0,
    drafter: Mapping[str, Any] | None = None,
) -> bytes:
    """Canonical JSON (UTF-8, sorted keys) of an engine's namespace.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        block_tokens: tokens per block of the KV cache group.
        blocks_per_chunk: blocks per full chunk.
        spec: the group's `FullAttentionSpec` or another; head counts are taken from the model, not
            from it, so that ranks of a tensor-parallel engine agree. MLA has one head. Of recurrent
            layers it describes a rank's part, so engines cut in another way share no states.
        layer_names: the group's layers, where it is one of several.
        kv_heads: what these layers have over all ranks, then.
        drafter: what tells a drafter from others, where some of the layers are its own.

    Raises:
        WeightsUnknown: nothing tells the weights from others.
        OSError: the model's files are there and cannot be read.
    """
    model = vllm_config.model_config
    encoding = encoding_of(vllm_config, block_tokens, spec)
    if recurrent(spec):
        return canonical_json(
            _of_model(vllm_config)
            | {
                "format": 2,
                "layers": int(model.get_total_num_hidden_layers()),
                "block_tokens": block_tokens,
                "chunk_tokens": block_tokens * blocks_per_chunk,
                "encoding": encoding,
                "state": state_description(vllm_config, spec),
                "group": list(layer_names),
            }
        )
    kv_dtype = str(spec.dtype).removeprefix("torch.")
    description = _of_model(vllm_config) | {
        "format": 2,
        "kv_dtype": kv_dtype,
        "layers": int(model.get_total_num_hidden_layers()),
        "kv_heads": 1 if _latent(spec) else int(model.get_total_num_kv_heads()),
        "head_size": [int(spec.head_size), int(getattr(spec, "head_size_v", spec.head_size))],
        "chunk_tokens": block_tokens * blocks_per_chunk,
        "encoding": encoding,
    }
    if not regroups(encoding, kv_dtype):
        description["block_tokens"] = block_tokens
    if layer_names:
        description |= {"group": list(layer_names), "kv_heads": kv_heads}
    if drafter:
        description["drafter"] = dict(drafter)
    return canonical_json(description)


def canonical_json(description: dict[str, Any]) -> bytes:
    """A namespace as it is sent: equal for equal descriptions."""
    return json.dumps(description, sort_keys=True, separators=(",", ":")).encode()


def offloading_identity(vllm_config: Any, block_tokens: int) -> dict[str, Any]:
    """What vLLM's offloading interface does not tell of an engine and its bytes depend on.

    Raises:
        WeightsUnknown: nothing tells the weights from others.
        OSError: the model's files are there and cannot be read.
    """
    model = vllm_config.model_config
    values = SimpleNamespace(dtype=model.dtype, head_size=int(model.get_head_size()))
    return _of_model(vllm_config) | {
        "model_dtype": str(model.dtype).removeprefix("torch."),
        "encoding": encoding_of(vllm_config, block_tokens, values),
        # What vLLM itself makes its block hashes with; they are part of the keys.
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
    }


def _of_model(vllm_config: Any) -> dict[str, Any]:
    """The model and how it is run, whatever of its KV cache is meant."""
    model = vllm_config.model_config
    hf_config = model.hf_text_config
    dummy = str(vllm_config.load_config.load_format) == "dummy"
    return {
        "model": model_identity(
            model.model,
            model.revision,
            model.hf_config,
            streamed_from=str(getattr(model, "model_weights", "") or ""),
            dummy=dummy,
        ),
        # Random weights are a stand-in for the model's; their KV must never be taken for it.
        "dummy_weights": dummy,
        "hf_overrides": overrides_of(model),
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "rope": plain(getattr(hf_config, "rope_parameters", None)),
        "quantization": str(model.quantization),
        "max_position_embeddings": getattr(hf_config, "max_position_embeddings", None),
    } | processing_of(vllm_config)


def _latent(spec: Any) -> bool:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return isinstance(spec, MLAAttentionSpec)


def digest_of(namespace: bytes) -> bytes:
    """32 bytes that stand for a namespace in keys and object names."""
    return hashlib.sha256(namespace).digest()


def encoding_of(vllm_config: Any, block_tokens: int, spec: Any) -> str:
    """How values lie inside a (block, head): attention kernels pack them in their own ways."""
    from vllm.platforms import current_platform

    if recurrent(spec):
        return state_encoding(spec)
    if current_platform.is_cuda():
        # Which backend serves, and so how it packs K and V, is decided by these two.
        capability: Any = current_platform.get_device_capability()
        backend = getattr(vllm_config.attention_config.backend, "name", "auto")
        encoding = f"cuda-{capability.major}.{capability.minor}-{backend}"
        by_token = (
            backend in _CUDA_BACKENDS_BY_TOKEN
            and str(vllm_config.cache_config.cache_dtype) in _CACHE_DTYPES_BY_TOKEN
            and str(spec.dtype).removeprefix("torch.") in _DTYPES_BY_TOKEN
        )
        return encoding + BY_TOKEN * by_token
    if _latent(spec):
        # Both CPU backends for MLA keep the latent vector of a token as it is.
        return f"cpu-{current_platform.get_cpu_architecture().name.lower()}-mla{BY_TOKEN}"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # pyright: ignore[reportPrivateUsage]

    isa = _get_attn_isa(
        spec.dtype, block_tokens, spec.head_size, str(vllm_config.cache_config.cache_dtype)
    )
    return f"cpu-{current_platform.get_cpu_architecture().name.lower()}-{isa}"


class WeightsUnknown(Exception):
    """Nothing tells these weights from others; the message says why and what would help."""


def model_identity(
    model: str,
    revision: str | None,
    hf_config: Any,
    *,
    streamed_from: str = "",
    dummy: bool = False,
) -> dict[str, str]:
    """Name and commit of a hub model, or a digest of the files of a local one.

    A revision may be a branch, which moves; transformers notes in the configuration which commit
    it came from. Weights that are `streamed_from` a URL are told apart by the revision alone.

    Raises:
        WeightsUnknown: two different models could not be told apart. Not for `dummy` weights.
        OSError: the files are there and cannot be read.
    """
    path = Path(model)
    if streamed_from:
        if not revision:
            raise WeightsUnknown(
                f"its weights are streamed from {streamed_from}, where others may be tomorrow; "
                "name them with --revision, by another name whenever they change"
            )
        config = folder_digest(path) if path.is_dir() else ""
        return {"name": streamed_from, "revision": revision, "config": config}
    if path.is_dir():
        if not dummy and not _weights_in(path):
            raise WeightsUnknown(
                f"there are no weights in {model} that kvlake knows ({', '.join(_WEIGHTS)})"
            )
        return {"digest": folder_digest(path)}
    if path.is_file():
        hasher = hashlib.sha256()
        _hash_opaque(hasher, path)
        return {"digest": hasher.hexdigest()}
    commit = getattr(hf_config, "_commit_hash", None)
    if not (commit or revision or dummy):
        raise WeightsUnknown(
            f"model {model!r} came with no commit, and its name alone may mean other weights "
            "tomorrow; name them with --revision"
        )
    return {"name": model, "revision": str(commit or revision or "")}


def adapter_identity(path: str) -> str:
    """What tells a LoRA adapter from others: its files.

    Raises:
        WeightsUnknown: it is not known which files vLLM loads.
        OSError: its files are there and cannot be read.
    """
    # As vLLM finds them, `get_adapter_absolute_path`, but for its download.
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        folder = _downloaded(path)
    if not _weights_in(folder):
        raise WeightsUnknown(
            f"there are no weights in {folder} that kvlake knows ({', '.join(_WEIGHTS)})"
        )
    return folder_digest(folder)


def _downloaded(hub_id: str) -> Path:
    """The only snapshot of a hub's repository that vLLM can load; raises `WeightsUnknown`.

    vLLM may load it at any time, and then loads what the hub has by then. Only offline, with one
    snapshot there, does the scheduler know what a worker has loaded, or will.
    """
    import huggingface_hub

    if huggingface_hub.is_offline_mode() and not os.environ.get("VLLM_USE_MODELSCOPE"):
        try:
            folder = Path(huggingface_hub.snapshot_download(hub_id, local_files_only=True))
            snapshots = list(folder.parent.iterdir())
        except (OSError, ValueError):
            snapshots = []
        if len(snapshots) == 1:
            return snapshots[0]
    raise WeightsUnknown(
        f"{hub_id!r} is no folder on this machine, and the name may mean other weights tomorrow; "
        "give the folder that `hf download` prints, or set HF_HUB_OFFLINE=1 with one revision "
        "downloaded"
    )


def folder_digest(folder: Path) -> str:
    """Hex digest of the configuration and of the weights in a folder of a model or an adapter.

    Of a safetensors file: its size, its header, and `_SAMPLE_BYTES` from the middle of every
    tensor, which a change of any layer's weights does not survive. Of other weight files: size,
    modification time and the first and last sample.
    """
    hasher = hashlib.sha256()
    for name in ("config.json", "adapter_config.json"):
        config = folder / name
        if config.is_file():
            hasher.update(config.read_bytes())
    for path in _weights_in(folder):
        if path.suffix == ".safetensors":
            _hash_safetensors(hasher, path)
        else:
            _hash_opaque(hasher, path)
    return hasher.hexdigest()


def _weights_in(folder: Path) -> list[Path]:
    """The weight files of a folder: safetensors, or where there are none what else there is."""
    first, *others = _WEIGHTS
    return sorted(folder.glob(first)) or sorted(
        path for pattern in others for path in folder.glob(pattern)
    )


def _hash_safetensors(hasher: Any, path: Path) -> None:
    # Format: 8 bytes of little-endian header length, a JSON header, then the tensors' bytes.
    hasher.update(path.stat().st_size.to_bytes(8, "little"))
    with path.open("rb") as file:
        length_bytes = file.read(8)
        (length,) = struct.unpack("<Q", length_bytes) if len(length_bytes) == 8 else (0,)
        if not 0 < length <= _HEADER_BYTES_MAX:
            _hash_opaque(hasher, path)
            return
        header = file.read(length)
        hasher.update(header)
        try:
            tensors = json.loads(header)
        except ValueError:
            _hash_opaque(hasher, path)
            return
        if not isinstance(tensors, dict):
            _hash_opaque(hasher, path)
            return
        for name in sorted(tensors):
            offsets = tensors[name].get("data_offsets") if isinstance(tensors[name], dict) else None
            if not offsets:
                continue
            start, end = offsets
            file.seek(8 + length + start + max(0, (end - start - _SAMPLE_BYTES) // 2))
            hasher.update(file.read(min(_SAMPLE_BYTES, end - start)))


def _hash_opaque(hasher: Any, path: Path) -> None:
    status = path.stat()
    hasher.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        hasher.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        hasher.update(file.read(_SAMPLE_BYTES))
