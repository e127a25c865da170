"""What the store holds.

Owns what the catalog says, and the bounded memory of withdrawn segments. It does not own reads
(`reads.py`) or writes (`writes.py`), which tell it what they found and did.

Invariants: a segment that was withdrawn, or found missing or corrupt here, is not offered again by
what was written before that, in whatever order the catalog's lines come; only by a later writing,
or when the memory is full and it is the oldest. Clocks order lines of one chunk only: one that is
off costs a miss, or a read that finds nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sidecar.core.commands import (
    Listed,
    Quarantine,
    Withdraw,
    Written,
)
from sidecar.core.listed_rows import ListedRow, ListedRows, offers_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from sidecar.core.directory import HostSegment, Realm
    from sidecar.core.listed_rows import Keys
    from sidecar.core.parts import CoreParts


class StoreView:
    """The engine's view of the object store."""

    def __init__(
        self,
        parts: CoreParts,
        came: Callable[[Realm, Keys], None],
        *,
        quarantine_keys_max: int,
        announces: bool,
    ) -> None:
        self._directory = parts.directory
        self._counters = parts.counters
        self._tenants = parts.tenants
        self._emit = parts.emit
        # Told of chunks that have no object here, and that can be read from the store now.
        self._came = came
        self._quarantine_keys_max = quarantine_keys_max
        self._announces = announces
        # (realm_id, key) -> ranks, and the newest writing that does not count for them.
        self._gone: dict[tuple[int, bytes], tuple[int, int]] = {}

    @property
    def quarantined_keys(self) -> int:
        """Keys of which some writing does not count."""
        return len(self._gone)

    def gone_until(self, realm: Realm, key: bytes) -> int:
        """The newest writing of this chunk that does not count: a new one must be later."""
        return self._gone.get((realm.realm_id, key), (0, 0))[1]

    def written(self, segment: HostSegment, event: Written) -> None:
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
        held, time = realm.stored.held(key)
        mask = held | 1 << segment.rank
        self._directory.set_stored(realm, key, mask, max(time, event.written_at))
        if mask & realm.full_mask == realm.full_mask:
            self._counters.chunks_written += 1

    def unusable(self, realm: Realm, key: bytes, bit: int) -> int:
        """A read found an object that is no use here; returns when it was written, if known."""
        mask, (held, time) = 1 << bit, realm.stored.held(key)
        self._directory.set_stored(realm, key, held & ~mask, time)
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

    def forget_realm(self, realm_id: int) -> None:
        """A realm is forgotten: what was withdrawn in it is learnt from the catalog again."""
        for name in [name for name in self._gone if name[0] == realm_id]:
            del self._gone[name]

    def _remember(self, realm: Realm, key: bytes, mask: int, time: int) -> None:
        name = (realm.realm_id, key)
        # Taken out first, so that it is the newest again.
        known_mask, known_time = self._gone.pop(name, (0, 0))
        self._gone[name] = (known_mask | mask, max(known_time, time))
        if len(self._gone) > self._quarantine_keys_max:
            del self._gone[next(iter(self._gone))]

    def _doubt(self, realm: Realm, key: bytes, mask: int) -> None:
        """Somebody withdrew segments: it may be that they found what was written here damaged.

        What is still in host memory is compared at its next use, or the damage would be written
        again, to be found again.
        """
        chunk = realm.chunks.get(key)
        if chunk is not None:
            for segment in chunk.segments:
                segment.verified &= not mask >> segment.rank & 1

    def _heal(self, realm: Realm, key: bytes, rank: int) -> None:
        name = (realm.realm_id, key)
        mask, time = self._gone.get(name, (0, 0))
        if mask & ~(1 << rank):
            self._gone[name] = (mask & ~(1 << rank), time)
        else:
            self._gone.pop(name, None)

    def listed(self, event: Listed) -> None:
        """Take over lines of the catalog.

        Millions come by when a sidecar starts, so those of chunks of which nothing else is known
        here are taken over by columns. They are of other chunks than the rest, so it does not
        matter which come first.
        """
        realm = self._directory.realms.get(event.realm_id)
        if realm is None:
            self._counters.stale_messages += 1
            return
        realm.segment_sources.learn_foreign(event.foreign)
        rows = event.rows.within(realm.segment_sources.known_mask)
        apart = self._apart(realm, rows)
        for row in rows.take(apart):
            self._listed_one(realm, row)
        rest = rows.take(~apart)
        if not len(rest):
            return
        offers = offers_of(rest)
        came = self._directory.offered(realm, offers)
        if came.any():
            self._came(realm, offers.keys[came])

    def _apart(self, realm: Realm, rows: ListedRows) -> npt.NDArray[np.bool_]:
        """Lines of chunks that are withdrawn, were so before, or have an object; shape [n]."""
        chunks, gone, realm_id = realm.chunks, self._gone, realm.realm_id
        withdrawn = set(rows.take(rows.withdrawn).key_list())
        if not (chunks or gone or withdrawn):
            return np.zeros(len(rows), dtype=np.bool_)
        found = [
            key in chunks or (realm_id, key) in gone or key in withdrawn for key in rows.key_list()
        ]
        return np.array(found, dtype=np.bool_)

    def _listed_one(self, realm: Realm, row: ListedRow) -> None:
        key, mask, written_at, withdrawn = row
        held, time = realm.stored.held(key)
        if withdrawn:
            self._remember(realm, key, mask, written_at)
            self._doubt(realm, key, mask)
            if held & mask and time <= written_at:
                self._directory.set_stored(realm, key, held & ~mask, time)
            return
        lost, until = self._gone.get((realm.realm_id, key), (0, 0))
        if written_at <= until:
            mask &= ~lost
        if mask & ~held or (mask and written_at > time):
            self._directory.set_stored(realm, key, held | mask, max(time, written_at))
