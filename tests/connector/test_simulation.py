"""Random lives of an engine and its sidecar: no wrong KV, no stuck request, no block left behind.

The seed is in the test's name; `Engine` checks every slot of KV that the model reads.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from vllm.v1.request import Request

from sidecar.protocol import Outcome
from tests.connector.configurations import CHUNK_TOKENS, request_of
from tests.connector.engine import Engine
from tests.connector.prompts import counted, total

STEPS = 160
FAILURES = (Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED, Outcome.FULL)


class Life:
    """One random life."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        # Few distinct beginnings, of lengths around blocks and chunks, so that prompts meet.
        self.stems = [
            [self.random.randrange(3) for _ in range(self.random.choice((50, 64, 130, 200, 256)))]
            for _ in range(4)
        ]
        self.requests: list[Request] = []
        self.speed = self.random.choice((0.1, 0.3, 0.7))
        """How likely a copy is to run between two events."""
        self.stopped_steps = 0
        """How long the sidecar will not run anything (it is stopped, or swaps)."""

    def prompt(self) -> list[int]:
        chance = self.random
        stem = chance.choice(self.stems)
        keep = chance.choice((len(stem), len(stem), chance.randrange(1, len(stem) + 1)))
        tail = chance.choice((0, 0, 1, 15, 16, 17, chance.randrange(100)))
        return [*stem[:keep], *(chance.randrange(5) for _ in range(tail))]

    def add(self) -> None:
        number = len(self.requests)
        salt = self.random.choice((None, None, None, "tenant"))
        length = self.random.choice((1, 2, 20, 70))
        request = request_of(f"r{number}", self.prompt(), max_tokens=length, salt=salt)
        self.requests.append(self.engine.add(request))

    def disturb(self) -> None:
        """What may happen between and within two steps, other than requests."""
        engine, chance = self.engine, self.random
        sidecar = engine.sidecar
        sidecar.receive()
        engine.clock.now += chance.choice((0.001, 0.001, 0.05, 0.3))
        self.stopped_steps -= 1
        if self.stopped_steps > 0:
            return
        for copy in chance.sample(sidecar.copies, len(sidecar.copies)):
            if chance.random() < self.speed:
                failed = chance.random() < 0.1
                sidecar.run(copy, chance.choice(FAILURES) if failed else Outcome.OK)
        for lookup in list(sidecar.lookups):
            if chance.random() < 0.5:
                sidecar.answer(lookup, chance.randrange(len(lookup.keys) + 1))
        for key in list(sidecar.parts):
            dice = chance.random()
            if dice < 0.01:
                sidecar.evict(key)
            elif dice < 0.06:
                sidecar.demote(key)

    def rarely(self) -> None:
        """What happens now and then."""
        engine, chance = self.engine, self.random
        dice = chance.random()
        alive = [request for request in self.requests if not request.is_finished()]
        if dice < 0.06 and alive:
            engine.abort(chance.choice(alive))
        elif dice < 0.08:
            engine.sidecar.detach()
        elif dice < 0.11:
            engine.sidecar.attach()
        elif dice < 0.13:
            # Every deadline passes, and the sidecar goes on much later with what it was given.
            engine.clock.now += 60
            self.stopped_steps = chance.randrange(30)
        elif dice < 0.134 and self.can_reset():
            # New weights: everything that was computed is void from here on.
            assert engine.scheduler.reset_prefix_cache(
                reset_running_requests=True, reset_connector=True
            )
            engine.weights += 1

    def can_reset(self) -> bool:
        """Whether vLLM could: it cannot while blocks are held by anything but running requests."""
        scheduler = self.engine.scheduler
        tables = scheduler.kv_cache_manager
        waiting = set(scheduler.requests) - {request.request_id for request in scheduler.running}
        held = any(tables.get_block_ids(request_id)[0] for request_id in waiting)
        return not held and not self.engine.role.stores.jobs

    def live(self) -> None:
        engine = self.engine
        for _ in range(STEPS):
            if self.random.random() < 0.25:
                self.add()
            self.disturb()
            self.rarely()
            engine.step(self.disturb if self.random.random() < 0.5 else lambda: None)
        if engine.client.session is None:
            engine.sidecar.attach()
        engine.settle()
        assert all(request.is_finished() for request in self.requests)
        engine.check_idle()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_random_life(model: Path, seed: int, ranks: int) -> None:
    # Few blocks, so that requests are preempted and blocks are wanted back early.
    engine = Engine(model, num_blocks=48, ranks=ranks, batch_tokens=96, max_seqs=6)
    taken = counted(engine)
    Life(engine, seed).live()
    engine.close()
    # It was a life in which something happened.
    assert total(taken, "chunks_stored") > 0


def test_an_unused_sidecar_costs_nothing(model: Path) -> None:
    """The same life with and without one: the same tokens come out."""
    outputs: list[list[list[int]]] = []
    for attached in (True, False):
        engine = Engine(model, num_blocks=64)
        if not attached:
            engine.sidecar.detach()
        prompts = [[number % 7] * (CHUNK_TOKENS + number) for number in range(20)]
        requests = [engine.run(request_of(f"r{i}", prompt)) for i, prompt in enumerate(prompts)]
        outputs.append([list(request.output_token_ids) for request in requests])
        engine.check_idle()
        engine.close()
    assert outputs[0] == outputs[1]
