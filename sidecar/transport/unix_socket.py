"""Unix sockets: accepting connections on the event loop, and one connection of the attach socket.

Owns the listening socket, its file, and who the kernel says is at the other end (SO_PEERCRED), and
one `Connection` per client with its stream framing and received descriptors (SCM_RIGHTS). Does not
own the socket's directory (`service/runtime_dir.py`), whom a connection is accepted from, sessions,
or the content of an `Attach`.

Invariants:

* A turn of the loop accepts `ACCEPTED_PER_WAKE_MAX` connections at most. Without a descriptor or
  memory for another one, accepting pauses for `ACCEPT_RETRY_SECONDS`.
* A received descriptor is close-on-exec and is handed to the caller or closed here, also on every
  error path; no client can make the sidecar keep one.
* A connection reads one `Attach` and then nothing: end of file means that the peer is gone.
"""

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio

from sidecar.errors import AttachRefused, StartError
from sidecar.logs import fields
from sidecar.protocol import FDS_PER_ATTACH_MAX
from sidecar.protocol.codec import frame_stream, stream_length
from sidecar.protocol.peer import Peer, peer_of

QUEUED_MAX: Final = 4096
"""Connections that the kernel queues; others are refused at once. Its default limit: every user who
may pass the directory can connect, and fill the queue."""
ACCEPTED_PER_WAKE_MAX: Final = 64
ACCEPT_RETRY_SECONDS: Final = 0.1
ATTACH_BYTES_MAX: Final = 1024 * 1024
# More than are allowed, so that extra descriptors arrive and can be refused.
_FDS_RECEIVED_MAX: Final = 32

_logger = logging.getLogger("kvlake.server")


class UnixListener:
    """The bound socket. Make it on the loop. Raises `StartError` where it cannot be bound."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._mode = mode
        self._loop = asyncio.get_running_loop()
        self._sock = self._bind()

    def start(
        self,
        accepted: Callable[[socket.socket, Peer], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        """Accept: `accepted` takes over each connection, `broke` gets an error that it raises."""
        self._accepted, self._broke = accepted, broke
        self._loop.add_reader(self._sock, self._accept, self._sock)

    def bind_again(self) -> None:
        """Make the socket's file again after somebody removed it. Connections are kept."""
        sock = self._bind()
        self.close()
        self._sock = sock
        self.start(self._accepted, self._broke)

    def close(self) -> None:
        """Stop accepting."""
        if self._sock.fileno() >= 0:
            self._loop.remove_reader(self._sock)
            self._sock.close()

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self.path.unlink(missing_ok=True)
            sock.bind(str(self.path))
            self.path.chmod(self._mode)
            sock.listen(QUEUED_MAX)
        except OSError as error:
            sock.close()
            raise StartError(
                f"the socket {self.path} cannot be made: {error}; choose another runtime.directory"
            ) from error
        return sock

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_PER_WAKE_MAX):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _logger.error("cannot accept", extra=fields(error=error))  # noqa: TRY400
                # The pending connection would keep the listener readable.
                self._loop.remove_reader(listener)
                self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume, listener)
                return
            try:
                sock.setblocking(False)
                self._accepted(sock, peer_of(sock))
            except BaseException as error:
                self._broke(error)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)


def close_fds(fds: list[int]) -> None:
    """Close descriptors, and empty the list."""
    while fds:
        os.close(fds.pop())


class Connection:
    """One client's Unix connection. Owns `sock`, which is non-blocking."""

    def __init__(self, sock: socket.socket, peer: Peer) -> None:
        self._sock = sock
        self.peer = peer

    async def receive_attach(self) -> tuple[bytes, list[int]]:
        """The first frame and its descriptors; the caller owns those.

        Raises `AttachRefused` for too many descriptors, `ProtocolError` for a frame over the
        limit, `EOFError` if the peer is gone.
        """
        fds: list[int] = []
        try:
            length = stream_length(await self._receive_exactly(4, fds), ATTACH_BYTES_MAX)
            return await self._receive_exactly(length, fds), fds
        except BaseException:
            close_fds(fds)
            raise

    async def _receive_exactly(self, num_bytes: int, fds: list[int]) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            await anyio.wait_readable(self._sock)
            try:
                data = self._receive(num_bytes - len(received), fds)
            except BlockingIOError:
                continue
            if not data:
                raise EOFError("the client closed its connection before it had attached")
            received += data
            if len(fds) > FDS_PER_ATTACH_MAX:
                raise AttachRefused(
                    "descriptors",
                    f"more than {FDS_PER_ATTACH_MAX} descriptors arrived with one Attach",
                )
        return bytes(received)

    def _receive(self, bytes_max: int, fds: list[int]) -> bytes:
        item_bytes = array.array("i").itemsize
        space = socket.CMSG_SPACE(_FDS_RECEIVED_MAX * item_bytes)
        data, ancillary, flags, _ = self._sock.recvmsg(bytes_max, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) // item_bytes * item_bytes])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC:
            # The kernel closed the rest; the caller closes what is in `fds`.
            raise AttachRefused(
                "descriptors", "descriptors were lost on the way (too many, or none left here)"
            )
        return data

    def try_send(self, payload: bytes, fds: tuple[int, ...] = ()) -> bool:
        """Send one frame now. False if it was not sent whole: the stream is then unusable."""
        frame = frame_stream(payload)
        try:
            return socket.send_fds(self._sock, [frame], fds) == len(frame)
        except OSError:
            return False

    async def wait_end(self) -> str:
        """Wait until the peer closes, dies or sends something; returns which, in words."""
        while (ended := self._ended()) is None:
            await anyio.wait_readable(self._sock)
        return ended

    def at_end(self) -> bool:
        """Whether the peer is gone, without waiting."""
        return self._ended() is not None

    def _ended(self) -> str | None:
        fds: list[int] = []
        try:
            data = self._receive(1, fds)
        except BlockingIOError:
            return None
        except (OSError, AttachRefused) as error:
            return f"connection lost: {error}"
        finally:
            close_fds(fds)
        return "unexpected bytes after Attach" if data else "end of file"

    def hang_up(self) -> None:
        """Shut the connection down: the peer reads end of file, and so does `wait_end`."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No task may be waiting for it."""
        self._sock.close()
