"""Hits from an object store, and a store that lies, fails, hangs or is full.

One engine; sidecars with empty memory and other stores take turns on its sockets. A request
always ends, and gives what the engine gives for as many cached tokens.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any, ClassVar, Final

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from tests.e2e.arms import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    KV_BYTES_PER_TOKEN,
    PATIENT,
    Call,
    Measured,
    Oracle,
    attach,
    blocks_of,
    check_equal,
    check_told,
    chunk_tokens,
    counters,
    empty,
    fresh_salt,
    idle,
    own_hit,
    same_output,
    told,
    words,
)
from tests.e2e.chains import QUARANTINE, in_folder
from tests.e2e.test_topology import announced, refreshed
from tests.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess
from tiers.kv.arrow_file import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "suite-store"),
]

ENGINE_ARGS: Final[dict[str, Any]] = {"num_gpu_blocks_override": 512, "max_model_len": 4096}


@pytest.fixture(scope="module")
def engine(folder: Path, model: str) -> Iterator[EngineProcess]:
    socket = SidecarProcess(folder / "s", {}).socket
    with EngineProcess(EngineSpec(model, socket, ENGINE_ARGS), folder / "engine.log") as engine:
        yield engine.wait_ready()


@contextlib.contextmanager
def cluster(
    folder: Path, engine: EngineProcess, store: dict[str, Any], limits: dict[str, str] | None = None
) -> Generator[SidecarProcess]:
    """An empty sidecar with this store, attached; at its end everything is written."""
    config = {
        "host": {"size": "128MiB"},
        # The model computes sooner than a store is read: wait for it all the same.
        "store": {"refresh_seconds": "200ms", "recompute": "never", **store},
        "limits": PATIENT if limits is None else limits,
    }
    with SidecarProcess(folder / "s", config) as sidecar:
        attach(engine, sidecar)
        yield sidecar
        empty(engine)
        sidecar.wait("everything ended", idle)
        assert sidecar.drain() == 0


def listed(sidecar: SidecarProcess, chunks: int) -> None:
    """Wait until the catalog was read whole, and has this many chunks.

    The number alone would not do: the chunks of one of its files, or those that attaching left, may
    be as many, before the file with the chunks that are meant is read.
    """

    def whole(status: dict[str, Any]) -> bool:
        store = _store(status)
        return bool(store["listings"] and store["chunks"] >= chunks)

    sidecar.wait("the store is listed", whole)


def _store(status: dict[str, Any]) -> dict[str, Any]:
    store: dict[str, Any] = status["tiers"]["store"]
    return store


def again(engine: EngineProcess, call: Call, salt: str) -> Measured:
    """The request on poisoned memory, under the salt of an earlier arm."""
    empty(engine)
    generation = engine.generate(call.prompt, max_tokens=call.max_tokens, cache_salt=salt)
    return Measured(generation, blocks_of(engine), salt)


def chunks_of(tokens: int, chunk: int = CHUNK_TOKENS) -> int:
    """Objects of a prompt: its full chunks, and its last whole blocks."""
    full, rest = divmod(tokens, chunk)
    return full + (rest >= BLOCK_TOKENS)


# --- a folder ------------------------------------------------------------------------------------


@pytest.mark.promise("full-attention", "llama", "store-hit")
@pytest.mark.parametrize("tokens", [3000, CHUNK_TOKENS + 1])
def test_folder_serves_an_empty_sidecar(folder: Path, engine: EngineProcess, tokens: int) -> None:
    call = Call(words(tokens, tokens))
    place = folder / f"store-{tokens}"
    place.mkdir()
    store = {"url": f"file://{place}", "prefix": "team/kv"}
    with cluster(folder, engine, store) as sidecar:
        expected = own_hit(engine, call, before=[call])
    chunks = chunks_of(tokens, chunk_tokens(engine))
    assert len(list((place / "team" / "kv").rglob("??/*/*.arrow"))) >= chunks
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks)
        cached_tokens, metrics = expected.generation.cached_tokens, told(engine)
        check_equal(again(engine, call, expected.salt), expected)
        check_told(engine, metrics, store=cached_tokens)
        counted = counters(sidecar)
        assert counted["chunks_read"] == counted["lookups"] * chunks
        # Now it is in host memory, and is not read twice.
        metrics = told(engine)
        check_equal(again(engine, call, expected.salt), expected)
        check_told(engine, metrics, host=cached_tokens)
        assert counters(sidecar)["chunks_read"] == counted["chunks_read"]


def test_head_in_the_engine_middle_in_host_tail_in_the_store(
    folder: Path, engine: EngineProcess
) -> None:
    """One request puts together what three tiers hold."""
    prompt = words(1500, 1)
    calls = [Call(prompt[: end + 1], max_tokens=1) for end in (CHUNK_TOKENS, 3 * CHUNK_TOKENS)]
    call = Call(prompt)
    place = folder / "three-tiers"
    place.mkdir()
    store = {"url": f"file://{place}"}
    with cluster(folder, engine, store) as sidecar:
        expected = own_hit(engine, call, before=[*calls, call])
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(1500, chunk_tokens(engine)))
        # Reads the first three chunks to host memory; the engine keeps one of them.
        for one in reversed(calls):
            empty(engine)
            engine.generate(one.prompt, max_tokens=1, cache_salt=expected.salt)
        assert counters(sidecar)["chunks_read"] == 3 * CHUNK_TOKENS // chunk_tokens(engine)
        metrics = told(engine)
        generation = engine.generate(call.prompt, cache_salt=expected.salt)
        check_equal(Measured(generation, blocks_of(engine), expected.salt), expected)
        assert counters(sidecar)["chunks_read"] == chunks_of(1500, chunk_tokens(engine))
        in_store_tokens = generation.cached_tokens - 3 * CHUNK_TOKENS
        check_told(engine, metrics, host=2 * CHUNK_TOKENS, store=in_store_tokens)


def test_store_that_is_only_read_or_only_written(folder: Path, engine: EngineProcess) -> None:
    call = Call(words(600, 2))
    place = folder / "one-way"
    place.mkdir()
    url = {"url": f"file://{place}"}
    with cluster(folder, engine, {**url, "read": "off"}) as sidecar:
        expected = own_hit(engine, call, before=[call])
    files = len(list(place.rglob("??/*/*.arrow")))
    with cluster(folder, engine, {**url, "read": "off"}) as sidecar:
        assert again(engine, call, expected.salt).generation.cached_tokens == 0
    with cluster(folder, engine, {**url, "write": "off"}) as sidecar:
        listed(sidecar, chunks_of(600, chunk_tokens(engine)))
        files = len(list(place.rglob("??/*/*.arrow")))
        check_equal(again(engine, call, expected.salt), expected)
        engine.generate(words(600, 3), cache_salt=fresh_salt())
        sidecar.wait("everything ended", idle)
    assert len(list(place.rglob("??/*/*.arrow"))) == files


# --- damage --------------------------------------------------------------------------------------


def _payload_end(path: Path) -> int:
    """Where an object's payload, whole blocks, ends; what follows is shorter than a block."""
    block_bytes = BLOCK_TOKENS * KV_BYTES_PER_TOKEN
    return PAGE_BYTES + (path.stat().st_size - PAGE_BYTES) // block_bytes * block_bytes


def _change_byte(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def _swap_in(path: Path, other: Path) -> None:
    """Another chunk under this name: intact, and of the same namespace, but not this one."""
    shutil.copyfile(other, path)


DAMAGE: Final[dict[str, Callable[[Path, Path], None]]] = {
    "payload": lambda path, _: _change_byte(path, PAGE_BYTES + 12_345),
    "last payload byte": lambda path, _: _change_byte(path, _payload_end(path) - 1),
    "header": lambda path, _: _change_byte(path, 40),
    "footer": lambda path, _: _change_byte(path, path.stat().st_size - 30),
    "token ids": lambda path, _: _change_byte(path, 1288 + 100),
    "truncated": lambda path, _: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path, _: os.truncate(path, 0),
    "longer": lambda path, _: os.truncate(path, path.stat().st_size + 1),
    "another chunk": _swap_in,
}


@pytest.mark.nightly
def test_damaged_objects_are_never_served(folder: Path, engine: EngineProcess) -> None:
    """Each is found out when it is read: the run ends before it, and it is put aside."""
    place = folder / "damaged"
    place.mkdir()
    store = {"url": f"file://{place}"}
    oracles = {
        name: Oracle(engine, Call(words(700, 50 + i)))
        for i, name in enumerate([*DAMAGE, "gone", "intact"])
    }
    salts: dict[str, str] = {}
    paths: dict[str, Path] = {}
    with cluster(folder, engine, store) as sidecar:
        # What the engine attached with is still being written, and counts for none of them.
        empty(engine)
        sidecar.wait("nothing is to be written", idle)
        for name, oracle in oracles.items():
            before = in_folder(place)
            salts[name] = own_hit(engine, oracle.call, before=[oracle.call]).salt
            empty(engine)
            sidecar.wait("everything is written", idle)
            (chain,) = in_folder(place).since(before).chains()
            paths[name] = chain[1]
    chunk = chunk_tokens(engine)
    for name, damage in DAMAGE.items():
        damage(paths[name], paths["intact"])
    (paths["intact"].parent / "notes.arrow").write_text("not ours")
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(700, chunk) * len(oracles))
        paths["gone"].unlink()
        for name, oracle in oracles.items():
            empty(engine)
            generation = engine.generate(oracle.call.prompt, cache_salt=salts[name])
            cached = 700 // BLOCK_TOKENS * BLOCK_TOKENS if name == "intact" else chunk
            assert generation.cached_tokens == cached, name
            oracle.check(generation)
        counted = counters(sidecar)
        assert counted["reads_corrupt"] == counted["quarantined_store"] == len(DAMAGE)
    # What was computed instead went to the store under the same names; the bad ones are aside.
    aside = list((place / QUARANTINE).rglob("*.arrow"))
    assert {path.name for path in aside} == {path.name for path in paths.values()}
    assert {path.parent.name for path in aside} == {paths[name].parent.name for name in DAMAGE}
    with cluster(folder, engine, store) as sidecar:
        listed(sidecar, chunks_of(700, chunk) * len(oracles))
        for name, oracle in oracles.items():
            empty(engine)
            generation = engine.generate(oracle.call.prompt, cache_salt=salts[name])
            assert generation.cached_tokens == 700 // BLOCK_TOKENS * BLOCK_TOKENS, name
            # Computed behind a cached chunk, its KV is rounded otherwise than the oracle's.
            oracle.check_close(generation)
        assert counters(sidecar)["reads_corrupt"] == 0


# --- a folder that takes nothing more ------------------------------------------------------------


@contextlib.contextmanager
def _small_disk(place: Path) -> Generator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)],
        check=False,
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_folder(folder: Path, engine: EngineProcess) -> None:
    place = folder / "small-disk"
    place.mkdir()

    def make_room(sidecar: SidecarProcess) -> None:
        subprocess.run(["mount", "-o", "remount,size=64m", str(place)], check=True)

    with _small_disk(place):
        _check_full(folder, engine, place, lambda sidecar: None, make_room)
        assert not list(place.rglob("*.tmp"))


def test_folder_that_takes_no_large_file(folder: Path, engine: EngineProcess) -> None:
    """As a file size limit or a quota does it; needs no privilege to set up."""
    place = folder / "no-large-file"
    place.mkdir()

    def limit(size_bytes: int) -> Callable[[SidecarProcess], None]:
        def apply(sidecar: SidecarProcess) -> None:
            assert sidecar.process is not None
            _, hard = resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(sidecar.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

        return apply

    size_bytes = chunk_tokens(engine) * KV_BYTES_PER_TOKEN * 2 // 3
    _check_full(folder, engine, place, limit(size_bytes), limit(resource.RLIM_INFINITY))
    assert not list(place.rglob("*.tmp"))


def _check_full(
    folder: Path,
    engine: EngineProcess,
    place: Path,
    fill: Callable[[SidecarProcess], None],
    make_room: Callable[[SidecarProcess], None],
) -> None:
    call, later = Call(words(3000, 4)), Call(words(1000, 5))
    store = {"url": f"file://{place}", "breaker": {"pause_max": "1s"}}
    with cluster(folder, engine, store) as sidecar:
        fill(sidecar)
        # Neither the requests nor the host tier feel it.
        expected = own_hit(engine, call, before=[call])
        sidecar.wait("writes fail", lambda status: status["counters"]["writes_failed"] > 0)
        check_equal(again(engine, call, expected.salt), expected)
        sidecar.wait("writing pauses", lambda status: _store(status)["writes"] != "closed")
        assert _store(sidecar.status())["reads"] == "closed", "what is there can be read"
        # The state is that of the last probe, whose few bytes may still fit.
        assert _store(sidecar.status())["verbs"]["write"]["failures"]
        assert "object store unavailable" in sidecar.log_path.read_text()
        make_room(sidecar)
        sidecar.wait("it is well", lambda status: _store(status)["state"] == "ok")
        written = counters(sidecar)["chunks_written"]
        salt = own_hit(engine, later, before=[later]).salt
        sidecar.wait("everything ended", idle)
        chunks = chunks_of(1000, chunk_tokens(engine))
        assert counters(sidecar)["chunks_written"] >= written + chunks
    with cluster(folder, engine, {"url": f"file://{place}"}) as sidecar:
        listed(sidecar, chunks)
        assert again(engine, later, salt).generation.cached_tokens == 992


# --- a bucket ------------------------------------------------------------------------------------


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
        portal.call(lambda: proxy.become(fault, times=1))
        generation = engine.generate(oracle.call.prompt, cache_salt=expected.salt)
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
