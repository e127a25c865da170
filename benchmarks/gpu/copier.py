"""The sidecar's copies without the sidecar: `tiers/cuda` on a worker's memory, timed.

For a child process, which has a context of its own on the device as the sidecar does. Each timing
of a plain copy is one `cuMemcpyAsync` of as many bytes, in the same direction, of the same pinned
memory.
"""

from __future__ import annotations

import concurrent.futures
import mmap
import tempfile
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from sidecar.config.sections import PREFAULT_THREADS_MAX
from tiers.cuda.device import Device, PinnedMemory
from tiers.cuda.driver import check, driver
from tiers.cuda.errors import NOT_READY
from tiers.kv.mapping import map_shared
from tiers.pool.file import Backing
from tiers.pool.numa import Placement

if TYPE_CHECKING:
    import numpy.typing as npt

    from sidecar.protocol import Memory
    from tiers.kv.layout import KVLayout

THREADS: Final = 2
"""For each direction. The sidecar has `copy.threads` of them for both."""
INFLIGHT_BYTES: Final = 32 << 20
"""The default of `gpu.loads_inflight_max` and `gpu.stores_inflight_max`."""
_POPULATE: Final = 0x8000  # MAP_POPULATE
_SEED_BYTES: Final = 16 << 20


class Copier:
    """One device, a pinned pool of `pool_bytes`, and a worker's memory mapped."""

    def __init__(self, shared: Memory, layout: KVLayout, pool_bytes: int) -> None:
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _POPULATE
        self._pool: npt.NDArray[np.uint8] = np.frombuffer(
            mmap.mmap(-1, pool_bytes, flags), dtype=np.uint8
        )
        # Not zeros: a link, a memory or a check may treat these otherwise.
        seed = np.random.default_rng(1).integers(0, 256, _SEED_BYTES, dtype=np.uint8)
        for start in range(0, pool_bytes, _SEED_BYTES):
            part = self._pool[start : start + _SEED_BYTES]
            part[:] = seed[: len(part)]
        self._device = Device(
            driver(),
            shared.device_uuid,
            to_device_bytes_max=INFLIGHT_BYTES,
            to_host_bytes_max=INFLIGHT_BYTES,
        )
        self._device.bind()
        begun = time.perf_counter()
        self._pins = PinnedMemory(self._device.driver, self._pool)
        self.pin_seconds = time.perf_counter() - begun
        self._memory = self._device.import_ipc(shared.handle, layout, self._pins)
        self._plain: tuple[int, Any, Any] | None = None
        self._shared: tuple[npt.NDArray[np.uint8], PinnedMemory] | None = None
        self._threads = concurrent.futures.ThreadPoolExecutor(2 * THREADS)

    def batches(self) -> bool:
        """Whether copies go out in batches here."""
        return self._device.calibration.batches

    def ways(self) -> str:
        """What the self-test of the device found of batches and 2D copies, in words."""
        found = self._device.calibration
        rates = [
            f"{direction} {size_bytes >> 10} KiB: {batch:.1f} GB/s in batches, {plane:.1f} in 2D"
            for direction, sizes in found.rates.items()
            for size_bytes, (batch, plane) in sorted(sizes.items())
        ]
        return "; ".join([*found.reasons, *rates]) or "nothing was timed"

    def _pinned_file(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Pinned memory of a file in /dev/shm, with its pages allocated as those of a pool."""
        if self._shared is None:
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                file.truncate(num_bytes)
                _, memory = map_shared(file.fileno(), num_bytes)
            assert Backing(True, PREFAULT_THREADS_MAX, Placement()).populate(memory)
            self._device.bind()
            self._shared = memory, PinnedMemory(self._device.driver, memory)
        return self._shared[0]

    def plain(self, num_bytes: int, *, to_device: bool, shared: bool = False) -> float:
        """Seconds of one `cuMemcpyAsync`; `shared`: with memory as the sidecar's pool has it."""
        cuda = self._device.driver
        self._device.bind()
        if self._plain is None:
            stream = cuda.call("cuStreamCreate", 1)
            self._plain = (int(cuda.call("cuMemAlloc", num_bytes)), stream, cuda.call(
                "cuEventCreate", 2
            ))  # fmt: skip
        there, stream, event = self._plain
        memory = self._pinned_file(num_bytes) if shared else self._pool
        here = memory.ctypes.data
        target, source = (there, here) if to_device else (here, there)
        copy, query = cuda.entry("cuMemcpyAsync"), cuda.entry("cuEventQuery")
        begun = time.perf_counter()
        check("cuMemcpyAsync", copy(target, source, num_bytes, int(stream)))
        cuda.call("cuEventRecord", event, stream)
        while (code := query(int(event))) == NOT_READY:
            if time.perf_counter() - begun > 60.0:
                raise TimeoutError(f"a plain copy of {num_bytes} bytes never ended")
        check("cuEventQuery", code)
        return time.perf_counter() - begun

    def ours(
        self,
        layout: KVLayout,
        blocks_per_chunk: int,
        num_bytes: int,
        *,
        to_device: bool,
        to_host: bool,
    ) -> float:
        """Seconds of copies of blocks, chunk by chunk; with both directions, twice the bytes."""
        part = self._memory.part(layout)
        chunk_bytes = layout.chunk(blocks_per_chunk).payload_bytes(blocks_per_chunk)
        count = num_bytes // chunk_bytes
        # Every other block, in any order: none follows on another.
        blocks = np.random.default_rng(count).permutation(layout.num_blocks // 2)
        blocks = 2 * blocks[: count * blocks_per_chunk].reshape(count, blocks_per_chunk)
        chunks = list(enumerate(blocks.astype(np.int64)))

        def run(mine: list[Any], copy: Any, first_byte: int) -> None:
            ahead: Any = None
            for number, ids in mine:
                start = first_byte + number * chunk_bytes
                flight = copy(ids, self._pool[start : start + chunk_bytes])
                if ahead is not None:
                    ahead.finish(_look_away)
                ahead = flight
            if ahead is not None:
                ahead.finish(_look_away)

        # Both directions at once use different parts of the pool, if it has them.
        apart = num_bytes if self._pool.size >= 2 * num_bytes else 0
        ways = [(part.scatter, apart)] * to_device + [(part.gather, 0)] * to_host
        begun = time.perf_counter()
        running = [
            self._threads.submit(run, chunks[thread::THREADS], copy, first_byte)
            for copy, first_byte in ways
            for thread in range(THREADS)
        ]
        for one in running:
            one.result(timeout=120.0)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Give everything back."""
        self._threads.shutdown()
        self._memory.close()
        self._device.bind()
        if self._plain is not None:
            there, stream, event = self._plain
            cuda = self._device.driver
            cuda.call("cuEventDestroy", event)
            cuda.call("cuStreamDestroy", stream)
            cuda.call("cuMemFree", there)
        if self._shared is not None:
            self._shared[1].close()
        self._pins.close()
        self._device.close()


def _look_away(piece: object) -> None:
    """Nobody hashes it: the copies alone are timed here."""


copier: Copier


def start(**named: Any) -> float:
    """Make this process's copier; seconds that pinning its pool took."""
    global copier
    copier = Copier(**named)
    return copier.pin_seconds
