"""A Unix socket for KV events: a PUB or ROUTER, to which SUB, DEALER and REQ sockets connect.

Owns subscriptions, and the limits of a subscriber. Does not own connections, reading and sending
(`transport/zmtp_server.py`), nor TCP (`curve_socket.py`).

Invariants: there are `PEERS_MAX` connections at most; a connection has `SUBSCRIPTIONS_MAX`
subscriptions at most, of `REQUEST_BYTES_MAX` each.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from sidecar.transport import zmtp
from sidecar.transport.zmtp_server import Sent, ZmtpPeer, ZmtpServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    SendFrames = Callable[[Sequence[bytes]], Sent]
    """Queues one message for a peer."""
    Received = Callable[[SendFrames, list[bytes]], None]
    """Takes the way back to a peer, and the parts of its request."""

PEERS_MAX: Final = 256
SUBSCRIPTIONS_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1024
RECEIVE_BYTES_MAX: Final = 4096
REQUEST_PARTS: Final = 2
"""Parts of a request: an empty one, and what is asked for. A subscription has one."""
MODE: Final = 0o600


class UnixSocket(ZmtpServer):
    """The bound socket, for the users `uids`.

    Args:
        queued_max: messages queued for one peer.
        received: makes it a ROUTER, and is called with each request. None makes it a PUB.
        broke: receives an error of the socket itself.
    """

    def __init__(
        self,
        path: Path,
        uids: Iterable[int],
        queued_max: int,
        received: Received | None,
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(
            path,
            b"PUB" if received is None else b"ROUTER",
            broke,
            mode=MODE,
            uids=uids,
            peers_max=PEERS_MAX,
            queued_max=queued_max,
            frame_bytes_max=REQUEST_BYTES_MAX,
            parts_max=REQUEST_PARTS,
            receive_bytes_max=RECEIVE_BYTES_MAX,
            heartbeats=True,
        )
        self._received = received
        self._topics: dict[ZmtpPeer, list[bytes]] = {}

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Send a message to all who subscribed to its first frame; False where one is full."""
        message = _message_of(frames)
        taken = True
        for peer, topics in list(self._topics.items()):
            if any(map(frames[0].startswith, topics)):
                taken &= self._queue(peer, message) is not Sent.FULL
        return taken

    def _send(self, peer: ZmtpPeer, frames: Sequence[bytes]) -> Sent:
        return Sent.GONE if peer.closed else self._queue(peer, _message_of(frames))

    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        """Pass on a request; subscribe or unsubscribe. What is neither ends the connection."""
        if self._received is not None:
            self._received(partial(self._send, peer), parts)
            return
        topics = self._topics.setdefault(peer, [])
        kind, topic = (parts[0][:1], parts[0][1:]) if len(parts) == 1 else (b"", b"")
        if kind == b"\1" and len(topics) < SUBSCRIPTIONS_MAX:
            topics.append(topic)
        elif kind != b"\0":
            self._close(peer)
        elif topic in topics:
            topics.remove(topic)

    def _close(self, peer: ZmtpPeer) -> None:
        super()._close(peer)
        self._topics.pop(peer, None)

    def _identified(self, peer: ZmtpPeer) -> None:
        """Subscribers need no identity."""


def _message_of(frames: Sequence[bytes]) -> bytes:
    *before, last = frames
    parts = [zmtp.framed(frame, zmtp.MORE) for frame in before]
    return b"".join((*parts, zmtp.framed(last)))
