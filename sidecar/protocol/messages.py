"""Messages over ZMQ: loads, stores, lookups, leases, pins, events, and their answers.

Owns their fields and limits, and names that connector and sidecar derive alike: of tenants, and of
the tiers in KV cache events. No limit is a setting: both sides have the same. Lists are bounded
while they are decoded; `codec.py` checks what types cannot say.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, Final

import msgspec

from tiers.kv.layout import BLOCKS_PER_CHUNK_MAX

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
    """The worker stopped waiting and took its blocks back; no block was written."""
    FAILED = 5
    """The copy raised; see the sidecar's log."""
    PARTIAL = 6
    """A store of several chunks kept some of them."""
    EXPIRED = 7
    """Its deadline passed first; no block was written."""


class LoadChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Copy blocks `first_block : first_block + len(block_ids)` of chunk `key` to `block_ids`."""

    key: Key
    first_block: Annotated[int, msgspec.Meta(ge=0)]
    block_ids: BlockIds
    group: GroupId = 0


class StoreChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


class LoadJob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All chunks that one request loads; `job_id` is also the id of its lease."""

    job_id: int
    chunks: Annotated[list[LoadChunk], msgspec.Meta(max_length=KEYS_PER_MESSAGE_MAX)]


class StoreJob(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunks of one request that became complete in one step.

    `job_id` is unique per engine and epoch. `ttl_ms`: the chunks expire after this time, 0 for
    never. `stays`: they are not written to the object store; chunks that expire are not either.
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

    The keys are ordered by use: those of one group are a chain, and a group that needs the chain of
    another one comes after it.
    """

    epoch: int
    lookup_id: int
    keys: Keys
    deadline_ms: Annotated[int, msgspec.Meta(ge=0)]
    tenant: bytes = b""
    num_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Tokens of all keys together. 0: unknown, and the read is not weighed against computing."""
    prefill_tokens_per_second: float = 0.0
    """As the engine measured it; 0: unknown."""
    groups: GroupIds = []
    """The group of each key; left out where all are of group 0."""


class LookupDone(msgspec.Struct, tag="lookup_done", frozen=True, forbid_unknown_fields=True):
    """The first `ready` keys of the lookup are in host memory; the rest will not be."""

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
    """Keep `keys` in host memory for `duration_ms`, also once they are stored later. Not answered.

    Pins the first keys, up to the limits of this client and `tenant`; the rest are counted.
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
    """Release leases and lookups. Unknown ids are ignored."""

    epoch: int
    lease_ids: Ids
    lookup_ids: Ids
    pins: bool = False
    """Whether to release all pins of this client too."""
    heard: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """`Events` received since the attach, to request more of them; -1: no request."""


class StoredEvent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Chunk `key` became available in `tier` ("host" or "store").

    For one known only from a listing, `key` is the first half and `parent` is empty.
    """

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


class Events(
    msgspec.Struct, tag="events", frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Changes of the tiers for this namespace and topology since the last `Events`."""

    epoch: int
    stored: list[StoredEvent]
    removed: list[RemovedEvent]
    anew: bool = False
    """Drop the contents of all earlier `Events`: everything is sent again from here on."""


class Error(msgspec.Struct, tag="error", frozen=True, forbid_unknown_fields=True):
    """The last frame of this session was refused. The session continues."""

    epoch: int
    code: str
    message: str


ClientMessage = Submit | Lookup | Lease | Pin | Release
ServerMessage = Done | LookupDone | Events | Error

TIERS_OWNER: Final = "kvlake/"
"""Prefix of the tiers' owners in vLLM's KV events. In an engine's own stream such events come from
the connector, and the sidecar ignores them: it publishes the tiers itself."""
HITS_OWNER: Final = "kvlake/hits"
"""Owner of an event by which the connector says that vLLM's events include hits from here on."""


def tiers_owner(namespace_digest: bytes, topology: str) -> str:
    """The owner, in KV events, of chunks that engines of one namespace and topology share."""
    return f"{TIERS_OWNER}{namespace_digest.hex()[:16]}/{topology}"


def tenant_id(cache_salt: str) -> bytes:
    """The tenant of requests with this cache salt: 8 bytes, or none for requests without one.

    The salt itself is a secret and is in no message: a client that knows it can read what its
    tenant's requests left in the cache.
    """
    if not cache_salt:
        return b""
    return hashlib.sha256(b"kvlake tenant\0" + cache_salt.encode()).digest()[:TENANT_BYTES]
