"""A device as an engine's process uses it: context, memory, streams, and work on them.

For child processes of the tests only. It calls cuda-python directly, so that what kvlake's own code
does is judged by something else.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver


class Failed(Exception):
    """A call of the driver returned an error; `code` says which."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"{call}: {code}")
        self.code = code


def call(name: str, *arguments: Any) -> Any:
    """Call the driver; raises `Failed`."""
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise Failed(name, int(code))
    return values[0] if len(values) == 1 else tuple(values)


class Device:
    """One GPU, current in the thread that made it."""

    def __init__(self, ordinal: int = 0) -> None:
        call("cuInit", 0)
        self.ordinal = ordinal
        self.context = call("cuDevicePrimaryCtxRetain", ordinal)
        call("cuCtxSetCurrent", self.context)
        self.stream = call("cuStreamCreate", 1)

    def allocate(self, size_bytes: int) -> int:
        """Device memory as torch takes it (cudaMalloc)."""
        return int(call("cuMemAlloc", size_bytes))

    def allocate_vmm(self, size_bytes: int, *, pieces: int = 1, exportable: bool = True) -> int:
        """Device memory of `pieces` physical allocations side by side, as expandable segments."""
        base = int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))
        piece = size_bytes // pieces
        for start in range(0, size_bytes, piece):
            self._map(base + start, piece, exportable=exportable)
        return base

    def discard_vmm(self, base: int, size_bytes: int) -> None:
        """Give memory back and keep its addresses, as vLLM's cumem allocator does for sleep."""
        call("cuMemUnmap", base, size_bytes)

    def restore_vmm(self, base: int, size_bytes: int) -> None:
        """Other memory at the addresses of what was discarded."""
        self._map(base, size_bytes, exportable=True)

    def _map(self, address: int, size_bytes: int, *, exportable: bool) -> None:
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = self.ordinal
        if exportable:
            prop.requestedHandleTypes = (
                driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
            )
        handle = call("cuMemCreate", size_bytes, prop, 0)
        call("cuMemMap", address, size_bytes, 0, handle, 0)
        call("cuMemRelease", handle)
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.ordinal
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size_bytes, [access], 1)

    def write(self, address: int, data: bytes) -> None:
        """Queue a write, as a kernel's, on the stream."""
        call("cuMemcpyHtoDAsync", address, data, len(data), self.stream)

    def fill(self, address: int, value: int, size_bytes: int) -> None:
        """Queue a kernel that writes one byte everywhere."""
        call("cuMemsetD8Async", address, value, size_bytes, self.stream)

    def read(self, address: int, size_bytes: int) -> bytes:
        """What the memory holds once the stream is through."""
        target: npt.NDArray[np.uint8] = np.zeros(size_bytes, dtype=np.uint8)
        call("cuMemcpyDtoHAsync", target.ctypes.data, address, size_bytes, self.stream)
        return target.tobytes()

    def reached(self, event: Any, seconds_max: float = 20.0) -> bool:
        """Poll an event."""
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            (code,) = driver.cuEventQuery(event)
            if int(code) == 0:
                return True
            if int(code) != 600:
                raise Failed("cuEventQuery", int(code))
            time.sleep(0.001)
        return False
