"""Chunks that requests asked to have kept: what holds them, for how long, and how many."""

from __future__ import annotations

import pytest

from sidecar.core.commands import Draining, Gather, SessionClosed, Tick
from sidecar.core.fair_share import ShareLimits
from sidecar.core.outbox import WritePolicy
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Outcome, Role
from tests import places
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import GROUP_NUMBERS, key, layout, release
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import make_world, no_writes

SLOT = layout(0).payload_bytes(layout(0).blocks_per_chunk)
TENANT = b"a tenant"


def keeping(slots: int = 4, **changes: object) -> tuple[World, int, int]:
    world = no_writes(slabs=slots, **changes)
    return world, world.open(Role.WORKER), world.open(Role.SCHEDULER)


def crowd(world: World, worker: int, numbers: range) -> None:
    """Store chunks one after the other: what is evicted for one is what is coldest then."""
    for number in numbers:
        world.stored(worker, 1000 + number, [number])


def in_host(world: World) -> list[int]:
    return sorted(int.from_bytes(name[1], "little") for name in world.index)


@pytest.mark.promise("pin")
def test_what_is_pinned_is_not_evicted_and_then_is() -> None:
    world, worker, scheduler = keeping()
    world.stored(worker, 1, [1, 2])
    world.pin(scheduler, [1, 2], 10)
    crowd(world, worker, range(10, 20))
    assert in_host(world) == [1, 2, 18, 19]
    world.now = 9.9
    world.send(Tick())
    crowd(world, worker, range(20, 30))
    assert in_host(world) == [1, 2, 28, 29]
    world.now = 10.0
    world.send(Tick())
    # It counts as used when its time was over.
    crowd(world, worker, range(30, 34))
    assert in_host(world) == [30, 31, 32, 33]
    assert not world.engine.shares.request_pins.used


def test_many_that_are_pinned_hide_no_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are out of the order of eviction, which is searched for a bounded number of steps."""
    places.patch(monkeypatch, "VICTIMS_SCANNED_MAX", 200)
    world, worker, scheduler = keeping(slots=700)
    for first in range(1, 601, 100):
        world.stored(worker, first, range(first, first + 100))
    for first in range(1, 501, 100):
        world.engine.shares.request_pins.limit = 1 << 60
        world.pin(scheduler, range(first, first + 100), 10)
    crowd(world, worker, range(3000, 3250))
    assert world.engine.counters.stores_dropped_full == 0


def test_a_store_that_is_still_on_the_way_is_pinned_too() -> None:
    world, worker, scheduler = keeping()
    world.pin(scheduler, [1, 2], 10)
    [first, _] = only(world.store(worker, 1, [1, 2]), Gather)
    world.copied(first.copy_id)
    crowd(world, worker, range(10, 20))
    assert 1 in in_host(world)
    assert world.engine.counters.chunks_pinned == 2


def test_a_second_wish_only_makes_it_longer() -> None:
    world, worker, scheduler = keeping()
    world.stored(worker, 1, [1])
    world.pin(scheduler, [1], 10)
    world.pin(scheduler, [1], 30)
    world.pin(scheduler, [1], 5)
    assert world.engine.shares.request_pins.used == SLOT
    for now, kept in ((10.0, True), (29.9, True), (30.0, False)):
        world.now = now
        world.send(Tick())
        assert bool(list(world.engine.request_pins)) is kept


def test_two_sessions_keep_the_same_chunk() -> None:
    world, worker, first = keeping()
    second = world.open(Role.SCHEDULER, engine_id="b")
    world.stored(worker, 1, [1])
    world.pin(first, [1], 10)
    world.pin(second, [1], 20)
    world.send(SessionClosed(second))
    del world.sessions[second]
    crowd(world, worker, range(10, 20))
    assert 1 in in_host(world)


def test_it_ends_with_a_release_a_session_or_the_sidecar() -> None:
    world, worker, scheduler = keeping()
    world.stored(worker, 1, [1])
    for end in (
        release(scheduler, pins=True),
        Draining(),
    ):
        world.pin(scheduler, [1], 10)
        assert world.engine.shares.request_pins.used == SLOT
        world.send(end)
        assert not world.engine.shares.request_pins.used
    world.pin(scheduler, [1], 10)
    assert not world.engine.shares.request_pins.used, "it drains"


def test_what_is_over_the_share_is_counted_and_from_the_end() -> None:
    world = make_world(
        slabs=32, write=WritePolicy.OFF, shares=ShareLimits(pinned_bytes_max=32 * SLOT)
    )
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, range(1, 31))
    world.pin(scheduler, range(1, 31), 10)
    # A half of what may be pinned, and of that seven eighths for one session.
    counters = world.engine.counters
    assert (counters.chunks_pinned, counters.pins_refused) == (14, 16)
    assert world.engine.shares.refused == {("pin", "kept"): 1}
    assert {one.chunk.key for one in world.engine.request_pins} == {key(n) for n in range(1, 15)}
    # Loads still get their leases.
    world.lease(scheduler, 7, range(20, 30))
    assert len(world.engine.leases) == 1


def test_of_several_groups_all_that_is_new_is_kept_or_none() -> None:
    """A hit needs chunks of each."""
    world = make_world(
        slabs=64, write=WritePolicy.OFF, shares=ShareLimits(pinned_bytes_max=32 * SLOT)
    )
    worker = world.open(Role.WORKER, other_realms=[1])
    scheduler = world.open(Role.SCHEDULER, other_realms=[1])
    first, other = range(1, 21), range(GROUP_NUMBERS + 1, GROUP_NUMBERS + 21)
    world.stored(worker, 1, [*first, *other])
    world.pin(scheduler, [*first[:3], *other[:3]], 10)
    world.now = 5.0
    world.pin(scheduler, [*first, *other], 10)
    counters = world.engine.counters
    assert (counters.chunks_pinned, counters.pins_refused) == (6, 34)
    kept = {one.chunk.key: one.deadline for one in world.engine.request_pins}
    assert kept == {key(number): 15.0 for number in (*first[:3], *other[:3])}


def test_a_tenant_at_its_limit_can_still_store() -> None:
    rules = TenantRules(named={TENANT: ("a", Quota(host_bytes_max=6 * SLOT))})
    world, worker, scheduler = keeping(slots=16, tenants=Tenants(rules))
    world.stored(worker, 1, range(1, 7), tenant=TENANT)
    world.pin(scheduler, range(1, 7), 10, tenant=TENANT)
    assert world.engine.counters.pins_refused == 3
    assert world.engine.shares.refused == {("pin", "tenant"): 1}
    commands = world.store(worker, 2, [50, 51, 52], tenant=TENANT)
    assert len(only(commands, Gather)) == 3


def test_before_a_worker_has_attached_there_is_nothing_to_pin() -> None:
    world = no_writes()
    scheduler = world.open(Role.SCHEDULER)
    world.pin(scheduler, [1, 2], 10)
    assert world.engine.counters.pins_refused == 2


def test_a_corrupt_chunk_goes_all_the_same() -> None:
    world, worker, scheduler = keeping()
    world.stored(worker, 1, [1])
    world.pin(scheduler, [1], 10)
    world.load(worker, 2, [1])
    told = world.copied(next(iter(world.scatters)), outcome=Outcome.CORRUPT)
    assert messages(told, worker) == done(2, Outcome.CORRUPT)
    assert not world.index
    world.now = 11.0
    world.send(Tick())
    assert not world.engine.shares.request_pins.used


@pytest.mark.parametrize("gone", ["expired", "corrupt"])
def test_what_is_gone_is_charged_to_nobody(gone: str) -> None:
    rules = TenantRules(named={TENANT: ("a", Quota(host_bytes_max=4 * SLOT))})
    world, worker, scheduler = keeping(tenants=Tenants(rules))
    second = world.open(Role.SCHEDULER, engine_id="b")
    world.stored(worker, 1, [1], tenant=TENANT, ttl_seconds=5.0)
    before = world.engine.shares.memory.used
    for session in (scheduler, second):
        world.pin(session, [1], 3600, tenant=TENANT)
    world.pin(scheduler, [2], 3600)
    if gone == "expired":
        world.now = 5.0
        world.send(Tick())
    else:
        world.load(worker, 2, [1])
        world.copied(next(iter(world.scatters)), outcome=Outcome.CORRUPT)
    shares = world.engine.shares
    assert [one.chunk.key for one in world.engine.request_pins] == [key(2)]
    assert (shares.request_pins.used, shares.pinned.used) == (SLOT, SLOT)
    # It is a new chunk that is stored again. It is pinned when a request asks for it.
    world.stored(worker, 3, [1], tenant=TENANT)
    world.pin(scheduler, [1], 3600, tenant=TENANT)
    assert world.engine.counters.pins_refused == 0
    world.send(release(scheduler, pins=True))
    assert (shares.request_pins.used, shares.memory.used) == (0, before)
