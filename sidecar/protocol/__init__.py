"""The messages between connectors and the sidecar, and where a connector looks for the sidecar.

Owns their fields and limits, and names that connector and sidecar derive alike: of tenants, and of
the tiers in KV cache events. No limit is a setting: both sides have the same. Lists are bounded
while they are decoded; `codec.py` encodes and decodes, and checks what types cannot say. Does not
own where a sidecar puts its socket (`runtime.directory`).

Two channels per client, one session:

* Unix socket (`attach.sock`): one `Attach` from the client with its file descriptors, one
  `Attached` or `Refused` back, then `IndexMoved` (with a descriptor) whenever the shared index
  moves. It stays open: in both directions end of file means that the other side is gone.
  Frames are 4 bytes of little-endian length, then MessagePack. An engine that serves without the
  cache sends a `Declined` in place of `Attach`, and leaves the connection open while it lives.
* ZMQ DEALER to ROUTER (`Attached.endpoint`): jobs and answers. The DEALER's routing id is
  `Attached.token`, so no message repeats who sent it. One frame, one message.

`docs/reference/protocol.md` has the conversation as a picture.

Invariants: every message carries the sidecar's `epoch`, and one with another epoch is refused and
counted; every job of a `Submit` gets exactly one outcome in a `Done`, unless the session ends
first; nothing is pickled; a frame over `FRAME_BYTES_MAX` is refused before it is decoded.
"""

import enum
import hashlib
import os
from pathlib import Path
from typing import Annotated, Final

import msgspec

from sidecar.protocol.prompts import Prompts
from tiers.kv.layout import BLOCKS_PER_CHUNK_MAX, KVLayout, Segment

PROTOCOL_VERSION: Final = 6
"""Increased by every incompatible change. Both sides refuse other versions."""
NAMESPACE_BYTES_MAX: Final = 65_536
MODEL_CHARACTERS_MAX: Final = 256
TOKEN_BYTES: Final = 16
FDS_PER_ATTACH_MAX: Final = 4
UUID_BYTES: Final = 16
IPC_HANDLE_BYTES: Final = 64
KIND_MEMFD: Final = "memfd"
KIND_CUDA_IPC: Final = "cuda_ipc"
KIND_CUDA_VMM: Final = "cuda_vmm"
MEMORY_FDS: Final[dict[str, tuple[str, ...]]] = {
    KIND_MEMFD: ("KV memory", "fence page"),
    KIND_CUDA_IPC: ("fence page",),
    KIND_CUDA_VMM: ("KV memory", "fence page"),
}
"""Kinds of memory, and the descriptors that arrive with each; the fence page is the last."""
DECLINED_CHARS_MAX: Final = 1_000
DECLINE_REASONS: Final = ("chunk_tokens", "unsupported", "weights", "memory")
"""Why an engine serves without the cache, in a `Declined`:

chunk_tokens: the chunk size is not a multiple of the block size. unsupported: something of the
model, the engine or the machine is refused. weights: the files of the model cannot be read. memory:
the KV cache of a rank cannot be shared.
"""
SERVICE_DIRECTORY: Final = "/run/kvlake"
"""`runtime.directory` of deploy/systemd/kvlake.service."""
FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
KEYS_PER_MESSAGE_MAX: Final = 65_536
JOBS_PER_MESSAGE_MAX: Final = 4_096
TTL_MS_MAX: Final = 365 * 24 * 3600 * 1000
PIN_MS_MAX: Final = 24 * 3600 * 1000
GROUPS_MAX: Final = 64
"""KV cache groups of one engine: a model of 62 layers, one in six of another kind, has 7."""
KEY_BYTES: Final = 32
EVENT_NAME_BYTES: Final = 16
"""The name of a chunk in KV cache events: the first half of its key."""
TENANT_BYTES: Final = 8

# Checked while decoding, a list's length before its first entry: otherwise a frame of small entries
# could use many times its size before it is refused.
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
GroupId = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]
GroupIds = Annotated[list[GroupId], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
Ids = Annotated[list[int], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
BlockIds = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0)]],
    msgspec.Meta(min_length=1, max_length=BLOCKS_PER_CHUNK_MAX),
]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Namespace = Annotated[bytes, msgspec.Meta(min_length=1, max_length=NAMESPACE_BYTES_MAX)]
BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
BlocksPerChunk = Annotated[int, msgspec.Meta(ge=1, le=BLOCKS_PER_CHUNK_MAX)]


class WireStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every message and part of one has: no changes, no unknown fields."""


# --- the Unix socket; descriptors travel beside its messages -------------------------------------


class Role(enum.StrEnum):
    """The half of the connector that a session serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Memory(WireStruct, omit_defaults=True, frozen=True):
    """How a worker's KV memory is shared. `kind` determines the descriptors beside the message.

    memfd: descriptor 0 is the KV memory, descriptor 1 the fence page.
    cuda_ipc: `handle` is from `cuIpcGetMemHandle`, descriptor 0 is the fence page.
    cuda_vmm: descriptor 0 is from `cuMemExportToShareableHandle`, descriptor 1 is the fence page.

    `size_bytes` is the whole allocation, from whose start the layout's offsets count.
    """

    kind: str
    size_bytes: int
    device_uuid: bytes = b""
    """The GPU, from `cuDeviceGetUuid`: device numbers differ between processes."""
    handle: bytes = b""


class Group(WireStruct, frozen=True):
    """A further KV cache group of an engine. See `Attach` for the fields.

    All groups of a worker are in the memory that it shares, and may overlap there: a block belongs
    to one group at a time.
    """

    namespace: Namespace
    block_tokens: BlockTokens
    blocks_per_chunk: BlocksPerChunk
    segment: Segment | None = None
    layout: KVLayout | None = None


class Attach(WireStruct, tag="attach", omit_defaults=True, frozen=True):
    """The only message of a client on the Unix socket, unless that is a `Declined`.

    `namespace` is canonical JSON (UTF-8) of all that makes KV bytes compatible. `topology` says how
    the model is split over the ranks; a chunk is loadable when all its segments are. Each run of
    `replicas` ranks holds the same segment (MLA). Workers alone set `layout`, `segment` and
    `memory`. These fields describe the engine's first KV cache group, and `groups` its others:
    group 1, 2, ... in chunks and lookups.
    """

    version: int
    role: Role
    engine_id: Name
    rank: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    topology: Name
    namespace: Namespace
    block_tokens: BlockTokens
    blocks_per_chunk: BlocksPerChunk
    pid: int
    want_events: bool = False
    segment: Segment | None = None
    layout: KVLayout | None = None
    memory: Memory | None = None
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=GROUPS_MAX - 1)] = ()
    events_endpoint: str = ""
    """Endpoint of the engine's own KV events, on this machine; empty without."""
    events_replay: str = ""
    """Endpoint where it replays them."""
    replicas: int = 1
    model: Annotated[str, msgspec.Meta(max_length=MODEL_CHARACTERS_MAX)] = ""
    """The engine's name of a model that is files, to show to people. Empty where the namespace has
    a name, because older sidecars refuse this field."""

    @property
    def segment_number(self) -> int:
        """The number of this rank's segment in a chunk."""
        return self.rank // self.replicas

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return self.world_size // self.replicas

    @property
    def parts(self) -> "tuple[Attach, ...]":
        """One message for each group, as an engine of that group alone would send it."""
        first = msgspec.structs.replace(self, groups=())
        others = (msgspec.structs.asdict(group) for group in self.groups)
        return (first, *(msgspec.structs.replace(first, **fields) for fields in others))


class Declined(WireStruct, tag="declined", frozen=True):
    """In place of `Attach`: a process of an engine serves without the cache.

    It is not answered, unless it is refused, and holds until the connection ends. `reason` is one
    of `DECLINE_REASONS`, or one that a later release adds; `message` is for an operator: field,
    value and remedy, as in vLLM's log.
    """

    version: int
    role: Role
    engine_id: Name
    reason: Annotated[str, msgspec.Meta(pattern=r"^[a-z_]{1,32}\Z")]
    message: Annotated[str, msgspec.Meta(min_length=1, max_length=DECLINED_CHARS_MAX)]


class Limits(WireStruct, frozen=True):
    """Limits of the sidecar's configuration that the connector must keep."""

    lookup_wait_ms_max: int
    load_deadline_ms_max: int
    store_deadline_ms_max: int
    jobs_inflight_max: int
    lease_ttl_ms_max: int


class Attached(WireStruct, tag="attached", frozen=True):
    """Answer to `Attach`; for a scheduler, descriptor 0 is the shared index, read-only."""

    version: int
    epoch: int
    token: bytes
    endpoint: str
    limits: Limits
    index_salt: bytes
    index_bytes: int = 0


class Refused(WireStruct, tag="refused", frozen=True):
    """The sidecar does not serve this client; `message` names the field, value and remedy."""

    code: str
    message: str


class IndexMoved(WireStruct, tag="index_moved", frozen=True):
    """The shared index has grown into a new mapping; descriptor 0 replaces the old one."""

    epoch: int
    index_bytes: int


FirstMessage = Attach | Declined
AttachReply = Attached | Refused | IndexMoved


def sockets_of(given: str | None) -> tuple[str, ...]:
    """Where to look for the sidecar: the one path that is given, or the default ones in order.

    A sidecar of this user comes first: that of a login shell is in `XDG_RUNTIME_DIR`, which a
    service or a container may lack. Then that of a service manager, which serves several users.
    """
    if given:
        return (given,)
    bases = [f"/tmp/kvlake-{os.getuid()}", SERVICE_DIRECTORY]  # noqa: S108 (its owner is checked)
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    if Path(own).is_dir():
        bases.insert(0, f"{own}/kvlake")
    return tuple(f"{base}/default/attach.sock" for base in bases)


# --- ZMQ: jobs, lookups, leases, pins, events, and their answers ---------------------------------


class Outcome(enum.IntEnum):
    """How a job, or one lookup, ended. Everything but OK is a miss to the engine."""

    __hash__ = int.__hash__  # That of Enum is Python code, and slow.

    OK = 0
    MISSING = 1
    """A chunk was evicted before the copy started."""
    CORRUPT = 2
    """The slot's checksum did not match; the chunk was quarantined."""
    FULL = 3
    """No slot could be freed; the store was dropped."""
    REVOKED = 4
    """The worker stopped waiting and took its blocks back; no block was written."""
    FAILED = 5
    """The copy raised; see the sidecar's log."""
    PARTIAL = 6
    """A store of several chunks kept some of them."""
    EXPIRED = 7
    """Its deadline passed first; no block was written."""
    RECOMPUTED = 8
    """Computing the rest of a lookup is faster than reading it."""
    PAUSED = 9
    """The rest of a lookup was not read, because reading is paused."""


class LoadChunk(WireStruct, array_like=True, frozen=True):
    """Copy blocks `first_block : first_block + len(block_ids)` of chunk `key` to `block_ids`."""

    key: Key
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: BlockIds
    group: GroupId = 0


class StoreChunk(WireStruct, array_like=True, frozen=True):
    """Copy `block_ids` to a slot under `key`. `token_ids` are little-endian int32.

    `parent` is the key of the chunk before it, or 32 zero bytes at the start of a prompt.
    `block_ids` holds between 1 and `blocks_per_chunk` blocks; fewer make a partial chunk.
    `tenant` owns the chunk: from `tenant_id`, empty for a request without a cache salt.
    """

    key: Key
    parent: Key
    token_ids: bytes
    block_ids: BlockIds
    tenant: bytes = b""
    group: GroupId = 0


class LoadJob(WireStruct, array_like=True, frozen=True):
    """All chunks that one request loads; `job_id` is also the id of its lease."""

    job_id: int
    chunks: Annotated[list[LoadChunk], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]


class StoreJob(WireStruct, array_like=True, frozen=True):
    """Chunks of one request that became complete in one step.

    `job_id` is unique per engine and epoch. `ttl_ms`: the chunks expire after this time, 0 for
    never. `stays`: they are not written to the object store; chunks that expire are not either.
    """

    job_id: int
    chunks: Annotated[list[StoreChunk], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=TTL_MS_MAX)] = 0
    stays: bool = False


class Submit(WireStruct, tag="submit", frozen=True):
    """A worker's work of one step. Copies start only once the fence page shows `fence`."""

    epoch: int
    fence: int
    loads: Annotated[list[LoadJob], msgspec.Meta(max_length=JOBS_PER_MESSAGE_MAX)]
    stores: Annotated[list[StoreJob], msgspec.Meta(max_length=JOBS_PER_MESSAGE_MAX)]


class JobOutcome(WireStruct, array_like=True, frozen=True):
    """`outcome` of job `job_id`; for loads, anything but OK means that no block may be used."""

    job_id: int
    outcome: Outcome


class Done(WireStruct, tag="done", frozen=True):
    """Answers to jobs of this worker, in the order in which they ended."""

    epoch: int
    jobs: list[JobOutcome]


class Lookup(WireStruct, tag="lookup", omit_defaults=True, frozen=True):
    """Bring `keys` from the object store to host memory, and lease them.

    Keys of one group are a chain, and a group that needs the chain of another comes after it.
    """

    epoch: int
    lookup_id: int
    keys: Keys
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)]
    tenant: bytes = b""
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of the keys behind `num_held`. 0: unknown, and the read is not weighed."""
    prefill_tokens_per_second: float = 0.0
    """As the engine measured it; 0: unknown."""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""
    num_held: Annotated[int, msgspec.Meta(ge=0)] = 0
    """So many of the first keys are in host memory, and must stay there meanwhile."""


class LookupDone(WireStruct, tag="lookup_done", frozen=True):
    """The first `ready` keys of the lookup are in host memory; the rest will not be."""

    epoch: int
    lookup_id: int
    ready: int
    outcome: Outcome


class Lease(WireStruct, tag="lease", omit_defaults=True, frozen=True):
    """Pin `keys` until every rank finished load job `lease_id`, a `Release`, or the deadline."""

    epoch: int
    lease_id: int
    keys: Keys
    tenant: bytes = b""


class Pin(WireStruct, tag="pin", omit_defaults=True, frozen=True):
    """Keep `keys` in host memory for `duration_ms`, also once they are stored later. Not answered.

    Pins the first keys, up to the limits of this client and `tenant`; the rest are counted.
    """

    epoch: int
    keys: Keys
    duration_ms: Annotated[int, msgspec.Meta(gt=0, le=PIN_MS_MAX)]
    tenant: bytes = b""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""


class Use(WireStruct, tag="use", omit_defaults=True, frozen=True):
    """A request was scheduled whose prompt has the chunks `keys`, head first in each group.

    Once for each request, cached or not, before what it computes is stored. Not answered.
    """

    epoch: int
    keys: Keys
    num_tokens: Annotated[int, msgspec.Meta(ge=0)]
    """Tokens of the prompt that these chunks hold."""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""


class Release(WireStruct, tag="release", omit_defaults=True, frozen=True):
    """Release leases and lookups. Unknown ids are ignored."""

    epoch: int
    lease_ids: Ids
    lookup_ids: Ids
    pins: bool = False
    """Whether to release all pins of this client too."""
    heard: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """`Events` received since the attach, to request more of them; -1: no request."""


class StoredEvent(WireStruct, array_like=True, frozen=True):
    """Chunk `key` became available in `tier` ("host" or "store").

    For one known only from a listing, `key` is the first half and `parent` is empty.
    """

    key: bytes
    parent: bytes
    num_tokens: int
    tier: str
    group: int = 0


class RemovedEvent(WireStruct, array_like=True, frozen=True):
    """Chunk `key` is no longer available in `tier`."""

    key: bytes
    tier: str
    group: int = 0


class Events(WireStruct, tag="events", omit_defaults=True, frozen=True):
    """Changes of the tiers for this namespace and topology since the last `Events`."""

    epoch: int
    stored: list[StoredEvent]
    removed: list[RemovedEvent]
    anew: bool = False
    """Drop the contents of all earlier `Events`: everything is sent again from here on."""


class Error(WireStruct, tag="error", frozen=True):
    """The last frame of this session was refused. The session continues."""

    epoch: int
    code: str
    message: str


ClientMessage = Submit | Lookup | Lease | Pin | Use | Release | Prompts
ServerMessage = Done | LookupDone | Events | Error

TIERS_OWNER: Final = "kvlake/"
"""Prefix of the tiers' owners in vLLM's KV events. In an engine's own stream such events come from
the connector, and the sidecar ignores them: it publishes the tiers itself."""
OFFLOADING: Final = "offloading"
"""The topology of vLLM's own offloading: chunks hold the parts of all ranks."""
HITS_OWNER: Final = "kvlake/hits"
"""Owner of an event by which the connector says that vLLM's events include hits from here on."""


def tiers_owner(digest: bytes, topology: str, block_tokens: int, home: str = "") -> str:
    """The owner, in KV events, of a realm's chunks; `home` is the owner of its home's."""
    own = f"{TIERS_OWNER}{digest.hex()[:16]}/{topology}.b{block_tokens}"
    return own + home.removeprefix(TIERS_OWNER[:-1])


def tenant_id(cache_salt: str) -> bytes:
    """The tenant of requests with this cache salt: 8 bytes, or none for requests without one.

    The salt itself is a secret and is in no message: a client that knows it can read what its
    tenant's requests left in the cache.
    """
    if not cache_salt:
        return b""
    return hashlib.sha256(b"kvlake tenant\0" + cache_salt.encode()).digest()[:TENANT_BYTES]
