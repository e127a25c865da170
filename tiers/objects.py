"""The object tier: named immutable objects behind any fsspec URL.

Owns the protocol `ObjectTier`, its one implementation over fsspec's contract (`FsspecObjects`),
and the rule of when slot memory is free again. Three ways lead to the bytes: a local folder (plain
system calls in worker threads), other synchronous file systems (one call at a time in a thread,
because few of them are thread-safe), and asynchronous ones such as S3 and GCS on this event loop.

Does not own names (`catalog.py`), retries, deadlines and counters (`wrap.py`), or the verdict on
what was read (`arrow.py`): a read that succeeds is bytes, not yet a chunk.

Invariants:

* When `write` or `read` has returned or raised, cancelled or not, nothing touches the caller's
  memory any more (rule 3 of the design). Cancelling stops the waiting for a server at once, and the
  waiting for a thread only when the thread has ended.
* In a local folder a name is there with all its bytes, or not there: a write goes to a temporary
  name in the same folder and is renamed.
* A read costs one request and never more memory than the caller's slot plus one byte.
* Every failure is an error of `tiers.errors` that names the URL, what failed and the remedy.

Risk taken: fsspec's S3 client hashes and sends a body on the event loop's thread. A store fast
enough to feel it gets its own module.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

from tiers.errors import ChunkCorrupt, ChunkMissing, ImageTruncated, TierError, TierUnavailable
from tiers.object_errors import Secrets, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")
Bytes = npt.NDArray[np.uint8]
Listing = list[tuple[str, int]]
"""Names and sizes in bytes."""

NAME_CHARACTERS_MAX: Final = 512
PROBE_BYTES: Final = 4096
PROBE_FOLDER: Final = "probe"
QUARANTINE_FOLDER: Final = "quarantine"
TEMPORARY_SUFFIX: Final = ".tmp"
TEMPORARY_SECONDS_MAX: Final = 24 * 3600
"""A temporary file older than this was left by a process that died; a listing removes it."""
THREADS_MAX_DEFAULT: Final = 4
CLEANUP_SECONDS_MAX: Final = 5.0
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


class ObjectTier(Protocol):
    """Named immutable objects. Names are relative: `v1/0f3a…/ab/ab12…/0-8.0-4.arrow`.

    Every verb raises `TierUnavailable`, and beside it what its own line says.
    """

    @property
    def url(self) -> str:
        """Where this tier keeps its objects, without secrets, for messages."""
        ...

    async def probe(self) -> None:
        """Write, read back, list and delete one object; the error is written for an operator."""
        ...

    async def write(self, name: str, image: Bytes) -> None:
        """Store all of `image` under `name`, replacing what is there. Raises `TierFull`."""
        ...

    async def read(self, name: str, into: Bytes) -> int:
        """Put an object at the start of `into` and return its size in bytes.

        Raises `ChunkMissing`, or `ImageTruncated` for an object that is empty or does not fit.
        """
        ...

    async def list(self, prefix: str) -> Listing:
        """All objects in folder `prefix` and below ("" for all), in no order."""
        ...

    async def quarantine(self, name: str) -> None:
        """Move an object to `quarantine/<name>`. Moving one that is gone is a success."""
        ...

    async def close(self) -> None:
        """Give connections back. No other call may be running or follow."""
        ...


class FsspecObjects:
    """The objects under one fsspec URL (`file://`, `s3://`, `gs://`, `memory://` and others).

    Args:
        url: a folder, or a bucket and a prefix.
        storage_options: handed to the file system's constructor; values are never logged.
        threads_max: how many calls to a local folder may run side by side.
        fsync: whether a local write is on the disk when it returns. Off by default: a cache may
            lose what a power cut took, and a torn file is found by its checksum.

    Raises:
        TierUnavailable: the URL or an option is not understood, or a package is missing.
    """

    def __init__(
        self,
        url: str,
        storage_options: Mapping[str, object] | None = None,
        *,
        threads_max: int = THREADS_MAX_DEFAULT,
        fsync: bool = False,
    ) -> None:
        options = dict(storage_options or {})
        self._secrets = Secrets(options)
        self._url = self._secrets.hide(url).rstrip("/")
        with self._translated("open"):
            self._store = _open(url, options, threads_max=threads_max, fsync=fsync)

    @property
    def url(self) -> str:
        """The URL without secrets."""
        return self._url

    async def write(self, name: str, image: Bytes) -> None:
        """See `ObjectTier.write`."""
        _check_name(name)
        _check_memory("image", image)
        with self._translated("write", name):
            await self._store.put(name, image)

    async def read(self, name: str, into: Bytes) -> int:
        """See `ObjectTier.read`."""
        _check_name(name)
        _check_memory("into", into)
        with self._translated("read", name):
            return await self._store.get(name, into)

    async def list(self, prefix: str) -> Listing:
        """See `ObjectTier.list`."""
        folder = prefix.rstrip("/")
        if folder:
            _check_name(folder)
        try:
            with self._translated("list", prefix):
                return await self._store.find(folder)
        except ChunkMissing:
            return []

    async def quarantine(self, name: str) -> None:
        """See `ObjectTier.quarantine`."""
        _check_name(name)
        with contextlib.suppress(ChunkMissing), self._translated("quarantine", name):
            await self._store.move(name, f"{QUARANTINE_FOLDER}/{name}")

    async def probe(self) -> None:
        """See `ObjectTier.probe`."""
        name = f"{PROBE_FOLDER}/{secrets.token_hex(8)}"
        sent = np.frombuffer(secrets.token_bytes(PROBE_BYTES), dtype=np.uint8)
        await self.write(name, sent)
        try:
            await self._probe_back(name, sent)
        except BaseException:
            with anyio.move_on_after(CLEANUP_SECONDS_MAX, shield=True):
                with contextlib.suppress(Exception):
                    await self._store.remove(name)
            raise
        with self._translated("delete", name):
            await self._store.remove(name)

    async def _probe_back(self, name: str, sent: Bytes) -> None:
        got = np.zeros(PROBE_BYTES, dtype=np.uint8)
        try:
            size_bytes = await self.read(name, got)
        except (ChunkMissing, ChunkCorrupt) as error:
            raise TierUnavailable(
                f"{error}: this object had just been written; kvlake needs a store that reads "
                "what was written",
                retryable=False,
            ) from error
        if size_bytes != PROBE_BYTES or not np.array_equal(sent, got):
            raise TierUnavailable(
                f"read {self._url}/{name}: {size_bytes} bytes came back that differ from the "
                f"{PROBE_BYTES} written; look for a proxy or cache before the store",
                retryable=False,
            )
        # A key may be allowed to put and get but not to list, and the catalog lists.
        await self.list(PROBE_FOLDER)

    async def close(self) -> None:
        """See `ObjectTier.close`."""
        with self._translated("close"):
            await self._store.close()

    @contextlib.contextmanager
    def _translated(self, verb: str, name: str = "") -> Iterator[None]:
        target = f"{self._url}/{name}" if name else self._url
        try:
            yield
        except TierError:
            raise
        except Exception as error:
            # `from None`: the client's own text may hold what Secrets has just taken out.
            raise translate(error, f"{verb} {target}", self._secrets) from None


class _Store(Protocol):
    """What `FsspecObjects` needs of a kind of file system; raises whatever that raises."""

    async def put(self, name: str, image: Bytes) -> None: ...
    async def get(self, name: str, into: Bytes) -> int: ...
    async def find(self, folder: str) -> Listing: ...
    async def move(self, name: str, target: str) -> None: ...
    async def remove(self, name: str) -> None: ...
    async def close(self) -> None: ...


def _open(url: str, options: dict[str, object], *, threads_max: int, fsync: bool) -> _Store:
    if "::" in url:
        raise TierUnavailable(
            f"store.url={url.split('::', 1)[0]}::…: chained URLs are not served; give the store's "
            "own URL",
            retryable=False,
        )
    # fsspec ships no types; going through importlib keeps that in one place, and keeps a sidecar
    # without a store from importing it.
    fsspec: Any = importlib.import_module("fsspec")
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
        self._limiter = anyio.CapacityLimiter(threads_max)

    async def put(self, name: str, image: Bytes) -> None:
        await run_to_end(lambda: self._put(self._path(name), memoryview(image)), self._limiter)

    async def get(self, name: str, into: Bytes) -> int:
        return await run_to_end(
            lambda: self._get(self._path(name), memoryview(into)), self._limiter
        )

    async def find(self, folder: str) -> Listing:
        return await run_to_end(lambda: self._find(folder), self._limiter)

    async def move(self, name: str, target: str) -> None:
        await run_to_end(lambda: self._move(self._path(name), self._path(target)), self._limiter)

    async def remove(self, name: str) -> None:
        await run_to_end(lambda: os.unlink(self._path(name)), self._limiter)

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
            size_bytes = os.fstat(fd).st_size
            _check_size(path, size_bytes, into.nbytes)
            done = 0
            while done < size_bytes:
                count = os.readv(fd, [into[done:size_bytes]])
                if count == 0:
                    raise ImageTruncated(
                        f"{path}: ended at {done} of {size_bytes} bytes while it was read; it will "
                        "be written again"
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
        return _fill(path, self._fs.cat_file(path, start=0, end=into.nbytes + 1), into)

    def _move(self, name: str, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.mv(f"{self._root}/{name}", target)


class _AsyncFilesystem:
    """An asynchronous fsspec file system, on the event loop of whoever calls."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._limiter = anyio.CapacityLimiter(THREADS_MAX_DEFAULT)

    async def put(self, name: str, image: Bytes) -> None:
        # A copy, because a client is free to read a body in a thread of its own.
        body = await run_to_end(image.tobytes, self._limiter)
        await self._fs._pipe_file(f"{self._root}/{name}", body)

    async def get(self, name: str, into: Bytes) -> int:
        path = f"{self._root}/{name}"
        # The range bounds the memory that a foreign object of any size can take, and spares the
        # HEAD request by which s3fs would first ask for the size.
        body: bytes = await self._fs._cat_file(path, start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: _fill(path, body, into), self._limiter)

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
        self._image: memoryview | None = memoryview(image)
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


def _fill(path: str, body: bytes, into: Bytes) -> int:
    size_bytes = len(body)
    _check_size(path, size_bytes, into.nbytes)
    # np.copyto releases the GIL; assigning through a memoryview holds it for the whole copy.
    np.copyto(into[:size_bytes], np.frombuffer(body, dtype=np.uint8))
    return size_bytes


def _relative(found: Mapping[str, Mapping[str, Any]], root: str) -> Listing:
    skip = len(root.strip("/")) + 1
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


def _check_size(path: str, size_bytes: int, size_bytes_max: int) -> None:
    if size_bytes == 0:
        raise ImageTruncated(f"{path}: the object is empty; it will be written again")
    if size_bytes > size_bytes_max:
        raise ImageTruncated(
            f"{path}: the object is longer than its slot of {size_bytes_max} bytes; it was written "
            "with another layout, or is foreign"
        )


def _check_name(name: str) -> None:
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.fullmatch(name):
        raise ValueError(
            f"name={name[:NAME_CHARACTERS_MAX]!r}: must be a relative path of at most "
            f"{NAME_CHARACTERS_MAX} letters, digits and ._=- whose parts do not start with a dot"
        )


def _check_memory(field: str, memory: Bytes) -> None:
    if memory.dtype != np.uint8 or memory.ndim != 1 or not memory.flags.c_contiguous:
        raise ValueError(
            f"{field}: must be a contiguous uint8 vector, got {memory.dtype} of shape "
            f"{memory.shape}"
        )
    if field == "into" and not memory.flags.writeable:
        raise ValueError("into: must be writeable")
    if memory.nbytes == 0:
        raise ValueError(f"{field}: must not be empty")
