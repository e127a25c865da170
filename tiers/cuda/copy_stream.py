"""Copies in one direction on one device: the stream, copies in flight, and their submission.

Owns a stream at the lowest priority, the events behind its batches, and pacing: at most
`inflight_bytes_max` bytes are queued at any time, so that a decode step's own small copies wait
behind little, and an abandoned load ends soon. Does not own memory or contexts.

Batches go to the driver as one call (`cuMemcpyBatchAsync`) of at most `DESCRIPTORS_MAX`
descriptors; a few descriptors, or all of them if the driver has no batches or failed their test, as
plain copies. The driver joins nothing and copies in any order within a batch. Planes are submitted
as 2D copies, one call each, if calibration found these faster than their runs in a batch
(`calibration.py`).

Invariants:

* Events are polled, never waited on: a device that hangs leaves a sleeping thread that still
  answers.
* A submitted copy is known to be complete, or still counted; `drain` returns only when nothing that
  was submitted can still access memory. After an error of the device nothing runs on it any more,
  and every call raises that error.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tiers.cuda.descriptors import cut, cut_planes
from tiers.cuda.driver import check
from tiers.cuda.errors import NOT_READY, CudaFailed, DeviceLost, failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.cuda.descriptors import Addresses, Descriptors, Planes
    from tiers.cuda.driver import Driver

DESCRIPTORS_MAX: Final = 1024
"""In one call. Driver 580 crashed at 51,828; beyond a thousand a call only gets longer."""
PLANES_MAX: Final = 64
"""Between two events: each is a separate call, and other threads wait for the lock meanwhile."""
PLAIN_DESCRIPTORS_MAX: Final = 2
"""Up to this number of descriptors, plain copies cost less than a batch."""
POLL_SECONDS_MIN: Final = 20e-6
POLL_SECONDS_MAX: Final = 500e-6
_EVENT_DISABLE_TIMING: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_ATTRIBUTES: Final = np.array([1, 0, 0, 0, 0, 1], dtype=np.int32)
"""One CUmemcpyAttributes: sources are read in stream order, no location hints, and the copy
engines rather than the SMs (CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)."""
_FIRSTS: Final = np.zeros(1, dtype=np.uint64)
_MEMORY_HOST: Final = 1
_MEMORY_DEVICE: Final = 2
# CUDA_MEMCPY2D as words of eight bytes: source, target, size.
_FROM: Final = 0
_TO: Final = 7
_TYPE, _HOST, _DEVICE, _PITCH = 2, 3, 4, 6
_WIDTH, _HEIGHT, _PLANE_WORDS = 14, 15, 16


def _never(width_bytes: int) -> bool:  # noqa: ARG001 (as every such answer)
    return False


class CopyStream:
    """Copies in one direction. Threads may share it; each call binds the context it needs.

    Args:
        bind: makes the device's context current in the calling thread.
        to_device: the direction.
        inflight_bytes_max: limit of queued bytes.
    """

    def __init__(
        self,
        driver: Driver,
        bind: Callable[[], None],
        *,
        to_device: bool,
        inflight_bytes_max: int,
    ) -> None:
        self._driver = driver
        self._bind = bind
        self._to_device = to_device
        self._inflight_bytes_max = inflight_bytes_max
        # Two batches at least, so that one runs while the next is being made.
        self._batch_bytes_max = max(1, inflight_bytes_max // 2)
        lowest, _ = driver.call("cuCtxGetStreamPriorityRange")
        self._stream: Any = driver.call("cuStreamCreateWithPriority", _STREAM_NON_BLOCKING, lowest)
        self._handle = int(self._stream)
        self._copy_one = driver.entry("cuMemcpyAsync")
        self._copy_batch: Any = None
        self._copy_plane: Any = None
        self._plane_pays: Callable[[int], bool] = _never
        self._plane_pitch_max = 0
        self._plane = np.zeros(_PLANE_WORDS, dtype=np.uint64)
        self._record = driver.entry("cuEventRecord")
        self._query = driver.entry("cuEventQuery")
        self._lock = threading.Lock()
        self._flying: deque[tuple[int, Any, int]] = deque()
        """Number, event and bytes of each batch that may still run, oldest first."""
        self._flying_bytes = 0
        self._events: list[Any] = []
        self._submitted = 0
        self._through = 0
        self._lost: CudaFailed | None = None

    def use_batches(self, *, on: bool) -> None:
        """Submit by `cuMemcpyBatchAsync`, or as plain copies. Raises `NotSupportedHere`."""
        self._copy_batch = self._driver.entry("cuMemcpyBatchAsync") if on else None

    def use_planes(self, pays: Callable[[int], bool], *, pitch_bytes_max: int) -> None:
        """Use 2D copies for runs whose bytes `pays` accepts. Raises `NotSupportedHere`."""
        self._copy_plane = self._driver.entry("cuMemcpy2DAsync")
        self._plane_pays = pays
        self._plane_pitch_max = pitch_bytes_max

    def no_planes(self) -> None:
        """Use no 2D copies."""
        self._copy_plane = None

    def takes_planes(self, width_bytes: int, pitch_bytes: int) -> bool:
        """Whether `submit_planes` accepts planes of such rows."""
        return (
            self._copy_plane is not None
            and width_bytes <= self._batch_bytes_max
            and pitch_bytes <= self._plane_pitch_max
            and self._plane_pays(width_bytes)
        )

    @property
    def lost(self) -> CudaFailed | None:
        """The error after which nothing can be copied any more, if any."""
        return self._lost

    def submit(self, copy: Descriptors) -> int:
        """Queue a copy; returns its number for `wait`. Waits while too much is in flight.

        Raises `CudaFailed`. Parts queued before still run: `drain` before reusing their memory.
        """
        pieces = cut(copy, self._batch_bytes_max)
        targets, sources = pieces.device, pieces.host
        if not self._to_device:
            targets, sources = sources, targets
        sizes = pieces.sizes

        def issue(first: int, last: int) -> None:
            self._copy(targets[first:last], sources[first:last], sizes[first:last])

        return self._submit_all(self._batches(sizes, DESCRIPTORS_MAX), issue)

    def submit_planes(self, copy: Planes) -> int:
        """As `submit`, for planes that `takes_planes` accepts."""
        planes = cut_planes(copy, self._batch_bytes_max)

        def issue(first: int, last: int) -> None:
            for index in range(first, last):
                self._copy_rows(planes, index)

        sizes = planes.rows * np.uint64(planes.width_bytes)
        return self._submit_all(self._batches(sizes, PLANES_MAX), issue)

    def _submit_all(
        self, batches: list[tuple[int, int, int]], issue: Callable[[int, int], None]
    ) -> int:
        self._bind()
        number = 0
        for first, last, size_bytes in batches:
            number = self._when(
                functools.partial(self._has_room, size_bytes),
                functools.partial(self._submit_batch, issue, first, last, size_bytes),
            )
        return number

    def _batches(self, sizes: Addresses, count_max: int) -> list[tuple[int, int, int]]:
        """First and last entry, and bytes, of each batch."""
        ends = np.cumsum(sizes.astype(np.int64))
        found: list[tuple[int, int, int]] = []
        first, done_bytes = 0, 0
        while first < len(sizes):
            fitting = int(np.searchsorted(ends, done_bytes + self._batch_bytes_max, side="right"))
            last = max(first + 1, min(fitting, first + count_max))
            found.append((first, last, int(ends[last - 1]) - done_bytes))
            first, done_bytes = last, int(ends[last - 1])
        return found

    def _has_room(self, size_bytes: int) -> bool:
        # A batch over the limit (a single descriptor never is) is submitted alone.
        return not self._flying or self._flying_bytes + size_bytes <= self._inflight_bytes_max

    def _submit_batch(
        self, issue: Callable[[int, int], None], first: int, last: int, size_bytes: int
    ) -> int:
        event = self._events.pop() if self._events else self._new_event()
        try:
            issue(first, last)
        finally:
            # Also after a failure: a part of the batch may have been queued.
            code = self._record(int(event), self._handle)
            if code:
                self._lose(failure("cuEventRecord", code))
            self._submitted += 1
            self._flying.append((self._submitted, event, size_bytes))
            self._flying_bytes += size_bytes
        if self._lost is not None:
            raise self._lost
        return self._submitted

    def _copy(self, targets: Any, sources: Any, sizes: Any) -> None:
        count = len(sizes)
        if self._copy_batch is None or count <= PLAIN_DESCRIPTORS_MAX:
            for target, source, size in zip(
                targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
            ):
                check("cuMemcpyAsync", self._copy_one(target, source, size, self._handle))
            return
        failed = np.zeros(1, dtype=np.uint64)
        code = self._copy_batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, count,
            _ATTRIBUTES.ctypes.data, _FIRSTS.ctypes.data, 1, failed.ctypes.data, self._handle,
        )  # fmt: skip
        check("cuMemcpyBatchAsync", code)

    def _copy_rows(self, planes: Planes, index: int) -> None:
        """One 2D copy. Called under the lock, which protects the structure."""
        plane = self._plane
        device, host = (_TO, _FROM) if self._to_device else (_FROM, _TO)
        plane[:] = 0
        plane[device + _TYPE], plane[host + _TYPE] = _MEMORY_DEVICE, _MEMORY_HOST
        plane[device + _DEVICE], plane[host + _HOST] = planes.device[index], planes.host[index]
        plane[device + _PITCH], plane[host + _PITCH] = planes.pitch_bytes, planes.width_bytes
        plane[_WIDTH], plane[_HEIGHT] = planes.width_bytes, planes.rows[index]
        check("cuMemcpy2DAsync", self._copy_plane(plane.ctypes.data, self._handle))

    def _new_event(self) -> Any:
        return self._driver.call("cuEventCreate", _EVENT_DISABLE_TIMING)

    def wait(self, number: int, *, seconds_max: float | None = None) -> None:
        """Return once copy `number` is complete. Raises `DeviceLost`, also after `seconds_max`."""
        self._bind()
        self._when(lambda: self._through >= number, lambda: number, seconds_max=seconds_max)

    def mark(self, event: Any) -> None:
        """Record `event` behind everything submitted so far."""
        self._bind()
        check("cuEventRecord", self._record(int(event), self._handle))

    def wait_mark(self, event: Any, *, seconds_max: float) -> None:
        """Return once `event` is reached. Raises `DeviceLost`, also after `seconds_max`."""

        def reached() -> bool:
            code = self._query(int(event))
            if code and code != NOT_READY:
                self._lose(failure("cuEventQuery", code))
            return not code

        self._when(reached, lambda: 0, seconds_max=seconds_max)

    def drain(self) -> None:
        """Return once nothing submitted so far can still run. Never raises."""
        number = self._submitted
        try:
            self.wait(number)
        except CudaFailed:
            return  # The device is lost: nothing runs there any more.

    def _when(
        self,
        true: Callable[[], bool],
        act: Callable[[], int],
        *,
        seconds_max: float | None = None,
    ) -> int:
        """Poll until `true`, then act under the same lock."""
        pause = POLL_SECONDS_MIN
        deadline = math.inf if seconds_max is None else time.monotonic() + seconds_max
        while True:
            with self._lock:
                self._poll()
                if self._lost is not None:
                    raise self._lost
                if true():
                    return act()
                if time.monotonic() > deadline:
                    self._lose(failure("cuEventQuery", NOT_READY, "CUDA_ERROR_NOT_READY"))
            time.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS_MAX)

    def _poll(self) -> None:
        while self._flying and self._lost is None:
            number, event, size_bytes = self._flying[0]
            code = self._query(int(event))
            if code == NOT_READY:
                return
            if code:
                self._lose(failure("cuEventQuery", code))
                return
            self._flying.popleft()
            self._flying_bytes -= size_bytes
            self._through = number
            self._events.append(event)

    def _lose(self, error: CudaFailed) -> None:
        # After any error it is unknown which copies still run.
        self._lost = error if isinstance(error, DeviceLost) else DeviceLost(error.call, error.code)

    def close(self) -> None:
        """Drain, then destroy stream and events. The context is current."""
        self.drain()
        if self._lost is not None:
            return  # They are gone with the context.
        for event in self._events:
            self._driver.call("cuEventDestroy", event)
        self._events.clear()
        self._driver.call("cuStreamDestroy", self._stream)
