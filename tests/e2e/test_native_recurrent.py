"""vLLM's own offloading: a model that mixes short convolutions and full attention, as in
`test_recurrent.py`.

Its cases run here as they are, on engines with `OffloadingConnector`. vLLM's host tier has the
states that vLLM hands over, those that the connector has too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e import test_recurrent
from tests.e2e.group_suite import engine_of
from tests.e2e.native import NativeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("lfm2", "offloading", "offloading-recurrent", "suite-recurrent"),
]


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("lfm2")
    test_recurrent.write_lfm2(model)
    with engine_of(model, folder, kind=NativeEngine) as engine:
        yield engine


class TestLfm2(test_recurrent.TestLfm2):
    def chunks_read(self, tokens: int) -> int:
        """A block of a group is a row of vLLM's host tier, and so a chunk."""
        return self.blocks_read(tokens)
