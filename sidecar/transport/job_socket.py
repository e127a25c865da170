"""The Unix socket for jobs: reads what ZMQ's DEALER sockets write, frame by frame.

Owns the listening socket, its connections, their handshake, and sending. Does not own framing
(`zmtp.py`), sessions, nor what a frame says.

Invariants:

* Before a connection is read, the kernel has said whose it is (SO_PEERCRED); before a message of it
  is read, it has named the token of a live session of that user, which nobody else holds.
* A connection has at most one frame of `CUT_BYTES_MAX` here. More parts than one are thrown away
  as they come: a message of many is told as one of two.
* One turn of the loop takes `WAKE_SECONDS_MAX` and a frame at most; connections take turns.
* Sending never waits. What the kernel does not take is kept, `replies_queued_max` messages of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import socket
import time
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from sidecar.protocol import FRAME_BYTES_MAX
from sidecar.transport import zmtp
from sidecar.transport.attach_socket import listen, peer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

WAKE_SECONDS_MAX: Final = 0.002
CUT_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""A longer frame ends its connection. Between this and FRAME_BYTES_MAX one is still answered."""
LINGER_MILLISECONDS_MAX: Final = 200
HANDSHAKE_SECONDS_MAX: Final = 5.0
UNNAMED_MAX: Final = 64
"""Connections that have not named a session yet; where there are more, the oldest is closed."""
ACCEPTED_PER_WAKE_MAX: Final = 16
FRAMES_PER_TURN_MAX: Final = 32
RECEIVE_BYTES_MAX: Final = 256 * 1024
READY_BYTES_MAX: Final = 1024

ACCEPT_AGAIN_SECONDS: Final = 1.0
"""Until a connection is accepted again for which there was no descriptor."""

_NO_MORE: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_HELLO: Final = zmtp.hello(b"ROUTER")


class Sent(enum.Enum):
    """What became of a message."""

    OK = "ok"
    GONE = "gone"
    """No peer has this token (any more, or yet)."""
    FULL = "full"
    """The peer does not read: `replies_queued_max` messages wait for it."""


class _Peer:
    """One connection."""

    def __init__(self, sock: socket.socket, uid: int) -> None:
        self.sock = sock
        self.uid = uid
        self.token = b""
        self.greeted = False
        self.inbox = bytearray()
        self.outbox: deque[memoryview] = deque()
        self.parts = 0
        """Parts of a message that came so far, of one that is not complete."""
        self.queued = False
        self.closed = False
        self.deadline: asyncio.TimerHandle | None = None


class JobSocket:
    """The bound socket. `received(token, parts)` is called on the loop, once a message.

    Args:
        path: of the Unix socket that it binds.
        received: a message of more parts than one has two here, which are empty.
        admitted: whether a session of this token is that of this user.
        refused: told of the name that a connection gave and that is no session's.
        broke: told of an error of its own.
        mode: of that socket's file.
        uids: the users who may connect to it.
        replies_queued_max: messages that wait to be sent to one peer; more are refused.
    """

    def __init__(
        self,
        path: Path,
        received: Callable[[bytes, list[bytes]], None],
        admitted: Callable[[bytes, int], bool],
        refused: Callable[[bytes], None],
        broke: Callable[[BaseException], None],
        *,
        mode: int,
        uids: Sequence[int],
        replies_queued_max: int,
    ) -> None:
        self.endpoint = f"ipc://{path}"
        self.handshakes_refused: Counter[str] = Counter(user=0)
        """Connections that were refused before they were read."""
        self._path = path
        self._received = received
        self._admitted = admitted
        self._refused = refused
        self._broke = broke
        self._mode = mode
        self._uids = frozenset(uids)
        self._replies_queued_max = replies_queued_max
        self._loop = asyncio.get_running_loop()
        self._unnamed: dict[_Peer, None] = {}
        self._named: dict[bytes, _Peer] = {}
        self._ready: deque[_Peer] = deque()
        self._turn_ends = 0.0
        self._turn: asyncio.Handle | None = None
        self._listener = self._listen()

    def bind_again(self) -> None:
        """Make the socket file again after somebody removed it; connected peers notice nothing."""
        listener = self._listen()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._listener = listener

    def _listen(self) -> socket.socket:
        self._path.unlink(missing_ok=True)
        listener = listen(self._path, self._mode)
        self._loop.add_reader(listener, self._guarded, self._accept, listener)
        return listener

    def forget(self, token: bytes) -> None:
        """Close the connection of a session that has ended."""
        if (peer := self._named.get(token)) is not None:
            self._close(peer)

    def send(self, token: bytes, payload: bytes) -> Sent:
        """Queue one message for a peer, or say why not."""
        peer = self._named.get(token)
        if peer is None:
            return Sent.GONE
        if len(peer.outbox) >= self._replies_queued_max:
            return Sent.FULL
        peer.outbox.append(memoryview(zmtp.framed(payload)))
        if len(peer.outbox) == 1:
            self._send_out(peer)
        return Sent.GONE if peer.closed else Sent.OK

    def close(self) -> None:
        """Send out what is queued (within the linger), close."""
        if self._turn is not None:
            self._turn.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        until = time.monotonic() + LINGER_MILLISECONDS_MAX / 1000
        for peer in list(self._named.values()):
            with contextlib.suppress(OSError):
                while peer.outbox:
                    peer.sock.settimeout(max(0.001, until - time.monotonic()))
                    peer.sock.sendall(peer.outbox.popleft())
        for peer in [*self._unnamed, *self._named.values()]:
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
                if error.errno in _NO_MORE:
                    # The one that waits makes the listener readable all the while.
                    self._loop.remove_reader(listener)
                    self._loop.call_later(ACCEPT_AGAIN_SECONDS, self._listen_again, listener)
                return
            sock.setblocking(False)
            uid = peer_of(sock).uid
            if uid not in self._uids:
                self.handshakes_refused["user"] += 1
                sock.close()
                continue
            if len(self._unnamed) >= UNNAMED_MAX:
                self._close(next(iter(self._unnamed)))
            peer = _Peer(sock, uid)
            self._unnamed[peer] = None
            peer.deadline = self._loop.call_later(HANDSHAKE_SECONDS_MAX, self._close, peer)
            self._loop.add_reader(sock, self._readable, peer)
            peer.outbox.append(memoryview(_HELLO))
            self._send_out(peer)

    def _listen_again(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._guarded, self._accept, listener)

    def _close(self, peer: _Peer) -> None:
        if peer.closed:
            return
        peer.closed = True
        if peer.deadline is not None:
            peer.deadline.cancel()
        self._unnamed.pop(peer, None)
        if peer.token:
            del self._named[peer.token]
        self._loop.remove_reader(peer.sock)
        self._loop.remove_writer(peer.sock)
        peer.sock.close()

    def _send_out(self, peer: _Peer) -> None:
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

    def _readable(self, peer: _Peer) -> None:
        if peer.queued:
            return
        peer.queued = True
        self._ready.append(peer)
        if self._turn is None:
            self._begin_turn()

    def _begin_turn(self) -> None:
        self._turn = None
        if not self._ready:
            return
        # What is over its time goes on in the loop's next turn, behind all else that is ready.
        self._turn = self._loop.call_soon(self._begin_turn)
        self._guarded(self._work, time.monotonic() + WAKE_SECONDS_MAX)

    def _work(self, until: float) -> None:
        for _ in range(len(self._ready)):
            peer = self._ready.popleft()
            peer.queued = False
            if not peer.closed and self._serve(peer) and not peer.closed:
                peer.queued = True
                self._ready.append(peer)
            if time.monotonic() > until:
                return

    def _serve(self, peer: _Peer) -> bool:
        """Take some frames of a peer; whether there may be more of them here."""
        try:
            if not self._take(peer):
                return True
            data = peer.sock.recv(RECEIVE_BYTES_MAX)
        except BlockingIOError:
            return False
        except (OSError, zmtp.BrokenError):
            self._close(peer)
            return False
        if not data:
            self._close(peer)
            return False
        peer.inbox += data
        try:
            return not self._take(peer)
        except zmtp.BrokenError:
            self._close(peer)
            return False

    def _take(self, peer: _Peer) -> bool:
        """Take up to `FRAMES_PER_TURN_MAX` frames out of the inbox; True if none is left whole."""
        at = 0
        try:
            if not peer.greeted:
                if len(peer.inbox) < zmtp.GREETING_BYTES:
                    return True
                zmtp.check_greeting(bytes(peer.inbox[: zmtp.GREETING_BYTES]))
                peer.greeted, at = True, zmtp.GREETING_BYTES
            for _ in range(FRAMES_PER_TURN_MAX):
                bytes_max = CUT_BYTES_MAX if peer.token else READY_BYTES_MAX
                frame = zmtp.frame_at(peer.inbox, at, bytes_max)
                if frame is None:
                    return True
                flags, first, at = frame
                with memoryview(peer.inbox) as view:
                    payload = bytes(view[first:at])
                self._framed_in(peer, flags, payload)
                if peer.closed:
                    return True
            return False
        finally:
            del peer.inbox[:at]

    def _framed_in(self, peer: _Peer, flags: int, payload: bytes) -> None:
        if flags & zmtp.COMMAND:
            # Only a READY: nobody here asks for heartbeats.
            if peer.token:
                raise zmtp.BrokenError
            self._name(peer, payload)
        elif not peer.token:
            raise zmtp.BrokenError
        elif flags & zmtp.MORE:
            peer.parts += 1
        else:
            parts = [payload] if not peer.parts else [b"", b""]
            peer.parts = 0
            self._received(peer.token, parts)

    def _name(self, peer: _Peer, payload: bytes) -> None:
        token = zmtp.identity_in(payload)
        if not self._admitted(token, peer.uid) or token in self._named:
            self._refused(token)
            raise zmtp.BrokenError
        peer.token = token
        del self._unnamed[peer]
        self._named[token] = peer
        if peer.deadline is not None:
            peer.deadline.cancel()
