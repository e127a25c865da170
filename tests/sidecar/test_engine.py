"""What the engine decides, rule by rule. `World` checks slots, pins and index after every event."""

from __future__ import annotations

import pytest

from sidecar.commands import (
    Copied,
    CopyOutcome,
    Draining,
    Gather,
    IndexSet,
    LookedUp,
    Quarantine,
    Read,
    Released,
    Scatter,
    SessionClosed,
    SessionOpened,
    StoreOutcome,
    Submitted,
    Tick,
    Write,
    Written,
)
from sidecar.protocol import (
    Done,
    Error,
    Events,
    JobOutcome,
    LoadChunk,
    LoadJob,
    Lookup,
    LookupDone,
    Outcome,
    RemovedEvent,
    Role,
    StoreChunk,
    StoreJob,
    StoredEvent,
    Submit,
)
from tests.sidecar.engine_kit import (
    BLOCK_TOKENS,
    EPOCH,
    ROOT,
    World,
    key,
    layout,
    make_world,
    messages,
    only,
)

ALL_RANKS = frozenset({0, 1})
RANK_0 = frozenset({0})


def done(job_id: int, outcome: Outcome) -> list[Done]:
    return [Done(EPOCH, [JobOutcome(job_id, outcome)])]


def no_writes(**changes: int) -> World:
    return make_world(store_writes=False, **changes)


# --- stores ---------------------------------------------------------------------------------------


def test_store_is_gathered_told_and_written():
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


def test_one_done_for_a_job_of_several_chunks():
    world = no_writes()
    worker = world.open(Role.WORKER)
    gathers = only(world.store(worker, 1, [1, 2]), Gather)
    assert messages(world.copied(gathers[1].copy_id), worker) == []
    assert messages(world.copied(gathers[0].copy_id), worker) == done(1, Outcome.OK)


@pytest.mark.parametrize("first_ended", [True, False])
def test_duplicate_store_is_ok_at_once(first_ended: bool):
    world = no_writes()
    workers = [world.open(Role.WORKER), world.open(Role.WORKER, engine_id="b")]
    [gather] = only(world.store(workers[0], 1, [1]), Gather)
    if first_ended:
        world.copied(gather.copy_id)
    commands = world.store(workers[1], 2, [1])
    assert messages(commands, workers[1]) == done(2, Outcome.OK)
    assert not only(commands, Gather)
    assert world.engine.counters.stores_duplicate == 1


def test_full_pool_drops_what_does_not_fit():
    world = no_writes(slabs=1)
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1, 2]), Gather)
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)
    assert messages(world.copied(gather.copy_id), worker) == done(1, Outcome.PARTIAL)
    assert world.engine.counters.stores_dropped_full == 2


def test_eviction_makes_room_oldest_first():
    world = no_writes(slabs=2)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    commands = world.store(worker, 3, [3])
    assert commands[0] == IndexSet(0, key(1), in_host=False, in_store=False)
    assert only(commands, Gather)
    assert world.engine.counters.chunks_evicted == 1


def test_eviction_takes_all_ranks_of_the_own_class_first():
    world = no_writes(slabs=4)
    big = [
        world.open(Role.WORKER, rank=rank, world_size=2, realm_id=1, content_bytes=64)
        for rank in (0, 1)
    ]
    small = world.open(Role.WORKER)
    for rank in (0, 1):
        world.stored(big[rank], 1, [1])
    world.stored(small, 1, [1, 2])
    # The other realm's chunk is older, but its slots are of another size.
    commands = world.store(small, 2, [3])
    assert only(commands, IndexSet)[0] == IndexSet(0, key(1), in_host=False, in_store=False)
    commands = world.store(big[0], 2, [2])
    assert only(commands, IndexSet)[0] == IndexSet(1, key(1), in_host=False, in_store=False)
    assert len(world.slots.used) == 3


def test_another_class_is_evicted_until_a_slab_is_empty():
    world = no_writes(slabs=1, slab_slots=2)
    small = world.open(Role.WORKER)
    big = world.open(Role.WORKER, realm_id=1, content_bytes=64)
    world.stored(small, 1, [1, 2])
    assert only(world.store(big, 1, [1]), Gather)
    assert world.engine.counters.chunks_evicted == 2


def test_pinned_and_busy_chunks_are_not_evicted():
    world = no_writes(slabs=2)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1, 2])
    world.lease(scheduler, 50, [1])
    world.load(worker, 51, [2])
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)


@pytest.mark.parametrize(
    ("outcome", "expected", "counter"),
    [
        (CopyOutcome.REVOKED, Outcome.REVOKED, "stores_revoked"),
        (CopyOutcome.FAILED, Outcome.FAILED, "stores_failed"),
        (CopyOutcome.CORRUPT, Outcome.FAILED, "stores_failed"),
    ],
)
def test_store_that_fails(outcome: CopyOutcome, expected: Outcome, counter: str):
    world = make_world()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    commands = world.copied(gather.copy_id, outcome)
    assert messages(commands, worker) == done(1, expected)
    assert getattr(world.engine.counters, counter) == 1
    assert not world.slots.used


@pytest.mark.parametrize(("blocks", "token_bytes"), [(3, 48), (2, 28), (1, 32)])
def test_store_that_does_not_fit_its_slot_is_refused(blocks: int, token_bytes: int):
    world = make_world()
    worker = world.open(Role.WORKER)
    chunk = StoreChunk(key(1), ROOT, bytes(token_bytes), list(range(blocks)))
    message = Submit(EPOCH, 1, [], [StoreJob(1, [chunk])])
    commands = world.send(Submitted(worker, message))
    assert commands[0].message == done(1, Outcome.FAILED)[0]  # type: ignore[union-attr]


def test_chunk_is_loadable_when_every_rank_is_there():
    world = make_world()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    assert not world.index
    world.stored(workers[1], 1, [1])
    assert world.index == {(0, key(1)): (True, False)}
    assert sorted(write.rank for write in world.writes.values()) == [0, 1]
    assert world.engine.counters.chunks_stored == 1


def test_chunk_whose_other_rank_never_comes_can_be_evicted():
    world = make_world(slabs=1)
    worker = world.open(Role.WORKER, world_size=2)
    world.stored(worker, 1, [1])
    assert only(world.store(worker, 2, [2]), Gather)


def test_a_chunk_is_not_evicted_for_its_own_other_rank():
    world = make_world(slabs=1)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    assert messages(world.store(workers[1], 1, [1]), workers[1]) == done(1, Outcome.FULL)
    assert len(only(world.load(workers[0], 2, [1]), Scatter)) == 1


# --- loads and leases -----------------------------------------------------------------------------


def test_load_scatters_every_chunk():
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


def test_load_of_a_missing_chunk_copies_nothing():
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    commands = world.load(worker, 2, [1, 2])
    assert messages(commands, worker) == done(2, Outcome.MISSING)
    assert not only(commands, Scatter)


def test_load_past_the_end_of_a_partial_chunk_fails():
    world = no_writes()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1], blocks=1), Gather)
    world.copied(gather.copy_id)
    assert messages(world.load(worker, 2, [1]), worker) == done(2, Outcome.FAILED)
    job = LoadJob(3, [LoadChunk(key(1), 0, [4])])
    assert only(world.send(Submitted(worker, Submit(EPOCH, 1, [job], []))), Scatter)


def test_worst_outcome_of_a_load_is_its_outcome():
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3])
    scatters = only(world.load(worker, 2, [1, 2, 3]), Scatter)
    world.copied(scatters[0].copy_id, CopyOutcome.REVOKED)
    world.copied(scatters[1].copy_id, CopyOutcome.FAILED)
    assert messages(world.copied(scatters[2].copy_id), worker) == done(2, Outcome.FAILED)
    assert world.engine.counters.loads_failed == 1


def test_corrupt_slot_is_quarantined_while_another_copy_runs_on_it():
    world = make_world()
    scheduler = world.open(Role.SCHEDULER, want_events=True)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.settle()
    first, second = (only(world.load(worker, job, [1]), Scatter)[0] for job in (2, 3))
    commands = world.copied(first.copy_id, CopyOutcome.CORRUPT)
    # What the store holds was written before, and is verified when it is read.
    assert only(commands, IndexSet) == [IndexSet(0, key(1), in_host=False, in_store=True)]
    removed = Events(EPOCH, [], [RemovedEvent(key(1), "host")])
    assert messages(commands, scheduler) == [removed]
    assert messages(commands, worker) == done(2, Outcome.CORRUPT)
    assert world.engine.snapshot().slots_zombie == 1
    assert messages(world.load(worker, 4, [1]), worker) == done(4, Outcome.MISSING)
    world.copied(second.copy_id)
    assert world.engine.snapshot().slots_allocated == 0
    counters = world.engine.counters
    assert (counters.quarantined_host, counters.loads_corrupt, counters.loads_missing) == (1, 1, 1)


def test_chunk_can_be_stored_again_beside_its_zombie():
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    first, second = (only(world.load(worker, job, [1]), Scatter)[0] for job in (2, 3))
    world.copied(first.copy_id, CopyOutcome.CORRUPT)
    world.stored(worker, 4, [1])
    world.copied(second.copy_id, CopyOutcome.CORRUPT)
    assert world.index == {(0, key(1)): (True, False)}
    assert world.engine.counters.quarantined_host == 1


def test_store_of_a_chunk_that_is_quarantined_meanwhile_fails():
    world = no_writes()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    [gather] = only(world.store(workers[1], 1, [1]), Gather)
    [scatter] = only(world.load(workers[0], 2, [1]), Scatter)
    world.copied(scatter.copy_id, CopyOutcome.CORRUPT)
    assert messages(world.copied(gather.copy_id), workers[1]) == done(1, Outcome.FAILED)
    assert not world.slots.used


def test_lease_ends_when_all_ranks_of_the_engine_finished():
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
    assert world.engine.snapshot().leases == 1
    [scatter] = only(world.load(workers[1], 9, [1]), Scatter)
    world.copied(scatter.copy_id, CopyOutcome.REVOKED)
    assert world.engine.snapshot().leases == 0


def test_lease_ends_at_its_deadline_and_at_release():
    world = no_writes()
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1])
    world.lease(scheduler, 1, [1])
    world.now = 1.0
    world.lease(scheduler, 2, [1])
    world.lease(scheduler, 3, [1])
    world.send(Released(scheduler, (3, 99), (99,)))
    world.now = 10.5
    world.send(Tick())
    assert world.engine.snapshot().leases == 1
    assert world.engine.counters.leases_expired == 1
    world.send(SessionClosed(scheduler))
    assert world.engine.snapshot().leases == 0


def test_leases_are_bounded_per_session():
    world = no_writes(leases_max_per_session=1)
    scheduler = world.open(Role.SCHEDULER)
    world.lease(scheduler, 1, [])
    world.lease(scheduler, 2, [])
    assert world.engine.snapshot().leases == 1
    assert world.engine.counters.leases_refused == 1


# --- lookups and reads ----------------------------------------------------------------------------


def looking(**changes: float) -> tuple[World, int, int]:
    world = make_world(**changes)
    return world, world.open(Role.WORKER), world.open(Role.SCHEDULER)


def answer(lookup_id: int, ready: int, outcome: Outcome) -> list[LookupDone]:
    return [LookupDone(EPOCH, lookup_id, ready, outcome)]


def test_lookup_reads_what_the_store_holds_in_order():
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1])
    world.listed({n: RANK_0 for n in (2, 3, 4)})
    commands = world.look_up(scheduler, 7, [1, 2, 3, 4, 5])
    reads = only(commands, Read)
    assert [read.key for read in reads] == [key(2), key(3)]
    assert world.engine.pending_work().reads_queued == 1
    [third] = only(world.read_done(reads[1].read_id), Read)
    assert not messages(world.read_done(reads[0].read_id), scheduler)
    commands = world.read_done(third.read_id)
    assert messages(commands, scheduler) == answer(7, 4, Outcome.OK)
    assert world.index[0, key(4)] == (True, True)
    # What was read is loadable, with the length that the object had.
    assert len(only(world.load(worker, 2, [1, 2, 3, 4]), Scatter)) == 4


def test_lookup_of_what_is_nowhere_is_answered_at_once():
    world, _, scheduler = looking()
    assert messages(world.look_up(scheduler, 7, [1]), scheduler) == answer(7, 0, Outcome.MISSING)
    assert messages(world.look_up(scheduler, 8, []), scheduler) == answer(8, 0, Outcome.OK)


def test_two_lookups_share_a_read():
    world, _, scheduler = looking()
    other = world.open(Role.SCHEDULER, engine_id="b")
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    assert not world.look_up(other, 2, [1])
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.OK)
    assert messages(commands, other) == answer(2, 1, Outcome.OK)


def test_chunk_held_partly_by_both_tiers_reads_the_missing_rank():
    world = make_world()
    scheduler = world.open(Role.SCHEDULER, world_size=2)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    world.listed({1: frozenset({1})})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    assert read.rank == 1
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.OK)
    # Complete now, it is written where the store lacks it.
    assert [write.rank for write in only(commands, Write)] == [0]


def test_nothing_is_read_before_every_rank_attached():
    world = make_world()
    scheduler = world.open(Role.SCHEDULER, world_size=2)
    world.open(Role.WORKER, world_size=2)
    world.listed({1: ALL_RANKS})
    commands = world.look_up(scheduler, 1, [1])
    assert messages(commands, scheduler) == answer(1, 0, Outcome.MISSING)


@pytest.mark.parametrize(
    ("failure", "expected", "in_store"),
    [
        (StoreOutcome.MISSING, Outcome.MISSING, False),
        (StoreOutcome.CORRUPT, Outcome.CORRUPT, False),
        (StoreOutcome.UNAVAILABLE, Outcome.FAILED, True),
    ],
)
def test_failed_read_cuts_the_run(failure: StoreOutcome, expected: Outcome, in_store: bool):
    world, _, scheduler = looking()
    world.listed({n: RANK_0 for n in (1, 2, 3)})
    reads = only(world.look_up(scheduler, 1, [1, 2, 3]), Read)
    assert not messages(world.read_done(reads[1].read_id, failure), scheduler)
    commands = world.read_done(reads[0].read_id)
    assert messages(commands, scheduler) == answer(1, 1, expected)
    # Chunk 3 lies behind the gap: its read was queued, and is not wanted any more.
    assert world.engine.pending_work().idle
    assert ((0, key(2)) in world.index) is in_store


def test_corrupt_object_is_quarantined_until_it_is_written_again():
    world, worker, scheduler = looking()
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    commands = world.read_done(read.read_id, StoreOutcome.CORRUPT)
    assert only(commands, Quarantine) == [Quarantine(0, 0, key(1))]
    assert world.listed({1: RANK_0}) == []
    assert world.listed({1: RANK_0}, complete=True) == []
    world.stored(worker, 1, [1])
    [write] = world.writes.values()
    world.written(write.write_id)
    assert world.index[0, key(1)] == (True, True)
    world.listed({}, complete=True)
    world.listed({}, complete=True)
    assert world.index[0, key(1)] == (True, False)
    world.listed({1: RANK_0})
    assert world.index[0, key(1)] == (True, True)


def test_quarantine_forgets_its_oldest_key():
    world, _, scheduler = looking(quarantine_keys_max=1)
    world.listed({1: RANK_0, 2: RANK_0})
    for number in (1, 2):
        [read] = only(world.look_up(scheduler, number, [number]), Read)
        world.read_done(read.read_id, StoreOutcome.CORRUPT)
    world.listed({1: RANK_0, 2: RANK_0})
    assert world.index == {(0, key(1)): (False, True)}


def test_lookup_past_its_deadline_gets_what_is_there_and_the_read_still_lands():
    world, _, scheduler = looking()
    world.listed({n: RANK_0 for n in (1, 2)})
    reads = only(world.look_up(scheduler, 1, [1, 2], deadline_ms=500), Read)
    world.read_done(reads[0].read_id)
    world.now = 0.5
    assert messages(world.send(Tick()), scheduler) == answer(1, 1, Outcome.MISSING)
    commands = world.read_done(reads[1].read_id)
    assert only(commands, IndexSet) == [IndexSet(0, key(2), in_host=True, in_store=True)]
    assert messages(commands, scheduler) == []
    assert world.engine.counters.lookups_expired == 1


def test_lookup_without_a_slot_is_answered_full():
    world, worker, scheduler = looking(slabs=1, store_writes=False)
    world.stored(worker, 1, [1])
    world.listed({2: RANK_0})
    commands = world.look_up(scheduler, 1, [1, 2])
    assert messages(commands, scheduler) == answer(1, 1, Outcome.FULL)


def test_answered_lookup_keeps_its_chunks_until_its_time_is_over():
    world, worker, scheduler = looking(slabs=1, store_writes=False)
    world.stored(worker, 1, [1])
    world.look_up(scheduler, 1, [1], deadline_ms=500)
    assert messages(world.store(worker, 2, [2]), worker) == done(2, Outcome.FULL)
    world.now = 10.6
    world.send(Tick())
    assert only(world.store(worker, 3, [2]), Gather)


def test_lease_takes_over_from_the_lookup():
    world, worker, scheduler = looking(store_writes=False)
    world.stored(worker, 1, [1, 2])
    world.look_up(scheduler, 1, [1, 2])
    world.look_up(scheduler, 2, [1, 2])
    world.lease(scheduler, 9, [1, 2])
    assert (world.engine.snapshot().lookups, world.engine.snapshot().leases) == (1, 1)
    world.lease(scheduler, 10, [1])
    assert world.engine.snapshot().lookups == 1


def test_released_lookup_is_not_answered():
    world, _, scheduler = looking()
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    world.send(Released(scheduler, (), (1,)))
    assert messages(world.read_done(read.read_id), scheduler) == []
    assert world.index[0, key(1)] == (True, True)


def test_lookup_waits_for_a_store_under_way_and_reads_if_it_fails():
    world, worker, scheduler = looking()
    world.listed({1: RANK_0})
    [gather] = only(world.store(worker, 1, [1]), Gather)
    assert not world.look_up(scheduler, 1, [1])
    [read] = only(world.copied(gather.copy_id, CopyOutcome.REVOKED), Read)
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.OK)


def test_lookups_are_bounded_per_session():
    world, worker, scheduler = looking(lookups_max_per_session=1)
    world.listed({1: RANK_0, 2: RANK_0})
    world.look_up(scheduler, 1, [1])
    commands = world.look_up(scheduler, 2, [2])
    assert messages(commands, scheduler) == answer(2, 0, Outcome.FULL)
    world.settle()
    # An answered one gives way.
    assert only(world.look_up(scheduler, 3, [2]), Read)
    assert world.engine.counters.lookups_refused == 1


def test_lookup_waits_no_longer_for_a_chunk_found_corrupt():
    world, worker, scheduler = looking(store_writes=False)
    world.stored(worker, 1, [1])
    world.listed({2: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1, 2]), Read)
    [scatter] = only(world.load(worker, 2, [1]), Scatter)
    world.copied(scatter.copy_id, CopyOutcome.CORRUPT)
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 0, Outcome.CORRUPT)


def test_reads_can_be_off():
    world, worker, scheduler = looking(store_reads=False)
    world.listed({1: RANK_0})
    assert not world.index
    commands = world.look_up(scheduler, 1, [1])
    assert messages(commands, scheduler) == answer(1, 0, Outcome.MISSING)
    # What is known of the store still saves a write.
    world.stored(worker, 1, [1])
    assert not world.writes


# --- writes, listings -----------------------------------------------------------------------------


def test_writes_are_bounded_and_in_order():
    world = make_world(writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    [first] = world.writes.values()
    assert first.key == key(1)
    assert world.engine.pending_work().writes_pending == 1
    [second] = only(world.written(first.write_id, StoreOutcome.UNAVAILABLE), Write)
    assert second.key == key(2)
    assert world.engine.counters.writes_failed == 1


def test_running_write_pins_and_pending_write_does_not():
    world = make_world(writes_inflight_max=1, slabs=2)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    commands = world.store(worker, 2, [3])
    assert only(commands, IndexSet) == [IndexSet(0, key(2), in_host=False, in_store=False)]
    assert world.engine.counters.writes_dropped == 1
    assert messages(world.store(worker, 3, [4]), worker) == done(3, Outcome.FULL)


def test_full_write_queue_drops_its_oldest():
    world = make_world(writes_inflight_max=1, write_queue_chunks_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [first] = world.writes.values()
    world.stored(worker, 2, [2, 3])
    assert world.engine.counters.writes_dropped == 1
    [second] = only(world.written(first.write_id), Write)
    assert second.key == key(3)


def test_evicted_chunk_stays_in_the_index_while_the_store_has_it():
    world = make_world(slabs=1)
    scheduler = world.open(Role.SCHEDULER, want_events=True)
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    stored = [StoredEvent(key(1), ROOT, 2 * BLOCK_TOKENS, "host")]
    assert messages(world.copied(gather.copy_id), scheduler) == [Events(EPOCH, stored, [])]
    [write] = world.writes.values()
    stored = [StoredEvent(key(1), ROOT, 2 * BLOCK_TOKENS, "store")]
    assert messages(world.written(write.write_id), scheduler) == [Events(EPOCH, stored, [])]
    commands = world.store(worker, 2, [2])
    assert messages(commands, scheduler) == [Events(EPOCH, [], [RemovedEvent(key(1), "host")])]
    assert world.index == {(0, key(1)): (False, True)}


def test_corrupt_write_quarantines_the_slot():
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [write] = world.writes.values()
    world.written(write.write_id, StoreOutcome.CORRUPT)
    assert not world.index
    assert not world.slots.used


def test_write_of_a_chunk_found_corrupt_is_not_vouched_for():
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [scatter] = only(world.load(worker, 2, [1]), Scatter)
    world.copied(scatter.copy_id, CopyOutcome.CORRUPT)
    world.settle()
    assert not world.index


def test_listing_spares_a_queued_write():
    world = make_world(writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    world.listed({2: RANK_0})
    world.settle()
    assert world.engine.counters.chunks_written == 1


def test_whole_listing_removes_what_it_lacks_but_not_what_was_just_written():
    world = make_world()
    worker = world.open(Role.WORKER)
    world.listed({1: RANK_0, 2: RANK_0})
    world.stored(worker, 1, [3])
    world.settle()
    world.listed({1: RANK_0}, complete=True)
    assert world.index == {(0, key(1)): (False, True), (0, key(3)): (True, True)}
    world.listed({1: RANK_0}, complete=True)
    assert world.index == {(0, key(1)): (False, True), (0, key(3)): (True, False)}


def test_listing_of_some_ranks_is_not_loadable():
    world = make_world()
    world.open(Role.WORKER, world_size=2)
    world.listed({1: RANK_0, 2: frozenset({0, 1, 5})})
    assert world.index == {(0, key(2)): (False, True)}
    world.listed({1: frozenset({1})})
    assert (0, key(1)) in world.index
    world.listed({1: RANK_0}, realm_id=9)
    assert world.engine.counters.stale_messages == 1


# --- sessions, drain ------------------------------------------------------------------------------


def test_copies_of_a_closed_session_go_on():
    world = no_writes()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    world.send(SessionClosed(worker))
    del world.sessions[worker]
    assert world.copied(gather.copy_id) == [IndexSet(0, key(1), in_host=True, in_store=False)]


def test_events_of_unknown_sessions_are_counted():
    world = make_world()
    world.store(99, 1, [1])
    world.look_up(99, 1, [1])
    world.lease(99, 1, [1])
    world.send(Released(99, (1,), (1,)))
    world.send(SessionClosed(99))
    assert world.engine.counters.stale_messages == 5


def test_a_message_of_the_wrong_role_is_refused():
    world = make_world()
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    for commands, session in (
        (world.store(scheduler, 1, [1]), scheduler),
        (world.look_up(worker, 1, [1]), worker),
        (world.lease(worker, 1, [1]), worker),
        (world.send(Released(worker, (1,), ())), worker),
    ):
        [message] = messages(commands, session)
        assert isinstance(message, Error)
        assert message.code == "role"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"session_id": 1}, "already open"),
        ({"layout": None}, "layout=None"),
        ({"world_size": 2}, "world_size=2"),
        ({"layout": layout(0, content_bytes=16)}, "layout of rank 0"),
    ],
)
def test_a_contradicting_session_is_refused(change: dict[str, object], text: str):
    world = make_world()
    world.open(Role.WORKER)
    values: dict[str, object] = {
        "session_id": 2,
        "role": Role.WORKER,
        "engine_id": "a",
        "rank": 0,
        "world_size": 1,
        "realm_id": 0,
        "want_events": False,
        "layout": layout(0),
    }
    event = SessionOpened(**(values | change))  # type: ignore[arg-type]
    assert text in (world.engine.refusal(event) or "")
    with pytest.raises(ValueError, match=text.split("=", maxsplit=1)[0]):
        world.engine.handle(event, 0.0)


def test_events_reach_only_subscribers_of_the_realm():
    world = no_writes()
    deaf = world.open(Role.SCHEDULER)
    other = world.open(Role.SCHEDULER, realm_id=1, want_events=True)
    listener = world.open(Role.SCHEDULER, want_events=True)
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    commands = world.copied(gather.copy_id)
    assert [len(messages(commands, s)) for s in (deaf, other, listener)] == [0, 0, 1]


def test_draining_ends_stores_and_lookups_and_writes_the_rest():
    world, worker, scheduler = looking(writes_inflight_max=1)
    world.stored(worker, 1, [1, 2])
    world.listed({3: RANK_0})
    world.look_up(scheduler, 1, [1, 2, 3])
    [gather] = only(world.store(worker, 2, [4]), Gather)
    commands = world.send(Draining())
    assert messages(commands, scheduler) == answer(1, 2, Outcome.MISSING)
    assert messages(world.store(worker, 3, [5]), worker) == done(3, Outcome.FULL)
    assert messages(world.store(worker, 4, [1]), worker) == done(4, Outcome.OK)
    commands = world.look_up(scheduler, 2, [1])
    assert messages(commands, scheduler) == answer(2, 0, Outcome.FULL)
    assert not world.engine.pending_work().idle
    world.copied(gather.copy_id)
    world.settle()
    assert world.engine.pending_work().idle
    assert world.engine.counters.chunks_written == 3
    assert world.engine.snapshot().draining


def test_clear_gives_every_slot_back():
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1, 2])
    world.settle()
    world.lease(scheduler, 1, [1])
    world.note(world.engine.clear())
    assert len(world.slots.used) == 1
    world.send(SessionClosed(scheduler))
    world.note(world.engine.clear())
    assert not world.slots.used
    assert world.engine.snapshot().realms[0].chunks_in_store == 2


def test_an_ending_that_nobody_waits_for_is_a_bug():
    world = make_world()
    for event in (Copied(1, CopyOutcome.OK), Written(1, StoreOutcome.OK)):
        with pytest.raises(KeyError):
            world.engine.handle(event, 0.0)


def test_deadline_of_a_lookup_is_bounded_by_the_operator():
    world, _, scheduler = looking()
    world.listed({1: RANK_0})
    world.send(LookedUp(scheduler, Lookup(EPOCH, 1, [key(1)], 10**18)))
    world.now = 10.0
    assert messages(world.send(Tick()), scheduler) == answer(1, 0, Outcome.MISSING)
