"""What waits may cost: how much of it there may be in all, and how much one session may have.

Owns the shares of everything that waits in the control plane (memory, copies, host memory that is
being stored into or pinned, lookups, leases, jobs) and the count of what was refused, by reason.
Owns the pins of leases and lookups, too (`Pins`). Does not own what waits: the part that takes from
a share gives the same back when the thing is over.

The rule of every share is one number: a session may have at most `alpha` times what is left free.
With 1, one that floods gets half, two that flood a third each, and whoever comes then finds as much
as any of them has; nobody has to be counted, and nothing is set aside for clients that ask for
nothing. (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches,
IEEE/ACM Transactions on Networking 6(2), 1998.) Of pinned memory one long prompt may need most, so
there one session gets up to seven eighths.

Invariants: a share never holds more than its limit; a session that has nothing is not in it; at
rest everything is zero.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sidecar.core.directory import Chunk, Directory, Realm
    from sidecar.protocol import LoadChunk, StoreChunk

PINNED_ALPHA: Final = 7
KEPT_DIVISOR: Final = 2
"""Of what may be pinned, requests may keep a half for a while: loads need the rest to go on."""

# What one of each costs in Python's heap, rounded up; tests/sidecar/test_bounds.py measures it.
LOOKUP_BYTES: Final = 1024
LOOKUP_CHUNK_BYTES: Final = 1280
LOOKUP_RANK_BYTES: Final = 640
KEPT_CHUNK_BYTES: Final = 1536
KEPT_RANK_BYTES: Final = 320
LEASE_BYTES: Final = 1024
LEASE_CHUNK_BYTES: Final = 256
COPY_BYTES: Final = 2048
COPY_RANK_BYTES: Final = 320
BLOCK_BYTES: Final = 48


class Share:
    """One bounded quantity, divided between sessions."""

    __slots__ = ("_alpha", "_by_session", "limit", "used")

    def __init__(self, limit: int, alpha: int = 1) -> None:
        self.limit = limit
        self._alpha = alpha
        self.used = 0
        self._by_session: dict[int, int] = {}

    def of(self, session_id: int) -> int:
        """What a session has."""
        return self._by_session.get(session_id, 0)

    @property
    def by_session(self) -> Mapping[int, int]:
        """What each session has that has any."""
        return self._by_session

    def fits(self, session_id: int, amount: int) -> bool:
        """Whether a session may have so much more."""
        left = self.limit - self.used - amount
        return self.of(session_id) + amount <= self._alpha * left

    def take(self, session_id: int, amount: int) -> None:
        """Take what was found to fit."""
        self.used += amount
        self._by_session[session_id] = self.of(session_id) + amount

    def give(self, session_id: int, amount: int) -> None:
        """Give back what was taken."""
        self.used -= amount
        left = self._by_session[session_id] - amount
        if left:
            self._by_session[session_id] = left
        else:
            del self._by_session[session_id]


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """The limit of each share."""

    memory_bytes_max: int = 256 << 20
    copies_queued_max: int = 65_536
    storing_bytes_max: int = 1 << 62
    pinned_bytes_max: int = 1 << 62
    lookups_max: int = 4096
    leases_max: int = 4096
    jobs_max_per_session: int = 1024


class FairShares:
    """All shares."""

    def __init__(self, limits: ShareLimits) -> None:
        self.memory = Share(limits.memory_bytes_max)
        self.copies = Share(limits.copies_queued_max)
        self.storing = Share(limits.storing_bytes_max)
        self.pinned = Share(limits.pinned_bytes_max, PINNED_ALPHA)
        self.kept = Share(limits.pinned_bytes_max // KEPT_DIVISOR, PINNED_ALPHA)
        self.lookups = Share(limits.lookups_max)
        self.leases = Share(limits.leases_max)
        self.jobs: Counter[int] = Counter()
        self.jobs_max_per_session = limits.jobs_max_per_session
        self.refused: Counter[tuple[str, str]] = Counter()
        """(what, for want of what) -> how often. Never decreases."""

    @property
    def shares(self) -> dict[str, Share]:
        """Each share by its name."""
        return {
            "memory_bytes": self.memory,
            "copies": self.copies,
            "storing_bytes": self.storing,
            "pinned_bytes": self.pinned,
            "kept_bytes": self.kept,
            "lookups": self.lookups,
            "leases": self.leases,
        }

    def refuse(self, what: str, why: str) -> None:
        """Count what was refused."""
        self.refused[what, why] += 1

    def admit(self, what: str, session_id: int, wanted: tuple[tuple[str, Share, int], ...]) -> bool:
        """Take all that is wanted, or nothing and count why."""
        for why, share, amount in wanted:
            if not share.fits(session_id, amount):
                self.refuse(what, why)
                return False
        for _, share, amount in wanted:
            share.take(session_id, amount)
        return True

    def begin_job(self, what: str, session_id: int) -> bool:
        """Count one job more of a session, unless it has all that it may have."""
        if self.jobs[session_id] >= self.jobs_max_per_session:
            self.refuse(what, "jobs")
            return False
        self.jobs[session_id] += 1
        return True

    def end_job(self, session_id: int) -> None:
        """Count one job less."""
        self.jobs[session_id] -= 1
        if not self.jobs[session_id]:
            del self.jobs[session_id]


def lookup_cost(realm: Realm, num_chunks: int) -> int:
    """Bytes of a lookup whose run has so many chunks, with their entries and queued reads."""
    return LOOKUP_BYTES + num_chunks * (LOOKUP_CHUNK_BYTES + LOOKUP_RANK_BYTES * realm.world_size)


def lease_cost(num_chunks: int) -> int:
    """Bytes of a lease. Its chunks are there anyway."""
    return LEASE_BYTES + num_chunks * LEASE_CHUNK_BYTES


def kept_cost(realm: Realm) -> int:
    """Bytes of one chunk that is kept, with its entry: it may hold nothing yet."""
    return KEPT_CHUNK_BYTES + KEPT_RANK_BYTES * realm.world_size


def load_cost(piece: LoadChunk) -> int:
    """Bytes of one chunk's scatter while it waits."""
    return COPY_BYTES + BLOCK_BYTES * len(piece.block_ids)


def store_cost(realm: Realm, piece: StoreChunk) -> int:
    """Bytes of one chunk's gather while it waits, with the chunk's entry."""
    fixed = COPY_BYTES + COPY_RANK_BYTES * realm.world_size
    return fixed + len(piece.token_ids) + BLOCK_BYTES * len(piece.block_ids)


class _Held:
    """One session's pins of one chunk."""

    __slots__ = ("count", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.count = 0
        self.size_bytes = size_bytes


class Pins:
    """Which session keeps which chunks from being evicted, and how much that is of each.

    A session's chunks count once however often it pins them. Each session is held to its share of
    the memory that may be pinned: a client that looks up or leases everything would otherwise leave
    no slot to evict for the others. Why a chunk is pinned, and until when, is not known here.

    Invariant: `chunk.pins` is the number of pins that are listed here.
    """

    def __init__(
        self, directory: Directory, chunk_bytes: Callable[[Chunk], int], share: Share
    ) -> None:
        self._directory = directory
        self._chunk_bytes = chunk_bytes
        self._share = share
        self._held: dict[int, dict[Chunk, _Held]] = {}

    def fitting(self, session_id: int, chunks: Sequence[Chunk]) -> int:
        """How many of `chunks`, from the first on, a session may pin."""
        held = self._held.get(session_id, {})
        wanted_bytes = 0
        for number, chunk in enumerate(chunks):
            if chunk not in held:
                wanted_bytes += self._chunk_bytes(chunk)
                if not self._share.fits(session_id, wanted_bytes):
                    return number
        return len(chunks)

    def pin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Pin chunks that were found to fit."""
        held = self._held.setdefault(session_id, {})
        for chunk in chunks:
            one = held.get(chunk)
            if one is None:
                one = held[chunk] = _Held(self._chunk_bytes(chunk))
                self._share.take(session_id, one.size_bytes)
            one.count += 1
            self._directory.pin(chunk)
        if not held:
            del self._held[session_id]

    def unpin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Take one pin of each back."""
        for chunk in chunks:
            held = self._held[session_id]
            one = held[chunk]
            one.count -= 1
            if not one.count:
                del held[chunk]
                self._share.give(session_id, one.size_bytes)
                if not held:
                    del self._held[session_id]
            self._directory.unpin(chunk)

    def held_bytes(self) -> dict[int, int]:
        """What each session pins that pins anything."""
        return {
            session_id: sum(one.size_bytes for one in held.values())
            for session_id, held in self._held.items()
        }

    def counts(self) -> dict[Chunk, int]:
        """How often each pinned chunk is pinned."""
        counts: dict[Chunk, int] = {}
        for held in self._held.values():
            for chunk, one in held.items():
                counts[chunk] = counts.get(chunk, 0) + one.count
        return counts
