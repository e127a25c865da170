"""Telling the sidecar that this process serves without the cache, for as long as it lives.

Nobody would see it else: an engine that was refused attaches to nothing, and looks to the sidecar
like one that is not there. Owns a connection of its own, on a daemon thread, that comes back when a
sidecar does. Nothing here waits for the sidecar, raises, or logs: vLLM's log has the reason.

A sidecar of before has no such message and refuses it, once in `REFUSED_SECONDS`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from connector.client import connect
from sidecar.protocol import (
    DECLINED_CHARS_MAX,
    PROTOCOL_VERSION,
    Declined,
    encode,
    frame_stream,
)

if TYPE_CHECKING:
    from sidecar.protocol import Role

Reason: TypeAlias = Literal["chunk_tokens", "unsupported", "weights", "memory"]
"""As in `sidecar.protocol.DECLINE_REASONS`."""
RETRY_SECONDS: Final = 1.0
REFUSED_SECONDS: Final = 300.0


class Declining:
    """Says why an engine is not cached to each sidecar that there is, until `close`.

    Args:
        paths: where the sidecar's `attach.sock` may be.
        role, engine_id: whose process this is.
        reason: in a word.
        message: for an operator: field, value and remedy. Cut off where it is long.
    """

    def __init__(
        self, paths: tuple[str, ...], role: Role, engine_id: str, reason: Reason, message: str
    ) -> None:
        printable = "".join(c if c.isprintable() else " " for c in message)
        self._paths = paths
        self._payload = frame_stream(
            encode(
                Declined(
                    version=PROTOCOL_VERSION,
                    role=role,
                    engine_id=engine_id,
                    reason=reason,
                    message=printable[:DECLINED_CHARS_MAX],
                )
            )
        )
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self.pause_seconds = 0.0
        """The last one, before another sidecar was looked for."""
        self._thread = threading.Thread(target=self._run, name="kvlake-declining", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say it no more. Safe to call twice."""
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._closing.is_set():
            refused = False
            with contextlib.suppress(OSError), connect(self._paths) as connection:
                refused = self._say(connection)
            self.pause_seconds = REFUSED_SECONDS if refused else RETRY_SECONDS
            self._closing.wait(self.pause_seconds)

    def _say(self, connection: socket.socket) -> bool:
        """Say it, and stay until the sidecar ends; whether it answered, which is a refusal."""
        connection.sendall(self._payload)
        connection.settimeout(None)
        self._connection = connection
        try:
            # Looked at after the connection can be seen by `close`, which may have come before.
            return not self._closing.is_set() and bool(connection.recv(1))
        finally:
            self._connection = None
