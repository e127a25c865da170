"""What the store holds and what is on its way there.

Owns the queue of writes, the running writes, what the catalog says, and the bounded memory of
withdrawn segments. It does not own reads (`lookups.py`), nor the slots that it sends. Whether a
tenant may have so many bytes more in the store is asked of `admit(tenant, num_bytes)`.

Invariants: only a running write holds its slot; a pending one is forgotten, and counted, when its
chunk leaves the host tier first. At most `writes_inflight_max` writes run. A segment that
was withdrawn, or found missing or corrupt here, is not offered again by what was written before
that, in whatever order the catalog's lines come; only by a later writing, or when the memory is
full and it is the oldest. Clocks order lines of one chunk only: one that is off costs a miss, or a
read that finds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.commands import (
    Command,
    Counters,
    Listed,
    Quarantine,
    StoreOutcome,
    Withdraw,
    Write,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sidecar.directory import Chunk, Directory, Realm, Segment
    from sidecar.host import HostTier
    from sidecar.tenants import Tenants


class StoreTier:
    """The engine's view of the object store."""

    def __init__(
        self,
        directory: Directory,
        host: HostTier,
        counters: Counters,
        tenants: Tenants,
        emit: Callable[[Command], None],
        *,
        writes_inflight_max: int,
        write_queue_chunks_max: int,
        quarantine_keys_max: int,
        announces: bool,
        admit: Callable[[bytes, int], bool],
    ) -> None:
        self._directory = directory
        self._host = host
        self._counters = counters
        self._tenants = tenants
        self._admit = admit
        self._emit = emit
        self._writes_inflight_max = writes_inflight_max
        self._write_queue_chunks_max = write_queue_chunks_max
        self._quarantine_keys_max = quarantine_keys_max
        self._pending: dict[Chunk, list[int]] = {}
        self._running: dict[int, Segment] = {}
        self._last_write_id = 0
        self._announces = announces
        # (realm_id, key) -> ranks, and the newest writing that does not count for them.
        self._gone: dict[tuple[int, bytes], tuple[int, int]] = {}

    @property
    def writes_pending(self) -> int:
        """Segments that wait to be written."""
        return sum(len(ranks) for ranks in self._pending.values())

    @property
    def writes_running(self) -> int:
        """Segments that are being written."""
        return len(self._running)

    def running(self) -> Iterator[Segment]:
        """Segments that are being written."""
        return iter(self._running.values())

    def enqueue(self, chunk: Chunk) -> None:
        """Queue a write for every rank of a complete chunk that the store lacks."""
        mask = chunk.realm.stored.get(chunk.key)
        ranks = [
            segment.rank
            for segment in chunk.segments
            if not mask >> segment.rank & 1 and not segment.writing
        ]
        if not ranks:
            return
        num_bytes = sum(self._host.slot_bytes(chunk.segments[rank]) for rank in ranks)
        if not self._admit(chunk.tenant, num_bytes):
            self._counters.writes_refused_quota += 1
            self._tenants.counters(chunk.tenant).writes_refused += 1
            return
        self._pending[chunk] = ranks
        while len(self._pending) > self._write_queue_chunks_max:
            self.forget(next(iter(self._pending)))

    def forget(self, chunk: Chunk) -> None:
        """Drop the writes of a chunk that did not start yet."""
        if self._pending.pop(chunk, None) is not None:
            self._counters.writes_dropped += 1

    def pump(self) -> None:
        """Start as many writes as may run."""
        while self._pending and len(self._running) < self._writes_inflight_max:
            chunk, ranks = next(iter(self._pending.items()))
            rank = ranks.pop(0)
            if not ranks:
                del self._pending[chunk]
            if not chunk.realm.stored_rank(chunk.key, rank):
                self._start(chunk.segments[rank])

    def _start(self, segment: Segment) -> None:
        self._host.hold(segment)
        segment.writing = True
        self._last_write_id += 1
        self._running[self._last_write_id] = segment
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
                written_after=self._gone.get((chunk.realm.realm_id, chunk.key), (0, 0))[1],
            )
        )

    def ended(self, event: Written) -> None:
        """A write ended: the slot is no longer read."""
        segment = self._running.pop(event.write_id)
        segment.writing = False
        chunk = segment.chunk
        self._host.release(segment)
        if event.outcome is not StoreOutcome.OK:
            expired = event.outcome is StoreOutcome.EXPIRED
            self._counters.writes_expired += expired
            self._counters.writes_failed += not expired
            if event.outcome is StoreOutcome.CORRUPT:
                self._host.quarantine(chunk)
            return
        self._counters.bytes_written += event.num_bytes
        self._tenants.wrote(chunk.tenant, event.num_bytes)
        if chunk.detached:
            # The chunk was found corrupt while it was being sent. A listing may offer what was
            # sent, and reading verifies it; this sidecar does not vouch for it.
            return
        realm, key = chunk.realm, chunk.key
        self._heal(realm, key, segment.rank)
        mask = realm.stored.get(key) | 1 << segment.rank
        self._directory.set_stored(realm, key, mask, max(realm.stored.time(key), event.written_at))
        if mask == realm.full_mask:
            self._counters.chunks_written += 1

    def lost(self, realm: Realm, key: bytes, rank: int) -> None:
        """A read found no object."""
        bit, time = 1 << rank, realm.stored.time(key)
        self._directory.set_stored(realm, key, realm.stored.get(key) & ~bit, time)
        self._remember(realm, key, bit, time)
        # Where nothing is known of it any more, somebody else has said so already.
        if self._announces and time:
            self._emit(Withdraw(realm.realm_id, rank, key, time))

    def quarantine(self, realm: Realm, key: bytes, rank: int) -> None:
        """A read found an object that is not the segment it claims to be."""
        self.lost(realm, key, rank)
        self._counters.quarantined_store += 1
        self._emit(Quarantine(realm.realm_id, rank, key))

    def _remember(self, realm: Realm, key: bytes, mask: int, time: int) -> None:
        name = (realm.realm_id, key)
        # Taken out first, so that it is the newest again.
        known_mask, known_time = self._gone.pop(name, (0, 0))
        self._gone[name] = (known_mask | mask, max(known_time, time))
        if len(self._gone) > self._quarantine_keys_max:
            del self._gone[next(iter(self._gone))]

    def _heal(self, realm: Realm, key: bytes, rank: int) -> None:
        name = (realm.realm_id, key)
        mask, time = self._gone.get(name, (0, 0))
        if mask & ~(1 << rank):
            self._gone[name] = (mask & ~(1 << rank), time)
        else:
            self._gone.pop(name, None)

    def listed(self, event: Listed) -> None:
        """Take over lines of the catalog.

        Millions come by when a sidecar starts, so this loop does for each only what it must.
        """
        realm = self._directory.realms.get(event.realm_id)
        if realm is None:
            self._counters.stale_messages += 1
            return
        stored, gone, set_stored = realm.stored, self._gone, self._directory.set_stored
        for key, named, written_at, withdrawn in event.rows:
            # A rank outside the world is another topology's object: not ours.
            mask = named & realm.full_mask
            held, time = stored.get(key), stored.time(key)
            if withdrawn:
                self._remember(realm, key, mask, written_at)
                if held & mask and time <= written_at:
                    set_stored(realm, key, held & ~mask, time)
                continue
            if gone:
                lost, until = gone.get((realm.realm_id, key), (0, 0))
                if written_at <= until:
                    mask &= ~lost
            if mask & ~held or (mask and written_at > time):
                set_stored(realm, key, held | mask, max(time, written_at))
