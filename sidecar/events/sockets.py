"""The sockets of the event stream: PUB for new batches, ROUTER for replay and snapshots.

Owns answering requests: batches from a number on, or a snapshot, framed as vLLM's
`ZmqEventPublisher` does; and on Unix sockets subscriptions, and the limits of a subscriber. Does
not own connections, reading and sending (`transport/zmtp_server.py`), sockets over TCP
(`curve_socket.py`), nor the content of batches (`publisher.py`).

    PUB      [topic, number, payload]
    ROUTER   request ["", number] or ["", "snapshot"]; answers ["", topic, number, payload] for each
             batch and ["", "", -1, ""] at the end. All batches of a snapshot have the number of the
             last batch published before it: those with higher numbers follow it.

Invariants: publishing never waits, and a batch that a slow subscriber cannot take is dropped for it
alone, and counted; one request is answered at a time. A peer that takes nothing of its answer for
`STALL_SECONDS_MAX` gets no more of it, and its connection ends. One request of each peer waits, and
`REQUESTS_WAITING_MAX` in all: others are dropped and counted. A Unix socket has `peers_max`
connections at most, each with `SUBSCRIPTIONS_MAX` subscriptions at most, of `REQUEST_BYTES_MAX`
each.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import anyio.lowlevel

from sidecar.config.sections import EventsSettings
from sidecar.events.curve_socket import (
    REQUEST_BYTES_MAX,
    CurveSocket,
    Received,
    Requester,
    SendFrames,
)
from sidecar.events.records import END_OF_REPLAY, SEQUENCE_BYTES, number_frame
from sidecar.transport.zmtp_server import MORE, Sent, ZmtpPeer, ZmtpServer, framed

REQUESTS_WAITING_MAX: Final = 64
STALL_SECONDS_MAX: Final = 30.0
"""Until a peer takes a batch of its answer. The whole answer has no limit: its end would be missing
each time."""
ANSWERS_QUEUED_MAX: Final = 32
FULL_POLL_SECONDS: Final = 0.005
SUBSCRIPTIONS_MAX: Final = 64
REQUEST_PARTS: Final = 2
"""Parts of a request: an empty one, and what is asked for. A subscription has one."""
MODE: Final = 0o600

_logger = logging.getLogger("kvlake.events")


class UnixSocket(ZmtpServer):
    """The bound socket, for our own user and root.

    Args:
        queued_max: messages queued for one peer.
        queued_bytes_max: bytes queued for one peer, beyond which no message is added.
        received: makes it a ROUTER, and is called with each request. None makes it a PUB.
        broke: receives an error of the socket itself.
    """

    peers_max = 256
    frame_bytes_max = REQUEST_BYTES_MAX
    parts_max = REQUEST_PARTS
    receive_bytes_max = 4096
    heartbeats = True

    def __init__(
        self,
        path: Path,
        queued_max: int,
        queued_bytes_max: int,
        received: Received | None,
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(
            path,
            b"PUB" if received is None else b"ROUTER",
            broke,
            mode=MODE,
            # Events contain prompts, which the users of runtime.allow_uids must not read.
            uids=(os.geteuid(), 0),
            queued_max=queued_max,
            queued_bytes_max=queued_bytes_max,
        )
        self._received = received
        self._topics: dict[ZmtpPeer, list[bytes]] = {}

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Send a message to all who subscribed to its first frame; False where one is full."""
        message = _message_of(frames)
        taken = True
        for peer, topics in list(self._topics.items()):
            if any(map(frames[0].startswith, topics)):
                taken &= self._queue(peer, message) is not Sent.FULL
        return taken

    def _send(self, peer: ZmtpPeer, frames: Sequence[bytes]) -> Sent:
        return Sent.GONE if peer.closed else self._queue(peer, _message_of(frames))

    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        """Pass on a request; subscribe or unsubscribe. What is neither ends the connection."""
        if self._received is not None:
            sends, closes = partial(self._send, peer), partial(self._close, peer)
            self._received(Requester(peer, sends, closes), parts)
            return
        topics = self._topics.setdefault(peer, [])
        kind, topic = (parts[0][:1], parts[0][1:]) if len(parts) == 1 else (b"", b"")
        if kind == b"\1" and len(topics) < SUBSCRIPTIONS_MAX:
            topics.append(topic)
        elif kind != b"\0":
            self._close(peer)
        elif topic in topics:
            topics.remove(topic)

    def _close(self, peer: ZmtpPeer) -> None:
        super()._close(peer)
        self._topics.pop(peer, None)

    def _identified(self, peer: ZmtpPeer) -> None:
        """Subscribers need no identity."""


class EventSockets:
    """Both sockets, bound. Make it on the loop; run `answer` as a task; close it at the end.

    The paths are those of Unix sockets, where the settings name no endpoint over TCP. `broke`
    receives an error of the sockets themselves. Raises `StartError` where one cannot be bound.
    """

    def __init__(
        self,
        settings: EventsSettings,
        path: Path,
        replay_path: Path,
        broke: Callable[[BaseException], None],
    ) -> None:
        self.batches_dropped = 0
        self.requests_answered = 0
        self.requests_dropped = 0
        self._topic = settings.topic.encode()
        self._requests: dict[Hashable, tuple[Requester, bytes]] = {}
        """By their peers, the next one first."""
        self._requested = asyncio.Event()
        self._closed = False

        def bind(
            field: str, path: Path, queued_max: int, received: Received | None
        ) -> UnixSocket | CurveSocket:
            if getattr(settings, field) == "ipc":
                # One that has more to read needs a snapshot anyway: no more is kept for replay.
                return UnixSocket(path, queued_max, settings.buffer_max, received, broke)
            return CurveSocket(field, settings, queued_max, received, broke)

        self._pub = bind("endpoint", path, settings.queue_batches, None)
        try:
            self._replay = bind("replay_endpoint", replay_path, ANSWERS_QUEUED_MAX, self._ask)
        except BaseException:
            self._pub.close()
            raise
        self.endpoint, self.replay_endpoint = self._pub.endpoint, self._replay.endpoint

    @property
    def unix_sockets(self) -> list[UnixSocket]:
        """Those that have a file, which can be removed."""
        return [one for one in (self._pub, self._replay) if isinstance(one, UnixSocket)]

    @property
    def handshakes_refused(self) -> int:
        """CURVE handshakes that failed, on either socket."""
        both = (self._pub, self._replay)
        return sum(one.refused for one in both if isinstance(one, CurveSocket))

    def publish(self, number: int, payload: bytes) -> None:
        """Give a batch to every subscriber that can take it. Never waits."""
        if not self._closed and not self._pub.publish((self._topic, number_frame(number), payload)):
            self.batches_dropped += 1

    # --- replay and snapshots --------------------------------------------------------------

    def _ask(self, requester: Requester, parts: list[bytes]) -> None:
        fits = len(parts) == REQUEST_PARTS and len(parts[1]) == SEQUENCE_BYTES
        waits = requester.peer in self._requests
        if not fits or (not waits and len(self._requests) >= REQUESTS_WAITING_MAX):
            self.requests_dropped += 1
            return
        # The newer one replaces it, because it says what the peer has by now.
        self.requests_dropped += waits
        self._requests[requester.peer] = requester, parts[1]
        self._requested.set()

    async def answer(self, batches: Callable[[bytes], Iterator[tuple[int, bytes]]]) -> None:
        """Answer requests with their numbered batches, until cancelled."""
        while True:
            while not self._requests:
                self._requested.clear()
                await self._requested.wait()
            requester, what = self._requests.pop(next(iter(self._requests)))
            await self._answer(requester, batches(what))

    async def _answer(self, requester: Requester, batches: Iterator[tuple[int, bytes]]) -> None:
        messages = ((b"", self._topic, number_frame(number), one) for number, one in batches)
        for frames in itertools.chain(messages, [(b"", b"", END_OF_REPLAY, b"")]):
            sent = await _send_when_room(requester.send, frames)
            if sent is not Sent.OK:
                break
            await anyio.lowlevel.checkpoint()
        else:
            self.requests_answered += 1
            return
        self.requests_dropped += 1
        if sent is Sent.FULL:
            _logger.warning("a subscriber does not read what it asked for")
            self.requests_dropped += self._requests.pop(requester.peer, None) is not None
            requester.close()

    def close(self) -> None:
        """Close both; what a subscriber has not taken within the linger is lost."""
        self._closed = True
        self._pub.close()
        self._replay.close()


async def _send_when_room(send: SendFrames, frames: Sequence[bytes]) -> Sent:
    """Send one message as soon as its peer has room for it; FULL if it has none in time."""
    deadline = anyio.current_time() + STALL_SECONDS_MAX
    while True:
        sent = send(frames)
        if sent is not Sent.FULL or anyio.current_time() > deadline:
            return sent
        await anyio.sleep(FULL_POLL_SECONDS)


def _message_of(frames: Sequence[bytes]) -> bytes:
    *before, last = frames
    parts = [framed(frame, MORE) for frame in before]
    return b"".join((*parts, framed(last)))
