"""Reconciliation: offering and announcing objects that the catalog does not know.

Owns going through a namespace's objects: at once where a reader doubts its catalog (there is none,
or a file of it is damaged or missing), and slowly, a slice at a time, for ever. That is how chunks
that an earlier release wrote, or that a sidecar wrote right before it died, are found. Does not
own listing and naming (`tiers/catalog/orphans.py`), nor what the engine makes of rows.

Invariants: one listing runs at a time, of one slice; nothing is announced twice by one sweep, nor
while too many rows wait to be announced; a namespace is gone through because of a doubt at most
once in `SWEEP_PAUSE_SECONDS`. What was withdrawn is not found again, unless the store's clock is
ahead of its writer's by more than `EARLIER_SECONDS`. A store that fails is asked again after a
pause, from where it was. No namespace waits for another one that has to wait.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel
import numpy as np

from sidecar.logs import fields
from tiers.catalog.diff import MARGIN_SECONDS
from tiers.catalog.names import namespace_prefix
from tiers.catalog.orphans import SLICES, objects_in, slices_there
from tiers.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.catalog.service import Catalogs
    from sidecar.sessions.namespaces import RealmLayout, Realms
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

SWEEP_PAUSE_SECONDS: Final = 600.0
RECONCILE_RETRY_SECONDS: Final = 2.0
ROWS_WAITING_MAX: Final = 50_000
ROWS_PER_SLICE: Final = 1024
YOUNG_SECONDS: Final = 600.0
"""An object younger than this may still be announced by whoever wrote it."""
EARLIER_SECONDS: Final = MARGIN_SECONDS / 2
"""By how much what is found is told to be older than its object. The other half is left for what
withdraws it: the object is then not taken for one that was written after that."""

_logger = logging.getLogger("kvlake.store")


class Reconciler:
    """Compares objects with what the engine knows of the catalog.

    Args:
        feed_rows: tells the engine rows of one realm.
        held: the ranks whose segment of a key the engine knows to be in the store, as bits.
        announces: whether others are told; without it, only the engine is.
        every_seconds: how long a slow pass over all slices takes.
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
        self._doubted: dict[bytes, None] = {}
        self._swept: dict[bytes, float] = {}
        self._retry_at: dict[bytes, float] = {}
        self._left: dict[bytes, list[int]] = {}
        """Slices that are still to be gone through, the next one last, where the store failed."""
        self._sweeping: set[bytes] = set()
        """The doubted namespace that is gone through, until it is forgotten."""
        self._wake = anyio.Event()
        self._one = anyio.Lock()
        self.sweeps = 0
        """Namespaces gone through because of a doubt."""
        self.found = 0
        """Segments that the catalog did not know."""

    def doubt(self, realm: RealmLayout) -> None:
        """The catalog of this realm may lack something: go through its objects soon."""
        self._doubted[realm.namespace_digest] = None
        self._wake.set()

    def forget(self, digest: bytes) -> None:
        """No realm is of this namespace any more."""
        self._doubted.pop(digest, None)
        self._retry_at.pop(digest, None)
        self._left.pop(digest, None)
        self._sweeping.discard(digest)

    async def run(self) -> None:
        """Go through what is doubted at once, and through everything slowly, for ever."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sweep_doubted)
            tasks.start_soon(self._sweep_slowly)

    async def _sweep_doubted(self) -> None:
        while True:
            self._wake = anyio.Event()
            digest = min(self._doubted, key=self._due, default=None)
            seconds = math.inf if digest is None else self._due(digest) - anyio.current_time()
            if digest is None or seconds > 0:
                with anyio.move_on_after(seconds):
                    await self._wake.wait()
                continue
            del self._doubted[digest]
            self._sweeping.add(digest)
            done = await self._sweep(digest)
            if digest not in self._sweeping:
                # Forgotten meanwhile. Whoever has come back since doubts it, and has it all to do.
                self._left.pop(digest, None)
                continue
            self._sweeping.remove(digest)
            if done:
                self._retry_at.pop(digest, None)
                self._note_swept(digest)
                continue
            if digest in self._doubted:
                # Doubted again meanwhile, so what was gone through counts no more.
                self._left.pop(digest, None)
            self._doubted[digest] = None
            self._retry_at[digest] = anyio.current_time() + RECONCILE_RETRY_SECONDS

    def _note_swept(self, digest: bytes) -> None:
        now = anyio.current_time()
        self._swept.pop(digest, None)
        while self._swept:
            oldest = next(iter(self._swept))
            if self._swept[oldest] + SWEEP_PAUSE_SECONDS > now:
                break
            del self._swept[oldest]
        self._swept[digest] = now

    def _due(self, digest: bytes) -> float:
        """When a doubted namespace is gone through."""
        retry_at = self._retry_at.get(digest)
        if retry_at is not None:
            return retry_at
        return self._swept.get(digest, -SWEEP_PAUSE_SECONDS) + SWEEP_PAUSE_SECONDS

    async def _sweep(self, digest: bytes) -> bool:
        """Go through the slices of a namespace, from where it was. False where the store failed."""
        left = self._left.get(digest)
        if left is None:
            there = await self._listed(digest)
            if there is None:
                return False
            left = self._left[digest] = there[::-1]
        before = self.found
        while (
            left and digest in self._sweeping and await self._slice(digest, left[-1], slowly=False)
        ):
            left.pop()
        if self.found > before:
            _logger.info(
                "objects that the catalog did not know are offered",
                extra=fields(namespace=namespace_prefix(digest), segments=self.found - before),
            )
        if left:
            return False
        self._left.pop(digest, None)
        self.sweeps += 1
        return True

    async def _listed(self, digest: bytes) -> list[int] | None:
        try:
            return await slices_there(self._store, namespace_prefix(digest))
        except TierError as error:
            _logger.debug("a sweep waits for the store", extra=fields(error=error))
            return None

    async def _sweep_slowly(self) -> None:
        number = 0
        while True:
            await anyio.sleep(self._every_seconds / SLICES)
            for digest in {realm.namespace_digest: None for realm in self._realms.all()}:
                # One that fails has its turn again in the next pass.
                await self._slice(digest, number, slowly=True)
            number = (number + 1) % SLICES

    async def _slice(self, digest: bytes, number: int, *, slowly: bool) -> bool:
        """Compare one slice. False where the store failed."""
        while self._catalogs.rows_waiting > ROWS_WAITING_MAX:  # noqa: ASYNC110
            await anyio.sleep(RECONCILE_RETRY_SECONDS)
        async with self._one:
            try:
                rows = await objects_in(self._store, namespace_prefix(digest), number)
            except TierError as error:
                _logger.debug("a sweep waits for the store", extra=fields(error=error))
                return False
            if slowly:
                rows = rows.take(rows.written_at < (time.time() - YOUNG_SECONDS) * 1e6)
            await self._compare(digest, rows, slowly=slowly)
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
        for first in range(0, len(rows), ROWS_PER_SLICE):
            last = min(first + ROWS_PER_SLICE, len(rows))
            for index, key in enumerate(rows.key_list(first, last), first):
                segment = rows.segments[rows.segment_ids[index]]
                masks = [masks.get(segment, 0) for masks in known]
                # Of segments that no engine here has, a slow pass cannot tell who knows them.
                lacks = not any(masks) and not slowly
                for realm, mask in zip(realms, masks, strict=True):
                    lacks |= bool(mask & ~self._held(realm.realm_id, key))
                if lacks:
                    unknown.append(index)
            await anyio.lowlevel.checkpoint()
            if not all(map(self._realms.knows, realms)):
                # What was known of it is not known any more, and would count as unknown.
                await self._compare(digest, rows, slowly=slowly)
                return
        if not unknown:
            return
        self.found += len(unknown)
        # Of those that are known the rows tell the time. By the store's clock they would seem to be
        # newer, and what withdraws them then would be too old to count: so would what has withdrawn
        # one of these, which is still there because it is deleted later.
        found = rows.take(np.array(unknown, dtype=np.intp))
        earlier = np.maximum(found.written_at - int(EARLIER_SECONDS * 1e6), 1)
        found = replace(found, written_at=earlier)
        if self._announces:
            for index in range(len(found)):
                self._catalogs.found(realms[0], found.row(index))
        for realm in realms:
            await self._feed_rows(realm, found)
