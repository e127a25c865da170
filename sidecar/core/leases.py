"""Pins with an owner and a deadline: what keeps a chunk from being evicted before its load.

Owns the leases that schedulers take, by session and by (realm, engine, job). It does not own the
count of pins (`fair_share.py`) nor the slots.

A lease ends once: when every rank finished the load job of the same id, when it is released, when
its session ends, or when its deadline passes. Scheduler and workers speak over different sockets,
so a rank may finish before the lease is known; such early ranks are remembered, a bounded number
of them, and counted when the lease comes.

Invariant: a lease's chunks are pinned once for each time that it lists them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.core.fair_share import lease_cost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk
    from sidecar.core.fair_share import FairShares, Pins

EARLY_JOBS_PER_ENGINE_MAX: Final = 256
"""Load jobs without a lease whose finished ranks are remembered; of more, the oldest go."""
EARLY_ENGINES_MAX: Final = 256

JobName = tuple[int, str, int]
"""(realm_id, engine_id, job_id): what a lease and the load jobs of its ranks share."""


class ChunkLease:
    """Chunks that one load needs."""

    __slots__ = ("chunks", "cost", "deadline", "finished_ranks", "lease_id", "name", "session_id")

    def __init__(
        self,
        session_id: int,
        name: JobName,
        chunks: list[Chunk],
        deadline: float,
        finished_ranks: set[int],
    ) -> None:
        self.session_id = session_id
        self.name = name
        self.lease_id = name[2]
        self.chunks = chunks
        self.deadline = deadline
        self.finished_ranks = finished_ranks
        self.cost = lease_cost(len(chunks))


class Leases:
    """All leases."""

    def __init__(self, pins: Pins, bounds: FairShares, *, ttl_seconds_max: float) -> None:
        self._pins = pins
        self._bounds = bounds
        self._ttl_seconds_max = ttl_seconds_max
        # All leases live equally long, so the order of insertion is that of the deadlines.
        self._by_owner: dict[tuple[int, int], ChunkLease] = {}
        self._by_job: dict[JobName, list[ChunkLease]] = {}
        self._early: dict[tuple[int, str], dict[int, set[int]]] = {}
        self._held: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_owner)

    def __iter__(self) -> Iterator[ChunkLease]:
        return iter(self._by_owner.values())

    def held(self, session_id: int) -> int:
        """Leases that a session holds."""
        return self._held.get(session_id, 0)

    def take(
        self, session_id: int, name: JobName, chunks: list[Chunk], world_size: int, now: float
    ) -> bool:
        """Pin `chunks` for load job `name`; a lease of the same id and session is replaced.

        False, and nothing is changed, where the session has all that it may have.
        """
        bounds = self._bounds
        if self._pins.fitting(session_id, chunks) < len(chunks):
            bounds.refuse("lease", "pinned")
            return False
        wanted = (
            ("memory", bounds.memory, lease_cost(len(chunks))),
            ("leases", bounds.leases, 1),
        )
        if not bounds.admit("lease", session_id, wanted):
            return False
        self._pins.pin(session_id, chunks)
        # Pinned first, so that what both leases name is never without a pin in between.
        self.release(session_id, name[2])
        early = self._take_early(name)
        lease = ChunkLease(session_id, name, chunks, now + self._ttl_seconds_max, early)
        self._by_owner[session_id, name[2]] = lease
        self._by_job.setdefault(name, []).append(lease)
        self._held[session_id] = self.held(session_id) + 1
        if len(early) >= world_size:
            self._end(lease)
        return True

    def rank_finished(self, name: JobName, rank: int, world_size: int) -> None:
        """Count a rank's load job as ended, however it ended."""
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
        """End one lease. An unknown id is no error: the lease may just have ended."""
        lease = self._by_owner.get((session_id, lease_id))
        if lease is not None:
            self._end(lease)

    def close_session(self, session_id: int, engine: tuple[int, str]) -> None:
        """End every lease of a session, and forget its engine's early ranks."""
        for lease in [lease for lease in self if lease.session_id == session_id]:
            self._end(lease)
        self.forget_early(engine)

    def forget_early(self, engine: tuple[int, str]) -> None:
        """Forget ranks that finished jobs without a lease: a scheduler counts its jobs anew.

        When one attaches, too: jobs of its predecessor may end after that one's session has.
        """
        self._early.pop(engine, None)

    def forget_realm(self, realm_id: int) -> None:
        """A realm without sessions is forgotten."""
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
        left = self._held[lease.session_id] - 1
        if left:
            self._held[lease.session_id] = left
        else:
            del self._held[lease.session_id]
        self._bounds.memory.give(lease.session_id, lease.cost)
        self._bounds.leases.give(lease.session_id, 1)
        self._pins.unpin(lease.session_id, lease.chunks)
