"""What the engine's tests share: a pool and a policy that check their use, and a driver.

The driver keeps, beside the engine, what the world outside would see: the content of every slot,
which operations run on it, the shared index, the store's bits. It asserts after every event that
the engine's commands never contradict it. Content is followed by slot, not by asking the engine.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from sidecar.breaker import BreakerRules, BreakerState
from sidecar.commands import (
    Command,
    Copied,
    CopyOutcome,
    Draining,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    LeaseTaken,
    Listed,
    LookedUp,
    OpenedGroup,
    PinAsked,
    Quarantine,
    Read,
    ReadDone,
    Released,
    Reply,
    Restored,
    RestoredSlot,
    Resume,
    Resumed,
    Scatter,
    SessionOpened,
    StoreOutcome,
    Submitted,
    Tick,
    Withdraw,
    Write,
    Written,
)
from sidecar.engine import Engine, EngineLimits
from sidecar.listed import ListedRow, listed_rows
from sidecar.protocol import (
    Done,
    JobOutcome,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    Pin,
    Role,
    ServerMessage,
    StoreChunk,
    StoreJob,
    Submit,
)
from sidecar.retention import FOR_EVER, Retention, read_tag
from sidecar.writes import WritePolicy
from tiers.layout import ChunkLayout, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from sidecar.tenants import Tenants
    from tiers.policy.policy import Policy

T = TypeVar("T")

ALL_RANKS = frozenset({0, 1})
RANK_0 = frozenset({0})

EPOCH = 7
BLOCK_TOKENS = 4
BLOCKS_PER_CHUNK = 2
ROOT = bytes(32)
GROUP_NUMBERS = 1_000_000
"""Chunks from this number on are of the second KV cache group, and so on."""


def group_of(number: int) -> int:
    """The KV cache group of chunk `number`: a key is of one group."""
    return number // GROUP_NUMBERS


def key(number: int) -> bytes:
    """The key of chunk `number` of the only chain; its parent is `number - 1`."""
    return number.to_bytes(32, "little") if number > 0 else ROOT


def groups_of(numbers: Sequence[int]) -> list[int]:
    """As a client says which groups keys are of: not at all where all are of the first."""
    groups = [group_of(number) for number in numbers]
    return groups if any(groups) else []


def namespace_of(realm_id: int) -> bytes:
    return bytes([realm_id]) * 32


def layout(rank: int, *, content_bytes: int = 8) -> ChunkLayout:
    return ChunkLayout(
        Segment(0, 2, rank, 1), BLOCKS_PER_CHUNK, BLOCK_TOKENS, content_bytes, "bfloat16", "plain"
    )


def limits(**changes: Any) -> EngineLimits:
    usual = EngineLimits(
        writes_inflight_max=2,
        reads_inflight_max=2,
        write_queue_bytes_max=1 << 30,
        leases_max_per_session=8,
        lease_ttl_seconds_max=10.0,
        lookups_max_per_session=8,
        quarantine_keys_max=8,
        recompute=True,
        regret_max=0.04,
        breaker=BreakerRules(failures_max=1_000_000),
        write=WritePolicy.THROUGH,
        flush_at_end=True,
        store_reads=True,
    )
    return replace(usual, **changes)


class SlabSlots:
    """A pool of slabs of `slab_slots` slots; a slab serves one class until it is empty."""

    def __init__(self, slabs: int, slab_slots: int) -> None:
        self.slab_slots = slab_slots
        self.slab_class: list[int | None] = [None] * slabs
        self.used: set[int] = set()
        self.freed: list[int] = []
        self.sealed: dict[int, tuple[int, int]] = {}
        """Slot to when it was sealed and when it was used last."""
        self.tags: dict[int, bytes] = {}
        self._moment = 0
        self._classes: list[int] = []

    def slot_class(self, layout: ChunkLayout) -> int:
        size_bytes = layout.payload_bytes(layout.blocks_per_chunk)
        if size_bytes not in self._classes:
            self._classes.append(size_bytes)
        return self._classes.index(size_bytes)

    def allocate(self, class_id: int) -> int | None:
        assert 0 <= class_id < len(self._classes)
        for wanted in (class_id, None):
            for slab, slab_class in enumerate(self.slab_class):
                if slab_class != wanted:
                    continue
                for slot in range(slab * self.slab_slots, (slab + 1) * self.slab_slots):
                    if slot not in self.used:
                        self.slab_class[slab] = class_id
                        self.used.add(slot)
                        return slot
        return None

    def _next(self) -> int:
        self._moment += 1
        return self._moment

    def set_tag(self, offset: int, tag: bytes) -> None:
        assert offset in self.used
        assert offset not in self.sealed
        self.tags[offset] = tag

    def seal(self, offset: int) -> None:
        assert offset in self.used
        assert offset not in self.sealed
        moment = self._next()
        self.sealed[offset] = (moment, moment)

    def unseal(self, offset: int) -> None:
        assert offset in self.used
        self.sealed.pop(offset, None)

    def touch(self, offset: int) -> None:
        self.sealed[offset] = (self.sealed[offset][0], self._next())

    def free(self, offset: int) -> None:
        self.sealed.pop(offset, None)
        self.tags.pop(offset, None)
        self.used.remove(offset)
        self.freed.append(offset)
        slab = offset // self.slab_slots
        if not any(slot // self.slab_slots == slab for slot in self.used):
            self.slab_class[slab] = None

    def class_of(self, offset: int) -> int:
        assert offset in self.used
        slab_class = self.slab_class[offset // self.slab_slots]
        assert slab_class is not None
        return slab_class

    def slot_bytes(self, class_id: int) -> int:
        return self._classes[class_id]

    @property
    def size_bytes(self) -> int:
        return len(self.slab_class) * self.slab_slots * max(self._classes, default=1)

    def free_bytes(self) -> int:
        return self.size_bytes - len(self.used) * max(self._classes, default=1)


class StrictLRU:
    """An eviction order that refuses every misuse."""

    def __init__(self) -> None:
        self.order: OrderedDict[Hashable, Hashable] = OrderedDict()

    def add(self, key: Hashable, parent: Hashable) -> None:
        assert key not in self.order
        self.order[key] = parent

    def touch(self, key: Hashable) -> None:
        self.order.move_to_end(key)

    def remove(self, key: Hashable) -> None:
        del self.order[key]

    def victims(self) -> Iterator[Hashable]:
        return iter(self.order)


@dataclass
class Content:
    """What is in a slot, as the outside knows it."""

    realm_id: int
    key: bytes
    rank: int
    num_blocks: int
    sealed: bool
    dead: bool = False
    """The engine was told that the chunk is corrupt."""
    verified: bool = field(default=True, compare=False)
    adopted: bool = field(default=True, compare=False)
    """False after a restart, until a worker of its rank attaches."""
    retention: Retention = field(default=FOR_EVER, compare=False)


@dataclass
class World:
    """An engine and everything outside of it."""

    engine: Engine
    slots: SlabSlots
    policy: Policy
    limits: EngineLimits
    admit_write: Callable[[int, bytes, int, int], bool]
    now: float = 0.0
    content: dict[int, Content] = field(default_factory=dict[int, Content])
    gathers: dict[int, Gather] = field(default_factory=dict[int, Gather])
    scatters: dict[int, Scatter] = field(default_factory=dict[int, Scatter])
    writes: dict[int, Write] = field(default_factory=dict[int, Write])
    reads: dict[int, Read] = field(default_factory=dict[int, Read])
    index: dict[tuple[int, bytes], tuple[bool, bool]] = field(
        default_factory=dict[tuple[int, bytes], tuple[bool, bool]]
    )
    sessions: dict[int, SessionOpened] = field(default_factory=dict[int, SessionOpened])
    world_sizes: dict[int, int] = field(default_factory=dict[int, int])
    quarantined: list[Quarantine] = field(default_factory=list[Quarantine])
    withdrawn: list[Withdraw] = field(default_factory=list[Withdraw])
    clock_us: int = 1000
    """The wall clock that writes are announced with."""
    layouts: dict[tuple[int, int], ChunkLayout] = field(
        default_factory=dict[tuple[int, int], ChunkLayout]
    )
    last_session_id: int = 0
    resuming: bool = False
    """Whether the engine waits for `Resumed`."""
    forgotten: set[tuple[int, bytes]] = field(default_factory=set[tuple[int, bytes]])
    """Chunks whose time was over, until somebody takes note of them."""

    def send(self, event: Event) -> list[Command]:
        """Hand an event in; check and note what comes out."""
        self.slots.freed.clear()
        for content in self.content.values():
            if content.adopted and content.retention.expires_at <= self.now:
                self.forgotten.add((content.realm_id, content.key))
                self._bury(content)
        commands = self.engine.handle(event, self.now)
        self.note(commands)
        return commands

    def resume(self) -> list[Command]:
        """Others had their turn."""
        self.resuming = False
        return self.send(Resumed())

    def note(self, commands: Sequence[Command]) -> None:
        in_use = {op.slot for op in self.running()}
        for slot in self.slots.freed:
            assert slot not in in_use, f"slot {slot} was freed under a running operation"
            del self.content[slot]
        self.slots.freed.clear()
        for command in commands:
            self._note(command)
        assert len(self.writes) <= self.limits.writes_inflight_max
        assert len(self.reads) <= self.limits.reads_inflight_max
        may_read = len(self.reads) < self.limits.reads_inflight_max
        if may_read and self.engine.breakers["read"].state is BreakerState.CLOSED:
            assert self.resuming or not self.engine.pending_work().reads_queued, "reads are stuck"
        assert set(self.content) == self.slots.used
        self.check()

    def _note(self, command: Command) -> None:
        match command:
            case Gather():
                assert command.slot not in self.content, "gather into a slot in use"
                self.gathers[command.copy_id] = command
                blocks = len(command.block_ids)
                self.content[command.slot] = Content(
                    command.realm_id, command.key, command.rank, blocks, sealed=False
                )
            case Read():
                assert command.slot not in self.content, "read into a slot in use"
                self.reads[command.read_id] = command
                self.content[command.slot] = Content(
                    command.realm_id, command.key, command.rank, 0, sealed=False
                )
                self._retain((command.realm_id, command.key), FOR_EVER)
            case Scatter():
                assert command.verify or self.content[command.slot].verified
                self.scatters[command.copy_id] = command
                self._expect(command, command.num_blocks)
            case Write():
                assert self.content[command.slot].retention == FOR_EVER, "it was to stay here"
                assert command.verify or self.content[command.slot].verified
                self.writes[command.write_id] = command
                self._expect(command, command.num_blocks)
            case IndexSet():
                name = (command.realm_id, command.key)
                flags = (command.in_host, command.in_store)
                assert self.index.get(name, (False, False)) != flags, "told twice"
                if any(flags):
                    self.index[name] = flags
                else:
                    del self.index[name]
            case IndexOffer():
                for one in command.keys:
                    name = (command.realm_id, one.tobytes())
                    assert name not in self.index, "told twice"
                    self.index[name] = (False, True)
            case Resume():
                assert not self.resuming, "asked for twice"
                self.resuming = True
            case Quarantine():
                self.quarantined.append(command)
            case Withdraw():
                self.withdrawn.append(command)
            case Reply():
                assert command.session_id in self.sessions, "a reply to a session that is gone"

    def _expect(self, command: Scatter | Write, num_blocks: int) -> None:
        found = self.content[command.slot]
        assert found == Content(
            command.realm_id, command.key, command.rank, num_blocks, sealed=True
        ), f"{command} finds {found}"

    def _retain(self, name: tuple[int, bytes], retention: Retention) -> None:
        """A slot of a chunk was given out, or found again: the least of all that was said holds."""
        own = [
            one
            for one in self.content.values()
            if (one.realm_id, one.key) == name and one.adopted and not one.dead
        ]
        said = [retention, *(one.retention for one in own)]
        least = Retention(min(one.expires_at for one in said), any(one.stays for one in said))
        for one in own:
            one.retention = least

    def running(self) -> list[Gather | Scatter | Write | Read]:
        return [
            *self.gathers.values(),
            *self.scatters.values(),
            *self.writes.values(),
            *self.reads.values(),
        ]

    def host_ranks(self) -> dict[tuple[int, bytes], set[int]]:
        """Which ranks of each chunk may be loaded, from the slots alone."""
        ranks: dict[tuple[int, bytes], set[int]] = {}
        for content in self.content.values():
            if content.sealed and not content.dead and content.adopted:
                ranks.setdefault((content.realm_id, content.key), set()).add(content.rank)
        return ranks

    def in_host(self) -> set[tuple[int, bytes]]:
        return {
            name
            for name, ranks in self.host_ranks().items()
            if len(ranks) == self.world_sizes[name[0]]
        }

    def check(self) -> None:
        self.engine.check()
        told = {name for name, (in_host, _) in self.index.items() if in_host}
        assert told == self.in_host(), "the index and the slots disagree"
        # What was found corrupt is kept no more, whoever stores the same key anew.
        kept = {
            (one.chunk.realm.realm_id, one.chunk.key)
            for one in self.engine._kept
            if not one.chunk.detached
        }
        assert set(self.policy.victims()) == set(self.host_ranks()) - kept, (
            "the policy orders other chunks"
        )
        whole = {slot for slot, one in self.content.items() if one.sealed and not one.dead}
        assert set(self.slots.sealed) == whole, "the pool would bring back other slots"
        unclaimed = sum(not one.adopted for one in self.content.values())
        assert self.engine.snapshot().slots_unclaimed == unclaimed

    # --- events ---------------------------------------------------------------------------------

    def open(
        self,
        role: Role,
        *,
        engine_id: str = "a",
        rank: int = 0,
        world_size: int = 1,
        realm_id: int = 0,
        want_events: bool = False,
        content_bytes: int = 8,
        replicas: int = 1,
        other_realms: Sequence[int] = (),
    ) -> int:
        self.last_session_id += 1
        worker = role is Role.WORKER
        own_layout = layout(rank // replicas, content_bytes=content_bytes) if worker else None
        # Other groups have other pages.
        other_layout = (
            layout(rank // replicas, content_bytes=content_bytes // 2) if worker else None
        )
        event = SessionOpened(
            self.last_session_id,
            role,
            engine_id,
            rank,
            world_size,
            realm_id,
            want_events,
            own_layout,
            namespace_of(realm_id),
            tuple(OpenedGroup(other, other_layout, namespace_of(other)) for other in other_realms),
            replicas=replicas,
        )
        number = event.segment_number
        for group in event.groups:
            self.world_sizes[group.realm_id] = event.num_segments
            if group.layout is not None:
                self._adopt(group.realm_id, number, group.layout)
        self.sessions[event.session_id] = event
        self.send(event)
        if want_events and not worker:
            self.send(Released(event.session_id, (), (), heard=0))
        return event.session_id

    def _adopt(self, realm_id: int, number: int, known: ChunkLayout) -> None:
        self.layouts[realm_id, number] = known
        for content in self.content.values():
            found = not content.adopted and (content.realm_id, content.rank) == (realm_id, number)
            # What is past its time is not found any more.
            if found and content.retention.expires_at > self.now:
                content.adopted = True
                self._retain((realm_id, content.key), content.retention)

    def copied(self, copy_id: int, outcome: CopyOutcome = CopyOutcome.OK) -> list[Command]:
        scatter = self.scatters.pop(copy_id, None)
        if scatter is None:
            gather = self.gathers.pop(copy_id)
            self.content[gather.slot].sealed = outcome is CopyOutcome.OK
        elif outcome is CopyOutcome.CORRUPT:
            self._bury(self.content[scatter.slot])
        elif outcome is CopyOutcome.OK and scatter.verify:
            self.content[scatter.slot].verified = True
        return self.send(Copied(copy_id, outcome))

    def written(self, write_id: int, outcome: StoreOutcome = StoreOutcome.OK) -> list[Command]:
        write = self.writes.pop(write_id)
        if outcome is StoreOutcome.CORRUPT:
            self._bury(self.content[write.slot])
        elif outcome is StoreOutcome.OK:
            self.content[write.slot].verified = True
        self.clock_us += 1
        written_at = max(self.clock_us, write.written_after + 1)
        return self.send(Written(write_id, outcome, num_bytes=100, written_at=written_at))

    def read_done(self, read_id: int, outcome: StoreOutcome = StoreOutcome.OK) -> list[Command]:
        read = self.reads.pop(read_id)
        content = self.content[read.slot]
        content.sealed = outcome is StoreOutcome.OK
        content.num_blocks = BLOCKS_PER_CHUNK if content.sealed else 0
        parent = key(int.from_bytes(read.key, "little") - 1)
        return self.send(
            ReadDone(read_id, outcome, num_blocks=BLOCKS_PER_CHUNK, parent=parent, num_bytes=100)
        )

    def _bury(self, content: Content) -> None:
        """Corrupt: all slots that the chunk has now are dead. Those of a dead chunk already are."""
        if content.dead:
            return
        for other in self.content.values():
            if (other.realm_id, other.key) == (content.realm_id, content.key):
                other.dead |= other.adopted

    def store(
        self,
        session_id: int,
        job_id: int,
        numbers: Sequence[int],
        *,
        blocks: int = 2,
        tenant: bytes = b"",
        ttl_seconds: float = 0.0,
        stays: bool = False,
    ) -> list[Command]:
        chunks = [
            StoreChunk(
                key(number),
                key(number - 1),
                bytes(4 * BLOCK_TOKENS * blocks),
                list(range(10 * number, 10 * number + blocks)),
                tenant,
                group_of(number),
            )
            for number in numbers
        ]
        job = StoreJob(job_id, chunks, int(ttl_seconds * 1000), stays)
        commands = self.send(Submitted(session_id, Submit(EPOCH, job_id, [], [job])))
        expires_at = self.now + ttl_seconds if ttl_seconds else math.inf
        retention = Retention(expires_at, stays=stays or ttl_seconds > 0)
        for gather in only(commands, Gather):
            self._retain((gather.realm_id, gather.key), retention)
        return commands

    def pin(
        self, session_id: int, numbers: Sequence[int], seconds: float, *, tenant: bytes = b""
    ) -> list[Command]:
        keys = [key(number) for number in numbers]
        message = Pin(EPOCH, keys, int(seconds * 1000), tenant, groups_of(numbers))
        return self.send(PinAsked(session_id, message))

    def load(self, session_id: int, job_id: int, numbers: Sequence[int]) -> list[Command]:
        chunks = [LoadChunk(key(number), 0, [1, 2], group_of(number)) for number in numbers]
        return self.send(
            Submitted(session_id, Submit(EPOCH, job_id, [LoadJob(job_id, chunks)], []))
        )

    def look_up(
        self,
        session_id: int,
        lookup_id: int,
        numbers: Sequence[int],
        *,
        deadline_ms: int = 500,
        tenant: bytes = b"",
        num_tokens: int = 0,
        prefill: float = 0.0,
    ) -> list[Command]:
        keys = [key(number) for number in numbers]
        groups = groups_of(numbers)
        lookup = Lookup(EPOCH, lookup_id, keys, deadline_ms, tenant, num_tokens, prefill, groups)
        return self.send(LookedUp(session_id, lookup))

    def lease(self, session_id: int, lease_id: int, numbers: Sequence[int]) -> list[Command]:
        return self.send(LeaseTaken(session_id, lease_id, tuple(key(n) for n in numbers)))

    def listed(
        self,
        numbers: dict[int, frozenset[int]],
        *,
        written_at: int = 1,
        withdrawn: bool = False,
        realm_id: int = 0,
    ) -> list[Command]:
        rows = [
            ListedRow(key(number), sum(1 << rank for rank in ranks), written_at, withdrawn)
            for number, ranks in numbers.items()
        ]
        return self.send(Listed(realm_id, listed_rows(rows)))

    def stored(self, session_id: int, job_id: int, numbers: Sequence[int], **options: Any) -> None:
        """Store chunks of one rank, to the end, and write none of them."""
        for command in self.store(session_id, job_id, numbers, **options):
            if isinstance(command, Gather):
                self.copied(command.copy_id)

    def settle(self) -> None:
        """Let everything that runs end well."""
        while self.running():
            for copy_id in [*self.gathers, *self.scatters]:
                self.copied(copy_id)
            for write_id in list(self.writes):
                self.written(write_id)
            for read_id in list(self.reads):
                self.read_done(read_id)

    def restart(self, policy: Policy, tenants: Tenants | None = None) -> None:
        """Kill the sidecar, and start another on what its pool says is sealed."""
        for ended in (self.gathers, self.scatters, self.writes, self.reads, self.sessions):
            ended.clear()
        for known in (self.index, self.world_sizes):
            known.clear()
        for slot in self.slots.used - set(self.slots.sealed):
            self.slots.free(slot)
            del self.content[slot]
        self.slots.freed.clear()
        self.policy = policy
        self.resuming = False
        self.engine = Engine(
            self.slots,
            policy,
            self.limits,
            epoch=EPOCH,
            tenants=tenants,
            admit_write=self.admit_write,
        )
        self.send(Restored(tuple(self._restored(slot) for slot in self.slots.sealed)))

    def _restored(self, slot: int) -> RestoredSlot:
        content = self.content[slot]
        content.adopted = content.verified = False
        sealed, used = self.slots.sealed[slot]
        tenant, retention = read_tag(self.slots.tags.get(slot, bytes(16)))
        content.retention = retention
        return RestoredSlot(
            slot=slot,
            namespace=namespace_of(content.realm_id),
            geometry=self.layouts[content.realm_id, content.rank].geometry,
            num_blocks=content.num_blocks,
            key=content.key,
            parent=key(int.from_bytes(content.key, "little") - 1),
            tenant=tenant,
            sealed=sealed,
            used=used,
            expires_at=retention.expires_at,
            stays=retention.stays,
        )

    def drain(self) -> None:
        self.send(Draining())
        self.settle()
        while not self.engine.pending_work().idle:
            # Writing pauses after failures; nothing else is left that could wait.
            assert self.engine.pending_work().writes_pending
            self.now += 10.0
            self.send(Tick())
            self.settle()
        assert self.engine.pending_work().idle


def make_world(
    *,
    slabs: int = 8,
    slab_slots: int = 1,
    policy: Policy | None = None,
    tenants: Tenants | None = None,
    admit_write: Callable[[int, bytes, int, int], bool] = lambda _realm, _who, _size, _objects: (
        True
    ),
    **changes: Any,
) -> World:
    slots, bounds = SlabSlots(slabs, slab_slots), limits(**changes)
    policy = StrictLRU() if policy is None else policy
    engine = Engine(slots, policy, bounds, epoch=EPOCH, tenants=tenants, admit_write=admit_write)
    return World(engine, slots, policy, bounds, admit_write)


def messages(commands: Sequence[Command], session_id: int) -> list[ServerMessage]:
    """What the commands say to one session."""
    return [c.message for c in commands if isinstance(c, Reply) and c.session_id == session_id]


def only(commands: Sequence[Command], kind: type[T]) -> list[T]:
    return [command for command in commands if isinstance(command, kind)]


def done(job_id: int, outcome: Outcome) -> list[Done]:
    return [Done(EPOCH, [JobOutcome(job_id, outcome)])]


def no_writes(**changes: Any) -> World:
    return make_world(write=WritePolicy.OFF, **changes)


def looking(**changes: Any) -> tuple[World, int, int]:
    world = make_world(**changes)
    return world, world.open(Role.WORKER), world.open(Role.SCHEDULER)


def answer(lookup_id: int, ready: int, outcome: Outcome) -> list[LookupDone]:
    return [LookupDone(EPOCH, lookup_id, ready, outcome)]
