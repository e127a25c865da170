"""What an earlier life had sealed comes back over several turns of the event loop."""

from __future__ import annotations

from typing import Any

import pytest

from sidecar.core.commands import (
    CaughtUp,
    Gather,
    IndexSet,
    Read,
    RestoredSlot,
    Resume,
    SessionClosed,
)
from sidecar.core.restored import RestoredSlots
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import ALL_RANKS, key
from tests.sidecar.engine_world import World
from tests.sidecar.restoring import holding, load, numbers
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import make_world, no_writes
from tiers.policy import POLICIES


def resumed(world: World) -> list[int]:
    """Let the engine go on to the end; how many entries of the index each turn changed."""
    changed: list[int] = []
    while world.resuming:
        changed.append(len(only(world.resume(), IndexSet)))
    return changed


def test_many_slots_are_taken_in_over_several_turns() -> None:
    world, _ = holding(7, adopted_max=2)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert world.in_host() == {(0, key(1)), (0, key(2))}
    assert messages(load(world, worker, 2, 9), worker) == done(9, Outcome.OK)
    assert resumed(world) == [2, 2, 1]
    assert world.in_host() == {(0, key(number)) for number in range(1, 8)}
    assert len(world.engine.host.restored_slots) == 0
    assert world.engine.counters.chunks_restored == 7


@pytest.mark.parametrize("adopted_max", [1, 2, 3, 100])
@pytest.mark.parametrize(("policy", "order"), [("lru", [2, 4, 1, 3]), ("fifo", [1, 2, 3, 4])])
def test_order_of_eviction_survives_slices(policy: str, order: list[int], adopted_max: int) -> None:
    world = no_writes(policy=POLICIES[policy](), adopted_max=adopted_max)
    worker = world.open(Role.WORKER)
    for number in (1, 2, 3, 4):
        world.stored(worker, number, [10 * number])
    scheduler = world.open(Role.SCHEDULER)
    world.use(scheduler, [10])
    world.use(scheduler, [30])
    for _ in range(2):
        world.restart(POLICIES[policy]())
        worker = world.open(Role.WORKER)
        resumed(world)
        assert numbers(list(world.policy.victims())) == [10 * number for number in order]


def test_ranks_are_taken_in_one_after_the_other() -> None:
    world = no_writes(adopted_max=2, slabs=16)
    for rank in (0, 1):
        worker = world.open(Role.WORKER, rank=rank, world_size=2)
        world.stored(worker, 1, [1, 2, 3, 4])
    world.restart(StrictLRU())
    for rank in (0, 1):
        world.open(Role.WORKER, rank=rank, world_size=2)
    assert world.in_host() == set(), "the second rank waits for the first"
    assert sum(resumed(world)) == 4
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3, 4)}


@pytest.mark.parametrize("ended", ["copied", "running"])
def test_what_is_stored_again_between_two_slices_stays(ended: str) -> None:
    world, _ = holding(3, adopted_max=1)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [3]), Gather)
    if ended == "copied":
        world.copied(gather.copy_id)
    resumed(world)
    if ended == "running":
        world.copied(gather.copy_id)
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3)}
    assert len(world.engine.host.restored_slots) == 1, "the first who needs room has it"
    load(world, worker, 3, 2)


def test_what_was_given_up_between_two_slices_is_gone() -> None:
    world, _ = holding(4, adopted_max=1, slabs=4)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [8, 9])
    resumed(world)
    assert world.in_host() == {(0, key(number)) for number in (1, 4, 8, 9)}
    assert world.engine.counters.chunks_evicted == 0


def test_a_slot_that_is_filled_anew_has_no_past() -> None:
    """Its last use was told to a policy that did not know its chunk yet."""
    world, worker = holding(1, adopted_max=1, slabs=1)
    load(world, worker, 1, 2)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert world.resuming
    [gather] = only(world.store(worker, 1, [3]), Gather)
    world.copied(gather.copy_id, outcome=Outcome.FAILED)
    [gather] = only(world.store(worker, 2, [1]), Gather)
    resumed(world)
    world.copied(gather.copy_id)
    assert world.in_host() == {(0, key(1))}


def test_what_is_being_read_between_two_slices_is_read() -> None:
    world = make_world(adopted_max=1, reads_begun_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    scheduler = world.open(Role.SCHEDULER)
    world.listed(dict.fromkeys((1, 2, 3), ALL_RANKS))
    commands = world.look_up(scheduler, 1, [1, 2, 3])
    [read] = only(commands, Read)
    assert not only(commands, Resume), "asked for already, and one turn is enough for both"
    for command in iter(lambda: world.resume() if world.resuming else None, None):
        assert command is not None
    for read_id in list(world.reads):
        world.read_done(read_id)
    world.settle()
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3)}
    assert read.key == key(3)


def test_a_worker_that_leaves_between_two_slices_leaves_its_chunks() -> None:
    world, _ = holding(3, adopted_max=1)
    world.restart(StrictLRU())
    world.send(SessionClosed(world.open(Role.WORKER)))
    del world.sessions[world.last_session_id]
    world.open(Role.WORKER, engine_id="b")
    assert sum(resumed(world)) > 0
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3)}
    assert world.engine.counters.chunks_restored == 3


def test_a_drain_between_two_slices_writes_nothing_more() -> None:
    world = make_world(adopted_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.send(CaughtUp(0))
    world.drain()
    resumed(world)
    assert not world.writes
    assert world.engine.pending_work().idle
    assert world.in_host() == {(0, key(number)) for number in (1, 2, 3)}


def test_memory_that_is_given_up_between_two_slices_is_not_taken_in() -> None:
    world, _ = holding(3, adopted_max=1)
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.note(world.engine.clear())
    assert not world.slots.used
    assert resumed(world) == [0]


def test_an_engine_that_attaches_has_only_some_slots_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All were filtered and sorted in that event: 0.2 s for a hundred thousand."""
    looked_at: list[RestoredSlot] = []
    fits = RestoredSlots.fits

    def noted(slots: RestoredSlots, restored: RestoredSlot, *given: Any) -> bool:
        looked_at.append(restored)
        return fits(slots, restored, *given)

    monkeypatch.setattr(RestoredSlots, "fits", noted)
    world, _ = holding(7, adopted_max=2)
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    assert len(looked_at) == 2
    resumed(world)
    assert len(looked_at) == 7
