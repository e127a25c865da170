"""Usage: how much merged rows offer, by tenant, and by tenant and age, in columns.

Owns chunks as columns (`Chunks`), sums by tenant and span of time (`Sums`), and the totals that a
manifest, `kvlake du` and a round of collection tell (`UsageTable`). Does not own which chunks go
(`retention.py`), nor which row of several holds (`merge.py`).

A tenant is a number here, `word_of`: the eight bytes of a row, most significant first.

Invariants: pure; however many rows are added, memory is that of one cell of 48 bytes for each pair
of a tenant and a span, and as much again while they are joined.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import TENANT_BYTES, Longs

if TYPE_CHECKING:
    from tiers.catalog.rows import Rows

JOIN_CELLS_MIN: Final = 65_536
"""Fewer are not worth joining."""

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]


def word_of(tenant: bytes) -> int:
    """A tenant as a number; 0 for none."""
    return int.from_bytes(tenant, "big")


def tenant_of(word: int) -> bytes:
    """The tenant as rows name it."""
    return word.to_bytes(TENANT_BYTES, "big")


class Chunks:
    """Columns by chunk, of sorted rows that are offered: at least one."""

    def __init__(self, live: Rows) -> None:
        keys = live.keys
        starts = np.flatnonzero(np.r_[True, np.any(keys[1:] != keys[:-1], axis=1)])
        self.starts = starts
        self.times: Longs = np.maximum.reduceat(live.written_at, starts)
        """When each was last written."""
        self.sizes: Longs = np.add.reduceat(live.size_bytes, starts)
        self.counts: Longs = np.diff(np.r_[starts, len(live)])
        # A row that reconciliation made has no tenant; the others of its chunk do.
        self.tenants: Words = np.maximum.reduceat(words_of(live), starts)

    def __len__(self) -> int:
        return len(self.starts)


def words_of(rows: Rows) -> Words:
    """Whose each row is."""
    return np.ascontiguousarray(rows.tenants).view(">u8").ravel().astype(np.uint64)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Columns of equal length, sorted by tenant and then by span."""

    tenants: Words
    spans: Longs
    amounts: Longs
    """Shape [n, 3]: bytes, objects, chunks."""
    oldest: Longs
    """When the first of them was last written, in microseconds."""

    def __len__(self) -> int:
        return len(self.tenants)

    def take(self, chosen: npt.NDArray[np.intp]) -> Cells:
        """The cells of these indexes."""
        return Cells(
            self.tenants[chosen], self.spans[chosen], self.amounts[chosen], self.oldest[chosen]
        )


SIZE, OBJECTS, CHUNKS = range(3)
"""Columns of `Cells.amounts`."""

NO_CELLS: Final = Cells(
    np.zeros(0, dtype=np.uint64),
    np.zeros(0, dtype=np.int64),
    np.zeros((0, 3), dtype=np.int64),
    np.zeros(0, dtype=np.int64),
)


def joined_cells(cells: Cells) -> Cells:
    """One cell for each tenant and span that these cells, in any order, have."""
    if not len(cells):
        return cells
    order = np.lexsort((cells.spans, cells.tenants))
    tenants, spans = cells.tenants[order], cells.spans[order]
    new = np.r_[True, (tenants[1:] != tenants[:-1]) | (spans[1:] != spans[:-1])]
    starts = np.flatnonzero(new)
    return Cells(
        tenants[starts],
        spans[starts],
        np.add.reduceat(cells.amounts[order], starts, axis=0),
        np.minimum.reduceat(cells.oldest[order], starts),
    )


class Sums:
    """Cells, which are added as they come and joined now and then."""

    def __init__(self) -> None:
        self._joined = NO_CELLS
        self._waiting: list[Cells] = []
        self._num_waiting = 0

    def add(self, cells: Cells) -> None:
        """Add cells, in any order."""
        part = joined_cells(cells)
        self._waiting.append(part)
        self._num_waiting += len(part)
        if self._num_waiting > max(JOIN_CELLS_MIN, len(self._joined)):
            self._join()

    @property
    def num_joined(self) -> int:
        """How many cells there are, without those that were added since they were last joined."""
        return len(self._joined)

    @property
    def cells(self) -> Cells:
        """All that were added."""
        if self._waiting:
            self._join()
        return self._joined

    def _join(self) -> None:
        parts = [self._joined, *self._waiting]
        self._waiting, self._num_waiting = [], 0
        self._joined = joined_cells(
            Cells(
                np.concatenate([part.tenants for part in parts]),
                np.concatenate([part.spans for part in parts]),
                np.concatenate([part.amounts for part in parts]),
                np.concatenate([part.oldest for part in parts]),
            )
        )

    def coarsen(self) -> None:
        """Make spans twice as long."""
        cells = self.cells
        self._joined = joined_cells(replace(cells, spans=cells.spans >> 1))


class Usage(NamedTuple):
    """What one tenant, or all, have in a namespace."""

    size_bytes: int = 0
    objects: int = 0
    oldest: int = 0
    """Microseconds since 1970: none of its chunks was last written before; 0 for no chunks."""
    chunks: int = 0

    def plus(self, other: Usage) -> Usage:
        """Both together."""
        return Usage(
            self.size_bytes + other.size_bytes,
            self.objects + other.objects,
            earlier(self.oldest, other.oldest),
            self.chunks + other.chunks,
        )


def earlier(one: int, other: int) -> int:
    """The earlier of two times, where 0 is none."""
    return min(one, other) if one and other else one or other


@dataclass(slots=True)
class UsageTable:
    """What is offered, in all and by tenant."""

    withdrawn: int = 0
    """Segments that are withdrawn and whose objects may still be there."""
    _sums: Sums = field(default_factory=Sums)

    def add(self, rows: Rows) -> None:
        """Count merged rows; all of a chunk must come together."""
        self.withdrawn += int(np.count_nonzero(rows.size_bytes == 0))
        live = rows.take(rows.size_bytes > 0)
        if len(live):
            chunks = Chunks(live)
            self._sums.add(cells_of(chunks, np.zeros(len(chunks), dtype=np.int64)))

    @property
    def whole(self) -> Usage:
        """Of all tenants."""
        cells = self._sums.cells
        if not len(cells):
            return Usage()
        sums: list[int] = cells.amounts.sum(axis=0).tolist()
        return Usage(sums[SIZE], sums[OBJECTS], int(cells.oldest.min()), sums[CHUNKS])

    @property
    def num_tenants(self) -> int:
        """How many tenants hold anything."""
        return len(self._sums.cells)

    def largest(self, most: int) -> dict[bytes, Usage]:
        """The tenants that hold most bytes, at most so many, the largest first."""
        cells = self._sums.cells
        order = np.argsort(-cells.amounts[:, SIZE], kind="stable")[:most]
        return holdings(cells.take(order))


def cells_of(chunks: Chunks, spans: Longs) -> Cells:
    """One cell for each chunk."""
    ones: Longs = np.ones(len(chunks), dtype=np.int64)
    amounts: Longs = np.stack([chunks.sizes, chunks.counts, ones], axis=1)
    return Cells(chunks.tenants, spans, amounts, chunks.times)


def cells_by_tenant(rows: Rows) -> Cells:
    """What rows in any order offer, a cell for each tenant; a row counts as a chunk."""
    live = rows.take(rows.size_bytes > 0)
    if not len(live):
        return NO_CELLS
    ones: Longs = np.ones(len(live), dtype=np.int64)
    amounts: Longs = np.stack([live.size_bytes, ones, ones], axis=1)
    spans: Longs = np.zeros(len(live), dtype=np.int64)
    words = words_of(live)
    if np.all(words == words[0]):
        # As most files are: one tenant's, which need not be sorted.
        oldest = live.written_at.min(keepdims=True)
        return Cells(words[:1], spans[:1], amounts.sum(axis=0, keepdims=True), oldest)
    return joined_cells(Cells(words, spans, amounts, live.written_at))


def held_by_tenant(rows: Rows) -> dict[bytes, Usage]:
    """The same, by tenant as rows name it."""
    return holdings(cells_by_tenant(rows))


def holdings(cells: Cells) -> dict[bytes, Usage]:
    """What each tenant holds, by its bytes, of cells that have each tenant once."""
    columns = zip(
        cells.tenants.tolist(), cells.amounts.tolist(), cells.oldest.tolist(), strict=True
    )
    return {
        tenant_of(word): Usage(amounts[SIZE], amounts[OBJECTS], oldest, amounts[CHUNKS])
        for word, amounts, oldest in columns
    }
