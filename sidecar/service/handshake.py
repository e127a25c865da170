"""Handshake: from a connection on the attach socket to a session, and to the session's end.

Owns whom a connection is accepted from, the time limit of an attach, the order of the checks, and
the answer. An engine that serves without the cache gets no session: it is listed (`uncached.py`).
Does not own the checks themselves (`sessions/`, `protocol/codec.py`) or sockets (`transport/`).

Invariants: a client is refused with a reason before anything is created for it, or has a session;
its descriptors are mapped by that session or closed; nothing that it does here can raise beyond its
own connection. Users who are not served are refused before a byte is read, and do not delay others.
A refusal is logged once a minute for each user and code.
"""

import contextlib
import logging
import math
import socket
import time
from collections.abc import Generator
from typing import Final

import anyio
import anyio.abc

from sidecar.errors import AttachRefused
from sidecar.logs import fields
from sidecar.protocol import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    Declined,
    FirstMessage,
    Limits,
    Refused,
    Role,
)
from sidecar.protocol.codec import ProtocolError, decode_first, encode, frame_stream
from sidecar.protocol.peer import Peer
from sidecar.service.dispatcher import Dispatcher
from sidecar.service.realm_eviction import RealmEviction
from sidecar.service.start_checks import cgroup_room
from sidecar.sessions.session import Session, check_shape
from sidecar.sessions.worker_memory import WorkerMemory, take_memory
from sidecar.transport.unix_socket import Connection, close_fds
from tiers.errors import LayoutError, PoolError
from tiers.sizes import approximate_size

ATTACHING_MAX: Final = 128
"""Connections without a session, beside `limits.sessions_max` with one."""
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
    """Turn errors into a refusal of this client: they must not end the sidecar."""
    try:
        yield
    except ProtocolError:
        raise
    except (LayoutError, PoolError) as error:
        code = "layout" if isinstance(error, LayoutError) else "pool"
        raise AttachRefused(code, str(error)) from error
    except (OSError, MemoryError) as error:
        raise AttachRefused(
            "resources",
            f"the sidecar lacks memory, descriptors or threads for another client: {error}",
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
    """Serves each connection until its end, as one of `tasks`."""

    def __init__(self, dispatcher: Dispatcher, endpoint: str, tasks: anyio.abc.TaskGroup) -> None:
        self._dispatcher = dispatcher
        self._eviction = RealmEviction(dispatcher)
        self._endpoint = endpoint
        self._tasks = tasks
        self._connections = 0
        self._connections_max = dispatcher.config.limits.sessions_max + ATTACHING_MAX
        self._served_uids = dispatcher.config.runtime.served_uids
        self._turned_away = 0
        self._prefaulting_bytes = 0
        """What is being mapped ahead may allocate."""
        self._logged: dict[tuple[int, str], float] = {}
        """When the refusal of a user, by its code, was last logged."""

    def accepted(self, sock: socket.socket, peer: Peer) -> None:
        """Serve a new connection, or turn it away. Takes over `sock`."""
        if peer.uid in self._served_uids:
            self._tasks.start_soon(self.serve, sock, peer)
        elif self._turned_away >= TURNED_AWAY_MAX:
            self._dispatcher.socket_stats.attaches_refused["user"] += 1
            sock.close()
        else:
            self._turned_away += 1
            self._tasks.start_soon(self._turn_away, sock, peer)

    async def _turn_away(self, sock: socket.socket, peer: Peer) -> None:
        """Send the reason, and close later: a client reads it once it has sent everything."""
        error = AttachRefused(
            "user",
            f"uid={peer.uid}: this sidecar serves the uids "
            f"{', '.join(str(uid) for uid in self._served_uids)}; run the engine as one of them, "
            "or add its uid to runtime.allow_uids of the sidecar",
        )
        try:
            self._note_refusal(peer, error)
            with contextlib.suppress(OSError):
                sock.send(frame_stream(encode(Refused(error.code, str(error)))))
                sock.shutdown(socket.SHUT_WR)
            await anyio.sleep(TURNED_AWAY_SECONDS)
        finally:
            self._turned_away -= 1
            sock.close()

    async def serve(self, sock: socket.socket, peer: Peer) -> None:
        """Serve one connection until its end."""
        connection = Connection(sock, peer)
        self._connections += 1
        try:
            if self._connections > self._connections_max:
                self._dispatcher.socket_stats.connections_cut += 1
                return
            admitted = await self._admit(connection)
            if isinstance(admitted, Declined):
                await self._stay_declined(admitted, connection)
            elif admitted is not None:
                await self._stay(admitted)
        finally:
            # Also after a bug in the engine, which ends the sidecar.
            connection.close()
            self._connections -= 1

    async def _stay(self, session: Session) -> None:
        """Wait for the session's end, and end it here."""
        memory = session.memory
        reason = "the sidecar stops"
        try:
            async with anyio.create_task_group() as tasks:
                if memory is not None:
                    tasks.start_soon(self._prefault, memory)
                reason = await session.connection.wait_end()
                tasks.cancel_scope.cancel()
        finally:
            self._dispatcher.end_session(session, reason)
            # A worker in sleep mode frees its memory after the end of file.
            if memory is not None:
                await memory.wait_unmapped(UNMAP_SECONDS_MAX)

    async def _prefault(self, memory: WorkerMemory) -> None:
        """Map a worker's memory ahead, if it may be."""
        if not self._may_prefault(memory):
            return
        needed = memory.prefault_bytes_max
        self._prefaulting_bytes += needed
        try:
            await memory.prefault()
        finally:
            self._prefaulting_bytes -= needed

    def _may_prefault(self, memory: WorkerMemory) -> bool:
        """Whether to map a worker's memory ahead. What that allocates counts for this container."""
        if not self._dispatcher.config.copies.prefault:
            return False
        needed, (room, where) = memory.prefault_bytes_max, cgroup_room()
        if room is None:
            return True
        # Part of it may be in use already, but a sidecar that is killed loses more.
        room = max(0, room - self._prefaulting_bytes)
        if needed <= room:
            return True
        _logger.warning(
            "KV memory is not mapped ahead: its first copies take longer",
            extra=fields(
                reason=f"{where} has {approximate_size(room)} left, and it may need "
                f"{approximate_size(needed)}; raise the limit, or set copy.prefault to false"
            ),
        )
        return False

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
        except ProtocolError as error:
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
        self, peer: Peer, error: ProtocolError, first: FirstMessage | None = None
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
        if len(self._logged) >= LOGGED_MAX:
            self._logged.clear()
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
        if dispatcher.engine.draining:
            raise AttachRefused("draining", "the sidecar is stopping; attach to the next one")
        dispatcher.sessions.check(attach, dispatcher.realms.find(attach.parts))

    def _open(self, attach: Attach, connection: Connection, memory: WorkerMemory | None) -> Session:
        """Create the session and its realms, or leave realms and pool as they were."""
        dispatcher, parts, number = self._dispatcher, attach.parts, attach.segment_number
        known = dispatcher.realms.find(parts)
        realms = dispatcher.realms.join(parts)
        new = [realm for realm in realms if attach.layout and number not in realm.ranks]
        try:
            for realm, part in zip(realms, parts, strict=True):
                if part.layout is not None:
                    realm.register(number, part.layout.chunk(part.blocks_per_chunk))
                    dispatcher.pool.register_class(realm.ranks[number].templates.slot_bytes)
        except BaseException:
            for realm in new:
                realm.ranks.pop(number, None)
            # Refused clients must not use up the limit of realms.
            dispatcher.realms.forget(realm for realm in realms if realm not in known)
            dispatcher.forget_slot_sizes()
            raise
        if dispatcher.store is not None:
            for realm in new:
                dispatcher.store.watch.refresh(realm)
        return dispatcher.sessions.open(attach, connection, realms, memory)

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
