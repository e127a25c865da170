"""The store's watch: is it well, and what does it hold that this sidecar did not write.

Owns probing and listing the object store, again and again, and the verdict (`StoreHealth`) that
status, readiness and metrics show. Does not own reads and writes (`mover.py`), nor what the engine
makes of a listing.

Invariants: an unwell store is an error in the log once, and a reason in the status as long as it
lasts; the host tier works on meanwhile. A realm is listed only once all its ranks are known:
before that no name can be matched to a rank, and nobody could load what it names.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from sidecar.commands import Event, Listed
from sidecar.logs import fields
from tiers.catalog.listing import ListingCatalog
from tiers.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.realms import Realm, Realms
    from tiers.objects import ObjectTier

KEYS_PER_SLICE: Final = 2048
"""About 10 ms of the event loop, the first time that a store is listed."""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class StoreHealth:
    """What is known of the store's state. `reason` is written for an operator."""

    checked: bool = False
    well: bool = False
    reason: str = "not probed yet"

    @property
    def state(self) -> str:
        """One word: starting, ok or unwell."""
        if not self.checked:
            return "starting"
        return "ok" if self.well else "unwell"


class StoreWatch:
    """Probes and lists. `feed` takes the `Listed` events."""

    def __init__(
        self,
        store: ObjectTier,
        realms: Realms,
        *,
        refresh_seconds: float,
        writes: bool,
        reads: bool,
        feed: Callable[[Event], None],
    ) -> None:
        self._store = store
        self._realms = realms
        self._refresh_seconds = refresh_seconds
        self._writes = writes
        self._reads = reads
        self._feed = feed
        self._catalog = ListingCatalog(store)
        self._due: set[int] = set()
        self._wake = anyio.Event()
        self.health = StoreHealth()
        self._listed: set[int] = set()
        self.listings = 0
        self.listings_failed = 0

    def learnt(self, realm: Realm) -> None:
        """A rank of this realm became known: list it as soon as all are."""
        self._due.add(realm.realm_id)
        self._wake.set()

    def failed(self, error: Exception) -> None:
        """A read or write failed: the store is unwell until a probe says otherwise."""
        self._judge(str(error))

    async def run(self) -> None:
        """Probe, list, wait, for ever."""
        while True:
            probed = not self.health.well
            reason = await self._probe() if probed else None
            self._due.clear()
            for realm in self._realms.all():
                reason = await self._list(realm) or reason
            if probed or reason is not None:
                self._judge(reason)
            next_round = anyio.current_time() + self._refresh_seconds
            while await self._due_before(next_round):
                reason = await self._list(self._realms[self._due.pop()])
                if reason is not None:
                    self._judge(reason)

    async def _due_before(self, moment: float) -> bool:
        """Wait until a realm is to be listed. False when the time for all of them has come."""
        while not self._due:
            self._wake = anyio.Event()
            with anyio.move_on_after(moment - anyio.current_time()):
                await self._wake.wait()
                continue
            return False
        return True

    async def _probe(self) -> str | None:
        """What is wrong with the store, in words for an operator, or None."""
        # Read-only credentials are enough where nothing is written; the listings judge then.
        if not self._writes:
            return None
        try:
            await self._store.probe()
        except TierError as error:
            return str(error)
        return None

    async def _list(self, realm: Realm) -> str | None:
        """Tell the engine what the store holds for a realm; what is wrong, or None."""
        if not self._reads or len(realm.ranks) < realm.world_size:
            return None
        try:
            found = await self._catalog.refresh(realm.namespace_digest)
        except TierError as error:
            self.listings_failed += 1
            return str(error)
        self.listings += 1
        ranks_by_key = _by_rank(found, realm)
        if realm.realm_id not in self._listed:
            # All of it is new, and adding is the slow part: a few at a time, so that engines are
            # answered in between.
            self._listed.add(realm.realm_id)
            await self._feed_slices(realm, ranks_by_key)
        self._feed(Listed(realm.realm_id, ranks_by_key, complete=True))
        return None

    async def _feed_slices(self, realm: Realm, ranks_by_key: dict[bytes, frozenset[int]]) -> None:
        items = iter(ranks_by_key.items())
        while part := dict(itertools.islice(items, KEYS_PER_SLICE)):
            self._feed(Listed(realm.realm_id, part, complete=False))
            await anyio.lowlevel.checkpoint()

    def _judge(self, reason: str | None) -> None:
        before = self.health.state
        self.health.checked = True
        self.health.well = reason is None
        self.health.reason = reason or ""
        if before == self.health.state:
            return
        if reason is None:
            _logger.info("the store is well", extra=fields(url=self._store.url))
        else:
            _logger.error(
                "the store is unwell; the host tier works without it",
                extra=fields(url=self._store.url, reason=reason),
            )


def _by_rank(found: dict[bytes, frozenset[str]], realm: Realm) -> dict[bytes, frozenset[int]]:
    """Segment names to ranks; segments of other cuts of the model are left out."""
    ranks_by_segment = realm.ranks_by_segment()
    none: frozenset[int] = frozenset()
    # Few different sets of segments come up, so each is translated once.
    translated: dict[frozenset[str], frozenset[int]] = {}
    ranks_by_key: dict[bytes, frozenset[int]] = {}
    for key, segments in found.items():
        ranks = translated.get(segments)
        if ranks is None:
            ranks = none.union(*(ranks_by_segment.get(name, none) for name in segments))
            translated[segments] = ranks
        if ranks:
            ranks_by_key[key] = ranks
    return ranks_by_key
