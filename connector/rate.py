"""How fast this engine computes prompts, as its own steps show.

Owns the measurement that the sidecar weighs reading from the object store against. A step lasts
from its planning to the planning of the next one, so a step after which the engine had nothing to
do looks slow; therefore the fastest of the last steps counts. That is optimistic for long prompts,
whose later tokens attend to more: then something is computed that could have been read a little
sooner, and never the other way round.
"""

from __future__ import annotations

from collections import deque
from typing import Final

STEPS_MAX: Final = 16
TOKENS_MIN: Final = 128
"""Steps with fewer tokens are mostly decoding, which is bound by something else."""


class PrefillRate:
    """Tokens per second of the steps that computed prompts."""

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=STEPS_MAX)
        self._planned = 0.0
        self._num_tokens = 0

    def step(self, now: float, num_tokens: int) -> None:
        """A step that computes `num_tokens` is planned; the one before it has ended."""
        seconds = now - self._planned
        if self._num_tokens >= TOKENS_MIN and seconds > 0:
            self._rates.append(self._num_tokens / seconds)
        self._planned, self._num_tokens = now, num_tokens

    @property
    def tokens_per_second(self) -> float:
        """0 until a step was measured."""
        return max(self._rates, default=0.0)
