"""Object stores through fsspec: the general path, for every store that fsspec has a driver for.

Owns the adapter from `StoreClient` to a driver's own verbs, and the translation of `Access` for
s3fs, gcsfs and adlfs. `storage_options` override what is derived from `Access`.

Synchronous drivers are called one at a time in a thread, because few of them are thread-safe, and a
cancel does not wait for it, because few have timeouts: a call that hangs keeps the others waiting,
until their deadlines. Asynchronous drivers run on the caller's event loop, where they also hash and
send bodies. Objects are copied, listings are complete, and each deletion is a request: a fast store
uses obstore.

Invariants: no driver retries by itself, because layers of retries multiply; a body is sent in one
request, because parts of an aborted upload are billed until somebody removes them; a missing bucket
is an error and never an empty listing; a write that must not replace anything is refused by drivers
whose `mode="create"` is not atomic.
"""

# ruff: noqa: SLF001 - the asynchronous half of fsspec's contract is its underscored methods

import contextlib
import dataclasses
import datetime as dt
import shutil
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import anyio

from tiers.errors import TierUnavailable
from tiers.store import aws_credentials as aws
from tiers.store.access import Access, Credentials, azure_account, present
from tiers.store.client import (
    Bytes,
    Found,
    Listing,
    Seen,
    StoreClient,
    fill,
    run_abandonable,
    run_to_end,
)
from tiers.store.errors import is_missing

COPY_THREADS_MAX: Final = 4
COPY_BYTES: Final = 1 << 20
"""Held in memory at a time of an object that is copied through this process."""
CONNECTIONS_MAX: Final = 64
SINGLE_REQUEST_BYTES_MAX: Final = 4 << 30
AZURE_HOST: Final = "blob.core.windows.net"
ATOMIC_CREATE: Final = frozenset(("memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"))
"""Protocols whose `mode="create"` was tested with concurrent writers. fsspec's default looks first
and then writes, so two writers may both succeed."""
_S3FS_IDENTITY: Final = frozenset(("key", "secret", "token", "session", "profile", "anon"))


def open_fsspec(url: str, access: Access) -> StoreClient:
    """The file system of `url`. Raises `TierUnavailable` if the URL is not understood."""
    import fsspec  # here: a sidecar without a store, or with a folder, does not need it

    protocol = url.split("://", 1)[0].lower()
    try:
        driver: Any = fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        raise TierUnavailable(
            f"store.url: {error}; use file://, s3://, gs:// or another fsspec URL", retryable=False
        ) from error
    root: str = driver._strip_protocol(url).rstrip("/")
    given = {**driver._get_kwargs_from_urls(url), **access.storage_options}
    given["skip_instance_cache"] = True
    if driver.async_impl:
        # A cached listing would hide what other clusters wrote.
        given = {"use_listings_cache": False, **given, "asynchronous": True}
    creates = protocol in ATOMIC_CREATE
    match protocol:
        case "s3" | "s3a":
            fs = driver(**_s3_options(root.split("/", 1)[0], access, given))
            fs.retries = 1
            return FsspecClient(fs, root, creates=creates, server=True, one_request=True)
        case "gs" | "gcs":
            return FsspecClient(
                _gcs(access, given),
                root,
                creates=creates,
                server=True,
                one_request=True,
                on_loop=lambda fs: _trust(fs, access),
            )
        case "az" | "abfs" | "abfss":
            account = azure_account(url) or access.account
            # `anon` keeps adlfs from looking for credentials, which the client has. With a loop of
            # its own it can close the client again when Python ends; without one it raises then.
            own = {"account_name": account, "anon": True}
            fs = driver(**{**own, **given, "asynchronous": False})
            # adlfs's own client knows no endpoint, proxy or authorities, and retries for minutes.
            fs.service_client = _azure_client(account, access, given)
            return FsspecClient(
                fs,
                root,
                creates=creates,
                server=True,
                hides_missing_bucket=True,
                put_options=_azure_tier(access),
            )
        case _:
            return FsspecClient(driver(**given), root, creates=creates)


@dataclasses.dataclass
class FsspecClient:
    """One driver of fsspec."""

    fs: Any
    root: str
    """Bucket and prefix, or path, without a slash at the end."""
    creates: bool
    """Whether `mode="create"` is atomic."""
    server: bool = False
    """Whether requests go over HTTP: then an error that names a file is one of this machine."""
    one_request: bool = False
    """Whether the driver takes a `chunksize`, beyond which it cuts a body."""
    hides_missing_bucket: bool = False
    """Whether the driver lists a missing bucket as empty."""
    put_options: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Further arguments of each write."""
    on_loop: Callable[[Any], None] | None = None
    """Called once, on the event loop, before the first request."""

    def __post_init__(self) -> None:
        self._copies = anyio.CapacityLimiter(COPY_THREADS_MAX)
        self._calls = anyio.CapacityLimiter(1)

    async def _call(self, verb: str, *args: Any, **options: Any) -> Any:
        if not self.fs.async_impl:
            # No argument is the caller's memory: a write has a copy, a read returns its own bytes.
            return await run_abandonable(
                lambda: getattr(self.fs, verb)(*args, **options), self._calls
            )
        if self.on_loop is not None:
            self.on_loop(self.fs)
            self.on_loop = None
        return await getattr(self.fs, f"_{verb}")(*args, **options)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        options = dict(self.put_options)
        if create:
            if not self.creates:
                raise NotImplementedError("this fsspec driver has no atomic create")
            options["mode"] = "create"
        if self.one_request:
            options["chunksize"] = image.nbytes + 1
        # A copy, because a driver is free to read a body in a thread of its own.
        body = await run_to_end(image.tobytes, self._copies)
        await self._make_folder(name)
        await self._call("pipe_file", self._path(name), body, **options)

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        # The range bounds the memory that a foreign object of any size can take, and spares the
        # HEAD request by which s3fs would first ask for the size.
        body: bytes = await self._call("cat_file", self._path(name), start=0, end=into.nbytes + 1)
        return await run_to_end(lambda: fill(body, into, seen), self._copies)

    async def list(
        self,
        prefix: str,
        *,
        start_after: str = "",
        deep: bool = True,
        names_max: int | None = None,  # noqa: ARG002 (fsspec has no pages)
    ) -> Listing:
        path = self._path(prefix)
        try:
            found = await self._call("find" if deep else "ls", path, detail=True)
        except FileNotFoundError:
            if deep:
                raise
            # `ls` raises for an empty folder as for a missing bucket, `find` for a bucket only.
            found = await self._call("find", path, detail=True)
        if not found and self.hides_missing_bucket:
            await self._call("ls", self.root.split("/", 1)[0])
        top = self.root.strip("/")
        listing: Listing = []
        for info in found.values() if isinstance(found, dict) else found:
            name = str(info["name"]).strip("/")[len(top) + 1 if top else 0 :]
            # Some list the folder itself, too.
            if name == prefix or (prefix and not name.startswith(f"{prefix}/")):
                continue
            if info.get("type") != "directory":
                listing.append(Found(name, int(info["size"]), _modified_seconds(info)))
            elif not deep:
                listing.append(Found(f"{name}/", 0, 0.0))
        return [one for one in listing if one.name > start_after]

    async def move(self, name: str, target: str) -> None:
        source = self._path(name)
        await self._make_folder(target)
        try:
            # Not `mv`, which may rename: the object would keep the time when it was written.
            await self._call("cp_file", source, self._path(target))
        except FileNotFoundError:
            # s3fs asks by a HEAD, whose 404 does not say what is missing. A GET raises what does.
            await self._call("cat_file", source, start=0, end=1)
            raise
        except NotImplementedError:
            # sftp, ftp and smb have no copying of their own.
            await run_abandonable(
                lambda: self._copy_through(source, self._path(target)), self._calls
            )
        await self.delete([name])

    def _copy_through(self, source: str, target: str) -> None:
        with self.fs.open(source, "rb") as read, self.fs.open(target, "wb") as write:
            shutil.copyfileobj(read, write, COPY_BYTES)

    async def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                await self._call("rm_file", self._path(name))
            except FileNotFoundError as error:
                # Drivers make one of any 404, also of one that is not the store's.
                if not is_missing(error, server=self.server):
                    raise

    async def close(self) -> None:
        # fsspec has no verb for it. These are where s3fs, gcsfs (and http) and adlfs keep theirs.
        for place in ("_s3", "_session", "service_client"):
            client: Any = getattr(self.fs, place, None)
            if client is not None:
                await client.close()

    async def _make_folder(self, name: str) -> None:
        if not self.fs.async_impl:
            await self._call("makedirs", self._path(name).rsplit("/", 1)[0], exist_ok=True)


def _modified_seconds(info: Mapping[str, Any]) -> float:
    """When an object was written, under the driver's own name for it; 0 if it does not say."""
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


def _s3_options(bucket: str, access: Access, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments of `s3fs.S3FileSystem`."""
    credentials = access.credentials
    config = {
        **aws.client_config(access),
        "retries": {"total_max_attempts": 1},
        "max_pool_connections": CONNECTIONS_MAX,
        # The image carries its own checksum from the GPU on; a second one on each way costs CPU,
        # and several S3 servers refuse the trailer that it comes in.
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        # botocore's own "auto" differs from release to release, and from obstore's.
        "s3": {"addressing_style": "virtual" if access.virtual_hosted(bucket) else "path"},
    }
    client = {"region_name": access.region, "verify": aws.verify(access)}
    extra = {
        "ServerSideEncryption": access.encryption.algorithm,
        "SSEKMSKeyId": access.encryption.kms_key,
        "StorageClass": access.storage_class,
    }
    own: dict[str, object] = {"endpoint_url": access.endpoint}
    if credentials.kind == "static":
        own |= {"key": credentials.access_key, "secret": credentials.secret_key}
        own["token"] = credentials.session_token
    elif credentials.kind == "anonymous":
        own["anon"] = True
    elif credentials.kind != "auto" or _S3FS_IDENTITY.isdisjoint(given):
        # s3fs's own session reads credentials in files once, and knows no role of ours.
        own["session"] = aws.aio_session(access)
    return {
        **present(**own),
        **given,
        "config_kwargs": _merged(config, given.get("config_kwargs")),
        "client_kwargs": _merged(client, given.get("client_kwargs")),
        "s3_additional_kwargs": _merged(extra, given.get("s3_additional_kwargs")),
    }


def _merged(own: Mapping[str, object], given: object) -> dict[str, object]:
    return present(**own) | (given if isinstance(given, dict) else {})  # pyright: ignore[reportUnknownVariableType]


def _gcs(access: Access, given: Mapping[str, Any]) -> Any:
    import aiohttp

    # Its sibling, which fsspec would take, first asks an API that other servers than Google's do
    # not have for the layout of each bucket, and sends some requests by gRPC.
    from gcsfs.core import GCSFileSystem
    from google.oauth2 import credentials as google

    credentials = access.credentials
    token: Any = "google_default"  # noqa: S105 (gcsfs's word for the chain)
    if credentials.kind == "anonymous":
        token = "anon"  # noqa: S105 (gcsfs's word for none)
    elif credentials.kind == "static":
        bearer: Any = google.Credentials
        token = credentials.key_file or bearer(credentials.token)
    options = {
        "endpoint_url": access.endpoint,
        "token": token,
        "session_kwargs": present(proxy=access.proxy, trust_env=access.proxy is None),
        "requests_timeout": aiohttp.ClientTimeout(
            total=None,
            sock_connect=access.connect_timeout,
            sock_read=access.read_timeout,
        ),
    }
    driver: Any = GCSFileSystem
    fs = driver(**{**present(**options), **given})
    # It tries six times, with pauses, and takes no argument that says otherwise.
    send = type(fs)._request.__wrapped__.__get__(fs)
    # It renews tokens on the event loop, and blocks it for minutes if nothing answers.
    renew, renewals = fs.credentials.maybe_refresh, anyio.CapacityLimiter(1)
    fs.credentials.maybe_refresh = lambda: None

    async def request(*args: Any, **options: Any) -> Any:
        await run_abandonable(renew, renewals)
        return await send(*args, **options)

    fs._request = request
    return fs


def _trust(fs: Any, access: Access) -> None:
    """Have gcsfs follow `access.tls`; a connector can be made on a running event loop only."""
    import aiohttp

    if access.tls.verify and access.tls.ca_file is None:
        return
    trusted: ssl.SSLContext | bool = access.tls.verify and ssl.create_default_context(
        cafile=access.tls.ca_file
    )
    fs.session_kwargs["connector"] = aiohttp.TCPConnector(ssl=trusted, limit=CONNECTIONS_MAX)


def _azure_client(account: str | None, access: Access, given: Mapping[str, Any]) -> Any:
    """A `BlobServiceClient` that follows `access`, and adlfs's words for credentials in `given`."""
    from azure.storage.blob.aio import BlobServiceClient

    account = given.get("account_name") or account
    proxies = access.proxy and {"http": access.proxy, "https": access.proxy}
    options = present(
        retry_total=0,
        connection_timeout=access.connect_timeout,
        read_timeout=access.read_timeout,
        max_single_put_size=SINGLE_REQUEST_BYTES_MAX,
        max_single_get_size=SINGLE_REQUEST_BYTES_MAX,
        connection_verify=aws.verify(access),
        proxies=proxies,
    )
    if "connection_string" in given:
        return BlobServiceClient.from_connection_string(given["connection_string"], **options)
    host = given.get("account_host") or f"{account}.{AZURE_HOST}"
    # What adlfs calls credentials comes first.
    names = ("account_key", "sas_token", "tenant_id", "client_id", "client_secret")
    words: dict[str, Any] = {name: given.get(name) for name in names}
    credentials = access.credentials
    if any(words.values()):
        credentials = credentials.model_copy(update=words)
    return BlobServiceClient(
        access.endpoint or f"https://{host}",
        credential=given.get("credential") or _azure_credential(account, credentials),
        **options,
    )


def _azure_credential(account: str | None, credentials: Credentials) -> Any:
    from azure.identity import aio

    if credentials.account_key is not None:
        return {"account_name": account, "account_key": credentials.account_key}
    if credentials.sas_token is not None:
        return credentials.sas_token
    if credentials.client_secret is not None:
        tenant, client = credentials.tenant_id or "", credentials.client_id or ""
        return aio.ClientSecretCredential(tenant, client, credentials.client_secret)
    if credentials.kind == "anonymous":
        return None
    if credentials.web_identity_token_file is not None:
        return aio.WorkloadIdentityCredential(
            tenant_id=credentials.tenant_id,
            client_id=credentials.client_id,
            token_file_path=credentials.web_identity_token_file,
        )
    if credentials.kind == "role":
        return aio.ManagedIdentityCredential(client_id=credentials.client_id)
    return aio.DefaultAzureCredential()


def _azure_tier(access: Access) -> dict[str, object]:
    if access.storage_class is None:
        return {}
    from azure.storage.blob import StandardBlobTier

    return {"standard_blob_tier": StandardBlobTier(access.storage_class)}
