"""When an LRU is preferred: constructed uses of which it would have had some, or none."""

from __future__ import annotations

from typing import Final

import pytest

from tests.tiers.policy.caches import sampled_key
from tiers.policy import reuse
from tiers.policy.reuse import PAUSE_SPANS, ReuseSample

CAPACITY: Final = 64
"""Eight of these are sampled."""
SIZE: Final = CAPACITY >> 3


class Rounds:
    """Some chunks that are used in turn, which an LRU would have each time from the second on."""

    def __init__(self) -> None:
        self.sample = ReuseSample()
        self.now = 0
        self.number = 0

    def use(self, count: int, *, cached: bool) -> None:
        for _ in range(count):
            self.number += 1
            self.now += 8
            key = sampled_key(self.number % SIZE)
            self.sample.use(key, 0, self.now, cached=cached)
            self.sample.trim(self.now, CAPACITY)

    def prefers_lru(self) -> bool:
        return self.sample.prefers_lru(self.now)


def test_lru_is_preferred_when_it_had_more_hits_than_its_size() -> None:
    rounds = Rounds()
    rounds.use(SIZE, cached=False)
    assert not rounds.prefers_lru()
    rounds.use(SIZE, cached=False)
    assert not rounds.prefers_lru()
    rounds.use(1, cached=False)
    assert rounds.prefers_lru()


def test_an_empty_cache_makes_no_later_pause_longer() -> None:
    rounds = Rounds()
    for now in range(100):
        rounds.sample.use(sampled_key("shared"), 0, now, cached=False)
        rounds.sample.trim(now, 0)
    rounds.now = 100
    while not rounds.prefers_lru():
        rounds.use(1, cached=False)
    rounds.now += PAUSE_SPANS * CAPACITY
    assert not rounds.prefers_lru()


def test_lru_is_not_preferred_where_it_has_no_more_hits() -> None:
    rounds = Rounds()
    for _ in range(100):
        rounds.use(SIZE, cached=True)
        assert not rounds.prefers_lru()
    # What is too much for an LRU is no hit of it either.
    for now in range(10_000):
        rounds.sample.use(sampled_key("many", now % (SIZE + 1)), 0, rounds.now + now, cached=False)
        rounds.sample.trim(rounds.now + now, CAPACITY)
        assert not rounds.sample.prefers_lru(rounds.now + now)


def test_hits_of_long_ago_do_not_make_up_for_those_lost_now() -> None:
    rounds = Rounds()
    for number in range(1000):
        # Hits that an LRU does not have.
        rounds.sample.use(sampled_key("other", number), 0, rounds.now, cached=True)
        rounds.sample.trim(rounds.now, CAPACITY)
    rounds.use(SIZE, cached=False)
    rounds.use(2 * SIZE, cached=False)
    assert not rounds.prefers_lru()
    rounds.use(1, cached=False)
    assert rounds.prefers_lru()


def test_an_lru_keeps_what_is_used_again() -> None:
    """Others come between two uses, as many as fit."""
    rounds = Rounds()
    for number in range(SIZE + 2):
        rounds.sample.use(sampled_key("kept"), 0, rounds.now, cached=False)
        rounds.sample.trim(rounds.now, CAPACITY)
        assert rounds.prefers_lru() == (number > SIZE)
        for other in range(3):
            rounds.sample.use(sampled_key("other", number, other), 0, rounds.now, cached=False)
            rounds.sample.trim(rounds.now, CAPACITY)


@pytest.mark.parametrize("more", [0, 1])
def test_a_thinner_sample_counts_what_it_keeps(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """Half of the hits that the LRU had more, and what is still sampled of the LRU itself."""
    monkeypatch.setattr(reuse, "SAMPLED_MAX", reuse.SAMPLED_SPAN * CAPACITY >> 3)
    rounds = Rounds()
    rounds.use(2 * SIZE, cached=False)
    larger = CAPACITY + 8
    for number in range(SIZE):
        # Half of these are sampled no more.
        rounds.sample.use((1, bytes([number % 2 * 8, number])), 0, rounds.now, cached=False)
        rounds.sample.trim(rounds.now, CAPACITY)
    assert not rounds.prefers_lru()
    rounds.sample.trim(rounds.now, larger)
    assert rounds.sample.mask == 15
    assert not rounds.prefers_lru()
    rounds.sample.use((1, bytes([0, 0 if more else 1])), 0, rounds.now, cached=False)
    rounds.sample.trim(rounds.now, larger)
    assert rounds.prefers_lru() == (more == 1)


def test_each_time_lru_is_preferred_for_twice_as_long() -> None:
    rounds = Rounds()
    rounds.use(SIZE, cached=False)
    for time in range(4):
        rounds.use(SIZE, cached=False)
        rounds.use(1, cached=False)
        assert rounds.prefers_lru()
        began = rounds.now
        lasts = PAUSE_SPANS * CAPACITY << time
        while rounds.prefers_lru() and rounds.now - began <= lasts:
            rounds.use(1, cached=True)
        assert rounds.now - began == lasts


def test_hits_that_are_lost_meanwhile_do_not_make_it_longer() -> None:
    """They count afterwards, once."""
    rounds = Rounds()
    rounds.use(2 * SIZE + 1, cached=False)
    began = rounds.now
    rounds.use(4 * SIZE, cached=False)
    assert rounds.prefers_lru()
    longest = (1 + 2) * PAUSE_SPANS * CAPACITY
    while rounds.prefers_lru() and rounds.now - began <= longest:
        rounds.use(1, cached=True)
    assert rounds.now - began <= longest
