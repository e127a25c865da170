"""Calibration of a device's copies: tested and timed once, before the first worker is served.

Owns the test of batches and of 2D copies in both directions, and the timing of both for runs at a
constant distance, as in a KV cache whose outermost axis is the layer. Which of the two is faster
differs between devices, drivers and directions, so it is measured on the device in use.

Invariants: a way to copy that failed its test is not used, and the reason is reported; a device
that is lost meanwhile, or does not finish, is a `CudaFailed`, and memory that it may still write to
is never freed; otherwise nothing is left behind.
"""

import contextlib
import functools
import mmap
from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np

from tiers.cuda.copy_stream import CopyStream
from tiers.cuda.descriptors import Descriptors
from tiers.cuda.driver import Driver
from tiers.cuda.errors import CudaFailed, DeviceLost
from tiers.kv.layout import Bytes

Strided = Literal["auto", "batch", "2d"]

TIMED_BYTES: Final = 4 << 20
TIMED_WIDTHS_BYTES: Final = (8 << 10, 32 << 10, 128 << 10)
"""A run of another size counts as the largest of these that is not larger, or as the smallest."""
FASTER_BY: Final = 1.1
"""Each 2D copy is a separate call, so it must be clearly faster."""
SECONDS_MAX: Final = 30.0

_ROWS: Final = 32
_REPEATS: Final = 2
"""The first warms up."""
_TRIAL_WIDTH_BYTES: Final = 256
_kept: list[mmap.mmap] = []
"""Memory in use, or that a device may still write to, since it was lost or did not finish."""


class Calibration:
    """Which ways to copy are used on one device, and why others are not."""

    def __init__(self, driver: Driver, streams: dict[str, CopyStream]) -> None:
        self._driver = driver
        self._streams = streams
        self.batches = False
        self.planes = False
        """Whether 2D copies are correct."""
        self.reasons: list[str] = []
        """Why something is not used, one line each."""
        self.rates: dict[str, dict[int, tuple[float, float]]] = {}
        """By direction and bytes of a run: GB/s in batches and as 2D copies. Empty if not timed."""

    def pays(self, direction: str, width_bytes: int) -> bool:
        """Whether 2D copies of runs of `width_bytes` are faster."""
        rates = self.rates[direction]
        if not rates:
            return False
        nearest = max((one for one in rates if one <= width_bytes), default=min(rates))
        batch, plane = rates[nearest]
        return plane > batch * FASTER_BY

    def describe_rates(self) -> dict[str, Any]:
        """For a log line: GB/s in batches / as 2D copies, by direction and KiB of a run."""
        return {
            name: {
                f"{width >> 10}KiB": f"{batch:.1f}/{plane:.1f}"
                for width, (batch, plane) in rates.items()
            }
            for name, rates in self.rates.items()
        }

    def run(self, strided: Strided) -> None:
        """Test and time everything, then configure the streams.

        The device's context is current. Raises `CudaFailed` if the device itself fails.
        """
        host_bytes = max(4 * _ROWS * _TRIAL_WIDTH_BYTES, TIMED_BYTES if strided == "auto" else 0)
        call, staging = self._driver.call, mmap.mmap(-1, host_bytes)
        self._host: Bytes = np.frombuffer(staging, dtype=np.uint8)
        with contextlib.ExitStack() as undo:
            # The distance between rows is twice their size, hence twice the room.
            self._there = int(call("cuMemAlloc", 2 * host_bytes))
            undo.callback(call, "cuMemFree", self._there)
            call("cuMemHostRegister", self._host.ctypes.data, host_bytes, 1)
            # Registered memory must not be unmapped: the address would be reused.
            _kept.append(staging)
            try:
                self._configure(strided)
            except CudaFailed:
                undo.pop_all()
                raise
            for stream in self._streams.values():
                stream.drain()
            call("cuMemHostUnregister", self._host.ctypes.data)
            _kept.remove(staging)
            del self._host

    def _configure(self, strided: Strided) -> None:
        """Raises `CudaFailed` only for a device that is lost."""
        for stream in self._streams.values():
            stream.batches = True
        self.batches = self._works("batches", Descriptors.pieces)
        for stream in self._streams.values():
            stream.batches = self.batches
        if strided == "batch" or not self._works("2D copies", lambda planes: planes):
            return
        self.planes = True
        for name, stream in self._streams.items():
            stream.plane_pays = lambda _: True
            if strided == "auto":
                self._time(name, stream)
                stream.plane_pays = functools.partial(self.pays, name)

    def _works(self, what: str, parts: Callable[[Descriptors], Descriptors]) -> bool:
        """Whether a way to copy is correct in both directions, compared with a plain copy."""
        size_bytes = _ROWS * _TRIAL_WIDTH_BYTES
        image, dense = self._host[: 2 * size_bytes], self._host[2 * size_bytes : 3 * size_bytes]
        chance = np.random.default_rng(len(what))
        rows = image.reshape(_ROWS, -1)[:, :_TRIAL_WIDTH_BYTES]
        planes = _planes(self._there, dense, _TRIAL_WIDTH_BYTES)
        ends = (self._there, image.ctypes.data, image.size)
        device, host, size = (np.array([one]) for one in ends)
        whole = Descriptors(device, host, size)
        right = True
        try:
            for name, source in (("to_device", dense), ("to_host", image)):
                image[:] = dense[:] = 0
                source[:] = chance.integers(1, 256, source.size, dtype=np.uint8)
                for direction in ("to_device", "to_host"):
                    stream = self._streams[direction]
                    number = stream.submit(parts(planes) if direction == name else whole)
                    stream.wait(number, seconds_max=SECONDS_MAX)
                right = right and np.array_equal(rows.ravel(), dense)
        except CudaFailed as error:
            self._note(f"{what} failed their test", error)
            return False
        if not right:
            self.reasons.append(f"{what} failed their test (the bytes differ)")
        return right

    def _note(self, what: str, error: CudaFailed) -> None:
        """Keep a reason, or raise the error of a lost device."""
        if isinstance(error, DeviceLost) or any(one.lost for one in self._streams.values()):
            raise error
        self.reasons.append(f"{what} ({error})")

    def _time(self, name: str, stream: CopyStream) -> None:
        rates = self.rates[name] = {}
        for width_bytes in TIMED_WIDTHS_BYTES:
            if not stream.takes_planes(width_bytes, 2 * width_bytes):
                continue
            planes = _planes(self._there, self._host, width_bytes)
            try:
                batch = self._rate(stream, planes.pieces())
                rates[width_bytes] = batch, self._rate(stream, planes)
            except CudaFailed as error:
                self._note(f"2D copies {name} could not be timed", error)
                rates.clear()
                return

    def _rate(self, stream: CopyStream, copy: Descriptors) -> float:
        """GB/s by the device's clock, the fastest of some repeats."""
        call = self._driver.call
        milliseconds: list[float] = []
        with contextlib.ExitStack() as stack:
            begun = call("cuEventCreate", 0)
            stack.callback(call, "cuEventDestroy", begun)
            ended = call("cuEventCreate", 0)
            stack.callback(call, "cuEventDestroy", ended)
            # Before the events are destroyed, also after an error.
            stack.callback(stream.drain)
            for _ in range(_REPEATS):
                stream.mark(begun)
                number = stream.submit(copy)
                stream.mark(ended)
                stream.wait(number, seconds_max=SECONDS_MAX)
                stream.wait_mark(ended, seconds_max=SECONDS_MAX)
                milliseconds.append(float(call("cuEventElapsedTime", begun, ended)))
        return TIMED_BYTES / 1e6 / max(min(milliseconds), 1e-6)


def _planes(there: int, memory: Bytes, width_bytes: int) -> Descriptors:
    """All of `memory` as planes whose rows have twice their size as distance on the device."""
    plane_bytes = _ROWS * width_bytes
    at = np.arange(memory.size // plane_bytes) * plane_bytes
    return Descriptors(
        device=there + at * 2,
        host=memory.ctypes.data + at,
        rows=np.full(len(at), _ROWS),
        width_bytes=width_bytes,
        pitch_bytes=2 * width_bytes,
    )
