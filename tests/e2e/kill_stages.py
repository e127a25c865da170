"""The stages of the kill matrix: what is under way when the signal is sent, and how that is known.

Each stage is brought about by something real that takes its time: an attach that the sidecar has
read and not answered, a copy between two of its pieces, a request to the S3 server of which half
has passed. It stays so until `World.let_go`, and `Staged.still` says whether it is so now.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from sidecar.protocol import Role
from tests.e2e.arms import empty, fresh_salt
from tests.e2e.holds import COPY_IN, COPY_OUT, LOAD, STORE, attach_as
from tests.e2e.kill_table import Cell, Stage, Victim
from tests.e2e.kill_world import TRIES_MAX
from tests.e2e.waiting import WAIT_SECONDS_MAX, until, until_or_not
from tests.faulty_proxy import CHUNK, Fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.e2e.kill_world import World

READS: Final = f"^GET .*{CHUNK}"
WRITES: Final = f"^PUT .*{CHUNK}"


@dataclass
class Staged:
    """A stage that is under way."""

    handles: list[int]
    """Requests of the victim's engine that have not been finished."""
    seen: str
    """What was seen of it, for the table."""
    still: Callable[[], bool]


def attach(world: World, cell: Cell) -> Staged:
    """A process of the engine attaches again, and a request comes meanwhile."""
    role = Role.SCHEDULER if cell.victim is Victim.CORE else Role.WORKER
    pid = world.victim.clients[role]
    who = "worker's attach" if pid == world.victim.worker else "engine core's attach"
    if (role, pid) == (Role.WORKER, world.victim.core):
        who += " as worker"
    world.holds.hold(attach_as(role), pid)
    world.holds.hang_up(role, pid)

    def attaching() -> bool:
        return world.holds.held(attach_as(role), pid) and (role, pid) not in world.attached()

    until("an attach is held", attaching)
    handle = world.begin(world.victim, fresh_salt())
    return Staged([handle], f"the {who} is read, not answered", attaching)


def lookup(world: World, cell: Cell) -> Staged:
    """A request waits for chunks that are being read from the bucket."""

    def reading() -> bool:
        status = world.status()
        asked = status["lookups"] and status["pending"]["reads_running"]
        return bool(asked and world.proxy.holding)

    for _ in range(TRIES_MAX):
        # One that was held before took the store for slow, and would not read.
        world.renew_sidecar()
        empty(world.victim.engine)
        salt = world.store_salts.pop()
        world.wait("the bucket is listed", lambda status: _listed(status, world.seam.chunks))
        world.become(Fault.HOLD, READS)
        handle = world.begin(world.victim, salt)
        if until_or_not(reading, WAIT_SECONDS_MAX / TRIES_MAX):
            return Staged([handle], f"{len(world.proxy.holding)} GET half-way", reading)
        # Its time was over before a busy machine read, or looked.
        world.let_go()
        world.finish(world.victim, handle)
    raise AssertionError(f"no object is read in {TRIES_MAX} tries; {world.status()}")


def load(world: World, cell: Cell) -> Staged:
    """A chunk is being copied by the sidecar into what the engine shares with it."""
    return _copying(world, LOAD, _stored(world))


def store(world: World, cell: Cell) -> Staged:
    """A chunk is being copied by the sidecar from what the engine shares with it."""
    return _copying(world, STORE, fresh_salt())


def copy_in(world: World, cell: Cell) -> Staged:
    """Chunks are being copied by vLLM's worker from its host tier into the engine's blocks."""
    return _copying_inside(world, COPY_IN, _stored(world))


def copy_out(world: World, cell: Cell) -> Staged:
    """Chunks are being copied by vLLM's worker from the engine's blocks to its host tier."""
    return _copying_inside(world, COPY_OUT, fresh_salt())


def _stored(world: World) -> str:
    salt = world.sealed(world.victim)
    empty(world.victim.engine)
    return salt


def _copying_inside(world: World, step: str, salt: str) -> Staged:
    pid = world.victim.worker
    world.holds.hold(step, pid)
    handle = world.begin(world.victim, salt)

    def copying() -> bool:
        return world.holds.held(step, pid)

    until(f"a {step} is held", copying)
    way = "into blocks" if step == COPY_IN else "out of blocks"
    return Staged([handle], f"a copy {way} between two layers", copying)


def _copying(world: World, step: str, salt: str) -> Staged:
    pid = world.victim.clients[Role.WORKER]
    world.holds.hold(step, pid)
    handle = world.begin(world.victim, salt)
    until(f"a {step} is held", lambda: world.holds.held(step, pid))

    def copying() -> bool:
        running = world.status()["pending"]["copies_running"]
        return bool(running) and world.holds.held(step, pid)

    return Staged([handle], f"a {step} between two pieces of a chunk", copying)


def write(world: World, cell: Cell) -> Staged:
    """Chunks are being written to the bucket, others wait, and a request comes meanwhile."""
    world.become(Fault.HOLD, WRITES)
    world.generate(world.victim, fresh_salt())

    def writing() -> bool:
        return bool(world.status()["pending"]["writes_running"] and world.proxy.holding)

    until("objects are being written", writing)
    handle = world.begin(world.victim, fresh_salt())
    return Staged([handle], f"{len(world.proxy.holding)} PUT half-way", writing)


def drain(world: World, cell: Cell) -> Staged:
    """The sidecar was told to stop and has still to write; a request comes meanwhile."""
    world.become(Fault.HOLD, WRITES)
    world.generate(world.victim, fresh_salt())
    until("objects are being written", lambda: bool(world.proxy.holding))
    os.kill(world.pid_of(Victim.SIDECAR), signal.SIGTERM)

    def draining() -> bool:
        status = world.status()
        running = status["pending"]["writes_running"] and world.proxy.holding
        return bool(status["state"] == "draining" and running)

    until("the sidecar drains", draining)
    handle = world.begin(world.victim, fresh_salt())
    return Staged([handle], f"draining, {len(world.proxy.holding)} PUT half-way", draining)


def _listed(status: dict[str, Any], chunks: int) -> bool:
    """The catalog was read whole: the number of chunks alone may be that of one of its files."""
    store = status["tiers"]["store"]
    return bool(store["listings"] and store["chunks"] >= chunks)


STAGES: Final[dict[Stage, Callable[[World, Cell], Staged]]] = {
    Stage.ATTACH: attach,
    Stage.LOOKUP: lookup,
    Stage.LOAD: load,
    Stage.STORE: store,
    Stage.WRITE: write,
    Stage.DRAIN: drain,
    Stage.COPY_IN: copy_in,
    Stage.COPY_OUT: copy_out,
}
