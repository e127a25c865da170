"""The kill matrix: SIGKILL and SIGSTOP of every process, at every stage of the cache's work.

Each cell brings a stage about, sees that it is under way, strikes, and then expects the same:
every request completes or says at once that its engine is dead; tokens, log probabilities and KV
bytes are the oracle's; the engine beside it is undisturbed; what can come back is attached again;
and nothing is left over. The table of all cells is printed at the end (`make kill-matrix`).
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final

import pytest
from anyio.from_thread import start_blocking_portal

from sidecar.exits import Exit
from sidecar.protocol import Role
from tests.e2e.arms import empty, fresh_salt, idle
from tests.e2e.kill_seams import CONNECTOR
from tests.e2e.kill_stages import STAGES, Staged
from tests.e2e.kill_table import (
    OF_HOST_TIER,
    ROWS,
    TELLING,
    Backend,
    Cell,
    Row,
    Signal,
    Stage,
    Victim,
    in_order_of_running,
)
from tests.e2e.kill_world import World
from tests.e2e.leftovers import mappings_of
from tests.e2e.waiting import until
from tests.faulty_proxy import faulty_proxy
from tests.harness.engine import EngineFailed
from tests.harness.servers import s3_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.kill_seams import Seam
    from tests.harness.engine import Generation

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.promise("connector", "kill-matrix")]

STOP_SECONDS: Final = 3.0
"""Longer than each deadline of the configuration."""
STOP_SECONDS_ATTACH: Final = 6.0
"""Longer than a client waits for an answer to its attach."""
COPIES: Final = (Stage.LOAD, Stage.STORE)


@pytest.fixture(scope="module")
def seam() -> Seam:
    return CONNECTOR


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, folder: Path, model: str, seam: Seam) -> Iterator[World]:
    kills = sum(is_kill(item) for item in request.session.items if item.path == request.path)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(s3_server(folder))
        portal = stack.enter_context(start_blocking_portal())
        proxy = stack.enter_context(
            portal.wrap_async_context_manager(faulty_proxy(server.endpoint))
        )
        world = World(seam, folder, model, server, proxy, portal, kills=kills)
        stack.callback(world.close)
        yield world


def is_kill(item: pytest.Item) -> bool:
    if item.get_closest_marker("skip"):
        return False
    cell = (
        item.callspec.params.get("cell")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else None
    )
    return isinstance(cell, Cell) and cell.kills_an_engine


@pytest.fixture
def row(request: pytest.FixtureRequest, cell: Cell) -> Row:
    row = request.config.stash[ROWS][cell] = Row.of(cell)
    return row


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=[] if cell in TELLING else [pytest.mark.nightly], id=str(cell))
        for cell in in_order_of_running(Backend.CONNECTOR)
    ],
)
def test_cell(world: World, cell: Cell, row: Row) -> None:
    check_cell(world, cell, row)


def check_cell(world: World, cell: Cell, row: Row) -> None:
    """One experiment, of either matrix."""
    world.repair()
    for party in (world.victim, world.witness):
        empty(party.engine)
    staged = STAGES[cell.stage](world, cell)
    row.struck_at = staged.seen
    assert staged.still(), f"{cell.stage} was over before the signal"
    match cell.victim:
        case Victim.SIDECAR:
            strike_sidecar(world, cell, staged, row)
        case Victim.WORKER | Victim.CORE:
            strike = kill_engine if cell.signal is Signal.KILL else stop_engine
            strike(world, cell, staged, row)
        case Victim.S3:
            strike_server(world, cell, staged, row)
    check_all_is_well(world, row)
    row.outcome = "ok"


def strike_sidecar(world: World, cell: Cell, staged: Staged, row: Row) -> None:
    world.strike(cell.victim, cell.signal)
    struck = time.monotonic()
    stopped = cell.signal is Signal.STOP
    # A copy that is stopped half-way holds the fence page's lock, so its blocks must wait for it.
    # vLLM's own offloading does not: what the sidecar may still write to is no block of it.
    waits = stopped and cell.stage is Stage.LOAD and world.seam.shares_blocks
    if cell.stage in OF_HOST_TIER:
        # The engine itself is held.
        world.let_go()
    if not waits:
        row.requests = finished(world, staged)
    # It had this prompt in the sidecar's memory: nothing that it does there may hang.
    row.others = told(world.generate(world.witness, world.sealed_salt))
    if stopped:
        sleep_until_late(struck, cell)
        if waits:
            # Once one of its loads is late, the engine sends no others.
            own = told(world.generate(world.victim, world.sealed_salt))
            row.others = f"{row.others}; its own engine: {own}"
        world.let_go()
        world.resume()
        if cell.stage is Stage.DRAIN:
            world.drained()
    if waits:
        row.requests = f"waited for the copy, then {finished(world, staged)}"
    if not stopped or cell.stage is Stage.DRAIN:
        world.let_go()
        world.restart_sidecar()
    row.back = f"{world.wait_attached():.2f}"


def kill_engine(world: World, cell: Cell, staged: Staged, row: Row) -> None:
    """Either process takes the engine with it; the sidecar and the other engine go on."""
    sharer = world.victim.clients[Role.WORKER]
    (memory,) = [inode for inode, name in mappings_of(sharer) if name == world.seam.memory]
    world.strike(cell.victim, cell.signal)
    row.requests = ended(world, staged)
    world.wait(
        "the dead engine's sessions, leases and lookups end",
        lambda status: len(status["sessions"]) == 2 and not status["leases"] + status["lookups"],
    )
    if cell.stage in COPIES:
        assert memory in mapped_by_sidecar(world), "unmapped under a copy that runs"
    if cell.stage is not Stage.DRAIN:
        row.others = f"{world.served(world.witness)} tokens loaded"
    world.let_go()
    until("its memory is unmapped", lambda: memory not in mapped_by_sidecar(world))
    if cell.stage is Stage.DRAIN:
        row.others = told(world.generate(world.witness, fresh_salt()))
        world.drained()
        world.restart_sidecar()
        until("the witness is back", lambda: world.attached() >= world.witness.clients.items())
        world.served(world.witness)
    world.wait("everything ended", idle)
    check_ledger(world)
    left = world.replace_victim()
    row.left = f"{left} of vLLM's own in /dev/shm; " if left else ""
    row.back = f"{world.wait_attached():.2f}"
    # Under a salt that the dead engine's sidecar or the engine beside it sealed.
    world.finds(world.victim)
    row.requests += "; its successor hits"


def stop_engine(world: World, cell: Cell, staged: Staged, row: Row) -> None:
    """Nothing waits for a stopped engine, and it goes on where it was."""
    world.strike(cell.victim, cell.signal)
    struck = time.monotonic()
    if cell.stage is not Stage.DRAIN:
        row.others = f"{world.served(world.witness)} tokens loaded"
    world.let_go()
    if cell.stage is Stage.DRAIN:
        row.others = told(world.generate(world.witness, fresh_salt()))
        world.drained()
        world.restart_sidecar()
    else:
        world.wait("what the sidecar did for it ends without it", idle)
    sleep_until_late(struck, cell)
    world.resume()
    row.requests = finished(world, staged)
    row.back = f"{world.wait_attached():.2f}"


def strike_server(world: World, cell: Cell, staged: Staged, row: Row) -> None:
    """Host memory goes on without the store, and the store is used again when it is back."""
    world.strike(cell.victim, cell.signal)
    struck = time.monotonic()
    world.let_go()
    row.requests = finished(world, staged)
    if cell.stage is Stage.DRAIN:
        row.others = told(world.generate(world.witness, fresh_salt()))
        # What waits to be written waits until the time is over, and that is told.
        world.drained(Exit.LOSS)
    else:
        row.others = f"{world.served(world.witness)} tokens loaded"
    if cell.signal is Signal.STOP:
        sleep_until_late(struck, cell)
        world.resume()
    else:
        world.server.restart()
    if cell.stage is Stage.DRAIN:
        world.restart_sidecar()
    row.back = f"{world.wait_attached():.2f}"


# --- what must hold after every cell -------------------------------------------------------------


def check_all_is_well(world: World, row: Row) -> None:
    world.wait("the store is well", lambda status: status["tiers"]["store"]["state"] == "ok")
    for party in (world.victim, world.witness):
        world.served(party)
    row.equal = "tokens, log probabilities, KV bytes"
    world.wait("everything ended", idle)
    check_ledger(world)
    left = world.leftovers()
    row.left += "; ".join(left) or "nothing"
    assert not left


def check_ledger(world: World) -> None:
    status = world.status()
    host, counters = status["tiers"]["host"], status["counters"]
    used = sum(one["slots_used"] for one in host["classes"])
    assert used == host["chunks"], "a slot is in use that holds no chunk"
    assert counters["quarantined_host"] == counters["quarantined_store"] == 0


def finished(world: World, staged: Staged) -> str:
    """All requests completed, and were right; how, in words."""
    generations = [world.finish(world.victim, handle) for handle in staged.handles]
    staged.handles.clear()
    world.check_bytes(world.victim)
    return ", ".join(told(generation) for generation in generations)


def ended(world: World, staged: Staged) -> str:
    """All requests completed, or vLLM said that their engine is dead."""
    said: list[str] = []
    for handle in staged.handles:
        started = time.monotonic()
        try:
            said.append(told(world.finish(world.victim, handle)))
        except EngineFailed as failed:
            assert "EngineDeadError" in str(failed)  # noqa: PT017 (others may complete)
            said.append(f"engine dead, said after {time.monotonic() - started:.1f} s")
    staged.handles.clear()
    return ", ".join(said)


def told(generation: Generation) -> str:
    if generation.cached_tokens:
        return f"{generation.cached_tokens} tokens loaded"
    return "computed"


def mapped_by_sidecar(world: World) -> set[int]:
    return {inode for inode, _ in mappings_of(world.pid_of(Victim.SIDECAR))}


def sleep_until_late(struck: float, cell: Cell) -> None:
    seconds = STOP_SECONDS_ATTACH if cell.stage is Stage.ATTACH else STOP_SECONDS
    time.sleep(max(0.0, struck + seconds - time.monotonic()))
