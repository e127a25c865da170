"""The engine: what to copy, read, write, evict and answer. Events in, commands out.

Owns the sessions, and calls the parts that decide: `directory.py` (where chunks are),
`host_tier.py` (slots), `jobs.py` (copies of workers), `lookups.py` (waiting for the store),
`reads.py` and `writes.py`, `store_view.py` (the catalog), `pins.py` (leases of loads, and pins of
requests). The same events in the same order give the same commands. Epochs are checked before.

Invariants, which the tests verify after every event: every allocated slot belongs to exactly one
segment, zombie or restored slot; every pin has an owner; what runs on a slot is what the parts say.

The commands of one event are in this order: changes of the shared index (readers stop seeing an
evicted chunk before its slot is filled again, and see a stored one before its worker gets the
answer), then copies, reads and writes, then messages.
"""

from collections.abc import Callable, Collection, Iterable
from typing import Final

from sidecar.core.commands import (
    CaughtUp,
    Command,
    Copied,
    Counters,
    Draining,
    Event,
    ForgetRealms,
    ForgettingCost,
    IndexOffer,
    IndexSet,
    Listed,
    PendingWork,
    ReadDone,
    Received,
    Restored,
    Resume,
    Resumed,
    SessionClosed,
    SessionOpened,
    Tick,
    Written,
)
from sidecar.core.directory import Directory, FlagChange, GoneKeys, Realm
from sidecar.core.event_feeds import EventFeed
from sidecar.core.fair_share import FairShares
from sidecar.core.host_tier import HostChange, HostTier
from sidecar.core.jobs import Job, Jobs
from sidecar.core.lookups import Lookups
from sidecar.core.outbox import CoreParts, EngineLimits, Outbox, WritePolicy
from sidecar.core.pins import Leases, Pins, RequestPins
from sidecar.core.reads import Reads
from sidecar.core.restored import SlotAllocator
from sidecar.core.store_view import StoreView
from sidecar.core.stored_table import Keys
from sidecar.core.tenants import Tenants
from sidecar.core.writes import Writes
from sidecar.protocol import (
    ClientMessage,
    JobOutcome,
    Lease,
    Lookup,
    Outcome,
    Pin,
    Release,
    Role,
    Submit,
    Use,
)
from sidecar.protocol.prompts import Prompts
from tiers.policy import Policy

CHUNKS_FORGOTTEN_MAX: Final = 64
"""Chunks that one `ForgetRealms` evicts. Each takes about 20 microseconds of the event loop."""


class Engine:
    """Decides. Give it every event, carry out every command, and report how each one ended.

    Its parts are public: the status reads them, and tests check what holds between them.

    `admit_write` says whether a tenant may have this many bytes and objects more in the store, in
    the namespace of a realm; `room_to_write`, whether that namespace may. `notify` takes every
    chunk that became available in a tier, or left it; `notify_listed` takes those of which only
    the catalog is known.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        policy: Policy,
        limits: EngineLimits,
        *,
        epoch: int,
        tenants: Tenants,
        admit_write: Callable[[int, bytes, int, int], bool],
        room_to_write: Callable[[int, int, int], bool],
        notify: Callable[[list[FlagChange]], None],
        notify_listed: Callable[[Realm, Keys], None],
    ) -> None:
        self.counters = Counters()
        self.limits = limits
        self._epoch = epoch
        self.sessions: dict[int, SessionOpened] = {}
        self.draining = False
        self._notify = notify
        self.notify_listed = notify_listed
        self._outbox = Outbox(epoch)
        self._event_feeds: dict[int, EventFeed] = {}
        directory = self.directory = Directory(readable=limits.store_reads)
        self.gone = GoneKeys(limits.gone_keys_max, directory.realms)
        self.tenants = tenants
        shares = self.shares = FairShares(limits.shares)
        host = self.host = HostTier(
            directory,
            slots,
            policy,
            self.counters,
            tenants,
            writes_all=limits.write in (WritePolicy.THROUGH, WritePolicy.ON_EVICT),
            curve_keys_max=limits.curve_keys_max,
        )
        emit = self._outbox.emit
        parts = CoreParts(epoch, limits, directory, host, self.counters, tenants, shares, emit)
        self.pins = Pins(self.directory, self.shares.pinned)
        self.store = StoreView(parts)
        self.writes = Writes(parts, self.store, admit_write, room_to_write)
        self.reads = Reads(parts, self.store)
        self.breakers = {"read": self.reads.breaker, "write": self.writes.breaker}
        self.lookups = Lookups(parts, self.reads, self.pins)
        self.leases = Leases(self.pins, self.shares, ttl_seconds_max=limits.lease_ttl_seconds_max)
        self.request_pins = RequestPins(parts, self.pins)
        self.jobs = Jobs(parts)

    def handle(self, event: Event, now: float) -> list[Command]:
        """Process one event; see `handle_all`."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """Process events that came at once; returns what to do, in order. `now` never decreases.

        Raises:
            KeyError: a copy, read or write ended that was not running.
            IllegalTransition: a bug in the engine.
        """
        self.lookups.now = self.host.now = now
        self.host.expire(now)
        self._apply_host_changes()
        # Before the events, because rows of the catalog are counted apart from other changes.
        self._publish_changes()
        for event in events:
            self._dispatch(event, now)
            self._apply_host_changes()
        for chunk, outcome in self.reads.pump(now):
            self.lookups.chunk_failed(chunk, outcome)
        self._apply_host_changes()
        self.writes.pump(now)
        self._publish_changes()
        return self._outbox.take()

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case Received() | SessionClosed():
                self._handle_session(event, now)
            case Copied():
                self._job_ended(self.jobs.copied(event, now))
            case Written():
                self.writes.ended(event, now)
            case ReadDone():
                self.lookups.read_ended(event)
            case SessionOpened():
                self._open(event)
                self._adopt()
            case Restored():
                self.host.restore(event.slots)
            case Listed():
                self._publish_listed(event)
            case CaughtUp():
                known = self._known([event.realm_id])
                self.counters.stale_messages += not known
                for realm in known:
                    realm.caught_up = True
            case ForgetRealms():
                self._forget_realms(event.realm_ids)
            case Tick():
                self.counters.leases_expired += self.leases.expire(now)
                self.lookups.expire()
                self.request_pins.expire(now)
            case Resumed():
                self._outbox.resuming = self.reads.resuming = False
                self._adopt()
            case Draining():
                self.draining = self.jobs.draining = True
                self.request_pins.drain()
                self.lookups.drain()
                self.writes.drain(flush=self.limits.flush_at_end)

    def _apply_host_changes(self) -> None:
        """Report what happened to chunks of the host tier to the other parts, in order."""
        changes = self.host.changes
        while changes:
            change, chunk = changes.popleft()
            match change:
                case HostChange.COMPLETE:
                    self.writes.completed(chunk)
                    self.lookups.chunk_loaded(chunk)
                case HostChange.RESTORED:
                    self.writes.restored(chunk)
                    self.lookups.chunk_loaded(chunk)
                case HostChange.USED:
                    self.writes.used(chunk)
                case HostChange.STORE_FAILED:
                    self.lookups.store_failed(chunk)
                case HostChange.REMOVED:
                    self.writes.removed(chunk)
                    self.request_pins.removed(chunk)
                    self.lookups.chunk_failed(chunk, Outcome.CORRUPT)

    def _publish_changes(self) -> None:
        changes = self.directory.take_changes()
        for change in changes:
            gone = self.gone.note(change, self.lookups.now)
            self._outbox.change_index(
                IndexSet(change.realm.realm_id, change.key, *change.now, gone)
            )
        for change in self.directory.take_unkept():
            told = self.gone.why(change.realm.realm_id, change.key)
            gone = self.gone.note(change, self.lookups.now)
            if gone not in (None, told):
                self._outbox.change_index(
                    IndexSet(change.realm.realm_id, change.key, *change.now, gone)
                )
        self._withdraw(self.gone.forget_oldest())
        if changes:
            self._notify(changes)
            for feed in self._event_feeds.values():
                feed.changed(changes)
        self.directory.free_removed()

    def _withdraw(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Remove chunks that are in no tier from the shared index."""
        for realm_id, key in names:
            self._outbox.change_index(IndexSet(realm_id, key, in_host=False, in_store=False))

    def _publish_listed(self, event: Listed) -> None:
        keys = self.store.listed(event)
        if keys is not None:
            realm = self.directory.realms[event.realm_id]
            self._outbox.change_index(IndexOffer(realm.realm_id, keys))
            self.notify_listed(realm, keys)
            for feed in self._event_feeds.values():
                feed.listed(realm, keys)

    def _adopt(self) -> None:
        if self.host.adopt(self.limits.adopted_max):
            self._outbox.emit(Resume())

    # --- sessions ------------------------------------------------------------------------------

    def _open(self, event: SessionOpened) -> None:
        attach, rank = event.attach, event.attach.segment_number
        for group in event.groups:
            realm = self.directory.open_realm(group.realm_id, attach.num_segments)
            assert realm.world_size == attach.num_segments, "it is part of a realm's identity"
            if group.layout is not None and realm.layouts[rank] is None:
                self.host.register_layout(
                    realm, rank, group.layout, group.namespace, group.slot_bytes
                )
        if attach.role is Role.SCHEDULER:
            self.leases.forget_early(event.engine)
            if attach.want_events:
                self._event_feeds[event.session_id] = EventFeed(
                    self._epoch, event.session_id, self._realms_of(event), self._outbox.emit
                )
        self.sessions[event.session_id] = event

    def _realms_of(self, session: SessionOpened) -> list[Realm]:
        """By the number of the KV cache group."""
        return [self.directory.realms[group.realm_id] for group in session.groups]

    def _handle_session(self, event: Received | SessionClosed, now: float) -> None:
        session = self.sessions.get(event.session_id)
        if session is None:
            self.counters.stale_messages += 1
        elif isinstance(event, SessionClosed):
            self._close(session)
        else:
            self._receive(session, event.message, now)

    def _receive(self, session: SessionOpened, message: ClientMessage, now: float) -> None:
        session_id, realms = session.session_id, self._realms_of(session)
        match message:
            case Submit():
                self._submit(session, realms, message, now)
            case Lookup():
                self.lookups.start(session_id, realms, message)
            case Lease():
                self._lease(session, realms, message, now)
            case Pin():
                if not self.draining:
                    self.request_pins.pin(session_id, realms, message, now)
            case Release():
                for lease_id in message.lease_ids:
                    self.leases.release(session_id, lease_id)
                for lookup_id in message.lookup_ids:
                    self.lookups.release(session_id, lookup_id)
                if message.pins:
                    self.request_pins.close_session(session_id)
                feed = self._event_feeds.get(session_id)
                if message.heard >= 0 and feed is not None:
                    feed.acknowledge(message.heard)
            case Use():
                self.host.use(realms, message)
            case Prompts():
                # `service/dispatcher.py` keeps them.
                pass

    def _submit(
        self, session: SessionOpened, realms: list[Realm], message: Submit, now: float
    ) -> None:
        # Loads first: a store may evict what a load of the same step needs.
        for load in message.loads:
            self._job_ended(self.jobs.load(session, realms, message.fence, load))
        for store in message.stores:
            self._job_ended(self.jobs.store(session, realms, message.fence, store, now))

    def _job_ended(self, job: Job | None) -> None:
        if job is None:
            return
        session = job.session
        if session.session_id in self.sessions:
            self._outbox.job_ended(session.session_id, JobOutcome(job.job_id, job.outcome))
        if job.loading:
            name = (*session.engine, job.job_id)
            self.leases.rank_finished(name, session.attach.rank, session.attach.world_size)

    def _lease(
        self, session: SessionOpened, realms: list[Realm], message: Lease, now: float
    ) -> None:
        session_id = session.session_id
        if self.shares.leases.of(session_id) >= self.limits.leases_max_per_session:
            self.counters.leases_refused += 1
            self.shares.refuse("lease", "client")
            return
        # Each key is of one group, which is not known here.
        found = (realm.chunks.get(key) for key in dict.fromkeys(message.keys) for realm in realms)
        chunks = [chunk for chunk in found if chunk is not None]
        name = (*session.engine, message.lease_id)
        if self.leases.take(session_id, name, chunks, session.attach.world_size, now):
            self.tenants.counters(message.tenant).leases += 1
        else:
            self.counters.leases_refused += 1

    def _close(self, session: SessionOpened) -> None:
        del self.sessions[session.session_id]
        self._event_feeds.pop(session.session_id, None)
        self.lookups.close_session(session.session_id)
        self.request_pins.close_session(session.session_id)
        if session.attach.role is Role.SCHEDULER:
            self.leases.close_session(session.session_id, session.engine)

    # --- realms without sessions ---------------------------------------------------------------

    def _known(self, realm_ids: Collection[int]) -> list[Realm]:
        known = self.directory.realms
        return [known[realm_id] for realm_id in realm_ids if realm_id in known]

    def _has_session(self, realm_ids: Collection[int]) -> bool:
        used = {group.realm_id for one in self.sessions.values() for group in one.groups}
        return not used.isdisjoint(realm_ids)

    def forgetting_cost(self, realm_ids: Collection[int]) -> ForgettingCost:
        """What forgetting these realms would lose. Its time does not depend on their chunks."""
        realms = self._known(realm_ids)
        return ForgettingCost(
            self.writes.outstanding_in(realm_ids),
            sum(len(realm.chunks) * realm.chunk_bytes for realm in realms),
            any(len(realm.stored) for realm in realms),
        )

    def in_use(self, realm_ids: Collection[int]) -> bool:
        """Whether a session, running work or a pin is in one of these realms. Linear in chunks."""
        return self._has_session(realm_ids) or any(
            self.host.busy(realm)
            or any(chunk.pins or chunk.busy for chunk in realm.chunks.values())
            for realm in self._known(realm_ids)
        )

    def _forget_realms(self, realm_ids: Collection[int]) -> None:
        """Evict some chunks; once none is left and nothing runs, forget the realms."""
        if self._has_session(realm_ids):
            return
        realms, left = self._known(realm_ids), CHUNKS_FORGOTTEN_MAX
        for realm in realms:
            left -= self.host.evict_realm(realm, left)
        if left < CHUNKS_FORGOTTEN_MAX or any(
            realm.chunks or self.host.busy(realm) for realm in realms
        ):
            return
        for realm in realms:
            self.gone.forget_realm(realm.realm_id)
            del self.directory.realms[realm.realm_id]
            self.store.forget_realm(realm.realm_id)
            self.leases.forget_realm(realm.realm_id)

    def clear(self) -> list[Command]:
        """Evict every chunk that is not pinned and not in use: after a drain, all of them."""
        self.host.clear()
        self._apply_host_changes()
        self._publish_changes()
        return self._outbox.take()

    def stored_mask(self, realm_id: int, key: bytes) -> int:
        """Ranks whose segment of `key` is in the store, as bits."""
        realm = self.directory.realms.get(realm_id)
        return 0 if realm is None else realm.stored.mask(key)

    def pending_work(self) -> PendingWork:
        """Work that has not ended."""
        return PendingWork(
            copies_running=len(self.jobs.running()),
            writes_running=len(self.writes.running()),
            writes_pending=self.writes.pending_ranks + self.writes.flushing,
            reads_running=len(self.reads.running()),
            reads_queued=len(self.reads.queue),
        )
