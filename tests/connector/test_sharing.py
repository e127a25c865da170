"""Who shares chunks with whom, and who does not, in vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from tests.connector.configurations import (
    CHUNK_TOKENS,
    request_of,
)
from tests.connector.double import SALT
from tests.connector.engine import Engine
from tests.connector.prompts import (
    CACHED,
    PROMPT,
    chain_of,
    seen,
)
from tiers.kv.index import FLAG_HOST, tag_of


class TestWhoShares:
    def test_tenants_do_not(self, engine: Engine) -> None:
        seen(engine, salt="one")
        engine.run(request_of("other", PROMPT, max_tokens=1, salt="other"))
        engine.run(request_of("nobody", PROMPT, max_tokens=1))
        engine.forget()
        assert engine.computed["other"] == engine.computed["nobody"] == len(PROMPT)
        engine.run(request_of("same", PROMPT, max_tokens=1, salt="one"))
        assert engine.computed["same"] == len(PROMPT) - CACHED

    @pytest.mark.promise("adapters")
    def test_adapters_do_not(self, engine: Engine, tmp_path: Path) -> None:
        keys: list[bytes] = []
        for name in ("a", "b", "c"):
            path = str(tmp_path / name)
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_model.bin").write_bytes(name.encode() * 100)
            lora = LoRARequest(name, 1 + len(keys), path)
            request = request_of(name, PROMPT, lora_request=lora)
            engine.role.new_request(request)
            keys.append(engine.role.requests[name].chain.keys[0])
        assert len({*keys, chain_of(engine, PROMPT).keys[0]}) == 4

    @pytest.mark.promise("adapters")
    def test_an_adapter_that_was_trained_on_is_another(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        def key(number: int, *, inplace: bool) -> bytes:
            lora = LoRARequest("a", 1, str(tmp_path), load_inplace=inplace)
            engine.role.new_request(request_of(f"r{number}", PROMPT, lora_request=lora))
            return engine.role.requests[f"r{number}"].chain.keys[0]

        (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
        first = key(1, inplace=False)
        (tmp_path / "adapter_model.bin").write_bytes(b"2" * 100)
        assert key(2, inplace=True) != first

    @pytest.mark.promise("adapters")
    @pytest.mark.parametrize("inplace", [False, True])
    def test_nothing_is_stored_of_what_begins_with_the_kv_of_an_adapter_of_before(
        self, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture, inplace: bool
    ) -> None:
        """vLLM's own cache knows both by one name and path."""

        def run(name: str, number: int, length: int, *, inplace: bool = False) -> set[bytes]:
            lora = LoRARequest("a", number, str(tmp_path), load_inplace=inplace)
            before = set(engine.sidecar.parts)
            request = request_of(name, PROMPT[:length], max_tokens=1, lora_request=lora)
            engine.run(request)
            return set(engine.sidecar.parts) - before

        weights = tmp_path / "adapter_model.bin"
        weights.write_bytes(b"1" * 100)
        assert run("old", 1, 200)
        # Unloaded, trained on, loaded again under another number; or in its place.
        weights.write_bytes(b"2" * 100)
        number = 1 if inplace else 2
        for name, length in (("new", 200), ("longer", 300)):
            assert not run(name, number, length, inplace=inplace)
            assert engine.computed[name] < length
        assert caplog.text.count("does not tell them apart") == 1
        # What begins otherwise is its own.
        other = request_of(
            "other",
            [number + 1 for number in PROMPT],
            max_tokens=1,
            lora_request=LoRARequest("a", number, str(tmp_path), load_inplace=inplace),
        )
        before = len(engine.sidecar.parts)
        engine.run(other)
        assert len(engine.sidecar.parts) > before
        engine.forget()
        assert run("after", number, 300, inplace=inplace)
        assert engine.computed["after"] == 300
        engine.forget()
        assert not run("hit", number, 300, inplace=inplace)
        assert engine.computed["hit"] == 300 - CACHED
        engine.check_idle()

    @pytest.mark.promise("adapters")
    def test_nor_of_what_waits_with_an_adapter_and_begins_with_the_kv_of_the_next(
        self, make: Callable[..., Engine], tmp_path: Path
    ) -> None:
        engine = make()
        weights = tmp_path / "adapter_model.bin"
        weights.write_bytes(b"1" * 100)
        new, old = (
            request_of(name, PROMPT, max_tokens=1, lora_request=LoRARequest("a", number, path))
            for name, number, path in (("new", 2, str(tmp_path)), ("old", 1, str(tmp_path)))
        )
        # Known before the other, which is computed first.
        engine.role.new_request(old)
        weights.write_bytes(b"2" * 100)
        engine.run(new)
        stored = set(engine.sidecar.parts)
        assert stored
        engine.run(old)
        assert engine.computed["old"] < len(PROMPT)
        assert set(engine.sidecar.parts) == stored
        engine.check_idle()

    @pytest.mark.promise("adapters")
    def test_how_adapters_are_applied_tells_them_apart(
        self, make: Callable[..., Engine], tmp_path: Path
    ) -> None:
        """And not what is computed without one."""
        (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
        three_d = LoRARequest("c", 3, str(tmp_path), is_3d_lora_weight=True)
        keys: list[dict[str, bytes]] = []
        for settings in (
            {},
            {"target_modules": ["q_proj", "o_proj"]},
            {"target_modules": ["o_proj", "q_proj"]},
            {"enable_moe_shared_loras": True},
            {"enable_mixed_moe_lora_format": True},
            {"enable_tower_connector_lora": True},
        ):
            engine = make(adapters=settings)
            for name, lora in (
                ("base", None),
                ("adapter", LoRARequest("a", 1, str(tmp_path))),
                ("three", three_d),
            ):
                engine.role.new_request(request_of(name, PROMPT, lora_request=lora))
            states = engine.role.requests
            keys.append({name: states[name].chain.keys[0] for name in states})
        assert len({one["base"] for one in keys}) == 1
        assert keys[1] == keys[2]
        assert len({one["adapter"] for one in keys}) == len(keys) - 1
        assert all(one["three"] != one["adapter"] for one in keys)

    @pytest.mark.promise("adapters")
    def test_requests_beside_an_adapter_that_is_loaded_in_its_place_are_void(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        """vLLM replaces it at once, in the midst of requests that it computes with it."""

        def lora(path: str, *, inplace: bool) -> LoRARequest:
            (tmp_path / path).mkdir(exist_ok=True)
            (tmp_path / path / "adapter_model.bin").write_bytes(path.encode() * 100)
            return LoRARequest("a", 1, str(tmp_path / path), load_inplace=inplace)

        old, new = lora("old", inplace=False), lora("new", inplace=True)
        other = request_of("other", PROMPT, max_tokens=60)
        other.kv_transfer_params = {"kvlake": {"write": False}}
        engine.add(other)
        running = engine.add(request_of("running", PROMPT, max_tokens=60, lora_request=old))
        short = engine.add(request_of("short", PROMPT[:224], max_tokens=18, lora_request=old))
        engine.finish(short)
        engine.sidecar.run_all()
        stored = set(engine.sidecar.parts)
        assert engine.role.planner.planned, "its last blocks, which are not sent yet"
        beside = engine.add(request_of("beside", PROMPT, max_tokens=1, lora_request=new))
        states = engine.role.requests
        assert states["running"].void
        assert states["beside"].void
        assert not states["other"].void
        engine.abort(other)
        engine.finish(running, beside)
        engine.settle()
        assert set(engine.sidecar.parts) == stored
        engine.check_idle()
        # What it computed beside those of before may be of either.
        late = engine.add(request_of("late", PROMPT, max_tokens=1, lora_request=new))
        engine.finish(late)
        engine.settle()
        assert set(engine.sidecar.parts) == stored
        # Once those are over, and forgotten, it is cached as any other.
        assert engine.scheduler.reset_prefix_cache()
        after = engine.add(request_of("after", PROMPT, max_tokens=1, lora_request=new))
        assert not states["after"].void
        engine.finish(after)
        engine.settle()
        assert len(engine.sidecar.parts) > len(stored)
        # vLLM has another one loaded under that number, or will have.
        engine.add(request_of("again", PROMPT, max_tokens=1, lora_request=old))
        assert "again" not in states

    def test_an_adapter_that_cannot_be_read_is_not_cached(
        self, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "adapter_config.json").symlink_to(tmp_path / "adapter_config.json")
        (tmp_path / "adapter_model.bin").symlink_to(tmp_path / "adapter_model.bin")
        unread = LoRARequest("a", 1, str(tmp_path))
        unknown = LoRARequest("b", 2, "org/b")
        for number, lora in enumerate((unread, unknown, unread, unknown)):
            engine.role.new_request(request_of(f"r{number}", PROMPT, lora_request=lora))
        assert not engine.role.requests
        assert caplog.text.count("is not cached") == 2, "told once of each"

    def test_an_adapter_whose_tensors_are_elsewhere_is_not_cached(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        """As vLLM 0.31 can be told."""
        (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
        lora = LoRARequest("a", 1, str(tmp_path))
        fields = {name: getattr(lora, name) for name in lora.__struct_fields__}
        fields["tensorizer_config_dict"] = {"tensorizer_dir": "s3://bucket/a"}
        streamed = SimpleNamespace(**fields)
        request = request_of("a", PROMPT)
        request.lora_request = streamed
        engine.role.new_request(request)
        assert not engine.role.requests

    @pytest.mark.promise("multimodal")
    def test_images_do_not(self, engine: Engine) -> None:
        def first_key(name: str, identifier: str) -> bytes:
            feature = MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=10, length=20),
            )
            engine.role.new_request(request_of(name, PROMPT, mm_features=[feature]))
            return engine.role.requests[name].chain.keys[0]

        keys = {first_key("a", "cat"), first_key("b", "dog"), chain_of(engine, PROMPT).keys[0]}
        assert len(keys) == 3

    @pytest.mark.promise("media-not-hashed")
    @pytest.mark.parametrize("caching", [True, False])
    @pytest.mark.parametrize("cache_gb", [0.0, 4.0])
    def test_images_that_vllm_only_counts_are_not_cached(
        self,
        make: Callable[..., Engine],
        caplog: pytest.LogCaptureFixture,
        cache_gb: float,
        caching: bool,
    ) -> None:
        """Without its two caches vLLM hashes no image: the first of each process has one name."""
        engine = make(media_cache_gb=cache_gb, prefix_caching=caching)
        counted = not cache_gb and not caching
        feature = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier="renderer0-mm-1-image-0",
            mm_position=PlaceholderRange(offset=10, length=20),
        )
        for name, features in (("image", [feature]), ("text", [])):
            engine.role.new_request(request_of(name, PROMPT, mm_features=features))
        assert set(engine.role.requests) == ({"text"} if counted else {"image", "text"})
        assert ("images, audio or video are not cached" in caplog.text) == counted

    @pytest.mark.promise("adapters", "multimodal")
    def test_images_of_an_adapter_that_became_another_are_not_cached(
        self, make: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """vLLM keeps embeddings by the adapter's name, also if the files are in another folder."""
        engine = make(media_cache_gb=4.0, adapters={"enable_tower_connector_lora": True})
        image = MultiModalFeatureSpec(
            data=None,
            modality="image",
            identifier="a:cat",
            mm_position=PlaceholderRange(offset=10, length=20),
        )
        adapters: dict[str, LoRARequest] = {}
        for number, (version, name) in enumerate((("1", "a"), ("2", "a"), ("3", "b")), 1):
            folder = tmp_path / version
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(version.encode() * 100)
            adapters[version] = LoRARequest(name, number, str(folder))

        def cached(version: str, *features: MultiModalFeatureSpec) -> bool:
            name = f"r{len(caplog.records)}-{version}-{len(features)}"
            request = request_of(
                name, PROMPT, lora_request=adapters[version], mm_features=[*features]
            )
            engine.role.new_request(request)
            return engine.role.requests.pop(name, None) is not None

        assert cached("1", image)
        assert not cached("2", image)
        assert cached("2")
        assert not cached("1", image)
        assert cached("3", image)
        assert caplog.text.count("use a new name for new weights") == 1

    @pytest.mark.promise("prompt-embeddings", "streaming-input")
    def test_embeddings_and_streams_are_not_cached(self, engine: Engine) -> None:
        embeds = request_of("e", PROMPT)
        embeds.prompt_embeds = torch.zeros(1)
        stream = request_of("s", PROMPT, resumable=True)
        for request in (embeds, stream):
            engine.role.new_request(request)
            assert engine.role.matched_tokens(request, 0) == 0
            engine.role.allocated(request, list, 0)
            engine.role.request_finished(request, [])
        assert not engine.role.requests

    @pytest.mark.promise("no-cache-reads")
    def test_a_request_that_may_not_read_the_cache(self, engine: Engine) -> None:
        seen(engine)
        request = request_of("a", PROMPT, max_tokens=1)
        request.skip_reading_prefix_cache = True
        engine.run(request)
        assert engine.computed["a"] == len(PROMPT)

    @pytest.mark.promise("roles")
    @pytest.mark.parametrize(("kv_role", "reads"), [("kv_producer", False), ("kv_consumer", True)])
    def test_the_role_in_vllms_configuration(
        self, make: Callable[..., Engine], kv_role: str, reads: bool
    ) -> None:
        engine = make(kv_role=kv_role)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert bool(engine.sidecar.parts) is not reads
        keys = chain_of(engine, PROMPT).keys
        for key in keys:
            engine.sidecar.index.set(tag_of(key, SALT), FLAG_HOST)
        engine.forget()
        request = request_of("b", PROMPT)
        engine.role.new_request(request)
        expected = len(keys) * CHUNK_TOKENS if reads else 0
        assert engine.role.matched_tokens(request, 0) == expected
