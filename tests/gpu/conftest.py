from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.double.control import Double, build


@pytest.fixture(scope="session")
def library(warm_server: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled double. Processes that use it are forked."""
    return build(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def double(library: Path, tmp_path: Path) -> Iterator[Double]:
    """One GPU that is none. No process may break a rule of the driver while it is there."""
    made = Double(library, tmp_path / "control")
    yield made
    made.no_violations()
