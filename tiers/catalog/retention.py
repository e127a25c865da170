"""Retention: how old and how much a namespace and each of its tenants may be, and which chunks go.

Owns the limits, the amounts by age that they apply to (`Ages`), and the decision on each chunk.
Does not own I/O, clocks, merging, or when any of this is done.

Chunks go whole and oldest first, by when they were last written: a store does not know when a chunk
was last read. What is too old goes first, then what tenants have too much, then what the namespace
has too much of the rest, so none goes for room that another has made. Limits of age are exact. For
bytes and objects, chunks written in one span are of one age, and no more of it goes than needed. A
span is a minute, or longer where `CELLS_MAX` would be exceeded. How much of its oldest span a
tenant keeps is an estimate when the namespace's own excess is computed.

Invariants: pure; the same chunks in the same order get the same decision; memory is bounded by
`CELLS_MAX`, or by the number of tenants.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import Longs, Rows
from tiers.catalog.usage import (
    CHUNKS,
    OBJECTS,
    SIZE,
    UNKNOWN_TENANT,
    Cells,
    Chunks,
    Mask,
    Sums,
    Usage,
    Words,
    cells_of,
    joined_cells,
    run_starts,
    word_of,
)

MICROSECONDS: Final = 1_000_000
FUTURE_SECONDS_MAX: Final = 24 * 3600
"""A row this far ahead comes from a wrong clock and has no usable age."""
CELLS_MAX: Final = 1 << 19
"""Pairs of a tenant and a span: 25 MB."""
COARSEST: Final = 20
"""How often a span is made twice as long: a million minutes are two years."""
NO_LIMIT: Final = 1 << 61
_MINUTE: Final = 60 * MICROSECONDS
_ROUNDING: Final = 1e-6

Reasons = npt.NDArray[np.uint8]


class RetentionReason(enum.IntEnum):
    """Which limit withdraws a chunk."""

    KEPT = 0, ""
    CLOCK = 1, "clock"
    TTL = 2, "store.ttl"
    TENANT_TTL = 3, "tenants.store_ttl"
    TENANT_SIZE = 4, "tenants.store_max"
    TENANT_OBJECTS = 5, "tenants.store_objects_max"
    SIZE = 6, "store.size_max"
    OBJECTS = 7, "store.objects_max"

    setting: str
    """The configuration key. `clock` is for a time ahead of the store, where there is a TTL."""

    def __new__(cls, number: int, setting: str = "") -> Self:
        """A number, and the setting of that name."""
        reason = int.__new__(cls, number)
        reason._value_, reason.setting = number, setting
        return reason


REASONS: Final = tuple(one for one in RetentionReason if one is not RetentionReason.KEPT)


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    """How old and how much. None: no limit."""

    ttl_seconds: float | None = None
    size_bytes_max: int | None = None
    objects_max: int | None = None

    @property
    def capped(self) -> bool:
        """Whether bytes or objects are limited."""
        return self.size_bytes_max is not None or self.objects_max is not None

    def exceeded(self, usage: Usage, now_seconds: float) -> bool:
        """Whether that is too much or too old."""
        if self.size_bytes_max is not None and usage.size_bytes > self.size_bytes_max:
            return True
        if self.objects_max is not None and usage.objects > self.objects_max:
            return True
        ttl = self.ttl_seconds
        return ttl is not None and 0 < usage.oldest < int((now_seconds - ttl) * MICROSECONDS)


@dataclass(frozen=True, slots=True)
class RetentionRules(RetentionLimits):
    """The limits of a namespace, and within it those of its tenants."""

    tenant: RetentionLimits = field(default_factory=RetentionLimits)
    """Limits of each tenant that is not in `named`."""
    named: Mapping[bytes, RetentionLimits] = field(default_factory=dict[bytes, RetentionLimits])
    """By tenant: b"" or zeros for requests without a cache salt."""

    @property
    def tenants_capped(self) -> bool:
        """Whether bytes or objects of any tenant are limited."""
        return self.tenant.capped or any(one.capped for one in self.named.values())


class TenantLimits:
    """Limits by tenant, as columns."""

    def __init__(self, rules: RetentionRules) -> None:
        self._default = rules.tenant
        self._named = {word_of(tenant): one for tenant, one in sorted(rules.named.items())}
        # Nothing stays longer than the tenant that it may belong to lets it.
        ttls = [one.ttl_seconds for one in (rules.tenant, *self._named.values())]
        shortest = min((one for one in ttls if one is not None), default=None)
        self._named[word_of(UNKNOWN_TENANT)] = RetentionLimits(shortest)
        words = sorted(self._named)
        self._words: Words = np.array(words, dtype=np.uint64)
        every = [self._named[word] for word in words] + [self._default]
        self.ttl = _column([_micros(one.ttl_seconds) for one in every])
        self.size_bytes_max = _column([one.size_bytes_max for one in every])
        self.objects_max = _column([one.objects_max for one in every])

    def of(self, word: int) -> RetentionLimits:
        """The limits of one tenant."""
        return self._named.get(word, self._default)

    def values(self, column: Longs, tenants: Words) -> Longs:
        """The values of one of the columns for these tenants; `NO_LIMIT` for none."""
        at, named = _find(self._words, tenants)
        return np.where(named, column[at], column[-1])


def _find(words: Words, tenants: Words) -> tuple[npt.NDArray[np.intp], Mask]:
    """Where each tenant is in sorted words, and whether it is there."""
    at = np.searchsorted(words, tenants)
    found: Mask = np.zeros(len(tenants), dtype=np.bool_)
    inside = at < len(words)
    found[inside] = words[at[inside]] == tenants[inside]
    return np.where(found, at, 0), found


def _micros(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * MICROSECONDS)


def _column(values: list[int | None]) -> Longs:
    limits = [NO_LIMIT if one is None else min(one, NO_LIMIT) for one in values]
    return np.array(limits, dtype=np.int64)


class Ages:
    """Which chunks are too old, and what is offered of the others, by tenant and age."""

    def __init__(self, rules: RetentionRules, now_seconds: float) -> None:
        self.rules = rules
        self.limits = TenantLimits(rules)
        self._now = int(now_seconds * MICROSECONDS)
        [self._ttl] = _column([_micros(rules.ttl_seconds)]).tolist()
        self._by_tenant = rules.tenants_capped
        self.sums = Sums()
        """All that was counted."""
        self._coarse = 0

    def add(self, rows: Rows) -> None:
        """Count merged rows; all rows of a chunk must come together."""
        chunks = Chunks(rows.take(rows.size_bytes > 0))
        cells = cells_of(chunks, self.spans(chunks.times))
        if not self._by_tenant:
            cells = replace(cells, tenants=np.zeros(len(cells), dtype=np.uint64))
        kept = np.flatnonzero(self.expired(chunks) == RetentionReason.KEPT)
        self.sums.add(cells.take(kept))
        while self._coarse < COARSEST and len(self.sums.joined) > CELLS_MAX:
            self._coarse += 1
            self.sums.coarsen()

    def expired(self, chunks: Chunks) -> Reasons:
        """For each chunk, the TTL that it exceeds: shape [n]."""
        own = self.limits.values(self.limits.ttl, chunks.tenants)
        found: Reasons = np.zeros(len(chunks), dtype=np.uint8)
        found[chunks.times < self._now - own] = RetentionReason.TENANT_TTL
        found[chunks.times < self._now - self._ttl] = RetentionReason.TTL
        bounded = np.minimum(own, self._ttl) < NO_LIMIT
        future = self._now + FUTURE_SECONDS_MAX * MICROSECONDS
        found[bounded & (chunks.times > future)] = RetentionReason.CLOCK
        return found

    def spans(self, times: Longs) -> Longs:
        """The span of each time."""
        return times // _MINUTE >> self._coarse


class _Excess:
    """How much has to go of each tenant, or of all as one: oldest spans first."""

    def __init__(self, cells: Cells, kind: int, most: Longs) -> None:
        """`cells` are sorted; `most` is the limit of each tenant that they have, in order."""
        amounts = cells.amounts[:, kind]
        starts = run_starts(cells.tenants)
        excess = np.add.reduceat(amounts, starts) - most
        over = np.flatnonzero(excess > 0)
        before = _before_each(amounts, starts)
        scope = _scopes(starts, len(amounts))
        needed = np.add.reduceat((before < excess[scope]).astype(np.int64), starts)
        last = (starts + needed - 1)[over]
        self._tenants: Words = cells.tenants[starts][over]
        self._before: Longs = cells.spans[last]
        """Chunks of earlier spans go."""
        self._left: Longs = excess[over] - before[last]
        """How much of this span's goes."""

    def takes(self, tenants: Words, spans: Longs, amounts: Longs) -> Mask:
        """Which of these chunks go. Depends on the chunks of earlier calls."""
        at, mine = _find(self._tenants, tenants)
        if not mine.any():
            return mine
        going: Mask = mine & (spans < self._before[at])
        edge = np.flatnonzero(mine & (spans == self._before[at]) & (self._left[at] > 0))
        if len(edge):
            edge = edge[np.argsort(at[edge], kind="stable")]
            scope, mass = at[edge], amounts[edge]
            starts = run_starts(scope)
            chosen = _before_each(mass, starts) < self._left[scope]
            going[edge[chosen]] = True
            self._left[scope[starts]] -= np.add.reduceat(np.where(chosen, mass, 0), starts)
        return going

    def share(self, cells: Cells, kind: int) -> npt.NDArray[np.float64]:
        """The estimated part of each cell that goes. To be called before `takes`."""
        at, mine = _find(self._tenants, cells.tenants)
        if not mine.any():
            return np.zeros(len(cells))
        edge = np.minimum(1.0, self._left[at] / np.maximum(1, cells.amounts[:, kind]))
        last = self._before[at]
        return np.select([~mine, cells.spans < last, cells.spans == last], [0.0, 1.0, edge])


def _scopes(starts: npt.NDArray[np.intp], total: int) -> npt.NDArray[np.intp]:
    """The run of each element."""
    return np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, total]))


def _before_each(amounts: Longs, starts: npt.NDArray[np.intp]) -> Longs:
    """The sum of the earlier elements of each element's run."""
    before = np.cumsum(amounts) - amounts
    result: Longs = before - before[starts][_scopes(starts, len(amounts))]
    return result


class RetentionDecision:
    """Which chunks go, and for what. `ages` has all of them; pass each chunk once, in any order."""

    def __init__(self, ages: Ages) -> None:
        self._ages = ages
        rules, cells, tenants = ages.rules, ages.sums.cells, ages.limits
        present = cells.tenants[run_starts(cells.tenants)]
        sizes = tenants.values(tenants.size_bytes_max, present)
        objects = tenants.values(tenants.objects_max, present)
        self._tenants = (_Excess(cells, SIZE, sizes), _Excess(cells, OBJECTS, objects))
        # What goes for a tenant's limits makes room under the namespace's.
        goes = np.maximum(
            self._tenants[0].share(cells, SIZE), self._tenants[1].share(cells, OBJECTS)
        )
        # From the oldest span that stays in part, whole chunks of its mean size.
        count = np.maximum(1, cells.amounts[:, CHUNKS])
        goes = np.ceil(goes * count - _ROUNDING) / count
        left = cells.amounts - np.ceil(cells.amounts * goes[:, None] - _ROUNDING).astype(np.int64)
        no_tenant = np.zeros(len(cells), dtype=np.uint64)
        total = joined_cells(replace(cells, tenants=no_tenant, amounts=left))
        self._namespace = (
            _Excess(total, SIZE, _column([rules.size_bytes_max])),
            _Excess(total, OBJECTS, _column([rules.objects_max])),
        )

    def reasons(self, rows: Rows) -> Reasons:
        """For each of these merged rows, the limit that withdraws it: shape [n]."""
        found: Reasons = np.zeros(len(rows), dtype=np.uint8)
        offered = np.flatnonzero(rows.size_bytes > 0)
        chunks = Chunks(rows.take(offered))
        found[offered] = np.repeat(self._of_chunks(chunks), chunks.counts)
        return found

    def _of_chunks(self, chunks: Chunks) -> Reasons:
        found = self._ages.expired(chunks)
        spans = self._ages.spans(chunks.times)
        no_tenant = np.zeros(len(chunks), dtype=np.uint64)
        reason = RetentionReason
        for scopes, tenants, kinds in (
            (self._tenants, chunks.tenants, (reason.TENANT_SIZE, reason.TENANT_OBJECTS)),
            (self._namespace, no_tenant, (reason.SIZE, reason.OBJECTS)),
        ):
            left = np.flatnonzero(found == reason.KEPT)
            if not len(left):
                break
            # Both get all chunks, because what goes for one makes room under the other.
            amounts = (chunks.sizes[left], chunks.counts[left])
            for scope, kind, amount in zip(scopes, kinds, amounts, strict=True):
                goes = scope.takes(tenants[left], spans[left], amount)
                free = left[goes]
                found[free[found[free] == reason.KEPT]] = kind
        return found
