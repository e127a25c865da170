"""Where each chunk is: in host memory, a slot per rank; in the store, a bit per rank.

Owns the realms (one namespace in one parallel layout), their chunks, the transition table of a
segment, and the list of chunks whose public flags changed. Does not own slots, pins, or the order
of eviction.

A chunk that only the store holds is one entry of a table (`stored_table.py`); there may be millions
of them. A `Chunk` exists while some of it is in host memory, on its way there, or pinned.

Invariants: a segment changes state only in `Directory.move`, along `TRANSITIONS`; it has a slot
unless it is ABSENT; a detached chunk (corrupt or expired) has only ABSENT and ZOMBIE segments; pins
are a count beside the states, never a state; a chunk that left the directory loses its segments
when the event ends.

Python's garbage collector does not track chunks and segments (`gc=False`): with 75,000 of them, a
collection held up the event loop and every copy thread for a quarter of a second. Their only cycle,
a chunk and its segments, is cut by hand (docs/adr/0057).
"""

import enum
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sidecar.core.retention import FOR_EVER, Gone, Retention
from sidecar.core.stored_table import Masks, StoredChunks, StoredColumns, distinct
from tiers.kv.layout import ChunkLayout
from tiers.kv.reshard import SegmentSources

Flags = npt.NDArray[np.bool_]

HISTORY_LINES_MAX: Final = 4096
"""Transitions of all chunks that are remembered, to explain an illegal one."""
ZERO_KEY: Final = bytes(32)


class SegmentState(enum.Enum):
    """What the slot of a segment holds."""

    __hash__ = object.__hash__  # That of Enum is Python code, and slow.

    ABSENT = "absent"
    """There is no slot."""
    STORING = "storing"
    """Blocks of a worker are being copied into it."""
    READING = "reading"
    """The object is being read into it."""
    HOST = "host"
    """It is sealed and can be loaded."""
    ZOMBIE = "zombie"
    """Its chunk is detached, but a copy, read or write still runs on it."""


class Cause(enum.Enum):
    """Why a segment changes state."""

    __hash__ = object.__hash__

    GATHER = "gather"
    READ = "read"
    FILLED = "filled"
    RESTORED = "restored"
    FAILED = "failed"
    EVICTED = "evicted"
    DETACHED = "detached"
    ENDED = "ended"


_S, _C = SegmentState, Cause
TRANSITIONS: Final[dict[tuple[SegmentState, Cause], SegmentState]] = {
    (_S.ABSENT, _C.GATHER): _S.STORING,
    (_S.ABSENT, _C.READ): _S.READING,
    (_S.ABSENT, _C.RESTORED): _S.HOST,
    (_S.STORING, _C.FILLED): _S.HOST,
    (_S.STORING, _C.FAILED): _S.ABSENT,
    (_S.STORING, _C.DETACHED): _S.ZOMBIE,
    (_S.READING, _C.FILLED): _S.HOST,
    (_S.READING, _C.FAILED): _S.ABSENT,
    (_S.READING, _C.DETACHED): _S.ZOMBIE,
    (_S.HOST, _C.EVICTED): _S.ABSENT,
    (_S.HOST, _C.DETACHED): _S.ZOMBIE,
    (_S.ZOMBIE, _C.ENDED): _S.ABSENT,
}


class IllegalTransition(Exception):  # a condition, as in h11 and distributed
    """A bug in the engine. The message contains the history of the chunk."""


class HostSegment(msgspec.Struct, eq=False, gc=False):
    """The part of a chunk that one rank holds. Compared by identity."""

    chunk: "Chunk"
    rank: int
    state: SegmentState = SegmentState.ABSENT
    slot: int = -1
    """-1: none."""
    num_blocks: int = 0
    verified: bool = True
    """Whether this process has verified a HOST segment, and nobody withdrew its object since."""
    running: int = 0
    """Copies, reads and writes on the slot; it is not freed before they end."""
    writing: bool = False

    @property
    def slot_bytes(self) -> int:
        """Size of the slot that it has or would get."""
        return self.chunk.realm.slot_bytes[self.rank]


class Chunk(msgspec.Struct, eq=False, gc=False):
    """A chunk with something in host memory, or pinned. Compared by identity."""

    realm: "Realm"
    key: bytes
    tenant: bytes
    """The salt is part of the key, so the tenant of a key never changes."""
    parent: bytes = ZERO_KEY
    pins: int = 0
    request_pins: int = 0
    """Sessions that asked to keep it. While there are any, it is in no order of eviction."""
    retention: Retention = FOR_EVER
    hosted: int = 0
    """Ranks whose segment is HOST."""
    used_at: float = 0.0
    """When it was used last, or came, by the engine's clock."""
    uses: int = 0
    """Requests that had it in their prompt since it came, up to `USES_MAX`."""
    request: int = 0
    """The last of those, by number; if none had it, that of the chunk before it; 0: unknown."""
    refused: bool = False
    """A policy refused it, and no request has used it since."""
    detached: bool = False
    gone: Gone | None = Gone.EVICTED
    """Why it left host memory, once it has; None: nobody needs to know."""
    segments: tuple[HostSegment, ...] = ()
    """One for each rank; none once it left the directory."""

    def __post_init__(self) -> None:
        self.segments = tuple([HostSegment(self, rank) for rank in range(self.realm.world_size)])

    @property
    def loadable(self) -> bool:
        """Whether every rank can load its segment from host memory."""
        return self.hosted == self.realm.world_size and not self.detached

    @property
    def busy(self) -> bool:
        """Whether a copy, read or write runs on one of its slots."""
        # Asked several times for each chunk that comes or goes: a generator takes twice as long.
        for segment in self.segments:  # noqa: SIM110
            if segment.running:
                return True
        return False

    @property
    def empty(self) -> bool:
        """Whether it has no slot."""
        for segment in self.segments:  # noqa: SIM110 (as above)
            if segment.state is not SegmentState.ABSENT:
                return False
        return True


class Realm:
    """The chunks of one namespace in one parallel layout."""

    def __init__(self, realm_id: int, world_size: int, *, readable: bool) -> None:
        self.realm_id = realm_id
        self.world_size = world_size
        """Segments of a chunk. Ranks that hold the same segment count as one."""
        self.readable = readable
        """Whether chunks may be read from the store."""
        self.full_mask = (1 << world_size) - 1
        self.segment_sources = SegmentSources(world_size)
        self.layouts: list[ChunkLayout | None] = [None] * world_size
        """Geometry of each rank's segment, once a worker of that rank attached."""
        self.slot_bytes = [0] * world_size
        """Size of each rank's slots, which is also their class in the pool."""
        self.chunks: dict[bytes, Chunk] = {}
        self.stored = StoredChunks(world_size)
        """Segments in the store."""
        self.caught_up = False
        """Whether all of its catalog was read: the store lacks what `stored` does not name."""
        self.backfill: dict[Chunk, None] = {}
        """Restored chunks that the store may lack, newest last."""
        self.hosted_chunks = 0
        self.stored_chunks = 0

    @property
    def chunk_bytes(self) -> int:
        """Size of the slots of one chunk, of all ranks that are known."""
        return sum(self.slot_bytes)

    def flags(self, key: bytes) -> tuple[bool, bool]:
        """The entry of `key` in the shared index: (in_host, in_store)."""
        chunk = self.chunks.get(key)
        return chunk is not None and chunk.loadable, self.in_store(key)

    def in_store(self, key: bytes) -> bool:
        """Whether the segments of all ranks can be read from the store."""
        return self.readable and self.segment_sources.covers(self.stored.mask(key))

    def obtainable(self, key: bytes) -> int:
        """Ranks whose segment can be read or made from the store, as bits."""
        return self.segment_sources.obtainable(self.stored.mask(key))

    def stored_names(self) -> Iterator[bytes]:
        """First halves of the keys of all chunks that can be read from the store, in no order."""
        for name, mask in self.stored.names():
            if self.readable and self.segment_sources.covers(mask):
                yield name

    def readable_in(self, masks: Masks) -> Flags:
        """Which of these masks provide the segments of all ranks; shape [n]."""
        values, places = distinct(masks)
        complete = [self.segment_sources.covers(mask) for mask in values]
        return np.array(complete, dtype=np.bool_)[places] & self.readable


class FlagChange(NamedTuple):
    """A chunk whose public flags changed."""

    realm: Realm
    key: bytes
    chunk: Chunk | None
    was: tuple[bool, bool]
    now: tuple[bool, bool]


class GoneKeys:
    """The chunks that left the cache last, so that an engine which misses one learns why.

    An `OrderedDict`: removing the oldest key of a dict takes time with the number of removed ones.
    """

    def __init__(self, keys_max: int, realms: Mapping[int, Realm]) -> None:
        self._keys_max = keys_max
        self._realms = realms
        # When and why. Python's garbage collector need not follow numbers and text.
        self._keys: OrderedDict[tuple[int, bytes], tuple[float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, change: FlagChange, now: float) -> Gone | None:
        """Note a change of a chunk; returns why it is gone, if it is to be remembered."""
        name = (change.realm.realm_id, change.key)
        self._keys.pop(name, None)
        if any(change.now):
            return None
        gone = Gone.EVICTED if change.chunk is None else change.chunk.gone
        if gone is not None and self._keys_max:
            self._keys[name] = (now, gone.value)
        return gone if self._keys_max else None

    def why(self, realm_id: int, key: bytes) -> Gone | None:
        """Why a chunk is gone, if that is remembered."""
        found = self._keys.get((realm_id, key))
        return None if found is None else Gone(found[1])

    def since(self, realm_id: int, key: bytes) -> float | None:
        """When a chunk left, or was not let in, if that is remembered."""
        found = self._keys.get((realm_id, key))
        return None if found is None else found[0]

    def forget_oldest(self) -> Iterator[tuple[int, bytes]]:
        """Forget what is too much; yields realm and key of those that still are in no tier."""
        while len(self._keys) > self._keys_max:
            (realm_id, key), _ = self._keys.popitem(last=False)
            realm = self._realms.get(realm_id)
            # A listing of the store does not report single chunks.
            if realm is not None and not any(realm.flags(key)):
                yield realm_id, key

    def of(self, realm_id: int) -> list[bytes]:
        """The remembered chunks of a realm."""
        return [key for realm, key in self._keys if realm == realm_id]

    def forget_realm(self, realm_id: int) -> None:
        """Forget the chunks of a realm. Who shares its index takes them out of that, see `of`."""
        for key in self.of(realm_id):
            del self._keys[realm_id, key]


class Directory:
    """All realms. Every change goes through here: it is legal, recorded, and reported once."""

    def __init__(self, *, readable: bool) -> None:
        self.realms: dict[int, Realm] = {}
        self._readable = readable
        self._history: deque[tuple[int, bytes, int, SegmentState, Cause]] = deque(
            maxlen=HISTORY_LINES_MAX
        )
        # (realm_id, key) -> realm, and flags and chunk before this event.
        self._touched: dict[tuple[int, bytes], tuple[Realm, tuple[bool, bool], Chunk | None]] = {}
        self._unkept: dict[tuple[int, bytes], Chunk] = {}
        self._removed: list[Chunk] = []
        """Chunks that left in this event, with their segments."""

    @property
    def chunks_in_host(self) -> int:
        """Chunks of all realms that can be loaded from host memory."""
        return sum(realm.hosted_chunks for realm in self.realms.values())

    @property
    def chunks_in_store(self) -> int:
        """Chunks of all realms that can be read from the store."""
        return sum(realm.stored_chunks for realm in self.realms.values())

    def open_realm(self, realm_id: int, world_size: int) -> Realm:
        """The realm, created on first use."""
        if realm_id not in self.realms:
            self.realms[realm_id] = Realm(realm_id, world_size, readable=self._readable)
        return self.realms[realm_id]

    def open_chunk(self, realm: Realm, key: bytes, tenant: bytes = b"") -> Chunk:
        """The chunk, created if there is none. `drop_if_unused` deletes it again."""
        chunk = realm.chunks.get(key)
        if chunk is None:
            chunk = realm.chunks[key] = Chunk(realm, key, tenant)
        return chunk

    def drop_if_unused(self, chunk: Chunk) -> None:
        """Delete the chunk if it has no slot and no pin."""
        if chunk.pins == 0 and not chunk.detached and chunk.empty:
            self._remove(chunk)

    def _remove(self, chunk: Chunk) -> None:
        realm, key = chunk.realm, chunk.key
        del realm.chunks[key]
        self._removed.append(chunk)
        chunk.detached = True
        if not self._readable and realm.stored.mask(key):
            # Nobody tells this sidecar when the object is collected. It is written again.
            realm.stored.set(key, 0, 0)

    def move(self, segment: HostSegment, cause: Cause) -> None:
        """Change the state of a segment along the table. Raises `IllegalTransition`."""
        chunk, before = segment.chunk, segment.state
        after = TRANSITIONS.get((before, cause))
        if after is None:
            raise IllegalTransition(
                f"{before.name} + {cause.name} is no transition, for rank {segment.rank} of "
                f"{self.history(chunk.realm.realm_id, chunk.key)}"
            )
        self._history.append((chunk.realm.realm_id, chunk.key, segment.rank, before, cause))
        hosted = (after is SegmentState.HOST) - (before is SegmentState.HOST)
        if hosted and not chunk.detached:
            self._touch(chunk.realm, chunk.key)
        segment.state = after
        chunk.hosted += hosted

    def detach(self, chunk: Chunk) -> None:
        """Remove a chunk; work that runs on its slots ends on zombies."""
        self._touch(chunk.realm, chunk.key)
        for segment in chunk.segments:
            if segment.state is not SegmentState.ABSENT:
                self.move(segment, Cause.DETACHED)
        self._remove(chunk)

    def not_kept(self, chunk: Chunk, gone: Gone | None) -> None:
        """Note that a chunk leaves host memory, or is not let in, and why, as in `Chunk.gone`.

        Its public flags need not change: it may be refused, or have been there in part.
        """
        chunk.gone = gone
        self._unkept[chunk.realm.realm_id, chunk.key] = chunk

    def set_stored(self, realm: Realm, key: bytes, mask: int, time: int) -> None:
        """Set the segments that the store holds (0: none), and when the newest was written."""
        if realm.stored.mask(key) != mask:
            self._touch(realm, key)
        realm.stored.set(key, mask, time)

    def add_stored(self, realm: Realm, columns: StoredColumns) -> Flags:
        """Add to what the store holds of chunks that have no `Chunk`; shape [n].

        Returns which of them became readable. `take_changes` does not report them.
        """
        before = realm.stored.add(columns.high, columns.low, columns.masks, columns.written_at)
        readable = realm.readable_in(before | columns.masks) & ~realm.readable_in(before)
        realm.stored_chunks += int(np.count_nonzero(readable))
        return readable

    def _touch(self, realm: Realm, key: bytes) -> None:
        touched = (realm.realm_id, key)
        if touched not in self._touched:
            self._touched[touched] = (realm, realm.flags(key), realm.chunks.get(key))

    def take_changes(self) -> list[FlagChange]:
        """Chunks whose flags changed since the last call, oldest first, each once.

        `take_unkept` has the others that host memory did not keep.
        """
        if not self._touched:
            return []
        changes: list[FlagChange] = []
        for (_, key), (realm, was, holder) in self._touched.items():
            now = realm.flags(key)
            if was != now:
                realm.hosted_chunks += now[0] - was[0]
                realm.stored_chunks += now[1] - was[1]
                chunk = realm.chunks.get(key) or holder
                changes.append(FlagChange(realm, key, chunk, was, now))
                self._unkept.pop((realm.realm_id, key), None)
        self._touched.clear()
        return changes

    def take_unkept(self) -> list[FlagChange]:
        """Chunks that host memory did not keep, and whose flags did not change; oldest first."""
        if not self._unkept:
            return []
        unkept, self._unkept = self._unkept, {}
        chunks = [chunk for chunk in unkept.values() if chunk.gone is not None]
        flags = [chunk.realm.flags(chunk.key) for chunk in chunks]
        return [
            FlagChange(one.realm, one.key, one, now, now)
            for one, now in zip(chunks, flags, strict=True)
        ]

    def free_removed(self) -> None:
        """At the end of an event: take from chunks that left what refers back to them."""
        for chunk in self._removed:
            chunk.segments = ()
        self._removed.clear()

    def history(self, realm_id: int, key: bytes) -> str:
        """The last transitions of a chunk."""
        lines = [
            f"rank {rank}: {state.name} + {cause.name}"
            for line_realm, line_key, rank, state, cause in self._history
            if (line_realm, line_key) == (realm_id, key)
        ]
        known = "; ".join(lines) if lines else "no transition is remembered"
        return f"chunk {key.hex()[:16]} of realm {realm_id}: {known}"
