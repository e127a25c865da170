"""Random conversations on vLLM's own scheduler, in a cache that is too small for them.

Shared heads, preemption, eviction, loads and stores that fail or stay under way, aborts. The model
of `engine.py` checks every KV that it reads on the way, and at the end nothing of ours is left.
"""

from __future__ import annotations

import random

from vllm.v1.request import Request

from sidecar.protocol import Outcome
from tests.connector.configurations import CHUNK_TOKENS, request_of
from tests.connector.engine import Engine


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens; another seed differs from the first token on."""
    chooser = random.Random(seed)
    return [chooser.randrange(400) for _ in range(length)]


def converse(engine: Engine, seed: int, *, requests: int = 15) -> None:
    """Let this many requests come and go, and check that everything ended."""
    chooser = random.Random(seed)
    heads = [prompt_of(chooser.randrange(100, 260), number) for number in range(4)]
    alive: list[Request] = []
    for serial in range(requests):
        head = chooser.choice(heads)
        # Some part at the end of a chunk.
        cut = chooser.choice([CHUNK_TOKENS, chooser.randrange(20, len(head))])
        prompt = [*head[:cut], *prompt_of(chooser.randrange(90), serial)]
        request = request_of(f"r{serial}", prompt, max_tokens=chooser.randrange(1, 60))
        alive.append(engine.add(request))
        for _ in range(chooser.randrange(1, 12)):
            disturb(engine, chooser)
            engine.step()
        if chooser.random() < 0.1:
            engine.abort(chooser.choice(alive))
        alive = [request for request in alive if not request.is_finished()]
    engine.finish(*alive)
    engine.settle()
    engine.check_idle()


def disturb(engine: Engine, chooser: random.Random) -> None:
    """Some copies end, some of them badly; chunks are evicted or only the store's; answers come."""
    sidecar = engine.sidecar
    sidecar.receive()
    for copy in list(sidecar.copies):
        if chooser.random() < 0.5:
            sidecar.run(copy, Outcome.OK if chooser.random() < 0.95 else Outcome.FAILED)
    for key in list(sidecar.parts):
        if chooser.random() < 0.01:
            sidecar.evict(key)
        elif chooser.random() < 0.02:
            sidecar.demote(key)
    for lookup in list(sidecar.lookups):
        sidecar.answer(lookup, chooser.randrange(len(lookup.keys) + 1))
