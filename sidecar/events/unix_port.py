"""A Unix socket for KV events: what a PUB or a ROUTER of ZMQ is to SUB, DEALER and REQ.

Owns the listening socket, its connections, their subscriptions, and sending. Does not own framing
(`transport/zmtp.py`), what is sent (`sockets.py`), nor TCP, where libzmq lets in keys only.

Invariants:

* A connection is of a listed user, as the kernel says. There are `PEERS_MAX` at most.
* A connection has at most one frame of `REQUEST_BYTES_MAX` here, one part more, and
  `SUBSCRIPTIONS_MAX` subscriptions. Of a message of more parts than two only their number is kept.
* One turn of the loop reads `RECEIVE_BYTES_MAX` of a connection.
* Sending never waits. What the kernel does not take is kept, `queued_max` messages of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from sidecar.transport import zmtp
from sidecar.transport.attach_socket import listen, peer_of
from sidecar.transport.job_socket import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

PEERS_MAX: Final = 256
SUBSCRIPTIONS_MAX: Final = 64
REQUEST_BYTES_MAX: Final = 1024
RECEIVE_BYTES_MAX: Final = 4096
PARTS_MAX: Final = 2
"""Of a request: an empty one, and what is asked for. A subscription has one."""
HELLO_SECONDS_MAX: Final = 5.0
ACCEPT_AGAIN_SECONDS: Final = 1.0
LINGER_SECONDS_MAX: Final = 0.1
MODE: Final = 0o600
_NO_MORE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class EventPeer:
    """One connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.greeted = False
        self.named = False
        self.closed = False
        self.inbox = bytearray()
        self.outbox: deque[memoryview] = deque()
        self.first = b""
        """The first part of a message that is not complete."""
        self.parts = 0
        """How many of its parts came."""
        self.topics: list[bytes] = []
        self.deadline: asyncio.TimerHandle | None = None


class EventPort:
    """The bound socket.

    Args:
        path: of the Unix socket that it binds.
        socket_type: `PUB` or `ROUTER`, as peers are told.
        uids: the users who may connect to it.
        queued_max: messages that wait for one peer; more are refused.
        took: hears of each message: this port, of whom, its parts. Of more than two it hears none.
        broke: told of an error of its own.
    """

    def __init__(
        self,
        path: Path,
        socket_type: bytes,
        uids: Iterable[int],
        queued_max: int,
        took: Callable[[EventPort, EventPeer, list[bytes]], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.path = path
        self._hello = zmtp.hello(socket_type)
        self._uids = frozenset(uids)
        self._queued_max = queued_max
        self._took = took
        self._broke = broke
        self._loop = asyncio.get_running_loop()
        self._peers: dict[EventPeer, None] = {}
        self._listener = self._listen()

    def bind_again(self) -> None:
        """Make the socket file again after somebody removed it; connected peers notice nothing."""
        listener = self._listen()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = listener

    def _listen(self) -> socket.socket:
        self.path.unlink(missing_ok=True)
        listener = listen(self.path, MODE)
        self._loop.add_reader(listener, self._guarded, self._accept, listener)
        return listener

    def publish(self, frames: Sequence[bytes]) -> bool:
        """Give a message to all who subscribed to its first frame; False where one is full."""
        message = _message(frames)
        taken = True
        for peer in list(self._peers):
            if any(frames[0].startswith(topic) for topic in peer.topics):
                taken &= self._queue(peer, message) is not Sent.FULL
        return taken

    def send(self, peer: EventPeer, frames: Sequence[bytes]) -> Sent:
        """Queue one message for a peer, or say why not."""
        return self._queue(peer, _message(frames))

    def _queue(self, peer: EventPeer, message: memoryview) -> Sent:
        if peer.closed:
            return Sent.GONE
        if len(peer.outbox) >= self._queued_max:
            return Sent.FULL
        peer.outbox.append(message)
        if len(peer.outbox) == 1:
            self._send_out(peer)
        return Sent.OK

    def close(self) -> None:
        """Send out what is queued (within the linger), close."""
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
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if error.errno in _NO_MORE:
                # The one that waits makes the listener readable all the while.
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_AGAIN_SECONDS, self._listen_again, listener)
            return
        sock.setblocking(False)
        if len(self._peers) >= PEERS_MAX or peer_of(sock).uid not in self._uids:
            sock.close()
            return
        peer = EventPeer(sock)
        self._peers[peer] = None
        peer.deadline = self._loop.call_later(HELLO_SECONDS_MAX, self._close, peer)
        self._loop.add_reader(sock, self._guarded, self._readable, peer)
        peer.outbox.append(memoryview(self._hello))
        self._send_out(peer)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._guarded, self._accept, listener)

    def _close(self, peer: EventPeer) -> None:
        if peer.closed:
            return
        peer.closed = True
        if peer.deadline is not None:
            peer.deadline.cancel()
        del self._peers[peer]
        peer.outbox.clear()
        self._loop.remove_reader(peer.sock)
        self._loop.remove_writer(peer.sock)
        peer.sock.close()

    def _send_out(self, peer: EventPeer) -> None:
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
            self._loop.add_writer(peer.sock, self._guarded, self._send_out, peer)
        except OSError:
            self._close(peer)
        else:
            self._loop.remove_writer(peer.sock)

    # --- reading ---------------------------------------------------------------------------

    def _readable(self, peer: EventPeer) -> None:
        try:
            data = peer.sock.recv(RECEIVE_BYTES_MAX)
            peer.inbox += data
            self._take(peer)
        except BlockingIOError:
            return
        except (OSError, zmtp.BrokenError):
            self._close(peer)
            return
        if not data:
            self._close(peer)

    def _take(self, peer: EventPeer) -> None:
        at = 0
        if not peer.greeted:
            if len(peer.inbox) < zmtp.GREETING_BYTES:
                return
            zmtp.check_greeting(bytes(peer.inbox[: zmtp.GREETING_BYTES]))
            peer.greeted, at = True, zmtp.GREETING_BYTES
        while not peer.closed:
            frame = zmtp.frame_at(peer.inbox, at, REQUEST_BYTES_MAX)
            if frame is None:
                break
            flags, first, at = frame
            self._framed_in(peer, flags, bytes(peer.inbox[first:at]))
        del peer.inbox[:at]

    def _framed_in(self, peer: EventPeer, flags: int, payload: bytes) -> None:
        if flags & zmtp.COMMAND and peer.named:
            if (pong := zmtp.pong_to(payload)) is not None:
                self._queue(peer, memoryview(pong))
        elif flags & zmtp.COMMAND:
            zmtp.identity_in(payload)
            peer.named = True
            if peer.deadline is not None:
                peer.deadline.cancel()
        elif not peer.named:
            raise zmtp.BrokenError
        else:
            peer.parts += 1
            if flags & zmtp.MORE:
                peer.first = payload if peer.parts == 1 else b""
                return
            parts = [peer.first, payload][-peer.parts :] if peer.parts <= PARTS_MAX else []
            peer.first, peer.parts = b"", 0
            self._took(self, peer, parts)

    def subscribe(self, peer: EventPeer, parts: list[bytes]) -> None:
        """Take a message as a subscription, or the end of one; any other ends the connection."""
        if len(parts) != 1 or parts[0][:1] not in (b"\0", b"\1"):
            self._close(peer)
        elif parts[0][:1] == b"\1":
            if len(peer.topics) >= SUBSCRIPTIONS_MAX:
                self._close(peer)
            else:
                peer.topics.append(parts[0][1:])
        elif parts[0][1:] in peer.topics:
            peer.topics.remove(parts[0][1:])


def _message(frames: Sequence[bytes]) -> memoryview:
    *before, last = frames
    parts = [zmtp.framed(frame, zmtp.MORE) for frame in before]
    return memoryview(b"".join((*parts, zmtp.framed(last))))
