"""A store that fails in every way, against a real sidecar in a process of its own.

The tests' client plays the engine; the store is a real S3 server behind a proxy that fails on
command. Whatever happens: no wrong byte is loaded, host memory goes on, the fault is counted by
its cause, and nobody has to do anything for the store to be used again.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from sidecar.cli.gc import run_collection
from sidecar.config.model import Config
from sidecar.protocol import Outcome
from tests.faulty_proxy import CHUNK, Fault, FaultyProxy, faulty_proxy
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import BLOCKS_PER_CHUNK, WAIT_SECONDS_MAX, Scheduler, Worker, key_of
from tiers.kv.index import FLAG_STORE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.promise("store-faults"),
    pytest.mark.usefixtures("warm_sidecars"),
]

# What each is counted as; any of them, where clients see it differently.
CAUSES: Final = {
    Fault.REFUSE: {"refused"},
    Fault.HANG_UP: {"connection"},
    Fault.RESET: {"connection"},
    Fault.TRUNCATE: {"connection"},
    Fault.STALL: {"slow"},
    Fault.STALL_BODY: {"slow"},
    Fault.FORBIDDEN: {"forbidden"},
    Fault.NOT_FOUND: {"missing"},
    Fault.NO_BUCKET: {"no_bucket"},
    Fault.TOO_MANY: {"busy"},
    Fault.BROKEN: {"busy"},
    Fault.SLOW_DOWN: {"busy"},
    Fault.EXPIRED: {"credentials"},
    Fault.SKEWED: {"clock"},
}
PASSING: Final = (Fault.HANG_UP, Fault.RESET, Fault.TRUNCATE, Fault.SLOW_DOWN)
CHUNKS: Final = f"^GET .*{CHUNK}"
"""Requests for chunks, in distinction from the catalog's and the probe's."""
BLOCKS: Final = tuple(range(BLOCKS_PER_CHUNK))
PATIENT: Final[dict[str, Any]] = {
    "connect_timeout": "60s",
    "read_timeout": "60s",
    "deadline_seconds_max": "60s",
    "gc": {"grace": "70s"},
}
"""Where no request has to end by its time: a machine that pauses makes none of them fail."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import shutil
    import tempfile

    # A Unix socket's path is short.
    path = Path(tempfile.mkdtemp(prefix="kvl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[S3Server]:
    with s3_server(folder) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(portal: BlockingPortal, server: S3Server) -> Iterator[FaultyProxy]:
    with portal.wrap_async_context_manager(faulty_proxy(server.endpoint)) as proxy:
        yield proxy


def config_of(server: S3Server, endpoint: str = "", **store: Any) -> dict[str, Any]:
    return {
        "host": {"size": "16MiB", "prefault": False},
        "limits": {"lookup_wait": "5s", "lease_ttl": "60s"},
        "store": {
            "url": server.url,
            "refresh_seconds": "100ms",
            "read_timeout": "400ms",
            "connect_timeout": "400ms",
            "deadline_seconds_max": "3s",
            "retries_max": 2,
            "gc": {"grace": "4s"},
            **server.settings_at(endpoint or server.endpoint),
            **store,
        },
    }


class Cluster:
    """A sidecar with an engine: the tests' client."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self._process = SidecarProcess(folder, config)
        self._numbers = itertools.count(1)

    def __enter__(self) -> Cluster:
        self._process.__enter__()
        path = Path(self._process.socket)
        self.worker, self.scheduler = Worker(path), Scheduler(path)
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.scheduler.close()
        self.worker.close()
        assert self._process.drain() == 0
        self._process.__exit__(*exc_info)

    @property
    def status(self) -> dict[str, Any]:
        return self._process.status()

    @property
    def store_status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.status["tiers"]["store"]
        return status

    def wait(self, what: str, true: Callable[[dict[str, Any]], bool]) -> None:
        self._process.wait(what, true, WAIT_SECONDS_MAX)

    def wait_state(self, state: str) -> None:
        self.wait(f"the store is {state}", lambda s: s["tiers"]["store"]["state"] == state)

    def wait_listed(self, *keys: bytes) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not all(flags & FLAG_STORE for flags in self.scheduler.flags(*keys)):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def save(self, key: bytes) -> None:
        """Compute a chunk and store it; its bytes are those of `content_of`."""
        self.worker.fill(BLOCKS, seed=key[0] + 256 * key[1])
        assert self.worker.store(next(self._numbers), key, BLOCKS) is Outcome.OK

    def lookup(self, key: bytes, deadline_ms: int = 4000) -> int:
        start = time.monotonic()
        ready = self.scheduler.lookup(next(self._numbers), [key], deadline_ms).ready
        assert time.monotonic() - start < deadline_ms / 1000 + 10
        return ready

    def load(self, key: bytes) -> bool:
        """Load a chunk into other blocks. True if it came, with the right bytes; else no byte."""
        target = [block + 32 for block in BLOCKS]
        self.worker.poison()
        outcome = self.worker.load(next(self._numbers), key, target)
        got = [self.worker.read(block) for block in target]
        if outcome is not Outcome.OK:
            assert all(set(block) == {0xEE} for block in got), "nothing was written"
            return False
        self.worker.fill(BLOCKS, seed=key[0] + 256 * key[1])
        assert got == [self.worker.read(block) for block in BLOCKS]
        return True

    def fetch(self, key: bytes, deadline_ms: int = 4000) -> bool:
        """What an engine does with a hit in the store."""
        return self.lookup(key, deadline_ms) == 1 and self.load(key)

    def wait_counted(self, causes: set[str], before: dict[str, int], asked: bytes) -> None:
        """One of them was; on a busy machine a request may have failed as a slow one first.

        Nobody else asks for a chunk again.
        """
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not causes & (told := self.counted_since(before)):
            assert time.monotonic() < deadline, told
            assert not self.fetch(asked)
            time.sleep(0.05)

    def wait_fetched(self, key: bytes) -> None:
        """It is a hit again; on a busy machine an answer may be too late now and then."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not self.fetch(key):
            assert time.monotonic() < deadline

    def causes(self) -> dict[str, int]:
        """How often each cause was counted so far, for reads and for what was tried again."""
        told = self.store_status
        found: dict[str, int] = dict(told["retries"])
        for verb in told["verbs"].values():
            for cause, count in verb["failures"].items():
                found[cause] = found.get(cause, 0) + count
        return found

    def counted_since(self, before: dict[str, int]) -> set[str]:
        """Causes that were counted again."""
        return {name for name, count in self.causes().items() if count > before.get(name, 0)}


@pytest.fixture(scope="module")
def keys(folder: Path, server: S3Server) -> Iterator[bytes]:
    """Keys of chunks that the bucket holds, and nobody's memory; each to use once."""
    made = [key_of("fault", number) for number in range(100)]
    with Cluster(folder / "w", config_of(server, **PATIENT)) as writer:
        for key in made:
            writer.save(key)
        writer.wait("all is written", lambda s: s["counters"]["chunks_written"] == len(made))
    return iter(made)


@pytest.fixture(
    scope="module", params=["obstore", pytest.param("fsspec", marks=pytest.mark.nightly)]
)
def cluster(
    request: pytest.FixtureRequest,
    folder: Path,
    server: S3Server,
    proxy: FaultyProxy,
    keys: Iterator[bytes],
) -> Iterator[Cluster]:
    """Reaches the bucket through the proxy only."""
    config = config_of(server, proxy.endpoint, backend=request.param)
    with Cluster(folder / request.param, config) as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["obstore", "fsspec"])
def patient(
    request: pytest.FixtureRequest,
    folder: Path,
    server: S3Server,
    proxy: FaultyProxy,
    keys: Iterator[bytes],
) -> Iterator[Cluster]:
    """The same, and nothing but a fault makes its requests fail."""
    config = config_of(server, proxy.endpoint, backend=request.param, **PATIENT)
    with Cluster(folder / f"{request.param}-patient", config) as cluster:
        yield cluster


@pytest.mark.parametrize("fault", CAUSES, ids=lambda fault: str(fault.value).replace(" ", "-"))
def test_a_fault_costs_hits_of_the_store_and_nothing_else(
    cluster: Cluster,
    server: S3Server,
    portal: BlockingPortal,
    proxy: FaultyProxy,
    keys: Iterator[bytes],
    fault: Fault,
) -> None:
    asked, spared, kept, new = next(keys), next(keys), key_of("kept", fault), key_of("new", fault)
    cluster.wait_state("ok")
    cluster.wait_listed(asked, spared)
    cluster.save(kept)
    before = cluster.causes()
    only = CHUNKS if fault is Fault.NOT_FOUND else ""
    portal.call(lambda: proxy.become(fault, only=only))
    try:
        assert not cluster.fetch(asked)
        assert cluster.load(kept), "host memory goes on"
        cluster.save(new)
        assert cluster.load(new)
        cluster.wait_counted(CAUSES[fault], before, asked)
        if fault is not Fault.NOT_FOUND:
            cluster.wait_state("unwell")
    finally:
        portal.call(proxy.become, Fault.PASS)
    cluster.wait_state("ok")
    cluster.wait_fetched(spared)
    if fault is Fault.NOT_FOUND:
        # What is told to be gone is withdrawn for all, until a collection finds that it is there.
        cluster.wait("it is told", lambda s: not s["tiers"]["store"]["catalog"]["rows_waiting"])
        config = Config.model_validate(config_of(server))
        assert config.store is not None
        # With its short grace, and with more time for a request than goes with that.
        longer = {"deadline_seconds_max": 60.0, "read_timeout": 60.0, "connect_timeout": 60.0}
        store = config.store.model_copy(update=longer)
        config = config.model_copy(update={"store": store})
        done = run_collection(config, wait=True)
        assert sum(one["deleted"] for one in done["namespaces"]) == 0
        cluster.wait_listed(asked)
    cluster.wait_fetched(asked)


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: str(fault.value).replace(" ", "-"))
def test_a_request_that_fails_once_is_no_miss(
    patient: Cluster,
    portal: BlockingPortal,
    proxy: FaultyProxy,
    keys: Iterator[bytes],
    fault: Fault,
) -> None:
    key = next(keys)
    patient.wait_listed(key)
    portal.call(lambda: proxy.become(fault, times=1, only=CHUNKS))
    assert patient.fetch(key, 60_000)


def test_wrong_bytes_of_the_right_length_are_never_served(
    patient: Cluster, portal: BlockingPortal, proxy: FaultyProxy, keys: Iterator[bytes]
) -> None:
    asked, spared = next(keys), next(keys)
    patient.wait_listed(asked, spared)
    before = patient.status["counters"]["reads_corrupt"]
    portal.call(lambda: proxy.become(Fault.WRONG_BYTES, only=CHUNKS))
    assert not patient.fetch(asked, 60_000)
    portal.call(proxy.become, Fault.PASS)
    assert patient.status["counters"]["reads_corrupt"] == before + 1
    patient.wait_fetched(spared)


def test_a_bucket_that_is_removed_and_made_again(folder: Path) -> None:
    lost, kept = key_of("lost"), key_of("kept")
    with (
        s3_server(folder) as server,
        Cluster(folder / "r", config_of(server, **PATIENT)) as cluster,
    ):
        cluster.save(key_of("before"))
        # SeaweedFS makes a removed bucket again for an object that is on its way.
        cluster.wait("nothing is on its way", wrote_all)
        bucket = Bucket(server)
        bucket.remove()
        cluster.save(lost)
        cluster.wait_state("unwell")
        # A server in the middle of removing it may have said something else first.
        cluster.wait(
            "it is told why",
            lambda s: "the bucket does not exist" in s["tiers"]["store"]["reason"],
        )
        assert cluster.causes()["no_bucket"] > 0
        assert cluster.load(lost)
        bucket.make()
        cluster.wait_state("ok")
        cluster.save(kept)
        with Cluster(folder / "after", config_of(server, **PATIENT)) as other:
            other.wait_listed(kept)
            other.wait_fetched(kept)


def wrote_all(status: dict[str, Any]) -> bool:
    """Whether the one chunk, its row and the record of its namespace are written."""
    writes = status["tiers"]["store"]["verbs"]["write"]
    return bool(writes["succeeded"] == 3 and not writes["inflight"])


class Bucket:
    """The bucket itself, as its administrator sees it."""

    def __init__(self, server: S3Server) -> None:
        from botocore.session import get_session

        self._name = server.bucket
        self._client: Any = get_session().create_client(
            "s3",
            endpoint_url=server.endpoint,
            region_name="us-east-1",
            aws_access_key_id=server.access_key,
            aws_secret_access_key=server.secret_key,
        )

    def remove(self) -> None:
        """Remove it until the server takes no object: it may know of a removal a moment later."""
        self._remove()
        while self._takes_objects():
            self._remove()

    def _takes_objects(self) -> bool:
        try:
            self._client.put_object(Bucket=self._name, Key="probe", Body=b"")
        except self._client.exceptions.NoSuchBucket:
            return False
        return True

    def _remove(self) -> None:
        for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._name):
            for one in page.get("Contents", ()):
                self._client.delete_object(Bucket=self._name, Key=one["Key"])
        self._client.delete_bucket(Bucket=self._name)

    def make(self) -> None:
        self._client.create_bucket(Bucket=self._name)
