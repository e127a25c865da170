"""The Unix sockets for KV events against peers that speak their protocol by hand, and mean harm."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, Final

import anyio
import pytest
import zmq

from sidecar.config.sections import EventsSettings
from sidecar.events.records import END_OF_REPLAY, SNAPSHOT, number_frame
from sidecar.events.sockets import EventSockets
from sidecar.protocol import Outcome
from tests import places
from tests.mappings import open_fds
from tests.sidecar.bench import until, wait_for
from tests.sidecar.client import WAIT_SECONDS_MAX, RunningSidecar, Worker, key_of
from tests.sidecar.configurations import with_events
from tests.sidecar.test_job_socket import GREETING, MORE, anonymous_bytes, at_end, frame, ready
from tests.sidecar.test_peers import OTHER, needs_root, run_as

MIB: Final = 1 << 20
PUBLISHER, REPLAY = "events", "replay"
BOTH = pytest.mark.parametrize("which", [PUBLISHER, REPLAY])
SUBSCRIBE: Final = bytes([0, 1, 1])


@pytest.fixture
def sidecar(short_directory: Any) -> Iterator[RunningSidecar]:
    with RunningSidecar(with_events(short_directory)) as running:
        yield running


def endpoint_of(sidecar: RunningSidecar, which: str) -> str:
    return sidecar.events if which == PUBLISHER else sidecar.replay


def raw(sidecar: RunningSidecar, which: str, *, greets: bool = True) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_SECONDS_MAX)
    sock.connect(endpoint_of(sidecar, which).removeprefix("ipc://"))
    if greets:
        sock.sendall(GREETING + ready(b"raw"))
    return sock


def store(sidecar: RunningSidecar, *numbers: int) -> None:
    """What is stored is told."""
    with Worker(sidecar.path) as worker:
        for number in numbers:
            assert worker.store(number + 1, key_of(number), [0]) is Outcome.OK


@contextlib.contextmanager
def zmq_socket(sidecar: RunningSidecar, kind: int, which: str, **options: int) -> Iterator[Any]:
    context = zmq.Context()
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name), value)
    sock.connect(endpoint_of(sidecar, which))
    try:
        yield sock
    finally:
        context.destroy(linger=0)


def subscribe(sidecar: RunningSidecar, sub: Any) -> None:
    """Subscribe to all, and return when the sidecar knows it: what it sends before is not heard."""
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    for number in range(1000, 1400):
        store(sidecar, number)
        if sub.poll(200):
            break
    while sub.poll(0):
        sub.recv_multipart()


@pytest.mark.promise("event-memory")
@BOTH
@pytest.mark.parametrize("size_bytes", [1, 900, MIB])
def test_a_message_without_end_takes_no_memory(
    sidecar: RunningSidecar, which: str, size_bytes: int
) -> None:
    """The replay socket went from 57 to 786 MiB in six seconds, and gave nothing back."""
    held = anonymous_bytes()
    many = frame(bytes(size_bytes), MORE) * max(1, MIB // 4 // (size_bytes + 9))
    sent = 0
    while sent < 24 * MIB:
        with raw(sidecar, which) as sock, contextlib.suppress(ConnectionError):
            while sent < 24 * MIB:
                sent += len(many)
                sock.sendall(many)
    store(sidecar, 1)
    grown = anonymous_bytes() - held
    assert grown < 12 * MIB, f"{grown / MIB:.0f} MiB"


@BOTH
def test_what_is_no_request_ends_its_connection_alone(sidecar: RunningSidecar, which: str) -> None:
    with zmq_socket(sidecar, zmq.SUB, PUBLISHER) as sub:
        subscribe(sidecar, sub)
        for bad in (bytes(64), b"GET / HTTP/1.1\r\n\r\n" * 8, GREETING + frame(b"unnamed")):
            with raw(sidecar, which, greets=False) as sock:
                sock.sendall(bad)
                assert at_end(sock)
        with raw(sidecar, which) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(frame(bytes(1025)))
            assert at_end(sock)
        store(sidecar, 1)
        assert sub.poll(WAIT_SECONDS_MAX * 1000)


def test_subscriptions_of_one_peer_are_bounded(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "SUBSCRIPTIONS_MAX", 4)
    with raw(sidecar, PUBLISHER) as sock, contextlib.suppress(ConnectionError):
        for _ in range(20):
            sock.sendall(SUBSCRIBE[:1] + b"\x04\x01abc")
        assert at_end(sock)


@BOTH
def test_connections_are_bounded_and_the_silent_ones_end(
    short_directory: Any, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    places.patch(monkeypatch, "UnixSocket.peers_max", 4)
    places.patch(monkeypatch, "HANDSHAKE_SECONDS_MAX", 1.0)
    with RunningSidecar(with_events(short_directory)) as sidecar:
        before = open_fds()
        silent = [raw(sidecar, which, greets=False) for _ in range(12)]
        assert all(map(at_end, silent))
        for sock in silent:
            sock.close()
        wait_for(lambda: open_fds() <= before)
        places.patch(monkeypatch, "HANDSHAKE_SECONDS_MAX", 3600.0)
        with raw(sidecar, which) as sock:
            assert sock.recv(64).startswith(b"\xff"), "there is room again"


def test_one_that_does_not_read_loses_batches_and_nobody_else_does(short_directory: Any) -> None:
    events = {"queue_batches": 4}
    with (
        RunningSidecar(with_events(short_directory, events=events)) as sidecar,
        zmq_socket(sidecar, zmq.SUB, PUBLISHER) as sub,
        raw(sidecar, PUBLISHER) as deaf,
    ):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        subscribe(sidecar, sub)
        deaf.sendall(SUBSCRIBE)
        with Worker(sidecar.path) as worker:
            number = 0
            while not sidecar.status()["events"]["batches_dropped"]:
                for _ in range(50):
                    number += 1
                    assert worker.store(number, key_of(number), [0]) is Outcome.OK
                    assert sub.poll(WAIT_SECONDS_MAX * 1000)
                    while sub.poll(0):
                        sub.recv_multipart()


async def test_what_one_that_does_not_read_has_queued_is_bounded_in_bytes(
    short_directory: Any,
) -> None:
    """10,000 batches of any size were kept for each."""
    settings = EventsSettings(buffer_max=MIB)
    sockets = EventSockets(
        settings,
        short_directory / "e",
        short_directory / "r",
        lambda error: pytest.fail(repr(error)),
    )
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.connect(sockets.endpoint.removeprefix("ipc://"))
        deaf.sendall(GREETING + ready(b"raw") + SUBSCRIBE)
        deaf.settimeout(0)

        def subscribed() -> bool:
            sockets.publish(0, b"anybody?")
            with contextlib.suppress(BlockingIOError):
                return b"anybody?" in deaf.recv(MIB)
            return False

        await until(subscribed)
        for number in range(100):
            sockets.publish(number, bytes(MIB // 8))
        # Some are in the kernel's buffers.
        assert 80 < sockets.batches_dropped < 92
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):
                deaf.recv(MIB)
                await anyio.sleep(0.01)
        sockets.publish(100, bytes(MIB // 8))
        assert sockets.batches_dropped < 92, "there is room again"
    sockets.close()


def test_a_request_socket_is_answered_and_heartbeats_are(sidecar: RunningSidecar) -> None:
    """vLLM's own example asks by REQ. A peer that gets no answer to its heartbeat hangs up."""
    store(sidecar, 1)
    with zmq_socket(sidecar, zmq.REQ, REPLAY, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=5000) as asks:
        asks.send(SNAPSHOT)
        assert asks.poll(WAIT_SECONDS_MAX * 1000)
        asks.recv_multipart()
    with zmq_socket(sidecar, zmq.DEALER, REPLAY, HEARTBEAT_IVL=20, HEARTBEAT_TIMEOUT=5000) as asks:
        for _ in range(3):
            asks.send_multipart((b"", number_frame(0)))
            while asks.recv_multipart()[2] != END_OF_REPLAY:
                pass
            assert not asks.poll(100)


@pytest.mark.promise("event-keys")
@needs_root
@BOTH
def test_another_user_hears_and_asks_nothing(short_directory: Any, which: str) -> None:
    """The directory can be passed through by those who are served; the sockets cannot."""
    short_directory.chmod(0o711)
    config = with_events(short_directory, runtime={"allow_uids": [OTHER]})
    script = """
sock = __import__("socket").socket(1)
try:
    sock.connect(where)
except OSError as error:
    print(error)
"""
    with RunningSidecar(config) as sidecar:
        path = endpoint_of(sidecar, which).removeprefix("ipc://")
        assert "Permission denied" in run_as(OTHER, script, path)
