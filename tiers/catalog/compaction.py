"""Compaction: many small logs become few snapshots, and what is too old or too much goes.

Owns one round on one namespace: merging, keeping it within its bounds, comparing it with the
objects, deleting objects that were withdrawn, the next manifest, and removing files that it has
replaced. Does not own when a round is due, nor the lease (`sidecar/collector.py`).

A small round adds a snapshot with the rows of new logs. A whole one merges everything into sorted
snapshots, and only it withdraws and deletes. A segment goes in two whole rounds: the first
withdraws it, in a log that readers see at their next refresh; the second, at least
`grace_seconds` later, deletes the object, unless it was announced or written again meanwhile.

Any number of rounds may run at once, be killed at any step, and begin again: files are only ever
added until the manifest is created, which one of them does. What the others made stays until it
is an hour old: two that merge the same rows make the same file, so it may be the winner's too.

Invariants: an object is deleted only when a manifest that is older than the grace withdraws it, no
log offers it again, and it is not newer than the row that was withdrawn; every time that is
compared with another was given by the store's clock, except for when rows were written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from tiers.catalog import manifest as manifests
from tiers.catalog.bounds import BOUNDS, Ages, Bounds, Verdict, Whys
from tiers.catalog.census import (
    OBJECTS,
    Census,
    Chunks,
    Holding,
    Sums,
    cells_of,
    held_by_tenant,
    word_of,
)
from tiers.catalog.comparing import Objects, compared, deletable
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import TENANTS_MAX, Counts, Manifest, Merged
from tiers.catalog.merge import merged, withdrawals
from tiers.catalog.names import (
    NUMBER_MAX,
    catalog_folder,
    manifest_name,
    snapshot_name,
)
from tiers.catalog.reader import Contents, Files, sort_out
from tiers.catalog.rows import Rows, digest_of, encode, joined
from tiers.catalog.shards import Shards, State, Superseded, load
from tiers.catalog.sweep import slice_folder
from tiers.errors import ChunkCorrupt, ChunkMissing, ObjectExists, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.filesystems import Found
    from tiers.objects import ObjectTier

    Tell = Callable[[Rows, Whys], Awaitable[None]]

SNAPSHOT_ROWS: Final = 250_000
"""Rows in one file of a whole merge: 25 MB."""
ANNOUNCED_ROWS: Final = 50_000
OVERLAY_SHARE: Final = 4
"""A whole merge is due when the snapshots beyond the base have a quarter as many rows."""
OVERLAY_ROWS: Final = 50_000
OVERLAY_ROWS_MAX: Final = 1_000_000
OVERLAYS_MAX: Final = 64
ABANDONED_SECONDS: Final = 3600.0
"""A round lasts less; what is older and in no manifest belongs to none that still runs."""
MANIFESTS_KEPT: Final = 3
WRITERS_KEPT: Final = 4096


class Plan(NamedTuple):
    """What a round is to do."""

    bounds: Bounds
    grace_seconds: float
    """From withdrawing to deleting: longer than a refresh and the longest read together."""
    keep_seconds: float
    """How long merged logs and old manifests stay, for readers that are slow."""
    whole: bool = False
    reconcile: bool = False
    reconcile_seconds: float | None = None
    """After how long the objects are compared with the rows again; None: only if asked for."""
    dry_run: bool = False
    """Count what would be done, and write nothing."""


@dataclass(slots=True)
class Report:
    """What a round did, or with `dry_run` would have done."""

    prefix: str
    whole: bool = False
    generation: int = -1
    logs_merged: int = 0
    census: Census = field(default_factory=Census)
    """Of a whole round: what is offered after it."""
    withdrawn: int = 0
    withdrawn_bytes: int = 0
    fallen: Sums = field(default_factory=Sums)
    """What was withdrawn, by tenant and by the bound that it fell to (`Why`)."""
    deleted: int = 0
    waiting: int = 0
    """Withdrawn segments whose time to be deleted has not come."""
    found: int = 0
    """Objects that no row named."""
    lost: int = 0
    """Rows whose object was gone."""
    files_removed: int = 0

    def count(self, gone: Rows, whys: Whys) -> None:
        """Count what a shard withdraws: merged rows that are offered, and what each falls to."""
        self.withdrawn += len(gone)
        self.withdrawn_bytes += int(gone.size_bytes.sum())
        chunks = Chunks(gone)
        self.fallen.add(cells_of(chunks, whys[chunks.starts].astype(np.int64)))

    def withdrawn_by(self) -> dict[str, int]:
        """Objects that were withdrawn, by the setting that they fell to."""
        cells = self.fallen.cells
        return {
            why.setting: int(cells.amounts[cells.spans == why, OBJECTS].sum()) for why in BOUNDS
        }


async def compact(
    tier: ObjectTier,
    prefix: str,
    plan: Plan,
    now_seconds: float,
    *,
    alive: Callable[[], Awaitable[bool]] | None = None,
    counts: Counts | None = None,
    tell: Tell | None = None,
) -> Report:
    """One round on the namespace in folder `prefix`.

    Args:
        tier: the store; it must be able to create without replacing.
        prefix: the namespace's folder.
        plan: what to do.
        now_seconds: the time by the store's clock.
        alive: asked now and then; False ends the round, because the lease is somebody else's.
        counts: where to count what is read.
        tell: hears of what is withdrawn, as merged rows and what each falls to.

    Raises the tier's errors, and `Superseded`; either way nothing is lost and it may be tried
    again.
    """
    round_ = _Round(tier, prefix, plan, now_seconds, alive, counts or Counts(), tell)
    return await round_.run()


class _Round:
    """State of one round."""

    def __init__(
        self,
        tier: ObjectTier,
        prefix: str,
        plan: Plan,
        now_seconds: float,
        alive: Callable[[], Awaitable[bool]] | None,
        counts: Counts,
        tell: Tell | None,
    ) -> None:
        self._tier = tier
        self._prefix = prefix
        self._folder = catalog_folder(prefix)
        self._plan = plan
        self._now = now_seconds
        self._alive = alive
        self._tell = tell
        self._files = Files(tier, self._folder, counts)
        self._report = Report(prefix)
        self._news: list[Rows] = []
        self._log = LogWriter(
            tier, self._folder, new_writer("c"), rows_max=ANNOUNCED_ROWS, seconds_max=0.0
        )

    async def run(self) -> Report:
        """Do it."""
        state = await load(self._files, self._now)
        if state.next_generation > NUMBER_MAX:
            raise TierUnavailable(
                f"{manifest_name(self._folder, NUMBER_MAX)} has the last number of all, and no "
                "sidecar made it: nothing here is compacted or collected; delete it",
                retryable=False,
            )
        again = self._plan.reconcile_seconds
        if again is not None and state.manifest.reconciled_seconds + again < self._now:
            self._plan = self._plan._replace(reconcile=True)
        self._report.whole = self._plan.whole or self._is_due(state)
        if self._report.whole:
            manifest = await self._whole(state)
        elif state.logs:
            manifest = await self._small(state)
        else:
            manifest = None
        if self._plan.dry_run:
            return self._report
        if manifest is not None:
            await self._create(manifest)
        self._report.generation = (manifest or state.manifest).generation
        await self._tidy(state, manifest or state.manifest)
        return self._report

    # --- when ------------------------------------------------------------------------------

    def _is_due(self, state: State) -> bool:
        """Whether there is more to do than to merge logs."""
        manifest, bounds = state.manifest, self._plan.bounds
        base_rows = max(0, manifest.rows - (len(state.fresh) - len(state.log_rows)))
        most = min(OVERLAY_ROWS_MAX, max(OVERLAY_ROWS, base_rows // OVERLAY_SHARE))
        if len(state.fresh) > most or len(manifest.snapshots) - manifest.base > OVERLAYS_MAX:
            return True
        if self._plan.reconcile or (state.doubt and not state.more):
            return True
        if manifest.base_withdrawn:
            # Withdrawing more before these are deleted would make them wait again, for ever.
            return self._deletes(manifest)
        held, tenants = _held(manifest, state.log_rows)
        if bounds.exceeded(held.size_bytes, held.objects, held.oldest, self._now):
            return True
        if len(manifest.tenants) >= TENANTS_MAX and bounds.tenant.exceeded(
            0, 0, held.oldest, self._now
        ):
            # It may be one of those that the manifest does not name.
            return True
        limits = bounds.of_tenants()
        return any(
            limits.limits(word_of(tenant)).exceeded(
                own.size_bytes, own.objects, own.oldest, self._now
            )
            for tenant, own in tenants.items()
        )

    def _deletes(self, manifest: Manifest) -> bool:
        """Whether what the base withdraws may be deleted now."""
        return 0 < manifest.base_seconds <= self._now - self._plan.grace_seconds

    async def _check_alive(self) -> None:
        if self._alive is not None and not await self._alive():
            raise Superseded("the lease is somebody else's")

    # --- a small round ---------------------------------------------------------------------

    async def _small(self, state: State) -> Manifest:
        rows, before = state.log_rows, state.manifest
        generation = state.next_generation
        names = [await self.write(generation, part, one) for part, one in _cut(rows)]
        held, tenants = _held(before, rows)
        largest = sorted(tenants.items(), key=lambda one: -one[1].size_bytes)[:TENANTS_MAX]
        return before.after(
            generation=generation,
            snapshots=(*before.snapshots, *names),
            rows=before.rows + len(rows),
            merged=self._merged(state, generation),
            held=held,
            tenants={tenant.hex(): own for tenant, own in largest},
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
        return found

    async def write(self, generation: int, part: int, rows: Rows) -> str:
        """Write one part of a snapshot; its name."""
        if self._plan.dry_run:
            return ""
        body = await anyio.to_thread.run_sync(encode, rows)
        name = snapshot_name(self._folder, generation, part, digest_of(body))
        await self._tier.write(name, body)
        return name

    # --- a whole round ---------------------------------------------------------------------

    async def _whole(self, state: State) -> Manifest:
        bounds, generation = self._plan.bounds, state.next_generation
        ages = await self._ages(state)
        verdict = await anyio.to_thread.run_sync(Verdict, bounds, ages, self._now)
        out = _Output(self, generation)
        deletes = self._deletes(state.manifest)
        self._report.logs_merged = len(state.logs)
        async for shard, found, withdrawn in Shards(self._files, state).rows():
            await self._check_alive()
            rows = found
            if self._plan.reconcile or (deletes and len(withdrawn)):
                objects = await self._objects(shard)
                if self._plan.reconcile:
                    rows = await self._reconciled(rows, objects)
                if deletes:
                    rows = await self._deleted(rows, withdrawn, objects)
            rows, gone, whys = await anyio.to_thread.run_sync(_judged, rows, verdict, self._report)
            if len(gone):
                if self._tell is not None:
                    await self._tell(gone, whys)
                await self._announce(withdrawals(gone))
            await out.add(rows)
        names = await out.close()
        await self._announce(None)
        census, held = self._report.census, self._report.census.whole
        self._report.waiting = census.withdrawn
        written = self._merged(state, generation)
        if self._log.files:
            written[self._log.writer] = Merged(self._log.files - 1, generation)
        # What was withdrawn by the manifest before does not begin to wait again.
        anew = (
            bool(self._report.withdrawn or self._report.lost)
            or not state.manifest.base_withdrawn
            or bool(np.any(state.fresh.size_bytes == 0))
        )
        tenants = {who.hex(): own for who, own in census.largest(TENANTS_MAX).items()}
        reconciled = 0.0 if state.doubt else state.manifest.reconciled_seconds
        return Manifest(
            generation=generation,
            snapshots=tuple(names),
            base=len(names),
            base_seconds=self._now if anew else state.manifest.base_seconds,
            base_withdrawn=census.withdrawn,
            rows=held.objects + census.withdrawn,
            held=held,
            merged=written,
            tenants=tenants,
            reconciled_seconds=self._now if self._plan.reconcile else reconciled,
        )

    async def _ages(self, state: State) -> Ages:
        """What is offered before the round, by age; only where a bound needs to know."""
        bounds = self._plan.bounds
        ages = Ages(bounds, self._now)
        if self._needs_ages(state):
            async for _, rows, _ in Shards(self._files, state).rows():
                await self._check_alive()
                await anyio.to_thread.run_sync(ages.add, rows)
        return ages

    def _needs_ages(self, state: State) -> bool:
        bounds = self._plan.bounds
        if bounds.capped or bounds.tenant.capped:
            return True
        if not bounds.capped_anywhere:
            return False
        # Named tenants alone have limits, and most namespaces hold nothing of theirs.
        known = state.manifest.tenants
        here = {bytes.fromhex(name) for name in known} | held_by_tenant(state.log_rows).keys()
        limits = bounds.of_tenants()
        capped = any(limits.limits(word_of(tenant)).capped for tenant in here)
        return capped or state.doubt or len(known) >= TENANTS_MAX

    async def _objects(self, shard: int) -> Objects:
        listing = await self._tier.list(slice_folder(self._prefix, shard))
        return {found.name: (found.size_bytes, found.modified_seconds) for found in listing}

    async def _reconciled(self, rows: Rows, objects: Objects) -> Rows:
        """The rows with what the objects say that they lack, or have too much."""
        found, lost = await anyio.to_thread.run_sync(
            compared, rows, objects, self._prefix, self._now
        )
        self._report.found += len(found)
        self._report.lost += len(lost)
        if not len(found) and not len(lost):
            return rows
        await self._announce(joined([found, lost]))
        return await anyio.to_thread.run_sync(merged, joined([rows, found, lost]))

    async def _deleted(self, rows: Rows, old: Rows, objects: Objects) -> Rows:
        """Delete what was withdrawn long enough ago; the rows without it."""
        rows, doomed = await anyio.to_thread.run_sync(deletable, rows, old, objects, self._prefix)
        if doomed and not self._plan.dry_run:
            await self._tier.delete(doomed)
        self._report.deleted += len(doomed)
        return rows

    async def _announce(self, rows: Rows | None) -> None:
        """Tell readers, some at a time; None: all that waits, now."""
        if rows is not None:
            self._news.append(rows)
        waiting = sum(len(one) for one in self._news)
        if not waiting or (rows is not None and waiting < ANNOUNCED_ROWS):
            return
        news, self._news = joined(self._news), []
        if not self._plan.dry_run:
            await self._log.write(news)

    # --- the manifest, and what it replaces ------------------------------------------------

    async def _create(self, manifest: Manifest) -> None:
        await self._check_alive()
        name = manifest_name(self._folder, manifest.generation)
        body = manifests.encode(manifest)
        try:
            await self._tier.write(name, body, create=True)
        except ObjectExists:
            # Perhaps our own, whose answer was lost.
            into = np.empty(len(body) + 1, dtype=np.uint8)
            try:
                size_bytes = await self._tier.read(name, into)
            except (ChunkMissing, ChunkCorrupt):
                size_bytes = 0
            if not np.array_equal(into[:size_bytes], body):
                raise Superseded(f"generation {manifest.generation} is another's") from None
        newest = max(sort_out(self._folder, await self._list("manifest")).manifests, default=-1)
        if newest != manifest.generation:
            raise Superseded(f"generation {newest} is there already")

    async def _list(self, folder: str) -> list[Found]:
        return await self._tier.list(f"{self._folder}/{folder}")

    async def _tidy(self, state: State, manifest: Manifest) -> None:
        """Remove files that nobody needs. What is left by an error is removed next time."""
        contents, old = state.contents, self._now - self._plan.keep_seconds
        names = _merged_logs(contents, state.manifest, old)
        for generation, found in contents.manifests.items():
            if generation <= manifest.generation - MANIFESTS_KEPT and found.modified_seconds < old:
                names.append(found.name)
        # Those of the manifest before too: it is what holds if the newest is damaged.
        used = {*manifest.snapshots, *state.manifest.snapshots}
        for name, found in contents.snapshots.items():
            if name not in used and found.modified_seconds < self._now - ABANDONED_SECONDS:
                names.append(name)
        if names:
            await self._tier.delete(names)
            self._report.files_removed = len(names)


class _Output:
    """Collects sorted rows into snapshots of a whole merge."""

    def __init__(self, round_: _Round, generation: int) -> None:
        self._round = round_
        self._generation = generation
        self._rows: list[Rows] = []
        self._names: list[str] = []

    async def add(self, rows: Rows) -> None:
        """Take the rows of the next shard."""
        if len(rows):
            self._rows.append(rows)
        if sum(len(one) for one in self._rows) >= SNAPSHOT_ROWS:
            await self._flush()

    async def close(self) -> list[str]:
        """Write what is left; the names of all files."""
        if self._rows:
            await self._flush()
        return self._names

    async def _flush(self) -> None:
        for _, rows in await anyio.to_thread.run_sync(_cut_all, self._rows):
            part = len(self._names)
            self._names.append(await self._round.write(self._generation, part, rows))
        self._rows = []


def _held(manifest: Manifest, rows: Rows) -> tuple[Holding, dict[bytes, Holding]]:
    """What a manifest and the rows of newer logs come to, in all and by tenant: an estimate."""
    tenants = {bytes.fromhex(name): held for name, held in manifest.tenants.items()}
    whole = manifest.held
    for tenant, held in held_by_tenant(rows).items():
        tenants[tenant] = tenants.get(tenant, Holding()).plus(held)
        whole = whole.plus(held)
    return whole, tenants


def _judged(rows: Rows, verdict: Verdict, report: Report) -> tuple[Rows, Rows, Whys]:
    """A shard's rows after what has to go is withdrawn; what that is, and why; counted."""
    whys = verdict.why(rows)
    going = np.flatnonzero(whys)
    gone, whys = rows.take(going), whys[going]
    if len(gone):
        report.count(gone, whys)
        rows = merged(joined([rows, withdrawals(gone)]))
    report.census.add(rows)
    return rows, gone, whys


def _cut_all(parts: list[Rows]) -> list[tuple[int, Rows]]:
    return _cut(joined(parts))


def _cut(rows: Rows) -> list[tuple[int, Rows]]:
    """Parts of a size that fits a file."""
    return [
        (part, rows.take(np.arange(first, min(first + SNAPSHOT_ROWS, len(rows)))))
        for part, first in enumerate(range(0, len(rows), SNAPSHOT_ROWS))
    ]


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


__all__ = ["Plan", "Report", "Superseded", "compact"]
