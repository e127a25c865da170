"""Receiving from a ZMQ socket on the event loop.

Owns knowing when a socket has messages, and receiving them. Does not own the socket.

Invariant: the descriptor is edge-triggered. It becomes readable once, not as long as there are
messages, and sending consumes the edge too. So after each wake and each send the socket itself is
asked (EVENTS), and while it has more, another wake is scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable

MESSAGES_PER_WAKE_MAX: Final = 64


class ZmqReader:
    """Calls `received` on the loop with the parts of each message. Make it on the loop.

    `broke` receives an error that it raises; without, the loop logs that.
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
                    self._received(self._socket.recv_multipart(zmq.NOBLOCK))
            self.check()
        except BaseException as error:
            if self._broke is None:
                raise
            self._broke(error)
