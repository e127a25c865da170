"""Which chunks are written, when, and what happens when the store fails."""

from __future__ import annotations

import pytest

from sidecar.core.breaker import BreakerRules, BreakerState
from sidecar.core.commands import (
    Draining,
    Gather,
    Read,
    StoreOutcome,
    Tick,
    Write,
    WriteCause,
)
from sidecar.core.outbox import WritePolicy
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.core.writes import WRITE_FAILURES_MAX
from sidecar.protocol import Outcome, Role
from tests import places
from tests.sidecar.engine_answers import answer, messages, only
from tests.sidecar.engine_names import RANK_0, key, layout
from tests.sidecar.engine_world import World
from tests.sidecar.unwalked import Unwalked
from tests.sidecar.worlds import looking, make_world

SLOT_BYTES = layout(0).payload_bytes(2)
TENANT = b"tenant 1"


def written(world: World) -> list[bytes]:
    """Keys of the writes that run."""
    return [write.key for write in world.writes.values()]


def finish(world: World) -> None:
    """Let what is being written, and then all that waits, end well."""
    while world.writes:
        world.written(next(iter(world.writes)))


# --- on_reuse ----------------------------------------------------------------------------------


def test_on_reuse_writes_what_a_second_request_uses() -> None:
    world, worker, scheduler = looking(write=WritePolicy.ON_REUSE)
    world.use(scheduler, [1, 2, 3])
    world.stored(worker, 1, [1, 2, 3])
    world.look_up(scheduler, 1, [3])
    world.lease(scheduler, 1, [3])
    world.load(worker, 2, [3])
    assert written(world) == [], "a lookup, a lease and a load are no requests"
    world.use(scheduler, [1])
    assert written(world) == [key(1)]
    world.use(scheduler, [1, 2])
    assert written(world) == [key(1), key(2)]
    finish(world)
    world.use(scheduler, [1, 2])
    assert written(world) == [], "what the store has is not written again"


def test_on_reuse_writes_what_a_second_request_uses_while_it_is_stored() -> None:
    world, worker, scheduler = looking(write=WritePolicy.ON_REUSE)
    world.use(scheduler, [1])
    [gather] = only(world.store(worker, 1, [1]), Gather)
    world.use(scheduler, [1])
    assert written(world) == []
    world.copied(gather.copy_id)
    assert written(world) == [key(1)]


@pytest.mark.promise("drain-no-writes")
def test_on_reuse_begins_no_write_while_draining() -> None:
    world, worker, scheduler = looking(write=WritePolicy.ON_REUSE)
    world.stored(worker, 1, [1, 2])
    world.send(Draining())
    world.use(scheduler, [1, 2])
    assert written(world) == []
    world.drain()
    assert world.engine.counters.writes_dropped == 0


# --- on_evict ----------------------------------------------------------------------------------


def test_on_evict_writes_the_cold_end_before_it_is_needed() -> None:
    world, worker, _ = looking(slabs=16, write=WritePolicy.ON_EVICT, writes_inflight_max=1)
    for number in range(1, 15):
        world.stored(worker, number, [number])
    assert written(world) == [], "an eighth of 16 is free"
    world.stored(worker, 15, [15])
    assert written(world) == [key(1)]
    finish(world)
    world.stored(worker, 16, [16])
    assert written(world) == [key(2)]
    finish(world)
    world.stored(worker, 17, [17])
    finish(world)
    assert world.engine.counters.writes_dropped == 0
    assert world.engine.counters.chunks_evicted == 1


def test_on_evict_counts_what_was_evicted_unwritten() -> None:
    world, worker, _ = looking(slabs=2, write=WritePolicy.ON_EVICT, writes_inflight_max=1)
    world.stored(worker, 1, [1, 2])
    [running] = world.writes.values()
    # One is held by its write, so the other has to go.
    world.stored(worker, 2, [3])
    assert world.engine.counters.writes_dropped == 1
    assert running.write_id in world.writes


def test_on_evict_looks_after_a_tenant_at_its_limit() -> None:
    rules = TenantRules(named={TENANT: ("one", Quota(8 * SLOT_BYTES))})
    world, worker, _ = looking(slabs=64, tenants=Tenants(rules), write=WritePolicy.ON_EVICT)
    for number in range(1, 9):
        world.stored(worker, number, [number], tenant=TENANT)
    assert written(world) != [], "its own cold end is written although the pool is empty"


@pytest.mark.parametrize("flush", [True, False])
def test_on_evict_writes_the_rest_when_host_memory_ends(*, flush: bool) -> None:
    world, worker, _ = looking(
        slabs=16, write=WritePolicy.ON_EVICT, flush_at_end=flush, write_queue_bytes_max=1
    )
    world.stored(worker, 1, [1, 2, 3, 4])
    assert written(world) == []
    world.drain()
    assert world.engine.counters.chunks_written == (4 if flush else 0)
    assert world.engine.counters.writes_dropped == 0


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.ON_REUSE])
def test_what_the_queue_dropped_is_written_when_host_memory_ends(
    policy: WritePolicy, *, flush: bool
) -> None:
    world, worker, scheduler = looking(
        slabs=16,
        write=policy,
        flush_at_end=flush,
        write_queue_bytes_max=1,
        writes_inflight_max=1,
    )
    world.stored(worker, 1, [1, 2, 3, 4, 5])
    world.use(scheduler, [1, 2, 3, 4])
    dropped = world.engine.counters.writes_dropped
    assert dropped == 3
    world.drain()
    wanted = 5 if policy is WritePolicy.THROUGH else 4
    assert world.engine.counters.chunks_written == (wanted if flush else wanted - dropped)
    assert world.engine.counters.writes_dropped == dropped


@pytest.mark.parametrize("stored", [0, 3, 5])
def test_what_is_written_at_the_end_is_found_over_several_turns(
    monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    places.patch(monkeypatch, "EXAMINED_PER_EVENT_MAX", 2)
    world, worker, _ = looking(slabs=16, write=WritePolicy.ON_EVICT, flush_at_end=True)
    world.stored(worker, 1, [1, 2, 3, 4, 5])
    world.listed(dict.fromkeys(range(1, stored + 1), RANK_0))
    world.send(Draining())
    assert not world.engine.pending_work().idle, "some may be left to write"
    world.drain()
    assert world.engine.counters.chunks_written == 5 - stored


def test_the_cold_end_is_examined_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "EXAMINED_PER_EVENT_MAX", 2)
    world, worker, _ = looking(slabs=64, write=WritePolicy.ON_EVICT, writes_inflight_max=64)
    world.stored(worker, 1, range(1, 65))
    while world.resuming:
        world.resume()
    assert sorted(written(world)) == sorted(key(number) for number in range(1, 9))


def test_without_reads_a_chunk_is_written_again_once_it_left_host_memory() -> None:
    """Nobody tells such a sidecar that its object was collected."""
    world, worker, _ = looking(slabs=16, store_reads=False)
    for number in [*range(1, 31), 1]:
        world.stored(worker, number, [number])
        finish(world)
    world.stored(worker, 31, [31])
    assert world.engine.counters.chunks_evicted > 0
    assert written(world) == [key(31)]
    assert world.engine.counters.chunks_written == 31
    # What is remembered of the store is no more than what host memory has.
    [realm] = world.engine.directory.realms.values()
    assert len(list(realm.stored.names())) <= 16


def test_off_writes_nothing() -> None:
    world, worker, scheduler = looking(slabs=2, write=WritePolicy.OFF)
    for number in range(1, 6):
        world.stored(worker, number, [number])
        world.lease(scheduler, number, [number])
    world.drain()
    assert world.engine.counters.chunks_written == 0


@pytest.mark.promise("page")
@pytest.mark.parametrize(
    ("policy", "cause"),
    [
        (WritePolicy.THROUGH, WriteCause.THROUGH),
        (WritePolicy.ON_REUSE, WriteCause.ON_REUSE),
        (WritePolicy.ON_EVICT, WriteCause.ON_EVICT),
    ],
)
def test_a_write_says_why_also_when_it_is_tried_again(
    policy: WritePolicy, cause: WriteCause
) -> None:
    world, worker, scheduler = looking(slabs=2, write=policy, writes_inflight_max=1)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    world.use(scheduler, [1])
    world.use(scheduler, [1])
    (write,) = world.writes.values()
    assert write.cause is cause
    world.written(write.write_id, StoreOutcome.UNAVAILABLE)
    assert {one.cause for one in world.writes.values()} == {cause}


@pytest.mark.promise("page")
def test_what_is_written_at_the_end_says_so() -> None:
    world, worker, _ = looking(slabs=16, write=WritePolicy.ON_EVICT)
    world.stored(worker, 1, [1])
    assert [one.cause for one in only(world.send(Draining()), Write)] == [WriteCause.STOPPING]


# --- failures ----------------------------------------------------------------------------------


def test_a_failed_write_is_tried_again_behind_the_others() -> None:
    """It is given up after some failures during which the store took others."""
    world, worker, _ = looking(slabs=16, writes_inflight_max=1)
    world.stored(worker, 1, list(range(1, 9)))
    tried: list[bytes] = []
    while world.writes:
        [write] = world.writes.values()
        tried.append(write.key)
        outcome = StoreOutcome.UNAVAILABLE if write.key in (key(1), key(2)) else StoreOutcome.OK
        world.written(write.write_id, outcome)
        if tried[-2:] == [key(1), key(2)]:
            world.stored(worker, 100 + len(tried), [100 + len(tried)])
    failed = [write for write in tried if write in (key(1), key(2))]
    # The first of them says nothing: the store took no write before.
    assert failed == [key(1), key(2)] * (WRITE_FAILURES_MAX + 1)
    assert tried[:9] == [*map(key, range(1, 9)), key(1)]
    assert world.engine.counters.writes_failed == len(failed)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_an_outage_loses_no_write(chunks: int) -> None:
    """However few are queued, and however long it lasts."""
    world, worker, _ = looking(slabs=16, writes_inflight_max=2, breaker=BreakerRules())
    world.stored(worker, 1, list(range(1, chunks + 1)))
    for _ in range(100):
        while world.writes:
            world.written(next(iter(world.writes)), StoreOutcome.UNAVAILABLE)
        world.now += 10.0
        world.send(Tick())
    assert world.engine.counters.writes_failed > 30
    assert world.engine.counters.chunks_written == 0
    for _ in range(2):
        world.now += 100.0
        world.send(Tick())
        finish(world)
    assert world.engine.counters.chunks_written == chunks


def test_writing_pauses_while_the_store_fails_and_goes_on_by_itself() -> None:
    world, worker, _ = looking(slabs=16, writes_inflight_max=2, breaker=BreakerRules(3, 1.0, 4.0))
    world.stored(worker, 1, list(range(1, 9)))
    for _ in range(3):
        world.written(next(iter(world.writes)), StoreOutcome.UNAVAILABLE)
    assert world.engine.breakers["write"].state is BreakerState.OPEN
    world.written(next(iter(world.writes)), StoreOutcome.EXPIRED)
    assert written(world) == [], "nothing is sent for a second"
    world.now = 0.9
    assert only(world.send(Tick()), Write) == []
    world.now = 1.0
    assert len(only(world.send(Tick()), Write)) == 1, "one finds out"
    world.written(next(iter(world.writes)), StoreOutcome.UNAVAILABLE)
    world.now = 2.9
    assert only(world.send(Tick()), Write) == []
    world.now = 3.0
    world.send(Tick())
    world.written(next(iter(world.writes)))
    assert len(written(world)) == 2, "and then all are"
    finish(world)
    # What was tried and failed was queued again: nothing was lost.
    assert world.engine.counters.chunks_written == 8
    assert world.engine.counters.writes_dropped == 0


def test_reading_pauses_and_nobody_waits_for_it() -> None:
    world, worker, scheduler = looking(breaker=BreakerRules(1, 1.0, 4.0), reads_inflight_max=1)
    world.stored(worker, 1, [1])
    world.listed(dict.fromkeys((2, 3, 4, 5), RANK_0))
    [read] = only(world.look_up(scheduler, 1, [1, 2, 3, 4]), Read)
    commands = world.read_done(read.read_id, StoreOutcome.UNAVAILABLE)
    assert messages(commands, scheduler) == answer(1, 1, Outcome.FAILED)
    assert only(commands, Read) == []
    commands = world.look_up(scheduler, 2, [1, 2])
    assert messages(commands, scheduler) == answer(2, 1, Outcome.PAUSED), "answered at once"
    assert world.engine.counters.reads_paused > 0
    assert not world.engine.breakers["write"].opened, "writes are judged on their own"
    world.now = 1.0
    [trial] = only(world.look_up(scheduler, 3, [1, 2, 3]), Read)
    # A missing object is an answer, too.
    world.read_done(trial.read_id, StoreOutcome.MISSING)
    assert world.engine.breakers["read"].state is BreakerState.CLOSED
    assert len(only(world.look_up(scheduler, 4, [1, 3]), Read)) == 1


def test_reads_behind_a_trial_wait_for_how_it_ends() -> None:
    world, _, scheduler = looking(breaker=BreakerRules(1, 1.0, 4.0), reads_inflight_max=4)
    world.listed(dict.fromkeys((1, 2, 3), RANK_0))
    reads = only(world.look_up(scheduler, 1, [1]), Read)
    world.read_done(reads[0].read_id, StoreOutcome.UNAVAILABLE)
    world.now = 1.0
    [trial] = only(world.look_up(scheduler, 2, [1, 2, 3]), Read)
    commands = world.read_done(trial.read_id)
    assert [read.key for read in only(commands, Read)] == [key(2), key(3)]


def test_what_waits_is_bounded_in_bytes() -> None:
    world = make_world(slabs=16, writes_inflight_max=1, write_queue_bytes_max=3 * SLOT_BYTES)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, list(range(1, 9)))
    assert world.engine.writes.pending_bytes == 3 * SLOT_BYTES
    assert world.engine.counters.writes_dropped == 4
    finish(world)
    assert world.engine.counters.chunks_written == 4
    assert world.engine.writes.pending_bytes == 0


def test_pending_work_does_not_walk_the_queue() -> None:
    world = make_world(writes_inflight_max=1)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    for worker in workers:
        world.stored(worker, 1, [1, 2])
    writes = world.engine.writes
    writes.pending = Unwalked(writes.pending)
    # One of the four segments is being written.
    assert world.engine.pending_work().writes_pending == 3


# --- a namespace at its bound --------------------------------------------------------------------


def test_a_chunk_is_written_only_where_its_namespace_has_room_when_its_turn_comes() -> None:
    held = 0
    asked: list[tuple[int, int]] = []

    def room(realm_id: int, num_bytes: int, objects: int) -> bool:
        asked.append((num_bytes, objects))
        return held + objects <= 3

    world = make_world(room_to_write=room, writes_inflight_max=2)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2, 3, 4])
    assert written(world) == [key(1), key(2)]
    # What is being written counts already, what only waits does not: it may never be written.
    assert asked == [(SLOT_BYTES, 1), (2 * SLOT_BYTES, 2)]
    for number in (1, 2):
        held += 1
        world.written(next(iter(world.writes)))
        assert asked[2:] == [(2 * SLOT_BYTES, 2), (2 * SLOT_BYTES, 2)][:number]
    assert written(world) == [key(3)]
    assert world.engine.counters.writes_refused_bound == 1
    held += 1
    finish(world)
    assert world.engine.counters.chunks_written == 3
    assert world.engine.writes.pending_bytes == 0


def test_all_ranks_of_a_chunk_are_written_or_none() -> None:
    asked: list[int] = []

    def room(realm_id: int, num_bytes: int, objects: int) -> bool:
        asked.append(objects)
        return objects <= 2

    world = make_world(room_to_write=room, writes_inflight_max=1)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    for worker in workers:
        world.stored(worker, 1, [1])
    while world.writes:
        world.written(next(iter(world.writes)))
    assert asked == [2]
    assert world.engine.counters.bytes_written
    assert world.engine.counters.writes_refused_bound == 0


def test_a_write_that_failed_is_tried_again_only_where_there_is_room_still() -> None:
    rooms = [True, False]
    world = make_world(room_to_write=lambda _realm, _size, _objects: rooms.pop(0))
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.written(next(iter(world.writes)), StoreOutcome.UNAVAILABLE)
    assert not world.writes
    assert world.engine.counters.writes_refused_bound == 1


@pytest.mark.parametrize("limit", ["bound", "quota"])
def test_a_chunk_that_a_limit_keeps_from_the_store_counts_once(limit: str) -> None:
    """Not again each time that the cold end is examined, nor as dropped when it goes."""

    def refuse(*_: object) -> bool:
        return False

    if limit == "bound":
        world = make_world(slabs=16, write=WritePolicy.ON_EVICT, room_to_write=refuse)
    else:
        world = make_world(slabs=16, write=WritePolicy.ON_EVICT, admit_write=refuse)
    worker = world.open(Role.WORKER)
    for number in range(1, 120, 2):
        world.stored(worker, number, [number])
    counters = world.engine.counters
    assert counters.chunks_evicted == 60 - 16
    assert counters.writes_dropped == 0
    # What is evicted next was tried, too.
    assert 0 <= getattr(counters, f"writes_refused_{limit}") - counters.chunks_evicted <= 16
    if limit == "quota":
        told = sum(one.counters.writes_refused for one in world.engine.tenants.snapshot())
        assert told == counters.writes_refused_quota
