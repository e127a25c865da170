"""What an earlier life had sealed is written to the store, after all else."""

from __future__ import annotations

import pytest

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import CaughtUp, Draining, StoreOutcome, Tick, Write, WriteCause
from sidecar.core.outbox import WritePolicy
from sidecar.protocol import Role
from tests import places
from tests.sidecar.engine_answers import only
from tests.sidecar.engine_names import ALL_RANKS, RANK_0, key
from tests.sidecar.restoring import holding
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import make_world


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
    assert [write.cause for write in world.writes.values()] == [WriteCause.RESTORED]
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
    for _ in range(3):
        world.now += 10.0
        world.send(Tick())
        [write_id] = world.writes
        world.written(write_id, StoreOutcome.UNAVAILABLE)
    world.send(CaughtUp(0))
    assert world.engine.pending_work().writes_pending == 1, "of those that were stored now"
    world.now += 10.0
    assert len(only(world.send(Tick()), Write)) == 1, "one finds out"
    world.settle()
    assert world.engine.counters.chunks_written == 3


def test_drain_and_eviction_forget_what_was_offered() -> None:
    world = make_world(writes_inflight_max=1, slabs=3, flush_at_end=False)
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


def test_restored_chunks_that_the_store_has_are_examined_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places.patch(monkeypatch, "EXAMINED_PER_EVENT_MAX", 2)
    world = make_world()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3, 4, 5, 6])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.listed(dict.fromkeys((2, 3, 4, 5, 6), RANK_0))
    backfill = world.engine.directory.realms[0].backfill
    world.send(CaughtUp(0))
    left = [len(backfill)]
    while world.resuming:
        world.resume()
        left.append(len(backfill))
    assert left == [4, 2, 0, 0]
    assert [write.key for write in world.writes.values()] == [key(1)]


def test_restored_chunks_that_were_reused_are_written_once_the_catalog_was_read() -> None:
    world = make_world(write=WritePolicy.ON_REUSE)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1, 2, 3])
    world.use(scheduler, [1, 2])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    assert not world.writes, "what the store holds is not known yet"
    world.listed({1: RANK_0})
    world.send(CaughtUp(0))
    written = [(write.key, write.cause) for write in world.writes.values()]
    assert written == [(key(2), WriteCause.ON_REUSE)]


def test_restored_chunks_are_written_where_no_catalog_is_read() -> None:
    world = make_world(store_reads=False)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    assert [write.key for write in world.writes.values()] == [key(1)]


def test_on_evict_writes_no_restored_chunk_before_the_catalog_was_read() -> None:
    """The cold eighth was written again after each restart."""
    world = make_world(slabs=16, write=WritePolicy.ON_EVICT, writes_inflight_max=1)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, range(1, 15))
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.stored(worker, 2, [20, 21, 22])
    assert not world.writes, "what the store holds is not known yet"
    assert world.engine.counters.chunks_evicted == 1
    assert world.engine.counters.writes_dropped == 0
    world.listed({2: RANK_0})
    world.send(CaughtUp(0))
    world.send(Tick())
    assert [write.key for write in world.writes.values()] == [key(3)]


def test_on_reuse_writes_no_restored_chunk_before_the_catalog_was_read() -> None:
    world = make_world(write=WritePolicy.ON_REUSE)
    world.stored(world.open(Role.WORKER), 1, [1, 2, 3])
    world.restart(StrictLRU())
    world.open(Role.WORKER)
    world.use(world.open(Role.SCHEDULER), [1, 2])
    assert not world.writes
    world.listed({1: RANK_0})
    world.send(CaughtUp(0))
    assert [write.key for write in world.writes.values()] == [key(2)]
