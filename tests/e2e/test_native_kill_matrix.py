"""The kill matrix of `test_kill_matrix.py` on vLLM's own offloading, with two stages more.

What is struck, when, and what is expected are the same; where they may differ is in `kill_seams.py`
and beside the expectation. There is no attach of vLLM's worker here, which has no session: where
it is struck at that stage, the engine core's is under way. Stages that the connector does not have
are the copies between blocks and vLLM's host tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.kill_seams import OFFLOADING
from tests.e2e.kill_table import Backend, in_order_of_running
from tests.e2e.test_kill_matrix import (
    check_cell,
    row,  # noqa: F401 (a fixture)  # pyright: ignore[reportUnusedImport]
    world,  # noqa: F401 (a fixture)  # pyright: ignore[reportUnusedImport]
)

if TYPE_CHECKING:
    from tests.e2e.kill_seams import Seam
    from tests.e2e.kill_table import Cell, Row
    from tests.e2e.kill_world import World

# What a sidecar's deaths and stops do to requests is shown in short by `test_native_lifecycle.py`.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.promise("kill-matrix", "offloading"),
]


@pytest.fixture(scope="module")
def seam() -> Seam:
    return OFFLOADING


@pytest.mark.parametrize("cell", in_order_of_running(Backend.OFFLOADING), ids=str)
def test_cell(world: World, cell: Cell, row: Row) -> None:  # noqa: F811 (the fixtures)
    check_cell(world, cell, row)
