"""What forgetting a realm waits for, and that nothing of it is known to the engine afterwards."""

from __future__ import annotations

import pytest

from sidecar.core.commands import (
    CaughtUp,
    ForgettingCost,
    Gather,
    Read,
    SessionClosed,
    StoreOutcome,
)
from sidecar.core.outbox import WritePolicy
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_answers import answer, messages, only
from tests.sidecar.engine_names import RANK_0, key, layout, slot_bytes_of
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world, no_writes
from tiers.policy.lru import LruPolicy

NOTHING = ForgettingCost(unwritten=False, host_bytes=0, listed=False)


def leave(world: World) -> None:
    for session_id in list(world.sessions):
        del world.sessions[session_id]
        world.send(SessionClosed(session_id))


def gone(world: World) -> bool:
    """Chunks go with the first event, the realm with the next."""
    world.forget_realms(0)
    return world.forget_realms(0) == {0}


def test_a_realm_with_a_session_stays() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    assert world.engine.in_use([0])
    assert not gone(world)
    assert world.in_host() == {(0, key(1))}


def test_a_realm_goes_with_its_chunks_a_few_at_a_time() -> None:
    world = no_writes(slabs=80)
    world.stored(world.open(Role.WORKER), 1, range(1, 71))
    leave(world)
    assert world.engine.forgetting_cost([0]).host_bytes == 70 * slot_bytes_of(layout(0))
    left: list[int] = []
    while not world.forget_realms(0):
        left.append(len(world.in_host()))
    assert left == [6, 0]
    assert not world.slots.used
    assert world.engine.counters.chunks_evicted == 70


def test_a_store_that_runs_keeps_its_realm() -> None:
    world = no_writes()
    [gather] = only(world.store(world.open(Role.WORKER), 1, [1]), Gather)
    leave(world)
    assert world.engine.in_use([0])
    assert not gone(world)
    world.copied(gather.copy_id)
    assert not world.engine.in_use([0])
    assert gone(world)


def test_a_write_that_runs_keeps_its_realm_and_what_waits_is_unwritten() -> None:
    world = make_world(writes_inflight_max=1)
    world.stored(world.open(Role.WORKER), 1, [1, 2])
    leave(world)
    [write_id] = world.writes
    assert world.engine.forgetting_cost([0]).unwritten
    assert not gone(world)
    world.written(write_id)
    assert gone(world)
    assert world.engine.counters.writes_dropped == 1


def test_a_zombies_realm_stays_until_its_slot_is_free() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.load(worker, 2, [1])
    world.load(worker, 3, [1])
    first, second = world.scatters
    world.copied(first, outcome=Outcome.CORRUPT)
    leave(world)
    assert len(world.engine.host.zombies) == 1
    assert not gone(world)
    world.copied(second)
    assert gone(world)


def test_a_read_that_runs_keeps_its_realm() -> None:
    world = no_writes()
    world.open(Role.WORKER)
    scheduler = world.open(Role.SCHEDULER)
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    leave(world)
    assert not gone(world)
    # What it finds missing is remembered for a realm that is still there.
    world.read_done(read.read_id, StoreOutcome.MISSING)
    assert gone(world)


def test_slots_that_are_being_adopted_keep_their_realm() -> None:
    world = no_writes(adopted_max=1)
    world.stored(world.open(Role.WORKER), 1, [1, 2, 3])
    world.restart(LruPolicy())
    world.open(Role.WORKER)
    leave(world)
    assert world.engine.in_use([0])
    assert not gone(world)
    while world.resuming:
        world.resume()
    assert gone(world)
    assert not world.slots.used


def test_what_waits_for_an_engine_in_host_memory_is_no_realms() -> None:
    world = no_writes()
    world.stored(world.open(Role.WORKER), 1, [1])
    world.restart(LruPolicy())
    world.open(Role.SCHEDULER)
    leave(world)
    assert gone(world)
    assert len(world.engine.host.restored_slots) == 1
    world.open(Role.WORKER)
    assert world.in_host() == {(0, key(1))}


@pytest.mark.parametrize("write", [WritePolicy.OFF, WritePolicy.THROUGH])
def test_nothing_of_a_forgotten_realm_is_known(write: WritePolicy) -> None:
    world = make_world(write=write)
    worker = world.open(Role.WORKER)
    world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1])
    world.settle()
    world.listed({2: RANK_0, 3: RANK_0}, written_at=5)
    world.listed({3: RANK_0}, written_at=6, withdrawn=True)
    world.send(CaughtUp(0))
    world.load(worker, 7, [1])
    world.settle()
    assert len(world.engine.store.withdrawn) == 1
    leave(world)
    assert world.engine.forgetting_cost([0]) != NOTHING
    assert gone(world)
    engine = world.engine
    assert engine.forgetting_cost([0]) == NOTHING
    assert not engine.directory.realms
    assert not engine.store.withdrawn
    assert not engine.directory.realms
    # What is late is of no realm, and makes none.
    stale = engine.counters.stale_messages
    world.listed({4: RANK_0})
    world.send(CaughtUp(0))
    assert engine.counters.stale_messages == stale + 2
    assert not engine.directory.realms
    # Another model, with another cut.
    for rank in range(2):
        world.open(Role.WORKER, rank=rank, world_size=2)
    scheduler = world.open(Role.SCHEDULER, world_size=2)
    commands = world.look_up(scheduler, 1, [1, 2])
    assert messages(commands, scheduler) == answer(1, 0, Outcome.MISSING)


def test_a_rank_that_is_not_known_has_no_size_when_the_coldest_are_written() -> None:
    """It counted as a slot of whatever class was registered last."""
    world = make_world(write=WritePolicy.ON_EVICT, slabs=2)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in range(2)]
    for worker in workers:
        world.stored(worker, 1, [1])
    world.settle()
    world.restart(LruPolicy())
    world.open(Role.WORKER, rank=0, world_size=2)
    other = world.open(Role.WORKER, realm_id=1, engine_id="b")
    world.stored(other, 1, [2])
    world.settle()
    assert world.in_host() == {(1, key(2))}
