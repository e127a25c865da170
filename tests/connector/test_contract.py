"""The installed vLLM, imported: that its classes do with ours what we rely on.

Names, signatures and the order of calls are compared by source in `tests/contract`, for every
supported release.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from connector import plugin
from connector.identity.eligibility import SINCE_VLLM_0_33, unsupported_reason
from connector.metrics import KVLakeStats
from connector.plan import Load, StepPlan, StepReport, Store
from connector.scheduler.stats import Stats
from connector.vllm import KVLakeConnector, KVLakeMetadata, KVLakeWorkerMetadata
from sidecar.protocol import LoadChunk, LoadJob, StoreChunk, StoreJob
from tests import places
from tests.connector.configurations import kv_cache_config, vllm_config
from tests.contract.base import OVERRIDDEN

READ_OF_A_REQUEST = [
    "all_token_ids",
    "block_hashes",
    "cache_salt",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "num_tokens",
    "prefill_stats",
    "prompt_embeds",
    "request_id",
    "resumable",
    "skip_reading_prefix_cache",
    "status",
]


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


class TestInterface:
    @pytest.mark.parametrize("name", OVERRIDDEN)
    def test_signatures(self, name: str) -> None:
        base = getattr(KVConnectorBase_V1, name, None)
        ours = getattr(KVLakeConnector, name)
        if base is not None and not isinstance(base, property):
            assert parameters(ours) == parameters(base)

    def test_nothing_abstract_is_left(self) -> None:
        assert not inspect.isabstract(KVLakeConnector), KVLakeConnector.__abstractmethods__
        assert parameters(SupportsHMA.request_finished_all_groups) == ["request", "block_ids"]
        assert supports_hma(KVLakeConnector)

    def test_a_producer_that_need_not_deliver(self) -> None:
        assert isinstance(
            inspect.getattr_static(KVConnectorBase_V1, "requires_kv_delivery"), property
        )

    def test_results_carry_failures(self) -> None:
        names = {field.name for field in dataclasses.fields(KVConnectorTransferResults)}
        assert names == {"finished_sending", "finished_recving", "failed_recving"}
        fields = {field.name for field in dataclasses.fields(KVConnectorOutput)}
        assert {"finished_recving", "failed_recving", "kv_connector_worker_meta"} <= fields

    def test_the_step_says_which_blocks_a_request_has(self) -> None:
        fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
        assert {"num_scheduled_tokens", "kv_connector_block_state"} <= fields
        state = KVConnectorBlockState(
            req_ids={"a"}, resolve_block_ids=lambda _: ([1, 2],), boundary_state_offloads={}
        )
        assert state.get_block_ids("a") == ([1, 2],)
        assert state.get_block_ids("b") is None

    def test_what_is_read_of_a_request(self) -> None:
        from vllm.sampling_params import SamplingParams

        request = Request("r", [1, 2, 3], SamplingParams(max_tokens=1), None)
        for name in READ_OF_A_REQUEST:
            assert hasattr(request, name), f"vLLM's Request has no {name} any more"
        assert request.all_token_ids[1:] == [2, 3]

    def test_what_is_used_of_the_block_pool(self) -> None:
        pool = BlockPool(num_gpu_blocks=4, enable_caching=True, hash_block_size=16)
        blocks = [pool.blocks[2]]
        free = pool.get_num_free_blocks()
        pool.touch(blocks)
        assert (blocks[0].ref_cnt, pool.get_num_free_blocks()) == (1, free - 1)
        pool.free_blocks(reversed(blocks))
        assert (blocks[0].ref_cnt, pool.get_num_free_blocks()) == (0, free)
        assert parameters(BlockPool.get_cached_block) == ["block_hash", "kv_cache_group_ids"]

    def test_what_is_used_of_events(self) -> None:
        fields = set(BlockStored.__struct_fields__)
        given = {
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
        }
        assert given <= fields
        assert {"block_hashes", "medium"} <= set(BlockRemoved.__struct_fields__)


class TestOrder:
    def test_the_load_failure_policy_is_read_after_the_connector_was_made(self) -> None:
        source = inspect.getsource(Scheduler.__init__)
        assert 0 < source.find("create_connector(") < source.rfind("kv_load_failure_policy")


class TestAggregation:
    def output(self, worker: int, **fields: Any) -> ModelRunnerOutput:
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(**fields)
        return output

    @pytest.mark.promise("tensor-parallel")
    @pytest.mark.promise("failed-load", "rank-aggregation")
    def test_ranks_are_added_up_and_a_load_ends_with_the_last(self) -> None:
        aggregator = KVOutputAggregator(2)
        first = aggregator.aggregate(
            [
                self.output(
                    0,
                    finished_recving={"a", "b"},
                    failed_recving={"a"},
                    kv_connector_worker_meta=KVLakeWorkerMetadata(StepReport({1: 1, 2: 1}, 1)),
                ),
                self.output(
                    1,
                    finished_recving={"b"},
                    kv_connector_worker_meta=KVLakeWorkerMetadata(StepReport({1: 1}, 0)),
                ),
            ]
        )
        assert first is not None
        connector_output = first.kv_connector_output
        assert connector_output is not None
        assert connector_output.finished_recving == {"b"}
        assert not connector_output.failed_recving
        report = connector_output.kv_connector_worker_meta
        assert isinstance(report, KVLakeWorkerMetadata)
        assert report.report == StepReport({1: 2, 2: 1}, 1)
        second = aggregator.aggregate([self.output(0), self.output(1, finished_recving={"a"})])
        assert second is not None
        assert second.kv_connector_output is not None
        assert second.kv_connector_output.failed_recving == {"a"}

    @pytest.mark.promise("rank-aggregation")
    def test_what_no_rank_tells(self, model: Path) -> None:
        """Counts and events are the scheduler's, failed loads are told by request."""
        worker = KVLakeConnector(vllm_config(model), KVConnectorRole.WORKER, kv_cache_config())
        assert worker.get_kv_connector_stats() is None
        assert worker.get_kv_connector_kv_cache_events() is None
        assert worker.get_block_ids_with_load_errors() == set()
        aggregator = KVOutputAggregator.from_connector(worker, 3)
        # All ranks are waited for, as no number is given.
        for ranks in ((0, 1), (2,)):
            outputs = [
                self.output(rank, finished_recving={"a"} if rank in ranks else None)
                for rank in range(3)
            ]
            made = aggregator.aggregate(cast("Any", outputs))
            assert made is not None
            assert made.kv_connector_output is not None
            assert made.kv_connector_output.finished_recving == ({"a"} if 2 in ranks else None)
            assert made.kv_connector_output.kv_connector_stats is None
            assert made.kv_connector_output.kv_cache_events is None
            assert not made.kv_connector_output.invalid_block_ids
        worker.shutdown()

    def test_a_report_alone_is_not_nothing(self) -> None:
        # vLLM drops connector outputs that are empty; one with only our report must arrive.
        metadata = KVLakeWorkerMetadata(StepReport({1: 1}))
        assert not KVConnectorOutput(kv_connector_worker_meta=metadata).is_empty()

    def test_what_travels_between_processes_can(self) -> None:
        load = Load("r", LoadJob(1, [LoadChunk(b"k" * 32, 0, [2])]))
        store = Store(StoreJob(2, [StoreChunk(b"k" * 32, b"p" * 32, bytes(8), [1])]))
        plan = StepPlan([load], [store])
        assert pickle.loads(pickle.dumps(KVLakeMetadata(plan))).plan == plan
        report = StepReport({3: 1}, 1)
        assert pickle.loads(pickle.dumps(KVLakeWorkerMetadata(report))).report == report

    def test_stats(self) -> None:
        stats = KVLakeConnector.build_kv_connector_stats({"requests_hit": 1})
        assert isinstance(stats, KVLakeStats)
        assert stats.aggregate(KVLakeStats(data={"requests_hit": 2})).to_dict() == {
            "requests_hit": 3
        }
        assert KVLakeStats(data={"requests_hit": 0}).is_empty()
        stats.reset()
        assert stats.is_empty()

    def test_each_count_says_what_it_is_of(self) -> None:
        texts = [field.metadata["help"] for field in dataclasses.fields(Stats)]
        assert len(set(texts)) == len(texts)
        assert all(texts)


def modules_of_the_connector() -> set[str]:
    """What it may import of the rest of the product, with the packages that these are in."""
    contracts = tomllib.loads((places.ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (thin,) = [one for one in contracts["contracts"] if one["id"] == "connector-is-thin"]
    direct = [line.partition(" -> ")[2] for line in thin["ignore_imports"]]
    # What works the driver imports it, and loads it where it is first used.
    names = [*direct, places.find("Driver").module_name]
    parts = [name.split(".") for name in [*names, *submodules("sidecar.protocol")]]
    return {".".join(one[:count]) for one in parts for count in range(1, len(one) + 1)}


def submodules(package: str) -> list[str]:
    folder = places.ROOT.joinpath(*package.split("."))
    return [f"{package}.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__"]


class TestFound:
    def test_by_plugin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))  # noqa: SLF001 (of vLLM)
        KVConnectorFactory._registry.pop("KVLakeConnector", None)  # noqa: SLF001 (of vLLM)
        plugin.register()
        plugin.register()
        config = KVTransferConfig(kv_connector="KVLakeConnector", kv_role="kv_both")
        assert KVConnectorFactory.get_connector_class(config) is KVLakeConnector

    def test_by_module_path(self) -> None:
        config = KVTransferConfig(
            kv_connector="KVLakeConnector",
            kv_connector_module_path="connector.vllm",
            kv_role="kv_both",
        )
        assert KVConnectorFactory.get_connector_class(config) is KVLakeConnector

    @pytest.mark.slow
    def test_importing_it_is_light_and_starts_no_cuda(self) -> None:
        # vLLM imports it in its front end too, and a process that started CUDA cannot fork.
        code = (
            "import sys, connector.vllm, torch\n"
            "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
            "ours = {m for m in sys.modules if m.startswith(('sidecar', 'tiers'))}\n"
            "assert ours <= {*sys.argv[1:]}, ours - {*sys.argv[1:]}\n"
            "from tiers.cuda.driver import driver\n"
            "assert not driver.cache_info().currsize, 'the driver was loaded'\n"
            "import connector.plugin\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, *modules_of_the_connector()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def test_the_plugin_imports_nothing_of_vllm(self) -> None:
        code = "import sys, connector.plugin; assert not {'vllm', 'torch'} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True)


class TestGpu:
    @pytest.fixture(autouse=True)
    def _on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True, device_type="cuda")
        monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)

    @pytest.mark.parametrize(
        ("block_tokens", "is_hybrid", "layout"),
        [
            *((tokens, False, KVCacheLayout.BLHNC) for tokens in (16, 32, 64)),
            # vLLM did not start where a kernel takes less.
            (128, False, KVCacheLayout.LBHNC),
            (16, True, KVCacheLayout.LBHNC),
        ],
    )
    def test_a_lone_connector_requires_small_blocks_in_one_run(
        self, block_tokens: int, is_hybrid: bool, layout: KVCacheLayout
    ) -> None:
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=block_tokens),
            model_config=SimpleNamespace(is_hybrid=is_hybrid),
        )
        assert KVLakeConnector.get_required_kvcache_layout(config) == layout.name

    @pytest.mark.promise("beside-others")
    def test_beside_other_connectors_no_layout_is_required(self) -> None:
        """NIXL asks for another one, and vLLM then starts no engine at all."""
        children = [
            {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
            {
                "kv_connector": "KVLakeConnector",
                "kv_connector_module_path": "connector.vllm",
                "kv_role": "kv_both",
            },
        ]
        config: Any = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_both",
                kv_connector_extra_config={"connectors": children},
            ),
            attention_config=SimpleNamespace(hisparse_config=None),
        )
        # vLLM's own offloading asks for the same as NIXL, which wants its library.
        layout = MultiConnector.get_required_kvcache_layout(config)
        assert layout == KVCacheLayout.LBHNC.name

    @pytest.mark.skipif(SINCE_VLLM_0_33, reason="vLLM 0.33 or later")
    def test_an_engine_that_may_sleep_is_not_served_before_vllm_tells_of_it(self) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        assert "vLLM 0.33" in unsupported_reason(config, None)

    def test_an_engine_that_may_sleep_is_served_where_vllm_tells_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        places.patch(monkeypatch, "SINCE_VLLM_0_33", True)
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                enable_sleep_mode=True, pooler_config=None, is_diffusion=False
            ),
            attention_config=SimpleNamespace(backend=None),
            cache_config=None,
            aux_output_config=SimpleNamespace(enabled=False),
            parallel_config=SimpleNamespace(
                enable_fault_tolerance=False,
                enable_elastic_ep=False,
                distributed_executor_backend="mp",
                nnodes_within_dp=1,
                placement_group=None,
            ),
            speculative_config=None,
        )
        assert "0 groups" in unsupported_reason(config, SimpleNamespace(kv_cache_groups=[]))
        assert KVLakeConnector.supports_sleep_mode(SimpleNamespace())


@pytest.mark.parametrize(
    ("kv_role", "takes"), [("kv_both", True), ("kv_consumer", True), ("kv_producer", False)]
)
def test_embeddings_are_taken_by_engines_that_load(model: Path, kv_role: str, takes: bool) -> None:
    """As `docs/reference/security.md` says; where vLLM leaves this off again, it need not."""
    config = vllm_config(model, kv_role=kv_role, media_cache_gb=4.0)
    config._resolve_mm_embedding_inputs()  # noqa: SLF001 (of vLLM)
    media = config.model_config.multimodal_config
    assert media is not None
    assert media.enable_mm_embeds is takes
    assert media.allow_missing_mm_embeddings is takes
    assert "self._resolve_mm_embedding_inputs()" in inspect.getsource(VllmConfig.__post_init__)
