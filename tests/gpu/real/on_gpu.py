"""The cases on this machine's GPU. Not collected by itself: `make gpu-test` names this file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.real.cases import CASES, told
from tests.gpu.real.world import Gpu, World


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Gpu()) as made:
        yield made


@pytest.mark.gpu
@pytest.mark.timeout(320)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: str, world: World, record_property: Callable[[str, object], None]) -> None:
    said = told(case, world)
    record_property("said", said)
    print(f"{case}: {said}")
