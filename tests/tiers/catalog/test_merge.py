"""Merging rows against a dictionary, and who goes to keep a namespace within its bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.catalog.kit import key
from tiers.catalog.merge import (
    SHARDS,
    Bounds,
    Census,
    Verdict,
    is_sorted,
    merged,
    shard_starts,
    withdrawals,
)
from tiers.catalog.rows import Row, Rows, joined, rows_of

MINUTE = 60_000_000
NOW = 1_700_000_000.0
MICROS = int(NOW * 1e6)

keys = st.integers(0, 9).map(lambda number: bytes([number * 25]) + key(number)[1:])
some_rows = st.lists(
    st.builds(
        Row,
        key=keys,
        segment=st.sampled_from(["0-8.0-4", "0-8.4-8", "8-16.0-4"]),
        written_at=st.integers(1, 6),
        size_bytes=st.integers(0, 3),
        num_blocks=st.just(1),
        parent=st.just(bytes(32)),
        tenant=st.sampled_from([b"", b"tenant-a", b"tenant-b"]),
    ),
    max_size=30,
)


def listed(rows: Rows) -> list[Row]:
    return [rows.row(index) for index in range(len(rows))]


def by_rule(rows: list[Row]) -> dict[tuple[bytes, str], tuple[int, bool]]:
    """Key and segment -> time, and whether it is withdrawn, row by row."""
    held: dict[tuple[bytes, str], tuple[int, bool]] = {}
    for row in rows:
        name = (row.key, row.segment)
        held[name] = max(held.get(name, (0, False)), (row.written_at, row.withdrawn))
    return held


@given(rows=some_rows)
def test_of_each_segment_the_latest_row_holds(rows: list[Row]) -> None:
    found = merged(rows_of(rows))
    told = listed(found)
    assert {(row.key, row.segment): (row.written_at, row.withdrawn) for row in told} == by_rule(
        rows
    )
    assert len(told) == len(by_rule(rows))
    assert [row.key for row in told] == sorted(row.key for row in told)
    assert is_sorted(found)
    starts = shard_starts(found)
    assert starts[0] == 0
    assert starts[SHARDS] == len(found)
    for shard in range(SHARDS):
        part = found.keys[starts[shard] : starts[shard + 1], 0]
        assert np.all(part == shard)


@given(first=some_rows, second=some_rows, third=some_rows)
def test_it_does_not_matter_who_merges_what_and_when(
    first: list[Row], second: list[Row], third: list[Row]
) -> None:
    one, two, three = (rows_of(rows) for rows in (first, second, third))
    whole = merged(joined([one, two, three]))
    assert listed(merged(joined([merged(joined([three, one])), two, three]))) == listed(whole)
    assert listed(merged(whole)) == listed(whole)


def chunk(number: int, minute: int, size_bytes: int = 10, tenant: bytes = b"") -> Row:
    return Row(key(number), "0-8.0-4", MICROS - minute * MINUTE, size_bytes, 1, tenant=tenant)


def gone(rows: list[Row], bounds: Bounds) -> set[int]:
    """Numbers of the keys that go."""
    census, whole = Census(), merged(rows_of(rows))
    census.add(whole)
    mask = Verdict(bounds, census, NOW).withdraws(whole)
    return {int.from_bytes(row.key, "big") for row in listed(whole.take(mask))}


def test_no_bound_takes_nothing() -> None:
    assert gone([chunk(1, 10_000)], Bounds()) == set()
    assert gone([], Bounds(ttl_seconds=1, size_bytes_max=1, objects_max=1)) == set()


def test_what_is_too_old_goes_and_so_does_what_comes_from_the_future() -> None:
    rows = [chunk(1, 59), chunk(2, 61), chunk(3, -100), chunk(4, -2000)]
    assert gone(rows, Bounds(ttl_seconds=3600)) == {2, 4}


@pytest.mark.parametrize(
    "bounds", [Bounds(size_bytes_max=30), Bounds(objects_max=3)], ids=["bytes", "objects"]
)
def test_the_oldest_go_until_the_rest_fits(bounds: Bounds) -> None:
    rows = [chunk(number, minute=number) for number in range(1, 8)]
    assert gone(rows, bounds) == {4, 5, 6, 7}


def test_of_one_minute_no_more_than_needed_goes() -> None:
    rows = [chunk(number, minute=5) for number in range(1, 8)]
    assert len(gone(rows, Bounds(size_bytes_max=65))) == 1
    assert len(gone(rows, Bounds(objects_max=5))) == 2


def test_a_tenant_over_its_limit_costs_only_itself() -> None:
    rows = [chunk(number, number, tenant=b"tenant-a") for number in range(1, 5)]
    rows += [chunk(number, number + 100, tenant=b"tenant-b") for number in range(11, 15)]
    rows += [chunk(number, number + 200) for number in range(21, 25)]
    limits = {b"tenant-a": 20, b"": 30}
    assert gone(rows, Bounds(tenant_bytes_max=limits.get)) == {3, 4, 24}


def test_a_chunk_goes_whole_and_is_as_old_as_its_newest_segment() -> None:
    old, new = MICROS - 100 * MINUTE, MICROS - MINUTE
    rows = [
        Row(key(1), "0-8.0-4", old, 10, 1, tenant=b"tenant-a"),
        Row(key(1), "0-8.4-8", new, 10, 1),
        Row(key(2), "0-8.0-4", old, 10, 1),
        Row(key(2), "0-8.4-8", old, 10, 1),
    ]
    assert gone(rows, Bounds(ttl_seconds=3600)) == {2}
    # The rows of a chunk are one tenant's, although the store's own row does not say whose.
    assert gone(rows, Bounds(tenant_bytes_max={b"tenant-a": 15}.get)) == {1}
    assert gone(rows, Bounds(size_bytes_max=20)) == {2}


def test_withdrawing_is_a_row_of_the_same_time() -> None:
    rows = rows_of([chunk(1, 5), chunk(2, 6)])
    both = merged(joined([rows, withdrawals(rows.take(np.array([0])))]))
    assert [(row.key, row.withdrawn) for row in listed(both)] == [(key(1), True), (key(2), False)]
