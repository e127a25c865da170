"""The scheduler role's counts in the shape of vLLM's statistics, and beside its own metrics.

Does not own what is counted: that is `connector.requests.Stats`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connector.requests import Stats

if TYPE_CHECKING:
    from vllm.config import VllmConfig


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
