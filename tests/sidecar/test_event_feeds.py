"""What a scheduler that wants events is told, whenever it comes and however slowly it reads."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from sidecar.core.commands import Command, Event, Reply
from sidecar.core.event_feeds import UNREAD_MAX
from sidecar.protocol import Events, Role
from tests import places
from tests.sidecar.engine_names import RANK_0, key, release
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world


class Told:
    """All that a world's engine tells, by session."""

    def __init__(self, world: World) -> None:
        self.unread: dict[int, list[Events]] = defaultdict(list)
        self._send = world.send
        world.send = self.send  # type: ignore[method-assign]

    def send(self, event: Event) -> list[Command]:
        commands = self._send(event)
        for command in commands:
            if isinstance(command, Reply) and isinstance(command.message, Events):
                self.unread[command.session_id].append(command.message)
        return commands


class Listener:
    """A client that applies what it is told, and says so when it is asked to read."""

    def __init__(self, world: World, told: Told) -> None:
        self._world = world
        self._told = told
        self.session_id = world.open(Role.SCHEDULER, want_events=True)
        self.begun = 0
        self.holds: dict[tuple[bytes, str], int] = {}
        self._taken = 0

    @property
    def unread(self) -> list[Events]:
        return self._told.unread[self.session_id]

    def read(self) -> None:
        """Take what is there, and what comes of saying so, until nothing more comes."""
        while self.unread:
            self.take()

    def take(self) -> None:
        """Take what is there, and say so once."""
        for message in self._told.unread.pop(self.session_id, []):
            self._apply(message)
        self._world.send(release(self.session_id, heard=self._taken))

    def _apply(self, message: Events) -> None:
        self._taken += 1
        self.begun += message.anew
        if message.anew:
            self.holds.clear()
        for stored in message.stored:
            self.holds[stored.key[:16], stored.tier] = stored.num_tokens
        for removed in message.removed:
            self.holds.pop((removed.key[:16], removed.tier), None)


def there(world: World) -> set[tuple[bytes, str]]:
    tiers = ("host", "store")
    return {
        (name[:16], tier)
        for (_, name), flags in world.index.items()
        for tier, flag in zip(tiers, flags, strict=True)
        if flag
    }


def test_one_that_comes_late_is_told_what_there_is() -> None:
    world = make_world()
    told = Told(world)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    world.written(next(iter(world.writes)))
    world.listed({9: RANK_0})
    listener = Listener(world, told)
    listener.read()
    assert set(listener.holds) == there(world)
    assert {(key(9)[:16], "store"), (key(1)[:16], "host")} <= set(listener.holds)
    world.listed({10: RANK_0})
    listener.read()
    assert (key(10)[:16], "store") in listener.holds


@pytest.mark.promise("events-vllm-stream")
@pytest.mark.parametrize("seed", range(2))
def test_whoever_reads_all_has_what_there_is(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unread_max = 3
    places.patch(monkeypatch, "UNREAD_MAX", unread_max)
    places.patch(monkeypatch, "FEED_CHUNKS_QUEUED_MAX", 5)
    places.patch(monkeypatch, "SLICE_CHUNKS", 2)
    chooser = random.Random(seed)
    world = make_world(slabs=2)
    told = Told(world)
    worker = world.open(Role.WORKER)
    listener = Listener(world, told)
    for job_id in range(1, 150):
        number = chooser.randrange(1, 30)
        if chooser.random() < 0.15:
            world.listed({number: RANK_0})
        elif world.writes and chooser.random() < 0.5:
            world.written(next(iter(world.writes)))
        else:
            world.stored(worker, job_id, [number])
        assert len(listener.unread) <= unread_max + 1
        if chooser.random() < 0.1:
            listener.read()
            assert set(listener.holds) == there(world)
    listener.read()
    assert set(listener.holds) == there(world)
    assert listener.begun > 1, "it read so slowly that it was told everything again"


def test_one_that_does_not_read_is_sent_no_more_than_so_much() -> None:
    world = make_world()
    told = Told(world)
    world.open(Role.WORKER)
    listener = Listener(world, told)
    listener.read()
    names = range(1000, 1000 + 4 * UNREAD_MAX)
    for number in names:
        world.listed({number: RANK_0})
    assert len(listener.unread) <= UNREAD_MAX
    listener.read()
    assert {(key(number)[:16], "store") for number in names} <= set(listener.holds)
    assert listener.begun == 1, "what waited was enough"


def test_of_what_is_only_listed_so_much_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "LISTED_MAX", 10)
    world = make_world()
    told = Told(world)
    worker = world.open(Role.WORKER)
    world.listed(dict.fromkeys(range(100, 150), RANK_0))
    world.stored(worker, 1, [1])
    listener = Listener(world, told)
    listener.read()
    assert len(listener.holds) == 11
    assert (key(1)[:16], "host") in listener.holds
    world.listed({200: RANK_0})
    listener.read()
    assert len(listener.holds) == 11


def test_what_is_withdrawn_while_the_rest_is_told_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names lie together in parts of a table, and a part of many chunks is told in many slices."""
    places.patch(monkeypatch, "SLICE_CHUNKS", 2)
    world = make_world()
    told = Told(world)
    world.open(Role.WORKER)
    together = [7 + 65536 * number for number in range(1, 9)]
    world.listed(dict.fromkeys(together, RANK_0))
    listener = Listener(world, told)
    listener.take()
    assert len(listener.holds) == 2
    world.listed(dict.fromkeys(together, RANK_0), written_at=2, withdrawn=True)
    listener.read()
    assert set(listener.holds) == there(world) == set()
