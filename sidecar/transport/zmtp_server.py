"""A Unix socket that ZMQ sockets connect to: ZMTP, read frame by frame.

Owns the listening socket, its connections, their handshake, reading, and sending. Does not own
framing (`zmtp.py`), nor what messages mean: subclasses do (`job_socket.py`,
`events/unix_sockets.py`).

Invariants:

* The kernel names the user of a connection (SO_PEERCRED) before a byte of it is read.
* A connection buffers at most one frame of `frame_bytes_max` (1 KiB before its READY) and the first
  `parts_max` parts of a message.
* One turn of the loop takes `WAKE_SECONDS_MAX` and a frame at most; connections take turns.
* Sending never waits. What the kernel does not take is queued, up to `queued_max` messages.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import enum
import errno
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from sidecar.transport import zmtp
from sidecar.transport.attach_socket import listen, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAKE_SECONDS_MAX: Final = 0.002
LINGER_SECONDS_MAX: Final = 0.2
HANDSHAKE_SECONDS_MAX: Final = 5.0
HANDSHAKES_MAX: Final = 64
"""Connections that have not sent a READY yet. Beyond it the oldest is closed."""
ACCEPTED_PER_WAKE_MAX: Final = 16
ACCEPT_RETRY_SECONDS: Final = 1.0
FRAMES_PER_TURN_MAX: Final = 32
READY_BYTES_MAX: Final = 1024

_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Sent(enum.Enum):
    """The result of sending a message."""

    OK = "ok"
    GONE = "gone"
    """The peer is not connected."""
    FULL = "full"
    """The peer does not read: `queued_max` messages are queued for it."""


class ZmtpPeer:
    """One connection."""

    def __init__(self, sock: socket.socket, uid: int) -> None:
        self.sock = sock
        self.uid = uid
        self.identity = b""
        self.greeted = False
        self.ready = False
        """Whether its READY was accepted."""
        self.inbox = bytearray()
        self.outbox: deque[memoryview] = deque()
        self.num_parts = 0
        """Parts received of an incomplete message."""
        self.parts: list[bytes] = []
        """The parts of it that are kept."""
        self.scheduled = False
        self.closed = False
        self.deadline: asyncio.TimerHandle | None = None


class ZmtpServer(abc.ABC):
    """The bound socket. Make it on the event loop.

    Args:
        path: where to bind.
        socket_type: ZMQ type that peers are told, such as `PUB`.
        broke: receives an error of the server itself.
        mode: permissions of the socket file.
        queued_max: messages queued for one peer.
        frame_bytes_max: a longer frame ends its connection.
        parts_max: parts of a message that are kept; a longer message is received as no parts.
        receive_bytes_max: bytes read at a time.
        heartbeats: answer PING, and ignore other commands after the READY. Otherwise they end the
            connection.
    """

    def __init__(
        self,
        path: Path,
        socket_type: bytes,
        broke: Callable[[BaseException], None],
        *,
        mode: int,
        queued_max: int,
        frame_bytes_max: int,
        parts_max: int,
        receive_bytes_max: int,
        heartbeats: bool,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.path = path
        self._hello = zmtp.hello(socket_type)
        self._broke = broke
        self._mode = mode
        self._queued_max = queued_max
        self._frame_bytes_max = frame_bytes_max
        self._parts_max = parts_max
        self._receive_bytes_max = receive_bytes_max
        self._heartbeats = heartbeats
        self._loop = asyncio.get_running_loop()
        self._peers: dict[ZmtpPeer, None] = {}
        self._handshaking: dict[ZmtpPeer, None] = {}
        self._readable_peers: deque[ZmtpPeer] = deque()
        self._turn: asyncio.Handle | None = None
        self._listener = self._listen()

    @abc.abstractmethod
    def _admits(self, uid: int) -> bool:
        """Whether a new connection of this user is read."""

    @abc.abstractmethod
    def _identified(self, peer: ZmtpPeer) -> None:
        """Handle a READY; `peer.identity` is set. Raises `ZmtpError` to end the connection."""

    @abc.abstractmethod
    def _message(self, peer: ZmtpPeer, parts: list[bytes]) -> None:
        """Handle a message; `parts` is empty where it had more than `parts_max`."""

    def bind_again(self) -> None:
        """Make the socket file again after somebody removed it. Connections are kept."""
        listener = self._listen()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = listener

    def _listen(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = listen(self.path, self._mode)
        self._loop.add_reader(listener, self._guarded, self._accept, listener)
        return listener

    def close(self) -> None:
        """Send what is queued, for `LINGER_SECONDS_MAX` at most, and close."""
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        until = time.monotonic() + LINGER_SECONDS_MAX
        for peer in list(self._peers):
            with contextlib.suppress(OSError):
                while peer.outbox:
                    peer.sock.settimeout(max(0.001, until - time.monotonic()))
                    peer.sock.sendall(peer.outbox.popleft())
            self._close(peer)

    # --- connections -----------------------------------------------------------------------

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:
            self._broke(error)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_PER_WAKE_MAX):
            try:
                sock, _ = listener.accept()
            except OSError as error:
                if error.errno in _OUT_OF_RESOURCES:
                    # The pending connection would keep the listener readable.
                    self._loop.remove_reader(listener)
                    self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume_accept, listener)
                return
            sock.setblocking(False)
            uid = peer_of(sock).uid
            if not self._admits(uid):
                sock.close()
                continue
            if len(self._handshaking) >= HANDSHAKES_MAX:
                self._close(next(iter(self._handshaking)))
            peer = ZmtpPeer(sock, uid)
            self._peers[peer] = self._handshaking[peer] = None
            peer.deadline = self._loop.call_later(HANDSHAKE_SECONDS_MAX, self._close, peer)
            self._loop.add_reader(sock, self._readable, peer)
            peer.outbox.append(memoryview(self._hello))
            self._flush(peer)

    def _resume_accept(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._guarded, self._accept, listener)

    def _close(self, peer: ZmtpPeer) -> None:
        if peer.closed:
            return
        peer.closed = True
        if peer.deadline is not None:
            peer.deadline.cancel()
        del self._peers[peer]
        self._handshaking.pop(peer, None)
        peer.outbox.clear()
        self._loop.remove_reader(peer.sock)
        self._loop.remove_writer(peer.sock)
        peer.sock.close()

    # --- sending ---------------------------------------------------------------------------

    def _queue(self, peer: ZmtpPeer, message: bytes) -> Sent:
        if len(peer.outbox) >= self._queued_max:
            return Sent.FULL
        peer.outbox.append(memoryview(message))
        if len(peer.outbox) == 1:
            self._flush(peer)
        return Sent.GONE if peer.closed else Sent.OK

    def _flush(self, peer: ZmtpPeer) -> None:
        if peer.closed:
            return
        try:
            while peer.outbox:
                sent = peer.sock.send(peer.outbox[0], socket.MSG_NOSIGNAL)
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

    # --- reading ---------------------------------------------------------------------------

    def _readable(self, peer: ZmtpPeer) -> None:
        if peer.scheduled:
            return
        peer.scheduled = True
        self._readable_peers.append(peer)
        if self._turn is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn = None
        if not self._readable_peers:
            return
        # A turn that runs out of time continues in the loop's next one, behind all else there.
        self._turn = self._loop.call_soon(self._begin_turn)
        self._guarded(self._read_all, time.monotonic() + WAKE_SECONDS_MAX)

    def _read_all(self, until: float) -> None:
        for _ in range(len(self._readable_peers)):
            peer = self._readable_peers.popleft()
            peer.scheduled = False
            if not peer.closed and self._read(peer) and not peer.closed:
                peer.scheduled = True
                self._readable_peers.append(peer)
            if time.monotonic() > until:
                return

    def _read(self, peer: ZmtpPeer) -> bool:
        """Take some frames of a peer; returns whether there may be more of them here."""
        try:
            if not self._take(peer):
                return True
            data = peer.sock.recv(self._receive_bytes_max)
            if data:
                peer.inbox += data
                return not self._take(peer)
        except BlockingIOError:
            return False
        except (OSError, zmtp.ZmtpError):
            pass
        self._close(peer)
        return False

    def _take(self, peer: ZmtpPeer) -> bool:
        """Take up to `FRAMES_PER_TURN_MAX` frames out of the inbox; True if no whole one is left.

        Raises `ZmtpError`.
        """
        at = 0
        try:
            if not peer.greeted:
                if len(peer.inbox) < zmtp.GREETING_BYTES:
                    return True
                zmtp.check_greeting(bytes(peer.inbox[: zmtp.GREETING_BYTES]))
                peer.greeted, at = True, zmtp.GREETING_BYTES
            for _ in range(FRAMES_PER_TURN_MAX):
                bytes_max = self._frame_bytes_max if peer.ready else READY_BYTES_MAX
                frame = zmtp.frame_at(peer.inbox, at, bytes_max)
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
        if flags & zmtp.COMMAND and peer.ready:
            if not self._heartbeats:
                raise zmtp.ZmtpError
            if (pong := zmtp.pong_to(payload)) is not None:
                self._queue(peer, pong)
        elif flags & zmtp.COMMAND:
            peer.identity = zmtp.identity_in(payload)
            self._identified(peer)
            peer.ready = True
            del self._handshaking[peer]
            if peer.deadline is not None:
                peer.deadline.cancel()
        elif not peer.ready:
            raise zmtp.ZmtpError
        else:
            more = flags & zmtp.MORE
            peer.num_parts += 1
            if peer.num_parts + more <= self._parts_max:
                peer.parts.append(payload)
            if not more:
                parts = peer.parts if peer.num_parts <= self._parts_max else []
                peer.num_parts, peer.parts = 0, []
                self._message(peer, parts)
