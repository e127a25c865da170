"""Models with slots of different sizes share host memory."""

from __future__ import annotations

import pytest

from sidecar.protocol import Role
from tests.sidecar.engine_world import World
from tests.sidecar.restoring import holding
from tests.sidecar.strict_pool import StrictLRU
from tests.sidecar.worlds import no_writes
from tiers.policy import POLICIES

SLOTS = 120


def hosted(world: World, realm_id: int) -> int:
    return world.engine.directory.realms[realm_id].hosted_chunks


@pytest.mark.parametrize(("policy", "share"), [("lru", 0.95), ("density", 0.5)])
@pytest.mark.parametrize("slab_slots", [1, 4])
def test_memory_of_an_idle_model_becomes_anothers(
    slab_slots: int, policy: str, share: float
) -> None:
    """Only chunks of the new model's own size were evicted, its own, for as long as it ran."""
    world = no_writes(slabs=SLOTS // slab_slots, slab_slots=slab_slots, policy=POLICIES[policy]())
    idle = world.open(Role.WORKER)
    world.stored(idle, 1, range(1, SLOTS + 1))
    used = world.open(Role.WORKER, realm_id=1, content_bytes=64)
    for job, first in enumerate(range(1, 2 * SLOTS, 20), start=2):
        world.stored(used, job, range(first, first + 20))
    assert hosted(world, 0) + hosted(world, 1) <= SLOTS
    # `density` may think that the chunks of both are as likely to be used.
    assert hosted(world, 1) >= share * SLOTS
    assert world.engine.counters.stores_dropped_full <= slab_slots


def test_a_store_takes_unclaimed_slots_before_it_evicts() -> None:
    """With slabs of many small slots, some were left, and what had just been stored went."""
    world, _ = holding(256, slabs=2, slab_slots=128)
    world.restart(StrictLRU())
    other = world.open(Role.WORKER, realm_id=1, content_bytes=64)
    world.stored(other, 1, [1, 2, 3])
    assert hosted(world, 1) == 3
    assert world.engine.counters.chunks_evicted == 0
    assert world.engine.counters.stores_dropped_full == 0
