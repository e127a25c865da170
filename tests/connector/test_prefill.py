"""How long an engine takes for a token of a prompt, measured by its own steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from connector.scheduler.prefill import PREFILL_TOKENS_MIN, STEPS_MAX, PrefillTimes
from tests.connector.configurations import request_of
from tests.connector.engine import Engine
from tests.connector.prompts import PROMPT


def step(times: PrefillTimes, planned: float, ended: float, *work: tuple[int, int]) -> None:
    times.planned(planned, work)
    times.ended(ended)


def test_nothing_is_known_before_a_measurement() -> None:
    times = PrefillTimes()
    assert times.seconds(0, 100) == 0.0
    times.planned(1.0, [(0, 512)])
    assert times.seconds(0, 100) == 0.0
    times.ended(1.5)
    assert times.seconds(0, 1024) == pytest.approx(1.0)
    # The output of a step that was never planned here.
    times.ended(9.0)
    assert times.seconds(0, 1024) == pytest.approx(1.0)


def test_steps_that_decode_do_not_count() -> None:
    times = PrefillTimes()
    for number in range(10):
        step(times, number, number + 0.001, *[(1000, 1)] * (PREFILL_TOKENS_MIN - 1))
    assert times.seconds(0, 100) == 0.0


def test_what_a_step_takes_to_generate_for_others_is_not_the_prompts() -> None:
    """Short new turns beside many answers, as where most is cached."""
    times = PrefillTimes()
    for start in range(0, 3 * STEPS_MAX, 3):
        times.planned(start, [], generating=64)
        times.ended(start + 0.9)
        times.planned(start + 1, [(12_000, 200)], generating=64)
        times.ended(start + 2)
    assert times.seconds(12_000, 200) == pytest.approx(0.1)
    # One that generates nothing beside it is all the prompt's.
    alone = PrefillTimes()
    alone.planned(0, [], generating=64)
    alone.ended(0.9)
    alone.planned(1, [(0, 200)])
    alone.ended(2)
    assert alone.seconds(0, 200) == pytest.approx(1.0)


def test_an_idle_engine_is_not_a_slow_one() -> None:
    times = PrefillTimes()
    for start in range(0, 100, 10):
        step(times, start, start + 1, (0, 1000))
    assert times.seconds(0, 1000) == pytest.approx(1.0)


def test_steps_that_were_planned_before_the_last_one_ended() -> None:
    """As with asynchronous scheduling, or several stages: they wait for each other."""
    times = PrefillTimes()
    times.planned(0.0, [(0, 1000)])
    times.planned(0.1, [(0, 1000)])
    times.ended(1.0)
    times.ended(2.0)
    assert times.seconds(0, 1000) == pytest.approx(1.0)


def test_one_slow_step_does_not_count_for_much() -> None:
    times = PrefillTimes()
    for start in range(STEPS_MAX):
        step(times, start * 100, start * 100 + (90 if start == 3 else 1), (0, 1000))
    assert times.seconds(0, 1000) == pytest.approx(1.0)


def test_tokens_far_into_a_prompt_are_dearer() -> None:
    times = PrefillTimes()
    step(times, 0, 1, (0, 2000))
    step(times, 1, 4, (30_000, 2000))
    assert times.seconds(0, 2000) == pytest.approx(1.0)
    assert times.seconds(30_000, 2000) == pytest.approx(3.0)
    # Half way between the two.
    assert times.seconds(15_000, 2000) == pytest.approx(2.0)
    # The nearest that is known.
    assert times.seconds(100_000, 1000) == pytest.approx(1.5)


def test_old_steps_are_forgotten() -> None:
    times = PrefillTimes()
    for number in range(STEPS_MAX + 1):
        step(times, number * 10, number * 10 + (1 if number else 9), (0, 1000))
    assert times.seconds(0, 1000) == pytest.approx(1.0)
    for number in range(1000):
        times.planned(number, [(0, 10)])
    assert times.seconds(0, 1000) == pytest.approx(1.0)


def test_a_step_with_a_prompt_that_is_not_cached_says_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How far that prompt is is not known."""
    planned: list[Sequence[tuple[int, int]]] = []
    times = engine.role.pending.times
    monkeypatch.setattr(times, "planned", lambda _, work, **_others: planned.append(work))
    engine.add(request_of("cached", PROMPT, max_tokens=1))
    engine.step()
    assert planned.pop() == [(0, len(PROMPT))]
    streamed = request_of("streamed", [7, *PROMPT], max_tokens=1)
    streamed.resumable = True
    engine.add(streamed)
    engine.step()
    assert planned.pop() == []
