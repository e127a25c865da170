"""vLLM's own offloading: hits from an object store, and from one that lies, fails or is full, as in
`test_store.py` and `test_store_buckets.py`.

Its tests run here as they are, on one engine with `OffloadingConnector`; most faults of a bucket's
network with `--nightly` alone, for they are far below what tells one engine from another.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from tests.e2e import test_store_buckets
from tests.e2e.native import NativeEngine
from tests.e2e.store_cluster import ENGINE_ARGS
from tests.e2e.test_store import (  # noqa: F401 (the tests)
    test_damaged_objects_are_never_served,
    test_folder_serves_an_empty_sidecar,
    test_folder_that_takes_no_large_file,
    test_full_folder,
    test_head_in_the_engine_middle_in_host_tail_in_the_store,
    test_store_that_is_only_read_or_only_written,
)
from tests.e2e.test_store_buckets import (  # noqa: F401 (the tests, and their fixtures)
    FAULTS,
    portal,
    proxy,
    server,
    sidecar,
    test_bucket_serves_another_cluster,
    test_two_sidecars_on_one_bucket,
    written,
)
from tests.harness.engine import EngineSpec
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("offloading", "offloading-spec", "suite-store"),
]
NIGHTLY: Final = (
    "test_bucket_serves_another_cluster",
    "test_damaged_objects_are_never_served",
    "test_folder_that_takes_no_large_file",
    "test_full_folder",
    "test_head_in_the_engine_middle_in_host_tail_in_the_store",
    "test_store_that_is_only_read_or_only_written",
    "test_two_sidecars_on_one_bucket",
    "test_fault",
    "test_passing_fault_is_retried",
    "test_frozen_server",
)
"""Tests of another module that this one runs nightly."""


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = SidecarProcess(folder / "s", {}).socket
    with NativeEngine(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


class TestUnreliableBucket(test_store_buckets.TestUnreliableBucket):
    """Its prompts are many small chunks: one of them is enough to open the breaker."""
