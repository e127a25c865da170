"""A sidecar's end of the wire with real sockets: the test says what is answered, and when.

Owns the Unix listener with its connections, the ZMQ ROUTER and an index. Does not own what a client
makes of the answers (`test_client.py`, `test_client_jobs.py`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from sidecar.protocol import Attach, Attached
from sidecar.protocol.codec import decode_first, encode, frame_stream
from tests.connector.double import LIMITS, SALT
from tiers.kv.index import IndexWriter

WAIT_SECONDS_MAX = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another thread brings about."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {WAIT_SECONDS_MAX} s"
        time.sleep(0.005)


class Peer:
    """The sidecar's end of one Unix connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(WAIT_SECONDS_MAX)
        header, self.fds, _, _ = socket.recv_fds(connection, 4, 8)
        (length,) = struct.unpack("<I", header)
        body = b""
        while len(body) < length:
            body += connection.recv(length - len(body))
        self.first = decode_first(body)

    @property
    def attach(self) -> Attach:
        """What it attaches with."""
        assert isinstance(self.first, Attach)
        return self.first

    def reply(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        socket.send_fds(self.connection, [payload], list(fds))

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []
        self.connection.close()


class Sidecar:
    """A listener, a ROUTER and an index. The test says what is answered, and when."""

    def __init__(self, directory: Path) -> None:
        self.path = str(directory / "attach.sock")
        self.endpoint = f"ipc://{directory}/jobs.sock"
        self.index = IndexWriter(64)
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.router.bind(self.endpoint)
        self.listener: socket.socket | None = None
        self.peers: list[Peer] = []
        self.tokens = itertools.count(1)
        self.listen()

    def listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.path)
        self.listener.listen(4)
        self.listener.settimeout(WAIT_SECONDS_MAX)

    def accept(self) -> Peer:
        """The next client's connection, its `Attach` received."""
        assert self.listener is not None
        connection, _ = self.listener.accept()
        peer = Peer(connection)
        self.peers.append(peer)
        return peer

    def attached(self, epoch: int = 7, **changes: Any) -> Attached:
        fields: dict[str, Any] = {
            "version": 1,
            "epoch": epoch,
            "token": b"token-%08d" % next(self.tokens),
            "endpoint": self.endpoint,
            "limits": LIMITS,
            "index_salt": SALT,
            "index_bytes": self.index.size_bytes,
            **changes,
        }
        return Attached(**fields)

    def admit(self, epoch: int = 7, **changes: Any) -> tuple[Peer, Attached]:
        """Accept a scheduler and give it the index."""
        peer = self.accept()
        answer = self.attached(epoch, **changes)
        peer.reply(frame_stream(encode(answer)), (self.index.fd,))
        return peer, answer

    def stop(self) -> None:
        """As if the process had died: every connection ends."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None
        for peer in self.peers:
            peer.close()
        self.peers.clear()

    def close(self) -> None:
        self.stop()
        self.context.destroy(linger=0)
        self.index.close()
