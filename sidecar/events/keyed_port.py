"""A TCP port for KV events: libzmq's PUB or ROUTER, for subscribers with a listed CURVE key.

Owns the socket, its limits, and draining it. Does not own who is let in (`transport/zap.py`), what
is sent (`sockets.py`), nor Unix sockets (`unix_port.py`).

Invariant: without a key nobody gets past the handshake, whose frames are of `REQUEST_BYTES_MAX` at
most. libzmq keeps all frames of a message of a subscriber that is let in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import zmq

from sidecar.events.unix_port import REQUEST_BYTES_MAX
from sidecar.transport.endpoints import bind
from sidecar.transport.job_socket import Sent
from sidecar.transport.zap import ZapAuthenticator
from sidecar.transport.zmq_reader import ZmqReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.config.observability import EventsSettings

REQUESTS_QUEUED_MAX: Final = 64
REQUESTS_PER_WAKE_MAX: Final = 64
LINGER_MILLISECONDS_MAX: Final = 100


class KeyedPort:
    """The bound socket. Raises `StartError` where it cannot be bound.

    Args:
        kind: `zmq.PUB` or `zmq.ROUTER`.
        field: of the configuration, with `endpoint` as its value.
        secret_key: this side's CURVE key.
        queued_max: messages that wait for one peer; more are refused.
        took: hears of each message to a ROUTER: of whom, and its parts.
        broke: told of an error of its own.
    """

    def __init__(
        self,
        kind: int,
        field: str,
        endpoint: str,
        settings: EventsSettings,
        secret_key: bytes,
        queued_max: int,
        took: Callable[[bytes, list[bytes]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._took = took
        # One context each: what answers who may connect is one per context.
        self._context = zmq.Context(io_threads=1)
        self._authenticator: ZapAuthenticator | None = None
        self._zmq_reader: ZmqReader | None = None
        try:
            self._socket = self._context.socket(kind)
            self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS_MAX)
            self._socket.setsockopt(zmq.SNDHWM, queued_max)
            self._socket.setsockopt(zmq.RCVHWM, REQUESTS_QUEUED_MAX)
            # A subscription is a message, too.
            self._socket.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES_MAX)
            admitted = frozenset(settings.subscribers).__contains__
            self._authenticator = ZapAuthenticator(
                self._context, self._socket, secret_key, admitted, broke
            )
            if kind == zmq.ROUTER:
                self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = bind(self._socket, field, endpoint)
            if kind == zmq.ROUTER:
                self._zmq_reader = ZmqReader(self._socket, self._drain, broke)
        except BaseException:
            self.close()
            raise

    @property
    def refused(self) -> int:
        """CURVE handshakes that failed."""
        return 0 if self._authenticator is None else self._authenticator.refused.total()

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Give a message to all who subscribed to its first frame; False where one is full."""
        if self._socket.closed:
            return True
        # First so that a subscriber that is full is noticed, then for all the others.
        self._socket.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._socket.setsockopt(zmq.XPUB_NODROP, 0)
            self._socket.send_multipart(frames, zmq.NOBLOCK)
            return False
        return True

    def send(self, peer: bytes, frames: Sequence[bytes]) -> Sent:
        """Queue one message for a peer, or say why not."""
        try:
            self._socket.send_multipart((peer, *frames), zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            if self._zmq_reader is not None:
                self._zmq_reader.check()
        return Sent.OK

    def _drain(self) -> None:
        for _ in range(REQUESTS_PER_WAKE_MAX):
            try:
                peer, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._took(peer, parts)

    def close(self) -> None:
        """Close it; what a subscriber has not taken within the linger is lost."""
        if self._zmq_reader is not None:
            self._zmq_reader.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy()
