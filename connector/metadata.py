"""vLLM's envelopes for what the scheduler role and the workers tell each other every step.

They travel by pickle between vLLM's own processes; what is in them is in `plan.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from connector.plan import StepPlan, StepReport


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
