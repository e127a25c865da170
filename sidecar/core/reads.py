"""Reads: which chunks come from the store to the host tier, when, and what becomes of each read.

Owns the running reads, their share of what one event begins, what they cost (`planner.py`), and the
breaker that stops reading while the store fails. It does not own who waits for a chunk
(`lookups.py`), slots, or what the store holds.

Reads belong to chunks, not to lookups: several lookups wait for the same read, and one that ends
after all of them gave up still lands in the host tier. Each verb returns the chunks that cannot
come, and the caller cuts the lookups that wait for them.

Invariants: at most `inflight_max` reads run; one event begins at most `begun_max`, and the others
get turns of their own.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from sidecar.core.breaker import BreakerState
from sidecar.core.commands import Read, ReadDone, Resume, StoreOutcome
from sidecar.core.directory import Cause, SegmentState
from sidecar.core.planner import Planner, ReadPlan, ReadStart
from sidecar.protocol import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.breaker import Breaker
    from sidecar.core.directory import Chunk, HostSegment, Realm
    from sidecar.core.parts import CoreParts
    from sidecar.core.store_view import StoreView


class ReadQueue:
    """Segments that wait to be read: which is next, and for which session.

    The sessions that want any take turns, and those of one session come in the order in which it
    asked. A segment that several sessions want waits in the queue of each, and is read when the
    first of them has its turn.

    Invariants: a session that floods delays another's next read by one read of its own, not by its
    backlog; a segment is queued by at least one session, or not at all; a session without queued
    reads is not here.
    """

    def __init__(self) -> None:
        self._by_session: dict[int, dict[HostSegment, None]] = {}
        """In the order of turns; each in the order of asking."""
        self._sessions_of: dict[HostSegment, set[int]] = {}

    def __len__(self) -> int:
        return len(self._sessions_of)

    def __iter__(self) -> Iterator[HostSegment]:
        return iter(self._sessions_of)

    def add(self, session_id: int, segment: HostSegment) -> None:
        """Queue a read for a session, behind what it has queued; once."""
        self._by_session.setdefault(session_id, {})[segment] = None
        self._sessions_of.setdefault(segment, set()).add(session_id)

    def discard(self, segment: HostSegment) -> None:
        """Nobody wants this read any more."""
        for session_id in self._sessions_of.pop(segment, ()):
            own = self._by_session[session_id]
            del own[segment]
            if not own:
                del self._by_session[session_id]

    def leave(self, session_id: int) -> None:
        """A session is over; what another wants too stays queued for that one."""
        for segment in self._by_session.pop(session_id, ()):
            sessions = self._sessions_of[segment]
            sessions.remove(session_id)
            if not sessions:
                del self._sessions_of[segment]

    def take(self) -> HostSegment | None:
        """Take out the read whose turn it is; its session's next one goes behind the others."""
        if not self._by_session:
            return None
        session_id = next(iter(self._by_session))
        own = self._by_session.pop(session_id)
        self._by_session[session_id] = own
        segment = next(iter(own))
        self.discard(segment)
        return segment

    def ahead(self, session_id: int, reads: int) -> int:
        """How many queued reads come before the last of so many more of a session, at most."""
        own = len(self._by_session.get(session_id, ()))
        return own + sum(
            min(len(queued), own + reads)
            for other, queued in self._by_session.items()
            if other != session_id
        )

    def check(self) -> None:
        """Verify the invariants; raises AssertionError."""
        sessions_of: dict[HostSegment, set[int]] = {}
        for session_id, queued in self._by_session.items():
            assert queued, f"session {session_id} has an empty queue"
            for segment in queued:
                sessions_of.setdefault(segment, set()).add(session_id)
        assert sessions_of == self._sessions_of, "a queued read is miscounted"


_FAILURES: Final = {
    StoreOutcome.MISSING: Outcome.MISSING,
    StoreOutcome.CORRUPT: Outcome.CORRUPT,
    StoreOutcome.UNREADABLE: Outcome.MISSING,
    StoreOutcome.EXPIRED: Outcome.EXPIRED,
    StoreOutcome.UNAVAILABLE: Outcome.FAILED,
}


class Reads:
    """The queue of reads and the reads that run."""

    def __init__(
        self,
        parts: CoreParts,
        store: StoreView,
        breaker: Breaker,
        *,
        inflight_max: int,
        begun_max: int,
    ) -> None:
        self._host = parts.host
        self._store = store
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._emit = parts.emit
        self._breaker = breaker
        self._inflight_max = inflight_max
        self._begun_max = begun_max
        self._planner = Planner(reads_inflight_max=inflight_max)
        self._starts: dict[int, ReadStart] = {}
        self._queue = ReadQueue()
        self._running: dict[int, HostSegment] = {}
        self._last_read_id = 0
        self._resuming = False
        """Whether `Resumed` is to come."""

    # --- what is there to tell ---------------------------------------------------------------

    @property
    def num_queued(self) -> int:
        """Reads that wait for their turn and that somebody still wants."""
        return len(self._queue)

    def queued(self) -> Iterator[HostSegment]:
        """Segments that wait to be read."""
        return iter(self._queue)

    @property
    def num_running(self) -> int:
        """Reads that were issued and have not ended."""
        return len(self._running)

    def running(self) -> Iterator[HostSegment]:
        """Segments that are being read."""
        return iter(self._running.values())

    def check(self) -> None:
        """Verify the queue; raises AssertionError."""
        self._queue.check()

    # --- before a read -----------------------------------------------------------------------

    def may_begin(self, now: float) -> bool:
        """Whether the store is read from: not while it fails."""
        return self._breaker.passes(now)

    def plan(
        self,
        session_id: int,
        missing: list[Chunk],
        num_chunks: int,
        num_tokens: int,
        prefill_tokens_per_second: float,
    ) -> ReadPlan:
        """Weigh reading these chunks of a run against computing so much of it, from there on."""
        reads = len(missing) * missing[0].realm.world_size
        return self._planner.plan(
            num_chunks,
            num_tokens,
            reads=reads,
            read_bytes=sum(
                _full_bytes(realm) * count
                for realm, count in Counter(chunk.realm for chunk in missing).items()
            ),
            queued=self._queue.ahead(session_id, reads) + len(self._running),
            prefill_tokens_per_second=prefill_tokens_per_second,
        )

    def queue(self, chunk: Chunk, session_ids: list[int]) -> bool:
        """Queue what the chunk lacks. False if the store lacks it too: the chunk cannot come."""
        absent = [s for s in chunk.segments if s.state is SegmentState.ABSENT]
        in_store = chunk.realm.obtainable(chunk.key)
        if not all(in_store >> segment.rank & 1 for segment in absent):
            return False
        for segment in absent:
            for session_id in session_ids:
                self._queue.add(session_id, segment)
        return True

    def forget(self, chunk: Chunk) -> None:
        """Nobody waits for the chunk any more: its reads lose their place in the queue."""
        for segment in chunk.segments:
            self._queue.discard(segment)

    def leave(self, session_id: int) -> None:
        """A session is over."""
        self._queue.leave(session_id)

    # --- reading -----------------------------------------------------------------------------

    def resumed(self) -> None:
        """Others had their turn."""
        self._resuming = False

    def pump(self, now: float) -> Iterator[tuple[Chunk, Outcome]]:
        """Start as many reads as may run; of many, a few at a time.

        Yields each chunk that cannot come, with the reason. The caller cuts the lookups that wait
        for it before it goes on, so that nothing is read that only they wanted.
        """
        if self._resuming:
            return
        last = self._last_read_id + self._begun_max
        while len(self._running) < self._inflight_max:
            if self._last_read_id == last:
                self._resume()
                break
            if not self._breaker.passes(now):
                yield from self._pause()
                break
            segment = self._queue.take()
            if segment is None:
                break
            chunk = segment.chunk
            if segment.state is not SegmentState.ABSENT:
                continue
            realm = chunk.realm
            sources = realm.segment_sources.sources(realm.stored.get(chunk.key), segment.rank)
            if not sources:
                yield chunk, Outcome.MISSING
            elif not self._host.reserve(segment, Cause.READ):
                yield chunk, Outcome.FULL
            else:
                self._last_read_id += 1
                self._running[self._last_read_id] = segment
                self._starts[self._last_read_id] = self._planner.read_started(now)
                self._breaker.begin(now)
                self._emit(
                    Read(
                        read_id=self._last_read_id,
                        realm_id=realm.realm_id,
                        rank=segment.rank,
                        slot=segment.slot,
                        key=chunk.key,
                        sources=sources,
                        tenant=chunk.tenant,
                    )
                )

    def _resume(self) -> None:
        if self._queue:
            self._resuming = True
            self._emit(Resume())

    def _pause(self) -> Iterator[tuple[Chunk, Outcome]]:
        """Nothing is read for now. While a trial runs the others wait for how it ends."""
        if self._breaker.state is BreakerState.OPEN:
            while (segment := self._queue.take()) is not None:
                self._counters.reads_paused += 1
                yield segment.chunk, Outcome.FAILED

    def ended(self, event: ReadDone, now: float) -> tuple[Chunk, Outcome] | None:
        """A read ended. Returns its chunk with the reason if that cannot come now."""
        segment = self._running.pop(event.read_id)
        self._planner.read_ended(self._starts.pop(event.read_id), now, event.num_bytes)
        chunk = segment.chunk
        if event.outcome in (StoreOutcome.UNAVAILABLE, StoreOutcome.EXPIRED):
            self._breaker.failed(now)
        else:
            self._breaker.succeeded()
        if event.outcome is StoreOutcome.OK:
            self._counters.bytes_read += event.num_bytes
            self._tenants.counters(chunk.tenant).bytes_read += event.num_bytes
            if self._host.arrived(segment, event.num_blocks, event.parent) and chunk.loadable:
                self._counters.chunks_read += 1
            return None
        self._note_failure(segment, event)
        self._host.failed(segment)
        return chunk, _FAILURES[event.outcome]

    def _note_failure(self, segment: HostSegment, event: ReadDone) -> None:
        realm, key, outcome = segment.chunk.realm, segment.chunk.key, event.outcome
        bit = segment.rank if event.failed < 0 else event.failed
        if outcome is StoreOutcome.CORRUPT:
            self._counters.reads_corrupt += 1
            self._store.quarantine(realm, key, bit)
        elif outcome is StoreOutcome.MISSING:
            self._counters.reads_missing += 1
            self._store.lost(realm, key, bit)
        elif outcome is StoreOutcome.UNREADABLE:
            self._counters.reads_unreadable += 1
            self._store.unusable(realm, key, bit)
        elif outcome is StoreOutcome.EXPIRED:
            self._counters.reads_expired += 1
        else:
            self._counters.reads_unavailable += 1
            self._counters.reads_garbled += event.garbled


def can_come(realm: Realm, key: bytes, chunk: Chunk | None) -> bool:
    """Whether what a chunk lacks in host memory is on its way or can be read."""
    if not realm.readable or None in realm.layouts:
        # Without a rank's layout there is no slot to read into.
        return False
    mask = realm.obtainable(key)
    if chunk is not None:
        for segment in chunk.segments:
            if segment.state in (SegmentState.HOST, SegmentState.READING):
                mask |= 1 << segment.rank
    return mask == realm.full_mask


def _full_bytes(realm: Realm) -> int:
    """Payload of a full chunk, over all ranks."""
    layouts = [layout for layout in realm.layouts if layout is not None]
    return sum(layout.payload_bytes(layout.blocks_per_chunk) for layout in layouts)
