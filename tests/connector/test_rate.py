"""What an engine says of its own speed."""

from __future__ import annotations

from connector.scheduler.pending import PREFILL_TOKENS_MIN, STEPS_MAX, PrefillRate


def test_nothing_is_said_before_a_step_was_measured() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_second == 0.0
    rate.step(1.0, 512)
    assert rate.tokens_per_second == 0.0
    rate.step(1.5, 1)
    assert rate.tokens_per_second == 1024.0


def test_steps_that_decode_say_nothing() -> None:
    rate = PrefillRate()
    for number in range(10):
        rate.step(number * 0.001, PREFILL_TOKENS_MIN - 1)
    assert rate.tokens_per_second == 0.0


def test_an_idle_engine_is_not_a_slow_one() -> None:
    rate = PrefillRate()
    for start in range(0, 100, 10):
        rate.step(start, 1000)
        rate.step(start + 1, 1000)
    assert rate.tokens_per_second == 1000.0


def test_what_was_long_ago_is_forgotten() -> None:
    rate = PrefillRate()
    for number in range(STEPS_MAX + 2):
        rate.step(float(number), 10_000 if number == 0 else 1000)
    assert rate.tokens_per_second == 1000.0
