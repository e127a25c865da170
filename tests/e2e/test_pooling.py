"""Pooling engines: what they make of a prompt that they have a part of, against their own hits.

With `LAST` pooling only the last token's output counts, and that is always computed: such an engine
is cached. An embedding of a hit is compared with that of the engine's own hit of as many tokens,
bit for bit, and the bytes of its KV with it. With `MEAN` pooling vLLM needs what it computed of a
whole prompt in one step. It goes on from no prefix of its own then, and ends at one that a
connector gives it: such an engine is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.arms import (
    CHUNK_TOKENS,
    Call,
    attach,
    check_hit,
    counters,
    empty,
    external_hit,
    fresh_salt,
    idle,
    own_hit,
    whole_blocks,
    words,
)
from tests.e2e.native import HOST_TIER_BYTES, NativeEngine
from tests.e2e.setups import SMALL, in_steps, sidecar_in
from tests.e2e.test_hits import loaded_tokens
from tests.harness.engine import EngineProcess, EngineSpec, Generation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("connector", "offloading", "suite-pooling"),
]

LAST: Final[dict[str, Any]] = {**SMALL, **in_steps(512), "runner": "pooling"}
"""The default of a llama. vLLM caches its prefixes, and may compute a prompt in several steps."""
MEAN: Final[dict[str, Any]] = {
    **SMALL,
    "runner": "pooling",
    "pooler_config": {"pooling_type": "MEAN"},
    # As vLLM decides itself.
    "enable_prefix_caching": None,
}
HITS: Final = "vllm:external_prefix_cache_hits"
ALIKE: Final = 0.99
"""Two embeddings, of length 1, that only rounding tells apart have a greater product than this."""


class PoolingEngine(EngineProcess):
    """Takes every request as one for an embedding of its prompt."""

    def begin(self, prompt: list[int], *, cache_salt: str | None = None, **_: Any) -> int:
        return self.begin_embedding(prompt, cache_salt=cache_salt)


class NativePoolingEngine(PoolingEngine, NativeEngine):
    """The same, with vLLM's own offloading."""


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with sidecar_in(folder) as sidecar:
        yield sidecar


def embedding_of(generation: Generation) -> list[float]:
    assert generation.embeddings is not None
    (embedding,) = generation.embeddings
    return embedding


def product(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@pytest.fixture(
    scope="class",
    params=[PoolingEngine, NativePoolingEngine],
    ids=["connector", "offloading"],
)
def engine(
    request: pytest.FixtureRequest, folder: Path, model: str, sidecar: SidecarProcess
) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar.socket, LAST)
    with request.param(spec, folder / f"{request.param.__name__}.log") as engine:
        engine.wait_ready()
        attach(engine, sidecar)
        yield engine
        empty(engine)
        sidecar.wait("everything ended", idle)
    sidecar.wait("it is gone", lambda now: not now["sessions"])


class TestLast:
    @pytest.mark.promise("pooling-last")
    @pytest.mark.parametrize("tokens", [97, 700, 1500])
    def test_host_hit(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        loaded, hits = counters(sidecar), engine.counter(HITS)
        found = check_hit(engine, Call(words(tokens, tokens)))
        assert found.cached_tokens == whole_blocks(tokens)
        assert loaded_tokens(sidecar, loaded) == engine.counter(HITS) - hits == found.cached_tokens

    @pytest.mark.promise("pooling-last")
    def test_shared_prefix_of_another_prompt(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        shared = words(2 * CHUNK_TOKENS, 1)
        first, second = Call(shared + words(400, 2)), Call(shared + words(300, 3))
        loaded, hits = counters(sidecar), engine.counter(HITS)
        found = check_hit(engine, second, before=[first])
        assert found.cached_tokens == len(shared)
        assert loaded_tokens(sidecar, loaded) == engine.counter(HITS) - hits == len(shared)
        another = first.generate(engine, fresh_salt())
        assert product(embedding_of(found), embedding_of(another)) < ALIKE

    def test_a_prompt_of_whole_blocks(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """Its last token is computed again, where vLLM's own hit goes back by a whole block.

        That is how the two are rounded otherwise. (Of vLLM's offloading the block is asked for.)
        """
        call = Call(words(2 * CHUNK_TOKENS, 4))
        oracle = own_hit(engine, call, before=[call])
        loaded = counters(sidecar)
        found = external_hit(engine, call, before=[call]).generation
        assert found.cached_tokens == loaded_tokens(sidecar, loaded) == len(call.prompt)
        assert product(embedding_of(found), embedding_of(oracle.generation)) > ALIKE

    @pytest.mark.promise("pooling-last")
    def test_embeddings_of_all_tokens_read_no_cache(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """They are all wanted, so they are all computed, and then there for others to read."""
        prompt, salt = words(300, 5), fresh_salt()

        def each() -> Generation:
            empty(engine)
            handle = engine.begin_embedding(prompt, cache_salt=salt, task="token_embed")
            return engine.finish(handle)

        before = counters(sidecar)
        first, again = each(), each()
        assert first.cached_tokens == again.cached_tokens == loaded_tokens(sidecar, before) == 0
        assert first.embeddings is not None
        assert first.embeddings == again.embeddings
        assert len(first.embeddings) == len(prompt)
        empty(engine)
        whole = Call(prompt).generate(engine, salt)
        assert whole.cached_tokens == whole_blocks(len(prompt))
        assert product(embedding_of(whole), first.embeddings[-1]) > ALIKE


def served_by(engine: EngineProcess) -> list[Generation]:
    """A prompt, the same one again, and one that begins as it does."""
    prompt, salt = words(700, 6), fresh_salt()
    served: list[Generation] = []
    for one in (prompt, prompt, prompt[: 2 * CHUNK_TOKENS] + words(100, 7)):
        empty(engine)
        served.append(engine.generate(one, cache_salt=salt))
    return served


@pytest.fixture(scope="class")
def expected(folder: Path, model: str) -> list[list[float]]:
    """What an engine without a connector makes of them."""
    with PoolingEngine(EngineSpec(model, None, MEAN), folder / "mean.log") as engine:
        expected = [embedding_of(one) for one in served_by(engine.wait_ready())]
    assert expected[0] == expected[1] != expected[2]
    return expected


class TestMean:
    @pytest.mark.promise(
        "offloading-prefixless", "refuse-pooling", "suite-refused", "uncached-engines"
    )
    @pytest.mark.parametrize(
        ("through", "told"),
        [
            (None, "kvlake: this engine is served without the cache"),
            ("OffloadingConnector", "kvlake: this engine is served by no tier"),
        ],
        ids=["connector", "offloading"],
    )
    def test_it_is_served_without_the_cache(
        self,
        folder: Path,
        model: str,
        sidecar: SidecarProcess,
        expected: list[list[float]],
        through: str | None,
        told: str,
    ) -> None:
        extra = {
            "spec_name": "KVLakeOffloadingSpec",
            "spec_module_path": "connector.offloading",
            "socket": sidecar.socket,
            "cpu_bytes_to_use": HOST_TIER_BYTES,
        }
        connector = {
            "kv_connector": through,
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
        spec = EngineSpec(model, sidecar.socket, MEAN, connector=connector if through else None)
        log, before = folder / f"mean-{through}.log", counters(sidecar)
        with PoolingEngine(spec, log) as engine:
            served = served_by(engine.wait_ready())
            assert engine.counter(HITS) == 0
            status = sidecar.status()
            assert not status["sessions"]
            (declined,) = status["uncached"]
            assert declined["reason"] == "unsupported"
        assert [embedding_of(one) for one in served] == expected
        assert not any(one.cached_tokens for one in served)
        assert counters(sidecar) == before
        (line,) = (one for one in log.read_text().splitlines() if "kvlake:" in one)
        assert told in line
        assert "MEAN" in line
        assert declined["message"] in line
