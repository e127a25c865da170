"""vLLM's own offloading: what starts, hangs and dies in any order, as in `test_lifecycle.py`, and
sidecars that find what earlier ones left, as in `test_warm_restart.py`.

Their tests run here as they are, on one engine with `OffloadingConnector`. Those of warm restarts
are last: their sidecar stays until the module ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.arms import attach
from tests.e2e.native import NativeEngine
from tests.e2e.test_lifecycle import (  # noqa: F401 (the tests, and their fixture)
    ENGINE_ARGS,
    oracle,
    test_abort_of_a_request_that_stores,
    test_abort_while_the_load_hangs,
    test_aborts_at_any_time_of_a_load,
    test_damaged_host_memory_is_never_used,
    test_engine_restarted,
    test_pool_of_four_chunks,
    test_preemption,
    test_reset_of_the_connector_forgets,
    test_sidecar_killed_at_any_time,
    test_sidecar_killed_with_a_load_outstanding,
    test_sidecar_killed_with_stores_outstanding,
    test_sidecar_restarted,
    test_sidecar_started_after_the_engine,
    test_sidecar_stopped_and_continued_in_time,
    test_sidecar_stopped_during_a_load,
    test_sidecar_stopped_during_a_store,
    test_without_a_sidecar,
)
from tests.e2e.test_warm_restart import (  # noqa: F401 (the tests)
    outlived,
    test_next_life_hits_what_this_one_stored,
    test_slot_damaged_between_two_lives_is_computed,
)
from tests.harness.engine import EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("offloading", "offloading-spec", "suite-lives", "suite-warm-restart"),
]
NIGHTLY: Final = (
    "test_abort_of_a_request_that_stores",
    "test_abort_while_the_load_hangs",
    "test_aborts_at_any_time_of_a_load",
    "test_damaged_host_memory_is_never_used",
    "test_pool_of_four_chunks",
    "test_preemption",
    "test_sidecar_killed_with_stores_outstanding",
    "test_sidecar_stopped_during_a_load",
    "test_sidecar_started_after_the_engine",
    "test_slot_damaged_between_two_lives_is_computed",
)
"""Tests of another module that this one runs nightly."""


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    """Started where there is no sidecar yet, as happens when a node boots."""
    socket = SidecarProcess(folder / "s", {}).socket
    with NativeEngine(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def sidecar(folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
    """For the tests of warm restarts."""
    with outlived(folder) as sidecar:
        attach(engine, sidecar)
        yield sidecar
