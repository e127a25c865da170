"""The fence page of a worker on a GPU: its stream writes the word that says that work is done.

Owns the registration of the page with the driver, and which writes are still on their way. The page
itself and what its words mean are `tiers/kv/fence.py`.

A write is queued on the engine's own stream (`cuStreamWriteValue64`), so it happens after all work
that was queued before it: what a store reads has been computed, and whatever still touched the
blocks that a load will fill is over. Nothing waits on the GPU for another process.

Invariant: a page is unregistered and unmapped only when no write to it is on its way. A device that
writes to a page that is gone takes the engine's context with it. Where that cannot be known, the
page stays until the process ends.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from tiers.cuda.driver import check, driver
from tiers.cuda.errors import CudaFailed
from tiers.kv.fence import PAGE_BYTES, WorkerFence

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

_PORTABLE_AND_MAPPED: Final = 3
_kept: list[StreamFence] = []
"""Pages that a stream may still write to, though nobody needs them any more."""


class StreamFence(WorkerFence):
    """A page that a stream writes.

    Args:
        context: the CUDA context of the stream.
        stream: the stream that is current now, asked for at each signal.
    """

    def __init__(self, context: Any, stream: Callable[[], int]) -> None:
        super().__init__()
        self._context = context
        self._stream = stream
        self._signaled = 0
        self._registered = False
        self._device_address = 0
        self._write: Any = None

    def signal(self, sequence: int) -> None:
        """Say that step `sequence` is finished, once the work queued up to now is.

        Raises `CudaFailed`; then it will not be said. Called in the engine's thread.
        """
        if not self._device_address:
            self._register()
        code = self._write(self._stream(), self._device_address, sequence, 0)
        check("cuStreamWriteValue64", code)
        self._signaled = sequence

    @property
    def quiet(self) -> bool:
        """Whether no write is on its way."""
        return self.done >= self._signaled

    def _register(self) -> None:
        # Only now: a page whose attempt to attach failed never meets the driver.
        cuda = driver()
        self._write = cuda.entry("cuStreamWriteValue64")
        with self._bound():
            if not self._registered:
                cuda.call("cuMemHostRegister", self.address, PAGE_BYTES, _PORTABLE_AND_MAPPED)
                self._registered = True
            self._device_address = int(cuda.call("cuMemHostGetDevicePointer", self.address, 0))

    @contextlib.contextmanager
    def _bound(self) -> Generator[None]:
        cuda = driver()
        cuda.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            cuda.call("cuCtxPopCurrent")

    def close(self) -> None:
        """Unregister, unmap and close; a page that may still be written is kept instead."""
        if self._registered:
            if not self.quiet:
                _kept.append(self)
                return
            try:
                with self._bound():
                    driver().call("cuMemHostUnregister", self.address)
            except CudaFailed:
                _kept.append(self)
                return
            self._registered = False
            self._device_address = 0
        super().close()
