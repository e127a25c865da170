"""A Unix socket that ZMQ sockets connect to: ZMTP, read frame by frame.

Owns connections: their handshake, reading, and sending, with the part of ZMTP 3.0 and its NULL
mechanism that this needs (https://rfc.zeromq.org/spec/23). Does not own accepting connections
(`unix_socket.py`), nor what messages mean: subclasses pass them on (`JobSocket`, and for events
`events/sockets.py`). libzmq's own sockets are not used because they buffer every part of a message
until the last one, without a limit (ADR 0034).

Invariants:

* The kernel names the user of a connection (SO_PEERCRED) before a byte of it is read.
* A connection buffers at most one frame of `frame_bytes_max` (1 KiB before its READY) and the first
  `parts_max` parts of a message.
* One turn of the loop takes `WAKE_SECONDS_MAX` and a frame at most; connections take turns.
* Sending never waits. What the kernel does not take is queued, up to `queued_max` messages, and no
  further one from `queued_bytes_max` bytes on.
* Before a message for jobs is read, its connection has named the token of a live session of its
  user, which no other connection holds.
"""

import abc
import asyncio
import contextlib
import enum
import math
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from sidecar.protocol import FRAME_BYTES_MAX
from sidecar.protocol.peer import Peer
from sidecar.transport.unix_socket import UnixListener

WAKE_SECONDS_MAX: Final = 0.002
LINGER_SECONDS_MAX: Final = 0.2
HANDSHAKE_SECONDS_MAX: Final = 5.0
HANDSHAKES_MAX: Final = 64
"""Connections that have not sent a READY yet. Beyond it the oldest is closed."""
FRAMES_PER_TURN_MAX: Final = 32
READY_BYTES_MAX: Final = 1024
CUT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""A longer frame for jobs ends its connection. One between FRAME_BYTES_MAX and this is answered
with an error."""

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame."""
GREETING_BYTES: Final = 64
_MECHANISM: Final = slice(12, 32)
_NULL: Final = b"NULL".ljust(20, b"\0")
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + _NULL + bytes(32)
_READY: Final = b"\x05READY"
_PING: Final = b"\x04PING"


class ZmtpError(Exception):
    """The received bytes violate the protocol; the connection ends."""


class Sent(enum.Enum):
    """The result of sending a message."""

    OK = "ok"
    GONE = "gone"
    """The peer is not connected."""
    FULL = "full"
    """The peer does not read: `queued_max` messages are queued for it, or `queued_bytes_max`."""


@dataclass(slots=True, eq=False)
class ZmtpPeer:
    """One connection."""

    sock: socket.socket
    uid: int
    identity: bytes = b""
    greeted: bool = False
    inbox: bytearray = field(default_factory=bytearray)
    outbox: deque[memoryview] = field(default_factory=deque[memoryview])
    outbox_bytes: int = 0
    num_parts: int = 0
    """Parts received of an incomplete message."""
    parts: list[bytes] = field(default_factory=list[bytes])
    """The parts of it that are kept."""
    closed: bool = False


class ZmtpServer(abc.ABC):
    """The bound socket. Make it on the event loop.

    Args:
        socket_type: ZMQ type that peers are told, such as `PUB`.
        broke: receives an error of the server itself.
        uids: users who may connect.
        queued_max: messages queued for one peer.
        queued_bytes_max: bytes queued for one peer, beyond which no message is added.
    """

    peers_max: ClassVar[float] = math.inf
    """Connections; more are closed at once."""
    frame_bytes_max: ClassVar[int]
    """A longer frame ends its connection."""
    parts_max: ClassVar[int] = 1
    """Parts of a message that are kept; a longer message is received as no parts."""
    receive_bytes_max: ClassVar[int]
    """Bytes read at a time."""
    heartbeats: ClassVar[bool] = False
    """Answer PING, and ignore other commands after the READY. Otherwise they end the connection."""

    def __init__(
        self,
        path: Path,
        socket_type: bytes,
        broke: Callable[[BaseException], None],
        *,
        mode: int,
        uids: Iterable[int],
        queued_max: int,
        queued_bytes_max: float = math.inf,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.users_refused = 0
        """Connections of other users, closed before they were read."""
        self._hello = hello(socket_type)
        self._broke = broke
        self._uids = frozenset(uids)
        self._queued_max = queued_max
        self._queued_bytes_max = queued_bytes_max
        self._loop = asyncio.get_running_loop()
        self._peers: dict[ZmtpPeer, None] = {}
        self._handshaking: dict[ZmtpPeer, asyncio.TimerHandle] = {}
        """Connections without an accepted READY, the oldest first, with what closes them."""
        self._readable: dict[ZmtpPeer, None] = {}
        """In the order of their turns."""
        self._turn: asyncio.Handle | None = None
        self.listener = UnixListener(path, mode)
        self.listener.start(self._accepted, broke)

    @abc.abstractmethod
    def _identified(self, peer: ZmtpPeer) -> None:
        """Handle a READY; `peer.identity` is set. Raises `ZmtpError` to end the connection."""

    @abc.abstractmethod
    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        """Handle a message; `parts` is empty where it had more than `parts_max`."""

    def close(self) -> None:
        """Send what is queued, for `LINGER_SECONDS_MAX` at most, and close."""
        if self._turn is not None:
            self._turn.cancel()
        self.listener.close()
        until = time.monotonic() + LINGER_SECONDS_MAX
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                while peer.outbox:
                    peer.sock.settimeout(max(0.001, until - time.monotonic()))
                    peer.sock.sendall(peer.outbox.popleft())
            self._close(peer)

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._broke(error)

    def _accepted(self, sock: socket.socket, by: Peer) -> None:
        served = by.uid in self._uids
        self.users_refused += not served
        if not served or len(self._peers) >= self.peers_max:
            sock.close()
            return
        if len(self._handshaking) >= HANDSHAKES_MAX:
            self._close(next(iter(self._handshaking)))
        peer = ZmtpPeer(sock, by.uid)
        self._peers[peer] = None
        deadline = self._loop.call_later(HANDSHAKE_SECONDS_MAX, self._close, peer)
        self._handshaking[peer] = deadline
        self._loop.add_reader(sock, self._due, peer)
        self._queue(peer, self._hello)

    def _close(self, peer: ZmtpPeer) -> None:
        if peer.closed:
            return
        peer.closed = True
        del self._peers[peer]
        self._end_handshake(peer)
        peer.outbox.clear()
        self._loop.remove_reader(peer.sock)
        self._loop.remove_writer(peer.sock)
        peer.sock.close()

    def _end_handshake(self, peer: ZmtpPeer) -> None:
        if (deadline := self._handshaking.pop(peer, None)) is not None:
            deadline.cancel()

    def _queue(self, peer: ZmtpPeer, message: bytes) -> Sent:
        full = peer.outbox_bytes >= self._queued_bytes_max
        if full or len(peer.outbox) >= self._queued_max:
            return Sent.FULL
        peer.outbox.append(memoryview(message))
        peer.outbox_bytes += len(message)
        if len(peer.outbox) == 1:
            self._flush(peer)
        return Sent.GONE if peer.closed else Sent.OK

    def _flush(self, peer: ZmtpPeer) -> None:
        if peer.closed:
            return
        try:
            while peer.outbox:
                sent = peer.sock.send(peer.outbox[0], socket.MSG_NOSIGNAL)
                peer.outbox_bytes -= sent
                if sent < len(peer.outbox[0]):
                    peer.outbox[0] = peer.outbox[0][sent:]
                else:
                    peer.outbox.popleft()
        except BlockingIOError:
            self._loop.add_writer(peer.sock, self._guarded, self._flush, peer)
        except OSError:
            self._close(peer)
        else:
            self._loop.remove_writer(peer.sock)

    def _due(self, peer: ZmtpPeer) -> None:
        self._readable[peer] = None
        if self._turn is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn = None
        if not self._readable:
            return
        # A turn that runs out of time continues in the loop's next one, behind all else there.
        self._turn = self._loop.call_soon(self._begin_turn)
        self._guarded(self._read_all, time.monotonic() + WAKE_SECONDS_MAX)

    def _read_all(self, until: float) -> None:
        for peer in list(self._readable):
            del self._readable[peer]
            if not peer.closed and self._read(peer) and not peer.closed:
                self._readable[peer] = None
            if time.monotonic() > until:
                return

    def _read(self, peer: ZmtpPeer) -> bool:
        """Take some frames of a peer; returns whether there may be more of them here."""
        try:
            if not self._take(peer):
                return True
            data = peer.sock.recv(self.receive_bytes_max)
            if data:
                peer.inbox += data
                return not self._take(peer)
        except BlockingIOError:
            return False
        except (OSError, ZmtpError):
            pass
        self._close(peer)
        return False

    def _take(self, peer: ZmtpPeer) -> bool:
        """Take up to `FRAMES_PER_TURN_MAX` frames of the inbox; True if no whole one is left."""
        at = 0
        try:
            if not peer.greeted:
                if len(peer.inbox) < GREETING_BYTES:
                    return True
                check_greeting(bytes(peer.inbox[:GREETING_BYTES]))
                peer.greeted, at = True, GREETING_BYTES
            for _ in range(FRAMES_PER_TURN_MAX):
                greets = peer in self._handshaking
                bytes_max = READY_BYTES_MAX if greets else self.frame_bytes_max
                frame = frame_at(peer.inbox, at, bytes_max)
                if frame is None:
                    return True
                flags, first, at = frame
                with memoryview(peer.inbox) as view:
                    payload = bytes(view[first:at])
                self._frame(peer, flags, payload)
                if peer.closed:
                    return True
            return False
        finally:
            del peer.inbox[:at]

    def _frame(self, peer: ZmtpPeer, flags: int, payload: bytes) -> None:
        if peer in self._handshaking:
            if not flags & COMMAND:
                raise ZmtpError
            peer.identity = identity_in(payload)
            self._identified(peer)
            self._end_handshake(peer)
        elif flags & COMMAND:
            if not self.heartbeats:
                raise ZmtpError
            if (pong := pong_to(payload)) is not None:
                self._queue(peer, pong)
        else:
            more = flags & MORE
            peer.num_parts += 1
            if peer.num_parts + more <= self.parts_max:
                peer.parts.append(payload)
            if not more:
                parts = peer.parts if peer.num_parts <= self.parts_max else []
                peer.num_parts, peer.parts = 0, []
                self._message(peer, parts)


class JobSocket(ZmtpServer):
    """The Unix socket for jobs: what the DEALER sockets of connectors connect to.

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


def framed(payload: bytes, flags: int = 0) -> bytes:
    """One frame."""
    if len(payload) > 255:
        return struct.pack(">BQ", flags | LONG, len(payload)) + payload
    return bytes([flags, len(payload)]) + payload


def hello(socket_type: bytes) -> bytes:
    """Greeting and READY of this side."""
    properties = (
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", socket_type), (b"Identity", b""))
    )
    return _GREETING + framed(_READY + b"".join(properties), COMMAND)


def pong_to(command: bytes) -> bytes | None:
    """The answer to a heartbeat; None to any other command."""
    if not command.startswith(_PING):
        return None
    # Behind its name a PING has 2 bytes of a time to live, then a context of at most 16.
    context = command[len(_PING) + 2 :][:16]
    return framed(b"\x04PONG" + context, COMMAND)


def check_greeting(greeting: bytes) -> None:
    """Raise `ZmtpError` unless these 64 bytes greet in this protocol."""
    if greeting[0] != 0xFF or greeting[10] < 3 or greeting[_MECHANISM] != _NULL:
        raise ZmtpError


def frame_at(inbox: bytearray, at: int, bytes_max: int) -> tuple[int, int, int] | None:
    """Flags, begin and end of the frame at `at`; None while it is not all there.

    Raises `ZmtpError` for one of more than `bytes_max`.
    """
    if len(inbox) < at + 2:
        return None
    flags = inbox[at]
    first = at + (9 if flags & LONG else 2)
    if len(inbox) < first:
        return None
    size = int.from_bytes(inbox[at + 1 : first], "big")
    if size > bytes_max:
        raise ZmtpError
    return (flags, first, first + size) if len(inbox) >= first + size else None


def identity_in(ready: bytes) -> bytes:
    """The routing id in a READY command. Raises `ZmtpError` where it is none."""
    if not ready.startswith(_READY):
        raise ZmtpError
    at = len(_READY)
    while at < len(ready):
        name = ready[at + 1 : at + 1 + ready[at]]
        at += 1 + len(name)
        if len(ready) < at + 4:
            raise ZmtpError
        size = int.from_bytes(ready[at : at + 4], "big")
        at += 4
        if len(ready) < at + size:
            raise ZmtpError
        if name.lower() == b"identity":
            return ready[at : at + size]
        at += size
    return b""
