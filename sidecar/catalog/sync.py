"""Follows the object store: whether it is available, and what other processes announced in it.

Owns probing the store, reading its catalogs and announcing in them, again and again, and
`StoreHealth`, which status, readiness and metrics show. Does not own reads and writes of chunks
(`data/`), objects that the catalog lacks (`reconcile.py`), positions and rows that wait
(`service.py`), or what the engine makes of the rows.

Invariants: an unavailable store is logged as an error once, and is a reason in the status as long
as it lasts; the host tier goes on meanwhile. A realm's catalog is read only once all its ranks are
known: before that no segment can be matched to a rank, and no engine could load it. Files are
parsed in threads, and rows are passed on a few at a time, so that engines are answered in between.
"""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import anyio
import anyio.lowlevel
import numpy as np

from sidecar.catalog.reconcile import Reconciler
from sidecar.catalog.service import Catalogs
from sidecar.config.store import StoreSettings
from sidecar.core.commands import CaughtUp, Event, Listed
from sidecar.core.stored_table import ListedRows
from sidecar.logs import fields
from sidecar.sessions.namespaces import RealmLayout, Realms
from tiers.catalog.names import LogName
from tiers.catalog.rows import Rows
from tiers.catalog.usage import cells_by_tenant, usage_by_tenant
from tiers.errors import TierError
from tiers.store.client import run_in_thread
from tiers.store.object_tier import PROBE_FOLDER, ObjectTier

ROWS_PER_SLICE: Final = 1024
"""One or two milliseconds of the event loop, where rows are next to each other."""
ROWS_PER_SLICE_SPARSE: Final = 256
TENANTS_PER_SLICE: Final = 512
DENSE_ROWS: Final = 65_536
"""The sorted rows of a file with as many are next to each other in the engine's table."""
ANNOUNCE_POLL_SECONDS_MAX: Final = 0.5
FLUSH_PAUSE_SECONDS: Final = 1.0
"""Between two tries to announce, while the store is unavailable."""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class StoreHealth:
    """The store's state. `reason` is for an operator."""

    state: Literal["starting", "ok", "unwell"] = "starting"
    reason: str = "not probed yet"
    creates: bool | None = None
    """Whether it can create without replacing, which compaction needs; None: unknown."""


class StoreWatch:
    """Probes, reads and announces. Without writes, read-only credentials are enough.

    `held` gives the ranks whose segment of a key the engine knows to be in the store, as bits.
    `index_settled` waits while a realm's index grows, so that few entries wait for room in it.
    """

    def __init__(
        self,
        store: ObjectTier,
        catalogs: Catalogs,
        realms: Realms,
        settings: StoreSettings,
        *,
        feed: Callable[[Event], None],
        held: Callable[[int, bytes], int],
        index_settled: Callable[[RealmLayout], Awaitable[None]],
    ) -> None:
        self._store = store
        self._realms = realms
        self._settings = settings
        self._writes = settings.write != "off"
        self._reads = settings.read == "on"
        self._feed = feed
        self._index_settled = index_settled
        self._catalogs = catalogs
        self._due: set[int] = set()
        self._wake = anyio.Event()
        self.health = StoreHealth()
        self.reconciler = Reconciler(
            store,
            catalogs,
            realms,
            feed_rows=self._feed_rows,
            held=held,
            announces=self._writes,
            every_seconds=settings.reconcile_every,
        )
        self.listings = 0
        self.listings_failed = 0

    def refresh(self, realm: RealmLayout) -> None:
        """A rank of this realm was added: read its catalog as soon as all are known."""
        self._due.add(realm.realm_id)
        self._wake.set()

    def forget(self, realm: RealmLayout, *, last: bool) -> None:
        """A realm is forgotten; with `last`, it was the last one of its namespace."""
        self._due.discard(realm.realm_id)
        if last:
            self.reconciler.forget(realm.namespace_digest)

    def failed(self, error: Exception) -> None:
        """A read or write failed: the store counts as unavailable until a probe succeeds."""
        self._judge(str(error))

    async def run(self) -> None:
        """Probe, refresh, announce, wait, for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._refresh_all)
            if self._writes:
                tasks.start_soon(self._announce)
            if self._reads:
                tasks.start_soon(self.reconciler.run)

    async def _announce(self) -> None:
        while True:
            due_in = self._catalogs.due_in
            if due_in is None or due_in > 0:
                # A row that comes meanwhile is not due before that.
                longest = min(self._settings.catalog_flush, ANNOUNCE_POLL_SECONDS_MAX)
                await anyio.sleep(min(longest, due_in or longest))
            elif not await self.flush():
                await anyio.sleep(FLUSH_PAUSE_SECONDS)

    async def flush(self) -> bool:
        """Announce all rows that wait now. False where the store refuses."""
        try:
            await self._catalogs.flush()
        except TierError as error:
            self.failed(error)
            return False
        return True

    async def flush_all(self) -> None:
        """Announce all rows, and those that come meanwhile, unless the store refuses."""
        while self._catalogs.rows_waiting and await self.flush():
            pass
        if self._catalogs.infos_waiting:
            await self.flush()

    async def _refresh_all(self) -> None:
        while True:
            probed = self.health.state != "ok"
            reason = await self._probe() if probed else None
            self._due.clear()
            for realm in self._realms.all():
                reason = await self._list(realm) or reason
            if probed or reason is not None:
                self._judge(reason)
            next_round = anyio.current_time() + self._settings.refresh_seconds
            while await self._due_before(next_round):
                reason = await self._list(self._realms[self._due.pop()])
                if reason is not None:
                    self._judge(reason)

    async def _due_before(self, moment: float) -> bool:
        """Wait until a realm is due. False when the time for all of them has come."""
        while not self._due:
            self._wake = anyio.Event()
            with anyio.move_on_after(moment - anyio.current_time()):
                await self._wake.wait()
                continue
            return False
        return True

    async def _probe(self) -> str | None:
        """What is wrong with the store, for an operator, or None."""
        before = self.health.creates
        try:
            if not self._writes:
                # Read-only credentials are enough.
                await self._store.list(PROBE_FOLDER)
                return None
            self.health.creates = (await self._store.probe()).creates
        except TierError as error:
            return str(error)
        if self.health.creates is False and before is not False:
            _logger.warning(
                "the store cannot create an object without replacing one that is there: its "
                "catalog is not compacted and nothing is collected; set a lifecycle rule on it",
                extra=fields(url=self._store.url),
            )
        return None

    async def _list(self, realm: RealmLayout) -> str | None:
        """Feed the engine what is new in the store for a realm. Returns what is wrong, or None."""
        if not self._reads or not realm.complete or not self._realms.knows(realm):
            return None
        try:
            reader = self._catalogs.reader(realm)
            async with contextlib.aclosing(reader.changes()) as changes:
                async for rows in changes:
                    # Own rows were counted when they were written, and a manifest counts those of
                    # its snapshots.
                    file = reader.file
                    if file is not None and file.writer != self._catalogs.writer_of(realm):
                        await self._count(realm, rows, file)
                    await self._feed_rows(realm, rows)
                    if not self._realms.knows(realm):
                        return None
            if not self._realms.knows(realm):
                return None
            # A manifest counts, even without rows of newer logs.
            self._catalogs.count(realm, {})
            if reader.take_suspect():
                self.reconciler.request(realm)
        except TierError as error:
            self.listings_failed += 1
            return str(error)
        self.listings += 1
        self._feed(CaughtUp(realm.realm_id))
        return None

    async def _count(self, realm: RealmLayout, rows: Rows, file: LogName) -> None:
        """Count the usage of the rows of a log file by tenant."""
        cells = await run_in_thread(cells_by_tenant, rows)
        for first in range(0, len(cells), TENANTS_PER_SLICE):
            if first:
                await anyio.lowlevel.checkpoint()
            if not self._realms.knows(realm):
                return
            part = np.arange(first, min(first + TENANTS_PER_SLICE, len(cells)))
            self._catalogs.count(realm, usage_by_tenant(cells.take(part)), file)

    async def _feed_rows(self, realm: RealmLayout, rows: Rows) -> None:
        realm.register_foreign(rows.segments)
        known = realm.masks_by_segment()
        # Segments that no rank here can use have no mask, and are left out.
        masks = [known.get(name, 0) for name in rows.segments]
        foreign = [rank.layout.segment for rank in realm.foreign]
        listed = await run_in_thread(_lines, rows, masks)
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
        self.health.state = "ok" if reason is None else "unwell"
        self.health.reason = reason or ""
        if before == self.health.state:
            return
        if reason is None:
            _logger.info("object store available", extra=fields(url=self._store.url))
        else:
            _logger.error(
                "object store unavailable; the host tier works without it",
                extra=fields(url=self._store.url, reason=reason),
            )


def _lines(rows: Rows, masks: Sequence[int]) -> ListedRows:
    """Rows for the engine, sorted by key; those without a mask are left out."""
    lines = ListedRows(
        rows.keys, tuple(masks), rows.segment_ids, rows.written_at, rows.size_bytes == 0
    )
    named = np.array([bool(mask) for mask in masks], dtype=np.bool_)
    return (lines if named.all() else lines.take(named[rows.segment_ids])).sorted()
