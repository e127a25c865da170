"""What the tests of an engine's second life begin with: a world that holds chunks."""

from __future__ import annotations

from typing import Any

from sidecar.core.commands import Command, Scatter
from sidecar.protocol import Role
from tests.sidecar.engine_answers import only
from tests.sidecar.engine_world import World
from tests.sidecar.worlds import no_writes


def numbers(names: object) -> list[int]:
    """Chunk numbers of an eviction order."""
    assert isinstance(names, list)
    return [int.from_bytes(name[1], "little") for name in names]


def holding(count: int, **changes: Any) -> tuple[World, int]:
    """A world whose only worker has stored chunks 1 to `count`."""
    world = no_writes(**changes)
    worker = world.open(Role.WORKER)
    world.stored(worker, 1, range(1, count + 1))
    return world, worker


def load(world: World, worker: int, number: int, job_id: int) -> list[Command]:
    [scatter] = only(world.load(worker, job_id, [number]), Scatter)
    return world.copied(scatter.copy_id)
