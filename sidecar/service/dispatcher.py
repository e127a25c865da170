"""The dispatcher: turns frames into events for the engine, and its commands into work and answers.

Owns the engine, the realms and sessions, and the executor that carries commands out. Does not own
sockets, tasks or signals (`app.py`), nor handshakes (`handshake.py`).

Invariants: events are fed one at a time, in order, and one that a command causes after all commands
before it. A message can end its own session and nothing else; an error of the engine is a bug and
ends the sidecar, without which its clients go on. A reply that cannot be delivered ends its
session: the client sees the end of file and attaches again, instead of waiting for the answer.
"""

import logging
import os
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Final

import anyio

from sidecar.catalog.garbage_collector import Collector
from sidecar.catalog.service import Catalogs
from sidecar.catalog.sync import StoreWatch
from sidecar.config.model import Config
from sidecar.config.store import StoreSettings
from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import Copied, Draining, Event, SessionClosed
from sidecar.core.directory import FlagChange
from sidecar.core.directory import Realm as Held
from sidecar.core.engine import Engine
from sidecar.core.fair_share import ShareLimits
from sidecar.core.outbox import EngineLimits, WritePolicy
from sidecar.core.stored_table import Keys
from sidecar.core.tenants import Tenants
from sidecar.data.copies import Copies
from sidecar.data.executor import Executor
from sidecar.data.transfer_times import TransferTimes
from sidecar.events.publisher import EventStream
from sidecar.events.sockets import EventSockets
from sidecar.logs import fields
from sidecar.protocol import Error, IndexMoved, Lease, Lookup, Role, ServerMessage, Use
from sidecar.protocol.codec import ProtocolError, encode
from sidecar.protocol.prompts import Prompts
from sidecar.service.prompts import PromptLog
from sidecar.service.uncached import UncachedEngines
from sidecar.service.uses import UseLog
from sidecar.sessions.gpus import Gpus
from sidecar.sessions.namespaces import RealmLayout, Realms
from sidecar.sessions.session import Session, Sessions
from sidecar.transport.zmtp_server import JobSocket, Sent
from tiers.policy import POLICIES
from tiers.pool.host_pool import HostPool
from tiers.store.middleware import Metered

JOBS_SLACK: Final = 4
"""Jobs that a session may have here, in multiples of its jobs in flight: a worker stops counting a
revoked job at once, the sidecar when it is over."""
QUARANTINE_KEYS_MAX: Final = 65_536
READS_BEGUN_MAX: Final = 2
"""Reads started at a time: each takes up to 0.1 ms of the event loop."""
ADOPTED_MAX: Final = 64
"""Restored slots adopted at a time: each takes up to 0.1 ms of the event loop."""
_NO_STORE: Final = StoreSettings(url="file:///", write="off", read="off")
"""Stands for the store where none is configured."""

_logger = logging.getLogger("kvlake.server")


@dataclass(slots=True)
class SocketStats:
    """Counters since the start. `observe/metrics.py` says what each of them counts."""

    sessions_opened: int = 0
    frames_received: int = 0
    replies_dropped: int = 0
    sockets_renewed: int = 0
    locks_renewed: int = 0
    connections_cut: int = 0
    attaches_expired: int = 0
    attaches_refused: Counter[str] = field(default_factory=Counter[str])
    frames_refused: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True)
class SharedStore:
    """The object store, with what follows it in the background."""

    tier: Metered
    settings: StoreSettings
    catalogs: Catalogs
    watch: StoreWatch
    collector: Collector


class Dispatcher:
    """The engine, with what feeds it and carries out its commands."""

    def __init__(self, config: Config, pool: HostPool, store: Metered | None, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self.pool = pool
        self.socket_stats = SocketStats()
        self.prompts = PromptLog(config.limits.prompts_kept)
        self.uses = UseLog(config.limits.prompts_kept)
        self.started = time.time()
        self.lost_before = 0
        self.realms = Realms(config.limits.realms_max)
        self.sessions = Sessions(config.limits.sessions_max)
        self.uncached = UncachedEngines(config.limits.sessions_max)
        self.engine = Engine(
            pool,
            POLICIES[config.host.policy](),
            _engine_limits(config),
            epoch=epoch,
            tenants=Tenants(config.tenants.rules()),
            admit_write=self._admits,
            room_to_write=self._has_room,
            notify=self._notify,
            notify_listed=self._notify_listed,
        )
        self.events: EventStream | None = None
        times = TransferTimes(config.limits.transfers_kept)
        self.copies = Copies(pool.memory, config.copies.threads, self._copied, times)
        self.gpus = Gpus(pool.memory, config.gpu)
        self.store = None if store is None else self._follow(store)
        self.executor = Executor(
            realms=self.realms,
            sessions=self.sessions,
            pool=pool.memory,
            store=store,
            catalogs=None if self.store is None else self.store.catalogs,
            copies=self.copies,
            limits=config.limits,
            feed=self.feed,
            reply=self._reply,
            index_moved=self._index_moved,
            store_failed=(lambda _: None) if self.store is None else self.store.watch.failed,
        )
        self.deadlines = anyio.Event()
        """Set when the engine got a lookup or a lease, which have deadlines."""
        self.drained = anyio.Event()
        """Set when, while draining, no work is left."""
        self.jobs: JobSocket | None = None
        """The socket for replies, once there is one."""
        self._events: deque[tuple[Event, ...]] = deque()
        self._feeding = False
        self._over = False

    def _follow(self, tier: Metered) -> SharedStore:
        settings = self.config.store
        assert settings is not None, "a store was opened"
        catalogs = Catalogs(tier, settings)
        watch = StoreWatch(
            tier,
            catalogs,
            self.realms,
            settings,
            feed=self.feed,
            held=self.engine.stored_mask,
            index_settled=lambda realm: self.executor.indexes.settled(realm.indexed_in),
        )
        collector = Collector(tier, self.config, watch.health, lambda: catalogs.logs_unmerged_max)
        return SharedStore(tier, settings, catalogs, watch, collector)

    def _admits(self, realm_id: int, tenant: bytes, num_bytes: int, objects: int) -> bool:
        """Whether a tenant's quota allows this write to a realm's namespace, as far as is known.

        Without a collector, what a tenant holds is not known: nothing says what a rule of the store
        has deleted.
        """
        quota, store = self.engine.tenants.quota(tenant), self.store
        if store is None or not quota.store_capped or not store.watch.health.creates:
            return True
        held = store.catalogs.usage(tenant, self.realms[realm_id].namespace_digest)
        return quota.admits(held.size_bytes + num_bytes, held.objects + objects)

    def _has_room(self, realm_id: int, num_bytes: int, objects: int) -> bool:
        """Whether the limits of a realm's namespace allow this write, as far as is known.

        The collector enforces them by deleting the oldest chunks, in rounds: faster writes would
        exceed them without this check. Without a collector they do not hold.
        """
        store = self.store
        if store is None or not store.settings.capped or not store.watch.health.creates:
            return True
        held = store.catalogs.namespace_usage(self.realms[realm_id].namespace_digest)
        return store.settings.has_room(held.size_bytes + num_bytes, held.objects + objects)

    def publish(self, sockets: EventSockets, first_number: int) -> None:
        """Publish changes of the tiers from now on. Call it before the first session."""
        self.events = EventStream(
            sockets,
            self.realms,
            self.engine.directory,
            self.pool.memory,
            self.config.events,
            first_number,
        )

    def _notify(self, changes: list[FlagChange]) -> None:
        if self.events is not None and not self._over:
            self.events.changed(changes)

    def _notify_listed(self, realm: Held, keys: Keys) -> None:
        if self.events is not None and not self._over:
            self.events.listed(realm, keys)

    def drain(self) -> None:
        """Start no new work; `drained` is set once all running work has ended."""
        self.feed(Draining())

    def end(self) -> None:
        """Ignore all further events: the tasks that carry out commands are ending."""
        if self.events is not None and not self._over:
            self.events.end()
        self._over = True

    def close(self) -> None:
        """End every session and close every index. No copy may be running."""
        self.end()
        for session in self.sessions.all():
            self.end_session(session, "the sidecar stops")
        if self.config.host.after_stop == "remove":
            # Slots still in use when the pool closes are then leaks.
            self.engine.clear()
        self.gpus.close()
        self.realms.close()

    # --- events ----------------------------------------------------------------------------

    def feed(self, *events: Event) -> None:
        """Pass events that came at once to the engine, and carry out its commands."""
        if self._over:
            return
        self._events.append(events)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                events = self._events.popleft()
                self.executor.execute(self.engine.handle_all(events, time.monotonic()))
        finally:
            self._feeding = False
        if self.engine.draining and self.engine.pending_work().idle:
            self.drained.set()

    def _copied(self, ended: list[Copied]) -> None:
        self.feed(*ended)

    # --- sessions --------------------------------------------------------------------------

    def open_session(self, session: Session) -> None:
        """Announce a new session to the engine."""
        self.socket_stats.sessions_opened += 1
        attach = session.attach
        _logger.info(
            "attached",
            extra=fields(
                session=session.session_id,
                role=attach.role,
                engine=attach.engine_id,
                rank=attach.rank,
                realm=session.realm.realm_id,
                pid=session.connection.peer.pid,
            ),
        )
        if self.events is not None and attach.events_endpoint:
            uid = session.connection.peer.uid
            if uid in (os.geteuid(), 0):
                self.events.follow(session.session_id, attach)
            else:
                # It would choose what this process connects to, and what subscribers receive.
                _logger.warning("an engine of another user is not followed", extra=fields(uid=uid))
        self.feed(session.opened_event())

    def end_session(self, session: Session, reason: str) -> None:
        """End a session, once."""
        if self.sessions.get(session.session_id) is not session:
            return
        _logger.info(
            "session ended",
            extra=fields(
                session=session.session_id, engine=session.attach.engine_id, reason=reason
            ),
        )
        if not session.connection.at_end():
            # Otherwise the handshake closes it, once its memory is unmapped.
            session.connection.hang_up()
        self.sessions.close(session)
        self.realms.use(session.realms)
        if self.jobs is not None:
            self.jobs.forget(session.token)
        if self.events is not None:
            self.events.leave(session.session_id)
        closed = SessionClosed(session.session_id)
        if self._over:
            # Its commands cannot be carried out any more; the engine releases what it held.
            self.engine.handle(closed, time.monotonic())
        else:
            self.feed(closed)
        self.copies.drop(session)

    def leave_lost_gpus(self) -> None:
        """End the sessions of workers on lost GPUs.

        Each attaches again, and is refused with the reason. Otherwise all its jobs would fail here.
        """
        lost = self.gpus.lost
        for session in self.sessions.all() if lost else ():
            memory = session.attach.memory
            if memory is not None and (reason := lost.get(memory.device_uuid)) is not None:
                self.end_session(session, reason)

    @property
    def index_bytes(self) -> int:
        """Shared memory of all indexes in bytes, including those that are being filled."""
        return self.realms.index_bytes + self.executor.indexes.growing_bytes

    def forget_slot_sizes(self) -> None:
        """Drop slot sizes that no realm has."""
        ranks = (rank for realm in self.realms.all() for rank in realm.ranks.values())
        self.pool.keep_classes({rank.templates.slot_bytes for rank in ranks})

    # --- messages --------------------------------------------------------------------------

    def received(self, routing_id: bytes, parts: list[bytes]) -> None:
        """Handle one ZMQ message."""
        self.socket_stats.frames_received += 1
        session = self.sessions.by_token(routing_id)
        if session is None:
            # Not answered: it may be a client of the previous sidecar, which attaches again.
            self.stranger(routing_id)
            return
        try:
            event = session.event_of(parts, self.epoch)
        except ProtocolError as error:
            self._refuse(session, error)
            self._deliver(session, Error(self.epoch, error.code, str(error)))
            return
        if isinstance(event.message, Prompts):
            self.prompts.add(session, event.message, self._gone_seconds)
            return
        if isinstance(event.message, Use):
            self.uses.add(session, event.message)
        self.feed(event)
        if isinstance(event.message, Lookup | Lease):
            self.deadlines.set()

    def _gone_seconds(self, realm_id: int, key: bytes) -> float | None:
        since = self.engine.gone.since(realm_id, key)
        return None if since is None else time.monotonic() - since

    def stranger(self, _: bytes) -> None:
        """Count a connection for jobs that named no session, and was closed."""
        # An engine that is idle learns with its next step only that the sidecar started again.
        self.socket_stats.frames_refused["unknown_peer"] += 1

    def _refuse(self, session: Session, error: ProtocolError) -> None:
        self.socket_stats.frames_refused[error.code] += 1
        about = fields(session=session.session_id, code=error.code, error=error)
        _logger.warning("frame refused", extra=about)

    def _reply(self, session_id: int, message: ServerMessage) -> None:
        session = self.sessions.get(session_id)
        if session is None:
            self.socket_stats.replies_dropped += 1
        else:
            self._deliver(session, message)

    def _deliver(self, session: Session, message: ServerMessage) -> None:
        """Send a message, or end the session. Its client has sent something before."""
        assert self.jobs is not None, "messages come only with the socket"
        sent = self.jobs.send(session.token, encode(message))
        if sent is Sent.OK:
            return
        self.socket_stats.replies_dropped += 1
        what = "does not read its answers" if sent is Sent.FULL else "closed its ZMQ socket"
        _logger.warning(
            "session cut off", extra=fields(session=session.session_id, reason=f"the client {what}")
        )
        session.connection.hang_up()

    def _index_moved(self, realm: RealmLayout) -> None:
        moved = encode(IndexMoved(self.epoch, realm.index.size_bytes))
        for session in self.sessions.all():
            reads = session.realm is realm and session.attach.role is Role.SCHEDULER
            if reads and not session.connection.try_send(moved, (realm.index.fd,)):
                session.connection.hang_up()


def _engine_limits(config: Config) -> EngineLimits:
    limits, store = config.limits, config.store or _NO_STORE
    return EngineLimits(
        writes_inflight_max=store.writes_inflight_max,
        reads_inflight_max=store.reads_inflight_max,
        write_queue_bytes_max=store.write_queue_max,
        leases_max_per_session=limits.jobs_inflight_max,
        lease_ttl_seconds_max=limits.lease_ttl,
        lookups_max_per_session=limits.jobs_inflight_max,
        quarantine_keys_max=QUARANTINE_KEYS_MAX,
        recompute=store.recompute == "when_sooner",
        regret_max=store.regret_max,
        breaker=BreakerRules(
            store.breaker.failures_max, store.breaker.pause, store.breaker.pause_max
        ),
        write=WritePolicy(store.write),
        # What is kept needs no writing: the next start has it, and its turn comes then.
        flush_at_end=config.host.after_stop == "remove",
        store_reads=store.read == "on",
        gone_keys_max=limits.gone_keys_max,
        curve_keys_max=limits.curve_keys_max,
        shares=ShareLimits(
            memory_bytes_max=limits.memory_max,
            copies_queued_max=limits.copies_queued_max,
            storing_bytes_max=limits.storing_max or config.host.size,
            pinned_bytes_max=limits.pinned_max or config.host.size,
            lookups_max=limits.lookups_max,
            leases_max=limits.leases_max,
            jobs_max_per_session=limits.jobs_inflight_max * JOBS_SLACK,
        ),
        verify_loads=config.integrity.verify_loads,
        verify_writes=config.integrity.verify_writes,
        reads_begun_max=READS_BEGUN_MAX,
        adopted_max=ADOPTED_MAX,
    )
