"""Merging rows: which of several rows of one segment holds, and who has to go.

Owns the rule of the catalog (of the rows of a segment the latest holds, and of the same time the
withdrawal), sorting by key, cutting into shards by a key's first byte, and choosing what goes to
keep a namespace within its bounds. Does not own I/O, clocks, or when any of this is done.

Chunks go whole and oldest first, by when they were last written: a store does not know when
anything was last read. What a bound says is exact for age; for bytes and objects, chunks written
in one minute are of one age.

Invariants: pure; merging is associative, commutative and idempotent, so it does not matter which
compactor merged what, how often, or in which order.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tiers.catalog.rows import NO_TENANT, Longs, Rows

if TYPE_CHECKING:
    from collections.abc import Callable

SHARDS: Final = 256
MICROSECONDS: Final = 1_000_000
_MINUTE: Final = 60 * MICROSECONDS
FUTURE_SECONDS_MAX: Final = 24 * 3600
"""A row this far ahead comes from a clock that is off, and has no age to speak of."""

Mask = npt.NDArray[np.bool_]


def merged(rows: Rows) -> Rows:
    """One row for each segment, sorted by key."""
    if not len(rows):
        return rows
    words = np.ascontiguousarray(rows.keys).view(">u8").astype(np.uint64)
    withdrawn = rows.size_bytes == 0
    # The names, not their numbers: those are a file's own.
    names = np.argsort(np.argsort(np.array(rows.segments, dtype=object))).astype(np.int64)
    segments = names[rows.segment_ids]
    # The last column is the most significant. Size and tenant only make the choice a fixed one.
    tenants = np.ascontiguousarray(rows.tenants).view(">u8").ravel().astype(np.uint64)
    order = np.lexsort(
        (
            tenants,
            rows.size_bytes,
            withdrawn,
            rows.written_at,
            segments,
            words[:, 3],
            words[:, 2],
            words[:, 1],
            words[:, 0],
        )
    )
    words, segments = words[order], segments[order]
    last = np.ones(len(order), dtype=np.bool_)
    same = np.all(words[1:] == words[:-1], axis=1) & (segments[1:] == segments[:-1])
    last[:-1] = ~same
    return rows.take(order[last])


def shard_starts(rows: Rows) -> npt.NDArray[np.intp]:
    """Where each shard of sorted rows begins, and the end: shape [257]."""
    return np.searchsorted(rows.keys[:, 0], np.arange(SHARDS + 1))


def is_sorted(rows: Rows) -> bool:
    """Whether shards can be cut from these rows."""
    return bool(np.all(rows.keys[1:, 0] >= rows.keys[:-1, 0]))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a namespace may hold. None: no limit."""

    ttl_seconds: float | None = None
    size_bytes_max: int | None = None
    objects_max: int | None = None
    tenant_bytes_max: Callable[[bytes], int | None] = field(default=lambda tenant: None)  # noqa: ARG005
    """By tenant; b"" stands for requests without a cache salt."""

    def quota(self, tenant: bytes) -> int | None:
        """The limit of a tenant as rows name it."""
        return self.tenant_bytes_max(b"" if tenant == NO_TENANT else tenant)


@dataclass(slots=True)
class Census:
    """What is offered, by age, so that it can be said how old is too old."""

    objects: int = 0
    chunks: int = 0
    withdrawn: int = 0
    oldest: int = 0
    tenant_bytes: Counter[bytes] = field(default_factory=Counter[bytes])
    tenant_objects: Counter[bytes] = field(default_factory=Counter[bytes])
    ages: Counter[tuple[bytes, int]] = field(default_factory=Counter[tuple[bytes, int]])
    """(tenant, minute) -> bytes of chunks that were last written in it."""
    age_objects: Counter[int] = field(default_factory=Counter[int])

    @property
    def size_bytes(self) -> int:
        """Bytes of all that is offered."""
        return sum(self.tenant_bytes.values())

    def add(self, rows: Rows) -> None:
        """Count merged rows; all of a chunk must come together."""
        self.withdrawn += int(np.count_nonzero(rows.size_bytes == 0))
        live = rows.take(rows.size_bytes > 0)
        if not len(live):
            return
        chunks = _Chunks(live)
        self.objects += len(live)
        self.chunks += len(chunks.times)
        first = int(live.written_at.min())
        self.oldest = min(self.oldest or first, first)
        tenants, whose = np.unique(chunks.tenants, return_inverse=True)
        minutes, when = np.unique(chunks.times // _MINUTE, return_inverse=True)
        cells, places = np.unique(whose * len(minutes) + when, return_inverse=True)
        sizes, counts = _sums(places, chunks.sizes), _sums(places, chunks.counts)
        for cell, size_bytes, count in zip(cells.tolist(), sizes, counts, strict=True):
            number = cell // len(minutes)
            tenant = tenants[number : number + 1].astype(">u8").tobytes()
            minute = int(minutes[cell % len(minutes)])
            self.tenant_bytes[tenant] += size_bytes
            self.tenant_objects[tenant] += count
            self.ages[tenant, minute] += size_bytes
            self.age_objects[minute] += count


def _sums(places: npt.NDArray[np.intp], amounts: Longs) -> list[int]:
    """The sum of the amounts of each place."""
    sums: Longs = np.zeros(int(places.max()) + 1, dtype=np.int64)
    np.add.at(sums, places, amounts)
    found: list[int] = sums.tolist()
    return found


class _Chunks:
    """Columns by chunk, of sorted rows that are offered."""

    def __init__(self, live: Rows) -> None:
        keys = live.keys
        starts = np.flatnonzero(np.r_[True, np.any(keys[1:] != keys[:-1], axis=1)])
        self.starts = starts
        self.times: Longs = np.maximum.reduceat(live.written_at, starts)
        self.sizes: Longs = np.add.reduceat(live.size_bytes, starts)
        self.counts: Longs = np.diff(np.r_[starts, len(live)])
        # A row that reconciliation made has no tenant; the others of its chunk do.
        words = np.ascontiguousarray(live.tenants).view(">u8").ravel().astype(np.uint64)
        self.tenants = np.maximum.reduceat(words, starts).astype(">u8")


class _Excess:
    """How much has to go of one scope, oldest minutes first."""

    def __init__(self, ages: Counter[int], excess: int) -> None:
        self.before = 0
        """Chunks of earlier minutes go."""
        self.left = 0
        """How much of this minute's goes."""
        left = excess
        for minute in sorted(ages):
            if left <= 0:
                return
            self.before, self.left = minute, left
            left -= ages[minute]

    def takes(self, minutes: Longs, amounts: Longs) -> Mask:
        """Which of these chunks go, of those that were asked for in this order."""
        going: Mask = minutes < self.before
        if self.left > 0:
            now = np.flatnonzero(minutes == self.before)
            gone_before = np.cumsum(amounts[now]) - amounts[now]
            now = now[gone_before < self.left]
            going[now] = True
            self.left -= int(amounts[now].sum())
        return going


class Verdict:
    """Who goes. Ask for every chunk once, in any order; made of a census of all of them."""

    def __init__(self, bounds: Bounds, census: Census, now_seconds: float) -> None:
        now = int(now_seconds * MICROSECONDS)
        ttl = bounds.ttl_seconds
        self._expired = 0 if ttl is None else now - int(ttl * MICROSECONDS)
        self._future = None if ttl is None else now + FUTURE_SECONDS_MAX * MICROSECONDS
        self._tenants: dict[bytes, _Excess] = {}
        for tenant, held in census.tenant_bytes.items():
            most = bounds.quota(tenant)
            if most is not None and held > most:
                self._tenants[tenant] = _Excess(_of(census.ages, tenant), held - most)
        self._bytes = self._objects = _Excess(Counter(), 0)
        if bounds.size_bytes_max is not None:
            self._bytes = _Excess(_of(census.ages, None), census.size_bytes - bounds.size_bytes_max)
        if bounds.objects_max is not None:
            self._objects = _Excess(census.age_objects, census.objects - bounds.objects_max)

    def withdraws(self, rows: Rows) -> Mask:
        """Which of these merged rows are to be withdrawn: shape [n]."""
        going = np.zeros(len(rows), dtype=np.bool_)
        offered = np.flatnonzero(rows.size_bytes > 0)
        if not len(offered):
            return going
        chunks = _Chunks(rows.take(offered))
        chosen = self._goes(chunks)
        going[offered] = np.repeat(chosen, chunks.counts)
        return going

    def _goes(self, chunks: _Chunks) -> Mask:
        times = chunks.times
        going: Mask = times < self._expired
        if self._future is not None:
            going |= times > self._future
        left = np.flatnonzero(~going)
        minutes = times[left] // _MINUTE
        # All are asked, because what goes for one bound makes room under the others.
        chosen: Mask = self._bytes.takes(minutes, chunks.sizes[left])
        chosen |= self._objects.takes(minutes, chunks.counts[left])
        for tenant, own in self._tenants.items():
            mine = np.flatnonzero(chunks.tenants[left] == np.frombuffer(tenant, dtype=">u8"))
            chosen[mine] |= own.takes(minutes[mine], chunks.sizes[left[mine]])
        going[left[chosen]] = True
        return going


def _of(ages: Counter[tuple[bytes, int]], tenant: bytes | None) -> Counter[int]:
    """The minutes of one tenant, or of all."""
    found: Counter[int] = Counter()
    for (whose, minute), size_bytes in ages.items():
        if tenant is None or whose == tenant:
            found[minute] += size_bytes
    return found


def bytes_by_tenant(rows: Rows) -> Counter[bytes]:
    """What these rows offer, by tenant as rows name it."""
    if not len(rows):
        return Counter()
    words = np.ascontiguousarray(rows.tenants).view(np.uint64).ravel()
    if np.all(words == words[0]):
        return Counter({words[:1].tobytes(): int(rows.size_bytes.sum())})
    tenants, places = np.unique(words, return_inverse=True)
    sums = np.zeros(len(tenants), dtype=np.int64)
    np.add.at(sums, places, rows.size_bytes)
    return Counter(
        {tenant.tobytes(): size for tenant, size in zip(tenants, sums.tolist(), strict=True)}
    )


def withdrawals(rows: Rows) -> Rows:
    """The rows that withdraw these."""
    zeros: Any = np.zeros_like(rows.size_bytes)
    return Rows(
        rows.keys,
        rows.parents,
        rows.segments,
        rows.segment_ids,
        rows.num_blocks,
        zeros,
        rows.written_at,
        rows.tenants,
    )
