"""A rank of an engine on the double: its KV cache in device memory, the connector's worker role.

For child processes of the tests. `export`, `WorkerRole` and the client are the connector's own;
only what torch would be is not: tensors are their addresses, the current stream is the device's.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from connector.client import Client
from connector.export import ExportedMemory, GroupTensors, export
from connector.plan import Load, LoadPiece, StepPlan, Store, StorePiece
from connector.worker import WorkerRole
from sidecar.protocol import PROTOCOL_VERSION, Attach, Memory, Role
from tests.gpu.device import Device, call
from tests.sidecar.client import NAMESPACE
from tiers.fence import WorkerFence
from tiers.layout import KVLayout

BLOCKS_PER_CHUNK = 4
WAIT_SECONDS_MAX = 90.0


class DeviceTensor:
    """One layer's view of the cache, as far as `export` asks a tensor."""

    dtype = torch.float16
    device = torch.device("cuda", 0)

    def __init__(self, base: int, layout: KVLayout, layer: int) -> None:
        self._storage = (base, layout.size_bytes)
        self._address = base + layout.layer_offsets_bytes[layer]
        heads, tokens = layout.segment.num_heads, layout.block_tokens
        self.shape = (layout.num_blocks, heads, tokens, layout.content_bytes // 2)
        self._strides = (
            layout.block_stride_bytes // 2,
            layout.head_stride_bytes // 2,
            layout.token_stride_bytes // 2,
            1,
        )

    def data_ptr(self) -> int:
        return self._address

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> Any:
        base, size_bytes = self._storage
        return SimpleNamespace(data_ptr=lambda: base, nbytes=lambda: size_bytes)


def share(gpu: Device, base: int, layout: KVLayout) -> ExportedMemory:
    """The cache at `base`, through the connector's own export."""
    tensors: dict[str, Any] = {
        f"layer.{layer}": DeviceTensor(base, layout, layer)
        for layer in range(layout.segment.num_layers)
    }
    return export(
        [GroupTensors(list(tensors.values()), layout.segment, "double")],
        None,
        stream=lambda: int(gpu.stream),
    )


class Rank:
    """One rank: `store` and `load` are steps, `outcome` polls for what became of them."""

    def __init__(
        self,
        socket: str,
        layout: KVLayout,
        *,
        vmm: bool = False,
        rank: int = 0,
        world_size: int = 1,
        engine_id: str = "gpu",
    ) -> None:
        self.gpu = Device()
        self.layout = layout
        allocate = self.gpu.allocate_vmm if vmm else self.gpu.allocate
        self.base = allocate(layout.size_bytes)
        self.memory = share(self.gpu, self.base, layout)
        self.kind = self.memory.shared.kind

        def describe(memory: ExportedMemory, shared: Memory) -> Attach:
            return Attach(
                version=PROTOCOL_VERSION,
                role=Role.WORKER,
                engine_id=engine_id,
                rank=rank,
                world_size=world_size,
                topology=f"tp{world_size}",
                namespace=NAMESPACE,
                block_tokens=layout.block_tokens,
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                pid=os.getpid(),
                segment=layout.segment,
                layout=memory.layout,
                memory=shared,
            )

        self.role = WorkerRole(self.memory, lambda attempt: Client(socket, attempt), describe)
        self._client: Client = self.role._client
        self.ended: dict[int, bool] = {}
        self._requests: dict[str, int] = {}
        self._failed = 0

    def attached(self, *, other_than: int = 0) -> int:
        """Wait for a session; returns the epoch of its sidecar."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < deadline:
            session = self._client.session
            if session is not None and session.epoch != other_than:
                return session.epoch
            time.sleep(0.005)
        raise TimeoutError("not attached")

    # --- steps ---------------------------------------------------------------------------------

    def begin_store(self, job_id: int, key: bytes, blocks: list[int]) -> None:
        tokens = np.arange(len(blocks) * self.layout.block_tokens, dtype="<i4").tobytes()
        piece = StorePiece(key, bytes(32), tokens, blocks)
        self.role.submit(StepPlan(stores=[Store(job_id, [piece])]))

    def begin_load(self, job_id: int, key: bytes, blocks: list[int], first: int = 0) -> None:
        self._requests[f"request-{job_id}"] = job_id
        piece = LoadPiece(key, first, blocks)
        self.role.submit(StepPlan(loads=[Load(job_id, f"request-{job_id}", [piece])]))

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

    # --- memory --------------------------------------------------------------------------------

    def _places(self, block: int) -> list[int]:
        layout = self.layout
        return [
            layout.offset(layer, block, head, token)
            for layer in range(layout.segment.num_layers)
            for head in range(layout.segment.num_heads)
            for token in range(layout.block_tokens)
        ]

    def image(self) -> bytes:
        """All of the cache, once the stream is through."""
        return self.gpu.read(self.base, self.layout.size_bytes)

    def block(self, block: int, image: bytes | None = None) -> bytes:
        """A block's content in payload order."""
        whole = self.image() if image is None else image
        size = self.layout.content_bytes
        return b"".join(whole[place : place + size] for place in self._places(block))

    def randomize(self, seed: int) -> None:
        """Queue a kernel that fills the whole cache with bytes that differ everywhere."""
        random = np.random.default_rng(seed)
        self.gpu.write(
            self.base, random.integers(0, 256, self.layout.size_bytes, dtype=np.uint8).tobytes()
        )

    def paint(self, block: int, value: int) -> None:
        """Queue kernels that set one block, layer by layer, to one value."""
        layout = self.layout
        block_bytes = layout.segment.num_heads * layout.block_tokens * layout.content_bytes
        for layer in range(layout.segment.num_layers):
            place = self.base + layout.offset(layer, block, 0, 0)
            self.gpu.fill(place, value, block_bytes)

    def no_fence(self) -> None:
        """A control: say at once what the stream would say after its work."""
        type(self._client.session.context).signal = WorkerFence.signal  # type: ignore[union-attr]

    def close(self) -> None:
        """Leave, and give everything of the driver back."""
        self.role.close()
        for fence in [self.role._fence, *self.role._retired]:
            if fence is not None:
                fence.close()
        call("cuStreamDestroy", self.gpu.stream)
