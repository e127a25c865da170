"""What the store holds.

Owns what the catalog says, and the bounded memory of withdrawn segments. It does not own reads
(`lookups.py`) or writes (`writes.py`), which tell it what they found and did.

Invariants: a segment that was withdrawn, or found missing or corrupt here, is not offered again by
what was written before that, in whatever order the catalog's lines come; only by a later writing,
or when the memory is full and it is the oldest. Clocks order lines of one chunk only: one that is
off costs a miss, or a read that finds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sidecar.commands import (
    Command,
    Counters,
    Listed,
    Quarantine,
    Withdraw,
    Written,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.directory import Directory, Realm, Segment
    from sidecar.tenants import Tenants


class StoreTier:
    """The engine's view of the object store."""

    def __init__(
        self,
        directory: Directory,
        counters: Counters,
        tenants: Tenants,
        emit: Callable[[Command], None],
        *,
        quarantine_keys_max: int,
        announces: bool,
    ) -> None:
        self._directory = directory
        self._counters = counters
        self._tenants = tenants
        self._emit = emit
        self._quarantine_keys_max = quarantine_keys_max
        self._announces = announces
        # (realm_id, key) -> ranks, and the newest writing that does not count for them.
        self._gone: dict[tuple[int, bytes], tuple[int, int]] = {}

    def gone_until(self, realm: Realm, key: bytes) -> int:
        """The newest writing of this chunk that does not count: a new one must be later."""
        return self._gone.get((realm.realm_id, key), (0, 0))[1]

    def written(self, segment: Segment, event: Written) -> None:
        """A segment was written, well."""
        chunk = segment.chunk
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
        if mask & realm.full_mask == realm.full_mask:
            self._counters.chunks_written += 1

    def unusable(self, realm: Realm, key: bytes, bit: int) -> int:
        """A read found an object that is no use here; returns when it was written, if known."""
        mask, time = 1 << bit, realm.stored.time(key)
        self._directory.set_stored(realm, key, realm.stored.get(key) & ~mask, time)
        self._remember(realm, key, mask, time)
        return time

    def lost(self, realm: Realm, key: bytes, bit: int) -> None:
        """A read found no object."""
        time = self.unusable(realm, key, bit)
        # Where nothing is known of it any more, somebody else has said so already.
        if self._announces and time:
            self._emit(Withdraw(realm.realm_id, bit, key, time))

    def quarantine(self, realm: Realm, key: bytes, bit: int) -> None:
        """A read found an object that is not the segment it claims to be."""
        self.lost(realm, key, bit)
        self._counters.quarantined_store += 1
        self._emit(Quarantine(realm.realm_id, bit, key))

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
        realm.cuts.learn_foreign(event.foreign)
        known = realm.cuts.known_mask
        stored, gone, set_stored = realm.stored, self._gone, self._directory.set_stored
        for key, named, written_at, withdrawn in event.rows:
            mask = named & known
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
