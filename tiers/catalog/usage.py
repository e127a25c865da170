"""How much merged rows offer, by tenant, and by tenant and age, in columns.

Owns chunks as columns (`Chunks`), sums by tenant and span of time (`Sums`), the totals of a whole
catalog (`UsageTable`), and the usage of one log that no manifest counts yet (`LogUsage`). Does not
own which chunks go (`retention.py`), the rule of merging (`merge.py`), or files (`log.py`).

A tenant is a number in columns, `word_of`: the eight bytes of a row, most significant first.

Invariants: pure; however many rows are added to `Sums`, memory is one cell of 48 bytes for each
pair of a tenant and a span, and as much again while cells are joined.
"""

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import NO_TENANT, TENANT_BYTES, Longs, Row, Rows

JOIN_CELLS_MIN: Final = 65_536
"""Fewer cells are not worth joining."""
LOG_SUMS_MAX: Final = 32
"""Sums of one log. A query for a tenant looks into each."""
_NOT_SENT: Final = -1

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
AMOUNT_MAX: Final = 1 << 62
Amount = Annotated[int, msgspec.Meta(ge=0, le=AMOUNT_MAX)]
"""Bounded, because JSON has numbers of any length, and a metric is a float."""


UNKNOWN_TENANT: Final = bytes(TENANT_BYTES - 1) + b"\1"
"""Stands in usage and manifests, never in rows, for the tenant of objects that a listing found."""


def word_of(tenant: bytes) -> int:
    """A tenant as a number; 0 for none."""
    return int.from_bytes(tenant, "big")


def tenant_of(word: int) -> bytes:
    """The tenant as rows name it."""
    return word.to_bytes(TENANT_BYTES, "big")


_UNKNOWN_WORD: Final = np.uint64(word_of(UNKNOWN_TENANT))


def words_of(rows: Rows) -> Words:
    """The tenant of each row. Only rows that were made of a listing have no number of blocks."""
    words = np.ascontiguousarray(rows.tenants).view(">u8").ravel().astype(np.uint64)
    return np.where((words == 0) & (rows.num_blocks == 0), _UNKNOWN_WORD, words)


class Usage(NamedTuple):
    """What one tenant, or all, have in a namespace."""

    size_bytes: Amount = 0
    objects: Amount = 0
    oldest: Amount = 0
    """Microseconds since 1970: no chunk was last written before; 0 without chunks."""
    chunks: Amount = 0

    def plus(self, other: "Usage") -> "Usage":
        """Both together."""
        return Usage(
            self.size_bytes + other.size_bytes,
            self.objects + other.objects,
            # 0 is no time.
            min(self.oldest, other.oldest) or self.oldest or other.oldest,
            self.chunks + other.chunks,
        )


NO_USAGE: Final = Usage()


def sum_of(usages: Iterable[Usage]) -> Usage:
    """All of these together."""
    return functools.reduce(Usage.plus, usages, NO_USAGE)


def run_starts(rows: npt.NDArray[Any]) -> npt.NDArray[np.intp]:
    """Where each run of equal rows begins; in sorted keys, where each chunk does."""
    differs = rows[1:] != rows[:-1]
    if differs.ndim > 1:
        differs = differs.any(axis=1)
    return np.flatnonzero(np.r_[len(rows) > 0, differs])


class Chunks:
    """Columns by chunk, of sorted rows that are offered."""

    def __init__(self, live: Rows) -> None:
        self.starts = starts = run_starts(live.keys)
        self.times: Longs = np.maximum.reduceat(live.written_at, starts)
        """When each was last written."""
        self.sizes: Longs = np.add.reduceat(live.size_bytes, starts)
        self.counts: Longs = np.diff(np.r_[starts, len(live)])
        # The tenant of a row that reconciliation made is that of the others of its chunk.
        words = words_of(live)
        largest: Words = np.maximum.reduceat(words, starts)
        unknown = largest == _UNKNOWN_WORD
        self.tenants: Words = np.where(unknown, np.minimum.reduceat(words, starts), largest)

    def __len__(self) -> int:
        return len(self.starts)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Columns of equal length, sorted by tenant and then by span."""

    tenants: Words
    spans: Longs
    amounts: Longs
    """Shape [n, 3]: bytes, objects, chunks."""
    oldest: Longs
    """When the first of the chunks was last written, in microseconds."""

    def __len__(self) -> int:
        return len(self.tenants)

    def take(self, chosen: npt.NDArray[np.intp]) -> "Cells":
        """The cells of these indexes."""
        return Cells(*(getattr(self, one)[chosen] for one in _COLUMNS))


_COLUMNS: Final = tuple(one.name for one in fields(Cells))
SIZE, OBJECTS, CHUNKS = range(3)
"""Columns of `Cells.amounts`."""

NO_CELLS: Final = Cells(
    np.zeros(0, dtype=np.uint64),
    np.zeros(0, dtype=np.int64),
    np.zeros((0, 3), dtype=np.int64),
    np.zeros(0, dtype=np.int64),
)


def joined_cells(cells: Cells) -> Cells:
    """One cell for each tenant and span of these cells, which may be in any order."""
    order = np.lexsort((cells.spans, cells.tenants))
    tenants, spans = cells.tenants[order], cells.spans[order]
    new = np.r_[len(cells) > 0, (tenants[1:] != tenants[:-1]) | (spans[1:] != spans[:-1])]
    starts = np.flatnonzero(new)
    return Cells(
        tenants[starts],
        spans[starts],
        np.add.reduceat(cells.amounts[order], starts, axis=0),
        np.minimum.reduceat(cells.oldest[order], starts),
    )


class Sums:
    """Cells that are added as they come and joined now and then."""

    def __init__(self) -> None:
        self.joined = NO_CELLS
        """The cells at the last join."""
        self._waiting: list[Cells] = []
        self._num_waiting = 0

    def add(self, cells: Cells) -> None:
        """Add cells, in any order."""
        part = joined_cells(cells)
        self._waiting.append(part)
        self._num_waiting += len(part)
        if self._num_waiting > max(JOIN_CELLS_MIN, len(self.joined)):
            self._join()

    @property
    def cells(self) -> Cells:
        """All that were added."""
        if self._waiting:
            self._join()
        return self.joined

    def _join(self) -> None:
        parts = [self.joined, *self._waiting]
        self._waiting, self._num_waiting = [], 0
        columns = [np.concatenate([getattr(part, one) for part in parts]) for one in _COLUMNS]
        self.joined = joined_cells(Cells(*columns))

    def coarsen(self) -> None:
        """Make spans twice as long."""
        cells = self.cells
        self.joined = joined_cells(replace(cells, spans=cells.spans >> 1))


@dataclass(slots=True)
class UsageTable:
    """What a whole catalog offers, in total and by tenant."""

    withdrawn: int = 0
    """Segments that are withdrawn and whose objects may still be there."""
    _sums: Sums = field(default_factory=Sums)

    def add(self, rows: Rows) -> None:
        """Count merged rows; all rows of a chunk must come together."""
        self.withdrawn += int(np.count_nonzero(rows.size_bytes == 0))
        chunks = Chunks(rows.take(rows.size_bytes > 0))
        self._sums.add(cells_of(chunks, np.zeros(len(chunks), dtype=np.int64)))

    @property
    def total(self) -> Usage:
        """Usage of all tenants."""
        cells = self._sums.cells
        if not len(cells):
            return NO_USAGE
        sums: list[int] = cells.amounts.sum(axis=0).tolist()
        return Usage(sums[SIZE], sums[OBJECTS], int(cells.oldest.min()), sums[CHUNKS])

    @property
    def num_tenants(self) -> int:
        """How many tenants have anything."""
        return len(self._sums.cells)

    def largest(self, most: int) -> dict[bytes, Usage]:
        """The `most` tenants with most bytes, the largest first."""
        cells = self._sums.cells
        order = np.argsort(-cells.amounts[:, SIZE], kind="stable")[:most]
        return usage_by_tenant(cells.take(order))


def cells_of(chunks: Chunks, spans: Longs) -> Cells:
    """One cell for each chunk."""
    ones: Longs = np.ones(len(chunks), dtype=np.int64)
    amounts: Longs = np.stack([chunks.sizes, chunks.counts, ones], axis=1)
    return Cells(chunks.tenants, spans, amounts, chunks.times)


def cells_by_tenant(rows: Rows) -> Cells:
    """What rows in any order offer, a cell for each tenant. Each row counts as a chunk."""
    live = rows.take(rows.size_bytes > 0)
    ones: Longs = np.ones(len(live), dtype=np.int64)
    amounts: Longs = np.stack([live.size_bytes, ones, ones], axis=1)
    spans: Longs = np.zeros(len(live), dtype=np.int64)
    words = words_of(live)
    if len(words) and np.all(words == words[0]):
        # Most files are of one tenant and need no sorting.
        oldest = live.written_at.min(keepdims=True)
        return Cells(words[:1], spans[:1], amounts.sum(axis=0, keepdims=True), oldest)
    return joined_cells(Cells(words, spans, amounts, live.written_at))


def usage_by_tenant(cells: Cells) -> dict[bytes, Usage]:
    """Usage by tenant as rows name it, of cells that have each tenant once."""
    columns = zip(
        cells.tenants.tolist(), cells.amounts.tolist(), cells.oldest.tolist(), strict=True
    )
    return {
        tenant_of(word): Usage(amounts[SIZE], amounts[OBJECTS], oldest, amounts[CHUNKS])
        for word, amounts, oldest in columns
    }


class TenantUsage:
    """Usage that is added as it comes, by tenant and in total."""

    def __init__(self) -> None:
        self.tenants: dict[bytes, Usage] = {}
        self.total = NO_USAGE

    def add(self, usages: Mapping[bytes, Usage]) -> None:
        """Add the usage of some tenants."""
        for tenant, usage in usages.items():
            self.tenants[tenant] = self.tenants.get(tenant, NO_USAGE).plus(usage)
            self.total = self.total.plus(usage)


class _LogSum(TenantUsage):
    """The usage of consecutive rows of a log."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.end = end
        """Rows of the log up to the last one of these."""
        self.number = _NOT_SENT
        """The file that has the last row."""


class LogUsage:
    """The usage of the rows of one log that no manifest counts yet.

    A manifest counts whole files of a log up to a number. So rows are summed by the file that they
    went into, and those that wait for the next file together. A row counts from `add` until
    `merged` names its file. Beyond `LOG_SUMS_MAX` sums the two oldest become one, which
    counts until the later of their files is merged: too much for a while, never too little.
    """

    def __init__(self) -> None:
        self.sums: deque[_LogSum] = deque()
        self._open = False
        """Whether the last sum takes more rows."""
        self._rows = 0
        self._rows_sent = 0
        self._merged = -1

    def add(self, row: Row) -> None:
        """Count a row that waits to be sent. A withdrawal has no usage."""
        self._rows += 1
        if not self._open:
            self.sums.append(_LogSum(self._rows))
            self._open = True
        last = self.sums[-1]
        last.end = self._rows
        if row.size_bytes:
            tenant = row.tenant or (NO_TENANT if row.num_blocks else UNKNOWN_TENANT)
            last.add({tenant: Usage(row.size_bytes, 1, row.written_at, 1)})

    def cut(self) -> None:
        """A file is made of the rows so far; later rows go into another."""
        self._open = False

    def sent(self, number: int, rows: int) -> None:
        """File `number` is in the store, with the next `rows` rows."""
        self._rows_sent += rows
        for one in self.sums:
            if one.number == _NOT_SENT and one.end <= self._rows_sent:
                one.number = number
        self._settle()

    def merged(self, number: int) -> None:
        """A manifest counts the files up to this one."""
        self._merged = number
        self._settle()

    def _settle(self) -> None:
        sums = self.sums
        while sums and _NOT_SENT < sums[0].number <= self._merged:
            sums.popleft()
        while len(sums) > LOG_SUMS_MAX and sums[1].number != _NOT_SENT:
            first, second = sums.popleft(), sums.popleft()
            first.add(second.tenants)
            first.end, first.number = second.end, second.number
            sums.appendleft(first)

    @property
    def total(self) -> Usage:
        """Usage of all tenants together."""
        return sum_of(one.total for one in self.sums)

    def of(self, tenant: bytes) -> Usage:
        """Usage of one tenant, as rows name it."""
        return sum_of(one.tenants.get(tenant, NO_USAGE) for one in self.sums)
