"""Merging rows against a dictionary."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.catalog.kit import key
from tiers.catalog.merge import (
    SHARDS,
    contained_in,
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
        num_blocks=st.integers(0, 1),
        # Those that differ in their last word, and in their first.
        parent=st.sampled_from([bytes(32), key(1), key(2), b"\xff" + bytes(31)]),
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
        held[name] = max(held.get(name, (0, False)), (row.written_at, row.size_bytes == 0))
    return held


@given(rows=some_rows)
def test_of_each_segment_the_latest_row_holds(rows: list[Row]) -> None:
    found = merged(rows_of(rows))
    told = listed(found)
    assert {
        (row.key, row.segment): (row.written_at, row.size_bytes == 0) for row in told
    } == by_rule(rows)
    assert len(told) == len(by_rule(rows))
    assert [row.key for row in told] == sorted(row.key for row in told)
    assert np.all(np.diff(found.keys[:, 0].astype(int)) >= 0)
    starts = shard_starts(found)
    assert starts[0] == 0
    assert starts[SHARDS] == len(found)
    for shard in range(SHARDS):
        part = found.keys[starts[shard] : starts[shard + 1], 0]
        assert np.all(part == shard)


@given(rows=some_rows)
def test_whose_a_segment_is_and_its_parent_any_row_of_it_tells(rows: list[Row]) -> None:
    given_rows = rows_of(rows)
    for row in listed(merged(given_rows)):
        same = [one for one in rows if (one.key, one.segment) == (row.key, row.segment)]
        assert row.tenant == max(one.tenant for one in same)
        assert row.parent == max(one.parent for one in same)
    assert listed(given_rows) == rows


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


def test_withdrawing_is_a_row_of_the_same_time() -> None:
    rows = rows_of([chunk(1, 5), chunk(2, 6)])
    gone = withdrawals(rows.take(np.array([0])), rows.written_at[:1], missing=True)
    both = merged(joined([rows, gone]))
    assert [(row.key, row.size_bytes == 0) for row in listed(both)] == [
        (key(1), True),
        (key(2), False),
    ]


@given(rows=some_rows, others=some_rows)
def test_rows_are_found_again_by_key_segment_and_time(rows: list[Row], others: list[Row]) -> None:
    there = {(row.key, row.segment, row.written_at) for row in others}
    found = contained_in(rows_of(rows), rows_of(others))
    expected = [(row.key, row.segment, row.written_at) in there for row in rows]
    assert found.tolist() == expected
