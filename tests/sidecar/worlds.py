"""The worlds that the engine's tests begin with: their limits, their pool, and who is attached."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sidecar.core.breaker import BreakerRules
from sidecar.core.outbox import EngineLimits, WritePolicy
from sidecar.protocol import Role
from tests.sidecar.engine_names import make_engine
from tests.sidecar.engine_world import World
from tests.sidecar.strict_pool import SlabSlots, StrictLRU

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.core.tenants import Tenants
    from tiers.policy import Policy


def limits(**changes: Any) -> EngineLimits:
    usual = EngineLimits(
        writes_inflight_max=2,
        reads_inflight_max=2,
        write_queue_bytes_max=1 << 30,
        leases_max_per_session=8,
        lease_ttl_seconds_max=10.0,
        lookups_max_per_session=8,
        quarantine_keys_max=8,
        recompute=True,
        regret_max=0.04,
        breaker=BreakerRules(failures_max=1_000_000),
        write=WritePolicy.THROUGH,
        flush_at_end=True,
        store_reads=True,
    )
    return replace(usual, **changes)


def make_world(
    *,
    slabs: int = 8,
    slab_slots: int = 1,
    policy: Policy | None = None,
    tenants: Tenants | None = None,
    admit_write: Callable[[int, bytes, int, int], bool] = lambda _realm, _who, _size, _objects: (
        True
    ),
    room_to_write: Callable[[int, int, int], bool] = lambda _realm, _size, _objects: True,
    **changes: Any,
) -> World:
    slots, bounds = SlabSlots(slabs, slab_slots), limits(**changes)
    policy = StrictLRU() if policy is None else policy
    engine = make_engine(slots, policy, bounds, tenants, admit_write, room_to_write)
    return World(engine, slots, policy, bounds, admit_write)


def no_writes(**changes: Any) -> World:
    return make_world(write=WritePolicy.OFF, **changes)


def looking(**changes: Any) -> tuple[World, int, int]:
    world = make_world(**changes)
    return world, world.open(Role.WORKER), world.open(Role.SCHEDULER)
