"""The sidecar's settings: what there is, its defaults and limits, one YAML file.

Owns the models (`Config` and its sections), loading with errors that say where and what to do,
showing without secrets, and the JSON schema that editors check a file against. Reading YAML and
wording errors is `sidecar/configfile.py`.

Invariants: a `Config` that exists is valid, frozen and complete (every default filled in); sizes
are bytes and durations are seconds once parsed; no secret leaves through `repr`, `show` or an
error.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

import yaml
from pydantic import (
    BaseModel,
    Field,
    SecretStr,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from sidecar import tenants
from sidecar.configfile import (
    ANY_NAME,
    MASK,
    TEXT_BYTES_MAX,
    ConfigError,
    FieldPath,
    Source,
    explain,
    mask_url,
    masked,
    read_source,
    secrets_in,
    secrets_of_url,
)
from sidecar.fieldtypes import Count, Directory, Duration, Flag, Ratio, ReadMode, Size, WriteMode
from sidecar.protocol import tenant_id
from sidecar.secretfiles import read_secret
from sidecar.section import Section
from sidecar.storeaccess import Access
from sidecar.tenants import OTHER, UNSALTED, TenantRules
from sidecar.units import format_duration
from tiers.access import AccessError, check, chosen_backend
from tiers.billing import Operation, PriceTable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Config", "ConfigError", "load", "loads", "schema", "show"]

Price = Annotated[Ratio, Field(ge=0, le=1_000_000)]

SOCKET_PATH_BYTES_MAX: Final = 107
"""What `struct sockaddr_un` holds on Linux, less the closing zero."""

UID_MAX: Final = (1 << 32) - 1
OVERFLOW_UID: Final = 65_534

_TCP: Final = re.compile(r"^tcp://(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9.*-]+):[0-9]{1,5}$")
_PUBLIC_KEY: Final = re.compile(r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$")
_NAME: Final = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
_URL: Final = re.compile(r"^[a-z][a-z0-9+.-]*://.*", re.DOTALL)


def default_runtime_directory() -> Path:
    """The user's own runtime directory where there is one, else one in /tmp named by user id."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and Path(own).is_dir():
        return Path(own) / "kvlake"
    return Path(f"/tmp/kvlake-{os.getuid()}")  # noqa: S108 (made 0700, and its owner is checked)


class Runtime(Section):
    """Where the sidecar's sockets are, and what this sidecar is called."""

    directory: Directory = Field(default_factory=default_runtime_directory)
    """Absolute directory for sockets; made with mode 0700."""
    name: str = "default"
    """Name of this sidecar; two on one node need two names."""
    allow_uids: tuple[Count, ...] = Field(default=(), max_length=256)
    """Further users whose engines are served, by number; the sidecar's own and root always are."""
    endpoint: str = "ipc"
    """Where jobs come in: `ipc`, or `tcp://ADDRESS:PORT` with a CURVE key."""
    curve_secret_key_file: Directory | None = None
    """File with this side's CURVE key, for an endpoint over TCP; `kvlake keygen` makes it."""
    strict_parents: Flag = True
    """Refuse a directory below one that other users can write to. Off for a volume of one pod."""

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return _require_absolute(value)

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _NAME.match(value):
            raise ValueError(
                f"{value!r} cannot name a directory; use 1 to 64 letters, digits, '.', '_' or '-'"
            )
        return value

    @field_validator("allow_uids", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(cast("list[object]", value)) if isinstance(value, list) else value

    @field_validator("allow_uids")
    @classmethod
    def _users(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for uid in value:
            if not 0 <= uid < UID_MAX:
                raise ValueError(f"{uid} is no user id; write numbers from 0 to {UID_MAX - 1}")
            if uid == OVERFLOW_UID:
                raise ValueError(
                    f"{uid} stands for every user whom this user namespace does not know; give the "
                    "engine a user of its own"
                )
        return value

    @field_validator("endpoint")
    @classmethod
    def _known(cls, value: str) -> str:
        return _require_endpoint(value)

    @model_validator(mode="after")
    def _keyed(self) -> Runtime:
        path = self.curve_secret_key_file
        if self.endpoint != "ipc" and path is None:
            raise ValueError(
                f"endpoint={self.endpoint} needs a key, or anybody could connect: `kvlake keygen "
                "--out FILE`, then runtime.curve_secret_key_file: FILE"
            )
        if self.endpoint == "ipc" and path is not None:
            raise ValueError("curve_secret_key_file is for an endpoint over TCP; leave it out")
        if path is not None:
            _require_absolute(path)
        return self

    def secret_key(self) -> str:
        """The CURVE key in `curve_secret_key_file`. Raises `SecretFileError`."""
        assert self.curve_secret_key_file is not None, "checked for an endpoint over TCP"
        return read_secret(self.curve_secret_key_file, "runtime.curve_secret_key_file")

    @model_validator(mode="after")
    def _fits(self) -> Runtime:
        length = len(os.fsencode(self.attach_path))
        if length > SOCKET_PATH_BYTES_MAX:
            raise ValueError(
                f"socket path {self.attach_path} has {length} bytes, and Linux takes at most "
                f"{SOCKET_PATH_BYTES_MAX}; choose a shorter runtime.directory or runtime.name"
            )
        return self

    @property
    def served_uids(self) -> tuple[int, ...]:
        """Users whose engines may attach: our own, root (which could anyway), and those listed."""
        return tuple(sorted({os.geteuid(), 0, *self.allow_uids}))

    @property
    def home(self) -> Path:
        """This sidecar's own directory."""
        return self.directory / self.name

    @property
    def attach_path(self) -> Path:
        """Unix socket on which engines attach."""
        return self.home / "attach.sock"

    @property
    def jobs_path(self) -> Path:
        """Socket behind the ZMQ endpoint that carries jobs."""
        return self.home / "jobs.sock"

    @property
    def events_path(self) -> Path:
        """Socket behind the ZMQ endpoint that publishes events."""
        return self.home / "events.sock"

    @property
    def replay_path(self) -> Path:
        """Socket behind the ZMQ endpoint that replays them."""
        return self.home / "replay.sock"

    @property
    def engine_events(self) -> tuple[str, str]:
        """Where an engine that `kvlake run` starts publishes its own events, and replays them."""
        return f"ipc://{self.home / 'engine.sock'}", f"ipc://{self.home / 'again.sock'}"


class Chunk(Section):
    """The unit that is stored, looked up and evicted."""

    tokens: Count = Field(default=256, ge=1, le=65_536)
    """Tokens per chunk; a multiple of the engine's block size. Handed on by `kvlake run`."""


class Host(Section):
    """The host memory tier."""

    size: Size = Field(default=8 << 30, ge=1 << 20)
    """Host memory for chunks, such as "8GiB"."""
    directory: Directory = Path("/dev/shm")  # noqa: S108 (a file system in memory, by design)
    """Absolute directory of the pool's file; in a memory file system such as /dev/shm."""
    policy: Literal["lru", "fifo"] = "lru"
    """Which chunk makes room: the least recently used, or the oldest."""
    prefault: Flag = True
    """Touch all of it at the start, so that no store pays for first use."""
    after_stop: Literal["keep", "remove"] = "keep"
    """`keep`: the memory stays for the next start. `remove`: it is given back at SIGTERM."""

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return _require_absolute(value)


class StoreBreaker(Section):
    """When a store that fails is left alone: reads and writes each on their own."""

    failures_max: Count = Field(default=5, ge=1, le=1_000_000)
    """Requests that fail in a row, retries included, before nothing is sent any more."""
    pause: Duration = Field(default=1.0, ge=0.01)
    """How long, before one request is sent to see whether the store works again."""
    pause_max: Duration = Field(default=30.0, ge=0.01)
    """The pause doubles with each such request that fails, up to this."""


class Collection(Section):
    """Compacting the catalog and deleting what is beyond `ttl`, `size_max` and `objects_max`."""

    enabled: Flag = True
    """Take part in it. One sidecar at a time does it, whoever gets the store's lease."""
    every: Duration = Field(default=600.0, ge=1.0)
    """How often it is looked whether there is anything to do."""
    grace: Duration = Field(default=300.0, ge=0.1)
    """From withdrawing a chunk to deleting it; longer than a refresh and a read together take."""


class Prices(Section):
    """What the store charges, for an estimate of the monthly bill. Requests are per 1000."""

    currency: str = Field(default="USD", min_length=1, max_length=8)
    """What the prices are in; only shown."""
    list: Price = 0.0
    """1000 requests that list."""
    get: Price = 0.0
    """1000 requests that read."""
    put: Price = 0.0
    """1000 requests that write or copy."""
    delete: Price = 0.0
    """1000 requests that delete."""
    head: Price = 0.0
    """1000 requests that look at an object without reading it; the sidecar sends none."""
    gb_month: Price = 0.0
    """One GB (10^9 bytes) kept for a month."""
    gb_read: Price = 0.0
    """One GB read, where the store is elsewhere."""
    gb_written: Price = 0.0
    """One GB written."""

    def table(self) -> PriceTable:
        """The prices as the estimate takes them."""
        per_1000: dict[Operation, float] = {
            "list": self.list,
            "get": self.get,
            "put": self.put,
            "delete": self.delete,
            "head": self.head,
        }
        return PriceTable(per_1000, self.gb_month, self.gb_read, self.gb_written)


class Store(Access):
    """The object store tier, shared by every sidecar that names the same place."""

    storage_options: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Handed to the fsspec client as they are, for what has no setting of its own here."""
    prefix: str = ""
    """Path under `url` below which everything is kept."""
    write: WriteMode = "through"
    """Which chunks are written, in the background. `through`: all, at once. `on_reuse`: those that
    are asked for again. `on_evict`: those that host memory will evict next. `off`: none."""
    read: ReadMode = "on"
    """`on`: chunks that only the store holds are served. `off`: they are not looked for."""
    refresh_seconds: Duration = Field(default=5.0, ge=0.05)
    """How often the catalog is looked at for what other sidecars wrote."""
    catalog_flush: Duration = Field(default=1.0, ge=0.01, le=3600)
    """Longest that a written chunk waits to be announced to others; a crash loses so much."""
    catalog_rows_max: Count = Field(default=10_000, ge=1, le=100_000)
    """Chunks after which they are announced at once."""
    reconcile_every: Duration = Field(default=86_400.0, ge=1.0)
    """How long it takes to compare all objects with the catalog, in the background, in slices."""
    ttl: Duration | None = Field(default=None, ge=1.0)
    """Age at which a chunk is deleted, such as "30d"; it counts from when it was written."""
    size_max: Size | None = Field(default=None, ge=1)
    """Bytes that a namespace (a model) may hold; beyond it, the oldest chunks are deleted."""
    objects_max: Count | None = Field(default=None, ge=1)
    """Objects that a namespace may hold; beyond it, the oldest chunks are deleted."""
    gc: Collection = Field(default_factory=Collection)
    prices: Prices | None = None
    writes_inflight_max: Count = Field(default=4, ge=1, le=1024)
    """Objects written at the same time."""
    reads_inflight_max: Count = Field(default=16, ge=1, le=1024)
    """Objects read at the same time."""
    requests_per_second_max: Count | None = Field(default=None, ge=1, le=1_000_000)
    """Requests that may begin in a second, retries included, evenly spread; null: no limit."""
    write_queue_max: Size = Field(default="4GiB", ge=1, validate_default=True)
    """Bytes that wait to be written, in host memory; beyond it the oldest is not written."""
    breaker: StoreBreaker = Field(default_factory=StoreBreaker)
    recompute: Literal["when_sooner", "never"] = "when_sooner"
    """`when_sooner`: a prompt waits only while reading is expected to be sooner than computing.
    `never`: it waits as long as `limits.lookup_wait` allows, to spare the GPU."""
    regret_max: Ratio = Field(default=0.04, ge=0, le=1)
    """Of the time to compute prompts, the part that waiting for the store may cost in vain."""
    deadline_seconds_max: Duration = Field(default=30.0, ge=0.01)
    """Longest that one request to the store may take, retries included."""
    retries_max: Count = Field(default=3, ge=0, le=100)
    """How often a request that failed in passing is sent again."""

    @field_validator("url")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if not _URL.match(value):
            remedy = f"file://{value}" if value.startswith("/") else f"s3://{value or 'bucket'}"
            raise ValueError(
                f"{mask_url(value)!r} has no scheme; write a URL such as {mask_url(remedy)}"
            )
        return value

    @field_validator("prefix")
    @classmethod
    def _relative(cls, value: str) -> str:
        trimmed = value.strip("/")
        if any(part in ("", ".", "..") for part in trimmed.split("/") if trimmed):
            raise ValueError(f"{value!r} must be a plain relative path such as team-a/kv")
        return trimmed

    @model_validator(mode="after")
    def _graceful(self) -> Store:
        least = self.refresh_seconds + self.deadline_seconds_max
        if self.gc.grace <= least:
            raise ValueError(
                f"gc.grace={format_duration(self.gc.grace)}: a chunk may still be read "
                f"{format_duration(least)} after it was withdrawn (refresh_seconds and "
                "deadline_seconds_max together); raise gc.grace"
            )
        return self

    @model_validator(mode="after")
    def _reachable(self) -> Store:
        # What a client cannot do is said when the file is checked, not when a sidecar starts.
        try:
            check(
                self.url, self.access, chosen_backend(self.url, self.access, self.storage_options)
            )
        except AccessError as error:
            raise ValueError(str(error)) from error
        return self

    def __repr_args__(self) -> Any:
        """Leave no password of the URL in a traceback or a log line."""
        for name, value in super().__repr_args__():
            yield name, mask_url(value) if name == "url" and isinstance(value, str) else value


class Limits(Section):
    """Deadlines and bounds. The first four are told to the engines when they attach."""

    lookup_wait: Duration = Field(default=0.5, le=60)
    """Longest that a request waits for chunks that only the store holds."""
    load_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest that an engine waits for a load; then it computes the tokens itself."""
    store_deadline: Duration = Field(default=10.0, ge=0.01, le=600)
    """Longest that an engine holds blocks for a store; then it takes them back."""
    lease_ttl: Duration = Field(default=10.0, ge=0.01, le=3600)
    """How long a pinned chunk stays pinned if nobody lets go of it."""
    attach_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """How long a client that has connected may take to attach; then it is cut off."""
    jobs_inflight_max: Count = Field(default=256, ge=1, le=4096)
    """Jobs that one engine may have running; beyond it, it stores nothing."""
    memory_max: Size = Field(default=256 << 20, ge=1 << 20)
    """What all that waits (lookups, leases, jobs, copies) may take of the sidecar's own memory."""
    copies_queued_max: Count = Field(default=65_536, ge=16, le=10_000_000)
    """Chunks that may wait to be copied; beyond it loads miss and stores are dropped."""
    storing_max: Size | None = Field(default=None, ge=1)
    """Host memory that may be in the middle of being stored into. null: host.size."""
    pinned_max: Size | None = Field(default=None, ge=1)
    """Host memory that leases and lookups may keep from being evicted. null: host.size."""
    lookups_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Lookups that may wait or keep what they brought; beyond it they are answered as full."""
    leases_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Leases that may be held; beyond it a load goes without one."""
    frames_queued_max: Count = Field(default=16, ge=1, le=65_536)
    """Messages of one client that may wait for the sidecar; beyond it they wait in the client."""
    replies_queued_max: Count = Field(default=1024, ge=16, le=65_536)
    """Answers that may wait for one client; one that does not read more is cut off."""
    sessions_max: Count = Field(default=256, ge=1, le=65_536)
    """Attached clients: one scheduler and one worker per rank for each engine."""
    drain_seconds_max: Duration = Field(default=30.0, le=3600)
    """Longest that a stopping sidecar goes on writing to the store."""

    @model_validator(mode="after")
    def _ordered(self) -> Limits:
        if self.lease_ttl < self.load_deadline:
            raise ValueError(
                f"lease_ttl={format_duration(self.lease_ttl)} ends before "
                f"load_deadline={format_duration(self.load_deadline)}; a lease must outlive the "
                "load that it protects, so raise lease_ttl or lower load_deadline"
            )
        return self


class Quota(Section):
    """What one tenant may hold."""

    host_max: Size | None = Field(default=None, ge=1)
    """Host memory; at it, the tenant's own least recently used chunks make room. null: no limit."""
    store_max: Size | None = Field(default=None, ge=1)
    """Bytes in the object store; at it, its chunks are written no more. null: no limit."""


class NamedTenant(Quota):
    """A tenant that has a name in metrics and may have limits of its own (null: the default's)."""

    salt: SecretStr | None = Field(default=None, min_length=1)
    """The cache salt of its requests: a secret, so take it from the environment."""
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """Instead of the salt: what `kvlake tenant id` prints for it, 16 hexadecimal digits."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> NamedTenant:
        if (self.salt is None) == (self.id is None):
            raise ValueError("give either salt or id; `kvlake tenant id` makes an id of a salt")
        return self

    @field_serializer("salt", when_used="json")
    def _mask(self, value: SecretStr | None) -> str | None:
        return None if value is None else MASK

    @property
    def tenant(self) -> bytes:
        """What the tenant is called in messages."""
        if self.salt is not None:
            return tenant_id(self.salt.get_secret_value())
        return bytes.fromhex(self.id or "")


class Tenants(Section):
    """Whose chunks may take how much. Requests with one cache salt are one tenant."""

    default: Quota = Field(default_factory=Quota)
    """Limits of each tenant; requests without a cache salt count as one tenant together."""
    named: dict[str, NamedTenant] = Field(default_factory=dict[str, NamedTenant])
    """Tenants by name. Those that are not here are told together, as `other`."""

    @field_validator("named")
    @classmethod
    def _distinct(cls, value: dict[str, NamedTenant]) -> dict[str, NamedTenant]:
        owners: dict[bytes, str] = {}
        for name, tenant in value.items():
            if not _NAME.match(name) or name in (UNSALTED, OTHER):
                raise ValueError(
                    f"{name!r} cannot name a tenant; use 1 to 64 letters, digits, '.', '_' or "
                    f"'-', other than {UNSALTED!r} and {OTHER!r}"
                )
            other = owners.setdefault(tenant.tenant, name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are the same tenant; keep one of them")
        return value

    def rules(self) -> TenantRules:
        """The limits as the engine takes them."""
        default = self.default
        return TenantRules(
            default=tenants.Quota(default.host_max, default.store_max),
            named={
                one.tenant: (
                    name,
                    tenants.Quota(
                        one.host_max or default.host_max, one.store_max or default.store_max
                    ),
                )
                for name, one in self.named.items()
            },
        )


class Copy(Section):
    """Copying between engines and host memory."""

    threads: Count = Field(default=1, ge=1, le=256)
    """Threads that copy; one saturates a core, and engines want theirs."""
    prefault: Flag = True
    """Map all of an engine's KV memory when it attaches; off, each page when it is first copied."""


class Gpu(Section):
    """Copying between GPUs and host memory, by their copy engines."""

    loads_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes on their way to one GPU at any time; a decode step's own copies wait behind them."""
    stores_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes on their way from one GPU at any time; a token's way back waits behind them."""


class Integrity(Section):
    """How often bytes are compared with the checksum taken when they left an engine."""

    verify_loads: Ratio = Field(default=1.0, ge=0, le=1)
    """Part of the chunks loaded from host memory that is verified, from 0 to 1, spread evenly."""


class Http(Section):
    """Metrics, health and status over HTTP."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; one that is not loopback needs a token."""
    port: Count = Field(default=9321, ge=0, le=65_535)
    """Port to listen on; 0 takes any that is free."""
    token: SecretStr | None = Field(default=None, min_length=16, max_length=1024)
    """Who asks for metrics or status must send it; a secret, so take it from the environment."""
    token_file: Directory | None = None
    """A file that holds the token, readable by its owner only; `kvlake keygen` makes one."""

    @field_validator("token_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else _require_absolute(value)

    @field_serializer("token", when_used="json")
    def _mask(self, value: SecretStr | None) -> str | None:
        return None if value is None else MASK

    @model_validator(mode="after")
    def _guarded(self) -> Http:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; keep one of them")
        if self.token is None and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines; listen on 127.0.0.1, or "
                "give http.token_file (made by `kvlake keygen --out FILE`) or http.token"
            )
        return self

    def secret_token(self) -> str:
        """The token, or nothing where none is needed. Raises `SecretFileError`."""
        if self.token_file is not None:
            return read_secret(self.token_file, "http.token_file")
        return "" if self.token is None else self.token.get_secret_value()


class Events(Section):
    """What the tiers and the engines' own caches gain and lose, for routers (docs/events.md)."""

    enabled: Flag = False
    """Publish KV events. Whoever subscribes reads the prompts' token ids."""
    endpoint: str = "ipc"
    """Where batches are published: `ipc` (`events.sock` beside the attach socket) or
    `tcp://ADDRESS:PORT`."""
    replay_endpoint: str = "ipc"
    """Where a subscriber asks for what it missed: `ipc` (`replay.sock`) or `tcp://ADDRESS:PORT`."""
    topic: str = Field(default="", max_length=256)
    """First frame of every batch; subscribers choose by it."""
    buffer_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that are kept for replay."""
    buffer_max: Size = Field(default=64 << 20, ge=1 << 20)
    """Bytes of the batches that are kept."""
    queue_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that wait for one subscriber; more are dropped for it, and counted."""
    curve_secret_key_file: Directory | None = None
    """File with this side's CURVE key, for TCP; `kvlake keygen` makes it."""
    subscribers: tuple[str, ...] = Field(default=(), max_length=256)
    """Public CURVE keys of those who may subscribe over TCP."""

    @field_validator("subscribers", mode="before")
    @classmethod
    def _listed(cls, value: object) -> object:
        return tuple(cast("list[object]", value)) if isinstance(value, list) else value

    @field_validator("subscribers")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for key in value:
            if not _PUBLIC_KEY.match(key):
                raise ValueError(f"{key!r} is no public CURVE key, which has 40 characters of Z85")
        return value

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _known(cls, value: str) -> str:
        return _require_endpoint(value)

    @model_validator(mode="after")
    def _guarded(self) -> Events:
        places = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        over_tcp = {name: place for name, place in places.items() if place != "ipc"}
        if self.curve_secret_key_file is not None:
            _require_absolute(self.curve_secret_key_file)
            if len(over_tcp) < len(places):
                raise ValueError("curve_secret_key_file is for TCP; give both endpoints over TCP")
            if not self.subscribers:
                raise ValueError("curve_secret_key_file without subscribers lets nobody in")
        elif self.subscribers:
            raise ValueError(
                "subscribers are known by CURVE keys, and this side has none: `kvlake keygen --out "
                "FILE`, then events.curve_secret_key_file: FILE"
            )
        for name, place in over_tcp.items():
            if self.curve_secret_key_file is None and not is_loopback(_host_of(place)):
                raise ValueError(
                    f"{name}={place} can be reached from other machines, and prompts can be read "
                    "there; use 127.0.0.1, or give curve_secret_key_file and subscribers"
                )
        return self

    def secret_key(self) -> str:
        """The CURVE key, or nothing where none is given. Raises `SecretFileError`."""
        if self.curve_secret_key_file is None:
            return ""
        return read_secret(self.curve_secret_key_file, "events.curve_secret_key_file")


class Log(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severity that is written."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for one object per line."""


class Config(Section):
    """kvlake sidecar."""

    runtime: Runtime = Field(default_factory=Runtime)
    chunk: Chunk = Field(default_factory=Chunk)
    host: Host = Field(default_factory=Host)
    store: Store | None = None
    limits: Limits = Field(default_factory=Limits)
    tenants: Tenants = Field(default_factory=Tenants)
    integrity: Integrity = Field(default_factory=Integrity)
    copies: Copy = Field(default_factory=Copy, alias="copy")
    # `copy` in the file; the attribute has another name because pydantic models have a method so
    # called.
    gpu: Gpu = Field(default_factory=Gpu)
    http: Http = Field(default_factory=Http)
    events: Events = Field(default_factory=Events)
    log: Log = Field(default_factory=Log)

    @property
    def pool_path(self) -> Path:
        """The host tier's file: one for each user and name."""
        return self.host.directory / f"kvlake-{os.getuid()}-{self.runtime.name}.pool"

    def secrets(self) -> set[str]:
        """Every secret that the configuration holds, for masking whatever repeats one."""
        found = {
            one.salt.get_secret_value()
            for one in self.tenants.named.values()
            if one.salt is not None
        }
        if self.http.token is not None:
            found.add(self.http.token.get_secret_value())
        if self.store is not None:
            found |= secrets_of_url(self.store.url)
            found |= secrets_in(self.store.storage_options)
            found |= self.store.secrets()
        return found


def _require_endpoint(value: str) -> str:
    if value != "ipc" and not _TCP.match(value):
        raise ValueError(
            f"{value!r} is no endpoint; write ipc, or tcp://ADDRESS:PORT such as "
            "tcp://127.0.0.1:9322"
        )
    return value


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches. Other names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require_absolute(value: Path) -> Path:
    if not value.is_absolute():
        raise ValueError(f"'{value}' is a relative path; write an absolute one such as /{value}")
    return value


def load(path: str | Path | None, *, environment: Mapping[str, str] | None = None) -> Config:
    """Read and check a configuration file; the defaults where `path` is None.

    Raises:
        ConfigError: the file cannot be read, or something in it must be fixed.
    """
    if path is None:
        return Config()
    try:
        # One byte more than is allowed tells a file that is too large, and no file is read whole.
        with Path(path).open("rb") as file:
            text = file.read(TEXT_BYTES_MAX + 1).decode()
    except FileNotFoundError as error:
        raise ConfigError(
            [f"{path}: no such file; configs/default.yaml is one to start from"]
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return loads(text, name=str(path), environment=environment)


def loads(
    text: str, *, name: str = "configuration", environment: Mapping[str, str] | None = None
) -> Config:
    """Check a configuration given as YAML text. Raises `ConfigError`."""
    source = read_source(text, name, environment)
    # A section that is written but left empty (`host:`) means its defaults.
    values = {key: value for key, value in source.values.items() if value is not None}
    return _validate(values, source)


def _validate(values: dict[str, object], source: Source) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        names = _names(Config)
        found = error.errors(include_url=False, include_context=False)
        raise ConfigError([explain(detail, source, names) for detail in found]) from None


def _names(model: type[BaseModel], path: FieldPath = ()) -> dict[FieldPath, list[str]]:
    fields = {info.alias or name: info for name, info in model.model_fields.items()}
    found: dict[FieldPath, list[str]] = {path: list(fields)}
    for name, info in fields.items():
        kinds = typing.get_args(info.annotation)
        inner = (*path, name, ANY_NAME) if typing.get_origin(info.annotation) is dict else None
        for kind in (info.annotation, *kinds):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= _names(kind, inner or (*path, name))
    return found


def show(config: Config) -> str:
    """The whole configuration as YAML, defaults filled in and secrets masked."""
    values = config.model_dump(mode="json", by_alias=True)
    if config.store is not None:
        values["store"] |= config.store.shown_access()
        values["store"]["url"] = mask_url(config.store.url)
        # YAML may hold numbers and dates as they are there; JSON would have made them text.
        values["store"]["storage_options"] = masked(config.store.storage_options)
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=False)


def schema() -> str:
    """JSON schema of the file, as text that ends in a newline."""
    document = Config.model_json_schema(mode="validation")
    for section in document["$defs"].values():
        for name, value in section["properties"].items():
            section["properties"][name] = _or_variable(value)
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    document["title"] = "kvlake sidecar configuration"
    return json.dumps(document, indent=2) + "\n"


def _or_variable(value: dict[str, Any]) -> dict[str, Any]:
    """Let a value that is not free text also be an environment variable."""
    if value.get("type") == "object" or (value.get("type") == "string" and "enum" not in value):
        return value
    about: dict[str, Any] = {
        key: value[key] for key in ("title", "description", "default") if key in value
    }
    rules = {key: rule for key, rule in value.items() if key not in about}
    alternatives = rules["anyOf"] if set(rules) == {"anyOf"} else [rules]
    return {**about, "anyOf": [*alternatives, {"type": "string", "pattern": r"\$\{"}]}
