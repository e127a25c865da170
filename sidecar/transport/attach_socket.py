"""The attach socket: connections, their descriptors, their end of file.

Owns one `Connection` per client with its stream framing, received descriptors (SCM_RIGHTS) and the
peer's credentials (SO_PEERCRED). Does not own the socket's directory (`service/runtime_dir.py`),
sessions, or the content of an `Attach`.

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
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from sidecar.errors import AttachRefused, StartError
from sidecar.protocol import FDS_PER_ATTACH_MAX, ProtocolError, frame_stream, stream_length

if TYPE_CHECKING:
    from pathlib import Path

ATTACH_BYTES_MAX: Final = 1024 * 1024
BACKLOG_CONNECTIONS_MAX: Final = 128
QUEUED_MAX: Final = 4096
"""Connections that the kernel queues; others are refused at once. Its default limit: every user who
may pass the directory can connect, and fill the queue."""
# More than are allowed, so that extra descriptors arrive and can be refused.
_FDS_RECEIVED_MAX: Final = 32
_CREDENTIALS = struct.Struct("iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end, from the kernel (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The process at the other end of a Unix connection."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(packed))


def listen(path: Path, mode: int) -> socket.socket:
    """A non-blocking listening socket at `path`. Raises `StartError`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(mode)
        listener.listen(QUEUED_MAX)
    except OSError as error:
        listener.close()
        raise StartError(
            f"the socket {path} cannot be made: {error}; choose another runtime.directory"
        ) from error
    return listener


def _attach_length(header: bytes) -> int:
    length = stream_length(header)
    if length > ATTACH_BYTES_MAX:
        raise ProtocolError(
            "frame_too_large",
            f"Attach of {length} bytes exceeds ATTACH_BYTES_MAX={ATTACH_BYTES_MAX}",
        )
    return length


def close_fds(fds: list[int]) -> None:
    """Close descriptors, and empty the list."""
    while fds:
        os.close(fds.pop())


class Connection:
    """One client's Unix connection. Owns `sock`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.peer = peer_of(sock)

    async def receive_attach(self) -> tuple[bytes, list[int]]:
        """The first frame and its descriptors; the caller owns those.

        Raises `AttachRefused` for too many descriptors, `ProtocolError` for a frame over the
        limit, `EOFError` if the peer is gone.
        """
        fds: list[int] = []
        try:
            length = _attach_length(await self._receive_exactly(4, fds))
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
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            return self._sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL) == len(frame)
        except OSError:
            return False

    async def wait_end(self) -> str:
        """Wait until the peer closes, dies or sends something; returns which, in words."""
        while True:
            await anyio.wait_readable(self._sock)
            ended = self._ended()
            if ended is not None:
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
