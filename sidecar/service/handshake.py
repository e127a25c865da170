"""Handshake: from a connection on the attach socket to a session, and to the session's end.

Owns accepting, the time limit of an attach, the order of the checks, and the answer. An engine that
serves without the cache gets no session: it is listed (`uncached.py`). Does not own the checks
themselves (`sessions/session.py`, `sessions/namespaces.py`, `protocol/codec.py`) or the socket's
framing (`transport/attach_socket.py`).

Invariants: a client is refused with a reason before anything is created for it, or has a session;
its descriptors are mapped by that session or closed; nothing that it does here can raise beyond its
own connection. Users who are not served are refused before a byte is read, cost no task, and do not
delay others. A refusal is logged once a minute for each user and code.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import time
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc

from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Declined,
    Limits,
    ProtocolError,
    Refused,
    Role,
    decode_first,
    encode,
    frame_stream,
)
from sidecar.service.realm_eviction import RealmEviction
from sidecar.sessions.session import Session, check_shape
from sidecar.sessions.worker_memory import take_memory
from sidecar.transport.attach_socket import BACKLOG_CONNECTIONS_MAX, Connection, close_fds, peer_of
from tiers.errors import LayoutError, PoolError

if TYPE_CHECKING:
    from collections.abc import Generator

    from sidecar.protocol import FirstMessage
    from sidecar.service.dispatcher import Dispatcher
    from sidecar.sessions.namespaces import RealmLayout
    from sidecar.sessions.worker_memory import WorkerMemory
    from sidecar.transport.attach_socket import Peer

ACCEPT_PAUSE_SECONDS: Final = 0.1
TURNED_AWAY_PER_WAKE_MAX: Final = 256
TURNED_AWAY_MAX: Final = 16
"""Connections of users who are not served that stay open to be read; more are closed without a
reason, which takes a fifth of the time."""
TURNED_AWAY_SECONDS: Final = 2.0
LOG_AGAIN_SECONDS: Final = 60.0
LOGGED_MAX: Final = 1024
UNMAP_SECONDS_MAX: Final = 30.0
"""How long the connection of a client that left stays open while a copy of its memory runs."""

_logger = logging.getLogger("kvlake.server")


@contextlib.contextmanager
def _as_refusals(connection: Connection) -> Generator[None]:
    """Turn unexpected errors into a refusal of this client: they must not end the sidecar."""
    try:
        yield
    except ProtocolError:
        raise
    except (OSError, MemoryError) as error:
        raise AttachRefused(
            "resources", f"the sidecar lacks memory or descriptors for another client: {error}"
        ) from error
    except (ArithmeticError, LookupError, ValueError) as error:
        _logger.exception(
            "a bug in the checks of an attach message; its client is refused",
            extra=fields(pid=connection.peer.pid, uid=connection.peer.uid),
        )
        raise AttachRefused(
            "internal",
            f"a bug in the sidecar, whose log has more: {type(error).__name__}: {error}",
        ) from error


class Handshakes:
    """Accepts connections and serves each until its end."""

    def __init__(self, dispatcher: Dispatcher, endpoint: str) -> None:
        self._dispatcher = dispatcher
        self._eviction = RealmEviction(dispatcher)
        self._endpoint = endpoint
        self._connections = 0
        self._connections_max = dispatcher.config.limits.sessions_max + BACKLOG_CONNECTIONS_MAX
        self._listener: socket.socket | None = None
        self._listening = anyio.CancelScope()
        self._served_uids = dispatcher.config.runtime.served_uids
        self._turned_away: set[socket.socket] = set()
        self._logged: dict[tuple[int, str], float] = {}
        """When the refusal of a user, by its code, was last logged."""

    async def run(self, listener: socket.socket, accepting: anyio.CancelScope) -> None:
        """Serve connections until cancelled. Cancelling `accepting` keeps the existing ones.

        Takes over `listener`.
        """
        self._listener = listener
        try:
            async with anyio.create_task_group() as tasks:
                with accepting:
                    while True:
                        await self._accept_all(self._listener, tasks)
        finally:
            self._listener.close()
            for sock in self._turned_away:
                sock.close()

    def move_to(self, listener: socket.socket) -> None:
        """Accept on another listener from now on. Connections are kept."""
        self._listener = listener
        self._listening.cancel()

    async def _accept_all(self, listener: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        """Accept until `move_to`, then close the listener."""
        with anyio.CancelScope() as self._listening:
            while True:
                await anyio.wait_readable(listener)
                for _ in range(TURNED_AWAY_PER_WAKE_MAX):
                    sock = await self._accept(listener)
                    if sock is None:
                        break
                    if self._served(sock):
                        tasks.start_soon(self.serve, sock)
                        # Its task must count it before another connection is accepted.
                        break
        listener.close()

    async def _accept(self, listener: socket.socket) -> socket.socket | None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            # No descriptors or memory left: the connection stays in the backlog meanwhile.
            _logger.error("cannot accept", extra=fields(error=error))  # noqa: TRY400
            await anyio.sleep(ACCEPT_PAUSE_SECONDS)
            return None
        return sock

    def _served(self, sock: socket.socket) -> bool:
        """Whether a connection is served. Otherwise it is closed, and nothing of it is read."""
        peer = peer_of(sock)
        if peer.uid not in self._served_uids:
            self._turn_away(sock, peer)
            return False
        if self._connections >= self._connections_max:
            self._dispatcher.socket_stats.connections_cut += 1
            sock.close()
            return False
        return True

    def _turn_away(self, sock: socket.socket, peer: Peer) -> None:
        """Send the reason, and close later: a client reads it once it has sent everything."""
        if len(self._turned_away) >= TURNED_AWAY_MAX:
            self._dispatcher.socket_stats.attaches_refused["user"] += 1
            sock.close()
            return
        error = AttachRefused(
            "user",
            f"uid={peer.uid}: this sidecar serves the uids "
            f"{', '.join(str(uid) for uid in self._served_uids)}; run the engine as one of them, "
            "or add its uid to runtime.allow_uids of the sidecar",
        )
        self._note_refusal(peer, error)
        sock.setblocking(False)
        with contextlib.suppress(OSError):
            sock.send(frame_stream(encode(Refused(error.code, str(error)))), socket.MSG_NOSIGNAL)
            sock.shutdown(socket.SHUT_WR)
        self._turned_away.add(sock)
        asyncio.get_running_loop().call_later(TURNED_AWAY_SECONDS, self._end_turned_away, sock)

    def _end_turned_away(self, sock: socket.socket) -> None:
        self._turned_away.discard(sock)
        sock.close()

    async def serve(self, sock: socket.socket) -> None:
        """Serve one connection until its end."""
        connection = Connection(sock)
        self._connections += 1
        session: Session | None = None
        reason = "the sidecar stops"
        try:
            admitted = await self._admit(connection)
            if isinstance(admitted, Declined):
                await self._stay_declined(admitted, connection)
            elif admitted is not None:
                session = admitted
                reason = await self._stay(session, connection)
        finally:
            try:
                if session is not None:
                    self._dispatcher.end_session(session, reason)
                    # A worker in sleep mode frees its memory after the end of file.
                    if session.memory is not None:
                        await session.memory.wait_unmapped(UNMAP_SECONDS_MAX)
            finally:
                # Also after a bug in the engine, which ends the sidecar.
                connection.close()
                self._connections -= 1

    async def _stay(self, session: Session, connection: Connection) -> str:
        """Wait for the session's end; returns its reason."""
        memory = session.memory
        if memory is None or not self._dispatcher.config.copies.prefault:
            return await connection.wait_end()
        reason = ""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(memory.prefault)
            reason = await connection.wait_end()
            tasks.cancel_scope.cancel()
        return reason

    async def _stay_declined(self, declined: Declined, connection: Connection) -> None:
        """List an engine that serves without the cache until its connection ends."""
        peer, uncached = connection.peer, self._dispatcher.uncached
        if declined.engine_id not in {one.engine_id for one in uncached.all()}:
            _logger.warning(
                "an engine serves without the cache",
                extra=fields(
                    engine=declined.engine_id,
                    pid=peer.pid,
                    code=declined.reason,
                    reason=declined.message,
                ),
            )
        # They have a limit of their own, and take no place of a client that wants to attach.
        self._connections -= 1
        try:
            with uncached.declining(declined, peer):
                await connection.wait_end()
        finally:
            self._connections += 1

    async def _admit(self, connection: Connection) -> Session | Declined | None:
        """The new session of a client, or its `Declined`; None if it was refused or is gone."""
        first: FirstMessage | None = None
        stats = self._dispatcher.socket_stats
        try:
            with anyio.fail_after(self._dispatcher.config.limits.attach_deadline):
                frame, fds = await connection.receive_attach()
            try:
                with _as_refusals(connection):
                    first = decode_first(frame)
                if isinstance(first, Declined):
                    self._dispatcher.uncached.check()
                    return first
                session = await self._attach(connection, first, fds)
            finally:
                close_fds(fds)
        except (AttachRefused, ProtocolError) as error:
            self._note_refusal(connection.peer, error, first)
            connection.try_send(encode(Refused(error.code, str(error))))
            return None
        except TimeoutError:
            stats.attaches_expired += 1
            if self._log_again(connection.peer, "expired"):
                _logger.warning(
                    "connection cut off: it did not attach within limits.attach_deadline",
                    extra=fields(pid=connection.peer.pid, uid=connection.peer.uid),
                )
            return None
        except (EOFError, OSError) as error:
            stats.connections_cut += 1
            _logger.debug("connection ended before it attached", extra=fields(error=error))
            return None
        fds_out = (session.realm.index.fd,) if session.attach.role is Role.SCHEDULER else ()
        if not connection.try_send(encode(self._attached(session)), fds_out):
            connection.hang_up()
        return session

    def _note_refusal(
        self,
        peer: Peer,
        error: AttachRefused | ProtocolError,
        first: FirstMessage | None = None,
    ) -> None:
        self._dispatcher.socket_stats.attaches_refused[error.code] += 1
        self._dispatcher.uncached.refused(peer, first, error)
        if self._log_again(peer, error.code):
            _logger.warning(
                "attach refused (logged once a minute per user and code)",
                extra=fields(pid=peer.pid, uid=peer.uid, code=error.code, reason=error),
            )

    def _log_again(self, peer: Peer, code: str) -> bool:
        """Whether this user and code were not logged for a while: clients retry at once."""
        now, key = time.monotonic(), (peer.uid, code)
        if now - self._logged.get(key, -math.inf) < LOG_AGAIN_SECONDS:
            return False
        self._logged.pop(key, None)
        while len(self._logged) >= LOGGED_MAX:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = now
        return True

    async def _attach(self, connection: Connection, attach: Attach, fds: list[int]) -> Session:
        """Check everything, stateless checks first; create what is created last."""
        dispatcher = self._dispatcher
        with _as_refusals(connection):
            check_shape(attach)
            # Takes seconds for the first worker on a GPU. A client that does not wait so long
            # attaches again, to a prepared device.
            if attach.memory is not None and attach.memory.device_uuid:
                await dispatcher.gpus.prepare(attach.memory)
        # An error of the engine here is no client's fault, and is not turned into a refusal.
        for gone in dispatcher.sessions.disconnected(attach):
            dispatcher.end_session(gone, "end of file")
        with _as_refusals(connection):
            self._check(attach)
        await self._eviction.make_room(attach.parts)
        with _as_refusals(connection):
            # Again: other clients may have attached while room was made.
            self._check(attach)
            memory = take_memory(attach, fds, dispatcher.gpus)
            try:
                session = self._open(attach, connection, memory)
            except BaseException:
                if memory is not None:
                    memory.end()
                raise
        dispatcher.open_session(session)
        dispatcher.uncached.attached(attach)
        return session

    def _check(self, attach: Attach) -> None:
        """Refuse what can be refused before anything is created, or evicted, for it."""
        dispatcher = self._dispatcher
        if dispatcher.draining:
            raise AttachRefused("draining", "the sidecar is stopping; attach to the next one")
        dispatcher.sessions.check(attach, dispatcher.realms.find(attach.parts))

    def _open(self, attach: Attach, connection: Connection, memory: WorkerMemory | None) -> Session:
        dispatcher = self._dispatcher
        parts = attach.parts
        known = dispatcher.realms.find(parts)
        realms = dispatcher.realms.join(parts)
        registered: list[RealmLayout] = []
        try:
            for realm, part in zip(realms, parts, strict=True):
                if self._register(realm, part):
                    registered.append(realm)
        except BaseException:
            # One group was refused: undo what was registered for the others.
            for realm in registered:
                del realm.ranks[attach.segment_number]
            # Refused clients must not use up the limit of realms.
            dispatcher.realms.forget(realm for realm in realms if realm not in known)
            dispatcher.forget_layouts()
            raise
        if dispatcher.watch is not None:
            for realm in registered:
                dispatcher.watch.refresh(realm)
        return dispatcher.sessions.open(attach, connection, realms, memory)

    def _register(self, realm: RealmLayout, attach: Attach) -> bool:
        """Register a worker's geometry, or leave the realm and the pool as they were.

        Returns whether it is new.
        """
        if attach.layout is None:
            return False
        try:
            layout = attach.layout.chunk(attach.blocks_per_chunk)
            new = realm.register(attach.segment_number, layout)
        except LayoutError as error:
            raise AttachRefused("layout", str(error)) from error
        slot_bytes = realm.ranks[attach.segment_number].templates.slot_bytes
        try:
            self._dispatcher.slots.register(layout, slot_bytes)
        except BaseException as error:
            if new:
                del realm.ranks[attach.segment_number]
            if isinstance(error, PoolError):
                raise AttachRefused("pool", str(error)) from error
            raise
        return new

    def _attached(self, session: Session) -> Attached:
        realm, limits = session.realm, self._dispatcher.config.limits
        scheduler = session.attach.role is Role.SCHEDULER
        return Attached(
            version=PROTOCOL_VERSION,
            epoch=self._dispatcher.epoch,
            token=session.token,
            endpoint=self._endpoint,
            limits=Limits(
                lookup_wait_ms_max=round(limits.lookup_wait * 1000),
                load_deadline_ms_max=round(limits.load_deadline * 1000),
                store_deadline_ms_max=round(limits.store_deadline * 1000),
                jobs_inflight_max=limits.jobs_inflight_max,
                lease_ttl_ms_max=round(limits.lease_ttl * 1000),
            ),
            index_salt=realm.index_salt,
            index_bytes=realm.index.size_bytes if scheduler else 0,
        )
