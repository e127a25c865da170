"""Pins protect chunks from eviction: for a load (lease), for a lookup, or because a request asked.

Owns which chunks each session pins, the leases of schedulers, and the chunks that requests keep.
Does not own lookups (`lookups.py`), slots, or the orders of eviction (`host_tier.py`).

A session's chunks count once, however often it pins them, against its share of the memory that may
be pinned: otherwise one client could pin everything, and leave the others no slot to evict.

Invariants: `chunk.pins` is the number of pins that are listed here; a lease pins each chunk once
for each time that it lists it; what a request keeps has one pin for it until its deadline, the end
of its session, a release, or the removal of the chunk.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sidecar.core.directory import Chunk, Directory, Realm
from sidecar.core.fair_share import FairShares, Share, lease_cost, request_pin_cost
from sidecar.core.outbox import CorePart, CoreParts
from sidecar.core.retention import Expiries
from sidecar.protocol import Pin

EARLY_JOBS_PER_ENGINE_MAX: Final = 256
"""Load jobs without a lease whose finished ranks are remembered; the oldest are forgotten."""
EARLY_ENGINES_MAX: Final = 256
TENANT_DIVISOR: Final = 2
"""A tenant with a limit in host memory may keep half of it: otherwise it could store no more."""

JobName = tuple[int, str, int]
"""(realm_id, engine_id, job_id): what a lease and the load jobs of its ranks share."""


@dataclass(slots=True)
class PinnedChunk:
    """One session's pins of one chunk."""

    size_bytes: int
    """When it was pinned first: more ranks may become known later."""
    count: int = 0


class Pins:
    """All pins."""

    def __init__(self, directory: Directory, share: Share) -> None:
        self._directory = directory
        self._share = share
        self.by_session: dict[int, dict[Chunk, PinnedChunk]] = {}

    def fitting(self, session_id: int, chunks: Sequence[Chunk]) -> int:
        """How many of `chunks`, from the first on, a session may pin."""
        own = self.by_session.get(session_id, {})
        wanted_bytes = 0
        for number, chunk in enumerate(chunks):
            if chunk not in own:
                wanted_bytes += chunk.realm.chunk_bytes
                if not self._share.fits(session_id, wanted_bytes):
                    return number
        return len(chunks)

    def pin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Pin chunks that fit."""
        for chunk in chunks:
            own = self.by_session.setdefault(session_id, {})
            pinned = own.get(chunk)
            if pinned is None:
                pinned = own[chunk] = PinnedChunk(chunk.realm.chunk_bytes)
                self._share.take(session_id, pinned.size_bytes)
            pinned.count += 1
            chunk.pins += 1

    def unpin(self, session_id: int, chunks: Iterable[Chunk]) -> None:
        """Remove one pin of each chunk."""
        for chunk in chunks:
            own = self.by_session[session_id]
            pinned = own[chunk]
            pinned.count -= 1
            if not pinned.count:
                del own[chunk]
                self._share.give(session_id, pinned.size_bytes)
                if not own:
                    del self.by_session[session_id]
            chunk.pins -= 1
            self._directory.drop_if_unused(chunk)


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
    """All leases.

    A lease ends once: when every rank finished the load job of the same id, when it is released,
    when its session ends, or at its deadline. Scheduler and workers use different sockets, so a
    rank may finish before the lease is known: such early ranks are remembered, and counted later.
    """

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
        own = self._early.get(name[:2], {})
        early = own.pop(name[2], set[int]())
        if not own:
            self._early.pop(name[:2], None)
        lease = ChunkLease(session_id, name, chunks, now + self._ttl_seconds_max, early)
        self._by_owner[session_id, name[2]] = lease
        self._by_job.setdefault(name, []).append(lease)
        if len(early) >= world_size:
            self._end(lease)
        return True

    def rank_finished(self, name: JobName, rank: int, world_size: int) -> None:
        """The load job of a rank ended, well or not."""
        if name not in self._by_job:
            own = self._early.setdefault(name[:2], {})
            own.setdefault(name[2], set()).add(rank)
            if len(own) > EARLY_JOBS_PER_ENGINE_MAX:
                del own[next(iter(own))]
            if len(self._early) > EARLY_ENGINES_MAX:
                del self._early[next(iter(self._early))]
        for lease in list(self._by_job.get(name, ())):
            lease.finished_ranks.add(rank)
            if len(lease.finished_ranks) >= world_size:
                self._end(lease)

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
            del self._early[engine]

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


@dataclass(slots=True, eq=False)
class _RequestPin:
    session_id: int
    chunk: Chunk
    deadline: float
    size_bytes: int
    cost: int


class RequestPins(CorePart):
    """Chunks that requests keep in host memory for a while.

    A scheduler names keys at the end of a request; naming a key again moves its deadline. A key
    without any data is kept too: its store may still be on its way over the socket of a worker.
    Such pins have a share of their own in what may be pinned, so that loads can always pin too.
    """

    def __init__(self, parts: CoreParts, pins: Pins) -> None:
        super().__init__(parts)
        self._pins = pins
        self._by_session: dict[int, dict[Chunk, _RequestPin]] = {}
        self._tenant_bytes: Counter[bytes] = Counter()
        self._deadlines = Expiries[_RequestPin](self._ends)

    def __iter__(self) -> Iterator[_RequestPin]:
        for own in self._by_session.values():
            yield from own.values()

    def pin(self, session_id: int, realms: list[Realm], message: Pin, now: float) -> None:
        """Keep as many of the new keys as fit, from the first on; count the others as refused.

        A hit needs chunks of each group, so of several groups all are kept, or none.
        """
        deadline = now + message.duration_ms / 1000
        groups = message.groups or itertools.repeat(0)
        taken: list[_RequestPin] = []
        refused = 0
        for key, group in dict.fromkeys(zip(message.keys, groups, strict=False)):
            realm = realms[group]
            own = self._by_session.get(session_id, {})
            chunk = realm.chunks.get(key)
            known = None if chunk is None else own.get(chunk)
            if known is not None:
                if deadline > known.deadline:
                    known.deadline = deadline
                    self._deadlines.add(deadline, known)
                continue
            pin = None if refused else self._take(session_id, realm, key, message.tenant, deadline)
            if pin is None:
                refused += 1
            else:
                taken.append(pin)
        if refused and message.groups:
            for pin in taken:
                self._end(pin)
            refused += len(taken)
            taken.clear()
        self._counters.chunks_pinned += len(taken)
        self._counters.pins_refused += refused

    def _take(
        self, session_id: int, realm: Realm, key: bytes, tenant: bytes, deadline: float
    ) -> _RequestPin | None:
        if None in realm.layouts:
            # Nothing can be stored yet, and its size is unknown.
            return None
        chunk = self._directory.open_chunk(realm, key, tenant)
        pin = _RequestPin(session_id, chunk, deadline, realm.chunk_bytes, request_pin_cost(realm))
        if not self._admit(pin):
            self._directory.drop_if_unused(chunk)
            return None
        self._pins.pin(session_id, (chunk,))
        self._host.request_pin(chunk)
        self._by_session.setdefault(session_id, {})[chunk] = pin
        self._tenant_bytes[chunk.tenant] += pin.size_bytes
        self._deadlines.add(deadline, pin)
        return pin

    def _admit(self, pin: _RequestPin) -> bool:
        shares, tenant, session_id = self._shares, pin.chunk.tenant, pin.session_id
        limit = self._tenants.quota(tenant).host_bytes_max
        tenant_bytes = self._tenant_bytes[tenant] + pin.size_bytes
        if limit is not None and tenant_bytes > limit // TENANT_DIVISOR:
            shares.refuse("pin", "tenant")
            return False
        if not self._pins.fitting(session_id, (pin.chunk,)):
            shares.refuse("pin", "pinned")
            return False
        wanted = ((shares.memory, pin.cost), (shares.request_pins, pin.size_bytes))
        return shares.admit("pin", session_id, *wanted)

    def _ends(self, pin: _RequestPin, deadline: float) -> bool:
        own = self._by_session.get(pin.session_id, {})
        return own.get(pin.chunk) is pin and pin.deadline == deadline

    def expire(self, now: float) -> None:
        """End the pins past their deadline."""
        for pin in self._deadlines.due(now):
            self._end(pin)

    def close_session(self, session_id: int) -> None:
        """End all pins of a session."""
        for pin in list(self._by_session.get(session_id, {}).values()):
            self._end(pin)

    def removed(self, chunk: Chunk) -> None:
        """End all pins of a chunk that expired or was corrupt: nothing is kept any more."""
        if chunk.request_pins:
            for own in [own for own in self._by_session.values() if chunk in own]:
                self._end(own[chunk])

    def drain(self) -> None:
        """End all pins: the sidecar stops."""
        for session_id in list(self._by_session):
            self.close_session(session_id)

    def _end(self, pin: _RequestPin) -> None:
        session_id, chunk = pin.session_id, pin.chunk
        own = self._by_session[session_id]
        del own[chunk]
        if not own:
            del self._by_session[session_id]
        self._tenant_bytes[chunk.tenant] -= pin.size_bytes
        if not self._tenant_bytes[chunk.tenant]:
            del self._tenant_bytes[chunk.tenant]
        self._shares.memory.give(session_id, pin.cost)
        self._shares.request_pins.give(session_id, pin.size_bytes)
        self._host.request_unpin(chunk)
        self._pins.unpin(session_id, (chunk,))
