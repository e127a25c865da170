"""The Unix socket for jobs: what the DEALER sockets of connectors connect to.

Owns which connection belongs to which session. Does not own connections, reading and sending
(`zmtp_server.py`), sessions, nor the content of a message.

Invariant: before a message of a connection is read, the connection has named the token of a live
session of its user, which no other connection holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from sidecar.protocol import FRAME_BYTES_MAX
from sidecar.transport.zmtp_server import Sent, ZmtpError, ZmtpPeer, ZmtpServer, framed

CUT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""A longer frame ends its connection. A frame between FRAME_BYTES_MAX and this is answered with an
error."""


class JobSocket(ZmtpServer):
    """The bound socket.

    Args:
        received: called with the token and the parts of each message; a message of more than one
            part has none here.
        admitted: whether a session with this token exists and belongs to this user.
        refused: called with an identity that is no session's.
        broke: receives an error of the socket itself.
    """

    frame_bytes_max = CUT_BYTES_MAX
    receive_bytes_max = 256 * 1024

    def __init__(
        self,
        path: Path,
        received: Callable[[bytes, list[bytes]], None],
        admitted: Callable[[bytes, int], bool],
        refused: Callable[[bytes], None],
        broke: Callable[[BaseException], None],
        *,
        mode: int,
        uids: Iterable[int],
        replies_queued_max: int,
    ) -> None:
        super().__init__(
            path, b"ROUTER", broke, mode=mode, uids=uids, queued_max=replies_queued_max
        )
        self._received = received
        self._admitted = admitted
        self._refused = refused
        self._by_token: dict[bytes, ZmtpPeer] = {}

    def forget(self, token: bytes) -> None:
        """Close the connection of a session that has ended."""
        if (peer := self._by_token.get(token)) is not None:
            self._close(peer)

    def send(self, token: bytes, payload: bytes) -> Sent:
        """Queue one message for a session."""
        peer = self._by_token.get(token)
        return Sent.GONE if peer is None else self._queue(peer, framed(payload))

    def _identified(self, peer: ZmtpPeer) -> None:
        token = peer.identity
        if not self._admitted(token, peer.uid) or token in self._by_token:
            self._refused(token)
            raise ZmtpError
        self._by_token[token] = peer

    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        self._received(peer.identity, parts)

    def _close(self, peer: ZmtpPeer) -> None:
        super()._close(peer)
        # A refused peer may have named the token of another.
        if self._by_token.get(peer.identity) is peer:
            del self._by_token[peer.identity]
