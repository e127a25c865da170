"""The circuit breaker in virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidecar.core.breaker import Breaker, BreakerRules, BreakerState


def make() -> Breaker:
    return Breaker(BreakerRules(failures_max=3, pause_seconds=1.0, pause_seconds_max=6.0))


def opened(now: float = 0.0) -> Breaker:
    breaker = make()
    for _ in range(3):
        breaker.failed(now, breaker.begin(now))
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = make()
    for _ in range(10):
        breaker.failed(0.0, breaker.begin(0.0))
        breaker.failed(0.0, breaker.begin(0.0))
        breaker.succeeded()
    assert breaker.passes(0.0)
    assert breaker.opened == 0


def test_one_trial_after_the_pause() -> None:
    breaker = opened()
    assert not breaker.passes(0.99)
    assert breaker.passes(1.0)
    breaker.begin(1.0)
    assert not breaker.passes(1.0), "one at a time"
    breaker.succeeded()
    assert breaker.passes(1.0)


def test_pauses_grow_to_their_limit_and_start_anew() -> None:
    breaker, now = opened(), 0.0
    pauses: list[float] = []
    for _ in range(5):
        begun = now
        while not breaker.passes(now):
            now += 0.25
        pauses.append(now - begun)
        breaker.failed(now, breaker.begin(now))
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0]
    assert breaker.opened == 1
    breaker.begin(now + 6.0)
    breaker.succeeded()
    for _ in range(3):
        breaker.failed(now, breaker.begin(now))
    assert breaker.passes(now + 1.0)


def test_what_was_under_way_does_not_prolong_the_pause() -> None:
    breaker = make()
    early = [breaker.begin(0.0) for _ in range(7)]
    for turn in early[:4]:
        breaker.failed(0.9, turn)
    assert breaker.passes(1.9)
    trial = breaker.begin(1.9)
    breaker.failed(2.0, early[4])
    breaker.abandoned(2.0, early[5])
    assert not breaker.passes(7.8), "the trial still runs, alone"
    breaker.failed(2.0, trial)
    assert breaker.passes(4.0), "one failed trial doubles the pause once"


def test_what_was_under_way_does_not_open_it_again() -> None:
    breaker = make()
    early = [breaker.begin(0.0) for _ in range(6)]
    for turn in early[:3]:
        breaker.failed(0.0, turn)
    breaker.begin(1.0)
    breaker.succeeded()
    for turn in early[3:]:
        breaker.failed(1.5, turn)
    assert breaker.state is BreakerState.CLOSED


def test_a_trial_that_was_given_up_says_nothing_of_the_next() -> None:
    breaker = opened()
    given_up = breaker.begin(1.0)
    breaker.begin(7.0)
    breaker.failed(7.5, given_up)
    assert breaker.state is BreakerState.TRIAL


def test_a_late_success_closes_it() -> None:
    breaker = opened()
    breaker.succeeded()
    assert breaker.passes(0.0)


def test_a_trial_that_was_not_made_leaves_room_for_another() -> None:
    breaker = opened()
    breaker.abandoned(1.0, breaker.begin(1.0))
    assert breaker.passes(1.0)
    assert breaker.state is BreakerState.OPEN


def test_a_trial_that_is_never_reported_on_ends() -> None:
    breaker = opened()
    breaker.begin(1.0)
    assert not breaker.passes(6.9)
    assert breaker.passes(7.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("ask", "good", "bad", "not sent")),
            st.integers(0, 5),
            st.floats(0.0, 3.0),
        ),
        max_size=60,
    )
)
def test_never_more_than_one_trial_and_never_for_ever(steps: list[tuple[str, int, float]]) -> None:
    breaker, now, trial_ends = Breaker(BreakerRules(1, 1.0, 6.0)), 0.0, 0.0
    running: list[tuple[int, bool]] = []
    """The turn of each request, and whether it is the trial."""
    for what, which, pause in steps:
        now += pause
        if what == "ask":
            if breaker.passes(now):
                assert now >= trial_ends
                turn = breaker.begin(now)
                running = [(other, False) for other, _ in running]
                running.append((turn, breaker.state is BreakerState.TRIAL))
                if breaker.state is BreakerState.TRIAL:
                    trial_ends = now + 6.0
        elif running:
            turn, trial = running.pop(which % len(running))
            if what == "good":
                breaker.succeeded()
            elif what == "bad":
                breaker.failed(now, turn)
            else:
                breaker.abandoned(now, turn)
            if what == "good" or trial:
                trial_ends = 0.0
    assert breaker.passes(now + 6.0)
