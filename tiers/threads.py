"""Threads that receive, hash and copy: priority, how many compute, and what if none can start.

With a dozen computing threads, more than there are cores, the GIL is often handed to a thread
without a core, and the event loop waits in the same queue: with sixteen readers on two cores it was
5 ms late once in a hundred times, with two 1.5 ms. Threads over the limit wait in the kernel
instead. At the priority of the event loop such threads delayed it by 3.2 to 3.7 ms once in a
hundred times while it read at full rate, and at a lower one by 1.8 to 2.0 (two cores).
"""

import asyncio
import contextlib
import contextvars
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Executor
from queue import SimpleQueue
from typing import Final, Generic, TypeVar

import anyio
import anyio.abc

W = TypeVar("W")
R = TypeVar("R")

NICENESS_ADDED: Final = 10
"""Such a thread gets a tenth of the weight of one with the process's niceness."""
NICENESS_MAX: Final = 19
COMPUTING_MAX: Final = 8
"""More threads would only wait for the GIL."""
_NOT_STARTED: Final = "can't start new thread"

_lowered = threading.local()


class NoThread(OSError):
    """A thread cannot be started: there are as many as there may be."""


@contextlib.contextmanager
def starting_threads() -> Generator[None]:
    """Raise `NoThread` where a thread cannot be started.

    CPython raises a RuntimeError. Callers expect that of bugs, and an OSError of a full machine.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != _NOT_STARTED:
            raise
        raise NoThread(
            errno.EAGAIN,
            "no thread can be started; raise the limit of processes (TasksMax= of the systemd "
            "unit, pids.max of the container's cgroup, ulimit -u of the user)",
        ) from error


def submit_or_do(threads: Executor, work: Callable[[], None]) -> None:
    """Have one of `threads` do `work`; where none is idle and none can be started, do it here."""
    left = [work]

    def once() -> None:
        if left:
            left.pop()()

    try:
        with starting_threads():
            threads.submit(once)
    except NoThread:
        # Python leaves it in the queue, for the next thread that starts.
        once()


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


class DedicatedThreads(Generic[W, R]):
    """Threads for one kind of work, which take it themselves, with the priority of the process.

    Args:
        count: number of threads.
        name: what their names begin with.
        take: returns the next work, None where there is none any more. Called in the threads.
        carry_out: does it, in the same thread. It must not raise.
        ended: gets what ended since its last call, oldest first, on the event loop. A turn of the
            loop for each would cost more than a small copy does.
    """

    def __init__(
        self,
        count: int,
        name: str,
        *,
        take: Callable[[], W | None],
        carry_out: Callable[[W], R],
        ended: Callable[[list[tuple[W, R]]], None],
    ) -> None:
        self._name = name
        self._take = take
        self._carry_out = carry_out
        self._report = ended
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._running: list[tuple[float, W] | None] = [None] * count
        self._ended: deque[tuple[W, R]] = deque()
        self._reporting = False
        """Whether a turn of the loop for what ended is due."""
        self._closing = False

    @property
    def running(self) -> list[tuple[float, W] | None]:
        """What each thread does, and since when (monotonic seconds); None for one that is free."""
        return list(self._running)

    def wake(self, count: int = 1) -> None:
        """Say that there is work for `count` calls of `take`."""
        for _ in range(count):
            self._woken.put(None)

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Work until cancelled. Work that runs then ends, and is reported, before this returns.

        It has started once all threads have. Raises `NoThread` before, and what `ended` raised.
        """
        loop = asyncio.get_running_loop()
        # anyio finds the loop by it, and a thread has none.
        context = contextvars.copy_context()
        broken: asyncio.Future[None] = loop.create_future()

        def report() -> None:
            # In this order: a thread adds to `_ended` before it looks at `_reporting`.
            self._reporting = False
            ended: list[tuple[W, R]] = []
            while self._ended:
                ended.append(self._ended.popleft())
            try:
                if ended:
                    self._report(ended)
            except BaseException as error:
                if broken.done():
                    raise
                broken.set_exception(error)

        def work(number: int) -> None:
            while True:
                self._woken.get()
                if self._closing:
                    return
                taken = self._take()
                if taken is None:
                    continue
                self._running[number] = (time.monotonic(), taken)
                done = (taken, self._carry_out(taken))
                # An idle thread keeps no reference to what it worked on.
                self._running[number] = taken = None
                self._ended.append(done)
                del done
                if not self._reporting:
                    self._reporting = True
                    loop.call_soon_threadsafe(report, context=context)

        threads = [
            threading.Thread(target=work, args=(number,), name=f"{self._name}-{number}")
            for number in range(len(self._running))
        ]
        try:
            with starting_threads():
                for thread in threads:
                    thread.start()
            task_status.started()
            await broken
        finally:
            self._closing = True
            self.wake(len(threads))
            while any(thread.is_alive() for thread in threads):
                # The first cancel is raised again; another adds nothing.
                with anyio.CancelScope(shield=True):
                    with contextlib.suppress(anyio.get_cancelled_exc_class()):
                        await anyio.sleep(0.001)
            report()


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
