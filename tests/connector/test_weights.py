"""Which weights an engine has: equal for equal bytes, whatever the path, and refused if unknown."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision

from connector.identity.namespace import served_as
from connector.identity.weights import WeightsUnknown, model_identity, read_adapter
from connector.options import samples_weights
from tests import places
from tests.connector.configurations import write_model
from tests.connector.weights import TENSORS, config_of, folder_digest, read_now, write_weights

SHOW_IDENTITIES = """
import json, sys
from pathlib import Path
from vllm.config import ModelConfig
from connector.identity.weights import model_identity
for commit in sys.argv[2:]:
    Path(sys.argv[1]).write_text(commit)
    config = ModelConfig(model="org/model", skip_tokenizer_init=True)
    print(json.dumps(model_identity(config)["revision"]))
"""


def identity_of(
    model: str,
    revision: str | None,
    hf_config: Any,
    *,
    load_format: str = "auto",
    streamed_from: str = "",
    hf_config_path: str | None = None,
) -> dict[str, str]:
    config = SimpleNamespace(
        model=model, revision=revision, hf_config=hf_config, hf_config_path=hf_config_path
    )
    found = model_identity(config, load_format, streamed_from=streamed_from)
    identity: dict[str, str] = read_now(found)
    return identity


def adapter_identity(path: str) -> str:
    return read_adapter(path).digest


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

    @pytest.mark.promise("weights")
    def test_consolidated_weights_are_told_from_those_beside_them(self, tmp_path: Path) -> None:
        """vLLM takes them with `mistral`, and with `auto` if there are any; else the others."""

        def of(load_format: str) -> dict[str, str]:
            return identity_of(str(tmp_path), None, None, load_format=load_format)

        write_weights(tmp_path)
        assert of("auto") == of("safetensors")
        (tmp_path / "consolidated.safetensors").write_bytes(b"a" * 5000)
        consolidated = of("auto")
        assert of("mistral") == consolidated != of("safetensors")
        write_weights(tmp_path, fill=2)
        assert of("mistral") == of("auto") == consolidated
        (tmp_path / "consolidated.safetensors").write_bytes(b"b" * 5000)
        assert of("mistral") == of("auto") != consolidated

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
    def test_by_default_a_hubs_repository_may_give_other_weights(self) -> None:
        """Those of Mistral's format, if there are any."""
        config = SimpleNamespace(_commit_hash="abc")

        def of(load_format: str) -> dict[str, str]:
            return identity_of("org/m", None, config, load_format=load_format)

        assert of("safetensors") == of("fastsafetensors") != of("auto") != of("mistral")

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
            "lost+found/model.safetensors",
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

    @pytest.mark.parametrize("given", [None, "main", "v2"])
    def test_a_revision_that_vllm_has_resolved_is_its_commit(self, given: str | None) -> None:
        """Its text is the branch; configurations of transformers 5.19 have none."""
        revision = ResolvedRevision("abc", given)
        found = identity_of("org/model", revision, SimpleNamespace())
        assert found == {"name": "org/model", "revision": "abc"}

    def test_a_commit_of_another_configuration_is_not_the_models(self) -> None:
        config = SimpleNamespace(_commit_hash="abc")
        with pytest.raises(WeightsUnknown, match="--revision"):
            identity_of("org/model", None, config, hf_config_path="org/other")

    @pytest.mark.promise("weights")
    def test_two_commits_of_one_branch_are_two_models(self, tmp_path: Path) -> None:
        """With vLLM's own configuration and a hub's cache on the disk."""
        repository = tmp_path / "hub" / "models--org--model"
        branch, commits = repository / "refs" / "main", ["a" * 40, "b" * 40]
        branch.parent.mkdir(parents=True)
        for commit in commits:
            snapshot = repository / "snapshots" / commit
            snapshot.mkdir(parents=True)
            write_model(snapshot)
        shown = subprocess.run(
            [sys.executable, "-c", SHOW_IDENTITIES, str(branch), *commits],
            env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr
        assert [json.loads(line) for line in shown.stdout.splitlines()[-2:]] == commits

    @pytest.mark.parametrize("revision", [None, "main", "master"])
    def test_a_name_that_may_mean_other_weights_tomorrow_is_refused(
        self, revision: str | None
    ) -> None:
        with pytest.raises(WeightsUnknown, match="--revision"):
            identity_of("org/model", revision, SimpleNamespace())
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
        for revision in (None, ResolvedRevision("abc")):
            with pytest.raises(WeightsUnknown, match="--revision"):
                of("s3://bucket/a", revision)
        assert of("s3://bucket/a", ResolvedRevision("abc", "1")) == of("s3://bucket/a", "1")

    @pytest.mark.parametrize("load_format", ["ipc_cache", "modelexpress"])
    def test_weights_that_another_process_has_are_refused(
        self, tmp_path: Path, load_format: str
    ) -> None:
        write_weights(tmp_path)
        with pytest.raises(WeightsUnknown, match="load_format"):
            identity_of(str(tmp_path), None, None, load_format=load_format)

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
