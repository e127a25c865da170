"""The GPUs of attached engines: prepared at the first attach, released at the end.

Owns the devices in use (`tiers/cuda/`) and the pinning of the pool, which all devices share. Does
not own sessions, nor when a copy runs. Without an engine on a GPU nothing is loaded.

Invariants:

* Preparing a device (a context, the self-test, pinning the pool: seconds) and unmapping run in
  threads. The loop waits only for mapping a worker's memory, about a millisecond.
* A lost device is not used again: its copies fail, its workers are refused.
* What a GPU cannot do is an `AttachRefused` with the reason: its engine serves without the cache.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import anyio

from sidecar.config.sections import GpuSettings
from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import KIND_CUDA_IPC, Memory
from tiers.cuda.device import Device, DeviceMemory, PinnedMemory
from tiers.cuda.driver import driver, gpu_name
from tiers.cuda.errors import CudaFailed, DeviceLost
from tiers.kv.copy import Region
from tiers.kv.layout import Bytes, KVLayout
from tiers.store.client import run_to_end
from tiers.threads import submit_or_do

FAILED_SECONDS: Final = 30.0
"""For how long a device that could not be prepared is not tried again: each attempt creates a
context and pins memory, and a worker that was refused attaches again five times a second."""

_logger = logging.getLogger("kvlake.gpu")


class Gpus:
    """Devices by UUID. Copies move between them and the host memory `pool`."""

    def __init__(self, pool: Bytes, settings: GpuSettings) -> None:
        self._pool: Bytes | None = pool
        self._settings = settings
        self._devices: dict[bytes, Device] = {}
        self._failed: dict[bytes, tuple[str, float]] = {}
        """Devices that could not be prepared: why, and until when. A lost one stays lost."""
        self._pins: PinnedMemory | None = None
        self._preparing: dict[bytes, anyio.CapacityLimiter] = {}
        self._pinning = threading.Lock()
        self._unmapping = ThreadPoolExecutor(1, thread_name_prefix="kvlake-unmap")

    @property
    def lost(self) -> dict[bytes, str]:
        """The devices that were lost after they had served: UUID to name and error.

        What was mapped there stays allocated on the device until this process ends.
        """
        return {
            uuid: f"{gpu_name(uuid)}: {device.lost}"
            # A copy: a thread that prepares a device adds it.
            for uuid, device in list(self._devices.items())
            if device.lost is not None
        }

    async def prepare(self, memory: Memory) -> None:
        """Prepare the device of `memory`, once. Raises `AttachRefused`."""
        uuid = memory.device_uuid
        device = self._known(uuid)
        if device is None:
            # One limiter per device: a device that hangs delays its own workers only.
            limiter = self._preparing.setdefault(uuid, anyio.CapacityLimiter(1))
            try:
                device = await run_to_end(lambda: self._ready(uuid), limiter)
            finally:
                if not limiter.statistics().tasks_waiting:
                    self._preparing.pop(uuid, None)
        if device.lost is not None:
            raise _refusal(uuid, device.lost)

    def _ready(self, uuid: bytes) -> Device:
        """In a thread: the device, with the pool pinned. Raises `AttachRefused`."""
        # Others waited for the one that prepared it.
        if (known := self._known(uuid)) is not None:
            return known
        try:
            return self._prepared(uuid)
        except CudaFailed as error:
            now = time.monotonic()
            # An attach names any UUID, so those that never come again are dropped here.
            for one, (_, until) in list(self._failed.items()):
                if until <= now:
                    self._failed.pop(one, None)
            seconds = math.inf if isinstance(error, DeviceLost) else FAILED_SECONDS
            # As text: the error's traceback would keep what was made for the device.
            self._failed[uuid] = str(error), now + seconds
            raise _refusal(uuid, error) from error

    def _known(self, uuid: bytes) -> Device | None:
        """A device that was prepared. Raises `AttachRefused` for one that could not be."""
        reason, until = self._failed.get(uuid, ("", 0.0))
        if time.monotonic() < until:
            raise _refusal(uuid, reason)
        return self._devices.get(uuid)

    def _prepared(self, uuid: bytes) -> Device:
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
        found = device.calibration
        _logger.info(
            "GPU ready",
            extra=fields(
                uuid=gpu_name(uuid),
                name=device.driver.name(device.ordinal),
                batches=found.batches,
                planes=found.planes,
                gb_per_second=found.describe_rates(),
            ),
        )
        return device

    def open(
        self, memory: Memory, layouts: Sequence[KVLayout], fds: list[int], *, pid: int
    ) -> "tuple[GpuMapping, Sequence[Region]]":
        """Map the memory of the worker `pid` on a prepared device. Raises `AttachRefused`."""
        device, pins = self._devices[memory.device_uuid], self._pins
        assert pins is not None, "pinned with the first device"
        first, *others = layouts
        try:
            mapped = (
                device.import_ipc(memory.handle, first, pins)
                if memory.kind == KIND_CUDA_IPC
                else device.import_vmm(fds[0], first, pins)
            )
        except CudaFailed as error:
            if memory.kind == KIND_CUDA_IPC and pid == os.getpid():
                raise AttachRefused(
                    "memory",
                    f"the worker's GPU memory: {error.call} failed ({error.code}), because worker "
                    f"and sidecar have the same process id {pid} in separate PID namespaces, and "
                    "the driver takes a handle of this id for the sidecar's own; restart one of "
                    "them, or let them share a PID namespace (docker --pid, hostPID)",
                ) from error
            raise AttachRefused("memory", f"the worker's GPU memory: {error}") from error
        regions = (mapped, *(mapped.part(layout) for layout in others))
        return GpuMapping(mapped, self._unmapping), regions

    def close(self) -> None:
        """Release everything. Every region is closed, and no copy runs."""
        self._unmapping.shutdown()
        # The pins in the context of a working device, if there is one.
        devices = sorted(self._devices.values(), key=lambda device: device.lost is not None)
        closing = [device.close for device in devices]
        if self._pins is not None:
            closing = [devices[0].bind, self._pins.close, *closing]
        for close in closing:
            try:
                close()
            except CudaFailed as error:
                _logger.warning("a GPU was not released cleanly", extra=fields(error=error))
        self._pins = None
        self._devices.clear()
        self._pool = None


def _refusal(uuid: bytes, reason: object) -> AttachRefused:
    return AttachRefused("gpu", f"{gpu_name(uuid)}: {reason}")


class GpuMapping:
    """A worker's KV memory on a GPU, mapped."""

    def __init__(self, memory: DeviceMemory, unmapping: ThreadPoolExecutor) -> None:
        self._memory = memory
        self._unmapping = unmapping
        self.mapped = True

    def close(self) -> None:
        """Unmap it, in a thread: the driver may take milliseconds."""
        submit_or_do(self._unmapping, self._unmap)

    def _unmap(self) -> None:
        try:
            self._memory.close()
        except Exception as error:
            # Without its traceback: the message says what the driver said.
            _logger.error("a worker's GPU memory was not unmapped", extra=fields(error=error))  # noqa: TRY400
        else:
            self.mapped = False
