"""The scheduler role's counters (`scheduler/stats.py`) in vLLM's statistics and metrics."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connector.scheduler.outcomes import HELP, PREFIX
from connector.scheduler.stats import Stats
from sidecar.protocol.prompts import PromptOutcome

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class KVLakeStats(KVConnectorStats):
    """Counts of one interval, by the field names of `Stats`."""

    def reset(self) -> None:
        """Forget the counts."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval, or another engine."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counts, which are sums already."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class KVLakePromMetrics(KVConnectorPromMetrics):
    """Exports the counts as `vllm:kvlake_*_total` beside vLLM's own metrics."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for field in fields(Stats):
            name, text = f"vllm:kvlake_{field.name}", f"kvlake: {field.metadata['help']}."
            counter = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            self._counters[field.name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }
        tokens = self._counter_cls(
            name="vllm:kvlake_prompt_tokens",
            documentation=f"kvlake: {HELP}.",
            labelnames=[*labelnames, "outcome", "reason"],
        )
        for outcome in PromptOutcome:
            self._counters[PREFIX + outcome] = {
                engine: tokens.labels(*values, *outcome.labels)
                for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts of one engine."""
        for name, count in transfer_stats_data.items():
            if count and name in self._counters:
                self._counters[name][engine_idx].inc(count)
