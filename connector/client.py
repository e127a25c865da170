"""The connections of one process with its sidecar. Nothing here blocks an engine's step.

`Client` owns one session at a time: a Unix connection (attach, descriptors, end of file), kept by a
daemon thread, and a ZMQ socket (jobs, answers), used by the engine's own thread only. `send` and
`poll` never wait. Without a sidecar `session` is None and the thread tries again every
`retry_seconds`. A change of state is logged once.

`UncachedNotice` owns the connection of a process that serves without the cache.

Does not own what messages mean (`scheduler/`, `worker.py`), nor the content of descriptors.
"""

import contextlib
import errno
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import zmq

from sidecar.protocol import (
    DECLINED_CHARS_MAX,
    FDS_PER_ATTACH_MAX,
    FRAME_BYTES_MAX,
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachReply,
    ClientMessage,
    Declined,
    IndexMoved,
    Limits,
    Refused,
    Role,
    ServerMessage,
)
from sidecar.protocol.codec import (
    ProtocolError,
    decode_attach_reply,
    decode_server,
    encode,
    frame_stream,
    stream_length,
)
from sidecar.protocol.peer import is_trusted, peer_of
from tiers.kv.index import ANYWHERE, IndexReader, tags_of

logger = logging.getLogger("vllm.kvlake")

REPLY_SECONDS_MAX: Final = 5.0
MESSAGES_PER_POLL_MAX: Final = 256
SEND_QUEUE_MESSAGES_MAX: Final = 1_000
RECONNECT_MS: Final = 2_000
"""A dealer of a sidecar that has ended tries to connect until the engine's next step, and another
sidecar at that path refuses it each time."""
RECEIVE_QUEUE_MESSAGES_MAX: Final = 10_000
"""Bounds the events of other engines that arrive while this one is idle and does not poll."""
NOTICE_RETRY_SECONDS: Final = 1.0
NOTICE_REFUSED_SECONDS: Final = 300.0
"""An older sidecar does not know the notice, and logs each one that it refuses."""

UncachedReason: TypeAlias = Literal["chunk_tokens", "unsupported", "weights", "memory"]
"""As in `sidecar.protocol.DECLINE_REASONS`."""


@dataclass(slots=True)
class SidecarSession:
    """One attachment to one run of a sidecar."""

    epoch: int
    token: bytes
    endpoint: str
    limits: Limits
    index_salt: bytes
    index: IndexReader | None
    context: object = None
    """The context of its `Attempt`: a worker's fence page."""
    wants_events: bool = False
    dead: bool = False
    ranks_lack: bool = False
    """A rank has no session beside this one of a scheduler, so no chunk can be loaded whole."""
    moved: deque[IndexReader] = field(default_factory=lambda: deque[IndexReader](maxlen=1))
    """The newest index, until the engine's thread takes it: it may be idle for hours."""

    def holds(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
        """Which tiers hold each chunk, as `tiers.kv.index` has it; of a scheduler's session."""
        assert self.index is not None, "a scheduler's session has one"
        return self.index.lookup(tags_of(keys, self.index_salt)) & np.uint8(ANYWHERE)


class Attempt(NamedTuple):
    """What one attempt to attach sends, and what its session keeps as `context`."""

    message: Attach
    fds: Sequence[int] = ()
    context: object = None


def connect(paths: tuple[str, ...]) -> socket.socket:
    """A connection to the first path that accepts one. Raises the `OSError` of the last path.

    One path was configured and is trusted. Several are the defaults, and a socket in /tmp, where
    any user may make one, must be root's or our own.
    """
    last = paths[-1]
    for path in paths:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.settimeout(REPLY_SECONDS_MAX)
        try:
            connection.connect(path)
            if len(paths) > 1 and path.startswith("/tmp/"):  # noqa: S108 (see above)
                uid = peer_of(connection).uid
                if not is_trusted(uid):
                    raise PermissionError(errno.EPERM, f"it belongs to uid {uid}", path)
        except OSError:
            connection.close()
            if path == last:
                raise
        else:
            return connection
    raise ValueError("no path")


def job_endpoint(told: str, paths: tuple[str, ...]) -> str:
    """Where to send jobs. Where a configured path is another one than the sidecar's own, beside it.

    Not with the defaults: in /tmp others may make a folder with a link to a trusted sidecar.
    """
    own, path = Path(told.removeprefix("ipc://")), Path(paths[0])
    beside = path.parent / own.name
    if len(paths) > 1 or not told.startswith("ipc://") or not beside.is_socket():
        return told
    with contextlib.suppress(OSError):
        if own.with_name("attach.sock").samefile(path):
            return told
    return f"ipc://{beside}"


class Client:
    """Attaches to the sidecar at the first path that accepts, and again whenever it comes back.

    `make_attempt` builds message and descriptors of each attempt, on the thread. Waits up to
    `attach_seconds` for the first session: for the start of an engine, never in a step. `when`
    calls `start` once there is something to attach with; if it does so later, nothing waits.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        make_attempt: Callable[[], Attempt],
        *,
        attach_seconds: float = 0.0,
        retry_seconds: float = 0.2,
        when: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        self._paths = paths
        self._make_attempt = make_attempt
        self._retry_seconds = retry_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer: zmq.Socket[bytes] | None = None
        self._current: SidecarSession | None = None
        # Written by the thread, read by the engine's thread: a single reference, so no lock.
        self._offered: SidecarSession | None = None
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._unanswered = False
        """The sidecar may still take what the last attempt sent."""
        self._attached_once = threading.Event()
        self.last_log = ""
        self.answers_stale = 0
        """Messages of an earlier run of the sidecar that were dropped."""
        self._pid = os.getpid()
        self.thread = threading.Thread(target=self._run, name="kvlake-attach", daemon=True)
        if when is None:
            self.start()
        else:
            when(self.start)
        if self.thread.is_alive():
            self.wait_attached(attach_seconds)

    def start(self) -> None:
        """Begin to attach, once, on any thread. Does nothing after `close`."""
        if not self._closing.is_set():
            self.thread.start()

    # --- the engine's thread -------------------------------------------------------------------

    @property
    def session(self) -> SidecarSession | None:
        """The live session, or None. Another object means that all earlier answers are void."""
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
            if current.index is not None:
                current.index.close()
            current.index = current.moved.popleft()
        return current

    def wait_attached(self, seconds: float) -> bool:
        """Wait for the first session."""
        return self._attached_once.wait(seconds)

    def send(self, session: SidecarSession, message: ClientMessage) -> bool:
        """Queue a message for `session`. False if that ended or is full, or the message too long.

        Never for a later session: a job could not be revoked there through this one's fence page.
        """
        if self.session is not session or self._dealer is None:
            return False
        frame = encode(message)
        if len(frame) > FRAME_BYTES_MAX:
            # The sidecar would refuse it, and its jobs would end at their deadline only.
            text = "a message of %d bytes was not sent: the sidecar accepts at most %d"
            self._log(logging.WARNING, text, len(frame), FRAME_BYTES_MAX)
            return False
        try:
            self._dealer.send(frame, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self._log(logging.WARNING, "sending to the sidecar failed: %s", error)
            return False
        return True

    def wait(self, milliseconds: int) -> None:
        """Wait until there is a message to `poll`, at most this long."""
        if self.session is not None and self._dealer is not None:
            self._dealer.poll(milliseconds, zmq.POLLIN)

    def poll(self, of: SidecarSession | None = None) -> list[ServerMessage]:
        """Messages that have arrived, up to a limit; none if another session `of` is given."""
        session = self.session
        if session is None or self._dealer is None or (of is not None and of is not session):
            return []
        messages: list[ServerMessage] = []
        for _ in range(MESSAGES_PER_POLL_MAX):
            # Unlike `recv`, this keeps the GIL. An engine has threads that compute, and to get it
            # back takes a millisecond, in each of its steps.
            if not int(self._dealer.get(zmq.EVENTS)) & zmq.POLLIN:
                break
            try:
                frame = self._dealer.recv(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            try:
                message = decode_server(frame)
            except ProtocolError as error:
                self._log(logging.WARNING, "answer of the sidecar refused: %s", error)
                continue
            if message.epoch == session.epoch:
                messages.append(message)
            else:
                self.answers_stale += 1
        return messages

    def close(self, release_seconds_max: float = 0.0, *, wait_seconds_max: float = 2.0) -> bool:
        """End the session and the thread. May be called twice.

        With `release_seconds_max`, waits as long for the sidecar to release everything of ours, and
        returns whether it did. Waits `wait_seconds_max` more for the thread. With both 0, a later
        call can wait.
        """
        self._closing.set()
        seconds_max = wait_seconds_max + release_seconds_max
        connection = self._connection if os.getpid() == self._pid else None
        if connection is not None:
            # After an end of file the sidecar unmaps our memory, and then hangs up.
            cut = seconds_max and not release_seconds_max
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR if cut else socket.SHUT_WR)
        # One that has not begun cannot be joined.
        with contextlib.suppress(RuntimeError):
            self.thread.join(timeout=seconds_max)
        released = not (self._unanswered or self.thread.is_alive())
        if connection is not None and seconds_max:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._close_dealer()
        self._current = None
        self._context.destroy(linger=0)
        return released

    def _open_dealer(self, session: SidecarSession) -> None:
        try:
            dealer = self._dealer = self._context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.IDENTITY, session.token)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
            dealer.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES_MAX)
            dealer.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES_MAX)
            dealer.connect(session.endpoint)
        except (zmq.ZMQError, ValueError) as error:
            # In the middle of an engine's step: do not raise, serve without the cache.
            session.dead = True
            self._close_dealer()
            text = "no job socket at %s (%s); serving without the cache until the sidecar restarts"
            if isinstance(error, zmq.ZMQError) and error.errno in (errno.EMFILE, errno.ENFILE):
                # That passes, so the thread is to attach again.
                text = "no job socket at %s (%s); serving without the cache until there is one"
                if (connection := self._connection) is not None:
                    with contextlib.suppress(OSError):
                        connection.shutdown(socket.SHUT_RDWR)
            self._log(logging.ERROR, text, session.endpoint, error)

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
                    self._connection = connection
                    # After `close` can see the connection: it may have been called before.
                    if self._closing.is_set():
                        return
                    session = self._attach(connection, self._make_attempt())
                    self._offered = session
                    self._attached_once.set()
                    path = connection.getpeername()
                    self._log(logging.INFO, "attached to the sidecar at %s", path)
                    connection.settimeout(None)
                    while True:
                        self._index_moved(session, *self._receive(connection))
            except (OSError, ProtocolError, ValueError) as error:
                self._unanswered = isinstance(error, TimeoutError)
                text = "no sidecar at %s (%s: %s); serving without the cache until it is back"
                if not self._closing.is_set():
                    state = "lost" if session is not None else "absent"
                    self._log(logging.WARNING, text, " or ".join(self._paths), state, error)
            except Exception as error:
                # A bug must not end the thread, or the engine would never attach again.
                text = "attaching to the sidecar failed unexpectedly: %r"
                self._log(logging.ERROR, text, error, exc_info=True)
            if session is not None:
                session.dead = True
            self._offered = None
            self._closing.wait(self._retry_seconds)

    def _attach(self, connection: socket.socket, attempt: Attempt) -> SidecarSession:
        payload = frame_stream(encode(attempt.message))
        sent = socket.send_fds(connection, [payload[:4]], attempt.fds) if attempt.fds else 0
        connection.sendall(payload[sent:])
        reply, received = self._receive(connection)
        scheduler = attempt.message.role is Role.SCHEDULER
        if not isinstance(reply, Attached) or (scheduler and len(received) != 1):
            _close_all(received)
            found = f"unexpected answer {type(reply).__name__} with {len(received)} descriptors"
            if isinstance(reply, Refused):
                found = f"refused ({reply.code}): {reply.message}"
            raise ConnectionError(found)
        return SidecarSession(
            reply.epoch,
            reply.token,
            job_endpoint(reply.endpoint, self._paths),
            reply.limits,
            reply.index_salt,
            IndexReader(received[0], reply.index_bytes) if scheduler else None,
            attempt.context,
            attempt.message.want_events,
        )

    def _index_moved(self, session: SidecarSession, moved: AttachReply, fds: list[int]) -> None:
        if not isinstance(moved, IndexMoved) or moved.epoch != session.epoch:
            self.answers_stale += isinstance(moved, IndexMoved)
            _close_all(fds)
        elif len(fds) == 1:
            session.moved.append(IndexReader(fds[0], moved.index_bytes))
        else:
            # The kernel drops a descriptor beyond the limit. The index before is not written.
            _close_all(fds)
            raise ConnectionError("a new index came without its descriptor: is RLIMIT_NOFILE met?")

    @staticmethod
    def _receive(connection: socket.socket) -> tuple[AttachReply, list[int]]:
        header, fds, _, _ = socket.recv_fds(
            connection, 4, FDS_PER_ATTACH_MAX, socket.MSG_CMSG_CLOEXEC
        )
        try:
            length = stream_length(_filled(connection, header, 4))
            return decode_attach_reply(_filled(connection, b"", length)), list(fds)
        except BaseException:
            _close_all(fds)
            raise

    def _log(self, level: int, text: str, *arguments: object, exc_info: bool = False) -> None:
        """Log what differs from the last line."""
        line = text % arguments
        if line != self.last_log:
            self.last_log = line
            logger.log(level, "kvlake: %s", line, exc_info=exc_info)


def _filled(connection: socket.socket, data: bytes, count: int) -> bytes:
    """`data` and what follows it on a connection, up to `count` bytes."""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise ConnectionError("the sidecar closed the connection")
        data += piece
    return data


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class UncachedNotice:
    """Tells each sidecar why this process serves without the cache, until `close`.

    A refused engine never attaches, so the sidecar would not know of it. Does not wait, raise or
    log: vLLM's log has the reason. `message` has field, value and remedy; long ones are cut.
    """

    def __init__(
        self,
        paths: tuple[str, ...],
        role: Role,
        engine_id: str,
        reason: UncachedReason,
        message: str,
    ) -> None:
        printable = "".join(c if c.isprintable() else " " for c in message)[:DECLINED_CHARS_MAX]
        declined = Declined(PROTOCOL_VERSION, role, engine_id, reason, printable)
        self._paths = paths
        self._payload = frame_stream(encode(declined))
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="kvlake-uncached", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the notice. May be called twice."""
        self._closing.set()
        if (connection := self._connection) is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        while not self._closing.is_set():
            refused = False
            with contextlib.suppress(OSError), connect(self._paths) as connection:
                connection.sendall(self._payload)
                connection.settimeout(None)
                self._connection = connection
                # After `close` can see the connection: it may have been called before.
                if not self._closing.is_set():
                    # The sidecar answers only to refuse the notice; otherwise it hangs up.
                    refused = bool(connection.recv(1))
            self._closing.wait(NOTICE_REFUSED_SECONDS if refused else NOTICE_RETRY_SECONDS)
