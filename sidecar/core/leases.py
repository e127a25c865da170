"""Leases: pins with an owner and a deadline, which keep chunks from eviction until they are loaded.

Owns the leases of schedulers, by session and by (realm, engine, job). Does not own the count of
pins (`pins.py`) or slots.

A lease ends once: when every rank finished the load job of the same id, when it is released, when
its session ends, or at its deadline. Scheduler and workers use different sockets, so a rank may
finish before the lease is known. Such early ranks are remembered, a bounded number of them, and
counted when the lease arrives.

Invariant: a lease pins each chunk once for each time that it lists it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from sidecar.core.fair_share import lease_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk
    from sidecar.core.fair_share import FairShares
    from sidecar.core.pins import Pins

EARLY_JOBS_PER_ENGINE_MAX: Final = 256
"""Load jobs without a lease whose finished ranks are remembered; the oldest are forgotten."""
EARLY_ENGINES_MAX: Final = 256

JobName = tuple[int, str, int]
"""(realm_id, engine_id, job_id): what a lease and the load jobs of its ranks share."""


@dataclass(slots=True, eq=False)
class ChunkLease:
    """Pins of the chunks of one load."""

    session_id: int
    name: JobName
    chunks: list[Chunk]
    deadline: float
    finished_ranks: set[int]

    @property
    def lease_id(self) -> int:
        """The id of the load job."""
        return self.name[2]

    @property
    def cost(self) -> int:
        """Bytes of the control plane."""
        return lease_cost(len(self.chunks))


class Leases:
    """All leases."""

    def __init__(self, pins: Pins, shares: FairShares, *, ttl_seconds_max: float) -> None:
        self._pins = pins
        self._shares = shares
        self._ttl_seconds_max = ttl_seconds_max
        # All leases live equally long, so the order of insertion is that of the deadlines.
        self._by_owner: dict[tuple[int, int], ChunkLease] = {}
        self._by_job: dict[JobName, list[ChunkLease]] = {}
        self._early: dict[tuple[int, str], dict[int, set[int]]] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    def __iter__(self) -> Iterator[ChunkLease]:
        return iter(self._by_owner.values())

    def take(
        self, session_id: int, name: JobName, chunks: list[Chunk], world_size: int, now: float
    ) -> bool:
        """Pin `chunks` for load job `name`; a lease of the same id and session is replaced.

        Returns False, and changes nothing, if it exceeds the share of the session.
        """
        shares, cost = self._shares, lease_cost(len(chunks))
        if self._pins.fitting(session_id, chunks) < len(chunks):
            shares.refuse("lease", "pinned")
            return False
        if not shares.admit("lease", session_id, (shares.memory, cost), (shares.leases, 1)):
            return False
        self._pins.pin(session_id, chunks)
        # After pinning, so that chunks of both leases are pinned throughout.
        self.release(session_id, name[2])
        early = self._take_early(name)
        lease = ChunkLease(session_id, name, chunks, now + self._ttl_seconds_max, early)
        self._by_owner[session_id, name[2]] = lease
        self._by_job.setdefault(name, []).append(lease)
        if len(early) >= world_size:
            self._end(lease)
        return True

    def rank_finished(self, name: JobName, rank: int, world_size: int) -> None:
        """The load job of a rank ended, well or not."""
        leases = self._by_job.get(name)
        if leases is None:
            self._remember_early(name, rank)
            return
        for lease in list(leases):
            lease.finished_ranks.add(rank)
            if len(lease.finished_ranks) >= world_size:
                self._end(lease)

    def _remember_early(self, name: JobName, rank: int) -> None:
        own = self._early.setdefault(name[:2], {})
        own.setdefault(name[2], set()).add(rank)
        if len(own) > EARLY_JOBS_PER_ENGINE_MAX:
            del own[next(iter(own))]
        if len(self._early) > EARLY_ENGINES_MAX:
            del self._early[next(iter(self._early))]

    def _take_early(self, name: JobName) -> set[int]:
        own = self._early.get(name[:2], {})
        early = own.pop(name[2], set[int]())
        if not own:
            self._early.pop(name[:2], None)
        return early

    def release(self, session_id: int, lease_id: int) -> None:
        """End one lease. An unknown id is not an error: the lease may just have ended."""
        lease = self._by_owner.get((session_id, lease_id))
        if lease is not None:
            self._end(lease)

    def close_session(self, session_id: int, engine: tuple[int, str]) -> None:
        """End every lease of a session, and forget its engine's early ranks."""
        for lease in [lease for lease in self if lease.session_id == session_id]:
            self._end(lease)
        self.forget_early(engine)

    def forget_early(self, engine: tuple[int, str]) -> None:
        """Forget early ranks of an engine: each scheduler numbers its jobs from the start.

        Also when a scheduler attaches, because jobs of the previous one may end after its session.
        """
        self._early.pop(engine, None)

    def forget_realm(self, realm_id: int) -> None:
        """Forget the early ranks of a realm without sessions."""
        for engine in [engine for engine in self._early if engine[0] == realm_id]:
            self.forget_early(engine)

    def expire(self, now: float) -> int:
        """End the leases past their deadline; returns how many."""
        expired = 0
        while self._by_owner:
            lease = next(iter(self))
            if lease.deadline > now:
                break
            self._end(lease)
            expired += 1
        return expired

    def _end(self, lease: ChunkLease) -> None:
        del self._by_owner[lease.session_id, lease.lease_id]
        named = self._by_job[lease.name]
        named.remove(lease)
        if not named:
            del self._by_job[lease.name]
        self._shares.memory.give(lease.session_id, lease.cost)
        self._shares.leases.give(lease.session_id, 1)
        self._pins.unpin(lease.session_id, lease.chunks)
