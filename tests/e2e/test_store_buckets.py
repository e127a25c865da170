"""Hits from a bucket, and a bucket that lies, fails or hangs.

One engine; sidecars with empty memory take turns on its sockets. A request always ends, and gives
what the engine gives for as many cached tokens.
"""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PATIENT,
    Call,
    Measured,
    Oracle,
    attach,
    check_equal,
    chunk_tokens,
    counters,
    empty,
    idle,
    own_hit,
    same_output,
    words,
)
from tests.e2e.store_cluster import ENGINE_ARGS, _store, again, chunks_of, cluster, engine, listed
from tests.e2e.test_topology import announced, refreshed
from tests.faulty_proxy import CHUNK, Fault, FaultyProxy, faulty_proxy
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["engine"]

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-store"),
]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[S3Server]:
    with s3_server(folder) as server:
        yield server


def _bucket(server: S3Server, endpoint: str = "") -> dict[str, Any]:
    return {"url": server.url, **server.settings_at(endpoint or server.endpoint)}


def test_bucket_serves_another_cluster(
    folder: Path, engine: EngineProcess, server: S3Server
) -> None:
    call = Call(words(3000, 6))
    with cluster(folder, engine, _bucket(server)) as sidecar:
        expected = own_hit(engine, call, before=[call])
    chunks = chunks_of(3000, chunk_tokens(engine))
    with cluster(folder, engine, _bucket(server)) as sidecar:
        listed(sidecar, chunks)
        check_equal(again(engine, call, expected.salt), expected)
        assert counters(sidecar)["chunks_read"] == chunks


def test_two_sidecars_on_one_bucket(
    folder: Path, model: str, engine: EngineProcess, server: S3Server
) -> None:
    """What one cluster writes, the other one's next listing finds: both are running."""
    call = Call(words(1000, 7))
    config = {
        "host": {"size": "64MiB"},
        "store": {"refresh_seconds": "200ms", "recompute": "never", **_bucket(server)},
        "limits": PATIENT,
    }
    with (
        cluster(folder, engine, _bucket(server)) as here,
        SidecarProcess(folder / "t", config) as other,
    ):
        spec = EngineSpec(model, other.socket, ENGINE_ARGS)
        with type(engine)(spec, folder / "other-engine.log") as other_engine:
            other_engine.wait_ready()
            attach(other_engine, other)
            expected = own_hit(engine, call, before=[call])
            # Until every store was answered some may be on their way, and the sidecar idle.
            empty(engine)
            here.wait("everything is written", idle)
            announced(here)
            # Not this many chunks: what its own engine attached with counts, too.
            refreshed(other)
            check_equal(again(other_engine, call, expected.salt), expected)
            assert counters(other)["chunks_read"] == chunks_of(1000, chunk_tokens(engine))


TOKENS: Final = 700
LIMITS: Final = {**PATIENT, "lookup_wait": "10s", "drain_seconds_max": "5s"}
"""A store that stalls ends the wait; one that is well has time, though the machine may pause."""
STORE_SECONDS_MAX: Final = "12s"

FAULTS: Final = [
    *(Fault.REFUSE, Fault.HANG_UP, Fault.STALL, Fault.STALL_BODY),
    *(Fault.SLOW_DOWN, Fault.FORBIDDEN, Fault.TRUNCATE, Fault.WRONG_BYTES),
]
PASSING: Final = [Fault.SLOW_DOWN, Fault.HANG_UP]
CHUNK_READ: Final = f"^GET .*{CHUNK}"
Prompt = tuple[Oracle, Measured]
"""A prompt that the bucket holds, with what its hit must give."""


def _prompts(request: pytest.FixtureRequest) -> int:
    """How many the cases of the class use."""
    assert request.cls is not None
    skipped = () if request.config.getoption("--nightly") else request.cls.nightly
    return 2 * (len(FAULTS) - len(skipped)) + len(PASSING) + 2


@pytest.fixture(scope="class")
def written(
    request: pytest.FixtureRequest, folder: Path, engine: EngineProcess, server: S3Server
) -> Iterator[Prompt]:
    """Prompts that were written to the bucket, and that nobody has in memory; each to use once."""
    calls = [Call(words(TOKENS, 100 + i)) for i in range(_prompts(request))]
    with cluster(folder, engine, _bucket(server)):
        prompts = [(Oracle(engine, call), own_hit(engine, call, before=[call])) for call in calls]
    return iter(prompts)


@pytest.fixture(scope="class")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="class")
def proxy(portal: BlockingPortal, server: S3Server) -> Iterator[FaultyProxy]:
    with portal.wrap_async_context_manager(faulty_proxy(server.endpoint)) as proxy:
        yield proxy


@pytest.fixture(scope="class")
def sidecar(
    request: pytest.FixtureRequest,
    folder: Path,
    engine: EngineProcess,
    server: S3Server,
    proxy: FaultyProxy,
    written: Iterator[Prompt],
) -> Iterator[SidecarProcess]:
    """Reaches the bucket through the proxy only."""
    store = {
        **_bucket(server, proxy.endpoint),
        "deadline_seconds_max": STORE_SECONDS_MAX,
        "breaker": {"pause_max": "1s"},
    }
    with cluster(folder, engine, store, LIMITS) as sidecar:
        chunks = chunks_of(TOKENS, chunk_tokens(engine))
        listed(sidecar, chunks * _prompts(request))
        yield sidecar


def check_served(sidecar: SidecarProcess, engine: EngineProcess, prompt: Prompt) -> None:
    """The store is well again, and what only it holds is a hit."""
    sidecar.wait("the store is well", lambda status: _store(status)["state"] == "ok")
    sidecar.wait("everything ended", idle)
    oracle, expected = prompt

    def reads_go_on(status: dict[str, Any]) -> bool:
        if _store(status)["reads"] == "closed":
            return True
        # A prompt of many chunks, each of which failed, opens the breaker. It closes when a request
        # tries the store after its pause; one that comes sooner is computed, and must not be kept.
        empty(engine)
        head = oracle.call.prompt[: CHUNK_TOKENS + 1]
        params = {"kvlake": {"write": False}}
        engine.generate(head, cache_salt=expected.salt, kv_transfer_params=params)
        return False

    sidecar.wait("reads go on", reads_go_on)
    check_equal(again(engine, oracle.call, expected.salt), expected)


@pytest.mark.promise("store-faults-engine")
class TestUnreliableBucket:
    """Every fault of the proxy. A request ends in time and is right, and the fault is forgotten."""

    nightly: ClassVar[Sequence[Fault]] = [one for one in FAULTS if one is not Fault.WRONG_BYTES]
    """Those that are tried with `--nightly` alone."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if metafunc.function.__name__ == "test_fault":
            faults = [
                pytest.param(
                    fault,
                    id=fault.value.replace(" ", "-"),
                    marks=[pytest.mark.nightly] if fault in self.nightly else [],
                )
                for fault in FAULTS
            ]
            metafunc.parametrize("fault", faults)

    def test_fault(
        self,
        sidecar: SidecarProcess,
        engine: EngineProcess,
        portal: BlockingPortal,
        proxy: FaultyProxy,
        written: Iterator[Prompt],
        fault: Fault,
    ) -> None:
        before = counters(sidecar)
        portal.call(proxy.become, fault)
        oracle, expected = next(written)
        generation = again(engine, oracle.call, expected.salt).generation
        assert generation.cached_tokens == 0
        oracle.check(generation)
        # What is new is computed and kept in host memory, whatever becomes of its writes.
        new = Call(words(600, 900 + FAULTS.index(fault)))
        fresh = own_hit(engine, new, before=[new])
        check_equal(again(engine, new, fresh.salt), fresh)
        sidecar.wait("it is told", lambda status: _store(status)["state"] == "unwell")
        portal.call(proxy.become, Fault.PASS)
        check_served(sidecar, engine, next(written))
        after = counters(sidecar)
        corrupt = after["reads_corrupt"] - before["reads_corrupt"]
        assert bool(corrupt) == (fault is Fault.WRONG_BYTES)

    @pytest.mark.parametrize("fault", PASSING)
    def test_passing_fault_is_retried(
        self,
        sidecar: SidecarProcess,
        engine: EngineProcess,
        portal: BlockingPortal,
        proxy: FaultyProxy,
        written: Iterator[Prompt],
        fault: Fault,
    ) -> None:
        """One refused request is not a miss."""
        oracle, expected = next(written)
        empty(engine)
        before = len(proxy.requests)
        portal.call(lambda: proxy.become(fault, times=1, only=CHUNK_READ))
        generation = engine.generate(oracle.call.prompt, cache_salt=expected.salt)
        asked = Counter(line for line in proxy.requests[before:] if re.search(CHUNK_READ, line))
        # A read that an earlier request gave up may be among them.
        assert 2 in asked.values()
        assert generation.cached_tokens == TOKENS // BLOCK_TOKENS * BLOCK_TOKENS
        assert same_output(generation, expected.generation)

    def test_frozen_server(
        self,
        sidecar: SidecarProcess,
        engine: EngineProcess,
        server: S3Server,
        written: Iterator[Prompt],
    ) -> None:
        """The server itself stops answering, and then goes on where it was."""
        os.kill(server.pid, signal.SIGSTOP)
        try:
            oracle, expected = next(written)
            generation = again(engine, oracle.call, expected.salt).generation
            assert generation.cached_tokens == 0
            oracle.check(generation)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        check_served(sidecar, engine, next(written))
