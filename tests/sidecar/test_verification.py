"""Which loads and writes the engine has verified: what is restored or in doubt, and a share."""

from __future__ import annotations

from collections import Counter

import pytest

from sidecar.core.commands import CaughtUp, Scatter, StoreOutcome, Write
from sidecar.core.outbox import WritePolicy
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_answers import only
from tests.sidecar.engine_names import RANK_0, key
from tests.sidecar.engine_world import World
from tests.sidecar.restoring import holding
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import make_world


def verified(world: World, worker: int, number: int, job_id: int) -> bool:
    [scatter] = only(world.load(worker, job_id, [number]), Scatter)
    world.copied(scatter.copy_id)
    return scatter.verify


def test_restored_chunk_is_verified_at_its_first_use() -> None:
    world, _ = holding(2, verify_loads=0.0)
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert [verified(world, worker, 1, job) for job in (1, 2, 3)] == [True, False, False]
    # A first use that failed does not count.
    [scatter] = only(world.load(worker, 4, [2]), Scatter)
    world.copied(scatter.copy_id, outcome=Outcome.REVOKED)
    assert [verified(world, worker, 2, job) for job in (5, 6)] == [True, False]
    world.stored(worker, 7, [3])
    assert not verified(world, worker, 3, 8)
    assert world.engine.counters.loads_unverified == 4


@pytest.mark.parametrize(
    ("rate", "count"), [(1.0, 1000), (0.5, 500), (0.1, 100), (0.37, 370), (0.001, 1), (0.0, 0)]
)
def test_rate_of_verified_loads(rate: float, count: int) -> None:
    world, worker = holding(1, verify_loads=rate)
    chosen = [verified(world, worker, 1, job) for job in range(2, 1002)]
    assert sum(chosen) == count
    again, worker = holding(1, verify_loads=rate)
    assert [verified(again, worker, 1, job) for job in range(2, 1002)] == chosen


@pytest.mark.parametrize(("rate", "count"), [(1.0, 400), (0.05, 20), (0.3, 120), (0.0, 0)])
def test_rate_of_verified_writes(rate: float, count: int) -> None:
    world = make_world(slabs=400, slab_slots=1, verify_writes=rate)
    worker = world.open(Role.WORKER)
    chosen = 0
    for number in range(1, 401):
        world.stored(worker, number, [number])
        [write] = world.writes.values()
        chosen += write.verify
        world.written(write.write_id)
    assert chosen == count
    assert world.engine.counters.writes_unverified == 400 - count


def test_of_several_ranks_each_is_sampled() -> None:
    """They take turns, so that every second segment is the same rank's."""
    world = make_world(slabs=400, slab_slots=1, verify_writes=0.5)
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    chosen: Counter[int] = Counter()
    for number in range(1, 21):
        for worker in workers:
            world.stored(worker, number, [number])
        for write in list(world.writes.values()):
            chosen[write.rank] += write.verify
            world.written(write.write_id)
        while world.writes:
            [write] = world.writes.values()
            chosen[write.rank] += write.verify
            world.written(write.write_id)
    assert chosen == {0: 10, 1: 10}


def test_what_was_withdrawn_is_verified_before_it_leaves_again() -> None:
    """Its object may have been found damaged, and then its slot has been, too."""
    world = make_world(verify_loads=0.0, verify_writes=0.0, write=WritePolicy.ON_REUSE)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1, 2])

    def wanted(lookup_id: int) -> list[Write]:
        world.look_up(scheduler, lookup_id, [1, 2])
        return only(world.use(scheduler, [1, 2]), Write)

    first, second = wanted(1)
    assert (first.verify, second.verify) == (False, False)
    world.written(first.write_id)
    world.written(second.write_id)
    assert wanted(2) == []
    world.listed({1: RANK_0}, written_at=1 << 50, withdrawn=True)
    assert not verified(world, worker, 2, 2)
    [scatter] = only(world.load(worker, 3, [1]), Scatter)
    [again] = only(world.use(scheduler, [1]), Write)
    assert (scatter.verify, again.verify) == (True, True)
    world.copied(scatter.copy_id)
    world.written(again.write_id)
    # Both found it whole, so who withdrew it had another reason.
    assert not verified(world, worker, 1, 4)
    world.listed({2: RANK_0}, written_at=1 << 51, withdrawn=True)
    [again] = wanted(3)
    assert (again.key, again.verify) == (key(2), True)
    # Another withdrawal while it is sent: it is in doubt again, or still.
    world.listed({2: RANK_0}, written_at=1 << 52, withdrawn=True)
    world.written(again.write_id, StoreOutcome.CORRUPT)
    assert (0, key(2)) not in world.index
    assert world.engine.counters.quarantined_host == 1


def test_written_chunk_counts_as_verified() -> None:
    world = make_world(verify_loads=0.0, verify_writes=0.0)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.send(CaughtUp(0))
    [write] = world.writes.values()
    assert write.verify
    world.written(write.write_id)
    assert not verified(world, worker, 1, 5)
