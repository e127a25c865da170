"""What an engine of two ranks must give, as tests, however the model is cut over them.

A test module subclasses `TwoRanksSuite`, has an engine of two ranks, and says what the objects of
either are called; or `RankPartsSuite`, where either has its own. A chunk is whole with the parts of
both. One engine serves all cases; sidecars take turns on its sockets.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from tests.e2e.arms import (
    CHUNK_TOKENS,
    KV_BYTES_PER_TOKEN,
    Call,
    Measured,
    Oracle,
    attach,
    blocks_of,
    check_equal,
    check_hit,
    chunk_tokens,
    close,
    counters,
    empty,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    sessions_of,
    whole_blocks,
    words,
)
from tests.e2e.setups import SMALL, folder_store, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tests.harness.sidecars import SidecarProcess

TOKENS: Final = 1500
WHOLE_TOKENS: Final = whole_blocks(TOKENS)


@contextlib.contextmanager
def engine_of(
    folder: Path,
    model: str,
    engine_args: dict[str, Any],
    *,
    kind: type[EngineProcess] = EngineProcess,
) -> Generator[EngineProcess]:
    """An engine of two ranks, each on a core of its own."""
    socket = sidecar_in(folder).socket
    spec = EngineSpec(model, socket, {**SMALL, **engine_args}, threads_bind="0|1")
    with kind(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


@contextlib.contextmanager
def cluster(folder: Path, engine: EngineProcess) -> Generator[SidecarProcess]:
    """An empty sidecar with a folder that outlives it, attached to both ranks."""
    with sidecar_in(folder, store=folder_store(folder / "store")) as sidecar:
        attach(engine, sidecar, sessions=sessions_of(engine))
        yield sidecar
        empty(engine)
        assert sidecar.process is not None
        if sidecar.process.poll() is None:
            sidecar.wait("everything ended", idle)
            assert sidecar.drain() == 0


def listed(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until the catalog was read whole: the number alone may be that of one of its files."""

    def whole(status: dict[str, Any]) -> bool:
        store = status["tiers"]["store"]
        return bool(store["listings"] and store["chunks"] >= chunks)

    sidecar.wait("the store is listed", whole)


class TwoRanksSuite:
    """Subclass it in a module with a fixture `engine`."""

    objects: ClassVar[tuple[str, ...]]
    """What the objects of a chunk are called: their layers and heads."""

    @pytest.mark.promise("two-ranks")
    def test_host_hit(self, folder: Path, engine: EngineProcess) -> None:
        call = Call(words(TOKENS, 1))
        with cluster(folder, engine) as sidecar:
            before = counters(sidecar)["bytes_loaded"]
            generation = check_hit(engine, call)
            assert generation.cached_tokens == WHOLE_TOKENS
            # Both ranks together loaded every byte once.
            loaded = counters(sidecar)["bytes_loaded"] - before
            assert loaded == WHOLE_TOKENS * KV_BYTES_PER_TOKEN

    @pytest.mark.nightly
    def test_partial_local_hit_plus_external(self, folder: Path, engine: EngineProcess) -> None:
        prompt = words(TOKENS, 2)
        head = Call(prompt[: CHUNK_TOKENS + 97], max_tokens=1)
        with cluster(folder, engine):
            generation = check_hit(engine, Call(prompt), before=[head, Call(prompt)], local=[head])
            assert generation.cached_tokens == WHOLE_TOKENS

    @pytest.mark.nightly
    def test_requests_side_by_side(self, folder: Path, engine: EngineProcess) -> None:
        """Loads, computing and aborts in steps that overlap; what a load left is given back."""
        calls = [Call(words(TOKENS, seed)) for seed in (7, 8, 9)]
        with cluster(folder, engine):
            oracles = [Oracle(engine, call) for call in calls]
            for oracle in oracles:
                oracle.at(0)
            salts = [fresh_salt(), fresh_salt()]
            # Computed at first, and then loaded.
            for aborted in (1, 0):
                empty(engine)
                for salt in salts:
                    handles = [engine.begin(call.prompt, cache_salt=salt) for call in calls]
                    engine.abort(handles[aborted])
                    generations = [engine.finish(handle) for handle in handles]
                    for at in {0, 1, 2} - {aborted}:
                        oracles[at].check_close(generations[at])

    @pytest.mark.promise("two-ranks")
    def test_store_hit_of_an_empty_sidecar(self, folder: Path, engine: EngineProcess) -> None:
        call = Call(words(TOKENS, 3))
        with cluster(folder, engine):
            expected = own_hit(engine, call, before=[call])
            assert expected.blocks[0] != expected.blocks[1], "ranks hold different parts"
        # Not those of the catalog.
        objects = {path.name for path in (folder / "store").rglob("*-*.*-*.arrow")}
        assert objects == set(self.objects)
        with cluster(folder, engine) as sidecar:
            chunks = -(-WHOLE_TOKENS // chunk_tokens(engine))
            listed(sidecar, chunks)
            empty(engine)
            generation = engine.generate(call.prompt, cache_salt=expected.salt)
            check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
            assert generation.cached_tokens == WHOLE_TOKENS
            assert counters(sidecar)["chunks_read"] == chunks

    @pytest.mark.nightly
    def test_sidecar_killed_during_a_load(self, folder: Path, engine: EngineProcess) -> None:
        """Whatever one rank had loaded already, both compute; a successor cleans up and serves."""
        call = Call(words(TOKENS, 5))
        cold = own_hit(engine, call)
        with cluster(folder, engine) as sidecar:
            warm = own_hit(engine, call, before=[call])
            empty(engine)
            handle = engine.begin(call.prompt, cache_salt=warm.salt)
            time.sleep(0.005)
            sidecar.kill()
            generation = engine.finish(handle)
            if has_host_tier(engine) and 0 < generation.cached_tokens < WHOLE_TOKENS:
                # What had come of the prompt's head is a hit.
                assert close(generation, cold.generation)
            else:
                expected = warm if generation.cached_tokens else cold
                assert generation.tokens == expected.generation.tokens
                assert generation.logprobs == expected.generation.logprobs
        with cluster(folder, engine):
            for _ in range(2):
                generation = engine.generate(call.prompt, cache_salt=warm.salt)
                empty(engine)
            assert generation.cached_tokens == WHOLE_TOKENS


class RankPartsSuite(TwoRanksSuite):
    """Where a chunk has an object of each rank: `objects` are the first's and the second's."""

    def test_a_chunk_of_which_one_rank_is_missing_is_no_hit(
        self, folder: Path, engine: EngineProcess
    ) -> None:
        """The run of loadable chunks ends before it."""
        call = Call(words(TOKENS, 4))
        _, second = self.objects
        before = set((folder / "store").rglob(second))
        with cluster(folder, engine):
            expected = own_hit(engine, call, before=[call])
        # All of the second rank's objects of this prompt but those of its first chunk.
        tokens = b"".join(token.to_bytes(4, "little") for token in call.prompt[:CHUNK_TOKENS])
        for path in set((folder / "store").rglob(second)) - before:
            if tokens not in path.read_bytes():
                path.unlink()
        with cluster(folder, engine) as sidecar:
            listed(sidecar, 1)
            empty(engine)
            generation = engine.generate(call.prompt, cache_salt=expected.salt)
            assert generation.cached_tokens == CHUNK_TOKENS
