"""Three ways to the bytes of an object: a local folder, a synchronous and an asynchronous client.

Owns what differs between kinds of file system, and the rule of when the caller's memory is free:
a local folder is served by plain system calls in worker threads, straight from and into slots;
other synchronous fsspec file systems by one call at a time in a thread, because few of them are
thread-safe; asynchronous ones such as S3 and GCS on the caller's event loop.

Does not own names, checks of arguments or the meaning of errors: these raise whatever the system
or the client raises, and `objects.py` turns it into the tier's errors.

Invariants:

* When `put` or `get` has returned or raised, cancelled or not, nothing touches the caller's memory
  any more (rule 3 of the design). Cancelling stops the waiting for a server at once, and the
  waiting for a thread only when the thread has ended.
* In a local folder a name is there with all its bytes, or not there: a write goes to a temporary
  name in the same folder and is renamed.
* A read costs one request and never more memory than the caller's slot plus one byte.

Risk taken: fsspec's S3 client hashes and sends a body on the event loop's thread. A store fast
enough to feel it gets its own module.
"""

# ruff: noqa: SLF001 - the asynchronous half of fsspec's contract is its underscored methods

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from tiers.errors import ImageTruncated, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Listing = list[tuple[str, int]]
"""Names and sizes in bytes."""

TEMPORARY_SUFFIX: Final = ".tmp"
TEMPORARY_SECONDS_MAX: Final = 24 * 3600
"""A temporary file older than this was left by a process that died; a listing removes it."""
LOCAL_THREADS_MAX: Final = 4
"""Enough to keep a disk busy. More only take turns on the cores, which engines want."""
ASYNC_THREADS_MAX: Final = 4


class Filesystem(Protocol):
    """Names and bytes; names are relative to the root that it was made with."""

    async def put(self, name: str, image: Bytes) -> None:
        """Store all of `image`, which is not touched after this has ended."""
        ...

    async def get(self, name: str, into: Bytes) -> int:
        """Fill the start of `into`; the size in bytes. Raises `ImageTruncated`."""
        ...

    async def find(self, folder: str) -> Listing:
        """Every object below `folder` ("" for all)."""
        ...

    async def move(self, name: str, target: str) -> None:
        """Rename, replacing what is there."""
        ...

    async def remove(self, name: str) -> None:
        """Delete one object."""
        ...

    async def close(self) -> None:
        """Give connections back."""
        ...


def open_filesystem(
    url: str, options: dict[str, object], *, threads_max: int, fsync: bool
) -> Filesystem:
    """The file system of `url`. Raises `TierUnavailable` where the URL is not understood."""
    if "::" in url:
        raise TierUnavailable(
            f"store.url={url.split('::', 1)[0]}::…: chained URLs are not served; give the store's "
            "own URL",
            retryable=False,
        )
    import fsspec  # here: a sidecar without a store does not need it

    protocol = url.split("://", 1)[0] if "://" in url else "file"
    try:
        kind: Any = fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise TierUnavailable(
            f"store.url: {error}; use file://, s3://, gs:// or another fsspec URL", retryable=False
        ) from error
    path: str = kind._strip_protocol(url)
    if protocol in {"file", "local"}:
        return _LocalFolder(path, threads_max=threads_max, fsync=fsync)
    options = {**kind._get_kwargs_from_urls(url), **options, "skip_instance_cache": True}
    if not kind.async_impl:
        return _SyncFilesystem(kind(**options), path)
    # A cached listing would hide what other clusters wrote.
    options = {"use_listings_cache": False, **options, "asynchronous": True}
    if protocol in {"s3", "s3a"}:
        return _S3(kind(**_s3_options(options)), path)
    return _AsyncFilesystem(kind(**options), path)


def _s3_options(options: dict[str, object]) -> dict[str, object]:
    config: dict[str, object] = {
        # `wrap.Retrying` retries, with the operator's limits; three layers of it would multiply.
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": 64,
        # The image carries its own checksum from the GPU on; a second one on each way costs CPU,
        # and several S3 servers refuse the trailer that it comes in.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
    }
    given = options.get("config_kwargs")
    if isinstance(given, dict):
        config.update(given)  # pyright: ignore[reportUnknownArgumentType]
    return {**options, "config_kwargs": config}


class _LocalFolder:
    """A folder of this machine or a mount: system calls in worker threads, into and from slots."""

    def __init__(self, root: str, *, threads_max: int, fsync: bool) -> None:
        self._root = root
        self._fsync = fsync
        # Apart, so that a backlog of writes does not hold up a read that a prompt waits for.
        threads = min(threads_max, LOCAL_THREADS_MAX)
        self._writers = anyio.CapacityLimiter(threads)
        self._readers = anyio.CapacityLimiter(threads)

    async def put(self, name: str, image: Bytes) -> None:
        await run_to_end(lambda: self._put(self._path(name), image.data), self._writers)

    async def get(self, name: str, into: Bytes) -> int:
        return await run_to_end(lambda: self._get(self._path(name), into.data), self._readers)

    async def find(self, folder: str) -> Listing:
        return await run_to_end(lambda: self._find(folder), self._readers)

    async def move(self, name: str, target: str) -> None:
        await run_to_end(lambda: self._move(self._path(name), self._path(target)), self._writers)

    async def remove(self, name: str) -> None:
        await run_to_end(lambda: os.unlink(self._path(name)), self._writers)

    async def close(self) -> None:
        return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, path: str, image: memoryview) -> None:
        temporary = f"{path}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        try:
            fd = _create(temporary)
        except FileNotFoundError:
            # Only for the first segment of a chunk, so it is not tried before every write.
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = _create(temporary)
        try:
            try:
                while image:
                    image = image[os.write(fd, image) :]
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        if self._fsync:
            _sync_folder(os.path.dirname(path))

    def _get(self, path: str, into: memoryview) -> int:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
            size_bytes = status.st_size
            _check_size(size_bytes, into.nbytes)
            done = 0
            while done < size_bytes:
                count = os.readv(fd, [into[done:size_bytes]])
                if count == 0:
                    raise ImageTruncated(
                        f"it ended at {done} of {size_bytes} bytes while it was read; it will be "
                        "written again"
                    )
                done += count
            return done
        finally:
            os.close(fd)

    def _find(self, folder: str) -> Listing:
        found: Listing = []
        pending = [folder]
        dead_before = time.time() - TEMPORARY_SECONDS_MAX
        while pending:
            inner = pending.pop()
            with os.scandir(f"{self._root}/{inner}" if inner else self._root) as entries:
                for entry in entries:
                    name = f"{inner}/{entry.name}" if inner else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(name)
                        continue
                    # Others write and move while this listing runs.
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        if not entry.name.endswith(TEMPORARY_SUFFIX):
                            found.append((name, status.st_size))
                        elif status.st_mtime < dead_before:
                            os.unlink(entry.path)
        return found

    def _move(self, path: str, target: str) -> None:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(path, target)


class _SyncFilesystem:
    """A synchronous fsspec file system: one call at a time, in a thread."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._limiter = anyio.CapacityLimiter(1)

    async def put(self, name: str, image: Bytes) -> None:
        await run_to_end(lambda: self._put(f"{self._root}/{name}", image), self._limiter)

    async def get(self, name: str, into: Bytes) -> int:
        return await run_to_end(lambda: self._get(f"{self._root}/{name}", into), self._limiter)

    async def find(self, folder: str) -> Listing:
        root = f"{self._root}/{folder}" if folder else self._root
        found: dict[str, dict[str, Any]] = await run_to_end(
            lambda: self._fs.find(root, detail=True), self._limiter
        )
        return _relative(found, self._root)

    async def move(self, name: str, target: str) -> None:
        await run_to_end(lambda: self._move(name, f"{self._root}/{target}"), self._limiter)

    async def remove(self, name: str) -> None:
        await run_to_end(lambda: self._fs.rm_file(f"{self._root}/{name}"), self._limiter)

    async def close(self) -> None:
        return

    def _put(self, path: str, image: Bytes) -> None:
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(path, image.tobytes())

    def _get(self, path: str, into: Bytes) -> int:
        return _fill(self._fs.cat_file(path, start=0, end=into.nbytes + 1), into)

    def _move(self, name: str, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.mv(f"{self._root}/{name}", target)


class _AsyncFilesystem:
    """An asynchronous fsspec file system, on the event loop of whoever calls."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._limiter = anyio.CapacityLimiter(ASYNC_THREADS_MAX)

    async def put(self, name: str, image: Bytes) -> None:
        # A copy, because a client is free to read a body in a thread of its own.
        body = await run_to_end(image.tobytes, self._limiter)
        await self._fs._pipe_file(f"{self._root}/{name}", body)

    async def get(self, name: str, into: Bytes) -> int:
        path = f"{self._root}/{name}"
        # The range bounds the memory that a foreign object of any size can take, and spares the
        # HEAD request by which s3fs would first ask for the size.
        body: bytes = await self._fs._cat_file(path, start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: _fill(body, into), self._limiter)

    async def find(self, folder: str) -> Listing:
        root = f"{self._root}/{folder}" if folder else self._root
        found: dict[str, dict[str, Any]] = await self._fs._find(root, detail=True)
        return _relative(found, self._root)

    async def move(self, name: str, target: str) -> None:
        await self._fs._cp_file(f"{self._root}/{name}", f"{self._root}/{target}")
        await self.remove(name)

    async def remove(self, name: str) -> None:
        await self._fs._rm_file(f"{self._root}/{name}")

    async def close(self) -> None:
        # fsspec has no verb for it; these are where s3fs, and gcsfs and http, keep their client.
        for place in ("_s3", "_session"):
            client: Any = getattr(self._fs, place, None)
            if client is not None:
                await client.close()


class _S3(_AsyncFilesystem):
    """s3fs: one request per verb, no retries of its own, and bodies straight from the slot."""

    def __init__(self, fs: Any, root: str) -> None:
        super().__init__(fs, root)
        fs.retries = 1

    async def put(self, name: str, image: Bytes) -> None:
        body = SlotBody(image)
        try:
            # The chunk size keeps it to one PUT: parts of an aborted upload cost money for ever.
            await self._fs._pipe_file(f"{self._root}/{name}", body, chunksize=image.nbytes)
        finally:
            body.detach_slot()


class SlotBody(io.BytesIO):
    """Slot memory as the body of a request, without a copy, until it is detached.

    The HTTP client sends a body from a task of its own that may outlive the request, after an
    early answer or a cancel. `detach_slot` ends that: once it has returned, no byte of the slot is
    read, because every read holds the lock. A BytesIO, because aiohttp sends one in pieces on the
    loop and any other file through one thread hop for each 64 KiB.
    """

    def __init__(self, image: Bytes) -> None:
        super().__init__()
        self._image: memoryview | None = image.data
        self._size_bytes = image.nbytes
        self._position = 0
        self._lock = threading.Lock()

    def detach_slot(self) -> None:
        """Let go of the memory; reads that follow raise `ValueError`."""
        with self._lock:
            self._image = None

    def __len__(self) -> int:
        return self._size_bytes

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes from the current position."""
        with self._lock:
            if self._image is None:
                raise ValueError("the slot was given back: the request has ended")
            start = self._position
            end = self._size_bytes if size is None or size < 0 else start + size
            piece = bytes(self._image[start:end])
            self._position = start + len(piece)
            return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move the position, as `io.IOBase.seek` does."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def getbuffer(self) -> memoryview:
        """All bytes; aiohttp asks for their number before it starts."""
        with self._lock:
            if self._image is None:
                raise ValueError("the slot was given back: the request has ended")
            return self._image[:]


class _ThreadWork:
    """One call in a worker thread, and whether it may still touch memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started = False
        self._abandoned = False
        self.ended = False

    def run(self, work: Callable[[], T]) -> T:
        with self._lock:
            if self._abandoned:
                raise RuntimeError("work was abandoned before its thread began")
            self._started = True
        try:
            return work()
        finally:
            self.ended = True

    def abandon(self) -> bool:
        """Keep the work from starting. False if it has started and has not ended."""
        with self._lock:
            self._abandoned = True
            return not self._started or self.ended


async def run_to_end(work: Callable[[], T], limiter: anyio.CapacityLimiter) -> T:
    """Run `work` in a worker thread, and do not return before it has ended, whoever cancels.

    anyio shields the wait from its own cancel scopes, but a bare `Task.cancel()` (asyncio itself
    on SIGINT) goes through that shield; so after any exception the thread is asked.
    """
    thread = _ThreadWork()
    try:
        return await anyio.to_thread.run_sync(thread.run, work, limiter=limiter)
    except BaseException:
        while not thread.abandon():
            # The cancel that came first is raised again below; another adds nothing to it.
            with anyio.CancelScope(shield=True):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(0.001)
        raise


def _fill(body: bytes, into: Bytes) -> int:
    size_bytes = len(body)
    _check_size(size_bytes, into.nbytes)
    # np.copyto releases the GIL; assigning through a memoryview holds it for the whole copy.
    np.copyto(into[:size_bytes], np.frombuffer(body, dtype=np.uint8))
    return size_bytes


def _relative(found: Mapping[str, Mapping[str, Any]], root: str) -> Listing:
    top = root.strip("/")
    skip = len(top) + 1 if top else 0
    return [
        (name.lstrip("/")[skip:], int(info["size"]))
        for name, info in found.items()
        if info.get("type") != "directory"
    ]


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_size(size_bytes: int, size_bytes_max: int) -> None:
    if size_bytes == 0:
        raise ImageTruncated("the object is empty; it will be written again")
    if size_bytes > size_bytes_max:
        raise ImageTruncated(
            f"the object is longer than its slot of {size_bytes_max} bytes; it was written "
            "with another layout, or is foreign"
        )
