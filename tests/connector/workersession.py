"""A worker role's session with a sidecar that is none: client, attempts, fence pages."""

from __future__ import annotations

import os
from collections.abc import Callable

from connector.client import Attempt, Client
from connector.export import ExportedMemory
from sidecar.protocol import PROTOCOL_VERSION, Attach, Role
from tests.connector.double import Clock, DoubleClient, session_of
from tiers.kv.fence import SidecarFence, WorkerFence


class WorkerSession:
    """What `WorkerRole` is made with; `attach` is what its client's thread would do."""

    def __init__(self, *, topology: str, block_tokens: int, blocks_per_chunk: int) -> None:
        self.clock = Clock()
        self.client = DoubleClient()
        self.attempts: Callable[[], Attempt] | None = None
        self.fences: list[SidecarFence] = []
        """The sidecar's end of each session's page, oldest first."""
        self._topology = topology
        self._block_tokens = block_tokens
        self._blocks_per_chunk = blocks_per_chunk

    def make_client(self, make_attempt: Callable[[], Attempt]) -> Client:
        self.attempts = make_attempt
        return self.client.as_client()

    def describe(self, memory: ExportedMemory) -> Attach:
        return Attach(
            version=PROTOCOL_VERSION,
            role=Role.WORKER,
            engine_id="e",
            rank=0,
            world_size=1,
            topology=self._topology,
            namespace=b"{}",
            block_tokens=self._block_tokens,
            blocks_per_chunk=self._blocks_per_chunk,
            pid=os.getpid(),
            segment=memory.layouts[0].segment,
            layout=memory.layouts[0],
            memory=memory.shared,
        )

    def attach(self) -> SidecarFence:
        """A new session with a new fence page."""
        assert self.attempts is not None
        attempt = self.attempts()
        assert isinstance(attempt.context, WorkerFence)
        self.fences.append(SidecarFence(os.dup(attempt.fds[1])))
        self.client.attach(session_of(context=attempt.context))
        return self.fences[-1]
