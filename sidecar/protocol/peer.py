"""Who is at the other end of a Unix socket.

Invariant: the answer is the kernel's (SO_PEERCRED) and about the connection itself. The owner of
the path says nothing of it, because the owner of its directory can replace it at any time.
"""

import os
import socket
import struct
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("iII")


class Peer(NamedTuple):
    """The process at the other end when it began to listen, or to connect."""

    pid: int
    """0 in another PID namespace."""
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """The other end of a connected Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Peer(*_CREDENTIALS.unpack(packed))


def is_trusted(uid: int) -> bool:
    """Whether this is root's id or our own: another user's socket in /tmp is not used."""
    return uid in (0, os.geteuid())
