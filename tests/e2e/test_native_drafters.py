"""vLLM's own offloading: a drafter with layers of its own (EAGLE), as in `test_drafters.py`.

Its tests run here as they are, on one engine with `OffloadingConnector`. A key is vLLM's block
hash, which does not name the token behind the chunk: where prompts part behind a chunk, its last
token in the drafter's layer may be the other prompt's. That can cost drafts, never change a token.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.native import NativeEngine
from tests.e2e.setups import sidecar_in
from tests.e2e.test_drafters import (  # noqa: F401 (the tests, and their fixture)
    engine_args,
    sidecar,
    test_another_next_token_is_another_chunk,
    test_next_turn,
    test_the_drafters_layer_is_loaded_too,
    write_eagle,
)
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "offloading-eagle", "suite-drafters"),
]


@pytest.fixture(scope="module")
def engine(
    folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    drafter = tmp_path_factory.mktemp("eagle")
    write_eagle(drafter)
    spec = EngineSpec(model, sidecar_in(folder).socket, engine_args(drafter))
    with NativeEngine(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()
