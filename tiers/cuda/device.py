"""One GPU as the sidecar uses it: its context, its two lanes, and workers' memory mapped on it.

Owns the retained primary context (one per process and device, shared by all workers on it), the
lanes, the imports, and the self-test that decides whether batches can be trusted. Does not own the
pool's pins nor when memory is unmapped.

Devices are named by UUID: their numbers differ between processes (CUDA_VISIBLE_DEVICES).

Invariants: a context is made current in each thread that calls; memory is imported at least as
large as its layout says, or refused; it is unmapped only when no copy of it can run.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiers.copy import Runs, check_copy
from tiers.cuda.descriptors import Descriptors, cut, describe, split_at_grid
from tiers.cuda.driver import check
from tiers.cuda.errors import CudaFailed, CudaMisused, NotSupportedHere
from tiers.cuda.lanes import Lane

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from tiers.copy import Visit
    from tiers.cuda.driver import Driver
    from tiers.cuda.pins import Pins
    from tiers.layout import KVLayout

    Bytes = npt.NDArray[np.uint8]
    BlockIds = npt.NDArray[np.int64]

IPC_HANDLE_BYTES: Final = 64
_LAZY_PEER_ACCESS: Final = 1
_TEST_PIECES: Final = 64
_TEST_PIECE_BYTES: Final = 256

_logger = logging.getLogger("kvlake.gpu")


class Device:
    """A GPU, by UUID. Raises `CudaFailed` where it cannot be used."""

    def __init__(
        self,
        driver: Driver,
        uuid: bytes,
        *,
        to_device_bytes_max: int,
        to_host_bytes_max: int,
    ) -> None:
        self.driver = driver
        self.uuid = uuid
        self.ordinal = driver.ordinal_of(uuid)
        self._set_current = driver.entry("cuCtxSetCurrent")
        self._context: Any = driver.call("cuDevicePrimaryCtxRetain", self.ordinal)
        self._context_handle = int(self._context)
        lanes: list[Lane] = []
        try:
            self.bind()
            for to_device, bytes_max in ((True, to_device_bytes_max), (False, to_host_bytes_max)):
                lanes.append(
                    Lane(driver, self.bind, to_device=to_device, inflight_bytes_max=bytes_max)
                )
            self.to_device, self.to_host = lanes
            self.batches = self._test_batches()
        except BaseException:
            for lane in lanes:
                lane.close()
            driver.call("cuDevicePrimaryCtxRelease", self.ordinal)
            raise

    def bind(self) -> None:
        """Make this device's context current in the calling thread."""
        check("cuCtxSetCurrent", self._set_current(self._context_handle))

    @property
    def lost(self) -> CudaFailed | None:
        """Why nothing can be copied any more, if that is so."""
        return self.to_device.lost or self.to_host.lost

    def _test_batches(self) -> bool:
        """Copy a pattern there and back in batches; without them from now on if it comes wrong."""
        size_bytes = _TEST_PIECES * _TEST_PIECE_BYTES
        there = int(self.driver.call("cuMemAlloc", size_bytes))
        staging = mmap.mmap(-1, 2 * size_bytes)
        host: Bytes = np.frombuffer(staging, dtype=np.uint8)
        try:
            self.driver.call("cuMemHostRegister", host.ctypes.data, host.size, 1)
            try:
                reason = self._test(there, host[:size_bytes], host[size_bytes:])
            finally:
                for lane in (self.to_device, self.to_host):
                    lane.drain()
                self.driver.call("cuMemHostUnregister", host.ctypes.data)
        finally:
            self.driver.call("cuMemFree", there)
        if reason:
            for lane in (self.to_device, self.to_host):
                lane.use_batches(on=False)
            _logger.warning(
                "copies of GPU %s go one by one: batches failed their test (%s)",
                self.uuid.hex(),
                reason,
            )
        return not reason

    def _test(self, there: int, sent: Bytes, back: Bytes) -> str:
        """Why batches are of no use here; nothing if they are."""
        sent[:] = np.random.default_rng(sent.size).integers(0, 256, sent.size, dtype=np.uint8)
        steps = np.arange(_TEST_PIECES, dtype=np.uint64) * np.uint64(_TEST_PIECE_BYTES)
        sizes = np.full(_TEST_PIECES, _TEST_PIECE_BYTES, dtype=np.uint64)
        device = np.uint64(there) + steps
        try:
            for lane, memory, order in (
                (self.to_device, sent, steps),
                (self.to_host, back, steps[::-1]),
            ):
                lane.use_batches(on=True)
                host = np.uint64(memory.ctypes.data) + order
                lane.wait(lane.submit(Descriptors(device, np.ascontiguousarray(host), sizes)))
        except CudaFailed as error:
            if self.lost is not None:
                raise
            return str(error)
        pieces = sent.reshape(_TEST_PIECES, -1)
        if np.array_equal(back.reshape(_TEST_PIECES, -1), pieces[::-1]):
            return ""
        return "the bytes that came back are not those that were sent"

    def import_ipc(self, handle: bytes, layout: KVLayout, pins: Pins) -> DeviceMemory:
        """Map memory that another process exported by a legacy IPC handle."""
        if len(handle) != IPC_HANDLE_BYTES:
            raise CudaMisused("cuIpcOpenMemHandle", 1, f"a handle of {len(handle)} bytes")
        self.bind()
        packed = self.driver.make("CUipcMemHandle")
        ctypes.memmove(packed.getPtr(), handle, IPC_HANDLE_BYTES)
        address = int(self.driver.call("cuIpcOpenMemHandle", packed, _LAZY_PEER_ACCESS))

        def unmap() -> None:
            self.driver.call("cuIpcCloseMemHandle", address)

        try:
            _, size_bytes = self.driver.call("cuMemGetAddressRange", address)
            self._check_size(int(size_bytes), layout)
            return DeviceMemory(self, address, layout, pins, unmap)
        except BaseException:
            unmap()
            raise

    def import_vmm(self, fd: int, layout: KVLayout, pins: Pins) -> DeviceMemory:
        """Map memory that another process exported as a descriptor; `fd` stays the caller's."""
        self.bind()
        call, posix = self.driver.call, "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        kind = self.driver.enum("CUmemAllocationHandleType", posix)
        handle = call("cuMemImportFromShareableHandle", fd, kind)
        undo: list[Callable[[], Any]] = [lambda: call("cuMemRelease", handle)]

        def unmap() -> None:
            while undo:
                undo.pop()()

        try:
            size_bytes = layout.size_bytes
            address = int(call("cuMemAddressReserve", size_bytes, 0, 0, 0))
            undo.append(lambda: call("cuMemAddressFree", address, size_bytes))
            # The driver refuses to map more than the handle stands for.
            call("cuMemMap", address, size_bytes, 0, handle, 0)
            undo.append(lambda: call("cuMemUnmap", address, size_bytes))
            access = self.driver.make("CUmemAccessDesc")
            access.location.type = self.driver.enum(
                "CUmemLocationType", "CU_MEM_LOCATION_TYPE_DEVICE"
            )
            access.location.id = self.ordinal
            access.flags = self.driver.enum(
                "CUmemAccess_flags", "CU_MEM_ACCESS_FLAGS_PROT_READWRITE"
            )
            call("cuMemSetAccess", address, size_bytes, [access], 1)
            return DeviceMemory(self, address, layout, pins, unmap)
        except BaseException:
            unmap()
            raise

    @staticmethod
    def _check_size(size_bytes: int, layout: KVLayout) -> None:
        if size_bytes < layout.size_bytes:
            raise NotSupportedHere(
                "cuMemGetAddressRange",
                1,
                f"the allocation has {size_bytes} bytes, its layout {layout.size_bytes}",
            )

    def close(self) -> None:
        """Give everything back. Nothing of it may be mapped any more."""
        self.bind()
        for lane in (self.to_device, self.to_host):
            lane.close()
        self.driver.call("cuDevicePrimaryCtxRelease", self.ordinal)


class DeviceMemory:
    """A worker's KV cache, mapped on its device. Made by `Device`."""

    def __init__(
        self,
        device: Device,
        address: int,
        layout: KVLayout,
        pins: Pins,
        unmap: Callable[[], None],
    ) -> None:
        self.device = device
        self._address = address
        self._layout = layout
        self._pins = pins
        self._unmap = unmap
        self._runs = Runs(layout)

    def part(self, layout: KVLayout) -> DeviceMemory:
        """The same memory, as another KV cache group lies in it. Whoever has this one unmaps."""
        return DeviceMemory(self.device, self._address, layout, self._pins, lambda: None)

    def gather(self, block_ids: BlockIds, payload: Bytes) -> Flight:
        """Begin to copy blocks into `payload`, which lies in the pool."""
        return self._begin(self.device.to_host, block_ids, payload, load=False)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> Flight:
        """Begin to copy `payload`, which lies in the pool, to blocks."""
        return self._begin(self.device.to_device, block_ids, payload, load=True)

    def _begin(self, lane: Lane, block_ids: BlockIds, payload: Bytes, *, load: bool) -> Flight:
        check_copy(self._layout, block_ids, payload)
        if not len(block_ids):
            return Flight(lane, 0, payload, load=load)
        found = describe(self._runs, block_ids, self._address, payload.ctypes.data)
        grid_bytes = self._pins.chunk_bytes
        found = split_at_grid(cut(found, grid_bytes), self._pins.origin, grid_bytes)
        try:
            return Flight(lane, lane.submit(found), payload, load=load)
        except CudaFailed:
            # What was queued before it failed may still run.
            lane.drain()
            raise

    def close(self) -> None:
        """Unmap it. No copy of it may be running."""
        self.device.bind()
        self._unmap()


class Flight:
    """A copy on its way: a `Transfer`."""

    def __init__(self, lane: Lane, number: int, payload: Bytes, *, load: bool) -> None:
        self._lane = lane
        self._number = number
        self._payload = payload
        self._load = load

    def finish(self, visit: Visit) -> None:
        """Wait for it, and show the payload: of a load while it travels. Raises `CudaFailed`."""
        if self._load:
            visit(self._payload.data)
            self._lane.wait(self._number)
        else:
            self._lane.wait(self._number)
            visit(self._payload.data)

    def settle(self) -> None:
        """Return once it cannot run any more."""
        with contextlib.suppress(CudaFailed):  # lost: nothing runs there any more
            self._lane.wait(self._number)
