"""Reconciliation: offering and announcing objects that the catalog does not know.

Owns passes over a namespace's objects: at once where its catalog is suspect (absent, or a file of
it damaged or missing), and slowly, a shard at a time, for ever. They find chunks that an earlier
release wrote, or that a sidecar wrote right before it died. Does not own listing and naming
(`tiers/catalog/orphans.py`), or what the engine makes of rows.

Invariants: one listing runs at a time, of one shard; nothing is announced twice by one pass, or
while too many rows wait to be announced; a suspect namespace has at most one pass in
`PASS_PAUSE_SECONDS`. What was withdrawn is not found again, unless the store's clock is ahead of
its writer's by more than `EARLIER_SECONDS`. Where the store fails, a pass goes on after a pause
from where it was. No namespace waits for the pause of another one.
"""

import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

import anyio
import anyio.lowlevel
import numpy as np

from sidecar.catalog.service import Catalogs
from sidecar.logs import fields
from sidecar.sessions.namespaces import RealmLayout, Realms
from tiers.catalog.major_compaction import MARGIN_SECONDS, YOUNG_SECONDS
from tiers.catalog.merge import SHARDS
from tiers.catalog.names import namespace_prefix
from tiers.catalog.orphans import nonempty_shards, rows_in_shard
from tiers.catalog.rows import Rows
from tiers.errors import TierError
from tiers.store.object_tier import ObjectTier

PASS_PAUSE_SECONDS: Final = 600.0
RECONCILE_RETRY_SECONDS: Final = 2.0
ROWS_WAITING_MAX: Final = 50_000
ROWS_PER_TURN: Final = 1024
EARLIER_SECONDS: Final = MARGIN_SECONDS / 2
"""Found rows are dated back by this. The other half of the margin is for their withdrawals, so that
the object does not count as written after those."""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class _Pass:
    """A pass over a namespace, requested or running."""

    digest: bytes
    left: list[int] | None = None
    """Shards to go, the next one last; None before they are listed."""
    retry_at: float | None = None
    """When a pass goes on that the store made fail."""
    forgotten: bool = False


class Reconciler:
    """Compares objects with what the engine knows of the catalog.

    `held` gives the ranks whose segment of a key the engine knows to be in the store, as bits.
    `every_seconds` is how long a slow pass over all shards takes.
    """

    def __init__(
        self,
        store: ObjectTier,
        catalogs: Catalogs,
        realms: Realms,
        *,
        feed_rows: Callable[[RealmLayout, Rows], Awaitable[None]],
        held: Callable[[int, bytes], int],
        announces: bool,
        every_seconds: float,
    ) -> None:
        self._store = store
        self._catalogs = catalogs
        self._realms = realms
        self._feed_rows = feed_rows
        self._held = held
        self._announces = announces
        self._every_seconds = every_seconds
        self._requested: dict[bytes, _Pass] = {}
        self._running: _Pass | None = None
        self._ended: dict[bytes, float] = {}
        """When the last pass of a namespace ended."""
        self._wake = anyio.Event()
        self._listing = anyio.Lock()
        self.sweeps = 0
        """Passes over suspect namespaces."""
        self.found = 0
        """Segments that the catalog did not know."""

    def request(self, realm: RealmLayout) -> None:
        """The catalog of this realm is suspect: go through its objects soon."""
        digest = realm.namespace_digest
        self._requested.setdefault(digest, _Pass(digest))
        self._wake.set()

    def forget(self, digest: bytes) -> None:
        """The last realm of this namespace is forgotten."""
        self._requested.pop(digest, None)
        if self._running is not None and self._running.digest == digest:
            self._running.forgotten = True

    async def run(self) -> None:
        """Go through suspect namespaces at once, and through all slowly, for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run_requested)
            tasks.start_soon(self._run_slowly)

    async def _run_requested(self) -> None:
        while True:
            self._wake = anyio.Event()
            one = min(self._requested.values(), key=self._due, default=None)
            seconds = math.inf if one is None else self._due(one) - anyio.current_time()
            if one is None or seconds > 0:
                with anyio.move_on_after(seconds):
                    await self._wake.wait()
                continue
            self._running = self._requested.pop(one.digest)
            done = await self._pass(one)
            self._running = None
            if one.forgotten:
                continue
            if done:
                now = anyio.current_time()
                ended = {
                    digest: at
                    for digest, at in self._ended.items()
                    if at + PASS_PAUSE_SECONDS > now
                }
                self._ended = ended | {one.digest: now}
                continue
            # A pass that was requested meanwhile begins from the first shard.
            again = self._requested.setdefault(one.digest, one)
            again.retry_at = anyio.current_time() + RECONCILE_RETRY_SECONDS

    def _due(self, one: _Pass) -> float:
        """When a requested pass begins."""
        if one.retry_at is not None:
            return one.retry_at
        return self._ended.get(one.digest, -PASS_PAUSE_SECONDS) + PASS_PAUSE_SECONDS

    async def _pass(self, one: _Pass) -> bool:
        """Go through the shards of a namespace, from where it was. False where the store failed."""
        prefix = namespace_prefix(one.digest)
        if one.left is None:
            try:
                one.left = (await nonempty_shards(self._store, prefix))[::-1]
            except TierError as error:
                _logger.debug("reconciliation waits for the store", extra=fields(error=error))
                return False
        before = self.found
        while one.left and not one.forgotten:
            if not await self._shard(one.digest, one.left[-1], slowly=False):
                break
            one.left.pop()
        if self.found > before:
            _logger.info(
                "objects that the catalog did not know are offered",
                extra=fields(namespace=prefix, segments=self.found - before),
            )
        if one.left:
            return False
        self.sweeps += 1
        return True

    async def _run_slowly(self) -> None:
        number = 0
        while True:
            await anyio.sleep(self._every_seconds / SHARDS)
            for digest in {realm.namespace_digest: None for realm in self._realms.all()}:
                # A shard that fails is read again in the next pass.
                await self._shard(digest, number, slowly=True)
            number = (number + 1) % SHARDS

    async def _shard(self, digest: bytes, number: int, *, slowly: bool) -> bool:
        """Compare one shard. False where the store failed."""
        while self._catalogs.rows_waiting > ROWS_WAITING_MAX:  # noqa: ASYNC110
            await anyio.sleep(RECONCILE_RETRY_SECONDS)
        async with self._listing:
            try:
                rows = await rows_in_shard(self._store, namespace_prefix(digest), number)
                if slowly:
                    rows = rows.take(rows.written_at < (time.time() - YOUNG_SECONDS) * 1e6)
                await self._compare(digest, rows, slowly=slowly)
            except TierError as error:
                _logger.debug("reconciliation waits for the store", extra=fields(error=error))
                return False
        return True

    async def _compare(self, digest: bytes, rows: Rows, *, slowly: bool) -> None:
        realms = [
            realm
            for realm in self._realms.all()
            if realm.namespace_digest == digest and realm.complete
        ]
        if not realms:
            return
        known = [realm.masks_by_segment() for realm in realms]
        unknown: list[int] = []
        for first in range(0, len(rows), ROWS_PER_TURN):
            last = min(first + ROWS_PER_TURN, len(rows))
            for index, key in enumerate(rows.key_list(first, last), first):
                segment = rows.segments[rows.segment_ids[index]]
                masks = [masks.get(segment, 0) for masks in known]
                # Segments that no engine here has may be known to others. A slow pass skips them.
                lacks = not any(masks) and not slowly
                for realm, mask in zip(realms, masks, strict=True):
                    lacks |= bool(mask & ~self._held(realm.realm_id, key))
                if lacks:
                    unknown.append(index)
            await anyio.lowlevel.checkpoint()
            if not all(map(self._realms.knows, realms)):
                # The engine has forgotten what it knew of that realm.
                await self._compare(digest, rows, slowly=slowly)
                return
        if not unknown:
            return
        self.found += len(unknown)
        # Rows have their writer's time. The store's own may be later: a withdrawal of the object
        # would then be too old to count, also one that was made before and is not deleted yet.
        found = rows.take(np.array(unknown, dtype=np.intp))
        earlier = np.maximum(found.written_at - int(EARLIER_SECONDS * 1e6), 1)
        found = replace(found, written_at=earlier)
        if self._announces:
            for index in range(len(found)):
                if index and index % ROWS_PER_TURN == 0:
                    await anyio.lowlevel.checkpoint()
                    if not all(map(self._realms.knows, realms)):
                        await self._compare(digest, rows, slowly=slowly)
                        return
                self._catalogs.announce(realms[0], found.row(index))
        for realm in realms:
            await self._feed_rows(realm, found)
