"""All sections of the configuration but `store` (`config/store.py`).

What happens at a limit is in `sidecar/core/fair_share.py`; `sidecar/service/runtime_dir.py` creates
the runtime directory.

Invariants: events, which contain prompts, leave the machine only encrypted, for known subscribers;
no cache salt or token is in a `repr`, or in the output of `kvlake config show`.
"""

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from sidecar.config.secret_files import read_secret
from sidecar.core import tenants
from sidecar.core.tenants import OTHER, UNSALTED, TenantRules
from sidecar.errors import StartError
from sidecar.protocol import GROUPS_MAX, tenant_id
from tiers.settings import (
    NAME_PATTERN,
    AbsolutePath,
    Count,
    Duration,
    Endpoint,
    Flag,
    Nodes,
    Ratio,
    Secret,
    Section,
    Size,
    matching,
)
from tiers.sizes import format_duration

SOCKET_PATH_BYTES_MAX: Final = 107
"""What `struct sockaddr_un` holds on Linux, less the closing zero."""
UID_MAX: Final = (1 << 32) - 1
OVERFLOW_UID: Final = 65_534
PREFAULT_THREADS_MAX: Final = 8
"""Clearing pages is bound by memory bandwidth, and an engine starts beside the sidecar."""

HISTORY_SECONDS_MIN: Final = 60.0
CURVE_KEYS_MIN: Final = 1024

PublicKey = Annotated[
    str,
    matching(
        r"^[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}$",
        "is no public CURVE key, which has 40 characters of Z85",
    ),
]


def default_runtime_directory() -> Path:
    """The user's own runtime directory where there is one, else one in /tmp named by user id."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    if own and Path(own).is_dir():
        return Path(own) / "kvlake"
    return Path(f"/tmp/kvlake-{os.getuid()}")  # noqa: S108 (made 0700, and its owner is checked)


class RuntimeSettings(Section):
    """The sidecar's sockets and its name."""

    directory: AbsolutePath = Field(default_factory=default_runtime_directory)
    """Absolute directory for sockets; created with mode 0700."""
    name: Annotated[
        str,
        matching(
            NAME_PATTERN, "cannot name a directory; use 1 to 64 letters, digits, '.', '_' or '-'"
        ),
    ] = "default"
    """Name of this sidecar; two on one node need two names."""
    allow_uids: tuple[Count, ...] = Field(default=(), max_length=256, strict=False)
    """User ids whose engines are served, beside the sidecar's own user and root."""
    strict_parents: Flag = True
    """Refuse a directory below one that other users can write to. Off for a volume of one pod."""

    @field_validator("allow_uids")
    @classmethod
    def _users(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for uid in value:
            if not 0 <= uid < UID_MAX:
                raise ValueError(f"{uid} is no user id; write numbers from 0 to {UID_MAX - 1}")
            if uid == OVERFLOW_UID:
                raise ValueError(
                    f"{uid} is every user that this user namespace does not map; give the engine a "
                    "user of its own"
                )
        return value

    @model_validator(mode="after")
    def _fits(self) -> "RuntimeSettings":
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


class ChunkSettings(Section):
    """The unit that is stored, looked up and evicted."""

    tokens: Count = Field(default=256, ge=1, le=65_536)
    """Tokens per chunk; a multiple of the engine's block size. Handed on by `kvlake run`."""


class HostSettings(Section):
    """The host memory tier."""

    size: Size = Field(default=8 << 30, ge=1 << 20)
    """Host memory for chunks, such as "8GiB"."""
    directory: AbsolutePath = Path("/dev/shm")  # noqa: S108 (a file system in memory, by design)
    """Absolute directory of the pool's file; in a memory file system such as /dev/shm."""
    policy: Literal["density", "lru", "fifo"] = "density"
    """Which chunk makes room: the one least likely to be used soon, as learned from earlier
    requests (`density`), the least recently used (`lru`), or the oldest (`fifo`)."""
    prefault: Flag = True
    """Touch all of it at startup, so that no store pays for first use."""
    prefault_threads: Count | None = Field(default=None, ge=1, le=256)
    """Threads that touch it. null: half of the cores, at most 8."""
    numa: Nodes = "auto"
    """NUMA nodes of its memory: `auto` (next to the GPUs), `off`, or a list such as [0]."""
    after_stop: Literal["keep", "remove"] = "keep"
    """`keep`: the memory stays for the next start. `remove`: it is freed at SIGTERM."""

    @property
    def touching_threads(self) -> int:
        """`prefault_threads`, or what is right for this machine."""
        cores = len(os.sched_getaffinity(0))
        return self.prefault_threads or min(PREFAULT_THREADS_MAX, max(1, cores // 2))


class CopySettings(Section):
    """Copying between engines and host memory."""

    threads: Count = Field(default=2, ge=1, le=256)
    """Threads that copy; those without another load share one. Each can saturate a core."""
    prefault: Flag = True
    """Map all of an engine's KV memory when it attaches; if off, each page when first copied."""


class GpuSettings(Section):
    """Copying between GPUs and host memory, by their copy engines."""

    loads_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes in flight to one GPU; a decode step's own copies queue behind them."""
    stores_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes in flight from one GPU; a token's copy to the host queues behind them."""
    strided_copies: Literal["auto", "batch", "2d"] = "auto"
    """How strided runs are copied: `auto` (measured when a GPU is first used), or one way."""
    hour_price: Annotated[Ratio, Field(ge=0, le=1_000_000)] = 0.0
    """Price of an hour of one GPU: with it, `kvlake status` shows savings in money. 0: unknown."""
    currency: str = Field(default="USD", min_length=1, max_length=8)
    """Currency of hour_price; only shown."""


class IntegritySettings(Section):
    """How often bytes are compared with the checksum that was taken when they left an engine."""

    verify_loads: Ratio = Field(default=1.0, ge=0, le=1)
    """Share of the chunks loaded from host memory that is verified, from 0 to 1, spread evenly."""
    verify_writes: Ratio = Field(default=0.02, ge=0, le=1)
    """Share of the chunks written to the object store that is verified. Readers verify all."""


class LimitsSettings(Section):
    """Deadlines and bounds. Engines receive the first four when they attach."""

    lookup_wait: Duration = Field(default=0.5, le=60)
    """Longest that a request waits for chunks that only the object store holds."""
    load_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest that an engine waits for a load; then it computes the tokens itself."""
    store_deadline: Duration = Field(default=10.0, ge=0.01, le=600)
    """Longest that an engine holds blocks for a store; then it takes them back."""
    lease_ttl: Duration = Field(default=10.0, ge=0.01, le=3600)
    """How long a pinned chunk stays pinned if its pin is not released."""
    attach_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """How long a connected client may take to attach; then it is disconnected."""
    jobs_inflight_max: Count = Field(default=256, ge=1, le=4096)
    """Running jobs of one engine; at the limit, it stores nothing."""
    memory_max: Size = Field(default=256 << 20, ge=1 << 20)
    """Memory of the sidecar for pending lookups, leases, jobs and copies."""
    copies_queued_max: Count = Field(default=65_536, ge=16, le=10_000_000)
    """Chunks queued for copying; at the limit, loads miss and stores are dropped."""
    storing_max: Size | None = Field(default=None, ge=1)
    """Host memory of running stores. null: host.size."""
    pinned_max: Size | None = Field(default=None, ge=1)
    """Host memory that leases and lookups may pin. null: host.size."""
    lookups_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Lookups that are pending or hold chunks; further ones are refused."""
    leases_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Leases at a time; further loads run without one."""
    replies_queued_max: Count = Field(default=1024, ge=16, le=65_536)
    """Answers queued for one client; a client that does not read them is disconnected."""
    sessions_max: Count = Field(default=256, ge=1, le=65_536)
    """Attached clients: one scheduler and one worker per rank for each engine."""
    realms_max: Count = Field(default=256, ge=GROUPS_MAX, le=65_536)
    """Namespaces and topologies at a time; new ones replace unused ones."""
    gone_keys_max: Count = Field(default=32_768, ge=0, le=1_000_000)
    """Chunks remembered after they left the cache, so that engines know why they miss. 0: none."""
    prompts_kept: Count = Field(default=1000, ge=0, le=100_000)
    """Prompts that `kvlake explain` can show. 0: none."""
    transfers_kept: Count = Field(default=2000, ge=0, le=100_000)
    """Transfers that /transfers can show. 0: none."""
    curve_keys_max: Count = Field(default=8192, ge=0, le=1_000_000)
    """Chunks whose uses tell what another `host.size` would bring. 0: it is not estimated."""
    history_seconds: Duration = Field(default=3600.0, ge=0, le=7200)
    """How far /history goes back, at least a minute. 0: there is none."""
    drain_seconds_max: Duration = Field(default=30.0, le=3600)
    """Longest that a stopping sidecar writes to the object store."""

    @model_validator(mode="after")
    def _enough(self) -> "LimitsSettings":
        if 0 < self.history_seconds < HISTORY_SECONDS_MIN:
            raise ValueError(
                f"history_seconds={format_duration(self.history_seconds)} is less than the minute "
                "that `kvlake status` shows; give 60s or more, or 0 to keep no history"
            )
        if 0 < self.curve_keys_max < CURVE_KEYS_MIN:
            raise ValueError(
                f"curve_keys_max={self.curve_keys_max} is too few for an estimate; give "
                f"{CURVE_KEYS_MIN} or more, or 0 for none"
            )
        return self

    @model_validator(mode="after")
    def _ordered(self) -> "LimitsSettings":
        if self.lease_ttl < self.load_deadline:
            raise ValueError(
                f"lease_ttl={format_duration(self.lease_ttl)} ends before "
                f"load_deadline={format_duration(self.load_deadline)}; a lease must outlive the "
                "load that it protects, so raise lease_ttl or lower load_deadline"
            )
        return self


class QuotaSettings(Section):
    """Limits of one tenant."""

    host_max: Size | None = Field(default=None, ge=1)
    """Host memory; at the limit, chunks of its own are evicted. null: no limit."""
    store_max: Size | None = Field(default=None, ge=1)
    """Bytes in a namespace of the object store; at the limit, nothing more is written."""
    store_objects_max: Count | None = Field(default=None, ge=1)
    """Objects in a namespace of the object store; at the limit, nothing more is written."""
    store_ttl: Duration | None = Field(default=None, ge=1.0)
    """Age at which its chunks are deleted from the object store, unless `store.ttl` is less."""

    def rule(self, default: "QuotaSettings") -> tenants.Quota:
        """The quota of one tenant; limits that are null are those of `default`."""
        return tenants.Quota(
            host_bytes_max=self.host_max or default.host_max,
            store_bytes_max=self.store_max or default.store_max,
            store_objects_max=self.store_objects_max or default.store_objects_max,
            store_ttl_seconds=self.store_ttl or default.store_ttl,
        )


class NamedTenantSettings(QuotaSettings):
    """A tenant with a name in metrics, and limits of its own (null: the default's)."""

    salt: Secret | None = Field(default=None, min_length=1)
    """The cache salt of its requests. A secret: take it from the environment."""
    id: str | None = Field(default=None, pattern=r"^[0-9a-f]{16}$")
    """Instead of the salt: its id by `kvlake tenant id`, 16 hexadecimal digits."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> "NamedTenantSettings":
        if (self.salt is None) == (self.id is None):
            raise ValueError("give either salt or id; `kvlake tenant id` prints the id of a salt")
        return self

    @property
    def tenant(self) -> bytes:
        """The tenant's id in messages."""
        if self.salt is not None:
            return tenant_id(self.salt.get_secret_value())
        return bytes.fromhex(self.id or "")


class TenantsSettings(Section):
    """Quotas. Requests with the same cache salt are one tenant."""

    default: QuotaSettings = Field(default_factory=QuotaSettings)
    """Limits of each tenant; all requests without a cache salt are one tenant."""
    named: dict[str, NamedTenantSettings] = Field(default_factory=dict[str, NamedTenantSettings])
    """Tenants by name. Metrics sum up the others as `other`."""

    @field_validator("named")
    @classmethod
    def _distinct(cls, value: dict[str, NamedTenantSettings]) -> dict[str, NamedTenantSettings]:
        owners: dict[bytes, str] = {}
        for name, tenant in value.items():
            if not re.match(NAME_PATTERN, name) or name in (UNSALTED, OTHER):
                raise ValueError(
                    f"{name!r} cannot name a tenant; use 1 to 64 letters, digits, '.', '_' or "
                    f"'-', other than {UNSALTED!r} and {OTHER!r}"
                )
            other = owners.setdefault(tenant.tenant, name)
            if other != name:
                raise ValueError(f"{other!r} and {name!r} are the same tenant; keep one of them")
        return value

    def rules(self) -> TenantRules:
        """The limits in the engine's form."""
        return TenantRules(
            default=self.default.rule(QuotaSettings()),
            named={one.tenant: (name, one.rule(self.default)) for name, one in self.named.items()},
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Names but `localhost` are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HttpSettings(Section):
    """Metrics, health and status over HTTP."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; one that is not loopback needs a token."""
    port: Count = Field(default=9321, ge=0, le=65_535)
    """Port to listen on; 0 takes any that is free."""
    token: Secret | None = Field(default=None, min_length=16, max_length=1024)
    """Requests for metrics or status must carry it. A secret: take it from the environment."""
    token_file: AbsolutePath | None = None
    """A file with the token, readable by its owner only; `kvlake keygen` creates one."""

    @model_validator(mode="after")
    def _needs_token(self) -> "HttpSettings":
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both given; keep one of them")
        if self.token is None and self.token_file is None and not is_loopback(self.host):
            raise ValueError(
                f"host={self.host} can be reached from other machines; listen on 127.0.0.1, or "
                "give http.token_file (made by `kvlake keygen --out FILE`) or http.token"
            )
        return self

    def secret_token(self) -> str:
        """The token, or nothing where none is needed. Raises `StartError`."""
        if self.token_file is not None:
            return read_secret(self.token_file, "http.token_file")
        return "" if self.token is None else self.token.get_secret_value()


class EventsSettings(Section):
    """What the tiers and the engines' caches gain and lose (docs/reference/events.md)."""

    enabled: Flag = False
    """Publish KV events. Subscribers can read the prompts' token ids."""
    endpoint: Endpoint = "ipc"
    """Where batches are published: `ipc` (`events.sock` beside the attach socket) or
    `tcp://ADDRESS:PORT`."""
    replay_endpoint: Endpoint = "ipc"
    """Where subscribers request missed batches: `ipc` (`replay.sock`) or `tcp://ADDRESS:PORT`."""
    topic: str = Field(default="", max_length=256)
    """First frame of every batch; subscribers filter by it."""
    buffer_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches that are kept for replay."""
    buffer_max: Size = Field(default=64 << 20, ge=1 << 20)
    """Bytes of the batches that are kept."""
    queue_batches: Count = Field(default=10_000, ge=1, le=1_000_000)
    """Batches queued for one subscriber; further ones are dropped for it, and counted. With `ipc`
    also those beyond buffer_max bytes."""
    curve_secret_key_file: AbsolutePath | None = None
    """File with this side's CURVE key, for TCP; `kvlake keygen` creates it."""
    subscribers: tuple[PublicKey, ...] = Field(default=(), max_length=256, strict=False)
    """Public CURVE keys of the allowed subscribers over TCP."""

    @model_validator(mode="after")
    def _needs_keys(self) -> "EventsSettings":
        places = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint}
        over_tcp = {name: place for name, place in places.items() if place != "ipc"}
        if self.curve_secret_key_file is not None:
            if len(over_tcp) < len(places):
                raise ValueError("curve_secret_key_file is for TCP; give both endpoints over TCP")
            if not self.subscribers:
                raise ValueError(
                    "curve_secret_key_file without subscribers admits nobody; list their keys"
                )
            return self
        if self.subscribers:
            raise ValueError(
                "subscribers need a CURVE key of this side: run `kvlake keygen --out FILE` and set "
                "events.curve_secret_key_file: FILE"
            )
        for name, place in over_tcp.items():
            raise ValueError(
                f"{name}={place} can be reached by every user of this machine at least, who could "
                "read prompts; use `ipc`, or give curve_secret_key_file and subscribers"
            )
        return self

    def secret_key(self) -> bytes:
        """The CURVE key. Raises `StartError`."""
        # Here, so that commands without events start without it.
        import zmq

        path = self.curve_secret_key_file
        assert path is not None, "events go over TCP"
        key = read_secret(path, "events.curve_secret_key_file").encode()
        try:
            zmq.curve_public(key)
        except (ValueError, KeyError, zmq.ZMQError) as error:
            raise StartError(
                f"events.curve_secret_key_file={path} holds no CURVE key; make one with "
                "`kvlake keygen --out FILE`"
            ) from error
        return key


class LogSettings(Section):
    """The log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest severity that is written."""
    format: Literal["text", "json"] = "text"
    """`text` for people, `json` for one object per line."""
