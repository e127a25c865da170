"""The engine after a restart: who gets back what an earlier life had sealed, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import (
    CaughtUp,
    Command,
    Draining,
    Restored,
    RestoredSlot,
    Scatter,
    SessionClosed,
    StoreOutcome,
    Tick,
    Write,
)
from sidecar.core.outbox import WritePolicy
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.core.writes import WRITE_TRIES_MAX
from sidecar.protocol import Events, Outcome, RemovedEvent, Role, StoredEvent
from tests.engine_invariants import check
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import (
    ALL_RANKS,
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
from tests.sidecar.strict_pool import SlabSlots, StrictLRU
from tests.sidecar.worlds import limits, make_world, no_writes
from tiers.policy import POLICIES

TENANT = b"a tenant"


def numbers(names: object) -> list[int]:
    """Chunk numbers of an eviction order."""
    assert isinstance(names, list)
    return [int.from_bytes(name[1], "little") for name in names]


def holding(count: int, **changes: Any) -> tuple[World, int]:
    """A world whose only worker has stored chunks 1 to `count`."""
    world = no_writes(**changes)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, range(1, count + 1))
    return world, worker


def load(world: World, worker: int, number: int, job_id: int) -> list[Command]:
    [scatter] = only(world.load(worker, job_id, [number]), Scatter)
    return world.copied(scatter.copy_id)


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
    world.copied(scatter.copy_id, Outcome.CORRUPT)
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
    world.copied(scatters[0].copy_id, Outcome.CORRUPT)
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


# --- verification --------------------------------------------------------------------------------


def verified(world: World, worker: int, number: int, job_id: int) -> bool:
    [scatter] = only(world.load(worker, job_id, [number]), Scatter)
    world.copied(scatter.copy_id)
    return scatter.verify


def test_restored_chunk_is_verified_at_its_first_use() -> None:
    world, _ = holding(2, verify_loads=0.0)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert [verified(world, worker, 1, job) for job in (1, 2, 3)] == [True, False, False]
    # A first use that failed does not count.
    [scatter] = only(world.load(worker, 4, [2]), Scatter)
    world.copied(scatter.copy_id, Outcome.REVOKED)
    assert [verified(world, worker, 2, job) for job in (5, 6)] == [True, False]
    world.stored(worker, 7, [3])
    assert not verified(world, worker, 3, 8)
    assert world.engine.counters.loads_unverified == 4


@pytest.mark.parametrize(
    ("rate", "count"), [(1.0, 1000), (0.5, 500), (0.1, 100), (0.37, 370), (0.001, 1), (0.0, 0)]
)
def test_rate_of_verified_loads(rate: float, count: int) -> None:
    world, worker = holding(1, verify_loads=rate)
    chosen = [verified(world, worker, 1, job) for job in range(2, 1002)]
    assert sum(chosen) == count
    again, worker = holding(1, verify_loads=rate)
    assert [verified(again, worker, 1, job) for job in range(2, 1002)] == chosen


@pytest.mark.parametrize(("rate", "count"), [(1.0, 400), (0.05, 20), (0.3, 120), (0.0, 0)])
def test_rate_of_verified_writes(rate: float, count: int) -> None:
    world = make_world(slabs=400, slab_slots=1, verify_writes=rate)
    worker = world.open(Role.WORKER)
    chosen = 0
    for number in range(1, 401):
        world.stored(worker, number, [number])
        [write] = world.writes.values()
        chosen += write.verify
        world.written(write.write_id)
    assert chosen == count
    assert world.engine.counters.writes_unverified == 400 - count


def test_of_several_ranks_each_is_sampled() -> None:
    """They take turns, so that every second segment is the same rank's."""
    world = make_world(slabs=400, slab_slots=1, verify_writes=0.5)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    chosen: Counter[int] = Counter()
    for number in range(1, 21):
        for worker in workers:
            world.stored(worker, number, [number])
        for write in list(world.writes.values()):
            chosen[write.rank] += write.verify
            world.written(write.write_id)
        while world.writes:
            [write] = world.writes.values()
            chosen[write.rank] += write.verify
            world.written(write.write_id)
    assert chosen == {0: 10, 1: 10}


def test_what_was_withdrawn_is_verified_before_it_leaves_again() -> None:
    """Its object may have been found damaged, and then its slot has been, too."""
    world = make_world(verify_loads=0.0, verify_writes=0.0, write=WritePolicy.ON_REUSE)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1, 2])

    def wanted(lookup_id: int) -> list[Write]:
        world.look_up(scheduler, lookup_id, [1, 2])
        return only(world.use(scheduler, [1, 2]), Write)

    first, second = wanted(1)
    assert (first.verify, second.verify) == (False, False)
    world.written(first.write_id)
    world.written(second.write_id)
    assert wanted(2) == []
    world.listed({1: RANK_0}, written_at=1 << 50, withdrawn=True)
    assert not verified(world, worker, 2, 2)
    [scatter] = only(world.load(worker, 3, [1]), Scatter)
    [again] = only(world.use(scheduler, [1]), Write)
    assert (scatter.verify, again.verify) == (True, True)
    world.copied(scatter.copy_id)
    world.written(again.write_id)
    # Both found it whole, so who withdrew it had another reason.
    assert not verified(world, worker, 1, 4)
    world.listed({2: RANK_0}, written_at=1 << 51, withdrawn=True)
    [again] = wanted(3)
    assert (again.key, again.verify) == (key(2), True)
    # Another withdrawal while it is sent: it is in doubt again, or still.
    world.listed({2: RANK_0}, written_at=1 << 52, withdrawn=True)
    world.written(again.write_id, StoreOutcome.CORRUPT)
    assert (0, key(2)) not in world.index
    assert world.engine.counters.quarantined_host == 1


def test_written_chunk_counts_as_verified() -> None:
    world = make_world(verify_loads=0.0, verify_writes=0.0)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.send(CaughtUp(0))
    [write] = world.writes.values()
    assert write.verify
    world.written(write.write_id)
    assert not verified(world, worker, 1, 5)


# --- to the store --------------------------------------------------------------------------------


def test_restored_chunks_are_written_after_the_catalog_and_when_nothing_else_is() -> None:
    world = make_world(writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert not world.writes, "what the store holds is not known yet"
    assert world.engine.pending_work().idle
    world.listed({2: RANK_0})
    assert not world.writes
    world.send(CaughtUp(0))
    assert [write.key for write in world.writes.values()] == [key(3)], "the newest first"
    world.stored(worker, 2, [4, 5])
    written: list[bytes] = []
    while world.writes:
        [(write_id, write)] = world.writes.items()
        written.append(write.key)
        world.written(write_id)
    assert written == [key(3), key(4), key(5), key(1)]
    assert world.engine.counters.writes_dropped == 0


def test_restored_chunks_are_written_as_many_at_once_as_may_be() -> None:
    world = make_world(writes_inflight_max=3, write_queue_bytes_max=0)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3, 4, 5])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.listed({4: RANK_0})
    started = only(world.send(CaughtUp(0)), Write)
    assert [write.key for write in started] == [key(5), key(3), key(2)]
    assert not only(world.send(Tick()), Write), "whatever could start has started"
    commands = world.written(started[0].write_id)
    assert [write.key for write in only(commands, Write)] == [key(1)]


def test_restored_chunks_do_not_queue_while_the_store_is_left_alone() -> None:
    world = make_world(writes_inflight_max=2, breaker=BreakerRules(1, 1.0, 4.0))
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [3])
    for _ in range(WRITE_TRIES_MAX):
        world.now += 10.0
        world.send(Tick())
        [write_id] = world.writes
        world.written(write_id, StoreOutcome.UNAVAILABLE)
    world.send(CaughtUp(0))
    assert world.engine.pending_work().idle, "a drain would wait for a store that fails"
    world.now += 10.0
    assert len(only(world.send(Tick()), Write)) == 1, "one finds out"
    world.settle()
    assert world.engine.counters.chunks_written == 2


def test_drain_and_eviction_forget_what_was_offered() -> None:
    world = make_world(writes_inflight_max=1, slabs=3)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.stored(worker, 2, [9])
    assert world.in_host() == {(0, key(number)) for number in (2, 3, 9)}
    [write_id] = world.writes
    world.send(CaughtUp(0))
    world.send(Draining())
    assert not only(world.written(write_id, StoreOutcome.OK), Write)
    assert not world.writes
    assert world.engine.pending_work().idle


def test_what_comes_back_during_a_drain_is_not_written() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.restart(StrictLRU())
    world.send(Draining())
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(1))}
    assert not only(world.send(CaughtUp(0)), Write)
    assert world.engine.pending_work().idle


def test_nothing_is_written_where_writing_is_off() -> None:
    world, _ = holding(2)
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.listed({1: ALL_RANKS})
    world.send(CaughtUp(0))
    assert not world.writes
