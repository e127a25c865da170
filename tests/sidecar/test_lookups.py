"""Lookups and reads, rule by rule, through the engine."""

from __future__ import annotations

import pytest

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import (
    Gather,
    IndexSet,
    Quarantine,
    Read,
    Scatter,
    StoreOutcome,
    Tick,
    Write,
)
from sidecar.core.outbox import WritePolicy
from sidecar.protocol import (
    Outcome,
    Role,
)
from tests.sidecar.engine_answers import answer, done, messages, only
from tests.sidecar.engine_names import ALL_RANKS, RANK_0, key, release
from tests.sidecar.worlds import looking, make_world


def test_lookup_reads_what_the_store_holds_in_order() -> None:
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1])
    world.listed(dict.fromkeys((2, 3, 4), RANK_0))
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


def test_a_read_makes_no_room_with_the_chunks_before_it() -> None:
    world, worker, scheduler = looking(slabs=1, slab_slots=2)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [7])
    world.settle()
    world.listed({2: RANK_0})
    # The oldest one, but the hit needs it.
    commands = world.look_up(scheduler, 7, [1, 2])
    [read] = only(commands, Read)
    assert world.index[0, key(1)] == (True, True)
    assert world.index[0, key(7)] == (False, True)
    assert messages(world.read_done(read.read_id), scheduler) == answer(7, 2, Outcome.OK)


def test_many_reads_begin_a_few_at_a_time() -> None:
    world, _, scheduler = looking(reads_inflight_max=6, reads_begun_max=2)
    world.listed(dict.fromkeys(range(1, 9), RANK_0))
    commands = world.look_up(scheduler, 7, list(range(1, 9)))
    assert [read.key for read in only(commands, Read)] == [key(1), key(2)]
    assert world.resuming
    assert not only(world.read_done(only(commands, Read)[0].read_id), Read), "others' turn"
    assert [read.key for read in only(world.resume(), Read)] == [key(3), key(4)]
    assert [read.key for read in only(world.resume(), Read)] == [key(5), key(6)]
    [last] = only(world.resume(), Read)
    assert last.key == key(7)
    assert not world.resuming, "as many run as may"


def test_many_queued_reads_are_given_up_a_few_at_a_time() -> None:
    """Once the store fails. In one event it took the loop 4 us for each."""
    rules = BreakerRules(1, 1.0, 4.0)
    world, _, scheduler = looking(reads_inflight_max=1, reads_begun_max=2, breaker=rules)
    world.listed(dict.fromkeys(range(1, 9), RANK_0))
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    for number in range(2, 9):
        world.look_up(scheduler, number, [number])
    counters = world.engine.counters
    world.read_done(read.read_id, StoreOutcome.UNAVAILABLE)
    paused = [counters.reads_paused]
    while world.resuming:
        world.resume()
        paused.append(counters.reads_paused)
    assert paused == [2, 4, 6, 7]


def test_lookup_of_what_is_nowhere_is_answered_at_once() -> None:
    world, _, scheduler = looking()
    assert messages(world.look_up(scheduler, 7, [1]), scheduler) == answer(7, 0, Outcome.MISSING)
    assert messages(world.look_up(scheduler, 8, []), scheduler) == answer(8, 0, Outcome.OK)


def test_two_lookups_share_a_read() -> None:
    world, _, scheduler = looking()
    other = world.open(Role.SCHEDULER, engine_id="b")
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    assert not world.look_up(other, 2, [1])
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.OK)
    assert messages(commands, other) == answer(2, 1, Outcome.OK)


def test_chunk_held_partly_by_both_tiers_reads_the_missing_rank() -> None:
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


def test_nothing_is_read_before_every_rank_attached() -> None:
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
def test_failed_read_cuts_the_run(failure: StoreOutcome, expected: Outcome, in_store: bool) -> None:
    world, _, scheduler = looking()
    world.listed(dict.fromkeys((1, 2, 3), RANK_0))
    reads = only(world.look_up(scheduler, 1, [1, 2, 3]), Read)
    assert not messages(world.read_done(reads[1].read_id, failure), scheduler)
    commands = world.read_done(reads[0].read_id)
    assert messages(commands, scheduler) == answer(1, 1, expected)
    # Chunk 3 lies behind the gap: its read was queued, and is not wanted any more.
    assert world.engine.pending_work().idle
    assert ((0, key(2)) in world.index) is in_store


@pytest.mark.promise("quarantine")
def test_corrupt_object_is_quarantined_until_it_is_written_again() -> None:
    world, worker, scheduler = looking()
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    commands = world.read_done(read.read_id, StoreOutcome.CORRUPT)
    assert only(commands, Quarantine) == [Quarantine(0, 0, key(1))]
    assert world.listed({1: RANK_0}) == []
    world.stored(worker, 1, [1])
    [write] = world.writes.values()
    world.written(write.write_id)
    assert world.index[0, key(1)] == (True, True)
    world.listed({1: RANK_0}, withdrawn=True)
    assert world.index[0, key(1)] == (True, True)


def test_quarantine_forgets_its_oldest_key() -> None:
    world, _, scheduler = looking(quarantine_keys_max=1)
    world.listed({1: RANK_0, 2: RANK_0})
    for number in (1, 2):
        [read] = only(world.look_up(scheduler, number, [number]), Read)
        world.read_done(read.read_id, StoreOutcome.CORRUPT)
    world.listed({1: RANK_0, 2: RANK_0})
    assert world.index == {(0, key(1)): (False, True)}


def test_lookup_past_its_deadline_gets_what_is_there_and_the_read_still_lands() -> None:
    world, _, scheduler = looking()
    world.listed(dict.fromkeys((1, 2), RANK_0))
    reads = only(world.look_up(scheduler, 1, [1, 2], deadline_ms=500), Read)
    world.read_done(reads[0].read_id)
    world.now = 0.5
    assert messages(world.send(Tick()), scheduler) == answer(1, 1, Outcome.EXPIRED)
    commands = world.read_done(reads[1].read_id)
    assert only(commands, IndexSet) == [IndexSet(0, key(2), in_host=True, in_store=True)]
    assert messages(commands, scheduler) == []
    assert world.engine.counters.lookups_expired == 1


def test_lookup_waits_no_longer_than_what_is_ready_saves() -> None:
    world, _, scheduler = looking()
    world.listed(dict.fromkeys((1, 2), RANK_0))
    # Computing both would take 8 s; the first credit, 4% of 25 s, lets it wait 1 s.
    commands = world.look_up(
        scheduler, 1, [1, 2], deadline_ms=60_000, num_tokens=8000, prefill=1000.0
    )
    reads = only(commands, Read)
    world.now = 0.9
    assert messages(world.send(Tick()), scheduler) == []
    world.read_done(reads[0].read_id)
    # The first chunk saves 4 s, which the second may take; 0.9 s of the credit are used up.
    world.now = 4.0
    assert messages(world.send(Tick()), scheduler) == []
    world.now = 4.09
    assert messages(world.send(Tick()), scheduler) == []
    world.now = 4.11
    assert messages(world.send(Tick()), scheduler) == answer(1, 1, Outcome.EXPIRED)
    assert world.engine.counters.lookups_expired == 1
    world.read_done(reads[1].read_id)


def test_a_store_that_stalls_costs_each_request_less() -> None:
    world, _, scheduler = looking()
    world.listed(dict.fromkeys(range(1, 40), RANK_0))
    waits: list[float] = []
    for number in range(1, 40):
        asked = world.now
        # 0.5 s to compute each: two of them are waited for in vain, then there is only what
        # each earns by its own 4%, 20 ms.
        told = messages(
            world.look_up(
                scheduler, number, [number], deadline_ms=60_000, num_tokens=500, prefill=1000.0
            ),
            scheduler,
        )
        while not told:
            world.now += 0.01
            told = messages(world.send(Tick()), scheduler)
        waits.append(world.now - asked)
    assert waits[0] == pytest.approx(0.5, abs=0.011)
    assert max(waits[4:]) <= 0.04
    assert sum(waits) <= 0.04 * (25 + 39 * 0.5) + 39 * 0.01


def test_no_recomputing_means_waiting_to_the_deadline() -> None:
    world, _, scheduler = looking(recompute=False)
    world.listed(dict.fromkeys((1, 2), RANK_0))
    world.look_up(scheduler, 1, [1, 2], deadline_ms=5000, num_tokens=100, prefill=10_000.0)
    world.now = 4.9
    assert messages(world.send(Tick()), scheduler) == []
    world.now = 5.1
    assert messages(world.send(Tick()), scheduler) == answer(1, 0, Outcome.EXPIRED)


def test_lookup_of_a_store_slower_than_the_engine_is_answered_at_once() -> None:
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1])
    world.listed(dict.fromkeys((2, 3, 4), RANK_0))
    [read] = only(world.look_up(scheduler, 1, [2]), Read)
    world.now = 3.0
    world.read_done(read.read_id)
    # A read took three seconds; the engine computes the run in a fraction of one.
    commands = world.look_up(scheduler, 2, [1, 3, 4], num_tokens=768, prefill=10_000.0)
    assert only(commands, Read) == []
    assert messages(commands, scheduler) == answer(2, 1, Outcome.RECOMPUTED)
    assert world.engine.counters.lookups_recomputed == 1
    # An engine that is slower still reads them.
    commands = world.look_up(scheduler, 3, [1, 3, 4], num_tokens=768, prefill=50.0)
    assert [read.key for read in only(commands, Read)] == [key(3), key(4)]


def test_what_is_held_does_not_make_a_read_worth_less() -> None:
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1, 2, 3])
    world.listed(dict.fromkeys((4, 9), RANK_0))
    [read] = only(world.look_up(scheduler, 1, [9]), Read)
    world.now = 3.0
    world.read_done(read.read_id)
    # A read took three seconds. The engine takes five for the tokens of the fourth chunk.
    commands = world.look_up(
        scheduler, 2, [1, 2, 3, 4], num_tokens=256, prefill=256 / 5, num_held=3
    )
    assert [one.key for one in only(commands, Read)] == [key(4)]


def test_lookup_without_a_slot_is_answered_full() -> None:
    world, worker, scheduler = looking(slabs=1, write=WritePolicy.OFF)
    world.stored(worker, 1, [1])
    world.listed({2: RANK_0})
    commands = world.look_up(scheduler, 1, [1, 2])
    assert messages(commands, scheduler) == answer(1, 1, Outcome.FULL)


def test_answered_lookup_keeps_its_chunks_until_its_time_is_over() -> None:
    world, worker, scheduler = looking(slabs=1, write=WritePolicy.OFF)
    world.stored(worker, 1, [1])
    world.look_up(scheduler, 1, [1], deadline_ms=500)
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)
    world.now = 10.6
    world.send(Tick())
    assert only(world.store(worker, 3, [3]), Gather)


def test_a_lease_ends_no_lookup_and_keeps_what_a_released_one_had() -> None:
    world, worker, scheduler = looking(slabs=2, write=WritePolicy.OFF)
    world.stored(worker, 1, [1, 2])
    world.look_up(scheduler, 1, [1, 2])
    world.look_up(scheduler, 2, [1, 2])
    world.lease(scheduler, 9, [1, 2])
    assert (len(world.engine.lookups), len(world.engine.leases)) == (2, 1)
    world.send(release(scheduler, (), (1, 2)))
    assert (len(world.engine.lookups), len(world.engine.leases)) == (0, 1)
    assert messages(world.store(worker, 2, [3]), worker) == done(2, Outcome.FULL)
    world.send(release(scheduler, (9,)))
    assert only(world.store(worker, 3, [3]), Gather)


def test_released_lookup_is_not_answered() -> None:
    world, _, scheduler = looking()
    world.listed({1: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1]), Read)
    world.send(release(scheduler, (), (1,)))
    assert messages(world.read_done(read.read_id), scheduler) == []
    assert world.index[0, key(1)] == (True, True)


def test_lookup_waits_for_a_store_under_way_and_reads_if_it_fails() -> None:
    world, worker, scheduler = looking()
    world.listed({1: RANK_0})
    [gather] = only(world.store(worker, 1, [1]), Gather)
    assert not world.look_up(scheduler, 1, [1])
    [read] = only(world.copied(gather.copy_id, outcome=Outcome.REVOKED), Read)
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.OK)


def test_lookups_are_bounded_per_session() -> None:
    world, _, scheduler = looking(lookups_max_per_session=1)
    world.listed({1: RANK_0, 2: RANK_0})
    world.look_up(scheduler, 1, [1])
    commands = world.look_up(scheduler, 2, [2])
    assert messages(commands, scheduler) == answer(2, 0, Outcome.FULL)
    world.settle()
    # An answered one gives way.
    assert only(world.look_up(scheduler, 3, [2]), Read)
    assert world.engine.counters.lookups_refused == 1


def test_lookup_waits_no_longer_for_a_chunk_found_corrupt() -> None:
    world, worker, scheduler = looking(write=WritePolicy.OFF)
    world.stored(worker, 1, [1])
    world.listed({2: RANK_0})
    [read] = only(world.look_up(scheduler, 1, [1, 2]), Read)
    [scatter] = only(world.load(worker, 2, [1]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.CORRUPT)
    commands = world.read_done(read.read_id)
    assert messages(commands, scheduler) == answer(1, 0, Outcome.CORRUPT)


def test_reads_can_be_off() -> None:
    world, worker, scheduler = looking(store_reads=False)
    world.listed({1: RANK_0})
    assert not world.index
    commands = world.look_up(scheduler, 1, [1])
    assert messages(commands, scheduler) == answer(1, 0, Outcome.MISSING)
    # What is known of the store still saves a write.
    world.stored(worker, 1, [1])
    assert not world.writes
