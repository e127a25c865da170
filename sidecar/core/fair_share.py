"""Fair shares: how much may be queued or pinned in total, and how much of it one session may have.

Owns the shares of everything that waits, and the count of refusals by reason. Does not own the
users of a share: each gives back the same amount that it took.

A session may have at most `alpha` times what is free. With 1, one session that floods gets half,
two get a third each, and a new session finds as much as each of them has. Nothing is reserved for
idle sessions. (Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet
switches, IEEE/ACM Transactions on Networking 6(2), 1998.) One long prompt may need most of the
pinned memory, so there one session gets up to seven eighths.

Invariants: a share never exceeds its limit; a session that holds nothing is not in it; when nothing
waits, everything is zero.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Final

from sidecar.core.directory import Realm
from sidecar.protocol import LoadChunk, StoreChunk

PINNED_ALPHA: Final = 7
UNLIMITED: Final = 1 << 62

# Cost of one of each in Python's heap, rounded up; tests/sidecar/test_fair_share.py measures it.
LOOKUP_BYTES: Final = 1024
LOOKUP_CHUNK_BYTES: Final = 1280
LOOKUP_RANK_BYTES: Final = 640
REQUEST_PIN_BYTES: Final = 1536
REQUEST_PIN_RANK_BYTES: Final = 320
LEASE_BYTES: Final = 1024
LEASE_CHUNK_BYTES: Final = 256
COPY_BYTES: Final = 2048
COPY_RANK_BYTES: Final = 320
BLOCK_BYTES: Final = 48


class Share:
    """One bounded quantity, divided between sessions. `reason` names it in refusals."""

    __slots__ = ("_alpha", "_session_max", "by_session", "limit", "reason", "used")

    def __init__(
        self, reason: str, limit: int, alpha: int = 1, *, session_max: int = UNLIMITED
    ) -> None:
        self.reason = reason
        self.limit = limit
        self._alpha = alpha
        self._session_max = session_max
        self.used = 0
        self.by_session: dict[int, int] = {}

    def of(self, session_id: int) -> int:
        """What a session holds."""
        return self.by_session.get(session_id, 0)

    def fits(self, session_id: int, amount: int) -> bool:
        """Whether a session may have this much more."""
        held = self.by_session.get(session_id, 0) + amount
        left = self.limit - self.used - amount
        return held <= self._session_max and held <= self._alpha * left

    def take(self, session_id: int, amount: int) -> None:
        """Take an amount that fits."""
        self.used += amount
        self.by_session[session_id] = self.by_session.get(session_id, 0) + amount

    def give(self, session_id: int, amount: int) -> None:
        """Give an amount back."""
        self.used -= amount
        left = self.by_session[session_id] - amount
        if left:
            self.by_session[session_id] = left
        else:
            del self.by_session[session_id]


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """The limit of each share."""

    memory_bytes_max: int = 256 << 20
    copies_queued_max: int = 65_536
    storing_bytes_max: int = UNLIMITED
    pinned_bytes_max: int = UNLIMITED
    lookups_max: int = 4096
    leases_max: int = 4096
    jobs_max_per_session: int = 1024


class FairShares:
    """All shares."""

    def __init__(self, limits: ShareLimits) -> None:
        self.memory = Share("memory", limits.memory_bytes_max)
        self.copies = Share("copies", limits.copies_queued_max)
        self.storing = Share("storing", limits.storing_bytes_max)
        self.pinned = Share("pinned", limits.pinned_bytes_max, PINNED_ALPHA)
        # Half of what may be pinned: loads need the rest.
        self.request_pins = Share("kept", limits.pinned_bytes_max // 2, PINNED_ALPHA)
        self.lookups = Share("lookups", limits.lookups_max)
        self.leases = Share("leases", limits.leases_max)
        self.jobs = Share("jobs", UNLIMITED, session_max=limits.jobs_max_per_session)
        self.refused: Counter[tuple[str, str]] = Counter()
        """(what was refused, reason) -> how often. Never decreases."""

    @property
    def shares(self) -> dict[str, Share]:
        """Each share by its label in the metrics."""
        return {
            "memory_bytes": self.memory,
            "copies": self.copies,
            "storing_bytes": self.storing,
            "pinned_bytes": self.pinned,
            "kept_bytes": self.request_pins,
            "lookups": self.lookups,
            "leases": self.leases,
        }

    def refuse(self, what: str, why: str) -> None:
        """Count a refusal."""
        self.refused[what, why] += 1

    def admit(self, what: str, session_id: int, *wanted: tuple[Share, int]) -> bool:
        """Take all that is wanted; if something does not fit, take nothing and count the reason."""
        for share, amount in wanted:
            if not share.fits(session_id, amount):
                self.refuse(what, share.reason)
                return False
        for share, amount in wanted:
            share.take(session_id, amount)
        return True


def lookup_cost(realm: Realm, num_chunks: int) -> int:
    """Memory of a lookup of this many chunks, with their entries and queued reads."""
    return LOOKUP_BYTES + num_chunks * (LOOKUP_CHUNK_BYTES + LOOKUP_RANK_BYTES * realm.world_size)


def lease_cost(num_chunks: int) -> int:
    """Memory of a lease, without its chunks."""
    return LEASE_BYTES + num_chunks * LEASE_CHUNK_BYTES


def request_pin_cost(realm: Realm) -> int:
    """Memory of a request's pin, with the chunk, which may be empty."""
    return REQUEST_PIN_BYTES + REQUEST_PIN_RANK_BYTES * realm.world_size


def load_cost(piece: LoadChunk) -> int:
    """Memory of the scatter of one chunk."""
    return COPY_BYTES + BLOCK_BYTES * len(piece.block_ids)


def store_cost(realm: Realm, piece: StoreChunk) -> int:
    """Memory of the gather of one chunk, with the chunk."""
    fixed = COPY_BYTES + COPY_RANK_BYTES * realm.world_size
    return fixed + len(piece.token_ids) + BLOCK_BYTES * len(piece.block_ids)
