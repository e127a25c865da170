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
import datetime as dt
import errno
import io
import os
import secrets
import stat
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from tiers.errors import ImageTruncated, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]


class Found(NamedTuple):
    """One line of a listing."""

    name: str
    """Relative to the root. A folder, in a listing of one level, ends with a slash."""
    size_bytes: int
    """0 for a folder."""
    modified_seconds: float
    """Seconds since 1970 by the store's own clock; 0 where the store does not say."""


Listing = list[Found]

TEMPORARY_SUFFIX: Final = ".tmp"
TEMPORARY_SECONDS_MAX: Final = 24 * 3600
"""A temporary file older than this was left by a process that died; a listing removes it."""
LOCAL_THREADS_MAX: Final = 4
"""Enough to keep a disk busy. More only take turns on the cores, which engines want."""
ASYNC_THREADS_MAX: Final = 4
MAKE_FOLDER_ATTEMPTS_MAX: Final = 8
S3_DELETES_MAX: Final = 1000
"""Names in one request, by S3's own limit."""

_CREATE: Final[Mapping[str, str]] = {"mode": "create"}
"""fsspec's word for a write that must not replace anything."""


class DeleteRefused(Exception):
    """A store deleted some of the objects and refused one; the answer is what botocore's is."""

    def __init__(self, failed: Mapping[str, Any]) -> None:
        super().__init__(f"{failed.get('Key')}: {failed.get('Message')}")
        self.response = {"Error": {"Code": str(failed.get("Code", ""))}}


class Filesystem(Protocol):
    """Names and bytes; names are relative to the root that it was made with."""

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        """Store all of `image`, which is not touched after this has ended.

        With `create`, raises `FileExistsError` (or the client's own word for it) for a name that
        is taken, where the store can.
        """
        ...

    async def get(self, name: str, into: Bytes) -> int:
        """Fill the start of `into`; the size in bytes. Raises `ImageTruncated`."""
        ...

    async def find(self, folder: str, *, start_after: str, deep: bool) -> Listing:
        """Objects below `folder` ("" for all) whose names sort after `start_after`.

        Not `deep`: only what is in the folder itself, and its folders.
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

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        place = os.link if create else os.replace
        await run_to_end(lambda: self._put(self._path(name), image.data, place), self._writers)

    async def get(self, name: str, into: Bytes) -> int:
        return await run_to_end(lambda: self._get(self._path(name), into.data), self._readers)

    async def find(self, folder: str, *, start_after: str, deep: bool) -> Listing:
        found = await run_to_end(lambda: self._find(folder, deep=deep), self._readers)
        return [one for one in found if one.name > start_after]

    async def move(self, name: str, target: str) -> None:
        await run_to_end(lambda: self._move(self._path(name), self._path(target)), self._writers)

    async def remove(self, names: Sequence[str]) -> None:
        await run_to_end(lambda: self._remove(names), self._writers)

    async def close(self) -> None:
        return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _put(self, path: str, image: memoryview, place: Callable[[str, str], None]) -> None:
        temporary = f"{path}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}"
        fd = self._create_in_folder(temporary)
        try:
            try:
                while image:
                    image = image[os.write(fd, image) :]
                if self._fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            place(temporary, path)
        finally:
            # After a rename there is nothing left under this name; after a link there is.
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if self._fsync:
            _sync_folder(os.path.dirname(path))

    def _create_in_folder(self, path: str) -> int:
        # The folder is made only where it is missing: for the first segment of a chunk. Then again,
        # because a removal may take an empty folder away in between.
        for _ in range(MAKE_FOLDER_ATTEMPTS_MAX):
            with contextlib.suppress(FileNotFoundError):
                return _create(path)
            with contextlib.suppress(FileNotFoundError):
                _make_folders(os.path.dirname(path))
        return _create(path)

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

    def _find(self, folder: str, *, deep: bool) -> Listing:
        found: Listing = []
        pending = [folder]
        dead_before = time.time() - TEMPORARY_SECONDS_MAX
        while pending:
            inner = pending.pop()
            # Others write, move and remove while this listing runs; only the folder that was asked
            # for has to be there.
            try:
                entries = os.scandir(f"{self._root}/{inner}" if inner else self._root)
            except FileNotFoundError:
                if inner != folder:
                    continue
                raise
            with entries:
                for entry in entries:
                    name = f"{inner}/{entry.name}" if inner else entry.name
                    if not entry.is_dir(follow_symlinks=False):
                        found.extend(_found_file(entry, name, dead_before))
                    elif deep:
                        pending.append(name)
                    else:
                        found.append(Found(f"{name}/", 0, 0.0))
        return found

    def _remove(self, names: Sequence[str]) -> None:
        folders: set[str] = set()
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path(name))
            folders.add(os.path.dirname(name))
        # Object stores have no folders that could be left behind.
        for folder in sorted(folders, reverse=True):
            inner = folder
            with contextlib.suppress(OSError):
                while inner:
                    os.rmdir(self._path(inner))
                    inner = os.path.dirname(inner)

    def _move(self, path: str, target: str) -> None:
        _make_folders(os.path.dirname(target))
        os.replace(path, target)


class _SyncFilesystem:
    """A synchronous fsspec file system: one call at a time, in a thread."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._limiter = anyio.CapacityLimiter(1)

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        options = _CREATE if create else {}
        await run_to_end(lambda: self._put(f"{self._root}/{name}", image, options), self._limiter)

    async def get(self, name: str, into: Bytes) -> int:
        return await run_to_end(lambda: self._get(f"{self._root}/{name}", into), self._limiter)

    async def find(self, folder: str, *, start_after: str, deep: bool) -> Listing:
        root = f"{self._root}/{folder}" if folder else self._root
        # `find` answers with a dict and `ls` with a list; the values are the same.
        work = self._fs.find if deep else self._fs.ls
        found: Any = await run_to_end(lambda: work(root, detail=True), self._limiter)
        return _relative(found.values() if deep else found, self._root, start_after)

    async def move(self, name: str, target: str) -> None:
        await run_to_end(lambda: self._move(name, f"{self._root}/{target}"), self._limiter)

    async def remove(self, names: Sequence[str]) -> None:
        await run_to_end(lambda: self._remove(names), self._limiter)

    async def close(self) -> None:
        return

    def _put(self, path: str, image: Bytes, options: Mapping[str, str]) -> None:
        self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(path, image.tobytes(), **options)

    def _remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{name}")

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

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        # A copy, because a client is free to read a body in a thread of its own.
        body = await run_to_end(image.tobytes, self._limiter)
        options = _CREATE if create else {}
        await self._fs._pipe_file(f"{self._root}/{name}", body, **options)

    async def get(self, name: str, into: Bytes) -> int:
        path = f"{self._root}/{name}"
        # The range bounds the memory that a foreign object of any size can take, and spares the
        # HEAD request by which s3fs would first ask for the size.
        body: bytes = await self._fs._cat_file(path, start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: _fill(body, into), self._limiter)

    async def find(self, folder: str, *, start_after: str, deep: bool) -> Listing:
        root = f"{self._root}/{folder}" if folder else self._root
        if deep:
            below: dict[str, Any] = await self._fs._find(root, detail=True)
            return _relative(below.values(), self._root, start_after)
        return _relative(await self._fs._ls(root, detail=True), self._root, start_after)

    async def move(self, name: str, target: str) -> None:
        await self._fs._cp_file(f"{self._root}/{name}", f"{self._root}/{target}")
        await self.remove([name])

    async def remove(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                await self._fs._rm_file(f"{self._root}/{name}")

    async def close(self) -> None:
        # fsspec has no verb for it; these are where s3fs, and gcsfs and http, keep their client.
        for place in ("_s3", "_session"):
            client: Any = getattr(self._fs, place, None)
            if client is not None:
                await client.close()


class _S3(_AsyncFilesystem):
    """s3fs: one request per verb, no retries of its own, and bodies straight from the slot.

    A listing is one request for each thousand names, a removal one for each thousand objects.
    """

    def __init__(self, fs: Any, root: str) -> None:
        super().__init__(fs, root)
        fs.retries = 1
        bucket, _, path = self._root.partition("/")
        self._bucket = bucket
        self._path = f"{path}/" if path else ""

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        body = SlotBody(image)
        options = _CREATE if create else {}
        try:
            # The chunk size keeps it to one PUT: parts of an aborted upload cost money for ever.
            await self._fs._pipe_file(
                f"{self._root}/{name}", body, chunksize=image.nbytes, **options
            )
        finally:
            body.detach_slot()

    async def find(self, folder: str, *, start_after: str, deep: bool) -> Listing:
        # Not through s3fs, which has no way to begin after a name.
        asked: dict[str, Any] = {
            "Bucket": self._bucket,
            "Prefix": f"{self._path}{folder}/" if folder else self._path,
        }
        if start_after:
            asked["StartAfter"] = f"{self._path}{start_after}"
        if not deep:
            asked["Delimiter"] = "/"
        skip = len(self._path)
        found: Listing = []
        while True:
            page: dict[str, Any] = await self._fs._call_s3("list_objects_v2", **asked)
            for one in page.get("Contents", ()):
                modified = one["LastModified"].timestamp()
                found.append(Found(one["Key"][skip:], int(one["Size"]), modified))
            for one in page.get("CommonPrefixes", ()):
                found.append(Found(one["Prefix"][skip:], 0, 0.0))
            if not page.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = page["NextContinuationToken"]

    async def remove(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), S3_DELETES_MAX):
            part = names[first : first + S3_DELETES_MAX]
            objects = [{"Key": f"{self._path}{name}"} for name in part]
            answer: dict[str, Any] = await self._fs._call_s3(
                "delete_objects", Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
            for failed in answer.get("Errors", ()):
                if failed.get("Code") != "NoSuchKey":
                    raise DeleteRefused(failed)


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


def _relative(found: Iterable[Mapping[str, Any]], root: str, start_after: str) -> Listing:
    top = root.strip("/")
    skip = len(top) + 1 if top else 0
    listing: Listing = []
    for info in found:
        name = str(info["name"]).strip("/")[skip:]
        if info.get("type") == "directory":
            listing.append(Found(f"{name}/", 0, 0.0))
        else:
            listing.append(Found(name, int(info["size"]), _modified_seconds(info)))
    return [one for one in listing if one.name > start_after]


def _modified_seconds(info: Mapping[str, Any]) -> float:
    """When an object was written, wherever its file system says so."""
    for field in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = info.get(field)
        if isinstance(value, dt.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            with contextlib.suppress(ValueError):
                return dt.datetime.fromisoformat(value).timestamp()
    return 0.0


def _found_file(entry: os.DirEntry[str], name: str, dead_before: float) -> Listing:
    """The line of one file; none for a temporary one, which is removed once it is old."""
    with contextlib.suppress(FileNotFoundError):
        status = entry.stat()
        if not entry.name.endswith(TEMPORARY_SUFFIX):
            return [Found(name, status.st_size, status.st_mtime)]
        if status.st_mtime < dead_before:
            os.unlink(entry.path)
    return []


def _create(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)


def _make_folders(path: str) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except FileExistsError as error:
        # Not the name that is written: a file, or a link to nowhere, on the way to it.
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from error


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
