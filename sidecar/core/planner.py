"""Load or recompute: whether to wait for a hit in the object store, and for how long.

* Before a read: a run of chunks is read if the reads are expected to end before the engine has
  computed the run. Both costs grow with its length, so it is read as a whole or not at all.
* During a read: a request that has waited longer than its ready chunks save spends the credit of
  its engine, which grows with the compute time of requests (by the fraction `regret_max`) and with
  the time that reads saved. A slow store thus costs all requests together that fraction and one
  credit, and no request waits in vain for longer than computing it takes (the ski-rental bound).

The estimate is that of BBR (Cardwell et al. 2016): the shortest time and the largest delivery rate
of the last reads. Both are optimistic on purpose: the second rule bounds the cost of optimism,
while an estimate that is too pessimistic is never corrected, because nothing is read.

Invariants: without a measured prefill rate no read is refused and no wait is cut short; a credit is
never above its cap, and is overdrawn by at most the time between two checks.
"""

from collections import deque
from typing import Final, NamedTuple

SAMPLES_MAX: Final = 32
"""Reads in the estimate."""
PROBE_EVERY: Final = 16
"""One of this many refused runs is read anyway, to notice a store that got faster."""
CREDIT_COMPUTE_SECONDS: Final = 25.0
"""The initial credit, and its cap, is `regret_max` of this much compute: 1 s at 4%."""


class ReadPlan(NamedTuple):
    """What to do about a run of chunks that only the store holds."""

    read: bool
    """False: the engine computes the run sooner than it could be read."""
    compute_seconds_per_chunk: float
    """What a ready chunk saves; 0 if unknown."""
    compute_seconds: float
    """Compute time of the whole run; 0 if unknown."""

    def saved_seconds(self, ready: int, limit_seconds: float) -> float:
        """How long waiting costs nothing, with `ready` leading chunks loaded."""
        if self.compute_seconds <= 0:
            return limit_seconds
        return min(limit_seconds, ready * self.compute_seconds_per_chunk)

    def patience_seconds(self, ready: int, limit_seconds: float) -> float:
        """How long to wait at most if there is credit."""
        return min(limit_seconds, self.saved_seconds(ready, limit_seconds) + self.compute_seconds)


UNKNOWN: Final = ReadPlan(read=True, compute_seconds_per_chunk=0.0, compute_seconds=0.0)
"""No prefill rate: read, until the deadline."""


class Credit:
    """How long the requests of one engine may still wait in vain.

    An engine computes one request after another, so requests that wait at the same time spend the
    same time once.
    """

    __slots__ = ("_regret_max", "_spent_until", "balance_seconds")

    def __init__(self, regret_max: float) -> None:
        self._regret_max = regret_max
        self.balance_seconds = regret_max * CREDIT_COMPUTE_SECONDS
        self._spent_until = 0.0

    def asked(self, compute_seconds: float) -> None:
        """A request arrived that takes `compute_seconds` to compute."""
        self._earn(self._regret_max * compute_seconds, compute_seconds)

    def saved(self, seconds: float) -> None:
        """A request waited this much less than computing would have taken."""
        self._earn(seconds, 0.0)

    def _earn(self, seconds: float, compute_seconds: float) -> None:
        # The share of a single long prompt may exceed the usual cap.
        cap = self._regret_max * max(CREDIT_COMPUTE_SECONDS, compute_seconds)
        self.balance_seconds = max(self.balance_seconds, min(cap, self.balance_seconds + seconds))

    def spend(self, since: float, now: float) -> bool:
        """A request waits in vain since `since`; returns whether it may go on."""
        self.balance_seconds -= max(0.0, now - max(since, self._spent_until))
        self._spent_until = now
        return self.balance_seconds > 0


class ReadStart(NamedTuple):
    """State at the start of a read, needed when it ends."""

    moment: float
    delivered_bytes: int
    running: int


class _Sample(NamedTuple):
    seconds: float
    bytes_per_second: float
    running: int


class Planner:
    """Measures reads and plans runs. At most `reads_inflight_max` reads run at the same time."""

    def __init__(self, *, reads_inflight_max: int) -> None:
        self._inflight_max = reads_inflight_max
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_MAX)
        self._delivered_bytes = 0
        self._running = 0
        self._refused = 0

    def read_started(self, now: float) -> ReadStart:
        """Note a started read; pass the result to `read_ended`."""
        self._running += 1
        return ReadStart(now, self._delivered_bytes, self._running)

    def read_ended(self, start: ReadStart, now: float, num_bytes: int) -> None:
        """Note the end of a read. One that delivered nothing is not a measurement."""
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
        """Decide on a run of `num_chunks`, from the first that host memory lacks.

        `reads` objects of `read_bytes` in all are read for it, after `queued` others; otherwise the
        engine computes `num_tokens`. A rate of 0 is not measured yet.
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
        """Expected time until the last object of a run is read; 0 without measurements."""
        if not self._samples:
            return 0.0
        # The larger of both, not the sum: reads that share a link take as long as all of them
        # together, and a measured rate already includes latency.
        quickest_seconds = min(sample.seconds for sample in self._samples)
        wanted_bytes = read_bytes / reads * (queued + reads)
        return max(quickest_seconds, wanted_bytes / self._rate(queued + reads))

    def _rate(self, wanted: int) -> float:
        """Expected bytes per second of `wanted` reads together."""
        fastest = max(sample.bytes_per_second for sample in self._samples)
        widest = max(self._samples, key=lambda sample: (sample.running, sample.bytes_per_second))
        running = min(wanted, self._inflight_max)
        if widest.running >= running:
            return fastest
        # More reads than were measured lately are assumed to be proportionally faster.
        return max(fastest, widest.bytes_per_second * running / max(1, widest.running))
