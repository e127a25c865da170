"""What waits is bounded, in all and of each client: the rule, and the engine that keeps it."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sidecar.core.commands import Gather, Read, Received, Scatter, SessionClosed
from sidecar.core.fair_share import PINNED_ALPHA, Share, ShareLimits
from sidecar.core.outbox import WritePolicy
from sidecar.protocol import (
    Lookup,
    Outcome,
    Role,
    ServerMessage,
    StoreChunk,
    StoreJob,
    Submit,
)
from tests.sidecar.engine_answers import answer, messages, only
from tests.sidecar.engine_names import RANK_0, key, layout
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world

SLOT = layout(0).payload_bytes(2)


class TestShare:
    def test_one_alone_gets_half_and_the_next_as_much_as_is_left(self) -> None:
        share = Share("copies", 120)
        for session_id, most in ((1, 60), (2, 30), (3, 15)):
            while share.fits(session_id, 1):
                share.take(session_id, 1)
            assert share.of(session_id) == most

    def test_those_that_flood_together_get_the_same(self) -> None:
        share = Share("copies", 120)
        for _ in range(200):
            for session_id in (1, 2):
                if share.fits(session_id, 1):
                    share.take(session_id, 1)
        assert (share.of(1), share.of(2)) == (40, 40)
        assert share.fits(3, 20), "who comes later finds room"

    def test_of_what_one_may_need_most_of_it_may_have_seven_eighths(self) -> None:
        share = Share("pinned", 80, PINNED_ALPHA)
        while share.fits(1, 1):
            share.take(1, 1)
        assert share.of(1) == 70
        assert share.fits(2, 8), "who comes later finds room"

    @pytest.mark.promise("pending-limit")
    @given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 50)), max_size=60))
    def test_never_over_the_limit_and_empty_in_the_end(self, wanted: list[tuple[int, int]]) -> None:
        share = Share("copies", 100)
        taken: list[tuple[int, int]] = []
        for session_id, amount in wanted:
            if share.fits(session_id, amount):
                share.take(session_id, amount)
                taken.append((session_id, amount))
                assert share.used <= share.limit
                assert share.of(session_id) <= share.limit - share.used
        for session_id, amount in taken:
            share.give(session_id, amount)
        assert (share.used, dict(share.by_session)) == (0, {})


def bounded(**changes: Any) -> World:
    return make_world(slabs=64, write=WritePolicy.OFF, shares=ShareLimits(**changes))


def empty(world: World) -> bool:
    return not any(share.used for share in world.engine.shares.shares.values())


class TestEngine:
    def test_a_lookup_over_the_share_is_answered_full(self) -> None:
        world = bounded(memory_bytes_max=16384)
        world.open(Role.WORKER)
        scheduler = world.open(Role.SCHEDULER)
        world.listed(dict.fromkeys(range(1, 9), RANK_0))
        assert only(world.look_up(scheduler, 1, [1, 2]), Read)
        (told,) = messages(world.look_up(scheduler, 2, [3, 4, 5]), scheduler)
        assert (told.ready, told.outcome) == (0, Outcome.FULL)  # type: ignore[union-attr]
        assert world.engine.shares.refused == {("lookup", "memory"): 1}
        assert world.engine.counters.lookups_refused == 1
        world.send(SessionClosed(scheduler))
        del world.sessions[scheduler]
        assert empty(world)

    def test_reads_that_nobody_waits_for_leave_the_queue(self) -> None:
        world = bounded()
        world.open(Role.WORKER)
        scheduler = world.open(Role.SCHEDULER)
        world.listed(dict.fromkeys(range(1, 200), RANK_0))
        for number in range(1, 190, 10):
            world.look_up(scheduler, 1, list(range(number, number + 10)), deadline_ms=9000)
        # The same id again replaces what was asked before.
        assert world.engine.pending_work().reads_queued <= 10

    @pytest.mark.promise("full-store")
    def test_stores_and_loads_over_the_share_end_as_full(self) -> None:
        world = bounded(copies_queued_max=8)
        flooding, other = world.open(Role.WORKER), world.open(Role.WORKER, engine_id="b")
        world.stored(flooding, 1, [30])
        commands = world.store(flooding, 2, range(1, 7))
        assert len(only(commands, Gather)) == 4
        (done,) = messages(world.load(flooding, 3, [30]), flooding)
        assert [job.outcome for job in done.jobs] == [Outcome.FULL]  # type: ignore[union-attr]
        assert only(world.store(other, 4, [8]), Gather)
        assert only(world.load(other, 5, [30]), Scatter)
        counters = world.engine.counters
        assert (counters.stores_dropped_share, counters.loads_dropped_full) == (2, 1)
        world.settle()
        assert empty(world)
        assert not world.engine.shares.jobs.used

    def test_slots_that_are_being_filled_are_shared_too(self) -> None:
        world = bounded(storing_bytes_max=8 * SLOT)
        flooding, other = world.open(Role.WORKER), world.open(Role.WORKER, engine_id="b")
        assert len(only(world.store(flooding, 1, range(1, 30)), Gather)) == 4
        assert world.engine.shares.refused == {("store", "storing"): 25}
        assert only(world.store(other, 2, [40]), Gather)

    def test_jobs_of_a_session_are_bounded(self) -> None:
        world = bounded(jobs_max_per_session=2)
        worker = world.open(Role.WORKER)
        for job_id in (1, 2):
            assert only(world.store(worker, job_id, [job_id]), Gather)
        (done,) = messages(world.store(worker, 3, [3]), worker)
        assert [job.outcome for job in done.jobs] == [Outcome.FULL]  # type: ignore[union-attr]
        assert world.engine.shares.refused == {("store", "jobs"): 1}

    def test_a_lease_over_the_share_is_refused_and_the_load_goes_without(self) -> None:
        world = bounded(leases_max=4)
        worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
        world.stored(worker, 1, [1])
        for lease_id in range(10, 14):
            world.lease(scheduler, lease_id, [1])
        assert len(world.engine.leases) == 2
        assert world.engine.shares.refused == {("lease", "leases"): 2}
        assert only(world.load(worker, 13, [1]), Scatter)

    @pytest.mark.promise("share-of-pins")
    def test_a_client_that_pins_everything_leaves_slots_to_evict(self) -> None:
        world = make_world(
            slabs=8, write=WritePolicy.OFF, shares=ShareLimits(pinned_bytes_max=8 * SLOT)
        )
        flooding, other = world.open(Role.WORKER), world.open(Role.WORKER, engine_id="b")
        scheduler = world.open(Role.SCHEDULER)
        world.stored(flooding, 1, range(1, 9))
        for lease_id in range(1, 9):
            world.lease(scheduler, lease_id, [lease_id])
        assert len(world.engine.leases) == 7
        assert world.engine.shares.refused == {("lease", "pinned"): 1}
        assert only(world.store(other, 2, [20]), Gather), "what was not pinned made room"
        # What a session pins already costs it nothing more.
        world.lease(scheduler, 20, list(range(1, 8)))
        assert len(world.engine.leases) == 8
        world.send(SessionClosed(scheduler))
        del world.sessions[scheduler]
        assert not world.engine.shares.pinned.used

    def test_a_lookup_is_cut_where_it_would_pin_more_than_its_share(self) -> None:
        world = make_world(
            slabs=8, write=WritePolicy.OFF, shares=ShareLimits(pinned_bytes_max=8 * SLOT)
        )
        world.open(Role.WORKER)
        scheduler = world.open(Role.SCHEDULER)
        world.listed(dict.fromkeys(range(1, 20), RANK_0))
        world.look_up(scheduler, 1, range(1, 13), deadline_ms=9000)
        reads = 0
        told: list[ServerMessage] = []
        while world.reads:
            reads += 1
            told += messages(world.read_done(next(iter(world.reads))), scheduler)
        assert reads == 7
        assert told == answer(1, 7, Outcome.FULL)
        assert world.engine.shares.refused == {("lookup", "pinned"): 1}

    @pytest.mark.promise("share-of-reads")
    def test_reads_of_a_session_do_not_wait_for_another_ones_backlog(self) -> None:
        world = bounded()
        world.open(Role.WORKER)
        flooding, other = world.open(Role.SCHEDULER), world.open(Role.SCHEDULER, engine_id="b")
        world.listed(dict.fromkeys(range(1, 60), RANK_0))
        for number in range(1, 41, 10):
            world.look_up(flooding, number, range(number, number + 10), deadline_ms=9000)
        world.look_up(other, 1, [50, 51], deadline_ms=9000)
        assert world.engine.pending_work().reads_queued == 40
        ended = 0
        while not messages(world.read_done(next(iter(world.reads))), other):
            ended += 1
        # Two were running; then the sessions take turns.
        assert ended <= 2 + 4

    @pytest.mark.promise("memory-limit")
    @pytest.mark.parametrize("what", ["lookups", "stores"])
    def test_the_account_is_no_smaller_than_what_python_allocates(self, what: str) -> None:
        world = make_world(
            slabs=1024,
            write=WritePolicy.OFF,
            lookups_max_per_session=10_000,
            shares=ShareLimits(memory_bytes_max=1 << 40, jobs_max_per_session=10_000),
        )
        engine = world.engine
        worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
        world.listed(dict.fromkeys(range(1, 2001), RANK_0))
        world.engine.handle(SessionClosed(9999), 0.0)
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        # Past the checks of `World`, which would be measured too.
        make = looked_up if what == "lookups" else submitted
        session_id = scheduler if what == "lookups" else worker
        kept = [engine.handle(make(session_id, number), 0.0) for number in range(1, 1001, 10)]
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(kept) == 100
        assert 0 < allocated <= engine.shares.memory.used


def looked_up(session_id: int, first: int) -> Any:
    keys = [key(number) for number in range(first, first + 10)]
    return Received(session_id, Lookup(7, first, keys, 9000))


def submitted(session_id: int, first: int) -> Any:
    chunks = [
        StoreChunk(key(5000 + number), key(0), bytes(32), [number, number + 1])
        for number in range(first, first + 10)
    ]
    return Received(session_id, Submit(7, 0, [], [StoreJob(first, chunks)]))
