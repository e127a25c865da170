"""The main figures over time: sums, sampled every few seconds, in fixed memory.

Owns the samples, the sums over a time, and the document of /history. Does not own the figures.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, NamedTuple

from sidecar.protocol.prompts import LOADED, PromptOutcome
from sidecar.service.dispatcher import Dispatcher

SAMPLE_SECONDS: Final = 5.0
SECONDS_MIN: Final = 60.0
"""Kept in any case, for the rates of the last minute."""
DIRECTIONS: Final = ("stored", "loaded", "written", "read")

Document = dict[str, Any]


class Figures(NamedTuple):
    """Sums since the start, and the last two as they are at the moment."""

    prompts: int
    tokens: Counter[PromptOutcome]
    gpu_seconds: float
    """Saved, net."""
    num_bytes: tuple[int, int, int, int]
    """By `DIRECTIONS`."""
    chunks_evicted: int
    host_bytes: int
    write_queue_bytes: int


def figures_of(dispatcher: Dispatcher) -> Figures:
    """The figures of a sidecar as of now."""
    engine, prompts = dispatcher.engine, dispatcher.prompts
    counters = engine.counters
    return Figures(
        prompts.prompts,
        prompts.tokens.copy(),
        prompts.seconds.gpu,
        (
            counters.bytes_stored,
            counters.bytes_loaded,
            counters.bytes_written,
            counters.bytes_read,
        ),
        counters.chunks_evicted,
        dispatcher.pool.stats().used_bytes,
        engine.writes.pending_bytes,
    )


@dataclass(frozen=True, slots=True)
class Window:
    """Sums over some seconds."""

    seconds: float
    prompts: int
    tokens: Counter[PromptOutcome]
    gpu_seconds: float
    num_bytes: dict[str, int]
    chunks_evicted: int
    cut: bool = False
    """Whether it is shorter than was asked for because no more is kept."""

    @property
    def hit_share(self) -> float | None:
        """Part of the tokens that was not computed, without those that no cache can have."""
        total = self.tokens.total() - self.tokens[PromptOutcome.TAIL]
        return sum(self.tokens[outcome] for outcome in LOADED) / total if total else None

    @property
    def rates(self) -> dict[str, float]:
        """Bytes per second by direction."""
        seconds = max(self.seconds, 1e-3)
        return {way: round(count / seconds, 3) for way, count in self.num_bytes.items()}


class FigureHistory:
    """Samples of the last `seconds`; 0: of a minute, and the document has none of them."""

    def __init__(
        self,
        figures: Callable[[], Figures],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._figures = figures
        self._seconds = seconds
        self._clock = clock
        samples_max = 1 + math.ceil(max(seconds, SECONDS_MIN) / SAMPLE_SECONDS)
        self._samples = deque([(clock(), figures())], maxlen=samples_max)
        self._forgot = False
        """Whether what was before the first sample is lost, and not only before the start."""

    def __len__(self) -> int:
        return len(self._samples)

    def sample(self) -> None:
        """Take a sample if the last one is `SAMPLE_SECONDS` old."""
        now = self._clock()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._forgot |= len(self._samples) == self._samples.maxlen
            self._samples.append((now, self._figures()))

    def over_last(self, seconds: float) -> Window:
        """The sums of the last `seconds`, or up to a sample more.

        Less after a start, and where less is kept: then the window is `cut`.
        """
        now = self._clock()
        before = next((one for one in reversed(self._samples) if now - one[0] >= seconds), None)
        if before is not None:
            return _between(before, (now, self._figures()))
        window = _between(self._samples[0], (now, self._figures()))
        return replace(window, cut=self._forgot)

    def document(self) -> Document:
        """Columns with a row for each time between two samples, oldest first."""
        samples = list(self._samples) if self._seconds else []
        now = self._clock()
        rows = [_between(*pair) for pair in pairwise(samples)]
        outcomes = [name for name in PromptOutcome if any(row.tokens[name] for row in rows)]
        return {
            "kept_seconds": self._seconds,
            "seconds_ago": [round(now - at, 1) for at, _ in samples[1:]],
            "seconds": [round(row.seconds, 1) for row in rows],
            "prompts": [row.prompts for row in rows],
            "tokens": {name: [row.tokens[name] for row in rows] for name in outcomes},
            "gpu_seconds_saved": [round(row.gpu_seconds, 4) for row in rows],
            "bytes": {way: [row.num_bytes[way] for row in rows] for way in DIRECTIONS},
            "chunks_evicted": [row.chunks_evicted for row in rows],
            "host_bytes": [figures.host_bytes for _, figures in samples[1:]],
            "write_queue_bytes": [figures.write_queue_bytes for _, figures in samples[1:]],
        }


def _between(before: tuple[float, Figures], after: tuple[float, Figures]) -> Window:
    (begin, old), (end, new) = before, after
    moved = zip(DIRECTIONS, old.num_bytes, new.num_bytes, strict=True)
    return Window(
        end - begin,
        new.prompts - old.prompts,
        new.tokens - old.tokens,
        new.gpu_seconds - old.gpu_seconds,
        {way: count - earlier for way, earlier, count in moved},
        new.chunks_evicted - old.chunks_evicted,
    )
