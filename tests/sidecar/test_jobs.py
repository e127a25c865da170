"""Stores, loads and leases, rule by rule, through the engine."""

from __future__ import annotations

import pytest

from sidecar.core.commands import (
    Gather,
    IndexSet,
    Received,
    Scatter,
    SessionClosed,
    Tick,
    Write,
)
from sidecar.protocol import (
    Events,
    LoadChunk,
    LoadJob,
    Outcome,
    RemovedEvent,
    Role,
    StoreChunk,
    StoreJob,
    Submit,
)
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import EPOCH, ROOT, key, layout, release
from tests.sidecar.worlds import make_world, no_writes


def test_store_is_gathered_told_and_written() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 5, [1]), Gather)
    assert (gather.fence, gather.parent, gather.block_ids) == (5, ROOT, (10, 11))
    commands = world.copied(gather.copy_id)
    assert [type(command).__name__ for command in commands] == ["IndexSet", "Write", "Reply"]
    assert commands[0] == IndexSet(0, key(1), in_host=True, in_store=False)
    assert messages(commands, worker) == done(5, Outcome.OK)
    [write] = only(commands, Write)
    assert world.written(write.write_id) == [IndexSet(0, key(1), in_host=True, in_store=True)]
    assert world.engine.counters.chunks_written == 1
    assert world.engine.counters.bytes_stored == layout(0).payload_bytes(2)


def test_one_done_for_a_job_of_several_chunks() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    gathers = only(world.store(worker, 1, [1, 2]), Gather)
    assert messages(world.copied(gathers[1].copy_id), worker) == []
    assert messages(world.copied(gathers[0].copy_id), worker) == done(1, Outcome.OK)


@pytest.mark.parametrize("first_ended", [True, False])
def test_duplicate_store_is_ok_at_once(first_ended: bool) -> None:
    world = no_writes()
    workers = [world.open(Role.WORKER), world.open(Role.WORKER, engine_id="b")]
    [gather] = only(world.store(workers[0], 1, [1]), Gather)
    if first_ended:
        world.copied(gather.copy_id)
    commands = world.store(workers[1], 2, [1])
    assert messages(commands, workers[1]) == done(2, Outcome.OK)
    assert not only(commands, Gather)
    assert world.engine.counters.stores_duplicate == 1


@pytest.mark.promise("full-store")
def test_full_pool_drops_what_does_not_fit() -> None:
    world = no_writes(slabs=1)
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1, 2]), Gather)
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)
    assert messages(world.copied(gather.copy_id), worker) == done(1, Outcome.PARTIAL)
    assert world.engine.counters.stores_dropped_full == 2


def test_eviction_makes_room_oldest_first() -> None:
    world = no_writes(slabs=2)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    commands = world.store(worker, 3, [3])
    assert commands[0] == IndexSet(0, key(1), in_host=False, in_store=False)
    assert only(commands, Gather)
    assert world.engine.counters.chunks_evicted == 1


def test_eviction_takes_the_coldest_chunk_with_all_ranks() -> None:
    world = no_writes(slabs=4)
    big = [
        world.open(Role.WORKER, rank=rank, world_size=2, realm_id=1, content_bytes=64)
        for rank in (0, 1)
    ]
    small = world.open(Role.WORKER)
    for rank in (0, 1):
        world.stored(big[rank], 1, [1])
    world.stored(small, 1, [1, 2])
    # The other realm's chunk is older, though its slots are of another size.
    commands = world.store(small, 2, [3])
    assert only(commands, IndexSet) == [IndexSet(1, key(1), in_host=False, in_store=False)]
    assert len(world.slots.used) == 3
    assert not only(world.store(big[0], 2, [2]), IndexSet), "the other slot is free"


def test_another_class_is_evicted_until_a_slab_is_empty() -> None:
    world = no_writes(slabs=1, slab_slots=2)
    small = world.open(Role.WORKER)
    big = world.open(Role.WORKER, realm_id=1, content_bytes=64)
    world.stored(small, 1, [1, 2])
    assert only(world.store(big, 1, [1]), Gather)
    assert world.engine.counters.chunks_evicted == 2


def test_pinned_and_busy_chunks_are_not_evicted() -> None:
    world = no_writes(slabs=2)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1, 2])
    world.lease(scheduler, 50, [1])
    world.load(worker, 51, [2])
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)


@pytest.mark.parametrize(
    ("outcome", "expected", "counter"),
    [
        (Outcome.REVOKED, Outcome.REVOKED, "stores_revoked"),
        (Outcome.FAILED, Outcome.FAILED, "stores_failed"),
        (Outcome.CORRUPT, Outcome.FAILED, "stores_failed"),
    ],
)
def test_store_that_fails(outcome: Outcome, expected: Outcome, counter: str) -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    commands = world.copied(gather.copy_id, outcome=outcome)
    assert messages(commands, worker) == done(1, expected)
    assert getattr(world.engine.counters, counter) == 1
    assert not world.slots.used


@pytest.mark.parametrize(("blocks", "token_bytes"), [(3, 48), (2, 28), (1, 32)])
def test_store_that_does_not_fit_its_slot_is_refused(blocks: int, token_bytes: int) -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    chunk = StoreChunk(key(1), ROOT, bytes(token_bytes), list(range(blocks)))
    message = Submit(EPOCH, 1, [], [StoreJob(1, [chunk])])
    assert messages(world.send(Received(worker, message)), worker) == done(1, Outcome.FAILED)


def test_chunk_is_loadable_when_every_rank_is_there() -> None:
    world = make_world()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    assert not world.index
    world.stored(workers[1], 1, [1])
    assert world.index == {(0, key(1)): (True, False)}
    assert sorted(write.rank for write in world.writes.values()) == [0, 1]
    assert world.engine.counters.chunks_stored == 1


def test_chunk_whose_other_rank_never_comes_can_be_evicted() -> None:
    world = make_world(slabs=1)
    worker = world.open(Role.WORKER, world_size=2)
    world.stored(worker, 1, [1])
    assert only(world.store(worker, 2, [2]), Gather)


def test_a_chunk_is_not_evicted_for_its_own_other_rank() -> None:
    world = make_world(slabs=1)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    assert messages(world.store(workers[1], 1, [1]), workers[1]) == done(1, Outcome.FULL)
    assert len(only(world.load(workers[0], 2, [1]), Scatter)) == 1


def test_load_scatters_every_chunk() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    scatters = only(world.load(worker, 2, [1, 2]), Scatter)
    assert [(s.key, s.num_blocks, s.block_ids) for s in scatters] == [
        (key(1), 2, (1, 2)),
        (key(2), 2, (1, 2)),
    ]
    world.copied(scatters[0].copy_id)
    assert messages(world.copied(scatters[1].copy_id), worker) == done(2, Outcome.OK)
    assert world.engine.counters.chunks_loaded == 2
    # In the same unit as the loads that fail: one for each request and rank.
    assert world.engine.counters.loads_served == 1


def test_load_of_a_missing_chunk_copies_nothing() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    commands = world.load(worker, 2, [1, 2])
    assert messages(commands, worker) == done(2, Outcome.MISSING)
    assert not only(commands, Scatter)
    counters = world.engine.counters
    assert (counters.loads_served, counters.loads_missing) == (0, 1)


def test_load_past_the_end_of_a_partial_chunk_fails() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1], blocks=1), Gather)
    world.copied(gather.copy_id)
    assert messages(world.load(worker, 2, [1]), worker) == done(2, Outcome.FAILED)
    job = LoadJob(3, [LoadChunk(key(1), 0, [4])])
    assert only(world.send(Received(worker, Submit(EPOCH, 1, [job], []))), Scatter)


def test_worst_outcome_of_a_load_is_its_outcome() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    scatters = only(world.load(worker, 2, [1, 2, 3]), Scatter)
    world.copied(scatters[0].copy_id, outcome=Outcome.REVOKED)
    world.copied(scatters[1].copy_id, outcome=Outcome.FAILED)
    assert messages(world.copied(scatters[2].copy_id), worker) == done(2, Outcome.FAILED)
    assert world.engine.counters.loads_failed == 1


def test_corrupt_slot_is_quarantined_while_another_copy_runs_on_it() -> None:
    world = make_world()
    scheduler = world.open(Role.SCHEDULER, want_events=True)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.settle()
    first, second = (only(world.load(worker, job, [1]), Scatter)[0] for job in (2, 3))
    commands = world.copied(first.copy_id, outcome=Outcome.CORRUPT)
    # What the store holds was written before, and is verified when it is read.
    assert only(commands, IndexSet) == [IndexSet(0, key(1), in_host=False, in_store=True)]
    removed = Events(EPOCH, [], [RemovedEvent(key(1), "host")])
    assert messages(commands, scheduler) == [removed]
    assert messages(commands, worker) == done(2, Outcome.CORRUPT)
    assert len(world.engine.host.zombies) == 1
    assert messages(world.load(worker, 4, [1]), worker) == done(4, Outcome.MISSING)
    world.copied(second.copy_id)
    assert len(world.engine.host.allocated) == 0
    counters = world.engine.counters
    assert (counters.quarantined_host, counters.loads_corrupt, counters.loads_missing) == (1, 1, 1)


@pytest.mark.parametrize("first_outcome", [Outcome.OK, Outcome.CORRUPT])
def test_a_load_with_one_corrupt_chunk_is_corrupt_once_all_its_copies_ended(
    first_outcome: Outcome,
) -> None:
    """Threads that share a load end its copies with different outcomes, in any order."""
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    first, second = only(world.load(worker, 2, [1, 2]), Scatter)
    others = {Outcome.OK: Outcome.CORRUPT, Outcome.CORRUPT: Outcome.OK}
    assert messages(world.copied(first.copy_id, outcome=first_outcome), worker) == []
    commands = world.copied(second.copy_id, outcome=others[first_outcome])
    assert messages(commands, worker) == done(2, Outcome.CORRUPT)
    assert world.engine.counters.loads_corrupt == 1


def test_zombie_is_freed_when_the_last_of_its_copies_ended() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    scatters = [only(world.load(worker, job, [1]), Scatter)[0] for job in (2, 3, 4)]
    world.copied(scatters[0].copy_id, outcome=Outcome.CORRUPT)
    world.copied(scatters[1].copy_id)
    assert len(world.slots.used) == 1
    world.copied(scatters[2].copy_id)
    assert not world.slots.used


def test_chunk_can_be_stored_again_beside_its_zombie() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    first, second = (only(world.load(worker, job, [1]), Scatter)[0] for job in (2, 3))
    world.copied(first.copy_id, outcome=Outcome.CORRUPT)
    world.stored(worker, 4, [1])
    world.copied(second.copy_id, outcome=Outcome.CORRUPT)
    assert world.index == {(0, key(1)): (True, False)}
    assert world.engine.counters.quarantined_host == 1


def test_store_of_a_chunk_that_is_quarantined_meanwhile_fails() -> None:
    world = no_writes()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    [gather] = only(world.store(workers[1], 1, [1]), Gather)
    [scatter] = only(world.load(workers[0], 2, [1]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.CORRUPT)
    assert messages(world.copied(gather.copy_id), workers[1]) == done(1, Outcome.FAILED)
    assert not world.slots.used


def test_lease_ends_when_all_ranks_of_the_engine_finished() -> None:
    world = no_writes(slabs=2)
    scheduler = world.open(Role.SCHEDULER, world_size=2)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    other = world.open(Role.WORKER, engine_id="b", world_size=2)
    for worker in workers:
        world.stored(worker, 1, [1])
    world.lease(scheduler, 9, [1, 2])
    for worker in (workers[0], other):
        [scatter] = only(world.load(worker, 9, [1]), Scatter)
        world.copied(scatter.copy_id)
    assert len(world.engine.leases) == 1
    [scatter] = only(world.load(workers[1], 9, [1]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.REVOKED)
    assert len(world.engine.leases) == 0


def test_lease_ends_at_its_deadline_and_at_release() -> None:
    world = no_writes()
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1])
    world.lease(scheduler, 1, [1])
    world.now = 1.0
    world.lease(scheduler, 2, [1])
    world.lease(scheduler, 3, [1])
    world.send(release(scheduler, (3, 99), (99,)))
    world.now = 10.5
    world.send(Tick())
    assert len(world.engine.leases) == 1
    assert world.engine.counters.leases_expired == 1
    world.send(SessionClosed(scheduler))
    assert len(world.engine.leases) == 0


def test_leases_are_bounded_per_session() -> None:
    world = no_writes(leases_max_per_session=1)
    scheduler = world.open(Role.SCHEDULER)
    world.lease(scheduler, 1, [])
    world.lease(scheduler, 2, [])
    assert len(world.engine.leases) == 1
    assert world.engine.counters.leases_refused == 1
