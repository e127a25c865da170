"""Makes the KV cache memory of one worker mappable by the sidecar.

CPU: while vLLM allocates the cache, its one `torch.zeros` returns a tensor over a memfd.
CUDA: the allocation is exported whole (`tiers/cuda/ipc_export.py`).
What cannot be shared (MIG, several allocations) is refused with the remedy.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from sidecar.protocol import KIND_CUDA_IPC, KIND_CUDA_VMM, KIND_MEMFD, Memory
from tiers.cuda.errors import CudaFailed
from tiers.cuda.ipc_export import ShareRefused, share
from tiers.cuda.stream_fence import StreamFence
from tiers.errors import LayoutError
from tiers.kv.fence import WorkerFence
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.mapping import map_shared, place_as_here
from tiers.kv.memfd import sealed_memfd


class ExportRefused(Exception):
    """This memory cannot be shared; the message has the reason and the remedy."""


EXPORT_FAULTS: Final = (ExportRefused, LayoutError, KeyError, OSError)
"""What `export` of the caches that vLLM registered may raise."""


def fault_reason(error: Exception) -> str:
    """Why the caches cannot be shared, as the end of a sentence with "because"."""
    if isinstance(error, KeyError):
        return f"vLLM registered no cache of layer {error}"
    if isinstance(error, OSError):
        return f"its KV memory cannot be shared: {error}"
    return str(error)


class MemfdAllocation(TorchFunctionMode):
    """Places the first 1-D int8 or uint8 `torch.zeros` on the CPU in this context on a memfd.

    vLLM's `allocate_kv_cache` makes one such allocation per worker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fd = -1
        self.size_bytes = 0
        self.address = 0
        self.fault: OSError | None = None
        """Why there is no memfd; `export` raises it, and the engine starts uncached."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and self.fd < 0 and self._is_cache(args, kwargs):
            try:
                return self._allocate(int(args[0]), kwargs["dtype"])
            except OSError as error:
                self.fault = error
        return func(*args, **kwargs)

    @staticmethod
    def _is_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == 1
            and isinstance(args[0], int)
            and args[0] > 0
            and kwargs.get("dtype") in (torch.int8, torch.uint8)
            and torch.device(kwargs.get("device") or "cpu").type == "cpu"
        )

    def _allocate(self, size_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        # Whole pages, as in the sidecar's mapping.
        mapped_bytes = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = sealed_memfd("kvlake-kv", mapped_bytes)
        try:
            _, memory = map_shared(fd, mapped_bytes)
        except OSError:
            os.close(fd)
            raise
        place_as_here(memory)
        # The tensor keeps the mapping alive through the buffer it was made from.
        tensor = torch.frombuffer(memory, dtype=dtype, count=size_bytes)
        self.fd = fd
        self.size_bytes = mapped_bytes
        self.address = tensor.data_ptr()
        return tensor


@dataclass(slots=True, eq=False)
class ExportedMemory:
    """KV memory with its layouts, its description for the wire, and a descriptor if it has one."""

    fd: int
    shared: Memory
    layouts: Sequence[KVLayout]
    """One of each KV cache group."""
    new_fence: Callable[[], WorkerFence] = WorkerFence
    """Makes a fence page for one attempt to attach."""

    @property
    def fds(self) -> list[int]:
        """Descriptors to send with the description, before that of the fence page."""
        return [self.fd] if self.fd >= 0 else []

    def close(self) -> None:
        """Close the descriptor; the engine's own mapping stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """One KV cache group on a worker.

    `tensors` have the shape [blocks, heads, tokens, content], in layer order. An entry of the third
    axis stands for `entry_tokens` tokens. `encoding` is from `namespace.encoding_of`. The scheduler
    has blocks of `block_tokens`; 0: as they are in memory.
    """

    tensors: list[torch.Tensor]
    segment: Segment
    encoding: str
    entry_tokens: int = 1
    block_tokens: int = 0


def export(
    groups: Sequence[GroupTensors],
    allocation: MemfdAllocation | None,
    *,
    stream: Callable[[], int] = lambda: int(torch.cuda.current_stream().cuda_stream),
) -> ExportedMemory:
    """Describe and share the KV cache that vLLM registered; raises one of `EXPORT_FAULTS`.

    `groups` are all KV cache groups, whose tensors may overlap. `stream` returns the handle of the
    CUDA stream that the engine's work is queued on.
    """
    tensors = [tensor for group in groups for tensor in group.tensors]
    kinds = {tensor.device.type for tensor in tensors}
    if kinds not in ({"cpu"}, {"cuda"}):
        raise ExportRefused(
            f"KV cache on {', '.join(sorted(kinds))}: only memory of the CPU or of one CUDA device "
            "can be shared; remove the kv connector from this engine"
        )
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    if len(storages) != 1:
        raise ExportRefused(
            f"KV cache in {len(storages)} allocations: kvlake shares one allocation per worker"
        )
    if kinds == {"cuda"}:
        return _export_gpu(groups, stream)
    if allocation is not None and allocation.fault is not None:
        raise allocation.fault
    if allocation is None or storages != {allocation.address}:
        raise ExportRefused(
            "this release of vLLM allocates its KV cache in a way that kvlake does not know; use a "
            "supported release, or remove the kv connector from this engine"
        )
    size_bytes = allocation.size_bytes
    layouts = [_layout(group, allocation.address, size_bytes) for group in groups]
    return ExportedMemory(allocation.fd, Memory(KIND_MEMFD, size_bytes), layouts)


def _export_gpu(groups: Sequence[GroupTensors], stream: Callable[[], int]) -> ExportedMemory:
    tensors = groups[0].tensors
    storage = tensors[0].untyped_storage()
    try:
        found = share(storage.data_ptr(), storage.nbytes())
    except (ShareRefused, CudaFailed) as error:
        raise ExportRefused(f"KV cache on {tensors[0].device}: {error}") from error
    try:
        layouts = [_layout(group, found.base, found.size_bytes) for group in groups]
    except BaseException:
        if found.fd >= 0:
            os.close(found.fd)
        raise
    kind = KIND_CUDA_IPC if found.handle else KIND_CUDA_VMM
    memory = Memory(kind, found.size_bytes, found.device_uuid, found.handle)
    return ExportedMemory(found.fd, memory, layouts, lambda: StreamFence(found.context, stream))


def _layout(group: GroupTensors, base: int, size_bytes: int) -> KVLayout:
    tensors = group.tensors
    # With MLA there may be no axis for the single head.
    shaped = [tensor.unsqueeze(1) if len(tensor.shape) == 3 else tensor for tensor in tensors]
    itemsize = tensors[0].element_size()
    views = [
        (
            tensor.data_ptr() - base,
            tuple(tensor.shape),
            tuple(stride * itemsize for stride in tensor.stride()),
        )
        for tensor in shaped
    ]
    layout = KVLayout.from_views(
        group.segment,
        views,
        itemsize=itemsize,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
        encoding=group.encoding,
        size_bytes=size_bytes,
        entry_tokens=group.entry_tokens,
    )
    if group.block_tokens not in (0, layout.block_tokens):
        raise ExportRefused(
            f"its blocks of {group.block_tokens} tokens lie in memory as blocks of "
            f"{layout.block_tokens}; set --block-size {layout.block_tokens}, or choose an "
            f"attention backend whose kernels take {group.block_tokens}"
        )
    return layout
