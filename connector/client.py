"""Non-blocking client of the sidecar; the connector's only importer of `sidecar.protocol`.

Owns one session at a time: a Unix connection (attach, descriptors, death) kept by a daemon
thread, and a DEALER (jobs, answers) used by the engine's own thread only. `send` and `poll` never
wait. While there is no sidecar, `session` is None and the thread tries again every
`retry_seconds`; a change of state is logged once.

Not owned: what messages mean (`scheduler.py`, `worker.py`), and the descriptors' content.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from sidecar.protocol import (
    FDS_PER_ATTACH_MAX,
    FRAME_BYTES_MAX,
    Attach,
    Attached,
    ClientMessage,
    IndexMoved,
    Limits,
    ProtocolError,
    Refused,
    Role,
    ServerMessage,
    decode_attach_reply,
    decode_server,
    encode,
    frame_stream,
    stream_length,
)
from tiers.kv.index import IndexReader

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger("vllm.kvlake")

REPLY_SECONDS_MAX = 5.0
MESSAGES_PER_POLL_MAX = 256
SEND_QUEUE_MESSAGES_MAX = 1_000
RECEIVE_QUEUE_MESSAGES_MAX = 10_000
"""An idle engine polls nothing while other engines' events arrive: they must not pile up here."""


@dataclass(slots=True)
class SidecarSession:
    """One attachment to one life of a sidecar."""

    epoch: int
    token: bytes
    endpoint: str
    limits: Limits
    index_salt: bytes
    index: IndexReader | None
    context: object = None
    """What the attempt's maker wants to keep with the session (a worker's fence page)."""
    wants_events: bool = False
    dead: bool = False
    moved: deque[IndexReader] = field(default_factory=deque[IndexReader])
    """Newer indexes that the thread received and the engine's thread has not taken yet."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to attach: the message, its descriptors, and what belongs to it if it succeeds."""

    message: Attach
    fds: list[int] = field(default_factory=list[int])
    context: object = None


class _Lost(Exception):
    """The Unix connection ended or never came to be; the message says why."""


def _check_owner(path: str) -> None:
    """Anybody may make a folder in /tmp: raise `PermissionError` where a stranger has.

    For places that nobody gave.
    """
    owner = os.lstat(path).st_uid
    if path.startswith("/tmp/") and owner not in (0, os.getuid()):  # noqa: S108 (see above)
        raise PermissionError(errno.EPERM, f"it belongs to uid {owner}", path)


def connect(paths: tuple[str, ...]) -> socket.socket:
    """A connection to the first path that takes one; raises the last one's `OSError`."""
    *others, last = paths
    for path in others:
        with contextlib.suppress(OSError):
            return _connect_to(path, given=False)
    return _connect_to(last, given=not others)


def _connect_to(path: str, *, given: bool) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.settimeout(REPLY_SECONDS_MAX)
    try:
        connection.connect(path)
        if not given:
            _check_owner(path)
    except OSError:
        connection.close()
        raise
    return connection


class Client:
    """A session with the sidecar that comes and goes by itself.

    Args:
        paths: where the sidecar's `attach.sock` may be; the first that takes a connection.
        make_attempt: builds message and descriptors anew for every attempt, on the thread.
        retry_seconds: pause between two attempts.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        make_attempt: Callable[[], Attempt],
        *,
        retry_seconds: float = 0.2,
    ) -> None:
        self._paths = paths
        self._make_attempt = make_attempt
        self._retry_seconds = retry_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._dealer: zmq.Socket[bytes] | None = None
        self._current: SidecarSession | None = None
        # Written by the thread, read by the engine's thread: a single reference, so no lock.
        self._offered: SidecarSession | None = None
        self._closing = threading.Event()
        self._release_seconds_max = 0.0
        self._held = False
        """Whether the sidecar may still hold what the last attempt sent."""
        self._attached_once = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.last_log = ""
        self.answers_stale = 0
        """Messages of an earlier life of the sidecar that were dropped. Never decreases."""
        self._pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="kvlake-attach", daemon=True)
        self.thread.start()

    # --- the engine's thread -------------------------------------------------------------------

    @property
    def session(self) -> SidecarSession | None:
        """The live session, or None. A changed identity means: everything from before is void."""
        offered = None if self._closing.is_set() else self._offered
        if offered is not self._current:
            self._close_dealer()
            self._current = offered
            if offered is not None:
                self._open_dealer(offered)
        current = self._current
        if current is None or current.dead:
            return None
        while current.moved:
            old, current.index = current.index, current.moved.popleft()
            if old is not None:
                old.close()
        return current

    def wait_attached(self, seconds: float) -> bool:
        """Wait for the first session; used before the engine serves, never in a step."""
        return self._attached_once.wait(seconds)

    def send(self, session: SidecarSession, message: ClientMessage) -> bool:
        """Queue a message for `session`; False where that is over or full, or the message too long.

        The session is named because the live one may have changed since the message was made: a
        job that went out in the next session could not be revoked through this one's fence page.
        """
        if self.session is not session or self._dealer is None:
            return False
        frame = encode(message)
        if len(frame) > FRAME_BYTES_MAX:
            # The sidecar would refuse it, and its jobs would be waited for until their deadline.
            self._log(
                "size",
                logging.WARNING,
                "a message of %d bytes was not sent: the sidecar takes %d",
                len(frame),
                FRAME_BYTES_MAX,
            )
            return False
        try:
            self._dealer.send(frame, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._log("send", logging.WARNING, "sending to the sidecar failed: %s", error)
            return False
        return True

    def wait(self, milliseconds: int) -> None:
        """Wait until a message is there to `poll`, but no longer than this."""
        if self.session is not None and self._dealer is not None:
            self._dealer.poll(milliseconds, zmq.POLLIN)

    def poll(self, of: SidecarSession | None = None) -> list[ServerMessage]:
        """Messages that have arrived, at most `MESSAGES_PER_POLL_MAX`; never waits.

        Where a session is named, none that are of another one: the live one may have changed.
        """
        session = self.session
        if session is None or self._dealer is None or (of is not None and of is not session):
            return []
        messages: list[ServerMessage] = []
        for _ in range(MESSAGES_PER_POLL_MAX):
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            try:
                message = decode_server(frame)
            except ProtocolError as error:
                self._log("decode", logging.WARNING, "answer of the sidecar refused: %s", error)
                continue
            if message.epoch == session.epoch:
                messages.append(message)
            else:
                self.answers_stale += 1
        return messages

    def close(self, release_seconds_max: float = 0.0, *, wait_seconds_max: float = 2.0) -> bool:
        """End the session and the thread; whether the sidecar holds nothing of ours any more.

        Waits so long for that, and beyond it for the thread. Safe to call twice.
        """
        if self._closing.is_set():
            return not self._held
        self._release_seconds_max = release_seconds_max
        self._closing.set()
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
            self.thread.join(timeout=wait_seconds_max + release_seconds_max)
        # Closed here and not by the thread: a number that the thread had closed could be somebody
        # else's file by the time that it is written to above. A thread that is still there (it
        # waits for an answer to its attach) keeps them.
        if not self.thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._close_dealer()
        self._current = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        return not self._held

    def _open_dealer(self, session: SidecarSession) -> None:
        try:
            if self._context is None:
                self._context = zmq.Context()
            dealer = self._dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, session.token)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
            dealer.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES_MAX)
            dealer.connect(session.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            # We are in the middle of an engine's step. Without its jobs channel a session is none.
            session.dead = True
            self._close_dealer()
            self._log(
                "connect",
                logging.ERROR,
                "no jobs channel at %s (%s); serving without the cache until the sidecar restarts",
                session.endpoint,
                error,
            )

    def _close_dealer(self) -> None:
        if self._dealer is not None:
            self._dealer.close(linger=0)
            self._dealer = None

    # --- the attach thread ---------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            session: SidecarSession | None = None
            try:
                with connect(self._paths) as connection:
                    self._held = True
                    session = self._attach(connection, self._make_attempt())
                    self._offered = session
                    self._attached_once.set()
                    self._log(
                        "state",
                        logging.INFO,
                        "attached to the sidecar at %s",
                        connection.getpeername(),
                    )
                    self._watch(connection, session)
                    self._held = not self._released(connection)
            except (_Lost, OSError, ProtocolError, ValueError) as error:
                # Only one that does not answer may still take what it was sent.
                self._held = self._held and isinstance(error, TimeoutError)
                state = "lost" if session is not None else "absent"
                self._log(
                    "state",
                    logging.WARNING,
                    "no sidecar at %s (%s: %s); serving without the cache until it is back",
                    " or ".join(self._paths),
                    state,
                    error,
                )
            except Exception as error:
                # A bug here must not end the thread, or the engine would never attach again.
                line = f"attaching to the sidecar failed unexpectedly: {error!r}"
                self._log("state", logging.ERROR, "%s", line, exc_info=True)
            if session is not None:
                session.dead = True
            self._offered = None
            self._closing.wait(self._retry_seconds)

    def _attach(self, connection: socket.socket, attempt: Attempt) -> SidecarSession:
        payload = frame_stream(encode(attempt.message))
        sent = socket.send_fds(connection, [payload[:4]], attempt.fds) if attempt.fds else 0
        connection.sendall(payload[sent:])
        reply, received = self._receive(connection)
        if isinstance(reply, Refused):
            _close_all(received)
            raise _Lost(f"refused ({reply.code}): {reply.message}")
        if not isinstance(reply, Attached):
            _close_all(received)
            raise _Lost(f"unexpected answer {type(reply).__name__}")
        index = None
        if attempt.message.role is Role.SCHEDULER:
            if len(received) != 1:
                _close_all(received)
                raise _Lost("the answer came without the shared index")
            index = IndexReader(received[0], reply.index_bytes)
        return SidecarSession(
            epoch=reply.epoch,
            token=reply.token,
            endpoint=reply.endpoint,
            limits=reply.limits,
            index_salt=reply.index_salt,
            index=index,
            context=attempt.context,
            wants_events=attempt.message.want_events,
        )

    def _watch(self, connection: socket.socket, session: SidecarSession) -> None:
        """Stay until the sidecar closes the connection; take a moved index on the way."""
        # Not select(): an engine with many files open has descriptors over its limit of 1,024.
        watched = select.poll()
        watched.register(connection, select.POLLIN)
        watched.register(self._wake_read, select.POLLIN)
        while True:
            ready = watched.poll()
            if self._closing.is_set():
                return
            if not any(fd == connection.fileno() for fd, _ in ready):
                continue
            reply, received = self._receive(connection)
            if not isinstance(reply, IndexMoved) or len(received) != 1:
                _close_all(received)
            elif reply.epoch != session.epoch:
                self.answers_stale += 1
                _close_all(received)
            else:
                session.moved.append(IndexReader(received[0], reply.index_bytes))

    def _released(self, connection: socket.socket) -> bool:
        """Leave, and wait until the sidecar hangs up: it does once it has unmapped our memory."""
        deadline = time.monotonic() + self._release_seconds_max
        try:
            connection.shutdown(socket.SHUT_WR)
            while (left := deadline - time.monotonic()) > 0:
                connection.settimeout(left)
                if not connection.recv(FRAME_BYTES_MAX):
                    return True
        except ConnectionError:
            return True
        except OSError:
            return False
        return False

    def _receive(
        self, connection: socket.socket
    ) -> tuple[Attached | Refused | IndexMoved, list[int]]:
        header, fds, _, _ = socket.recv_fds(
            connection, 4, FDS_PER_ATTACH_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not header:
            raise _Lost("the sidecar closed the connection")
        try:
            while len(header) < 4:
                header += self._more(connection, 4 - len(header))
            length = stream_length(header)
            body = b""
            while len(body) < length:
                body += self._more(connection, length - len(body))
            return decode_attach_reply(body), list(fds)
        except BaseException:
            _close_all(fds)
            raise

    @staticmethod
    def _more(connection: socket.socket, count: int) -> bytes:
        piece = connection.recv(count)
        if not piece:
            raise _Lost("the sidecar closed the connection in mid-message")
        return piece

    def _log(
        self, topic: str, level: int, text: str, *arguments: object, exc_info: bool = False
    ) -> None:
        # Once per change: the same line again says nothing new.
        line = f"{topic}:{text % arguments}"
        if line != self.last_log:
            self.last_log = line
            logger.log(level, "kvlake: %s", text % arguments, exc_info=exc_info)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
