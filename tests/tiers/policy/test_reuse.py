"""When chunks are used again, and what keeping them is worth: constructed uses with known answers.

Worth is in uses for each use of others: a chunk that is used again for sure after 1000 others is
worth 1/1000 at first, and 1/10 ten before.
"""

from __future__ import annotations

from math import log, sqrt
from typing import TYPE_CHECKING

import pytest

from tests.tiers.policy import caches
from tests.tiers.policy.caches import sampled_key
from tiers.policy import reuse
from tiers.policy.reuse import (
    AGES,
    FADING,
    KIND_WEIGHT,
    KINDS,
    USES,
    ReuseSample,
    age_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


LATE = 1000


def reused(sample: ReuseSample, kind: int, ages: Sequence[int], *, unused: int = 0) -> None:
    """Chunks of a kind, used at time 0 and again at these ages; and others, used once."""
    for number in range(len(ages) + unused):
        sample.use(sampled_key(kind, number), kind, 0, cached=False)
    for number, age in enumerate(ages):
        # What a chunk is used as afterwards does not matter: it has the last kind.
        sample.use(sampled_key(kind, number), KINDS - 1, age, cached=False)


def worth_of(kind: int, ages: Sequence[int], *, unused: int = 0, now: int = 0) -> list[float]:
    sample = ReuseSample()
    reused(sample, kind, ages, unused=unused)
    return sample.worth(max(now, *ages))[kind]


# --- ages -----------------------------------------------------------------------------------------


def test_an_age_is_never_less_than_that_of_fewer_uses() -> None:
    ages = [age_of(uses) for uses in range(70_000)]
    assert ages == sorted(ages)
    assert ages[0] == 0


@pytest.mark.parametrize("octave", range(2, AGES // 2))
def test_each_power_of_two_has_two_ages(octave: int) -> None:
    """The second begins at its root times as much."""
    begin, end = 1 << octave, 2 << octave
    middle = int(begin * sqrt(2)) + 1
    assert age_of(begin - 1) == age_of(middle - 2) == 2 * octave
    assert age_of(middle - 1) == age_of(end - 2) == 2 * octave + 1


def test_the_last_age_has_no_end() -> None:
    assert age_of((1 << AGES // 2) - 2) == AGES - 1
    assert age_of(1 << AGES) == age_of(1 << 200) == AGES - 1


# --- worth ----------------------------------------------------------------------------------------


def test_worth_grows_until_the_only_age_of_use_and_falls_after() -> None:
    worth = worth_of(0, [LATE] * 4000)
    late = age_of(LATE)
    assert worth[: late + 1] == sorted(worth[: late + 1])
    assert worth[late] > 3 * worth[late - 4] > 3 * worth[0]
    assert worth[late + 1 :] == [0.0] * (AGES - late - 1)


@pytest.mark.parametrize("part", [0.25, 1.0])
def test_worth_is_the_chance_for_each_use_of_waiting(part: float) -> None:
    count = 4000
    worth = worth_of(0, [LATE] * int(part * count), unused=int((1 - part) * count), now=100 * LATE)
    # In the middle of the age that has it, up to which a chunk waits for nothing else.
    used = 2 ** (age_of(LATE) / 2) - 1
    for age in range(age_of(LATE) - 5):
        waits = used - (2 ** (age / 2) - 1)
        assert worth[age] == pytest.approx(part / waits, rel=0.35)


def test_what_is_used_again_at_any_time_alike_is_worth_the_same_at_each_age() -> None:
    """So far as an age of a few uses can tell, and until nothing is left."""
    count, each = 20_000, 1 / 300
    ages = [1 + int(-log(1 - (number + 0.5) / count) / each) for number in range(count)]
    worth = worth_of(0, ages)
    assert worth[8 : age_of(900)] == pytest.approx([each] * (age_of(900) - 8), rel=0.2)


def test_it_gives_up_after_the_early_uses() -> None:
    """One in two is used soon, and the others very late: those do not make it worth less."""
    late = worth_of(0, [10] * 2000 + [100_000] * 2000)
    never = worth_of(0, [10] * 2000, unused=2000, now=100_000)
    assert late[0] == pytest.approx(never[0], rel=0.01)
    assert never[age_of(20)] == 0 < late[age_of(20)] < late[0] / 1000


def test_more_uses_are_worth_more() -> None:
    sample = ReuseSample()
    for uses, count in enumerate((200, 800, 1800)):
        reused(sample, uses, [LATE] * count, unused=2000 - count)
    none, one, more = sample.worth(100 * LATE)[:USES]
    for age in range(age_of(LATE) + 1):
        assert 3 * none[age] < one[age] < more[age]


def test_what_is_rare_leans_on_what_has_as_many_uses() -> None:
    sample = ReuseSample()
    reused(sample, 0, [LATE] * 200, unused=1800)
    reused(sample, USES, [LATE] * 2)
    reused(sample, 1, [LATE] * 1800, unused=200)
    worth = sample.worth(100 * LATE)
    # Two that were both used again say little against all those of which one in ten was.
    assert worth[0][0] < worth[USES][0] < 2 * worth[0][0]
    # A kind that never came is worth what all with as many uses are.
    assert worth[2 * USES][0] == pytest.approx(worth[0][0], rel=0.1)
    assert worth[USES + 1][0] == pytest.approx(worth[1][0], rel=0.1)
    # With many, it speaks for itself.
    reused(sample, 2 * USES, [LATE] * int(20 * KIND_WEIGHT))
    assert sample.worth(100 * LATE)[2 * USES][0] > 5 * worth[0][0]


def test_what_has_as_many_uses_as_no_other_leans_on_all() -> None:
    sample = ReuseSample()
    reused(sample, 2, [LATE] * 2000)
    worth = sample.worth(LATE)
    assert worth[0][0] == pytest.approx(worth[2][0], rel=0.1)
    assert worth[2][0] == pytest.approx(1 / LATE, rel=0.35)


def test_what_still_waits_counts_as_not_used_so_long() -> None:
    """What was used just before says nothing of how long it will wait."""
    early, late = (worth_of(0, [LATE] * 500, unused=1500, now=n * LATE) for n in (3, 300))
    assert early[0] == pytest.approx(late[0], rel=0.01)
    sample = ReuseSample()
    reused(sample, 0, [LATE] * 500)
    for number in range(1500):
        sample.use(sampled_key("young", number), 0, LATE, cached=False)
    assert sample.worth(LATE)[0][0] > 3 * late[0]


def test_what_is_of_an_age_now_was_there_for_half_of_it() -> None:
    """All that were not used again are as old now as the others were then."""
    worth = [worth_of(0, [LATE] * 500, unused=1500, now=n * LATE)[0] for n in (1, 100)]
    assert worth[0] / worth[1] == pytest.approx((500 / 1250) / (500 / 2000), rel=0.1)


def test_nothing_is_worth_anything_at_first() -> None:
    assert ReuseSample().worth(0) == [[0.0] * AGES] * KINDS


def test_uses_of_long_ago_count_less() -> None:
    """First all were used again, then none."""
    worths: list[float] = []
    for learned in (0, 30):
        sample = ReuseSample()
        reused(sample, 0, [LATE] * 2000)
        for _ in range(learned):
            sample.worth(LATE)
        for number in range(500):
            sample.use(sampled_key("unused", number), 0, LATE, cached=False)
        worths.append(sample.worth(100 * LATE)[0][0])
    recent, long_ago = worths
    old = 2000 * FADING**30
    assert long_ago / recent == pytest.approx(old / (old + 500) / (2000 / 2500), rel=0.1)


def test_what_was_given_up_long_ago_counts_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """First none were used again, then all."""
    monkeypatch.setattr(reuse, "SAMPLED_MIN", 64)
    worths: list[float] = []
    for learned in (0, 30):
        sample = ReuseSample()
        for now in range(2000):
            sample.use(sampled_key("unused", now), 0, now, cached=False)
            sample.trim(now, 1)
        for _ in range(learned):
            sample.worth(2000)
        for number in range(500):
            sample.use(sampled_key(number), 0, 2000, cached=False)
        for number in range(500):
            sample.use(sampled_key(number), 1, 2004, cached=False)
        worths.append(sample.worth(2004)[0][0])
    recent, long_ago = worths
    old = 2000 * FADING**30
    assert long_ago / recent == pytest.approx(500 / (old + 500) / (500 / 2500), rel=0.15)


# --- what it remembers ----------------------------------------------------------------------------


def fill(sample: ReuseSample, count: int, capacity: int, began: int = 0) -> int:
    """Use chunks of which no second use comes; returns how many are remembered at most."""
    most = 0
    for now in range(began, began + count):
        key = caches.key(now)
        if not key[1][0] & sample.mask:
            sample.use(key, 0, now, cached=False)
        if now % 16 == 0:
            sample.trim(now, capacity)
            most = max(most, len(sample))
    return most


@pytest.mark.parametrize(
    ("capacity", "least", "most"),
    [(1, 32, 64), (160, 110, 220), (330, 113, 226), (20_000, 429, 859)],
)
def test_the_sample_is_bounded(
    monkeypatch: pytest.MonkeyPatch, capacity: int, least: int, most: int
) -> None:
    """By its least size, by eleven for each cached chunk sampled, by the most, and beyond that."""
    monkeypatch.setattr(reuse, "SAMPLED_MIN", 64)
    monkeypatch.setattr(reuse, "SAMPLED_MAX", 256)
    sample = ReuseSample()
    found = fill(sample, 4000 if capacity < 10_000 else 400_000 // 2, capacity)
    assert least <= found <= most + 16


def test_the_bounds_themselves() -> None:
    """One of 23 chunks beyond 380,000; a large cache does without most keys."""
    for capacity, most in ((100, 2048), (380_000, 16_384), (2_000_000, 2_000_000 // 23)):
        sample = ReuseSample()
        for now in range(2 * most):
            sample.use((1, now.to_bytes(8, "little")[::-1]), 0, now, cached=False)
            if now % 64 == 0:
                sample.trim(now, capacity)
        assert most // 2 - 64 <= len(sample) <= most + 1024


def test_a_use_is_found_in_the_older_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "SAMPLED_MIN", 64)
    sample = ReuseSample()
    for number in range(64):
        sample.use(sampled_key(number), 0, 0, cached=False)
    sample.trim(0, 1)
    for number in range(64):
        sample.use(sampled_key(number), 1, LATE, cached=False)
    assert len(sample) == 64
    worth = sample.worth(LATE)
    assert worth[0][0] == pytest.approx(1 / LATE, rel=0.4)
    assert worth[0][age_of(LATE)] > 5 * worth[0][0]


def test_a_larger_cache_thins_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the keys that go are of the younger half, some of the older."""
    monkeypatch.setattr(reuse, "SAMPLED_MIN", 4000)
    sample = ReuseSample()
    keys = [key for number in range(20_000) if not (key := caches.key(number))[1][0] & 7]
    for now, key in enumerate(keys):
        sample.use(key, 0, now, cached=False)
        sample.trim(now, 400)
    assert sample.mask == 7
    assert 2000 < len(sample) == len(keys) < 4000
    sample.trim(len(keys), 90_000)
    assert sample.mask == 63
    kept = [key for key in keys if not key[1][0] & 63]
    assert len(sample) == len(kept)
    # It knows those that are left from before.
    now = len(keys) + LATE
    for key in kept:
        sample.use(key, 1, now, cached=False)
    assert len(sample) == len(kept)
    assert 0.1 / LATE < sample.worth(now)[0][0] < 1 / LATE
    # It stays as thin when the cache is small again.
    sample.trim(now, 10)
    assert sample.mask == 63


def test_what_it_gave_up_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that are not remembered any more were not used again."""
    monkeypatch.setattr(reuse, "SAMPLED_MIN", 64)
    worths: list[float] = []
    for unused in (0, 4000):
        sample = ReuseSample()
        for now in range(unused):
            sample.use(sampled_key("unused", now), 0, now, cached=False)
            sample.trim(now, 8)
        assert len(sample) <= 64
        for number in range(500):
            sample.use(sampled_key(number), 0, 4000, cached=False)
        for number in range(500):
            sample.use(sampled_key(number), 1, 4000 + 10, cached=False)
        worths.append(sample.worth(4010)[0][0])
    assert worths[1] == pytest.approx(worths[0] / 9, rel=0.15)
