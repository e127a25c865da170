"""What of vLLM's connector interface we stand on. A failure here says what moved, before it bites.

vLLM calls its connector API experimental. Everything is compared by what this vLLM says about
itself: signatures, fields, the order of calls in its sources.
"""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
    SupportsHMA,
    supports_hma,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from connector import plugin
from connector.plan import Load, LoadPiece, StepPlan, StepReport, Store, StorePiece
from connector.vllm import (
    KVLakeConnector,
    KVLakeMetadata,
    KVLakeStats,
    KVLakeWorkerMetadata,
    _Engine,
)

SIGNATURES = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "get_mem_pool_context": [],
    "get_required_kvcache_layout": ["vllm_config"],
    "register_kv_caches": ["kv_caches"],
    "start_load_kv": ["forward_context", "kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": [],
    "get_transfer_results": ["finished_req_ids"],
    "build_connector_worker_meta": [],
    "bind_gpu_block_pool": ["gpu_block_pool"],
    "on_new_request": ["request"],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "request_finished": ["request", "block_ids"],
    "has_pending_block_frees": [],
    "has_pending_push_work": [],
    "get_external_cache_hit_sources": ["request", "num_external_tokens"],
    "take_events": [],
    "get_kv_connector_stats": [],
    "build_kv_connector_stats": ["data"],
    "build_prom_metrics": [
        "vllm_config",
        "metric_types",
        "labelnames",
        "per_engine_labelvalues",
    ],
    "reset_cache": [],
    "shutdown": [],
}
"""Methods of the base class that we override, and their parameters in order."""


READ_OF_A_REQUEST = [
    "all_token_ids",
    "block_hashes",
    "cache_salt",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "prompt_embeds",
    "request_id",
    "resumable",
    "skip_reading_prefix_cache",
]


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


class TestInterface:
    @pytest.mark.parametrize("name", SIGNATURES)
    def test_signatures(self, name: str) -> None:
        base = getattr(KVConnectorBase_V1, name, None)
        assert base is not None, f"vLLM's KVConnectorBase_V1 has no {name} any more"
        assert parameters(base) == SIGNATURES[name], f"vLLM changed the parameters of {name}"
        assert parameters(getattr(KVLakeConnector, name)) == SIGNATURES[name]

    def test_every_override_is_known_here(self) -> None:
        ours = {name for name in vars(KVLakeConnector) if not name.startswith("_")}
        known = {*SIGNATURES, "requires_kv_delivery", "request_finished_all_groups"}
        assert ours <= known, f"overridden but not checked: {ours - known}"

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
    """The order of calls that we rely on, read from vLLM's own source."""

    def order(self, function: Any, *names: str) -> None:
        source = inspect.getsource(function)
        place = 0
        for name in names:
            assert name in source, f"{function.__qualname__} no longer calls {name}"
            place = source.find(name, place)
            assert place >= 0, f"{function.__qualname__} calls {name} earlier than in {names}"

    def test_worker_hooks(self) -> None:
        # Stores go out after the forward pass, and their ends are reported in the same step.
        self.order(
            KVConnectorModelRunnerMixin._get_kv_connector_output,
            "bind_connector_metadata",
            "yield output",
            "wait_for_save()",
            "get_transfer_results(",
            "build_connector_worker_meta()",
            "clear_connector_metadata()",
        )

    def test_scheduling(self) -> None:
        # A load is planned in the very call of schedule() whose metadata carries it.
        self.order(
            Scheduler.schedule,
            "get_num_new_matched_tokens(",
            "allocate_slots(",
            "update_state_after_alloc(",
            "get_external_cache_hit_sources(",
            "_build_kv_connector_meta(",
            "_update_after_schedule(",
        )

    def test_the_load_failure_policy_is_read_after_the_connector_was_made(self) -> None:
        self.order(Scheduler.__init__, "create_connector(", "kv_load_failure_policy")

    def test_failures_are_taken_before_completions(self) -> None:
        self.order(
            Scheduler.update_from_output,
            "_handle_failed_recving(",
            "_update_from_kv_xfer_finished(",
            "connector.get_kv_connector_stats()",
            "connector.take_events()",
        )

    def test_blocks_of_a_finished_request_are_freed_after_we_were_told(self) -> None:
        self.order(Scheduler._free_request, "_connector_finished(", "_free_blocks(")

    def test_an_idle_engine_steps_on_while_stores_are_outstanding(self) -> None:
        assert "has_pending_push_work" in inspect.getsource(Scheduler.has_requests)


class TestAggregation:
    def output(self, worker: int, **fields: Any) -> ModelRunnerOutput:
        output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
        output.kv_connector_output = KVConnectorOutput(**fields)
        return output

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

    def test_a_report_alone_is_not_nothing(self) -> None:
        # vLLM drops connector outputs that are empty; one with only our report must arrive.
        metadata = KVLakeWorkerMetadata(StepReport({1: 1}))
        assert not KVConnectorOutput(kv_connector_worker_meta=metadata).is_empty()

    def test_what_travels_between_processes_can(self) -> None:
        piece = StorePiece(b"k" * 32, b"p" * 32, bytes(8), [1])
        plan = StepPlan([Load(1, "r", [LoadPiece(b"k" * 32, 0, [2])])], [Store(2, [piece])])
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


class TestFound:
    def test_by_plugin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
        KVConnectorFactory._registry.pop(plugin.NAME, None)
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

    def test_importing_it_is_light_and_starts_no_cuda(self) -> None:
        # vLLM imports it in its front end too, and a process that started CUDA cannot fork.
        code = (
            "import sys, connector.vllm, torch\n"
            "assert not torch.cuda.is_initialized(), 'CUDA was initialised'\n"
            "ours = [m for m in sys.modules if m.startswith(('sidecar', 'tiers'))]\n"
            "allowed = {'sidecar', 'sidecar.protocol', 'tiers', 'tiers.errors', 'tiers.fence',\n"
            "           'tiers.index', 'tiers.layout', 'tiers.memfd', 'tiers.cuda',\n"
            "           'tiers.cuda.driver', 'tiers.cuda.errors', 'tiers.cuda.fencing',\n"
            "           'tiers.cuda.sharing'}\n"
            "assert set(ours) <= allowed, set(ours) - allowed\n"
            "assert sys.modules['tiers.cuda.driver']._driver is None, 'the driver was loaded'\n"
            "import connector.plugin\n"
        )
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
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

    def test_all_of_a_block_is_asked_for_in_one_run(self) -> None:
        layout = KVLakeConnector.get_required_kvcache_layout(SimpleNamespace())
        assert layout == KVCacheLayout.BLHNC.name

    def test_an_engine_that_may_sleep_is_not_served(self) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        engine = object.__new__(_Engine)
        assert "enable_sleep_mode" in engine._refusal(config, None, 256)
