"""vLLM's own offloading: requests that are more than a prompt, as in `test_requests.py`.

Its tests run here as they are, on one engine with `OffloadingConnector`, with LoRA, constrained
outputs and drafts by n-grams switched on at once; but not that adapters are known by their files,
for vLLM's block hashes know them by name and path.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e.native import NativeEngine
from tests.e2e.setups import sidecar_in
from tests.e2e.test_requests import (  # noqa: F401 (the tests, and their fixtures)
    ENGINE_ARGS,
    loras,
    sidecar,
    test_an_adapter_has_its_own_chunks,
    test_constrained_outputs_share_with_others,
    test_drafts_are_stored_once_they_are_known,
    test_requests_of_adapters_are_preempted_and_aborted,
)
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("sidecar"),
    pytest.mark.promise("offloading", "offloading-spec", "suite-requests"),
]
NIGHTLY: Final = (
    "test_requests_of_adapters_are_preempted_and_aborted",
    "test_drafts_are_stored_once_they_are_known",
)
"""Tests of another module that this one runs nightly."""


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar_in(folder).socket, ENGINE_ARGS)
    with NativeEngine(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()
