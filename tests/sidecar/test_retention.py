"""Chunks that are to be forgotten after a time, or that stay on their node."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from sidecar.core.commands import Gather, Scatter, Tick, Write
from sidecar.core.directory import Chunk, Directory
from sidecar.core.outbox import WritePolicy
from sidecar.core.retention import Expiries, Retention, read_tag, slot_tag
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Events, Outcome, RemovedEvent, Role
from tests.sidecar.engine_answers import done, messages, only
from tests.sidecar.engine_names import EPOCH, key, layout, slot_bytes_of
from tests.sidecar.engine_world import World
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import make_world, no_writes

TENANT = b"a tenant"


def pass_time(world: World, seconds: float) -> list[Any]:
    world.now += seconds
    return world.send(Tick())


# --- the tag of a slot ---------------------------------------------------------------------------


@given(
    st.sampled_from([b"", TENANT]),
    st.just(math.inf) | st.floats(0.001, 1e9),
    st.booleans(),
)
def test_a_tag_says_what_was_put_in(tenant: bytes, expires_at: float, stays: bool) -> None:
    tag = slot_tag(tenant, Retention(expires_at, stays=stays))
    assert len(tag) == 16
    found_tenant, found, uses = read_tag(tag)
    assert uses == 0
    assert (found_tenant, found.stays) == (tenant, stays)
    assert found.expires_at == expires_at or 0 <= expires_at - found.expires_at <= 0.001


def test_a_tag_of_an_earlier_release_says_nothing() -> None:
    assert read_tag(TENANT + bytes(8)) == (TENANT, Retention(), 0)
    assert read_tag(bytes(16)) == (b"", Retention(), 0)


def test_the_last_bits_of_a_tag_are_its_uses() -> None:
    tag = slot_tag(TENANT, Retention(1000.0, stays=True))
    used = tag[:-1] + bytes([tag[-1] | 15 << 4])
    assert read_tag(used) == (TENANT, Retention(1000.0, stays=True), 15)


# --- being forgotten -----------------------------------------------------------------------------


def test_a_chunk_is_gone_after_its_time_and_told_so() -> None:
    world = make_world()
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER, want_events=True)
    world.stored(worker, 1, [1], ttl_seconds=5)
    world.stored(worker, 2, [2])
    assert not only(pass_time(world, 4.9), Scatter)
    assert (0, key(1)) in world.index
    told = messages(pass_time(world, 0.1), scheduler)
    assert told == [Events(EPOCH, [], [RemovedEvent(key(1), "host")])]
    assert (0, key(1)) not in world.index
    assert (0, key(2)) in world.index
    assert world.engine.counters.chunks_expired == 1


def test_a_chunk_that_is_listed_as_its_time_ends_counts_once() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    world.now = 5.0
    world.listed({1: frozenset({0})})
    assert world.engine.directory.chunks_in_store == 1


def test_no_load_begins_after_its_time_even_between_two_ticks() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    world.now = 5.0
    assert messages(world.load(worker, 2, [1]), worker) == done(2, Outcome.MISSING)


def test_a_load_that_runs_ends_before_its_slot_is_freed() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    [scatter] = only(world.load(worker, 2, [1]), Scatter)
    pass_time(world, 6)
    assert len(world.engine.host.zombies) == 1
    assert messages(world.copied(scatter.copy_id), worker) == done(2, Outcome.OK)
    assert len(world.engine.host.allocated) == 0


def test_a_pin_or_a_lease_is_no_way_around_it() -> None:
    world = no_writes()
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    world.pin(scheduler, [1], 60)
    world.lease(scheduler, 9, [1])
    pass_time(world, 5)
    assert not world.index
    pass_time(world, 60)
    assert not world.engine.shares.pinned.used
    assert not world.engine.shares.request_pins.used


def test_a_store_that_ends_after_its_time_keeps_nothing() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    [gather] = only(world.store(worker, 1, [1], ttl_seconds=5), Gather)
    pass_time(world, 6)
    assert messages(world.copied(gather.copy_id), worker) == done(1, Outcome.OK)
    assert not world.index
    assert world.engine.counters.stores_failed == 0, "no alarm: it was asked for"
    assert world.engine.counters.chunks_expired == 1
    assert len(world.engine.host.allocated) == 0


def test_what_is_stored_anew_has_its_own_time() -> None:
    world = no_writes()
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    pass_time(world, 5)
    world.stored(worker, 2, [1])
    pass_time(world, 100)
    assert (0, key(1)) in world.index


def test_the_first_of_two_ranks_times_holds() -> None:
    world = no_writes()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in (0, 1)]
    world.stored(workers[0], 1, [1])
    world.stored(workers[1], 1, [1], ttl_seconds=5)
    assert (0, key(1)) in world.index
    for content in world.content.values():
        assert content.retention == Retention(5.0, stays=True)
    pass_time(world, 5)
    assert not world.index


# --- a restart -----------------------------------------------------------------------------------


@pytest.mark.parametrize("attached", [True, False])
def test_a_restart_changes_nothing(attached: bool) -> None:
    world = no_writes()
    world.stored(world.open(Role.WORKER), 1, [1, 2], ttl_seconds=5)
    world.restart(StrictLRU())
    if attached:
        world.open(Role.WORKER)
        assert (0, key(1)) in world.index
    pass_time(world, 5)
    assert not world.index
    assert not len(world.engine.host.allocated)


def test_what_expired_while_there_was_no_sidecar_does_not_come_back() -> None:
    world = no_writes()
    world.stored(world.open(Role.WORKER), 1, [1], ttl_seconds=5)
    world.now = 5.0
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    assert not world.index
    assert messages(world.load(worker, 2, [1]), worker) == done(2, Outcome.MISSING)


def test_a_tenant_keeps_its_slot_over_a_restart() -> None:
    rules = TenantRules(named={TENANT: ("a", Quota())})
    world = no_writes(tenants=Tenants(rules))
    world.stored(world.open(Role.WORKER), 1, [1], ttl_seconds=50, tenant=TENANT)
    tenants = Tenants(rules)
    world.restart(StrictLRU(), tenants)
    world.open(Role.WORKER)
    assert tenants.account(TENANT).host_bytes == slot_bytes_of(layout(0))


# --- the store -----------------------------------------------------------------------------------


@pytest.mark.promise("host-only")
@pytest.mark.parametrize("options", [{"stays": True}, {"ttl_seconds": 50}])
@pytest.mark.parametrize("policy", [WritePolicy.THROUGH, WritePolicy.ON_REUSE])
def test_it_is_not_written(policy: WritePolicy, options: dict[str, Any]) -> None:
    world = make_world(write=policy)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], **options)
    assert not only(world.store(worker, 2, [1]), Write)
    assert not world.writes
    world.restart(StrictLRU())
    worker = world.open(Role.WORKER)
    world.store(worker, 2, [1])
    world.drain()
    assert world.engine.counters.chunks_written == 0


def test_it_is_not_missed_by_the_store_when_it_is_evicted() -> None:
    world = make_world(slabs=1, write=WritePolicy.ON_EVICT)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], stays=True)
    world.stored(worker, 2, [3], stays=True)
    assert world.engine.counters.chunks_evicted == 1
    assert world.engine.counters.writes_dropped == 0
    world.drain()
    assert world.engine.counters.chunks_written == 0


# --- the order -----------------------------------------------------------------------------------


def test_what_was_evicted_is_not_remembered_for_its_whole_time() -> None:
    """A time of a year would otherwise keep an entry for each chunk that ever was."""
    order = Expiries[Chunk](lambda chunk, _: not chunk.empty)
    realm = Directory(readable=True).open_realm(0, 1)
    for number in range(10_000):
        order.add(1e9, Chunk(realm, key(number), b""))
    assert len(order) < 3000


def test_what_is_not_valid_yet_when_it_is_added_is_not_swept() -> None:
    """A chunk gets its slot only after its time is noted."""
    valid = set[int]()
    order = Expiries[int](lambda number, _: number in valid)
    for number in range(5000):
        order.add(1.0, number)
        valid.add(number)
    assert list(order.due(1.0)) == list(range(5000))
