"""One worker of a simulated engine: KV memory, the real worker role, a device that may be late."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from connector.client import Attempt, Client
from connector.export import ExportedMemory
from connector.worker import WorkerRole
from sidecar.protocol import KIND_MEMFD, PROTOCOL_VERSION, Attach, Group, Memory, Role
from tests.simulation.clock import Violation
from tests.simulation.content import BLOCK_TOKENS, POISON, Words
from tests.simulation.wire import Wire
from tiers.kv.fence import WorkerFence
from tiers.kv.memfd import sealed_memfd

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
        memory = self._memory
        assert memory is not None
        return Attempt(self._describe(memory), [memory.fd, fence.fd], fence)


def attach_message(engine: SimEngine, role: Role, rank: int, **parts: Any) -> Attach:
    """What a role of the engine attaches with."""
    layouts = [
        group.kv_layout(rank, engine.num_blocks) if role is Role.WORKER else None
        for group in engine.groups
    ]
    first, *others = [
        Group(
            group.namespace,
            BLOCK_TOKENS,
            group.geometry.blocks_per_chunk,
            None if layout is None else layout.segment,
            layout,
        )
        for group, layout in zip(engine.groups, layouts, strict=True)
    ]
    return Attach(
        version=PROTOCOL_VERSION,
        role=role,
        engine_id=engine.name,
        rank=rank,
        world_size=engine.model.ranks,
        topology=engine.model.topology,
        namespace=first.namespace,
        block_tokens=first.block_tokens,
        blocks_per_chunk=first.blocks_per_chunk,
        segment=first.segment,
        layout=first.layout,
        groups=tuple(others),
        pid=4_000,
        **parts,
    )


class Rank:
    """One worker: its KV memory and its role."""

    def __init__(self, engine: SimEngine, rank: int) -> None:
        self.engine = engine
        self.rank = rank
        self.layout, *others = [one.kv_layout(rank, engine.num_blocks) for one in engine.groups]
        self.fd = sealed_memfd("sim-kv", self.layout.size_bytes)
        self._map = mmap.mmap(self.fd, self.layout.size_bytes)
        memory = np.frombuffer(self._map, dtype=np.uint8)
        self.views = [group.view(memory, rank) for group in engine.groups]
        """Per KV cache group: they lie over each other, and the first has all of it."""
        self.kv = self.views[0]
        if engine.pool.null.is_null:
            self.kv[0] = POISON
        exported = ExportedMemory(
            self.fd, Memory(KIND_MEMFD, self.layout.size_bytes), [self.layout, *others]
        )
        self.wire: Wire
        self.role = SimWorker(
            lambda: exported,
            self._wired,
            self._describe,
            clock=engine.world.clock,
            late=engine.late_fences,
        )

    def _wired(self, make_attempt: Callable[[], Attempt]) -> Client:
        self.wire = Wire(self.engine.node, f"{self.engine.name}.{self.rank}", make_attempt)
        return self.wire.as_client()

    def _describe(self, memory: ExportedMemory) -> Attach:
        return attach_message(self.engine, Role.WORKER, self.rank, memory=memory.shared)

    def compute(
        self, group: int, digests: Words, table: Sequence[int], start: int, request_id: str
    ) -> None:
        """The forward pass over tokens from `start` on: reads what they attend to, and compares."""
        model, kv = self.engine.groups[group], self.views[group]
        positions = np.arange(len(digests))
        blocks = np.array(table, dtype=np.int64)[positions // BLOCK_TOKENS]
        places = positions % BLOCK_TOKENS
        expected = model.expand(digests, self.rank)
        first = max(0, start - model.window + 1) if model.window else 0
        if first < start:
            found = kv[blocks[first:start], :, :, places[first:start]]
            wrong = (found != expected[first:start]).any(axis=(1, 2, 3))
            if wrong.any():
                raise Violation(
                    "the model reads right KV",
                    f"{request_id} rank {self.rank} group {group} at "
                    f"{first + np.flatnonzero(wrong)[:8]} of {start}",
                )
        kv[blocks[start:], :, :, places[start:]] = expected[start:]

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
