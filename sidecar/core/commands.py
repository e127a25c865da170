"""The engine's vocabulary: events that it is told, commands that it answers with.

The engine (`sidecar/core/engine.py`) is a pure function of its state: `handle(event, now) ->
list[Command]`. The server turns messages into events, the executor turns commands into I/O and
their endings into events. Nothing here does anything; these are records.

Ids: `session_id` counts attachments in this sidecar's life, `realm_id` counts (namespace,
topology) pairs, `copy_id`, `write_id` and `read_id` count commands. A slot is named by its byte
offset in the pool's mapping. A tenant is named as in the messages (`protocol.tenant_id`).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.core.listed_rows import Keys, ListedRows
    from sidecar.protocol import Lookup, Pin, Role, ServerMessage, Submit
    from tiers.kv.layout import ChunkLayout
    from tiers.kv.layout import Segment as LayoutSegment

# --- events ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedGroup:
    """One KV cache group of a client; for a worker, `layout` is its rank's chunk geometry."""

    realm_id: int
    layout: ChunkLayout | None
    namespace: bytes = b""
    """Digest of the realm's namespace."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A client attached. Realm, layout and namespace are of its first KV cache group."""

    session_id: int
    role: Role
    engine_id: str
    rank: int
    world_size: int
    realm_id: int
    want_events: bool
    layout: ChunkLayout | None
    namespace: bytes = b""
    others: tuple[OpenedGroup, ...] = ()
    replicas: int = 1
    """Ranks in a row that hold the same segment. The engine knows their chunks by segment."""

    @property
    def groups(self) -> tuple[OpenedGroup, ...]:
        """All of its groups, in the order of their numbers."""
        return (OpenedGroup(self.realm_id, self.layout, self.namespace), *self.others)

    @property
    def segment_number(self) -> int:
        """Which of a chunk's segments this worker holds: its rank in the realm."""
        return self.rank // self.replicas

    @property
    def num_segments(self) -> int:
        """Segments of a chunk."""
        return self.world_size // self.replicas

    def stores(self, key: bytes) -> bool:
        """Whether this worker, of those that hold the same segment, is the one to store it."""
        number = int.from_bytes(key[:4], "little")
        return number % self.replicas == self.rank % self.replicas


@dataclass(frozen=True, slots=True)
class RestoredSlot:
    """A slot that was sealed before this life. `sealed` and `used` only say what came first."""

    slot: int
    namespace: bytes
    geometry: ChunkLayout
    """The layout that it was stored with, less its chunk size (`ChunkLayout.geometry`)."""
    num_blocks: int
    key: bytes
    parent: bytes
    tenant: bytes
    sealed: int
    used: int
    expires_at: float = math.inf
    """On the engine's clock, when its chunk is to be forgotten."""
    stays: bool = False
    """Its chunk is not for the object store."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What host memory held when the sidecar started; before every other event."""

    slots: tuple[RestoredSlot, ...]


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """End of file on the client's Unix socket. Copies that run for it go on to their end."""

    session_id: int


@dataclass(frozen=True, slots=True)
class Submitted:
    """A worker's jobs of one step."""

    session_id: int
    message: Submit


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A scheduler asks for chunks that only the store holds."""

    session_id: int
    message: Lookup


@dataclass(frozen=True, slots=True)
class LeaseTaken:
    """A scheduler pins chunks until load job `lease_id` of every rank has ended."""

    session_id: int
    lease_id: int
    keys: tuple[bytes, ...]
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Released:
    """A scheduler gives leases and lookups back, and with `pins` all that it pinned.

    With `heard`, it has taken so many messages of events, and listens for more.
    """

    session_id: int
    lease_ids: tuple[int, ...]
    lookup_ids: tuple[int, ...]
    pins: bool = False
    heard: int = -1


@dataclass(frozen=True, slots=True)
class PinAsked:
    """A scheduler wants chunks to stay in host memory for a while."""

    session_id: int
    message: Pin


class CopyOutcome(enum.Enum):
    """How one gather or scatter ended."""

    OK = "ok"
    CORRUPT = "corrupt"
    REVOKED = "revoked"
    EXPIRED = "expired"
    """It had not started by the job's deadline, and nothing was touched."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Copied:
    """A `Gather` or `Scatter` ended; its slot and blocks are no longer touched."""

    copy_id: int
    outcome: CopyOutcome
    detail: str = ""


class StoreOutcome(enum.Enum):
    """How one read from, or write to, the object store ended."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    UNREADABLE = "unreadable"
    """Somebody else's object that cannot be used here, and that need not be damaged."""
    EXPIRED = "expired"
    """Not done within `store.deadline_seconds_max`."""
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Written:
    """A `Write` ended; its slot is no longer read."""

    write_id: int
    outcome: StoreOutcome
    num_bytes: int = 0
    written_at: int = 0
    """As announced in the catalog: microseconds since 1970."""


@dataclass(frozen=True, slots=True)
class ReadDone:
    """A `Read` ended. OK means: verified, in the slot, with `num_blocks` blocks."""

    read_id: int
    outcome: StoreOutcome
    num_blocks: int = 0
    parent: bytes = b""
    num_bytes: int = 0
    failed: int = -1
    """The bit of the source that the outcome is about; -1: the rank's own segment."""
    garbled: bool = False
    """It arrived damaged, and otherwise the second time: a fault of this node or the way to it."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Lines of the catalog that are new to one realm; any of them may come again."""

    realm_id: int
    rows: ListedRows
    foreign: Sequence[LayoutSegment] = ()
    """Segments of other cuts, by bit from the world size on."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that a realm's catalog held when the sidecar began to read it was `Listed`."""

    realm_id: int


@dataclass(frozen=True, slots=True)
class ForgetRealms:
    """No session is of these realms: give up some of their chunks or, with the last, all of them.

    Come again until they are gone; passed over while anything runs or is pinned in one of them.
    """

    realm_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: leases and lookups past their deadline end."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Others had a turn: go on with what `Resume` put off."""


@dataclass(frozen=True, slots=True)
class Draining:
    """The sidecar stops: no new store or lookup is accepted, pending writes are issued."""


Event = (
    Restored
    | SessionOpened
    | SessionClosed
    | Submitted
    | LookedUp
    | LeaseTaken
    | PinAsked
    | Released
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

# --- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gather:
    """Copy a worker's blocks into a slot, checksum and seal it; answered by `Copied`."""

    copy_id: int
    session_id: int
    job_id: int
    fence: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    parent: bytes
    token_ids: bytes
    block_ids: tuple[int, ...]
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Copy part of a slot of `num_blocks` blocks out, and `verify` all; answered by `Copied`."""

    copy_id: int
    session_id: int
    job_id: int
    fence: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    num_blocks: int
    first_block: int
    block_ids: tuple[int, ...]
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Write:
    """Send a sealed slot to the object store; answered by `Written`.

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
    """The catalog has to say that it was written later than this: when it was withdrawn."""
    verify: bool = True


@dataclass(frozen=True, slots=True)
class Read:
    """Bring one segment from the object store into a slot and verify it; answered by `ReadDone`.

    `sources` are bits of the segments to make it from: the rank's own, or others that cover it.
    """

    read_id: int
    realm_id: int
    rank: int
    slot: int
    key: bytes
    sources: tuple[int, ...]
    tenant: bytes = b""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Move a corrupt object aside so that nobody reads it again. Best effort, not answered."""

    realm_id: int
    bit: int
    """Rank, or a segment of another cut."""
    key: bytes


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Announce that the object of a segment is gone. Best effort, not answered."""

    realm_id: int
    bit: int
    """Rank, or a segment of another cut."""
    key: bytes
    written_at: int
    """What the catalog said of it; a later writing holds."""


@dataclass(frozen=True, slots=True)
class Resume:
    """There is more to do than one turn of the event loop should; answered by `Resumed`."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Send a message to one session; dropped where the session is gone."""

    session_id: int
    message: ServerMessage


@dataclass(frozen=True, slots=True)
class IndexSet:
    """What the shared index shall say of a chunk. Neither flag: remove it."""

    realm_id: int
    key: bytes
    in_host: bool
    in_store: bool


@dataclass(frozen=True, slots=True, eq=False)
class IndexOffer:
    """The shared index shall say of these chunks that the store holds them, and the host not."""

    realm_id: int
    keys: Keys
    """Shape [n, 32], all different."""


Command = (
    Gather | Scatter | Write | Read | Quarantine | Withdraw | Resume | Reply | IndexSet | IndexOffer
)


@dataclass(slots=True)
class Counters:
    """What the engine counted since it started; the metrics read it. Never decreases.

    What each field counts is said in `observe/metric_table.py`, in the words that Prometheus shows.
    """

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
    stale_messages: int = field(default=0)
