"""Compaction: many small logs become few snapshots, and what is too old or too much goes.

Owns one round on one namespace: which kind is due, merging new logs, the next manifest, and
removing files that it has replaced. Does not own what a round over everything does
(`major_compaction.py`), nor when a round is due, nor the lease
(`sidecar/catalog/garbage_collector.py`).

A small round adds a snapshot with the rows of new logs. A whole one merges everything into sorted
snapshots, and only it withdraws and deletes. A segment goes in two whole rounds: the first
withdraws it, in a log that readers see at their next refresh; the second, at least
`grace_seconds` later, deletes the object, unless it was announced or written again meanwhile.
A whole round that comes in between, because there are many new rows, lets the first wait go on:
it withdraws nothing, and what others withdrew meanwhile stays beyond the base.

Any number of rounds may run at once, be killed at any step, and begin again: files are only ever
added until the manifest is created, which one of them does. What the others made stays until it
is an hour old: two that merge the same rows make the same file, so it may be the winner's too.

Invariants: an object is deleted only when a manifest that is older than the grace withdraws it, no
log offers it again, and it is not newer than the row that was withdrawn; every time that is
compared with another was given by the store's clock, except for when rows were written.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import anyio.to_thread
import numpy as np

from tiers.catalog import manifest as manifests
from tiers.catalog.event_loop import in_turns
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import ANNOUNCED_ROWS, MajorCompaction
from tiers.catalog.manifest import TENANTS_MAX, TENANTS_PER_SLICE, Counts, Manifest, Merged
from tiers.catalog.names import NUMBER_MAX, catalog_folder, manifest_name, parse_snapshot
from tiers.catalog.reader import Contents, Files, sort_out
from tiers.catalog.rounds import CompactionPlan, CompactionReport, CompactionWork
from tiers.catalog.scan import State, Superseded, load
from tiers.catalog.snapshots import Snapshots
from tiers.catalog.usage import Usage, held_by_tenant, word_of
from tiers.errors import ChunkCorrupt, ChunkMissing, ObjectExists, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping

    from tiers.catalog.retention import RetentionRules
    from tiers.catalog.rounds import Tell
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

OVERLAY_SHARE: Final = 4
"""A whole merge is due when the snapshots beyond the base have a quarter as many rows."""
OVERLAY_ROWS: Final = 50_000
OVERLAY_ROWS_MAX: Final = 1_000_000
OVERLAYS_MAX: Final = 64
ABANDONED_SECONDS: Final = 3600.0
"""A round lasts less; what is older and in no manifest belongs to none that still runs."""
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
    alive: Callable[[], Awaitable[bool]] | None = None,
    counts: Counts | None = None,
    tell: Tell | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> CompactionReport:
    """One round on the namespace in folder `prefix`.

    Args:
        tier: the store; it must be able to create without replacing.
        prefix: the namespace's folder.
        plan: what to do.
        now_seconds: the time by the store's clock.
        alive: asked now and then; False ends the round, because the lease is somebody else's.
        counts: where to count what is read.
        tell: hears of what is withdrawn, as merged rows and what each falls to.
        clock: monotonic seconds: how long the round has taken.

    Raises the tier's errors, and `Superseded`; either way nothing is lost and it may be tried
    again.
    """
    files = Files(tier, catalog_folder(prefix), counts or Counts())
    work = CompactionWork(
        tier, prefix, plan, now_seconds, files, CompactionReport(prefix), alive, tell
    )
    return await _Round(work, clock).run()


class _Round:
    """State of one round."""

    def __init__(self, work: CompactionWork, clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._began = clock()
        self._report = work.report
        self._log = LogWriter(
            work.tier, work.folder, new_writer("c"), rows_max=ANNOUNCED_ROWS, seconds_max=0.0
        )

    async def run(self) -> CompactionReport:
        """Do it."""
        work = self._work
        state = await load(work.files, work.now_seconds)
        self._report.logs_left = state.left
        if state.next_generation > NUMBER_MAX:
            raise TierUnavailable(
                f"{manifest_name(work.folder, NUMBER_MAX)} has the last number of all, and no "
                "sidecar made it: nothing here is compacted or collected; delete it",
                retryable=False,
            )
        again = work.plan.reconcile_seconds
        if again is not None and state.manifest.reconciled_seconds + again < work.now_seconds:
            work.plan = work.plan._replace(reconcile=True)
        self._report.whole = work.plan.whole or await self._is_due(state)
        if self._report.whole:
            manifest = await self._whole(state)
        elif state.logs:
            manifest = await self._small(state)
        else:
            manifest = None
        if work.plan.dry_run:
            return self._report
        if manifest is not None:
            await self._create(manifest)
        self._report.generation = (manifest or state.manifest).generation
        await self._tidy(state, manifest or state.manifest)
        return self._report

    # --- when ------------------------------------------------------------------------------

    async def _is_due(self, state: State) -> bool:
        """Whether there is more to do than to merge logs."""
        manifest, plan, now_seconds = state.manifest, self._work.plan, self._work.now_seconds
        base_rows = max(0, manifest.rows - (len(state.fresh) - len(state.log_rows)))
        most = min(OVERLAY_ROWS_MAX, max(OVERLAY_ROWS, base_rows // OVERLAY_SHARE))
        if len(state.fresh) > most or len(manifest.snapshots) - manifest.base > OVERLAYS_MAX:
            return True
        if plan.reconcile or (state.doubt and not state.left):
            return True
        if manifest.base_withdrawn:
            # Withdrawing more before these are deleted would make them wait again, for ever.
            return self._deletes(manifest)
        held, tenants = await _held(manifest, state.log_rows)
        if plan.bounds.exceeded(held.size_bytes, held.objects, held.oldest, now_seconds):
            return True
        if len(manifest.tenants) >= TENANTS_MAX and plan.bounds.tenant.exceeded(
            0, 0, held.oldest, now_seconds
        ):
            # It may be one of those that the manifest does not name.
            return True
        return await in_turns(_any_exceeds(plan.bounds, tenants, now_seconds))

    def _deletes(self, manifest: Manifest) -> bool:
        """Whether what the base withdraws may be deleted now."""
        return 0 < manifest.base_seconds <= self._work.deletable_before

    def _waits(self, manifest: Manifest) -> bool:
        """Whether what the base withdraws is to wait on, and no more is withdrawn before that."""
        # Who asks for a whole round wants the bounds to hold now.
        asked = self._work.plan.whole
        return bool(manifest.base_withdrawn) and manifest.base_seconds > 0 and not asked

    # --- a small round ---------------------------------------------------------------------

    async def _small(self, state: State) -> Manifest:
        rows, before = state.log_rows, state.manifest
        generation = state.next_generation
        out = self._snapshots(generation)
        await out.write(rows)
        held, tenants = await _held(before, rows)
        return before.after(
            generation=generation,
            snapshots=(*before.snapshots, *await out.close()),
            rows=before.rows + len(rows),
            merged=self._merged(state, generation),
            held=held,
            tenants=await in_turns(_largest(tenants)),
            reconciled_seconds=0.0 if state.doubt else before.reconciled_seconds,
        )

    def _merged(self, state: State, generation: int) -> dict[str, Merged]:
        """How far each log is merged now; long forgotten writers, without files, are left out."""
        found = dict(state.manifest.merged)
        for file in state.logs:
            found[file.log.writer] = Merged(file.log.number, generation)
        self._report.logs_merged = len(state.logs)
        there = {file.log.writer for file in state.contents.logs}
        gone = sorted(found.keys() - there, key=lambda writer: found[writer].generation)
        for writer in gone[: max(0, len(gone) - WRITERS_KEPT)]:
            del found[writer]
        # Of more than a manifest takes, the logs of some are merged again, which changes nothing,
        # until the files of the others are removed.
        last = sorted(found, key=lambda writer: found[writer].generation)[WRITERS_WRITTEN_MAX:]
        for writer in last:
            del found[writer]
        return found

    def _snapshots(self, generation: int) -> Snapshots:
        tier = None if self._work.plan.dry_run else self._work.tier
        return Snapshots(tier, self._work.folder, generation)

    # --- a whole round ---------------------------------------------------------------------

    async def _whole(self, state: State) -> Manifest:
        work, generation = self._work, state.next_generation
        merge = MajorCompaction(work, state, self._log)
        deletes = self._deletes(state.manifest)
        waits = not deletes and self._waits(state.manifest)
        done = await merge.run(self._snapshots(generation), deletes=deletes, waits=waits)
        census, held = self._report.census, self._report.census.whole
        self._report.waiting = census.withdrawn
        written = self._merged(state, generation)
        if self._log.files:
            written[self._log.writer] = Merged(self._log.files - 1, generation)
        # Readers could not hear of it before now: a round may take longer than the grace.
        since = work.now_seconds + self._clock() - self._began
        # What was withdrawn by the manifest before does not begin to wait again.
        anew = (
            done.anew
            if waits
            else (
                bool(self._report.withdrawn or self._report.lost)
                or not state.manifest.base_withdrawn
                or bool(np.any(state.fresh.size_bytes == 0))
            )
        )
        largest = await anyio.to_thread.run_sync(census.largest, TENANTS_MAX)
        reconciled = 0.0 if state.doubt else state.manifest.reconciled_seconds
        return Manifest(
            generation=generation,
            snapshots=done.names,
            base=done.base,
            base_seconds=since if anew else state.manifest.base_seconds,
            base_withdrawn=census.withdrawn - done.late,
            rows=held.objects + census.withdrawn,
            held=held,
            merged=written,
            tenants=await in_turns(_largest(largest)),
            reconciled_seconds=work.now_seconds if work.plan.reconcile else reconciled,
        )

    # --- the manifest, and what it replaces ------------------------------------------------

    async def _create(self, manifest: Manifest) -> None:
        work = self._work
        await work.check_alive()
        name = manifest_name(work.folder, manifest.generation)
        body = await in_turns(manifests.encoding(manifest))
        try:
            await work.tier.write(name, body, create=True)
        except ObjectExists:
            # Perhaps our own, whose answer was lost.
            into = np.empty(len(body) + 1, dtype=np.uint8)
            try:
                size_bytes = await work.tier.read(name, into)
            except (ChunkMissing, ChunkCorrupt):
                size_bytes = 0
            if not np.array_equal(into[:size_bytes], body):
                raise Superseded(f"generation {manifest.generation} is another's") from None
        listing = await work.tier.list(f"{work.folder}/manifest")
        newest = max(sort_out(work.folder, listing).manifests, default=-1)
        if newest != manifest.generation:
            raise Superseded(f"generation {newest} is there already")

    async def _tidy(self, state: State, manifest: Manifest) -> None:
        """Remove files that nobody needs. What is left by an error is removed next time."""
        work, contents = self._work, state.contents
        old = work.now_seconds - work.plan.keep_seconds
        names = _merged_logs(contents, state.manifest, old)
        for generation, found in contents.manifests.items():
            if generation <= manifest.generation - MANIFESTS_KEPT and found.modified_seconds < old:
                names.append(found.name)
        # Those of the manifest before too: it is what holds if the newest is damaged.
        used = {*manifest.snapshots, *state.manifest.snapshots}
        abandoned = work.now_seconds - ABANDONED_SECONDS
        for name, found in contents.snapshots.items():
            # One of a generation to come may just have been written again, and be what that needs.
            begun = (parse_snapshot(work.folder, name) or 0) <= manifest.generation
            if begun and name not in used and found.modified_seconds < abandoned:
                names.append(name)
        if names:
            await work.tier.delete(names)
            self._report.files_removed = len(names)


async def _held(manifest: Manifest, rows: Rows) -> tuple[Usage, dict[bytes, Usage]]:
    """What a manifest and the rows of newer logs come to, in all and by tenant: an estimate."""
    added = await anyio.to_thread.run_sync(held_by_tenant, rows)
    return await in_turns(_sums(manifest, added))


def _sums(
    manifest: Manifest, added: Mapping[bytes, Usage]
) -> Generator[None, None, tuple[Usage, dict[bytes, Usage]]]:
    whole, tenants = manifest.held, dict[bytes, Usage]()
    for number, (name, held) in enumerate(manifest.tenants.items()):
        tenants[bytes.fromhex(name)] = held
        if number % TENANTS_PER_SLICE == 0:
            yield
    for number, (tenant, held) in enumerate(added.items()):
        tenants[tenant] = tenants.get(tenant, Usage()).plus(held)
        whole = whole.plus(held)
        if number % TENANTS_PER_SLICE == 0:
            yield
    return whole, tenants


def _any_exceeds(
    bounds: RetentionRules, tenants: Mapping[bytes, Usage], now_seconds: float
) -> Generator[None, None, bool]:
    """Whether a tenant has more than it may."""
    limits = bounds.of_tenants()
    for number, (tenant, own) in enumerate(tenants.items()):
        most = limits.limits(word_of(tenant))
        if most.exceeded(own.size_bytes, own.objects, own.oldest, now_seconds):
            return True
        if number % TENANTS_PER_SLICE == 0:
            yield
    return False


def _largest(tenants: Mapping[bytes, Usage]) -> Generator[None, None, dict[str, Usage]]:
    """As a manifest names them: those that hold most bytes."""
    sizes: list[int] = []
    found: dict[str, Usage] = {}
    for number, (tenant, own) in enumerate(tenants.items()):
        sizes.append(own.size_bytes)
        found[tenant.hex()] = own
        if number % TENANTS_PER_SLICE == 0:
            yield
    if len(sizes) > TENANTS_MAX:
        names = list(found)
        yield
        smallest = np.argsort(sizes, kind="stable")[: len(sizes) - TENANTS_MAX].tolist()
        for number in smallest:
            del found[names[number]]
    return found


def _merged_logs(contents: Contents, before: Manifest, old: float) -> list[str]:
    """Log files that are older than `old`, and in snapshots since the manifest before.

    Whoever has looked at the catalog since then has read them, and whoever looks for the first
    time reads the snapshots instead: of the newest manifest, or if that is damaged of the last.
    """
    merged_by = before.merged
    return [
        file.found.name
        for file in contents.logs
        if file.log.writer in merged_by
        and file.log.number <= merged_by[file.log.writer].number
        and file.found.modified_seconds < old
    ]


__all__ = ["CompactionPlan", "CompactionReport", "Superseded", "compact"]
