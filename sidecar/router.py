"""The ZMQ side: one ROUTER on which all clients' jobs come in and all answers go out.

Owns the socket, its limits, and draining it from the event loop. Does not own who a routing id
belongs to, nor what a frame says.

Invariants:

* The descriptor of a ZMQ socket is edge-triggered: it becomes readable once, not as long as there
  is something to receive. So after every wake-up and every send the socket itself is asked
  (EVENTS), and while it says there is more, another drain is scheduled.
* One drain takes at most `FRAMES_PER_WAKE_MAX` frames, then the loop runs everything else that is
  ready; ZMQ takes the frames of different peers in turn.
* Sending never waits. A peer that is gone or does not read is the caller's to deal with.
"""

from __future__ import annotations

import asyncio
import enum
from typing import TYPE_CHECKING, Final

import zmq

from sidecar.protocol import FRAME_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

FRAMES_PER_WAKE_MAX: Final = 256
RECEIVE_QUEUE_FRAMES_MAX: Final = 256
SEND_QUEUE_FRAMES_MAX: Final = 4096
CUT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""ZMQ cuts a peer off at this size. Between it and FRAME_BYTES_MAX a frame is still answered."""
LINGER_MILLISECONDS_MAX: Final = 200
IPC_PATH_MODE: Final = 0o600


class Sent(enum.Enum):
    """What became of a message."""

    OK = "ok"
    GONE = "gone"
    """No peer has this routing id (any more, or yet)."""
    FULL = "full"
    """The peer does not read: `SEND_QUEUE_FRAMES_MAX` messages wait for it."""


class Router:
    """The bound socket. `received(routing_id, parts)` is called for each message, on the loop."""

    def __init__(
        self,
        path: Path,
        received: Callable[[bytes, list[bytes]], None],
        broke: Callable[[BaseException], None],
        *,
        mode: int = IPC_PATH_MODE,
        uids: Sequence[int] = (),
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._mode = mode
        self._received = received
        self._broke = broke
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        try:
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.MAXMSGSIZE, CUT_BYTES_MAX)
            self._socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_FRAMES_MAX)
            self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_FRAMES_MAX)
            self._socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS_MAX)
            # The kernel says who connects (SO_PEERCRED), as on the attach socket.
            for uid in uids:
                self._socket.setsockopt(zmq.IPC_FILTER_UID, uid)
            self._socket.bind(self.endpoint)
            path.chmod(mode)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._loop = asyncio.get_running_loop()
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._drain)
        # What arrived between bind and here has rung the bell already.
        self._check()

    def bind_again(self) -> None:
        """Make the socket file anew after somebody removed it; connected peers notice nothing.

        The old listener stays beside it: ending that one would remove the new file, later.
        """
        self._socket.bind(self.endpoint)
        self._path.chmod(self._mode)

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
            self._check()
        return Sent.OK

    def close(self) -> None:
        """Stop draining, send out what is queued (within the linger), close."""
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()
        self._context.destroy()

    def _check(self) -> None:
        """Schedule a drain if the socket holds more. Sending eats the edge, so it asks too."""
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        try:
            for _ in range(FRAMES_PER_WAKE_MAX):
                try:
                    routing_id, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self._received(routing_id, parts)
            self._check()
        except BaseException as error:
            # The loop would only log it, and go on with a server that is wrong.
            self._broke(error)
