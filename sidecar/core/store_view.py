"""The engine's view of the object store.

Owns how rows of the catalog are applied, and the bounded list of withdrawn segments. Does not own
reads (`reads.py`) or writes (`writes.py`), which report their results here.

Invariants: a segment that was withdrawn, or found missing or corrupt here, is offered again only by
a later write, or when it is the oldest of a full list; the order of the catalog's rows does not
matter. Clocks only order rows of one chunk: a wrong clock costs a miss or a read without result.
"""

from collections import OrderedDict
from itertools import repeat

import numpy as np
import numpy.typing as npt

from sidecar.core.commands import Listed, Quarantine, Withdraw, Written
from sidecar.core.directory import HostSegment, Realm
from sidecar.core.outbox import CorePart, CoreParts, WritePolicy
from sidecar.core.stored_table import Keys, ListedRow, ListedRows, key_list, merged_by_key, tags_of


class StoreView(CorePart):
    """Applies what the catalog, reads and writes say of the store."""

    def __init__(self, parts: CoreParts) -> None:
        super().__init__(parts)
        self._announces = parts.limits.write is not WritePolicy.OFF
        self.withdrawn: OrderedDict[tuple[int, bytes], tuple[int, int]] = OrderedDict()
        """(realm_id, key) -> ranks, and the time up to which their writes do not count.

        An `OrderedDict` for the same reason as in `GoneKeys`.
        """

    def withdrawn_until(self, realm: Realm, key: bytes) -> int:
        """The newest write of this chunk that does not count: a new one must be later."""
        return self.withdrawn.get((realm.realm_id, key), (0, 0))[1]

    def written(self, segment: HostSegment, event: Written) -> None:
        """Note a successful write."""
        chunk = segment.chunk
        self._counters.bytes_written += event.num_bytes
        self._tenants.counters(chunk.tenant).bytes_written += event.num_bytes
        if chunk.detached:
            # It was found corrupt during the write. The catalog may offer the object, and readers
            # verify it; this sidecar does not vouch for it.
            return
        realm, key = chunk.realm, chunk.key
        name, bit = (realm.realm_id, key), 1 << segment.rank
        ranks, until = self.withdrawn.pop(name, (0, 0))
        if ranks & ~bit:
            self.withdrawn[name] = (ranks & ~bit, until)
        held, time = realm.stored.entry(key)
        mask = held | bit
        self._directory.set_stored(realm, key, mask, max(time, event.written_at))
        if mask & realm.full_mask == realm.full_mask:
            self._counters.chunks_written += 1

    def unusable(self, realm: Realm, key: bytes, bit: int) -> int:
        """Note an object that cannot be used here; returns when it was written, if known."""
        mask, (held, time) = 1 << bit, realm.stored.entry(key)
        self._directory.set_stored(realm, key, held & ~mask, time)
        self._withdraw(realm, key, mask, time)
        return time

    def missing(self, realm: Realm, key: bytes, bit: int) -> None:
        """Note that a read found no object."""
        time = self.unusable(realm, key, bit)
        # Without a time the entry is gone: another sidecar has withdrawn it already.
        if self._announces and time:
            self._emit(Withdraw(realm.realm_id, bit, key, time))

    def quarantine(self, realm: Realm, key: bytes, bit: int) -> None:
        """Note an object that is not the segment that its name says."""
        self.missing(realm, key, bit)
        self._counters.quarantined_store += 1
        self._emit(Quarantine(realm.realm_id, bit, key))

    def forget_realm(self, realm_id: int) -> None:
        """Forget a realm; the catalog says again what was withdrawn in it."""
        for name in [name for name in self.withdrawn if name[0] == realm_id]:
            del self.withdrawn[name]

    def _withdraw(self, realm: Realm, key: bytes, mask: int, time: int) -> None:
        name = (realm.realm_id, key)
        # Removed first, so that it becomes the newest.
        known_mask, known_time = self.withdrawn.pop(name, (0, 0))
        self.withdrawn[name] = (known_mask | mask, max(known_time, time))
        if len(self.withdrawn) > self._limits.quarantine_keys_max:
            self.withdrawn.popitem(last=False)

    def listed(self, event: Listed) -> Keys | None:
        """Apply rows of the catalog.

        After a start there are millions, so rows of chunks that are in no other table here are
        applied by columns. These are other chunks than the rest, so their order does not matter.

        Returns the keys without a `Chunk` that became readable from the store.
        """
        realm = self._directory.realms.get(event.realm_id)
        if realm is None:
            self._counters.stale_messages += 1
            return None
        realm.segment_sources.register_foreign(event.foreign)
        known_mask = realm.segment_sources.known_mask
        realm.stored.widen(known_mask.bit_length())
        rows = event.rows.within(known_mask)
        known = self._known(realm, rows)
        for row in rows.take(known):
            self._apply(realm, row)
        rest = rows.take(~known)
        if not len(rest):
            return None
        columns = merged_by_key(rest, realm.stored.width)
        readable = self._directory.add_stored(realm, columns)
        return columns.keys[readable] if readable.any() else None

    def _known(self, realm: Realm, rows: ListedRows) -> npt.NDArray[np.bool_]:
        """Rows of chunks that are withdrawn (and perhaps a few more), or have a `Chunk`; [n]."""
        words, _ = tags_of(rows.keys)
        # Half a tag is enough: a row of another chunk is as well applied alone as by columns.
        found = np.isin(words, words[rows.withdrawn])
        if not self.withdrawn and not realm.chunks:
            return found
        keys = key_list(rows.keys)
        # Once the list is full, comparing with all of it costs more than to apply the rows.
        if self.withdrawn:
            names = zip(repeat(realm.realm_id), keys, strict=False)
            found |= np.fromiter(map(self.withdrawn.__contains__, names), np.bool_)
        if realm.chunks:
            found |= np.fromiter(map(realm.chunks.__contains__, keys), np.bool_)
        return found

    def _apply(self, realm: Realm, row: ListedRow) -> None:
        key, mask, written_at, withdrawn = row
        held, time = realm.stored.entry(key)
        if withdrawn:
            self._withdraw(realm, key, mask, written_at)
            if key in realm.chunks:
                # The reader that withdrew them may have found what was written here damaged: it is
                # verified at its next use, or the same damage would be written again.
                for segment in realm.chunks[key].segments:
                    segment.verified &= not mask >> segment.rank & 1
            if held & mask and time <= written_at:
                self._directory.set_stored(realm, key, held & ~mask, time)
            return
        lost, until = self.withdrawn.get((realm.realm_id, key), (0, 0))
        if written_at <= until:
            mask &= ~lost
        if mask & ~held or (mask and written_at > time):
            self._directory.set_stored(realm, key, held | mask, max(time, written_at))
