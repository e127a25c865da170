"""Sessions, events, drain and status of the engine. `World` checks it after every event."""

from __future__ import annotations

import gc
import sys

import pytest

from sidecar.core.commands import (
    Copied,
    Draining,
    Gather,
    IndexSet,
    Received,
    SessionClosed,
    StoreOutcome,
    Tick,
    Written,
)
from sidecar.core.retention import FOR_EVER
from sidecar.protocol import (
    Lookup,
    Outcome,
    Role,
)
from tests.sidecar.engine_answers import answer, done, messages, only
from tests.sidecar.engine_names import EPOCH, RANK_0, key, release
from tests.sidecar.worlds import looking, make_world, no_writes
from tiers.policy.density import DensityPolicy


def test_copies_of_a_closed_session_go_on() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    world.send(SessionClosed(worker))
    del world.sessions[worker]
    assert world.copied(gather.copy_id) == [IndexSet(0, key(1), in_host=True, in_store=False)]


def test_copies_that_end_at_once_are_answered_and_indexed_together() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    gathers = only(world.store(worker, 1, [1, 2]), Gather)
    for gather in gathers:
        world.content[gather.slot].sealed = True
        del world.gathers[gather.copy_id]
    ended = Copied([gather.copy_id for gather in gathers], Outcome.OK)
    commands = world.engine.handle(ended, world.now)
    world.note(commands)
    indexed = [IndexSet(0, key(number), in_host=True, in_store=False) for number in (1, 2)]
    assert commands[:2] == indexed
    assert messages(commands, worker) == done(1, Outcome.OK)


def test_chunks_need_no_garbage_collector() -> None:
    """A collection looks at all that it knows of, and holds up the event loop and every copy."""
    world = no_writes(policy=DensityPolicy())
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    chunk = world.engine.directory.realms[0].chunks[key(1)]
    (segment,) = chunk.segments
    gc.collect()  # It takes tuples of what it need not follow off its lists.
    assert not any(map(gc.is_tracked, (chunk, segment, chunk.segments)))
    assert chunk.retention is FOR_EVER
    for number in range(3, 40, 2):
        world.stored(worker, number, [number])
    assert chunk.detached
    assert chunk.segments == (), "it and its segment would never be freed"
    assert sys.getrefcount(segment) == 2


def test_events_of_unknown_sessions_are_counted() -> None:
    world = make_world()
    world.store(99, 1, [1])
    world.look_up(99, 1, [1])
    world.lease(99, 1, [1])
    world.send(release(99, (1,), (1,)))
    world.send(SessionClosed(99))
    assert world.engine.counters.stale_messages == 5


def test_events_reach_only_subscribers_of_the_realm() -> None:
    world = no_writes()
    deaf = world.open(Role.SCHEDULER)
    other = world.open(Role.SCHEDULER, realm_id=1, want_events=True)
    listener = world.open(Role.SCHEDULER, want_events=True)
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1]), Gather)
    commands = world.copied(gather.copy_id)
    assert [len(messages(commands, s)) for s in (deaf, other, listener)] == [0, 0, 1]


def test_draining_ends_stores_and_lookups_and_writes_the_rest() -> None:
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
    assert world.engine.draining


def test_clear_gives_every_slot_back() -> None:
    world, worker, scheduler = looking()
    world.stored(worker, 1, [1, 2])
    world.settle()
    world.lease(scheduler, 1, [1])
    world.note(world.engine.clear())
    assert len(world.slots.used) == 1
    world.send(SessionClosed(scheduler))
    world.note(world.engine.clear())
    assert not world.slots.used
    assert world.engine.directory.realms[0].stored_chunks == 2


def test_an_ending_that_nobody_waits_for_is_a_bug() -> None:
    world = make_world()
    for event in (Copied([1], Outcome.OK), Written(1, StoreOutcome.OK)):
        with pytest.raises(KeyError):
            world.engine.handle(event, 0.0)


def test_deadline_of_a_lookup_is_bounded_by_the_operator() -> None:
    world, _, scheduler = looking()
    world.listed({1: RANK_0})
    world.send(Received(scheduler, Lookup(EPOCH, 1, [key(1)], 10**18)))
    world.now = 10.0
    assert messages(world.send(Tick()), scheduler) == answer(1, 0, Outcome.EXPIRED)
