"""What may happen to an engine: the events of its clients, its operations, and its lives.

`World` makes them from a few numbers, hands them in, and tells what watches the engine
(`engine_watch.py`) what they do to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sidecar.core.commands import (
    Command,
    Copied,
    Draining,
    ForgetRealms,
    Gather,
    Listed,
    ReadDone,
    Received,
    Restored,
    RestoredSlot,
    StoreOutcome,
    Tick,
    Written,
)
from sidecar.core.retention import Retention, read_tag
from sidecar.core.stored_table import ListedRow
from sidecar.protocol import (
    Lease,
    LoadChunk,
    LoadJob,
    Lookup,
    Outcome,
    Pin,
    Role,
    StoreChunk,
    StoreJob,
    Submit,
    Use,
)
from tests.sidecar.catalog_rows import listed_rows
from tests.sidecar.engine_answers import only
from tests.sidecar.engine_names import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    EPOCH,
    group_of,
    groups_of,
    key,
    layout,
    make_engine,
    namespace_of,
    opened_group,
    opened_session,
    release,
)
from tests.sidecar.engine_watch import Watched
from tiers.kv.layout import ChunkLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.core.tenants import Tenants
    from tiers.policy import Policy


@dataclass
class World(Watched):
    """See the module."""

    clock_us: int = 1000
    """The wall clock that writes are announced with."""
    layouts: dict[tuple[int, int], ChunkLayout] = field(
        default_factory=dict[tuple[int, int], ChunkLayout]
    )
    last_session_id: int = 0

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
        event = opened_session(
            self.last_session_id,
            role,
            (
                opened_group(realm_id, own_layout, namespace_of(realm_id)),
                *(opened_group(one, other_layout, namespace_of(one)) for one in other_realms),
            ),
            engine_id=engine_id,
            rank=rank,
            world_size=world_size,
            want_events=want_events,
            replicas=replicas,
        )
        number = event.attach.segment_number
        for group in event.groups:
            self.world_sizes[group.realm_id] = event.attach.num_segments
            if group.layout is not None:
                self._adopt(group.realm_id, number, group.layout)
        self.sessions[event.session_id] = event
        self.send(event)
        sliced = self.limits.adopted_max < len(self.content) * 2
        assert sliced or not self.coming, "restored slots were not taken in"
        if want_events and not worker:
            self.send(release(event.session_id, heard=0))
        return event.session_id

    def _adopt(self, realm_id: int, number: int, known: ChunkLayout) -> None:
        self.layouts[realm_id, number] = known
        for slot, content in self.content.items():
            found = not content.adopted and (content.realm_id, content.rank) == (realm_id, number)
            # What is past its time is not found any more.
            if found and content.retention.expires_at > self.now:
                self.coming.add(slot)

    def copied(self, *copy_ids: int, outcome: Outcome = Outcome.OK) -> list[Command]:
        """Copies of one job end."""
        for copy_id in copy_ids:
            scatter = self.scatters.pop(copy_id, None)
            if scatter is None:
                gather = self.gathers.pop(copy_id)
                self.content[gather.slot].sealed = outcome is Outcome.OK
            elif outcome is Outcome.CORRUPT:
                self._bury(self.content[scatter.slot])
            elif outcome is Outcome.OK and scatter.verify:
                self.content[scatter.slot].verified = True
        return self.send(Copied(copy_ids, outcome))

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
        commands = self.send(Received(session_id, Submit(EPOCH, job_id, [], [job])))
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
        return self.send(Received(session_id, message))

    def use(self, session_id: int, numbers: Sequence[int], num_tokens: int = 0) -> list[Command]:
        """A scheduler says which chunks the prompt of a request has."""
        message = Use(EPOCH, [key(number) for number in numbers], num_tokens, groups_of(numbers))
        return self.send(Received(session_id, message))

    def load(self, session_id: int, job_id: int, numbers: Sequence[int]) -> list[Command]:
        chunks = [LoadChunk(key(number), 0, [1, 2], group_of(number)) for number in numbers]
        return self.send(Received(session_id, Submit(EPOCH, job_id, [LoadJob(job_id, chunks)], [])))

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
        num_held: int = 0,
    ) -> list[Command]:
        keys = [key(number) for number in numbers]
        groups = groups_of(numbers)
        lookup = Lookup(
            EPOCH, lookup_id, keys, deadline_ms, tenant, num_tokens, prefill, groups, num_held
        )
        return self.send(Received(session_id, lookup))

    def lease(self, session_id: int, lease_id: int, numbers: Sequence[int]) -> list[Command]:
        return self.send(Received(session_id, Lease(EPOCH, lease_id, [key(n) for n in numbers])))

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

    def forget_realms(self, *realm_ids: int) -> set[int]:
        """Have realms forgotten, as far as they may be; returns which of them are gone."""
        self.send(ForgetRealms(realm_ids))
        gone = {one for one in realm_ids if one not in self.engine.directory.realms}
        for name, (in_host, _) in list(self.index.items()):
            if name[0] in gone:
                assert not in_host, "forgotten with what host memory holds"
                del self.index[name]
        assert not any(self.engine.gone.of(one) for one in gone)
        for name in [name for name in self.gone if name[0] in gone]:
            # The service takes these out of the index.
            del self.gone[name]
        for realm_id in gone:
            self.world_sizes.pop(realm_id, None)
        return gone

    def stored(self, session_id: int, job_id: int, numbers: Sequence[int], **options: Any) -> None:
        """Store chunks of one rank, to the end, and write none of them."""
        for command in self.store(session_id, job_id, numbers, **options):
            if isinstance(command, Gather):
                self.copied(command.copy_id)

    def settle(self) -> None:
        """Let everything that runs end well."""
        while self.running():
            jobs: dict[tuple[int, int], list[int]] = {}
            for copy in [*self.gathers.values(), *self.scatters.values()]:
                jobs.setdefault((copy.session_id, copy.job_id), []).append(copy.copy_id)
            for copy_ids in jobs.values():
                self.copied(*copy_ids)
            for write_id in list(self.writes):
                self.written(write_id)
            for read_id in list(self.reads):
                self.read_done(read_id)

    def restart(self, policy: Policy, tenants: Tenants | None = None) -> None:
        """Kill the sidecar, and start another on what its pool says is sealed."""
        for ended in (self.gathers, self.scatters, self.writes, self.reads, self.sessions):
            ended.clear()
        for known in (self.index, self.gone, self.world_sizes):
            known.clear()
        for slot in self.slots.used - set(self.slots.sealed):
            self.slots.free(slot)
            del self.content[slot]
        self.slots.freed.clear()
        self.policy = policy
        self.resuming = False
        self.coming.clear()
        self.engine = make_engine(self.slots, policy, self.limits, tenants, self.admit_write)
        self.send(Restored(tuple(self._restored(slot) for slot in self.slots.sealed)))

    def _restored(self, slot: int) -> RestoredSlot:
        content = self.content[slot]
        content.adopted = content.verified = False
        sealed, used = self.slots.sealed[slot]
        tenant, retention, uses = read_tag(self.slots.tags.get(slot, bytes(16)))
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
            retention=retention,
            uses=uses,
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
