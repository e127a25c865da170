"""vLLM's own offloading: two data-parallel ranks on one sidecar, as in `test_dp2.py`.

Its tests run here as they are, on an engine with `OffloadingConnector`; not that what each rank's
own cache holds is told, for a tier is not told where an engine publishes its events.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.arms import empty, idle
from tests.e2e.native import NativeEngine
from tests.e2e.setups import SMALL, sidecar_in
from tests.e2e.test_dp2 import (  # noqa: F401 (the tests)
    RANKS,
    attach_ranks,
    test_a_prompt_of_one_rank_is_a_hit_in_the_other,
    test_both_ranks_at_once,
    test_each_rank_is_an_engine_of_its_own,
)
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "suite-data-parallel"),
]


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with sidecar_in(folder) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[EngineProcess]:
    engine_args = {**SMALL, "data_parallel_size": RANKS}
    spec = EngineSpec(model, sidecar.socket, engine_args, threads_bind="0|1")
    with NativeEngine(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach_ranks(engine, sidecar)
        yield engine
        empty(engine)
        sidecar.wait("everything ended", idle)
