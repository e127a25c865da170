"""Turns: how many threads that receive and hash compute at a time, and behind whom.

Owns the turns and the threads' niceness. Does not own the threads, nor what they do.

Each thread that has received a piece wants Python's lock, to say so and to have it hashed. Where a
dozen do, more than there are cores, the lock is handed to one that has no core, and the event
loop's thread, which asks for it in the same queue, waits behind it for as long as the others
compute: with sixteen readers on two cores it came 5 ms late once in a hundred times, with two
1.5 ms.
Threads without a turn wait in the kernel, and for nothing else.

Such threads also stand behind the event loop for a core, and behind the engine's. Of the same rank
they kept the loop off both cores for 3.2 to 3.7 ms once in a hundred times while it read at full
rate, and behind it for 1.8 to 2.0 (two cores); with two processes beside that never rest, for 9 to
15 ms, and behind it for 2 to 4.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

T = TypeVar("T")

BEHIND: Final = 10
"""Added to a thread's niceness. It has a tenth of the weight of one that was not stepped back."""
NICENESS_MAX: Final = 19
TURNS_MAX: Final = 8
"""What the lock allows for: more would only wait for it."""

_stepped_back = threading.local()


def lower_priority() -> None:
    """Have the calling thread compute when the event loop and the engine do not, for good.

    What it is given to do next it does so, too: giving niceness back is a privilege. A thread that
    runs an event loop, and has been given a thread's work, stays where it is.
    """
    if getattr(_stepped_back, "done", False) or _runs_a_loop():
        return
    _stepped_back.done = True
    thread = threading.get_native_id()
    # A sandbox that forbids it has a loop that comes later, and nothing else.
    with contextlib.suppress(OSError):
        niceness = os.getpriority(os.PRIO_PROCESS, thread)
        os.setpriority(os.PRIO_PROCESS, thread, min(niceness + BEHIND, NICENESS_MAX))


class OwnThreads:
    """Threads for one kind of work, of the rank that the process has: no other steps them back.

    Args:
        count: as many calls as run at a time; more wait in the order of their coming.
        name: what the threads are called.
    """

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)

    async def run_sync(
        self, work: Callable[[], T], *, limiter: anyio.CapacityLimiter, abandon_on_cancel: bool
    ) -> T:
        """As `anyio.to_thread.run_sync`, in one of these."""
        async with limiter:
            ended = asyncio.get_running_loop().run_in_executor(self._threads, work)
            with anyio.CancelScope(shield=not abandon_on_cancel):
                await asyncio.wait([ended])
            return ended.result()

    def close(self) -> None:
        """Let the threads end, each with what it does."""
        self._threads.shutdown(wait=False)


def _runs_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class ThreadTurns:
    """A context manager that a thread enters to compute. At most `count` are inside."""

    def __init__(self, count: int | None = None) -> None:
        if count is None:
            # As many as there are cores: with one more the event loop came later.
            count = max(2, min(len(os.sched_getaffinity(0)), TURNS_MAX))
        # Not threading.Semaphore: it is made of Python code, which would wait for the lock, too.
        self._free: SimpleQueue[None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def __enter__(self) -> None:
        self._free.get()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free.put(None)
