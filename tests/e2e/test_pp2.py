"""Two pipeline stages: each holds half of the layers.

vLLM schedules a step ahead of the one that the stages compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from tests.e2e.setups import in_steps
from tests.e2e.two_ranks import RankPartsSuite, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "pipeline-parallel", "suite-two-stages"),
]

# A prompt is several steps, of which two are under way at once.
ENGINE_ARGS: Final[dict[str, Any]] = {"pipeline_parallel_size": 2, **in_steps(512)}


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    with engine_of(folder, model, ENGINE_ARGS) as engine:
        engine.dummy_step()
        yield engine


class TestStages(RankPartsSuite):
    objects: ClassVar = ("0-3.0-4.arrow", "3-6.0-4.arrow")
