"""A machine that has as many threads as there may be, so that Python can start no other."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any
from unittest import mock

from anyio._backends._asyncio import WorkerThread

if TYPE_CHECKING:
    from collections.abc import Generator

ANYIO = "AnyIO worker thread"
"""The name of the threads of `anyio.to_thread`."""


@contextlib.contextmanager
def no_thread(name: str, *, after: int = 0) -> Generator[list[str]]:
    """While this lasts no thread can be started whose name begins so, after this many.

    Gives the names of those that could not.
    """
    start = threading.Thread.start
    refused: list[str] = []
    left = iter(range(after))

    def limited(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and next(left, None) is None:
            refused.append(thread.name)
            # As CPython, for clone(2) with EAGAIN.
            raise RuntimeError("can't start new thread")
        start(thread)

    with mock.patch.object(threading.Thread, "start", limited):
        yield refused


@contextlib.contextmanager
def none_idle() -> Generator[None]:
    """While this lasts, each piece of work of `anyio.to_thread` needs a thread of its own."""
    make = WorkerThread.__init__

    def alone(thread: WorkerThread, *args: Any) -> None:
        make(thread, *args)
        thread.idle_workers = deque()

    with mock.patch.object(WorkerThread, "__init__", alone):
        yield
