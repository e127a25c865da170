"""`KVLakeConnector`, the class that vLLM loads.

Passes vLLM's calls to the role of this process, and wraps what the roles exchange in classes of
vLLM. Where an engine cannot be cached safely (`identity/eligibility.py`), it serves without the
cache and logs that once. No method raises for a fault of the cache.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, cast

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

import connector.ownership  # noqa: F401 # pyright: ignore[reportUnusedImport] (looks first)
from connector.client import Attempt, Client, UncachedNotice, UncachedReason
from connector.events import events_endpoints, hits_event, vllm_events
from connector.export import ExportedMemory, ExportRefused, GroupTensors, MemfdAllocation, export
from connector.identity.adapters import LoadedAdapters
from connector.identity.mamba import states_of
from connector.identity.namespace import adapter_settings
from connector.identity.profile import EngineProfile, block_bytes_of
from connector.metrics import KVLakePromMetrics, KVLakeStats
from connector.options import CONNECTOR_OPTIONS, log_unknown_options
from connector.plan import StepPlan, StepReport
from connector.scheduler.outcomes import PromptTokens
from connector.scheduler.requests import Settings
from connector.scheduler.role import SchedulerRole
from connector.scheduler.traces import Attributes, Tracer
from connector.vllm_workarounds import (
    WeightChanges,
    called_by_multi_connector,
    multi_connector_transfer,
    recomputes_failed_loads,
    unwatch_weights,
    watch_adapter_loads,
    watch_engine_weights,
)
from connector.worker import WorkerRole
from sidecar.protocol import Attach, Role

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = logging.getLogger("vllm.kvlake")
KERNEL_BLOCK_TOKENS: Final = (16, 32, 64)
"""Blocks that each backend's kernels take whole, if it is chosen with them."""
UNCACHED: Final = "kvlake: this engine is served without the cache, because %s"


def emit_span(
    name: str, headers: Mapping[str, str], begin: int, end: int, attributes: Attributes
) -> None:
    """Send a span below the caller's with the tracer of vLLM's engine core."""
    try:
        from vllm.tracing import instrument_manual
        from vllm.tracing.otel import extract_trace_context

        instrument_manual(name, begin, end, attributes, extract_trace_context(headers))
    except Exception as error:
        _log_lost_spans(f"{type(error).__name__}: {error}")


@cache
def _log_lost_spans(why: str) -> None:
    """Log each reason once."""
    logger.warning("kvlake: spans of traced requests are lost: %s", why)


class KVLakeMetadata(KVConnectorMetadata):
    """A step's plan, from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KVLakeWorkerMetadata(KVConnectorWorkerMetadata):
    """A worker's report, from the workers to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Sum of two ranks' reports."""
        assert isinstance(other, KVLakeWorkerMetadata)
        return KVLakeWorkerMetadata(self.report.add(other.report))


class KVLakeConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector of kvlake; its options: docs/reference/engine-options.md."""

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._allocation: MemfdAllocation | None = None
        self._report = StepReport()
        self._stale = False
        """The plan of this step was made without knowing of a change of the weights."""
        self._notice: UncachedNotice | None = None
        self._uncached_requests = 0
        self._prompts = PromptTokens()
        self._publishes_hits = False
        self._adapters = LoadedAdapters()
        self._weights = WeightChanges()
        transfer: Any = vllm_config.kv_transfer_config
        schedules = role == KVConnectorRole.SCHEDULER
        if schedules:
            log_unknown_options(transfer.kv_connector_extra_config, CONNECTOR_OPTIONS)
        elif vllm_config.lora_config is not None:
            watch_adapter_loads(self._adapters)
        self._engine = EngineProfile(vllm_config, kv_cache_config, logs=schedules)
        if schedules:
            self._engine.then(self._report_refusal)
        if schedules and not self._engine.refusal:
            outer = multi_connector_transfer()
            self._beside_others = outer is not None
            # Both before vLLM goes on: it reads the policy that this sets.
            self._reads = transfer.is_kv_consumer and recomputes_failed_loads(transfer, outer)

    def _report_refusal(self) -> None:
        if self._engine.refusal:
            logger.warning(UNCACHED, self._engine.refusal)
            self._notify_uncached(self._engine.reason, self._engine.refusal)

    def _notify_uncached(self, reason: UncachedReason, message: str) -> None:
        """Tell the sidecar, for as long as this process lives, that it is not cached."""
        if self._notice is None:
            engine, role = self._engine, Role(self.role.name.lower())
            self._notice = UncachedNotice(engine.sockets, role, engine.engine_id, reason, message)

    @property
    def requires_kv_delivery(self) -> bool:
        """No: a dropped store is a later miss."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> str | None:
        """On a GPU, small blocks of all layers in one piece, and large ones by layer.

        vLLM does not start where blocks of all layers are in one piece and a kernel takes smaller
        blocks only. That happens with large blocks, which are fast in pieces, too. Where a backend
        has not the layout, vLLM takes another one. Nothing as one of several connectors: NIXL and
        others need another layout.
        """
        from vllm.platforms import current_platform

        if not current_platform.is_cuda() or called_by_multi_connector():
            return None
        # The blocks of a hybrid model are made as large as its states, after this.
        hybrid = vllm_config.model_config.is_hybrid
        small = vllm_config.cache_config.block_size in KERNEL_BLOCK_TOKENS
        return "BLHNC" if small and not hybrid else "LBHNC"

    # --- worker --------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """On the CPU, a context that places the KV cache on a memfd."""
        from vllm.platforms import current_platform

        if self._engine.refusal or not current_platform.is_cpu():
            return None
        self._allocation = MemfdAllocation()
        return self._allocation

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Describe and share the cache; without it the worker serves uncached."""
        engine = self._engine
        self._weights.watch()

        def share() -> ExportedMemory:
            if engine.refusal:
                # The scheduler may see less: of a group of unlike layers, one.
                raise ExportRefused(engine.refusal)
            rank = engine.parallel_layout.this_rank()
            groups = [
                GroupTensors(
                    [kv_caches[name] for name in group.layer_names],
                    group.segment(engine.parallel_layout, rank),
                    group.encoding,
                    group.entry_tokens,
                    group.geometry.block_tokens,
                )
                for group in engine.groups
            ]
            return export(groups, self._allocation)

        def describe(exported: ExportedMemory) -> Attach:
            rank = engine.parallel_layout.this_rank()
            return engine.attach(Role.WORKER, rank, exported, memory=exported.shared)

        make_client = partial(
            Client,
            engine.sockets,
            attach_seconds=engine.attach_seconds,
            when=engine.when_identified,
        )
        self._worker = WorkerRole(share, make_client, describe)
        self._notify_refused_worker()

    def _notify_refused_worker(self) -> None:
        """The scheduler logs it, once for all ranks."""
        if self._worker is not None and (refusal := self._worker.refusal):
            logger.debug("kvlake: this worker cannot be served: %s", refusal)
            reason = self._engine.reason if self._engine.refusal else "memory"
            self._notify_uncached(reason, refusal)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:  # noqa: ARG003
        """Yes: vLLM 0.33 asks, and then tells when the KV cache goes and comes back."""
        return True

    def unregister_kv_caches(self) -> None:
        """Before sleep: have the sidecar release the memory."""
        if self._worker is not None:
            self._worker.unregister()

    def restore_kv_caches(self) -> None:
        """After sleep: share the memory again."""
        if self._worker is not None:
            self._worker.restore()
            self._notify_refused_worker()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 (vLLM's)
        """Compare the weights with the plan's. Loads are sent with stores in `wait_for_save`.

        That comes before the step's reports, or with a drafter after them.
        """
        self._stale = self._weights.unknown_to(self._plan().weight_changes)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled after its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are stored after the step."""

    def wait_for_save(self) -> None:
        """Send this step's jobs. Does not wait: their blocks are held until the answer."""
        if self._worker is not None:
            self._worker.submit(self._plan(), self._adapters.holds, stale=self._stale)

    def _plan(self) -> StepPlan:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVLakeMetadata)
        return metadata.plan

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 (vLLM's signature)
    ) -> KVConnectorTransferResults:
        """Loads that ended on this rank, failed ones among them."""
        if self._worker is None:
            return KVConnectorTransferResults()
        if self._engine.refusal and not self._worker.refusal:
            # Known only after the memory was shared.
            self._worker.refuse(self._engine.refusal)
            self._notify_refused_worker()
        results = self._worker.collect(self._plan())
        self._report = results.report
        return KVConnectorTransferResults(
            finished_recving=results.loaded, failed_recving=results.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What else ended or changed on this rank."""
        report, self._report = self._report, StepReport()
        report.weights_changed = self._weights.take()
        report.adapters = self._adapters.take()
        return None if report.empty else KVLakeWorkerMetadata(report)

    # --- scheduler -----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Begin to serve. vLLM calls this once its scheduler is made, before any request."""
        engine, vllm_config = self._engine, cast("Any", self._vllm_config)
        if engine.refusal:
            return
        events = vllm_config.kv_events_config
        self._wants_events = bool(events is not None and events.enable_kv_cache_events)
        # As in vLLM's publisher: data parallel ranks of a dense model are all rank 0.
        index = vllm_config.parallel_config.data_parallel_index
        endpoint, replay = events_endpoints(events, index)
        parts: dict[str, Any] = {"events_endpoint": endpoint, "events_replay": replay}
        parts["want_events"] = self._wants_events
        client = Client(
            engine.sockets,
            lambda: Attempt(engine.attach(Role.SCHEDULER, 0, **parts)),
            attach_seconds=engine.attach_seconds,
            when=engine.when_identified,
        )
        if engine.media_refusal:
            logger.warning(
                "kvlake: requests with images, audio or video are not cached, because %s",
                engine.media_refusal,
            )
        adapters = adapter_settings(vllm_config)
        settings = Settings(
            reads=self._reads,
            writes=vllm_config.kv_transfer_config.is_kv_producer,
            world_size=engine.world_size,
            # Ranks of a dense model are engines of their own.
            steps_with_others=vllm_config.parallel_config.data_parallel_size > 1,
            separate_worker=vllm_config.parallel_config.distributed_executor_backend != "uni",
            num_blocks=engine.num_blocks,
            speculation=engine.speculation,
            load_tokens_min=engine.load_tokens_min,
            caches_media=not engine.media_refusal,
            beside_others=self._beside_others,
            adapters=json.dumps(adapters, sort_keys=True) if adapters else "",
            adapts_media=bool(adapters.get("enable_tower_connector_lora")),
        )
        tracer = Tracer()
        if vllm_config.observability_config.otlp_traces_endpoint:
            block_bytes = block_bytes_of(self._kv_cache_config, engine.world_size)
            tracer = Tracer(emit_span, block_bytes)
        self._scheduler = SchedulerRole(
            client, engine.groups, settings, gpu_block_pool, tracer=tracer
        )
        self._prompts = self._scheduler.prompts
        watch_engine_weights(self._scheduler)

    def on_new_request(self, request: Any) -> None:
        """Hash the prompt once, and start to read what only the object store has."""
        if self._scheduler is None:
            self._uncached_requests += 1
            return
        if getattr(request, "kv_cache_report_mode", "") == "full":
            self._publishes_hits = True
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own hit; always asynchronously."""
        role = self._scheduler
        matched = role.matched_tokens(request, num_computed_tokens) if role is not None else 0
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that were allocated for it."""
        if self._scheduler is None:
            self._prompts.uncached(request)
        else:
            self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's jobs."""
        if self._scheduler is None:
            return KVLakeMetadata(StepPlan())
        if self._engine.refusal and not self._scheduler.retired:
            self._scheduler.retire()
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> Sequence[list[int]]:
            ids = state.get_block_ids(request_id) if state is not None else None
            return [[] for _ in self._engine.groups] if ids is None else ids

        plan = self._scheduler.build_plan(
            scheduler_output.num_scheduled_tokens,
            block_ids_of,
            states_of(state),
            scheduler_output.preempted_req_ids or (),
        )
        plan.idle = scheduler_output.total_num_scheduled_tokens == 0
        self._scheduler.wait_idle(plan)
        return KVLakeMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers reported."""
        if self._scheduler is None:
            return
        self._scheduler.loads_ended(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )
        # Another connector's, which vLLM computes again.
        self._scheduler.stores.distrust(connector_output.invalid_block_ids or ())
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVLakeWorkerMetadata):
            self._scheduler.stores_ended(metadata.report)
            if metadata.report.refusal and not self._scheduler.retired:
                if not self._engine.refusal:
                    logger.warning(UNCACHED, metadata.report.refusal)
                self._scheduler.retire()

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, of an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the tail. Never delays the request's blocks: references of ours hold them."""
        if self._scheduler is None:
            self._prompts.finished(request)
            return False, None
        failed = request.status is RequestStatus.FINISHED_ERROR
        return False, self._scheduler.request_finished(request, block_ids, failed=failed)

    def has_pending_block_frees(self) -> bool:
        """Whether to wait for blocks of open stores, for milliseconds, rather than preempt."""
        return self._scheduler is not None and self._scheduler.stores.blocks_coming_back()

    def has_pending_push_work(self) -> bool:
        """Whether to keep stepping: blocks of open stores are not free yet."""
        return self._scheduler is not None and bool(self._scheduler.stores.jobs)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> "dict[CacheHitSource, int]":
        """Tokens from host memory, and from the object store, which vLLM counts as disk."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        # Not at import: vLLM 0.31 has no such module, and does not call this.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host, store = self._scheduler.hit_sources(request)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: store}
        return {source: count for source, count in sources.items() if count}

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Changes of the tiers, as in the sidecar's own stream but without tokens."""
        if self._scheduler is None or not self._wants_events:
            return ()
        engine, taken = self._engine, self._scheduler.take_events()
        events = vllm_events(taken, engine.owner, several_groups=len(engine.groups) > 1)
        if self._publishes_hits:
            self._publishes_hits = False
            events.append(hits_event())
        return events

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        """What the scheduler role counted since the last call; None for nothing."""
        counts = self._prompts.take()
        if self._scheduler is not None:
            counts |= self._scheduler.take_stats()
        elif self._uncached_requests:
            counts["requests_uncached"] = self._uncached_requests
            self._uncached_requests = 0
        return KVLakeStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> "KVConnectorStats | None":
        """Stats from their serialized form."""
        return KVLakeStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        """Counters beside vLLM's own."""
        return KVLakePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Hide everything cached so far from this engine."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Detach. vLLM does not always call this, so the sidecar relies on end of file."""
        self._engine.close()
        unwatch_weights(self._weights)
        if self._scheduler is not None:
            unwatch_weights(self._scheduler)
            self._scheduler.client.close()
        if self._worker is not None:
            self._worker.close()
        if self._notice is not None:
            self._notice.close()
