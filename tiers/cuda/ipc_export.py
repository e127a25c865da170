"""Export of an engine's GPU memory, so that another process can map it.

Owns the choice between the two ways: a legacy IPC handle, which is bytes, for memory of
`cudaMalloc`; a POSIX descriptor for memory of the virtual memory API (vLLM's cumem allocator, an
expandable segment). Does not own the memory, nor the message (`connector/export.py`).

Runs inside the engine, in the thread whose context the memory belongs to. It allocates no device
memory, starts no work and waits for none.
"""

import os
from dataclasses import dataclass
from typing import Any, Final

from tiers.cuda.driver import Driver, bytes_of, driver
from tiers.cuda.errors import CudaFailed
from tiers.errors import TierError

ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch 2.10 introduced the second name and still reads the first."""


class ShareRefused(TierError):
    """This memory cannot be shared; the message names the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class SharedAllocation:
    """A whole allocation that another process can map by `handle`, or else by `fd`."""

    device_uuid: bytes
    base: int
    size_bytes: int
    context: Any
    """Its CUDA context."""
    handle: bytes = b""
    fd: int = -1
    """A descriptor that the caller owns; -1 with a `handle`."""


def share(address: int, num_bytes: int) -> SharedAllocation:
    """Share the allocation of `num_bytes` at `address`.

    Raises `ShareRefused`, or `CudaFailed` if the driver itself fails.
    """
    cuda = driver()
    context = cuda.call("cuCtxGetCurrent")
    if not int(context):
        raise ShareRefused("no CUDA context in this thread; share memory from the one that made it")
    ordinal = int(cuda.call("cuCtxGetDevice"))
    name = cuda.name(ordinal)
    if " MIG " in f" {name} ":
        raise ShareRefused(
            f"device {name!r} is a slice of a GPU (MIG), whose memory no other process can map; "
            "give the engine a whole GPU"
        )
    base, size_bytes = (int(value) for value in cuda.call("cuMemGetAddressRange", address))
    if address + num_bytes > base + size_bytes:
        raise ShareRefused(
            f"the KV cache of {num_bytes} bytes lies in several allocations of which the first has "
            f"{size_bytes} bytes, as expandable segments make them ({_expandable_by()}): take "
            "expandable_segments out of the engine's environment, or let vLLM allocate the cache "
            "in one piece (--enable-cumem-allocator, with vLLM 0.33 or later)"
        )
    uuid = cuda.uuid(ordinal)
    try:
        handle = bytes_of(cuda.call("cuIpcGetMemHandle", base), 64)
    except CudaFailed as error:
        fd = _descriptor(cuda, base, error)
        return SharedAllocation(uuid, base, size_bytes, context, fd=fd)
    return SharedAllocation(uuid, base, size_bytes, context, handle=handle)


def _descriptor(cuda: Driver, base: int, ipc_error: CudaFailed) -> int:
    posix = cuda.enum("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
    try:
        handle = cuda.call("cuMemRetainAllocationHandle", base)
        try:
            return int(cuda.call("cuMemExportToShareableHandle", handle, posix, 0))
        finally:
            cuda.call("cuMemRelease", handle)
    except CudaFailed as error:
        raise ShareRefused(
            f"the allocator made memory that can be shared neither by an IPC handle ({ipc_error}) "
            f"nor as a descriptor ({error}); use PyTorch's native allocator without expandable "
            "segments (backend:cudaMallocAsync and expandable_segments out of "
            f"{' and '.join(ALLOCATOR_VARIABLES)}); vLLM's cumem allocator needs a machine without "
            "IMEX channels, where it falls back to descriptors"
        ) from error


def _expandable_by() -> str:
    """What enables expandable segments."""
    found = [
        name
        for name in ALLOCATOR_VARIABLES
        if "expandable_segments:true" in os.environ.get(name, "").lower().replace(" ", "")
    ]
    return f"on in {' and '.join(found)}" if found else "on in the allocator itself, by no variable"
