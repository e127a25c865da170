"""The engine after a restart: who gets back what an earlier life had sealed, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from sidecar.core.commands import Command, Restored, RestoredSlot, Scatter, SessionClosed
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Events, Outcome, RemovedEvent, Role, StoredEvent
from tests.engine_invariants import check
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import (
    BLOCK_TOKENS,
    RANK_0,
    key,
    layout,
    make_engine,
    opened_group,
    opened_session,
    slot_bytes_of,
)
from tests.sidecar.engine_world import World
from tests.sidecar.restoring import holding, load, numbers
from tests.sidecar.strict_pool import SlabSlots, StrictLRU
from tests.sidecar.worlds import limits, no_writes
from tiers.policy import POLICIES
from tiers.policy.key import CacheKey

TENANT = b"a tenant"


# --- coming back ---------------------------------------------------------------------------------


def test_chunks_come_back_with_their_worker() -> None:
    world, _ = holding(3)
    world.restart(StrictLRU())
    host, directory = world.engine.host, world.engine.directory
    assert (len(host.restored_slots), directory.chunks_in_host, world.index) == (3, 0, {})
    assert host.restored_slots.num_bytes == 3 * slot_bytes_of(layout(0))

    scheduler = world.open(Role.SCHEDULER, want_events=True)
    assert world.index == {}, "only a worker knows the geometry"
    worker = world.open(Role.WORKER)
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3)}
    assert (len(host.restored_slots), directory.chunks_in_host) == (0, 3)
    counters = world.engine.counters
    assert (counters.slots_restored, counters.chunks_restored) == (3, 3)

    assert messages(load(world, worker, 2, 9), worker) == done(9, Outcome.OK)
    # Another engine finds them too; nothing is adopted twice.
    world.send(SessionClosed(worker))
    world.open(Role.WORKER, engine_id="b")
    assert world.engine.counters.chunks_restored == 3
    del scheduler


def test_listeners_are_told() -> None:
    world, _ = holding(2)
    world.restart(StrictLRU())
    scheduler = world.open(Role.SCHEDULER, want_events=True)
    told: list[Events] = []
    send = world.send

    def listen(event: Any) -> list[Command]:
        commands = send(event)
        told.extend(m for m in messages(commands, scheduler) if isinstance(m, Events))
        return commands

    world.send = listen  # type: ignore[method-assign]
    worker = world.open(Role.WORKER)
    tokens = 2 * BLOCK_TOKENS
    assert [event for one in told for event in one.stored] == [
        StoredEvent(key(1), key(0), tokens, "host"),
        StoredEvent(key(2), key(1), tokens, "host"),
    ]
    told.clear()
    [scatter] = only(world.load(worker, 5, [1]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.CORRUPT)
    assert [event for one in told for event in one.removed] == [RemovedEvent(key(1), "host")]
    assert (0, key(1)) not in world.index


def test_chunk_of_two_ranks_waits_for_both() -> None:
    world = no_writes()
    first, second = (world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1))
    world.stored(first, 1, [1, 2, 3])
    world.stored(second, 1, [1, 2])
    world.restart(StrictLRU())
    world.open(Role.WORKER, rank=1, world_size=2)
    assert world.in_host() == set()
    assert len(world.engine.host.restored_slots) == 3
    world.open(Role.WORKER, rank=0, world_size=2)
    assert world.in_host() == {(0, key(1)), (0, key(2))}
    assert world.engine.counters.chunks_restored == 2


def test_what_was_not_whole_does_not_come_back() -> None:
    """Gathers and reads that ran, and a corrupt chunk on whose slots something still ran."""
    world, worker = holding(2)
    scheduler = world.open(Role.SCHEDULER)
    world.listed({7: RANK_0})
    world.look_up(scheduler, 1, [7])
    world.store(worker, 2, [5])
    scatters = only(world.load(worker, 3, [1]) + world.load(worker, 4, [1]), Scatter)
    world.copied(scatters[0].copy_id, outcome=Outcome.CORRUPT)
    assert len(world.engine.host.zombies) == 1
    assert len(world.reads) == len(world.gathers) == 1
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(2))}


@pytest.mark.parametrize(("policy", "order"), [("lru", [2, 4, 1, 3]), ("fifo", [1, 2, 3, 4])])
def test_order_of_eviction_survives(policy: str, order: list[int]) -> None:
    world = no_writes(policy=POLICIES[policy](), slabs=4)
    worker = world.open(Role.WORKER)
    for number in (1, 2, 3, 4):
        # Chunks without cached parents: each is a chain of its own.
        world.stored(worker, number, [10 * number])
    scheduler = world.open(Role.SCHEDULER)
    world.use(scheduler, [10])
    world.use(scheduler, [30])
    expected = [10 * number for number in order]
    for _ in range(3):
        assert numbers(list(world.policy.victims())) == expected
        world.restart(POLICIES[policy]())
        worker = world.open(Role.WORKER)
    world.stored(worker, 20, [99])
    assert numbers(list(world.policy.victims())) == [*expected[1:], 99]


def test_each_use_counts_once_after_a_restart_whatever_the_number_of_ranks() -> None:
    class Counting(StrictLRU):
        """Counts the uses of each key, as a policy does that learns from them."""

        def __init__(self) -> None:
            super().__init__()
            self.uses = Counter[int]()

        def add(
            self, key: CacheKey, parent: CacheKey | None, uses: int = 0, *, first: bool = False
        ) -> None:
            super().add(key, parent, uses, first=first)
            self.uses[numbers([key])[0]] += uses

        def use(self, keys: Sequence[CacheKey], num_tokens: int) -> None:
            super().use(keys, num_tokens)
            self.uses.update(numbers(list(keys)))

    world = no_writes()
    for rank in (0, 1):
        world.stored(world.open(Role.WORKER, rank=rank, world_size=2), 1, [1, 2, 3])
    scheduler = world.open(Role.SCHEDULER, world_size=2)
    for used in ([1, 2], [1]):
        world.use(scheduler, used)
    for _ in range(3):
        policy = Counting()
        world.restart(policy)
        for rank in (1, 0):
            world.open(Role.WORKER, rank=rank, world_size=2)
        assert policy.uses == {1: 2, 2: 1, 3: 0}
        [realm] = world.engine.directory.realms.values()
        assert [realm.chunks[key(number)].uses for number in (1, 2, 3)] == [2, 1, 0]


def test_tenants_come_back_and_keep_to_their_limits() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    # Chunks of which none is before another.
    world.stored(worker, 1, [10, 20, 30], tenant=TENANT)
    world.stored(worker, 2, [7])
    slot_bytes = slot_bytes_of(layout(0))
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    held = {one.tenant: one.host_bytes for one in world.engine.tenants}
    assert held == {TENANT: 3 * slot_bytes, b"": slot_bytes}

    # The operator lowered it: what was used longest ago goes.
    rules = TenantRules(named={TENANT: ("named", Quota(host_bytes_max=2 * slot_bytes))})
    world.restart(StrictLRU(), Tenants(rules))
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(number)) for number in (20, 30, 7)}
    none = TenantRules(named={TENANT: ("named", Quota(host_bytes_max=slot_bytes - 1))})
    world.restart(StrictLRU(), Tenants(none))
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(7))}


# --- whose it is ---------------------------------------------------------------------------------


def opened(world: World, **changes: Any) -> None:
    """Open a worker whose event differs from the usual one."""
    send = world.engine.handle

    def changed(event: Any, now: float) -> list[Command]:
        [group] = event.groups
        for name in ("blocks_per_chunk", "block_tokens", "dtype", "encoding"):
            if name in changes:
                layout = msgspec.structs.replace(group.layout, **{name: changes[name]})
                size = slot_bytes_of(layout)
                group = msgspec.structs.replace(group, layout=layout, slot_bytes=size)
        group = msgspec.structs.replace(group, namespace=changes.get("namespace", group.namespace))
        event = msgspec.structs.replace(event, groups=(group,))
        return send(event, now)

    world.engine.handle = changed  # type: ignore[method-assign]
    for content in world.content.values():
        content.realm_id = -1
    world.open(Role.WORKER)
    world.engine.handle = send  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": b"another"},
        {"dtype": "float16"},
        {"encoding": "packed"},
        {"block_tokens": 8},
        {"blocks_per_chunk": 4},
        {"blocks_per_chunk": 1},
    ],
)
def test_another_geometry_gets_nothing(other: dict[str, Any]) -> None:
    world, _ = holding(3)
    world.restart(StrictLRU())
    opened(world, **other)
    assert world.in_host() == set()
    assert len(world.engine.host.restored_slots) == 3


def test_tail_is_not_taken_by_a_realm_of_another_chunk_size() -> None:
    """A slot of one block, from a realm of two: it fits a realm of one, whose slots are smaller."""
    world = no_writes()
    worker = world.open(Role.WORKER)
    for command in world.store(worker, 1, [1], blocks=1):
        world.copied(command.copy_id)  # type: ignore[union-attr]
    world.restart(StrictLRU())
    opened(world, blocks_per_chunk=1)
    assert len(world.engine.host.restored_slots) == 1


def test_realms_with_the_same_segments_share_what_there_is() -> None:
    """Two cuts of one model: a slot goes to the first who lacks it, a second one stays for more."""
    slots = SlabSlots(8, 1)
    found: list[RestoredSlot] = []
    for moment, number in enumerate((1, 2, 2, 3), start=1):
        slot = slots.allocate(slot_bytes_of(layout(0)))
        assert slot is not None
        slots.seal(slot)
        found.append(
            RestoredSlot(
                slot, b"same", layout(0).geometry, 2, key(number), key(0), b"", moment, moment
            )
        )
    engine = make_engine(slots, StrictLRU(), limits())
    engine.handle(Restored(tuple(found)), 0.0)
    for realm_id, chunks in ((0, 3), (1, 1), (2, 0)):
        group = opened_group(realm_id, layout(0), b"same")
        event = opened_session(realm_id, Role.WORKER, [group])
        engine.handle(event, 0.0)
        check(engine)
        assert engine.directory.realms[realm_id].hosted_chunks == chunks
    assert len(engine.host.restored_slots) == 0


# --- room ----------------------------------------------------------------------------------------


def test_unclaimed_slots_make_room_first() -> None:
    world, _ = holding(3, slabs=4)
    world.restart(StrictLRU())
    other = world.open(Role.WORKER, realm_id=1)
    world.stored(other, 1, [1])
    assert len(world.engine.host.restored_slots) == 3, "there was room"
    world.stored(other, 2, [2, 3])
    assert len(world.engine.host.restored_slots) == 1
    assert world.engine.counters.slots_unclaimed_dropped == 2
    assert world.engine.counters.chunks_evicted == 0
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(3)), *((1, key(number)) for number in (1, 2, 3))}


def test_what_other_sizes_would_bring_is_reckoned_without_what_nobody_claimed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three slots are full, and two of those have chunks of a model that did not come back."""
    world = no_writes(slabs=8, slab_slots=1)
    world.stored(world.open(Role.WORKER), 1, [1])
    world.stored(world.open(Role.WORKER, realm_id=1), 1, [2, 3])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    host = world.engine.host
    assert len(host.restored_slots) == 2
    capacities: list[float] = []
    monkeypatch.setattr(host.orders, "expected_hit_ratios", capacities.append)
    host.expected_hit_ratios()
    assert capacities == [8.0]


def test_slabs_of_another_class_are_emptied() -> None:
    world, _ = holding(6, slabs=2, slab_slots=3)
    world.restart(StrictLRU())
    other = world.open(Role.WORKER, realm_id=1, content_bytes=64)
    world.stored(other, 1, [1, 2, 3])
    assert len(world.engine.host.restored_slots) == 3
    world.stored(other, 2, [4, 5])
    assert len(world.engine.host.restored_slots) == 0
    assert world.engine.counters.chunks_evicted == 0


def test_nothing_unclaimed_is_left_when_memory_is_given_up() -> None:
    world, _ = holding(3)
    world.restart(StrictLRU())
    world.note(world.engine.clear())
    assert not world.slots.used
