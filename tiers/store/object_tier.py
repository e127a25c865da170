"""The object tier: named immutable objects behind a URL.

Owns `ObjectTier` and its implementation `UrlObjects`: checks of names and memory, the probe, the
translation of errors, and the choice of the client. Does not own the transfer
(`folder.py`, `obstore_client.py`, `fsspec_client.py`), names (`tiers/catalog/`), retries, deadlines
and counters (`middleware.py`), or verification: a read gives bytes, not yet a chunk.

Invariants, beside those of `client.py`: no name leaves the URL's folder; every failure is an error
of `tiers.errors` that names the URL, what failed and the remedy, and contains no secret.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import anyio
import numpy as np

from tiers.errors import (
    ChunkCorrupt,
    ChunkMissing,
    ImageTruncated,
    ObjectDenied,
    ObjectExists,
    ObjectOdd,
    TierError,
    TierUnavailable,
)
from tiers.redaction import Redactor, mask_url
from tiers.store.access import (
    CLOUDS,
    Access,
    check,
    chosen_backend,
    names_per_removal,
    provider_of,
    with_endpoint,
)
from tiers.store.client import Bytes, Listing, Objects, Seen, StoreClient
from tiers.store.errors import translate
from tiers.store.folder import LocalFolder

NAME_CHARACTERS_MAX: Final = 512
SECRET_CHARACTERS_MIN: Final = 4
"""Less than in logs: what a client says is seldom about anything but the store."""
PROBE_BYTES: Final = 4096
PROBE_FOLDER: Final = "probe"
PROBE_NAME_BYTES: Final = 8
QUARANTINE_FOLDER: Final = "quarantine"
CLEANUP_SECONDS_MAX: Final = 5.0
_NAME = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]*(/[A-Za-z0-9_=-][A-Za-z0-9._=-]*)*")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a probe found out about a working store."""

    creates: bool
    """Whether `write(create=True)` never replaces an object. Without it, nothing is compacted."""


class ObjectTier(Objects, Protocol):
    """The objects under a URL. Every verb may raise `TierUnavailable`, a read `ChunkMissing`."""

    @property
    def url(self) -> str:
        """The URL without secrets, for messages."""
        ...

    async def probe(self) -> Abilities:
        """Write, read back, list and delete one object; the error is written for an operator."""
        ...

    async def quarantine(self, name: str) -> None:
        """Move an object to `quarantine/<name>`; a missing one is no error.

        Listings give the time of the move, from which it is kept for a while.
        """


class UrlObjects:
    """The objects under a URL (`file://`, `s3://`, `gs://`, `az://`, and what fsspec knows).

    Raises `TierUnavailable` if the URL or a setting is not understood, or a package is missing.
    """

    def __init__(self, url: str, access: Access | None = None) -> None:
        access = with_endpoint(url, access or Access())
        self._secrets = Redactor(access.secrets(), SECRET_CHARACTERS_MIN)
        # "memory://" stays; elsewhere a slash at the end would be doubled in messages.
        self.url = mask_url(url if url.endswith("://") else url.rstrip("/"))
        """Without secrets."""
        self._listed_by_server = provider_of(url) in CLOUDS
        with self._translated("open"):
            self.store = _open(url, access)
            self.names_per_removal = names_per_removal(url, access)
            """How many objects one request removes."""

    @property
    def entries_skipped(self) -> int:
        """Entries of a local folder that listings omitted."""
        return self.store.entries_skipped if isinstance(self.store, LocalFolder) else 0

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        _check_name(name)
        _check_memory("image", image)
        try:
            with self._translated("write", name):
                await self.store.write(name, image, create=create)
        except ChunkMissing as error:
            # A folder that cannot be made (a dangling link, a pseudo file system) is no miss.
            raise TierUnavailable(
                f"{error}: the folder of store.url cannot be made here; correct it", retryable=False
            ) from None

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        _check_name(name)
        _check_memory("into", into)
        with self._translated("read", name):
            return await self.store.read(name, into, seen=seen)

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        folder = prefix.rstrip("/")
        # `start_after` may be any name of a listing, also a foreign one: it opens nothing.
        if folder:
            _check_name(folder)
        try:
            with self._translated("list", prefix):
                return await self.store.list(
                    folder, start_after=start_after, deep=deep, names_max=names_max
                )
        except ChunkMissing as error:
            if self._listed_by_server:
                # A server lists an empty prefix as empty. Taking its 404 for that would make the
                # catalog forget everything.
                raise TierUnavailable(
                    f"{error}: a listing got a 404; check that the bucket exists", retryable=True
                ) from None
            return []

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            _check_name(name)
        if names:
            with self._translated("delete", names[0]):
                await self.store.delete(names)

    async def quarantine(self, name: str) -> None:
        _check_name(name)
        with contextlib.suppress(ChunkMissing), self._translated("quarantine", name):
            await self.store.move(name, f"{QUARANTINE_FOLDER}/{name}")

    async def probe(self) -> Abilities:
        name = f"{PROBE_FOLDER}/{secrets.token_hex(PROBE_NAME_BYTES)}"
        sent = np.frombuffer(secrets.token_bytes(PROBE_BYTES), dtype=np.uint8)
        await self.write(name, sent)
        try:
            await self._probe_back(name, sent)
            # A key may be allowed to put and get but not to list, and the catalog lists.
            await self.list(PROBE_FOLDER)
            abilities = Abilities(creates=False)
            try:
                await self.write(name, sent, create=True)
            except ObjectExists:
                abilities = Abilities(creates=True)
            except TierUnavailable as error:
                # "Not implemented" is an answer; a store that fails for a while gives none.
                if error.retryable:
                    raise
        except BaseException:
            with anyio.move_on_after(CLEANUP_SECONDS_MAX, shield=True):
                with contextlib.suppress(Exception):
                    await self.store.delete([name])
            raise
        await self.delete([name])
        return abilities

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
                f"read {self.url}/{name}: {size_bytes} bytes came back that differ from the "
                f"{PROBE_BYTES} written; look for a proxy or cache before the store",
                retryable=False,
            )

    async def close(self) -> None:
        with self._translated("close"):
            await self.store.close()

    @contextlib.contextmanager
    def _translated(self, verb: str, name: str = "") -> Generator[None]:
        target = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except (ImageTruncated, ObjectOdd, ObjectDenied) as error:
            raise type(error)(f"{verb} {target}: {error}") from None
        except TierError:
            raise
        except Exception as error:
            # `from None`: the client's own text may contain a secret.
            doing, server = f"{verb} {target}", self._listed_by_server
            raise translate(error, doing, self._secrets, server=server) from None


def _open(url: str, access: Access) -> StoreClient:
    if "::" in url:
        raise TierUnavailable(
            f"store.url={url.split('::', 1)[0]}::…: chained URLs are not served; give the store's "
            "own URL",
            retryable=False,
        )
    backend = chosen_backend(url, access)
    check(url, access, backend)
    if provider_of(url) == "folder":
        path = url.split("://", 1)[1] if "://" in url else url
        # A relative root must not move with the working directory.
        root = os.path.abspath(os.path.expanduser(path))
        return LocalFolder(root, access.folder)
    # Not at the top: a sidecar with another kind of store does not have their packages.
    if backend == "obstore":
        from tiers.store.obstore_client import ObstoreClient

        return ObstoreClient(url, access)
    from tiers.store.fsspec_client import open_fsspec

    return open_fsspec(url, access)


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
