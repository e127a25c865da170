"""Load or recompute, against stores that are simulated in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.planner import (
    CREDIT_COMPUTE_SECONDS,
    PROBE_EVERY,
    SAMPLES_MAX,
    Credit,
    Planner,
    ReadPlan,
    ReadStart,
)

CHUNK_BYTES = 1 << 20
CHUNK_TOKENS = 256
REGRET = 0.04


@dataclass
class StoreModel:
    """A store with a latency and a bandwidth that its readers share, chunk after chunk."""

    latency: float
    bytes_per_second: float
    inflight: int = 16
    now: float = 0.0
    ends: list[float] = field(default_factory=list[float])

    def arrivals(self, count: int) -> list[float]:
        """When each of `count` reads that are issued together ends, from now on."""
        ends: list[float] = []
        line_free = 0.0
        for number in range(count):
            issued = ends[number - self.inflight] if number >= self.inflight else 0.0
            line_free = max(issued + self.latency, line_free) + CHUNK_BYTES / self.bytes_per_second
            ends.append(line_free)
        return ends

    def read(self, planner: Planner, count: int) -> None:
        """Have `count` chunks read at once, as the lookups do."""
        starts: list[ReadStart] = []
        arrivals = self.arrivals(count)
        for number, arrival in enumerate(arrivals):
            while len(starts) < count and len(starts) < number + self.inflight:
                issued = (
                    arrivals[len(starts) - self.inflight] if len(starts) >= self.inflight else 0.0
                )
                starts.append(planner.read_started(self.now + issued))
            planner.read_ended(starts[number], self.now + arrival, CHUNK_BYTES)
        self.now += arrivals[-1]


TICK = 0.01


def waited(
    plan: ReadPlan, credit: Credit, arrivals: list[float], start: float
) -> tuple[float, int]:
    """How long a request waits, and how many leading chunks it then has. Looked at every tick."""
    seconds, ready = 0.0, 0
    while ready < len(arrivals):
        if arrivals[ready] <= seconds:
            ready += 1
            continue
        saved = plan.saved_seconds(ready, 1e9)
        if seconds >= plan.patience_seconds(ready, 1e9):
            break
        if seconds > saved and not credit.spend(start + saved, start + seconds):
            break
        seconds = min(arrivals[ready], seconds + TICK)
    saved = plan.saved_seconds(ready, 1e9)
    if saved > seconds:
        credit.saved(saved - seconds)
    else:
        credit.spend(start + saved, start + seconds)
    return seconds, ready


def make() -> Planner:
    return Planner(reads_inflight_max=16)


def plan_of(
    planner: Planner, count: int, *, queued: int = 0, prefill: float = 10_000.0
) -> ReadPlan:
    """The plan for a run of which nothing is in host memory."""
    return planner.plan(
        count,
        count * CHUNK_TOKENS,
        reads=count,
        read_bytes=count * CHUNK_BYTES,
        queued=queued,
        prefill_tokens_per_second=prefill,
    )


def test_reads_when_nothing_is_known() -> None:
    planner = make()
    assert plan_of(planner, 4, prefill=1000.0).read
    plan = plan_of(planner, 4, prefill=0.0)
    assert plan.read
    assert plan.patience_seconds(0, 0.5) == 0.5, "without a prefill rate only the deadline counts"


def test_a_fast_store_is_read_and_a_slow_one_is_not() -> None:
    for latency, rate, expected in ((0.02, 1e9, True), (0.02, 1e5, False), (30.0, 1e9, False)):
        planner, store = make(), StoreModel(latency, rate)
        store.read(planner, 16)
        plan = plan_of(planner, 16)
        assert plan.read is expected, (latency, rate)


def test_reads_that_share_a_link_are_not_counted_twice() -> None:
    planner = make()
    # Sixteen at once, each with a sixteenth of 32 MiB a second: all of them end together.
    starts = [planner.read_started(0.0) for _ in range(16)]
    for number, start in enumerate(starts):
        planner.read_ended(start, 0.5 + number * 1e-6, CHUNK_BYTES)
    # 0.5 s to read what takes 0.7 s to compute, and 0.5 s of reading for 0.45 s of computing.
    assert plan_of(planner, 16, prefill=16 * CHUNK_TOKENS / 0.7).read
    assert not plan_of(planner, 16, prefill=16 * CHUNK_TOKENS / 0.45).read


def test_a_long_queue_makes_a_store_slow() -> None:
    planner, store = make(), StoreModel(0.02, 1e8)
    store.read(planner, 16)
    assert plan_of(planner, 8).read
    assert not plan_of(planner, 8, queued=200).read


def test_single_reads_say_little_about_many() -> None:
    planner, store = make(), StoreModel(0.1, 1e9)
    for _ in range(SAMPLES_MAX):
        store.read(planner, 1)
    # One after the other they took 100 ms each; sixteen at once take hardly more.
    assert plan_of(planner, 16).read


def test_a_store_that_recovers_is_found_out() -> None:
    planner = make()
    StoreModel(5.0, 1e9).read(planner, 16)
    refused = [plan_of(planner, 4).read for _ in range(PROBE_EVERY)]
    assert refused == [False] * (PROBE_EVERY - 1) + [True]
    StoreModel(0.01, 1e9).read(planner, 4)
    assert plan_of(planner, 4).read


def test_reads_that_bring_nothing_measure_nothing() -> None:
    planner = make()
    for _ in range(8):
        planner.read_ended(planner.read_started(0.0), 0.001, 0)
    assert planner.read_seconds(1, CHUNK_BYTES, 0) == 0.0


@pytest.mark.parametrize("ready", [0, 1, 7])
def test_patience_grows_with_what_is_ready(ready: int) -> None:
    plan = ReadPlan(read=True, compute_seconds_per_chunk=0.1, compute_seconds=0.8)
    assert plan.saved_seconds(ready, 60.0) == pytest.approx(0.1 * ready)
    assert plan.patience_seconds(ready, 60.0) == pytest.approx(0.1 * ready + 0.8)
    assert plan.patience_seconds(ready, 0.03) == 0.03


def test_the_first_read_of_a_good_store_is_waited_for() -> None:
    """50 ms to the first byte is more than 4% of 250 ms; a start credit bridges it."""
    planner, credit = make(), Credit(REGRET)
    plan = plan_of(planner, 10)
    assert waited(plan, credit, StoreModel(0.05, 1e9).arrivals(10), 0.0)[1] == 10


def test_credit_is_used_once_by_requests_that_wait_together() -> None:
    credit = Credit(REGRET)
    full = credit.balance_seconds
    for _ in range(64):
        assert credit.spend(0.0, 0.5)
    assert credit.balance_seconds == pytest.approx(full - 0.5)
    assert not credit.spend(0.4, 1.1)


def test_credit_comes_back_and_is_bounded() -> None:
    credit = Credit(REGRET)
    cap = credit.balance_seconds
    credit.saved(100.0)
    assert credit.balance_seconds == cap
    credit.spend(0.0, 3.0)
    assert credit.balance_seconds == pytest.approx(cap - 3.0)
    credit.saved(0.5)
    assert credit.balance_seconds == pytest.approx(cap - 2.5)
    credit.asked(1000.0)
    assert credit.balance_seconds == pytest.approx(cap - 2.5 + 40.0)
    credit.asked(0.1)
    assert credit.balance_seconds > cap, "what a long prompt brought is not taken away"


def test_no_regret_means_no_credit() -> None:
    credit = Credit(0.0)
    credit.asked(100.0)
    credit.saved(100.0)
    assert credit.balance_seconds == 0.0
    assert not credit.spend(0.0, 0.001)


@given(
    prefill=st.floats(100, 1e6),
    requests=st.lists(
        st.tuples(st.integers(1, 64), st.floats(0.0001, 10), st.floats(1e4, 1e10)), max_size=40
    ),
)
def test_waiting_costs_at_most_the_regret_and_one_credit(
    prefill: float, requests: list[tuple[int, float, float]]
) -> None:
    """Whatever stores do between requests, all first tokens together are hardly later."""
    planner, credit = make(), Credit(REGRET)
    now = computed = took = longest = 0.0
    for count, latency, rate in requests:
        plan = plan_of(planner, count, prefill=prefill)
        compute = count * CHUNK_TOKENS / prefill
        credit.asked(compute)
        store = StoreModel(latency, rate, now=now)
        seconds, ready = waited(plan, credit, store.arrivals(count), now) if plan.read else (0.0, 0)
        if plan.read:
            store.read(planner, count)
        first_token = seconds + (count - ready) * CHUNK_TOKENS / prefill
        assert first_token <= 2 * compute + TICK
        now += max(first_token, store.now - now)
        computed += compute
        took += first_token
        longest = max(longest, compute)
    credit_seconds = REGRET * max(CREDIT_COMPUTE_SECONDS, longest)
    assert took <= computed * (1 + REGRET) + credit_seconds + TICK * (1 + 1e-6) + 1e-6
