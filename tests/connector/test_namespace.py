"""What a namespace consists of: equal for equal weights, different for anything else."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connector.identity.namespace import (
    adapter_settings,
    digest_of,
    encoding_of,
    namespace_of,
    served_as,
)
from connector.identity.weights import (
    WeightsUnknown,
    folder_digest,
    model_identity,
    read_adapter,
)
from connector.options import samples_weights
from tests import places

TENSORS = {"model.embed": 5000, "model.layers.0.q": 64, "model.layers.1.q": 3000}


def identity_of(
    model: str,
    revision: str | None,
    hf_config: Any,
    *,
    load_format: str = "auto",
    streamed_from: str = "",
) -> dict[str, str]:
    config = SimpleNamespace(model=model, revision=revision, hf_config=hf_config)
    return model_identity(config, load_format, streamed_from=streamed_from)


def adapter_identity(path: str) -> str:
    return read_adapter(path).digest


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


def change(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(bytes(content))


class TestFolders:
    def test_equal_weights_under_two_paths_are_one_model(self, tmp_path: Path) -> None:
        one = write_weights(tmp_path / "one")
        other = write_weights(tmp_path / "elsewhere" / "other")
        assert folder_digest(one) == folder_digest(other)
        assert identity_of(str(one), None, None) == identity_of(str(other), "main", None)

    def test_only_models_in_folders_have_a_display_name(self, tmp_path: Path) -> None:
        place = str(write_weights(tmp_path / "one"))
        assert served_as(place, "llama") == "llama"
        assert served_as(place, "a\nb" + "x" * 300) == "x" * 256
        assert served_as(place, "a\nb") == "a?b"
        # Its namespace has the name.
        assert served_as("org/model", "llama") == ""

    def test_other_weights_under_one_path_are_another_model(self, tmp_path: Path) -> None:
        before = folder_digest(write_weights(tmp_path, fill=1))
        after = folder_digest(write_weights(tmp_path, fill=2))
        assert before != after

    @pytest.mark.parametrize("tensor", range(len(TENSORS)))
    def test_any_layer_counts_in_a_sample(self, tmp_path: Path, tensor: int) -> None:
        path = write_weights(tmp_path) / "model.safetensors"
        before = folder_digest(tmp_path, sampled=True)
        sizes = list(TENSORS.values())
        end = path.stat().st_size - sum(sizes[tensor + 1 :])
        change(path, end - sizes[tensor] // 2)
        assert folder_digest(tmp_path, sampled=True) != before

    @pytest.mark.promise("weights")
    def test_every_byte_counts(self, tmp_path: Path) -> None:
        """For example an embedding with some rows patched in place."""
        path = write_weights(tmp_path) / "model.safetensors"
        full, sampled = folder_digest(tmp_path), folder_digest(tmp_path, sampled=True)
        change(path, path.stat().st_size - sum(TENSORS.values()))
        assert folder_digest(tmp_path) != full
        assert folder_digest(tmp_path, sampled=True) == sampled
        config = config_of(tmp_path, weights_digest="some")
        with pytest.raises(ValueError, match=r"weights_digest.*'some'.*'full' or 'sampled'"):
            samples_weights(config)

    def test_the_configuration_counts(self, tmp_path: Path) -> None:
        before = folder_digest(write_weights(tmp_path))
        assert folder_digest(write_weights(tmp_path, config='{"a": 2}')) != before

    def test_a_truncated_file_is_another_model_and_no_error(self, tmp_path: Path) -> None:
        path = write_weights(tmp_path) / "model.safetensors"
        whole = path.read_bytes()
        digests = {folder_digest(tmp_path, sampled=True)}
        lengths = (0, 4, 8, 9, 60, len(whole) - 3000, len(whole) - 1)
        for length in lengths:
            path.write_bytes(whole[:length])
            digests.add(folder_digest(tmp_path, sampled=True))
        assert len(digests) == len(lengths) + 1

    @pytest.mark.parametrize(
        "head", [b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 4) + b"{x:}"]
    )
    def test_an_invalid_safetensors_file_is_sampled_as_opaque(
        self, tmp_path: Path, head: bytes
    ) -> None:
        (tmp_path / "model.safetensors").write_bytes(head + b"data")
        assert len(folder_digest(tmp_path, sampled=True)) == 64

    def test_other_formats_are_told_apart(self, tmp_path: Path) -> None:
        (tmp_path / "pytorch_model.bin").write_bytes(b"a" * 5000)
        before = folder_digest(tmp_path)
        (tmp_path / "pytorch_model.bin").write_bytes(b"b" * 5000)
        assert folder_digest(tmp_path) != before

    @pytest.mark.promise("weights")
    @pytest.mark.parametrize("load_format", ["pt", "npcache", "tensorizer", "somebodys"])
    def test_files_of_the_load_format_count(self, tmp_path: Path, load_format: str) -> None:
        """The safetensors files beside them do not."""
        write_weights(tmp_path)
        names = {"pt": "x.pt", "npcache": "x.bin", "tensorizer": "model.tensors"}
        if load_format in names:
            with pytest.raises(WeightsUnknown, match="no weights in"):
                identity_of(str(tmp_path), None, None, load_format=load_format)
        path = tmp_path / names.get(load_format, "x.gguf")
        path.write_bytes(b"a" * 5000)
        before = identity_of(str(tmp_path), None, None, load_format=load_format)
        safetensors = identity_of(str(tmp_path), None, None)
        path.write_bytes(b"b" * 5000)
        assert identity_of(str(tmp_path), None, None, load_format=load_format) != before
        assert identity_of(str(tmp_path), None, None) == safetensors
        assert identity_of(str(tmp_path), None, None, load_format="mistral") == safetensors

    def test_arrays_of_npcache_count_instead_of_weights(self, tmp_path: Path) -> None:
        def of() -> dict[str, str]:
            return identity_of(str(tmp_path), None, None, load_format="npcache")

        (tmp_path / "x.bin").write_bytes(b"a" * 5000)
        before = of()
        (tmp_path / "np").mkdir()
        (tmp_path / "np" / "weight_names.json").write_text('["w"]')
        (tmp_path / "np" / "w").write_bytes(b"a" * 5000)
        made = of()
        assert made != before
        (tmp_path / "x.bin").write_bytes(b"b" * 5000)
        assert of() == made
        (tmp_path / "np" / "w").write_bytes(b"b" * 5000)
        assert of() != made

    def test_weights_in_a_subfolder(self, tmp_path: Path) -> None:
        """Such as the audio encoder of Kimi-Audio."""
        before = folder_digest(write_weights(tmp_path))
        write_weights(tmp_path / "whisper-large-v3", fill=1)
        one = folder_digest(tmp_path)
        write_weights(tmp_path / "whisper-large-v3", fill=2)
        assert len({before, one, folder_digest(tmp_path)}) == 3

    @pytest.mark.promise("weights")
    def test_weights_from_other_places(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Ultravox names the models from which its encoder and language model are loaded."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        model = write_weights(tmp_path / "model")

        def of(**names: Any) -> dict[str, str]:
            config = SimpleNamespace(audio_model_id=None, text_model_id=None, _commit_hash="abc")
            vars(config).update(names)
            assert identity_of("org/m", None, config, load_format="dummy")["name"] == "org/m"
            return {
                **identity_of("org/m", None, config),
                "folder": str(identity_of(str(model), None, config)),
            }

        alone = of()
        encoder = write_weights(tmp_path / "encoder", fill=1)
        one = of(audio_model_id=str(encoder))
        write_weights(encoder, fill=2)
        other = of(audio_model_id=str(encoder))
        assert alone["name"] == one["name"]
        assert len({str(sorted(each.items())) for each in (alone, one, other)}) == 3
        assert len({each["folder"] for each in (alone, one, other)}) == 3
        with pytest.raises(WeightsUnknown, match=r"text_model_id.*may mean other weights"):
            of(text_model_id="org/llama")


BESIDE = [
    "model.safetensors.index.json",
    "consolidated.safetensors.index.json",
    "pytorch_model.bin.index.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
    "hf_quant_config.json",
    "sparse_attention_config.json",
    "modeling_mine.py",
    "tokenizer.py",
    "layers/attention.py",
    "audio_tokenizer/config.json",
    "nobody_knows.dat",
    "nested/deeper/still.json",
]


class TestFilesBesideTheWeights:
    """What decides which weights are loaded, or what they mean, is part of the identity."""

    @pytest.mark.promise("weights")
    @pytest.mark.parametrize("name", BESIDE)
    def test_they_count(self, tmp_path: Path, name: str) -> None:
        def seen() -> tuple[str, str]:
            return folder_digest(tmp_path), folder_digest(tmp_path, sampled=True)

        write_weights(tmp_path)
        digests = [seen()]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for content in ("{}", '{"weight_map": {}}'):
            path.write_text(content)
            digests.append(seen())
        path.rename(path.with_name("x-" + path.name))
        digests.append(seen())
        assert len({one for both in digests for one in both}) == 8

    @pytest.mark.promise("adapters")
    @pytest.mark.parametrize("name", [name for name in BESIDE if "/" not in name])
    def test_they_count_with_adapters(self, tmp_path: Path, name: str) -> None:
        write_weights(tmp_path)
        before = adapter_identity(str(tmp_path))
        (tmp_path / name).write_text("{}")
        assert adapter_identity(str(tmp_path)) != before

    def test_names_of_files_count(self, tmp_path: Path) -> None:
        """The same contents under each other's names are other weights."""
        one, other = write_weights(tmp_path / "a", fill=1), write_weights(tmp_path / "b", fill=2)
        for folder, names in ((one, ("1", "2")), (other, ("2", "1"))):
            (folder / "model.safetensors").unlink()
            for name, fill in zip(names, (b"x", b"y"), strict=True):
                (folder / f"{name}.safetensors").write_bytes(fill * 100)
        assert folder_digest(one) != folder_digest(other)

    @pytest.mark.promise("weights")
    @pytest.mark.parametrize(
        "name",
        [
            "tokenizer.json",
            "tokenizer_config.json",
            "special_tokens_map.json",
            "vocab.json",
            "merges.txt",
            "chat_template.jinja",
            "generation_config.json",
            "README.md",
            "LICENSE",
            "LICENSE.txt",
            "picture.png",
            ".gitattributes",
            ".cache/huggingface/download/x.json",
            "original/consolidated.00.pth",
            "checkpoint-5/model.safetensors",
            "pytorch_model.bin",
            "tf_model.h5",
            "model.onnx",
            "optimizer.pt",
            "__pycache__/modeling_mine.pyc",
            "lora/adapter_config.json",
        ],
    )
    def test_files_that_change_no_kv_do_not_count(self, tmp_path: Path, name: str) -> None:
        write_weights(tmp_path)
        before = [folder_digest(tmp_path, sampled=sampled) for sampled in (False, True)]
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
        assert [folder_digest(tmp_path, sampled=sampled) for sampled in (False, True)] == before

    def test_an_adapter_is_one_file_of_a_format(self, tmp_path: Path) -> None:
        """vLLM expects certain names, so safetensors with another name do not replace them."""
        (tmp_path / "other.safetensors").write_bytes(b"s" * 100)
        (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
        before = adapter_identity(str(tmp_path))
        (tmp_path / "adapter_model.bin").write_bytes(b"2" * 100)
        assert adapter_identity(str(tmp_path)) != before

    def test_a_folder_with_too_many_files_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_weights(tmp_path)
        places.patch(monkeypatch, "_FILES_MAX", 3)
        (tmp_path / "loop").symlink_to(tmp_path)
        with pytest.raises(WeightsUnknown, match="more than 3"):
            folder_digest(tmp_path)


class TestNames:
    def test_a_hub_model_is_its_name_and_commit(self) -> None:
        config = SimpleNamespace(_commit_hash="abc")
        assert identity_of("org/model", None, config) == {"name": "org/model", "revision": "abc"}
        # A branch moves; the commit that it stood at is what was loaded.
        assert identity_of("org/model", "main", config)["revision"] == "abc"
        assert identity_of("org/model", "v2", SimpleNamespace())["revision"] == "v2"

    def test_a_name_that_may_mean_other_weights_tomorrow_is_refused(self) -> None:
        with pytest.raises(WeightsUnknown, match="--revision"):
            identity_of("org/model", None, SimpleNamespace())
        assert identity_of("org/model", None, SimpleNamespace(), load_format="dummy")

    def test_weights_that_are_streamed_are_told_apart_by_their_revision(
        self, tmp_path: Path
    ) -> None:
        # vLLM pulls the configuration to a folder, which is the same for every fine-tune.
        (tmp_path / "config.json").write_text("{}")

        def of(url: str, revision: str | None) -> dict[str, str]:
            return identity_of(str(tmp_path), revision, None, streamed_from=url)

        assert of("s3://bucket/a", "1") != of("s3://bucket/b", "1")
        assert of("s3://bucket/a", "1") != of("s3://bucket/a", "2")
        with pytest.raises(WeightsUnknown, match="--revision"):
            of("s3://bucket/a", None)

    def test_a_folder_without_weights_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(WeightsUnknown, match="no weights in"):
            identity_of(str(tmp_path), "main", None)
        assert identity_of(str(tmp_path), None, None, load_format="dummy")

    def test_a_single_file_is_what_it_holds(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"a" * 5000)
        before = identity_of(str(path), None, None)
        path.write_bytes(b"b" * 5000)
        assert identity_of(str(path), None, None) != before

    def test_an_adapter_is_its_files(self, tmp_path: Path) -> None:
        one = write_weights(tmp_path / "one")
        other = write_weights(tmp_path / "other")
        assert adapter_identity(str(one)) == adapter_identity(str(other))
        (other / "adapter_config.json").write_text('{"lora_alpha": 32}')
        assert adapter_identity(str(one)) != adapter_identity(str(other))

    @pytest.mark.promise("adapters")
    def test_an_adapter_in_the_home_folder_is_its_files(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        before = adapter_identity(str(write_weights(tmp_path / "a", fill=1)))
        assert adapter_identity("~/a") == before
        write_weights(tmp_path / "a", fill=2)
        assert adapter_identity("~/a") != before

    @pytest.mark.promise("adapters")
    def test_an_adapter_of_a_hub_is_its_only_snapshot(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM cannot have loaded another one."""
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        repository = tmp_path / "models--org--x"
        snapshot = write_weights(repository / "snapshots" / ("a" * 40))
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("a" * 40)
        # Whatever the environment said when the library was first imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        with pytest.raises(WeightsUnknown, match="HF_HUB_OFFLINE"):
            adapter_identity("org/x")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        assert adapter_identity("org/x") == adapter_identity(str(snapshot))
        write_weights(repository / "snapshots" / ("b" * 40))
        for path in ("org/x", "org/unknown", "no/hub/id", "/nowhere"):
            with pytest.raises(WeightsUnknown, match="may mean other weights"):
                adapter_identity(path)

    def test_an_adapter_without_weights_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(WeightsUnknown, match="no weights in"):
            adapter_identity(str(tmp_path))


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
        quantization_config=values["quantization_config"],
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
        lora_config=lora_dtype and SimpleNamespace(lora_dtype=lora_dtype),
    )


def namespace(
    folder: Path, heads: int = 4, dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> bytes:
    spec = FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=64, dtype=dtype)
    config = config_of(folder, **changes)
    return namespace_of(config, block_tokens=32, blocks_per_chunk=8, spec=spec)


class TestAdapters:
    def test_adapters_for_text_of_multimodal_models_before_033(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        text = SimpleNamespace(
            lora_config=SimpleNamespace(), model_config=SimpleNamespace(multimodal_config=None)
        )
        media = SimpleNamespace(
            lora_config=SimpleNamespace(),
            model_config=SimpleNamespace(multimodal_config=SimpleNamespace()),
        )
        unadapted = SimpleNamespace(lora_config=None, model_config=media.model_config)
        manager = "vllm.lora.model_manager.LoRAModelManager._get_text_lora_names"
        monkeypatch.setattr(manager, None, raising=False)
        assert adapter_settings(media)
        # All others share, whatever their release.
        assert not adapter_settings(text)
        assert not adapter_settings(unadapted)
        monkeypatch.delattr(manager)
        assert not adapter_settings(media)


class TestNamespace:
    @pytest.fixture(autouse=True)
    def avx512(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM names no encoding of an FP8 cache on CPUs without it. No kernel runs here."""
        monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: True)

    def test_it_is_canonical_json_with_no_path(self, tmp_path: Path) -> None:
        content = namespace(write_weights(tmp_path))
        assert str(tmp_path).encode() not in content
        description = json.loads(content)
        assert content == json.dumps(description, sort_keys=True, separators=(",", ":")).encode()
        assert len(digest_of(content)) == 32

    def test_ranks_of_one_engine_agree(self, tmp_path: Path) -> None:
        write_weights(tmp_path)
        assert namespace(tmp_path, heads=4) == namespace(tmp_path, heads=8)

    @pytest.mark.promise("engine-settings")
    @pytest.mark.parametrize(
        "changes",
        [
            {"dtype": torch.float16},
            {"cache_dtype": "fp8_e4m3"},
            {"layers": 3},
            {"kv_heads": 4},
            {"quantization": "awq"},
            {"rope": {"rope_theta": 500000.0}},
            {"hf_overrides": {"rms_norm_eps": 0.1}},
            {"load_format": "dummy"},
            {"load_format": "somebodys"},
            {"class_overrides": {"LlamaForCausalLM": "mine:Llama"}},
            {"quantization_config": {"linear": "fp8"}},
            {"architecture": "TransformersForCausalLM"},
            {"runner": "pooling"},
            {"lora_dtype": torch.float16},
            {"hf_config_path": "org/other"},
            {"weights_digest": "sampled"},
            {"media": {"mm_processor_kwargs": {"num_crops": 4}}},
            {"media": {"media_io_kwargs": {"video": {"num_frames": 40}}}},
            {"media": {"video_pruning_rate": 0.5}},
            {"media": {"mm_encoder_attn_dtype": "fp8"}},
        ],
    )
    def test_all_that_changes_the_bytes_is_in_it(
        self, tmp_path: Path, changes: dict[str, Any]
    ) -> None:
        write_weights(tmp_path)
        assert namespace(tmp_path, **changes) != namespace(tmp_path)

    def test_tensorizer_weights_in_another_place(self, tmp_path: Path) -> None:
        write_weights(tmp_path)
        (tmp_path / "model.tensors").write_bytes(b"a" * 5000)

        def of(loader: dict[str, Any], revision: str | None = None) -> bytes:
            config: Any = {"load_format": "tensorizer", "loader": loader, "revision": revision}
            return namespace(tmp_path, **config)

        # As vLLM sets it.
        assert of({"tensorizer_config": {"tensorizer_dir": str(tmp_path)}}) == of({})
        with pytest.raises(WeightsUnknown, match=r"streamed from s3://b/x\.tensors"):
            of({"tensorizer_uri": "s3://b/x.tensors"})
        assert of({"tensorizer_uri": "s3://b/x.tensors"}, "1") != of({}, "1")

    @pytest.mark.promise("batch-invariant")
    def test_batch_invariant_engines_share_among_themselves(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_weights(tmp_path)
        # A sum over ranks is another one; of experts it is over those of all engines in step, and
        # over parts of each or over whole ones.
        changes: list[dict[str, Any]] = [
            {},
            {"tensors": 2},
            {"data_ranks": 2},
            {"data_ranks": 2, "by_expert": True},
            {"tensors": 2, "by_expert": True},
            {"data_ranks": 2, "tensors": 2},
            # What is compiled is fused.
            {"eager": True},
        ]
        found = {namespace(tmp_path, **one) for one in changes}
        assert len(found) == 1
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        found |= {namespace(tmp_path, **one) for one in changes}
        assert len(found) == len(changes) + 1
        assert namespace(tmp_path) == namespace(tmp_path, by_expert=True), "of one rank"
        monkeypatch.setattr("vllm.__version__", "0.0.1")
        assert namespace(tmp_path) not in found

    def test_the_dtype_of_the_model_counts_beside_a_quantized_cache(self, tmp_path: Path) -> None:
        write_weights(tmp_path)
        fp8 = namespace(tmp_path, cache_dtype="fp8")
        assert namespace(tmp_path, cache_dtype="fp8", model_dtype=torch.float16) != fp8
        assert namespace(tmp_path, cache_dtype="fp8", skip_layers=["0"]) != fp8

    def test_how_the_engine_prepares_media_is_in_it_and_its_cache_is_not(
        self, tmp_path: Path
    ) -> None:
        write_weights(tmp_path)
        assert namespace(tmp_path, media={}) == namespace(tmp_path)
        assert namespace(tmp_path, media={"mm_processor_cache_gb": 1}) == namespace(tmp_path)
        scales = tmp_path / "scales.json"
        found = set[bytes]()
        for text in ("{}", '{"a": 1}'):
            scales.write_text(text)
            media = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(scales)}
            found.add(namespace(tmp_path, media=media))
        assert len(found) == 2

    @pytest.mark.promise("engine-settings")
    @pytest.mark.parametrize("nested", [False, True])
    def test_long_rope_is_scaled_by_the_longest_context(self, tmp_path: Path, nested: bool) -> None:
        """vLLM uses the long factors for all positions if `max_model_len` is long."""
        write_weights(tmp_path)
        rope: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
        rope = {"full_attention": rope} if nested else rope

        def of(max_model_len: int) -> bytes:
            return namespace(tmp_path, rope=rope, max_model_len=max_model_len)

        assert of(2048) == of(4096) != of(4097) == of(131072)
        assert namespace(tmp_path, max_model_len=131072) == namespace(tmp_path)

    @pytest.mark.promise("engine-settings")
    def test_an_override_function_is_the_configuration_it_makes(self, tmp_path: Path) -> None:
        """Its name may mean another one tomorrow, and its address differs between processes."""
        write_weights(tmp_path)

        def to_overridden(config: Any) -> Any:
            return config

        def of(made: float) -> bytes:
            return namespace(tmp_path, hf_overrides=to_overridden, made=made)

        assert of(0.1) == of(0.1) != of(0.3)

    def test_another_configuration_file_is_what_it_holds(self, tmp_path: Path) -> None:
        write_weights(tmp_path)
        other = write_weights(tmp_path / "other", config='{"rope_theta": 5}')
        before = namespace(tmp_path, hf_config_path=str(other))
        (other / "config.json").write_text('{"rope_theta": 6}')
        assert namespace(tmp_path, hf_config_path=str(other)) != before

    def test_block_sizes_that_can_be_converted_share(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_weights(tmp_path)

        def of(block_tokens: int, chunk_tokens: int = 256) -> bytes:
            spec = FullAttentionSpec(
                block_size=block_tokens, num_kv_heads=4, head_size=64, dtype=torch.bfloat16
            )
            return namespace_of(
                config_of(tmp_path),
                block_tokens=block_tokens,
                blocks_per_chunk=chunk_tokens // block_tokens,
                spec=spec,
            )

        assert of(32) == of(64) == of(128)
        assert of(32) != of(32, chunk_tokens=512), "their keys would hardly ever meet"

        def unknown(*_: object) -> str:
            return "cpu-arm-neon"

        places.patch(monkeypatch, "encoding_of", unknown)
        assert of(32) != of(64)

    def test_the_cpu_encoding_names_how_kernels_pack(self, tmp_path: Path) -> None:
        spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)
        assert encoding_of(config_of(tmp_path), 32, spec).startswith("cpu-")


def test_the_gpu_encoding_names_what_selects_the_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capability = SimpleNamespace(major=9, minor=0)
    platform = SimpleNamespace(
        is_cpu=lambda: False, is_cuda=lambda: True, get_device_capability=lambda: capability
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)

    def encoding(
        backend: str | None,
        cache_dtype: str = "auto",
        dtype: Any = torch.bfloat16,
        **kinds: str,
    ) -> str:
        chosen = None if backend is None else SimpleNamespace(name=backend)
        per_kind = {kind: SimpleNamespace(name=name) for kind, name in kinds.items()}
        config = SimpleNamespace(
            attention_config=SimpleNamespace(backend=chosen, backend_per_kind=per_kind),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        )
        return encoding_of(config, 16, replace(spec, dtype=dtype))

    assert encoding(None) == "cuda-9.0-auto+token"
    assert encoding("FLASH_ATTN") == "cuda-9.0-FLASH_ATTN+token"
    assert encoding(None, "fp8", torch.float8_e4m3fn) == "cuda-9.0-auto+token"
    # As `--attention-config.backend_per_kind` has it.
    kinds = {"sliding_window": "TRITON_ATTN", "full_attention": "FLASHINFER"}
    named = "cuda-9.0-auto-full_attention=FLASHINFER-sliding_window=TRITON_ATTN"
    assert encoding(None, **kinds) == f"{named}+token"
    assert encoding(None, sliding_window="OTHER") == "cuda-9.0-auto-sliding_window=OTHER"
    # Scales beside the values, or layouts that nobody has looked at.
    assert encoding("TURBOQUANT") == "cuda-9.0-TURBOQUANT"
    assert encoding(None, "int8_per_token_head", torch.int8) == "cuda-9.0-auto"
    assert encoding(None, "nvfp4", torch.uint8) == "cuda-9.0-auto"
    assert encoding(None, "auto", torch.uint8) == "cuda-9.0-auto"
