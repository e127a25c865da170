"""What a model must give on a real engine, whatever KV cache groups it has, as tests.

A test module subclasses `GroupSuite`, has an engine of its model, and says what of each group a hit
reads. vLLM lays the pages of all groups over each other. What a hit gives is compared with the
engine's own hit of as many tokens: log probabilities and bytes. One engine serves most cases;
sidecars take turns on its sockets.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest

from tests.e2e.arms import (
    ALIKE,
    GENERATED_TOKENS,
    PREEMPTIONS,
    SESSIONS,
    Call,
    Measured,
    attach,
    blocks_of,
    check_reloaded,
    check_throughout,
    close,
    counters,
    empty,
    external_hit,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    same_output,
    sessions_of,
    whole_blocks,
    words,
)
from tests.e2e.holds import LOAD, Holds
from tests.e2e.setups import SMALL, attached, folder_store, in_steps, listed, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from pathlib import Path

    from tests.harness.engine import Generation
    from tests.harness.sidecars import SidecarProcess


def nightly_but(one: int, sizes: Sequence[int]) -> list[Any]:
    """Parameters of a test of which `make test` runs one."""
    return [
        pytest.param(size, marks=[] if size == one else [pytest.mark.nightly]) for size in sizes
    ]


ENGINE_ARGS: Final[dict[str, Any]] = {
    **SMALL,
    **in_steps(512),
    "enable_prefix_caching": True,
    "skip_tokenizer_init": True,
}


@contextlib.contextmanager
def engine_of(
    model: Path, folder: Path, *, kind: type[EngineProcess] = EngineProcess, **engine_args: Any
) -> Generator[EngineProcess]:
    """An engine for the suite."""
    spec = EngineSpec(str(model), sidecar_in(folder).socket, {**ENGINE_ARGS, **engine_args})
    with kind(spec, folder / "engine.log") as engine:
        yield engine.wait_ready()


def succeeded(
    engine: EngineProcess, sidecar: SidecarProcess, bucket: Path, *, sessions: int = SESSIONS
) -> None:
    """End the sidecar, and start one with empty memory that has read what is in its store."""
    empty(engine)
    sidecar.wait("everything ended", idle)
    assert sidecar.drain() == 0
    sidecar.start()
    attach(engine, sidecar, sessions=sessions)
    listed(sidecar, bucket)


class GroupSuite:
    """Subclass it in a module with a fixture `engine`, and give it what raises here."""

    groups: ClassVar = 3
    preempted_tokens: ClassVar = 390
    """Tokens of a prompt: a dozen fit in the KV cache, but not with what they generate."""
    begin_otherwise: ClassVar = True
    """Whether no block of a prompt is one of another's, too."""
    rounding: ClassVar = ALIKE
    """How far apart log probabilities are on average where requests ran in other batches."""
    ranks_have_a_store: ClassVar = False
    """Whether two ranks are asked for a hit of the store, too."""

    def blocks_read(self, tokens: int) -> int:
        """Blocks of a hit of this many tokens, in all groups."""
        raise NotImplementedError

    def chunks_read(self, tokens: int) -> int:
        """Chunks of a hit of this many tokens, in all groups."""
        raise NotImplementedError

    def call(self, tokens: int, seed: int, max_tokens: int = GENERATED_TOKENS) -> Call:
        """A request of this many tokens. Requests of one seed begin alike."""
        return Call(words(tokens, seed), max_tokens)

    @pytest.fixture
    def sidecar(self, folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
        with attached(folder, engine) as sidecar:
            yield sidecar

    def check_bytes(self, measured: Measured, oracle: Measured) -> None:
        """Assert that what was loaded is what the engine had, and that nothing else was.

        The last block of each group is partly written. What else is in it is what was there before:
        vLLM uses the blocks of a window that moved on again at once, at other times in either arm.
        """
        cached_tokens = measured.generation.cached_tokens
        assert cached_tokens == oracle.generation.cached_tokens
        for worker, expected in zip(measured.blocks, oracle.blocks, strict=True):
            assert (worker & expected).total() >= self.blocks_read(cached_tokens)
            assert (worker - expected).total() <= self.groups

    def check_same(self, engine: EngineProcess, call: Call, expected: Measured) -> None:
        """Assert that on poison a request under the salt of `expected` gives what that gave."""
        empty(engine)
        generation = call.generate(engine, expected.salt)
        assert generation.cached_tokens == whole_blocks(call.tokens)
        assert same_output(generation, expected.generation)
        self.check_bytes(Measured(generation, blocks_of(engine), expected.salt), expected)

    @pytest.mark.promise("host-hit")
    @pytest.mark.parametrize("tokens", nightly_but(515, [125, 160, 512, 515, 1500]))
    def test_host_hits(self, engine: EngineProcess, sidecar: SidecarProcess, tokens: int) -> None:
        # To vLLM's host tier a group is a part of a key.
        realms = 1 if has_host_tier(engine) else self.groups
        assert len(sidecar.status()["realms"]) == realms
        before = counters(sidecar)
        for max_tokens in (40, 1):
            call = self.call(tokens, tokens, max_tokens)
            oracle = own_hit(engine, call, before=[call])
            measured = external_hit(engine, call, before=[call])
            assert measured.generation.cached_tokens == whole_blocks(tokens)
            assert same_output(measured.generation, oracle.generation)
        self.check_bytes(measured, oracle)
        assert counters(sidecar)["loads_missing"] == before["loads_missing"]

    def test_behind_the_engines_own_hit(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        call = self.call(1300, 1)
        head = replace(call, prompt=[*call.prompt[: 512 - call.media_tokens], 7], max_tokens=1)
        oracle = own_hit(engine, call, before=[head, call])
        measured = external_hit(engine, call, before=[head, call], local=[head])
        cached_tokens = measured.generation.cached_tokens
        assert cached_tokens == oracle.generation.cached_tokens == whole_blocks(1300)
        assert same_output(measured.generation, oracle.generation)

    @pytest.mark.promise("store-hit")
    def test_object_hit(self, folder: Path, engine: EngineProcess) -> None:
        """An empty sidecar offers what another one left: every group of it, or nothing."""
        bucket, call = folder / "store", self.call(1500, 7, max_tokens=1)
        with attached(folder, engine, store=folder_store(bucket)) as sidecar:
            expected = own_hit(engine, call, before=[call])
            succeeded(engine, sidecar, bucket)
            self.check_same(engine, call, expected)
            assert counters(sidecar)["chunks_read"] == self.chunks_read(whole_blocks(1500))

    @pytest.mark.promise("abort-of-load")
    @pytest.mark.nightly
    def test_an_abort_during_a_load(self, folder: Path, engine: EngineProcess) -> None:
        """Half-way through its copy, beside loads of others: each of them gets its own bytes.

        Blocks of the aborted one are nobody else's until its copy has ended.
        """
        holds = Holds(folder / "holds")
        (folder / "holds").mkdir()
        call, *others = (self.call(930 - 10 * number, 20 + 2 * number, 1) for number in range(4))
        with attached(folder, engine, holds=holds) as sidecar:
            expected = own_hit(engine, call, before=[call])
            computed = [other.generate(engine, expected.salt) for other in others]
            empty(engine)
            workers = [one for one in sidecar.status()["sessions"] if one["role"] == "worker"]
            (pid,) = (one["pid"] for one in workers)
            holds.hold(LOAD, pid)
            handle = call.begin(engine, expected.salt)
            sidecar.wait("the load is held", lambda _: holds.held(LOAD, pid))
            beside = [other.begin(engine, expected.salt) for other in others]
            engine.abort(handle)
            assert engine.finish(handle).tokens == []
            holds.let_go()
            for other, one, cold in zip(others, beside, computed, strict=True):
                generation = engine.finish(one)
                assert generation.cached_tokens == whole_blocks(other.tokens)
                assert close(generation, cold)
            sidecar.wait("everything ended", idle)
            self.check_same(engine, call, expected)

    @pytest.mark.promise("preemption")
    @pytest.mark.nightly
    def test_preemption(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """More requests than the KV cache has room for: they are preempted, and load again."""
        calls = [
            self.call(self.preempted_tokens + 10 * number, 60 + number, max_tokens=250)
            for number in range(12)
        ]
        loaded = counters(sidecar)["chunks_loaded"]
        salt = fresh_salt()
        # Nothing was stored before: only who was preempted can load. An engine with a host tier of
        # its own finds it there, and in the second round in the sidecar.
        rounds: list[list[Generation]] = []
        for _ in range(2 if has_host_tier(engine) else 1):
            empty(engine)
            preempted = engine.counter(PREEMPTIONS)
            handles = [call.begin(engine, salt) for call in calls]
            rounds.append([engine.finish(handle) for handle in handles])
            assert engine.counter(PREEMPTIONS) > preempted
        assert counters(sidecar)["chunks_loaded"] > loaded
        # vLLM's host tier has what the engine computed, the sidecar what it computed first.
        if self.begin_otherwise and not has_host_tier(engine):
            check_reloaded(engine, calls, rounds[-1], [salt] * len(calls))
        for generations in rounds:
            for call, generation in zip(calls, generations, strict=True):
                assert len(generation.tokens) == 250
                check_throughout(engine, call, generation, self.rounding)

    @pytest.mark.promise("engine-restart")
    def test_engine_restarted(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """Another engine of the same model hits what the first one stored."""
        call = self.call(1100, 8, max_tokens=1)
        expected = own_hit(engine, call, before=[call])
        empty(engine)
        with type(engine)(engine.spec, folder / "second-engine.log") as second:
            second.wait_ready()
            attach(second, sidecar, sessions=2 * SESSIONS)
            self.check_same(second, call, expected)
            empty(second)
        sidecar.wait("it is gone", lambda now: len(now["sessions"]) == SESSIONS)

    @pytest.mark.promise("two-ranks")
    @pytest.mark.nightly
    def test_two_ranks(self, folder: Path, engine: EngineProcess) -> None:
        """Each rank has its own part of every group, and loads that."""
        engine_args = {**engine.spec.engine_args, "tensor_parallel_size": 2}
        spec = replace(engine.spec, engine_args=engine_args, threads_bind="0|1")
        call, bucket = self.call(900, 9, max_tokens=1), folder / "store-of-ranks"
        sections: dict[str, Any] = (
            {"store": folder_store(bucket)} if self.ranks_have_a_store else {}
        )
        with attached(folder, engine, **sections) as sidecar:
            with type(engine)(spec, folder / "two-ranks.log") as ranks:
                ranks.wait_ready()
                sessions = SESSIONS + sessions_of(ranks)
                attach(ranks, sidecar, sessions=sessions)
                before = counters(sidecar)
                oracle = own_hit(ranks, call, before=[call])
                assert oracle.blocks[0] != oracle.blocks[1], "ranks hold different parts"
                measured = external_hit(ranks, call, before=[call])
                assert measured.generation.cached_tokens == whole_blocks(900)
                assert same_output(measured.generation, oracle.generation)
                self.check_bytes(measured, oracle)
                assert counters(sidecar)["loads_missing"] == before["loads_missing"]
                if self.ranks_have_a_store:
                    succeeded(ranks, sidecar, bucket, sessions=sessions)
                    self.check_same(ranks, call, oracle)
                    assert counters(sidecar)["chunks_read"] == self.chunks_read(whole_blocks(900))
                empty(ranks)
            sidecar.wait("they are gone", lambda now: len(now["sessions"]) == SESSIONS)
