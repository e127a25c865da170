"""A TCP socket for KV events: libzmq's PUB or ROUTER, for subscribers with a listed CURVE key.

Owns the socket, its limits, binding it, the answers to libzmq's authentication requests (ZAP, RFC
27), and receiving from libzmq's sockets on the event loop (`ZmqReader`). Does not own keys, which
are in the configuration (`config/sections.py`), what is sent, nor Unix sockets (`sockets.py`).

Invariants: without an admitted key no peer gets past the handshake, whose frames have
`REQUEST_BYTES_MAX` at most; nothing here waits. libzmq buffers all frames of a message of an
accepted subscriber.
"""

import asyncio
import contextlib
from collections.abc import Callable, Generator, Hashable, Sequence
from functools import partial
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85

from sidecar.config.sections import EventsSettings
from sidecar.errors import StartError
from sidecar.transport.zmtp_server import Sent

SendFrames = Callable[[Sequence[bytes]], Sent]
"""Queues one message for a peer."""


class Requester(NamedTuple):
    """The peer that sent a request."""

    peer: Hashable
    send: SendFrames
    close: Callable[[], None]
    """Ends its connection. Over TCP libzmq offers no way to, and this does nothing."""


Received = Callable[[Requester, list[bytes]], None]
"""Takes a peer, and the parts of its request."""

REQUEST_BYTES_MAX: Final = 1024
REQUESTS_QUEUED_MAX: Final = 64
LINGER_MILLISECONDS_MAX: Final = 100
HANDSHAKE_MILLISECONDS_MAX: Final = 5000
MESSAGES_PER_WAKE_MAX: Final = 8
_FAILED: Final = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
"""No CURVE, or garbage; broken off."""


class ZmqReader:
    """Calls `received` on the loop with the parts of each message. Make it on the loop.

    The descriptor is edge-triggered. It becomes readable once, not as long as there are messages,
    and sending consumes the edge too. So after each wake and each send the socket itself is asked
    (EVENTS), and while it has more, another wake is scheduled. `broke` receives an error that
    `received` raises; without, the loop logs that.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        received: Callable[[list[bytes]], None],
        broke: Callable[[BaseException], None] | None,
    ) -> None:
        self._socket = socket
        self._received = received
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._wake)
        # The edge of what arrived since the socket was bound is over.
        self.check()

    def check(self) -> None:
        """Schedule a wake if the socket has messages. Call it after each send."""
        if self._socket.closed or self._scheduled is not None:
            return
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._scheduled = self._loop.call_soon(self._wake)

    def close(self) -> None:
        """Stop reading. Call it before the socket is closed."""
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _wake(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        try:
            with contextlib.suppress(zmq.Again):
                for _ in range(MESSAGES_PER_WAKE_MAX):
                    # `received` may close it.
                    if self._socket.closed:
                        return
                    self._received(self._socket.recv_multipart(zmq.NOBLOCK))
            self.check()
        except BaseException as error:
            if self._broke is None:
                raise
            self._broke(error)


class CurveSocket:
    """The bound socket, for `events.FIELD`. Arguments are those of a `UnixSocket`.

    Raises `StartError` where it cannot be bound, or there is no secret key.
    """

    def __init__(
        self,
        field: str,
        settings: EventsSettings,
        queued_max: int,
        received: Received | None,
        broke: Callable[[BaseException], None],
    ) -> None:
        self.refused = 0
        """CURVE handshakes that failed."""
        self._admitted = frozenset(settings.subscribers)
        self._readers: list[ZmqReader] = []
        # ZAP answers for a whole context, so each socket has its own.
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUB if received is None else zmq.ROUTER)
        self._zap = self._context.socket(zmq.ROUTER)
        try:
            options: dict[int, int | bytes] = {
                zmq.LINGER: LINGER_MILLISECONDS_MAX,
                zmq.SNDHWM: queued_max,
                zmq.RCVHWM: REQUESTS_QUEUED_MAX,
                # A subscription is a message, too.
                zmq.MAXMSGSIZE: REQUEST_BYTES_MAX,
                zmq.CURVE_SERVER: 1,
                zmq.CURVE_SECRETKEY: settings.secret_key(),
                zmq.ZAP_DOMAIN: b"kvlake",
                zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS_MAX,
            }
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind("inproc://zeromq.zap.01")
            monitor = self._socket.get_monitor_socket(_FAILED)
            self._readers.append(ZmqReader(self._zap, self._authenticate, broke))
            self._readers.append(ZmqReader(monitor, self._handshake_failed, broke))
            self.endpoint = _bind(self._socket, f"events.{field}", getattr(settings, field))
            if received is not None:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

                def pass_on(parts: list[bytes]) -> None:
                    peer, *request = parts
                    requester = Requester(peer, partial(self._send, peer, reader), lambda: None)
                    received(requester, request)

                reader = ZmqReader(self._socket, pass_on, broke)
                self._readers.append(reader)
        except BaseException:
            self.close()
            raise

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Send a message to all who subscribed to its first frame; False where one became full.

        libzmq leaves one that is full out until it has room: what it misses meanwhile is not seen.
        """
        # The first attempt detects a subscriber that is full, the second serves all the others.
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return False
        return True

    def _send(self, peer: bytes, reader: ZmqReader, frames: Sequence[bytes]) -> Sent:
        try:
            self._socket.send_multipart((peer, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            reader.check()
        return Sent.OK

    def _authenticate(self, parts: list[bytes]) -> None:
        """Answer one request: address, "", version, id, domain, peer, routing id, "CURVE", key."""
        address, empty, version, request_id, *_, key = parts
        name = z85.encode(key).decode()
        status = (b"200", b"OK", name.encode())
        if name not in self._admitted:
            self.refused += 1
            status = (b"400", b"unknown key", b"")
        self._zap.send_multipart((address, empty, version, request_id, *status, b""), zmq.NOBLOCK)

    def _handshake_failed(self, _: list[bytes]) -> None:
        self.refused += 1

    def close(self) -> None:
        """Close it, after `LINGER_MILLISECONDS_MAX` at most."""
        for reader in self._readers:
            reader.close()
        self._socket.disable_monitor()
        self._context.destroy()


@contextlib.contextmanager
def bound(field: str, endpoint: str) -> Generator[None]:
    """Bind an endpoint for a moment, as a trial. Raises `StartError`."""
    context = zmq.Context(io_threads=1)
    try:
        _bind(context.socket(zmq.ROUTER), field, endpoint)
        yield
    finally:
        context.destroy(linger=0)


def _bind(socket: zmq.Socket[bytes], field: str, endpoint: str) -> str:
    """Bind a socket; returns its address."""
    socket.setsockopt(zmq.IPV6, int("[" in endpoint))
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise StartError(
            f"{field}={endpoint} cannot be bound: {error}; it must be an address of this "
            "machine, with a port that is free (or 0 for any)"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
