"""vLLM's own offloading: a model that mixes sliding windows and full attention, as in
`test_hybrid.py`.

Its cases run here as they are, on engines with `OffloadingConnector`. vLLM's host tier has windows
where the engine itself keeps them: where prompts end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e import test_hybrid
from tests.e2e.group_suite import engine_of
from tests.e2e.native import NativeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

# One hit of this model, on two ranks, is in what is always run: `test_native_groups.py`.
pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("gemma-3", "offloading", "offloading-groups", "suite-windows"),
]


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    model = tmp_path_factory.mktemp("gemma")
    test_hybrid.write_gemma(model)
    with engine_of(model, folder, kind=NativeEngine) as engine:
        yield engine


class TestGemma(test_hybrid.TestGemma):
    def chunks_read(self, tokens: int) -> int:
        """A block of a group is a row of vLLM's host tier, and so a chunk."""
        return self.blocks_read(tokens)
