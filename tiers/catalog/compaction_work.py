"""What the parts of a compaction share: its plan, its report, and the snapshots that it writes.

Does not own any step of a compaction (`compaction.py`, `major_compaction.py`), or the columns of
snapshots (`rows.py`).

Invariant: a snapshot's name has its generation, its part and the digest of its bytes, so writing it
again, or by two processes at once, leaves the same file.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from tiers.catalog.names import snapshot_name
from tiers.catalog.reader import Files
from tiers.catalog.retention import REASONS, Reasons, RetentionRules
from tiers.catalog.rows import Rows, cut, digest_of, encode, joined
from tiers.catalog.scan import Superseded
from tiers.catalog.usage import OBJECTS, Chunks, Sums, UsageTable, cells_of
from tiers.store.object_tier import ObjectTier

OnWithdrawn = Callable[[Rows, Reasons], Awaitable[None]]


SNAPSHOT_ROWS: Final = 250_000
"""Rows in one file of a major compaction: 25 MB."""


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
    found: int = 0
    """Objects that no row named, or that a reader missed."""
    lost: int = 0
    """Rows whose object was gone."""
    files_removed: int = 0

    def count_withdrawn(self, rows: Rows, reasons: Reasons) -> None:
        """Count merged rows that a shard withdraws."""
        self.withdrawn += len(rows)
        self.withdrawn_bytes += int(rows.size_bytes.sum())
        chunks = Chunks(rows)
        self.withdrawn_cells.add(cells_of(chunks, reasons[chunks.starts].astype(np.int64)))

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
    """Writes sorted rows as they come into files of one size; None for a tier only counts files."""

    def __init__(self, tier: ObjectTier | None, folder: str, generation: int) -> None:
        self._tier = tier
        self._folder = folder
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
        for part in await anyio.to_thread.run_sync(lambda: cut(joined(rows), SNAPSHOT_ROWS)):
            name = ""
            if self._tier is not None:
                body = await anyio.to_thread.run_sync(encode, part)
                number = len(self._names)
                name = snapshot_name(self._folder, self._generation, number, digest_of(body))
                await self._tier.write(name, body)
            self._names.append(name)
        return self._names
