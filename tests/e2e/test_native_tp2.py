"""vLLM's own offloading: two tensor-parallel ranks, as in `test_tp2.py`.

Its cases run here as they are, on an engine with `OffloadingConnector`; but not that a chunk of
which one rank is missing is no hit, for a row of vLLM's host tier, which is a chunk to kvlake, has
the pages of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from tests.e2e.native import NativeEngine
from tests.e2e.two_ranks import TwoRanksSuite, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

# Two ranks with an adapter are in what is always run: `test_native_groups.py`.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "offloading-groups", "suite-two-ranks"),
]


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    with engine_of(folder, model, {"tensor_parallel_size": 2}, kind=NativeEngine) as engine:
        yield engine


class TestTensorParallel(TwoRanksSuite):
    objects: ClassVar = ("0-1.0-1.arrow",)
