"""What a namespace consists of: equal for equal weights, different for anything else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connector.identity.namespace import adapter_settings, digest_of, encoding_of
from connector.identity.weights import WeightsUnknown
from tests import places
from tests.connector.weights import config_of, namespace_of, write_weights


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
            {"without_window": True},
            {"architecture": "TransformersForCausalLM"},
            {"runner": "pooling"},
            {"lora_dtype": torch.float16},
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

    @pytest.mark.promise("engine-settings")
    def test_settings_of_a_quantization_in_a_file(self, tmp_path: Path) -> None:
        model, file = write_weights(tmp_path / "model"), tmp_path / "torchao.json"
        given: Any = {"hf_overrides": {"quantization_config_file": str(file)}}
        file.write_text('{"bits": 8}')
        before = namespace(model, **given)
        file.write_text('{"bits": 4}')
        assert namespace(model, **given) != before

    @pytest.mark.promise("engine-settings")
    @pytest.mark.parametrize("kind", ["ONLINE", "INPUT"])
    def test_settings_of_a_quantization_in_a_variable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        model, file = write_weights(tmp_path / "model"), tmp_path / "humming.json"
        found = [namespace(model)]
        file.write_text('{"dtype": "int8"}')
        for value in ('{"dtype": "int4"}', str(file)):
            monkeypatch.setenv(f"VLLM_HUMMING_{kind}_QUANT_CONFIG", value)
            found.append(namespace(model))
        file.write_text('{"dtype": "int6"}')
        found.append(namespace(model))
        assert len(set(found)) == 4

    @pytest.mark.promise("engine-settings")
    @pytest.mark.parametrize(
        ("name", "value", "default"),
        [
            ("VLLM_MARLIN_INPUT_DTYPE", "int8", ""),
            ("VLLM_B12X_MOE_FP4_FORCE_A16", "1", "0"),
            ("VLLM_CPU_INT4_W4A8", "0", "1"),
        ],
    )
    def test_a_variable_that_sets_the_precision_of_activations(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, default: str
    ) -> None:
        model = write_weights(tmp_path)
        monkeypatch.delenv(name, raising=False)
        before = namespace(model)
        monkeypatch.setenv(name, value)
        assert namespace(model) != before
        monkeypatch.setenv(name, default)
        assert namespace(model) == before

    @pytest.mark.promise("engine-settings")
    @pytest.mark.parametrize(
        "changes",
        [
            {"moe_backend": "marlin"},
            {"per_quant": {"nvfp4_w4a16": "humming"}},
            {"VLLM_USE_DEEP_GEMM": "0"},
            {"VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel"},
        ],
    )
    def test_kernels_count_where_weights_are_quantized(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
    ) -> None:
        """Some quantize the weights again. In other models they change only rounding."""
        model = write_weights(tmp_path)
        before = [namespace(model), namespace(model, quantization="fp8")]
        for name, value in changes.items():
            if name.isupper():
                monkeypatch.setenv(name, value)
        after = [namespace(model, **changes), namespace(model, quantization="fp8", **changes)]
        assert after[0] == before[0]
        assert after[1] != before[1]

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
        # For a Mistral model it chooses the processor of images.
        as_hugging_face: Any = {"config_format": "hf"}
        assert namespace(tmp_path, media={}, **as_hugging_face) != namespace(tmp_path)
        assert namespace(tmp_path, **as_hugging_face) == namespace(tmp_path)
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

        def of(max_model_len: int, **changes: Any) -> bytes:
            return namespace(tmp_path, rope=rope, max_model_len=max_model_len, **changes)

        assert of(2048) == of(4096) != of(4097) == of(131072)
        # Fitted to the memory after the layers were made.
        assert of(2048, asked=-1) == of(131072)
        assert namespace(tmp_path, max_model_len=131072) == namespace(tmp_path)

    @pytest.mark.promise("engine-settings")
    def test_llama_4_scales_queries_by_the_longest_context(self, tmp_path: Path) -> None:
        """From some position on, unless a generation configuration says otherwise."""
        write_weights(tmp_path)

        def of(max_model_len: int, model: str = "Llama4ForCausalLM", **changes: Any) -> bytes:
            changes |= {"max_model_len": max_model_len, "architecture": model}
            return namespace(tmp_path, **changes)

        assert of(4096) == of(32768) != of(32769) == of(131072)
        assert of(4096, generation={"attn_temperature_tuning": True}) == of(131072)
        assert of(131072, generation={"attn_temperature_tuning": False}) == of(4096)
        # Fitted to the memory after the layers were made.
        assert of(4096, asked=-1) == of(131072)
        other = "Llama3ForCausalLM"
        assert of(4096, other) == of(131072, other)

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
        assert before != namespace(tmp_path)

    def test_a_configuration_that_may_be_another_tomorrow_is_refused(self, tmp_path: Path) -> None:
        write_weights(tmp_path)
        with pytest.raises(WeightsUnknown, match="org/other"):
            namespace(tmp_path, hf_config_path="org/other")

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

    @pytest.mark.promise("engine-settings")
    def test_cpus_that_pack_a_quantized_cache_in_tiles_share_with_no_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """vLLM decides that by the model's dtype, not by the cache's."""

        def of(tiles: bool, dtype: torch.dtype) -> bytes:
            monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
            return namespace(folder, dtype=torch.uint8, cache_dtype="fp8", model_dtype=dtype)

        folder = write_weights(tmp_path)
        assert of(True, torch.bfloat16) != of(False, torch.bfloat16)
        assert of(True, torch.float16) == of(False, torch.float16)


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
