"""What merged rows offer: totals in all and by tenant, and cells that are joined now and then."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import places
from tests.tiers.catalog.kit import key
from tiers.catalog.merge import merged
from tiers.catalog.rows import NO_TENANT, Row, Rows, rows_of
from tiers.catalog.usage import (
    CHUNKS,
    OBJECTS,
    SIZE,
    Cells,
    Sums,
    Usage,
    UsageTable,
    cells_by_tenant,
    tenant_of,
    usage_by_tenant,
    word_of,
)

A, B = b"tenant-a", b"tenant-b"


def row(number: int, tenant: bytes, size_bytes: int = 10, at: int = 100, part: int = 0) -> Row:
    return Row(key(number), f"0-8.{part}-4", at, size_bytes, 1, tenant=tenant)


def test_what_is_offered_is_counted_by_chunk_object_and_byte() -> None:
    census = UsageTable()
    census.add(merged(rows_of([row(1, A), row(1, A, part=1, at=300), row(2, B, at=200)])))
    census.add(merged(rows_of([row(3, b"", size_bytes=0), row(4, b"", size_bytes=7, at=50)])))
    assert census.total == Usage(37, 4, 50, 3)
    assert census.withdrawn == 1
    assert census.num_tenants == 3
    # A chunk is as old as its newest segment.
    assert census.largest(2) == {A: Usage(20, 2, 300, 1), B: Usage(10, 1, 200, 1)}
    assert UsageTable().total == Usage()
    assert UsageTable().largest(5) == {}


def by_tenant(rows: Rows) -> dict[bytes, Usage]:
    return usage_by_tenant(cells_by_tenant(rows))


def test_rows_in_any_order_are_counted_by_tenant() -> None:
    rows = [row(1, A), row(2, B, at=5), row(1, A, part=1), row(3, A, size_bytes=0)]
    assert by_tenant(rows_of(rows)) == {A: Usage(20, 2, 100, 2), B: Usage(10, 1, 5, 1)}
    assert by_tenant(rows_of(rows[:1])) == {A: Usage(10, 1, 100, 1)}
    assert by_tenant(rows_of([row(1, b"")])) == {NO_TENANT: Usage(10, 1, 100, 1)}
    assert by_tenant(rows_of([])) == {}


def test_a_tenant_is_its_eight_bytes() -> None:
    assert tenant_of(word_of(A)) == A
    assert word_of(NO_TENANT) == word_of(b"") == 0


amounts = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 9)), max_size=30)


@given(parts=st.lists(amounts, max_size=5))
def test_sums_are_those_of_a_dictionary(parts: list[list[tuple[int, int, int]]]) -> None:
    sums, expected = Sums(), Counter[tuple[int, int]]()
    with pytest.MonkeyPatch.context() as patch:
        places.patch(patch, "JOIN_CELLS_MIN", 3)
        for part in parts:
            columns = np.array(part, dtype=np.int64).reshape(-1, 3)
            sums.add(
                Cells(
                    columns[:, 0].astype(np.uint64),
                    columns[:, 1],
                    np.repeat(columns[:, 2:], 3, axis=1),
                    columns[:, 2],
                )
            )
            for tenant, span, amount in part:
                expected[tenant, span] += amount
    cells = sums.cells
    assert {
        (tenant, span): amount
        for tenant, span, amount in zip(
            cells.tenants.tolist(),
            cells.spans.tolist(),
            cells.amounts[:, SIZE].tolist(),
            strict=True,
        )
    } == expected
    assert np.array_equal(cells.amounts[:, SIZE], cells.amounts[:, CHUNKS])
    assert np.array_equal(cells.amounts[:, SIZE], cells.amounts[:, OBJECTS])
    total = int(cells.amounts[:, SIZE].sum())
    sums.coarsen()
    assert int(sums.cells.amounts[:, SIZE].sum()) == total
    assert set(sums.cells.spans.tolist()) <= {0, 1}
