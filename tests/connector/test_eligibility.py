"""Engines that are served without the cache, and the reasons."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from vllm.config import ModelConfig
from vllm.config.ec_transfer import ECTransferConfig
from vllm.config.pooler import PoolerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import CpuArchEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
    UniformTypeKVCacheSpecs,
)

from connector.client import Attempt, Client
from connector.export import ExportedMemory, ExportRefused
from connector.identity.eligibility import (
    SINCE_VLLM_0_33,
    media_unsupported_reason,
    nodes_unsupported_reason,
    prefix_unsupported_reason,
)
from connector.vllm import KVLakeConnector
from sidecar.protocol import Role, Submit
from tests import places
from tests.connector.configurations import (
    BLOCK_TOKENS,
    kv_cache_config,
    request_of,
    spec_of,
    vllm_config,
)
from tests.connector.engine import Engine
from tiers.kv.memfd import sealed_memfd

PROMPT = [number % 89 for number in range(300)]


def reason_of(model: Path, change: Callable[[Any, Any], Any], caplog: Any) -> str:
    config, kv = vllm_config(model), kv_cache_config()
    kv = change(config, kv) or kv
    caplog.clear()
    connector = KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv)
    assert connector.get_num_new_matched_tokens(request_of("a", PROMPT), 0) == (0, False)
    (line,) = [one.getMessage() for one in caplog.records if "without the cache" in one.message]
    return str(line)


class TestRefused:
    """Served without the cache, with the reason in one line of the log."""

    @pytest.mark.promise("refuse-context-parallel")
    @pytest.mark.parametrize(
        "name",
        [
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ],
    )
    def test_context_parallel(
        self, model: Path, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        def change(config: Any, _: Any) -> None:
            setattr(config.parallel_config, name, 2)

        assert f"{name}=2 is not supported" in reason_of(model, change, caplog)

    @pytest.mark.promise("refuse-retries")
    @pytest.mark.parametrize("name", ["enable_fault_tolerance", "enable_elastic_ep"])
    def test_continuation(self, model: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
        def change(config: Any, _: Any) -> None:
            setattr(config.parallel_config, name, True)

        assert f"{name} is not supported" in reason_of(model, change, caplog)

    @pytest.mark.promise("refuse-experts")
    def test_routed_experts(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        def change(config: Any, _: Any) -> None:
            config.aux_output_config.enable_return_routed_experts = True

        assert "enable_return_routed_experts" in reason_of(model, change, caplog)

    @pytest.mark.promise("refuse-nodes")
    def test_ranks_on_several_nodes(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Each rank would attach to the sidecar of its own node, and no chunk be complete."""

        def change(config: Any, _: Any) -> None:
            config.parallel_config.nnodes = 2

        assert "ranks are on 2 nodes" in reason_of(model, change, caplog)

    def test_external_launcher(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        def change(config: Any, _: Any) -> None:
            config.parallel_config.world_size = 2
            config.parallel_config.distributed_executor_backend = "external_launcher"

        assert "external_launcher" in reason_of(model, change, caplog)

    @pytest.mark.promise("refuse-nodes")
    def test_ranks_that_ray_places_on_several_nodes(
        self, model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a double of Ray's placement table."""
        table = {
            "bundles": {0: {"GPU": 1.0}, 1: {"GPU": 1.0}, 2: {"CPU": 1.0}},
            "bundles_to_node_id": {0: "here", 1: "there", 2: "elsewhere"},
        }
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
        double = ModuleType("ray.util")

        def places(_: object) -> Any:
            return table

        monkeypatch.setattr(double, "placement_group_table", places, raising=False)
        monkeypatch.setitem(sys.modules, "ray.util", double)
        monkeypatch.setattr("vllm.platforms.current_platform.ray_device_key", "GPU", raising=False)

        def change(config: Any, _: Any) -> None:
            config.parallel_config.placement_group = object()

        assert "ranks are on 2 nodes" in reason_of(model, change, caplog)
        config = vllm_config(model)
        change(config, None)
        monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", "1")
        assert not nodes_unsupported_reason(config)
        monkeypatch.delenv("VLLM_RAY_BUNDLE_INDICES")
        table["bundles_to_node_id"][1] = "here"  # type: ignore[index]
        assert not nodes_unsupported_reason(config)

    @pytest.mark.promise("refuse-sleep")
    @pytest.mark.skipif(SINCE_VLLM_0_33, reason="before vLLM 0.33")
    @pytest.mark.parametrize("setting", ["enable_sleep_mode", "enable_cumem_allocator"])
    def test_sleep_mode(self, model: Path, caplog: pytest.LogCaptureFixture, setting: str) -> None:
        def change(config: Any, _: Any) -> None:
            setattr(config.model_config, setting, True)

        assert setting in reason_of(model, change, caplog)


class TestPrefixes:
    """Models that cannot continue from a prefix, though vLLM asks the connector."""

    @pytest.mark.promise("refuse-prefixless")
    def test_prefix_lm(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        def change(*_: Any) -> Any:
            return kv_cache_config(specs=[replace(spec_of(), non_causal=True)])

        assert "Prefix-LM" in reason_of(model, change, caplog)

    @pytest.mark.promise("refuse-prefixless")
    def test_r_swa(self, model: Path) -> None:
        spec = spec_of(RSWASpec, rswa_window=64)
        assert "R-SWA" in prefix_unsupported_reason(vllm_config(model), [spec])

    @pytest.mark.promise("refuse-prefixless")
    def test_cpu_attention_without_prefixes(
        self, model: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = vllm_config(model)
        config.scheduler_config.enable_chunked_prefill = False
        assert not prefix_unsupported_reason(config, [spec_of()])
        assert "MLA" in prefix_unsupported_reason(config, [spec_of(MLAAttentionSpec)])
        found = "vllm.platforms.current_platform.get_cpu_architecture"
        monkeypatch.setattr(found, lambda: CpuArchEnum.RISCV)
        assert "RISC-V" in prefix_unsupported_reason(config, [spec_of()])

    @pytest.mark.promise("refuse-pooling")
    @pytest.mark.parametrize(
        ("pooling", "cached"),
        [("MEAN", False), ("CLS", False), ("STEP", False), ("LAST", True), ("ALL", True)],
    )
    def test_pooling_of_a_whole_prompt(self, model: Path, pooling: Any, cached: bool) -> None:
        """Its forward pass raises if a part was not computed, which ends the engine."""
        config = vllm_config(model)
        config.model_config.pooler_config = PoolerConfig(pooling_type=pooling)
        assert (pooling in prefix_unsupported_reason(config, [spec_of()])) != cached

    @pytest.mark.promise("refuse-diffusion")
    def test_diffusion(self, model: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A request may emit tokens whose KV is not final."""

        def change(config: Any, _: Any) -> None:
            # Not from the start: on CPUs vLLM itself refuses such a model.
            vars(config.model_config).pop("is_diffusion", None)
            config.model_config.hf_config.canvas_length = 32

        assert "diffusion" in reason_of(model, change, caplog)

    @pytest.mark.promise("batch-invariant")
    @pytest.mark.parametrize(
        ("backend", "prefix_caching", "cached"),
        [
            ("FLASH_ATTN", True, True),
            (None, True, True),
            ("FLASHINFER", True, False),
            ("TRITON_MLA", True, False),
            # As vLLM leaves it where the backend came to be one of these.
            (None, False, False),
            # The user's own wish, with a backend that would go on from one.
            ("FLASH_ATTN", False, True),
            ("FLASHINFER", False, False),
        ],
    )
    def test_batch_invariance(
        self,
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        backend: str | None,
        prefix_caching: bool,
        cached: bool,
    ) -> None:
        config = vllm_config(model, prefix_caching=prefix_caching)
        if backend is not None:
            kinds: Any = AttentionBackendEnum
            config.attention_config.backend = kinds[backend]
        assert not prefix_unsupported_reason(config, [spec_of()])
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        assert ("VLLM_BATCH_INVARIANT" in prefix_unsupported_reason(config, [spec_of()])) != cached

    def test_simulated_routing(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same tokens meet other experts each time."""
        name = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"
        config = vllm_config(model)
        assert not prefix_unsupported_reason(config, [spec_of()])
        monkeypatch.setenv(name, "uniform_random")
        assert name in prefix_unsupported_reason(config, [spec_of()])

    @pytest.mark.promise("refuse-prefixless")
    @pytest.mark.parametrize(
        ("kind", "length", "given"),
        [
            ("dynamic", 4096, {"factor": 2.0}),
            (
                "longrope",
                1024,
                {
                    "original_max_position_embeddings": 1024,
                    **dict.fromkeys(("short_factor", "long_factor"), [1.0] * 16),
                },
            ),
        ],
    )
    def test_rope_by_the_longest_request_of_a_step(
        self, model: Path, kind: str, length: int, given: dict[str, Any]
    ) -> None:
        """So Transformers computes it. vLLM's own layers have one scale for all requests."""
        rope = {"rope_type": kind, "rope_theta": 1e4, **given}

        def reason(max_model_len: int, model_impl: Any) -> str:
            config = vllm_config(model)
            config.model_config = ModelConfig(
                model=str(model),
                max_model_len=max_model_len,
                model_impl=model_impl,
                hf_overrides={"rope_parameters": rope},
            )
            return prefix_unsupported_reason(config, [spec_of()])

        assert f"({kind})" in reason(length + 1, "transformers")
        assert not reason(length, "transformers")
        assert not reason(length + 1, "vllm")

    def test_media_that_another_process_encodes(self, model: Path) -> None:
        config = vllm_config(model, media_cache_gb=1.0)
        assert not media_unsupported_reason(config)
        for role in ("ec_producer", "ec_consumer"):
            transfer = ECTransferConfig(ec_connector="ECExampleConnector", ec_role=role)
            config.ec_transfer_config = transfer
            told = media_unsupported_reason(config)
            assert ("ec_transfer_config" in told) == (role == "ec_consumer")


class TestRefusedByRanks:
    """A reason that only a worker knows ends the scheduler's part with the first step."""

    def replaced(self, engine: Engine, *numbers: int) -> None:
        """Have these ranks refuse: layers with pages of several sizes are one group of theirs."""
        specs: dict[str, KVCacheSpec] = {"a": spec_of(), "b": replace(spec_of(), head_size=64)}
        uniform = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(BLOCK_TOKENS, specs))
        seen = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[uniform])
        for number in numbers:
            rank = engine.ranks[number]
            config = engine.scheduler.vllm_config
            rank.connector = rank.loaded = KVLakeConnector(config, KVConnectorRole.WORKER, seen)
            rank.connector.register_kv_caches({})

    @pytest.mark.promise("refuse-layers")
    @pytest.mark.parametrize("refusing", [(0, 1), (1,)])
    def test_layers_of_one_group_with_pages_of_several_sizes(
        self,
        make: Callable[..., Engine],
        caplog: pytest.LogCaptureFixture,
        refusing: tuple[int, ...],
    ) -> None:
        """vLLM shows its scheduler one layer of such a group; workers see all and report it."""
        engine = make(ranks=2)
        self.replaced(engine, *refusing)
        caplog.clear()
        # What its steps are to store waits for two ranks, and for one of them in vain.
        engine.run(request_of("a", PROMPT, max_tokens=40))
        (line,) = [one.getMessage() for one in caplog.records if "kvlake: " in one.message]
        assert "UniformTypeKVCacheSpecs among them" in line
        assert engine.client.closed
        assert all(engine.ranks[one].client.closed for one in {0, 1} - {*refusing})
        engine.check_idle()
        jobs = [len(rank.client.sent_of(Submit)) for rank in engine.ranks]
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT)
        assert jobs == [len(rank.client.sent_of(Submit)) for rank in engine.ranks]
        assert caplog.text.count("kvlake: ") == 1
        engine.check_idle()

    @pytest.mark.promise("refuse-unshared-memory")
    def test_requests_in_flight_end(self, make: Callable[..., Engine]) -> None:
        """A load, a read of the store, and a request that waits for another engine."""
        engine = make(ranks=2)
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        engine.forget()
        stored = [*PROMPT, *range(100)]
        engine.run(request_of("in the store", [7, *stored], max_tokens=1))
        engine.forget()
        for key in list(engine.sidecar.parts)[-4:]:
            engine.sidecar.demote(key)
        waiting = request_of("c", [8, *stored], max_tokens=1)
        waiting.kv_transfer_params = {"kvlake": {"expect_tokens": 64, "wait_seconds": 60}}
        requests = [
            engine.add(request_of("a", PROMPT, max_tokens=4)),
            engine.add(request_of("b", [7, *stored], max_tokens=4)),
            engine.add(waiting),
        ]
        self.replaced(engine, 1)
        engine.finish(*requests)
        engine.settle()
        assert engine.client.closed
        assert engine.ranks[0].client.closed
        assert engine.computed["c"] >= len(stored)
        engine.check_idle()

    @pytest.mark.promise("refuse-unshared-memory")
    def test_memory_that_cannot_be_shared_after_sleep_mode(
        self, make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(ranks=2)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        engine.forget()
        rank = engine.ranks[1]

        def share() -> ExportedMemory:
            raise ExportRefused("it is in pieces")

        setattr(rank.role, "_export", share)  # noqa: B010 (mypy)
        rank.connector.unregister_kv_caches()
        rank.connector.restore_kv_caches()
        caplog.clear()
        engine.run(request_of("b", PROMPT, max_tokens=40))
        (line,) = [one.getMessage() for one in caplog.records if "kvlake: " in one.message]
        assert "because after sleep mode it is in pieces; restart the engine" in line
        assert engine.client.closed
        assert engine.ranks[0].client.closed
        assert engine.computed["b"] >= len(PROMPT)
        engine.check_idle()

    @pytest.mark.promise("refuse-sleep")
    def test_a_refused_engine_sleeps_and_wakes(
        self, make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
    ) -> None:
        """vLLM notifies every connector."""
        engine = make()
        self.replaced(engine, 0)
        (rank,) = engine.ranks
        caplog.clear()
        for name in ("a", "b", "c"):
            engine.run(request_of(name, PROMPT, max_tokens=4))
            assert engine.computed[name] >= len(PROMPT)
            # Asleep, then awake; and the hooks once more, each for itself.
            rank.connector.unregister_kv_caches()
            rank.connector.restore_kv_caches()
            rank.connector.restore_kv_caches()
            engine.forget()
        assert caplog.text.count("kvlake: ") == 1, "that it is refused"
        assert not rank.client.sent_of(Submit)
        engine.check_idle()

    def test_a_sidecar_that_does_not_answer_delays_no_step(
        self,
        make: Callable[..., Engine],
        short_directory: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The attaching thread waits for the answer; the step does not wait for the thread."""
        engine = make()
        attempt = Attempt(engine.connector._engine.attach(Role.SCHEDULER, 0))  # noqa: SLF001 (its public names are vLLM's)
        path = str(short_directory / "attach.sock")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            client = engine.role.client = Client((path,), lambda: attempt)
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(1), "it waits for an answer from now on"
                waited: list[float | None] = []
                with monkeypatch.context() as patch:
                    patch.setattr(
                        client.thread, "join", lambda timeout=None: waited.append(timeout)
                    )
                    engine.role.retire()
                assert waited == [0.0]
                assert client.session is None
        client.thread.join()

    @pytest.mark.promise("batch-invariant")
    def test_prefix_caching_that_vllm_turned_off_in_a_worker(
        self,
        make: Callable[..., Engine],
        model: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        """The backend is chosen in the worker's process, which has its own configuration."""
        engine = make()
        config = vllm_config(model, prefix_caching=False)
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
        worker = KVLakeConnector(config, KVConnectorRole.WORKER, kv_cache_config(num_blocks=8))
        worker.register_kv_caches({})
        engine.ranks[0].connector = engine.ranks[0].loaded = worker
        engine.run(request_of("a", PROMPT, max_tokens=4))
        assert "VLLM_BATCH_INVARIANT" in caplog.text
        assert engine.client.closed
        engine.check_idle()

    @pytest.mark.promise("refuse-unshared-memory")
    def test_memory_that_cannot_be_shared(
        self,
        make: Callable[..., Engine],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        places.patch(monkeypatch, "ParallelLayout.this_rank", lambda _layout: 0)
        engine = make()
        rank = engine.ranks[0]
        kv = kv_cache_config(num_blocks=8)
        rank.connector = KVLakeConnector(engine.scheduler.vllm_config, KVConnectorRole.WORKER, kv)
        rank.loaded = rank.connector
        rank.connector.register_kv_caches({})
        engine.run(request_of("a", PROMPT, max_tokens=4))
        said = "this engine is served without the cache, because vLLM registered no cache of layer"
        assert f"{said} 'layer.0'" in caplog.text
        assert caplog.text.count("kvlake: ") == 1
        assert engine.client.closed
        engine.check_idle()

    def test_memory_that_the_kernel_does_not_share(
        self,
        make: Callable[..., Engine],
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        def refused(name: str, size_bytes: int) -> int:
            if name == "kvlake-kv":
                raise OSError(errno.EMFILE, "Too many open files")
            return sealed_memfd(name, size_bytes)

        places.patch(monkeypatch, "ParallelLayout.this_rank", lambda _layout: 0)
        places.patch(monkeypatch, "sealed_memfd", refused)
        engine = make()
        rank = engine.ranks[0]
        kv = kv_cache_config(num_blocks=8)
        rank.connector = KVLakeConnector(engine.scheduler.vllm_config, KVConnectorRole.WORKER, kv)
        rank.loaded = rank.connector
        context = rank.connector.get_mem_pool_context()
        assert context is not None
        with context:
            cache = torch.zeros(8 * 4096, dtype=torch.int8)
        tensor = cache.view(torch.bfloat16).view(8, 1, BLOCK_TOKENS, -1)
        rank.connector.register_kv_caches({"layer.0": tensor, "layer.1": tensor})
        engine.run(request_of("a", PROMPT, max_tokens=4))
        assert "because its KV memory cannot be shared: [Errno 24] Too many open" in caplog.text
        assert engine.client.closed
        engine.check_idle()
