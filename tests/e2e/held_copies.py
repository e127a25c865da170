"""`HeldSpec`: the offloading spec of `native.py`, of whose worker one copy can be held half-way.

What the connector's sidecar copies into and out of an engine's blocks, vLLM's own worker copies
between these and its host tier. Here that worker looks at files between two layers (`holds.py`).
Loaded in an engine's process; all else is the code that is tested.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from connector.offloading.cpu_worker import HostCopyWorker
from tests.e2e.holds import COPY_IN, COPY_OUT, Holds
from tests.e2e.settling import SettlingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult


class HeldSpec(SettlingSpec):
    """Runs in the engine's processes; else the spec as it is."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker for CPU engines, held."""
        worker: Any = super().get_worker(kv_caches)
        assert isinstance(worker, HostCopyWorker)
        hold_copies(worker, Holds(Path(self.extra_config["holds"])))
        return worker


def hold_copies(worker: Any, holds: Holds) -> None:
    """Wait after each layer of a copy, in the copy thread: there is one."""
    copy = worker._copy  # noqa: SLF001 (its public names are vLLM's)
    step = COPY_OUT

    def copied(job_id: int, pieces: list[Any], *, store: bool) -> TransferResult:
        nonlocal step
        step = COPY_OUT if store else COPY_IN
        result: TransferResult = copy(job_id, pieces, store=store)
        return result

    worker._copy = copied  # noqa: SLF001 (its public names are vLLM's)
    pid = os.getpid()
    worker._groups = [_Held(runs, lambda: holds.wait(step, pid)) for runs in worker._groups]  # noqa: SLF001 (its public names are vLLM's)


class _Held(list[Any]):
    """A list during whose iteration something happens after each item."""

    def __init__(self, items: list[Any], visit: Callable[[], None]) -> None:
        super().__init__(items)
        self._visit = visit

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield item
            self._visit()
