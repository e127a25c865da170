"""Writes: which chunks of the host tier are written to the store, in which order, and when.

Owns the write policy (`WritePolicy`), the queue of chunks, the running writes, and the breaker that
pauses writing while the store fails. Does not own what the store holds (`store_view.py`), or the
slots that are sent.

Invariants: only a running write holds its slot; a queued one is dropped, and counted, when its
chunk leaves the host tier. At most `writes_inflight_max` writes run, and the queue holds at most
`write_queue_bytes_max` (or one chunk): beyond it the oldest is dropped and counted. A write that
failed is queued again, behind the others. It is given up after `WRITE_FAILURES_MAX` failures, of
which one counts only if the store took another write since the one before: else it is the store
that fails, and the breaker paces the tries. While draining, only what was stored before is queued:
a write that starts then may be cut off, and would be reported as lost.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, TypeVar

from sidecar.core.breaker import Breaker
from sidecar.core.commands import Resume, StoreOutcome, Write, WriteCause, Written
from sidecar.core.directory import Chunk, HostSegment
from sidecar.core.outbox import CorePart, CoreParts, Sampling, WritePolicy
from sidecar.core.store_view import StoreView

K = TypeVar("K")

WRITE_FAILURES_MAX: Final = 3

EXAMINED_PER_EVENT_MAX: Final = 64
"""Chunks that one event examines: each takes a few microseconds of the event loop."""
AHEAD_SHARE: Final = 1 / 8
"""Part of the pool, from the cold end, that `on_evict` keeps free or written."""
AHEAD_STEPS: Final = 16
"""The cold end is examined again when 1/16 of that part has been used."""

_Account = tuple[int, bytes]
"""(realm_id, tenant)"""


@dataclass(slots=True)
class PendingWrite:
    """A queued chunk, and the ranks to write."""

    account: _Account
    ranks: list[int]
    num_bytes: int
    failures: int
    taken: int
    """`Writes._taken` at the last failure, or when it was queued first."""
    cause: WriteCause
    begun: bool = False
    """Some of it is written, so all of it will be."""


class _Running(NamedTuple):
    segment: HostSegment
    failures: int
    taken: int
    verifies: bool
    cause: WriteCause
    turn: int
    """The breaker's."""


class Writes(CorePart):
    """The queue of writes and the running writes. `admit` and `room` are those of `Engine`."""

    def __init__(
        self,
        parts: CoreParts,
        store: StoreView,
        admit: Callable[[int, bytes, int, int], bool],
        room: Callable[[int, int, int], bool],
    ) -> None:
        super().__init__(parts)
        self._store = store
        self.breaker = Breaker(parts.limits.breaker)
        self._policy = parts.limits.write
        self._queue_bytes_max = parts.limits.write_queue_bytes_max
        self._admit = admit
        self._room = room
        # To find the first of a dict takes time with the number of those that were removed.
        self.pending = OrderedDict[Chunk, PendingWrite]()
        self.pending_bytes = 0
        self.pending_ranks = 0
        """Queued ranks of all chunks. Counted, because a drain asks for them after every event."""
        self._outstanding: dict[_Account, tuple[int, int]] = {}
        """Bytes and objects that are queued or being written: they count for the tenant already."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Bytes and objects of the chunks that are being written, by realm."""
        self._sampling = Sampling(parts.limits.verify_writes)
        self._running: dict[int, _Running] = {}
        self._last_write_id = 0
        self._taken = 0
        """Writes that the store took."""
        self._filled_bytes = 0
        """Bytes that entered the host tier since its cold end was last examined."""
        self._examined: Iterator[Chunk] | None = None
        """What is left of the chunks that are examined over several events."""
        self._refused: set[Chunk] = set()
        """Chunks in the host tier that a limit of the store kept from it at their last try."""
        self._draining = False

    def running(self) -> Collection[HostSegment]:
        """Segments that are being written."""
        return [one.segment for one in self._running.values()]

    def completed(self, chunk: Chunk) -> None:
        """A chunk entered the host tier with all of its segments."""
        if self._policy is WritePolicy.THROUGH:
            self._enqueue(chunk, WriteCause.THROUGH)
        elif self._policy is WritePolicy.ON_EVICT:
            self._filled_bytes += chunk.realm.chunk_bytes
            if chunk.refused:
                # It goes first: the cold end may not be examined before.
                self._enqueue(chunk, WriteCause.ON_EVICT)
        elif self._policy is WritePolicy.ON_REUSE and chunk.uses:
            # A second request used it while it was stored.
            self._enqueue(chunk, WriteCause.ON_REUSE)
        self._release(chunk)

    def _release(self, chunk: Chunk) -> None:
        """Let a refused chunk go, unless some of it is still to be written."""
        if chunk not in self.pending and not any(one.writing for one in chunk.segments):
            self._host.orders.written(chunk)

    def restored(self, chunk: Chunk) -> None:
        """A chunk is complete again after a restart; the store may have it."""
        if self._policy is not WritePolicy.OFF:
            chunk.realm.backfill[chunk] = None
        self._release(chunk)

    def _unknown(self, chunk: Chunk) -> bool:
        """Whether the store may have a restored chunk, because its catalog was not read yet."""
        realm = chunk.realm
        return self._limits.store_reads and not realm.caught_up and chunk in realm.backfill

    def outstanding_in(self, realm_ids: Collection[int]) -> bool:
        """Whether a chunk of one of these realms is queued or being written."""
        return any(realm_id in realm_ids for realm_id, _ in self._outstanding)

    def used(self, chunk: Chunk) -> None:
        """A chunk of the host tier was used again."""
        if self._policy is WritePolicy.ON_REUSE and not self._draining and not self._unknown(chunk):
            self._enqueue(chunk, WriteCause.ON_REUSE)

    def removed(self, chunk: Chunk) -> None:
        """A chunk left the host tier: it cannot be written any more."""
        unknown = self._unknown(chunk)
        chunk.realm.backfill.pop(chunk, None)
        refused = chunk in self._refused
        self._refused.discard(chunk)
        if chunk in self.pending:
            self._drop(chunk)
        elif self._policy is WritePolicy.ON_EVICT and not (
            refused or unknown or chunk.retention.stays
        ):
            self._counters.writes_dropped += bool(self._missing(chunk))

    def drain(self, *, flush: bool) -> None:
        """The sidecar stops. With `flush`, host memory is lost: queue what the store lacks."""
        self._draining = True
        self._examined = None
        if flush and self._policy is not WritePolicy.OFF:
            # Nothing is dropped for the size of the queue; only time limits a drain. What the
            # queue dropped before is still in host memory, whatever the policy.
            self._queue_bytes_max = sys.maxsize
            unused = self._policy is not WritePolicy.ON_REUSE
            self._examined = iter(
                [
                    chunk
                    for realm in self._directory.realms.values()
                    for chunk in realm.chunks.values()
                    if unused or chunk.uses
                ]
            )

    @property
    def flushing(self) -> bool:
        """Whether a drain has yet to queue chunks that the store lacks."""
        return self._draining and self._examined is not None

    def flush(self) -> None:
        """Queue the rest at once: what is left to write is about to be counted."""
        for chunk in self._examined or ():
            self._enqueue(chunk, WriteCause.STOPPING)
        self._examined = None

    def _write_ahead(self) -> None:
        """Queue the chunks that are evicted next, so that the cold end is free or written.

        A slot that is needed cannot wait for a write, so databases clean their pages like this.
        When the sidecar stops, all are examined that it had then.
        """
        if self._examined is None:
            ahead_bytes = int(self._host.slots.size_bytes * AHEAD_SHARE)
            if self._draining or self._filled_bytes * AHEAD_STEPS < ahead_bytes:
                return
            self._filled_bytes = 0
            self._examined = self._cold_end(ahead_bytes)
        cause = WriteCause.STOPPING if self._draining else WriteCause.ON_EVICT
        left = EXAMINED_PER_EVENT_MAX
        for chunk in islice(self._examined, left):
            left -= 1
            # What is in memory alone is lost by a stop: better twice in the store than never.
            if self._draining or not self._unknown(chunk):
                self._enqueue(chunk, cause)
        if left:
            self._examined = None
        else:
            self._emit(Resume())

    def _cold_end(self, ahead_bytes: int) -> Iterator[Chunk]:
        """The chunks that are evicted next."""
        num_bytes = ahead_bytes - self._host.slots.free_bytes()
        yield from self._coldest(self._host.orders.victims(), num_bytes)
        for account in list(self._tenants):
            # A tenant at its limit evicts its own chunks, which may be young among all.
            limit = account.quota.host_bytes_max
            if limit is not None and account.order is not None:
                num_bytes = int(limit * AHEAD_SHARE) - limit + account.host_bytes
                if num_bytes > 0:
                    yield from self._coldest(self._host.orders.victims(account.order), num_bytes)

    def _coldest(self, chunks: Iterator[Chunk], num_bytes: int) -> Iterator[Chunk]:
        """This many bytes of them."""
        for chunk in chunks:
            if num_bytes <= 0 or self.pending_bytes >= self._queue_bytes_max:
                # A longer queue would drop what is colder.
                return
            num_bytes -= chunk.realm.chunk_bytes
            yield chunk

    def _missing(self, chunk: Chunk) -> list[int]:
        """Ranks whose segment the store lacks and nobody writes."""
        mask = chunk.realm.obtainable(chunk.key)
        return [
            segment.rank
            for segment in chunk.segments
            if not mask >> segment.rank & 1 and not segment.writing
        ]

    def _enqueue(self, chunk: Chunk, cause: WriteCause) -> None:
        """Queue a write for every rank of a complete chunk that the store lacks."""
        if chunk in self.pending or not chunk.loadable or chunk.retention.stays:
            return
        ranks = self._missing(chunk)
        if not ranks:
            return
        account = (chunk.realm.realm_id, chunk.tenant)
        ahead_bytes, ahead = self._outstanding.get(account, (0, 0))
        num_bytes = sum(chunk.segments[rank].slot_bytes for rank in ranks)
        if not self._admit(*account, ahead_bytes + num_bytes, ahead + len(ranks)):
            first = self._refuse(chunk)
            self._counters.writes_refused_quota += first
            self._tenants.counters(chunk.tenant).writes_refused += first
            return
        self._put(chunk, ranks, cause, failures=0)

    def _refuse(self, chunk: Chunk) -> bool:
        """Remember that a limit keeps a chunk from the store; False if it did so before."""
        before = len(self._refused)
        self._refused.add(chunk)
        return len(self._refused) > before

    def _put(self, chunk: Chunk, ranks: list[int], cause: WriteCause, *, failures: int) -> None:
        num_bytes = sum(chunk.segments[rank].slot_bytes for rank in ranks)
        account = (chunk.realm.realm_id, chunk.tenant)
        pending = PendingWrite(account, ranks, num_bytes, failures, self._taken, cause)
        self.pending[chunk] = pending
        self.pending_bytes += num_bytes
        self.pending_ranks += len(ranks)
        _add(self._outstanding, pending.account, num_bytes, len(ranks))
        while self.pending_bytes > self._queue_bytes_max and len(self.pending) > 1:
            self._drop(next(iter(self.pending)))

    def _take_out(self, chunk: Chunk) -> PendingWrite:
        pending = self.pending.pop(chunk)
        self.pending_bytes -= pending.num_bytes
        self.pending_ranks -= len(pending.ranks)
        _add(self._outstanding, pending.account, -pending.num_bytes, -len(pending.ranks))
        if pending.begun:
            _add(self._begun, pending.account[0], -pending.num_bytes, -len(pending.ranks))
        return pending

    def _drop(self, chunk: Chunk) -> None:
        self._take_out(chunk)
        self._counters.writes_dropped += 1
        self._release(chunk)

    def pump(self, now: float) -> None:
        """Start as many writes as may run."""
        if self._policy is WritePolicy.ON_EVICT or self._draining:
            self._write_ahead()
        left = EXAMINED_PER_EVENT_MAX
        while len(self._running) < self._limits.writes_inflight_max and self.breaker.passes(now):
            while not self.pending and left and (restored := self._next_restored()) is not None:
                left -= 1
                if self._policy is WritePolicy.THROUGH:
                    self._enqueue(restored, WriteCause.RESTORED)
                elif self._policy is WritePolicy.ON_EVICT:
                    self._filled_bytes += restored.realm.chunk_bytes
                elif restored.uses:
                    self._enqueue(restored, WriteCause.ON_REUSE)
            if not left:
                self._emit(Resume())
                break
            if not self.pending:
                break
            left -= 1
            chunk, pending = next(iter(self.pending.items()))
            if not pending.begun and not self._begin(pending):
                self._take_out(chunk)
                self._counters.writes_refused_bound += self._refuse(chunk)
                self._release(chunk)
                continue
            segment = chunk.segments[pending.ranks.pop(0)]
            pending.num_bytes -= segment.slot_bytes
            self.pending_bytes -= segment.slot_bytes
            self.pending_ranks -= 1
            if not pending.ranks:
                del self.pending[chunk]
            if not chunk.realm.obtainable(chunk.key) >> segment.rank & 1:
                self._start(segment, pending, self.breaker.begin(now))
            else:
                self._settle(segment)
                self._release(chunk)

    def _next_restored(self) -> Chunk | None:
        """Take the newest restored chunk of a realm. A drain leaves them to the next run."""
        if not self._draining:
            for realm in self._directory.realms.values():
                # Where nothing is read, neither is the catalog, and some is written again.
                if realm.backfill and (realm.caught_up or not self._limits.store_reads):
                    return realm.backfill.popitem()[0]
        return None

    def _begin(self, pending: PendingWrite) -> bool:
        """Whether its namespace has room for a chunk. Queued chunks do not count."""
        realm_id = pending.account[0]
        ahead_bytes, ahead = self._begun.get(realm_id, (0, 0))
        wanted = (ahead_bytes + pending.num_bytes, ahead + len(pending.ranks))
        if not self._room(realm_id, *wanted):
            return False
        pending.begun = True
        self._begun[realm_id] = wanted
        return True

    def _start(self, segment: HostSegment, pending: PendingWrite, turn: int) -> None:
        self._host.hold(segment)
        segment.writing = True
        self._last_write_id += 1
        verifies = self._sampling.selects(segment)
        self._running[self._last_write_id] = _Running(
            segment, pending.failures, pending.taken, verifies, pending.cause, turn
        )
        chunk = segment.chunk
        self._emit(
            Write(
                write_id=self._last_write_id,
                realm_id=chunk.realm.realm_id,
                rank=segment.rank,
                slot=segment.slot,
                key=chunk.key,
                num_blocks=segment.num_blocks,
                tenant=chunk.tenant,
                parent=chunk.parent,
                written_after=self._store.withdrawn_until(chunk.realm, chunk.key),
                verify=verifies,
                cause=pending.cause,
            )
        )

    def _settle(self, segment: HostSegment) -> None:
        """A segment is written, or need not be."""
        self._refused.discard(segment.chunk)
        realm_id, num_bytes = segment.chunk.realm.realm_id, segment.slot_bytes
        _add(self._outstanding, (realm_id, segment.chunk.tenant), -num_bytes, -1)
        _add(self._begun, realm_id, -num_bytes, -1)

    def ended(self, event: Written, now: float) -> None:
        """A write ended: the slot is not read any more."""
        segment, failures, taken, verifies, cause, turn = self._running.pop(event.write_id)
        self._settle(segment)
        segment.writing = False
        chunk = segment.chunk
        self._host.release(segment)
        if event.outcome is StoreOutcome.OK:
            self.breaker.succeeded()
            self._taken += 1
            segment.verified |= verifies
            self._counters.writes_unverified += not verifies
            self._store.written(segment, event)
        elif event.outcome is StoreOutcome.CORRUPT:
            self._counters.writes_failed += 1
            # Found before anything was sent, so it says nothing about the store.
            self.breaker.abandoned(now, turn)
            self._host.quarantine(chunk)
        else:
            self.breaker.failed(now, turn)
            expired = event.outcome is StoreOutcome.EXPIRED
            self._counters.writes_expired += expired
            self._counters.writes_failed += not expired
            failures += self._taken > taken
            if failures < WRITE_FAILURES_MAX and chunk.loadable:
                ranks = [segment.rank]
                if chunk in self.pending:
                    pending = self._take_out(chunk)
                    ranks = [*pending.ranks, segment.rank]
                    failures = max(pending.failures, failures)
                self._put(chunk, ranks, cause, failures=failures)
        self._release(chunk)


def _add(sums: dict[K, tuple[int, int]], of: K, num_bytes: int, objects: int) -> None:
    """Add to one of the sums; a sum of no objects is deleted."""
    had_bytes, had = sums.pop(of, (0, 0))
    if had + objects:
        sums[of] = (had_bytes + num_bytes, had + objects)
