"""Compaction: many small logs become few snapshots, and what is too old or too much goes.

Owns one compaction of one namespace: which kind is due, merging new logs, the next manifest, and
removing files that it has replaced. Does not own what a major compaction does
(`major_compaction.py`), or when one is due and the lease (`sidecar/catalog/garbage_collector.py`).

A minor compaction adds a snapshot with the rows of new logs. A major one merges everything into
sorted snapshots, and only it withdraws and deletes. A segment goes in two of them: the first
withdraws it in a log; the second, at least `grace_seconds` later, deletes the object unless it was
announced or written again. One in between does not restart the grace: what others withdrew
meanwhile stays beyond the base, and it withdraws nothing unless an operator requested it.

Any number of compactions may run at once, be killed at any step, and begin again: files are only
added until one of them creates the manifest. The files of the others stay for an hour: two that
merge the same rows make the same file, so it may be the winner's.

Invariants: an object is deleted only when a manifest that is older than the grace withdraws it, no
log offers it again, and it is not newer than the withdrawn row. Times that are compared were all
given by the store's clock, except for when rows were written.
"""

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final, TypeVar

import anyio.lowlevel
import msgspec
import numpy as np

from tiers.catalog import manifest as manifests
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import (
    ANNOUNCED_ROWS,
    CompactionPlan,
    CompactionReport,
    CompactionWork,
    MajorCompaction,
    OnWithdrawn,
    SnapshotWriter,
)
from tiers.catalog.manifest import (
    TENANTS_MAX,
    TENANTS_PER_SLICE,
    Counts,
    Manifest,
    Merged,
    run_in_slices,
)
from tiers.catalog.names import NUMBER_MAX, catalog_folder, manifest_name, parse_snapshot
from tiers.catalog.reader import Files, sort_out
from tiers.catalog.retention import TenantLimits
from tiers.catalog.rows import Rows
from tiers.catalog.scan import CatalogState, Superseded, load
from tiers.catalog.usage import NO_USAGE, Usage, cells_by_tenant, usage_by_tenant
from tiers.errors import ChunkCorrupt, ChunkMissing, ObjectExists, TierUnavailable
from tiers.store.client import run_in_thread
from tiers.store.object_tier import ObjectTier

T = TypeVar("T")

OVERLAY_SHARE: Final = 4
"""A major compaction is due when the snapshots beyond the base have a quarter as many rows."""
OVERLAY_ROWS: Final = 50_000
OVERLAY_ROWS_MAX: Final = 1_000_000
OVERLAYS_MAX: Final = 64
ABANDONED_SECONDS: Final = 3600.0
"""A compaction is shorter. No running one needs an older file that is in no manifest."""
MANIFESTS_KEPT: Final = 3
WRITERS_KEPT: Final = 4096
WRITERS_WRITTEN_MAX: Final = 1 << 14
"""With as many tenants as a manifest may name it has less than `MANIFEST_BYTES_MAX`."""


async def compact(
    tier: ObjectTier,
    prefix: str,
    plan: CompactionPlan,
    now_seconds: float,
    *,
    renew_lease: Callable[[], Awaitable[bool]] | None = None,
    counts: Counts | None = None,
    on_withdrawn: OnWithdrawn | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CompactionReport:
    """One compaction of the namespace in folder `prefix`; `now_seconds` is by the store's clock.

    `tier` must be able to create without replacing. `renew_lease` is called now and then; False
    ends the compaction, because another process has the lease. `on_withdrawn` gets merged rows that
    are withdrawn, and the reason of each.

    Raises the tier's errors, and `Superseded`. Nothing is lost then, and it may be tried again.
    """
    files = Files(tier, catalog_folder(prefix), counts or Counts())
    report = CompactionReport(prefix)
    work = CompactionWork(tier, prefix, plan, now_seconds, files, report, renew_lease, on_withdrawn)
    return await _Compaction(work, clock).run()


class _Compaction:
    """State of one compaction."""

    def __init__(self, work: CompactionWork, clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._began = clock()
        self._report = work.report
        self._log = LogWriter(
            work.tier, work.files.folder, new_writer("c"), rows_max=ANNOUNCED_ROWS, seconds_max=0.0
        )

    async def run(self) -> CompactionReport:
        work = self._work
        state = await load(work.files, work.now_seconds, work.check_lease)
        self._report.logs_left = state.left
        if state.next_generation > NUMBER_MAX:
            raise TierUnavailable(
                f"{manifest_name(work.files.folder, NUMBER_MAX)} has the highest possible number, "
                "and no sidecar made it: nothing here is compacted or collected; delete it",
                retryable=False,
            )
        every = work.plan.reconcile_seconds
        if every is not None and state.manifest.reconciled_seconds + every < work.now_seconds:
            work.plan = work.plan._replace(reconcile=True)
        self._report.major = work.plan.major or await self._major_is_due(state)
        manifest = None
        if self._report.major:
            manifest = await self._major(state)
        elif state.logs:
            manifest = await self._minor(state)
        if work.plan.dry_run:
            return self._report
        if manifest is not None:
            await self._create(manifest)
        self._report.generation = (manifest or state.manifest).generation
        await self._remove_files(state, manifest or state.manifest)
        return self._report

    async def _major_is_due(self, state: CatalogState) -> bool:
        manifest, plan, now_seconds = state.manifest, self._work.plan, self._work.now_seconds
        base_rows = max(0, manifest.rows - (len(state.fresh) - len(state.log_rows)))
        most = min(OVERLAY_ROWS_MAX, max(OVERLAY_ROWS, base_rows // OVERLAY_SHARE))
        if len(state.fresh) > most or len(manifest.snapshots) - manifest.base > OVERLAYS_MAX:
            return True
        if plan.reconcile or (state.suspect and not state.left):
            return True
        if manifest.base_withdrawn:
            # Withdrawing more before these are deleted would restart their grace again and again.
            return self._grace_is_over(manifest)
        usage, tenants = await _usage_with(manifest, state.log_rows)
        if plan.retention.exceeded(usage, now_seconds):
            return True
        if len(manifest.tenants) >= TENANTS_MAX and plan.retention.tenant.exceeded(
            Usage(oldest=usage.oldest), now_seconds
        ):
            # It may be a tenant that the manifest does not name.
            return True
        limits = TenantLimits(plan.retention)
        async for batch in _batches(tenants.items()):
            for name, used in batch:
                if limits.of(int(name, 16)).exceeded(used, now_seconds):
                    return True
        return False

    def _grace_is_over(self, manifest: Manifest) -> bool:
        """Whether what the base withdraws may be deleted now."""
        return 0 < manifest.base_seconds <= self._work.now_seconds - self._work.plan.grace_seconds

    async def _minor(self, state: CatalogState) -> Manifest:
        rows, before = state.log_rows, state.manifest
        generation = state.next_generation
        out = SnapshotWriter(self._work, generation)
        await out.add(rows)
        usage, tenants = await _usage_with(before, rows)
        if len(tenants) > TENANTS_MAX:
            # A manifest names those with most bytes.
            names = list(tenants)
            sizes = [one.size_bytes for one in tenants.values()]
            await anyio.lowlevel.checkpoint()
            for number in np.argsort(sizes, kind="stable")[: len(sizes) - TENANTS_MAX].tolist():
                del tenants[names[number]]
        return msgspec.structs.replace(
            before,
            generation=generation,
            snapshots=(*before.snapshots, *await out.flush()),
            rows=before.rows + len(rows),
            merged=self._merged(state, generation),
            held=usage,
            tenants=tenants,
            reconciled_seconds=0.0 if state.suspect else before.reconciled_seconds,
        )

    def _merged(self, state: CatalogState, generation: int) -> dict[str, Merged]:
        """How far each log is merged now, without writers whose files were removed long ago."""
        found = dict(state.manifest.merged)
        for file in state.logs:
            found[file.log.writer] = Merged(file.log.number, generation)
        self._report.logs_merged = len(state.logs)
        there = {file.log.writer for file in state.contents.logs}
        gone = sorted(found.keys() - there, key=lambda writer: found[writer].generation)
        for writer in gone[: max(0, len(gone) - WRITERS_KEPT)]:
            del found[writer]
        # Logs of writers beyond what a manifest takes are merged again, which changes nothing,
        # until the files of the others are removed.
        last = sorted(found, key=lambda writer: found[writer].generation)[WRITERS_WRITTEN_MAX:]
        for writer in last:
            del found[writer]
        return found

    async def _major(self, state: CatalogState) -> Manifest:
        work, report, before = self._work, self._report, state.manifest
        generation = state.next_generation
        deletes = self._grace_is_over(before)
        grace_runs = before.base_withdrawn > 0 and before.base_seconds > 0 and not deletes
        done = await MajorCompaction(work, state, self._log).run(
            SnapshotWriter(work, generation), deletes=deletes, grace_runs=grace_runs
        )
        usage, withdrawn = report.usage.total, report.usage.withdrawn
        report.waiting, report.late = withdrawn, done.late_rows
        merged = self._merged(state, generation)
        if self._log.files:
            merged[self._log.writer] = Merged(self._log.files - 1, generation)
        if grace_runs:
            grace_begins = done.restart_grace
        else:
            # What the manifest before withdrew does not begin its grace again, except for what may
            # not be deleted yet: otherwise each compaction would go through everything for it.
            grace_begins = (
                bool(report.withdrawn or report.lost)
                or (deletes and withdrawn > done.late_rows)
                or not before.base_withdrawn
                or bool(np.any(state.fresh.size_bytes == 0))
            )
        # Readers learn of it now: a compaction may take longer than the grace.
        ended = work.now_seconds + self._clock() - self._began
        largest: dict[str, Usage] = {}
        tenants = await run_in_thread(report.usage.largest, TENANTS_MAX)
        async for batch in _batches(tenants.items()):
            largest.update((tenant.hex(), usage) for tenant, usage in batch)
        reconciled = 0.0 if state.suspect else before.reconciled_seconds
        return Manifest(
            generation=generation,
            snapshots=done.names,
            base=done.base,
            base_seconds=ended if grace_begins else before.base_seconds,
            base_withdrawn=withdrawn - done.late_rows,
            rows=usage.objects + withdrawn,
            held=usage,
            merged=merged,
            tenants=largest,
            reconciled_seconds=work.now_seconds if work.plan.reconcile else reconciled,
        )

    async def _create(self, manifest: Manifest) -> None:
        work = self._work
        await work.check_lease()
        name = manifest_name(work.files.folder, manifest.generation)
        body = await run_in_slices(manifests.encode(manifest))
        try:
            await work.tier.write(name, body, create=True)
        except ObjectExists:
            # It may be our own, if the store's answer was lost.
            into = np.empty(len(body) + 1, dtype=np.uint8)
            try:
                size_bytes = await work.tier.read(name, into)
            except (ChunkMissing, ChunkCorrupt):
                size_bytes = 0
            if not np.array_equal(into[:size_bytes], body):
                raise Superseded(f"generation {manifest.generation} is another's") from None
        listing = await work.tier.list(f"{work.files.folder}/manifest")
        found = await sort_out(work.files.folder, listing)
        newest = max(found.manifests, default=-1)
        if newest != manifest.generation:
            raise Superseded(f"generation {newest} is there already")

    async def _remove_files(self, state: CatalogState, manifest: Manifest) -> None:
        """Remove files that nobody needs. After an error the next compaction removes them."""
        work, contents = self._work, state.contents
        old = work.now_seconds - work.plan.keep_seconds
        # Readers that have listed the catalog since the manifest before have read its logs. New
        # ones read the snapshots of the newest manifest, or of the one before if it is damaged.
        names = [
            file.found.name
            for file in contents.logs
            if (merged := state.manifest.merged.get(file.log.writer)) is not None
            and file.log.number <= merged.number
            and file.found.modified_seconds < old
        ]
        for generation, found in contents.manifests.items():
            if generation <= manifest.generation - MANIFESTS_KEPT and found.modified_seconds < old:
                names.append(found.name)
        # The manifest before is used where the newest is damaged.
        used = {*manifest.snapshots, *state.manifest.snapshots}
        abandoned = work.now_seconds - ABANDONED_SECONDS
        for name, found in contents.snapshots.items():
            # One of a later generation may just have been written again, by a compaction that runs.
            begun = (parse_snapshot(work.files.folder, name) or 0) <= manifest.generation
            if begun and name not in used and found.modified_seconds < abandoned:
                names.append(name)
        if names:
            await work.tier.delete(names)
            self._report.files_removed = len(names)


async def _usage_with(manifest: Manifest, rows: Rows) -> tuple[Usage, dict[str, Usage]]:
    """The usage of a manifest and of the rows of newer logs, in total and by tenant: an estimate.

    This and what follows may go through 65,536 tenants, and let other tasks run in between.
    """
    cells = await run_in_thread(cells_by_tenant, rows)
    total, tenants = manifest.held, dict(manifest.tenants)
    async for added in _batches(usage_by_tenant(cells).items()):
        for tenant, usage in added:
            name = tenant.hex()
            tenants[name] = tenants.get(name, NO_USAGE).plus(usage)
            total = total.plus(usage)
    return total, tenants


async def _batches(items: Iterable[tuple[T, Usage]]) -> AsyncIterator[list[tuple[T, Usage]]]:
    """`TENANTS_PER_SLICE` items at a time. Other tasks get a turn before each batch."""
    left = iter(items)
    while batch := list(itertools.islice(left, TENANTS_PER_SLICE)):
        await anyio.lowlevel.checkpoint()
        yield batch
