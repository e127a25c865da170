"""Engines and sidecars that start, stop, hang and die in any order, with requests under way.

One engine, started before any sidecar was, lives through the whole module; sidecars come and go
beneath it on the same sockets. Whatever happens, a request gives what the engine would have given
without a sidecar: right for as many tokens as it says were cached.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.arms import (
    CHUNK_TOKENS,
    KV_BYTES_PER_TOKEN,
    PATIENT,
    PREEMPTIONS,
    SESSIONS,
    Call,
    Oracle,
    attach,
    blocks_of,
    check_equal,
    check_throughout,
    chunk_tokens,
    counters,
    empty,
    external_hit,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    words,
)
from tests.e2e.chains import in_pool, pool_of
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess
from tests.releases import require_vllm
from tiers.kv.arrow_file import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.harness.engine import Generation

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-lives")]

BLOCKS = 160
"""5,120 tokens of KV cache: enough for any one prompt here, too few for many at once."""
ENGINE_ARGS: dict[str, Any] = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 4096}
PROMPT_TOKENS = 3000
WHOLE_TOKENS = PROMPT_TOKENS // 32 * 32
HASTY_LOADS = {**PATIENT, "load_deadline": "5s", "lease_ttl": "6s", "store_deadline": "10s"}
"""Time to store what is to be loaded; a stopped sidecar is not waited for as long as that."""
HASTY_STORES = {**PATIENT, "store_deadline": "1s"}
TRIES_MAX = 10
SEED = int(os.environ.get("KVLAKE_TEST_SEED", "20"))


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    """Started where there is no sidecar yet, as happens when a node boots."""
    socket = SidecarProcess(folder / "s", {}).socket
    with EngineProcess(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@pytest.fixture(scope="module")
def oracle(engine: EngineProcess) -> Oracle:
    return Oracle(engine, Call(words(PROMPT_TOKENS, 1000)))


@contextlib.contextmanager
def running(
    folder: Path, engine: EngineProcess, *, size: str = "256MiB", limits: dict[str, str] = PATIENT
) -> Iterator[SidecarProcess]:
    """A sidecar that the engine is attached to. It must have nothing left to do at the end."""
    config = {"host": {"size": size}, "limits": limits}
    with SidecarProcess(folder / "s", config) as sidecar:
        attach(engine, sidecar)
        yield sidecar
        assert sidecar.process is not None
        if sidecar.process.poll() is None:
            sidecar.wait("everything ended", idle)


def stored(engine: EngineProcess, prompt: list[int]) -> str:
    """Have the prompt in host memory and nowhere else; its salt."""
    salt = fresh_salt()
    engine.generate(prompt, cache_salt=salt)
    empty(engine)
    return salt


def check_loaded(
    oracle: Oracle, engine: EngineProcess, salt: str, *, rounded: bool = False
) -> None:
    """The whole prompt is loaded, though it may have no longer than a second for it.

    What is late on a busy machine is computed, and there the next time. `rounded`: as in
    `check_rounded`.
    """
    for _ in range(TRIES_MAX):
        generation = engine.generate(oracle.call.prompt, cache_salt=salt)
        if rounded:
            check_rounded(oracle, generation, engine)
        else:
            oracle.check(generation)
        if generation.cached_tokens == WHOLE_TOKENS:
            return
        empty(engine)
    raise AssertionError(f"{generation.cached_tokens} tokens of {WHOLE_TOKENS} were loaded")


def check_rounded(oracle: Oracle, generation: Generation, engine: EngineProcess) -> None:
    """As `Oracle.check`, of chunks that may have been computed behind others that were loaded.

    The connector computes all of a prompt or nothing, and so does not round otherwise.
    """
    check = oracle.check_close if has_host_tier(engine) else oracle.check
    check(generation)


def send(sidecar: SidecarProcess, number: signal.Signals) -> None:
    assert sidecar.process is not None
    sidecar.process.send_signal(number)


# --- starting and restarting ---------------------------------------------------------------------


def test_without_a_sidecar(engine: EngineProcess) -> None:
    """The engine serves, and its own prefix cache works."""
    prompt = words(1000, 1)
    assert engine.generate(prompt).cached_tokens == 0
    assert engine.generate(prompt).cached_tokens == 992


def test_sidecar_started_after_the_engine(folder: Path, engine: EngineProcess) -> None:
    call = Call(words(PROMPT_TOKENS, 2))
    with running(folder, engine):
        expected = own_hit(engine, call, before=[call])
        check_equal(external_hit(engine, call, before=[call]), expected)


def test_sidecar_restarted(folder: Path, engine: EngineProcess, oracle: Oracle) -> None:
    """A new sidecar is empty: the engine attaches by itself, misses, stores, hits."""
    prompt = oracle.call.prompt
    with running(folder, engine) as sidecar:
        salt = stored(engine, prompt)
        assert sidecar.drain() == 0
        # Nobody there: a miss, and nothing waits for anything.
        oracle.check(engine.generate(prompt, cache_salt=salt))
    with running(folder, engine):
        empty(engine)
        assert engine.generate(prompt, cache_salt=salt).cached_tokens == 0
        empty(engine)
        again = engine.generate(prompt, cache_salt=salt)
        assert again.cached_tokens == WHOLE_TOKENS
        oracle.check(again)


@pytest.mark.promise("engine-restart", "llama", "several-engines")
def test_engine_restarted(folder: Path, model: str, engine: EngineProcess) -> None:
    """Another engine of the same model, beside the same sidecar, hits what the first one stored."""
    call = Call(words(PROMPT_TOKENS, 3))
    with running(folder, engine) as sidecar:
        expected = own_hit(engine, call, before=[call])
        spec = EngineSpec(model, sidecar.socket, ENGINE_ARGS)
        with type(engine)(spec, folder / "second-engine.log") as second:
            second.wait_ready()
            attach(second, sidecar, sessions=2 * SESSIONS)
            empty(second)
            generation = second.generate(call.prompt, cache_salt=expected.salt)
            assert generation.cached_tokens == WHOLE_TOKENS
            assert generation.tokens == expected.generation.tokens
            assert generation.logprobs == expected.generation.logprobs
            assert not blocks_of(second)[0] - expected.blocks[0]
            # Killed while it loads and stores: its sessions end, its jobs too.
            handles = [
                second.begin(call.prompt, cache_salt=salt) for salt in (expected.salt, fresh_salt())
            ]
            time.sleep(0.05)
            second.kill()
            del handles
        sidecar.wait("the killed engine is gone", lambda status: len(status["sessions"]) == 2)
        sidecar.wait("everything ended", idle)
        check_equal(external_hit(engine, call, before=[call]), expected)


@pytest.mark.promise("reset")
def test_reset_of_the_connector_forgets(folder: Path, engine: EngineProcess) -> None:
    """A reset of the connector says that weights may have changed: nothing from before is found,
    what is stored from then on is."""
    prompt = words(1500, 4)
    with running(folder, engine):
        salt = stored(engine, prompt)
        assert engine.generate(prompt, cache_salt=salt).cached_tokens == 1472
        engine.reset_prefix_cache(connector=True)
        engine.poison()
        assert engine.generate(prompt, cache_salt=salt).cached_tokens == 0
        empty(engine)
        assert engine.generate(prompt, cache_salt=salt).cached_tokens == 1472


@pytest.mark.promise("reset")
@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_pause_under_load_forgets(folder: Path, engine: EngineProcess, mode: str) -> None:
    """While requests are loaded, computed and stored; a reset alone fails then, again and again."""
    if mode == "wait":
        require_vllm("0.32", "it waits for what holds blocks while it is loaded")
    prompt = words(1500, 4)
    with running(folder, engine):
        loaded, other = stored(engine, prompt), stored(engine, prompt)
        empty(engine)
        handles = [engine.begin(prompt, cache_salt=one) for one in (loaded, fresh_salt(), loaded)]
        engine.pause(mode)
        engine.poison()
        engine.resume()
        # Those that the engine had not begun when it paused end only now.
        for handle in handles:
            engine.finish_or_refused(handle)
        assert engine.generate(prompt, cache_salt=other).cached_tokens == 0


# --- aborts --------------------------------------------------------------------------------------


@pytest.mark.promise("abort-of-load", "llama")
def test_aborts_at_any_time_of_a_load(folder: Path, engine: EngineProcess, oracle: Oracle) -> None:
    chooser = random.Random(SEED)
    prompt = oracle.call.prompt
    oracle.at(0)
    with running(folder, engine) as sidecar:
        salt = stored(engine, prompt)
        took = engine.generate(prompt, cache_salt=salt).total_ms / 1000
        for _ in range(15):
            empty(engine)
            handle = engine.begin(prompt, cache_salt=salt)
            time.sleep(chooser.uniform(0, took))
            engine.abort(handle)
            engine.finish(handle)
        sidecar.wait("everything ended", idle)
        empty(engine)
        generation = engine.generate(prompt, cache_salt=salt)
        assert generation.cached_tokens == WHOLE_TOKENS
        oracle.check(generation)


def test_abort_while_the_load_hangs(folder: Path, engine: EngineProcess, oracle: Oracle) -> None:
    """The blocks of an aborted request stay reserved until nothing can write to them."""
    prompt = oracle.call.prompt
    with running(folder, engine, limits=HASTY_LOADS) as sidecar:
        salt = stored(engine, prompt)
        send(sidecar, signal.SIGSTOP)
        handle = engine.begin(prompt, cache_salt=salt)
        time.sleep(0.3)
        engine.abort(handle)
        assert engine.finish(handle).tokens == []
        # Returns only when the load was revoked and its blocks came back.
        empty(engine)
        send(sidecar, signal.SIGCONT)
        sidecar.wait("everything ended", idle)
        assert engine.digests() == [{}], "a revoked load wrote to the engine's memory"
        check_loaded(oracle, engine, salt)


@pytest.mark.nightly
def test_abort_of_a_request_that_stores(folder: Path, engine: EngineProcess) -> None:
    """What was computed before an abort may be stored, and is right if it is."""
    chooser = random.Random(SEED + 1)
    oracle = Oracle(engine, Call(words(2000, 5)))
    prompt = oracle.call.prompt
    with running(folder, engine):
        took = oracle.at(0).generation.total_ms / 1000
        for _ in range(10):
            salt = fresh_salt()
            handle = engine.begin(prompt, max_tokens=64, cache_salt=salt)
            time.sleep(chooser.uniform(0, 1.5 * took))
            engine.abort(handle)
            engine.finish(handle)
            empty(engine)
            oracle.check(engine.generate(prompt, cache_salt=salt))


# --- a sidecar that hangs or dies ----------------------------------------------------------------


@pytest.mark.promise("failed-load")
@pytest.mark.nightly
def test_sidecar_stopped_during_a_load(folder: Path, engine: EngineProcess, oracle: Oracle) -> None:
    """The request is computed once the load's deadline is over; the load never happens."""
    prompt = oracle.call.prompt
    with running(folder, engine, limits=HASTY_LOADS) as sidecar:
        salt = stored(engine, prompt)
        send(sidecar, signal.SIGSTOP)
        generation = engine.generate(prompt, cache_salt=salt)
        assert generation.cached_tokens == 0
        oracle.check(generation)
        empty(engine)
        send(sidecar, signal.SIGCONT)
        # What it was sent while it was stopped it may read later than a question for its status.
        sidecar.wait(
            "it comes to the load",
            lambda status: status["counters"]["loads_revoked"] + status["counters"]["loads_failed"],
        )
        sidecar.wait("everything ended", idle)
        assert engine.digests() == [{}], "a revoked load wrote to the engine's memory"
        check_loaded(oracle, engine, salt)


@pytest.mark.nightly
def test_sidecar_stopped_during_a_store(
    folder: Path, engine: EngineProcess, oracle: Oracle
) -> None:
    """The blocks come back after the store's deadline, and what is in them then is not stored."""
    prompt, salt = oracle.call.prompt, fresh_salt()
    with running(folder, engine, limits=HASTY_STORES) as sidecar:
        empty(engine)
        send(sidecar, signal.SIGSTOP)
        oracle.check(engine.generate(prompt, cache_salt=salt))
        empty(engine)
        send(sidecar, signal.SIGCONT)
        sidecar.wait("everything ended", idle)
        generation = engine.generate(prompt, cache_salt=salt)
        # What vLLM's offloading sends is a copy, which stays as it was for as long as the sidecar
        # may read it: a late store of it is as good as another.
        assert has_host_tier(engine) or generation.cached_tokens == 0
        oracle.check(generation)
        empty(engine)
        # What was just computed had a second to be stored, too.
        check_loaded(oracle, engine, salt, rounded=True)


@pytest.mark.nightly
def test_sidecar_stopped_and_continued_in_time(
    folder: Path, engine: EngineProcess, oracle: Oracle
) -> None:
    """A pause shorter than the deadlines costs time and nothing else."""
    prompt = oracle.call.prompt
    with running(folder, engine) as sidecar:
        salt = stored(engine, prompt)
        send(sidecar, signal.SIGSTOP)
        handle = engine.begin(prompt, cache_salt=salt)
        time.sleep(0.5)
        send(sidecar, signal.SIGCONT)
        generation = engine.finish(handle)
        assert generation.cached_tokens == WHOLE_TOKENS
        oracle.check(generation)


@pytest.mark.promise("failed-load")
def test_sidecar_killed_with_a_load_outstanding(
    folder: Path, engine: EngineProcess, oracle: Oracle
) -> None:
    """End of file ends the load at once, not its deadline of a minute."""
    prompt = oracle.call.prompt
    with running(folder, engine) as sidecar:
        salt = stored(engine, prompt)
        send(sidecar, signal.SIGSTOP)
        handle = engine.begin(prompt, cache_salt=salt)
        time.sleep(0.3)
        sidecar.kill()
        generation = engine.finish(handle, seconds=40)
        assert generation.cached_tokens == 0
        oracle.check(generation)


@pytest.mark.nightly
def test_sidecar_killed_with_stores_outstanding(
    folder: Path, engine: EngineProcess, oracle: Oracle
) -> None:
    prompt, salt = oracle.call.prompt, fresh_salt()
    with running(folder, engine) as sidecar:
        empty(engine)
        send(sidecar, signal.SIGSTOP)
        oracle.check(engine.generate(prompt, cache_salt=salt))
        sidecar.kill()
        # Blocks of the stores are given back, or this fails after 20 s.
        empty(engine)
    with running(folder, engine):
        oracle.check(engine.generate(prompt, cache_salt=salt))


@pytest.mark.nightly
def test_sidecar_killed_at_any_time(folder: Path, engine: EngineProcess, oracle: Oracle) -> None:
    chooser = random.Random(SEED + 2)
    loading, storing = oracle.call.prompt, Oracle(engine, Call(words(2500, 6)))
    oracle.at(0)
    took = storing.at(0).generation.total_ms / 1000
    for _ in range(2 if has_host_tier(engine) else 5):
        with running(folder, engine) as sidecar:
            salt = stored(engine, loading)
            handle = engine.begin(loading, cache_salt=salt)
            time.sleep(chooser.uniform(0, 0.06))
            sidecar.kill()
            oracle.check(engine.finish(handle))
            empty(engine)
        with running(folder, engine) as sidecar:
            handle = engine.begin(storing.call.prompt, cache_salt=salt)
            time.sleep(chooser.uniform(0.5, 1.2) * took)
            sidecar.kill()
            storing.check(engine.finish(handle))
            empty(engine)
    # The last one was killed: its pool's file is taken over, and removed, by a successor.
    with running(folder, engine):
        oracle.check(engine.generate(loading, cache_salt=salt))


# --- memory that rots ----------------------------------------------------------------------------


@pytest.mark.promise("failed-load")
def test_damaged_host_memory_is_never_used(
    folder: Path, engine: EngineProcess, oracle: Oracle
) -> None:
    """A byte of a slot changes after it was sealed: what was loaded of it is computed."""
    prompt = oracle.call.prompt
    with running(folder, engine) as sidecar:
        # What the engine attached with is none of the prompt's.
        empty(engine)
        sidecar.wait("nothing is to be stored", idle)
        before = in_pool(sidecar)
        salt = stored(engine, prompt)
        (chain,) = in_pool(sidecar).since(before).chains()
        with pool_of(sidecar).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[chain[2] + PAGE_BYTES + 100_000] ^= 1
        generation = engine.generate(prompt, cache_salt=salt)
        # The connector loads a prompt as one, vLLM's offloading each chunk by itself.
        sound_tokens = 2 * chunk_tokens(engine) if has_host_tier(engine) else 0
        assert generation.cached_tokens == sound_tokens
        oracle.check(generation)
        counted = counters(sidecar)
        assert counted["loads_corrupt"] == counted["quarantined_host"] == 1
        # The damaged chunk was stored again; those behind it never left.
        empty(engine)
        generation = engine.generate(prompt, cache_salt=salt)
        assert generation.cached_tokens == WHOLE_TOKENS
        check_rounded(oracle, generation, engine)


# --- too little memory ---------------------------------------------------------------------------


@pytest.mark.promise("llama", "preemption", "preemption-hits")
def test_preemption(folder: Path, engine: EngineProcess) -> None:
    """More requests than the KV cache has room for: they are preempted, and load again."""
    calls = [Call(words(700 + 10 * i, 20 + i), max_tokens=200) for i in range(8)]
    loaded: list[int] = []
    rounds: list[list[Generation]] = []
    with running(folder, engine) as sidecar:
        salt, preempted = fresh_salt(), engine.counter(PREEMPTIONS)
        for _ in range(2):
            empty(engine)
            handles = [call.begin(engine, salt) for call in calls]
            rounds.append([engine.finish(handle) for handle in handles])
            sidecar.wait("everything ended", idle)
            loaded.append(counters(sidecar)["chunks_loaded"])
        # In the first round nothing was stored before: only who was preempted can load. An engine
        # with a host tier of its own finds it there.
        assert loaded[has_host_tier(engine)] > 0
        assert engine.counter(PREEMPTIONS) > preempted
        for generations in rounds:
            for call, generation in zip(calls, generations, strict=True):
                assert len(generation.tokens) == 200
                check_throughout(engine, call, generation)
        empty(engine)


def test_pool_of_four_chunks(folder: Path, engine: EngineProcess) -> None:
    """Far too small a pool: chunks are evicted all the time, also between lookup and load."""
    chooser = random.Random(SEED + 3)
    slot_bytes = chunk_tokens(engine) * KV_BYTES_PER_TOKEN + 32 * 1024
    slots = 4 * CHUNK_TOKENS // chunk_tokens(engine)
    oracles = [Oracle(engine, Call(words(330 + 70 * i, 40 + i))) for i in range(4)]
    salt = fresh_salt()
    with running(folder, engine, size=f"{slots * slot_bytes}B") as sidecar:
        for _ in range(12):
            empty(engine)
            chosen = chooser.choices(oracles, k=3)
            handles = [engine.begin(oracle.call.prompt, cache_salt=salt) for oracle in chosen]
            generations = [engine.finish(handle) for handle in handles]
            for oracle, generation in zip(chosen, generations, strict=True):
                oracle.check_close(generation)
        status = sidecar.status()
        used = [one["slots_used"] + one["slots_free"] for one in status["tiers"]["host"]["classes"]]
        # Slots have a header and a footer each, for which the size above has room to spare.
        assert sum(used) // slots == 1
        assert status["counters"]["chunks_evicted"] > 0
        assert status["counters"]["chunks_loaded"] > 0
