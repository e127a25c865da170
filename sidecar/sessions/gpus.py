"""The GPUs of the engines that are attached: made ready at a first attach, given back at the end.

Owns the devices in use (`tiers/cuda/`) and the pins of the pool, which all devices share. Does not
own sessions, nor when a copy runs. Where no engine on a GPU attaches, nothing here loads anything.

Invariants:

* Making a device ready (a context, the self-test, pinning the pool: seconds) and unmapping run in
  threads; mapping a worker's memory, about a millisecond, is all that the loop waits for.
* A device that was lost serves nobody any more: its copies fail, its workers are refused by name.
* Whatever a GPU cannot do is an `AttachRefused` that says why: its engine is served without cache.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio

from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import KIND_CUDA_IPC
from tiers.cuda.calibration import describe_rates
from tiers.cuda.device import Device, DeviceMemory
from tiers.cuda.driver import driver
from tiers.cuda.errors import CudaFailed
from tiers.cuda.pinned_memory import PinnedMemory
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    from collections.abc import Generator
    from concurrent.futures import Future

    import numpy as np
    import numpy.typing as npt

    from sidecar.config.host import GpuSettings
    from sidecar.protocol import Memory
    from tiers.kv.copy import Transfer
    from tiers.kv.layout import KVLayout

    Bytes = npt.NDArray[np.uint8]
    BlockIds = npt.NDArray[np.int64]

_logger = logging.getLogger("kvlake.gpu")


class Gpus:
    """Devices by UUID. `pool` is the host memory that copies come from and go to."""

    def __init__(self, pool: Bytes, settings: GpuSettings) -> None:
        self._pool: Bytes | None = pool
        self._settings = settings
        self._devices: dict[bytes, Device] = {}
        self._pins: PinnedMemory | None = None
        self._preparing: dict[bytes, anyio.CapacityLimiter] = {}
        self._pinning = threading.Lock()
        self._unmapping: ThreadPoolExecutor | None = None

    async def prepare(self, memory: Memory) -> None:
        """Make the device of `memory` ready, once. Raises `AttachRefused`."""
        uuid = memory.device_uuid
        try:
            device = self._devices.get(uuid)
            if device is None:
                # One limiter for each: a device that hangs holds up nobody but its own workers.
                limiter = self._preparing.setdefault(uuid, anyio.CapacityLimiter(1))
                try:
                    device = await run_to_end(lambda: self._ready(uuid), limiter)
                finally:
                    if not limiter.statistics().tasks_waiting:
                        self._preparing.pop(uuid, None)
            if device.lost is not None:
                raise device.lost
        except CudaFailed as error:
            raise AttachRefused("gpu", f"GPU-{uuid.hex()}: {error}") from error

    def _ready(self, uuid: bytes) -> Device:
        """In a thread: the device, with the pool pinned."""
        if uuid in self._devices:
            return self._devices[uuid]
        assert self._pool is not None, "nobody attaches after close"
        device = Device(
            driver(),
            uuid,
            to_device_bytes_max=self._settings.loads_inflight_max,
            to_host_bytes_max=self._settings.stores_inflight_max,
            strided=self._settings.strided_copies,
        )
        try:
            with self._pinning:
                if self._pins is None:
                    self._pins = PinnedMemory(device.driver, self._pool)
        except CudaFailed:
            device.close()
            raise
        self._devices[uuid] = device
        found = device.findings
        _logger.info(
            "GPU ready",
            extra=fields(
                uuid=uuid.hex(),
                name=device.driver.name(device.ordinal),
                batches=device.batches,
                planes=found.planes,
                gb_per_second=describe_rates(found),
            ),
        )
        return device

    def open(self, memory: Memory, layout: KVLayout, fds: list[int]) -> GpuRegion:
        """Map a worker's memory on a device that was prepared. Raises `AttachRefused`."""
        device, pins = self._devices[memory.device_uuid], self._pins
        assert pins is not None, "pinned with the first device"
        try:
            mapped = (
                device.import_ipc(memory.handle, layout, pins)
                if memory.kind == KIND_CUDA_IPC
                else device.import_vmm(fds[0], layout, pins)
            )
        except CudaFailed as error:
            raise AttachRefused("memory", f"the worker's GPU memory: {error}") from error
        if self._unmapping is None:
            self._unmapping = ThreadPoolExecutor(1, thread_name_prefix="kvlake-unmap")
        return GpuRegion(mapped, self._unmapping)

    def close(self) -> None:
        """Give everything back. Every region is closed, and no copy runs."""
        if self._unmapping is not None:
            self._unmapping.shutdown()
            self._unmapping = None
        devices = sorted(self._devices.values(), key=lambda device: device.lost is not None)
        with _told():
            if self._pins is not None:
                # In the context of a device that works, if there is one.
                devices[0].bind()
                self._pins.close()
        for device in devices:
            with _told():
                device.close()
        self._pins = None
        self._devices.clear()
        self._pool = None


@contextlib.contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except CudaFailed as error:
        _logger.warning("a GPU was not given back in order", extra=fields(error=error))


class GpuRegion:
    """A worker's KV memory on a GPU. A `Region`, unmapped in a thread."""

    def __init__(self, memory: DeviceMemory, unmapping: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._unmapping = unmapping
        self.mapped = True

    def gather(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """Begin to copy blocks to `payload`."""
        return self._memory.gather(block_ids, payload)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """Begin to copy `payload` to blocks."""
        return self._memory.scatter(block_ids, payload)

    def part(self, layout: KVLayout) -> GpuPart:
        """Another KV cache group in the same memory."""
        return GpuPart(self._memory.part(layout), self)

    def close(self) -> None:
        """Unmap it soon: the driver may take milliseconds, which the loop does not have."""
        self._unmapping.submit(self._memory.close).add_done_callback(self._closed)

    def _closed(self, ended: Future[None]) -> None:
        error = ended.exception()
        if error is None:
            self.mapped = False
        else:
            _logger.error("a worker's GPU memory was not unmapped", extra=fields(error=error))


class GpuPart:
    """One more KV cache group in a `GpuRegion`, which owns the mapping. A `Region`."""

    def __init__(self, memory: DeviceMemory, region: GpuRegion) -> None:
        self._memory = memory
        self._region = region

    def part(self, layout: KVLayout) -> GpuPart:
        """Another KV cache group in the same memory."""
        return self._region.part(layout)

    def gather(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """Begin to copy blocks to `payload`."""
        return self._memory.gather(block_ids, payload)

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """Begin to copy `payload` to blocks."""
        return self._memory.scatter(block_ids, payload)

    @property
    def mapped(self) -> bool:
        """Whether the region is still mapped."""
        return self._region.mapped

    def close(self) -> None:
        """Nothing: the region unmaps."""
