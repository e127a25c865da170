"""What the store holds and what is on its way there.

Owns the queue of writes, the running writes, the answers to listings, and the bounded memory of
quarantined objects. It does not own reads (`lookups.py`), nor the slots that it sends. Whether a
tenant may have so many bytes more in the store is asked of `admit(tenant, num_bytes)`.

Invariants: only a running write holds its slot; a pending one is forgotten, and counted, when its
chunk leaves the host tier first. At most `writes_inflight_max` writes run. A quarantined object
is not offered by a listing again until this sidecar wrote it anew (or the memory is full and it
is the oldest): a listing may be older than the quarantine, and best effort may have failed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.commands import Command, Counters, Listed, Quarantine, StoreOutcome, Write, Written

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
        self._quarantined: dict[tuple[int, bytes], int] = {}

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
        mask = chunk.realm.stored.get(chunk.key, 0)
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
        realm = chunk.realm
        self._heal(realm, chunk.key, segment.rank)
        realm.written.add(chunk.key)
        mask = realm.stored.get(chunk.key, 0) | 1 << segment.rank
        self._directory.set_stored(realm, chunk.key, mask)
        if mask == realm.full_mask:
            self._counters.chunks_written += 1

    def lost(self, realm: Realm, key: bytes, rank: int) -> None:
        """A read found no object."""
        self._directory.set_stored(realm, key, realm.stored.get(key, 0) & ~(1 << rank))

    def quarantine(self, realm: Realm, key: bytes, rank: int) -> None:
        """A read found an object that is not the segment it claims to be."""
        self.lost(realm, key, rank)
        self._counters.quarantined_store += 1
        self._emit(Quarantine(realm.realm_id, rank, key))
        name = (realm.realm_id, key)
        # Taken out first, so that it is the newest again.
        self._quarantined[name] = self._quarantined.pop(name, 0) | 1 << rank
        if len(self._quarantined) > self._quarantine_keys_max:
            del self._quarantined[next(iter(self._quarantined))]

    def _heal(self, realm: Realm, key: bytes, rank: int) -> None:
        name = (realm.realm_id, key)
        left = self._quarantined.get(name, 0) & ~(1 << rank)
        if left:
            self._quarantined[name] = left
        else:
            self._quarantined.pop(name, None)

    def listed(self, event: Listed) -> None:
        """Take over what a listing says, whole or in addition to what is known."""
        realm = self._directory.realms.get(event.realm_id)
        if realm is None:
            self._counters.stale_messages += 1
            return
        held = self._take_over(realm, event)
        if not event.complete:
            return
        # A listing holds what was held before, as a rule; then there is nothing to look for.
        if held < len(realm.stored):
            listed, written = event.ranks_by_key, realm.written
            for key in [key for key in realm.stored if key not in listed and key not in written]:
                self._directory.set_stored(realm, key, 0)
        # What was written before this listing came is in the next one.
        realm.written.clear()

    def _take_over(self, realm: Realm, event: Listed) -> int:
        """Set what the listing names; returns how many of its keys the store then holds.

        A million keys come by every few seconds and few of them are news, so this loop does for
        each key only what may change something.
        """
        masks: dict[frozenset[int], int] = {}
        stored, written, quarantined = realm.stored, realm.written, self._quarantined
        held = 0
        for key, ranks in event.ranks_by_key.items():
            mask = masks.get(ranks)
            if mask is None:
                # A rank outside the world is another topology's object: not ours.
                mask = sum(1 << rank for rank in ranks if 0 <= rank < realm.world_size)
                masks[ranks] = mask
            if quarantined:
                mask &= ~quarantined.get((realm.realm_id, key), 0)
            before = stored.get(key, 0)
            if not event.complete or key in written:
                mask |= before
            if mask != before:
                self._directory.set_stored(realm, key, mask)
            held += mask != 0
        return held
