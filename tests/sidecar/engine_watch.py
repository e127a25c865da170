"""An engine, and what the world outside of it would see.

`Watched` keeps, beside the engine, the content of every slot, which operations run on it, and the
shared index. It asserts after every event that the engine's commands never contradict that. Content
is followed by slot, not by asking the engine. Does not own what happens to an engine
(`engine_world.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sidecar.core.breaker import BreakerState
from sidecar.core.commands import (
    Command,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    Quarantine,
    Read,
    Reply,
    Resume,
    Resumed,
    Scatter,
    SessionOpened,
    Withdraw,
    Write,
)
from sidecar.core.engine import Engine
from sidecar.core.outbox import EngineLimits
from sidecar.core.retention import FOR_EVER, Gone, Retention
from tests.engine_invariants import check
from tests.sidecar.strict_pool import SlabSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers.policy import Policy


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
class Watched:
    """See the module."""

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
    gone: dict[tuple[int, bytes], Gone] = field(default_factory=dict[tuple[int, bytes], Gone])
    """What the index says of chunks that are in no tier any more."""
    sessions: dict[int, SessionOpened] = field(default_factory=dict[int, SessionOpened])
    world_sizes: dict[int, int] = field(default_factory=dict[int, int])
    quarantined: list[Quarantine] = field(default_factory=list[Quarantine])
    withdrawn: list[Withdraw] = field(default_factory=list[Withdraw])
    coming: set[int] = field(default_factory=set[int])
    """Restored slots of ranks that attached: adopted now, or in turns of their own."""
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
        assert len(self.gone) <= self.limits.gone_keys_max
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
        self._note_adopted()
        for command in commands:
            self._note(command)
        assert len(self.writes) <= self.limits.writes_inflight_max
        assert len(self.reads) <= self.limits.reads_inflight_max
        may_read = len(self.reads) < self.limits.reads_inflight_max
        if may_read and self.engine.breakers["read"].state is BreakerState.CLOSED:
            assert self.resuming or not self.engine.pending_work().reads_queued, "reads are stuck"
        assert set(self.content) == self.slots.used
        self.check()

    def _note_adopted(self) -> None:
        for slot in self.coming.difference(self.engine.host.restored_slots.by_offset):
            self.coming.remove(slot)
            content = self.content.get(slot)
            if content is not None and not content.adopted:
                content.adopted = True
                self._retain((content.realm_id, content.key), content.retention)

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
                flags, gone = (command.in_host, command.in_store), self.gone.pop(name, None)
                told = (self.index.pop(name, (False, False)), gone)
                assert told != (flags, command.gone), "told twice"
                if any(flags):
                    assert command.gone is None
                    self.index[name] = flags
                if command.gone is not None:
                    self.gone[name] = command.gone
            case IndexOffer():
                for one in command.keys:
                    name = (command.realm_id, one.tobytes())
                    assert name not in self.index, "told twice"
                    self.index[name] = (False, True)
                    self.gone.pop(name, None)
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
        check(self.engine)
        told = {name for name, (in_host, _) in self.index.items() if in_host}
        assert told == self.in_host(), "the index and the slots disagree"
        # What was found corrupt is kept no more, even if an engine stores the same key again.
        kept = {
            (one.chunk.realm.realm_id, one.chunk.key)
            for one in self.engine.request_pins
            if not one.chunk.detached
        }
        kept |= {(one.realm.realm_id, one.key) for one in self.engine.host.orders.unwritten}
        assert set(self.policy.victims()) == set(self.host_ranks()) - kept, (
            "the policy orders other chunks"
        )
        whole = {slot for slot, one in self.content.items() if one.sealed and not one.dead}
        assert set(self.slots.sealed) == whole, "the pool would bring back other slots"
        unclaimed = sum(not one.adopted for one in self.content.values())
        assert len(self.engine.host.restored_slots) == unclaimed

    def _bury(self, content: Content) -> None:
        """Corrupt: all slots that the chunk has now are dead. Those of a dead chunk already are."""
        if content.dead:
            return
        for other in self.content.values():
            if (other.realm_id, other.key) == (content.realm_id, content.key):
                other.dead |= other.adopted
