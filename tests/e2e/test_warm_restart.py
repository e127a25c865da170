"""A sidecar is killed and started again beneath a live engine: host memory is as warm as before.

What the second sidecar gives must be what the engine's own prefix cache gives: log probabilities
and KV bytes. What was damaged while nobody looked is found at its first use, and computed.
"""

from __future__ import annotations

import mmap
import os
import signal
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.sidecars import POOLS, SidecarProcess
from tests.e2e.arms import (
    CHUNK_TOKENS,
    Call,
    Measured,
    attach,
    blocks_of,
    check_equal,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    same_output,
    words,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine

PROMPT_TOKENS = 3000
WHOLE_TOKENS = PROMPT_TOKENS // 32 * 32
ENGINE_ARGS: dict[str, Any] = {"num_gpu_blocks_override": 160, "max_model_len": 4096}
CONFIG: dict[str, Any] = {
    "host": {"size": "256MiB", "after_stop": "keep"},
    "limits": {"load_deadline": "60s", "lease_ttl": "60s", "store_deadline": "60s"},
}


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    sidecar = SidecarProcess(folder / "s", CONFIG)
    try:
        yield sidecar.start()
    finally:
        assert sidecar.process is not None
        if sidecar.process.poll() is None:
            sidecar.drain()
        sidecar.remove_pool()


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[Engine]:
    spec = EngineSpec(model, sidecar.socket, ENGINE_ARGS)
    with Engine(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach(engine, sidecar)
        yield engine


class Stored:
    """A prompt in host memory and nowhere else, and what it must give."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.call = Call(words(PROMPT_TOKENS, seed))
        self.cold = own_hit(engine, self.call)
        self.hit = own_hit(engine, self.call, before=[self.call])
        self.salt = fresh_salt()
        self.ask()
        empty(engine)

    def ask(self) -> Measured:
        generation = self.engine.generate(
            self.call.prompt, max_tokens=self.call.max_tokens, cache_salt=self.salt
        )
        return Measured(generation, blocks_of(self.engine), self.salt)


def next_life(engine: Engine, sidecar: SidecarProcess, ending: signal.Signals) -> None:
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
    engine: Engine, sidecar: SidecarProcess, ending: signal.Signals
) -> None:
    stored = Stored(engine, 2000 + ending)
    next_life(engine, sidecar, ending)
    before = counters(sidecar)
    assert before["chunks_restored"] > WHOLE_TOKENS // CHUNK_TOKENS
    measured = stored.ask()
    assert measured.generation.cached_tokens == WHOLE_TOKENS
    check_equal(measured, stored.hit)
    after = counters(sidecar)
    assert after["chunks_loaded"] - before["chunks_loaded"] == -(-WHOLE_TOKENS // CHUNK_TOKENS)
    assert after["loads_corrupt"] == after["quarantined_host"] == 0


def test_slot_damaged_between_two_lives_is_computed(
    engine: Engine, sidecar: SidecarProcess
) -> None:
    stored = Stored(engine, 2100)
    third = stored.call.prompt[2 * CHUNK_TOKENS : 3 * CHUNK_TOKENS]
    sidecar.wait("everything ended", idle)
    sidecar.kill()
    pool = POOLS / f"kvlake-{os.getuid()}-{sidecar.name}.pool"
    with pool.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        # A slot is an Arrow file of one row: the payload follows the page with the token ids.
        tokens, places = array("i", third).tobytes(), [0]
        while (place := memory.find(tokens, places[-1] + 1)) >= 0:
            # The oracle's slots hold these tokens too, under another salt.
            places.append(place)
            memory[place - place % mmap.PAGESIZE + mmap.PAGESIZE + 100_000] ^= 1
        assert len(places) > 1
    sidecar.start()
    attach(engine, sidecar)
    empty(engine)
    computed = stored.ask()
    assert computed.generation.cached_tokens == 0
    # Blocks of the load that failed are free, and hold what was copied before it was noticed.
    assert same_output(computed.generation, stored.cold.generation)
    counted = counters(sidecar)
    assert counted["loads_corrupt"] == counted["quarantined_host"] == 1
    # The damaged chunk was stored anew; those around it never left.
    empty(engine)
    again = stored.ask()
    assert again.generation.cached_tokens == WHOLE_TOKENS
    check_equal(again, stored.hit)
