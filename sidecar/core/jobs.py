"""Jobs of workers: which copies they need, and the one outcome that each job gets.

Owns running copies and the jobs that wait for them. It decides per chunk whether a copy is needed
and possible; slots come from `host_tier.py`.

Invariants: a job ends once, when all its copies ended, and then has one outcome; a slot that a
copy touches is held until `Copied`, whatever became of the session, the job or the chunk.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sidecar.core.commands import (
    Copied,
    CopyOutcome,
    Gather,
    Scatter,
    SessionOpened,
)
from sidecar.core.directory import Cause, SegmentState
from sidecar.core.fair_share import load_cost, store_cost
from sidecar.core.parts import Sampling
from sidecar.core.retention import Retention
from sidecar.protocol import JobOutcome, LoadChunk, LoadJob, Outcome, StoreChunk, StoreJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.core.directory import Chunk, HostSegment, Realm
    from sidecar.core.parts import CoreParts
    from tiers.kv.layout import ChunkLayout

_OUTCOME_OF_COPY: Final = {
    CopyOutcome.OK: Outcome.OK,
    CopyOutcome.CORRUPT: Outcome.CORRUPT,
    CopyOutcome.REVOKED: Outcome.REVOKED,
    CopyOutcome.EXPIRED: Outcome.EXPIRED,
    CopyOutcome.FAILED: Outcome.FAILED,
}

_LOAD_WORST_LAST: Final = (
    Outcome.OK,
    Outcome.MISSING,
    Outcome.FULL,
    Outcome.REVOKED,
    Outcome.EXPIRED,
    Outcome.FAILED,
    Outcome.CORRUPT,
)


class Job:
    """One load or store job of one rank, from its submission to its outcome."""

    __slots__ = ("begun", "job_id", "loading", "outcomes", "remaining", "session")

    def __init__(self, session: SessionOpened, job_id: int, *, loading: bool) -> None:
        self.session = session
        self.job_id = job_id
        self.loading = loading
        self.remaining = 0
        self.begun = False
        """Whether it counts as one of its session's running jobs."""
        self.outcomes: set[Outcome] = set()
        """What happened to its chunks."""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the whole, from those of its chunks."""
        if self.outcomes <= {Outcome.OK}:
            return Outcome.OK
        if self.loading:
            return max(self.outcomes, key=_LOAD_WORST_LAST.index)
        if Outcome.OK in self.outcomes:
            return Outcome.PARTIAL
        for outcome in (Outcome.REVOKED, Outcome.EXPIRED, Outcome.FAILED):
            if outcome in self.outcomes:
                return outcome
        return Outcome.FULL


class RunningCopy:
    """A gather or scatter that was issued and has not ended."""

    __slots__ = (
        "cost",
        "job",
        "num_blocks",
        "num_bytes",
        "parent",
        "segment",
        "storing",
        "verifies",
    )

    def __init__(
        self,
        job: Job,
        segment: HostSegment,
        num_blocks: int,
        num_bytes: int,
        parent: bytes,
        cost: int,
        storing: int,
        *,
        verifies: bool = False,
    ) -> None:
        self.job = job
        self.segment = segment
        self.num_blocks = num_blocks
        self.num_bytes = num_bytes
        self.parent = parent
        self.cost = cost
        """Bytes of the control plane that it takes while it has not ended."""
        self.storing = storing
        """Bytes of the slot that it fills, 0 for a scatter."""
        self.verifies = verifies
        """Whether a scatter that goes well has seen the slot to be right."""


class Jobs:
    """All jobs. `ended` is called with each job's outcome, `store_failed` after a lost gather."""

    def __init__(
        self,
        parts: CoreParts,
        *,
        verify_loads: float,
        ended: Callable[[Job, JobOutcome], None],
        store_failed: Callable[[Chunk], None],
    ) -> None:
        self._directory = parts.directory
        self._host = parts.host
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._bounds = parts.bounds
        self._emit = parts.emit
        self._ended = ended
        self._store_failed = store_failed
        self._sampling = Sampling(verify_loads)
        self._running: dict[int, RunningCopy] = {}
        self._last_copy_id = 0

    @property
    def copies_running(self) -> int:
        """Gathers and scatters that have not ended."""
        return len(self._running)

    def running(self) -> Iterator[HostSegment]:
        """The segment of each running copy."""
        return (copy.segment for copy in self._running.values())

    def held(self) -> Iterator[tuple[int, int, int]]:
        """Session, memory and slot bytes that each running copy was admitted with."""
        return (
            (copy.job.session.session_id, copy.cost, copy.storing)
            for copy in self._running.values()
        )

    def load(
        self, session: SessionOpened, realms: list[Realm], fence: int, message: LoadJob
    ) -> None:
        """Start a load job: all of its chunks are there, or none is copied.

        `realms` are those of the session's KV cache groups, in their order.
        """
        job = Job(session, message.job_id, loading=True)
        segments: list[HostSegment] = []
        for piece in message.chunks:
            chunk = realms[piece.group].chunks.get(piece.key)
            segment = chunk.segments[session.segment_number] if chunk is not None else None
            if segment is None or segment.state is not SegmentState.HOST:
                job.outcomes.add(Outcome.MISSING)
                break
            if not _fits(piece, segment.num_blocks):
                job.outcomes.add(Outcome.FAILED)
                break
            segments.append(segment)
        else:
            self._scatter_all(job, fence, message.chunks, segments)
        self._end_if_over(job)

    def _scatter_all(
        self, job: Job, fence: int, pieces: list[LoadChunk], segments: list[HostSegment]
    ) -> None:
        if not pieces:
            return
        session_id, bounds = job.session.session_id, self._bounds
        costs = [load_cost(piece) for piece in pieces]
        wanted = (
            ("memory", bounds.memory, sum(costs)),
            ("copies", bounds.copies, len(costs)),
        )
        if not self._begin(job, "load") or not bounds.admit("load", session_id, wanted):
            self._counters.loads_dropped_full += 1
            job.outcomes.add(Outcome.FULL)
            return
        for piece, segment, cost in zip(pieces, segments, costs, strict=True):
            self._scatter(job, fence, piece, segment, cost)

    def _begin(self, job: Job, what: str) -> bool:
        """Count the job as running, once."""
        if not job.begun:
            job.begun = self._bounds.begin_job(what, job.session.session_id)
        return job.begun

    def _scatter(
        self, job: Job, fence: int, piece: LoadChunk, segment: HostSegment, cost: int
    ) -> None:
        chunk = segment.chunk
        layout = _layout_of(chunk.realm, segment.rank)
        self._host.hold(segment)
        self._host.touch(chunk)
        num_bytes = layout.payload_bytes(len(piece.block_ids))
        verifies = self._sampling.chooses(segment)
        self._counters.loads_unverified += not verifies
        copy = RunningCopy(
            job,
            segment,
            segment.num_blocks,
            num_bytes,
            chunk.parent,
            cost,
            0,
            verifies=verifies,
        )
        self._emit(
            Scatter(
                copy_id=self._start(copy),
                session_id=job.session.session_id,
                job_id=job.job_id,
                fence=fence,
                realm_id=chunk.realm.realm_id,
                rank=segment.rank,
                slot=segment.slot,
                key=piece.key,
                num_blocks=segment.num_blocks,
                first_block=piece.first_block,
                block_ids=tuple(piece.block_ids),
                verify=verifies,
            )
        )

    def store(
        self,
        session: SessionOpened,
        realms: list[Realm],
        fence: int,
        message: StoreJob,
        now: float,
        *,
        accept: bool,
    ) -> None:
        """Start a store job. With `accept` False (draining) nothing new is taken."""
        job = Job(session, message.job_id, loading=False)
        # What is to be forgotten could not be called back from a store that others read.
        expires_at = now + message.ttl_ms / 1000 if message.ttl_ms else math.inf
        retention = Retention(expires_at, stays=message.stays or message.ttl_ms > 0)
        for piece in message.chunks:
            realm = realms[piece.group]
            job.outcomes.update(self._gather(job, realm, fence, piece, retention, accept=accept))
        self._end_if_over(job)

    def _gather(
        self,
        job: Job,
        realm: Realm,
        fence: int,
        piece: StoreChunk,
        retention: Retention,
        *,
        accept: bool,
    ) -> tuple[Outcome, ...]:
        """Start one chunk's copy; its outcome if there is nothing to copy."""
        rank = job.session.segment_number
        layout = _layout_of(realm, rank)
        num_blocks = len(piece.block_ids)
        if (
            num_blocks > layout.blocks_per_chunk
            or len(piece.token_ids) != 4 * num_blocks * layout.block_tokens
        ):
            self._counters.stores_failed += 1
            return (Outcome.FAILED,)
        if not job.session.stores(piece.key):
            # Another rank holds the same bytes. One copy is enough, and they take turns.
            return (Outcome.OK,)
        chunk = realm.chunks.get(piece.key)
        if chunk is not None and chunk.segments[rank].state is not SegmentState.ABSENT:
            # Being stored or read counts as there: nothing that this job holds is needed any more.
            self._counters.stores_duplicate += 1
            # Somebody computed what is there already: it is in demand.
            self._host.touch(chunk)
            return (Outcome.OK,)
        if not accept:
            self._counters.stores_dropped_draining += 1
            return (Outcome.FULL,)
        chunk = self._directory.open_chunk(realm, piece.key, piece.tenant)
        segment = chunk.segments[rank]
        session_id, bounds = job.session.session_id, self._bounds
        cost, storing = store_cost(realm, piece), self._host.slot_bytes(segment)
        wanted = (
            ("memory", bounds.memory, cost),
            ("copies", bounds.copies, 1),
            ("storing", bounds.storing, storing),
        )
        if not self._begin(job, "store") or not bounds.admit("store", session_id, wanted):
            self._counters.stores_dropped_share += 1
            self._directory.settle(chunk)
            return (Outcome.FULL,)
        if not self._host.reserve(segment, Cause.GATHER, retention):
            self._give_back(session_id, cost, storing)
            self._directory.settle(chunk)
            return (Outcome.FULL,)
        num_bytes = layout.payload_bytes(num_blocks)
        self._emit(
            Gather(
                copy_id=self._start(
                    RunningCopy(job, segment, num_blocks, num_bytes, piece.parent, cost, storing)
                ),
                session_id=job.session.session_id,
                job_id=job.job_id,
                fence=fence,
                realm_id=realm.realm_id,
                rank=rank,
                slot=segment.slot,
                key=piece.key,
                parent=piece.parent,
                token_ids=piece.token_ids,
                block_ids=tuple(piece.block_ids),
                tenant=chunk.tenant,
            )
        )
        return ()

    def _start(self, copy: RunningCopy) -> int:
        self._last_copy_id += 1
        self._running[self._last_copy_id] = copy
        copy.job.remaining += 1
        return self._last_copy_id

    def _give_back(self, session_id: int, cost: int, storing: int) -> None:
        self._bounds.memory.give(session_id, cost)
        self._bounds.copies.give(session_id, 1)
        if storing:
            self._bounds.storing.give(session_id, storing)

    def copied(self, event: Copied, now: float) -> None:
        """A copy ended: its slot and blocks are no longer touched."""
        copy = self._running.pop(event.copy_id)
        job = copy.job
        self._give_back(job.session.session_id, copy.cost, copy.storing)
        if job.loading:
            job.outcomes.add(self._scattered(copy, event.outcome))
        else:
            job.outcomes.add(self._gathered(copy, event.outcome, now))
        job.remaining -= 1
        self._end_if_over(job)

    def _scattered(self, copy: RunningCopy, outcome: CopyOutcome) -> Outcome:
        self._host.release(copy.segment)
        if outcome is CopyOutcome.OK:
            copy.segment.verified |= copy.verifies
            self._counters.chunks_loaded += 1
            self._counters.bytes_loaded += copy.num_bytes
            own = self._tenants.counters(copy.segment.chunk.tenant)
            own.chunks_loaded += 1
            own.bytes_loaded += copy.num_bytes
        elif outcome is CopyOutcome.CORRUPT:
            self._host.quarantine(copy.segment.chunk)
        return _OUTCOME_OF_COPY[outcome]

    def _gathered(self, copy: RunningCopy, outcome: CopyOutcome, now: float) -> Outcome:
        segment, chunk = copy.segment, copy.segment.chunk
        if outcome is CopyOutcome.OK:
            self._counters.bytes_stored += copy.num_bytes
            own = self._tenants.counters(chunk.tenant)
            own.bytes_stored += copy.num_bytes
            if self._host.arrived(segment, copy.num_blocks, copy.parent):
                self._counters.chunks_stored += chunk.loadable
                own.chunks_stored += chunk.loadable
                return Outcome.OK
            if chunk.expires_at <= now:
                # Its time was over while it was copied: forgotten, as was asked.
                return Outcome.OK
            # Another rank's part was found corrupt meanwhile, and the chunk went with it.
            self._counters.stores_failed += 1
            return Outcome.FAILED
        counters = self._counters
        counters.stores_revoked += outcome is CopyOutcome.REVOKED
        counters.stores_expired += outcome is CopyOutcome.EXPIRED
        counters.stores_failed += outcome in (CopyOutcome.FAILED, CopyOutcome.CORRUPT)
        self._host.failed(segment)
        self._store_failed(chunk)
        # A gather compares nothing: what it calls corrupt has failed.
        return Outcome.FAILED if outcome is CopyOutcome.CORRUPT else _OUTCOME_OF_COPY[outcome]

    def _end_if_over(self, job: Job) -> None:
        if job.remaining:
            return
        if job.begun:
            self._bounds.end_job(job.session.session_id)
        outcome = job.outcome
        if job.loading:
            counters = self._counters
            counters.loads_served += outcome is Outcome.OK
            counters.loads_missing += outcome is Outcome.MISSING
            counters.loads_corrupt += outcome is Outcome.CORRUPT
            counters.loads_failed += outcome is Outcome.FAILED
            counters.loads_revoked += outcome is Outcome.REVOKED
            counters.loads_expired += outcome is Outcome.EXPIRED
        self._ended(job, JobOutcome(job.job_id, outcome))


def _layout_of(realm: Realm, rank: int) -> ChunkLayout:
    layout = realm.layouts[rank]
    assert layout is not None, "a worker's layout is learnt when it attaches"
    return layout


def _fits(piece: LoadChunk, num_blocks: int) -> bool:
    return piece.first_block + len(piece.block_ids) <= num_blocks
