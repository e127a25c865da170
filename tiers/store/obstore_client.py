"""S3, GCS and Azure through obstore: the fast path.

Owns the obstore client of a store, the translation of `Access` for it, and when a slot is free
again. A body is sent from the slot's own memory by Rust threads that never take the GIL. What is
read is copied into the slot off the event loop, or received there by `s3_direct.py` where that can.
Does not own the meaning of errors (`object_tier.py`), nor finding S3 credentials
(`aws_credentials.py`).

Invariants:

* A cancelled call of obstore raises before its Rust half has ended; so the memory view that was
  handed over is released, which Python refuses while anything holds it.
* One request per verb: bodies are never cut into parts (parts of an aborted upload are billed until
  somebody removes them), and the client never retries.

Traps of obstore 0.12, each with a test: `allow_http` panics as a keyword and works inside
`client_options`; a process that exits while its threads run may abort; keys of a configuration are
mixed with a session token of the environment; endpoints of the environment count, and its
AWS_ENDPOINT_URL_S3 more than `endpoint`.
"""

import contextlib
import ctypes
import datetime as dt
import logging
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import obstore
from obstore import store

from tiers.store import aws_credentials as aws
from tiers.store.access import Access, azure_account, installed, present, provider_of
from tiers.store.client import Bytes, Found, Listing, Seen, fill, run_to_end
from tiers.store.errors import is_missing
from tiers.store.s3_direct import NotUnderstoodError, S3DirectReads
from tiers.threads import lower_priority

COPY_THREADS_MAX: Final = 2
"""One copies as fast as most networks deliver; more only compete with the loop for cores."""
LIST_NAMES_PER_STEP: Final = 1000
RELEASE_POLL_SECONDS: Final = 0.001
CLOSE_SECONDS: Final = 0.05
"""How long obstore's threads take to become idle after the last answer."""
POOL_IDLE_SECONDS_MAX: Final = 60
REQUEST_SECONDS_MAX: Final = 3600
"""In effect none: `Deadline` limits a request."""
MAPPED_ALLOCATION_BYTES_MIN: Final = 1 << 30
KEPT_HEAP_BYTES: Final = 512 << 20
_AZURE_KINDS: Final = {
    "account_key": "access_key",
    "sas_token": "sas_token",
    "client_secret": "client_secret",
    "web_identity_token_file": "workload_identity",
}
"""What obstore calls the kind of credentials that have a field."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

_log = logging.getLogger("kvlake.store")


class ObstoreClient:
    """A bucket or container, and a prefix in it."""

    def __init__(self, url: str, access: Access) -> None:
        _start_runtime()
        _keep_freed_memory()
        # One for obstore and direct reads: two would assume a role twice.
        provider = aws.credential_provider(access) if provider_of(url) == "s3" else None
        self.client = _client(url, access, provider)
        self._direct = _direct(url, access, provider)
        self._attributes = {"Storage-Class": access.storage_class} if access.storage_class else None
        self._copies = anyio.CapacityLimiter(COPY_THREADS_MAX)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        body = image.data
        try:
            await obstore.put_async(
                self.client,
                name,
                body,
                use_multipart=False,
                mode="create" if create else "overwrite",
                attributes=self._attributes,
            )
        finally:
            await _released(body)

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        if (direct := self._direct) is not None:
            try:
                return await direct.get(name, into, seen=seen)
            except NotUnderstoodError as error:
                # Concurrent reads may have logged this already, or still run.
                if self._direct is direct:
                    _log.warning("direct reads are off, obstore reads from now on: %s", error)
                    self._direct = None
                direct.close()
        # The range bounds the memory that a foreign object of any size can take.
        body: Any = await obstore.get_range_async(self.client, name, start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: fill(body, into, seen), self._copies)

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        if self._direct is not None:
            # Listings run every few seconds, reads may not.
            self._direct.tidy()
        found: Listing = []
        if not deep:
            answer = await obstore.list_with_delimiter_async(self.client, prefix or None)
            found += [Found(f"{one}/", 0, 0.0) for one in answer["common_prefixes"]]
            found += map(_found, answer["objects"])
            return [one for one in found if one.name > start_after]
        stream = obstore.list(
            self.client,
            prefix or None,
            offset=start_after or None,
            chunk_size=LIST_NAMES_PER_STEP,
        )
        async for part in stream:
            # Servers differ in where they begin: Azure at the name, some at the start.
            found += [one for one in map(_found, part) if one.name > start_after]
            if names_max is not None and len(found) >= names_max:
                break
        return found

    async def move(self, name: str, target: str) -> None:
        await obstore.copy_async(self.client, name, target, overwrite=True)
        await self.delete([name])

    async def delete(self, names: Sequence[str]) -> None:
        try:
            await obstore.delete_async(self.client, list(names))
        except FileNotFoundError:
            # One that is missing is an error on some stores, and those after it are not removed.
            for name in names:
                try:
                    await obstore.delete_async(self.client, name)
                except FileNotFoundError as error:
                    # obstore makes one of any 404, also of one that is not the store's.
                    if not is_missing(error, server=True):
                        raise

    async def close(self) -> None:
        if self._direct is not None:
            self._direct.close()
        # obstore has no verb for it. Its threads must be idle when Python ends.
        with anyio.CancelScope(shield=True):
            await anyio.sleep(CLOSE_SECONDS)


def _found(one: Any) -> Found:
    return Found(one["path"], one["size"], one["last_modified"].timestamp())


async def _released(body: memoryview) -> None:
    """Return once nothing else holds the memory behind `body`."""
    while True:
        try:
            body.release()
        except BufferError:
            # As in `run_to_end`: the wait is about memory, and no cancel may shorten it.
            with anyio.CancelScope(shield=True):
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await anyio.sleep(RELEASE_POLL_SECONDS)
        else:
            return


def _keep_freed_memory() -> None:
    """Make malloc of glibc reuse what the last read freed, rather than map and fault it in again.

    For the whole process, and worth it: two thirds of the processor time of reading 32 MiB objects
    were page faults.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, MAPPED_ALLOCATION_BYTES_MIN)
    mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


@cache
def _start_runtime() -> None:
    """Make obstore start its threads, once in a process, from a thread of lower priority.

    A thread of Linux inherits the niceness of the one that starts it, and obstore starts its
    threads with its first call: from the event loop they would compete with the loop.
    """

    def first_call() -> None:
        lower_priority()
        obstore.put(store.MemoryStore(), "first", b"")

    thread = threading.Thread(target=first_call, name="kvlake-obstore")
    thread.start()
    thread.join()


def _direct(url: str, access: Access, provider: aws.Provider | None) -> S3DirectReads | None:
    """Reads straight into slots; None where that needs a full HTTP client."""
    if provider_of(url) != "s3" or access.endpoint is None or access.proxy is not None:
        return None
    if provider is not None and not installed("botocore"):
        return None
    bucket, prefix = _bucket_and_prefix(url)
    virtual = access.virtual_hosted(bucket)
    endpoint = (_with_bucket(access.endpoint, bucket) if virtual else access.endpoint).rstrip("/")
    way = urlsplit(endpoint)
    # obstore follows proxies of the environment, and speaks TLS, which decrypts into memory of its
    # own in any case.
    proxied = not {"http", "all"}.isdisjoint(getproxies()) and not proxy_bypass(way.netloc)
    if way.scheme != "http" or proxied:
        return None
    path = "/".join(one for one in ("" if virtual else bucket, prefix) if one)
    return S3DirectReads(f"{endpoint}/{path}", access, provider)


def _bucket_and_prefix(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.netloc.split("@", 1)[0], parts.path.strip("/")


def _client(url: str, access: Access, provider: aws.Provider | None) -> Any:
    bucket, prefix = _bucket_and_prefix(url)
    common: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": _client_options(access),
        "retry_config": {"max_retries": 0},
    }
    match provider_of(url):
        case "s3":
            return store.S3Store(bucket, **_s3(bucket, access, provider), **common)
        case "gcs":
            return store.GCSStore(bucket, **_gcs(access), **common)
        case _:
            return store.AzureStore(bucket, **_azure(url, access), **common)


def _client_options(access: Access) -> dict[str, Any]:
    ca_file = access.tls.ca_file
    return present(
        # Without this, http:// is refused.
        allow_http=True,
        connect_timeout=dt.timedelta(seconds=access.connect_timeout),
        read_timeout=dt.timedelta(seconds=access.read_timeout),
        timeout=dt.timedelta(seconds=REQUEST_SECONDS_MAX),
        pool_idle_timeout=dt.timedelta(seconds=POOL_IDLE_SECONDS_MAX),
        allow_invalid_certificates=None if access.tls.verify else True,
        root_certificate=None if ca_file is None else ca_file.read_bytes(),
        proxy_url=access.proxy,
    )


def _s3(bucket: str, access: Access, provider: aws.Provider | None) -> dict[str, Any]:
    virtual = access.virtual_hosted(bucket)
    # obstore reads no profile.
    region = aws.region_of(access)
    endpoint = access.endpoint or f"https://s3.{region}.amazonaws.com"
    return present(
        virtual_hosted_style_request=virtual,
        # The image carries its own checksum; hashing it once more to sign it costs a core.
        unsigned_payload=True,
        # Not every server knows the request that deletes many.
        disable_bulk_delete=not access.at_aws,
        region=region,
        aws_endpoint_url_s3=_with_bucket(endpoint, bucket) if virtual else endpoint,
        server_side_encryption=access.encryption.algorithm,
        sse_kms_key_id=access.encryption.kms_key,
        credential_provider=provider,
        skip_signature=True if provider is None else None,
    )


def _with_bucket(endpoint: str, bucket: str) -> str:
    """Obstore wants the bucket in the endpoint itself."""
    parts = urlsplit(endpoint)
    return parts._replace(
        netloc=f"{bucket}.{parts.netloc}",
        # A slash at its end would begin the names of objects.
        path=parts.path.rstrip("/"),
    ).geturl()


def _gcs(access: Access) -> dict[str, Any]:
    credentials = access.credentials
    bearer = {"token": credentials.token, "expires_at": None}
    return present(
        base_url=access.endpoint,
        # obstore signs writes to GCS all the same, but nobody can write anonymously.
        skip_signature=True if credentials.kind == "anonymous" else None,
        service_account=credentials.key_file,
        credential_provider=None if credentials.token is None else lambda: bearer,
    )


def _azure(url: str, access: Access) -> dict[str, Any]:
    credentials = access.credentials
    kinds = (_AZURE_KINDS[name] for name in credentials.given() if name in _AZURE_KINDS)
    kind = next(kinds, "managed_identity" if credentials.kind == "role" else None)
    return present(
        account_name=azure_account(url) or access.account,
        endpoint=access.endpoint,
        credential_type=kind,
        skip_signature=True if credentials.kind == "anonymous" else None,
        account_key=credentials.account_key,
        sas_key=credentials.sas_token,
        tenant_id=credentials.tenant_id,
        client_id=credentials.client_id,
        client_secret=credentials.client_secret,
        federated_token_file=credentials.web_identity_token_file,
    )
