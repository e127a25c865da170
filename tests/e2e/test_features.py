"""What a request or an engine may be given that meets the cache, on real engines.

Most of it on one engine, with priority scheduling and prompt embeddings switched on at once. Beside
it one without a prefix cache of its own, and one with another connector of vLLM's beside kvlake's.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e.arms import (
    BLOCK_TOKENS,
    GENERATED_TOKENS,
    KV_BYTES_PER_TOKEN,
    PREEMPTIONS,
    SESSIONS,
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
    external_hit,
    fresh_salt,
    has_host_tier,
    own_hit,
    same_output,
    whole_blocks,
    words,
)
from tests.e2e.group_suite import succeeded
from tests.e2e.setups import SMALL, attached, folder_store, sidecar_in
from tests.harness.engine import EngineProcess, EngineSpec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import Generation
    from tests.harness.sidecars import SidecarProcess

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.promise("connector", "suite-features"),
]

ENGINE_ARGS: Final[dict[str, Any]] = {
    **SMALL,
    "scheduling_policy": "priority",
    "enable_prompt_embeds": True,
}
TOKENS: Final = 1500
WHOLE_TOKENS: Final = whole_blocks(TOKENS)
LOG: Final = "engine.log"


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar_in(folder).socket, ENGINE_ARGS)
    with EngineProcess(spec, folder / LOG) as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="class")
def sidecar(folder: Path, engine: EngineProcess) -> Iterator[SidecarProcess]:
    with attached(folder, engine) as sidecar:
        yield sidecar


@pytest.fixture
def kind() -> type[EngineProcess]:
    """For engines that a test starts itself."""
    return EngineProcess


def wishing(call: Call, **request_params: Any) -> Call:
    """The same request, with what it asks of the cache."""
    return asking(call, request_params)


def chunks_of(engine: EngineProcess) -> int:
    """Chunks of a prompt of `TOKENS`."""
    return -(-WHOLE_TOKENS // chunk_tokens(engine))


def asking(call: Call, request_params: object) -> Call:
    params = {"kv_transfer_params": {"kvlake": request_params}}
    return replace(call, options={**call.options, **params})


def stored_by(engine: EngineProcess, sidecar: SidecarProcess, call: Call) -> tuple[str, int]:
    """Run a request from poison on; its salt, and how many chunks it stored."""
    salt = fresh_salt()
    empty(engine)
    before = counters(sidecar)["chunks_stored"]
    call.generate(engine, salt)
    empty(engine)
    return salt, counters(sidecar)["chunks_stored"] - before


class TestWishes:
    """`kv_transfer_params={"kvlake": {...}}`."""

    @pytest.fixture(scope="class")
    @classmethod
    def bucket(cls, folder: Path) -> Path:
        return folder / "store"

    @pytest.fixture(scope="class")
    @classmethod
    def sidecar(cls, folder: Path, engine: EngineProcess, bucket: Path) -> Iterator[SidecarProcess]:
        with attached(folder, engine, store=folder_store(bucket)) as sidecar:
            yield sidecar

    @pytest.mark.promise("read-write")
    def test_write_false_stores_nothing_and_loads(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        call = Call(words(TOKENS, 1))
        reader = wishing(call, write=False)
        oracle = own_hit(engine, call, before=[call])
        check_equal(external_hit(engine, reader, before=[call]), oracle)
        salt, stored = stored_by(engine, sidecar, reader)
        assert stored == 0
        assert call.generate(engine, salt).cached_tokens == 0

    @pytest.mark.promise("read-write")
    def test_read_false_loads_nothing_and_stores(self, engine: EngineProcess) -> None:
        call = Call(words(TOKENS, 2))
        writer = wishing(call, read=False)
        check_equal(external_hit(engine, writer, before=[call]), own_hit(engine, call))
        oracle = own_hit(engine, call, before=[call])
        check_equal(external_hit(engine, call, before=[writer]), oracle)

    @pytest.mark.promise("read-write")
    def test_neither(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        call = Call(words(TOKENS, 3))
        other = wishing(call, read=False, write=False)
        check_equal(external_hit(engine, other, before=[call]), own_hit(engine, call))
        assert stored_by(engine, sidecar, other)[1] == 0

    @pytest.mark.promise("host-only", "ttl")
    def test_only_host_memory(
        self, engine: EngineProcess, sidecar: SidecarProcess, bucket: Path
    ) -> None:
        """What only the store has is not read, and what stays in host memory is not written."""
        call, near, brief = (Call(words(TOKENS, seed)) for seed in (4, 5, 6))
        oracle = own_hit(engine, near, before=[near])
        # In host memory it is as any other.
        measured = external_hit(engine, near, before=[wishing(near, write="host")])
        check_equal(measured, oracle)
        brief_salt, stored = stored_by(engine, sidecar, wishing(brief, ttl_seconds=3600))
        assert stored >= chunks_of(engine)
        expected = own_hit(engine, call, before=[call])
        succeeded(engine, sidecar, bucket)
        empty(engine)
        assert near.generate(engine, measured.salt).cached_tokens == 0
        assert brief.generate(engine, brief_salt).cached_tokens == 0
        assert counters(sidecar)["chunks_read"] == 0
        of_host = wishing(call, read="host", write=False)
        empty(engine)
        generation = of_host.generate(engine, expected.salt)
        cold = own_hit(engine, call)
        assert generation.cached_tokens == counters(sidecar)["chunks_read"] == 0
        assert generation.logprobs == cold.generation.logprobs
        # The second time host memory has what the first read there.
        for one in (call, of_host):
            empty(engine)
            generation = one.generate(engine, expected.salt)
            check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
            assert counters(sidecar)["chunks_read"] == chunks_of(engine)

    @pytest.mark.promise("ttl")
    def test_ttl(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        call = Call(words(TOKENS, 7))
        oracle = own_hit(engine, call, before=[call])
        check_equal(external_hit(engine, call, before=[wishing(call, ttl_seconds=3600)]), oracle)
        expired = counters(sidecar)["chunks_expired"]
        salt, stored = stored_by(engine, sidecar, wishing(call, ttl_seconds=1))
        assert stored >= chunks_of(engine)
        sidecar.wait(
            "it is forgotten", lambda now: now["counters"]["chunks_expired"] == expired + stored
        )
        generation = call.generate(engine, salt)
        measured = Measured(generation, blocks_of(engine), salt)
        check_equal(measured, own_hit(engine, call))
        assert generation.cached_tokens == 0

    @pytest.mark.promise("malformed-params")
    def test_what_is_not_understood_is_taken_as_less(
        self, folder: Path, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        call = Call(words(TOKENS, 8))
        cold = own_hit(engine, call)
        for request_params, stores in (("no", 0), ({"raed": False}, 0), ({"read": "false"}, 1)):
            check_equal(external_hit(engine, asking(call, request_params), before=[call]), cold)
            assert bool(stored_by(engine, sidecar, asking(call, request_params))[1]) == stores
        log = (folder / LOG).read_text()
        assert log.count("is not understood") == 1, "told once"

    def test_another_connectors_words_are_none_of_ours(self, engine: EngineProcess) -> None:
        call = Call(words(TOKENS, 9), options={"kv_transfer_params": {"of_others": True}})
        assert check_hit(engine, call).cached_tokens == WHOLE_TOKENS


@pytest.mark.promise("pin")
def test_what_is_pinned_stays(folder: Path, engine: EngineProcess) -> None:
    """In a pool that others' prompts fill several times over."""
    call = Call(words(700, 10))
    with attached(folder, engine, host={"size": "32MiB"}) as sidecar:
        oracle = own_hit(engine, call, before=[call])
        pinned, _ = stored_by(engine, sidecar, wishing(call, pin_seconds=600))
        sidecar.wait("it is pinned", lambda now: now["counters"]["chunks_pinned"] >= 3)
        other, _ = stored_by(engine, sidecar, call)
        for seed in range(8):
            stored_by(engine, sidecar, Call(words(TOKENS, 11 + seed), max_tokens=1))
        assert counters(sidecar)["chunks_evicted"] > 0
        generation = call.generate(engine, pinned)
        check_equal(Measured(generation, blocks_of(engine), pinned), oracle)
        assert generation.cached_tokens == whole_blocks(700)
        empty(engine)
        assert call.generate(engine, other).cached_tokens == 0


class TestRequests:
    @pytest.mark.promise("no-cache-reads")
    def test_a_request_that_may_not_read_the_cache(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """One that asks for its prompt's log probabilities needs all of it computed. It stores."""
        call = Call(words(TOKENS, 20))
        whole = replace(call, options={"prompt_logprobs": 1})
        cold = own_hit(engine, whole)
        measured = external_hit(engine, whole, before=[call])
        check_equal(measured, cold)
        assert measured.generation.cached_tokens == 0
        told = measured.generation.prompt_logprobs
        assert told == cold.generation.prompt_logprobs
        assert told is not None
        assert len(told) == TOKENS
        oracle = own_hit(engine, call, before=[whole])
        check_equal(external_hit(engine, call, before=[whole]), oracle)
        assert oracle.generation.cached_tokens == WHOLE_TOKENS

    @pytest.mark.promise("samples")
    def test_several_samples_of_one_prompt(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """Each is a request to the cache: it loads the prompt, and stores what it generated."""
        number = 4
        plain = Call(words(TOKENS, 24))
        drawn = replace(plain, max_tokens=100, options={"samples": number})
        oracle = own_hit(engine, plain, before=[plain])
        loaded = counters(sidecar)["bytes_loaded"]
        measured = external_hit(engine, drawn, before=[plain])
        assert measured.generation.cached_tokens == WHOLE_TOKENS
        assert counters(sidecar)["bytes_loaded"] >= loaded + WHOLE_TOKENS * KV_BYTES_PER_TOKEN
        # Side by side they are computed in other shapes: what was loaded is bit for bit the same,
        # what came after it is rounded otherwise.
        (worker,), (expected,) = measured.blocks, oracle.blocks
        assert (worker & expected).total() >= WHOLE_TOKENS // BLOCK_TOKENS
        behind = whole_blocks(TOKENS + 100) - WHOLE_TOKENS
        assert len(worker.keys() - expected.keys()) <= number * (behind // BLOCK_TOKENS + 1)
        samples = measured.generation.samples
        assert samples is not None
        assert len(samples) == number
        assert len({tuple(tokens) for tokens, _ in samples}) > 1, "chance had no say"
        for _, positions in samples:
            # The token drawn is told, too, where it is none of the likeliest.
            assert close(replace(measured.generation, logprobs=positions), oracle.generation)
        for tokens, _ in samples:
            assert len(tokens) == 100
            turn = Call([*plain.prompt, *tokens, *words(50, 25)], max_tokens=1)
            empty(engine)
            generation = turn.generate(engine, measured.salt)
            assert generation.cached_tokens == whole_blocks(TOKENS + 100)
            Oracle(engine, turn).check_close(generation)

    @pytest.mark.promise("priority-scheduling")
    def test_priority_scheduling(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """Who matters more overtakes those that wait, and others are preempted and load again."""
        prompts = [words(1300, seed) for seed in (26, 27, 28)]
        oracles = [Oracle(engine, Call(prompt, max_tokens=1)) for prompt in prompts]
        for oracle in oracles:
            oracle.at(0)
        empty(engine)
        loaded = counters(sidecar)["chunks_loaded"]
        preempted = engine.counter(PREEMPTIONS)
        # Six of them have room as they come, and not with what they generate.
        low = Call(prompts[0], max_tokens=150, options={"priority": 9})
        calls = [replace(low, prompt=prompts[number % 3]) for number in range(14)]
        calls.append(Call(prompts[0], options={"priority": 0}))
        salts = [fresh_salt() for _ in calls]
        handles = [call.begin(engine, salt) for call, salt in zip(calls, salts, strict=True)]
        # It came last, and would have to wait for most of these.
        urgent = engine.finish(handles.pop())
        oracles[0].check_close(urgent)
        for handle in handles[9:]:
            engine.abort(handle)
        assert all(len(engine.finish(handle).tokens) < 150 for handle in handles[9:])
        for number, handle in enumerate(handles[:9]):
            generation = engine.finish(handle)
            assert len(generation.tokens) == 150
            oracles[number % 3].check_close(generation)
        assert engine.counter(PREEMPTIONS) > preempted
        empty(engine)
        # Each has a salt of its own: only who was preempted can load. An engine with a host tier of
        # its own finds it there.
        assert has_host_tier(engine) or counters(sidecar)["chunks_loaded"] > loaded
        for call, salt in ((calls[0], salts[0]), (calls[-1], salts[-1])):
            generation = replace(call, max_tokens=1).generate(engine, salt)
            assert generation.cached_tokens == whole_blocks(1300)
            empty(engine)


class TestNotCached:
    @pytest.mark.promise("prompt-embeddings")
    def test_prompt_embeddings_are_served_and_not_cached(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """They are those of a prompt's tokens, and so give what the tokens give."""
        prompt = words(TOKENS, 21)
        cold = own_hit(engine, Call(prompt))
        warm = own_hit(engine, Call(prompt), before=[Call(prompt)])
        call = Call(prompt, options={"as_embeddings": True})
        empty(engine)
        before = counters(sidecar)
        check_equal(own_hit(engine, call), cold)
        check_equal(own_hit(engine, call, before=[call]), warm)
        check_equal(external_hit(engine, call, before=[call]), cold)
        empty(engine)
        after = counters(sidecar)
        for name in ("chunks_stored", "chunks_loaded", "lookups"):
            assert after[name] == before[name]

    @pytest.mark.promise("streaming-input")
    def test_streaming_input_is_served_and_not_cached(
        self, engine: EngineProcess, sidecar: SidecarProcess
    ) -> None:
        """Each answer is that of all inputs so far; vLLM drops an answer's last token."""
        first, second = words(700, 22), words(500, 23)
        salt = fresh_salt()
        streams = Call(first, options={"inputs": [second]})
        empty(engine)
        before = counters(sidecar)
        generation = streams.generate(engine, salt)
        empty(engine)
        assert counters(sidecar)["chunks_stored"] == before["chunks_stored"]
        assert len(generation.tokens) == len(generation.logprobs) == 2 * GENERATED_TOKENS
        turn = Call([*first, *generation.tokens[: GENERATED_TOKENS - 1], *second])
        Oracle(engine, Call(first)).check_close(generation)
        oracle = Oracle(engine, turn)
        oracle.check_close(part(generation, GENERATED_TOKENS))
        # What the engine itself holds of it serves others, and is stored for them.
        empty(engine)
        assert same_output(streams.generate(engine, salt), generation)
        for _ in range(2):
            other = turn.generate(engine, salt)
            assert other.cached_tokens == whole_blocks(turn.tokens)
            oracle.check_close(other)
            empty(engine)
        # But it reads nothing of what others stored of the same tokens.
        loaded = counters(sidecar)["chunks_loaded"]
        assert loaded > before["chunks_loaded"]
        assert same_output(streams.generate(engine, salt), generation)
        assert counters(sidecar)["chunks_loaded"] == loaded


def part(generation: Generation, start: int) -> Generation:
    """What came from some token on."""
    return replace(
        generation, tokens=generation.tokens[start:], logprobs=generation.logprobs[start:]
    )


@pytest.mark.promise("no-prefix-caching")
def test_prefix_caching_off_in_the_engine(folder: Path, model: str, engine: EngineProcess) -> None:
    """Then kvlake's is the only one there is; the oracle is an engine that has its own."""
    call, other = Call(words(TOKENS, 30)), Call(words(TOKENS, 31))
    engine_args = {**SMALL, "enable_prefix_caching": False}
    spec = EngineSpec(model, sidecar_in(folder).socket, engine_args)
    with attached(folder, engine) as sidecar:
        expected, oracle = (own_hit(engine, one, before=[one]) for one in (call, other))
        empty(engine)
        with type(engine)(spec, folder / "uncached.log") as second:
            second.wait_ready()
            attach(second, sidecar, sessions=2 * SESSIONS)
            empty(second)
            before = counters(sidecar)["bytes_loaded"]
            generation = call.generate(second, expected.salt)
            check_equal(Measured(generation, blocks_of(second), expected.salt), expected)
            # At once again: the engine itself has nothing.
            assert call.generate(second, expected.salt).cached_tokens == WHOLE_TOKENS
            loaded = counters(sidecar)["bytes_loaded"] - before
            assert loaded == 2 * WHOLE_TOKENS * KV_BYTES_PER_TOKEN
            measured = external_hit(second, other, before=[other])
            check_equal(measured, oracle)
            # And the other way round.
            empty(second)
            empty(engine)
            generation = other.generate(engine, measured.salt)
            check_equal(Measured(generation, blocks_of(engine), measured.salt), oracle)
        sidecar.wait("it is gone", lambda now: len(now["sessions"]) == SESSIONS)


@pytest.mark.promise("beside-others")
def test_beside_another_connector(folder: Path, model: str, kind: type[EngineProcess]) -> None:
    """vLLM's `ExampleConnector`, which keeps prompts in files, by their tokens and nothing else.

    So it has what an engine computed under any salt, and kvlake only what it was asked for.
    """
    place, call = folder / "example", Call(words(TOKENS, 40))
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(place)},
    }
    spec = EngineSpec(model, sidecar_in(folder, name="m").socket, SMALL, beside=(other,))
    with kind(spec, folder / "beside.log") as engine:
        engine.wait_ready()
        with attached(folder, engine, name="m") as sidecar:
            oracle = own_hit(engine, call, before=[call])
            assert any(place.iterdir())
            # Under another salt it is the other connector's hit: kvlake has nothing there, and
            # stores what came.
            salt = fresh_salt()
            empty(engine)
            before = counters(sidecar)
            generation = call.generate(engine, salt)
            check_equal(Measured(generation, blocks_of(engine), salt), oracle)
            empty(engine)
            assert counters(sidecar)["bytes_loaded"] == before["bytes_loaded"]
            assert counters(sidecar)["chunks_stored"] >= before["chunks_stored"] + chunks_of(engine)
            # From then on it is that of kvlake, which is asked first.
            for _ in range(2):
                empty(engine)
                generation = call.generate(engine, salt)
                check_equal(Measured(generation, blocks_of(engine), salt), oracle)
                loaded = counters(sidecar)["bytes_loaded"] - before["bytes_loaded"]
                before = counters(sidecar)
                assert loaded == WHOLE_TOKENS * KV_BYTES_PER_TOKEN
                # The second time nothing is there of the other's.
                shutil.rmtree(place)
                place.mkdir()
        # Without a sidecar the other connector goes on.
        for _ in range(2):
            salt = fresh_salt()
            empty(engine)
            generation = call.generate(engine, salt)
        check_equal(Measured(generation, blocks_of(engine), salt), oracle)
