"""Reads: which chunks are read from the store, when, and how each read ended.

Owns the queue of reads, the running reads, their cost (`planner.py`), and the breaker that pauses
reading while the store fails. Does not own who waits for a chunk (`lookups.py`), slots, or what the
store holds. Several lookups may wait for the same read, and a read whose lookups all gave up still
ends in the host tier.

Invariant: at most `reads_inflight_max` reads run; one event starts at most `reads_begun_max`.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from sidecar.core.breaker import Breaker, BreakerState
from sidecar.core.commands import Read, ReadDone, Resume, StoreOutcome
from sidecar.core.directory import Cause, Chunk, HostSegment, Realm, SegmentState
from sidecar.core.host_tier import Reservation
from sidecar.core.outbox import CorePart, CoreParts
from sidecar.core.planner import UNKNOWN, Planner, ReadPlan, ReadStart
from sidecar.core.store_view import StoreView
from sidecar.protocol import Lookup, Outcome


class ReadQueue:
    """Segments to read: which is next, and for which session.

    Sessions take turns, each in the order in which it asked. A segment that several sessions want
    is in the queue of each, and is read when the first of them has its turn.

    Invariants: a session that floods delays another's next read by one read, not by its backlog; a
    session without queued reads is not here.
    """

    def __init__(self) -> None:
        self.by_session: dict[int, dict[HostSegment, None]] = {}
        """In the order of turns."""
        self.sessions_of: dict[HostSegment, set[int]] = {}

    def __len__(self) -> int:
        return len(self.sessions_of)

    def add(self, session_id: int, segment: HostSegment) -> None:
        """Queue a read for a session, once."""
        self.by_session.setdefault(session_id, {})[segment] = None
        self.sessions_of.setdefault(segment, set()).add(session_id)

    def discard(self, segment: HostSegment) -> None:
        """Remove a read."""
        for session_id in self.sessions_of.pop(segment, ()):
            own = self.by_session[session_id]
            del own[segment]
            if not own:
                del self.by_session[session_id]

    def close_session(self, session_id: int) -> None:
        """Remove the reads that only this session wants."""
        for segment in self.by_session.pop(session_id, ()):
            sessions = self.sessions_of[segment]
            sessions.remove(session_id)
            if not sessions:
                del self.sessions_of[segment]

    def take(self) -> HostSegment | None:
        """Remove and return the next read; its session goes behind the others."""
        if not self.by_session:
            return None
        session_id = next(iter(self.by_session))
        own = self.by_session.pop(session_id)
        self.by_session[session_id] = own
        segment = next(iter(own))
        self.discard(segment)
        return segment

    def ahead(self, session_id: int, reads: int) -> int:
        """At most how many queued reads come before the last of `reads` more of a session."""
        own = len(self.by_session.get(session_id, ()))
        return own + sum(
            min(len(queued), own + reads)
            for other, queued in self.by_session.items()
            if other != session_id
        )


class Reads(CorePart):
    """The queue of reads and the running reads."""

    def __init__(self, parts: CoreParts, store: StoreView) -> None:
        super().__init__(parts)
        self._store = store
        self.breaker = Breaker(parts.limits.breaker)
        self._planner = Planner(reads_inflight_max=parts.limits.reads_inflight_max)
        self.queue = ReadQueue()
        self._running: dict[int, tuple[HostSegment, ReadStart, int]] = {}
        """By read: the last is the breaker's turn."""
        self._last_read_id = 0
        self.resuming = False
        """Whether `Resumed` has to arrive before more reads start."""

    def running(self) -> Collection[HostSegment]:
        """Segments that are being read."""
        return [segment for segment, _, _ in self._running.values()]

    def plan(self, session_id: int, message: Lookup, run: list[Chunk]) -> ReadPlan:
        """Weigh reading what a run lacks against computing it, from its first missing chunk on."""
        missing = [chunk for chunk in run if not chunk.loadable]
        if not missing or not self._limits.recompute:
            return UNKNOWN
        # At least one: a chunk that was held may be gone by now.
        wanted = max(1, len(message.keys) - message.num_held)
        reads = len(missing) * missing[0].realm.world_size
        read_bytes = 0
        for realm, count in Counter(chunk.realm for chunk in missing).items():
            layouts = [layout for layout in realm.layouts if layout is not None]
            full = sum(layout.payload_bytes(layout.blocks_per_chunk) for layout in layouts)
            read_bytes += full * count
        return self._planner.plan(
            len(run),
            message.num_tokens * min(len(run), wanted) // wanted,
            reads=reads,
            read_bytes=read_bytes,
            queued=self.queue.ahead(session_id, reads) + len(self._running),
            prefill_tokens_per_second=message.prefill_tokens_per_second,
        )

    def enqueue(self, chunk: Chunk, session_ids: Iterable[int]) -> bool:
        """Queue the absent segments of a chunk. False if the store lacks one of them."""
        absent = [s for s in chunk.segments if s.state is SegmentState.ABSENT]
        in_store = chunk.realm.obtainable(chunk.key)
        if not all(in_store >> segment.rank & 1 for segment in absent):
            return False
        for segment in absent:
            for session_id in session_ids:
                self.queue.add(session_id, segment)
        return True

    def cancel(self, chunk: Chunk) -> None:
        """Remove a chunk from the queue."""
        for segment in chunk.segments:
            self.queue.discard(segment)

    def pump(self, now: float) -> Iterator[tuple[Chunk, Outcome]]:
        """Start as many reads as may run. At most `reads_begun_max` queued ones are examined.

        Yields each chunk that cannot be read, with the reason. The caller cuts the lookups that
        wait for it before the next step, so that nothing is read for them alone.
        """
        if self.resuming:
            return
        left = self._limits.reads_begun_max
        while len(self._running) < self._limits.reads_inflight_max:
            paused = False
            if not self.breaker.passes(now):
                paused = self.breaker.state is BreakerState.OPEN
                if not paused:
                    # The queued reads wait for the result of a trial.
                    break
            if not left:
                if self.queue:
                    self.resuming = True
                    self._emit(Resume())
                break
            left -= 1
            segment = self.queue.take()
            if segment is None:
                break
            if paused:
                self._counters.reads_paused += 1
                yield segment.chunk, Outcome.FAILED
                continue
            if segment.state is not SegmentState.ABSENT:
                continue
            chunk, realm = segment.chunk, segment.chunk.realm
            sources = realm.segment_sources.sources(realm.stored.mask(chunk.key), segment.rank)
            if not sources:
                yield chunk, Outcome.MISSING
            elif self._host.reserve(segment, Cause.READ) is not Reservation.MADE:
                yield chunk, Outcome.FULL
            else:
                self._start(segment, sources, now)

    def _start(self, segment: HostSegment, sources: tuple[int, ...], now: float) -> None:
        chunk = segment.chunk
        self._last_read_id += 1
        start, turn = self._planner.read_started(now), self.breaker.begin(now)
        self._running[self._last_read_id] = (segment, start, turn)
        self._emit(
            Read(
                read_id=self._last_read_id,
                realm_id=chunk.realm.realm_id,
                rank=segment.rank,
                slot=segment.slot,
                key=chunk.key,
                sources=sources,
                tenant=chunk.tenant,
            )
        )

    def ended(self, event: ReadDone, now: float) -> tuple[Chunk, Outcome] | None:
        """A read ended. Returns the chunk and the reason if it failed."""
        segment, start, turn = self._running.pop(event.read_id)
        self._planner.read_ended(start, now, event.num_bytes)
        chunk = segment.chunk
        if event.outcome in (StoreOutcome.UNAVAILABLE, StoreOutcome.EXPIRED):
            self.breaker.failed(now, turn)
        else:
            self.breaker.succeeded()
        if event.outcome is StoreOutcome.OK:
            self._counters.bytes_read += event.num_bytes
            self._tenants.counters(chunk.tenant).bytes_read += event.num_bytes
            if self._host.filled(segment, event.num_blocks, event.parent) and chunk.loadable:
                self._counters.chunks_read += 1
            return None
        reason = self._failed(segment, event)
        self._host.failed(segment)
        return chunk, reason

    def _failed(self, segment: HostSegment, event: ReadDone) -> Outcome:
        realm, key, outcome = segment.chunk.realm, segment.chunk.key, event.outcome
        bit = segment.rank if event.failed < 0 else event.failed
        if outcome is StoreOutcome.CORRUPT:
            self._counters.reads_corrupt += 1
            self._store.quarantine(realm, key, bit)
            return Outcome.CORRUPT
        if outcome is StoreOutcome.MISSING:
            self._counters.reads_missing += 1
            self._store.missing(realm, key, bit)
            return Outcome.MISSING
        if outcome is StoreOutcome.UNREADABLE:
            self._counters.reads_unreadable += 1
            self._store.unusable(realm, key, bit)
            return Outcome.MISSING
        if outcome is StoreOutcome.EXPIRED:
            self._counters.reads_expired += 1
            return Outcome.EXPIRED
        self._counters.reads_unavailable += 1
        self._counters.reads_garbled += event.garbled
        return Outcome.FAILED


def can_complete(realm: Realm, key: bytes, chunk: Chunk | None) -> bool:
    """Whether all segments of a chunk are in host memory, being read, or in the store."""
    if not realm.readable or None in realm.layouts:
        # A rank whose layout is unknown has no slot to read into.
        return False
    mask = realm.obtainable(key)
    if chunk is not None:
        for segment in chunk.segments:
            if segment.state in (SegmentState.HOST, SegmentState.READING):
                mask |= 1 << segment.rank
    return mask == realm.full_mask
