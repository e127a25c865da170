"""The pinned host pool: registered with the driver, so that copy engines access it directly.

Owns the registrations, in chunks: one call for hundreds of gigabytes would block the driver for
many seconds, and is all or nothing. Chunks are a grid from the pool's start; slots of several sizes
share the pool, so a slot may cross a border of the grid, and a copy must not (`split_at_grid`).

Invariants: all of the memory is registered, or none of it; registrations are PORTABLE, so they
are valid for every device of this process; they end before the memory is unmapped.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from tiers.cuda.errors import CudaFailed

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tiers.cuda.driver import Driver

CHUNK_BYTES: Final = 1 << 30
_PORTABLE: Final = 1


class PinnedMemory:
    """Registers `memory` with the driver. A context must be current here and in `close`."""

    def __init__(
        self, driver: Driver, memory: npt.NDArray[np.uint8], *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
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
