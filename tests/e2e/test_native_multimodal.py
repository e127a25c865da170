"""vLLM's own offloading: images in prompts, as in `test_multimodal.py`.

Its cases run here as they are, on engines with `OffloadingConnector`. What tells prompts with other
images apart is vLLM's block hash, which covers the images of a block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.e2e import test_multimodal
from tests.e2e.arms import (
    SESSIONS,
    Call,
    counters,
    empty,
    fresh_salt,
    idle,
    same_output,
    words,
)
from tests.e2e.group_suite import engine_of
from tests.e2e.native import NativeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("idefics-3", "offloading", "suite-multimodal"),
]


@pytest.fixture(scope="module")
def engine(
    folder: Path, model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    idefics = tmp_path_factory.mktemp("idefics")
    test_multimodal.write_idefics(idefics, model)
    with engine_of(idefics, folder, kind=NativeEngine, skip_tokenizer_init=False) as engine:
        yield engine


class TestIdefics3(test_multimodal.TestIdefics3):
    def chunks_read(self, tokens: int) -> int:
        """A block is a row of vLLM's host tier, and so a chunk."""
        return self.blocks_read(tokens)

    def test_images_that_vllm_only_counts_are_not_cached(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """Which blocks hold an image is not seen here: nothing of such an engine is cached."""
        calls, salt = (self.call(900, 40), Call(words(900, 41))), fresh_salt()
        for call in calls:
            call.generate(engine, salt)
        empty(engine)
        sidecar.wait("everything ended", idle)
        before = counters(sidecar)
        engine_args = {**engine.spec.engine_args, **test_multimodal.COUNTING}
        spec, log = replace(engine.spec, engine_args=engine_args), folder / "counting.log"
        with NativeEngine(spec, log) as counting:
            counting.wait_ready()
            for call in calls:
                cold = call.generate(counting, salt)
                empty(counting)
                again = call.generate(counting, salt)
                assert cold.cached_tokens == again.cached_tokens == 0
                assert same_output(again, cold)
                empty(counting)
            assert len(sidecar.status()["sessions"]) == SESSIONS, "it never attached"
        assert counters(sidecar) == before, "nothing is stored or loaded"
        told = "served by vLLM's host tier alone, because it takes images"
        assert log.read_text().count(told) == 1
