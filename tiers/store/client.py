"""What every store of objects does: names and bytes, and when memory is free.

Owns the protocols, the lines of a listing, work in threads that is waited for, and the checks of an
object's size. Clients are `folder.py`, `obstore_client.py` (S3, GCS, Azure) and `fsspec_client.py`
(all others); `object_tier.py` checks their arguments and translates their errors.

Invariants of all of them: when `write` or `read` has returned or raised, cancelled or not, nothing
touches the caller's memory any more, and a cancel waits only for a thread that uses it; a name
exists with all its bytes, or does not exist; a read costs one request, and at most the memory of
the slot plus one byte, and its copy in the client.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from tiers.errors import ImageTruncated, TierUnavailable
from tiers.threads import NoThread, lower_priority, starting_threads

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
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


class Objects(Protocol):
    """Named immutable objects, by names relative to a root: `v1/0f3a…/ab/ab12…/0-8.0-4.arrow`."""

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """Store all of `image` under `name`, replacing an object.

        With `create` nothing is replaced: of several writers of a name one succeeds, and the others
        get an error that says so (`ObjectExists`); so does a writer that is retried after its
        answer was lost, though the object may be its own. A store that cannot do this replaces (see
        `Abilities`), or raises `TierUnavailable`.
        """

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """Put an object at the start of `into` and return its size in bytes.

        Raises `ImageTruncated` for an object that is empty or does not fit, and in a folder
        `ObjectOdd` or `ObjectDenied`.
        """
        ...

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        """All objects in folder `prefix` and below ("" for all), in no order.

        What was written before the call is in the answer.
        `start_after`: only those whose whole name sorts after it. For folders without folders:
        servers differ in whether "a/x" or "a-b/x" comes first.
        Not `deep`: the objects in the folder itself, and its folders, whose names end with "/".
        `names_max`: if there are more, the first ones in order of their names are enough, and the
        caller asks for the rest with `start_after`. Some stores answer with all.
        """
        ...

    async def delete(self, names: Sequence[str]) -> None:
        """Delete any number of objects; a missing one is no error.

        After an error some are deleted and some are not.
        """

    async def close(self) -> None:
        """Close connections. No other call may run or follow."""


class StoreClient(Objects, Protocol):
    """The objects of one kind of store. Raises what the system or the client's library raises."""

    async def move(self, name: str, target: str) -> None:
        """Rename, replacing what is there. Listings give the time of the move."""


async def run_to_end(
    work: Callable[[], T],
    limiter: anyio.CapacityLimiter,
    *,
    abort: Callable[[], None] | None = None,
) -> T:
    """Run `work` in a worker thread of lower priority. Returns after it ended, even if cancelled.

    `abort` makes waiting work end soon: it is called after a cancel until the work has ended.

    anyio shields the wait from its own cancel scopes, but a bare `Task.cancel()` (asyncio itself
    on SIGINT) passes that shield; so after any exception the thread is asked.

    Raises `NoThread`, an OSError, where none is idle and none can be started.
    """
    ended: Future[None] = Future()

    def tracked() -> T:
        if not ended.set_running_or_notify_cancel():
            raise RuntimeError("work was abandoned before its thread began")
        lower_priority()
        try:
            return work()
        finally:
            ended.set_result(None)

    try:
        with starting_threads():
            return await anyio.to_thread.run_sync(
                tracked, limiter=limiter, abandon_on_cancel=abort is not None
            )
    except BaseException:
        # One that has not started is cancelled, and never does.
        while not (ended.cancel() or ended.done()):
            if abort is not None:
                abort()
            # The first cancel is raised again below; another adds nothing.
            with anyio.CancelScope(shield=True):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(0.001)
        raise


async def run_abandonable(work: Callable[[], T], limiter: anyio.CapacityLimiter) -> T:
    """Run `work`, which uses no memory of the caller, in a thread. A cancel does not wait for it.

    The thread keeps its token of `limiter` until it ends, so that calls it blocks do not pile up in
    more threads. Python waits for it when it ends: a process that must not ends by `os._exit`.

    Raises `NoThread`, an OSError, where none is idle and none can be started.
    """
    borrower = object()
    await limiter.acquire_on_behalf_of(borrower)
    loop, begun = asyncio.get_running_loop(), Future[None]()

    def tracked() -> T:
        if not begun.set_running_or_notify_cancel():
            raise RuntimeError("work was abandoned before its thread began")
        lower_priority()
        try:
            return work()
        finally:
            # A loop that has closed has no use for the token.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(limiter.release_on_behalf_of, borrower)

    try:
        with starting_threads():
            # The limiter of the call itself limits nothing; anyio's own is shared with others.
            return await anyio.to_thread.run_sync(
                tracked, limiter=anyio.CapacityLimiter(1), abandon_on_cancel=True
            )
    finally:
        # One that has not started is cancelled, and never does.
        if begun.cancel():
            limiter.release_on_behalf_of(borrower)


async def run_in_thread(work: Callable[[*Ts], T], *given: *Ts) -> T:
    """`work(*given)` in a thread. Raises `TierUnavailable` where none can be started: try again."""
    try:
        with starting_threads():
            return await anyio.to_thread.run_sync(work, *given)
    except NoThread as error:
        raise TierUnavailable(str(error), retryable=True) from error


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
