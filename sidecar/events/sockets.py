"""The sockets of the event stream: PUB for new batches, ROUTER for replay and snapshots.

Owns answering requests: batches from a number on, or a snapshot, framed as vLLM's
`ZmqEventPublisher` does. Does not own the sockets (`unix_sockets.py`, over TCP `curve_socket.py`),
nor the content of batches (`publisher.py`).

    PUB      [topic, number, payload]
    ROUTER   request ["", number] or ["", "snapshot"]; answers ["", topic, number, payload] for each
             batch and ["", "", -1, ""] at the end. All batches of a snapshot have the number of the
             last batch published before it: those with higher numbers follow it.

Invariants: publishing never waits, and a batch that a slow subscriber cannot take is dropped for it
alone, and counted; one request is answered at a time, for `ANSWER_SECONDS_MAX` at most, and beyond
`REQUESTS_WAITING_MAX` requests are dropped and counted.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.lowlevel

from sidecar.events.curve_socket import CurveSocket
from sidecar.events.records import END_OF_REPLAY, SEQUENCE_BYTES, SNAPSHOT, number_frame
from sidecar.events.unix_sockets import REQUEST_PARTS, UnixSocket
from sidecar.transport.zmtp_server import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from sidecar.config.observability import EventsSettings
    from sidecar.events.publisher import EventStream
    from sidecar.events.unix_sockets import Received, SendFrames

REQUESTS_WAITING_MAX: Final = 64
ANSWER_SECONDS_MAX: Final = 30.0
ANSWERS_QUEUED_MAX: Final = 256
"""Batches of an answer that are queued for its peer."""
FULL_POLL_SECONDS: Final = 0.005
_IPC: Final = "ipc://"

_logger = logging.getLogger("kvlake.events")


class EventSockets:
    """Both sockets, bound. Make it on the loop; run `answer` as a task; close it at the end.

    Endpoints are `ipc://PATH`, for the users `uids`, or where ZMQ binds over TCP, for subscribers
    with a key. `broke` receives an error of the sockets themselves. Raises `StartError` where one
    cannot be bound.
    """

    def __init__(
        self,
        settings: EventsSettings,
        endpoint: str,
        replay_endpoint: str,
        secret_key: bytes,
        uids: Iterable[int],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.batches_dropped = 0
        """Times that a batch could not be given to every subscriber."""
        self.requests_answered = 0
        self.requests_dropped = 0
        self._topic = settings.topic.encode()
        self._requests: deque[tuple[SendFrames, bytes]] = deque()
        self._requested = anyio.Event()
        self._closed = False

        def bind(
            field: str, address: str, queued_max: int, received: Received | None
        ) -> UnixSocket | CurveSocket:
            if address.startswith(_IPC):
                path = Path(address.removeprefix(_IPC))
                return UnixSocket(path, uids, queued_max, received, broke)
            return CurveSocket(field, address, settings, secret_key, queued_max, received, broke)

        self._pub = bind("endpoint", endpoint, settings.queue_batches, None)
        try:
            self._replay = bind("replay_endpoint", replay_endpoint, ANSWERS_QUEUED_MAX, self._ask)
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

    def _ask(self, send: SendFrames, parts: list[bytes]) -> None:
        fits = len(parts) == REQUEST_PARTS and len(parts[1]) == SEQUENCE_BYTES
        if not fits or len(self._requests) >= REQUESTS_WAITING_MAX:
            self.requests_dropped += 1
            return
        self._requests.append((send, parts[1]))
        self._requested.set()

    async def answer(self, stream: EventStream) -> None:
        """Answer requests until cancelled."""
        while True:
            while self._requests:
                send, what = self._requests.popleft()
                with anyio.move_on_after(ANSWER_SECONDS_MAX) as scope:
                    await self._answer(send, _batches(what, stream))
                if scope.cancelled_caught:
                    self.requests_dropped += 1
                    _logger.warning("a subscriber does not read what it asked for")
            self._requested = anyio.Event()
            await self._requested.wait()

    async def _answer(self, send: SendFrames, batches: Iterator[tuple[int, bytes]]) -> None:
        for number, payload in batches:
            frames = (b"", self._topic, number_frame(number), payload)
            if not await _send_when_room(send, frames):
                self.requests_dropped += 1
                return
            await anyio.lowlevel.checkpoint()
        if await _send_when_room(send, (b"", b"", END_OF_REPLAY, b"")):
            self.requests_answered += 1

    def close(self) -> None:
        """Close both; what a subscriber has not taken within the linger is lost."""
        self._closed = True
        self._pub.close()
        self._replay.close()


async def _send_when_room(send: SendFrames, frames: Sequence[bytes]) -> bool:
    """Send one message as soon as its peer has room for it. False if the peer is gone."""
    while True:
        sent = send(frames)
        if sent is not Sent.FULL:
            return sent is Sent.OK
        await anyio.sleep(FULL_POLL_SECONDS)


def _batches(what: bytes, stream: EventStream) -> Iterator[tuple[int, bytes]]:
    if what == SNAPSHOT:
        number = stream.history.next_number - 1
        for payload in stream.snapshot():
            yield number, payload
    else:
        yield from stream.history.since(int.from_bytes(what, "big"))
