"""The sockets of the event stream: PUB for what is told now, ROUTER for what was told before.

Owns both sockets, their limits, and answering requests: batches from a number on, or a snapshot,
framed as vLLM's `ZmqEventPublisher` does. Does not own what is told (`publisher.py`).

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
  sidecar's own user and root.
"""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.lowlevel
import zmq

from sidecar.events.records import END_OF_REPLAY, SEQUENCE_BYTES, SNAPSHOT, number_frame
from sidecar.transport.endpoints import bind
from sidecar.transport.zap import ZapAuthenticator
from sidecar.transport.zmq_reader import ZmqReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from sidecar.config.observability import EventsSettings
    from sidecar.events.publisher import EventStream, Told

REQUESTS_WAITING_MAX: Final = 64
REQUESTS_PER_WAKE_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1024
ANSWER_SECONDS_MAX: Final = 30.0
ANSWERS_QUEUED_MAX: Final = 256
"""Batches of an answer that wait for one who asked."""
FULL_POLL_SECONDS: Final = 0.005
LINGER_MILLISECONDS_MAX: Final = 100
IPC_MODE: Final = 0o600
_REQUEST_FRAMES: Final = 3

_logger = logging.getLogger("kvlake.events")


class _Request(NamedTuple):
    peer: bytes
    what: bytes


class EventSockets:
    """Both sockets, bound. Make it on the loop; run `answer` as a task; close it at the end.

    Args:
        endpoint, replay_endpoint: what ZMQ binds.
        secret_key: this side's CURVE key, or nothing.
        broke: told of an error of its own.
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
        self._broke = broke
        self._admitted = frozenset(settings.subscribers)
        self._doorkeepers: list[ZapAuthenticator] = []
        self._contexts: list[zmq.Context[zmq.Socket[bytes]]] = []
        self._listeners: dict[Path, zmq.Socket[bytes]] = {}
        self._uids = tuple(uids)
        try:
            self._pub = self._socket(zmq.PUB, secret_key)
            self._pub.setsockopt(zmq.SNDHWM, settings.queue_batches)
            # A subscription is a message, too.
            self._pub.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
            self.endpoint = self._bind(self._pub, "events.endpoint", endpoint)
            self._router = self._socket(zmq.ROUTER, secret_key)
            self._router.setsockopt(zmq.SNDHWM, ANSWERS_QUEUED_MAX)
            self._router.setsockopt(zmq.RCVHWM, REQUESTS_WAITING_MAX)
            self._router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.replay_endpoint = self._bind(
                self._router, "events.replay_endpoint", replay_endpoint
            )
        except BaseException:
            self._destroy()
            raise
        self._requests: deque[_Request] = deque()
        self._asked = anyio.Event()
        self._zmq_reader = ZmqReader(self._router, self._drain, broke)

    def _socket(self, kind: int, secret_key: bytes) -> zmq.Socket[bytes]:
        # One context each: what answers who may connect is one per context.
        context = zmq.Context(io_threads=1)
        self._contexts.append(context)
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS_MAX)
        for uid in self._uids:
            socket.setsockopt(zmq.IPC_FILTER_UID, uid)
        if secret_key:
            self._doorkeepers.append(
                ZapAuthenticator(
                    context, socket, secret_key, self._admitted.__contains__, self._broke
                )
            )
        return socket

    def _bind(self, socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
        if endpoint.startswith("ipc://"):
            path = Path(endpoint.removeprefix("ipc://"))
            self._listeners[path] = socket
            path.unlink(missing_ok=True)
        where = bind(socket, field, endpoint)
        for path in self._listeners:
            path.chmod(IPC_MODE)
        return where

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files of the sockets that are not over TCP."""
        return tuple(self._listeners)

    def bind_again(self, path: Path) -> None:
        """Make the socket file anew after somebody removed it; connected peers notice nothing."""
        path.unlink(missing_ok=True)
        self._listeners[path].bind(f"ipc://{path}")
        path.chmod(IPC_MODE)

    @property
    def handshakes_refused(self) -> int:
        """CURVE handshakes that failed, on either socket."""
        return sum(keeper.refused.total() for keeper in self._doorkeepers)

    # --- what is told now ----------------------------------------------------------------------

    def publish(self, batch: Told) -> None:
        """Give a batch to every subscriber that can take it."""
        if self._pub.closed:
            return
        frames = (self._topic, number_frame(batch.number), batch.payload)
        # First so that a subscriber that is full is noticed, then for all the others.
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._pub.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self.batches_dropped += 1
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.NOBLOCK)

    # --- what was told before ------------------------------------------------------------------

    def _drain(self) -> None:
        for _ in range(REQUESTS_PER_WAKE_MAX):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        fits = len(frames) == _REQUEST_FRAMES and len(frames[2]) == SEQUENCE_BYTES
        if not fits or len(self._requests) >= REQUESTS_WAITING_MAX:
            self.requests_dropped += 1
            return
        self._requests.append(_Request(frames[0], frames[2]))
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

    async def _send(self, peer: bytes, frames: tuple[bytes, bytes, bytes]) -> bool:
        """Send one message, when there is room for it. False if who asked is gone."""
        while True:
            try:
                self._router.send_multipart((peer, b"", *frames), zmq.NOBLOCK)
            except zmq.Again:
                await anyio.sleep(FULL_POLL_SECONDS)
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return False
            else:
                return True
            finally:
                self._zmq_reader.check()

    def close(self) -> None:
        """Close both; what a subscriber has not taken is lost."""
        self._zmq_reader.close()
        self._destroy()

    def _destroy(self) -> None:
        for keeper in self._doorkeepers:
            keeper.close()
        for context in self._contexts:
            context.destroy()


def _batches(what: bytes, stream: EventStream) -> Iterator[tuple[int, bytes]]:
    if what == SNAPSHOT:
        number = stream.history.next_number - 1
        for payload in stream.snapshot():
            yield number, payload
    else:
        yield from stream.history.since(int.from_bytes(what, "big"))
