"""One GPU as the sidecar uses it: its context, its two copy streams, and mapped memory of workers.

Owns the retained primary context (one per process and device, shared by all workers on it), the
streams, the imports, and the registration of the pool, so that copy engines access it directly.
Does not own when memory is unmapped.

Devices are named by UUID: their numbers differ between processes (CUDA_VISIBLE_DEVICES).

Invariants: a context is made current in each calling thread, by `Device.bind` alone; imported
memory is at least as large as its layout, or refused; it is unmapped only when no copy of it can
run. All of the pool is registered, or none of it; registrations are PORTABLE, so they are valid for
every device of this process; they end before the pool is unmapped.
"""

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tiers.cuda.calibration import Calibration, Strided
from tiers.cuda.copy_stream import CopyStream
from tiers.cuda.descriptors import PlaneShape, cut, describe, describe_planes, split_at_grid
from tiers.cuda.driver import Driver, check, gpu_name
from tiers.cuda.errors import NOT_READY, CudaFailed, NotSupportedHere
from tiers.kv.copy import BlockIds, Runs, Visit, check_copy
from tiers.kv.layout import Bytes, KVLayout

CHUNK_BYTES: Final = 1 << 30
"""Registered with one call."""
_LAZY_PEER_ACCESS: Final = 1
_PORTABLE: Final = 1

_current = threading.local()
"""`context` is the one that `Device.bind` made current in this thread, the last time."""
_logger = logging.getLogger("kvlake.gpu")


class Device:
    """A GPU, by UUID. Raises `CudaFailed` if it cannot be used."""

    def __init__(
        self,
        driver: Driver,
        uuid: bytes,
        *,
        to_device_bytes_max: int,
        to_host_bytes_max: int,
        strided: Strided = "auto",
    ) -> None:
        self.driver = driver
        self.uuid = uuid
        self.ordinal = driver.ordinal_of(uuid)
        self._set_current = driver.entry("cuCtxSetCurrent")
        self._context: Any = driver.call("cuDevicePrimaryCtxRetain", self.ordinal)
        self._context_handle = int(self._context)
        streams: list[CopyStream] = []
        try:
            self.bind()
            pitch_bytes_max = driver.attribute("MAX_PITCH", self.ordinal)
            for to_device, bytes_max in ((True, to_device_bytes_max), (False, to_host_bytes_max)):
                stream = CopyStream(
                    driver,
                    self.bind,
                    to_device=to_device,
                    inflight_bytes_max=bytes_max,
                    pitch_bytes_max=pitch_bytes_max,
                )
                streams.append(stream)
            self.to_device, self.to_host = streams
            directions = {"to_device": self.to_device, "to_host": self.to_host}
            self.calibration = Calibration(driver, directions)
            self.calibration.run(strided)
        except BaseException as error:
            # On a lost device this may fail, too; the first error is the one to report.
            with contextlib.suppress(CudaFailed):
                for stream in streams:
                    stream.close()
            # The release would wait for a device that hangs.
            if not (isinstance(error, CudaFailed) and error.code == NOT_READY):
                with contextlib.suppress(CudaFailed):
                    driver.call("cuDevicePrimaryCtxRelease", self.ordinal)
            raise
        for reason in self.calibration.reasons:
            _logger.warning("%s: %s, so they are not used", gpu_name(self.uuid), reason)

    def bind(self) -> None:
        """Make this device's context current in the calling thread."""
        # By identity: a context that was released and retained again may have the same handle.
        if getattr(_current, "context", None) is not self._context:
            check("cuCtxSetCurrent", self._set_current(self._context_handle))
            _current.context = self._context

    @property
    def lost(self) -> CudaFailed | None:
        """The error after which nothing can be copied any more, if any."""
        return self.to_device.lost or self.to_host.lost

    def import_ipc(self, handle: bytes, layout: KVLayout, pins: "PinnedMemory") -> "DeviceMemory":
        """Map memory that another process exported by a legacy IPC handle of 64 bytes."""
        self.bind()
        call = self.driver.call
        packed = self.driver.make("CUipcMemHandle")
        ctypes.memmove(packed.getPtr(), handle, len(handle))
        with contextlib.ExitStack() as unmap:
            address = int(call("cuIpcOpenMemHandle", packed, _LAZY_PEER_ACCESS))
            unmap.callback(call, "cuIpcCloseMemHandle", address)
            size_bytes = int(call("cuMemGetAddressRange", address)[1])
            if size_bytes < layout.size_bytes:
                raise NotSupportedHere(
                    "cuMemGetAddressRange",
                    1,
                    f"the allocation has {size_bytes} bytes, its layout {layout.size_bytes}",
                )
            return DeviceMemory(self, address, layout, pins, unmap.pop_all().close)

    def import_vmm(self, fd: int, layout: KVLayout, pins: "PinnedMemory") -> "DeviceMemory":
        """Map memory that another process exported as a descriptor; `fd` stays the caller's."""
        self.bind()
        call, enum, size_bytes = self.driver.call, self.driver.enum, layout.size_bytes
        kind = enum("CUmemAllocationHandleType", "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR")
        handle = call("cuMemImportFromShareableHandle", fd, kind)
        undo: list[tuple[Any, ...]] = [("cuMemRelease", handle)]

        def unmap() -> None:
            # No exit stack: that would free the addresses also if the memory was not unmapped.
            while undo:
                call(*undo.pop())

        try:
            address = int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))
            undo.append(("cuMemAddressFree", address, size_bytes))
            # The driver refuses to map more than the allocation has.
            call("cuMemMap", address, size_bytes, 0, handle, 0)
            undo.append(("cuMemUnmap", address, size_bytes))
            access = self.driver.make("CUmemAccessDesc")
            access.location.type = enum("CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE")
            access.location.id = self.ordinal
            access.flags = enum("CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
            call("cuMemSetAccess", address, size_bytes, [access], 1)
            return DeviceMemory(self, address, layout, pins, unmap)
        except BaseException:
            unmap()
            raise

    def close(self) -> None:
        """Release everything. No memory may be mapped any more. Raises `CudaFailed`."""
        self.bind()
        for stream in (self.to_device, self.to_host):
            stream.close()
        self.driver.call("cuDevicePrimaryCtxRelease", self.ordinal)


class PinnedMemory:
    """Registers `memory` with the driver. A context must be current here and in `close`.

    In chunks, on a grid from its start: one call for hundreds of gigabytes would block the driver
    for many seconds, and is all or nothing. A slot may cross a border of the grid, and a copy must
    not (`split_at_grid`).
    """

    def __init__(self, driver: Driver, memory: Bytes, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._driver = driver
        self.chunk_bytes = chunk_bytes
        self.origin = memory.ctypes.data
        self._registered: list[int] = []
        try:
            for start in range(0, memory.size, chunk_bytes):
                size_bytes = min(chunk_bytes, memory.size - start)
                driver.call("cuMemHostRegister", self.origin + start, size_bytes, _PORTABLE)
                self._registered.append(self.origin + start)
        except CudaFailed:
            self.close()
            raise

    def close(self) -> None:
        """Unregister all of it. No copy may be running."""
        while self._registered:
            # The registrations of a lost device are gone.
            with contextlib.suppress(CudaFailed):
                self._driver.call("cuMemHostUnregister", self._registered.pop())


@dataclass(eq=False)
class DeviceMemory:
    """A worker's KV cache, mapped on its device. Made by `Device`."""

    device: Device
    _address: int
    _layout: KVLayout
    _pins: PinnedMemory
    _unmap: Callable[[], None]

    def __post_init__(self) -> None:
        self._runs = Runs(self._layout)
        self._plane_shape = PlaneShape.of(self._runs)

    def part(self, layout: KVLayout) -> "DeviceMemory":
        """Another KV cache group in the same memory. Closing it unmaps nothing."""
        return DeviceMemory(self.device, self._address, layout, self._pins, lambda: None)

    def gather(self, block_ids: BlockIds, payload: Bytes) -> "DeviceTransfer":
        """Begin to copy blocks into `payload`, which lies in the pool."""
        return self._begin(self.device.to_host, block_ids, payload)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> "DeviceTransfer":
        """Begin to copy `payload`, which lies in the pool, to blocks."""
        return self._begin(self.device.to_device, block_ids, payload)

    def _begin(self, stream: CopyStream, block_ids: BlockIds, payload: Bytes) -> "DeviceTransfer":
        check_copy(self._layout, block_ids, payload)
        number = 0
        try:
            if len(block_ids):
                # `payload.ctypes` would make several objects in Python.
                host = ctypes.addressof(ctypes.c_char.from_buffer(payload.data))
                number = self._submit(stream, block_ids, host, payload.size)
        except CudaFailed:
            # Parts queued before the failure may still run.
            stream.drain()
            raise
        return DeviceTransfer(stream, number, payload, stream is self.device.to_device)

    def _submit(self, stream: CopyStream, block_ids: BlockIds, host: int, size_bytes: int) -> int:
        """Queue a copy; returns the number of its last part."""
        origin, grid_bytes = self._pins.origin, self._pins.chunk_bytes
        runs, shape = self._runs, self._plane_shape
        inside = (host - origin) % grid_bytes + size_bytes <= grid_bytes
        # A payload across a border of the pins is rare: it is copied without planes.
        if inside and shape and stream.takes_planes(runs.size_bytes, shape.pitch_bytes):
            planes = describe_planes(runs, shape, block_ids, self._address, host)
            return stream.submit(planes)
        found = describe(runs, block_ids, self._address, host)
        if not inside:
            found = split_at_grid(cut(found, grid_bytes), origin, grid_bytes)
        return stream.submit(found)

    def close(self) -> None:
        """Unmap it. No copy of it may be running."""
        self.device.bind()
        self._unmap()


@dataclass(slots=True)
class DeviceTransfer:
    """A running copy: a `Transfer`."""

    _stream: CopyStream
    _number: int
    _payload: Bytes
    _load: bool

    def finish(self, visit: Visit) -> None:
        """Wait for it, and visit the payload; a load's during the copy. Raises `CudaFailed`."""
        if self._load:
            visit(self._payload.data)
        self._stream.wait(self._number)
        if not self._load:
            visit(self._payload.data)

    def settle(self) -> None:
        """Return once it cannot run any more."""
        with contextlib.suppress(CudaFailed):  # A lost device runs nothing.
            self._stream.wait(self._number)
