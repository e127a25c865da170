"""The sockets of the event stream: PUB for what is told now, ROUTER for what was told before.

Owns answering requests: batches from a number on, or a snapshot, framed as vLLM's
`ZmqEventPublisher` does. Does not own the sockets (`unix_port.py`, over TCP `keyed_port.py`), nor
what is told (`publisher.py`).

    PUB      [topic, number, payload]
    ROUTER   asked ["", number] or ["", "snapshot"]; answers ["", topic, number, payload] for each
             batch and ["", "", -1, ""] at the end. All batches of a snapshot have the number of the
             last batch that was told before it: those with higher numbers follow it.

Invariants:

* Publishing never waits. What a subscriber that does not read cannot take is dropped for it alone,
  and counted.
* One request is answered at a time, as fast as who asked reads, for `ANSWER_SECONDS_MAX` at most.
  `REQUESTS_WAITING_MAX` wait; more are dropped, counted, and asked again by who wants them.
* Over TCP a subscriber has a key that the configuration names. The Unix sockets are for the
  sidecar's own user and root, and what one of these sends takes a bounded amount of memory.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.lowlevel
import zmq

from sidecar.events.keyed_port import KeyedPort
from sidecar.events.records import END_OF_REPLAY, SEQUENCE_BYTES, SNAPSHOT, number_frame
from sidecar.events.unix_port import EventPeer, EventPort
from sidecar.transport.job_socket import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sidecar.config.observability import EventsSettings
    from sidecar.events.publisher import EventStream, Told

REQUESTS_WAITING_MAX: Final = 64
ANSWER_SECONDS_MAX: Final = 30.0
ANSWERS_QUEUED_MAX: Final = 256
"""Batches of an answer that wait for one who asked."""
FULL_POLL_SECONDS: Final = 0.005
_IPC: Final = "ipc://"
_REQUEST_PARTS: Final = 2

_logger = logging.getLogger("kvlake.events")


class _Request(NamedTuple):
    peer: EventPeer | bytes
    what: bytes


class EventSockets:
    """Both sockets, bound. Make it on the loop; run `answer` as a task; close it at the end.

    Args:
        endpoint, replay_endpoint: `ipc://PATH`, or where ZMQ binds over TCP.
        secret_key: this side's CURVE key, for TCP.
        uids: the users who may connect to the Unix sockets.
        broke: told of an error of its own.

    Raises `StartError` where one cannot be bound.
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
        self._requests: deque[_Request] = deque()
        self._asked = anyio.Event()
        self._closed = False
        queued, uids = settings.queue_batches, tuple(uids)
        if endpoint.startswith(_IPC):
            path = Path(endpoint.removeprefix(_IPC))
            self._pub: EventPort | KeyedPort = EventPort(
                path, b"PUB", uids, queued, EventPort.subscribe, broke
            )
        else:
            self._pub = KeyedPort(
                zmq.PUB,
                "events.endpoint",
                endpoint,
                settings,
                secret_key,
                queued,
                self._take,
                broke,
            )
        try:
            self._replay = self._open_replay(settings, replay_endpoint, secret_key, uids, broke)
        except BaseException:
            self._pub.close()
            raise
        self.endpoint, self.replay_endpoint = self._pub.endpoint, self._replay.endpoint

    def _open_replay(
        self,
        settings: EventsSettings,
        endpoint: str,
        secret_key: bytes,
        uids: tuple[int, ...],
        broke: Callable[[BaseException], None],
    ) -> EventPort | KeyedPort:
        if endpoint.startswith(_IPC):
            path = Path(endpoint.removeprefix(_IPC))
            return EventPort(path, b"ROUTER", uids, ANSWERS_QUEUED_MAX, self._asked_by, broke)
        return KeyedPort(
            zmq.ROUTER,
            "events.replay_endpoint",
            endpoint,
            settings,
            secret_key,
            ANSWERS_QUEUED_MAX,
            self._take,
            broke,
        )

    def _local(self) -> dict[Path, EventPort]:
        ports = (self._pub, self._replay)
        return {port.path: port for port in ports if isinstance(port, EventPort)}

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files of the sockets that are not over TCP."""
        return tuple(self._local())

    def bind_again(self, path: Path) -> None:
        """Make the socket file again after somebody removed it; connected peers notice nothing."""
        self._local()[path].bind_again()

    @property
    def handshakes_refused(self) -> int:
        """CURVE handshakes that failed, on either socket."""
        ports = (self._pub, self._replay)
        return sum(port.refused for port in ports if isinstance(port, KeyedPort))

    # --- what is told now ----------------------------------------------------------------------

    def publish(self, batch: Told) -> None:
        """Give a batch to every subscriber that can take it."""
        if self._closed:
            return
        frames = (self._topic, number_frame(batch.number), batch.payload)
        if not self._pub.publish(frames):
            self.batches_dropped += 1

    # --- what was told before ------------------------------------------------------------------

    def _asked_by(self, _: EventPort, peer: EventPeer, parts: list[bytes]) -> None:
        self._take(peer, parts)

    def _take(self, peer: EventPeer | bytes, parts: list[bytes]) -> None:
        fits = len(parts) == _REQUEST_PARTS and len(parts[1]) == SEQUENCE_BYTES
        if not fits or len(self._requests) >= REQUESTS_WAITING_MAX:
            self.requests_dropped += 1
            return
        self._requests.append(_Request(peer, parts[1]))
        self._asked.set()

    async def answer(self, stream: EventStream) -> None:
        """Answer requests until cancelled."""
        while True:
            while self._requests:
                request = self._requests.popleft()
                with anyio.move_on_after(ANSWER_SECONDS_MAX) as scope:
                    await self._answer(request, stream)
                if scope.cancelled_caught:
                    self.requests_dropped += 1
                    _logger.warning("a subscriber does not read what it asked for")
            self._asked = anyio.Event()
            await self._asked.wait()

    async def _answer(self, request: _Request, stream: EventStream) -> None:
        for number, payload in _batches(request.what, stream):
            if not await self._send(request.peer, (self._topic, number_frame(number), payload)):
                self.requests_dropped += 1
                return
            await anyio.lowlevel.checkpoint()
        if await self._send(request.peer, (b"", END_OF_REPLAY, b"")):
            self.requests_answered += 1

    async def _send(self, peer: EventPeer | bytes, frames: tuple[bytes, bytes, bytes]) -> bool:
        """Send one message, when there is room for it. False if who asked is gone."""
        while True:
            sent = self._sent(peer, (b"", *frames))
            if sent is not Sent.FULL:
                return sent is Sent.OK
            await anyio.sleep(FULL_POLL_SECONDS)

    def _sent(self, peer: EventPeer | bytes, frames: tuple[bytes, ...]) -> Sent:
        if isinstance(self._replay, EventPort):
            assert isinstance(peer, EventPeer), "it came over that port"
            return self._replay.send(peer, frames)
        assert isinstance(peer, bytes), "it came over that port"
        return self._replay.send(peer, frames)

    def close(self) -> None:
        """Close both; what a subscriber has not taken is lost."""
        self._closed = True
        self._pub.close()
        self._replay.close()


def _batches(what: bytes, stream: EventStream) -> Iterator[tuple[int, bytes]]:
    if what == SNAPSHOT:
        number = stream.history.next_number - 1
        for payload in stream.snapshot():
            yield number, payload
    else:
        yield from stream.history.since(int.from_bytes(what, "big"))
