"""Any order of events, any outcome: the pure engine against a model of dicts.

The model, and what must hold of it, is in `engine_model.py`; here is what may happen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import initialize, precondition, rule

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import CaughtUp, Read, StoreOutcome, Tick, Write
from sidecar.core.fair_share import ShareLimits
from sidecar.core.outbox import WritePolicy
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_model import MAIN, OTHER, WINDOW, EngineModel
from tests.sidecar.engine_names import GROUP_NUMBERS, layout, release
from tests.sidecar.worlds import make_world
from tiers.policy import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

TENANT = b"a tenant"

PICK = st.integers(0, 1000)
NUMBERS = st.one_of(st.integers(1, 4), st.integers(GROUP_NUMBERS + 1, GROUP_NUMBERS + 2))
MIXED = [2, GROUP_NUMBERS + 1, GROUP_NUMBERS + 2]
CHUNKS = st.one_of(
    st.sampled_from([[], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], MIXED]),
    st.lists(NUMBERS, min_size=1, max_size=3, unique=True),
)
COPY_OUTCOMES = st.sampled_from(
    [*3 * [Outcome.OK], Outcome.CORRUPT, Outcome.REVOKED, Outcome.EXPIRED, Outcome.FAILED]
)
STORE_OUTCOMES = st.sampled_from([StoreOutcome.OK, StoreOutcome.OK, *StoreOutcome])


def choose(items: Sequence[T], pick: int) -> T:
    return items[pick % len(items)]


class EngineMachine(EngineModel):
    @initialize(
        world_size=st.sampled_from([1, 2]),
        slabs=st.integers(1, 8),
        slab_slots=st.sampled_from([1, 2]),
        policy=st.sampled_from(sorted(POLICIES)),
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
        several=st.booleans(),
        begun=st.sampled_from([1, 100]),
        adopted=st.sampled_from([1, 2, 1000]),
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
        several: bool,
        begun: int,
        adopted: int,
    ) -> None:
        slot_bytes = layout(0).payload_bytes(2)
        limit = Quota(None if quota is None else quota * slot_bytes)
        rules = TenantRules(named={TENANT: ("named", limit)})
        self.new_policy = lambda: POLICIES[policy]()
        self.new_tenants = lambda: Tenants(rules)
        self.world = make_world(
            tenants=self.new_tenants(),
            slabs=slabs,
            slab_slots=slab_slots,
            policy=POLICIES[policy](),
            writes_inflight_max=inflight,
            reads_inflight_max=inflight,
            reads_begun_max=begun,
            adopted_max=adopted,
            write_queue_bytes_max=queue * slot_bytes,
            breaker=BreakerRules(failures, 1.0, 4.0),
            quarantine_keys_max=quarantine,
            gone_keys_max=quarantine,
            leases_max_per_session=bound,
            lookups_max_per_session=bound,
            write=write,
            shares=ShareLimits(
                memory_bytes_max=memory,
                copies_queued_max=share,
                storing_bytes_max=share * slot_bytes,
                pinned_bytes_max=share * slot_bytes * world_size,
                lookups_max=share,
                leases_max=share,
                jobs_max_per_session=share,
            ),
            verify_loads=verify,
            verify_writes=verify,
        )
        self.world_size = world_size
        self.other_realms = (WINDOW,) if several else ()
        self.begin_life()
        self.attach_all()

    def attach_all(self) -> None:
        for rank in range(self.world_size):
            self.open_worker(rank, "a")
        self.open_scheduler("a", want_events=True)

    # --- sessions -------------------------------------------------------------------------------

    @rule(rank=st.integers(0, 1), engine_id=st.sampled_from("ab"))
    def open_worker(self, rank: int, engine_id: str) -> None:
        self.open_main(Role.WORKER, rank=rank % self.world_size, engine_id=engine_id)

    @rule()
    def open_other_worker(self) -> None:
        self.opened(self.world.open(Role.WORKER, realm_id=OTHER, content_bytes=64))

    @rule(engine_id=st.sampled_from("ab"), want_events=st.booleans())
    def open_scheduler(self, engine_id: str, want_events: bool) -> None:
        self.open_main(Role.SCHEDULER, engine_id=engine_id, want_events=want_events)

    @precondition(lambda self: self.world.sessions)
    @rule(pick=PICK, sure=st.integers(0, 5))
    def close(self, pick: int, sure: int) -> None:
        if sure == 0:
            self.close_session(choose(list(self.world.sessions), pick))

    @rule(pick=PICK, chunks=CHUNKS)
    def stale(self, pick: int, chunks: list[int]) -> None:
        gone = [session for session in self.ever_opened if session not in self.world.sessions]
        session_id = choose(gone, pick) if gone else 9999
        before = self.world.engine.counters.stale_messages
        assert not self.world.store(session_id, 1, chunks)
        assert not self.world.lease(session_id, 1, chunks)
        assert self.world.engine.counters.stale_messages == before + 2

    # --- jobs -----------------------------------------------------------------------------------

    @precondition(lambda self: self.has_worker)
    @rule(
        pick=PICK,
        chunks=CHUNKS,
        blocks=st.sampled_from([1, 2, 2, 2]),
        tenant=st.sampled_from([b"", TENANT, b"someone."]),
        ttl_seconds=st.sampled_from([0.0, 0.0, 0.0, 1.0, 6.0]),
        stays=st.sampled_from([False, False, True]),
    )
    def store(
        self,
        pick: int,
        chunks: list[int],
        blocks: int,
        tenant: bytes,
        ttl_seconds: float,
        stays: bool,
    ) -> None:
        session_id, job_id = choose(self.sessions(Role.WORKER), pick), self.next_id()
        chunks = self.fitting(session_id, chunks)
        commands = self.world.store(
            session_id,
            job_id,
            chunks,
            blocks=blocks,
            tenant=tenant,
            ttl_seconds=ttl_seconds,
            stays=stays,
        )
        self.submitted(session_id, job_id, chunks, commands)
        assert not self.draining or not self.jobs[session_id, job_id].copies
        self.absorb(commands)

    @rule(chunks=CHUNKS)
    def store_on_all_ranks(self, chunks: list[int]) -> None:
        """The usual case, whole, so that runs get to what follows it."""
        for session_id in self.ranks().values():
            job_id = self.next_id()
            chunks = self.fitting(session_id, chunks)
            commands = self.world.store(session_id, job_id, chunks)
            self.submitted(session_id, job_id, chunks, commands)
            copies = list(self.jobs[session_id, job_id].copies)
            self.absorb(commands)
            if copies:
                self.end_copies(copies, Outcome.OK)

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
        ranks = frozenset({0, 1})
        for realm_id, first in ((MAIN, 0), (WINDOW, GROUP_NUMBERS)):
            there = [n for n in numbers if first <= n < first + GROUP_NUMBERS]
            self.list_chunks(realm_id, dict.fromkeys(there, ranks), 10**9, withdrawn=False)
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

    @precondition(lambda self: self.world.gathers or self.world.scatters)
    @rule(pick=PICK, outcome=COPY_OUTCOMES, others_too=st.booleans())
    def copy_ends(self, pick: int, outcome: Outcome, *, others_too: bool) -> None:
        copies = {**self.world.gathers, **self.world.scatters}
        one = copies[choose(list(copies), pick)]
        ended = [one.copy_id]
        if others_too and outcome is not Outcome.CORRUPT:
            job = (one.session_id, one.job_id)
            ended = [n for n, copy in copies.items() if (copy.session_id, copy.job_id) == job]
        self.end_copies(ended, outcome)

    # --- leases, lookups, and what is kept ------------------------------------------------------

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, chunks=CHUNKS, job=st.none() | PICK)
    def lease(self, pick: int, chunks: list[int], job: int | None) -> None:
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        # Sometimes for a load that is under way or over already.
        known = [job_id for _, job_id in (*self.jobs, *self.leases)]
        lease_id = choose(known, job) if known and job is not None else self.next_id()
        self.take_lease(session_id, lease_id, chunks)

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, chunks=CHUNKS, num_tokens=st.sampled_from([0, 100, 5000]))
    def use(self, pick: int, chunks: list[int], num_tokens: int) -> None:
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        chunks = self.fitting(session_id, chunks)
        self.absorb(self.world.use(session_id, chunks, num_tokens))

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
        chunks = self.fitting(session_id, chunks)
        names = [self.name_of(session_id, number) for number in chunks]
        self.waiting[session_id, lookup_id] = (names, ends)
        self.absorb(self.world.look_up(session_id, lookup_id, chunks, deadline_ms=deadline_ms))
        assert not self.draining or (session_id, lookup_id) not in self.waiting

    @precondition(lambda self: self.has_scheduler)
    @rule(
        pick=PICK,
        chunks=CHUNKS,
        seconds=st.sampled_from([1.0, 6.0, 30.0]),
        tenant=st.sampled_from([b"", TENANT]),
    )
    def pin(self, pick: int, chunks: list[int], seconds: float, tenant: bytes) -> None:
        """As many as may be, from the first on; the others are counted."""
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        chunks = self.fitting(session_id, chunks)
        before = self.world.engine.counters.pins_refused
        commands = self.world.pin(session_id, chunks, seconds, tenant=tenant)
        refused = self.world.engine.counters.pins_refused - before
        if not self.draining:
            for number in chunks[: len(chunks) - refused]:
                name = (session_id, self.name_of(session_id, number))
                self.kept[name] = max(self.kept.get(name, 0.0), self.world.now + seconds)
        self.absorb(commands)

    @precondition(lambda self: self.has_scheduler)
    @rule(pick=PICK, lease=PICK, lookup=PICK, pins=st.booleans())
    def release(self, pick: int, lease: int, lookup: int, pins: bool) -> None:
        session_id = choose(self.sessions(Role.SCHEDULER), pick)
        leases = [i for owner, i in self.leases if owner == session_id] or [4242]
        lookups = [i for owner, i in (*self.waiting, *self.answered) if owner == session_id]
        lease_id, lookup_id = choose(leases, lease), choose(lookups or [4242], lookup)
        self.leases.pop((session_id, lease_id), None)
        self.waiting.pop((session_id, lookup_id), None)
        self.answered.pop((session_id, lookup_id), None)
        if pins:
            self.keep_no_more(session_id)
        self.absorb(self.world.send(release(session_id, (lease_id,), (lookup_id,), pins=pins)))

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

    @precondition(lambda self: self.world.resuming)
    @rule()
    def resume(self) -> None:
        self.absorb(self.world.resume())

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
        realm_id=st.sampled_from([MAIN, MAIN, OTHER, WINDOW]),
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
        if realm_id == WINDOW:
            ranks_by_number = {GROUP_NUMBERS + n: ranks for n, ranks in ranks_by_number.items()}
        self.list_chunks(realm_id, ranks_by_number, written_at, withdrawn=withdrawn)

    @rule(realm_id=st.sampled_from([MAIN, OTHER, WINDOW]))
    def catalog_read_to_its_end(self, realm_id: int) -> None:
        self.absorb(self.world.send(CaughtUp(realm_id)))

    # --- realms that nobody uses ----------------------------------------------------------------

    @rule(unit=st.sampled_from([(MAIN, WINDOW), (OTHER,), (WINDOW,)]), leave=st.booleans())
    def forget_what_nobody_uses(self, unit: tuple[int, ...], leave: bool) -> None:
        if leave and unit != (OTHER,):
            for session_id in list(self.world.sessions):
                self.close_session(session_id)
        self.forget_realms(unit)

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
            self.attach_all()

    # --- the end --------------------------------------------------------------------------------

    @precondition(lambda self: not self.draining)
    @rule(sure=st.integers(0, 40))
    def drain(self, sure: int) -> None:
        if sure == 0:
            self.start_draining()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        self.start_draining()
        while self.world.running() or self.world.engine.pending_work().writes_pending:
            if self.world.resuming:
                self.resume()
            elif not self.world.running():
                # Writing pauses after failures.
                self.tick(10.0)
            elif self.world.gathers or self.world.scatters:
                self.copy_ends(0, Outcome.OK, others_too=True)
            elif self.world.writes:
                self.write_ends(0, StoreOutcome.OK)
            else:
                self.read_ends(0, StoreOutcome.OK)
        assert self.world.engine.pending_work().idle
        assert not self.jobs, "a job was never answered"
        for session_id in list(self.world.sessions):
            self.close_session(session_id)
        engine = self.world.engine
        assert (len(engine.leases), len(engine.lookups), engine.host.zombies) == (0, 0, set())
        bounds = self.world.engine.shares
        assert not any(share.used for share in bounds.shares.values()), "something still waits"
        assert not bounds.jobs.used, "a job still runs"
        self.world.note(self.world.engine.clear())
        assert not self.world.slots.used, "a slot was left"


EngineMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestEngineMachine = EngineMachine.TestCase
