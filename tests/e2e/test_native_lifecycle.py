"""vLLM's own offloading: sidecars that start, hang and die, as in `test_lifecycle.py`; hits from an
object store, as in `test_store.py`.

Their tests run here as they are, on one engine with `OffloadingConnector`. What vLLM's side does
itself (preemption, aborts, blocks that are reused) is in `tests/connector/test_offloading.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.demo.engine import EngineSpec
from sidecar.demo.sidecars import SidecarProcess
from tests.e2e.native import NativeEngine
from tests.e2e.test_lifecycle import (  # noqa: F401 (the tests, and their fixture)
    ENGINE_ARGS,
    oracle,
    test_reset_of_the_connector_forgets,
    test_sidecar_killed_with_a_load_outstanding,
    test_sidecar_killed_with_stores_outstanding,
    test_sidecar_restarted,
    test_sidecar_started_after_the_engine,
    test_sidecar_stopped_during_a_load,
)
from tests.e2e.test_store import (  # noqa: F401 (a test)
    test_folder_serves_an_empty_sidecar,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sidecar.demo.engine import Engine

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[Engine]:
    """Started where there is no sidecar yet, as happens when a node boots."""
    socket = SidecarProcess(folder / "s", {}).socket
    with NativeEngine(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()
