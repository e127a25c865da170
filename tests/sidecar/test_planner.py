"""Load or recompute, against stores that are simulated in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.planner import PROBE_EVERY, SAMPLES_MAX, Plan, Planner, ReadStart

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


def waited(plan: Plan, arrivals: list[float], limit: float) -> tuple[float, int]:
    """How long a request waits under a plan, and how many leading chunks it then has."""
    ready = 0
    for arrival in arrivals:
        patience = plan.patience_seconds(ready, limit)
        if arrival > patience:
            return patience, ready
        ready += 1
    return arrivals[-1], ready


def make(**changes: float) -> Planner:
    return Planner(reads_inflight_max=16, regret_max=changes.get("regret_max", REGRET))


def plan_of(planner: Planner, count: int, *, queued: int = 0, prefill: float = 10_000.0) -> Plan:
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
    plan = Plan(read=True, compute_seconds_per_chunk=0.1, regret_seconds_max=0.04)
    assert plan.patience_seconds(ready, 60.0) == pytest.approx(0.1 * ready + 0.04)
    assert plan.patience_seconds(ready, 0.03) == 0.03


@given(
    latency=st.floats(0.0001, 10),
    rate=st.floats(1e4, 1e10),
    prefill=st.floats(100, 1e6),
    count=st.integers(1, 64),
    learnt=st.one_of(st.none(), st.tuples(st.floats(0.0001, 10), st.floats(1e4, 1e10))),
)
def test_waiting_costs_at_most_the_regret(
    latency: float,
    rate: float,
    prefill: float,
    count: int,
    learnt: tuple[float, float] | None,
) -> None:
    """Whatever the planner believes of the store, the first token is at most 4% later."""
    planner = make()
    if learnt is not None:
        StoreModel(*learnt).read(planner, 16)
    plan = plan_of(planner, count, prefill=prefill)
    compute = count * CHUNK_TOKENS / prefill
    if not plan.read:
        return
    seconds, ready = waited(plan, StoreModel(latency, rate).arrivals(count), 1e9)
    first_token = seconds + (count - ready) * CHUNK_TOKENS / prefill
    assert first_token <= compute * (1 + REGRET) * (1 + 1e-9)
