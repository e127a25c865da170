"""Wire messages between connectors and the sidecar: what they are, their limits, their codec.

Two channels per client, one session:

* Unix socket (`attach.sock`): one `Attach` from the client with its file descriptors, one
  `Attached` or `Refused` back, then `IndexMoved` (with a descriptor) whenever the shared index
  moved. It stays open: end of file means that the other side died, in both directions.
  Frames are 4 bytes of little-endian length, then MessagePack.
* ZMQ DEALER to ROUTER (`Attached.endpoint`): jobs and answers. The DEALER's routing id is
  `Attached.token`, so no message repeats who sent it. One frame, one message.

The whole conversation::

    worker                              sidecar                             scheduler
      | Attach(layout, fds) ------------> |                                     |
      | <----------- Attached(token, ...) |                                     |
      |                                   | <---------------------- Attach()    |
      |                                   | Attached(token, fd of index) -----> |
      |                                   | <---- Lookup(keys in the store only)|
      |                                   | LookupDone(ready) ----------------> |
      |                                   | <------ Lease(keys) with the load   |
      | Submit(fence, loads, stores) ---> |                                     |
      | <---------------- Done(outcomes)  |                                     |
      |                                   | <------ Release(lease) on abort     |
      |                                   | <------ Pin(keys) at a request's end|   if it asked
      |                                   | Events(stored, removed) ----------> |   if asked for
      | (EOF) --------------------------> |  leases and jobs of the session end |
      | any refused frame: <------- Error |                                     |

Invariants: every message carries the sidecar's `epoch`, and one from another life is dropped and
counted; every `Submit` job gets exactly one outcome in a `Done`, unless the session ends first;
nothing is pickled; a frame over `FRAME_BYTES_MAX` is refused before it is decoded.
"""

from __future__ import annotations

import enum
import hashlib
import math
import re
import struct
from typing import Annotated, Final, TypeVar

import msgspec

from tiers.layout import KVLayout, Segment

T = TypeVar("T")

PROTOCOL_VERSION: Final = 4
"""Raised by every incompatible change. Both sides refuse another version, by name."""

FRAME_BYTES_MAX: Final = 4 * 1024 * 1024
KEYS_PER_MESSAGE_MAX: Final = 65_536
JOBS_PER_MESSAGE_MAX: Final = 4_096
NAMESPACE_BYTES_MAX: Final = 65_536
BLOCKS_PER_CHUNK_MAX: Final = 65_536
TTL_MS_MAX: Final = 365 * 24 * 3600 * 1000
PIN_MS_MAX: Final = 24 * 3600 * 1000
GROUPS_MAX: Final = 64
"""KV cache groups of one engine: a model of 62 layers, one in six of another kind, has 7."""
KEY_BYTES: Final = 32
TOKEN_BYTES: Final = 16
TENANT_BYTES: Final = 8
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


# Checked while decoding, a list's length before its first entry: a frame of small entries would
# otherwise become many times its size before it is refused.
Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
GroupId = Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]
GroupIds = Annotated[list[GroupId], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
Ids = Annotated[list[int], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
BlockIds = Annotated[
    list[Annotated[int, msgspec.Meta(ge=0)]],
    msgspec.Meta(min_length=1, max_length=BLOCKS_PER_CHUNK_MAX),
]


class Role(enum.StrEnum):
    """Which half of the connector a session serves."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Outcome(enum.IntEnum):
    """How a job, or one lookup, ended. Everything but OK is a miss to the engine."""

    OK = 0
    MISSING = 1
    """A chunk was evicted before the copy started."""
    CORRUPT = 2
    """The slot's checksum did not match; the chunk was quarantined."""
    FULL = 3
    """No slot could be freed; the store was dropped."""
    REVOKED = 4
    """The worker gave up waiting and took its blocks back; nothing was touched."""
    FAILED = 5
    """The copy raised; see the sidecar's log."""
    PARTIAL = 6
    """A store of several chunks kept some of them."""
    EXPIRED = 7
    """Its deadline passed first; nothing was touched."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a worker's KV memory is shared. `kind` names what arrives beside the message.

    memfd: descriptor 0 is the KV memory, descriptor 1 the fence page.
    cuda_ipc: `handle` is what `cuIpcGetMemHandle` gave, descriptor 0 the fence page.
    cuda_vmm: descriptor 0 is what `cuMemExportToShareableHandle` gave, descriptor 1 the fence page.

    `size_bytes` is the whole allocation, from whose start the layout's offsets count.
    """

    kind: str
    size_bytes: int
    device_uuid: bytes = b""
    """Which GPU, as `cuDeviceGetUuid` names it: numbers differ between processes."""
    handle: bytes = b""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One more KV cache group of an engine: what it has of its own. See `Attach` for the fields.

    All groups of a worker lie in the memory that it shares once, and may lie over each other
    there: a block belongs to one group at a time.
    """

    namespace: bytes
    block_tokens: int
    blocks_per_chunk: int
    segment: Segment | None = None
    layout: KVLayout | None = None


class Attach(msgspec.Struct, tag="attach", frozen=True, forbid_unknown_fields=True):
    """First and only message of a client on the Unix socket.

    `namespace` is canonical JSON (UTF-8): what makes KV bytes compatible. `topology` names how
    the model is cut over the ranks; chunks are loadable when all their segments are. Of every
    `replicas` ranks in a row all hold the same segment (MLA).
    `layout`, `segment` and `memory` are given by workers only. These fields are of the engine's
    first KV cache group, and `groups` are its others: group 1, 2, ... in chunks and lookups.
    """

    version: int
    role: Role
    engine_id: str
    rank: int
    world_size: int
    topology: str
    namespace: bytes
    block_tokens: int
    blocks_per_chunk: int
    pid: int
    want_events: bool = False
    segment: Segment | None = None
    layout: KVLayout | None = None
    memory: Memory | None = None
    curve_key: bytes = b""
    """Public CURVE key (Z85) made for this session; used where jobs travel over TCP."""
    groups: Annotated[tuple[Group, ...], msgspec.Meta(max_length=GROUPS_MAX - 1)] = ()
    events_endpoint: str = ""
    """Where the engine publishes its own KV events, on this machine; empty where it does not."""
    events_replay: str = ""
    """Where it replays them."""
    replicas: int = 1

    @property
    def segment_number(self) -> int:
        """Which of a chunk's segments this rank holds."""
        return self.rank // self.replicas

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return self.world_size // self.replicas

    @property
    def parts(self) -> tuple[Attach, ...]:
        """One message for each group, as an engine of that group alone would send it."""
        first = msgspec.structs.replace(self, groups=())
        return (
            first,
            *(
                msgspec.structs.replace(
                    first,
                    namespace=group.namespace,
                    block_tokens=group.block_tokens,
                    blocks_per_chunk=group.blocks_per_chunk,
                    segment=group.segment,
                    layout=group.layout,
                )
                for group in self.groups
            ),
        )


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deadlines and bounds that the operator set in the sidecar and the connector must keep."""

    lookup_wait_ms_max: int
    load_deadline_ms_max: int
    store_deadline_ms_max: int
    jobs_inflight_max: int
    lease_ttl_ms_max: int


class Attached(msgspec.Struct, tag="attached", frozen=True, forbid_unknown_fields=True):
    """Answer to `Attach`; for a scheduler, descriptor 0 is the shared index, read-only."""

    version: int
    epoch: int
    token: bytes
    endpoint: str
    limits: Limits
    index_salt: bytes
    index_bytes: int = 0
    curve_key: bytes = b""
    """The sidecar's public CURVE key (Z85); empty where `endpoint` is a Unix socket."""


class Refused(msgspec.Struct, tag="refused", frozen=True, forbid_unknown_fields=True):
    """The sidecar will not serve this client; `message` names the field, value and remedy."""

    code: str
    message: str


class IndexMoved(msgspec.Struct, tag="index_moved", frozen=True, forbid_unknown_fields=True):
    """The shared index was grown into a new mapping; descriptor 0 replaces the old one."""

    epoch: int
    index_bytes: int


class LoadChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copy blocks `first_block : first_block + len(block_ids)` of chunk `key` to `block_ids`."""

    key: Key
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: BlockIds
    group: GroupId = 0


class StoreChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copy `block_ids` to a slot under `key`. `token_ids` are little-endian int32 bytes.

    `parent` is the key of the chunk before it, or 32 zero bytes at the start of a prompt.
    `block_ids` holds between 1 and `blocks_per_chunk` blocks; fewer make a partial chunk.
    `tenant` is whose chunk it is: from `tenant_id`, empty for a request without a cache salt.
    """

    key: Key
    parent: Key
    token_ids: bytes
    block_ids: BlockIds
    tenant: bytes = b""
    group: GroupId = 0


class LoadJob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All chunks that one request loads; `job_id` is also the id of its lease."""

    job_id: int
    chunks: Annotated[list[LoadChunk], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]


class StoreJob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks of one request that became complete in one step.

    `job_id` is unique per engine and life. `ttl_ms`: they are forgotten so long after this, 0 for
    never. `stays`: they are not written to the object store; what is forgotten is not either.
    """

    job_id: int
    chunks: Annotated[list[StoreChunk], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]
    ttl_ms: Annotated[int, msgspec.Meta(ge=0, le=TTL_MS_MAX)] = 0
    stays: bool = False


class Submit(msgspec.Struct, tag="submit", frozen=True, forbid_unknown_fields=True):
    """A worker's work of one step. Copies start only once the fence page shows `fence`."""

    epoch: int
    fence: int
    loads: Annotated[list[LoadJob], msgspec.Meta(max_length=JOBS_PER_MESSAGE_MAX)]
    stores: Annotated[list[StoreJob], msgspec.Meta(max_length=JOBS_PER_MESSAGE_MAX)]


class JobOutcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`outcome` of job `job_id`; for loads, anything but OK means that no block may be used."""

    job_id: int
    outcome: Outcome


class Done(msgspec.Struct, tag="done", frozen=True, forbid_unknown_fields=True):
    """Answers to jobs of this worker, in the order in which they ended."""

    epoch: int
    jobs: list[JobOutcome]


class Lookup(
    msgspec.Struct, tag="lookup", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Bring `keys` from the object store to host memory, and lease them.

    In the order in which they are of use: of one group they are a chain, and those of a group
    that cannot do without the chain of another come after it.
    """

    epoch: int
    lookup_id: int
    keys: Keys
    deadline_ms: int
    tenant: bytes = b""
    num_tokens: int = 0
    """Tokens of all keys together; 0: not said, and then nothing is weighed against computing."""
    prefill_tokens_per_second: float = 0.0
    """What the engine measured of itself; 0: nothing yet."""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""


class LookupDone(msgspec.Struct, tag="lookup_done", frozen=True, forbid_unknown_fields=True):
    """The first `ready` keys of the lookup are in host memory; the rest will not come."""

    epoch: int
    lookup_id: int
    ready: int
    outcome: Outcome


class Lease(
    msgspec.Struct, tag="lease", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Pin `keys` until every rank finished load job `lease_id`, a `Release`, or the deadline."""

    epoch: int
    lease_id: int
    keys: Keys
    tenant: bytes = b""


class Pin(msgspec.Struct, tag="pin", frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Keep `keys` in host memory for `duration_ms`, also what is still to be stored. Not answered.

    As many of them, from the first on, as this client and `tenant` may pin; the rest are counted.
    """

    epoch: int
    keys: Keys
    duration_ms: Annotated[int, msgspec.Meta(gt=0, le=PIN_MS_MAX)]
    tenant: bytes = b""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""


class Release(
    msgspec.Struct, tag="release", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Give leases and lookups back before their work was done. Unknown ids are ignored."""

    epoch: int
    lease_ids: Ids
    lookup_ids: Ids
    pins: bool = False
    """All that this client has pinned, too."""


class StoredEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunk `key` became available in `tier` ("host" or "store")."""

    key: bytes
    parent: bytes
    num_tokens: int
    tier: str
    group: int = 0


class RemovedEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunk `key` is no longer available in `tier`."""

    key: bytes
    tier: str
    group: int = 0


class Events(msgspec.Struct, tag="events", frozen=True, forbid_unknown_fields=True):
    """What the tiers gained and lost for this namespace and topology since the last one."""

    epoch: int
    stored: list[StoredEvent]
    removed: list[RemovedEvent]


class Error(msgspec.Struct, tag="error", frozen=True, forbid_unknown_fields=True):
    """The last frame of this session was refused. The session goes on."""

    epoch: int
    code: str
    message: str


ClientMessage = Submit | Lookup | Lease | Pin | Release
ServerMessage = Done | LookupDone | Events | Error
AttachReply = Attached | Refused | IndexMoved

_HERE: Final = re.compile(
    r"^(ipc:///[^\0]{1,107}|tcp://(127\.0\.0\.1|localhost|\[::1\]):[0-9]{1,5})\Z"
)
_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_server_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(ServerMessage)
_attach_decoder: msgspec.msgpack.Decoder[Attach] = msgspec.msgpack.Decoder(Attach)
_reply_decoder: msgspec.msgpack.Decoder[AttachReply] = msgspec.msgpack.Decoder(AttachReply)


def tenant_id(cache_salt: str) -> bytes:
    """The tenant of requests with this cache salt: 8 bytes, or none for requests without one.

    The salt itself is a secret and is in no message: whoever knows it can ask for what its
    tenant's requests left in the cache.
    """
    if not cache_salt:
        return b""
    return hashlib.sha256(b"kvlake tenant\0" + cache_salt.encode()).digest()[:TENANT_BYTES]


class ProtocolError(ValueError):
    """A frame that this protocol cannot accept. `code` is stable, for counters and tests."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def encode(message: ClientMessage | ServerMessage | Attach | AttachReply) -> bytes:
    """MessagePack bytes of one message."""
    return _encoder.encode(message)


def decode_client(frame: bytes | memoryview) -> ClientMessage:
    """Decode and validate what a connector sent over ZMQ. Raises `ProtocolError`."""
    message = _decode(_client_decoder, frame)
    _check_client(message)
    return message


def decode_server(frame: bytes | memoryview) -> ServerMessage:
    """Decode what the sidecar sent over ZMQ. Raises `ProtocolError`."""
    return _decode(_server_decoder, frame)


def decode_attach(frame: bytes | memoryview) -> Attach:
    """Decode and validate the first frame of a Unix connection. Raises `ProtocolError`."""
    # The version is read on its own first, so that a peer of another version is told so rather
    # than handed a list of fields that it cannot know.
    version = _peek_version(frame)
    if version is not None and version != PROTOCOL_VERSION:
        raise ProtocolError(
            "version",
            f"protocol version {version} is not spoken here (this side speaks "
            f"{PROTOCOL_VERSION}); install the same kvlake release for connector and sidecar",
        )
    message = _decode(_attach_decoder, frame)
    _check_attach(message)
    return message


def decode_attach_reply(frame: bytes | memoryview) -> AttachReply:
    """Decode what the sidecar sent over the Unix socket. Raises `ProtocolError`."""
    return _decode(_reply_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    if len(frame) > FRAME_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large",
            f"frame of {len(frame)} bytes exceeds FRAME_BYTES_MAX={FRAME_BYTES_MAX}; "
            "send fewer jobs per message",
        )
    try:
        return decoder.decode(frame)
    except msgspec.ValidationError as error:
        code = (
            "unknown_tag" if "Invalid value" in str(error) and "$.type" in str(error) else "field"
        )
        raise ProtocolError(code, f"message refused: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError("malformed", f"frame is not MessagePack: {error}") from error


class _Versioned(msgspec.Struct):
    version: int


_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def _peek_version(frame: bytes | memoryview) -> int | None:
    if len(frame) > FRAME_BYTES_MAX:
        return None
    try:
        return _version_decoder.decode(frame).version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _require(condition: bool, field: str, value: object, rule: str) -> None:
    if not condition:
        raise ProtocolError("field", f"{field}={value!r}: {rule}")


def _check_tenant(tenant: bytes) -> None:
    _require(len(tenant) in (0, TENANT_BYTES), "tenant", len(tenant), f"0 or {TENANT_BYTES} bytes")


def _check_client(message: ClientMessage) -> None:
    match message:
        case Submit():
            jobs = len(message.loads) + len(message.stores)
            _require(jobs <= JOBS_PER_MESSAGE_MAX, "jobs", jobs, f"at most {JOBS_PER_MESSAGE_MAX}")
            for store in message.stores:
                for chunk in store.chunks:
                    _require(
                        len(chunk.token_ids) % 4 == 0,
                        "token_ids",
                        len(chunk.token_ids),
                        "int32 bytes come in fours",
                    )
                    _check_tenant(chunk.tenant)
        case Lookup():
            _check_tenant(message.tenant)
            _require(message.deadline_ms >= 0, "deadline_ms", message.deadline_ms, "must be >= 0")
            _require(message.num_tokens >= 0, "num_tokens", message.num_tokens, "must be >= 0")
            rate = message.prefill_tokens_per_second
            # Written so that NaN fails too.
            _require(0 <= rate < math.inf, "prefill_tokens_per_second", rate, "finite, >= 0")
            counted = (0, len(message.keys))
            _require(len(message.groups) in counted, "groups", len(message.groups), "one per key")
        case Lease():
            _check_tenant(message.tenant)
        case Pin():
            _check_tenant(message.tenant)
            counted = (0, len(message.keys))
            _require(len(message.groups) in counted, "groups", len(message.groups), "one per key")
        case Release():
            ids = len(message.lease_ids) + len(message.lookup_ids)
            _require(ids <= KEYS_PER_MESSAGE_MAX, "ids", ids, f"at most {KEYS_PER_MESSAGE_MAX}")


def _check_attach(message: Attach) -> None:
    _require(0 < message.world_size <= 4096, "world_size", message.world_size, "between 1 and 4096")
    _require(
        0 <= message.rank < message.world_size, "rank", message.rank, "between 0 and world_size - 1"
    )
    _require(
        message.replicas > 0 and message.world_size % message.replicas == 0,
        "replicas",
        message.replicas,
        f"must divide world_size={message.world_size}",
    )
    for part in message.parts:
        _check_group(part)
    _require(
        0 < len(message.engine_id) <= 256, "engine_id", message.engine_id, "1 to 256 characters"
    )
    _require(0 < len(message.topology) <= 256, "topology", message.topology, "1 to 256 characters")
    for field, place in (
        ("events_endpoint", message.events_endpoint),
        ("events_replay", message.events_replay),
    ):
        _require(
            not place or bool(_HERE.match(place)), field, place, "ipc:///PATH, or TCP on loopback"
        )
    if message.memory is not None:
        _check_memory(message.memory)


def _check_group(part: Attach) -> None:
    _require(0 < part.block_tokens <= 65_536, "block_tokens", part.block_tokens, "1 to 65536")
    _require(
        0 < part.blocks_per_chunk <= 65_536, "blocks_per_chunk", part.blocks_per_chunk, "1 to 65536"
    )
    _require(
        0 < len(part.namespace) <= NAMESPACE_BYTES_MAX,
        "namespace",
        len(part.namespace),
        f"1 to {NAMESPACE_BYTES_MAX} bytes",
    )
    if part.role is Role.WORKER:
        given = (part.segment, part.layout, part.memory)
        _require(None not in given, "segment/layout/memory", given, "a worker gives all three")


def _check_memory(memory: Memory) -> None:
    on_gpu = memory.kind in (KIND_CUDA_IPC, KIND_CUDA_VMM)
    for field, value, size in (
        ("memory.device_uuid", memory.device_uuid, UUID_BYTES if on_gpu else 0),
        ("memory.handle", memory.handle, IPC_HANDLE_BYTES if memory.kind == KIND_CUDA_IPC else 0),
    ):
        _require(len(value) == size, field, len(value), f"{size} bytes for {memory.kind!r}")


_LENGTH = struct.Struct("<I")


def frame_stream(payload: bytes) -> bytes:
    """A payload as it travels on the Unix socket: 4 bytes of length, then the bytes."""
    return _LENGTH.pack(len(payload)) + payload


def stream_length(header: bytes) -> int:
    """Length that a 4-byte stream header announces. Raises `ProtocolError` over the limit."""
    (length,) = _LENGTH.unpack(header)
    if length > FRAME_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large", f"frame of {length} bytes exceeds FRAME_BYTES_MAX={FRAME_BYTES_MAX}"
        )
    return int(length)
