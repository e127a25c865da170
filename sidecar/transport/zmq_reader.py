"""The descriptor of a ZMQ socket, on the event loop.

Owns knowing when a socket has something to receive. Does not own receiving it.

Invariant: the descriptor is edge-triggered. It becomes readable once, not as long as there is
something to receive, and sending eats the edge too. So after every drain and every send the socket
itself is asked (EVENTS), and while it says there is more, another drain is scheduled.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Callable


class ZmqReader:
    """Calls `drain` on the loop whenever the socket may have something.

    Args:
        drain: receives some of what is there, and need not receive all.
        broke: told of an error of `drain`; the loop would only log it, and go on with a server
            that is wrong.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        drain: Callable[[], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self._socket = socket
        self._drain = drain
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled: asyncio.Handle | None = None
        self._loop.add_reader(self._fd, self._ring)
        # What arrived between bind and here has rung already.
        self.check()

    def check(self) -> None:
        """Schedule a drain if the socket holds more. To be called after every send."""
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN and self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._ring)

    def close(self) -> None:
        """Stop listening to it. To be called before the socket is closed."""
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _ring(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        try:
            self._drain()
            self.check()
        except BaseException as error:
            self._broke(error)
