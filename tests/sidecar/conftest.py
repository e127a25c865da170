"""What several tests of the sidecar start with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.sidecar.bench import Bench, new_bench
from tests.sidecar.client import RunningSidecar, config_in

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with RunningSidecar(config_in(short_directory)) as running:
        yield running


@pytest.fixture
def bench() -> Iterator[Bench]:
    with new_bench() as bench:
        yield bench
