"""Jobs of workers: the copies that they need, and the one outcome of each job.

Owns running copies and the jobs that wait for them. Decides per chunk whether a copy is needed and
possible; slots come from `host_tier.py`.

Invariants: a job ends once, when all its copies ended, with one outcome; a slot that a copy uses is
held until `Copied`, whatever happens to the session, the job or the chunk.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from sidecar.core.commands import Copied, Gather, Scatter, SessionOpened
from sidecar.core.directory import Cause, HostSegment, Realm, SegmentState
from sidecar.core.fair_share import load_cost, store_cost
from sidecar.core.host_tier import Reservation
from sidecar.core.outbox import CorePart, CoreParts, Sampling
from sidecar.core.retention import Retention
from sidecar.protocol import LoadChunk, LoadJob, Outcome, StoreChunk, StoreJob
from tiers.kv.layout import ChunkLayout

_LOAD_WORST_LAST: Final = (
    Outcome.OK,
    Outcome.MISSING,
    Outcome.FULL,
    Outcome.REVOKED,
    Outcome.EXPIRED,
    Outcome.FAILED,
    Outcome.CORRUPT,
)
_STORE_WORST_FIRST: Final = (Outcome.REVOKED, Outcome.EXPIRED, Outcome.FAILED, Outcome.FULL)


@dataclass(slots=True, eq=False)
class Job:
    """One load or store job of one rank, from its submission to its outcome."""

    session: SessionOpened
    job_id: int
    loading: bool
    fence: int
    running: int = 0
    """Copies that have not ended."""
    begun: bool = False
    """Whether it counts as one of its session's running jobs."""
    outcomes: set[Outcome] = field(default_factory=set[Outcome])
    """Outcomes of its chunks."""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the job, from those of its chunks."""
        if self.outcomes <= {Outcome.OK}:
            return Outcome.OK
        if self.loading:
            return max(self.outcomes, key=_LOAD_WORST_LAST.index)
        if Outcome.OK in self.outcomes:
            return Outcome.PARTIAL
        return next(outcome for outcome in _STORE_WORST_FIRST if outcome in self.outcomes)


@dataclass(slots=True, eq=False)
class RunningCopy:
    """A gather or scatter that has not ended."""

    job: Job
    segment: HostSegment
    command: Gather | Scatter
    cost: int
    """Bytes of the control plane."""
    storing: int = 0
    """Bytes of the slot that a gather fills."""

    @property
    def num_bytes(self) -> int:
        """Bytes to copy."""
        layout = _layout_of(self.segment.chunk.realm, self.segment.rank)
        return layout.payload_bytes(len(self.command.block_ids))


class Jobs(CorePart):
    """All jobs. Each verb returns the job if it has ended."""

    def __init__(self, parts: CoreParts) -> None:
        super().__init__(parts)
        self._sampling = Sampling(parts.limits.verify_loads)
        self._running: dict[int, RunningCopy] = {}
        self._last_copy_id = 0
        self.draining = False

    def running(self) -> Collection[RunningCopy]:
        """All copies that have not ended."""
        return self._running.values()

    def load(
        self, session: SessionOpened, realms: list[Realm], fence: int, message: LoadJob
    ) -> Job | None:
        """Start a load job. If any of its chunks is missing, none is copied."""
        job = Job(session, message.job_id, loading=True, fence=fence)
        rank = session.attach.segment_number
        segments: list[HostSegment] = []
        for piece in message.chunks:
            chunk = realms[piece.group].chunks.get(piece.key)
            segment = chunk.segments[rank] if chunk is not None else None
            if segment is None or segment.state is not SegmentState.HOST:
                job.outcomes.add(Outcome.MISSING)
                return self._ended(job)
            if piece.first_block + len(piece.block_ids) > segment.num_blocks:
                job.outcomes.add(Outcome.FAILED)
                return self._ended(job)
            segments.append(segment)
        costs = [load_cost(piece) for piece in message.chunks]
        if not costs or self._admit(job, sum(costs), len(costs)):
            for piece, segment, cost in zip(message.chunks, segments, costs, strict=True):
                self._scatter(job, piece, segment, cost)
        else:
            self._counters.loads_dropped_full += 1
            job.outcomes.add(Outcome.FULL)
        return self._ended(job)

    def _admit(self, job: Job, cost: int, copies: int, storing: int = 0) -> bool:
        """Take the shares of copies. The first ones of a job also count it as running."""
        shares, session_id = self._shares, job.session.session_id
        what = "load" if job.loading else "store"
        wanted = [(shares.memory, cost), (shares.copies, copies)]
        if not job.begun:
            wanted.insert(0, (shares.jobs, 1))
        if storing:
            wanted.append((shares.storing, storing))
        admitted = shares.admit(what, session_id, *wanted)
        job.begun |= admitted
        return admitted

    def _scatter(self, job: Job, piece: LoadChunk, segment: HostSegment, cost: int) -> None:
        chunk = segment.chunk
        self._host.hold(segment)
        verifies = self._sampling.selects(segment)
        self._counters.loads_unverified += not verifies
        self._last_copy_id += 1
        command = Scatter(
            copy_id=self._last_copy_id,
            session_id=job.session.session_id,
            job_id=job.job_id,
            fence=job.fence,
            realm_id=chunk.realm.realm_id,
            rank=segment.rank,
            slot=segment.slot,
            key=piece.key,
            block_ids=tuple(piece.block_ids),
            num_blocks=segment.num_blocks,
            first_block=piece.first_block,
            verify=verifies,
        )
        self._start(RunningCopy(job, segment, command, cost))

    def store(
        self, session: SessionOpened, realms: list[Realm], fence: int, message: StoreJob, now: float
    ) -> Job | None:
        """Start a store job. While draining it copies nothing."""
        job = Job(session, message.job_id, loading=False, fence=fence)
        # A chunk that expires is not written: it could not be deleted where others read it.
        expires_at = now + message.ttl_ms / 1000 if message.ttl_ms else math.inf
        retention = Retention(expires_at, stays=message.stays or message.ttl_ms > 0)
        for piece in message.chunks:
            realm = realms[piece.group]
            outcome = self._gather(job, realm, piece, retention)
            if outcome is not None:
                job.outcomes.add(outcome)
        return self._ended(job)

    def _gather(
        self, job: Job, realm: Realm, piece: StoreChunk, retention: Retention
    ) -> Outcome | None:
        """Start the copy of one chunk; returns its outcome if there is nothing to copy."""
        rank = job.session.attach.segment_number
        layout, num_blocks = _layout_of(realm, rank), len(piece.block_ids)
        token_bytes = 4 * num_blocks * layout.block_tokens
        if num_blocks > layout.blocks_per_chunk or len(piece.token_ids) != token_bytes:
            self._counters.stores_failed += 1
            return Outcome.FAILED
        if not job.session.stores(piece.key):
            # Another rank holds the same bytes. One copy is enough, and ranks take turns.
            return Outcome.OK
        chunk = realm.chunks.get(piece.key)
        if chunk is not None and chunk.segments[rank].state is not SegmentState.ABSENT:
            # It is there, or is being stored or read, so the blocks are not needed.
            self._counters.stores_duplicate += 1
            return Outcome.OK
        if self.draining:
            self._counters.stores_dropped_draining += 1
            return Outcome.FULL
        chunk = self._directory.open_chunk(realm, piece.key, piece.tenant)
        chunk.parent = piece.parent
        segment = chunk.segments[rank]
        cost, storing = store_cost(realm, piece), segment.slot_bytes
        admitted = self._admit(job, cost, 1, storing)
        self._counters.stores_dropped_share += not admitted
        made = Reservation.FULL
        if admitted:
            made = self._host.reserve(segment, Cause.GATHER, retention)
        if made is not Reservation.MADE:
            if admitted:
                self._give_back(job, cost, 1, storing)
            self._directory.drop_if_unused(chunk)
            # A refusal is no fault: there is nothing to copy.
            return Outcome.OK if made is Reservation.REFUSED else Outcome.FULL
        self._last_copy_id += 1
        command = Gather(
            copy_id=self._last_copy_id,
            session_id=job.session.session_id,
            job_id=job.job_id,
            fence=job.fence,
            realm_id=realm.realm_id,
            rank=rank,
            slot=segment.slot,
            key=piece.key,
            block_ids=tuple(piece.block_ids),
            parent=piece.parent,
            token_ids=piece.token_ids,
            tenant=chunk.tenant,
        )
        self._start(RunningCopy(job, segment, command, cost, storing))
        return None

    def _start(self, copy: RunningCopy) -> None:
        self._running[copy.command.copy_id] = copy
        copy.job.running += 1
        self._emit(copy.command)

    def _give_back(self, job: Job, cost: int, copies: int, storing: int) -> None:
        session_id, shares = job.session.session_id, self._shares
        shares.memory.give(session_id, cost)
        shares.copies.give(session_id, copies)
        if storing:
            shares.storing.give(session_id, storing)

    def copied(self, event: Copied, now: float) -> Job | None:
        """Copies of a job ended: their slots and blocks are not used any more."""
        copies = [self._running.pop(copy_id) for copy_id in event.copy_ids]
        job = copies[0].job
        cost, storing = sum(copy.cost for copy in copies), sum(copy.storing for copy in copies)
        self._give_back(job, cost, len(copies), storing)
        for copy in copies:
            if isinstance(copy.command, Scatter):
                outcome = self._scattered(copy, copy.command, event.outcome)
            else:
                outcome = self._gathered(copy, copy.command, event.outcome, now)
            job.outcomes.add(outcome)
        job.running -= len(copies)
        return self._ended(job)

    def _scattered(self, copy: RunningCopy, command: Scatter, outcome: Outcome) -> Outcome:
        self._host.release(copy.segment)
        if outcome is Outcome.OK:
            copy.segment.verified |= command.verify
            num_bytes = copy.num_bytes
            for counters in (self._counters, self._tenants.counters(copy.segment.chunk.tenant)):
                counters.chunks_loaded += 1
                counters.bytes_loaded += num_bytes
        elif outcome is Outcome.CORRUPT:
            self._host.quarantine(copy.segment.chunk)
        return outcome

    def _gathered(
        self, copy: RunningCopy, command: Gather, outcome: Outcome, now: float
    ) -> Outcome:
        counters, chunk = self._counters, copy.segment.chunk
        if outcome is Outcome.OK:
            own, num_bytes = self._tenants.counters(chunk.tenant), copy.num_bytes
            counters.bytes_stored += num_bytes
            own.bytes_stored += num_bytes
            if self._host.filled(copy.segment, len(command.block_ids), command.parent):
                counters.chunks_stored += chunk.loadable
                own.chunks_stored += chunk.loadable
                return Outcome.OK
            if chunk.retention.expires_at <= now:
                # It expired during the copy, as was asked.
                return Outcome.OK
            # Another rank's segment was found corrupt meanwhile, and the chunk was removed.
            counters.stores_failed += 1
            return Outcome.FAILED
        counters.stores_revoked += outcome is Outcome.REVOKED
        counters.stores_expired += outcome is Outcome.EXPIRED
        counters.stores_failed += outcome in (Outcome.FAILED, Outcome.CORRUPT)
        self._host.failed(copy.segment)
        # A gather compares nothing, so CORRUPT is a failure.
        return Outcome.FAILED if outcome is Outcome.CORRUPT else outcome

    def _ended(self, job: Job) -> Job | None:
        if job.running:
            return None
        if job.begun:
            self._shares.jobs.give(job.session.session_id, 1)
        if job.loading:
            counters, outcome = self._counters, job.outcome
            counters.loads_served += outcome is Outcome.OK
            counters.loads_missing += outcome is Outcome.MISSING
            counters.loads_corrupt += outcome is Outcome.CORRUPT
            counters.loads_failed += outcome is Outcome.FAILED
            counters.loads_revoked += outcome is Outcome.REVOKED
            counters.loads_expired += outcome is Outcome.EXPIRED
        return job


def _layout_of(realm: Realm, rank: int) -> ChunkLayout:
    layout = realm.layouts[rank]
    assert layout is not None, "a worker gives its layout when it attaches"
    return layout
