"""The judgement of a soak: noise and restarts are no growth, a slow leak is."""

from __future__ import annotations

import math
import random

import pytest

from tests.soak import plot, report, verdicts
from tests.soak.prompts import Prompts
from tests.soak.verdicts import Sample, Verdict, slope

pytestmark = pytest.mark.promise("soak")

LONG_SECONDS = 1800.0
STEADY = ("shared_bytes", "sockets", "mappings", "threads", "zombies", "tasks")


def life(start: float, seconds: float, pid: int, leak_per_second: float) -> list[Sample]:
    chooser = random.Random(pid)
    return [
        {
            "time": start + second,
            "sidecar.life": pid,
            # A spike now and then: a request of the harness's own, a listing.
            "sidecar.descriptors": 40 + leak_per_second * second + 20 * (chooser.random() < 0.1),
            "sidecar.anonymous_bytes": (200 << 20) + chooser.randrange(4 << 20),
            **{f"sidecar.{name}": 1.0 for name in STEADY},
        }
        for second in range(0, int(seconds), 2)
    ]


def of(found: list[Verdict], name: str) -> Verdict:
    return next(one for one in found if one.name == name)


def test_the_slope_is_that_of_most_of_the_points() -> None:
    times = [float(number) for number in range(50)]
    values = [3 * moment + (1000 if moment % 10 == 0 else 0) for moment in times]
    assert abs(slope(times, values) - 3) < 0.5
    assert slope([1.0], [5.0]) == 0


def test_noise_and_restarts_are_no_growth() -> None:
    samples = [*life(0, 100, 7, 0), *life(100, 200, 8, 0)]
    assert all(one.good for one in verdicts.growth(samples, "sidecar", 20))


def test_a_leak_in_one_life_is_seen() -> None:
    samples = [*life(0, 100, 7, 0), *life(100, 60, 8, 1.0), *life(160, 200, 9, 0)]
    verdict = of(verdicts.growth(samples, "sidecar", 20), "sidecar.descriptors")
    assert not verdict.good
    assert "worst of 3 lives" in verdict.said


def test_what_a_process_takes_while_it_warms_up_is_no_growth() -> None:
    samples = life(0, 100, 7, 0)
    for sample in samples:
        sample["sidecar.anonymous_bytes"] += min(sample["time"], 20) * (50 << 20)
    assert of(verdicts.growth(samples, "sidecar", 20), "sidecar.anonymous_bytes").good


def test_files_are_judged_over_all_lives() -> None:
    samples: list[Sample] = [
        {
            "time": float(second),
            "shm.bytes": (48 + second) << 20,
            "shm.files": 2 + second // 50,
            "runtime.files": 4,
        }
        for second in range(200)
    ]
    assert [one.good for one in verdicts.whole_growth(samples, 20)] == [False, False, True]


def test_what_was_not_seen_long_enough_is_not_good() -> None:
    assert not any(one.good for one in verdicts.growth(life(0, 10, 7, 0), "sidecar", 2))


def test_a_store_must_be_back_within_its_limit_at_the_end() -> None:
    full: list[Sample] = [{"time": 1.0, "store.bytes": 5.0}, {"time": 2.0, "store.bytes": 9.0}]
    assert not verdicts.bounded("store.bytes", full, 8).good
    back = verdicts.bounded("store.bytes", [*full, {"time": 3.0, "store.bytes": 7.0}], 8)
    assert back.good
    assert "9 at most before" in back.said
    assert not verdicts.bounded("store.bytes", [], 8).good


def rounds(median: float, noise: float, seed: int, count: int = 12) -> list[float]:
    chooser = random.Random(seed)
    return [median * math.exp(chooser.gauss(0, noise)) for _ in range(count)]


def judged(start: list[float], end: list[float]) -> Verdict:
    return verdicts.throughput(start, end, LONG_SECONDS)


def test_throughput_that_stays_is_good_and_a_loss_is_not() -> None:
    start = rounds(1.8, 0.02, 1)
    assert judged(start, rounds(1.8, 0.02, 2)).good
    assert judged(start, rounds(1.9, 0.02, 2)).good
    assert judged(start, rounds(1.8 * 0.97, 0.02, 2)).good
    lost = judged(start, rounds(1.8 * 0.92, 0.02, 2))
    assert not lost.good
    assert "0.9" in lost.said


def test_a_disturbed_round_does_not_change_the_verdict() -> None:
    end = [*rounds(1.8, 0.02, 2), 0.9, 1.1]
    assert judged(rounds(1.8, 0.02, 1), end).good


def test_rounds_that_are_too_noisy_prove_nothing() -> None:
    loss = judged(rounds(1.8, 0.3, 1), rounds(1.8, 0.3, 2)).said
    assert float(loss.split()[0]) > 0.95, "the change itself is within the limit"
    assert not judged(rounds(1.8, 0.3, 1), rounds(1.8, 0.3, 2)).good


@pytest.mark.parametrize(
    ("start", "end", "seconds", "good"),
    [(3, 3, 479, True), (5, 12, 479, True), (12, 5, 479, False), (12, 0, 479, False)]
    + [(start, end, 480, False) for start, end in ((3, 3), (5, 12), (12, 5))],
)
def test_a_few_rounds_are_not_judged_and_only_a_short_run_may_have_them(
    start: int, end: int, seconds: float, good: bool
) -> None:
    verdict = verdicts.throughput([1.8] * start, [1.8] * end, seconds)
    assert verdict.good == good
    assert f"not judged: {start} and {end} rounds" in verdict.said


def test_rounds_that_load_less_at_the_end_are_told() -> None:
    many: list[Sample] = [{"pace.hit_ratio": 0.9}] * 6
    few: list[Sample] = [{"pace.hit_ratio": 0.4}] * 6
    assert verdicts.hits(many, many).good
    assert not verdicts.hits(many, few).good
    assert not verdicts.hits(many, []).good


def test_prompts_follow_from_the_seed_and_share_prefixes() -> None:
    one, other, third = Prompts(1), Prompts(1), Prompts(2)
    asks = [one.next() for _ in range(50)]
    assert asks == [other.next() for _ in range(50)]
    assert asks[0] != third.next()
    heads = {(ask.salt, tuple(ask.prompt[:512])) for ask in asks}
    assert len(heads) < len(asks)


def test_the_picture_shows_every_panel() -> None:
    samples: list[Sample] = [{"time": 0.0, "shm.bytes": 1.0}, {"time": 60.0, "shm.bytes": 2.0}]
    drawn = plot.svg(samples, [(30.0, "kill")], "a soak")
    assert drawn.count("<polyline") == sum(len(series) for _, _, series in plot.PANELS)
    assert "<title>kill</title>" in drawn


def test_windows_in_which_the_load_was_held_are_left_out() -> None:
    samples: list[Sample] = [
        {
            "time": float(second),
            "held": float(20 <= second < 30),
            "prompt_tokens": 1000.0 * second,
            "cached_tokens": 500.0 * second,
            "requests": float(second),
            "ttft_ms_sum": 100.0 * second,
        }
        for second in range(0, 60, 2)
    ]
    made = report.windows(samples)
    assert [one["time"] for one in made] == [10, 40, 50]
    assert {one["tokens_per_second"] for one in made} == {1000}


def test_a_summary_replaces_the_last_one() -> None:
    page = f"before\n{report.BEGIN}old\n{report.END}after\n"
    once = report.inserted(page, "| new |\n")
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert report.inserted(once, "| new |\n") == once
    with pytest.raises(ValueError, match="must have the lines"):
        report.inserted("nothing", "| new |\n")


def test_the_page_has_a_place_for_the_summary() -> None:
    report.inserted(report.PAGE.read_text(), "")
