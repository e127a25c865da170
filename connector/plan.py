"""What the scheduler role and the workers of one engine exchange in each step.

Plain records, pickled between vLLM's own processes; `vllm.py` wraps them in vLLM's classes. Jobs
are already as a worker sends them to its sidecar.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

from sidecar.protocol import LoadJob, StoreJob

OVERHEAD_BYTES_MAX: Final = 128
"""Size of an encoded job, or chunk of a job, without its tokens and block ids."""
BLOCK_ID_BYTES_MAX: Final = 5
IDLE_WAIT_MS: Final = 2
"""How long a step that computes nothing waits for the sidecar. An answer ends the wait.

vLLM itself sleeps for 1 ms between two such steps.
"""
LOADS_WAIT_MS: Final = 10
"""The same for a worker with open loads. A request that comes meanwhile waits for the step."""
STORES_WAIT_MS: Final = 1
"""The same for a scheduler while stores are open: it gets no answers to them."""

T = TypeVar("T")


def batches(
    items: Iterable[T], bytes_max_of: Callable[[T], int], bytes_max: int, items_max: int
) -> Iterator[list[T]]:
    """Items in order, in as few lists as fit into messages. An item alone may be larger."""
    batch: list[T] = []
    size_bytes = 0
    for item in items:
        item_bytes = bytes_max_of(item)
        if batch and (len(batch) == items_max or size_bytes + item_bytes > bytes_max):
            yield batch
            batch, size_bytes = [], 0
        batch.append(item)
        size_bytes += item_bytes
    if batch:
        yield batch


@dataclass(slots=True)
class Load:
    """All chunks that a request loads."""

    request_id: str
    job: LoadJob

    @property
    def bytes_max(self) -> int:
        """An upper bound for the size of the encoded job."""
        blocks = sum(len(chunk.block_ids) for chunk in self.job.chunks)
        return OVERHEAD_BYTES_MAX * (1 + len(self.job.chunks)) + BLOCK_ID_BYTES_MAX * blocks


@dataclass(slots=True)
class Store:
    """Chunks of one request that a step completes."""

    job: StoreJob
    adapter_id: int = 0
    adapter_files: str = ""
    """What a worker must have loaded for vLLM's `adapter_id` to store them."""

    @property
    def bytes_max(self) -> int:
        """An upper bound for the size of the encoded job."""
        return OVERHEAD_BYTES_MAX + sum(
            OVERHEAD_BYTES_MAX + len(chunk.token_ids) + BLOCK_ID_BYTES_MAX * len(chunk.block_ids)
            for chunk in self.job.chunks
        )


@dataclass(slots=True)
class StepPlan:
    """Jobs of one step, the same for every rank."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    idle: bool = False
    """The step computes nothing, and the scheduler did not wait in it."""
    waiting: bool = False
    """A job of any rank, or a lookup, is still open at the sidecar."""
    retired: bool = False
    """A rank can never share its memory, so all ranks detach. Set in every later plan, too."""
    weight_changes: int = 0
    """How often the engine's weights were replaced, as far as the scheduler knows."""
    epoch: int = 0
    """The sidecar of the scheduler's session, or 0. Ranks report that they have none with it."""


@dataclass(slots=True)
class StepReport:
    """What ended on a rank since its last report."""

    ended: dict[int, int] = field(default_factory=dict)
    """Ended store jobs: job id to the number of ranks."""
    failed: int = 0
    """How many of them failed, each rank counted; expired ones included."""
    stores_expired: int = 0
    loads_expired: int = 0
    refusal: str = ""
    """Why a rank can never share its memory. Reported once."""
    adapters: dict[tuple[int, str, bool], int] = field(default_factory=dict)
    """LoRA adapters that were loaded: number, files, whether in place, to the number of ranks."""
    weights_changed: bool = False
    """Weights were replaced without the scheduler's knowledge."""
    unattached: int | None = None
    """Ranks that have no session beside an attached scheduler, in every step; 0 once after that."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to report."""
        return self == StepReport()

    def add(self, other: "StepReport") -> "StepReport":
        """Sum of two ranks' reports."""
        unattached = [one.unattached for one in (self, other) if one.unattached is not None]
        return StepReport(
            Counter(self.ended) + Counter(other.ended),
            self.failed + other.failed,
            self.stores_expired + other.stores_expired,
            self.loads_expired + other.loads_expired,
            self.refusal or other.refusal,
            Counter(self.adapters) + Counter(other.adapters),
            self.weights_changed or other.weights_changed,
            sum(unattached) if unattached else None,
        )
