"""`KVLakeConnector`: the class that vLLM loads, and the only file that subclasses vLLM.

Delegates by role to `SchedulerRole` or `WorkerRole`. Where an engine cannot be cached safely
(KV cache groups of an unknown kind, ranks that replicate heads, pipeline stages, drafts), it serves
without the cache and says so once. No method raises for a fault of the cache.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, ZmqEventPublisher
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connector.client import Attempt, Client
from connector.export import ExportedMemory, ExportRefused, GroupTensors, MemfdAllocation, export
from connector.groups import FULL, Attention, CachedGroup, Geometry, chunk_tokens_of
from connector.namespace import WeightsUnknown, digest_of, encoding_of, namespace_of
from connector.plan import StepPlan, StepReport
from connector.requests import Settings, Stats
from connector.scheduler import SchedulerRole
from connector.worker import TransferResults, WorkerRole
from sidecar.protocol import GROUPS_MAX, PROTOCOL_VERSION, Attach, Group, Memory, Role
from tiers.errors import LayoutError
from tiers.layout import Segment, head_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    from tiers.layout import KVLayout

logger = logging.getLogger("vllm.kvlake")

MEDIUM_STORAGE = "STORAGE"
EVENT_NAME_BYTES = 16
"""Of a chunk's key, as in the sidecar's own stream."""


class KVLakeMetadata(KVConnectorMetadata):
    """A step's jobs on their way from the scheduler to the workers."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class KVLakeWorkerMetadata(KVConnectorWorkerMetadata):
    """Ended stores on their way from the workers to the scheduler."""

    def __init__(self, report: StepReport) -> None:
        self.report = report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add up what several ranks reported."""
        assert isinstance(other, KVLakeWorkerMetadata)
        return KVLakeWorkerMetadata(self.report.add(other.report))


class KVLakeStats(KVConnectorStats):
    """Counts of one interval, by the field names of `connector.scheduler.Stats`."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval, or another engine."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts as they are; they are sums already."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KVLakePromMetrics(KVConnectorPromMetrics):
    """Exports the counts as `vllm:kvlake_*_total` beside vLLM's own metrics."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        for name in asdict(Stats()):
            counter = self._counter_cls(
                name=f"vllm:kvlake_{name}",
                documentation=f"kvlake connector: {name.replace('_', ' ')}.",
                labelnames=labelnames,
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts of one engine."""
        for name, count in transfer_stats_data.items():
            if count and name in self._counters:
                self._counters[name][engine_idx].inc(count)


@dataclass(frozen=True, slots=True)
class _Group:
    """One KV cache group, as both roles must see it."""

    layer_names: list[str]
    geometry: Geometry
    num_heads: int
    encoding: str
    namespace: bytes
    latent: bool = False
    """MLA: one vector per token instead of heads, and every rank holds all of it."""

    def segment(self, rank: int, tp_size: int) -> Segment:
        """Layers and heads of a tensor-parallel rank. Raises `LayoutError`."""
        if self.latent:
            return Segment(0, len(self.layer_names), 0, 1)
        return head_segment(len(self.layer_names), self.num_heads, rank, tp_size)


class _Engine:
    """What both roles must agree on, read from vLLM's configuration once."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        self.socket = str(extra.get("socket") or default_socket())
        self.attach_seconds = _seconds(extra, "attach_seconds", 2.0)
        self.load_tokens_min = _count(extra, "load_tokens_min", 64)
        chunk_tokens = _count(extra, "chunk_tokens", 256)
        parallel = vllm_config.parallel_config
        self.engine_id = str(transfer.engine_id)
        self.tp_size = int(parallel.tensor_parallel_size)
        self.world_size = int(parallel.world_size)
        self.refusal = self._refusal(vllm_config, kv_cache_config, chunk_tokens)
        if self.refusal:
            return
        groups = kv_cache_config.kv_cache_groups
        try:
            self.groups = [
                self._group(vllm_config, group, chunk_tokens, alone=len(groups) == 1)
                for group in groups
            ]
        except (WeightsUnknown, OSError) as error:
            self.refusal = str(error)
            return
        self.replicas = self.tp_size if self.groups[0].latent else 1

    def _group(self, vllm_config: Any, group: Any, chunk_tokens: int, *, alone: bool) -> _Group:
        spec = group.kv_cache_spec
        layer_names: list[str] = list(group.layer_names)
        attention = _attention(spec)
        assert attention is not None, "refused before"
        block_tokens = int(spec.block_size)
        own_tokens = chunk_tokens_of(chunk_tokens, block_tokens, attention)
        geometry = Geometry(block_tokens, own_tokens, attention)
        num_heads = self._num_heads(vllm_config, spec)
        namespace = namespace_of(
            vllm_config,
            block_tokens=block_tokens,
            blocks_per_chunk=geometry.blocks_per_chunk,
            spec=spec,
            # Of a group that is the whole model, the model says it all.
            layer_names=() if alone else layer_names,
            kv_heads=num_heads,
        )
        encoding = encoding_of(vllm_config, block_tokens, spec)
        latent = isinstance(spec, MLAAttentionSpec)
        return _Group(layer_names, geometry, num_heads, encoding, namespace, latent)

    def _num_heads(self, vllm_config: Any, spec: Any) -> int:
        """KV heads of a group's layers over all ranks; hybrid models may have several counts."""
        if isinstance(spec, MLAAttentionSpec):
            return 1
        total = int(vllm_config.model_config.get_total_num_kv_heads())
        # Where heads are replicated the product would count them twice; that is refused.
        return total if self.tp_size > total else int(spec.num_kv_heads) * self.tp_size

    def _refusal(self, vllm_config: Any, kv_cache_config: Any, chunk_tokens: int) -> str:
        """Why this engine cannot be cached safely, or nothing."""
        # Not at import: vLLM imports this module in its front end, which must not pick a platform.
        from vllm.platforms import current_platform

        if not (current_platform.is_cpu() or current_platform.is_cuda()):
            return f"platform {current_platform.device_type!r} is not supported by this release"
        if vllm_config.model_config.enable_sleep_mode:
            # Asleep, its memory goes, and what the sidecar mapped would no longer be the cache.
            return "enable_sleep_mode is not supported by this release"
        parallel = vllm_config.parallel_config
        groups = kv_cache_config.kv_cache_groups
        unknown = {
            type(group.kv_cache_spec).__name__
            for group in groups
            if _attention(group.kv_cache_spec) is None
            or not getattr(group, "enable_kv_transfer", True)
        }
        if unknown or not 0 < len(groups) <= GROUPS_MAX:
            kinds = f", {', '.join(sorted(unknown))} among them" if unknown else ""
            return (
                f"its KV cache is of {len(groups)} groups{kinds}; this release knows full, "
                "sliding-window and chunked local attention"
            )
        for name in (
            "pipeline_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(parallel, name, 1) > 1:
                return f"{name}={getattr(parallel, name)} is not supported by this release"
        if vllm_config.speculative_config is not None:
            return "speculative decoding is not supported by this release"
        latent = [isinstance(group.kv_cache_spec, MLAAttentionSpec) for group in groups]
        if any(latent):
            if len(groups) > 1:
                return "MLA beside groups of other kinds is not supported by this release"
            if current_platform.is_cpu() and not (
                vllm_config.scheduler_config.enable_chunked_prefill
            ):
                # Its reference backend attends to the tokens of the step only.
                return "its MLA backend cannot go on from a cached prefix"
        for group in groups:
            spec = group.kv_cache_spec
            if chunk_tokens % spec.block_size:
                return (
                    f"chunk_tokens={chunk_tokens} is not a multiple of the block size "
                    f"{spec.block_size}"
                )
            if any(latent):
                continue
            try:
                heads = self._num_heads(vllm_config, spec)
                head_segment(len(group.layer_names), heads, 0, self.tp_size)
            except LayoutError as error:
                return str(error)
        return ""

    def owner(self, group: int) -> str:
        """Whose chunks are told of in events."""
        namespace = digest_of(self.groups[group].namespace)
        return f"kvlake/{namespace.hex()[:16]}/tp{self.tp_size}"

    def attach(
        self, role: Role, rank: int, exported: ExportedMemory | None = None, **parts: Any
    ) -> Attach:
        """The attach message of one role of this engine; of a worker, with its memory."""
        first, *others = self.groups
        layouts: Sequence[KVLayout | None] = [None] * len(self.groups)
        if exported is not None:
            layouts = exported.layouts
            parts |= {"segment": exported.layout.segment, "layout": exported.layout}
        return Attach(
            version=PROTOCOL_VERSION,
            role=role,
            engine_id=self.engine_id,
            rank=rank,
            world_size=self.world_size,
            # Ranks that hold copies do not count: they read what an engine without them stored.
            topology=f"tp{self.tp_size // self.replicas}",
            replicas=self.replicas,
            namespace=first.namespace,
            block_tokens=first.geometry.block_tokens,
            blocks_per_chunk=first.geometry.blocks_per_chunk,
            pid=os.getpid(),
            groups=tuple(
                Group(
                    namespace=group.namespace,
                    block_tokens=group.geometry.block_tokens,
                    blocks_per_chunk=group.geometry.blocks_per_chunk,
                    segment=None if layout is None else layout.segment,
                    layout=layout,
                )
                for group, layout in zip(others, layouts[1:], strict=True)
            ),
            **parts,
        )


class KVLakeConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's KV connector of kvlake; see `docs/operations.md` for its extra configuration."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._allocation: MemfdAllocation | None = None
        self._transfers: TransferResults | None = None
        self._engine = _Engine(vllm_config, kv_cache_config)
        if self._engine.refusal:
            if role == KVConnectorRole.SCHEDULER:
                logger.warning(
                    "kvlake: this engine is served without the cache, because %s",
                    self._engine.refusal,
                )
        elif role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(vllm_config)

    def _make_scheduler(self, vllm_config: Any) -> SchedulerRole:
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            # vLLM reads this after it made the connector. With "fail", a chunk that was evicted
            # between lookup and load would fail the user's request.
            logger.info("kvlake: kv_load_failure_policy is set to 'recompute'")
            transfer.kv_load_failure_policy = "recompute"
        engine = self._engine
        events = vllm_config.kv_events_config
        self._wants_events = bool(events is not None and events.enable_kv_cache_events)
        endpoint, replay = events_endpoints(events, vllm_config.parallel_config.data_parallel_rank)
        attempt = Attempt(
            engine.attach(
                Role.SCHEDULER,
                0,
                want_events=self._wants_events,
                events_endpoint=endpoint,
                events_replay=replay,
            )
        )
        client = Client(engine.socket, lambda: attempt)
        # Before the first request: a sidecar that is there should serve the first one too.
        client.wait_attached(engine.attach_seconds)
        settings = Settings(
            reads=transfer.is_kv_consumer,
            writes=transfer.is_kv_producer,
            load_tokens_min=engine.load_tokens_min,
        )
        groups = [CachedGroup(digest_of(one.namespace), one.geometry) for one in engine.groups]
        return SchedulerRole(client, groups, settings, engine.world_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: a dropped store is a later miss, nothing is handed over."""
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:  # noqa: ARG003
        """All of a block in one run, where a GPU's attention backend can; vLLM falls back."""
        from vllm.platforms import current_platform

        return "BLHNC" if current_platform.is_cuda() else None

    # --- worker --------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """On the CPU, a context that places the KV cache on a memfd."""
        from vllm.platforms import current_platform

        if self._engine.refusal or not current_platform.is_cpu():
            return None
        self._allocation = MemfdAllocation()
        return self._allocation

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe and share the cache; without it the worker serves uncached."""
        engine = self._engine
        if engine.refusal:
            if any(
                isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
                for group in self._kv_cache_config.kv_cache_groups
            ):
                # The scheduler is shown one layer of such a group, and so did not refuse it.
                logger.warning(
                    "kvlake: this worker is served without the cache, because %s", engine.refusal
                )
            return
        from vllm.distributed import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
        try:
            groups = [
                GroupTensors(
                    [kv_caches[name] for name in group.layer_names],
                    group.segment(rank, engine.tp_size),
                    group.encoding,
                )
                for group in engine.groups
            ]
            memory = export(groups, self._allocation)
            _require_blocks(memory, engine.groups)
        except (ExportRefused, LayoutError, KeyError) as error:
            logger.warning("kvlake: this worker is served without the cache, because %s", error)
            return

        def describe(exported: ExportedMemory, shared: Memory) -> Attach:
            return engine.attach(Role.WORKER, rank, exported, memory=shared)

        self._worker = WorkerRole(
            memory,
            lambda make_attempt: self._attached(Client(engine.socket, make_attempt)),
            describe,
        )

    def _attached(self, client: Client) -> Client:
        client.wait_attached(self._engine.attach_seconds)
        return client

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads go out with the step's stores in `wait_for_save`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous, requests are scheduled once theirs has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole chunks are stored after the step."""

    def wait_for_save(self) -> None:
        """Send this step's jobs. Their blocks are held until the answer, so nothing waits here."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KVLakeMetadata)
        if self._worker is not None:
            self._worker.submit(metadata.plan)
        elif metadata.plan.loads or metadata.plan.stores:
            self._transfers = _unserved(metadata.plan)

    def get_transfer_results(
        self,
        finished_req_ids: set[str],  # noqa: ARG002 (vLLM's signature)
    ) -> KVConnectorTransferResults:
        """Loads that ended on this rank, failed ones among them."""
        if self._worker is not None:
            self._transfers = self._worker.collect()
        if self._transfers is None:
            return KVConnectorTransferResults()
        return KVConnectorTransferResults(
            finished_recving=self._transfers.loaded, failed_recving=self._transfers.failed
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Stores that ended on this rank."""
        transfers, self._transfers = self._transfers, None
        if transfers is None or transfers.report.empty:
            return None
        return KVLakeWorkerMetadata(transfers.report)

    # --- scheduler -----------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Keep the pool: references in it hold the blocks of outstanding stores."""
        if self._scheduler is not None:
            self._scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """Hash the prompt once, and start to read what only the object store holds."""
        if self._scheduler is not None:
            self._scheduler.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the engine's own hit; always asynchronously."""
        if self._scheduler is None:
            return 0, False
        matched = self._scheduler.matched_tokens(request, num_computed_tokens)
        return matched, bool(matched)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load into the blocks that were allocated for it."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """This step's jobs."""
        if self._scheduler is None:
            return KVLakeMetadata(StepPlan())
        state = scheduler_output.kv_connector_block_state

        nothing: list[list[int]] = [[] for _ in self._engine.groups]

        def block_ids_of(request_id: str) -> Sequence[list[int]]:
            ids = state.get_block_ids(request_id) if state is not None else None
            return ids if ids is not None else nothing

        plan = self._scheduler.build_plan(scheduler_output.num_scheduled_tokens, block_ids_of)
        plan.idle = scheduler_output.total_num_scheduled_tokens == 0
        return KVLakeMetadata(plan)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take what the workers reported."""
        if self._scheduler is None:
            return
        self._scheduler.loads_ended(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, KVLakeWorkerMetadata):
            self._scheduler.stores_ended(metadata.report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished_all_groups`, of an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Store the tail. Never delays the request's blocks: references of ours hold them."""
        if self._scheduler is not None:
            self._scheduler.request_finished(request, block_ids)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Blocks of stored chunks come back in milliseconds: rather wait than preempt."""
        return self._scheduler is not None and self._scheduler.blocks_coming_back()

    def has_pending_push_work(self) -> bool:
        """Keep stepping until the blocks of outstanding stores were given back."""
        return self._scheduler is not None and self._scheduler.stores_outstanding > 0

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        """Host memory, or the object store (vLLM's name for tiers below host memory: disk)."""
        if self._scheduler is None or not num_external_tokens:
            return {}
        # Not at import: vLLM 0.31 has no such module, and does not ask.
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host, store = self._scheduler.hit_sources(request)
        sources = {CacheHitSource.HOST: host, CacheHitSource.DISK: store}
        return {source: count for source, count in sources.items() if count}

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What the tiers gained and lost, as the sidecar's own stream calls it, less the tokens."""
        if self._scheduler is None or not self._wants_events:
            return ()
        stored, removed = self._scheduler.take_events()
        several = len(self._engine.groups) > 1
        events: list[KVCacheEvent] = []
        for event in stored:
            medium, locality = _medium(event.tier)
            events.append(
                BlockStored(
                    block_hashes=[event.key[:EVENT_NAME_BYTES]],
                    parent_block_hash=event.parent[:EVENT_NAME_BYTES]
                    if any(event.parent)
                    else None,
                    token_ids=[],
                    block_size=event.num_tokens,
                    lora_id=None,
                    medium=medium,
                    lora_name=None,
                    locality=locality,
                    ownership=self._engine.owner(event.group),
                    group_idx=event.group if several else None,
                )
            )
        for gone in removed:
            medium, locality = _medium(gone.tier)
            events.append(
                BlockRemoved(
                    block_hashes=[gone.key[:EVENT_NAME_BYTES]],
                    medium=medium,
                    locality=locality,
                    ownership=self._engine.owner(gone.group),
                    group_idx=gone.group if several else None,
                )
            )
        return events

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts of the scheduler role since the last call."""
        if self._scheduler is None:
            return None
        return KVLakeStats(data=asdict(self._scheduler.take_stats()))

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Stats from their serialized form."""
        return KVLakeStats(data=data if data is not None else {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Counters beside vLLM's own."""
        return KVLakePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def reset_cache(self) -> bool | None:
        """Nothing cached before this call is found by this engine again."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Detach; vLLM does not always call this, so the sidecar relies on end of file."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def default_socket() -> str:
    """Where a sidecar with the default configuration listens for this user."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and Path(own).is_dir():
        base = Path(own) / "kvlake"
    else:
        base = Path(f"/tmp/kvlake-{os.getuid()}")  # noqa: S108 (the sidecar checks its owner)
    return str(base / "default" / "attach.sock")


def events_endpoints(events: Any, data_parallel_rank: int) -> tuple[str, str]:
    """Where a process of this machine subscribes to vLLM's own KV events, and has them replayed.

    Empty where vLLM publishes none, or where it connects to its subscriber rather than binds.
    """
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return "", ""
    places: list[str] = []
    for given in (events.endpoint, events.replay_endpoint or ""):
        try:
            place = ZmqEventPublisher.offset_endpoint_port(given, data_parallel_rank) or ""
        except ValueError:
            # vLLM itself refuses such an endpoint for this rank, and says so.
            place = ""
        place = place.replace("tcp://*:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
        reached = place.startswith("ipc:///") or "*" in given or "::" in given
        places.append(place if reached and not place.endswith(":0") else "")
    endpoint, replay = places
    return (endpoint, replay) if endpoint else ("", "")


def _medium(tier: str) -> tuple[str, str]:
    """Medium and locality of a tier."""
    return (MEDIUM_CPU, "LOCAL") if tier == "host" else (MEDIUM_STORAGE, "REMOTE")


def _attention(spec: Any) -> Attention | None:
    """What layers of a KV cache group still read of their past; None of a kind not known here."""
    # Not subclasses: they may keep other things in a block than keys and values of its tokens.
    if type(spec) is FullAttentionSpec:
        return FULL
    if type(spec) is MLAAttentionSpec:
        # With several tokens in one state a block is no row of tokens.
        return FULL if spec.tokens_per_state == 1 and spec.page_size_padded is None else None
    if type(spec) is SlidingWindowSpec and not getattr(spec, "extra_retained_tokens", 0):
        return Attention(window=int(spec.sliding_window))
    if type(spec) is ChunkedLocalAttentionSpec:
        return Attention(local=int(spec.attention_chunk_size))
    return None


def _require_blocks(memory: ExportedMemory, groups: list[_Group]) -> None:
    """Raise `ExportRefused` where attention kernels divide the scheduler's blocks."""
    for layout, group in zip(memory.layouts, groups, strict=True):
        if layout.block_tokens != group.geometry.block_tokens:
            memory.close()
            raise ExportRefused(
                f"its blocks of {group.geometry.block_tokens} tokens lie in memory as blocks of "
                f"{layout.block_tokens}; set --block-size {layout.block_tokens}"
            )


def _unserved(plan: StepPlan) -> TransferResults:
    """Every job of a step fails on a rank whose memory could not be shared."""
    loads = {load.request_id for load in plan.loads}
    ended = {store.job_id: 1 for store in plan.stores}
    return TransferResults(loads, set(loads), StepReport(ended, len(ended)))


def _count(extra: dict[str, Any], name: str, default: int) -> int:
    value = extra.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(
            f"kv_connector_extra_config[{name!r}]={value!r}: must be a positive integer"
        )
    return value


def _seconds(extra: dict[str, Any], name: str, default: float) -> float:
    value = extra.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"kv_connector_extra_config[{name!r}]={value!r}: must be seconds, 0 or more"
        )
    return float(value)
