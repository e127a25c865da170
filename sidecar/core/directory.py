"""Where each chunk is: per rank a host segment with its slot, per rank a bit for the store.

Owns the realms (one namespace cut one way over `world_size` ranks), their chunks, the transition
table of a segment, and the list of chunks whose public flags changed. It does not own slots (it
only notes their numbers), nor who pins a chunk (it only counts), nor the order of eviction.

A chunk that only the store holds is one entry of a table (`stored_table.py`): there may be millions
of them. A `Chunk` object exists while something of it is in, on its way to, or pinned for, the host
tier.

Invariants: a segment's state changes only through `Directory.move`, along `TRANSITIONS`; a
segment has a slot exactly when it is not ABSENT; a detached chunk (corrupt, removed from the
directory) has only ABSENT and ZOMBIE segments; pins are a count beside the states, never a state.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from sidecar.core.stored_table import SegmentSources, StoredChunks, distinct, widened

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from sidecar.core.listed_rows import StoredColumns
    from sidecar.core.stored_table import Masks
    from tiers.kv.layout import ChunkLayout

    Flags = npt.NDArray[np.bool_]


STORY_LINES_MAX: Final = 4096
"""Transitions that are remembered, over all chunks, to explain an illegal one."""

ZERO_KEY: Final = bytes(32)


class SegmentState(enum.Enum):
    """What a segment's slot holds."""

    ABSENT = "absent"
    """No slot."""
    STORING = "storing"
    """A worker's blocks are being copied into the slot."""
    READING = "reading"
    """The store's object is being read into the slot."""
    HOST = "host"
    """The slot is sealed and may be copied out."""
    ZOMBIE = "zombie"
    """Nobody may find the slot any more, but a copy, read or write still runs on it."""


class Cause(enum.Enum):
    """Why a segment changes its state."""

    GATHER = "gather"
    READ = "read"
    ARRIVED = "arrived"
    RESTORED = "restored"
    FAILED = "failed"
    EVICTED = "evicted"
    DETACHED = "detached"
    ENDED = "ended"


class StoreState(enum.Enum):
    """What the store holds of one rank's segment."""

    ABSENT = "absent"
    WRITING = "writing"
    STORED = "stored"


_S, _C = SegmentState, Cause
TRANSITIONS: Final[dict[tuple[SegmentState, Cause], SegmentState]] = {
    (_S.ABSENT, _C.GATHER): _S.STORING,
    (_S.ABSENT, _C.READ): _S.READING,
    (_S.ABSENT, _C.RESTORED): _S.HOST,
    (_S.STORING, _C.ARRIVED): _S.HOST,
    (_S.STORING, _C.FAILED): _S.ABSENT,
    (_S.STORING, _C.DETACHED): _S.ZOMBIE,
    (_S.READING, _C.ARRIVED): _S.HOST,
    (_S.READING, _C.FAILED): _S.ABSENT,
    (_S.READING, _C.DETACHED): _S.ZOMBIE,
    (_S.HOST, _C.EVICTED): _S.ABSENT,
    (_S.HOST, _C.DETACHED): _S.ZOMBIE,
    (_S.ZOMBIE, _C.ENDED): _S.ABSENT,
}


class IllegalTransition(Exception):  # a condition, as in h11 and distributed
    """A bug in the engine: the message ends with what happened to the chunk before."""


class HostSegment:
    """One rank's part of a chunk in the host tier. `slot` is -1 while there is none."""

    __slots__ = (
        "chunk",
        "num_blocks",
        "rank",
        "running",
        "slot",
        "state",
        "verified",
        "writing",
    )

    def __init__(self, chunk: Chunk, rank: int) -> None:
        self.chunk = chunk
        self.rank = rank
        self.state = SegmentState.ABSENT
        self.slot = -1
        self.num_blocks = 0
        self.verified = True
        """Whether this process has seen all bytes of a HOST segment to be right, and nobody has
        withdrawn since what was written of them."""
        self.running = 0
        """Copies, reads and writes that touch the slot now; it is not freed before they ended."""
        self.writing = False


class Chunk:
    """A chunk with something in, or pinned for, the host tier. Compared by identity."""

    __slots__ = (
        "detached",
        "expires_at",
        "hosted",
        "kept",
        "key",
        "parent",
        "pins",
        "realm",
        "segments",
        "stays",
        "tenant",
    )

    def __init__(self, realm: Realm, key: bytes, tenant: bytes) -> None:
        self.realm = realm
        self.key = key
        self.tenant = tenant
        """Whose it is. The salt is in the key, so a key never changes its tenant."""
        self.parent = ZERO_KEY
        self.pins = 0
        self.kept = 0
        """Sessions that keep it for a while: it stands in no order of eviction meanwhile."""
        self.expires_at = math.inf
        """When it is to be forgotten, as whoever stored it said."""
        self.stays = False
        """It is not written to the store."""
        self.hosted = 0
        """Ranks whose segment is HOST."""
        self.detached = False
        self.segments = [HostSegment(self, rank) for rank in range(realm.world_size)]

    @property
    def loadable(self) -> bool:
        """Whether every rank can load its segment from the host tier."""
        return self.hosted == self.realm.world_size and not self.detached

    @property
    def busy(self) -> bool:
        """Whether a copy, read or write runs on one of its slots."""
        return any(segment.running for segment in self.segments)

    @property
    def vacant(self) -> bool:
        """Whether it has no slot at all."""
        return all(segment.state is SegmentState.ABSENT for segment in self.segments)


class Realm:
    """The chunks of one namespace and topology."""

    __slots__ = (
        "chunks",
        "full_mask",
        "hosted_chunks",
        "layouts",
        "readable",
        "realm_id",
        "segment_sources",
        "slot_classes",
        "stored",
        "stored_chunks",
        "world_size",
    )

    def __init__(self, realm_id: int, world_size: int, *, readable: bool) -> None:
        self.realm_id = realm_id
        self.world_size = world_size
        """Segments of a chunk. Ranks that hold copies of one segment are one rank here."""
        self.readable = readable
        """Whether chunks may be read from the store at all."""
        self.full_mask = (1 << world_size) - 1
        self.segment_sources = SegmentSources(world_size)
        self.layouts: list[ChunkLayout | None] = [None] * world_size
        """Geometry of each rank's segment, once a worker of that rank attached."""
        self.slot_classes: list[int] = [-1] * world_size
        self.chunks: dict[bytes, Chunk] = {}
        self.stored = StoredChunks(world_size)
        """Which ranks' segments of a chunk are in the store, and since when."""
        self.hosted_chunks = 0
        self.stored_chunks = 0

    def flags(self, key: bytes) -> tuple[bool, bool]:
        """What the shared index says of `key`: (in_host, in_store)."""
        chunk = self.chunks.get(key)
        return chunk is not None and chunk.loadable, self.in_store(key)

    def in_store(self, key: bytes) -> bool:
        """Whether every rank's segment of `key` can be read from the store."""
        return self.readable and self.obtainable(key) == self.full_mask

    def obtainable(self, key: bytes) -> int:
        """Ranks whose segment the store holds, or holds the parts of, as bits."""
        mask = self.stored.get(key)
        return self.segment_sources.obtainable(mask) if mask else 0

    def stored_names(self) -> Iterator[bytes]:
        """First halves of the keys of all chunks that can be read from the store, in no order."""
        for name, mask in self.stored.names():
            if self.readable and self.segment_sources.obtainable(mask) == self.full_mask:
                yield name

    def readable_in(self, masks: Masks) -> Flags:
        """Of which of these masks every rank's segment can be read; shape [n]."""
        values, places = distinct(masks)
        whole = [
            bool(mask) and self.segment_sources.obtainable(mask) == self.full_mask
            for mask in values
        ]
        return np.array(whole, dtype=np.bool_)[places] & self.readable

    def stored_rank(self, key: bytes, rank: int) -> bool:
        """Whether the store holds the segment of `rank`."""
        return bool(self.stored.get(key) >> rank & 1)

    def store_state(self, key: bytes, rank: int) -> StoreState:
        """What the store holds of one segment, as far as this sidecar knows."""
        if self.stored_rank(key, rank):
            return StoreState.STORED
        chunk = self.chunks.get(key)
        writing = chunk is not None and chunk.segments[rank].writing
        return StoreState.WRITING if writing else StoreState.ABSENT


class FlagChange(NamedTuple):
    """A chunk whose public flags differ from those that were last told."""

    realm: Realm
    key: bytes
    chunk: Chunk | None
    was: tuple[bool, bool]
    now: tuple[bool, bool]


class Directory:
    """All realms. Changes go through here so that each is legal, told once, and remembered."""

    def __init__(self, *, readable: bool) -> None:
        self.realms: dict[int, Realm] = {}
        self._readable = readable
        self._story: deque[tuple[int, bytes, int, SegmentState, Cause]] = deque(
            maxlen=STORY_LINES_MAX
        )
        # (realm_id, key) -> realm, and flags and chunk before this event.
        self._touched: dict[tuple[int, bytes], tuple[Realm, tuple[bool, bool], Chunk | None]] = {}

    def open_realm(self, realm_id: int, world_size: int) -> Realm:
        """The realm, made at its first use."""
        realm = self.realms.get(realm_id)
        if realm is None:
            realm = Realm(realm_id, world_size, readable=self._readable)
            self.realms[realm_id] = realm
        return realm

    def forget_realm(self, realm: Realm) -> None:
        """Forget a realm that has no chunk any more, and what the store holds of it."""
        assert not realm.chunks, "a chunk would be lost"
        del self.realms[realm.realm_id]

    def open_chunk(self, realm: Realm, key: bytes, tenant: bytes = b"") -> Chunk:
        """The chunk's object, made where it has none. `settle` drops it when it is not needed."""
        chunk = realm.chunks.get(key)
        if chunk is None:
            chunk = realm.chunks[key] = Chunk(realm, key, tenant)
        return chunk

    def pin(self, chunk: Chunk) -> None:
        """Count one more owner that needs the chunk to stay."""
        chunk.pins += 1

    def unpin(self, chunk: Chunk) -> None:
        """Count one owner less."""
        chunk.pins -= 1
        self.settle(chunk)

    def settle(self, chunk: Chunk) -> None:
        """Drop the chunk's object if it holds nothing and nobody waits for it."""
        if chunk.pins == 0 and not chunk.detached and chunk.vacant:
            del chunk.realm.chunks[chunk.key]
            chunk.detached = True

    def move(self, segment: HostSegment, cause: Cause) -> None:
        """Change a segment's state along the table. Raises `IllegalTransition`."""
        chunk = segment.chunk
        before = segment.state
        after = TRANSITIONS.get((before, cause))
        if after is None:
            raise IllegalTransition(
                f"{before.name} + {cause.name} is no transition, for rank {segment.rank} of "
                f"{self.story(chunk.realm.realm_id, chunk.key)}"
            )
        if not chunk.detached:
            self._touch(chunk.realm, chunk.key)
        self._story.append((chunk.realm.realm_id, chunk.key, segment.rank, before, cause))
        segment.state = after
        chunk.hosted += (after is SegmentState.HOST) - (before is SegmentState.HOST)

    def detach(self, chunk: Chunk) -> None:
        """Take a chunk out of the directory; what still runs on it ends on zombies."""
        self._touch(chunk.realm, chunk.key)
        for segment in chunk.segments:
            if segment.state is not SegmentState.ABSENT:
                self.move(segment, Cause.DETACHED)
        del chunk.realm.chunks[chunk.key]
        chunk.detached = True

    def set_stored(self, realm: Realm, key: bytes, mask: int, time: int) -> None:
        """Say which ranks' segments the store holds (0: none), and when the newest was written."""
        if realm.stored.get(key) != mask:
            self._touch(realm, key)
        realm.stored.set(key, mask, time)

    def offered(self, realm: Realm, offers: StoredColumns) -> Flags:
        """Add to what the store holds of chunks that have no object here; shape [n].

        Returns which of them the store holds whole now, and did not before. They are not among the
        changes that are told by `take_changes`.
        """
        before = realm.stored.offer(offers.high, offers.low, offers.masks, offers.written_at)
        masks = before | widened(offers.masks, before.shape[1])
        came = realm.readable_in(masks) & ~realm.readable_in(before)
        realm.stored_chunks += int(np.count_nonzero(came))
        return came

    def _touch(self, realm: Realm, key: bytes) -> None:
        touched = (realm.realm_id, key)
        if touched not in self._touched:
            self._touched[touched] = (realm, realm.flags(key), realm.chunks.get(key))

    def take_changes(self) -> list[FlagChange]:
        """Chunks whose flags changed since the last call, oldest first; each is told once."""
        changes: list[FlagChange] = []
        for (_, key), (realm, was, holder) in self._touched.items():
            now = realm.flags(key)
            if was != now:
                realm.hosted_chunks += now[0] - was[0]
                realm.stored_chunks += now[1] - was[1]
                chunk = realm.chunks.get(key) or holder
                changes.append(FlagChange(realm, key, chunk, was, now))
        self._touched.clear()
        return changes

    def story(self, realm_id: int, key: bytes) -> str:
        """What happened to one chunk, as far as it is remembered."""
        lines = [
            f"rank {rank}: {state.name} + {cause.name}"
            for story_realm, story_key, rank, state, cause in self._story
            if (story_realm, story_key) == (realm_id, key)
        ]
        told = "; ".join(lines) if lines else "nothing is remembered"
        return f"chunk {key.hex()[:16]} of realm {realm_id}: {told}"
