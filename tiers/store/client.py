"""What every kind of file system gives a tier: names and bytes, and when memory is free.

Owns the protocol `Filesystem`, the lines of a listing, work in threads that is never left behind,
the checks of an object's size, and how what has come is told while it is in a core's cache
(`Seen`). Does not own any way to the bytes: a local folder is
`folder.py`, S3, GCS and Azure on obstore `obstore_client.py`, everything that fsspec knows
`fsspec_client.py`; nor names, checks of arguments and the meaning of errors: a file system raises
whatever the system or the client raises, and `object_tier.py` turns it into the tier's errors.

Invariants of every file system:

* When `put` or `get` has returned or raised, cancelled or not, nothing touches the caller's memory
  any more (rule 3 of the design). Cancelling stops the waiting for a server at once, and the
  waiting for a thread only when the thread has ended.
* A name is there with all its bytes, or not there.
* A read costs one request and never more memory than the caller's slot plus one byte, and its
  copy in the client.
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
from tiers.threads import OwnThreads, lower_priority

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]

Seen = Callable[[int, int, int], None]
"""Told by a read, `seen(size_bytes, first, last)`: of an object of so many bytes, those from
`first` to `last` lie in the slot now, and most likely still in this core's cache.

Pieces come in order, in worker threads, one at a time; `first` 0 begins anew. Where a read is tried
again, `seen(0, 0, 0)` says so before: nothing that was told counts any more. It raises nothing.
Whoever reads may tell less than all, or nothing; and who changes bytes after they came must not
hand it on.
"""

PIECE_BYTES: Final = 256 * 1024
"""What a core copies and then finds in its cache again, though other reads take turns on it."""


class Found(NamedTuple):
    """One line of a listing."""

    name: str
    """Relative to the root. A folder, in a listing of one level, ends with a slash."""
    size_bytes: int
    """0 for a folder."""
    modified_seconds: float
    """Seconds since 1970 by the store's own clock; 0 where the store does not say."""


Listing = list[Found]


class Filesystem(Protocol):
    """Names and bytes; names are relative to the root that it was made with."""

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        """Store all of `image`, which is not touched after this has ended.

        With `create`, raises `FileExistsError` (or the client's own word for it) for a name that
        is taken, where the store can.
        """
        ...

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """Fill the start of `into`; the size in bytes. Raises `ImageTruncated`.

        `seen` is told of what has come, see `Seen`.
        """
        ...

    async def find(
        self, folder: str, *, start_after: str, deep: bool, names_max: int | None
    ) -> Listing:
        """Objects below `folder` ("" for all) whose names sort after `start_after`.

        Not `deep`: only what is in the folder itself, and its folders. Where there are more than
        `names_max`, the first so many in order are enough.
        """
        ...

    async def move(self, name: str, target: str) -> None:
        """Rename, replacing what is there."""
        ...

    async def remove(self, names: Sequence[str]) -> None:
        """Delete objects; one that is not there is deleted."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...


class _ThreadWork:
    """One call in a worker thread, and whether it may still touch memory."""

    def __init__(self, *, behind: bool = True) -> None:
        self._lock = threading.Lock()
        self._behind = behind
        self._started = False
        self._abandoned = False
        self.ended = False

    def run(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._abandoned:
                raise RuntimeError("work was abandoned before its thread began")
            self._started = True
        if self._behind:
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
    threads: OwnThreads | None = None,
) -> T:
    """Run `work` in a worker thread, and do not return before it has ended, whoever cancels.

    `abort` makes work that waits for somebody else end soon. It is called after a cancel, on the
    loop, until the work has ended. Without it a cancel waits for as long as the work takes.
    Without `threads` the work stands behind the event loop for a core (`turns.step_back`).

    anyio shields the wait from its own cancel scopes, but a bare `Task.cancel()` (asyncio itself
    on SIGINT) goes through that shield; so after any exception the thread is asked.
    """
    thread = _ThreadWork(behind=threads is None)
    run_sync = anyio.to_thread.run_sync if threads is None else threads.run_sync
    try:
        return await run_sync(
            lambda: thread.run(work), limiter=limiter, abandon_on_cancel=abort is not None
        )
    except BaseException:
        while not thread.abandon():
            if abort is not None:
                abort()
            # The cancel that came first is raised again below; another adds nothing to it.
            with anyio.CancelScope(shield=True):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(0.001)
        raise


class Leaving:
    """Work in threads that use no memory of the caller's, so that a cancel does not wait for them.

    A mount whose server is gone holds a thread for as long as it likes. Whoever waits for a listing
    goes on at its deadline, and says that the store is unwell. Python itself does wait for such a
    thread when the process ends: a program that must not is to end by `os._exit`.

    Args:
        left_max: threads that may be left behind; beyond it `run` raises `TimeoutError` at once.
    """

    def __init__(self, left_max: int) -> None:
        self._left_max = left_max
        self._left: list[_ThreadWork] = []
        self._limiter = anyio.CapacityLimiter(left_max)

    async def run(self, work: Callable[[], T]) -> T:
        """What `work` returns. After a cancel it may go on, and nobody hears of it."""
        async with self._limiter:
            self._left = [one for one in self._left if not one.ended]
            if len(self._left) >= self._left_max:
                raise TimeoutError(
                    f"{len(self._left)} listings have not come back: is this a mount whose server "
                    "is gone?"
                )
            thread = _ThreadWork()
            try:
                # A limiter of its own: the shared one would have no place left one day.
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
