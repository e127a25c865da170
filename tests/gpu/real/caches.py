"""A worker's KV cache on a device and the engine's own work on it, by torch or by the driver alone.

For child processes of the tests and benchmarks. `TorchCache` is what an engine has: one allocation
by torch (vLLM's `allocate_kv_cache`), a view of it per layer, kernels on the current stream.
`BareCache` does the same on the double of libcuda, which runs no kernels: so that all but torch is
rehearsed without a GPU. What is queued here is never waited for, but where a method says so.
"""

from __future__ import annotations

import gc
import mmap
import time
from typing import Any, Final, Protocol

import numpy as np
import torch

from tests.gpu.device import Device, call
from tests.gpu.real.model import VOCABULARY, Decoder
from tests.gpu.worker import DeviceTensor, DriverCache
from tests.offsets import offset_of
from tiers.kv.layout import KVLayout

PLACES: Final = ("malloc", "interior", "vmm", "segments")
"""Memory of cudaMalloc; the same, somewhere inside an allocation; one exportable allocation of the
virtual memory API; whatever PyTorch's expandable segments make of it (set in the environment)."""
DEVICE: str = "cuda"
BUSY_BYTES: int = 256 << 20
BUSY_PASSES: Final = 2
"""Work that is queued before each layer's: some 0.2 ms a pass on a data center GPU."""
MATMUL_SIZE: int = 8192
MATMULS_PER_STEP: Final = 2
_SEGMENT_BYTES: Final = 1 << 20
"""By how much an expandable segment of the double grows (20 MiB in PyTorch)."""


class Cache(Protocol):
    """A KV cache, and what an engine does with it."""

    layout: KVLayout
    tensors: list[Any]
    """What vLLM would register, a layer each."""

    def stream(self) -> int:
        """Handle of the stream that work is queued on."""

    def tensors_of(self, layout: KVLayout) -> list[Any]:
        """The layers of `layout` in this memory."""

    def view(self, layout: KVLayout) -> None:
        """Let `tensors` be those of `layout`, in the same memory."""

    def finish(self) -> None:
        """Wait until what was queued is through."""

    def randomize(self, seed: int) -> None:
        """Fill all of it with bytes that differ everywhere."""

    def paint(self, block: int, value: int) -> None:
        """Be busy, and set one block to one value, layer by layer."""

    def snapshot(self, block: int) -> None:
        """Be busy, and copy one block aside, layer by layer."""

    def seen(self) -> set[int]:
        """Values of the bytes that the last snapshot copied. Waits."""

    def values(self, block: int) -> set[int]:
        """Values of a block's bytes now. Waits."""

    def block(self, block: int) -> bytes:
        """A block's content in payload order. Waits."""

    def prefill(self, blocks: list[int]) -> None:
        """Compute the KV of a prompt that fills all of `blocks` but the last."""

    def answer(self, blocks: list[int]) -> bytes:
        """What the model says behind that prompt: its logits. The last block takes its own KV."""

    def compute(self) -> None:
        """Queue the work of one decode step: matrix products."""

    def launch(self) -> None:
        """Queue the smallest kernel that there is."""

    def mark(self) -> Any:
        """A mark behind what is queued, for `reached`."""

    def reached(self, mark: Any) -> None:
        """Wait for a mark."""

    def read_word(self) -> None:
        """Copy four bytes to the host, as an engine its tokens, and wait for them."""

    def drop(self) -> None:
        """Give the memory back. Nothing else may be called any more."""


def open_cache(kind: str, layout: KVLayout, place: str) -> Cache:
    """A cache of `kind` torch or bare, in memory of `place`."""
    return TorchCache(layout, place) if kind == "torch" else BareCache(layout, place)


class _Foreign:
    """Device memory that torch did not allocate, as torch can take it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


class TorchCache:
    """By torch, on a device."""

    def __init__(self, layout: KVLayout, place: str) -> None:
        torch.cuda.init()
        self._kept: list[Any] = []
        self.buffer = self._allocate(layout.size_bytes, place)
        self._scratch = torch.ones(BUSY_BYTES // 4, dtype=torch.float32, device=DEVICE)
        self._factors: list[torch.Tensor] = []
        self._word_stream: Any = None
        self.view(layout)
        torch.cuda.synchronize()

    def _allocate(self, size_bytes: int, place: str) -> torch.Tensor:
        if place == "vmm":
            device = Device()
            self._kept.append(device)
            buffer = torch.as_tensor(
                _Foreign(device.allocate_vmm(size_bytes), size_bytes), device=DEVICE
            )
            return buffer.zero_()
        if place == "interior":
            # What was freed is cut up for the next allocation.
            room = torch.empty(2 * size_bytes, dtype=torch.int8, device=DEVICE)
            del room
            self._kept.append(torch.empty(size_bytes, dtype=torch.int8, device=DEVICE))
        # As vLLM 0.32 does it, in `allocate_kv_cache`.
        return torch.zeros(size_bytes, dtype=torch.int8, device=DEVICE)

    def tensors_of(self, layout: KVLayout) -> list[torch.Tensor]:
        heads, tokens = layout.segment.num_heads, layout.block_tokens
        return [
            torch.as_strided(
                self.buffer,
                size=(layout.num_blocks, heads, tokens, layout.content_bytes),
                stride=(
                    layout.block_stride_bytes,
                    layout.head_stride_bytes,
                    layout.token_stride_bytes,
                    1,
                ),
                storage_offset=self.buffer.storage_offset() + offset,
            ).view(getattr(torch, layout.dtype))
            for offset in layout.layer_offsets_bytes
        ]

    def view(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tensors = self.tensors_of(layout)
        self._bytes = [tensor.view(torch.uint8) for tensor in self.tensors]
        self._aside = [torch.empty_like(one[0]).contiguous() for one in self._bytes]

    def stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def _be_busy(self) -> None:
        for _ in range(BUSY_PASSES):
            self._scratch.add_(1.0)

    def randomize(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.buffer.random_(-128, 127)

    def paint(self, block: int, value: int) -> None:
        for layer in self._bytes:
            self._be_busy()
            layer[block].fill_(value)

    def snapshot(self, block: int) -> None:
        for layer, aside in zip(self._bytes, self._aside, strict=True):
            self._be_busy()
            aside.copy_(layer[block])

    def seen(self) -> set[int]:
        return set(torch.unique(torch.stack(self._aside)).tolist())

    def values(self, block: int) -> set[int]:
        return set(torch.unique(torch.stack([layer[block] for layer in self._bytes])).tolist())

    def block(self, block: int) -> bytes:
        whole = torch.stack([layer[block] for layer in self._bytes]).contiguous()
        return bytes(whole.cpu().numpy().tobytes())

    def prefill(self, blocks: list[int]) -> None:
        tokens = [31 * place % VOCABULARY for place in range(self._prompt_tokens(blocks))]
        Decoder(self._bytes).run(tokens, 0, blocks)

    def answer(self, blocks: list[int]) -> bytes:
        logits = Decoder(self._bytes).run([1], self._prompt_tokens(blocks), blocks)
        return bytes(logits.cpu().numpy().tobytes())

    def _prompt_tokens(self, blocks: list[int]) -> int:
        return (len(blocks) - 1) * self.layout.block_tokens

    def compute(self) -> None:
        if not self._factors:
            # Random: products of zeros run faster than those of real data.
            self._factors = [
                torch.randn(MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device=DEVICE)
                for _ in range(3)
            ]
        left, right, product = self._factors
        for _ in range(MATMULS_PER_STEP):
            torch.mm(left, right, out=product)

    def launch(self) -> None:
        self._scratch[0].fill_(1.0)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record()
        return event

    def reached(self, mark: Any) -> None:
        mark.synchronize()

    def read_word(self) -> None:
        if self._word_stream is None:
            self._word_stream = torch.cuda.Stream()
            self._word = torch.ones(1, dtype=torch.int32, device=DEVICE)
            self._host_word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
            torch.cuda.synchronize()
        with torch.cuda.stream(self._word_stream):
            self._host_word.copy_(self._word, non_blocking=True)
        self._word_stream.synchronize()

    def drop(self) -> None:
        torch.cuda.synchronize()
        del self.buffer, self._scratch, self.tensors, self._bytes, self._aside
        self._kept.clear()
        self._factors.clear()
        gc.collect()
        torch.cuda.empty_cache()


class BareCache(DriverCache):
    """By the driver alone, on its double."""

    def __init__(self, layout: KVLayout, place: str) -> None:
        self.gpu = Device()
        size_bytes = layout.size_bytes
        self._freed: int | None = None
        if place == "vmm":
            self.base = self.gpu.allocate_vmm(size_bytes)
        elif place == "segments":
            pieces = max(1, size_bytes // _SEGMENT_BYTES)
            self.base = self.gpu.allocate_vmm(size_bytes, pieces=pieces)
        elif place == "interior":
            self._freed = self.gpu.allocate(2 * size_bytes)
            self.base = self._freed + size_bytes
        else:
            self.base = self._freed = self.gpu.allocate(size_bytes)
        self._aside = np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8)
        call("cuMemHostRegister", self._aside.ctypes.data, self._aside.size, 1)
        self.view(layout)

    def tensors_of(self, layout: KVLayout) -> list[DeviceTensor]:
        layers = range(layout.segment.num_layers)
        return [DeviceTensor(self.base, layout, layer) for layer in layers]

    def view(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tensors = self.tensors_of(layout)

    def prefill(self, blocks: list[int]) -> None:
        self.randomize(len(blocks))

    def answer(self, blocks: list[int]) -> bytes:
        # There is no model: the bytes that one would read.
        return b"".join(self.block(block) for block in blocks[:-1])

    def stream(self) -> int:
        return int(self.gpu.stream)

    def finish(self) -> None:
        self.gpu.read(self.base, 1)

    def _layer_bytes(self) -> int:
        layout = self.layout
        return layout.segment.num_heads * layout.block_tokens * layout.content_bytes

    def snapshot(self, block: int) -> None:
        size_bytes = self._layer_bytes()
        for layer in range(self.layout.segment.num_layers):
            target = self._aside.ctypes.data + layer * size_bytes
            source = self.base + offset_of(self.layout, layer, block, 0, 0)
            call("cuMemcpyDtoHAsync", target, source, size_bytes, self.gpu.stream)

    def seen(self) -> set[int]:
        self.finish()
        return set(self._aside[: self._layer_bytes() * self.layout.segment.num_layers].tolist())

    def values(self, block: int) -> set[int]:
        return set(self.block(block))

    def compute(self) -> None:
        self.launch()

    def launch(self) -> None:
        self.gpu.fill(self.base, 1, 1)

    def mark(self) -> Any:
        event = call("cuEventCreate", 2)
        call("cuEventRecord", event, self.gpu.stream)
        return event

    def reached(self, mark: Any) -> None:
        assert self.gpu.reached(mark, 60.0), "the stream did not get there"
        call("cuEventDestroy", mark)

    def read_word(self) -> None:
        call("cuMemcpyDtoHAsync", self._aside.ctypes.data, self.base, 4, self.gpu.stream)
        self.reached(self.mark())

    def drop(self) -> None:
        self.finish()
        call("cuMemHostUnregister", self._aside.ctypes.data)
        if self._freed is not None:
            call("cuMemFree", self._freed)


def free_bytes() -> int:
    """Device memory that nobody has. A context must be current."""
    return int(call("cuMemGetInfo")[0])


class Watcher:
    """Looks at a device's memory from a process of its own."""

    def __init__(self) -> None:
        self.gpu = Device()

    def free(self) -> int:
        """Bytes that nobody has."""
        return free_bytes()

    def seconds_until(self, wanted_bytes: int, seconds_max: float) -> tuple[float, int]:
        """Wait until so much is free; how long that took, and what is free then."""
        begun = time.monotonic()
        while True:
            found, seconds = free_bytes(), time.monotonic() - begun
            if found >= wanted_bytes or seconds > seconds_max:
                return seconds, found
            time.sleep(0.002)
