"""The identity of the weights of a model or an adapter.

A model from a hub is its name and commit. A folder or a file is what it holds, not its path: the
same model under two paths is shared, two fine-tunes under one path are not. If nothing tells
weights from others, `WeightsUnknown` says why.

Large files are not read here: an identity has `UnreadFiles` in place of a digest of such files,
with the stamps that they have now. `file_digests.py` reads them, and `completed` puts the digest in
their place.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, cast

from connector.identity.file_digests import file_digest, file_stamp, read_all, stamps_settled

_DIGEST_DOMAIN: Final = b"kvlake/weights/2\0"
"""Change it with what is hashed, so that digests of two versions are never equal."""
_SAMPLE_BYTES: Final = 1024
_SMALL_BYTES: Final = 32 * 1024 * 1024
"""Other files than weights, up to this size, are always read whole and their digests not cached."""
_FILES_MAX: Final = 4096
_DEPTH_MAX: Final = 4
_WEIGHTS: Final = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.tensors")
_USUAL_FORMATS: Final = (
    *("auto", "hf", "dummy", "bitsandbytes", "gguf", "safetensors", "fastsafetensors"),
    *("instanttensor", "runai_streamer", "runai_streamer_sharded", "sharded_state"),
)
"""Values of `--load-format` with which vLLM takes safetensors if there are any."""
_CONSOLIDATED: Final = "consolidated*.safetensors"
_FORMATS: Final = {
    "pt": ("*.pt",),
    "npcache": ("*.bin",),
    "tensorizer": ("*.tensors",),
    "mistral": (_CONSOLIDATED,),
}
"""The files that other formats read. With a format that is not here, all weights count."""
_SERVED_FORMATS: Final = ("ipc_cache", "modelexpress")
"""With these, another process has the weights, and they need not be those of the files."""
_BRANCHES: Final = ("main", "master", "HEAD")
_OTHER_MODELS: Final = ("audio_model_id", "text_model_id")
"""Names of other models in a configuration, from which parts are loaded (Ultravox)."""
_HEADER_BYTES_MAX: Final = 100 * 1024 * 1024
_ALL_WEIGHTS: Final = (*_WEIGHTS, "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite")
"""Weights count only if the load format reads them."""
_WITHOUT_EFFECT: Final = (
    # KV depends on token ids, however they were made.
    *("tokenizer.json", "tokenizer.model", "tokenizer.model.v*", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tekken.json", "*.tiktoken", "spiece.model", "sentencepiece*.model"),
    *("chat_template.jinja", "chat_template.json"),
    # Sampling.
    "generation_config.json",
    # Documentation.
    *("*.md", "LICENSE*", "NOTICE*", "README*", "*.pdf"),
    *("*.gif", "*.jpeg", "*.jpg", "*.png", "*.svg", "*.webp"),
    # Left by a training run; vLLM does not load these either.
    *("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("rng_state*", "trainer_state.json", "*_results.json", "events.out.tfevents*"),
)
"""Names of files that no KV depends on. All others count."""
_FOLDERS_WITHOUT_EFFECT: Final = (
    *("__pycache__", "checkpoint-*", "np", "original", "runs"),
    # At the root of a volume, where only root may read it.
    "lost+found",
)


class WeightsUnknown(Exception):
    """Nothing tells these weights from others; the message gives the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class UnreadFiles:
    """Stands for the digest of files, of which the large ones are still to be read."""

    files: Sequence[tuple[str, str, str]]
    """Name, hex digest and stamp of each file. One that is read has no stamp, another no digest."""
    single: bool = False
    """It is one file, and known by its own digest."""

    @property
    def stamps(self) -> list[str]:
        """The files to be read."""
        return [stamp for _, _, stamp in self.files if stamp]

    def digest(self, digests: Mapping[str, str]) -> str:
        """The hex digest of all files, given those of the unread ones by stamp."""
        found = [(name, digest or digests[stamp]) for name, digest, stamp in self.files]
        if self.single:
            return found[0][1]
        hasher = hashlib.sha256(_DIGEST_DOMAIN)
        for name, digest in found:
            _hash_name(hasher, name)
            hasher.update(bytes.fromhex(digest))
        return hasher.hexdigest()


def unread_stamps(description: Any) -> Iterator[str]:
    """Stamps of all files that a description still needs."""
    if isinstance(description, UnreadFiles):
        yield from description.stamps
    elif isinstance(description, dict):
        for value in cast("dict[str, Any]", description).values():
            yield from unread_stamps(value)


def completed(description: Any, digests: Mapping[str, str]) -> Any:
    """A copy of a description with digests, by stamp, in place of `UnreadFiles`."""
    if isinstance(description, UnreadFiles):
        return description.digest(digests)
    if isinstance(description, dict):
        items = cast("dict[str, Any]", description).items()
        return {name: completed(value, digests) for name, value in items}
    return description


def model_identity(
    config: Any, load_format: str = "auto", *, streamed_from: str = "", sampled: bool = False
) -> dict[str, str | UnreadFiles]:
    """Name and commit of a hub model, or a digest of the files of a local one.

    `config` is vLLM's `ModelConfig`. Its revision may be a branch, which moves; vLLM notes the
    commit. Weights that are `streamed_from` a URL are known by the revision alone. Digests of
    `sampled` files cover a part of their bytes, and never equal those of whole files.

    Raises:
        WeightsUnknown: two models could not be told apart. Not for dummy weights.
        OSError: the files are there and cannot be read.
    """
    model, revision, hf_config = config.model, config.revision, config.hf_config
    path = Path(model)
    dummy = load_format == "dummy"
    others: dict[str, str | UnreadFiles] = {}
    if not dummy:
        others |= _other_models(hf_config, sampled=sampled)
    if load_format not in _USUAL_FORMATS:
        # A commit may hold other weights in other formats.
        others["load_format"] = load_format
    if load_format in _SERVED_FORMATS:
        raise WeightsUnknown(
            f"with load_format={load_format!r} another process has its weights, and they need not "
            "be those that the model's files have now; use load_format='auto'"
        )
    if streamed_from:
        # As it was given: of none, vLLM makes "main" for a hub model.
        named = str(getattr(revision, "initial", revision) or "")
        if not named:
            raise WeightsUnknown(
                f"its weights are streamed from {streamed_from}, which may hold others tomorrow; "
                "name them with --revision, and change the name whenever they change"
            )
        beside = folder_identity(path) if path.is_dir() else ""
        return others | {"name": streamed_from, "revision": named, "config": beside}
    kind = "sampled" if sampled else "digest"
    if path.is_dir():
        if load_format == "auto" and _matching(path, _CONSOLIDATED):
            # So vLLM chooses. Other formats read the files beside these.
            load_format = others["load_format"] = "mistral"
        if not dummy and not _weights_in(path, load_format):
            known = ", ".join(_FORMATS.get(load_format, _WEIGHTS))
            raise WeightsUnknown(f"there are no weights in {model} that kvlake knows ({known})")
        return others | {kind: folder_identity(path, sampled=sampled, load_format=load_format)}
    if path.is_file():
        if not sampled:
            return others | {kind: UnreadFiles([("", "", file_stamp(path))], single=True)}
        hasher = hashlib.sha256()
        _hash_opaque(hasher, path)
        return others | {kind: hasher.hexdigest()}
    # The text of a revision that vLLM has resolved is still a branch's name.
    commit = getattr(revision, "resolved", None)
    if not commit and not config.hf_config_path:
        commit = getattr(hf_config, "_commit_hash", None)
    if not (commit or dummy) and str(revision or "main") in _BRANCHES:
        raise WeightsUnknown(
            f"model {model!r} came without a commit, and its name may mean other weights tomorrow; "
            "name a commit with --revision"
        )
    if not dummy and load_format != "auto":
        # With "auto" vLLM takes a repository's consolidated files, if there are any. They need not
        # be the same weights, and other formats read the files beside them.
        others.setdefault("load_format", "hf")
    return others | {"name": model, "revision": str(commit or revision or "")}


def _other_models(hf_config: Any, *, sampled: bool) -> dict[str, str | UnreadFiles]:
    """A digest of each model that parts of this one are loaded from.

    vLLM takes whatever revision their hub has, so names do not identify them.
    """
    digests: dict[str, str | UnreadFiles] = {}
    for name in _OTHER_MODELS:
        if place := getattr(hf_config, name, None):
            try:
                folder = Path(place) if Path(place).is_dir() else downloaded_folder(place)
            except WeightsUnknown as error:
                raise WeightsUnknown(f"its {name} is loaded from elsewhere: {error}") from error
            if not _weights_in(folder):
                raise WeightsUnknown(f"there are no weights in {folder}, its {name}")
            digests[name] = folder_identity(folder, sampled=sampled)
    return digests


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The files of a LoRA adapter, as they were when they were read."""

    digest: str
    stamps: list[str]
    """Empty if a later change might not have shown in them."""


def read_adapter(path: str, known: AdapterFiles | None = None) -> AdapterFiles:
    """Read all files of an adapter; `known` is what they were, and is kept if they are unchanged.

    Raises `WeightsUnknown`, and `OSError` if they cannot be read, or change meanwhile.
    """
    began = time.time()
    folder, found = _adapter_files(path)
    stamps = _stamps(found)
    if known is not None and known.stamps == stamps:
        return known
    digest = _digest_now(folder, found)
    again, found = _adapter_files(path)
    if again != folder or _stamps(found) != stamps:
        raise OSError(f"{path} was changed while it was read")
    return AdapterFiles(digest, stamps if stamps_settled(stamps, began) else [])


def _stamps(found: list[tuple[Path, bool]]) -> list[str]:
    return [file_stamp(path) for path, _ in found]


def _adapter_files(path: str) -> tuple[Path, list[tuple[Path, bool]]]:
    # As `get_adapter_absolute_path` of vLLM, without its download.
    folder = Path(os.path.expanduser(path))
    if not folder.is_dir():
        folder = downloaded_folder(path)
    # Adapters have their own file names, so safetensors do not stand for other formats.
    found = _files_in(folder, "any")
    if not any(weighty for _, weighty in found):
        raise WeightsUnknown(
            f"there are no weights in {folder} that kvlake knows ({', '.join(_WEIGHTS)})"
        )
    return folder, found


def downloaded_folder(hub_id: str) -> Path:
    """The only snapshot of a hub's repository that vLLM can load; raises `WeightsUnknown`.

    vLLM may load it at any time, and loads what the hub has then: offline, with a single snapshot,
    that is known.
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
        f"{hub_id!r} is not a folder on this machine, and may mean other weights tomorrow; give "
        "the folder that `hf download` prints, or set HF_HUB_OFFLINE=1 with one revision downloaded"
    )


def folder_identity(
    folder: Path, *, sampled: bool = False, load_format: str = "auto"
) -> str | UnreadFiles:
    """Hex digest of the names and bytes of the files that vLLM may read in a model's folder.

    All files count except those known to change no KV: an index of shards, quantization settings
    and the model's own code decide about KV as weights do. If weights are `sampled`, a safetensors
    file counts with its size, its header and `_SAMPLE_BYTES` from the middle of every tensor, which
    a training of all layers changes; another large file with size, time, first and last sample.

    Raises:
        WeightsUnknown: there are too many files.
        OSError: the files cannot be read, or change meanwhile.
    """
    found = [
        (one, weighty)
        for each in _folders(folder)
        for one, weighty in _files_in(each, load_format if each == folder else "auto")
    ]
    return _sample_of(folder, found) if sampled else _unread_files(folder, found)


def settings_digest(folder: Path) -> str:
    """As `folder_identity`, for the files beside the weights, without subfolders; reads them."""
    return _digest_now(folder, [one for one in _files_in(folder, "auto") if not one[1]])


def _is_large(path: Path, *, weighty: bool) -> bool:
    return weighty or path.stat().st_size > _SMALL_BYTES


def _name_in(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _unread_files(folder: Path, found: list[tuple[Path, bool]]) -> UnreadFiles:
    files: list[tuple[str, str, str]] = []
    for path, weighty in found:
        large = _is_large(path, weighty=weighty)
        known, stamp = ("", file_stamp(path)) if large else (file_digest(path), "")
        files.append((_name_in(folder, path), known, stamp))
    return UnreadFiles(files)


def _digest_now(folder: Path, found: list[tuple[Path, bool]]) -> str:
    """Read all files. Remembers nothing, so that it waits for no other process.

    Adapters are read in a scheduler's step.
    """
    unread = _unread_files(folder, found)
    return unread.digest(read_all(unread.stamps))


def _sample_of(folder: Path, found: list[tuple[Path, bool]]) -> str:
    hasher = hashlib.sha256(_DIGEST_DOMAIN)
    for path, weighty in found:
        _hash_name(hasher, _name_in(folder, path))
        if not _is_large(path, weighty=weighty):
            hasher.update(bytes.fromhex(file_digest(path)))
        elif path.suffix == ".safetensors":
            _hash_safetensors(hasher, path)
        else:
            _hash_opaque(hasher, path)
    return hasher.hexdigest()


def _hash_name(hasher: Any, name: str) -> None:
    encoded = name.encode(errors="surrogateescape")
    hasher.update(len(encoded).to_bytes(4, "little") + encoded)


def _folders(folder: Path) -> list[Path]:
    """A model's folder and subfolders that vLLM may read (towers, code), but not of adapters."""
    found = level = [folder]
    for _ in range(_DEPTH_MAX):
        level = [
            each / name
            for each in level
            for name in sorted(os.listdir(each))
            if not _without_effect(name, _FOLDERS_WITHOUT_EFFECT)
            and (each / name).is_dir()
            and not (each / name / "adapter_config.json").exists()
        ]
        found = found + level
        if len(found) > _FILES_MAX:
            raise WeightsUnknown(f"{folder} has more than {_FILES_MAX} folders in it")
    return found


def _files_in(folder: Path, load_format: str) -> list[tuple[Path, bool]]:
    """Files that count in a folder, each with whether it holds weights; sorted by name."""
    weights = set(_weights_in(folder, load_format))
    others = {
        folder / name
        for name in os.listdir(folder)
        if not _without_effect(name, (*_WITHOUT_EFFECT, *_ALL_WEIGHTS))
        and (folder / name).is_file()
    }
    if len(weights | others) > _FILES_MAX:
        raise WeightsUnknown(f"{folder} has more than {_FILES_MAX} files in it")
    return [(path, path in weights) for path in sorted(weights | others)]


def _without_effect(name: str, patterns: tuple[str, ...]) -> bool:
    return name.startswith(".") or any(fnmatchcase(name, pattern) for pattern in patterns)


def _weights_in(folder: Path, load_format: str = "auto") -> list[Path]:
    """The weight files that vLLM reads in a folder: safetensors, or all if there are none."""
    arrays = folder / "np"
    if load_format == "npcache" and (arrays / "weight_names.json").is_file():
        # vLLM made them from the weights at an earlier start, and reads nothing else since.
        return sorted(path for path in arrays.iterdir() if path.is_file())
    if load_format not in _USUAL_FORMATS:
        return _matching(folder, *_FORMATS.get(load_format, _WEIGHTS))
    first, *others = _WEIGHTS
    return _matching(folder, first) or _matching(folder, *others)


def _matching(folder: Path, *patterns: str) -> list[Path]:
    return sorted(
        path
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and not _without_effect(path.name, _WITHOUT_EFFECT)
    )


def _hash_safetensors(hasher: Any, path: Path) -> None:
    hasher.update(path.stat().st_size.to_bytes(8, "little"))
    with path.open("rb") as file:
        # The header's length, the header in JSON, and the tensors.
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _HEADER_BYTES_MAX else b""
        hasher.update(header)
        try:
            tensors = json.loads(header)
        except ValueError:
            tensors = None
        if not isinstance(tensors, dict):
            _hash_opaque(hasher, path)
            return
        for name in sorted(tensors):
            offsets = tensors[name].get("data_offsets") if isinstance(tensors[name], dict) else None
            if offsets:
                start, end = offsets
                middle = start + max(0, (end - start - _SAMPLE_BYTES) // 2)
                file.seek(8 + len(header) + middle)
                hasher.update(file.read(min(_SAMPLE_BYTES, end - start)))


def _hash_opaque(hasher: Any, path: Path) -> None:
    status = path.stat()
    hasher.update(f"{path.name}:{status.st_size}:{status.st_mtime_ns}".encode())
    with path.open("rb") as file:
        hasher.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, status.st_size - _SAMPLE_BYTES))
        hasher.update(file.read(_SAMPLE_BYTES))
