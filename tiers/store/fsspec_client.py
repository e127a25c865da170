"""Object stores through fsspec: the general path, for everything that fsspec has a client for.

Owns what differs between fsspec's kinds of file system: synchronous ones are called one at a time
in a thread, because few of them are thread-safe; asynchronous ones on the caller's event loop; and
s3fs, gcsfs and adlfs have classes of their own, so that a verb costs as few requests as the store
allows, is not retried below `wrap.Retrying`, and a missing bucket is no empty listing.

Does not own how `Access` is spelt for these clients (`fsspec_options.py`), nor what errors
mean.

Risk taken: these clients hash and send a body on the event loop's thread, and gcsfs renews its
tokens there. A store fast enough to feel it has `obstore_client.py`.
"""

# ruff: noqa: SLF001 - the asynchronous half of fsspec's contract is its underscored methods

from __future__ import annotations

import contextlib
import datetime as dt
import io
import os
import shutil
import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

import anyio

from tiers.errors import TierUnavailable
from tiers.store.client import Bytes, Filesystem, Found, Listing, Seen, fill, run_to_end
from tiers.store.fsspec_options import (
    azure_client,
    azure_options,
    gcs_options,
    gcs_session,
    gcs_timeout,
    s3_options,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tiers.store.access import Access

ASYNC_THREADS_MAX: Final = 4
COPY_BYTES: Final = 1 << 20
"""Of an object that is copied through this process, in memory at a time."""
S3_DELETES_MAX: Final = 1000
"""Names in one request, by S3's own limit."""

_CREATE: Final[Mapping[str, str]] = {"mode": "create"}
"""fsspec's word for a write that must not replace anything."""


def open_fsspec(url: str, access: Access, options: Mapping[str, object]) -> Filesystem:
    """The file system of `url`. Raises `TierUnavailable` where the URL is not understood."""
    import fsspec  # here: a sidecar without a store, or with a folder, does not need it

    protocol = url.split("://", 1)[0].lower()
    try:
        kind: Any = _kind(protocol) or fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise TierUnavailable(
            f"store.url: {error}; use file://, s3://, gs:// or another fsspec URL", retryable=False
        ) from error
    path: str = kind._strip_protocol(url)
    given = {**kind._get_kwargs_from_urls(url), **options, "skip_instance_cache": True}
    if not kind.async_impl:
        return _SyncFilesystem(kind(**given), path)
    # A cached listing would hide what other clusters wrote.
    given = {"use_listings_cache": False, **given, "asynchronous": True}
    match protocol:
        case "s3" | "s3a":
            return _S3(kind(**s3_options(path.split("/", 1)[0], access, given)), path)
        case "gs" | "gcs":
            return _Gcs(kind(**gcs_options(access, given)), path, access)
        case "az" | "abfs" | "abfss":
            client = azure_client(url, access, given)
            return _Azure(kind(**azure_options(url, access, given)), path, access, client)
        case _:
            return _AsyncFilesystem(kind(**given), path)


def _kind(protocol: str) -> Any:
    """The class for a protocol, where fsspec's own choice is not the one that fits."""
    if protocol not in ("gs", "gcs"):
        return None
    # Its sibling, which fsspec would take, asks for the layout of each bucket first, from an API
    # that other servers than Google's do not have, and sends some requests by gRPC.
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem


class DeleteRefused(Exception):
    """A store deleted some of the objects and refused one; the answer is what botocore's is."""

    def __init__(self, failed: Mapping[str, Any]) -> None:
        super().__init__(f"{failed.get('Key')}: {failed.get('Message')}")
        self.response = {"Error": {"Code": str(failed.get("Code", ""))}}


class _SyncFilesystem:
    """A synchronous fsspec file system: one call at a time, in a thread."""

    def __init__(self, fs: Any, root: str) -> None:
        self._fs = fs
        self._root = root.rstrip("/")
        self._limiter = anyio.CapacityLimiter(1)

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        options = _CREATE if create else {}
        await run_to_end(lambda: self._put(f"{self._root}/{name}", image, options), self._limiter)

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        path = f"{self._root}/{name}"
        return await run_to_end(lambda: self._get(path, into, seen), self._limiter)

    async def find(
        self,
        folder: str,
        *,
        start_after: str,
        deep: bool,
        names_max: int | None,  # noqa: ARG002 (fsspec has no pages)
    ) -> Listing:
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

    def _get(self, path: str, into: Bytes, seen: Seen | None) -> int:
        return fill(self._fs.cat_file(path, start=0, end=into.nbytes + 1), into, seen)

    def _move(self, name: str, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        source = f"{self._root}/{name}"
        try:
            # Not `mv`, which may rename: the object would keep the time when it was written.
            self._fs.cp_file(source, target)
        except NotImplementedError:
            # sftp, ftp and smb have no copying of their own.
            with self._fs.open(source, "rb") as read, self._fs.open(target, "wb") as write:
                shutil.copyfileobj(read, write, COPY_BYTES)
        self._remove([name])


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

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        path = f"{self._root}/{name}"
        # The range bounds the memory that a foreign object of any size can take, and spares the
        # HEAD request by which s3fs would first ask for the size.
        body: bytes = await self._fs._cat_file(path, start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: fill(body, into, seen), self._limiter)

    async def find(
        self,
        folder: str,
        *,
        start_after: str,
        deep: bool,
        names_max: int | None,  # noqa: ARG002 (fsspec has no pages)
    ) -> Listing:
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

    async def find(
        self, folder: str, *, start_after: str, deep: bool, names_max: int | None
    ) -> Listing:
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
            came: Listing = []
            for one in page.get("Contents", ()):
                modified = one["LastModified"].timestamp()
                came.append(Found(one["Key"][skip:], int(one["Size"]), modified))
            for one in page.get("CommonPrefixes", ()):
                came.append(Found(one["Prefix"][skip:], 0, 0.0))
            # Some servers do not know StartAfter, and begin at the start.
            found += [one for one in came if one.name > start_after]
            if not page.get("IsTruncated") or (names_max is not None and len(found) >= names_max):
                return found
            asked["ContinuationToken"] = page["NextContinuationToken"]

    async def move(self, name: str, target: str) -> None:
        # s3fs asks for the size first, by a HEAD, whose 404 cannot say what is missing.
        await self._fs._copy_basic(f"{self._root}/{name}", f"{self._root}/{target}")
        await self.remove([name])

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


class _Gcs(_AsyncFilesystem):
    """gcsfs: one request per verb, no retries of its own, no cached listing."""

    def __init__(self, fs: Any, root: str, access: Access) -> None:
        super().__init__(fs, root)
        self._access = access
        bucket, _, path = self._root.partition("/")
        self._bucket = bucket
        self._path = f"{path}/" if path else ""
        # gcsfs asks six times, with pauses, and nobody else may say otherwise. `wrap.Retrying`
        # retries, with the operator's limits.
        fs._request = type(fs)._request.__wrapped__.__get__(fs)
        fs.requests_timeout = gcs_timeout(access)

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        self._connect()
        body = await run_to_end(image.tobytes, self._limiter)
        options: dict[str, Any] = {"mode": "create"} if create else {}
        # Larger than the body: gcsfs then sends it in one request.
        path = f"{self._root}/{name}"
        await self._fs._pipe_file(path, body, chunksize=len(body) + 1, **options)

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        self._connect()
        return await super().get(name, into, seen=seen)

    async def find(
        self, folder: str, *, start_after: str, deep: bool, names_max: int | None
    ) -> Listing:
        self._connect()
        asked: dict[str, Any] = {"prefix": f"{self._path}{folder}/" if folder else self._path}
        if start_after:
            # This one begins at the name, which is left out below.
            asked["startOffset"] = f"{self._path}{start_after}"
        if not deep:
            asked["delimiter"] = "/"
        skip = len(self._path)
        found: Listing = []
        while True:
            try:
                page: dict[str, Any] = await self._fs._call(
                    "GET", "b/{}/o", self._bucket, json_out=True, **asked
                )
            except FileNotFoundError as error:
                # A folder that is empty is an empty answer; this is about the bucket.
                raise BucketMissing(self._bucket) from error
            for one in page.get("items", ()):
                modified = dt.datetime.fromisoformat(one["updated"]).timestamp()
                found.append(Found(one["name"][skip:], int(one["size"]), modified))
            for one in page.get("prefixes", ()):
                found.append(Found(one[skip:], 0, 0.0))
            token = page.get("nextPageToken")
            # One more, for the name that it begins at.
            if not token or (names_max is not None and len(found) > names_max):
                return [one for one in found if one.name > start_after]
            asked["pageToken"] = token

    async def move(self, name: str, target: str) -> None:
        self._connect()
        await super().move(name, target)

    async def remove(self, names: Sequence[str]) -> None:
        self._connect()
        await super().remove(names)

    async def close(self) -> None:
        if self._fs._session is not None:
            await self._fs._session.close()

    def _connect(self) -> None:
        # Not before the event loop runs, and not by gcsfs, which knows neither authorities nor
        # timeouts.
        if self._fs._session is None:
            self._fs._session = gcs_session(self._access)


class _Azure(_AsyncFilesystem):
    """adlfs with a client of our own making: its own knows no endpoint, proxy or authorities."""

    def __init__(self, fs: Any, root: str, access: Access, client: Any) -> None:
        from azure.storage.blob import StandardBlobTier  # here: only Azure needs it

        super().__init__(fs, root)
        _drop_finalizers(fs)
        fs.service_client = client
        container, _, path = self._root.partition("/")
        self._container = container
        self._path = f"{path}/" if path else ""
        self._tier = access.storage_class and StandardBlobTier(access.storage_class)

    async def put(self, name: str, image: Bytes, *, create: bool) -> None:
        body = await run_to_end(image.tobytes, self._limiter)
        options: dict[str, Any] = {"standard_blob_tier": self._tier} if self._tier else {}
        path = f"{self._root}/{name}"
        await self._fs._pipe_file(path, body, overwrite=not create, max_concurrency=1, **options)

    async def get(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        path = f"{self._root}/{name}"
        body: bytes = await self._fs._cat_file(
            path, start=0, end=into.nbytes + 1, max_concurrency=1
        )
        return await run_to_end(lambda: fill(body, into, seen), self._limiter)

    async def find(
        self,
        folder: str,
        *,
        start_after: str,
        deep: bool,
        names_max: int | None,  # noqa: ARG002 (fsspec has no pages)
    ) -> Listing:
        container = self._fs.service_client.get_container_client(self._container)
        prefix = f"{self._path}{folder}/" if folder else self._path
        skip = len(self._path)
        found: Listing = []
        listed = container.list_blobs if deep else container.walk_blobs
        async for one in listed(name_starts_with=prefix):
            name: str = one.name
            modified = getattr(one, "last_modified", None)
            if modified is None:
                found.append(Found(name[skip:], 0, 0.0))
            else:
                found.append(Found(name[skip:], int(one.size), modified.timestamp()))
        return [one for one in found if one.name > start_after]

    async def close(self) -> None:
        await self._fs.service_client.close()


def _drop_finalizers(fs: Any) -> None:
    """Keep adlfs from closing its client when Python ends, on a loop that no longer runs.

    It registers that for itself as its own argument, so it would also never be freed.
    """
    registry: dict[weakref.finalize[..., Any], Any] = weakref.finalize._registry  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
    for finalizer in list(registry):
        alive = finalizer.peek()
        if alive is not None and alive[0] is fs:
            finalizer.detach()


class BucketMissing(Exception):
    """A listing of a bucket that is not there; the answer is what botocore's is."""

    def __init__(self, bucket: str) -> None:
        super().__init__(f"the bucket {bucket} was not found")
        self.response = {"Error": {"Code": "NoSuchBucket"}}


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
