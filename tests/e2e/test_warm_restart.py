"""A sidecar is killed and started again beneath a live engine: host memory is as warm as before.

What the second sidecar gives must be what the engine's own prefix cache gives: log probabilities
and KV bytes. What was damaged while nobody looked is found at its first use, and computed.
"""

from __future__ import annotations

import contextlib
import mmap
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.arms import (
    PATIENT,
    Call,
    Measured,
    Oracle,
    attach,
    blocks_of,
    check_equal,
    chunk_tokens,
    close,
    counters,
    empty,
    fresh_salt,
    has_host_tier,
    idle,
    own_hit,
    words,
)
from tests.e2e.chains import in_pool, pool_of
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess
from tiers.kv.arrow_file import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-warm-restart")]

PROMPT_TOKENS = 3000
WHOLE_TOKENS = PROMPT_TOKENS // 32 * 32
ENGINE_ARGS: dict[str, Any] = {"num_gpu_blocks_override": 160, "max_model_len": 4096}
CONFIG: dict[str, Any] = {
    "host": {"size": "256MiB", "after_stop": "keep"},
    "limits": PATIENT,
}


@contextlib.contextmanager
def outlived(folder: Path) -> Iterator[SidecarProcess]:
    """A sidecar whose memory outlives it, and what is left of it in the end does not."""
    sidecar = SidecarProcess(folder / "s", CONFIG)
    try:
        yield sidecar.start()
    finally:
        assert sidecar.process is not None
        if sidecar.process.poll() is None:
            sidecar.drain()
        sidecar.remove_pool()


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with outlived(folder) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[EngineProcess]:
    spec = EngineSpec(model, sidecar.socket, ENGINE_ARGS)
    with EngineProcess(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach(engine, sidecar)
        yield engine


class Stored:
    """A prompt in host memory and nowhere else, and what it must give."""

    def __init__(self, engine: EngineProcess, seed: int) -> None:
        self.engine = engine
        self.call = Call(words(PROMPT_TOKENS, seed))
        self.oracle = Oracle(engine, self.call)
        self.hit = own_hit(engine, self.call, before=[self.call])
        self.salt = fresh_salt()
        self.ask()
        empty(engine)

    def ask(self) -> Measured:
        generation = self.engine.generate(
            self.call.prompt, max_tokens=self.call.max_tokens, cache_salt=self.salt
        )
        return Measured(generation, blocks_of(self.engine), self.salt)


def next_life(engine: EngineProcess, sidecar: SidecarProcess, ending: signal.Signals) -> None:
    """End the sidecar, and start the next one on what it left."""
    assert sidecar.process is not None
    sidecar.wait("everything ended", idle)
    sidecar.process.send_signal(ending)
    sidecar.process.wait(60)
    sidecar.start()
    attach(engine, sidecar)
    empty(engine)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_next_life_hits_what_this_one_stored(
    engine: EngineProcess, sidecar: SidecarProcess, ending: signal.Signals
) -> None:
    stored = Stored(engine, 2000 + ending)
    next_life(engine, sidecar, ending)
    before, chunks = counters(sidecar), -(-WHOLE_TOKENS // chunk_tokens(engine))
    assert before["chunks_restored"] > chunks
    measured = stored.ask()
    assert measured.generation.cached_tokens == WHOLE_TOKENS
    check_equal(measured, stored.hit)
    after = counters(sidecar)
    assert after["chunks_loaded"] - before["chunks_loaded"] == chunks
    assert after["loads_corrupt"] == after["quarantined_host"] == 0


def test_slot_damaged_between_two_lives_is_computed(
    engine: EngineProcess, sidecar: SidecarProcess
) -> None:
    others = in_pool(sidecar)
    stored = Stored(engine, 2100)
    sidecar.wait("everything ended", idle)
    # Those of the oracle, under other salts, too.
    chains = in_pool(sidecar).since(others).chains()
    assert len(chains) > 1
    sidecar.kill()
    with pool_of(sidecar).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for chain in chains:
            memory[chain[2] + PAGE_BYTES + 100_000] ^= 1
    sidecar.start()
    attach(engine, sidecar)
    empty(engine)
    computed = stored.ask()
    # The connector loads a prompt as one; vLLM's offloading loads each chunk by itself.
    sound_tokens = 2 * chunk_tokens(engine) if has_host_tier(engine) else 0
    assert computed.generation.cached_tokens == sound_tokens
    # Blocks of the load that failed are free, and hold what was copied before it was noticed.
    stored.oracle.check(computed.generation)
    counted = counters(sidecar)
    assert counted["loads_corrupt"] == counted["quarantined_host"] == 1
    # The damaged chunk was stored again; those around it never left.
    empty(engine)
    again = stored.ask()
    assert again.generation.cached_tokens == WHOLE_TOKENS
    if has_host_tier(engine):
        # Computed behind chunks that were loaded, its KV is rounded otherwise.
        assert close(again.generation, stored.hit.generation)
    else:
        check_equal(again, stored.hit)
