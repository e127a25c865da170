"""vLLM's own offloading: what a request or an engine may be given, as in `test_features.py`, and
layers that read a part of their past, as in `test_windows.py`.

Its cases run here as they are, on engines with `OffloadingConnector`. Not that a prompt is pinned,
which the connector alone can do. What the connector does not cache vLLM's host tier does, by
vLLM's block hashes: they name embeddings by their values, and what streamed in by its tokens.
"""

# pyright: reportUnusedImport=false

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e import test_windows
from tests.e2e.arms import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    Call,
    Oracle,
    check_equal,
    counters,
    empty,
    external_hit,
    fresh_salt,
    own_hit,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import engine_of
from tests.e2e.native import NativeEngine
from tests.e2e.setups import attached, sidecar_in
from tests.e2e.test_features import (  # noqa: F401 (the tests)
    ENGINE_ARGS,
    LOG,
    TOKENS,
    TestRequests,
    TestWishes,
    part,
    test_beside_another_connector,
    test_prefix_caching_off_in_the_engine,
)
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import EngineProcess
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("offloading", "suite-features"),
]


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar_in(folder).socket, ENGINE_ARGS)
    with NativeEngine(spec, folder / LOG) as engine:
        yield engine.wait_ready()


@pytest.fixture
def kind() -> type[EngineProcess]:
    return NativeEngine


@pytest.fixture(scope="class")
def sidecar(folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
    with attached(folder, engine) as sidecar:
        yield sidecar


class TestCachedByVllmsHashes:
    @pytest.mark.promise("prompt-embeddings")
    def test_prompt_embeddings(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """They are cached as such: what was computed of tokens is not found."""
        prompt = words(TOKENS, 21)
        cold = own_hit(engine, Call(prompt))
        warm = own_hit(engine, Call(prompt), before=[Call(prompt)])
        call = Call(prompt, options={"as_embeddings": True})
        check_equal(own_hit(engine, call), cold)
        check_equal(external_hit(engine, call, before=[Call(prompt)]), cold)
        loaded = counters(sidecar)["chunks_loaded"]
        check_equal(external_hit(engine, call, before=[call]), warm)
        assert counters(sidecar)["chunks_loaded"] > loaded

    @pytest.mark.promise("streaming-input")
    def test_streaming_input(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """It is stored until it goes on: then vLLM mixes up its blocks
        (`connector/offloading/workarounds.py`)."""
        first, second = words(700, 22), words(500, 23)
        salt = fresh_salt()
        streams = Call(first, options={"inputs": [second]})
        empty(engine)
        generation = streams.generate(engine, salt)
        assert len(generation.tokens) == len(generation.logprobs) == 2 * GENERATED_TOKENS
        kept = generation.tokens[: GENERATED_TOKENS - 1]
        turn = Call([*first, *kept, *second])
        Oracle(engine, Call(first)).check_close(generation)
        oracle = Oracle(engine, turn)
        oracle.check_close(part(generation, GENERATED_TOKENS))
        # What was computed before it went on is found, and no more.
        before = len(first) + len(kept)
        for held_tokens in (before - before % BLOCK_TOKENS, whole_blocks(turn.tokens)):
            empty(engine)
            other = turn.generate(engine, salt)
            assert other.cached_tokens == held_tokens
            oracle.check_close(other)
        empty(engine)
        loaded = counters(sidecar)["chunks_loaded"]
        again = streams.generate(engine, salt)
        assert counters(sidecar)["chunks_loaded"] > loaded
        assert again.cached_tokens == whole_blocks(len(first))
        Oracle(engine, Call(first)).check_close(again)
        # Rounding may have chosen other words.
        said = Call([*first, *again.tokens[: GENERATED_TOKENS - 1], *second])
        Oracle(engine, said).check_close(part(again, GENERATED_TOKENS))


class TestWindowsAlone(test_windows.TestWindowsAlone):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[EngineProcess]:
        model = tmp_path_factory.mktemp("mistral")
        test_windows.write_mistral(model)
        with engine_of(model, folder, kind=NativeEngine, num_gpu_blocks_override=48) as engine:
            yield engine

    def chunks_read(self, tokens: int) -> int:
        """A block of a group is a row of vLLM's host tier, and so a chunk."""
        return self.blocks_read(tokens)


class TestChunkedLocal(test_windows.TestChunkedLocal):
    @pytest.fixture(scope="class")
    @classmethod
    def engine(
        cls, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[EngineProcess]:
        model = tmp_path_factory.mktemp("llama4")
        test_windows.write_llama4(model)
        with engine_of(model, folder, kind=NativeEngine) as engine:
            yield engine

    def chunks_read(self, tokens: int) -> int:
        """vLLM's offloading takes local attention for full: it asks for all that there is."""
        return self.groups * (tokens // BLOCK_TOKENS)

    @pytest.mark.parametrize("tokens", [125, 161, 513, 515, 1500])
    def test_host_hits(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        super().test_host_hits(engine, sidecar, tokens)

    @pytest.mark.parametrize("tokens", [160, 512])
    def test_a_prompt_of_whole_blocks(
        self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int
    ) -> None:
        """So all of it is loaded, and the last token is computed again."""
        call = self.call(tokens, tokens)
        measured = external_hit(engine, call, before=[call])
        assert measured.generation.cached_tokens == tokens - 1
        Oracle(engine, call).check_close(measured.generation)
