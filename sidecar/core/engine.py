"""The engine: what to copy, read, write, evict and answer. Events in, commands out.

Owns the sessions and the wiring of the parts that decide: `directory.py` (where chunks are),
`host_tier.py` (slots), `jobs.py` (copies of workers), `lookups.py` (who waits for the store),
`reads.py` and `writes.py`, `store_view.py` (the catalog), `leases.py` (pins of loads),
`request_pins.py` (pins that requests ask for). It does no I/O and has neither clock nor randomness:
the same events in the same order give the same commands. The server checks epochs and frames before
an event.

Invariants, which the tests verify after every event: every allocated slot is in
the directory, a zombie or in the inventory, and in one place only; every pin has an owner; what
runs on a slot is what the parts say is running.

The order of the commands of one event: changes of the shared index (so that a reader stops seeing
an evicted chunk before its slot is filled anew, and sees a stored one before the worker is told),
then copies, reads and writes, then messages.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.core.breaker import Breaker, BreakerRules
from sidecar.core.commands import (
    CaughtUp,
    Command,
    Copied,
    Counters,
    Draining,
    Event,
    ForgetRealms,
    IndexOffer,
    IndexSet,
    LeaseTaken,
    Listed,
    LookedUp,
    OpenedGroup,
    PinAsked,
    ReadDone,
    Released,
    Reply,
    Restored,
    Resume,
    Resumed,
    SessionClosed,
    SessionOpened,
    Submitted,
    Tick,
    Written,
)
from sidecar.core.directory import Directory, FlagChange, Realm
from sidecar.core.event_feeds import EventFeeds
from sidecar.core.fair_share import FairShares, Pins, ShareLimits
from sidecar.core.host_tier import HostChange, HostTier
from sidecar.core.idle_realms import IdleRealms, Loss
from sidecar.core.jobs import Job, Jobs
from sidecar.core.leases import Leases
from sidecar.core.lookups import Lookups
from sidecar.core.parts import CoreParts, EngineSnapshot, Outbox, PendingWork, RealmSnapshot
from sidecar.core.reads import Reads
from sidecar.core.request_pins import RequestPins
from sidecar.core.store_view import StoreView
from sidecar.core.tenants import Tenants
from sidecar.core.writes import WritePolicy, Writes
from sidecar.protocol import Error, JobOutcome, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from sidecar.core.listed_rows import Keys
    from sidecar.core.restored import SlotAllocator
    from tiers.policy.policy import Policy


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Bounds that the operator sets, and which ways to the store are open."""

    writes_inflight_max: int
    reads_inflight_max: int
    write_queue_bytes_max: int
    leases_max_per_session: int
    lease_ttl_seconds_max: float
    lookups_max_per_session: int
    quarantine_keys_max: int
    recompute: bool
    """Whether a run that is computed sooner than read is computed."""
    regret_max: float
    """Fraction of the time to compute that waiting for the store may cost in vain."""
    breaker: BreakerRules
    write: WritePolicy
    flush_at_end: bool
    """Whether what `write` has not written yet is written while draining."""
    store_reads: bool
    reads_begun_max: int = 1 << 30
    """Reads that one event begins, room for them made; the others get turns of their own."""
    adopted_max: int = 1 << 30
    """Restored slots that one event takes in; the others get turns of their own."""
    bounds: ShareLimits = field(default_factory=ShareLimits)
    """What may wait, in all and of one session."""
    verify_loads: float = 1.0
    """Part of the loaded chunks that is verified, 0 to 1; one not seen before always is."""
    verify_writes: float = 1.0
    """The same of the segments that are written to the store."""


def _always(realm_id: int, tenant: bytes, num_bytes: int, objects: int) -> bool:  # noqa: ARG001
    """No tenant has a limit in the store."""
    return True


def _unbounded(realm_id: int, num_bytes: int, objects: int) -> bool:  # noqa: ARG001
    """No namespace has a bound in the store."""
    return True


class Engine:
    """Decides. Feed it every event; carry out every command; tell it how each one ended.

    Its parts are public so that tests can check what holds between them; nobody else reads them.

    Args:
        policy: the order of eviction of all chunks.
        tenants: limits of tenants; none where it is left out.
        admit_write: whether a tenant may have so many bytes and objects more in the
            store, in the namespace of a realm.
        room_to_write: whether that namespace may have so many bytes and objects more.
        tell: hears of every chunk that became available in a tier, or went from it; except
        tell_listed: of those in the store that nothing but the catalog is known of.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        policy: Policy,
        limits: EngineLimits,
        *,
        epoch: int,
        tenants: Tenants | None = None,
        admit_write: Callable[[int, bytes, int, int], bool] = _always,
        room_to_write: Callable[[int, int, int], bool] = _unbounded,
        tell: Callable[[list[FlagChange]], None] | None = None,
        tell_listed: Callable[[Realm, Keys], None] | None = None,
    ) -> None:
        self.counters = Counters()
        self.limits = limits
        self._epoch = epoch
        self._slots = slots
        self.sessions: dict[int, SessionOpened] = {}
        self.draining = False
        self._tell = tell
        self.tell_listed = tell_listed
        self._outbox = Outbox(epoch)
        self._event_feeds = EventFeeds(epoch, self._outbox.emit)
        self.directory = Directory(readable=limits.store_reads)
        self.tenants = Tenants() if tenants is None else tenants
        self.bounds = FairShares(limits.bounds)
        self.host = HostTier(
            self.directory,
            slots,
            policy,
            self.counters,
            self.tenants,
        )
        parts = CoreParts(
            self.directory,
            self.host,
            self.counters,
            self.tenants,
            self.bounds,
            self._outbox.emit,
        )
        self.pins = Pins(self.directory, self.host.chunk_bytes, self.bounds.pinned)
        self.store = StoreView(
            parts,
            self._chunks_listed,
            quarantine_keys_max=limits.quarantine_keys_max,
            announces=limits.write is not WritePolicy.OFF,
        )
        self.breakers = {name: Breaker(limits.breaker) for name in ("read", "write")}
        self.writes = Writes(
            parts,
            self.store,
            self.breakers["write"],
            policy=limits.write,
            inflight_max=limits.writes_inflight_max,
            queue_bytes_max=limits.write_queue_bytes_max,
            verify=limits.verify_writes,
            admit=admit_write,
            room=room_to_write,
        )
        self.reads = Reads(
            parts,
            self.store,
            self.breakers["read"],
            inflight_max=limits.reads_inflight_max,
            begun_max=limits.reads_begun_max,
        )
        self.lookups = Lookups(
            parts,
            self.reads,
            self.pins,
            epoch=epoch,
            lookups_max_per_session=limits.lookups_max_per_session,
            ttl_seconds_max=limits.lease_ttl_seconds_max,
            recompute=limits.recompute,
            regret_max=limits.regret_max,
        )
        self.leases = Leases(self.pins, self.bounds, ttl_seconds_max=limits.lease_ttl_seconds_max)
        self.kept = RequestPins(parts, self.pins)
        self._idle_realms = IdleRealms(
            self.directory, self.host, self.store, self.writes, self.leases
        )
        self.jobs = Jobs(
            parts,
            verify_loads=limits.verify_loads,
            ended=self._job_ended,
            store_failed=self.lookups.store_failed,
        )

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take one event in; returns what to do, in order. `now` never goes back.

        Raises:
            KeyError: a copy, read or write ended that was not running.
            ValueError: a session that `refusal` would have refused.
            IllegalTransition: a bug in the engine.
        """
        self.host.expire(now)
        self._apply_host_changes()
        # Told before the event: lines of the catalog count chunks that nothing else has changed.
        self._tell_changes()
        match event:
            case (
                Submitted() | LookedUp() | LeaseTaken() | PinAsked() | Released() | SessionClosed()
            ):
                self._handle_session(event, now)
            case Restored():
                self.host.restore(event.slots)
            case SessionOpened():
                self._open(event)
                self._adopt_some()
            case Copied():
                self.jobs.copied(event, now)
            case Written():
                self.writes.ended(event, now)
            case ReadDone():
                self.lookups.read_ended(event, now)
            case Listed():
                self.store.listed(event)
            case CaughtUp() | ForgetRealms():
                self._handle_realms(event)
            case Tick():
                self.counters.leases_expired += self.leases.expire(now)
                self.lookups.expire(now)
                self.kept.expire(now)
            case Resumed():
                self._outbox.resumed()
                self._adopt_some()
                self.reads.resumed()
            case Draining():
                self.draining = True
                self.kept.drain()
                self.lookups.drain()
                self.writes.draining(flush=self.limits.flush_at_end)
        self._apply_host_changes()
        for chunk, outcome in self.reads.pump(now):
            self.lookups.gave_up(chunk, outcome)
        self._apply_host_changes()
        self.writes.pump(now)
        return self._flush()

    def _apply_host_changes(self) -> None:
        """Pass on what happened to chunks of the host tier, in the order in which it did."""
        changes = self.host.changes
        while changes:
            change, chunk = changes.popleft()
            match change:
                case HostChange.COMPLETE:
                    self.writes.completed(chunk)
                    self.lookups.completed(chunk)
                case HostChange.RESTORED:
                    self.writes.restored(chunk)
                    self.lookups.completed(chunk)
                case HostChange.USED:
                    self.writes.wanted(chunk)
                case HostChange.REMOVED:
                    self.writes.removed(chunk)
                    self.lookups.removed(chunk)

    def _handle_realms(self, event: CaughtUp | ForgetRealms) -> None:
        if isinstance(event, ForgetRealms):
            if self._used_realms.isdisjoint(event.realm_ids):
                self._idle_realms.forget(event.realm_ids)
        elif event.realm_id in self.directory.realms:
            self.writes.caught_up(event.realm_id)
        else:
            self.counters.stale_messages += 1

    def refusal(self, event: SessionOpened) -> str | None:
        """Why a session cannot be served: its geometry contradicts what its realm holds."""
        if event.session_id in self.sessions:
            return f"session_id={event.session_id} is already open"
        for group in event.groups:
            reason = self._group_refusal(event, group)
            if reason is not None:
                return reason
        return None

    def _group_refusal(self, event: SessionOpened, group: OpenedGroup) -> str | None:
        if event.role is Role.WORKER and group.layout is None:
            return "layout=None: a worker must give its rank's chunk layout"
        realm = self.directory.realms.get(group.realm_id)
        if realm is None:
            return None
        if realm.world_size != event.num_segments:
            return (
                f"world_size={event.world_size} with replicas={event.replicas} makes chunks of "
                f"{event.num_segments} segments, but those of the same topology have "
                f"{realm.world_size}; give different cuts different topology names"
            )
        known = realm.layouts[event.segment_number]
        if event.role is Role.WORKER and known is not None and known != group.layout:
            return (
                f"layout of rank {event.rank} is {group.layout}, but an earlier worker of the same "
                f"namespace and topology had {known}; use one kvlake configuration for both"
            )
        return None

    def _open(self, event: SessionOpened) -> None:
        reason = self.refusal(event)
        if reason is not None:
            raise ValueError(reason)
        for group in event.groups:
            realm = self.directory.open_realm(group.realm_id, event.num_segments)
            number = event.segment_number
            if group.layout is not None and realm.layouts[number] is None:
                self.host.learn_layout(realm, number, group.layout)
                self.host.adopt(realm, number, group.namespace)
        if event.role is Role.SCHEDULER:
            self.leases.forget_early((event.realm_id, event.engine_id))
            if event.want_events:
                realms = [self.directory.realms[group.realm_id] for group in event.groups]
                self._event_feeds.open(event.session_id, realms)
        self.sessions[event.session_id] = event

    def _adopt_some(self) -> None:
        if self.host.adopt_some(self.limits.adopted_max):
            self._outbox.emit(Resume())

    def _handle_session(
        self,
        event: Submitted | LookedUp | LeaseTaken | PinAsked | Released | SessionClosed,
        now: float,
    ) -> None:
        session = self.sessions.get(event.session_id)
        if session is None:
            self.counters.stale_messages += 1
            return
        realms = [self.directory.realms[group.realm_id] for group in session.groups]
        worker = session.role is Role.WORKER
        match event:
            case SessionClosed():
                self._close(session)
            case Submitted() if worker:
                self._submit(session, realms, event, now)
            case LookedUp() if not worker:
                self.lookups.ask(session.session_id, realms, event.message, now)
            case LeaseTaken() if not worker:
                self._lease(session, realms, event, now)
            case PinAsked() if not worker:
                if not self.draining:
                    self.kept.ask(session.session_id, realms, event.message, now)
            case Released() if not worker:
                for lease_id in event.lease_ids:
                    self.leases.release(session.session_id, lease_id)
                for lookup_id in event.lookup_ids:
                    self.lookups.release(session.session_id, lookup_id)
                if event.pins:
                    self.kept.close_session(session.session_id)
                if event.heard >= 0:
                    self._event_feeds.listens(session.session_id, event.heard)
            case _:
                text = f"{type(event).__name__} is not for a {session.role} session to send"
                self._outbox.emit(Reply(session.session_id, Error(self._epoch, "role", text)))

    def _submit(
        self, session: SessionOpened, realms: list[Realm], event: Submitted, now: float
    ) -> None:
        message = event.message
        # Loads first: a store may evict what a load of the same step needs.
        for load in message.loads:
            self.jobs.load(session, realms, message.fence, load)
        for store in message.stores:
            self.jobs.store(session, realms, message.fence, store, now, accept=not self.draining)

    def _lease(
        self, session: SessionOpened, realms: list[Realm], event: LeaseTaken, now: float
    ) -> None:
        session_id = session.session_id
        if self.leases.held(session_id) >= self.limits.leases_max_per_session:
            self.counters.leases_refused += 1
            self.bounds.refuse("lease", "client")
            return
        keys = dict.fromkeys(event.keys)
        # A key is of one group, whichever that is.
        found = (realm.chunks.get(key) for key in keys for realm in realms)
        chunks = [chunk for chunk in found if chunk is not None]
        for chunk in chunks:
            self.host.touch(chunk)
        name = (session.realm_id, session.engine_id, event.lease_id)
        if not self.leases.take(session_id, name, chunks, session.world_size, now):
            self.counters.leases_refused += 1
            return
        self.tenants.counters(event.tenant).leases += 1

    def _close(self, session: SessionOpened) -> None:
        del self.sessions[session.session_id]
        self._event_feeds.close_session(session.session_id)
        self.lookups.close_session(session.session_id)
        self.kept.close_session(session.session_id)
        if session.role is Role.SCHEDULER:
            self.leases.close_session(session.session_id, (session.realm_id, session.engine_id))

    def _chunks_listed(self, realm: Realm, keys: Keys) -> None:
        self._outbox.emit(IndexOffer(realm.realm_id, keys))
        if self.tell_listed is not None:
            self.tell_listed(realm, keys)
        self._event_feeds.listed(realm, keys)

    def _job_ended(self, job: Job, outcome: JobOutcome) -> None:
        session = job.session
        if session.session_id in self.sessions:
            self._outbox.job_ended(session.session_id, outcome)
        if job.loading:
            name = (session.realm_id, session.engine_id, job.job_id)
            self.leases.rank_finished(name, session.rank, session.world_size)

    def _flush(self) -> list[Command]:
        self._tell_changes()
        return self._outbox.take()

    def _tell_changes(self) -> None:
        changes = self.directory.take_changes()
        for change in changes:
            in_host, in_store = change.now
            self._outbox.emit(IndexSet(change.realm.realm_id, change.key, in_host, in_store))
        if changes:
            if self._tell is not None:
                self._tell(changes)
            self._event_feeds.changed(changes)

    @property
    def _used_realms(self) -> set[int]:
        return {group.realm_id for one in self.sessions.values() for group in one.groups}

    def loss(self, realm_ids: Collection[int]) -> Loss:
        """What forgetting these realms would cost."""
        return self._idle_realms.loss(realm_ids)

    def needs(self, realm_ids: Collection[int]) -> bool:
        """Whether a session is of one of these realms, or something runs or is pinned there."""
        return not self._used_realms.isdisjoint(realm_ids) or self._idle_realms.busy(realm_ids)

    def clear(self) -> list[Command]:
        """Give up every chunk that nothing pins or runs on: after a drain, all of them."""
        self.host.clear()
        self._apply_host_changes()
        return self._flush()

    def stored_mask(self, realm_id: int, key: bytes) -> int:
        """Ranks whose segment of `key` is known to be in the store, as bits."""
        realm = self.directory.realms.get(realm_id)
        return 0 if realm is None else realm.stored.get(key)

    def pending_work(self) -> PendingWork:
        """What has not ended yet."""
        return PendingWork(
            copies_running=self.jobs.copies_running,
            writes_running=self.writes.num_running,
            writes_pending=self.writes.pending,
            reads_running=self.reads.num_running,
            reads_queued=self.reads.num_queued,
        )

    @property
    def timed(self) -> tuple[int, bool]:
        """How many leases there are, and whether anybody waits for a lookup: both end with time."""
        return len(self.leases), any(True for _ in self.lookups)

    def snapshot(self) -> EngineSnapshot:
        """Numbers for the status page and the gauges."""
        realms = self.directory.realms.values()
        sessions = Counter(session.realm_id for session in self.sessions.values())
        return EngineSnapshot(
            sessions=len(self.sessions),
            chunks_in_host=sum(realm.hosted_chunks for realm in realms),
            chunks_in_store=sum(realm.stored_chunks for realm in realms),
            slots_allocated=len(self.host.allocated),
            slots_zombie=len(self.host.zombies),
            slots_unclaimed=len(self.host.restored_slots),
            unclaimed_bytes=self.host.restored_slots.num_bytes,
            leases=len(self.leases),
            lookups=sum(1 for _ in self.lookups),
            write_queue_bytes=self.writes.pending_bytes,
            pending=self.pending_work(),
            draining=self.draining,
            realms=tuple(
                RealmSnapshot(
                    realm_id=realm.realm_id,
                    world_size=realm.world_size,
                    sessions=sessions[realm.realm_id],
                    chunks_in_host=realm.hosted_chunks,
                    chunks_in_store=realm.stored_chunks,
                )
                for realm in realms
            ),
            tenants=self.tenants.snapshot(),
        )
