"""Major compaction: everything is merged, and what has to go is withdrawn or deleted.

Owns going through a catalog shard by shard: what exceeds a limit, what the objects say that the
rows do not, what was withdrawn long enough ago, and announcing it; and what both kinds of
compactions share: plan, report, and snapshots. Does not own which compaction is due or the manifest
(`compaction.py`), or limits (`retention.py`).

Invariants: those of `compaction.py`; a row is announced as withdrawn before it is left out; an
object that may be written or announced at this moment is left alone.
"""

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from tiers.catalog.log import LogWriter
from tiers.catalog.manifest import TENANTS_MAX
from tiers.catalog.merge import contained_in, merged, newest_of_chunk, withdrawals
from tiers.catalog.names import segment_name, snapshot_name
from tiers.catalog.orphans import list_shard, rows_of_listing, shard_folder
from tiers.catalog.reader import Files
from tiers.catalog.retention import (
    REASONS,
    Ages,
    Reasons,
    RetentionDecision,
    RetentionRules,
    TenantLimits,
)
from tiers.catalog.rows import SIZE_LARGEST, Rows, cut, digest_of, encode, joined
from tiers.catalog.scan import BaseRows, CatalogState, Superseded, merged_shards, run_for_rows
from tiers.catalog.usage import OBJECTS, Chunks, Sums, UsageTable, cells_by_tenant, cells_of
from tiers.store.client import Found, run_in_thread
from tiers.store.object_tier import ObjectTier

ANNOUNCED_ROWS: Final = 50_000
DELETED_NAMES: Final = 100
"""Objects that are deleted between two checks of the lease and of the objects themselves."""
LOOK_NAMES: Final = 1000
"""Names in the listing right before objects are deleted: one request."""
LATE_ROWS_MAX: Final = 25_000
"""Rows withdrawn in the base's grace that are kept beyond it. Each compaction reads them again."""

MARGIN_SECONDS: Final = 60.0
"""How far the clocks of a writer and of the store may differ without an object being kept."""
YOUNG_SECONDS: Final = 600.0
"""Younger objects and rows are not compared: one may be there before the other, whose writer may
still announce it."""

SNAPSHOT_ROWS: Final = 250_000
"""Rows in one file of a major compaction: 25 MB."""

Objects = dict[str, tuple[int, float]]
"""Names of a shard's objects -> size and time."""
OnWithdrawn = Callable[[Rows, Reasons], Awaitable[None]]


class CompactionPlan(NamedTuple):
    """What a compaction is to do."""

    retention: RetentionRules
    grace_seconds: float
    """From withdrawing to deleting: longer than a refresh and the longest read together."""
    keep_seconds: float
    """How long merged logs and old manifests stay, for slow readers."""
    major: bool = False
    reconcile: bool = False
    reconcile_seconds: float | None = None
    """After how long the objects are compared with the rows again; None: only with `reconcile`."""
    dry_run: bool = False
    """Count what would be done, and write nothing."""


@dataclass(slots=True)
class CompactionReport:
    """What a compaction did, or with `dry_run` would have done."""

    prefix: str
    major: bool = False
    generation: int = -1
    logs_merged: int = 0
    logs_left: int = 0
    """Log files beyond what one compaction merges. The next one goes on with them."""
    usage: UsageTable = field(default_factory=UsageTable)
    """What is offered after a major compaction."""
    withdrawn: int = 0
    withdrawn_bytes: int = 0
    withdrawn_cells: Sums = field(default_factory=Sums)
    """What was withdrawn, by tenant and by `RetentionReason`."""
    deleted: int = 0
    waiting: int = 0
    """Withdrawn segments that are still in their grace."""
    late: int = 0
    """How many of them were withdrawn while the grace of the others ran, and have the next one."""
    found: int = 0
    """Objects that no row named, or that a reader missed."""
    lost: int = 0
    """Rows whose object was gone."""
    files_removed: int = 0

    def withdrawn_by(self) -> dict[str, int]:
        """Objects that were withdrawn, by the setting that limits them."""
        cells = self.withdrawn_cells.cells
        return {
            reason.setting: int(cells.amounts[cells.spans == reason, OBJECTS].sum())
            for reason in REASONS
        }


@dataclass(slots=True)
class CompactionWork:
    """One compaction, for its parts."""

    tier: ObjectTier
    prefix: str
    plan: CompactionPlan
    now_seconds: float
    """The time by the store's clock."""
    files: Files
    report: CompactionReport
    renew_lease: Callable[[], Awaitable[bool]] | None
    on_withdrawn: OnWithdrawn | None

    async def check_lease(self) -> None:
        """Raise `Superseded` where another process has the lease."""
        if self.renew_lease is not None and not await self.renew_lease():
            raise Superseded("another process has the lease")


class SnapshotWriter:
    """Writes sorted rows as they come into files of one size; a dry run only counts files.

    A snapshot's name has its generation, its part and the digest of its bytes, so writing it again,
    or by two processes at once, leaves the same file.
    """

    def __init__(self, work: CompactionWork, generation: int) -> None:
        self._work = work
        self._generation = generation
        self._rows: list[Rows] = []
        self._names: list[str] = []

    async def add(self, rows: Rows) -> None:
        """Take the rows of the next shard."""
        if len(rows):
            self._rows.append(rows)
        if sum(len(one) for one in self._rows) >= SNAPSHOT_ROWS:
            await self.flush()

    async def flush(self) -> list[str]:
        """Write queued rows. Returns the names of all files."""
        rows, self._rows = self._rows, []
        for part in await run_in_thread(lambda: cut(joined(rows), SNAPSHOT_ROWS)):
            name = ""
            if not self._work.plan.dry_run:
                body = await run_in_thread(encode, part)
                folder, number = self._work.files.folder, len(self._names)
                name = snapshot_name(folder, self._generation, number, digest_of(body))
                await self._work.tier.write(name, body)
            self._names.append(name)
        return self._names


class MergedFiles(NamedTuple):
    """The files of a major compaction."""

    names: tuple[str, ...]
    base: int
    """How many of them, the first ones, are the base."""
    late_rows: int
    """Rows beyond the base: what was withdrawn in its grace."""
    restart_grace: bool
    """Whether the base's grace, which was to go on, has to begin again."""


class MajorCompaction:
    """Goes through a catalog once, or twice where a limit depends on the ages of all chunks."""

    def __init__(self, work: CompactionWork, state: CatalogState, log: LogWriter) -> None:
        self._work = work
        self._state = state
        self._log = log
        self._unannounced: list[Rows] = []
        self._late: list[Rows] = []
        self._restart_grace = False

    async def run(self, out: SnapshotWriter, *, deletes: bool, grace_runs: bool) -> MergedFiles:
        """Merge all into `out`.

        `deletes`: what the base withdraws may be deleted now. `grace_runs`: its grace goes on, so
        nothing is withdrawn for a limit, and what others withdrew is kept apart. But an operator
        who requests a compaction wants the limits to hold now, until that becomes too much.
        """
        work, plan = self._work, self._work.plan
        late_rows = np.count_nonzero(self._state.fresh.size_bytes == 0)
        withdraws = not grace_runs or (plan.major and late_rows <= LATE_ROWS_MAX)
        rules = plan.retention if withdraws else RetentionRules()
        decision = await run_in_thread(RetentionDecision, await self._ages(rules))
        base_rows = BaseRows(work.files, self._state)
        async for shard, found, withdrawn in merged_shards(base_rows, self._state.fresh):
            await work.check_lease()
            rows = found
            if plan.reconcile or (deletes and len(withdrawn)):
                listing = await list_shard(work.tier, work.prefix, shard, work.check_lease)
                objects = {one.name: (one.size_bytes, one.modified_seconds) for one in listing}
                if plan.reconcile:
                    rows = await self._reconcile(rows, objects)
                if deletes:
                    rows = await self._delete(rows, withdrawn, objects, shard)
            rows, gone, reasons, news = await run_for_rows(
                len(rows), _withdraw, rows, decision, work.report
            )
            if len(gone):
                if work.on_withdrawn is not None:
                    await work.on_withdrawn(gone, reasons)
                await self._announce(news)
            if grace_runs:
                rows = await run_for_rows(len(rows), self._without_late, rows, withdrawn)
            await out.add(rows)
        base = len(await out.flush())
        late = joined(self._late)
        await out.add(late)
        names = tuple(await out.flush())
        await self._announce(None)
        return MergedFiles(names, base, len(late), self._restart_grace)

    def _without_late(self, rows: Rows, withdrawn: Rows) -> Rows:
        """The rows that may go into a base whose grace goes on. The others are kept, if few."""
        going = np.flatnonzero(rows.size_bytes == 0)
        late = going[~contained_in(rows.take(going), withdrawn)]
        if not len(late):
            return rows
        # What is withdrawn now is bounded, and must not put off the deletion of the rest.
        few = sum(len(one) for one in self._late) + len(late) <= LATE_ROWS_MAX
        if not few and not self._work.plan.major:
            self._restart_grace = True
            return rows
        self._late.append(rows.take(late))
        kept = np.ones(len(rows), dtype=np.bool_)
        kept[late] = False
        return rows.take(kept)

    async def _ages(self, rules: RetentionRules) -> Ages:
        """What is offered before the compaction, by age; only where a limit depends on it."""
        work = self._work
        ages = Ages(rules, work.now_seconds)
        if await run_in_thread(self._needs_ages, rules):
            base = BaseRows(work.files, self._state)
            async for _, rows, _ in merged_shards(base, self._state.fresh):
                await work.check_lease()
                await run_for_rows(len(rows), ages.add, rows)
        return ages

    def _needs_ages(self, rules: RetentionRules) -> bool:
        if rules.capped or rules.tenant.capped or not rules.tenants_capped:
            return rules.capped or rules.tenant.capped
        # Only named tenants have limits, and most namespaces hold nothing of theirs.
        known = self._state.manifest.tenants
        here = {int(name, 16) for name in known}
        here |= set(cells_by_tenant(self._state.log_rows).tenants.tolist())
        limits = TenantLimits(rules)
        capped = any(limits.of(word).capped for word in here)
        return capped or self._state.suspect or len(known) >= TENANTS_MAX

    async def _reconcile(self, rows: Rows, objects: Objects) -> Rows:
        """The rows, with those that the objects lack or have too much."""
        work = self._work
        found, lost = await run_for_rows(
            len(rows) + len(objects), compare, rows, objects, work.prefix, work.now_seconds
        )
        work.report.found += len(found)
        work.report.lost += len(lost)
        return await self._with_announced(rows, joined([found, lost]))

    async def _delete(self, rows: Rows, old: Rows, objects: Objects, shard: int) -> Rows:
        """Delete what was withdrawn long enough ago. Returns the rows without it.

        An object that a reader missed and that is there is offered again.
        """
        work = self._work
        rows, doomed, found = await run_for_rows(
            len(rows), find_deletable, rows, old, objects, work.prefix
        )
        work.report.deleted += len(doomed) if work.plan.dry_run else 0
        # The listing may be minutes old by now, and at a slow rate older than a lease.
        left = deque(sorted(doomed))
        while left and not work.plan.dry_run:
            await work.check_lease()
            names = await self._unchanged(left, objects, shard_folder(work.prefix, shard))
            await work.tier.delete(names)
            work.report.deleted += len(names)
        work.report.found += len(found)
        return await self._with_announced(rows, found)

    async def _unchanged(self, left: deque[str], objects: Objects, folder: str) -> list[str]:
        """Take the next names from `left`. Returns those whose objects are as they were listed."""
        # Begin right before the first name. Some servers take the folder itself for all of it.
        after = left[0][:-1]
        page = await self._work.tier.list(folder, start_after=after, names_max=LOOK_NAMES)
        there = {one.name: (one.size_bytes, one.modified_seconds) for one in page}
        # A store without pages answers with all names, which then last for more deletions.
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

    async def _with_announced(self, rows: Rows, others: Rows) -> Rows:
        if not len(others):
            return rows
        await self._announce(others)
        return await run_in_thread(merged, joined([rows, others]))

    async def _announce(self, rows: Rows | None) -> None:
        """Announce rows to readers, many at a time. None: all that wait, now."""
        if rows is not None:
            self._unannounced.append(rows)
        waiting = sum(len(one) for one in self._unannounced)
        if not waiting or (rows is not None and waiting < ANNOUNCED_ROWS):
            return
        unannounced, self._unannounced = joined(self._unannounced), []
        if not self._work.plan.dry_run:
            await self._log.write(unannounced)


def _withdraw(
    rows: Rows, decision: RetentionDecision, report: CompactionReport
) -> tuple[Rows, Rows, Reasons, Rows]:
    """A shard's rows with what exceeds a limit withdrawn. Counts both.

    Also the rows that go, the reason of each, and the rows that withdraw them.
    """
    reasons = decision.reasons(rows)
    going = np.flatnonzero(reasons)
    gone, reasons = rows.take(going), reasons[going]
    news = withdrawals(gone, newest_of_chunk(rows)[going], missing=False)
    if len(gone):
        report.withdrawn += len(gone)
        report.withdrawn_bytes += int(gone.size_bytes.sum())
        chunks = Chunks(gone)
        report.withdrawn_cells.add(cells_of(chunks, reasons[chunks.starts].astype(np.int64)))
        rows = merged(joined([rows, news]))
    report.usage.add(rows)
    return rows, gone, reasons, news


def compare(rows: Rows, objects: Objects, prefix: str, now_seconds: float) -> tuple[Rows, Rows]:
    """Rows of objects that no row names, and rows that withdraw those without an object.

    `rows` are merged ones of the shard, all of each chunk.
    """
    old = now_seconds - YOUNG_SECONDS
    known = dict(zip(object_names(rows, prefix), range(len(rows)), strict=True))
    unnamed: list[Found] = []
    for name, (size_bytes, modified) in objects.items():
        if not 0 < modified < old:
            continue
        index = known.get(name)
        withdrawn = index is not None and not rows.size_bytes[index]
        if index is None or (
            withdrawn and modified > rows.written_at[index] / 1e6 + MARGIN_SECONDS
        ):
            unnamed.append(Found(name, size_bytes, modified))
    newest = newest_of_chunk(rows)
    lost = np.array(
        [
            index
            for name, index in known.items()
            if rows.size_bytes[index] and name not in objects and newest[index] / 1e6 < old
        ],
        dtype=np.intp,
    )
    return (
        rows_of_listing(unnamed, prefix),
        withdrawals(rows.take(lost), newest[lost], missing=True),
    )


def find_deletable(
    rows: Rows, withdrawn: Rows, objects: Objects, prefix: str
) -> tuple[Rows, list[str], Rows]:
    """The rows without those in `withdrawn` that are done with, and objects to be deleted.

    Also rows that offer again an object that a reader missed, and that is there: the reader may
    have asked a replica that lags behind, or the wrong server. Nothing is deleted on such a report.

    `rows` are merged ones of the shard, all of each chunk; `withdrawn` those of them that have
    withdrawn for long enough; `objects` all of the shard.
    """
    waiting = np.flatnonzero(rows.size_bytes == 0)
    due = waiting[contained_in(rows.take(waiting), withdrawn)]
    doomed: list[str] = []
    missed: list[int] = []
    sizes: list[int] = []
    kept = np.ones(len(rows), dtype=np.bool_)
    some = rows.take(due)
    named = zip(due.tolist(), object_names(some, prefix), some.written_at.tolist(), strict=True)
    for index, name, written_at in named:
        there = objects.get(name)
        if there is not None:
            size_bytes, modified = there
            if not 0 < modified <= written_at / 1e6 + MARGIN_SECONDS:
                # Written again, and about to be announced.
                continue
            if size_bytes and not rows.num_blocks[index]:
                missed.append(index)
                sizes.append(min(size_bytes, SIZE_LARGEST))
                continue
            doomed.append(name)
        kept[index] = False
    # Later than all withdrawals of the chunk, so that readers take it.
    chosen = np.array(missed, dtype=np.intp)
    found = replace(
        rows.take(chosen),
        size_bytes=np.array(sizes, dtype=np.int64),
        written_at=newest_of_chunk(rows)[chosen] + 1,
    )
    return (rows.take(kept) if len(due) else rows), doomed, found


def object_names(rows: Rows, prefix: str) -> list[str]:
    """The object that each row names."""
    keys = rows.key_list(0, len(rows))
    ids = rows.segment_ids.tolist()
    return [
        segment_name(prefix, key, rows.segments[number])
        for key, number in zip(keys, ids, strict=True)
    ]
