"""Jobs over TCP: one ROUTER on which all clients' jobs come in and all answers go out.

Owns the socket, its limits, and draining it from the event loop. Does not own who a routing id
belongs to, what a frame says, nor the Unix socket (`job_socket.py`).

Invariants:

* One drain takes at most `FRAMES_PER_WAKE_MAX` frames and begins none after `WAKE_SECONDS_MAX`;
  then the loop runs all else that is ready. ZMQ takes the messages of different peers in turn.
* A message of more than one part is told as one of two; its parts are thrown away. (libzmq has kept
  all of them until the last: only clients with a session's key can send any.)
* Sending never waits. A peer that is gone or does not read is the caller's to deal with.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import zmq

from sidecar.protocol import FRAME_BYTES_MAX
from sidecar.transport.endpoints import bind
from sidecar.transport.zap import ZapAuthenticator
from sidecar.transport.zmq_reader import ZmqReader

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

FRAMES_PER_WAKE_MAX: Final = 256
WAKE_SECONDS_MAX: Final = 0.002
CUT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""ZMQ cuts a peer off at this size. Between it and FRAME_BYTES_MAX a frame is still answered."""
LINGER_MILLISECONDS_MAX: Final = 200


class Sent(enum.Enum):
    """What became of a message."""

    OK = "ok"
    GONE = "gone"
    """No peer has this routing id (any more, or yet)."""
    FULL = "full"
    """The peer does not read: `replies_queued_max` messages wait for it."""


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """TCP with CURVE: where, this side's secret key, and whose keys are welcome now."""

    endpoint: str
    secret_key: bytes = field(repr=False)
    admitted: Callable[[str], bool]


class Router:
    """The bound socket. `received(routing_id, parts, user)` is called on the loop, once a message.

    Args:
        curve: the TCP address that it binds, and the keys of those who may connect.
        received: `user` is the key that the sender's connection proved to have.
        broke: told of an error of its own.
        frames_queued_max: messages of one peer that wait here; more of them wait in the peer.
        replies_queued_max: messages that wait to be sent to one peer; more are refused.
    """

    def __init__(
        self,
        curve: CurveSettings,
        received: Callable[[bytes, list[bytes], str], None],
        broke: Callable[[BaseException], None],
        *,
        frames_queued_max: int,
        replies_queued_max: int,
    ) -> None:
        self.endpoint = curve.endpoint
        self.public_key = b""
        """What clients need to connect."""
        self._authenticator: ZapAuthenticator | None = None
        self._parts: list[zmq.Frame] = []
        """The address and first part of a message of which more is to come."""
        self._received = received
        self._broke = broke
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, CUT_BYTES_MAX)
            self._socket.setsockopt(zmq.RCVHWM, frames_queued_max)
            self._socket.setsockopt(zmq.SNDHWM, replies_queued_max)
            self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS_MAX)
            self._bind(curve)
        except BaseException:
            self._dismiss()
            self._context.destroy(linger=0)
            raise
        self._zmq_reader = ZmqReader(self._socket, self._drain, broke)

    def _dismiss(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()

    def _bind(self, curve: CurveSettings) -> None:
        self.public_key = zmq.curve_public(curve.secret_key)
        self._authenticator = ZapAuthenticator(
            self._context, self._socket, curve.secret_key, curve.admitted, self._broke
        )
        self.endpoint = bind(self._socket, "runtime.endpoint", curve.endpoint)

    @property
    def handshakes_refused(self) -> Mapping[str, int]:
        """Connections that failed to prove a welcome key, by what failed."""
        return {} if self._authenticator is None else self._authenticator.refused

    def forget(self, token: bytes) -> None:
        """A session has ended: its key is not let in again. libzmq cannot end one connection."""

    def send(self, routing_id: bytes, payload: bytes) -> Sent:
        """Queue one message for a peer, or say why not."""
        try:
            self._socket.send_multipart((routing_id, payload), zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        finally:
            self._zmq_reader.check()
        return Sent.OK

    def close(self) -> None:
        """Stop draining, send out what is queued (within the linger), close."""
        self._zmq_reader.close()
        self._dismiss()
        self._context.destroy()

    def _receive(self) -> tuple[bytes, list[bytes], str] | None:
        """One frame; the whole message with its last one."""
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        if frame.more:
            self._parts = [*self._parts, frame][:3]
            return None
        parts, self._parts = self._parts, []
        payload = [frame.bytes] if len(parts) < 2 else [b"", b""]
        # libzmq tells with each frame which key the doorkeeper let its connection in for.
        return parts[0].bytes, payload, str(frame.get("User-Id"))

    def _drain(self) -> None:
        until = time.monotonic() + WAKE_SECONDS_MAX
        for _ in range(FRAMES_PER_WAKE_MAX):
            try:
                message = self._receive()
            except zmq.Again:
                break
            if message is not None:
                self._received(*message)
            if time.monotonic() > until:
                break
