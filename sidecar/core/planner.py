"""Load or recompute: whether a hit in the object store is worth waiting for, and for how long.

Owns the estimate of what reading costs now, and two rules:

* Before anything is read: a run is read if that is expected to end before the engine would have
  computed it. Both costs grow with the length of the run, so a part of it is never better than
  all of it or nothing.
* While it is read: estimates err, and stores stall. A request that has waited longer than what is
  ready saves it waits on its engine's credit. The credit grows with what the engine computes (by
  `regret_max` of it) and with the time that reads saved; it is bounded; waiting uses it up. So a
  store that is slower than the engine costs all requests together that fraction and one credit,
  however wrong the estimates were, and no request ever waits longer in vain than computing it
  takes: the ski-rental bound. One request at a time could not be granted enough for the round trip
  of a good store; what the requests before it saved can.

The estimate is that of BBR (Cardwell et al. 2016): of the last reads the shortest time and the
largest delivery rate, where the rate of a read is what all reads delivered between its start and
its end. Both are optimistic on purpose: the second rule bounds what optimism costs, while nothing
would ever correct a pessimist who does not read.

Does not own lookups, reads or the clock (`lookups.py`, `reads.py`); it is told. Pure.

Invariants: without a measured prefill rate nothing is refused and no wait is cut short: the
deadline of the lookup is then the only bound. A credit is never above its cap, and is overdrawn by
no more than the time between two looks at it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

SAMPLES_MAX: Final = 32
"""Reads that the estimate looks back on."""

PROBE_EVERY: Final = 16
"""Of so many refused runs one is read all the same, to see whether the store got faster."""

CREDIT_COMPUTE_SECONDS: Final = 25.0
"""A credit starts with, and keeps at most, `regret_max` of so much computing: 1 s of 4%."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to do about a run of chunks that only the store holds."""

    read: bool
    """False: the engine computes the run sooner than it could be read."""
    compute_seconds_per_chunk: float
    """What a ready chunk saves; 0 where it is not known."""
    compute_seconds: float
    """What computing the whole run takes; 0 where it is not known."""

    def saved_seconds(self, ready: int, limit_seconds: float) -> float:
        """How long the run may have been waited for at no loss, with `ready` leading chunks."""
        if self.compute_seconds <= 0:
            return limit_seconds
        return min(limit_seconds, ready * self.compute_seconds_per_chunk)

    def patience_seconds(self, ready: int, limit_seconds: float) -> float:
        """How long the run may have been waited for if there is credit."""
        return min(limit_seconds, self.saved_seconds(ready, limit_seconds) + self.compute_seconds)


UNKNOWN: Final = ReadPlan(read=True, compute_seconds_per_chunk=0.0, compute_seconds=0.0)
"""Nothing is known of the engine: read, and let the deadline bound it."""


class Credit:
    """How long the requests of one engine may yet wait in vain.

    It is time of the engine, which computes one thing after the other: requests that wait at the
    same time use it up once.

    Args:
        regret_max: fraction of the time to compute that waiting may cost in vain.
    """

    __slots__ = ("_balance_seconds", "_regret_max", "_spent_until")

    def __init__(self, regret_max: float) -> None:
        self._regret_max = regret_max
        self._balance_seconds = regret_max * CREDIT_COMPUTE_SECONDS
        self._spent_until = 0.0

    @property
    def balance_seconds(self) -> float:
        """What is left."""
        return self._balance_seconds

    def asked(self, compute_seconds: float) -> None:
        """A request came that the engine would take `compute_seconds` for."""
        self._earn(self._regret_max * compute_seconds, compute_seconds)

    def saved(self, seconds: float) -> None:
        """A request waited so much less than what it waited for took to compute."""
        self._earn(seconds, 0.0)

    def _earn(self, seconds: float, compute_seconds: float) -> None:
        # A single long prompt may be worth more than the cap: its own share counts in any case.
        cap = self._regret_max * max(CREDIT_COMPUTE_SECONDS, compute_seconds)
        self._balance_seconds = max(
            self._balance_seconds, min(cap, self._balance_seconds + seconds)
        )

    def spend(self, since: float, now: float) -> bool:
        """Somebody waits in vain since `since`; False: no longer, the credit is used up."""
        self._balance_seconds -= max(0.0, now - max(since, self._spent_until))
        self._spent_until = now
        return self._balance_seconds > 0


class ReadStart(NamedTuple):
    """What to remember of a read until it ends."""

    moment: float
    delivered_bytes: int
    running: int


class _Sample(NamedTuple):
    seconds: float
    bytes_per_second: float
    running: int


class Planner:
    """Keeps the rates and plans runs.

    Args:
        reads_inflight_max: reads that run at the same time.
    """

    def __init__(self, *, reads_inflight_max: int) -> None:
        self._inflight_max = reads_inflight_max
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._delivered_bytes = 0
        self._running = 0
        self._refused = 0

    def read_started(self, now: float) -> ReadStart:
        """A read was issued; hand the answer to `read_ended`."""
        self._running += 1
        return ReadStart(now, self._delivered_bytes, self._running)

    def read_ended(self, start: ReadStart, now: float, num_bytes: int) -> None:
        """A read ended with `num_bytes`; one that brought nothing (0) is no measurement."""
        self._running -= 1
        seconds = now - start.moment
        if num_bytes <= 0 or seconds <= 0:
            return
        self._delivered_bytes += num_bytes
        rate = (self._delivered_bytes - start.delivered_bytes) / seconds
        self._samples.append(_Sample(seconds, rate, start.running))

    def plan(
        self,
        num_chunks: int,
        num_tokens: int,
        *,
        reads: int,
        read_bytes: int,
        queued: int,
        prefill_tokens_per_second: float,
    ) -> ReadPlan:
        """Decide on a run.

        Args:
            num_chunks: chunks of the run, from the first that is not in host memory on.
            num_tokens: tokens of these chunks: what the engine would compute otherwise.
            reads: objects that have to be read for them.
            read_bytes: bytes of these objects.
            queued: objects that wait to be read, or are read, already.
            prefill_tokens_per_second: the engine's own measurement; 0 where it has none yet.
        """
        if num_chunks <= 0 or reads <= 0 or num_tokens <= 0 or prefill_tokens_per_second <= 0:
            return UNKNOWN
        compute_seconds = num_tokens / prefill_tokens_per_second
        read = self.read_seconds(reads, read_bytes, queued) <= compute_seconds
        if not read:
            self._refused += 1
            read = self._refused % PROBE_EVERY == 0
        return ReadPlan(read, compute_seconds / num_chunks, compute_seconds)

    def read_seconds(self, reads: int, read_bytes: int, queued: int) -> float:
        """When the last of a run's objects would be there; 0 where nothing was measured yet."""
        if not self._samples:
            return 0.0
        # Not their sum: where reads share a link each takes as long as all of them, and the sum
        # would count them twice. A measured rate has the latency of its reads in it.
        quickest_seconds = min(sample.seconds for sample in self._samples)
        wanted_bytes = read_bytes / reads * (queued + reads)
        return max(quickest_seconds, wanted_bytes / self._rate(queued + reads))

    def _rate(self, wanted: int) -> float:
        """Bytes per second that `wanted` reads together may be expected to have."""
        fastest = max(self._samples, key=lambda sample: sample.bytes_per_second)
        widest = max(self._samples, key=lambda sample: (sample.running, sample.bytes_per_second))
        running = min(wanted, self._inflight_max)
        if widest.running >= running:
            return fastest.bytes_per_second
        # So many have not run at once lately: until they have, more reads are taken for faster.
        return max(
            fastest.bytes_per_second, widest.bytes_per_second * running / max(1, widest.running)
        )
