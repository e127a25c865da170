"""The last hour: sums over any time, rows for curves, and memory that does not grow."""

from __future__ import annotations

from collections import Counter

import pytest

from sidecar.config.sections import GpuSettings
from sidecar.observe.benefit import sentences
from sidecar.observe.history import (
    SAMPLE_SECONDS,
    SECONDS_MIN,
    FigureHistory,
    Figures,
    Window,
)
from sidecar.protocol.prompts import PromptOutcome
from sidecar.service.prompts import Seconds

HOUR = 3600.0


class World:
    def __init__(self, seconds: float = HOUR) -> None:
        self.now = 1000.0
        self.figures = Figures(0, Counter(), 0.0, (0, 0, 0, 0), 0, 0, 0)
        self.history = FigureHistory(lambda: self.figures, seconds, lambda: self.now)

    def go_on(
        self,
        seconds: float,
        *,
        stored: int = 0,
        loaded: int = 0,
        read: int = 0,
        host_tokens: int = 0,
    ) -> None:
        """Half a second at a time, as the watchdog beats; counts grow by so much in a second."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            old = self.figures
            had = old.num_bytes
            self.figures = old._replace(
                prompts=old.prompts + (host_tokens > 0),
                tokens=old.tokens + Counter({PromptOutcome.HOST: host_tokens // 2}),
                num_bytes=(had[0] + stored // 2, had[1] + loaded // 2, had[2], had[3] + read // 2),
                host_bytes=old.host_bytes + stored // 2,
            )
            self.history.sample()


def test_only_the_last_minute_counts() -> None:
    world = World()
    world.go_on(3600, stored=1 << 20)
    world.go_on(600)
    assert world.history.over_last(60).rates["stored"] == 0
    world.go_on(600, loaded=1000, read=10, host_tokens=8)
    minute = world.history.over_last(60)
    assert minute.rates == {"stored": 0, "loaded": 1000, "written": 0, "read": 10}
    assert 60 <= minute.seconds <= 60 + SAMPLE_SECONDS
    assert minute.tokens == {PromptOutcome.HOST: 8 * minute.seconds}
    assert minute.prompts == 2 * minute.seconds


def test_a_sidecar_that_has_just_started_says_over_how_long_it_counts() -> None:
    world = World()
    nothing = dict.fromkeys(("stored", "loaded", "written", "read"), 0)
    assert world.history.over_last(60) == Window(0, 0, Counter(), 0, nothing, 0)
    assert world.history.document()["seconds"] == []
    world.go_on(12, stored=2000)
    minute = world.history.over_last(60)
    assert (minute.seconds, minute.rates["stored"]) == (12, 2000)


@pytest.mark.parametrize("seconds", [HOUR, 300.0, SECONDS_MIN])
def test_memory_is_fixed_and_asking_changes_nothing(seconds: float) -> None:
    world = World(seconds)
    samples = 1 + seconds / SAMPLE_SECONDS
    world.go_on(10 * seconds, stored=2)
    assert len(world.history) == samples
    assert world.history.over_last(seconds).seconds == seconds
    assert world.history.document() == world.history.document()
    assert world.history.document()["kept_seconds"] == seconds
    assert len(world.history) == samples


def test_a_window_longer_than_what_is_kept_is_cut() -> None:
    world = World(300.0)
    world.go_on(200, host_tokens=20)
    assert not world.history.over_last(HOUR).cut, "it has everything since the start"
    world.go_on(1000, host_tokens=20)
    assert not world.history.over_last(60).cut
    hour = world.history.over_last(HOUR)
    assert (hour.seconds, hour.cut) == (300, True)


def test_without_a_history_the_last_minute_is_known() -> None:
    world = World(0.0)
    world.go_on(1000, stored=100)
    assert world.history.over_last(60).rates["stored"] == 100
    assert world.history.over_last(HOUR).seconds == SECONDS_MIN
    document = world.history.document()
    assert document.pop("kept_seconds") == 0
    assert not any(document.pop("bytes").values())
    assert not any(document.values()), "a row was sent"


def test_the_document_has_a_row_for_each_time() -> None:
    world = World()
    world.go_on(2 * SAMPLE_SECONDS, stored=100, host_tokens=20)
    world.go_on(SAMPLE_SECONDS)
    assert world.history.document() == {
        "kept_seconds": HOUR,
        "seconds_ago": [10.0, 5.0, 0.0],
        "seconds": [5.0, 5.0, 5.0],
        "prompts": [10, 10, 0],
        "tokens": {"host": [100, 100, 0]},
        "gpu_seconds_saved": [0.0, 0.0, 0.0],
        "bytes": {"stored": [500, 500, 0], "loaded": [0] * 3, "written": [0] * 3, "read": [0] * 3},
        "chunks_evicted": [0, 0, 0],
        "host_bytes": [500, 1000, 1000],
        "write_queue_bytes": [0, 0, 0],
    }


def test_the_share_of_hits_leaves_out_what_no_cache_can_have() -> None:
    def share(**tokens: int) -> float | None:
        counts = Counter({PromptOutcome(name): count for name, count in tokens.items()})
        return Window(1, 1, counts, 0, {}, 0).hit_share

    assert share() is None
    assert share(tail=5) is None
    assert share(tail=50, local=30, new=10) == pytest.approx(0.75)


def window(chunks_evicted: int = 0, **tokens: int) -> Window:
    counts = Counter({PromptOutcome(name): count for name, count in tokens.items()})
    return Window(10.0, 1, counts, 0.0, {}, chunks_evicted)


def said(minute: Window, hour: Window, seconds: Seconds | None = None) -> list[str]:
    """The sentences; what came in the last seconds is of no matter to them."""
    windows = {"10s": window(local=7), "1min": minute, "1h": hour}
    return sentences(windows, seconds or Seconds(), GpuSettings(hour_price=3.0))


def test_the_sentences_are_over_the_last_minute_that_had_prompts() -> None:
    hour = window(new=100, host=100)
    assert said(window(new=100), hour)[0].startswith(
        "0% of 100 cacheable prompt tokens in the last minute were not computed"
    )
    assert said(window(), hour)[0].startswith(
        "50% of 200 cacheable prompt tokens in the last hour were not computed"
    )
    assert said(window(), window()) == ["no prompt in the last hour"]
    assert said(window(tail=3), hour) == [
        "no prompt of the last minute was long enough to be cached"
    ]


@pytest.mark.parametrize(
    ("host", "evicted", "chunks", "line"),
    [
        (0, 153_600, 300, "host hit rate 0%; 300 chunks evicted before reuse: host.size is too "),
        (64, 153_600, 1234, "host hit rate 0%; 1,234 chunks evicted before reuse: host.size is "),
        (900, 99_100, 300, "host hit rate 0.9%; 300 chunks evicted before reuse: host.size is "),
        (1000, 99_000, 300, ""),
        (0, 153_600, 0, ""),
    ],
)
def test_host_memory_that_is_too_small(host: int, evicted: int, chunks: int, line: str) -> None:
    minute = window(chunks, host=host, evicted=evicted)
    found = [one for one in said(minute, minute) if "before reuse" in one]
    assert len(found) == bool(line)
    assert "".join(found).startswith(line)


def test_few_tokens_that_were_evicted_do_not_make_it_too_small() -> None:
    minute = window(300, new=800, evicted=200)
    assert "before reuse" not in "".join(said(minute, minute))


def test_a_cache_that_costs_time_says_so() -> None:
    seconds = Seconds(saved=1.0, spent=4.0, gpu_saved=20.0, gpu_spent=164.0)
    minute = window(new=100, tail=5)
    first, *_, last = said(minute, minute, seconds)
    assert first.startswith("0% of 100 cacheable prompt tokens in the last minute")
    assert last == (
        "since the start lookups and loads took 144.0 GPU-seconds more than they saved: "
        "0.04 GPU-hours, 0.12 USD"
    )


@pytest.mark.parametrize("gpu_net", [100.0, -100.0])
def test_a_gain_is_told_apart_from_a_loss_by_gpu_seconds(gpu_net: float) -> None:
    """An engine of one rank gains, and one of eight loses, or the other way round."""
    seconds = Seconds(150.0 - gpu_net, 150.0, 200.0 + gpu_net, 200.0)
    minute = window(new=100)
    *_, last = said(minute, minute, seconds)
    assert ("more than they saved" in last) is (gpu_net < 0)
    assert " 100.0 GPU-seconds " in last
    assert "-" not in last.replace("GPU-", "")


def test_a_window_that_is_cut_is_named_by_its_length() -> None:
    tokens = Counter({PromptOutcome.NEW: 100})
    empty = Window(10.0, 0, Counter(), 0.0, {}, 0)
    windows = {"10s": empty, "1min": empty, "1h": Window(300.2, 1, tokens, 0.0, {}, 0, cut=True)}
    first, *_ = sentences(windows, Seconds(), GpuSettings())
    assert first.startswith("0% of 100 cacheable prompt tokens in the last 5m were not computed")
    windows["1h"] = Window(61.0, 0, Counter(), 0.0, {}, 0, cut=True)
    assert sentences(windows, Seconds(), GpuSettings()) == ["no prompt in the last 61s"]
