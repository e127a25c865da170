"""Copies in one direction on one device: the stream, copies in flight, and their submission.

Owns a stream at the lowest priority, the events after its batches, and pacing: at most
`inflight_bytes_max` bytes are queued at any time, so that a decode step's own small copies wait
behind little, and an abandoned load ends soon. `calibration.py` decides between batches (one call
for many descriptors, copied in any order), plain copies, and 2D copies (one call for each plane).

Invariants: events are polled, never waited on, so a device that hangs leaves a sleeping thread that
still answers; one thread polls for all that wait, because each poll needs the GIL; a submitted copy
is known to be complete, or still counted; `drain` returns only when nothing that was submitted can
still access memory. After an error of the device nothing runs on it any more, and every call raises
that error.
"""

import contextlib
import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tiers.cuda.descriptors import Descriptors, batches
from tiers.cuda.driver import Driver, check
from tiers.cuda.errors import NOT_READY, CudaFailed, DeviceLost, failure

DESCRIPTORS_MAX: Final = 1024
"""In one call. Driver 580 crashed at 51,828; beyond a thousand a call only gets longer."""
PLANES_MAX: Final = 64
"""Between two events: each is a separate call, and other threads wait for the lock meanwhile."""
PLAIN_DESCRIPTORS_MAX: Final = 2
"""Up to this number of descriptors, plain copies cost less than a batch."""
POLL_SECONDS_MIN: Final = 20e-6
POLL_SECONDS_MAX: Final = 100e-6
_EVENT_DISABLE_TIMING: Final = 2
_STREAM_NON_BLOCKING: Final = 1
_ATTRIBUTES: Final = np.array([1, 0, 0, 0, 0, 1], dtype=np.int32)
"""One CUmemcpyAttributes: sources are read in stream order, no location hints, and the copy
engines rather than the SMs (CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)."""
_ATTRIBUTES_AT: Final = _ATTRIBUTES.ctypes.data
_FIRSTS: Final = np.zeros(1, dtype=np.uint64)
_FIRSTS_AT: Final = _FIRSTS.ctypes.data
_MEMORY_HOST: Final = 1
_MEMORY_DEVICE: Final = 2
# CUDA_MEMCPY2D as words of eight bytes: source, target, size.
_FROM: Final = 0
_TO: Final = 7
_TYPE, _HOST, _DEVICE, _PITCH = 2, 3, 4, 6
_WIDTH, _HEIGHT, _PLANE_WORDS = 14, 15, 16


class _Waiter:
    """A thread that sleeps until another one finds that its condition holds."""

    def __init__(self, true: Callable[[], bool]) -> None:
        self.true = true
        self._asleep = threading.Lock()
        self._asleep.acquire()
        self.sleep = self._asleep.acquire
        self.wake = self._asleep.release


class CopyStream:
    """Copies in one direction. Threads may share it; each call binds the context it needs."""

    def __init__(
        self,
        driver: Driver,
        bind: Callable[[], None],
        *,
        to_device: bool,
        inflight_bytes_max: int,
        pitch_bytes_max: int,
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
        self.batches = False
        """Whether to submit by `cuMemcpyBatchAsync`, and not as plain copies."""
        self.plane_pays: Callable[[int], bool] | None = None
        """Accepts the bytes of the runs for which to use 2D copies. None: use none."""
        self._pitch_bytes_max = pitch_bytes_max
        self._plane = np.zeros(_PLANE_WORDS, dtype=np.uint64)
        self._device, self._host = (_TO, _FROM) if to_device else (_FROM, _TO)
        self._plane[self._device + _TYPE] = _MEMORY_DEVICE
        self._plane[self._host + _TYPE] = _MEMORY_HOST
        # Made once: to ask an array for its address costs more than to copy its descriptors.
        self._plane_at = self._plane.ctypes.data
        self._batch = np.zeros((4, DESCRIPTORS_MAX), dtype=np.int64)
        """Arguments of one batch: targets, sources, sizes, and the number of one that failed."""
        self._batch_at = [row.ctypes.data for row in self._batch]
        self._record = driver.entry("cuEventRecord")
        self._query = driver.entry("cuEventQuery")
        self._submitting = threading.Lock()
        """Held while a copy is queued: copies are queued, and so end, one after the other."""
        self._lock = threading.Lock()
        self._polling = False
        """Whether a thread polls for those in `_waiting`."""
        self._waiting: list[_Waiter] = []
        self._flying: deque[tuple[int, Any, int]] = deque()
        """Number, event and bytes of each batch that may still run, oldest first."""
        self._flying_bytes = 0
        self._events: list[Any] = []
        self._submitted = 0
        self._through = 0
        self.lost: DeviceLost | None = None
        """The error after which nothing can be copied any more, if any."""

    def takes_planes(self, width_bytes: int, pitch_bytes: int) -> bool:
        """Whether planes of such rows can and should be submitted."""
        return (
            self.plane_pays is not None
            and width_bytes <= self._batch_bytes_max
            and pitch_bytes <= self._pitch_bytes_max
            and self.plane_pays(width_bytes)
        )

    def submit(self, copy: Descriptors) -> int:
        """Queue a copy of ranges, or of planes that `takes_planes` accepts.

        Returns its number for `wait`. Waits while too much is in flight.
        Raises `CudaFailed`. Parts queued before still run: `drain` before reusing their memory.
        """
        count_max = DESCRIPTORS_MAX if copy.flat else PLANES_MAX
        self._bind()
        number = 0
        with self._submitting:
            for part, size_bytes in batches(copy, self._batch_bytes_max, count_max):
                number = self._when(
                    functools.partial(self._has_room, size_bytes),
                    functools.partial(self._submit_batch, part, size_bytes),
                )
        return number

    def _has_room(self, size_bytes: int) -> bool:
        # A batch over the limit (a single descriptor never is) is submitted alone.
        return not self._flying or self._flying_bytes + size_bytes <= self._inflight_bytes_max

    def _submit_batch(self, batch: Descriptors, size_bytes: int) -> int:
        event = (
            self._events.pop()
            if self._events
            else self._driver.call("cuEventCreate", _EVENT_DISABLE_TIMING)
        )
        try:
            if batch.flat:
                self._copy_ranges(batch)
            else:
                self._copy_planes(batch)
        finally:
            # Also after a failure: a part of the batch may have been queued.
            code = self._record(int(event), self._handle)
            if code:
                self._lose(failure("cuEventRecord", code))
            self._submitted += 1
            self._flying.append((self._submitted, event, size_bytes))
            self._flying_bytes += size_bytes
        if self.lost is not None:
            raise self.lost.again()
        return self._submitted

    def _copy_ranges(self, ranges: Descriptors) -> None:
        """One call, or a few. Called under the lock, which protects the arguments."""
        targets, sources, sizes = ranges.device, ranges.host, ranges.rows
        if not self._to_device:
            targets, sources = sources, targets
        count = len(sizes)
        if not self.batches or count <= PLAIN_DESCRIPTORS_MAX:
            for target, source, size in zip(
                targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
            ):
                check("cuMemcpyAsync", self._copy_one(target, source, size, self._handle))
            return
        for row, values in zip(self._batch, (targets, sources, sizes), strict=False):
            row[:count] = values
        targets_at, sources_at, sizes_at, failed_at = self._batch_at
        code = self._driver.entry("cuMemcpyBatchAsync")(
            targets_at, sources_at, sizes_at, count, _ATTRIBUTES_AT, _FIRSTS_AT, 1, failed_at,
            self._handle,
        )  # fmt: skip
        check("cuMemcpyBatchAsync", code)

    def _copy_planes(self, planes: Descriptors) -> None:
        """A call for each. Called under the lock, which protects the structure."""
        plane, device, host = self._plane, self._device, self._host
        plane[device + _PITCH], plane[host + _PITCH] = planes.pitch_bytes, planes.width_bytes
        plane[_WIDTH] = planes.width_bytes
        copy_plane = self._driver.entry("cuMemcpy2DAsync")
        for there, here, rows in zip(
            planes.device.tolist(), planes.host.tolist(), planes.rows.tolist(), strict=True
        ):
            plane[device + _DEVICE], plane[host + _HOST], plane[_HEIGHT] = there, here, rows
            check("cuMemcpy2DAsync", copy_plane(self._plane_at, self._handle))

    def wait(self, number: int, *, seconds_max: float | None = None) -> None:
        """Return once copy `number` is complete. Raises `DeviceLost`, also after `seconds_max`."""
        if self.lost is None and self._through >= number:
            return
        self._bind()
        self._when(lambda: self._through >= number, lambda: number, seconds_max=seconds_max)

    def mark(self, event: Any) -> None:
        """Record `event` after everything submitted so far."""
        self._bind()
        check("cuEventRecord", self._record(int(event), self._handle))

    def wait_mark(self, event: Any, *, seconds_max: float) -> None:
        """Return once `event` is reached. Raises `DeviceLost`, also after `seconds_max`."""
        self._when(lambda: self._reached(event), lambda: 0, seconds_max=seconds_max)

    def drain(self) -> None:
        """Return once nothing submitted so far can still run. Never raises."""
        with contextlib.suppress(CudaFailed):  # On a lost device nothing runs any more.
            self.wait(self._submitted)

    def _when(
        self,
        true: Callable[[], bool],
        act: Callable[[], int],
        *,
        seconds_max: float | None = None,
    ) -> int:
        """Wait until `true`, then act under the same lock. Polls, or waits for one who does."""
        pause = POLL_SECONDS_MIN
        deadline = math.inf if seconds_max is None else time.monotonic() + seconds_max
        with self._lock:
            try:
                while True:
                    if not true():
                        self._poll()
                    if self.lost is not None:
                        raise self.lost.again()
                    if true():
                        return act()
                    if time.monotonic() > deadline:
                        self._lose(failure("cuEventQuery", NOT_READY, "CUDA_ERROR_NOT_READY"))
                    elif self._polling:
                        self._follow(true)
                    else:
                        self._polling = True
                        self._unlocked(time.sleep, pause)
                        self._polling = False
                        pause = min(pause * 1.5, POLL_SECONDS_MAX)
            finally:
                self._wake(next_poller=not self._polling)

    def _follow(self, true: Callable[[], bool]) -> None:
        """Sleep until `true` may hold, or nobody polls any more."""
        waiter = _Waiter(true)
        self._waiting.append(waiter)
        self._unlocked(waiter.sleep)

    def _wake(self, *, next_poller: bool) -> None:
        """Wake those whose condition holds; if `next_poller`, at least one of them."""
        ready = [one for one in self._waiting if self.lost is not None or one.true()]
        if next_poller and not ready:
            ready = self._waiting[:1]
        for one in ready:
            self._waiting.remove(one)
            one.wake()

    def _unlocked(self, sleep: Callable[..., object], *seconds: float) -> None:
        self._lock.release()
        try:
            sleep(*seconds)
        finally:
            self._lock.acquire()

    def _poll(self) -> None:
        while self._flying and self.lost is None:
            number, event, size_bytes = self._flying[0]
            if not self._reached(event):
                return
            self._flying.popleft()
            self._flying_bytes -= size_bytes
            self._through = number
            self._events.append(event)
            self._wake(next_poller=False)

    def _reached(self, event: Any) -> bool:
        code = self._query(int(event))
        if code and code != NOT_READY:
            self._lose(failure("cuEventQuery", code))
        return not code

    def _lose(self, error: CudaFailed) -> None:
        # After any error it is unknown which copies still run.
        self.lost = error if isinstance(error, DeviceLost) else DeviceLost(error.call, error.code)

    def close(self) -> None:
        """Drain, then destroy stream and events. The context is current."""
        self.drain()
        if self.lost is not None:
            return  # They are gone with the context.
        for event in self._events:
            self._driver.call("cuEventDestroy", event)
        self._events.clear()
        self._driver.call("cuStreamDestroy", self._stream)
