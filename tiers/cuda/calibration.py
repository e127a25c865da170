"""Calibration of a device's copies: tested and timed once, before the first worker is served.

Owns the test of batches and of 2D copies with a pattern in both directions, and the timing of both
for runs at a constant distance, as in a KV cache whose outermost axis is the layer. Which of the
two is faster differs between devices, drivers and directions, so it is measured on the device in
use. Does not own the copy streams that it configures.

Invariants: a way to copy that failed its test is not used, and the reason is reported; a device
that is lost meanwhile, or does not finish, is a `CudaFailed`, and memory that it may still write to
is never freed; otherwise nothing is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from tiers.cuda.descriptors import Descriptors, Planes
from tiers.cuda.errors import CudaFailed, DeviceLost

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from tiers.cuda.copy_stream import CopyStream
    from tiers.cuda.driver import Driver

    Bytes = npt.NDArray[np.uint8]

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
"""Memory that a device may still write to, since it was lost or did not finish."""


@dataclass(slots=True)
class CalibrationResult:
    """Which ways to copy are used, and why others are not."""

    batches: bool = False
    planes: bool = False
    """Whether 2D copies are correct."""
    reasons: list[str] = field(default_factory=list[str])
    """Why something is not used, one line each."""
    rates: dict[str, dict[int, tuple[float, float]]] = field(
        default_factory=dict[str, dict[int, tuple[float, float]]]
    )
    """By direction and bytes of a run: GB/s in batches and as 2D copies. Empty if not timed."""

    def pays(self, direction: str) -> Callable[[int], bool]:
        """A function of the bytes of a run: whether 2D copies are faster."""
        rates = self.rates[direction]

        def answer(width_bytes: int) -> bool:
            if not rates:
                return False
            nearest = max((one for one in rates if one <= width_bytes), default=min(rates))
            batch, plane = rates[nearest]
            return plane > batch * FASTER_BY

        return answer


class Calibration:
    """Of one device, whose context is current. Raises `CudaFailed` if the device itself fails."""

    def __init__(self, driver: Driver, streams: dict[str, CopyStream], ordinal: int) -> None:
        self._driver = driver
        self._streams = streams
        self._pitch_bytes_max = driver.attribute("MAX_PITCH", ordinal)

    def run(self, strided: Strided) -> CalibrationResult:
        """Test and time everything, then configure the streams."""
        timed_bytes = TIMED_BYTES if strided == "auto" else 0
        host_bytes = max(4 * _ROWS * _TRIAL_WIDTH_BYTES, timed_bytes)
        found = CalibrationResult()
        # The distance between rows is twice their size, hence twice the room.
        there = int(self._driver.call("cuMemAlloc", 2 * host_bytes))
        staging = mmap.mmap(-1, host_bytes)
        host: Bytes = np.frombuffer(staging, dtype=np.uint8)
        try:
            self._driver.call("cuMemHostRegister", host.ctypes.data, host_bytes, 1)
        except CudaFailed:
            self._driver.call("cuMemFree", there)
            raise
        try:
            self._try(found, there, host, strided)
            if strided == "auto" and found.planes:
                self._time(found, there, host)
            self._choose(found, strided)
        except CudaFailed as error:
            if self._lost or isinstance(error, DeviceLost):
                _kept.append(staging)
                raise
            self._give_back(there, host, staging)
            raise
        self._give_back(there, host, staging)
        return found

    @property
    def _lost(self) -> bool:
        return any(stream.lost is not None for stream in self._streams.values())

    def _give_back(self, there: int, host: Bytes, staging: mmap.mmap) -> None:
        for stream in self._streams.values():
            stream.drain()
        try:
            self._driver.call("cuMemHostUnregister", host.ctypes.data)
        except CudaFailed:
            # Registered memory must not be unmapped: the address would be reused.
            _kept.append(staging)
            raise
        finally:
            self._driver.call("cuMemFree", there)

    # --- right or wrong ------------------------------------------------------------------------

    def _try(self, found: CalibrationResult, there: int, host: Bytes, strided: Strided) -> None:
        for stream in self._streams.values():
            stream.no_planes()
        found.batches = self._tried(found, "batches", self._pieces, there, host)
        if not found.batches:
            for stream in self._streams.values():
                stream.use_batches(on=False)
        if strided != "batch":
            found.planes = self._tried(found, "2D copies", self._planes, there, host)
        if not found.planes:
            for stream in self._streams.values():
                stream.no_planes()

    def _tried(
        self,
        found: CalibrationResult,
        what: str,
        submit: Callable[[CopyStream, int, Bytes], int],
        there: int,
        host: Bytes,
    ) -> bool:
        """Whether a way to copy is correct in both directions, compared with a plain copy."""
        size_bytes = _ROWS * _TRIAL_WIDTH_BYTES
        image, dense = host[: 2 * size_bytes], host[2 * size_bytes : 3 * size_bytes]
        chance = np.random.default_rng(len(what))
        rows = image.reshape(_ROWS, -1)[:, :_TRIAL_WIDTH_BYTES]
        whole = Descriptors(*(np.array([one], dtype=np.uint64) for one in (
            there, image.ctypes.data, image.size
        )))  # fmt: skip
        right = True
        try:
            for name, source in (("to_device", dense), ("to_host", image)):
                image[:] = dense[:] = 0
                source[:] = chance.integers(1, 256, source.size, dtype=np.uint8)
                for direction in ("to_device", "to_host"):
                    stream = self._streams[direction]
                    number = (
                        submit(stream, there, dense) if direction == name else stream.submit(whole)
                    )
                    stream.wait(number, seconds_max=SECONDS_MAX)
                right = right and np.array_equal(rows.ravel(), dense)
        except CudaFailed as error:
            if self._lost or isinstance(error, DeviceLost):
                raise
            found.reasons.append(f"{what} failed their test ({error})")
            return False
        if not right:
            found.reasons.append(f"{what} failed their test (the bytes differ)")
        return right

    def _pieces(self, stream: CopyStream, there: int, memory: Bytes) -> int:
        stream.use_batches(on=True)
        return stream.submit(_planes(there, memory, _TRIAL_WIDTH_BYTES).pieces())

    def _planes(self, stream: CopyStream, there: int, memory: Bytes) -> int:
        stream.use_planes(_always, pitch_bytes_max=self._pitch_bytes_max)
        return stream.submit_planes(_planes(there, memory, _TRIAL_WIDTH_BYTES))

    # --- slow or fast --------------------------------------------------------------------------

    def _time(self, found: CalibrationResult, there: int, host: Bytes) -> None:
        for name, stream in self._streams.items():
            rates = found.rates[name] = {}
            for width_bytes in TIMED_WIDTHS_BYTES:
                if not stream.takes_planes(width_bytes, 2 * width_bytes):
                    continue
                planes = _planes(there, host, width_bytes)
                pieces = planes.pieces()
                try:
                    rates[width_bytes] = (
                        self._rate(stream, functools.partial(stream.submit, pieces)),
                        self._rate(stream, functools.partial(stream.submit_planes, planes)),
                    )
                except CudaFailed as error:
                    if self._lost or isinstance(error, DeviceLost):
                        raise
                    found.reasons.append(f"2D copies {name} could not be timed ({error})")
                    rates.clear()
                    break

    def _rate(self, stream: CopyStream, submit: Callable[[], int]) -> float:
        """GB/s by the device's clock, the fastest of some repeats."""
        milliseconds: list[float] = []
        with contextlib.ExitStack() as stack:
            begun, ended = (self._event(stack) for _ in range(2))
            # Before the events are destroyed, also after an error.
            stack.callback(stream.drain)
            for _ in range(_REPEATS):
                stream.mark(begun)
                number = submit()
                stream.mark(ended)
                stream.wait(number, seconds_max=SECONDS_MAX)
                stream.wait_mark(ended, seconds_max=SECONDS_MAX)
                milliseconds.append(float(self._driver.call("cuEventElapsedTime", begun, ended)))
        return TIMED_BYTES / 1e6 / max(min(milliseconds), 1e-6)

    def _event(self, stack: contextlib.ExitStack) -> Any:
        event = self._driver.call("cuEventCreate", 0)
        stack.callback(self._driver.call, "cuEventDestroy", event)
        return event

    def _choose(self, found: CalibrationResult, strided: Strided) -> None:
        for name, stream in self._streams.items():
            if not found.planes:
                continue
            pays = found.pays(name) if strided == "auto" else _always
            stream.use_planes(pays, pitch_bytes_max=self._pitch_bytes_max)


def _always(width_bytes: int) -> bool:  # noqa: ARG001 (as every such answer)
    return True


def _planes(there: int, memory: Bytes, width_bytes: int) -> Planes:
    """All of `memory` as planes whose rows have twice their size as distance on the device."""
    plane_bytes = _ROWS * width_bytes
    at = np.arange(memory.size // plane_bytes, dtype=np.uint64) * np.uint64(plane_bytes)
    return Planes(
        device=np.uint64(there) + at * np.uint64(2),
        host=np.uint64(memory.ctypes.data) + at,
        rows=np.full(len(at), _ROWS, dtype=np.uint64),
        width_bytes=width_bytes,
        pitch_bytes=2 * width_bytes,
    )


def describe_rates(found: CalibrationResult) -> dict[str, Any]:
    """The rates for a log line: GB/s in batches / as 2D copies, by direction and KiB of a run."""
    return {
        name: {
            f"{width >> 10}KiB": f"{batch:.1f}/{plane:.1f}"
            for width, (batch, plane) in rates.items()
        }
        for name, rates in found.rates.items()
    }
