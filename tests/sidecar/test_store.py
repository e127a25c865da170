"""Writes, listings and eviction to the store, rule by rule, through the engine."""

from __future__ import annotations

import pytest

from sidecar.core.commands import (
    Gather,
    IndexOffer,
    IndexSet,
    Listed,
    Scatter,
    StoreOutcome,
    Withdraw,
    Write,
)
from sidecar.core.outbox import WritePolicy
from sidecar.core.stored_table import ListedRow, key_list
from sidecar.protocol import (
    Events,
    Outcome,
    RemovedEvent,
    Role,
    StoredEvent,
)
from tests.sidecar.catalog_rows import listed_rows
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import ALL_RANKS, BLOCK_TOKENS, EPOCH, RANK_0, ROOT, key, layout
from tests.sidecar.unwalked import Unwalked
from tests.sidecar.worlds import looking, make_world

SLOT_BYTES = layout(0).payload_bytes(2)


def test_writes_are_bounded_and_in_order() -> None:
    world = make_world(writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    [first] = world.writes.values()
    assert first.key == key(1)
    assert world.engine.pending_work().writes_pending == 1
    [second] = only(world.written(first.write_id, StoreOutcome.UNAVAILABLE), Write)
    assert second.key == key(2)
    assert world.engine.counters.writes_failed == 1


def test_running_write_pins_and_pending_write_does_not() -> None:
    world = make_world(writes_inflight_max=1, slabs=2)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    commands = world.store(worker, 2, [3])
    assert only(commands, IndexSet) == [IndexSet(0, key(2), in_host=False, in_store=False)]
    assert world.engine.counters.writes_dropped == 1
    assert messages(world.store(worker, 3, [4]), worker) == done(3, Outcome.FULL)


def test_full_write_queue_drops_its_oldest() -> None:
    world = make_world(writes_inflight_max=1, write_queue_bytes_max=SLOT_BYTES)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [first] = world.writes.values()
    world.stored(worker, 2, [2, 3])
    assert world.engine.counters.writes_dropped == 1
    [second] = only(world.written(first.write_id), Write)
    assert second.key == key(3)


def test_evicted_chunk_stays_in_the_index_while_the_store_has_it() -> None:
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


def test_corrupt_write_quarantines_the_slot() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [write] = world.writes.values()
    world.written(write.write_id, StoreOutcome.CORRUPT)
    assert not world.index
    assert not world.slots.used


def test_write_of_a_chunk_found_corrupt_is_not_vouched_for() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    [scatter] = only(world.load(worker, 2, [1]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.CORRUPT)
    world.settle()
    assert not world.index


def test_listing_spares_a_queued_write() -> None:
    world = make_world(writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    world.listed({2: RANK_0})
    world.settle()
    assert world.engine.counters.chunks_written == 1


def test_withdrawing_spares_what_was_written_later() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    world.listed({1: RANK_0, 2: RANK_0}, written_at=5)
    world.stored(worker, 1, [3])
    world.settle()
    world.listed({2: RANK_0, 3: RANK_0}, written_at=5, withdrawn=True)
    assert world.index == {(0, key(1)): (False, True), (0, key(3)): (True, True)}
    world.listed({1: RANK_0}, written_at=6)
    world.listed({1: RANK_0}, written_at=5, withdrawn=True)
    assert (0, key(1)) in world.index
    world.listed({1: RANK_0}, written_at=6, withdrawn=True)
    assert (0, key(1)) not in world.index


def test_lines_of_the_catalog_may_come_in_any_order_and_twice() -> None:
    world = make_world()
    world.open(Role.WORKER)
    world.listed({1: RANK_0}, written_at=5, withdrawn=True)
    for written_at in (4, 5, 5):
        world.listed({1: RANK_0}, written_at=written_at)
        assert not world.index
    world.listed({1: RANK_0}, written_at=6)
    world.listed({1: RANK_0}, written_at=6)
    world.listed({1: RANK_0}, written_at=5, withdrawn=True)
    assert world.index == {(0, key(1)): (False, True)}


def test_withdrawing_one_rank_makes_a_chunk_unloadable() -> None:
    world = make_world()
    world.open(Role.WORKER, world_size=2)
    world.listed({1: ALL_RANKS}, written_at=5)
    world.listed({1: RANK_0}, written_at=5, withdrawn=True)
    assert not world.index
    world.listed({1: RANK_0}, written_at=5)
    assert not world.index
    world.listed({1: RANK_0}, written_at=7)
    assert world.index == {(0, key(1)): (False, True)}


def test_a_write_after_a_withdrawal_is_announced_as_later() -> None:
    world = make_world()
    worker = world.open(Role.WORKER)
    world.listed({1: RANK_0}, written_at=10**9)
    world.listed({1: RANK_0}, written_at=10**9, withdrawn=True)
    world.stored(worker, 1, [1])
    [write] = world.writes.values()
    assert write.written_after == 10**9
    world.settle()
    assert world.index == {(0, key(1)): (True, True)}
    world.listed({1: RANK_0}, written_at=10**9, withdrawn=True)
    assert world.index == {(0, key(1)): (True, True)}


@pytest.mark.parametrize("outcome", [StoreOutcome.MISSING, StoreOutcome.CORRUPT])
def test_what_is_gone_is_withdrawn_for_everybody(outcome: StoreOutcome) -> None:
    world, _, scheduler = looking()
    world.listed({1: RANK_0}, written_at=8)
    world.look_up(scheduler, 1, [1])
    [read] = world.reads.values()
    world.read_done(read.read_id, outcome)
    assert world.withdrawn == [Withdraw(0, 0, key(1), 8)]
    world.listed({1: RANK_0}, written_at=8)
    assert not world.index


def test_a_sidecar_that_only_reads_announces_nothing() -> None:
    world, _, scheduler = looking(write=WritePolicy.OFF)
    world.listed({1: RANK_0})
    world.look_up(scheduler, 1, [1])
    [read] = world.reads.values()
    world.read_done(read.read_id, StoreOutcome.MISSING)
    assert not world.withdrawn


def test_listing_of_some_ranks_is_not_loadable() -> None:
    world = make_world()
    world.open(Role.WORKER, world_size=2)
    world.listed({1: RANK_0, 2: frozenset({0, 1, 5})})
    assert world.index == {(0, key(2)): (False, True)}
    world.listed({1: frozenset({1})})
    assert (0, key(1)) in world.index
    world.listed({1: RANK_0}, realm_id=9)
    assert world.engine.counters.stale_messages == 1


def test_a_chunk_whose_key_begins_like_that_of_a_withdrawn_one() -> None:
    world = make_world()
    world.open(Role.WORKER)
    world.listed({1: RANK_0})
    other = key(1)[:8] + b"2" * 24
    rows = [
        ListedRow(key(1), 1, 5, withdrawn=True),
        ListedRow(other, 1, 1, withdrawn=False),
        ListedRow(key(2), 1, 1, withdrawn=False),
    ]
    world.send(Listed(0, listed_rows(rows)))
    realm = world.engine.directory.realms[0]
    assert [realm.in_store(one) for one in (key(1), other, key(2))] == [False, True, True]
    assert world.index[0, other] == (False, True)
    # Also when the withdrawal is remembered from before.
    third = key(1)[:8] + b"3" * 24
    world.send(Listed(0, listed_rows([ListedRow(third, 1, 1, withdrawn=False)])))
    assert world.index[0, third] == (False, True)


def test_a_slice_of_rows_does_not_walk_the_withdrawn_chunks() -> None:
    world = make_world(quarantine_keys_max=4)
    world.open(Role.WORKER)
    world.listed(dict.fromkeys((1, 2, 3, 4), RANK_0), written_at=5, withdrawn=True)
    store = world.engine.store
    store.withdrawn = Unwalked(store.withdrawn)
    world.listed({1: RANK_0, 5: RANK_0}, written_at=5)
    assert world.index == {(0, key(5)): (False, True)}
    # The list is full, so the oldest one leaves it.
    world.listed({6: RANK_0}, written_at=5, withdrawn=True)
    world.listed({1: RANK_0, 2: RANK_0}, written_at=5)
    assert world.index == dict.fromkeys([(0, key(5)), (0, key(1))], (False, True))


def test_a_listing_tells_the_index_and_whoever_follows_of_what_can_be_read_now() -> None:
    world = make_world()
    told: list[bytes] = []
    world.engine.notify_listed = lambda realm, keys: told.extend(key_list(keys))
    world.open(Role.WORKER)
    commands = world.listed({1: RANK_0, 2: RANK_0})
    assert only(commands, IndexSet) == []
    [offer] = only(commands, IndexOffer)
    assert sorted(key_list(offer.keys)) == told == sorted([key(1), key(2)])
    # Again, or later, it is no news; what has an object here is told with the others' changes.
    assert world.listed({1: RANK_0}, written_at=9) == []
    assert told == [key(1), key(2)]
