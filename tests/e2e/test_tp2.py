"""Two tensor-parallel ranks: each holds half of the KV heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from tests.e2e import adapters
from tests.e2e.arms import Call, check_hit, words
from tests.e2e.two_ranks import TOKENS, WHOLE_TOKENS, RankPartsSuite, cluster, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-two-ranks", "tensor-parallel"),
]

ENGINE_ARGS: Final[dict[str, Any]] = {"tensor_parallel_size": 2, **adapters.ENGINE_ARGS}


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    with engine_of(folder, model, ENGINE_ARGS) as engine:
        yield engine


@pytest.mark.promise("llama")
class TestTensorParallel(RankPartsSuite):
    objects: ClassVar = ("0-6.0-2.arrow", "0-6.2-4.arrow")

    @pytest.mark.promise("lora", "two-ranks")
    def test_an_adapters_host_hit(self, folder: Path, engine: EngineProcess) -> None:
        adapters.write_adapter(folder / "adapter", 1)
        lora = ("adapter", 1, str(folder / "adapter"))
        prompt = words(TOKENS, 6)
        with cluster(folder, engine):
            generation = check_hit(engine, Call(prompt, options={"adapter": lora}))
            assert generation.cached_tokens == WHOLE_TOKENS
            other = check_hit(engine, Call(prompt))
            assert other.logprobs[0] != generation.logprobs[0]
