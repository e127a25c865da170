"""Lookups: bring chunks that only the store holds to the host tier, and keep them for a while.

Owns the lookups that wait, and those that were answered and still pin their chunks. It does not own
the reads (`reads.py`), the count of pins (`fair_share.py`), leases, or slots.

A lookup's run is the leading part of its keys of which each is in host memory or can be read. Its
chunks are pinned from the start. It is answered once: when the whole run is there, when a chunk
fails (the run is cut before it), when waiting on does not pay (`planner.py`), or when its deadline
passes. What is ready then stays pinned until the lookup is released, because a lease has what is
loaded of it or nothing of it is needed, or until the end of its time.

Invariants: only reads of chunks for which a lookup waits are queued, so the lookups' share of
memory bounds the queue; every waiting lookup is listed under each chunk that it lacks.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sidecar.core.commands import ReadDone, Reply
from sidecar.core.fair_share import lookup_cost
from sidecar.core.planner import UNKNOWN, Credit, ReadPlan
from sidecar.core.reads import can_come
from sidecar.protocol import Lookup, LookupDone, Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.core.directory import Chunk, Realm
    from sidecar.core.fair_share import Pins
    from sidecar.core.parts import CoreParts
    from sidecar.core.reads import Reads


class OpenLookup:
    """One lookup and the chunks that it pins. `chunks` is its run, cut where one failed."""

    __slots__ = (
        "answered",
        "asked",
        "chunks",
        "cost",
        "expires",
        "first_missing",
        "lead",
        "lookup_id",
        "outcome",
        "plan",
        "session_id",
        "wait_seconds",
        "waits",
    )

    def __init__(
        self,
        session_id: int,
        lookup_id: int,
        chunks: list[Chunk],
        plan: ReadPlan,
        *,
        asked: float,
        wait_seconds: float,
        expires: float,
        cost: int,
    ) -> None:
        self.session_id = session_id
        self.lookup_id = lookup_id
        self.chunks = chunks
        self.plan = plan
        self.asked = asked
        self.wait_seconds = wait_seconds
        self.expires = expires
        self.cost = cost
        """Bytes of the control plane that it was admitted with."""
        self.lead = _leading(chunks, 0)
        """Leading chunks of the run that are in host memory."""
        self.first_missing = self.lead
        self.waits: set[Chunk] = set()
        self.outcome = Outcome.OK
        self.answered = False

    @property
    def ready(self) -> int:
        """Chunks that were waited for and are there, from the first that was missing on."""
        return self.lead - self.first_missing

    @property
    def loses_from(self) -> float:
        """From when on it waits in vain, unless more comes: later, the more is there."""
        return self.asked + self.plan.saved_seconds(self.ready, self.wait_seconds)

    @property
    def deadline(self) -> float:
        """When it is answered with what is there, whatever credit is left."""
        return self.asked + self.plan.patience_seconds(self.ready, self.wait_seconds)


class Lookups:
    """All lookups."""

    def __init__(
        self,
        parts: CoreParts,
        reads: Reads,
        pins: Pins,
        *,
        epoch: int,
        lookups_max_per_session: int,
        ttl_seconds_max: float,
        recompute: bool,
        regret_max: float,
    ) -> None:
        self._directory = parts.directory
        self._host = parts.host
        self._reads = reads
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._bounds = parts.bounds
        self._pins = pins
        self._emit = parts.emit
        self._epoch = epoch
        self._lookups_max_per_session = lookups_max_per_session
        self._ttl_seconds_max = ttl_seconds_max
        self._recompute = recompute
        self._regret_max = regret_max
        self._credits: dict[int, Credit] = {}
        """Of each session that asked."""
        self._now = 0.0
        """Of the last event."""
        self._by_session: dict[int, dict[int, OpenLookup]] = {}
        self._waiters: dict[Chunk, dict[OpenLookup, None]] = {}
        self._draining = False

    def __iter__(self) -> Iterator[OpenLookup]:
        for lookups in self._by_session.values():
            yield from lookups.values()

    def ask(self, session_id: int, realms: list[Realm], message: Lookup, now: float) -> None:
        """Start a lookup; it may be answered at once. The same id again replaces the first.

        `realms` are those of the session's KV cache groups, in their order.
        """
        realm = realms[0]
        self._now = now
        self._counters.lookups += 1
        self._tenants.counters(message.tenant).lookups += 1
        self.release(session_id, message.lookup_id)
        own = self._by_session.setdefault(session_id, {})
        cost = lookup_cost(realm, len(message.keys))
        if not self._admit(session_id, own, cost):
            self._counters.lookups_refused += 1
            self._reply(session_id, message.lookup_id, 0, Outcome.FULL)
            return
        chunks = self._run(realms, message)
        fitting = self._pins.fitting(session_id, chunks)
        cut = fitting < len(chunks)
        if cut:
            self._bounds.refuse("lookup", "pinned")
            self._shorten(chunks, fitting)
        plan = self._plan(session_id, message, chunks)
        self._credit(session_id).asked(plan.compute_seconds)
        if not plan.read:
            self._counters.lookups_recomputed += 1
            self._shorten(chunks, _leading(chunks, 0))
        wait_seconds = min(message.deadline_ms / 1000, self._ttl_seconds_max)
        lookup = OpenLookup(
            session_id,
            message.lookup_id,
            chunks,
            plan,
            asked=now,
            wait_seconds=wait_seconds,
            expires=now + wait_seconds + self._ttl_seconds_max,
            cost=lookup_cost(realm, len(chunks)),
        )
        # Taken for all keys at first: how many of them are worth an entry is known only now.
        if cost != lookup.cost:
            self._bounds.memory.give(session_id, cost - lookup.cost)
        own[message.lookup_id] = lookup
        self._pins.pin(session_id, chunks)
        for chunk in chunks:
            self._host.touch(chunk)
            if not chunk.loadable:
                lookup.waits.add(chunk)
                self._waiters.setdefault(chunk, {})[lookup] = None
        if cut:
            lookup.outcome = Outcome.FULL
        elif not chunks:
            lookup.outcome = Outcome.MISSING if message.keys else Outcome.OK
        # Copied: queueing a read may find that the chunk cannot come, and cut the run.
        for chunk in list(chunks):
            if not chunk.loadable and not lookup.answered:
                self._queue(chunk, [session_id])
        self._answer_if_over(lookup)

    def _shorten(self, chunks: list[Chunk], length: int) -> None:
        """Cut a run that is not pinned yet."""
        cut = chunks[length:]
        del chunks[length:]
        for chunk in cut:
            self._directory.settle(chunk)

    def _plan(self, session_id: int, message: Lookup, chunks: list[Chunk]) -> ReadPlan:
        """Weigh reading what the run lacks against computing the run from there on."""
        first = _leading(chunks, 0)
        missing = [chunk for chunk in chunks[first:] if not chunk.loadable]
        if not missing or not self._recompute:
            return UNKNOWN
        num_chunks = len(chunks) - first
        num_tokens = message.num_tokens * num_chunks // len(message.keys)
        speed = message.prefill_tokens_per_second
        return self._reads.plan(session_id, missing, num_chunks, num_tokens, speed)

    def _admit(self, session_id: int, own: dict[int, OpenLookup], cost: int) -> bool:
        bounds = self._bounds
        if self._draining:
            bounds.refuse("lookup", "draining")
            return False
        if not self._make_room(own):
            bounds.refuse("lookup", "client")
            return False
        wanted = (("memory", bounds.memory, cost), ("lookups", bounds.lookups, 1))
        return bounds.admit("lookup", session_id, wanted)

    def _credit(self, session_id: int) -> Credit:
        credit = self._credits.get(session_id)
        if credit is None:
            credit = self._credits[session_id] = Credit(self._regret_max)
        return credit

    def _make_room(self, own: dict[int, OpenLookup]) -> bool:
        """Below the limit; what was answered long ago gives way to what is asked now."""
        if len(own) < self._lookups_max_per_session:
            return True
        for lookup in own.values():
            if lookup.answered:
                self._end(lookup)
                return True
        return False

    def _run(self, realms: list[Realm], message: Lookup) -> list[Chunk]:
        run: dict[Chunk, None] = {}
        groups = message.groups or itertools.repeat(0)
        for key, group in zip(message.keys, groups, strict=False):
            realm = realms[group]
            chunk = realm.chunks.get(key)
            if chunk is None or not chunk.loadable:
                if not can_come(realm, key, chunk):
                    break
                if not self._reads.may_begin(self._now):
                    self._counters.reads_paused += 1
                    break
                chunk = self._directory.open_chunk(realm, key, message.tenant)
            if chunk in run:
                # No chain repeats a key; waiting twice for one chunk would only need care.
                break
            run[chunk] = None
        return list(run)

    def read_ended(self, event: ReadDone, now: float) -> None:
        """A read ended, well or not; lookups that waited for it go on."""
        self._now = now
        lost = self._reads.ended(event, now)
        if lost is not None:
            self.gave_up(*lost)

    def completed(self, chunk: Chunk) -> None:
        """Every rank's segment is in the host tier."""
        self._reads.forget(chunk)
        for lookup in self._waiters.pop(chunk, ()):
            lookup.waits.discard(chunk)
            lookup.lead = _leading(lookup.chunks, lookup.lead)
            self._answer_if_over(lookup)

    def store_failed(self, chunk: Chunk) -> None:
        """A gather that lookups may have waited for brought nothing: read instead."""
        waiters = self._waiters.get(chunk)
        if waiters is not None:
            self._queue(chunk, [lookup.session_id for lookup in waiters])

    def _queue(self, chunk: Chunk, session_ids: list[int]) -> None:
        if not self._reads.queue(chunk, session_ids):
            self.gave_up(chunk, Outcome.MISSING)

    def removed(self, chunk: Chunk) -> None:
        """A chunk was quarantined in the host tier."""
        self.gave_up(chunk, Outcome.CORRUPT)

    def gave_up(self, chunk: Chunk, outcome: Outcome) -> None:
        """A chunk will not come: runs that need it are cut before it."""
        self._reads.forget(chunk)
        for lookup in self._waiters.pop(chunk, ()):
            lookup.waits.discard(chunk)
            lookup.outcome = outcome
            self._cut(lookup, lookup.chunks.index(chunk))
            self._answer_if_over(lookup)

    def _cut(self, lookup: OpenLookup, length: int) -> None:
        """Let go of the run's chunks from `length` on."""
        cut = lookup.chunks[length:]
        del lookup.chunks[length:]
        for chunk in cut:
            if chunk in lookup.waits:
                lookup.waits.discard(chunk)
                waiters = self._waiters[chunk]
                del waiters[lookup]
                if not waiters:
                    del self._waiters[chunk]
                    self._reads.forget(chunk)
        self._pins.unpin(lookup.session_id, cut)

    def _answer_if_over(self, lookup: OpenLookup) -> None:
        if not lookup.waits and not lookup.answered:
            self._answer(lookup)

    def _answer(self, lookup: OpenLookup) -> None:
        # From the start: what was ready may have been found corrupt since.
        ready = _leading(lookup.chunks, 0)
        if ready < len(lookup.chunks) and lookup.outcome is Outcome.OK:
            # Only a chunk that was there and turned out corrupt leaves such a gap.
            lookup.outcome = Outcome.CORRUPT
        lookup.answered = True
        self._cut(lookup, ready)
        self._settle(lookup)
        if ready == 0:
            self._drop(lookup)
        self._reply(lookup.session_id, lookup.lookup_id, ready, lookup.outcome)

    def _settle(self, lookup: OpenLookup) -> None:
        """Book what a lookup's wait saved its engine, or cost it."""
        if lookup.plan.compute_seconds <= 0:
            return
        credit = self._credit(lookup.session_id)
        if lookup.loses_from > self._now:
            credit.saved(lookup.loses_from - self._now)
        else:
            credit.spend(lookup.loses_from, self._now)

    def _reply(self, session_id: int, lookup_id: int, ready: int, outcome: Outcome) -> None:
        self._emit(Reply(session_id, LookupDone(self._epoch, lookup_id, ready, outcome)))

    def _drop(self, lookup: OpenLookup) -> None:
        own = self._by_session[lookup.session_id]
        del own[lookup.lookup_id]
        self._bounds.memory.give(lookup.session_id, lookup.cost)
        self._bounds.lookups.give(lookup.session_id, 1)

    def _end(self, lookup: OpenLookup) -> None:
        """Forget a lookup and its pins. It is not answered any more."""
        lookup.answered = True
        self._cut(lookup, 0)
        self._drop(lookup)

    def release(self, session_id: int, lookup_id: int) -> None:
        """Give one lookup back. An unknown id is no error: it may just have ended."""
        lookup = self._by_session.get(session_id, {}).get(lookup_id)
        if lookup is not None:
            self._end(lookup)

    def close_session(self, session_id: int) -> None:
        """End every lookup of a session, unanswered."""
        for lookup in list(self._by_session.get(session_id, {}).values()):
            self._end(lookup)
        self._by_session.pop(session_id, None)
        self._reads.leave(session_id)
        self._credits.pop(session_id, None)

    def expire(self, now: float) -> None:
        """Answer the lookups past their deadline, drop the pins of those past their time."""
        self._now = now
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
            if losing:
                since = min(lookup.loses_from for lookup in losing)
                if not self._credit(session_id).spend(since, now):
                    for lookup in losing:
                        self._expired(lookup)

    def _expired(self, lookup: OpenLookup) -> None:
        self._counters.lookups_expired += 1
        self._answer_with_what_is_there(lookup, Outcome.EXPIRED)

    def drain(self) -> None:
        """Answer everything that waits and start no read any more."""
        self._draining = True
        for lookup in list(self):
            if not lookup.answered:
                self._answer_with_what_is_there(lookup, Outcome.MISSING)

    def check(self) -> None:
        """Verify that what is queued to be read is waited for; raises AssertionError."""
        for segment in self._reads.queued():
            assert segment.chunk in self._waiters, "a read is queued that nobody waits for"

    def _answer_with_what_is_there(self, lookup: OpenLookup, outcome: Outcome) -> None:
        lookup.outcome = outcome
        self._answer(lookup)


def _leading(chunks: list[Chunk], known: int) -> int:
    """How many chunks of a run, from its start, are in host memory; `known` are known to be."""
    ready = known
    while ready < len(chunks) and chunks[ready].loadable:
        ready += 1
    return ready
