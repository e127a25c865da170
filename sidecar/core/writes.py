"""Writes: which chunks of the host tier go to the store, in which order, and when.

Owns the write policy, the queue of chunks that wait, the running writes, and the breaker that
stops writing while the store fails. It does not own what the store holds (`store_view.py`), nor the
slots that are sent. Whether a tenant may have so much more in the store is asked of
`admit(realm_id, tenant, num_bytes, objects)`, and whether its namespace may of
`room(realm_id, num_bytes, objects)`.

Three policies say when a chunk that the store lacks is queued:

* `through`: as soon as all of its segments are in host memory.
* `on_reuse`: when it is wanted a second time (looked up, leased, or computed again by somebody
  who did not find it): most prompts never are, and only what is read again is worth a request.
* `on_evict`: while it still is among those that are evicted next. A slot that is needed cannot wait
  for a write, so the coldest part of the pool is written ahead, as databases clean their pages.

Invariants: only a running write holds its slot; a pending one is forgotten, and counted, when its
chunk leaves the host tier first. At most `inflight_max` writes run, and what waits is at most
`queue_bytes_max` (or one chunk): beyond it the oldest is dropped and counted. A write that the
store failed is tried again, behind the others, `WRITE_TRIES_MAX` times in all. A chunk for which
its namespace has no room when its turn comes is not written, and counted.

Chunks that came back after a restart (`restored.py`) are queued by `through` when nothing else is.
While draining, only what was stored before is still queued: neither what comes back nor what is
wanted again, for a write that begins then may be cut off, and would be told as a loss.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from sidecar.core.commands import StoreOutcome, Write, Written
from sidecar.core.parts import Sampling
from sidecar.core.restored import Backfill

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from sidecar.core.breaker import Breaker
    from sidecar.core.directory import Chunk, HostSegment
    from sidecar.core.parts import CoreParts
    from sidecar.core.store_view import StoreView

K = TypeVar("K")

WRITE_TRIES_MAX: Final = 3

AHEAD_SHARE: Final = 1 / 8
"""Part of the pool that `on_evict` keeps free or written, counted from the cold end."""

AHEAD_STEPS: Final = 16
"""The cold end is looked through again whenever so much of that part has been used up: 1/16."""


class WritePolicy(enum.StrEnum):
    """When a chunk is written."""

    OFF = "off"
    THROUGH = "through"
    ON_REUSE = "on_reuse"
    ON_EVICT = "on_evict"


_Account = tuple[int, bytes]
"""A realm and a tenant in it."""


class _Pending:
    """A chunk that waits, and what of it. `begun`: a part of it is written, so all of it is."""

    __slots__ = ("account", "begun", "num_bytes", "ranks", "tries")

    def __init__(self, account: _Account, ranks: list[int], num_bytes: int, tries: int) -> None:
        self.account = account
        self.begun = False
        self.ranks = ranks
        self.num_bytes = num_bytes
        self.tries = tries


class _Running(NamedTuple):
    """A write that was issued and has not ended."""

    segment: HostSegment
    tries: int
    verifies: bool
    account: _Account
    num_bytes: int


class Writes:
    """The queue of writes and the writes that run."""

    def __init__(
        self,
        parts: CoreParts,
        store: StoreView,
        breaker: Breaker,
        *,
        policy: WritePolicy,
        inflight_max: int,
        queue_bytes_max: int,
        verify: float,
        admit: Callable[[int, bytes, int, int], bool],
        room: Callable[[int, int, int], bool],
    ) -> None:
        self._host = parts.host
        self._store = store
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._emit = parts.emit
        self._breaker = breaker
        self._policy = policy
        self._inflight_max = inflight_max
        self._queue_bytes_max = queue_bytes_max
        self._admit = admit
        self._room = room
        self._pending: dict[Chunk, _Pending] = {}
        self._pending_bytes = 0
        self._outstanding: dict[_Account, tuple[int, int]] = {}
        """Bytes and objects that wait or are being written: they count as the tenant's already."""
        self._begun: dict[int, tuple[int, int]] = {}
        """Bytes and objects of each realm's chunks that are being written, all ranks of them."""
        self._sampling = Sampling(verify)
        self._running: dict[int, _Running] = {}
        self._last_write_id = 0
        self._filled_bytes = 0
        """What came into the host tier since its cold end was looked through."""
        self._draining = False
        self._flushing = False
        self._offers = Backfill()

    # --- what is there to tell ---------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Segments that wait to be written."""
        return sum(len(one.ranks) for one in self._pending.values())

    @property
    def pending_chunks(self) -> Collection[Chunk]:
        """Chunks of which something waits to be written."""
        return self._pending.keys()

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._pending_bytes

    def running(self) -> Iterator[HostSegment]:
        """Segments that are being written."""
        return (one.segment for one in self._running.values())

    @property
    def num_running(self) -> int:
        """How many segments are being written."""
        return len(self._running)

    # --- the policy --------------------------------------------------------------------------

    def completed(self, chunk: Chunk) -> None:
        """A chunk came into the host tier, with all of its segments."""
        if self._policy is WritePolicy.THROUGH:
            self._enqueue(chunk)
        elif self._policy is WritePolicy.ON_EVICT:
            self._filled_bytes += sum(map(self._host.slot_bytes, chunk.segments))

    def restored(self, chunk: Chunk) -> None:
        """A chunk came back after a restart, with all of its segments; the store may have it."""
        if self._draining:
            # It is written by whoever finds it next, as is what was still offered.
            return
        if self._policy is WritePolicy.THROUGH:
            self._offers.add(chunk)
        else:
            self.completed(chunk)

    def caught_up(self, realm_id: int) -> None:
        """What the store holds of a realm is known."""
        self._offers.caught_up(realm_id)

    def forget_realm(self, realm_id: int) -> None:
        """A realm without chunks is forgotten."""
        self._offers.forget_realm(realm_id)

    def waits(self, realm_ids: Collection[int]) -> bool:
        """Whether a chunk of one of these realms waits to be written."""
        return any(account[0] in realm_ids for account in self._outstanding)

    def wanted(self, chunk: Chunk) -> None:
        """A chunk of the host tier was asked for again."""
        if self._policy is WritePolicy.ON_REUSE and chunk.loadable and not self._draining:
            self._enqueue(chunk)

    def removed(self, chunk: Chunk) -> None:
        """A chunk left the host tier: it cannot be written any more."""
        self._offers.forget(chunk)
        if chunk in self._pending:
            self._drop(chunk)
        elif self._policy is WritePolicy.ON_EVICT and not chunk.stays and self._missing(chunk):
            self._counters.writes_dropped += 1

    def draining(self, *, flush: bool) -> None:
        """The sidecar ends; with `flush`, what it holds does too: queue what the store lacks."""
        self._draining = True
        self._offers.withdraw()
        if flush and self._policy is WritePolicy.ON_EVICT:
            # Only what is left when the time is over is lost, so nothing is dropped for bytes.
            self._flushing = True
            for chunk in self._host.coldest():
                self._enqueue(chunk, bounded=False)

    def _write_ahead(self) -> None:
        """Queue what is evicted next, so that the cold end of the pool is free or written."""
        if self._policy is not WritePolicy.ON_EVICT:
            return
        ahead_bytes = int(self._host.size_bytes * AHEAD_SHARE)
        if self._filled_bytes * AHEAD_STEPS < ahead_bytes:
            return
        self._filled_bytes = 0
        self._write_coldest(self._host.coldest(), ahead_bytes - self._host.free_bytes())
        for account in self._tenants:
            # One at its limit evicts its own, which may be young among all.
            limit = account.quota.host_bytes_max
            if limit is not None and account.order is not None:
                cold = self._host.coldest(account.order)
                self._write_coldest(cold, int(limit * AHEAD_SHARE) - limit + account.host_bytes)

    def _write_coldest(self, coldest: Iterator[Chunk], num_bytes: int) -> None:
        """See to it that so many bytes from the cold end on are written."""
        for chunk in coldest:
            if num_bytes <= 0 or self._pending_bytes >= self._queue_bytes_max:
                # More in the queue would only push out what is colder.
                break
            # Of ranks that have not attached since a restart nothing is known.
            num_bytes -= self._host.chunk_bytes(chunk)
            self._enqueue(chunk)

    def _missing(self, chunk: Chunk) -> list[int]:
        """Ranks of which the store lacks the segment and nobody sends it."""
        mask = chunk.realm.obtainable(chunk.key)
        return [
            segment.rank
            for segment in chunk.segments
            if not mask >> segment.rank & 1 and not segment.writing
        ]

    def _enqueue(self, chunk: Chunk, *, bounded: bool = True) -> None:
        """Queue a write for every rank of a complete chunk that the store lacks."""
        if chunk in self._pending or not chunk.loadable or chunk.stays:
            return
        ranks = self._missing(chunk)
        if not ranks:
            return
        num_bytes = self._bytes(chunk, ranks)
        account = (chunk.realm.realm_id, chunk.tenant)
        ahead_bytes, ahead = self._outstanding.get(account, (0, 0))
        if not self._admit(*account, ahead_bytes + num_bytes, ahead + len(ranks)):
            self._counters.writes_refused_quota += 1
            self._tenants.counters(chunk.tenant).writes_refused += 1
            return
        self._put(chunk, ranks, tries=0)
        if bounded:
            self._bound()

    def _bytes(self, chunk: Chunk, ranks: list[int]) -> int:
        return sum(self._host.slot_bytes(chunk.segments[rank]) for rank in ranks)

    def _put(self, chunk: Chunk, ranks: list[int], *, tries: int) -> None:
        num_bytes = self._bytes(chunk, ranks)
        account = (chunk.realm.realm_id, chunk.tenant)
        self._pending[chunk] = _Pending(account, ranks, num_bytes, tries)
        self._count(account, num_bytes, len(ranks))
        self._pending_bytes += num_bytes

    def _count(self, account: _Account, num_bytes: int, objects: int) -> None:
        _add(self._outstanding, account, num_bytes, objects)

    def _bound(self) -> None:
        while self._pending_bytes > self._queue_bytes_max and len(self._pending) > 1:
            self._drop(next(iter(self._pending)))

    def _take_out(self, chunk: Chunk) -> _Pending:
        one = self._pending.pop(chunk)
        self._pending_bytes -= one.num_bytes
        self._count(one.account, -one.num_bytes, -len(one.ranks))
        if one.begun:
            _add(self._begun, one.account[0], -one.num_bytes, -len(one.ranks))
        return one

    def _drop(self, chunk: Chunk) -> None:
        self._take_out(chunk)
        self._counters.writes_dropped += 1

    # --- writing -----------------------------------------------------------------------------

    def pump(self, now: float) -> None:
        """Start as many writes as may run."""
        self._write_ahead()
        while len(self._running) < self._inflight_max and self._breaker.passes(now):
            self._take_offered()
            if not self._pending:
                break
            chunk, one = next(iter(self._pending.items()))
            if not one.begun and not self._begin(one):
                self._take_out(chunk)
                self._counters.writes_refused_bound += 1
                continue
            rank = one.ranks.pop(0)
            num_bytes = self._bytes(chunk, [rank])
            one.num_bytes -= num_bytes
            self._pending_bytes -= num_bytes
            if not one.ranks:
                del self._pending[chunk]
            if not chunk.realm.obtainable(chunk.key) >> rank & 1:
                self._breaker.begin(now)
                self._start(chunk.segments[rank], one.tries + 1, one.account, num_bytes)
            else:
                self._count(one.account, -num_bytes, -1)
                _add(self._begun, one.account[0], -num_bytes, -1)

    def _begin(self, one: _Pending) -> bool:
        """Whether its namespace has room for a chunk. What only waits may never be written."""
        realm_id = one.account[0]
        ahead_bytes, ahead = self._begun.get(realm_id, (0, 0))
        if not self._room(realm_id, ahead_bytes + one.num_bytes, ahead + len(one.ranks)):
            return False
        one.begun = True
        _add(self._begun, realm_id, one.num_bytes, len(one.ranks))
        return True

    def _take_offered(self) -> None:
        """Queue one of those that came back, if nothing else waits."""
        while not self._pending:
            chunk = self._offers.take()
            if chunk is None:
                return
            self._enqueue(chunk)

    def _start(self, segment: HostSegment, tries: int, account: _Account, num_bytes: int) -> None:
        self._host.hold(segment)
        segment.writing = True
        self._last_write_id += 1
        verifies = self._sampling.chooses(segment)
        self._running[self._last_write_id] = _Running(segment, tries, verifies, account, num_bytes)
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
                written_after=self._store.gone_until(chunk.realm, chunk.key),
                verify=verifies,
            )
        )

    def ended(self, event: Written, now: float) -> None:
        """A write ended: the slot is no longer read."""
        segment, tries, verifies, account, num_bytes = self._running.pop(event.write_id)
        self._count(account, -num_bytes, -1)
        _add(self._begun, account[0], -num_bytes, -1)
        segment.writing = False
        chunk = segment.chunk
        self._host.release(segment)
        if event.outcome is StoreOutcome.OK:
            self._breaker.succeeded()
            segment.verified |= verifies
            self._counters.writes_unverified += not verifies
            self._store.written(segment, event)
        elif event.outcome is StoreOutcome.CORRUPT:
            self._counters.writes_failed += 1
            # Found before anything was sent: it says nothing of the store.
            self._breaker.abandoned(now)
            self._host.quarantine(chunk)
        else:
            self._breaker.failed(now)
            expired = event.outcome is StoreOutcome.EXPIRED
            self._counters.writes_expired += expired
            self._counters.writes_failed += not expired
            if tries < WRITE_TRIES_MAX and chunk.loadable:
                self._again(segment, tries)

    def _again(self, segment: HostSegment, tries: int) -> None:
        chunk = segment.chunk
        ranks = [segment.rank]
        if chunk in self._pending:
            one = self._take_out(chunk)
            ranks, tries = [*one.ranks, segment.rank], max(one.tries, tries)
        self._put(chunk, ranks, tries=tries)
        if not self._flushing:
            self._bound()


def _add(sums: dict[K, tuple[int, int]], of: K, num_bytes: int, objects: int) -> None:
    """Add to one of the sums; one that comes to no objects is dropped."""
    had_bytes, had = sums.pop(of, (0, 0))
    if had + objects:
        sums[of] = (had_bytes + num_bytes, had + objects)
