"""What tells the weights of a model or an adapter from others.

Owns the rule: a model of a hub is its name and commit; a folder or a file is what it holds, not
what it is called, so that the same model under two paths is shared and two fine-tunes under one
path are not. Where nothing tells weights from others, `WeightsUnknown` says why. How files of many
gigabytes are read is in `file_digests.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from connector.identity.file_digests import digests_of, file_digest, opened_stamp, stamps_settled

_DIGEST_DOMAIN: Final = b"kvlake/weights/2\0"
"""Changes with what is hashed, so that digests of two versions are never equal."""
_SAMPLE_BYTES: Final = 1024
_SMALL_BYTES: Final = 32 * 1024 * 1024
"""Beside the weights, files up to this size are read whole, and nothing of them is remembered."""
_FILES_MAX: Final = 4096
_DEPTH_MAX: Final = 4
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.tensors")
_USUAL_FORMATS: Final = (
    "auto",
    "hf",
    "dummy",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
    "bitsandbytes",
    "gguf",
)
"""Values of `--load-format` with which vLLM takes safetensors where there are any."""
_FORMATS: Final = {"pt": ("*.pt",), "npcache": ("*.bin",), "tensorizer": ("*.tensors",)}
"""Of those of other files, which; of a format that is not here all of them count."""
_ANY_FORMAT: Final = ""
_OTHER_MODELS: Final = ("audio_model_id", "text_model_id")
"""What of a model's configuration names models that parts of it are loaded from: Ultravox."""
_HEADER_BYTES_MAX: Final = 100 * 1024 * 1024
_OTHER_SUFFIXES: Final = (
    ".h5",
    ".msgpack",
    ".onnx",
    ".onnx_data",
    ".ot",
    ".tflite",
    *(pattern.removeprefix("*") for pattern in _WEIGHTS),
)
"""Files of weights, which count where the load format reads them, and else do not."""
_WITHOUT_EFFECT: Final = (
    # Of given token ids, which model computes what is the same with any tokenizer.
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template.jinja",
    "chat_template.json",
    # How tokens are chosen.
    "generation_config.json",
    # What people read.
    "*.md",
    "LICENSE*",
    "NOTICE*",
    "README*",
    "*.gif",
    "*.jpeg",
    "*.jpg",
    "*.pdf",
    "*.png",
    "*.svg",
    "*.webp",
    # What a training leaves behind; vLLM does not load these either.
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
    "rng_state*",
    "trainer_state.json",
    "*_results.json",
    "events.out.tfevents*",
)
"""Names of files that no KV depends on. Whatever is not among them counts."""
_FOLDERS_WITHOUT_EFFECT: Final = ("__pycache__", "checkpoint-*", "np", "original", "runs")


class WeightsUnknown(Exception):
    """Nothing tells these weights from others; the message says why and what would help."""


def model_identity(
    model: str,
    revision: str | None,
    hf_config: Any,
    *,
    streamed_from: str = "",
    dummy: bool = False,
    sampled: bool = False,
    load_format: str = "auto",
) -> dict[str, str]:
    """Name and commit of a hub model, or a digest of the files of a local one.

    A revision may be a branch, which moves; transformers notes in the configuration which commit
    it came from. Weights that are `streamed_from` a URL are told apart by the revision alone. Of
    `sampled` files not every byte counts; they share nothing with those of which all do.

    Raises:
        WeightsUnknown: two different models could not be told apart. Not for `dummy` weights.
        OSError: the files are there and cannot be read.
    """
    path = Path(model)
    others = {} if dummy else _other_models(hf_config, sampled=sampled)
    if load_format not in _USUAL_FORMATS:
        # A commit may hold several, and of other weights.
        others["load_format"] = load_format
    if streamed_from:
        if not revision:
            raise WeightsUnknown(
                f"its weights are streamed from {streamed_from}, where others may be tomorrow; "
                "name them with --revision, by another name whenever they change"
            )
        config = folder_digest(path) if path.is_dir() else ""
        return others | {"name": streamed_from, "revision": revision, "config": config}
    if path.is_dir():
        if not dummy and not _weights_in(path, load_format):
            known = ", ".join(_FORMATS.get(load_format, _WEIGHTS))
            raise WeightsUnknown(f"there are no weights in {model} that kvlake knows ({known})")
        digest = folder_digest(path, sampled=sampled, load_format=load_format)
        return others | {"sampled" if sampled else "digest": digest}
    if path.is_file():
        if not sampled:
            return others | {"digest": digests_of([path])[0]}
        hasher = hashlib.sha256()
        _hash_opaque(hasher, path)
        return others | {"sampled": hasher.hexdigest()}
    commit = getattr(hf_config, "_commit_hash", None)
    if not (commit or revision or dummy):
        raise WeightsUnknown(
            f"model {model!r} came with no commit, and its name alone may mean other weights "
            "tomorrow; name them with --revision"
        )
    return others | {"name": model, "revision": str(commit or revision or "")}


def _other_models(hf_config: Any, *, sampled: bool) -> dict[str, str]:
    """Of models that parts of this one are loaded from, a digest of each.

    vLLM takes them at whatever revision their hub has, so names do not tell them.
    """
    digests: dict[str, str] = {}
    for name in _OTHER_MODELS:
        if place := getattr(hf_config, name, None):
            try:
                folder = Path(place) if Path(place).is_dir() else _downloaded(place)
            except WeightsUnknown as error:
                raise WeightsUnknown(f"its {name} is loaded from elsewhere: {error}") from error
            if not _weights_in(folder):
                raise WeightsUnknown(f"there are no weights in {folder}, its {name}")
            digests[name] = folder_digest(folder, sampled=sampled)
    return digests


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of a LoRA adapter, as they were when they were read.

    `settled`: they had not been changed for so long that a further change shows in their stamps.
    """

    path: str
    digest: str
    stamps: tuple[str, ...]
    settled: bool


def adapter_identity(path: str) -> str:
    """What tells a LoRA adapter from others: the files in its folder; see `read_adapter`."""
    return read_adapter(path).digest


def read_adapter(path: str) -> AdapterFiles:
    """Read all files of an adapter.

    Raises:
        WeightsUnknown: it is not known which files vLLM loads.
        OSError: its files are there and cannot be read, or change meanwhile.
    """
    began = time.time()
    folder, found = _adapter_files(path)
    stamps = _stamps(found)
    # In a step of the scheduler, which waits for no other process. vLLM reads it as well.
    digest = _digest_of(folder, found, sampled=False, remember=False)
    again, found = _adapter_files(path)
    if again != folder or _stamps(found) != stamps:
        raise OSError(f"{path} was changed while it was read")
    return AdapterFiles(path, digest, stamps, stamps_settled(stamps, began))


def same_adapter(files: AdapterFiles) -> bool:
    """Whether no file of an adapter was changed, added or removed since.

    It is cheap enough for each request. Of files that were changed shortly before they were read
    that cannot be said.

    Raises:
        WeightsUnknown: it is not known which files vLLM loads.
        OSError: its files are there and cannot be opened.
    """
    return files.settled and _stamps(_adapter_files(files.path)[1]) == files.stamps


def _stamps(found: list[tuple[Path, bool]]) -> tuple[str, ...]:
    return tuple(opened_stamp(path) for path, _ in found)


def _adapter_files(path: str) -> tuple[Path, list[tuple[Path, bool]]]:
    # As vLLM finds them, `get_adapter_absolute_path`, but for its download.
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        folder = _downloaded(path)
    # It takes names of its own, so that a file of one format does not stand for those of others.
    found = _files_in(folder, _ANY_FORMAT)
    if not any(weighty for _, weighty in found):
        raise WeightsUnknown(
            f"there are no weights in {folder} that kvlake knows ({', '.join(_WEIGHTS)})"
        )
    return folder, found


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


def folder_digest(
    folder: Path, *, sampled: bool = False, remember: bool = True, load_format: str = "auto"
) -> str:
    """Hex digest of the files that vLLM may read in a folder of a model, with their names.

    All of them count but those that are known to change no KV: which shards an index names, how
    weights are quantized, and the model's own code decide about KV as the weights do. Every byte
    counts. Where weights are `sampled`, only so much of a safetensors file counts as is read in no
    time: its size, its header, and `_SAMPLE_BYTES` from the middle of every tensor, which a
    training of all layers does not survive; and of other large files size, time and the first and
    last sample.

    Raises:
        WeightsUnknown: there are too many files.
        OSError: the files cannot be read, or change meanwhile.
    """
    found = [
        (one, weighty)
        for each in _folders(folder)
        for one, weighty in _files_in(each, load_format if each == folder else "auto")
    ]
    return _digest_of(folder, found, sampled=sampled, remember=remember)


def settings_digest(folder: Path) -> str:
    """As `folder_digest`, of what is beside the weights in the folder itself."""
    found = [(path, False) for path, weighty in _files_in(folder, "auto") if not weighty]
    return _digest_of(folder, found, sampled=False, remember=False)


def _digest_of(
    folder: Path, found: list[tuple[Path, bool]], *, sampled: bool, remember: bool
) -> str:
    large = [path for path, weighty in found if weighty or path.stat().st_size > _SMALL_BYTES]
    digests = dict(
        zip(large, digests_of(large, remember=remember), strict=True) if not sampled else ()
    )
    hasher = hashlib.sha256(_DIGEST_DOMAIN)
    for path, _ in found:
        name = path.relative_to(folder).as_posix().encode(errors="surrogateescape")
        hasher.update(len(name).to_bytes(4, "little") + name)
        if path in digests:
            hasher.update(bytes.fromhex(digests[path]))
        elif path not in large:
            hasher.update(bytes.fromhex(file_digest(path)))
        elif path.suffix == ".safetensors":
            _hash_safetensors(hasher, path)
        else:
            _hash_opaque(hasher, path)
    return hasher.hexdigest()


def _folders(folder: Path) -> list[Path]:
    """A model's folder, and those in it that vLLM may read: towers, packages of code.

    Not those of adapters, which are known by their own files.
    """
    found = [folder]
    level = [folder]
    for _ in range(_DEPTH_MAX):
        level = [
            each / name
            for each in level
            for name in sorted(os.listdir(each))
            if not _without_effect(name, _FOLDERS_WITHOUT_EFFECT) and (each / name).is_dir()
        ]
        level = [each for each in level if not (each / "adapter_config.json").exists()]
        found += level
        if len(found) > _FILES_MAX:
            raise WeightsUnknown(f"{folder} has more than {_FILES_MAX} folders in it")
    return found


def _files_in(folder: Path, load_format: str) -> list[tuple[Path, bool]]:
    """Files that count in a folder, and whether each is one of the weights; sorted by name."""
    weights = set(_weights_in(folder, load_format))
    others = {
        folder / name
        for name in os.listdir(folder)
        if not _without_effect(name, _WITHOUT_EFFECT)
        and not name.endswith(_OTHER_SUFFIXES)
        and (folder / name).is_file()
    }
    if len(weights | others) > _FILES_MAX:
        raise WeightsUnknown(f"{folder} has more than {_FILES_MAX} files in it")
    return [(path, path in weights) for path in sorted(weights | others)]


def _without_effect(name: str, patterns: tuple[str, ...]) -> bool:
    return name.startswith(".") or any(fnmatchcase(name, pattern) for pattern in patterns)


def _weights_in(folder: Path, load_format: str = "auto") -> list[Path]:
    """The weight files of a folder: safetensors, or where there are none what else there is.

    Of a format that takes others, those.
    """
    arrays = folder / "np"
    if load_format == "npcache" and (arrays / "weight_names.json").is_file():
        # vLLM made them of the weights at an earlier start, and reads nothing else since.
        return sorted(path for path in arrays.iterdir() if path.is_file())
    first, *others = _WEIGHTS
    if load_format not in _USUAL_FORMATS:
        patterns = _FORMATS.get(load_format, _WEIGHTS)
        return _matching(folder, *patterns)
    return _matching(folder, first) or _matching(folder, *others)


def _matching(folder: Path, *patterns: str) -> list[Path]:
    return sorted(
        path
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and not _without_effect(path.name, _WITHOUT_EFFECT)
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
