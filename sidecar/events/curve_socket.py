"""A TCP socket for KV events: libzmq's PUB or ROUTER, for subscribers with a listed CURVE key.

Owns the socket, its limits, and binding it. Does not own authentication (`transport/zap.py`), what
is sent (`sockets.py`), nor Unix sockets (`unix_sockets.py`).

Invariant: without a key no peer gets past the handshake, whose frames have `REQUEST_BYTES_MAX` at
most. libzmq buffers all frames of a message of an accepted subscriber.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import zmq

from sidecar.errors import StartError
from sidecar.events.unix_sockets import REQUEST_BYTES_MAX
from sidecar.transport.zap import ZapAuthenticator
from sidecar.transport.zmq_reader import ZmqReader
from sidecar.transport.zmtp_server import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from sidecar.config.observability import EventsSettings
    from sidecar.events.unix_sockets import Received

REQUESTS_QUEUED_MAX: Final = 64
LINGER_MILLISECONDS_MAX: Final = 100


class CurveSocket:
    """The bound socket, for `events.FIELD`. Arguments are those of a `UnixSocket`.

    Raises `StartError` where it cannot be bound.
    """

    def __init__(
        self,
        field: str,
        endpoint: str,
        settings: EventsSettings,
        secret_key: bytes,
        queued_max: int,
        received: Received | None,
        broke: Callable[[BaseException], None],
    ) -> None:
        # ZAP answers for a whole context, so each socket has its own.
        self._context = zmq.Context(io_threads=1)
        self._authenticator: ZapAuthenticator | None = None
        self._reader: ZmqReader | None = None
        try:
            self._socket = self._context.socket(zmq.PUB if received is None else zmq.ROUTER)
            self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS_MAX)
            self._socket.setsockopt(zmq.SNDHWM, queued_max)
            self._socket.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED_MAX)
            # A subscription is a message, too.
            self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
            admitted = frozenset(settings.subscribers).__contains__
            self._authenticator = ZapAuthenticator(
                self._context, self._socket, secret_key, admitted, broke
            )
            self.endpoint = _bind(self._socket, f"events.{field}", endpoint)
            if received is not None:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
                self._reader = ZmqReader(
                    self._socket,
                    lambda parts: received(partial(self._send, parts[0]), parts[1:]),
                    broke,
                )
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """CURVE handshakes that failed."""
        return 0 if self._authenticator is None else self._authenticator.refused.total()

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Send a message to all who subscribed to its first frame; False where one is full."""
        # The first attempt detects a subscriber that is full, the second serves all the others.
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return False
        return True

    def _send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        try:
            self._socket.send_multipart((peer, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            if self._reader is not None:
                self._reader.check()
        return Sent.OK

    def close(self) -> None:
        """Close it, after `LINGER_MILLISECONDS_MAX` at most."""
        if self._reader is not None:
            self._reader.close()
        if self._authenticator is not None:
            self._authenticator.close()
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
