"""The fence page of a worker on a GPU: its stream writes the word that marks finished work.

Owns the registration of the page (`tiers/kv/fence.py`) with the driver, and its pending writes.
A write is queued on the engine's own stream (`cuStreamWriteValue64`), so it happens after all work
queued before it: a store's data has been computed, and all earlier accesses to the blocks of a load
are over. Nothing on the GPU waits for another process.

Invariant: a page is unregistered and unmapped only when no write to it is pending. A device that
writes to an unmapped page destroys the engine's context. If that cannot be known, the page stays
until the process ends.
"""

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Final

from tiers.cuda.driver import check, driver
from tiers.cuda.errors import CudaFailed
from tiers.kv.fence import PAGE_BYTES, WorkerFence

_PORTABLE_AND_MAPPED: Final = 3
_kept: "list[StreamFence]" = []
"""Closed pages that a stream may still write to."""


class StreamFence(WorkerFence):
    """A page that a stream of a CUDA context writes. `stream` is called at each signal."""

    def __init__(self, context: Any, stream: Callable[[], int]) -> None:
        super().__init__()
        self._context = context
        self._stream = stream
        self._signaled = 0
        self._registered = False
        self._device_address = 0
        self._write: Any = None

    def signal(self, sequence: int) -> None:
        """Mark step `sequence` as finished once all work queued so far is.

        Called in the engine's thread. Raises `CudaFailed`; the step is not marked then.
        """
        if not self._device_address:
            self._register()
        code = self._write(self._stream(), self._device_address, sequence, 0)
        check("cuStreamWriteValue64", code)
        self._signaled = sequence

    @property
    def quiet(self) -> bool:
        """Whether no write is pending."""
        return self.done >= self._signaled

    def _register(self) -> None:
        # At the first signal: a page of a failed attach is never registered.
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
        """Unregister, unmap and close; a page with a pending write is kept instead."""
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
