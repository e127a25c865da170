"""The channels between one client and the sidecar, on virtual time.

Mirrors `connector/client.py` towards the roles of the connector (`session`, `send`, `poll`) and
what the kernel and ZMQ do towards the sidecar: messages of one channel arrive in order, after a
delay, never twice, and are lost with their sidecar. Owns attaching, and attaching again after an
end of file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from connector.client import REPLY_SECONDS_MAX, Attempt, Client, SidecarSession
from sidecar.protocol import Attached, ClientMessage, IndexMoved, Refused, Role, ServerMessage
from sidecar.protocol.codec import decode_attach_reply, decode_server, encode
from tests.simulation.clock import Violation, World
from tiers.kv.index import IndexReader

if TYPE_CHECKING:
    from tests.simulation.process import SidecarProcess, SimConnection

RETRY_SECONDS = 0.2
DELAY_SECONDS_MAX = 0.002
REFUSED_SENDS_RATE = 0.002


class Node:
    """One machine: whose sidecar it is that clients find there."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process: SidecarProcess | None = None


class Wire:
    """One client's two channels. Stands in for `connector.client.Client`."""

    def __init__(self, node: Node, name: str, make_attempt: Callable[[], Attempt]) -> None:
        self.node = node
        self.world = node.world
        self.name = name
        self.pid = 4_000
        self.dead = False
        self.reading = True
        self.token = b""
        self.answers_stale = 0
        self.waiting = 0
        """Messages on their way, or not polled yet."""
        self._make_attempt = make_attempt
        self._attempt: Attempt | None = None
        self._process: SidecarProcess | None = None
        self._connection: SimConnection | None = None
        self._offered: SidecarSession | None = None
        self._current: SidecarSession | None = None
        self._inbox: deque[bytes] = deque()
        self._last_in = self._last_out = self._last_socket = 0.0
        self.world.after(0.0, self._attach)

    def as_client(self) -> Client:
        return cast("Client", self)

    # --- towards the connector's roles ---------------------------------------------------------

    @property
    def session(self) -> SidecarSession | None:
        offered = None if self.dead else self._offered
        if offered is not self._current:
            self._inbox.clear()
            self.waiting = 0
            self._current = offered
            if offered is not None and self._process is not None:
                self.token = offered.token
                self._process.router.wires[offered.token] = self
        current = self._current
        if current is None or current.dead:
            return None
        while current.moved:
            old, current.index = current.index, current.moved.popleft()
            if old is not None:
                old.close()
        return current

    def send(self, session: SidecarSession, message: ClientMessage) -> bool:
        process = self._process
        if self.session is not session or process is None:
            return False
        if self.world.random.random() < REFUSED_SENDS_RATE:
            self.world.saw("wire: send refused")
            return False
        frame, token = encode(message), self.token
        self._last_out = self._arrival(self._last_out)
        self.world.after(
            self._last_out - self.world.now, lambda: self._arrived(process, token, frame)
        )
        return True

    @staticmethod
    def _arrived(process: SidecarProcess, token: bytes, frame: bytes) -> None:
        if process.dead:
            process.world.saw("wire: message lost with the sidecar")
            return
        process.receive(token, frame)

    def wait(self, milliseconds: int) -> None:
        return

    def poll(self, of: SidecarSession | None = None) -> list[ServerMessage]:
        session = self.session
        if session is None or not self.reading or (of is not None and of is not session):
            return []
        messages: list[ServerMessage] = []
        while self._inbox:
            self.waiting -= 1
            message = decode_server(self._inbox.popleft())
            if message.epoch != session.epoch:
                raise Violation("an answer of an earlier life is not delivered", str(message.epoch))
            messages.append(message)
        return messages

    def close(self) -> None:
        self.die()

    def hear(self) -> None:
        """Read messages again."""
        self.reading = True

    # --- towards the sidecar -------------------------------------------------------------------

    def _arrival(self, last: float) -> float:
        return max(last, self.world.now + self.world.random.random() * DELAY_SECONDS_MAX)

    def from_router(self, process: SidecarProcess, payload: bytes) -> None:
        """The sidecar sent a message to the present session."""
        self.waiting += 1
        session = self._current
        self._last_in = self._arrival(self._last_in)
        self.world.after(self._last_in - self.world.now, lambda: self._came(session, payload))

    def _came(self, session: SidecarSession | None, payload: bytes) -> None:
        if session is self._current and not self.dead and session is not None and not session.dead:
            self._inbox.append(payload)
        else:
            self.world.saw("wire: answer lost with its session")

    def from_socket(self, connection: SimConnection, payload: bytes, fds: list[int]) -> None:
        """The sidecar sent a frame on the Unix connection."""
        self._last_socket = self._arrival(self._last_socket)
        self.world.after(
            self._last_socket - self.world.now, lambda: self._read(connection, payload, fds)
        )

    def _read(self, connection: SimConnection, payload: bytes, fds: list[int]) -> None:
        if connection is not self._connection or self.dead:
            for fd in fds:
                os.close(fd)
            return
        reply = decode_attach_reply(payload)
        match reply:
            case Attached():
                self._attached(reply, fds)
            case IndexMoved():
                self.world.saw("index moved")
                assert self._offered is not None
                self._offered.moved.append(IndexReader(fds[0], reply.index_bytes))
            case Refused():
                self.world.saw(f"attach refused: {reply.code}")
                self.world.note(f"{self.name} refused: {reply.message}")
                self._hang_up()

    def _attached(self, reply: Attached, fds: list[int]) -> None:
        assert self._attempt is not None
        scheduler = self._attempt.message.role is Role.SCHEDULER
        self._offered = SidecarSession(
            epoch=reply.epoch,
            token=reply.token,
            endpoint=reply.endpoint,
            limits=reply.limits,
            index_salt=reply.index_salt,
            wants_events=self._attempt.message.want_events,
            index=IndexReader(fds[0], reply.index_bytes) if scheduler else None,
            context=self._attempt.context,
        )
        self._attempt = None
        self.world.saw("attached")
        self.world.note(f"{self.name} attached to {reply.epoch % 10_000_000}")

    def _attach(self) -> None:
        if self.dead or self._connection is not None:
            return
        process = self.node.process
        if process is None or not process.accepting:
            self.world.after(RETRY_SECONDS, self._attach)
            return
        self._attempt = self._make_attempt()
        fds = [os.dup(fd) for fd in self._attempt.fds]
        self._process = process
        connection = process.connect(self, encode(self._attempt.message), fds)
        self._connection = connection
        self.world.after(REPLY_SECONDS_MAX, lambda: self._no_answer(connection))

    def _no_answer(self, connection: SimConnection) -> None:
        if connection is self._connection and self._offered is None:
            self.world.saw("attach not answered in time")
            self._hang_up()

    def _hang_up(self) -> None:
        connection, process = self._connection, self._process
        if connection is not None and process is not None:
            process.call(connection.ended)
        self._lost()

    def cut(self, connection: SimConnection) -> None:
        """The sidecar closed the connection; the end of file arrives a little later."""
        delay = self.world.random.random() * DELAY_SECONDS_MAX
        self.world.after(delay, lambda: self._ended(connection))

    def sidecar_gone(self, process: SidecarProcess) -> None:
        """The sidecar's process is over."""
        if process is self._process and self._connection is not None:
            self.cut(self._connection)

    def _ended(self, connection: SimConnection) -> None:
        if connection is not self._connection:
            return
        self.world.saw("end of file at a client")
        process = self._process
        if process is not None:
            process.call(connection.ended)
        self._lost()

    def _lost(self) -> None:
        if self._process is not None:
            self._process.router.wires.pop(self.token, None)
        if self._offered is not None:
            self._offered.dead = True
        self._offered = self._connection = self._process = self._attempt = None
        self.token = b""
        if not self.dead:
            self.world.after(RETRY_SECONDS, self._attach)

    def die(self) -> None:
        """The client's process is gone."""
        if self.dead:
            return
        self.dead = True
        connection, process = self._connection, self._process
        if connection is not None and process is not None:
            delay = self.world.random.random() * DELAY_SECONDS_MAX
            self.world.after(delay, lambda: process.call(connection.ended))
        self._lost()
