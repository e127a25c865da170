"""How long this engine takes to compute the tokens of a prompt, by how far into it they are.

Attention makes a token at 30,000 dearer than the first ones, so times are kept by position, and
interpolated between positions. They are those of the engine's own steps, of which several may be on
their way. A step that also generates for other requests would have taken its time without the
prompt, too: what steps take that only generate is not the prompt's.
"""

from collections import deque
from collections.abc import Sequence
from math import log2
from statistics import fmean, median_low
from typing import Final

import numpy as np

STEPS_MAX: Final = 16
"""Steps at about one position that are remembered; their median counts."""
PLACES_PER_POWER: Final = 4
"""Positions that are told apart, for each power of two."""
DECODE_TOKENS_MAX: Final = 15
"""A request with at most this many tokens in a step generates, perhaps with drafts."""
PREFILL_TOKENS_MIN: Final = 128
"""Steps with fewer tokens of prompts mostly decode: they say nothing about the speed of prompts."""
PLANNED_MAX: Final = 64


class PrefillTimes:
    """Seconds of a prompt's token, measured step by step."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[tuple[float, float]]] = {}
        self._known: dict[int, tuple[float, float]] = {}
        """Position and seconds of one token there, by place."""
        self._generated = deque[float](maxlen=STEPS_MAX)
        """Seconds of the last steps that only generated."""
        self._planned = deque[tuple[float, int, float, int]](maxlen=PLANNED_MAX)
        self._ended = 0.0

    def planned(self, now: float, work: Sequence[tuple[int, int]], *, generating: int = 0) -> None:
        """Note that a step is planned that computes (position, tokens) of these prompts.

        `generating` requests get a token in the same step.
        """
        total = sum(tokens for _, tokens in work)
        weighted = sum((position + tokens / 2) * tokens for position, tokens in work)
        self._planned.append((now, total, weighted / total if total else 0.0, generating))

    def ended(self, now: float) -> None:
        """Note that the output of the oldest planned step was taken."""
        if not self._planned:
            return
        planned, tokens, position, generating = self._planned.popleft()
        # It began once the step before it had ended.
        seconds = now - max(planned, self._ended)
        self._ended = now
        if generating and not tokens:
            self._generated.append(seconds)
        if tokens >= PREFILL_TOKENS_MIN and seconds > 0:
            if generating and self._generated:
                seconds = max(0.0, seconds - median_low(self._generated))
            place = int(PLACES_PER_POWER * log2(1 + position))
            samples = self._samples.setdefault(place, deque(maxlen=STEPS_MAX))
            samples.append((position, seconds / tokens))
            positions, times = zip(*samples, strict=True)
            # The lower of two: the first step of an engine is slow.
            self._known[place] = (fmean(positions), median_low(times))

    def seconds(self, begin: int, tokens: int) -> float:
        """How long `tokens` from position `begin` on take; 0 before the first measurement."""
        if not self._known:
            return 0.0
        positions, times = zip(*sorted(self._known.values()), strict=True)
        return tokens * float(np.interp(begin + tokens / 2, positions, times))
