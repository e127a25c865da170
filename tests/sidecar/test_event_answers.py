"""Answers to requests for events: to peers that read slowly, or not, or ask all the time."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import pytest

from sidecar.config.sections import EventsSettings
from sidecar.events.records import END_OF_REPLAY, SNAPSHOT, number_frame
from sidecar.events.sockets import EventSockets
from tests import places
from tests.sidecar.bench import until
from tests.sidecar.test_job_socket import GREETING, MORE, frame, ready

PAYLOAD: Final = bytes(1 << 16)
BATCHES: Final = 400
"""More than a peer's queue and the kernel's buffers take."""


class Peer:
    """A connection to the replay socket, by hand."""

    def __init__(self, endpoint: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(endpoint.removeprefix("ipc://"))
        self.sock.sendall(GREETING + ready(b"raw"))
        self.gap_seconds_max = 0.0
        """The longest time from the begin of one read to the end of the next."""

    def ask(self, what: bytes = SNAPSHOT) -> None:
        self.sock.sendall(frame(b"", MORE) + frame(what))

    def read(self, until: bytes, pause_seconds: float = 0.0) -> bool:
        """Read until these bytes come; False at the end of the connection."""
        tail, last = b"", time.monotonic()
        with contextlib.suppress(ConnectionResetError):
            while piece := self.sock.recv(len(PAYLOAD)):
                tail, now = tail[-64:] + piece, time.monotonic()
                self.gap_seconds_max, last = max(self.gap_seconds_max, now - last), now
                if until in tail:
                    return True
                time.sleep(pause_seconds)
        return False


class Sockets:
    """Event sockets that answer each request with as much."""

    def __init__(self, directory: Path) -> None:
        self.broken: list[BaseException] = []
        self.asked: list[bytes] = []
        self.begun: list[Callable[[], None]] = []
        """What is done when an answer begins: the first of these at the first one."""
        self.events = EventSockets(
            EventsSettings(), directory / "events", directory / "replay", self.broken.append
        )

    def batches(self, what: bytes) -> Iterator[tuple[int, bytes]]:
        self.asked.append(what)
        if self.begun:
            self.begun.pop(0)()
        return ((number, PAYLOAD) for number in range(BATCHES))

    @contextlib.contextmanager
    def peer(self) -> Iterator[Peer]:
        peer = Peer(self.events.replay_endpoint)
        with peer.sock:
            yield peer


@pytest.fixture
async def sockets(short_directory: Path) -> AsyncIterator[Sockets]:
    made = Sockets(short_directory)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(made.events.answer, made.batches)
        yield made
        tasks.cancel_scope.cancel()
    made.events.close()
    assert not made.broken


async def test_an_answer_that_is_read_slowly_has_its_end(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut 30 seconds after its begin, whatever it had, and each time."""
    # Less than the answer takes in all.
    places.patch(monkeypatch, "STALL_SECONDS_MAX", 1.5)
    cut = 0
    while True:
        with sockets.peer() as peer:
            peer.ask()
            if await anyio.to_thread.run_sync(peer.read, END_OF_REPLAY, 0.005):
                break
        # A machine that paused made it one that does not read: once more.
        assert peer.gap_seconds_max > 0.5
        cut += 1
    assert (sockets.events.requests_answered, sockets.events.requests_dropped) == (1, cut)


async def test_one_that_does_not_read_is_cut_off_and_the_next_is_answered(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "STALL_SECONDS_MAX", 1.5)
    with sockets.peer() as deaf, sockets.peer() as reader:
        # The second request comes as soon as the first is being answered. The other peer, whose
        # answer is the next, may be as slow as the machine.
        sockets.begun = [
            deaf.ask,
            lambda: places.patch(monkeypatch, "STALL_SECONDS_MAX", 60.0),
        ]
        deaf.ask()
        await until(lambda: len(sockets.asked) == 1)
        reader.ask()
        assert await anyio.to_thread.run_sync(reader.read, END_OF_REPLAY)
        assert not await anyio.to_thread.run_sync(deaf.read, END_OF_REPLAY)
    assert len(sockets.asked) == 2, "its second request is not answered"
    assert (sockets.events.requests_answered, sockets.events.requests_dropped) == (1, 2)


async def test_one_that_asks_all_the_time_leaves_room_and_gets_its_last_answer(
    sockets: Sockets, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "REQUESTS_WAITING_MAX", 2)
    with sockets.peer() as insistent, sockets.peer() as other:
        insistent.ask(number_frame(0))
        await until(lambda: len(sockets.asked) == 1)
        for number in range(1, 20):
            insistent.ask(number_frame(number))
        await until(lambda: sockets.events.requests_dropped == 18)
        other.ask()
        for peer in (insistent, insistent, other):
            assert await anyio.to_thread.run_sync(peer.read, END_OF_REPLAY)
    assert sockets.asked == [number_frame(0), number_frame(19), SNAPSHOT]
    assert sockets.events.requests_dropped == 18
