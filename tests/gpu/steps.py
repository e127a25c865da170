"""What an engine's worker does with the connector: attach, submit steps, ask what became of them.

For child processes of the tests and benchmarks. The worker role, its client and the fence are the
connector's own; whose memory it is, a double's or a device's, is not known here.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from connector.client import Client, SidecarSession
from connector.export import ExportedMemory
from connector.plan import Load, StepPlan, Store
from connector.worker import WorkerRole
from sidecar.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Group,
    LoadChunk,
    LoadJob,
    Outcome,
    Role,
    StoreChunk,
    StoreJob,
)
from tests.sidecar.client import NAMESPACE
from tiers.kv.fence import WorkerFence
from tiers.kv.layout import KVLayout

BLOCKS_PER_CHUNK = 4
WAIT_SECONDS_MAX = 90.0


class CountingRole(WorkerRole):
    """Counts jobs that did not end whole: a store that was dropped in part is no failure to it."""

    incomplete = 0

    def _end(self, job: Load | Store, outcome: Outcome) -> None:
        self.incomplete += outcome is not Outcome.OK
        super()._end(job, outcome)


class Steps:
    """One worker: `store` and `load` are steps, `outcome` polls for what became of them."""

    layout: KVLayout
    role: CountingRole

    def join(
        self,
        socket: str,
        export: Callable[[], ExportedMemory],
        *,
        rank: int = 0,
        world_size: int = 1,
        engine_id: str = "gpu",
        blocks_per_chunk: int = BLOCKS_PER_CHUNK,
        namespace: bytes = NAMESPACE,
    ) -> None:
        """Begin to attach; `attached` waits for it.

        Further KV cache groups of what is exported have a namespace of their own.
        """

        def describe(exported: ExportedMemory) -> Attach:
            return Attach(
                version=PROTOCOL_VERSION,
                role=Role.WORKER,
                engine_id=engine_id,
                rank=rank,
                world_size=world_size,
                topology=f"tp{world_size}",
                namespace=namespace,
                block_tokens=self.layout.block_tokens,
                blocks_per_chunk=blocks_per_chunk,
                pid=os.getpid(),
                segment=self.layout.segment,
                layout=exported.layouts[0],
                memory=exported.shared,
                groups=tuple(
                    Group(
                        b'{"group": %d, "of": %s}' % (number, namespace),
                        layout.block_tokens,
                        blocks_per_chunk,
                        layout.segment,
                        layout,
                    )
                    for number, layout in enumerate(exported.layouts[1:], start=1)
                ),
            )

        self.role = CountingRole(export, lambda attempt: Client((socket,), attempt), describe)
        self.ended: dict[int, bool] = {}
        self._requests: dict[str, int] = {}

    @property
    def _client(self) -> Client:
        # Another one after sleep.
        assert self.role.client is not None
        return self.role.client

    @property
    def session(self) -> SidecarSession | None:
        """With the sidecar, if there is one."""
        return self._client.session

    def attached(self, *, other_than: int = 0) -> int:
        """Wait for a session; returns the epoch of its sidecar."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < deadline:
            session = self._client.session
            if session is not None and session.epoch != other_than:
                return session.epoch
            time.sleep(0.005)
        raise TimeoutError(f"not attached: {self._client.last_log}")

    def leave(self) -> None:
        """Detach, and give the pages of all fences back."""
        self.role.close()
        for fence in [self.role.fence, *self.role.retired]:
            if fence is not None:
                fence.close()

    def begin_store(self, job_id: int, key: bytes, blocks: list[int]) -> None:
        self.role.submit(StepPlan(stores=[self.store_job(job_id, [(key, blocks)])]))

    def begin_load(self, job_id: int, key: bytes, blocks: list[int], first: int = 0) -> None:
        self.role.submit(StepPlan(loads=[self.load_job(job_id, [(key, blocks)], first)]))

    def store_job(
        self, job_id: int, chunks: list[tuple[bytes, list[int]]], *, group: int = 0
    ) -> Store:
        """A job that stores chunks, each with its key and its blocks."""
        stored: list[StoreChunk] = []
        for key, blocks in chunks:
            tokens = np.arange(len(blocks) * self.layout.block_tokens, dtype="<i4").tobytes()
            stored.append(StoreChunk(key, bytes(32), tokens, blocks, group=group))
        return Store(StoreJob(job_id, stored))

    def load_job(
        self,
        job_id: int,
        chunks: list[tuple[bytes, list[int]]],
        first: int = 0,
        *,
        group: int = 0,
    ) -> Load:
        """A job that loads chunks, from block `first` of each on."""
        self._requests[f"request-{job_id}"] = job_id
        loaded = [LoadChunk(key, first, blocks, group) for key, blocks in chunks]
        return Load(f"request-{job_id}", LoadJob(job_id, loaded))

    def outcome(self, job_id: int) -> bool:
        """Step until a job has ended; whether it went well."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while job_id not in self.ended:
            assert time.monotonic() < deadline, f"job {job_id} never ended"
            self.step()
            time.sleep(0.0002)
        return self.ended[job_id]

    def step(self) -> None:
        """What the engine asks after each step."""
        results = self.role.collect()
        failed = results.report.failed
        for job_id in results.report.ended:
            self.ended[job_id] = failed == 0
        for request in results.loaded:
            self.ended[self._requests.pop(request)] = request not in results.failed

    def store(self, job_id: int, key: bytes, blocks: list[int]) -> bool:
        self.begin_store(job_id, key, blocks)
        return self.outcome(job_id)

    def load(self, job_id: int, key: bytes, blocks: list[int], first: int = 0) -> bool:
        self.begin_load(job_id, key, blocks, first)
        return self.outcome(job_id)

    def no_fence(self) -> None:
        """A control: say at once what the stream would say after its work."""
        fence: Any = self._client.session.context  # type: ignore[union-attr]
        fence.signal = functools.partial(WorkerFence.signal, fence)
