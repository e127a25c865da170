"""One round of compaction: what it is to do, what it did, and what its parts share.

Owns `CompactionPlan`, `CompactionReport`, and `CompactionWork`, which holds both with the store and
the catalog's folder. Does not own any step of a round (`compaction.py`, `major_compaction.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tiers.catalog.names import catalog_folder
from tiers.catalog.retention import BOUNDS, RetentionRules, Whys
from tiers.catalog.scan import Superseded
from tiers.catalog.usage import OBJECTS, Chunks, Sums, UsageTable, cells_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.catalog.reader import Files
    from tiers.catalog.rows import Rows
    from tiers.store.object_tier import ObjectTier

    Tell = Callable[[Rows, Whys], Awaitable[None]]


class CompactionPlan(NamedTuple):
    """What a round is to do."""

    bounds: RetentionRules
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
class CompactionReport:
    """What a round did, or with `dry_run` would have done."""

    prefix: str
    whole: bool = False
    generation: int = -1
    logs_merged: int = 0
    logs_left: int = 0
    """Log files that are too much for one round: the next one goes on with them."""
    census: UsageTable = field(default_factory=UsageTable)
    """Of a whole round: what is offered after it."""
    withdrawn: int = 0
    withdrawn_bytes: int = 0
    fallen: Sums = field(default_factory=Sums)
    """What was withdrawn, by tenant and by the bound that it fell to (`Why`)."""
    deleted: int = 0
    waiting: int = 0
    """Withdrawn segments whose time to be deleted has not come."""
    found: int = 0
    """Objects that no row named, or that somebody missed."""
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


@dataclass(slots=True)
class CompactionWork:
    """One round, for its parts."""

    tier: ObjectTier
    prefix: str
    plan: CompactionPlan
    now_seconds: float
    """The time by the store's clock."""
    files: Files
    report: CompactionReport
    alive: Callable[[], Awaitable[bool]] | None
    tell: Tell | None

    @property
    def folder(self) -> str:
        """The catalog's."""
        return catalog_folder(self.prefix)

    @property
    def deletable_before(self) -> float:
        """What was withdrawn before this moment may be deleted."""
        return self.now_seconds - self.plan.grace_seconds

    async def check_alive(self) -> None:
        """Raise `Superseded` where somebody else has the lease."""
        if self.alive is not None and not await self.alive():
            raise Superseded("the lease is somebody else's")
