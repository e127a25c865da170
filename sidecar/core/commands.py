"""Records of the engine: events, commands, counters, and the work that has not ended.

The dispatcher turns messages into events; the executor carries commands out, and turns their
results into events.

Ids: `session_id` counts attachments in this epoch, `realm_id` counts (namespace, parallel layout)
pairs, `copy_id`, `write_id` and `read_id` count commands. A slot is named by its byte offset in the
pool's mapping. A tenant is named as in the messages (`protocol.tenant_id`).
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from sidecar.core.retention import FOR_EVER, Gone, Retention
from sidecar.core.stored_table import Keys, ListedRows
from sidecar.protocol import Attach, ClientMessage, Outcome, ServerMessage
from tiers.kv.layout import ChunkLayout, Segment


class OpenedGroup(msgspec.Struct, frozen=True):
    """One KV cache group of a client; `layout` is the chunk geometry of a worker's rank."""

    realm_id: int
    layout: ChunkLayout | None = None
    namespace: bytes = b""
    """Digest of the realm's namespace."""
    slot_bytes: int = 0
    """Size of the slots that hold a segment of that geometry, as the pool has registered it."""


class SessionOpened(msgspec.Struct, frozen=True):
    """A client attached."""

    session_id: int
    attach: Attach
    groups: tuple[OpenedGroup, ...]
    """In the order of their numbers."""

    @property
    def engine(self) -> tuple[int, str]:
        """What tells the client's engine from others: its first realm, and its own id."""
        return self.groups[0].realm_id, self.attach.engine_id

    def stores(self, key: bytes) -> bool:
        """Whether this worker, of those with the same segment, is the one that stores it."""
        attach, replicas = self.attach, self.attach.replicas
        return (
            replicas == 1 or int.from_bytes(key[:4], "little") % replicas == attach.rank % replicas
        )


class RestoredSlot(msgspec.Struct, frozen=True):
    """A slot that an earlier run sealed. `sealed` and `used` are only good for sorting."""

    slot: int
    namespace: bytes
    geometry: ChunkLayout
    """Its layout without the chunk size (`ChunkLayout.geometry`)."""
    num_blocks: int
    key: bytes
    parent: bytes
    tenant: bytes
    sealed: int
    used: int
    retention: Retention = FOR_EVER
    uses: int = 0
    """Requests that used it, up to `USES_MAX`."""


class Restored(msgspec.Struct, frozen=True):
    """What host memory held at the start; before any other event."""

    slots: tuple[RestoredSlot, ...]


class SessionClosed(msgspec.Struct, frozen=True):
    """The client's Unix socket was closed. Its running copies go on to their end."""

    session_id: int


class Received(msgspec.Struct, frozen=True):
    """A valid message of a client."""

    session_id: int
    message: ClientMessage


class Copied(msgspec.Struct, frozen=True):
    """Some `Gather` or `Scatter` of one job ended; their slots and blocks are not used any more."""

    copy_ids: Sequence[int]
    """At least one."""
    outcome: Outcome
    """OK, CORRUPT, REVOKED, EXPIRED (it had not started by its deadline) or FAILED."""
    detail: str = ""


class StoreOutcome(enum.Enum):
    """How a read or write of the object store ended."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """An object of another writer that cannot be used here, and need not be damaged."""
    EXPIRED = "expired"
    """Not done within `store.deadline_seconds_max`."""
    UNAVAILABLE = "unavailable"


class Written(msgspec.Struct, frozen=True):
    """A `Write` ended; its slot is not read any more."""

    write_id: int
    outcome: StoreOutcome
    num_bytes: int = 0
    written_at: int = 0
    """As announced in the catalog: microseconds since 1970."""


class ReadDone(msgspec.Struct, frozen=True):
    """A `Read` ended. OK: verified, in the slot, with `num_blocks` blocks."""

    read_id: int
    outcome: StoreOutcome
    num_blocks: int = 0
    parent: bytes = b""
    num_bytes: int = 0
    failed: int = -1
    """The bit of the source that failed; -1: the rank's own segment."""
    garbled: bool = False
    """Damaged, and different when read again: a fault of this node or its network."""


class Listed(msgspec.Struct, frozen=True):
    """Rows of the catalog that are new to one realm; a row may be repeated."""

    realm_id: int
    rows: ListedRows
    foreign: Sequence[Segment] = ()
    """Segments of other parallel layouts, by bit from the world size on."""


class CaughtUp(msgspec.Struct, frozen=True):
    """Everything that a realm's catalog held was `Listed`. Repeated after each listing."""

    realm_id: int


class ForgetRealms(msgspec.Struct, frozen=True):
    """Evict some chunks of these realms, which no session uses; without chunks, forget them.

    Repeated until they are gone. Does nothing while work runs, or something is pinned, in one.
    """

    realm_ids: tuple[int, ...]


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


class Resumed(msgspec.Struct, frozen=True):
    """The answer to `Resume`."""


class Draining(msgspec.Struct, frozen=True):
    """The sidecar stops: refuse new stores and lookups, and write what is queued."""


Event = (
    Restored
    | SessionOpened
    | SessionClosed
    | Received
    | Copied
    | Written
    | ReadDone
    | Listed
    | CaughtUp
    | ForgetRealms
    | Tick
    | Resumed
    | Draining
)


class BlockCopy(msgspec.Struct, frozen=True):
    """A copy between a slot and blocks of a worker; answered by `Copied`."""

    copy_id: int
    session_id: int
    job_id: int
    fence: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    block_ids: tuple[int, ...]


class Gather(BlockCopy, frozen=True):
    """Copy blocks into a slot, checksum and seal it."""

    parent: bytes
    token_ids: bytes
    tenant: bytes = b""


class Scatter(BlockCopy, frozen=True):
    """Copy blocks of a slot of `num_blocks` to the worker, from `first_block` on.

    With `verify`, the whole slot is compared with its checksum.
    """

    num_blocks: int
    first_block: int
    verify: bool = True


class WriteCause(enum.StrEnum):
    """Why a chunk is written, in words for operators."""

    THROUGH = "it was stored (store.write: through)"
    ON_REUSE = "a second request used it (store.write: on_reuse)"
    ON_EVICT = "it is evicted soon (store.write: on_evict)"
    RESTORED = "an earlier run had not written it (store.write: through)"
    STOPPING = "the sidecar stops"


class Write(msgspec.Struct, frozen=True):
    """Write a sealed slot to the object store; answered by `Written`.

    With `verify` it is compared with its checksum first. Readers always compare.
    """

    write_id: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    num_blocks: int
    tenant: bytes = b""
    parent: bytes = bytes(32)
    written_after: int = 0
    """The time in the catalog has to be later than this, when it was withdrawn."""
    verify: bool = True
    cause: WriteCause = WriteCause.THROUGH


class Read(msgspec.Struct, frozen=True):
    """Read one segment from the object store into a slot, and verify it; answered by `ReadDone`.

    `sources` are the bits of the segments to make it from: the rank's own, or others.
    """

    read_id: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    sources: tuple[int, ...]
    tenant: bytes = b""


class Quarantine(msgspec.Struct, frozen=True):
    """Move a corrupt object aside, so that nobody reads it again. Best effort, not answered."""

    realm_id: int
    bit: int
    """A rank, or a segment of another parallel layout."""
    key: bytes


class Withdraw(msgspec.Struct, frozen=True):
    """Announce that the object of a segment is gone. Best effort, not answered."""

    realm_id: int
    bit: int
    key: bytes
    written_at: int
    """As the catalog says; a later write stays valid."""


class Resume(msgspec.Struct, frozen=True):
    """Call again in the next turn of the event loop; answered by `Resumed`."""


class Reply(msgspec.Struct, frozen=True):
    """Send a message to a session; dropped if it is closed."""

    session_id: int
    message: ServerMessage
    waited_seconds: float | None = None
    """How long a lookup took until this answer."""


class IndexSet(msgspec.Struct, frozen=True):
    """Set the entry of a chunk in the shared index. Neither flag, and not gone: remove it."""

    realm_id: int
    key: bytes
    in_host: bool
    in_store: bool
    gone: Gone | None = None
    """Why no tier has it any more."""


class IndexOffer(msgspec.Struct, frozen=True, eq=False):
    """Set the entries of chunks that are in the store and not in host memory."""

    realm_id: int
    keys: Keys
    """Shape [n, 32], all different."""


Command = (
    Gather | Scatter | Write | Read | Quarantine | Withdraw | Resume | Reply | IndexSet | IndexOffer
)


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Work that has not ended; a drain waits until all of it is zero."""

    copies_running: int
    writes_running: int
    writes_pending: int
    reads_running: int
    reads_queued: int

    @property
    def idle(self) -> bool:
        """Whether there is none."""
        return self == PendingWork(0, 0, 0, 0, 0)


class ForgettingCost(NamedTuple):
    """What is lost with some realms; those with the lowest cost are forgotten first."""

    unwritten: bool
    """A chunk is queued to be written: nobody else would have it."""
    host_bytes: int
    """Size of the slots of their chunks, at most."""
    listed: bool
    """The catalog named chunks: it is read again when an engine returns."""


@dataclass(slots=True)
class Counters:
    """They never decrease; `observe/metrics.py` says what each of them counts."""

    chunks_stored: int = 0
    chunks_loaded: int = 0
    chunks_evicted: int = 0
    chunks_expired: int = 0
    chunks_pinned: int = 0
    chunks_written: int = 0
    chunks_read: int = 0
    chunks_restored: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    stores_duplicate: int = 0
    stores_dropped_full: int = 0
    stores_refused: int = 0
    stores_dropped_quota: int = 0
    stores_dropped_share: int = 0
    stores_dropped_draining: int = 0
    stores_failed: int = 0
    stores_revoked: int = 0
    stores_expired: int = 0
    loads_served: int = 0
    loads_dropped_full: int = 0
    loads_unverified: int = 0
    loads_missing: int = 0
    loads_corrupt: int = 0
    loads_failed: int = 0
    loads_revoked: int = 0
    loads_expired: int = 0
    lookups: int = 0
    lookups_refused: int = 0
    lookups_expired: int = 0
    lookups_recomputed: int = 0
    reads_paused: int = 0
    reads_unreadable: int = 0
    leases_refused: int = 0
    leases_expired: int = 0
    pins_refused: int = 0
    reads_dropped_full: int = 0
    reads_dropped_quota: int = 0
    reads_missing: int = 0
    reads_corrupt: int = 0
    reads_unavailable: int = 0
    reads_garbled: int = 0
    reads_expired: int = 0
    writes_dropped: int = 0
    writes_refused_quota: int = 0
    writes_refused_bound: int = 0
    writes_failed: int = 0
    writes_unverified: int = 0
    writes_expired: int = 0
    slots_restored: int = 0
    slots_unclaimed_dropped: int = 0
    quarantined_host: int = 0
    quarantined_store: int = 0
    stale_messages: int = 0
