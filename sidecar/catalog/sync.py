"""The store's watch: is it well, and what does it hold that this sidecar did not write.

Owns probing the object store, reading its catalog and announcing in it, again and again, and the
verdict (`StoreHealth`) that status, readiness and metrics show. Does not own reads and writes of
chunks (`data/executor.py`), objects that the catalog lacks (`reconcile.py`), positions and what
waits to be announced (`service.py`), nor what the engine makes of the rows.

Invariants: an unwell store is an error in the log once, and a reason in the status as long as it
lasts; the host tier works on meanwhile. A realm's catalog is read only once all its ranks are
known: before that no segment can be matched to a rank, and nobody could load it. Files are parsed
in threads, and rows are handed on a few at a time, so that engines are answered in between.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np

from sidecar.catalog.reconcile import Reconciler
from sidecar.core.commands import CaughtUp, Event, Listed
from sidecar.core.listed_rows import ListedRows, by_key
from sidecar.logs import fields
from tiers.catalog.usage import cells_by_tenant, holdings
from tiers.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from sidecar.catalog.service import Catalogs
    from sidecar.sessions.namespaces import RealmLayout, Realms
    from tiers.catalog.names import LogName
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

ROWS_PER_SLICE: Final = 1024
"""One or two milliseconds of the event loop, where rows are next to each other."""
ROWS_PER_SLICE_SPARSE: Final = 256
TENANTS_PER_SLICE: Final = 512
"""As ROWS_PER_SLICE: of a file that has rows of so many more."""
DENSE_ROWS: Final = 65_536
"""Rows of a file with so many are next to each other in what is known, once they are sorted."""
ANNOUNCE_POLL_SECONDS_MAX: Final = 0.5
FLUSH_PAUSE_SECONDS: Final = 1.0
"""Between two tries to announce, while the store is unwell."""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class StoreHealth:
    """What is known of the store's state. `reason` is written for an operator."""

    checked: bool = False
    well: bool = False
    reason: str = "not probed yet"
    creates: bool | None = None
    """Whether it can create without replacing, which compaction needs; None: not known."""

    @property
    def state(self) -> str:
        """One word: starting, ok or unwell."""
        if not self.checked:
            return "starting"
        return "ok" if self.well else "unwell"


class StoreWatch:
    """Probes, reads and announces. `feed` takes the `Listed` and `CaughtUp` events.

    `index_settled` waits while a realm's index grows, so that few entries wait for room in it.
    """

    def __init__(
        self,
        store: ObjectTier,
        catalogs: Catalogs,
        realms: Realms,
        *,
        refresh_seconds: float,
        flush_seconds: float,
        writes: bool,
        reads: bool,
        reconcile_seconds: float,
        feed: Callable[[Event], None],
        held: Callable[[int, bytes], int],
        index_settled: Callable[[RealmLayout], Awaitable[None]],
    ) -> None:
        self._store = store
        self._realms = realms
        self._refresh_seconds = refresh_seconds
        self._flush_seconds = flush_seconds
        self._writes = writes
        self._reads = reads
        self._feed = feed
        self._index_settled = index_settled
        self._catalogs = catalogs
        self._due: set[int] = set()
        self._caught_up: set[int] = set()
        self._wake = anyio.Event()
        self.health = StoreHealth()
        self.reconciler = Reconciler(
            store,
            catalogs,
            realms,
            feed_rows=self._feed_rows,
            held=held,
            announces=writes,
            every_seconds=reconcile_seconds,
        )
        self.listings = 0
        self.listings_failed = 0

    def learnt(self, realm: RealmLayout) -> None:
        """A rank of this realm became known: read its catalog as soon as all are."""
        self._due.add(realm.realm_id)
        self._wake.set()

    def forget(self, realm: RealmLayout, *, last: bool) -> None:
        """A realm is forgotten; with `last`, no other one is of its namespace."""
        self._due.discard(realm.realm_id)
        self._caught_up.discard(realm.realm_id)
        if last:
            self.reconciler.forget(realm.namespace_digest)

    def failed(self, error: Exception) -> None:
        """A read or write failed: the store is unwell until a probe says otherwise."""
        self._judge(str(error))

    async def run(self) -> None:
        """Probe, refresh, announce, wait, for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._refresh)
            if self._writes:
                tasks.start_soon(self._announce)
            if self._reads:
                tasks.start_soon(self.reconciler.run)

    async def _announce(self) -> None:
        """Flush what waits whenever it is due."""
        while True:
            due_in = self._catalogs.due_in
            if due_in is None or due_in > 0:
                # A row that comes meanwhile is due no sooner than in this many seconds.
                longest = self._flush_seconds
                await anyio.sleep(min(longest, due_in or longest, ANNOUNCE_POLL_SECONDS_MAX))
            elif not await self.flush():
                await anyio.sleep(FLUSH_PAUSE_SECONDS)

    async def flush(self) -> bool:
        """Announce everything that waits now. False where the store would not take it."""
        try:
            await self._catalogs.flush()
        except TierError as error:
            self.failed(error)
            return False
        return True

    async def flush_all(self) -> None:
        """Announce everything, and what comes meanwhile, as far as the store takes it."""
        while self._catalogs.rows_waiting and await self.flush():
            pass
        if self._catalogs.undescribed:
            await self.flush()

    async def _refresh(self) -> None:
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
        """Wait until a realm is to be read. False when the time for all of them has come."""
        while not self._due:
            self._wake = anyio.Event()
            with anyio.move_on_after(moment - anyio.current_time()):
                await self._wake.wait()
                continue
            return False
        return True

    async def _probe(self) -> str | None:
        """What is wrong with the store, in words for an operator, or None."""
        # Read-only credentials are enough where nothing is written; the refreshes judge then.
        if not self._writes:
            return None
        before = self.health.creates
        try:
            self.health.creates = (await self._store.probe()).creates
        except TierError as error:
            return str(error)
        if self.health.creates is False and before is not False:
            _logger.warning(
                "the store can not write so that nothing is replaced: its catalog is not "
                "compacted, and nothing is collected; bound it with a lifecycle rule of its own",
                extra=fields(url=self._store.url),
            )
        return None

    async def _list(self, realm: RealmLayout) -> str | None:
        """Tell the engine what is new in the store for a realm; what is wrong, or None."""
        if not self._reads or not realm.complete or not self._realms.knows(realm):
            return None
        try:
            reader = self._catalogs.reader(realm)
            async with contextlib.aclosing(reader.changes()) as changes:
                async for rows in changes:
                    # Its own were counted when they were written.
                    if reader.writer != self._catalogs.writer_of(realm):
                        await self._note(realm, rows, reader.file)
                    await self._feed_rows(realm, rows)
                    if not self._realms.knows(realm):
                        return None
            if not self._realms.knows(realm):
                return None
            # A manifest that came with no rows behind it counts all the same.
            self._catalogs.note(realm, {})
            if reader.take_doubt():
                self.reconciler.doubt(realm)
        except TierError as error:
            self.listings_failed += 1
            return str(error)
        self.listings += 1
        if realm.realm_id not in self._caught_up:
            self._caught_up.add(realm.realm_id)
            self._feed(CaughtUp(realm.realm_id))
        return None

    async def _note(self, realm: RealmLayout, rows: Rows, file: LogName | None) -> None:
        """Count what the rows say of their tenants."""
        cells = await anyio.to_thread.run_sync(cells_by_tenant, rows)
        for first in range(0, len(cells), TENANTS_PER_SLICE):
            if first:
                await anyio.lowlevel.checkpoint()
            if not self._realms.knows(realm):
                return
            part = np.arange(first, min(first + TENANTS_PER_SLICE, len(cells)))
            self._catalogs.note(realm, holdings(cells.take(part)), file)

    async def _feed_rows(self, realm: RealmLayout, rows: Rows) -> None:
        realm.register_foreign(rows.segments)
        known = realm.masks_by_segment()
        # What is left out has nothing that a rank here could use.
        masks = [known.get(name, 0) for name in rows.segments]
        foreign = [rank.layout.segment for rank in realm.foreign]
        listed = await anyio.to_thread.run_sync(_lines, rows, masks)
        size = ROWS_PER_SLICE if len(listed) >= DENSE_ROWS else ROWS_PER_SLICE_SPARSE
        for first in range(0, len(listed), size):
            if not self._realms.knows(realm):
                return
            part = listed.take(slice(first, first + size))
            self._feed(Listed(realm.realm_id, part, foreign))
            await anyio.lowlevel.checkpoint()
            await self._index_settled(realm)

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


def _lines(rows: Rows, masks: Sequence[int]) -> ListedRows:
    """Rows as lines for the engine, sorted by key; those without a mask are left out."""
    lines = ListedRows(
        rows.keys, tuple(masks), rows.segment_ids, rows.written_at, rows.size_bytes == 0
    )
    named = np.array([bool(mask) for mask in masks], dtype=np.bool_)
    return by_key(lines if named.all() else lines.take(named[rows.segment_ids]))
