"""How fast kvlake is beside an engine without it: rounds of the same work on both.

A machine that others use is faster and slower by the minute, so seconds of one minute cannot be
compared with those of another. What can is the ratio of two measurements of the same moment.

Owns the rounds. Does not own when they are taken (`run.py`) or what their ratios say
(`verdicts.py`). Invariant: every round does the same work. Its prompts are fixed by the seed, its
cache salts are new, both engines begin with empty prefix caches and the sidecar with nothing to do.
While one engine is measured the other is stopped: an idle engine of vLLM spins, and takes a core.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tests.e2e import arms
from tests.harness.engine import EngineProcess, Generation
from tests.soak.clients import CLIENTS, MAX_TOKENS, REQUEST_SECONDS_MAX
from tests.soak.prompts import Ask, Prompts

Sample = dict[str, float]

ROUND_REQUESTS: Final = 24
PASSES: Final[tuple[str, ...]] = ("stored", "loaded", "loaded")
"""What kvlake does in each pass of a round, all over the same prompts."""


class Pace:
    """Takes rounds on a pair of engines.

    Args:
        seed: from which the prompts follow.
        rest: waits until the sidecar has nothing to do.
    """

    def __init__(self, seed: int, rest: Callable[[], None]) -> None:
        prompts = Prompts(seed)
        self._asks = [prompts.next() for _ in range(ROUND_REQUESTS)]
        self._rest = rest
        self._rounds = 0
        self.compared = 0
        """Answers that were compared with those of the engine without kvlake."""
        self.farthest = 0.0
        """How far apart the log probabilities of two answers were at most, on average."""
        self.wrong: list[str] = []

    def take(self, engine: EngineProcess, reference: EngineProcess) -> Sample:
        """One round, with nothing else running: prompts are computed and stored, then loaded.

        Beside each pass stands one of the reference; which is first takes turns.
        """
        self._rounds += 1
        seconds: dict[str, float] = dict.fromkeys((*PASSES, "reference"), 0.0)
        given: list[Generation] = []
        for number, name in enumerate(PASSES):
            pair: list[tuple[str, EngineProcess]] = [(name, engine), ("reference", reference)]
            if (self._rounds + number) % 2:
                pair.reverse()
            answers: dict[str, list[Generation]] = {}
            for (kind, which), (_, other) in zip(pair, reversed(pair), strict=True):
                which.reset_prefix_cache()
                self._rest()
                with _stopped(other):
                    spent, answers[kind] = self._pass(which, f"round-{self._rounds}")
                seconds[kind] += spent
            given = answers[name]
            self.compare(f"in round {self._rounds}", given, answers["reference"])
        tokens = sum(len(ask.prompt) for ask in self._asks)
        return {
            **{f"pace.{name}_seconds": spent for name, spent in seconds.items()},
            "pace.ratio": seconds["reference"] / sum(seconds[name] for name in set(PASSES)),
            "pace.hit_ratio": sum(one.cached_tokens for one in given) / tokens,
        }

    def compare(
        self, when: str, given: Sequence[Generation], expected: Sequence[Generation]
    ) -> None:
        """Note answers that differ by more than rounding."""
        for one, other in zip(given, expected, strict=True):
            self.compared += 1
            apart = arms.apart(one, other)
            self.farthest = max(self.farthest, apart)
            if not arms.close(one, other):
                self.wrong.append(
                    f"{when}, {one.cached_tokens} tokens cached, {apart:.3f} apart: "
                    f"{one.logprobs[:1]}, not {other.logprobs[:1]}"
                )

    def _pass(self, engine: EngineProcess, salt: str) -> tuple[float, list[Generation]]:
        def one(ask: Ask) -> Generation:
            salted = f"{salt}-{ask.salt}"
            handle = engine.begin(ask.prompt, max_tokens=MAX_TOKENS, cache_salt=salted)
            return engine.finish(handle, REQUEST_SECONDS_MAX)

        with ThreadPoolExecutor(CLIENTS) as clients:
            started = time.monotonic()
            answers = list(clients.map(one, self._asks))
            return time.monotonic() - started, answers


@contextlib.contextmanager
def _stopped(engine: EngineProcess) -> Generator[None]:
    """All processes of an engine that has nothing to do."""
    group = engine.process.pid
    os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(group, signal.SIGCONT)
