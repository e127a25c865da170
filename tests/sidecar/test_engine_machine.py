"""Any order of events, any outcome: the pure engine against a model of dicts.

`World` (engine_kit) follows what is in each slot and what runs on it. The machine adds what it
takes to know the rest from outside: the store's bits, jobs that are owed an answer, leases and
lookups. Where the model cannot see when a pin ended, it lets go early: it never asks for more
than the rules promise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from sidecar import tenants
from sidecar.bounds import BoundLimits
from sidecar.breaker import BreakerRules
from sidecar.commands import (
    CaughtUp,
    Command,
    CopyOutcome,
    Draining,
    Gather,
    Read,
    Released,
    Reply,
    Scatter,
    SessionClosed,
    SessionOpened,
    StoreOutcome,
    Tick,
    Write,
)
from sidecar.protocol import Done, Events, LookupDone, Outcome, Role
from sidecar.tenants import TenantRules, Tenants
from sidecar.writes import WritePolicy
from tests.sidecar.engine_kit import World, key, layout, make_world
from tiers.policy import make

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers.policy.policy import Policy

T = TypeVar("T")
Name = tuple[int, bytes]

MAIN, OTHER = 0, 1
"""Two realms: OTHER has one rank and slots of another size, and competes for slabs."""

TENANT = b"a tenant"

PICK = st.integers(0, 1000)
CHUNKS = st.one_of(
    st.sampled_from([[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True),
)
COPY_OUTCOMES = st.sampled_from([CopyOutcome.OK, CopyOutcome.OK, *CopyOutcome])
STORE_OUTCOMES = st.sampled_from([StoreOutcome.OK, StoreOutcome.OK, *StoreOutcome])


@dataclass
class OwedJob:
    """A job that was submitted and not answered."""

    loading: bool
    chunks: int
    copies: set[int]
    results: list[CopyOutcome] = field(default_factory=list[CopyOutcome])


@dataclass
class Pin:
    """Chunks that must stay in the host tier until then."""

    names: set[Name]
    last: bytes
    ends: float


def choose(items: Sequence[T], pick: int) -> T:
    return items[pick % len(items)]


class EngineMachine(RuleBasedStateMachine):
    world: World

    @initialize(
        world_size=st.sampled_from([1, 2]),
        slabs=st.integers(1, 8),
        slab_slots=st.sampled_from([1, 2]),
        policy=st.sampled_from(["lru", "fifo"]),
        inflight=st.integers(1, 3),
        queue=st.integers(0, 3),
        quarantine=st.integers(0, 3),
        bound=st.integers(1, 4),
        write=st.sampled_from(WritePolicy),
        failures=st.sampled_from([1, 3, 1000]),
        verify=st.sampled_from([0.0, 0.3, 1.0]),
        quota=st.none() | st.integers(0, 4),
        memory=st.sampled_from([256 << 20, 256 << 20, 16_384, 65_536]),
        share=st.sampled_from([65_536, 65_536, 4, 12]),
    )
    def start(
        self,
        world_size: int,
        slabs: int,
        slab_slots: int,
        policy: str,
        inflight: int,
        queue: int,
        quarantine: int,
        bound: int,
        write: WritePolicy,
        failures: int,
        verify: float,
        quota: int | None,
        memory: int,
        share: int,
    ) -> None:
        slot_bytes = layout(0).payload_bytes(2)
        limit = tenants.Quota(None if quota is None else quota * slot_bytes)
        rules = TenantRules(named={TENANT: ("named", limit)})
        self.new_policy: Callable[[], Policy] = lambda: make(policy)
        self.new_tenants: Callable[[], Tenants] = lambda: Tenants(rules, self.new_policy)
        self.world = make_world(
            tenants=self.new_tenants(),
            slabs=slabs,
            slab_slots=slab_slots,
            policy=make(policy),
            writes_inflight_max=inflight,
            reads_inflight_max=inflight,
            write_queue_bytes_max=queue * slot_bytes,
            breaker=BreakerRules(failures, 1.0, 4.0),
            quarantine_keys_max=quarantine,
            leases_max_per_session=bound,
            lookups_max_per_session=bound,
            write=write,
            bounds=BoundLimits(
                memory_bytes_max=memory,
                copies_queued_max=share,
                storing_bytes_max=share * slot_bytes,
                pinned_bytes_max=share * slot_bytes * world_size,
                lookups_max=share,
                leases_max=share,
                jobs_max_per_session=share,
            ),
            verify_loads=verify,
        )
        self.world_size = world_size
        self.last_id = 0
        self.begin_life()
        for rank in range(world_size):
            self.open_worker(rank, "a")
        self.open_scheduler("a", want_events=True)

    def begin_life(self) -> None:
        """Nothing is known to a sidecar that has just started."""
        self.draining = False
        self.ever_opened: dict[int, SessionOpened] = {}
        self.stored: dict[Name, set[int]] = {}
        self.times: dict[Name, int] = {}
        self.gone: dict[Name, tuple[set[int], int]] = {}
        self.jobs: dict[tuple[int, int], OwedJob] = {}
        self.finished: dict[tuple[int, str, int], set[int]] = {}
        self.leases: dict[tuple[int, int], Pin] = {}
        self.waiting: dict[tuple[int, int], tuple[list[bytes], float]] = {}
        self.answered: dict[tuple[int, int], Pin] = {}
        self.ever_asked: set[tuple[int, int]] = set()
        self.held: set[Name] = set()

    # --- what the engine says -------------------------------------------------------------------

    def absorb(self, commands: Sequence[Command], *, buried: Name | None = None) -> None:
        """Check commands and state against the model. `buried` was found corrupt just now."""
        for command in commands:
            if isinstance(command, Reply):
                self.absorb_message(command)
        in_store = {
            name
            for name, ranks in self.stored.items()
            if len(ranks) == self.world.world_sizes[name[0]]
        }
        told = {name for name, (_, flag) in self.world.index.items() if flag}
        assert told == in_store, "the index and the store disagree"
        held = self.world.in_host()
        lost = self.held - held - {buried}
        for pin in (*self.leases.values(), *self.answered.values()):
            assert not pin.names & lost, "a pinned chunk was evicted"
            pin.names &= held
        for account in self.world.engine.tenants:
            most = account.quota.host_bytes_max
            assert most is None or account.host_bytes <= most, "a tenant is over its limit"
        self.held = held
        snapshot = self.world.engine.snapshot()
        assert snapshot.slots_allocated == len(self.world.content)
        assert snapshot.leases >= len(self.leases), "a lease ended early"
        assert snapshot.lookups >= len(self.waiting) + len(self.answered), "a lookup ended early"
        assert snapshot.chunks_in_host == len(held)
        assert snapshot.chunks_in_store == len(in_store)

    def absorb_message(self, reply: Reply) -> None:
        message = reply.message
        if isinstance(message, Done):
            for job in message.jobs:
                self.job_done(self.jobs.pop((reply.session_id, job.job_id)), job.outcome)
        elif isinstance(message, LookupDone):
            self.lookup_done((reply.session_id, message.lookup_id), message)
        else:
            assert isinstance(message, Events)
            assert message.stored or message.removed

    def job_done(self, job: OwedJob, outcome: Outcome) -> None:
        assert not job.copies, "answered before its last copy ended"
        fine = set(job.results) <= {CopyOutcome.OK}
        if job.loading:
            if outcome is Outcome.OK:
                assert fine
                assert len(job.results) == job.chunks
            elif not job.results:
                assert outcome in (Outcome.MISSING, Outcome.FULL)
            else:
                assert outcome.name in {result.name for result in job.results}
        elif outcome is Outcome.OK:
            assert fine
        elif outcome is Outcome.FULL:
            assert not job.results
        elif outcome in (Outcome.REVOKED, Outcome.FAILED):
            assert job.results

    def lookup_done(self, name: tuple[int, int], message: LookupDone) -> None:
        keys, ends = self.waiting.pop(name)
        ready = keys[: message.ready]
        names = {(MAIN, ready_key) for ready_key in ready}
        assert names <= self.world.in_host(), "answered ready, and is not there"
        if message.outcome is Outcome.OK:
            assert ready or not keys
        if ready:
            self.answered[name] = Pin(names, ready[-1], ends)

    # --- sessions -------------------------------------------------------------------------------

    def opened(self, session_id: int) -> None:
        self.ever_opened[session_id] = self.world.sessions[session_id]

    def sessions(self, role: Role, *, realm_id: int | None = None) -> list[int]:
        return [
            session.session_id
            for session in self.world.sessions.values()
            if session.role is role and realm_id in (None, session.realm_id)
        ]

    @property
    def has_worker(self) -> bool:
        return bool(self.sessions(Role.WORKER))

    @property
    def has_scheduler(self) -> bool:
        return bool(self.sessions(Role.SCHEDULER))

    @rule(rank=st.integers(0, 1), engine_id=st.sampled_from("ab"))
    def open_worker(self, rank: int, engine_id: str) -> None:
        size = self.world_size
        self.opened(
            self.world.open(Role.WORKER, rank=rank % size, world_size=size, engine_id=engine_id)
        )

    @rule()
    def open_other_worker(self) -> None:
        self.opened(self.world.open(Role.WORKER, realm_id=OTHER, content_bytes=64))

    @rule(engine_id=st.sampled_from("ab"), want_events=st.booleans())
    def open_scheduler(self, engine_id: str, want_events: bool) -> None:
        self.opened(
            self.world.open(
                Role.SCHEDULER,
                world_size=self.world_size,
                engine_id=engine_id,
                want_events=want_events,
            )
        )

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, sure=st.integers(0, 5))
    def close(self, pick: int, sure: int) -> None:
        if sure == 0:
            self.close_session(choose(list(self.world.sessions), pick))

    def close_session(self, session_id: int) -> None:
        del self.world.sessions[session_id]
        pins = (self.leases, self.answered, self.waiting)
        for owned in pins:
            for name in [name for name in owned if name[0] == session_id]:
                del owned[name]
        self.absorb(self.world.send(SessionClosed(session_id)))

    @rule(pick=PICK, chunks=CHUNKS)
    def stale(self, pick: int, chunks: list[int]) -> None:
        gone = [session for session in self.ever_opened if session not in self.world.sessions]
        session_id = choose(gone, pick) if gone else 9999
        before = self.world.engine.counters.stale_messages
        assert not self.world.store(session_id, 1, chunks)
        assert not self.world.lease(session_id, 1, chunks)
        assert self.world.engine.counters.stale_messages == before + 2

    # --- jobs -----------------------------------------------------------------------------------

    def next_id(self) -> int:
        self.last_id += 1
        return self.last_id

    def submitted(
        self, session_id: int, job_id: int, chunks: list[int], commands: list[Command]
    ) -> None:
        copies = [
            command
            for command in commands
            if isinstance(command, Gather | Scatter)
            and (command.session_id, command.job_id) == (session_id, job_id)
        ]
        loading = any(isinstance(copy, Scatter) for copy in copies)
        job = OwedJob(loading, len(chunks), {copy.copy_id for copy in copies})
        self.jobs[session_id, job_id] = job

    @precondition(lambda self: self.has_worker)
    @rule(
        pick=PICK,
        chunks=CHUNKS,
        blocks=st.sampled_from([1, 2, 2, 2]),
        tenant=st.sampled_from([b"", TENANT, b"someone."]),
    )
    def store(self, pick: int, chunks: list[int], blocks: int, tenant: bytes) -> None:
        session_id, job_id = choose(self.sessions(Role.WORKER), pick), self.next_id()
        commands = self.world.store(session_id, job_id, chunks, blocks=blocks, tenant=tenant)
        self.submitted(session_id, job_id, chunks, commands)
        assert not self.draining or not self.jobs[session_id, job_id].copies
        self.absorb(commands)

    def ranks(self) -> dict[int, int]:
        """A worker of each rank of the main realm that has one."""
        workers = self.sessions(Role.WORKER, realm_id=MAIN)
        return {self.world.sessions[session_id].rank: session_id for session_id in workers}

    @rule(chunks=CHUNKS)
    def store_on_all_ranks(self, chunks: list[int]) -> None:
        """The usual case, whole, so that runs get to what follows it."""
        for session_id in self.ranks().values():
            job_id = self.next_id()
            commands = self.world.store(session_id, job_id, chunks)
            self.submitted(session_id, job_id, chunks, commands)
            copies = list(self.jobs[session_id, job_id].copies)
            self.absorb(commands)
            for copy_id in copies:
                self.end_copy(copy_id, CopyOutcome.OK)

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, chunks=CHUNKS, twice=st.booleans())
    def lease_and_load_on_all_ranks(self, pick: int, chunks: list[int], twice: bool) -> None:
        """Scatters that go on running, two on each slot with `twice`."""
        lease_id = self.next_id()
        self.take_lease(choose(self.sessions(Role.SCHEDULER), pick), lease_id, chunks)
        for session_id in self.ranks().values():
            self.load(session_id, lease_id, chunks)
            if twice:
                self.load(session_id, self.next_id(), chunks)

    @rule(numbers=CHUNKS, pick=PICK)
    def store_holds_and_is_asked(self, numbers: list[int], pick: int) -> None:
        self.list_chunks(MAIN, dict.fromkeys(numbers, frozenset({0, 1})), 10**9, withdrawn=False)
        if self.has_scheduler:
            self.look_up(pick, numbers, 60_000)

    @precondition(lambda self: self.has_worker)
    @rule(pick=PICK, chunks=CHUNKS)
    def load_without_lease(self, pick: int, chunks: list[int]) -> None:
        self.load(choose(self.sessions(Role.WORKER), pick), self.next_id(), chunks)

    @precondition(lambda self: self.has_worker and self.leases)
    @rule(pick=PICK, pick_worker=PICK, chunks=CHUNKS)
    def load_with_lease(self, pick: int, pick_worker: int, chunks: list[int]) -> None:
        _, job_id = choose(list(self.leases), pick)
        self.load(choose(self.sessions(Role.WORKER), pick_worker), job_id, chunks)

    def load(self, session_id: int, job_id: int, chunks: list[int]) -> None:
        if (session_id, job_id) in self.jobs:
            return
        session = self.world.sessions[session_id]
        host = self.world.host_ranks()
        names = [(session.realm_id, key(number)) for number in chunks]
        there = all(session.rank in host.get(name, set()) for name in names)
        commands = self.world.load(session_id, job_id, chunks)
        self.submitted(session_id, job_id, chunks, commands)
        job = self.jobs[session_id, job_id]
        job.loading = True
        # Partial chunks have one block and the load asks for two: refused as a whole.
        assert len(job.copies) in ({0, len(chunks)} if there else {0})
        if not job.copies:
            self.rank_finished(session_id, job_id)
            [outcome] = [
                outcome.outcome
                for command in commands
                if isinstance(command, Reply) and isinstance(command.message, Done)
                for outcome in command.message.jobs
            ]
            del self.jobs[session_id, job_id]
            if chunks:
                assert outcome in {Outcome.FAILED, Outcome.FULL if there else Outcome.MISSING}
            commands = [c for c in commands if not isinstance(c, Reply)]
        self.absorb(commands)

    def rank_finished(self, session_id: int, job_id: int) -> None:
        session = self.ever_opened[session_id]
        name = (session.realm_id, session.engine_id, job_id)
        ranks = self.finished.setdefault(name, set())
        ranks.add(session.rank)
        if len(ranks) < session.world_size:
            return
        for owner, lease_id in list(self.leases):
            scheduler = self.ever_opened[owner]
            if (scheduler.realm_id, scheduler.engine_id, lease_id) == name:
                del self.leases[owner, lease_id]

    @precondition(lambda self: self.world.gathers or self.world.scatters)
    @rule(pick=PICK, outcome=COPY_OUTCOMES)
    def copy_ends(self, pick: int, outcome: CopyOutcome) -> None:
        self.end_copy(choose([*self.world.gathers, *self.world.scatters], pick), outcome)

    def end_copy(self, copy_id: int, outcome: CopyOutcome) -> None:
        scatter = self.world.scatters.get(copy_id)
        buried = None
        if scatter is not None and outcome is CopyOutcome.CORRUPT:
            buried = (scatter.realm_id, scatter.key)
        for (session_id, job_id), job in list(self.jobs.items()):
            if copy_id in job.copies:
                job.copies.remove(copy_id)
                gathered_corrupt = not job.loading and outcome is CopyOutcome.CORRUPT
                job.results.append(CopyOutcome.FAILED if gathered_corrupt else outcome)
                if job.loading and not job.copies:
                    self.rank_finished(session_id, job_id)
                if not job.copies and session_id not in self.world.sessions:
                    del self.jobs[session_id, job_id]
        self.absorb(self.world.copied(copy_id, outcome), buried=buried)

    # --- leases and lookups ---------------------------------------------------------------------

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, chunks=CHUNKS, job=st.none() | PICK)
    def lease(self, pick: int, chunks: list[int], job: int | None) -> None:
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        # Sometimes for a load that is under way or over already.
        known = [job_id for _, job_id in (*self.jobs, *self.leases)]
        lease_id = choose(known, job) if known and job is not None else self.next_id()
        self.take_lease(session_id, lease_id, chunks)

    def take_lease(self, session_id: int, lease_id: int, chunks: list[int]) -> None:
        keys = {key(number) for number in chunks}
        refused = self.world.engine.counters.leases_refused
        commands = self.world.lease(session_id, lease_id, chunks)
        if self.world.engine.counters.leases_refused == refused:
            for name in [name for name in self.answered if name[0] == session_id]:
                if self.answered[name].last in keys:
                    del self.answered[name]
            names = {(MAIN, chunk_key) for chunk_key in keys} & self.held
            ends = self.world.now + self.world.limits.lease_ttl_seconds_max
            self.leases[session_id, lease_id] = Pin(names, b"", ends)
            session = self.world.sessions[session_id]
            ranks = self.finished.get((MAIN, session.engine_id, lease_id), set())
            if len(ranks) == self.world_size:
                del self.leases[session_id, lease_id]
        self.absorb(commands)

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, chunks=CHUNKS, deadline_ms=st.sampled_from([0, 1500, 60_000]))
    def look_up(self, pick: int, chunks: list[int], deadline_ms: int) -> None:
        session_id, lookup_id = choose(self.sessions(Role.SCHEDULER), pick), self.next_id()
        own = [name for name in self.ever_asked if name[0] == session_id]
        if len(own) >= self.world.limits.lookups_max_per_session:
            # Any answered one may have given way; the model cannot tell which.
            for name in own:
                self.answered.pop(name, None)
        self.ever_asked.add((session_id, lookup_id))
        ttl = self.world.limits.lease_ttl_seconds_max
        ends = self.world.now + min(deadline_ms / 1000, ttl) + ttl
        self.waiting[session_id, lookup_id] = ([key(number) for number in chunks], ends)
        self.absorb(self.world.look_up(session_id, lookup_id, chunks, deadline_ms=deadline_ms))
        assert not self.draining or (session_id, lookup_id) not in self.waiting

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, lease=PICK, lookup=PICK)
    def release(self, pick: int, lease: int, lookup: int) -> None:
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        leases = [i for owner, i in self.leases if owner == session_id] or [4242]
        lookups = [i for owner, i in (*self.waiting, *self.answered) if owner == session_id]
        lease_id, lookup_id = choose(leases, lease), choose(lookups or [4242], lookup)
        self.leases.pop((session_id, lease_id), None)
        self.waiting.pop((session_id, lookup_id), None)
        self.answered.pop((session_id, lookup_id), None)
        self.absorb(self.world.send(Released(session_id, (lease_id,), (lookup_id,))))

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 30.0]))
    def tick(self, seconds: float) -> None:
        self.world.now += seconds
        for pins in (self.leases, self.answered):
            for name in [name for name, pin in pins.items() if pin.ends <= self.world.now]:
                del pins[name]
        commands = self.world.send(Tick())
        self.absorb(commands)
        assert seconds < 30.0 or not self.waiting, "a lookup outlived its deadline"
        started = [command for command in commands if isinstance(command, Read | Write)]
        assert seconds or not started, "the event before this left something that could start"

    # --- the store ------------------------------------------------------------------------------

    def set_stored(self, name: Name, ranks: set[int], time: int) -> None:
        if ranks:
            self.stored[name] = ranks
            self.times[name] = time
        else:
            self.stored.pop(name, None)
            self.times.pop(name, None)

    def forget(self, name: Name, ranks: set[int], time: int) -> None:
        """What was written until `time` does not count for these ranks any more."""
        known, known_time = self.gone.pop(name, (set[int](), 0))
        self.gone[name] = (known | ranks, max(known_time, time))
        if len(self.gone) > self.world.limits.quarantine_keys_max:
            del self.gone[next(iter(self.gone))]

    @precondition(lambda self: self.world.writes)
    @rule(pick=PICK, outcome=STORE_OUTCOMES)
    def write_ends(self, pick: int, outcome: StoreOutcome) -> None:
        write = choose(list(self.world.writes.values()), pick)
        name = (write.realm_id, write.key)
        if outcome is StoreOutcome.OK and not self.world.content[write.slot].dead:
            written_at = max(self.world.clock_us + 1, write.written_after + 1)
            time = max(self.times.get(name, 0), written_at)
            self.set_stored(name, self.stored.get(name, set()) | {write.rank}, time)
            ranks, until = self.gone.get(name, (set[int](), 0))
            if ranks - {write.rank}:
                self.gone[name] = (ranks - {write.rank}, until)
            else:
                self.gone.pop(name, None)
        buried = name if outcome is StoreOutcome.CORRUPT else None
        self.absorb(self.world.written(write.write_id, outcome), buried=buried)

    @precondition(lambda self: self.world.reads)
    @rule(pick=PICK, outcome=STORE_OUTCOMES)
    def read_ends(self, pick: int, outcome: StoreOutcome) -> None:
        read = choose(list(self.world.reads.values()), pick)
        name = (read.realm_id, read.key)
        before = len(self.world.quarantined)
        if outcome in (StoreOutcome.MISSING, StoreOutcome.CORRUPT, StoreOutcome.UNREADABLE):
            time = self.times.get(name, 0)
            self.set_stored(name, self.stored.get(name, set()) - {read.rank}, time)
            self.forget(name, {read.rank}, time)
        self.absorb(self.world.read_done(read.read_id, outcome))
        assert len(self.world.quarantined) - before == (outcome is StoreOutcome.CORRUPT)

    @rule(
        realm_id=st.sampled_from([MAIN, MAIN, OTHER]),
        ranks_by_number=st.dictionaries(
            st.integers(1, 4), st.frozensets(st.integers(0, 2), max_size=3), max_size=4
        ),
        everywhere=st.booleans(),
        written_at=st.sampled_from([1, 2, 1000, 1001, 1002, 1005, 10**9]),
        withdrawn=st.booleans(),
    )
    def listed(
        self,
        realm_id: int,
        ranks_by_number: dict[int, frozenset[int]],
        everywhere: bool,
        written_at: int,
        withdrawn: bool,
    ) -> None:
        if everywhere:
            ranks_by_number = dict.fromkeys(ranks_by_number, frozenset({0, 1, 2}))
        self.list_chunks(realm_id, ranks_by_number, written_at, withdrawn=withdrawn)

    def list_chunks(
        self,
        realm_id: int,
        ranks_by_number: dict[int, frozenset[int]],
        written_at: int,
        *,
        withdrawn: bool,
    ) -> None:
        size = self.world.world_sizes.get(realm_id, 0)
        for number, all_ranks in ranks_by_number.items() if size else ():
            name = (realm_id, key(number))
            ranks = {rank for rank in all_ranks if rank < size}
            held, time = self.stored.get(name, set()), self.times.get(name, 0)
            if withdrawn:
                if not ranks:
                    continue
                self.forget(name, ranks, written_at)
                if time <= written_at:
                    self.set_stored(name, held - ranks, time)
                continue
            lost, until = self.gone.get(name, (set[int](), 0))
            if written_at <= until:
                ranks -= lost
            if ranks:
                self.set_stored(name, held | ranks, max(time, written_at))
        commands = self.world.listed(
            ranks_by_number, written_at=written_at, withdrawn=withdrawn, realm_id=realm_id
        )
        self.absorb(commands)

    @rule(realm_id=st.integers(0, 1))
    def catalog_read_to_its_end(self, realm_id: int) -> None:
        self.absorb(self.world.send(CaughtUp(realm_id)))

    # --- another life ---------------------------------------------------------------------------

    @rule(sure=st.integers(0, 3), attach=st.booleans())
    def restart(self, sure: int, attach: bool) -> None:
        """Killed in the middle of all that runs; the next life starts on what was sealed."""
        if sure != 0:
            return
        whole = sorted(self.world.slots.sealed)
        self.world.restart(self.new_policy(), self.new_tenants())
        assert sorted(self.world.slots.used) == whole
        self.begin_life()
        self.absorb([])
        if attach:
            for rank in range(self.world_size):
                self.open_worker(rank, "a")
            self.open_scheduler("a", want_events=True)

    # --- the end --------------------------------------------------------------------------------

    @precondition(lambda self: not self.draining)
    @rule(sure=st.integers(0, 40))
    def drain(self, sure: int) -> None:
        if sure == 0:
            self.start_draining()

    def start_draining(self) -> None:
        self.draining = True
        self.absorb(self.world.send(Draining()))
        assert not self.waiting, "a lookup waits for a sidecar that stops"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.start_draining()
        while self.world.running() or self.world.engine.pending_work().writes_pending:
            if not self.world.running():
                # Writing pauses after failures.
                self.tick(10.0)
            elif self.world.gathers or self.world.scatters:
                self.copy_ends(0, CopyOutcome.OK)
            elif self.world.writes:
                self.write_ends(0, StoreOutcome.OK)
            else:
                self.read_ends(0, StoreOutcome.OK)
        assert self.world.engine.pending_work().idle
        assert not self.jobs, "a job was never answered"
        for session_id in list(self.world.sessions):
            self.close_session(session_id)
        snapshot = self.world.engine.snapshot()
        assert (snapshot.leases, snapshot.lookups, snapshot.slots_zombie) == (0, 0, 0)
        bounds = self.world.engine.bounds
        assert not any(share.used for share in bounds.shares.values()), "something still waits"
        assert not bounds.jobs, "a job still runs"
        self.world.note(self.world.engine.clear())
        assert not self.world.slots.used, "a slot was left"


EngineMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
