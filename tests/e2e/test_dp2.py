"""Two data-parallel ranks on one sidecar: to it they are two engines of one model."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e import telling
from tests.e2e.arms import (
    BLOCK_TOKENS,
    KV_BYTES_PER_TOKEN,
    SESSIONS,
    Call,
    Measured,
    check_equal,
    close,
    counters,
    empty,
    external_hit,
    fresh_salt,
    idle,
    own_hit,
    words,
)
from tests.e2e.setups import SMALL, sidecar_in
from tests.e2e.waiting import until
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.subscriber import Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-data-parallel")]

RANKS: Final = 2
TOKENS: Final = 1500
WHOLE_TOKENS: Final = 1472


@pytest.fixture(scope="module")
def sidecar(folder: Path) -> Iterator[SidecarProcess]:
    with sidecar_in(folder, events={"enabled": True}) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(folder: Path, model: str, sidecar: SidecarProcess) -> Iterator[EngineProcess]:
    engine_args = {**SMALL, "data_parallel_size": RANKS, "kv_events_config": _events()}
    connector = telling.connector_of(sidecar.socket)
    spec = EngineSpec(model, sidecar.socket, engine_args, connector, threads_bind="0|1")
    with EngineProcess(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attach_ranks(engine, sidecar)
        yield engine
        empty(engine)
        sidecar.wait("everything ended", idle)


def _events() -> dict[str, Any]:
    """An engine's `kv_events_config`: vLLM counts ports up, by ranks, and takes no files for them.

    Ports in a row that nobody has, below those that the system itself hands out.
    """
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + 2 * RANKS):
                stack.enter_context(socket.socket()).bind(("", port))
            return {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{first}",
                "replay_endpoint": f"tcp://*:{first + RANKS}",
            }


def attach_ranks(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """Wait until all ranks are attached to this sidecar, as both sides see it."""
    sidecar.wait("all attach", lambda now: len(now["sessions"]) == RANKS * SESSIONS)
    for rank in range(RANKS):
        _attached(engine, sidecar, rank)


def _attached(engine: EngineProcess, sidecar: SidecarProcess, rank: int) -> None:
    """The sidecar knows a session a moment before the engine does: a store proves it is there."""
    before = counters(sidecar)["chunks_stored"]

    def stored() -> bool:
        engine.generate(
            words(2 * BLOCK_TOKENS, 1), max_tokens=1, cache_salt=fresh_salt(), rank=rank
        )
        engine.reset_prefix_cache()
        return counters(sidecar)["chunks_stored"] > before

    until(f"rank {rank} stores", stored)


def _of(rank: int, measured: Measured) -> Measured:
    """As its rank sees it; the other one's memory is as it was, poison."""
    assert not any(blocks for other, blocks in enumerate(measured.blocks) if other != rank)
    return Measured(measured.generation, [measured.blocks[rank]], measured.salt)


@pytest.mark.promise("data-parallel")
def test_each_rank_is_an_engine_of_its_own(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    sessions = sidecar.status()["sessions"]
    roles: dict[str, list[str]] = {}
    for session in sessions:
        roles.setdefault(session["engine_id"], []).append(session["role"])
    assert [name.rpartition("_")[2] for name in sorted(roles)] == ["dp0", "dp1"]
    assert all(sorted(of) == ["scheduler", "worker"] for of in roles.values())
    assert len(sidecar.status()["realms"]) == 1, "they share their chunks"


@pytest.mark.promise("data-parallel")
@pytest.mark.parametrize("reader", range(RANKS))
def test_a_prompt_of_one_rank_is_a_hit_in_the_other(
    engine: EngineProcess, sidecar: SidecarProcess, reader: int
) -> None:
    prompt = words(TOKENS, 10 + reader)
    here, there = (Call(prompt, options={"rank": rank}) for rank in (reader, 1 - reader))
    oracle = _of(reader, own_hit(engine, here, before=[here]))
    before = counters(sidecar)["bytes_loaded"]
    measured = _of(reader, external_hit(engine, here, before=[there]))
    check_equal(measured, oracle)
    assert measured.generation.cached_tokens == WHOLE_TOKENS
    assert counters(sidecar)["bytes_loaded"] - before == WHOLE_TOKENS * KV_BYTES_PER_TOKEN


def test_both_ranks_at_once(engine: EngineProcess, sidecar: SidecarProcess) -> None:
    """What either one stored, both load side by side."""
    calls = [Call(words(700, 20 + rank), options={"rank": rank}) for rank in range(RANKS)]
    salt = fresh_salt()
    empty(engine)
    computed = [call.generate(engine, salt) for call in calls]
    empty(engine)
    handles = [
        engine.begin(call.prompt, cache_salt=salt, rank=rank)
        for rank in range(RANKS)
        for call in calls
    ]
    for handle, expected in zip(handles, computed * RANKS, strict=True):
        generation = engine.finish(handle)
        assert generation.cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS
        # Beside another request it is computed in other shapes.
        assert close(generation, expected)


@pytest.mark.promise("events-engine")
def test_what_each_ranks_own_cache_holds_is_told(
    engine: EngineProcess, sidecar: SidecarProcess
) -> None:
    """By vLLM's hashes, under the rank's name and number."""
    salt = fresh_salt()
    for rank in range(RANKS):
        engine.generate(words(600, 30 + rank), max_tokens=1, cache_salt=salt, rank=rank)
    events = sidecar.status()["events"]
    owners = sorted(one["owner"] for one in events["engines"])
    assert [owner.rpartition("_")[2] for owner in owners] == ["dp0", "dp1"]
    held = [set(telling.copies_of(engine, rank)) for rank in range(RANKS)]
    assert all(len(blocks) >= 600 // BLOCK_TOKENS for blocks in held)
    assert held[0] != held[1]
    follower = Subscriber(events["endpoint"], events["replay_endpoint"])
    try:
        follower.until(lambda: [telling.followed(follower, "GPU", one) for one in owners] == held)
        assert [follower.ranks[owner] for owner in owners] == list(range(RANKS))
    finally:
        follower.close()
