"""Connections on the attach socket: their descriptors, their end of file.

Owns one `Connection` per client with its stream framing and received descriptors (SCM_RIGHTS). Does
not own accepting (`unix_listener.py`), sessions, or the content of an `Attach`.

Invariants:

* A received descriptor is close-on-exec and is handed to the caller or closed here, also on every
  error path; no client can make the sidecar keep one.
* A connection reads one `Attach` and then nothing: end of file means that the peer is gone.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from typing import Final

import anyio

from sidecar.errors import AttachRefused
from sidecar.protocol import FDS_PER_ATTACH_MAX
from sidecar.protocol.codec import frame_stream, stream_length
from sidecar.transport.unix_listener import peer_of

ATTACH_BYTES_MAX: Final = 1024 * 1024
# More than are allowed, so that extra descriptors arrive and can be refused.
_FDS_RECEIVED_MAX: Final = 32


def close_fds(fds: list[int]) -> None:
    """Close descriptors, and empty the list."""
    while fds:
        os.close(fds.pop())


class Connection:
    """One client's Unix connection. Owns `sock`, which is non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.peer = peer_of(sock)

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
