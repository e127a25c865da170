"""What must hold after every event, beside the sidecar and without asking it.

Owns the shadow of the sidecar's world: which operation runs on which slot, which jobs and lookups
wait for an answer. Other rules: over bytes in `images.py`, over the whole in `balance.py`, for what
is asked and answered in `conduct.py`, for what requests want kept in `retained.py`, for blocks of
an engine in `copying.py`. Every rule has a short name; `Violation.rule` says which was broken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sidecar.core.commands import (
    Command,
    Copied,
    Event,
    ForgetRealms,
    Gather,
    Read,
    ReadDone,
    Received,
    RestoredSlot,
    Scatter,
    SessionClosed,
    StoreOutcome,
    Tick,
    Write,
    Written,
)
from sidecar.core.directory import Cause, HostSegment
from sidecar.core.host_tier import Reservation
from sidecar.core.tenants import TenantRules
from sidecar.protocol import (
    Done,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    Pin,
    Release,
    ServerMessage,
    StoreJob,
    Submit,
)
from tests.engine_invariants import check
from tests.simulation.balance import Balance
from tests.simulation.brief import brief
from tests.simulation.clock import Violation, World
from tests.simulation.conduct import Conduct, Work
from tests.simulation.content import Model, Truth
from tests.simulation.copying import Copying
from tests.simulation.images import Images
from tests.simulation.retained import Retained

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.simulation.process import SidecarProcess


class Checks:
    """All rules. `watch` puts them around one life of a sidecar."""

    def __init__(self, world: World, models: list[Model]) -> None:
        self.world = world
        self.truth = Truth()
        self.images = Images(world, self.truth, models)
        self.copying = Copying()
        self._work: dict[tuple[str, int], Work] = {}
        self._restored: tuple[RestoredSlot, ...] = ()
        self._jobs: dict[int, set[int]] = {}
        self._lookups: dict[int, dict[int, Lookup]] = {}
        self._ticks = 0
        self._handling = False
        self.balance = Balance(world, self.truth, TenantRules(), {}, self.images.model_of)
        self.conduct = Conduct(world)
        self.retained = Retained(world)

    # --- around a sidecar ----------------------------------------------------------------------

    def watch(self, process: SidecarProcess) -> None:
        """Check everything that this life does."""
        self._clear()
        rules, images = process.config.tenants.rules(), self.images
        self.balance = Balance(self.world, self.truth, rules, images.sealed, images.model_of)
        for one in self._restored:
            self.balance.filled(one)
        self.conduct = Conduct(self.world)
        self.retained.begins()
        engine, executor, slots = (
            process.dispatcher.engine,
            process.dispatcher.executor,
            process.pool,
        )
        handle, execute = engine.handle_all, executor.execute
        allocate, free, reserve = slots.allocate, slots.free, engine.host.reserve

        def handled(events: Sequence[Event], now: float) -> list[Command]:
            told = [one for event in events for one in _one_by_one(event)]
            works = [self._before(process, event) for event in told]
            self._handling = True
            commands = handle(events, now)
            self._handling = False
            self.world.saw(f"{min(len(events), 2)} events at once")
            self.world.note(
                f"engine: {type(events[0]).__name__} x {len(events)}, {len(commands)} commands:",
                lambda: (
                    f"{', '.join(map(brief, events))} -> {', '.join(map(brief, commands)) or '-'}"
                ),
            )
            for event, work in zip(told, works, strict=True):
                # Nobody knows which of them a command is for, so all count as those of the first.
                first = event is told[0]
                self._after(process, event, work, commands if first else [], now)
            return commands

        def executed(commands: list[Command]) -> None:
            execute(commands)
            if commands:
                self.balance.index_is_true(process)

        def allocated(slot_bytes: int) -> int | None:
            offset = allocate(slot_bytes)
            self.balance.allocated(offset)
            return offset

        def freed(offset: int) -> None:
            self._freed(offset)
            free(offset)

        def reserved(segment: HostSegment, cause: Cause, *retention: Any) -> Reservation:
            made = reserve(segment, cause, *retention)
            if made is Reservation.REFUSED:
                self.conduct.refused(process, segment)
            return made

        for owner, name, value in (
            (engine, "handle_all", handled),
            (engine.host, "reserve", reserved),
            (executor, "execute", executed),
            (slots, "allocate", allocated),
            (slots, "free", freed),
        ):
            setattr(owner, name, value)

    def begins(self, restored: tuple[RestoredSlot, ...]) -> None:
        """A sidecar begins, with what it found in its memory."""
        self.images.come_back(restored, self.balance.tenants)
        self._restored = restored

    def died(self, process: SidecarProcess, *, kept: bool) -> None:
        """Its life is over: nothing that it promised holds; its memory may be there still."""
        self.images.died(
            {zombie.slot for zombie in process.dispatcher.engine.host.zombies}, kept=kept
        )
        self._clear()
        engine = process.dispatcher.engine
        for name, count in vars_of(engine.counters).items():
            self.world.seen[f"counter {name}"] += count
        for (what, why), count in engine.shares.refused.items():
            self.world.seen[f"refused: {what} for want of {why}"] += count

    def _clear(self) -> None:
        for table in (self._work, self._jobs, self._lookups):
            cast("dict[Any, Any]", table).clear()
        self.images.clear()
        self.balance.close()

    # --- events --------------------------------------------------------------------------------

    def _before(self, process: SidecarProcess, event: Event) -> Work | None:
        work: Work | None = None
        self.balance.begins(process, event)
        match event:
            case Copied():
                (copy_id,) = event.copy_ids
                work = self._ended("copy", copy_id)
                assert isinstance(work, Gather | Scatter)
                self._copied(process, work, event)
            case Written():
                work = self._ended("write", event.write_id)
                if event.outcome is StoreOutcome.CORRUPT:
                    self.images.stays(work, "write")
                self.world.saw(f"write {event.outcome.value}")
            case ReadDone():
                work = self._ended("read", event.read_id)
                self.world.saw(f"read {event.outcome.value}")
                if event.outcome is StoreOutcome.OK:
                    self.images.filled(process, work, event.num_blocks)
                elif event.outcome is StoreOutcome.CORRUPT:
                    self.images.refused(process, work)
            case _:
                self._asked(event)
        self.conduct.before(process, event, work)
        return work

    def _asked(self, event: Event) -> None:
        """What a client asks for, and when it is gone."""
        match event:
            case Received(message=Submit() as message):
                jobs: list[LoadJob | StoreJob] = [*message.loads, *message.stores]
                ids = [job.job_id for job in jobs]
                self._jobs.setdefault(event.session_id, set()).update(ids)
                for job in jobs:
                    self._are_mixed(type(job).__name__, [piece.group for piece in job.chunks])
            case Received(message=Lookup() as message):
                asked = self._lookups.setdefault(event.session_id, {})
                asked[message.lookup_id] = message
                self._are_mixed("Lookup", message.groups)
            case Received(message=Pin() as message):
                self._are_mixed("Pin", message.groups)
            case Received(message=Release() as message):
                for lookup_id in message.lookup_ids:
                    self._lookups.get(event.session_id, {}).pop(lookup_id, None)
            case SessionClosed():
                self._jobs.pop(event.session_id, None)
                self._lookups.pop(event.session_id, None)
            case _:
                pass

    def _are_mixed(self, what: str, groups: list[int]) -> None:
        if len(set(groups)) > 1:
            self.world.saw(f"several groups: in one {what}")

    def _ended(self, kind: str, number: int) -> Work:
        work = self._work.pop((kind, number), None)
        if work is None:
            raise Violation("work ends once", f"{kind} {number}")
        return work

    def _copied(self, process: SidecarProcess, work: Gather | Scatter, event: Copied) -> None:
        kind = type(work).__name__.lower()
        self.world.saw(f"{kind} {event.outcome.name.lower()}")
        if event.outcome is Outcome.EXPIRED:
            for reason in ("was not reached", "no copy thread", "the worker revoked", "held its"):
                if reason in event.detail:
                    self.world.saw(f"copy expired: {reason}")
        elif event.outcome is Outcome.FAILED:
            if "another chunk" not in event.detail:
                raise Violation("no copy raises", event.detail)
        elif event.outcome is Outcome.CORRUPT:
            self.images.stays(work, "load")
        elif event.outcome is Outcome.OK:
            if isinstance(work, Gather):
                self.images.filled(process, work, len(work.block_ids))
            else:
                self.images.loaded(process, work)

    def _after(
        self,
        process: SidecarProcess,
        event: Event,
        work: Work | None,
        commands: list[Command],
        now: float,
    ) -> None:
        for command in commands:
            match command:
                case Gather() | Scatter():
                    self._begin(process, "copy", command.copy_id, command)
                case Write():
                    self._begin(process, "write", command.write_id, command)
                case Read():
                    self._begin(process, "read", command.read_id, command)
                case _:
                    pass
        if isinstance(event, ForgetRealms):
            known = process.dispatcher.engine.directory.realms
            left = any(realm_id in known for realm_id in event.realm_ids)
            self.world.saw("chunks of a realm given up" if left else "realm forgotten")
        self.conduct.after(process, event, work, commands, now)
        self.retained.after(process.dispatcher.engine, event, commands, now)
        self._ticks += 1
        if isinstance(event, Tick) and not commands and self._ticks % 8:
            return
        self.balance.check(process, event, now)

    def _begin(self, process: SidecarProcess, kind: str, number: int, work: Work) -> None:
        writes = isinstance(work, Gather | Read)
        for other in self._work.values():
            if other.slot != work.slot:
                continue
            if writes or isinstance(other, Gather | Read):
                raise Violation("a slot is not reused under work", f"{work} beside {other}")
        self._work[kind, number] = work
        self.images.begins(process, work)
        if isinstance(work, Gather | Read):
            self.balance.filled(work)

    def _freed(self, offset: int) -> None:
        for work in self._work.values():
            if work.slot == offset:
                raise Violation("a slot is not freed under work", f"{work}")
        self.balance.freed(offset)
        self.retained.freed(offset)
        self.images.freed(offset)

    def moved(self, segment: HostSegment, cause: Cause) -> None:
        """A segment changes its state."""
        self.world.saw(f"{segment.state.name} + {cause.name}")
        if cause is Cause.EVICTED and self._handling:
            self.balance.evicted(segment.chunk)

    def object_written(self, process: SidecarProcess, name: str, image: bytes) -> None:
        """All pieces of an object were taken from its slot."""
        self.images.object_written(process, self._work.values(), name, image)

    # --- messages ------------------------------------------------------------------------------

    def received(self, token: bytes, frame: bytes) -> None:
        """A client's frame reached the sidecar."""
        self.world.saw("frame received")

    def sent(self, process: SidecarProcess, token: bytes, message: ServerMessage) -> None:
        """The sidecar answers."""
        session = process.dispatcher.sessions.by_token(token)
        assert session is not None
        match message:
            case Done():
                waiting = self._jobs.get(session.session_id, set())
                for job in message.jobs:
                    self.world.saw(f"job {job.outcome.name}")
                    if job.job_id not in waiting:
                        raise Violation("a job is answered once", f"job {job.job_id}")
                    waiting.discard(job.job_id)
                    self.conduct.job_answered(session.session_id, job)
            case LookupDone():
                self._looked_up(process, session, message)
            case _:
                self.world.saw(f"message {type(message).__name__}")

    def _looked_up(self, process: SidecarProcess, session: Any, message: LookupDone) -> None:
        self.world.saw(f"lookup {message.outcome.name}")
        asked = self._lookups.get(session.session_id, {})
        question = asked.pop(message.lookup_id, None)
        if question is None:
            raise Violation("a lookup is answered once", f"lookup {message.lookup_id}")
        realms = process.dispatcher.engine.directory.realms
        groups = question.groups or [0] * len(question.keys)
        for key, group in list(zip(question.keys, groups, strict=True))[: message.ready]:
            chunk = realms[session.realms[group].realm_id].chunks.get(key)
            if chunk is None or not self.balance.is_there(chunk):
                raise Violation("what a lookup calls ready is there", key.hex()[:12])
        self.conduct.lookup_answered(process, session.session_id, message)

    # --- the end -------------------------------------------------------------------------------

    def quiet(self, process: SidecarProcess) -> None:
        """All engines are gone and time has passed: nothing is left but chunks."""
        engine = process.dispatcher.engine
        work = engine.pending_work()
        self.images.all_sealed_right(process)
        if self._work or not work.idle:
            raise Violation("everything ends", f"{work}, {self._work}")
        if engine.host.adoptions:
            raise Violation("what a rank stored comes back to it", f"{engine.host.adoptions}")
        left = (len(engine.leases), len(engine.lookups), engine.sessions, engine.host.zombies)
        if any(left):
            raise Violation("everything is released", f"{left}")
        waiting = {number: jobs for number, jobs in self._jobs.items() if jobs}
        if waiting:
            raise Violation("every job is answered", f"{waiting}")
        process.dispatcher.executor.execute(engine.clear())
        check(engine)
        used = process.pool.stats().used_bytes
        if used:
            raise Violation("every slot can be freed", f"{used} bytes are used")
        bounds = engine.shares
        held = {name: share.used for name, share in bounds.shares.items() if share.used}
        if held or bounds.jobs.used:
            raise Violation("at rest nothing is held", f"{held}, jobs {bounds.jobs.by_session}")

    def answered(self, process: SidecarProcess) -> None:
        """Nothing runs any more, and sessions are open: every question has its answer."""
        for what, waiting in (("job", self._jobs), ("lookup", self._lookups)):
            for session_id, left in cast("dict[int, Any]", waiting).items():
                if left:
                    raise Violation(f"every {what} is answered", f"{session_id}: {sorted(left)}")


def _one_by_one(event: Event) -> list[Event]:
    """An event for each copy, where one tells of several."""
    if isinstance(event, Copied):
        return [Copied([one], event.outcome, event.detail) for one in event.copy_ids]
    return [event]


def vars_of(counters: Any) -> dict[str, int]:
    """Fields of a slotted record of counts."""
    return {name: getattr(counters, name) for name in counters.__slots__}
