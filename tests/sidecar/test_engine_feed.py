"""Replays of an engine's events: late, long, cut short, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import places
from tests.sidecar.client import RunningSidecar, Scheduler
from tests.sidecar.configurations import with_events
from tests.sidecar.engine_sockets import (
    DoubleEngine,
    batch,
    endpoints,
    publish,
    publishing,
    stored,
)
from tests.sidecar.subscriber import Subscriber


@pytest.fixture
def engine(short_directory: Path) -> Iterator[DoubleEngine]:
    made = DoubleEngine(short_directory)
    yield made
    made.close()


def follows(blocks: int) -> Callable[[dict[str, Any]], bool]:
    """Whether the sidecar has this many blocks of its one engine."""
    return lambda status: [one["blocks"] for one in status["events"]["engines"]] == [blocks]


def gaps(sidecar: RunningSidecar) -> int:
    (one,) = sidecar.status()["events"]["engines"]
    return int(one["gaps"])


def test_an_idle_engine_that_answers_late_is_asked_again(
    short_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: DoubleEngine,
    subscribe: Callable[..., Subscriber],
) -> None:
    places.patch(monkeypatch, "REPLAY_SECONDS_MAX", 0.1)
    places.patch(monkeypatch, "PAUSE_SECONDS", 0.1)
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Scheduler(sidecar.path, **engine.attach),
    ):
        for _ in range(3):
            assert engine.asked()[1] == 0
        # Given up, each of them. The next is answered as soon as it comes, until one is heard.
        while not follows(1)(sidecar.status()):
            if engine.is_asked(10):
                asker, _ = engine.asked()
                engine.answer(asker, [0])
        follower = subscribe(sidecar)
        follower.see()
        assert follower.names("GPU") == {0}


@pytest.mark.parametrize("queued_max", [None, 1])
def test_thousands_of_batches_are_replayed_without_a_gap(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, queued_max: int | None
) -> None:
    """With room for one batch vLLM's socket drops most of each answer; the rest is requested."""
    if queued_max is not None:
        places.patch(monkeypatch, "REPLAY_QUEUED_MAX", queued_max)
    with publishing(short_directory, buffer_steps=10_000, max_queue_size=10_000) as publisher:
        for number in range(8000):
            publish(publisher, stored(number))
        attach = endpoints(short_directory)
        with (
            RunningSidecar(with_events(short_directory)) as sidecar,
            Scheduler(sidecar.path, topology="offloading", **attach),
        ):
            sidecar.wait_until(follows(8000))
            assert gaps(sidecar) == 0


def test_a_batch_that_the_subscription_missed_is_found_though_nothing_follows(
    short_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: DoubleEngine,
    subscribe: Callable[..., Subscriber],
) -> None:
    """Published after the first replay, and before the subscription had effect."""
    places.patch(monkeypatch, "PAUSE_SECONDS", 0.1)
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Scheduler(sidecar.path, **engine.attach),
    ):
        for number in range(2):
            asker, first = engine.asked()
            assert first == number
            engine.answer(asker, [number])
        follower = subscribe(sidecar)
        follower.recover()
        follower.until_equal({"GPU": {0, 1}})
        assert gaps(sidecar) == 0


@pytest.mark.parametrize("lost", [{1}, {2}, {1, 2}])
@pytest.mark.parametrize("end", [True, False])
def test_what_an_engine_drops_from_a_replay_is_requested_again(
    short_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    engine: DoubleEngine,
    lost: set[int],
    end: bool,
) -> None:
    """A ROUTER drops what its peer has not taken in time; vLLM's has room for 1,000 batches."""
    places.patch(monkeypatch, "PAUSE_SECONDS", 3600.0)
    engine.bind_events()
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Scheduler(sidecar.path, **engine.attach),
    ):
        engine.wait_for_subscription()
        asker, _ = engine.asked()
        # Published while the replay is under way; it waits, as it does not follow the last one.
        engine.publish(3)
        engine.answer(asker, sorted({0, 1, 2} - lost), end=end)
        asker, first = engine.asked()
        assert first == min(lost)
        engine.answer(asker, range(first, 4))
        sidecar.wait_until(follows(4))
        assert gaps(sidecar) == 0
    assert "Exception" not in caplog.text


def test_what_follows_the_last_batch_waits_for_no_replay(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, engine: DoubleEngine
) -> None:
    places.patch(monkeypatch, "REPLAY_SECONDS_MAX", 3600.0)
    engine.bind_events()
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Scheduler(sidecar.path, **engine.attach),
    ):
        engine.wait_for_subscription()
        engine.publish(0)
        sidecar.wait_until(follows(1))


def test_what_comes_while_a_replay_does_not_is_bounded_in_bytes(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, engine: DoubleEngine
) -> None:
    """10,000 batches of up to 64 MiB each were kept."""
    places.patch(monkeypatch, "REPLAY_SECONDS_MAX", 3600.0)
    places.patch(monkeypatch, "WAITING_BYTES_MAX", 3 * len(batch(5)))
    engine.bind_events()
    with (
        RunningSidecar(with_events(short_directory)) as sidecar,
        Scheduler(sidecar.path, **engine.attach),
    ):
        engine.wait_for_subscription()
        # With a gap: what follows the last one need not wait.
        for number in range(5, 9):
            engine.publish(number)
        sidecar.wait_until(follows(4))
