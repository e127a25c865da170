"""The scheduler role's counts in the shape of vLLM's statistics, and beside its own metrics.

Owns the words for what each count is of. Does not own the counts: that is
`connector.scheduler.requests.Stats`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

HELP: Final = {
    "requests_hit": "Requests whose first load brought all its tokens",
    "requests_missed": "Requests that began without a load though they lacked load_tokens_min"
    " tokens or more behind the hit in vLLM's own prefix cache. What that cache held, shorter"
    " requests, and those that do not read are neither hit nor missed",
    "tokens_loaded_host": "Prompt tokens loaded that host memory held when they were looked up",
    "tokens_loaded_store": "Prompt tokens loaded that were read from the object store first",
    "loads_failed": "Loads of requests that failed; their tokens were computed",
    "loads_expired": "Of these, loads whose deadline passed first, each rank counted",
    "lookups_sent": "Requests for which the sidecar was asked to read from the object store",
    "lookups_expired": "Of these, requests to which it had not answered within limits.lookup_wait",
    "chunks_stored": "Chunks that the engine set out to store. Which of them were stored, the"
    " sidecar counts: kvlake_chunks_stored_total",
    "stores_skipped": "Chunks that were not stored because too many stores had not ended",
    "stores_failed": "Store jobs that failed, each rank counted; a job has many chunks",
    "stores_expired": "Of these, jobs whose deadline passed first",
    "answers_stale": "Messages of an earlier life of the sidecar, which were dropped",
    "pins_skipped": "Chunks that were to be pinned (pin_seconds) while there was no sidecar",
    "expected_late": "Requests for which another engine's chunks (expect_tokens) did not come in"
    " time",
    "requests_uncached": "Requests that came while the engine had no sidecar, or was refused",
}
"""What each count is of, by its field in `Stats`."""


class KVLakeStats(KVConnectorStats):
    """Counts of one interval, by the field names of `connector.scheduler.requests.Stats`."""

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
        for name, told in HELP.items():
            counter = self._counter_cls(
                name=f"vllm:kvlake_{name}",
                documentation=f"kvlake: {told}.",
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
