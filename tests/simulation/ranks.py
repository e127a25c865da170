"""One worker of a simulated engine: KV memory, the real worker role, a device that may be late."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from connector.client import Attempt, Client
from connector.export import ExportedMemory
from connector.worker import WorkerRole
from sidecar.protocol import Attach, Memory, Role
from tests.simulation.wire import Wire
from tiers.fence import WorkerFence
from tiers.memfd import sealed_memfd

if TYPE_CHECKING:
    from tests.simulation.engine import SimEngine


class LateFence(WorkerFence):
    """A page whose stores come when the simulated stream gets there."""

    late = False
    sequence = 0

    def signal(self, sequence: int) -> None:
        self.sequence = max(self.sequence, sequence)
        if not self.late:
            super().signal(self.sequence)

    def reach(self) -> None:
        """The stream got there."""
        if self.fd >= 0:
            super().signal(self.sequence)


class SimWorker(WorkerRole):
    """The real worker role, with fence pages that a simulated device writes to."""

    def __init__(self, *parts: Any, late: bool, **options: Any) -> None:
        self._late = late
        self.pages: list[LateFence] = []
        super().__init__(*parts, **options)

    def _make_attempt(self) -> Attempt:
        fence = LateFence()
        fence.late = self._late
        self.pages.append(fence)
        memory = Memory(kind="memfd", size_bytes=self._memory.size_bytes)
        return Attempt(self._describe(self._memory, memory), [self._memory.fd, fence.fd], fence)


class Rank:
    """One worker: its KV memory and its role."""

    def __init__(self, engine: SimEngine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.layout = engine.model.kv_layout(rank, engine.num_blocks)
        self.fd = sealed_memfd("sim-kv", self.layout.size_bytes)
        self._map = mmap.mmap(self.fd, self.layout.size_bytes)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self.kv = engine.model.view(memory, rank)
        exported = ExportedMemory(self.fd, self.layout.size_bytes, self.layout)
        self.wire: Wire
        self.role = SimWorker(
            exported,
            self._wired,
            self._describe,
            clock=engine.world.clock,
            late=engine.late_fences,
        )

    def _wired(self, make_attempt: Callable[[], Attempt]) -> Client:
        self.wire = Wire(self.engine.node, f"{self.engine.name}.{self.rank}", make_attempt)
        return self.wire.as_client()

    def _describe(self, memory: ExportedMemory, shared: Memory) -> Attach:
        segment = self.layout.segment
        return self.engine.attach_message(
            Role.WORKER, self.rank, segment=segment, layout=self.layout, memory=shared
        )

    def device_done(self) -> None:
        """The step's work on the device is over."""
        pages = self.role.pages
        pages[:] = [page for page in pages if page.fd >= 0]
        for page in pages:
            page.reach()

    def close(self) -> None:
        """The process is gone."""
        self.wire.die()
        for page in self.role.pages:
            page.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
