"""The ranges and planes of a copy, carried out by numpy and compared with the CPU's copy."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.gpu.layouts import ORDERS, layout_in
from tiers.cuda.descriptors import (
    Descriptors,
    PlaneShape,
    batches,
    cut,
    describe,
    describe_planes,
    split_at_grid,
)
from tiers.kv.copy import CopyPlan, Runs

DEVICE = 1 << 46
HOST = 1 << 47
BLOCKS = 24

block_ids = st.lists(st.integers(0, BLOCKS - 1), min_size=1, unique=True)
orders = st.sampled_from(ORDERS)


def carried_out(parts: list[Descriptors], memory: np.ndarray, size_bytes: int) -> np.ndarray:
    """The payload that these descriptors gather. Each of its bytes must be in one of them."""
    payload = np.zeros(size_bytes, dtype=np.uint8)
    done_bytes = 0
    for part in parts:
        ranges = part if part.flat else part.pieces()
        for device, host, rows in zip(ranges.device, ranges.host, ranges.rows, strict=True):
            payload[host - HOST :][:rows] = memory[device - DEVICE :][:rows]
            done_bytes += int(rows)
    assert done_bytes == size_bytes
    return payload


@given(
    order=orders,
    ids=block_ids,
    planes=st.booleans(),
    rows_max=st.integers(1, 200),
    count_max=st.integers(1, 50),
    grid_rows=st.integers(1, 200),
)
def test_the_parts_of_a_copy_are_within_their_limits_and_together_the_copy(
    order: str, ids: list[int], planes: bool, rows_max: int, count_max: int, grid_rows: int
) -> None:
    layout = layout_in(order, layers=9, tokens=8, content_bytes=48, blocks=BLOCKS)
    runs, blocks = Runs(layout), np.array(ids, dtype=np.int64)
    memory = np.random.default_rng(1).integers(1, 256, layout.size_bytes, dtype=np.uint8)
    wanted = np.empty(len(ids) * layout.block_payload_bytes, dtype=np.uint8)
    CopyPlan(layout).gather(memory, blocks, wanted)
    shape = PlaneShape.of(runs) if planes else None
    if shape is not None:
        found = describe_planes(runs, shape, blocks, DEVICE, HOST)
    else:
        grid_bytes = grid_rows * runs.size_bytes
        # The payload begins in the middle of the grid.
        origin = HOST - grid_bytes // 2
        found = split_at_grid(
            cut(describe(runs, blocks, DEVICE, HOST), grid_bytes), origin, grid_bytes
        )
        cells = (found.host - origin) // grid_bytes
        assert (cells == (found.host + found.rows - 1 - origin) // grid_bytes).all()
    bytes_max = rows_max * runs.size_bytes
    parts = list(batches(found, bytes_max, count_max))
    for part, size_bytes in parts:
        assert size_bytes == part.rows.sum() * part.width_bytes <= bytes_max
        assert 1 <= len(part.rows) <= count_max
    payload = carried_out([part for part, _ in parts], memory, wanted.size)
    assert np.array_equal(payload, wanted)


@given(order=orders, ids=block_ids)
def test_no_two_ranges_follow_on_each_other(order: str, ids: list[int]) -> None:
    layout = layout_in(order, blocks=BLOCKS)
    found = describe(Runs(layout), np.array(ids, dtype=np.int64), DEVICE, HOST)
    assert (found.device[1:] != found.device[:-1] + found.rows[:-1]).all()
