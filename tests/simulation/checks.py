"""What must hold after every event, beside the sidecar and without asking it.

Owns the shadow of the sidecar's world: which operation runs on which slot, what each slot was
sealed with, which jobs and lookups wait for an answer, which bytes were damaged on purpose. What
was sealed and damaged outlives the sidecar, as its memory does. Rules over the whole are in
`balance.py`, those for what is asked and answered in `conduct.py`. Every rule has a short name;
`Violation.rule` says which one was broken.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

import sidecar.copies
from sidecar.commands import (
    Command,
    Copied,
    CopyOutcome,
    Event,
    Gather,
    Listed,
    LookedUp,
    PinAsked,
    Read,
    ReadDone,
    Released,
    Reply,
    RestoredSlot,
    Scatter,
    SessionClosed,
    StoreOutcome,
    Submitted,
    Tick,
    Write,
    Written,
)
from sidecar.directory import Cause, Chunk, Segment, SegmentState
from sidecar.protocol import (
    Done,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    ServerMessage,
    StoreChunk,
    StoreJob,
)
from sidecar.tenants import TenantRules
from tests.simulation.balance import Balance, Sealed
from tests.simulation.clock import Violation, World
from tests.simulation.conduct import Conduct, Work
from tests.simulation.content import Fact, Model, Truth, templates_of
from tests.simulation.retained import Retained
from tiers.catalog.names import namespace_prefix, parse_name
from tiers.errors import ChunkCorrupt

if TYPE_CHECKING:
    from sidecar.copyqueue import Group
    from sidecar.realms import Realm
    from tests.simulation.engine import SimEngine
    from tests.simulation.process import SidecarProcess


@dataclass(frozen=True, slots=True)
class Place:
    """A byte of a sealed payload in the pool."""

    slot: int
    offset: int
    key: bytes
    partial: bool
    """Another rank's segment of the chunk is on its way."""


class Checks:
    """All rules. `watch` puts them around one life of a sidecar."""

    def __init__(self, world: World, models: list[Model]) -> None:
        self.world = world
        self.truth = Truth()
        self.engines: list[SimEngine] = []
        self.damaged: set[int] = set()
        self.copying: list[Group] = []
        self._models = models
        self._work: dict[tuple[str, int], Work] = {}
        self.sealed: dict[int, Sealed] = {}
        self._restored: tuple[RestoredSlot, ...] = ()
        self._jobs: dict[int, set[int]] = {}
        self._lookups: dict[int, dict[int, Lookup]] = {}
        self._damaged_before: set[int] = set()
        """Writes that were to find that their slot had been damaged before they began."""
        self._ticks = 0
        self._handling = False
        self.balance = Balance(world, self.truth, TenantRules(), {}, self.model_of)
        self.conduct = Conduct(world)
        self.retained = Retained(world)

    # --- around a sidecar ----------------------------------------------------------------------

    def watch(self, process: SidecarProcess) -> None:
        """Check everything that this life does."""
        self._clear()
        self.balance = Balance(
            self.world, self.truth, process.config.tenants.rules(), self.sealed, self.model_of
        )
        for one in self._restored:
            self.balance.filled(one)
        self.conduct = Conduct(self.world)
        self.retained.begins()
        engine, mover, pool = process.hub.engine, process.hub.mover, process.pool
        handle, execute = engine.handle, mover.execute
        allocate, free = pool.allocate, pool.free

        def handled(event: Event, now: float) -> list[Command]:
            work = self._before(process, event)
            self._handling = True
            commands = handle(event, now)
            self._handling = False
            self.world.note(
                f"engine: {type(event).__name__}, {len(commands)} commands:",
                lambda: f"{brief(event)} -> {', '.join(map(brief, commands)) or '-'}",
            )
            self._after(process, event, work, commands, now)
            return commands

        def executed(commands: list[Command]) -> None:
            execute(commands)
            if commands:
                self.balance.index_is_true(process)

        def allocated(class_id: int) -> int | None:
            offset = allocate(class_id)
            self.balance.allocated(offset)
            return offset

        def freed(offset: int) -> None:
            self._freed(offset)
            free(offset)

        for owner, name, value in (
            (engine, "handle", handled),
            (mover, "execute", executed),
            (pool, "allocate", allocated),
            (pool, "free", freed),
        ):
            setattr(owner, name, value)

    def begins(self, restored: tuple[RestoredSlot, ...]) -> None:
        """A sidecar found this in its memory: exactly what the one before had sealed."""
        owners = self.balance.tenants
        found = {
            one.slot: (one.namespace, one.geometry, one.key, one.num_blocks, one.tenant)
            for one in restored
        }
        expected = {
            slot: (model.digest, model.chunk_layout(rank).geometry, key, num_blocks, owners[slot])
            for slot, (model, key, rank, num_blocks) in self.sealed.items()
        }
        if found != expected:
            differing = sorted(dict(found.items() ^ expected.items()))
            raise Violation("what was sealed comes back", f"slots {differing}")
        self._restored = restored
        if self.damaged:
            self.world.saw("damage outlives a sidecar")

    def died(self, process: SidecarProcess, *, kept: bool) -> None:
        """Its life is over: nothing that it promised holds; its memory may be there still."""
        dead = {zombie.slot for zombie in process.hub.engine._host.zombies}
        # In place: the ledger has it too, and slots are freed before the next life begins.
        for slot in [one for one in self.sealed if not kept or one in dead]:
            del self.sealed[slot]
        self.damaged.intersection_update(self.sealed)
        self._clear()
        engine = process.hub.engine
        for name, count in vars_of(engine.counters).items():
            self.world.seen[f"counter {name}"] += count
        for (what, why), count in engine.bounds.refused.items():
            self.world.seen[f"refused: {what} for want of {why}"] += count

    def _clear(self) -> None:
        for table in (self._work, self._jobs, self._lookups):
            cast("dict[Any, Any]", table).clear()
        self._damaged_before.clear()
        self.balance.close()

    # --- events --------------------------------------------------------------------------------

    def _before(self, process: SidecarProcess, event: Event) -> Work | None:
        work: Work | None = None
        self.balance.begins(process)
        match event:
            case Copied():
                work = self._ended("copy", event.copy_id)
                assert isinstance(work, Gather | Scatter)
                self._copied(process, work, event)
            case Written():
                work = self._ended("write", event.write_id)
                if event.outcome is StoreOutcome.CORRUPT and work.slot not in self.damaged:
                    raise Violation("what was sealed stays", f"slot {work.slot} corrupt on write")
                self.world.saw(f"write {event.outcome.value}")
            case ReadDone():
                work = self._ended("read", event.read_id)
                self.world.saw(f"read {event.outcome.value}")
                if event.outcome is StoreOutcome.OK:
                    self._seal(process, work, event.num_blocks)
                elif event.outcome is StoreOutcome.CORRUPT:
                    self._refused_rightly(process, work)
            case _:
                self._asked(event)
        self.conduct.before(process, event, work)
        return work

    def _asked(self, event: Event) -> None:
        """What a client asks for, and when it is gone."""
        match event:
            case Submitted():
                jobs: list[LoadJob | StoreJob] = [*event.message.loads, *event.message.stores]
                ids = [job.job_id for job in jobs]
                self._jobs.setdefault(event.session_id, set()).update(ids)
                for job in jobs:
                    self._are_mixed(type(job).__name__, [piece.group for piece in job.chunks])
            case LookedUp():
                asked = self._lookups.setdefault(event.session_id, {})
                asked[event.message.lookup_id] = event.message
                self._are_mixed("Lookup", event.message.groups)
            case PinAsked():
                self._are_mixed("Pin", event.message.groups)
            case Released():
                for lookup_id in event.lookup_ids:
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
        self.world.saw(f"{kind} {event.outcome.value}")
        if event.outcome is CopyOutcome.EXPIRED:
            for reason in ("was not reached", "no copy thread", "taking blocks back", "held its"):
                if reason in event.detail:
                    self.world.saw(f"copy expired: {reason}")
        elif event.outcome is CopyOutcome.FAILED:
            if "another chunk" not in event.detail:
                raise Violation("no copy raises", event.detail)
        elif event.outcome is CopyOutcome.CORRUPT:
            if work.slot not in self.damaged:
                raise Violation("what was sealed stays", f"slot {work.slot} corrupt on load")
        elif event.outcome is CopyOutcome.OK:
            if isinstance(work, Gather):
                self._seal(process, work, len(work.block_ids))
            else:
                self._loaded_right(process, work)

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
        self.conduct.after(process, event, work, commands, now)
        self.retained.after(process.hub.engine, event, commands, now)
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
        if isinstance(work, Gather | Read):
            self.damaged.discard(work.slot)
            self.sealed.pop(work.slot, None)
            self.balance.filled(work)
            return
        model = self.model_of(process.hub.realms[work.realm_id])
        if self.sealed.get(work.slot) != (model, work.key, work.rank, work.num_blocks):
            raise Violation("only what is sealed is served", f"{work}")
        if isinstance(work, Write) and work.verify and work.slot in self.damaged:
            self._damaged_before.add(work.write_id)

    def _freed(self, offset: int) -> None:
        for work in self._work.values():
            if work.slot == offset:
                raise Violation("a slot is not freed under work", f"{work}")
        self.balance.freed(offset)
        self.retained.freed(offset)
        self.damaged.discard(offset)

    def moved(self, segment: Segment, cause: Cause) -> None:
        """A segment changes its state."""
        self.world.saw(f"{segment.state.name} + {cause.name}")
        if cause is Cause.EVICTED and self._handling:
            self.balance.evicted(segment.chunk)

    # --- bytes ---------------------------------------------------------------------------------

    def _fact(self, key: bytes) -> Fact:
        fact = self.truth.facts.get(key)
        if fact is None:
            raise Violation("every key was made from tokens", key.hex()[:12])
        return fact

    def model_of(self, realm: Realm) -> Model:
        """The simulated model of a realm."""
        return next(
            model
            for model in self._models
            if (model.digest, model.topology) == (realm.namespace_digest, realm.topology)
        )

    def _seal(self, process: SidecarProcess, work: Work, num_blocks: int) -> None:
        """A slot was filled: it must hold what its key says, all of it."""
        model = self.model_of(process.hub.realms[work.realm_id])
        fact = self._fact(work.key)
        if fact.num_blocks != num_blocks:
            raise Violation("a chunk is whole", f"{num_blocks} blocks of {fact.num_blocks}")
        if work.slot not in self.damaged:
            template = templates_of(model, work.rank)[num_blocks]
            image = process.pool.memory[work.slot : work.slot + template.image_bytes]
            self._is_right(model, work.rank, work.key, image, type(work).__name__)
        self.sealed[work.slot] = (model, work.key, work.rank, num_blocks)

    def _is_right(self, model: Model, rank: int, key: bytes, image: Any, what: str) -> None:
        fact = self._fact(key)
        template = templates_of(model, rank)[fact.num_blocks]
        try:
            meta = template.verify(image, key)
        except ChunkCorrupt as error:
            raise Violation("what is sealed is an image", f"{what}: {error}") from error
        payload = np.asarray(image)[template.payload_offset :][: template.payload_bytes]
        expected = model.blocks(fact.digests, rank).view(np.uint8).ravel()
        if not np.array_equal(payload, expected):
            raise Violation("a key holds its own bytes", f"{what} of {key.hex()[:12]}, rank {rank}")
        if (meta.parent, meta.token_ids) != (fact.parent, fact.token_ids):
            raise Violation("a key holds its own row", f"{what} of {key.hex()[:12]}")

    def _loaded_right(self, process: SidecarProcess, work: Scatter) -> None:
        session = process.hub.sessions.get(work.session_id)
        if session is None:
            return
        rank = self._rank_of(session)
        if rank is None:
            return
        if work.slot in self.damaged:
            self.world.saw("damage after a load")
        fact = self._fact(work.key)
        model = self.model_of(process.hub.realms[work.realm_id])
        blocks = model.blocks(fact.digests, rank.rank)
        wanted = blocks[work.first_block : work.first_block + len(work.block_ids)]
        found = rank.views[rank.engine.groups.index(model)][list(work.block_ids)]
        if not np.array_equal(found, wanted):
            raise Violation("what is served is right", f"{work}")

    def _rank_of(self, session: Any) -> Any:
        for engine in self.engines:
            for rank in engine.ranks:
                if rank.wire is session.connection.wire and not engine.dead:
                    return rank
        return None

    def object_written(self, process: SidecarProcess, name: str, image: bytes) -> None:
        """All pieces of an object were taken from its slot."""
        parts = parse_name(name)
        assert parts is not None
        ranks = {
            rank
            for model in self._models
            if name.startswith(namespace_prefix(model.digest))
            for rank in range(model.ranks)
            if model.segment(rank) == parts.segment
        }
        # An object may arrive after its write has failed, while that of another rank runs.
        works = [
            work
            for work in self._work.values()
            if isinstance(work, Write) and work.key == parts.key and work.rank in ranks
        ]
        if any(work.slot in self.damaged for work in works):
            if any(work.write_id in self._damaged_before for work in works):
                raise Violation("a damaged slot is not written", name)
            self.world.saw("damage under a write")
            assert process.objects is not None
            process.objects.spoilt(name)
            return
        for model in self._models:
            if not name.startswith(namespace_prefix(model.digest)):
                continue
            for rank in range(model.ranks):
                if model.segment(rank) == parts.segment:
                    array = np.frombuffer(image, dtype=np.uint8)
                    self._is_right(model, rank, parts.key, array, "object")
                    return
        raise Violation("objects have names of their own", name)

    def _refused_rightly(self, process: SidecarProcess, work: Work) -> None:
        assert process.objects is not None
        tainted = process.objects._bucket.tainted
        if not any(work.key.hex() in name for name in tainted):
            raise Violation("a sound object is taken", f"{work}")

    def all_sealed_right(self, process: SidecarProcess) -> None:
        """Every slot that may be served holds what its key says."""
        for slot, (model, key, rank, num_blocks) in self.sealed.items():
            if slot in self.damaged:
                continue
            template = templates_of(model, rank)[num_blocks]
            image = process.pool.memory[slot : slot + template.image_bytes]
            self._is_right(model, rank, key, image, "slot")

    def sealed_payloads(self, process: SidecarProcess) -> list[Place]:
        """A place in the payload of each sealed slot."""
        places: list[Place] = []
        on_the_way = (SegmentState.STORING, SegmentState.READING)
        for slot in sorted(self.sealed):
            model, key, rank, num_blocks = self.sealed[slot]
            template = templates_of(model, rank)[num_blocks]
            within = template.payload_offset + self.world.random.randrange(template.payload_bytes)
            partial = any(
                segment.state in on_the_way
                for realm in process.hub.realms.all()
                if self.model_of(realm) == model
                for chunk in [self._chunk(process, realm, key)]
                if chunk is not None
                for segment in chunk.segments
            )
            places.append(Place(slot, slot + within, key, partial))
        return places

    def _chunk(self, process: SidecarProcess, realm: Realm, key: bytes) -> Chunk | None:
        known = process.hub.engine._directory.realms.get(realm.realm_id)
        return None if known is None else known.chunks.get(key)

    # --- blocks --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_copies(self) -> Iterator[None]:
        """Know which copies stand in the middle of their work."""
        real = {name: getattr(sidecar.copies, name) for name in ("_gather", "_scatter")}

        def watched(name: str) -> Any:
            def copy(group: Group, pool: Any) -> Any:
                self.copying.append(group)
                try:
                    return real[name](group, pool)
                finally:
                    self.copying.remove(group)

            return copy

        try:
            for name in real:
                setattr(sidecar.copies, name, watched(name))
            yield
        finally:
            for name, function in real.items():
                setattr(sidecar.copies, name, function)

    def blocks_taken(self, engine: SimEngine, block_ids: list[int]) -> None:
        """Blocks got a new owner, or new content: nobody may be copying from or to them."""
        if not self.copying:
            return
        taken = set(block_ids)
        wires = {rank.wire for rank in engine.ranks}
        for group in self.copying:
            connection = cast("Any", group.session.connection)
            if connection.wire not in wires:
                continue
            for command in group.commands:
                both = taken.intersection(command.block_ids)
                if both:
                    raise Violation("a block is not reused under a copy", f"{both} of {command}")

    blocks_written = blocks_taken

    # --- messages ------------------------------------------------------------------------------

    def received(self, token: bytes, frame: bytes) -> None:
        """A client's frame reached the sidecar."""
        self.world.saw("frame received")

    def sent(self, process: SidecarProcess, token: bytes, message: ServerMessage) -> None:
        """The sidecar answers."""
        session = process.hub.sessions.by_token(token)
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
        realms = process.hub.engine._directory.realms
        groups = question.groups or [0] * len(question.keys)
        for key, group in list(zip(question.keys, groups, strict=True))[: message.ready]:
            chunk = realms[session.realms[group].realm_id].chunks.get(key)
            if chunk is None or not self.balance.is_there(chunk):
                raise Violation("what a lookup calls ready is there", key.hex()[:12])
        self.conduct.lookup_answered(process, session.session_id, message)

    # --- the end -------------------------------------------------------------------------------

    def quiet(self, process: SidecarProcess) -> None:
        """All engines are gone and time has passed: nothing is left but chunks."""
        engine = process.hub.engine
        snapshot = engine.snapshot()
        self.all_sealed_right(process)
        if self._work or not snapshot.pending.idle:
            raise Violation("everything ends", f"{snapshot.pending}, {self._work}")
        if snapshot.leases or snapshot.lookups or snapshot.sessions or snapshot.slots_zombie:
            raise Violation("everything is released", f"{snapshot}")
        waiting = {number: jobs for number, jobs in self._jobs.items() if jobs}
        if waiting:
            raise Violation("every job is answered", f"{waiting}")
        process.hub.mover.execute(engine.clear())
        engine.check()
        used = process.pool.stats().used_bytes
        if used:
            raise Violation("every slot can be freed", f"{used} bytes are used")
        bounds = engine.bounds
        held = {name: share.used for name, share in bounds.shares.items() if share.used}
        if held or bounds.jobs:
            raise Violation("at rest nothing is held", f"{held}, jobs {bounds.jobs}")

    def answered(self, process: SidecarProcess) -> None:
        """Nothing runs any more, and sessions are open: every question has its answer."""
        for what, waiting in (("job", self._jobs), ("lookup", self._lookups)):
            for session_id, left in cast("dict[int, Any]", waiting).items():
                if left:
                    raise Violation(f"every {what} is answered", f"{session_id}: {sorted(left)}")


def vars_of(counters: Any) -> dict[str, int]:
    """Fields of a slotted record of counts."""
    return {name: getattr(counters, name) for name in counters.__slots__}


def brief(record: object) -> str:
    """An event or a command on one line, with keys cut short."""
    match record:
        case Reply():
            return f"reply to {record.session_id}: {brief(record.message)}"
        case bytes():
            return record.hex()[:8] if record else "-"
        case list() | tuple():
            return f"[{' '.join(map(brief, record))}]"
        case Listed():
            return f"Listed({len(record.rows)} rows)"
        case StoreChunk():
            return f"{brief(record.key)}<-{record.block_ids}"
        case LoadChunk():
            return f"{brief(record.key)}+{record.first_block}->{record.block_ids}"
    names = getattr(record, "__slots__", None) or getattr(record, "__struct_fields__", None)
    if names is None or isinstance(record, enum.Enum):
        return str(getattr(record, "name", record))
    shown = [name for name in names if name not in ("token_ids", "epoch", "layout", "tenant")]
    values = " ".join(f"{name}={brief(getattr(record, name))}" for name in shown)
    return f"{type(record).__name__}({values})"
