"""What a client of a store gives to a tier: names and bytes, and when memory is free.

Owns the protocol `StoreClient`, the lines of a listing, work in threads that is waited for, and the
checks of an object's size. Clients are `folder.py`, `obstore_client.py` (S3, GCS, Azure) and
`fsspec_client.py` (all others). Does not own names, checks of arguments or the meaning of errors: a
client raises whatever the system or its library raises, and `object_tier.py` translates it.

Invariants of every client:

* When `put` or `get` has returned or raised, cancelled or not, nothing touches the caller's memory
  any more. Cancelling stops the wait for a server at once, and the wait for a thread only when the
  thread has ended.
* A name exists with all its bytes, or does not exist.
* A read costs one request, and at most the memory of the caller's slot plus one byte, and its copy
  in the client.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from tiers.errors import ImageTruncated
from tiers.threads import DedicatedThreads, lower_priority

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

Seen = Callable[[int, int, int], None]
"""Called by a read as `seen(size_bytes, first, last)`: bytes `first` to `last` of an object of
`size_bytes` are in the slot, and most likely still in this core's cache.

Calls come in order, from worker threads, one at a time; `first` 0 starts over. Before another
attempt a read calls `seen(0, 0, 0)`, which revokes all earlier calls. It raises nothing. A read may
report a part of the object, or nothing. A wrapper that changes bytes must not pass it on.
"""

PIECE_BYTES: Final = 256 * 1024
"""What stays in a core's cache after a copy, while other reads take turns on the core."""


class Found(NamedTuple):
    """One line of a listing."""

    name: str
    """Relative to the root. A folder ends with a slash (in listings of one level)."""
    size_bytes: int
    """0 for a folder."""
    modified_seconds: float
    """Seconds since 1970 by the store's clock; 0 if the store does not say."""


Listing = list[Found]


class StoreClient(Protocol):
    """Names and bytes. Names are relative to the client's root."""

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        """Store all of `image`.

        With `create`, raises `FileExistsError` (or the library's equivalent) if the name is taken,
        and `NotImplementedError` or the like if the store cannot tell.
        """
        ...

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """Fill the start of `into`; the size in bytes. Raises `ImageTruncated`."""
        ...

    async def find(
        self, folder: str, *, start_after: str, deep: bool, names_max: int | None
    ) -> Listing:
        """Objects below `folder` ("" for all) whose names sort after `start_after`.

        Not `deep`: the objects in the folder itself, and its folders. If there are more than
        `names_max`, the first `names_max` in order are enough.
        """
        ...

    async def move(self, name: str, target: str) -> None:
        """Rename, replacing what is there."""
        ...

    async def remove(self, names: Sequence[str]) -> None:
        """Delete objects. A missing one is no error."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


class _ThreadWork:
    """One call in a worker thread, and whether it may still touch memory."""

    def __init__(self, *, lowered: bool = True) -> None:
        self._lock = threading.Lock()
        self._lowered = lowered
        self._started = False
        self._abandoned = False
        self.ended = False

    def run(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._abandoned:
                raise RuntimeError("work was abandoned before its thread began")
            self._started = True
        if self._lowered:
            lower_priority()
        try:
            return work()
        finally:
            self.ended = True

    def abandon(self) -> bool:
        """Keep the work from starting. False if it has started and has not ended."""
        with self._lock:
            self._abandoned = True
            return not self._started or self.ended


async def run_to_end(
    work: Callable[[], T],
    limiter: anyio.CapacityLimiter,
    *,
    abort: Callable[[], None] | None = None,
    threads: DedicatedThreads | None = None,
) -> T:
    """Run `work` in a worker thread. Returns after it has ended, even if cancelled.

    `abort` makes waiting work end soon. It is called after a cancel, on the loop, until the work
    has ended; without it a cancel waits as long as the work takes. Without `threads` the work has a
    lower priority than the event loop (`tiers.threads.lower_priority`).

    anyio shields the wait from its own cancel scopes, but a bare `Task.cancel()` (asyncio itself
    on SIGINT) passes that shield; so after any exception the thread is asked.
    """
    thread = _ThreadWork(lowered=threads is None)
    run_sync = anyio.to_thread.run_sync if threads is None else threads.run_sync
    try:
        return await run_sync(
            lambda: thread.run(work), limiter=limiter, abandon_on_cancel=abort is not None
        )
    except BaseException:
        while not thread.abandon():
            if abort is not None:
                abort()
            # The first cancel is raised again below; another adds nothing.
            with anyio.CancelScope(shield=True):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(0.001)
        raise


class AbandonableThreads:
    """Work in threads that use no memory of the caller, so that a cancel does not wait for it.

    A mount whose server is gone blocks a thread for any time; the caller goes on at its deadline.
    Python waits for such threads when it ends: a process that must not wait ends by `os._exit`.

    Args:
        left_max: threads that may be abandoned; beyond it `run` raises `TimeoutError` at once.
    """

    def __init__(self, left_max: int) -> None:
        self._left_max = left_max
        self._left: list[_ThreadWork] = []
        self._limiter = anyio.CapacityLimiter(left_max)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. After a cancel it may go on, and its result is dropped."""
        async with self._limiter:
            self._left = [one for one in self._left if not one.ended]
            if len(self._left) >= self._left_max:
                raise TimeoutError(
                    f"{len(self._left)} listings have not returned: is this a mount whose server "
                    "is gone?"
                )
            thread = _ThreadWork()
            try:
                # A limiter for each: abandoned threads would use up a shared one.
                return await anyio.to_thread.run_sync(
                    thread.run, work, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True
                )
            except BaseException:
                if not thread.abandon():
                    self._left.append(thread)
                raise


def fill(found: Bytes | bytes, into: Bytes, seen: Seen | None) -> int:
    """Copy a whole object into a slot; its size in bytes. Raises `ImageTruncated`."""
    body = np.frombuffer(found, dtype=np.uint8)
    size_bytes = body.nbytes
    check_size(size_bytes, into.nbytes)
    step = size_bytes if seen is None else PIECE_BYTES
    for first in range(0, size_bytes, step):
        last = min(first + step, size_bytes)
        # np.copyto releases the GIL; assigning through a memoryview holds it for the whole copy.
        np.copyto(into[first:last], body[first:last])
        if seen is not None:
            seen(size_bytes, first, last)
    return size_bytes


def check_size(size_bytes: int, size_bytes_max: int) -> None:
    """Raise `ImageTruncated` for an object that is empty or longer than its slot."""
    if size_bytes == 0:
        raise ImageTruncated("the object is empty; it will be written again")
    if size_bytes > size_bytes_max:
        raise ImageTruncated(
            f"the object is longer than its slot of {size_bytes_max} bytes; it was written "
            "with another layout, or is foreign"
        )
