"""A whole round: everything is merged anew, and what has to go is withdrawn or deleted.

Owns going through a catalog shard by shard: what falls to a bound, what the objects say that the
rows do not, what was withdrawn long enough ago, and telling readers. Does not own which round is
due, nor the manifest (`compaction.py`), bounds (`retention.py`) or comparing (`diff.py`).

Invariants: those of `compaction.py`; a row is announced as withdrawn before it is left out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from tiers.catalog.diff import Objects, compared, deletable
from tiers.catalog.event_loop import aside
from tiers.catalog.manifest import TENANTS_MAX
from tiers.catalog.merge import both_have, merged, newest_of_chunk, withdrawals
from tiers.catalog.orphans import listed_in, slice_folder
from tiers.catalog.retention import Ages, RetentionDecision, RetentionRules, Whys
from tiers.catalog.rows import Rows, joined
from tiers.catalog.scan import Shards
from tiers.catalog.usage import held_by_tenant, word_of

if TYPE_CHECKING:
    from tiers.catalog.log import LogWriter
    from tiers.catalog.rounds import CompactionReport, CompactionWork
    from tiers.catalog.scan import State
    from tiers.catalog.snapshots import Snapshots

ANNOUNCED_ROWS: Final = 50_000
DELETED_NAMES: Final = 100
"""Objects that are deleted between two looks at the lease, and at themselves."""
LOOK_NAMES: Final = 1000
"""Names of a look right before objects are deleted: one request."""
LATE_ROWS_MAX: Final = 25_000
"""Rows withdrawn while the base waits that are kept beyond it; each round reads them again."""


class MergedFiles(NamedTuple):
    """The files of a whole merge."""

    names: tuple[str, ...]
    base: int
    """How many of them, the first ones, are the base."""
    late: int
    """Rows beyond the base: what was withdrawn while it waits."""
    anew: bool
    """Whether the base has to wait again, where it was to wait on."""


class MajorCompaction:
    """Goes through a catalog once, or twice where a bound needs to know ages first."""

    def __init__(self, work: CompactionWork, state: State, log: LogWriter) -> None:
        self._work = work
        self._state = state
        self._log = log
        self._news: list[Rows] = []
        self._late: list[Rows] = []
        self._anew = False

    async def run(self, out: Snapshots, *, deletes: bool, waits: bool) -> MergedFiles:
        """Merge all into `out`.

        `deletes`: what the base withdraws may be deleted now. `waits`: it is to wait as long as it
        did, so nothing is withdrawn for a bound, and rows that others withdrew are kept apart.
        """
        work, plan = self._work, self._work.plan
        bounds = RetentionRules() if waits else plan.bounds
        ages = await self._ages(bounds)
        verdict = await anyio.to_thread.run_sync(RetentionDecision, bounds, ages, work.now_seconds)
        async for shard, found, withdrawn in Shards(work.files, self._state).rows():
            await work.check_alive()
            rows = found
            if plan.reconcile or (deletes and len(withdrawn)):
                objects = await self._objects(shard)
                if plan.reconcile:
                    rows = await self._reconciled(rows, objects)
                if deletes:
                    rows = await self._deleted(rows, withdrawn, objects, shard)
            rows, fallen = await aside(len(rows), _judged, rows, verdict, work.report)
            if len(fallen.rows):
                if work.tell is not None:
                    await work.tell(fallen.rows, fallen.whys)
                await self._announce(fallen.news)
            if waits:
                rows = await aside(len(rows), self._without_late, rows, withdrawn)
            await out.add(rows)
        base = len(await out.close())
        late = joined(self._late)
        if len(late):
            await out.write(late)
        await self._announce(None)
        return MergedFiles(tuple(await out.close()), base, len(late), self._anew)

    def _without_late(self, rows: Rows, withdrawn: Rows) -> Rows:
        """The rows that may go to a base which waits on; the others are kept, if they are few."""
        going = np.flatnonzero(rows.size_bytes == 0)
        late = going[~both_have(rows.take(going), withdrawn)]
        if not len(late):
            return rows
        if sum(len(one) for one in self._late) + len(late) > LATE_ROWS_MAX:
            self._anew = True
            return rows
        self._late.append(rows.take(late))
        kept = np.ones(len(rows), dtype=np.bool_)
        kept[late] = False
        return rows.take(kept)

    async def _ages(self, bounds: RetentionRules) -> Ages:
        """What is offered before the round, by age; only where a bound needs to know."""
        work = self._work
        ages = Ages(bounds, work.now_seconds)
        if await anyio.to_thread.run_sync(self._needs_ages, bounds):
            async for _, rows, _ in Shards(work.files, self._state).rows():
                await work.check_alive()
                await aside(len(rows), ages.add, rows)
        return ages

    def _needs_ages(self, bounds: RetentionRules) -> bool:
        if bounds.capped or bounds.tenant.capped:
            return True
        if not bounds.capped_anywhere:
            return False
        # Named tenants alone have limits, and most namespaces hold nothing of theirs.
        known = self._state.manifest.tenants
        here = {bytes.fromhex(name) for name in known}
        here |= held_by_tenant(self._state.log_rows).keys()
        limits = bounds.of_tenants()
        capped = any(limits.limits(word_of(tenant)).capped for tenant in here)
        return capped or self._state.doubt or len(known) >= TENANTS_MAX

    async def _objects(self, shard: int) -> Objects:
        listing = await listed_in(self._work.tier, self._work.prefix, shard)
        return {found.name: (found.size_bytes, found.modified_seconds) for found in listing}

    async def _reconciled(self, rows: Rows, objects: Objects) -> Rows:
        """The rows with what the objects say that they lack, or have too much."""
        work = self._work
        found, lost = await aside(
            len(rows) + len(objects), compared, rows, objects, work.prefix, work.now_seconds
        )
        work.report.found += len(found)
        work.report.lost += len(lost)
        if not len(found) and not len(lost):
            return rows
        await self._announce(joined([found, lost]))
        return await anyio.to_thread.run_sync(merged, joined([rows, found, lost]))

    async def _deleted(self, rows: Rows, old: Rows, objects: Objects, shard: int) -> Rows:
        """Delete what was withdrawn long enough ago, or is there after all; the rows then."""
        work = self._work
        rows, doomed, found = await aside(len(rows), deletable, rows, old, objects, work.prefix)
        work.report.deleted += len(doomed) if work.plan.dry_run else 0
        # What was listed may be minutes old by now, and at a slow rate older than a lease.
        left = deque(sorted(doomed))
        while left and not work.plan.dry_run:
            await work.check_alive()
            names = await self._unchanged(left, objects, slice_folder(work.prefix, shard))
            await work.tier.delete(names)
            work.report.deleted += len(names)
        work.report.found += len(found)
        if not len(found):
            return rows
        await self._announce(found)
        return await anyio.to_thread.run_sync(merged, joined([rows, found]))

    async def _unchanged(self, left: deque[str], objects: Objects, folder: str) -> list[str]:
        """Take the next names from `left`; those of them whose objects are as they were."""
        # Right before the first; some servers would take its folder for all that is in that.
        after = left[0][:-1]
        page = await self._work.tier.list(folder, start_after=after, names_max=LOOK_NAMES)
        there = {one.name: (one.size_bytes, one.modified_seconds) for one in page}
        # All that a store answers with lasts for more of them, where it has no pages.
        most = max(DELETED_NAMES, len(page) // 10)
        end = max(there, default="") if len(page) >= LOOK_NAMES else ""
        names: list[str] = []
        taken = 0
        while left and taken < most and (not taken or not end or left[0] <= end):
            name = left.popleft()
            taken += 1
            if there.get(name) == objects[name]:
                names.append(name)
        return names

    async def _announce(self, rows: Rows | None) -> None:
        """Tell readers, some at a time; None: all that waits, now."""
        if rows is not None:
            self._news.append(rows)
        waiting = sum(len(one) for one in self._news)
        if not waiting or (rows is not None and waiting < ANNOUNCED_ROWS):
            return
        news, self._news = joined(self._news), []
        if not self._work.plan.dry_run:
            await self._log.write(news)


class _Fallen(NamedTuple):
    """What has to go of a shard."""

    rows: Rows
    whys: Whys
    news: Rows
    """The rows that withdraw these."""


def _judged(
    rows: Rows, verdict: RetentionDecision, report: CompactionReport
) -> tuple[Rows, _Fallen]:
    """A shard's rows after what has to go is withdrawn, and what that is; counted."""
    whys = verdict.why(rows)
    going = np.flatnonzero(whys)
    gone, whys = rows.take(going), whys[going]
    news = withdrawals(gone, newest_of_chunk(rows)[going], missing=False)
    if len(gone):
        report.count(gone, whys)
        rows = merged(joined([rows, news]))
    report.census.add(rows)
    return rows, _Fallen(gone, whys, news)
