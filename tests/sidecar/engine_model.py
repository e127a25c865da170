"""What the machine of `test_engine_machine.py` knows: a model of dicts beside the pure engine.

`World` (engine_world) follows what is in each slot and what runs on it. The model adds what it
takes to know the rest from outside: the store's bits, jobs that are owed an answer, leases, lookups
and what is to be kept. Where it cannot see when a pin ended, it lets go early: it never asks for
more than the rules promise. Chunks are names: a realm and a key, which is of one KV cache group.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hypothesis.stateful import RuleBasedStateMachine

from sidecar.core.commands import (
    Command,
    Draining,
    Gather,
    Reply,
    Scatter,
    SessionClosed,
    SessionOpened,
)
from sidecar.protocol import Done, Events, LookupDone, Outcome, Role
from tests.sidecar.engine_names import GROUP_NUMBERS, group_of, key
from tests.sidecar.engine_world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.core.tenants import Tenants
    from tiers.policy import Policy

Name = tuple[int, bytes]

MAIN, OTHER, WINDOW = 0, 1, 2
"""Realms. OTHER is of other engines, has one rank and slots of another size, and competes for
slabs; WINDOW is the second group of MAIN's engines, where they have two."""


@dataclass
class OwedJob:
    """A job that was submitted and not answered."""

    loading: bool
    chunks: int
    copies: set[int]
    results: list[Outcome] = field(default_factory=list[Outcome])


@dataclass
class Pin:
    """Chunks that must stay in the host tier until then."""

    names: set[Name]
    last: bytes
    ends: float


class EngineModel(RuleBasedStateMachine):
    """State and what must hold of it; rules are in the class below it."""

    world: World
    world_size: int
    other_realms: tuple[int, ...]
    new_policy: Callable[[], Policy]
    new_tenants: Callable[[], Tenants]
    last_id = 0

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
        self.waiting: dict[tuple[int, int], tuple[list[Name], float]] = {}
        self.answered: dict[tuple[int, int], Pin] = {}
        self.ever_asked: set[tuple[int, int]] = set()
        self.held: set[Name] = set()
        self.kept: dict[tuple[int, Name], float] = {}
        """What a session asked to have kept, and until when."""

    # --- names ----------------------------------------------------------------------------------

    def fitting(self, session_id: int, numbers: Sequence[int]) -> list[int]:
        """Chunks of the groups that a session has, in place of those that it lacks."""
        groups = len(self.ever_opened[session_id].groups)
        own = (n if group_of(n) < groups else n % GROUP_NUMBERS for n in numbers)
        return list(dict.fromkeys(own))

    def name_of(self, session_id: int, number: int) -> Name:
        """A chunk, as a session means it."""
        groups = self.ever_opened[session_id].groups
        return (groups[group_of(number)].realm_id, key(number))

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
        # What is past its time, or corrupt, is gone, even if pinned; a pin goes with it.
        ended = {*self.world.forgotten, *([buried] if buried else [])}
        self.world.forgotten.clear()
        lost = self.held - held - ended
        for (session_id, name), until in list(self.kept.items()):
            if name in ended or until <= self.world.now:
                del self.kept[session_id, name]
            else:
                assert name not in lost, "a chunk that is to be kept was evicted"
        for pin in (*self.leases.values(), *self.answered.values()):
            assert not pin.names & lost, "a pinned chunk was evicted"
            pin.names &= held
        for account in self.world.engine.tenants:
            most = account.quota.host_bytes_max
            assert most is None or account.host_bytes <= most, "a tenant is over its limit"
        self.held = held
        engine = self.world.engine
        assert len(engine.host.allocated) == len(self.world.content)
        assert len(engine.leases) >= len(self.leases), "a lease ended early"
        assert len(engine.lookups) >= len(self.waiting) + len(self.answered), "a lookup ended early"
        assert engine.directory.chunks_in_host == len(held)
        assert engine.directory.chunks_in_store == len(in_store)

    def absorb_message(self, reply: Reply) -> None:
        message = reply.message
        if isinstance(message, Done):
            for job in message.jobs:
                self.job_done(self.jobs.pop((reply.session_id, job.job_id)), job.outcome)
        elif isinstance(message, LookupDone):
            self.lookup_done((reply.session_id, message.lookup_id), message)
        else:
            assert isinstance(message, Events)
            assert message.stored or message.removed or message.anew

    def job_done(self, job: OwedJob, outcome: Outcome) -> None:
        assert not job.copies, "answered before its last copy ended"
        fine = set(job.results) <= {Outcome.OK}
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
        asked, ends = self.waiting.pop(name)
        ready = asked[: message.ready]
        assert self.world.in_host().issuperset(ready), "answered ready, and is not there"
        if message.outcome is Outcome.OK:
            assert ready or not asked
        if ready:
            _, last = ready[-1]
            self.answered[name] = Pin(set(ready), last, ends)

    # --- sessions -------------------------------------------------------------------------------

    def opened(self, session_id: int) -> None:
        self.ever_opened[session_id] = self.world.sessions[session_id]

    def sessions(self, role: Role, *, realm_id: int | None = None) -> list[int]:
        return [
            session.session_id
            for session in self.world.sessions.values()
            if session.attach.role is role and realm_id in (None, session.engine[0])
        ]

    def open_main(self, role: Role, **parts: Any) -> None:
        """A client of an engine with all of its groups."""
        realms = self.other_realms
        self.opened(self.world.open(role, other_realms=realms, world_size=self.world_size, **parts))

    @property
    def has_worker(self) -> bool:
        return bool(self.sessions(Role.WORKER))

    @property
    def has_scheduler(self) -> bool:
        return bool(self.sessions(Role.SCHEDULER))

    def close_session(self, session_id: int) -> None:
        del self.world.sessions[session_id]
        pins = (self.leases, self.answered, self.waiting)
        for owned in pins:
            for name in [name for name in owned if name[0] == session_id]:
                del owned[name]
        self.keep_no_more(session_id)
        self.absorb(self.world.send(SessionClosed(session_id)))

    def keep_no_more(self, session_id: int) -> None:
        """A session lets go of all that it had kept."""
        for name in [name for name in self.kept if name[0] == session_id]:
            del self.kept[name]

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

    def ranks(self) -> dict[int, int]:
        """A worker of each rank of the main realm that has one."""
        workers = self.sessions(Role.WORKER, realm_id=MAIN)
        return {self.world.sessions[session_id].attach.rank: session_id for session_id in workers}

    def load(self, session_id: int, job_id: int, chunks: list[int]) -> None:
        if (session_id, job_id) in self.jobs:
            return
        session = self.world.sessions[session_id]
        host = self.world.host_ranks()
        chunks = self.fitting(session_id, chunks)
        names = [self.name_of(session_id, number) for number in chunks]
        there = all(session.attach.rank in host.get(name, set()) for name in names)
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
        name = (*session.engine, job_id)
        ranks = self.finished.setdefault(name, set())
        ranks.add(session.attach.rank)
        if len(ranks) < session.attach.world_size:
            return
        for owner, lease_id in list(self.leases):
            scheduler = self.ever_opened[owner]
            if (*scheduler.engine, lease_id) == name:
                del self.leases[owner, lease_id]

    def end_copies(self, copy_ids: Sequence[int], outcome: Outcome) -> None:
        """Copies of one job end; only one of them, if it is corrupt."""
        scatter = self.world.scatters.get(copy_ids[0])
        buried = None
        if scatter is not None and outcome is Outcome.CORRUPT:
            buried = (scatter.realm_id, scatter.key)
        for (session_id, job_id), job in list(self.jobs.items()):
            ended = job.copies.intersection(copy_ids)
            if ended:
                job.copies -= ended
                gathered_corrupt = not job.loading and outcome is Outcome.CORRUPT
                job.results += [Outcome.FAILED if gathered_corrupt else outcome] * len(ended)
                if job.loading and not job.copies:
                    self.rank_finished(session_id, job_id)
                if not job.copies and session_id not in self.world.sessions:
                    del self.jobs[session_id, job_id]
        self.absorb(self.world.copied(*copy_ids, outcome=outcome), buried=buried)

    # --- leases and lookups ---------------------------------------------------------------------

    def take_lease(self, session_id: int, lease_id: int, chunks: list[int]) -> None:
        chunks = self.fitting(session_id, chunks)
        keys = {key(number) for number in chunks}
        refused = self.world.engine.counters.leases_refused
        commands = self.world.lease(session_id, lease_id, chunks)
        if self.world.engine.counters.leases_refused == refused:
            for name in [name for name in self.answered if name[0] == session_id]:
                if self.answered[name].last in keys:
                    del self.answered[name]
            names = {self.name_of(session_id, number) for number in chunks} & self.held
            ends = self.world.now + self.world.limits.lease_ttl_seconds_max
            self.leases[session_id, lease_id] = Pin(names, b"", ends)
            session = self.world.sessions[session_id]
            ranks = self.finished.get((MAIN, session.attach.engine_id, lease_id), set())
            if len(ranks) == self.world_size:
                del self.leases[session_id, lease_id]
        self.absorb(commands)

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

    # --- realms that nobody uses ----------------------------------------------------------------

    def forget_realms(self, unit: Sequence[int]) -> None:
        """All that nobody uses, and nothing else, is forgotten."""
        world = self.world
        sessions = {group.realm_id for one in world.sessions.values() for group in one.groups}
        used = sessions | {operation.realm_id for operation in world.running()}
        known = world.engine.directory.realms.keys() & set(unit)
        there = {name for name in self.held if name[0] in unit}
        gone: set[int] = set()
        for _ in range(2):
            # Chunks go with the first, realms with the second.
            gone = world.forget_realms(*unit)
        if used.isdisjoint(unit):
            assert world.engine.host.adoptions or gone.issuperset(unit), "it stays for nobody"
        else:
            assert not known & gone, "a realm was forgotten that is in use"
        if not sessions.isdisjoint(unit):
            lost = there - world.in_host() - world.forgotten
            assert not lost, "a chunk of a realm with a session was given up"
        for name in [name for name in {*self.stored, *self.gone} if name[0] in gone]:
            self.set_stored(name, set(), 0)
            self.gone.pop(name, None)
        self.absorb([])

    def start_draining(self) -> None:
        self.draining = True
        self.kept.clear()
        self.absorb(self.world.send(Draining()))
        assert not self.waiting, "a lookup waits for a sidecar that stops"
