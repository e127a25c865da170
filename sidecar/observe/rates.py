"""Bytes per second of the last minute, for the status.

Owns a few samples of the engine's counters of bytes. Does not own the counters, nor when a sample
is due to be taken: the watchdog's beat does that.

Invariants: memory is fixed, however long the sidecar lives; asking changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.commands import Counters

SAMPLE_SECONDS: Final = 5.0
WINDOW_SECONDS: Final = 60.0
_WAYS: Final = ("stored", "loaded", "written", "read")


class _Sample(NamedTuple):
    taken_at: float
    num_bytes: tuple[int, ...]


class Rates:
    """How fast bytes go each way, over `WINDOW_SECONDS` and at most one sample more.

    Args:
        counters: of the engine.
        clock: monotonic seconds.
    """

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._samples = deque([self._now()], maxlen=1 + round(WINDOW_SECONDS / SAMPLE_SECONDS))

    def note(self) -> None:
        """Take a sample, if it is time for one."""
        if self._clock() - self._samples[-1].taken_at >= SAMPLE_SECONDS:
            self._samples.append(self._now())

    def document(self) -> dict[str, object]:
        """Bytes per second of each way, and over how many seconds they were counted."""
        now, since = self._now(), self._samples[0]
        seconds = max(now.taken_at - since.taken_at, 1e-3)
        per_second = {
            way: round((after - before) / seconds, 3)
            for way, before, after in zip(_WAYS, since.num_bytes, now.num_bytes, strict=True)
        }
        return {"seconds": round(seconds, 3), "bytes_per_second": per_second}

    def _now(self) -> _Sample:
        counters = self._counters
        num_bytes = (
            counters.bytes_stored,
            counters.bytes_loaded,
            counters.bytes_written,
            counters.bytes_read,
        )
        return _Sample(self._clock(), num_bytes)
