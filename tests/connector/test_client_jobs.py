"""Jobs and their answers between a client and a ZMQ ROUTER, with the test as sidecar."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from connector.client import SEND_QUEUE_MESSAGES_MAX, Client
from sidecar.protocol import FRAME_BYTES_MAX, Done, Error, Release, ServerMessage
from sidecar.protocol.codec import decode_client, encode
from tests import places
from tests.connector.clients import live, make_client, sidecar
from tests.connector.listening import WAIT_SECONDS_MAX, Sidecar, until

__all__ = ["make_client", "sidecar"]


def drain(client: Client, wanted: int) -> list[ServerMessage]:
    """Poll until this many messages have come."""
    messages: list[ServerMessage] = []

    def polled() -> bool:
        messages.extend(client.poll())
        return len(messages) >= wanted

    until(polled, f"{wanted} messages")
    return messages


class TestJobs:
    def test_messages_both_ways(self, sidecar: Sidecar, make_client: Callable[..., Client]) -> None:
        client = make_client()
        _, answer = sidecar.admit()
        session = live(client)
        assert client.send(session, Release(7, [1], [2]))
        token, frame = sidecar.router.recv_multipart()
        assert token == answer.token
        assert decode_client(frame) == Release(7, [1], [2])
        sidecar.router.send_multipart([token, encode(Done(7, []))])
        assert drain(client, 1) == [Done(7, [])]

    def test_a_poll_without_a_message_keeps_the_gil(
        self,
        sidecar: Sidecar,
        make_client: Callable[..., Client],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """`recv` gives it up, and an engine with busy threads waits a millisecond for it."""
        client = make_client()
        sidecar.admit()
        session = live(client)
        client.send(session, Release(7, [1], []))
        token, _ = sidecar.router.recv_multipart()
        calls = list[Any]()
        recv = zmq.Socket.recv

        def noted(self: zmq.Socket[bytes], *given: Any, **options: Any) -> Any:
            calls.append(self)
            return recv(self, *given, **options)

        monkeypatch.setattr(zmq.Socket, "recv", noted)
        assert client.poll() == []
        assert not calls
        sidecar.router.send_multipart([token, encode(Done(7, []))])
        assert drain(client, 1) == [Done(7, [])]
        assert len(calls) == 1

    @pytest.mark.promise("epoch-engine")
    def test_other_lives_and_garbage_are_dropped(
        self,
        sidecar: Sidecar,
        make_client: Callable[..., Client],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        client = make_client()
        sidecar.admit()
        client.send(live(client), Release(7, [1], []))
        token, _ = sidecar.router.recv_multipart()
        for payload in (b"", b"\xc1", b"x" * 100, encode(Done(6, [])), encode(Error(7, "c", "m"))):
            sidecar.router.send_multipart([token, payload])
        assert drain(client, 1) == [Error(7, "c", "m")]
        assert "refused" in caplog.text

    def test_one_poll_takes_a_bounded_number(
        self,
        sidecar: Sidecar,
        make_client: Callable[..., Client],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        places.patch(monkeypatch, "MESSAGES_PER_POLL_MAX", 3)
        client = make_client()
        sidecar.admit()
        client.send(live(client), Release(7, [1], []))
        token, _ = sidecar.router.recv_multipart()
        for _ in range(8):
            sidecar.router.send_multipart([token, encode(Done(7, []))])
        counts: list[int] = []

        def polled() -> bool:
            counts.append(len(client.poll()))
            return sum(counts) == 8

        until(polled, "eight answers")
        assert max(counts) <= 3

    def test_sending_to_one_that_does_not_read_never_waits(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        # An endpoint where nobody is: all that is sent stays in our own queue.
        client = make_client()
        sidecar.admit(endpoint=sidecar.endpoint + ".nobody")
        session = live(client)
        sent = [client.send(session, Release(7, [1], [])) for _ in range(3_000)]
        assert sent.count(True) == SEND_QUEUE_MESSAGES_MAX
        assert not sent[-1]

    def test_a_message_that_is_too_long_is_not_sent(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        sidecar.admit()
        session = live(client)
        assert not client.send(session, Release(7, [2**62] * (FRAME_BYTES_MAX // 9 + 1), []))
        assert client.send(session, Release(7, [1], []))
        _, frame = sidecar.router.recv_multipart()
        assert decode_client(frame) == Release(7, [1], [])

    def test_waiting_ends_with_an_answer(
        self, sidecar: Sidecar, make_client: Callable[..., Client]
    ) -> None:
        client = make_client()
        client.wait(1)
        sidecar.admit()
        client.send(live(client), Release(7, [1], []))
        token, _ = sidecar.router.recv_multipart()
        client.wait(1)
        assert client.poll() == []
        sidecar.router.send_multipart([token, encode(Done(7, []))])
        client.wait(int(WAIT_SECONDS_MAX * 1000))
        assert client.poll() == [Done(7, [])]

    @pytest.mark.parametrize("endpoint", ["nonsense", "ipc://" + "x" * 200, ""])
    def test_a_bad_endpoint_is_no_session_and_no_error(
        self, sidecar: Sidecar, make_client: Callable[..., Client], endpoint: str
    ) -> None:
        client = make_client()
        sidecar.admit(endpoint=endpoint)
        assert client.wait_attached(WAIT_SECONDS_MAX)
        assert client.session is None
        assert client.session is None
        assert client.poll() == []

    def test_a_passing_lack_of_descriptors_is_no_end(
        self, sidecar: Sidecar, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client = make_client()
        made = zmq.Context.socket

        def full(context: Any, kind: int) -> Any:
            monkeypatch.setattr(zmq.Context, "socket", made)
            raise zmq.ZMQError(errno.EMFILE)

        monkeypatch.setattr(zmq.Context, "socket", full)
        sidecar.admit()
        assert client.wait_attached(WAIT_SECONDS_MAX)
        assert client.session is None
        sidecar.admit()
        assert client.send(live(client), Release(7, [1], []))

    def test_a_dealer_of_a_sidecar_that_ended_does_not_connect_all_the_time(
        self, sidecar: Sidecar, make_client: Callable[..., Client], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An idle engine closes it with its next step only. ZMQ's default is ten times a second."""
        client = make_client()
        made, dealers = zmq.Context.socket, list[Any]()

        def noted(context: Any, kind: int) -> Any:
            dealers.append(made(context, kind))
            return dealers[-1]

        monkeypatch.setattr(zmq.Context, "socket", noted)
        sidecar.admit()
        live(client)
        [dealer] = dealers
        assert dealer.getsockopt(zmq.RECONNECT_IVL) >= 1000
