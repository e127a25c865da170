"""A rank of an engine on the double: its KV cache in device memory, the connector's worker role.

For child processes of the tests. `export`, `WorkerRole` and the client are the connector's own;
only what torch would be is not: tensors are their addresses, the current stream is the device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from connector.export import ExportedMemory, GroupTensors, export
from tests.gpu.device import Device, call
from tests.gpu.steps import Steps
from tests.offsets import offset_of
from tiers.kv.layout import KVLayout


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


def bytes_of(seed: int, layout: KVLayout) -> bytes:
    """A whole cache of bytes that differ everywhere."""
    return np.random.default_rng(seed).integers(0, 256, layout.size_bytes, dtype=np.uint8).tobytes()


def trials(seed: int, first: int) -> Iterator[tuple[int, int, int, bytes]]:
    """Jobs, each with a block to store, a block to load it into, and a key."""
    chance = np.random.default_rng(seed)
    for job in range(first, first + 400, 2):
        source, target = chance.choice(24, 2, replace=False).tolist()
        yield job, source, target, chance.bytes(32)


class DriverCache:
    """A KV cache in device memory, and kernels that write it, by the driver alone."""

    gpu: Device
    base: int
    layout: KVLayout

    def _places(self, block: int) -> list[int]:
        layout = self.layout
        return [
            offset_of(layout, layer, block, head, token)
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
        self.gpu.write(self.base, bytes_of(seed, self.layout))

    def paint(self, block: int, value: int) -> None:
        """Queue kernels that set one block, layer by layer, to one value."""
        layout = self.layout
        block_bytes = layout.segment.num_heads * layout.block_tokens * layout.content_bytes
        for layer in range(layout.segment.num_layers):
            place = self.base + offset_of(layout, layer, block, 0, 0)
            self.gpu.fill(place, value, block_bytes)


class Rank(DriverCache, Steps):
    """One rank."""

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
        self.join(socket, self._share, rank=rank, world_size=world_size, engine_id=engine_id)

    def _share(self) -> ExportedMemory:
        self.memory = share(self.gpu, self.base, self.layout)
        self.kind = self.memory.shared.kind
        return self.memory

    def loaded_again(self, seed: int, first: int, writer: KVLayout) -> int:
        """How many of the first `trials` are found; asserts that they have the bytes stored.

        A rank with the layout `writer` stored them, or was killed while it did.
        """
        before = DriverCache()
        before.layout = writer
        found = 0
        for job, source, target, key in islice(trials(seed, first), 16):
            if self.load(job + 500, key, [target]):
                assert self.block(target) == before.block(source, bytes_of(job, writer)), job
                found += 1
        return found

    def go_to_sleep(self) -> None:
        """As vLLM's worker: its streams are idle, the connector is told, the memory goes."""
        call("cuStreamSynchronize", self.gpu.stream)
        self.role.unregister()
        self.gpu.discard_vmm(self.base, self.layout.size_bytes)

    def wake_up(self) -> None:
        """The memory comes back, with nothing of before in it, and the connector is told."""
        self.gpu.restore_vmm(self.base, self.layout.size_bytes)
        self.role.restore()

    def close(self) -> None:
        """Leave, and give everything of the driver back."""
        self.leave()
        call("cuStreamDestroy", self.gpu.stream)
