"""Lookups: bring chunks that only the store holds to the host tier, and keep them for a while.

Owns the lookups that wait, and the answered ones that still pin their chunks. Does not own reads
(`reads.py`), the count of pins (`pins.py`), leases, or slots.

The run of a lookup is the longest prefix of its keys of which each is in host memory or can be
read. Its chunks are pinned from the start. A lookup is answered once: when the whole run is loaded,
when a chunk fails (which ends the run before it), when waiting no longer pays (`planner.py`), or at
its deadline. The loaded chunks stay pinned until the lookup is released (a lease has them, or they
are not needed), or until it expires.

Invariants: only chunks that a lookup waits for are queued to be read, so the lookups' share of
memory bounds the queue; a waiting lookup is listed under each chunk that it lacks.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sidecar.core.commands import ReadDone, Reply
from sidecar.core.directory import Chunk, Realm
from sidecar.core.fair_share import lookup_cost
from sidecar.core.outbox import CorePart, CoreParts
from sidecar.core.pins import Pins
from sidecar.core.planner import Credit, ReadPlan
from sidecar.core.reads import Reads, can_complete
from sidecar.protocol import Lookup, LookupDone, Outcome


@dataclass(slots=True, eq=False)
class OpenLookup:
    """One lookup and the chunks that it pins."""

    session_id: int
    lookup_id: int
    chunks: list[Chunk]
    """Its run, up to the first chunk that failed."""
    plan: ReadPlan
    asked: float
    wait_seconds: float
    expires: float
    cost: int
    """Bytes of the control plane."""
    leading: int = field(init=False)
    """Leading chunks of the run that are in host memory."""
    first_missing: int = field(init=False)
    waits: set[Chunk] = field(default_factory=set["Chunk"])
    outcome: Outcome = Outcome.OK
    answered: bool = False

    def __post_init__(self) -> None:
        self.leading = self.first_missing = _leading(self.chunks, 0)

    @property
    def ready(self) -> int:
        """Leading chunks that were missing at first and are loaded now."""
        return self.leading - self.first_missing

    @property
    def loses_from(self) -> float:
        """From when on it waits in vain, unless more chunks are loaded."""
        return self.asked + self.plan.saved_seconds(self.ready, self.wait_seconds)

    @property
    def deadline(self) -> float:
        """When it is answered, whatever credit is left."""
        return self.asked + self.plan.patience_seconds(self.ready, self.wait_seconds)


class Lookups(CorePart):
    """All lookups."""

    def __init__(self, parts: CoreParts, reads: Reads, pins: Pins) -> None:
        super().__init__(parts)
        self._reads = reads
        self._pins = pins
        self._credits = defaultdict[int, Credit](lambda: Credit(parts.limits.regret_max))
        """By session."""
        self.now = 0.0
        """Time of the event."""
        self._by_session: dict[int, dict[int, OpenLookup]] = {}
        self.waiters: dict[Chunk, dict[OpenLookup, None]] = {}
        self._draining = False

    def __len__(self) -> int:
        return sum(map(len, self._by_session.values()))

    def __iter__(self) -> Iterator[OpenLookup]:
        for lookups in self._by_session.values():
            yield from lookups.values()

    def start(self, session_id: int, realms: list[Realm], message: Lookup) -> None:
        """Start a lookup; it may be answered at once. An open one of the same id is replaced."""
        self._counters.lookups += 1
        self._tenants.counters(message.tenant).lookups += 1
        self.release(session_id, message.lookup_id)
        own = self._by_session.setdefault(session_id, {})
        cost = lookup_cost(realms[0], len(message.keys))
        if not self._admit(session_id, own, cost):
            self._counters.lookups_refused += 1
            done = LookupDone(self._epoch, message.lookup_id, 0, Outcome.FULL)
            self._emit(Reply(session_id, done))
            return
        chunks, outcome = self._run(realms, message)
        fitting = self._pins.fitting(session_id, chunks)
        if fitting < len(chunks):
            outcome = Outcome.FULL
            self._shares.refuse("lookup", "pinned")
            self._shorten(chunks, fitting)
        first = _leading(chunks, 0)
        plan = self._reads.plan(session_id, message, chunks[first:])
        self._credits[session_id].asked(plan.compute_seconds)
        if not plan.read:
            self._counters.lookups_recomputed += 1
            self._shorten(chunks, first)
            outcome = Outcome.RECOMPUTED
        if outcome is Outcome.OK and message.keys and not chunks:
            outcome = Outcome.MISSING
        ttl_seconds = self._limits.lease_ttl_seconds_max
        wait_seconds = min(message.deadline_ms / 1000, ttl_seconds)
        lookup = own[message.lookup_id] = OpenLookup(
            session_id,
            message.lookup_id,
            chunks,
            plan,
            asked=self.now,
            wait_seconds=wait_seconds,
            expires=self.now + wait_seconds + ttl_seconds,
            cost=lookup_cost(realms[0], len(chunks)),
            outcome=outcome,
        )
        # Admitted for all keys; only now is it known how many of them are in the run.
        if cost != lookup.cost:
            self._shares.memory.give(session_id, cost - lookup.cost)
        self._wait(lookup)

    def _wait(self, lookup: OpenLookup) -> None:
        """Pin the run, and queue what it lacks."""
        self._pins.pin(lookup.session_id, lookup.chunks)
        for chunk in lookup.chunks:
            if not chunk.loadable:
                lookup.waits.add(chunk)
                self.waiters.setdefault(chunk, {})[lookup] = None
        # Copied: a chunk that turns out to be unreadable cuts the run.
        for chunk in list(lookup.chunks):
            if chunk in lookup.waits and not lookup.answered:
                self._enqueue(chunk, [lookup])
        self._answer_if_done(lookup)

    def _shorten(self, chunks: list[Chunk], length: int) -> None:
        """Cut a run that is not pinned yet."""
        cut = chunks[length:]
        del chunks[length:]
        for chunk in cut:
            self._directory.drop_if_unused(chunk)

    def _admit(self, session_id: int, own: dict[int, OpenLookup], cost: int) -> bool:
        shares = self._shares
        if self._draining:
            shares.refuse("lookup", "draining")
            return False
        if len(own) >= self._limits.lookups_max_per_session:
            # The oldest answered one is ended for it.
            oldest = next((lookup for lookup in own.values() if lookup.answered), None)
            if oldest is None:
                shares.refuse("lookup", "client")
                return False
            self._end(oldest)
        return shares.admit("lookup", session_id, (shares.memory, cost), (shares.lookups, 1))

    def _run(self, realms: list[Realm], message: Lookup) -> tuple[list[Chunk], Outcome]:
        """The leading chunks that are there or can be read, and why it is not all of them."""
        run: dict[Chunk, None] = {}
        groups = message.groups or itertools.repeat(0)
        for key, group in zip(message.keys, groups, strict=False):
            realm = realms[group]
            chunk = realm.chunks.get(key)
            if chunk is None or not chunk.loadable:
                if not can_complete(realm, key, chunk):
                    break
                if not self._reads.breaker.passes(self.now):
                    self._counters.reads_paused += 1
                    return list(run), Outcome.PAUSED
                chunk = self._directory.open_chunk(realm, key, message.tenant)
            if chunk in run:
                # No chain repeats a key.
                break
            run[chunk] = None
        return list(run), Outcome.OK

    def read_ended(self, event: ReadDone) -> None:
        """A read ended."""
        failed = self._reads.ended(event, self.now)
        if failed is not None:
            self.chunk_failed(*failed)

    def chunk_loaded(self, chunk: Chunk) -> None:
        """Every rank's segment is in the host tier."""
        self._reads.cancel(chunk)
        for lookup in self.waiters.pop(chunk, ()):
            lookup.waits.discard(chunk)
            lookup.leading = _leading(lookup.chunks, lookup.leading)
            self._answer_if_done(lookup)

    def store_failed(self, chunk: Chunk) -> None:
        """A gather failed that lookups may wait for: read the chunk instead."""
        if chunk in self.waiters:
            self._enqueue(chunk, self.waiters[chunk])

    def _enqueue(self, chunk: Chunk, lookups: Iterable[OpenLookup]) -> None:
        if not self._reads.enqueue(chunk, [lookup.session_id for lookup in lookups]):
            self.chunk_failed(chunk, Outcome.MISSING)

    def chunk_failed(self, chunk: Chunk, outcome: Outcome) -> None:
        """A chunk cannot be loaded: cut the runs before it."""
        self._reads.cancel(chunk)
        for lookup in self.waiters.pop(chunk, ()):
            lookup.waits.discard(chunk)
            lookup.outcome = outcome
            self._cut(lookup, lookup.chunks.index(chunk))
            self._answer_if_done(lookup)

    def _cut(self, lookup: OpenLookup, length: int) -> None:
        """Unpin the run's chunks from `length` on."""
        cut = lookup.chunks[length:]
        del lookup.chunks[length:]
        for chunk in cut:
            if chunk in lookup.waits:
                lookup.waits.discard(chunk)
                waiters = self.waiters[chunk]
                del waiters[lookup]
                if not waiters:
                    del self.waiters[chunk]
                    self._reads.cancel(chunk)
        self._pins.unpin(lookup.session_id, cut)

    def _answer_if_done(self, lookup: OpenLookup) -> None:
        if not lookup.waits and not lookup.answered:
            self._answer(lookup, lookup.outcome)

    def _answer(self, lookup: OpenLookup, outcome: Outcome) -> None:
        """Answer with the chunks that are loaded, and unpin the others."""
        # From the start, because a loaded chunk may have been found corrupt since.
        ready = _leading(lookup.chunks, 0)
        if ready < len(lookup.chunks) and outcome is Outcome.OK:
            # Only a loaded chunk that turned out to be corrupt leaves such a gap.
            outcome = Outcome.CORRUPT
        lookup.outcome = outcome
        lookup.answered = True
        self._cut(lookup, ready)
        if lookup.plan.compute_seconds > 0:
            credit = self._credits[lookup.session_id]
            if lookup.loses_from > self.now:
                credit.saved(lookup.loses_from - self.now)
            else:
                credit.spend(lookup.loses_from, self.now)
        if ready == 0:
            self._end(lookup)
        done = LookupDone(self._epoch, lookup.lookup_id, ready, outcome)
        self._emit(Reply(lookup.session_id, done, self.now - lookup.asked))

    def _end(self, lookup: OpenLookup) -> None:
        """End a lookup and its pins, without an answer."""
        lookup.answered = True
        self._cut(lookup, 0)
        del self._by_session[lookup.session_id][lookup.lookup_id]
        self._shares.memory.give(lookup.session_id, lookup.cost)
        self._shares.lookups.give(lookup.session_id, 1)

    def release(self, session_id: int, lookup_id: int) -> None:
        """End one lookup. An unknown id is not an error: it may just have ended."""
        lookup = self._by_session.get(session_id, {}).get(lookup_id)
        if lookup is not None:
            self._end(lookup)

    def close_session(self, session_id: int) -> None:
        """End every lookup of a session."""
        for lookup in list(self._by_session.get(session_id, {}).values()):
            self._end(lookup)
        self._by_session.pop(session_id, None)
        self._reads.queue.close_session(session_id)
        self._credits.pop(session_id, None)

    def expire(self) -> None:
        """Answer the lookups past their deadline, and end the answered ones past their time."""
        now = self.now
        for session_id, own in self._by_session.items():
            losing: list[OpenLookup] = []
            for lookup in list(own.values()):
                if lookup.answered:
                    if lookup.expires <= now:
                        self._counters.leases_expired += 1
                        self._end(lookup)
                elif lookup.deadline <= now:
                    self._expired(lookup)
                elif lookup.loses_from < now:
                    losing.append(lookup)
            since = min((lookup.loses_from for lookup in losing), default=now)
            if losing and not self._credits[session_id].spend(since, now):
                for lookup in losing:
                    self._expired(lookup)

    def _expired(self, lookup: OpenLookup) -> None:
        self._counters.lookups_expired += 1
        self._answer(lookup, Outcome.EXPIRED)

    def drain(self) -> None:
        """Answer every lookup that waits, and refuse new ones."""
        self._draining = True
        for lookup in list(self):
            if not lookup.answered:
                self._answer(lookup, Outcome.MISSING)


def _leading(chunks: list[Chunk], known: int) -> int:
    """How many leading chunks of a run are in host memory, given that `known` are."""
    ready = known
    while ready < len(chunks) and chunks[ready].loadable:
        ready += 1
    return ready
