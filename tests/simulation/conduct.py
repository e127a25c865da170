"""What the sidecar owes to its clients: outcomes that are true, and nothing done in vain.

Owns the shadow of what was asked, by whom and when, and how each piece of it ended. Does not own
bytes, slots and queues (`images.py`, `balance.py`). Rules are named as there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.core.commands import (
    Command,
    Copied,
    Draining,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    Listed,
    Quarantine,
    Read,
    ReadDone,
    Received,
    Reply,
    Scatter,
    SessionClosed,
    SessionOpened,
    StoreOutcome,
    Withdraw,
    Write,
    Written,
)
from sidecar.core.directory import Chunk, HostSegment, SegmentState
from sidecar.protocol import (
    JobOutcome,
    Lease,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    Release,
    Role,
    StoreJob,
    Submit,
)
from tests.simulation.clock import Violation, World

if TYPE_CHECKING:
    from sidecar.core.engine import Engine
    from sidecar.core.pins import ChunkLease
    from tests.simulation.process import SidecarProcess

Work = Gather | Scatter | Write | Read
JobName = tuple[int, int]
"""(session_id, job_id)"""
LoadName = tuple[int, str, int]
"""(realm_id, engine_id, job_id): what a lease and the load jobs of all ranks share."""
SegmentName = tuple[int, int, bytes]
"""(realm_id, rank, key)"""

LOOKUP_SLACK_SECONDS = 0.06
"""A tick, and the message's way."""


@dataclass(slots=True)
class _Asked:
    """A job, and what became of its chunks so far."""

    job: LoadJob | StoreJob
    there: set[bytes] = field(default_factory=set[bytes])
    """Chunks that had a slot before."""
    segments: dict[bytes, SegmentName] = field(default_factory=dict[bytes, SegmentName])
    """What a store fills, by key."""
    refused: set[bytes] = field(default_factory=set[bytes])
    """Those of them that the policy refused since."""
    ready: set[bytes] = field(default_factory=set[bytes])
    """Those of them that could be loaded by this rank."""
    running: int = 0
    copied: set[bytes] = field(default_factory=set[bytes])
    lost: bool = False
    """A chunk was given up, for another rank's part was corrupt, before its copy ended."""
    outcomes: list[Outcome] = field(default_factory=list[Outcome])


@dataclass(slots=True)
class _Question:
    """A lookup that waits for its answer."""

    message: Lookup
    asked: float


class Conduct:
    """The rules of one life of a sidecar."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._jobs: dict[JobName, _Asked] = {}
        self._job_of: dict[int, JobName] = {}
        self._chunk_of: dict[int, Chunk] = {}
        """Per copy, as it was known when the copy began."""
        self._questions: dict[tuple[int, int], _Question] = {}
        self._quarantined: dict[tuple[int, int, bytes], int] = {}
        """(realm_id, bit of a segment, key) -> the newest writing that is known to be bad."""
        self._opened: dict[int, SessionOpened] = {}
        self._loads_ended: dict[LoadName, set[int]] = {}
        """Ranks whose load ended, since the engine's scheduler attached."""
        self._leases: dict[JobName, ChunkLease] = {}
        self._leases_refused = 0
        self._failures = {Write: 0, Read: 0}
        self._closed_until = {Write: 0.0, Read: 0.0}
        """Until when a store that failed too often is left alone."""
        self._tried = {Write: 0.0, Read: 0.0}
        """When a request began that is to find out whether it works again, and is under way."""
        self._turns = {Write: 0, Read: 0}
        self._turn_of: dict[Write | Read, int] = {}
        """What began before the last time that it was left alone says nothing by a failure."""
        self._stored_before: bool | None = None
        self.written = 0
        """Writes that ended well."""
        self._draining = False

    # --- an event ------------------------------------------------------------------------------

    def before(self, process: SidecarProcess, event: Event, work: Work | None) -> None:
        """Note what is asked; `work` is what ended with this event."""
        message = getattr(event, "message", None)
        if message is not None and message.epoch != process.epoch:
            raise Violation("a message of another life is dropped", f"{type(message).__name__}")
        self._stored_before = None
        match event:
            case Received(message=Submit() as submit):
                self._submitted(process, event.session_id, submit)
            case Received(message=Lookup() as lookup):
                name = (event.session_id, lookup.lookup_id)
                self._questions[name] = _Question(lookup, self._world.now)
            case Received(message=Release() as release):
                for lookup_id in release.lookup_ids:
                    self._questions.pop((event.session_id, lookup_id), None)
            case SessionOpened():
                self._opened[event.session_id] = event
                self._forget_loads(event)
            case SessionClosed():
                self._forget_loads(self._opened[event.session_id])
                for job in [job for job in self._jobs if job[0] == event.session_id]:
                    if not self._jobs[job].running:
                        del self._jobs[job]
                for name in [name for name in self._questions if name[0] == event.session_id]:
                    del self._questions[name]
            case Copied():
                self._ended(process, event, work)
            case Written() | ReadDone() if isinstance(work, Write | Read):
                self._stored_before = self._is_stored(process, work)
                self._store_answered(process, work, event.outcome)
                self.written += isinstance(work, Write) and event.outcome is StoreOutcome.OK
            case Draining():
                self._draining = True
            case _:
                pass

    def _submitted(self, process: SidecarProcess, session_id: int, message: Submit) -> None:
        session = process.dispatcher.engine.sessions.get(session_id)
        if session is None:
            return
        realms = process.dispatcher.engine.directory.realms
        jobs: list[LoadJob | StoreJob] = [*message.loads, *message.stores]
        for job in jobs:
            asked = self._jobs[session_id, job.job_id] = _Asked(job)
            for piece in job.chunks:
                realm_id, rank = session.groups[piece.group].realm_id, session.attach.rank
                chunk = realms[realm_id].chunks.get(piece.key)
                if isinstance(job, StoreJob):
                    asked.segments[piece.key] = (realm_id, rank, piece.key)
                state = chunk.segments[rank].state if chunk else SegmentState.ABSENT
                if state is not SegmentState.ABSENT:
                    asked.there.add(piece.key)
                if (
                    chunk
                    and state is SegmentState.HOST
                    and chunk.retention.expires_at > self._world.now
                ):
                    asked.ready.add(piece.key)

    def _ended(self, process: SidecarProcess, event: Copied, work: Work | None) -> None:
        (copy_id,) = event.copy_ids
        name, chunk = self._job_of.pop(copy_id, None), self._chunk_of.pop(copy_id, None)
        asked = self._jobs.get(name) if name is not None else None
        if asked is not None:
            assert name is not None
            asked.running -= 1
            asked.outcomes.append(event.outcome)
            # What is forgotten because its time is over was stored as was asked.
            over = chunk is not None and chunk.retention.expires_at <= self._world.now
            if isinstance(work, Gather) and not (over or self._is_known(process, work)):
                asked.lost = True
            if not asked.running and isinstance(asked.job, LoadJob):
                self._load_ended(name)

    def _load_ended(self, name: JobName) -> None:
        session = self._opened[name[0]]
        load = (*session.engine, name[1])
        self._loads_ended.setdefault(load, set()).add(session.attach.rank)

    def _forget_loads(self, session: SessionOpened) -> None:
        """A scheduler comes or goes: the next one counts its jobs from the start."""
        if session.attach.role is Role.SCHEDULER:
            engine = session.engine
            for name in [name for name in self._loads_ended if name[:2] == engine]:
                del self._loads_ended[name]

    @staticmethod
    def _is_known(process: SidecarProcess, work: Gather) -> bool:
        realm = process.dispatcher.engine.directory.realms[work.realm_id]
        chunk = realm.chunks.get(work.key)
        return chunk is not None and chunk.segments[work.rank].slot == work.slot

    @staticmethod
    def _is_stored(process: SidecarProcess, work: Write | Read) -> bool:
        realm = process.dispatcher.engine.directory.realms[work.realm_id]
        return bool(realm.stored.mask(work.key) >> work.rank & 1)

    # --- its commands --------------------------------------------------------------------------

    def after(
        self,
        process: SidecarProcess,
        event: Event,
        work: Work | None,
        commands: list[Command],
        now: float,
    ) -> None:
        """What was decided fits what was asked and what happened."""
        self._in_order(commands)
        engine = process.dispatcher.engine
        withdrawn: dict[tuple[int, int, bytes], int] = {}
        for command in commands:
            match command:
                case Gather() | Scatter():
                    self._copy(process, command)
                case Read():
                    self._read(command)
                case Quarantine():
                    self._quarantined.setdefault((command.realm_id, command.bit, command.key), 0)
                case Withdraw():
                    withdrawn[command.realm_id, command.bit, command.key] = command.written_at
                case _:
                    pass
        self._store_is_left_alone(process, commands)
        for name in withdrawn.keys() & self._quarantined.keys():
            self._quarantined[name] = max(self._quarantined[name], withdrawn[name])
        match event:
            case Received(message=Submit() as submit) if event.session_id in engine.sessions:
                for load in submit.loads:
                    asked = self._jobs.get((event.session_id, load.job_id))
                    if asked is not None and not asked.running:
                        self._load_ended((event.session_id, load.job_id))
            case Received(message=Release() as release):
                self._released(process, event.session_id, release)
            case Listed():
                self._listed(process, event)
            case Written() | ReadDone() | Copied() if work is not None:
                self._work_ended(process, event, work)
            case _:
                pass
        if not isinstance(event, SessionClosed):
            self._work_ends_with_its_session(process)
        self._leases_last(engine, event, now)
        self._jobs_are_bounded(engine)

    @staticmethod
    def _in_order(commands: list[Command]) -> None:
        """Readers of the index stop seeing a chunk before its slot is filled again."""
        order = [
            0
            if isinstance(command, IndexSet | IndexOffer)
            else 2
            if isinstance(command, Reply)
            else 1
            for command in commands
        ]
        if order != sorted(order):
            raise Violation("the index is told first, clients last", f"{commands}")

    def _store_is_left_alone(self, process: SidecarProcess, commands: list[Command]) -> None:
        """While it fails, one request at a time finds out whether it works again."""
        now = self._world.now
        for command in commands:
            if not isinstance(command, Write | Read):
                continue
            assert process.config.store is not None
            rules, kind = process.config.store.breaker, type(command)
            if self._failures[kind] >= rules.failures_max:
                tried = self._tried[kind]
                if now < self._closed_until[kind] or (tried and now < tried + rules.pause_max):
                    raise Violation("a store that fails is left alone", f"{command}")
                self._tried[kind] = now
                self._turns[kind] += 1
            self._turn_of[command] = self._turns[kind]

    def _store_answered(
        self, process: SidecarProcess, work: Write | Read, outcome: StoreOutcome
    ) -> None:
        kind, failed = type(work), outcome in (StoreOutcome.UNAVAILABLE, StoreOutcome.EXPIRED)
        current = self._turn_of.pop(work) == self._turns[kind]
        if failed and current:
            assert process.config.store is not None
            rules = process.config.store.breaker
            self._failures[kind] += 1
            if self._failures[kind] == rules.failures_max:
                self._closed_until[kind] = self._world.now + min(rules.pause, rules.pause_max)
                self._turns[kind] += 1
        elif not failed and (outcome is not StoreOutcome.CORRUPT or kind is Read):
            self._failures[kind], self._closed_until[kind] = 0, 0.0
            current = True
        if current:
            self._tried[kind] = 0.0

    def _copy(self, process: SidecarProcess, command: Gather | Scatter) -> None:
        if self._draining and isinstance(command, Gather):
            raise Violation("nothing new is stored while draining", f"{command}")
        name = (command.session_id, command.job_id)
        self._job_of[command.copy_id] = name
        realm = process.dispatcher.engine.directory.realms[command.realm_id]
        self._chunk_of[command.copy_id] = realm.chunks[command.key]
        asked = self._jobs[name]
        asked.running += 1
        asked.copied.add(command.key)

    def _read(self, command: Read) -> None:
        names = {(command.realm_id, bit, command.key) for bit in command.sources}
        if names & self._quarantined.keys():
            raise Violation("what is in quarantine is not read again", f"{command}")
        wanted = any(command.key in one.message.keys for one in self._questions.values())
        if not wanted or self._draining:
            raise Violation("only what somebody waits for is read", f"{command}")

    def _released(self, process: SidecarProcess, session_id: int, message: Release) -> None:
        engine = process.dispatcher.engine
        for lease in engine.leases:
            if lease.session_id == session_id and lease.lease_id in message.lease_ids:
                raise Violation("a lease ends with its release", f"{lease.lease_id}")
        for lookup in engine.lookups:
            if lookup.session_id == session_id and lookup.lookup_id in message.lookup_ids:
                raise Violation("a lookup ends with its release", f"{lookup.lookup_id}")

    def _listed(self, process: SidecarProcess, event: Listed) -> None:
        written = {row.key: row.written_at for row in event.rows if not row.withdrawn}
        for name, newest in list(self._quarantined.items()):
            if name[0] == event.realm_id and written.get(name[2], 0) > newest:
                del self._quarantined[name]
        for realm_id, bit, key in self._quarantined:
            realm = process.dispatcher.engine.directory.realms.get(realm_id)
            if realm is not None and realm.stored.mask(key) >> bit & 1:
                raise Violation("what is in quarantine is not offered again", key.hex()[:12])

    def _work_ended(
        self, process: SidecarProcess, event: Copied | Written | ReadDone, work: Work
    ) -> None:
        realm = process.dispatcher.engine.directory.realms[work.realm_id]
        chunk = realm.chunks.get(work.key)
        corrupt = event.outcome in (Outcome.CORRUPT, StoreOutcome.CORRUPT)
        if corrupt and chunk is not None and chunk.segments[work.rank].slot == work.slot:
            raise Violation("a corrupt slot is out of sight", f"{work}")
        if isinstance(work, Gather | Scatter):
            return
        stored, ok = self._is_stored(process, work), event.outcome is StoreOutcome.OK
        if isinstance(work, Write):
            if stored and not (ok or self._stored_before):
                raise Violation("only what was written is called stored", f"{work}")
            if ok:
                self._quarantined.pop((work.realm_id, work.rank, work.key), None)
        elif work.sources != (work.rank,):
            # Made from segments of another cut: which of them was missing is not said here.
            return
        elif stored and event.outcome in (StoreOutcome.MISSING, StoreOutcome.CORRUPT):
            raise Violation("what is missing is not called stored", f"{work}")

    def _work_ends_with_its_session(self, process: SidecarProcess) -> None:
        for session in process.dispatcher.copies.queue.sessions():
            if process.dispatcher.sessions.get(session.session_id) is not session:
                raise Violation("queued work ends with its session", f"{session.session_id}")

    # --- leases --------------------------------------------------------------------------------

    def _leases_last(self, engine: Engine, event: Event, now: float) -> None:
        """A lease ends with its load, its release, its session or its time, and not before."""
        held = {(lease.session_id, lease.lease_id): lease for lease in engine.leases}
        message = event.message if isinstance(event, Received) else None
        session_id = getattr(event, "session_id", -1)
        if isinstance(message, Lease) and session_id in engine.sessions:
            self._lease_was_taken(engine, session_id, message, held)
        for name, lease in held.items():
            if self._is_loaded(lease.name):
                raise Violation("a lease ends with its load", f"{name}")
        for name, lease in self._leases.items():
            if held.get(name) is lease or lease.deadline <= now:
                continue
            if self._is_loaded(lease.name):
                del self._loads_ended[lease.name]
                continue
            closed = isinstance(event, SessionClosed)
            released = isinstance(message, Release) and name[1] in message.lease_ids
            replaced = isinstance(message, Lease) and name[1] == message.lease_id
            if session_id != name[0] or not (closed or released or replaced):
                raise Violation("a lease lasts until its load", f"{name} at {event}")
        self._leases, self._leases_refused = held, engine.counters.leases_refused

    def _lease_was_taken(
        self, engine: Engine, session_id: int, message: Lease, held: dict[JobName, ChunkLease]
    ) -> None:
        session = self._opened[session_id]
        refused = engine.counters.leases_refused > self._leases_refused
        if refused:
            return
        name, load = (
            (session_id, message.lease_id),
            (*session.engine, message.lease_id),
        )
        if name in self._leases:
            # Replaced: what ended for the one before does not count for this one.
            self._loads_ended.pop(load, None)
        realms = [engine.directory.realms[group.realm_id] for group in session.groups]
        found = (realm.chunks.get(key) for realm in realms for key in message.keys)
        named = {chunk for chunk in found if chunk is not None}
        if name in held and set(held[name].chunks) != named:
            raise Violation("a lease pins what it names", f"{message}")
        if name not in held:
            if not self._is_loaded(load):
                raise Violation("a lease lasts until its load", f"{message} did not begin")
            del self._loads_ended[load]

    def _is_loaded(self, name: LoadName) -> bool:
        ranks = self._loads_ended.get(name, ())
        return bool(ranks) and len(ranks) >= next(
            one.attach.world_size for one in self._opened.values() if one.engine == name[:2]
        )

    def _jobs_are_bounded(self, engine: Engine) -> None:
        running = Counter(name[0] for name, asked in self._jobs.items() if asked.running)
        most = engine.limits.shares.jobs_max_per_session
        if running and max(running.values()) > most:
            raise Violation("queues are bounded", f"jobs: {running} of {most}")

    def refused(self, process: SidecarProcess, segment: HostSegment) -> None:
        """An order refuses to store a segment: `fifo` never does, and each only a new chunk."""
        chunk = segment.chunk
        new = all(one.state is SegmentState.ABSENT for one in chunk.segments)
        own = process.dispatcher.engine.tenants.order(chunk.tenant)
        if (process.config.host.policy == "fifo" and own is None) or not new:
            raise Violation("only a new chunk is refused", f"{segment}")
        name = (chunk.realm.realm_id, segment.rank, chunk.key)
        for asked in self._jobs.values():
            if asked.segments.get(chunk.key) == name:
                asked.refused.add(chunk.key)

    # --- answers -------------------------------------------------------------------------------

    def job_answered(self, session_id: int, job: JobOutcome) -> None:
        """The outcome is that of the copies, and all of them have ended."""
        asked = self._jobs.pop((session_id, job.job_id), None)
        if asked is None:
            return
        if asked.running:
            raise Violation("a job is answered when its copies ended", f"job {job.job_id}")
        keys = {piece.key for piece in asked.job.chunks}
        done = all(outcome is Outcome.OK for outcome in asked.outcomes) and not asked.lost
        copied = done and asked.copied == keys
        # A store needs no copy of what was there, or what the policy refuses.
        there = isinstance(asked.job, StoreJob) and done
        there = there and asked.copied | asked.there | asked.refused >= keys
        good, missed = job.outcome is Outcome.OK, job.outcome is Outcome.MISSING
        false = (copied and not good) or (good and not (copied or there))
        if false or (missed and asked.ready >= keys):
            raise Violation(
                "an outcome is true", f"job {job.job_id}: {job.outcome.name} of {asked}"
            )

    def lookup_answered(
        self, process: SidecarProcess, session_id: int, message: LookupDone
    ) -> None:
        """It was waited for no longer than that pays."""
        question = self._questions.pop((session_id, message.lookup_id), None)
        if question is None or self._world.disturbed >= question.asked:
            return
        asked, waited = question.message, self._world.now - question.asked
        seconds_max = asked.deadline_ms / 1000
        store = process.config.store
        rate = asked.prefill_tokens_per_second
        reckons = store is not None and store.recompute == "when_sooner"
        if reckons and rate > 0 and asked.num_tokens > 0:
            # What is ready is worth what computing it takes; beyond it, no more than all of it.
            worth = message.ready / len(asked.keys) + 1.0
            seconds_max = min(seconds_max, worth * asked.num_tokens / rate)
        if waited > seconds_max + LOOKUP_SLACK_SECONDS:
            raise Violation(
                "a lookup waits no longer than it pays",
                f"{waited:.3f} s, at most {seconds_max:.3f} s: {message}",
            )
