"""Unix sockets for KV events: what SUB, DEALER and REQ sockets of ZMQ connect to.

Owns subscriptions, and the limits of a subscriber. Does not own connections, reading and sending
(`transport/zmtp_server.py`), nor TCP (`curve_socket.py`).

Invariants: there are `PEERS_MAX` connections at most; a connection has `SUBSCRIPTIONS_MAX`
subscriptions at most, of `REQUEST_BYTES_MAX` each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from sidecar.transport import zmtp
from sidecar.transport.zmtp_server import Sent, ZmtpPeer, ZmtpServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

PEERS_MAX: Final = 256
SUBSCRIPTIONS_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1024
RECEIVE_BYTES_MAX: Final = 4096
REQUEST_PARTS: Final = 2
"""Parts of a request: an empty one, and what is asked for. A subscription has one."""
MODE: Final = 0o600


class _EventSocket(ZmtpServer):
    def __init__(
        self,
        path: Path,
        socket_type: bytes,
        uids: Iterable[int],
        queued_max: int,
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(
            path,
            socket_type,
            broke,
            mode=MODE,
            queued_max=queued_max,
            frame_bytes_max=REQUEST_BYTES_MAX,
            parts_max=REQUEST_PARTS,
            receive_bytes_max=RECEIVE_BYTES_MAX,
            heartbeats=True,
        )
        self._uids = frozenset(uids)

    def _admits(self, uid: int) -> bool:
        return uid in self._uids and len(self._peers) < PEERS_MAX

    def _identified(self, peer: ZmtpPeer) -> None:
        """Subscribers need no identity."""


class UnixPub(_EventSocket):
    """A PUB socket for the users `uids`; `queued_max` messages are queued for one subscriber."""

    def __init__(
        self,
        path: Path,
        uids: Iterable[int],
        queued_max: int,
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(path, b"PUB", uids, queued_max, broke)
        self._topics: dict[ZmtpPeer, list[bytes]] = {}

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Send a message to all who subscribed to its first frame; False where one is full."""
        message = _message_of(frames)
        taken = True
        for peer, topics in list(self._topics.items()):
            if any(map(frames[0].startswith, topics)):
                taken &= self._queue(peer, message) is not Sent.FULL
        return taken

    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        """Subscribe or unsubscribe; any other message ends the connection."""
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


class UnixRouter(_EventSocket):
    """A ROUTER socket for the users `uids`; `received` is called with each peer's requests."""

    def __init__(
        self,
        path: Path,
        uids: Iterable[int],
        queued_max: int,
        received: Callable[[ZmtpPeer, list[bytes]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        super().__init__(path, b"ROUTER", uids, queued_max, broke)
        self._received = received

    def send(self, peer: ZmtpPeer, frames: Sequence[bytes]) -> Sent:
        """Queue one message for a peer."""
        return Sent.GONE if peer.closed else self._queue(peer, _message_of(frames))

    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        self._received(peer, parts)


def _message_of(frames: Sequence[bytes]) -> bytes:
    *before, last = frames
    parts = [zmtp.framed(frame, zmtp.MORE) for frame in before]
    return b"".join((*parts, zmtp.framed(last)))
