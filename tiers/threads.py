"""Threads that receive, hash and copy: their priority, and how many compute at a time.

With a dozen computing threads, more than there are cores, the GIL is often handed to a thread
without a core, and the event loop waits in the same queue: with sixteen readers on two cores it was
5 ms late once in a hundred times, with two 1.5 ms. Threads over the limit wait in the kernel
instead. At the priority of the event loop such threads delayed it by 3.2 to 3.7 ms once in a
hundred times while it read at full rate, and at a lower one by 1.8 to 2.0 (two cores).
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final, TypeVar

import anyio

T = TypeVar("T")

NICENESS_ADDED: Final = 10
"""Such a thread gets a tenth of the weight of one with the process's niceness."""
NICENESS_MAX: Final = 19
COMPUTING_MAX: Final = 8
"""More threads would only wait for the GIL."""

_lowered = threading.local()


def lower_priority() -> None:
    """Make the calling thread yield to the event loop and the engine, for good.

    It keeps the priority for later work: lowering niceness is a privilege. Does nothing in a thread
    that runs an event loop.
    """
    if getattr(_lowered, "done", False):
        return
    with contextlib.suppress(RuntimeError):
        asyncio.get_running_loop()
        return
    _lowered.done = True
    thread = threading.get_native_id()
    # A sandbox may forbid it; then the event loop is later.
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness + NICENESS_ADDED, NICENESS_MAX))


class DedicatedThreads:
    """Threads for one kind of work, with the priority of the process: no other work lowers it."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run_sync(
        self, work: Callable[[], T], *, limiter: anyio.CapacityLimiter, abandon_on_cancel: bool
    ) -> T:
        """As `anyio.to_thread.run_sync`."""
        async with limiter:
            ended = asyncio.get_running_loop().run_in_executor(self._threads, work)
            with anyio.CancelScope(shield=not abandon_on_cancel):
                await asyncio.wait([ended])
            return ended.result()

    def close(self) -> None:
        """End the threads when their current work is done."""
        self._threads.shutdown(wait=False)


class ComputeLimiter:
    """A context manager for threads: at most one per core, `COMPUTING_MAX` in all, are inside."""

    def __init__(self) -> None:
        # One more than there are cores made the event loop later.
        count = max(2, min(len(os.sched_getaffinity(0)), COMPUTING_MAX))
        # Not threading.Semaphore: it is Python code, which would wait for the GIL, too.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(self, *_: object) -> None:
        self._free.put(None)
