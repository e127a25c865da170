"""A Unix socket that accepts connections on the event loop.

Owns the listening socket, its file, and who the kernel says is at the other end (SO_PEERCRED). Does
not own the socket's directory (`service/runtime_dir.py`), nor whom a connection is accepted from.

Invariant: a turn of the loop accepts `ACCEPTED_PER_WAKE_MAX` connections at most. Without a
descriptor or memory for another one, accepting pauses for `ACCEPT_RETRY_SECONDS`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sidecar.errors import StartError
from sidecar.logs import fields

QUEUED_MAX: Final = 4096
"""Connections that the kernel queues; others are refused at once. Its default limit: every user who
may pass the directory can connect, and fill the queue."""
ACCEPTED_PER_WAKE_MAX: Final = 64
ACCEPT_RETRY_SECONDS: Final = 0.1
_CREDENTIALS = struct.Struct("iII")

_logger = logging.getLogger("kvlake.server")


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
