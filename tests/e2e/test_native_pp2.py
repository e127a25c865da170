"""vLLM's own offloading: two pipeline stages, as in `test_pp2.py`.

Its cases run here as they are, on an engine with `OffloadingConnector`; but not that a chunk of
which one stage is missing is no hit, for a row of vLLM's host tier, which is a chunk to kvlake, has
the pages of both. Stages of different numbers of layers are refused, for vLLM's host tier takes the
parts of all workers to be alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from sidecar.demo.model import write_model
from tests.e2e.arms import Call, counters, empty, fresh_salt, idle, same_output, words
from tests.e2e.native import NativeEngine
from tests.e2e.setups import SMALL, attached
from tests.e2e.test_pp2 import ENGINE_ARGS
from tests.e2e.two_ranks import TOKENS, TwoRanksSuite, engine_of
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "offloading-stages", "suite-two-stages"),
]


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    with engine_of(folder, model, ENGINE_ARGS, kind=NativeEngine) as engine:
        engine.dummy_step()
        yield engine


class TestStages(TwoRanksSuite):
    objects: ClassVar = ("0-1.0-1.arrow",)


@pytest.mark.promise("offloading-stages")
def test_stages_of_different_numbers_of_layers(
    folder: Path, engine: EngineProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Seven layers are four and three. Served by no tier, such an engine is right."""
    model = write_model(tmp_path_factory.mktemp("seven"), layers=7, hidden=256, heads=4, kv_heads=4)
    log = folder / "seven.log"
    with attached(folder, engine) as sidecar:
        sidecar.wait("everything ended", idle)
        before = counters(sidecar)
        spec = EngineSpec(str(model), sidecar.socket, {**SMALL, **ENGINE_ARGS}, threads_bind="0|1")
        with NativeEngine(spec, log) as seven:
            seven.wait_ready()
            seven.dummy_step()
            calls, salt = [Call(words(TOKENS, seed)) for seed in (20, 21)], fresh_salt()
            first = [call.generate(seven, salt) for call in calls]
            empty(seven)
            again = [call.generate(seven, salt) for call in calls]
            empty(seven)
        assert all(map(same_output, again, first))
        assert not any(one.cached_tokens for one in again)
        assert counters(sidecar) == before, "nothing is stored or loaded"
    told = "served by no tier, because its pipeline stages hold different numbers of layers"
    assert log.read_text().count(told) == 1
