"""The index says why a chunk is in no tier any more, of the last ones that left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sidecar.core.commands import Command, IndexSet, SessionClosed, StoreOutcome
from sidecar.core.outbox import WritePolicy
from sidecar.core.retention import Gone
from sidecar.core.tenants import Quota, TenantRules, Tenants
from sidecar.protocol import Outcome, Role
from tests.sidecar.engine_names import RANK_0, key, layout
from tests.sidecar.engine_world import World
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import looking, make_world, no_writes

pytestmark = pytest.mark.promise("prompt-tokens")

TENANT = b"a tenant"


def gone(commands: Sequence[Command]) -> dict[bytes, Gone | None]:
    """What the index says of the chunks that these commands take out of all tiers."""
    found = [one for one in commands if isinstance(one, IndexSet)]
    return {one.key: one.gone for one in found if not one.in_host and not one.in_store}


def left(world: World) -> dict[bytes, Gone]:
    """What the index says now."""
    return {key: why for (_, key), why in world.gone.items()}


def test_a_chunk_that_made_room() -> None:
    world = no_writes(slabs=2, gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1, 2])
    assert gone(world.store(worker, 2, [3])) == {key(1): Gone.EVICTED}
    assert left(world) == {key(1): Gone.EVICTED}


def refusing(write: WritePolicy, **options: Any) -> tuple[World, int]:
    """A host tier of one slot that holds chunk 1, whose policy refuses chunk 2."""
    policy = StrictLRU()
    policy.refused.add((0, key(2)))
    world = make_world(slabs=1, policy=policy, write=write, gone_keys_max=8, **options)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    return world, worker


def test_a_chunk_that_the_policy_refuses() -> None:
    world, worker = refusing(WritePolicy.OFF)
    assert gone(world.store(worker, 2, [2])) == {key(2): Gone.EVICTED}
    assert left(world) == {key(2): Gone.EVICTED}
    world.now = 5.0
    assert gone(world.store(worker, 3, [2])) == {}, "the index says so already"
    assert world.engine.gone.since(0, key(2)) == 5.0
    assert isinstance(world.policy, StrictLRU)
    world.policy.refused.clear()
    world.use(world.open(Role.SCHEDULER), [2])
    world.stored(worker, 4, [2])
    assert left(world) == {key(1): Gone.EVICTED}, "the second is there"


def test_a_chunk_that_the_store_has_is_not_gone_when_it_is_refused() -> None:
    world, worker = refusing(WritePolicy.OFF)
    world.listed({2: RANK_0})
    assert gone(world.store(worker, 2, [2])) == {}
    assert left(world) == {}


def test_a_chunk_that_is_refused_and_copied_for_the_store() -> None:
    """It goes first, here before it was written."""
    world, worker = refusing(WritePolicy.THROUGH, writes_inflight_max=0)
    world.stored(worker, 2, [2])
    assert left(world) == {key(1): Gone.EVICTED}
    assert gone(world.store(worker, 3, [3])) == {key(2): Gone.EVICTED}


def test_a_chunk_that_finds_no_room() -> None:
    world = no_writes(slabs=1, gone_keys_max=8)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1])
    world.lease(scheduler, 1, [1])
    assert gone(world.store(worker, 2, [2])) == {key(2): Gone.EVICTED}


def test_a_chunk_that_its_tenants_limit_has_no_room_for() -> None:
    rules = TenantRules(named={TENANT: ("named", Quota(host_bytes_max=1))})
    world = no_writes(tenants=Tenants(rules), gone_keys_max=8)
    worker = world.open(Role.WORKER)
    assert gone(world.store(worker, 1, [1], tenant=TENANT)) == {key(1): Gone.QUOTA}


def test_a_part_of_a_chunk_that_made_room() -> None:
    """The other rank never stored its own, so no engine ever found the chunk."""
    world = no_writes(slabs=1, gone_keys_max=8)
    first = world.open(Role.WORKER, rank=0, world_size=2)
    world.stored(first, 1, [1])
    assert gone(world.store(first, 2, [2])) == {key(1): Gone.EVICTED}


def test_a_chunk_that_comes_back_is_not_gone() -> None:
    world = no_writes(slabs=1, gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    world.stored(worker, 3, [1])
    assert left(world) == {key(2): Gone.EVICTED}
    # One that the store is listed to have is there, and stays so when the memory is full.
    world.listed({2: RANK_0})
    assert left(world) == {}
    for number in range(3, 13):
        world.stored(worker, number + 1, [number])
    assert world.index[0, key(2)] == (False, True)


def test_only_the_last_ones_are_remembered() -> None:
    world = no_writes(slabs=1, gone_keys_max=3)
    worker = world.open(Role.WORKER)
    for number in range(1, 8):
        world.stored(worker, number, [number])
    assert left(world) == dict.fromkeys((key(4), key(5), key(6)), Gone.EVICTED)
    assert len(world.engine.gone) == 3


def test_nothing_is_remembered_if_the_limit_says_so() -> None:
    world = no_writes(slabs=1, gone_keys_max=0)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    assert gone(world.store(worker, 2, [2])) == {key(1): None}


def test_a_chunk_whose_time_is_over() -> None:
    world = no_writes(gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], ttl_seconds=5)
    world.now = 6.0
    assert gone(world.store(worker, 2, [2])) == {key(1): Gone.EXPIRED}


def test_a_chunk_of_a_tenant_at_its_limit() -> None:
    slot = layout(0).payload_bytes(2)
    rules = TenantRules(named={TENANT: ("named", Quota(host_bytes_max=slot))})
    world = make_world(tenants=Tenants(rules), gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], tenant=TENANT)
    [write] = world.writes
    world.written(write)
    assert gone(world.store(worker, 2, [3], tenant=TENANT)) == {}, "the store has it"
    world = no_writes(tenants=Tenants(rules), gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1], tenant=TENANT)
    assert gone(world.store(worker, 2, [3], tenant=TENANT)) == {key(1): Gone.QUOTA}


def test_a_damaged_chunk_is_not_remembered() -> None:
    world = no_writes(gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.load(worker, 2, [1])
    [scatter] = world.scatters
    assert gone(world.copied(scatter, outcome=Outcome.CORRUPT)) == {key(1): None}


def test_a_chunk_that_left_the_store() -> None:
    world, _, scheduler = looking(gone_keys_max=8)
    world.listed({1: RANK_0})
    world.look_up(scheduler, 1, [1])
    [read] = world.reads
    assert gone(world.read_done(read, StoreOutcome.MISSING)) == {key(1): Gone.EVICTED}


def test_a_forgotten_realm() -> None:
    """`service/realm_eviction.py` takes its chunks out of an index that stays."""
    world = no_writes(slabs=1, gone_keys_max=8)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, [1])
    world.stored(worker, 2, [2])
    other = world.open(Role.WORKER, realm_id=1)
    world.send(SessionClosed(other))
    assert world.forget_realms(1) == {1}
    assert world.engine.gone.of(0) == [key(1)]
    world.send(SessionClosed(worker))
    assert world.forget_realms(0) == set(), "its last chunk is evicted first"
    assert world.forget_realms(0) == {0}
    assert not world.engine.gone.of(0)
