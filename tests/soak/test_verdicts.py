"""The judgement of a soak: noise and restarts are no growth, a slow leak is."""

from __future__ import annotations

import random

from tests.soak import plot, verdicts
from tests.soak.prompts import Prompts
from tests.soak.verdicts import Sample, Verdict, slope


def life(start: float, seconds: float, pid: int, leak_per_second: float) -> list[Sample]:
    chooser = random.Random(pid)
    return [
        {
            "time": start + second,
            "sidecar.life": pid,
            # A spike now and then: a request of the harness's own, a listing.
            "sidecar.descriptors": 40 + leak_per_second * second + 20 * (chooser.random() < 0.1),
            "sidecar.anonymous_bytes": (200 << 20) + chooser.randrange(4 << 20),
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


def test_shared_memory_is_judged_over_all_lives() -> None:
    samples: list[Sample] = [
        {"time": float(second), "shm.bytes": (48 + second) << 20, "shm.files": 2 + second // 50}
        for second in range(200)
    ]
    assert [one.good for one in verdicts.shared_growth(samples, 20)] == [False, False]


def window(tokens: float, calibration: float) -> Sample:
    return {"tokens_per_second": tokens, "calibration_seconds": calibration}


def test_throughput_is_judged_beside_the_speed_of_the_machine() -> None:
    steady = [window(1000, 0.01)] * 10
    slower_machine = [*[window(1000, 0.01)] * 5, *[window(800, 0.0125)] * 5]
    slower_kvlake = [*[window(1000, 0.01)] * 5, *[window(900, 0.01)] * 5]
    assert verdicts.throughput(steady).good
    assert verdicts.throughput(slower_machine).good
    verdict = verdicts.throughput(slower_kvlake)
    assert not verdict.good
    assert "0.900 of the first" in verdict.said


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
