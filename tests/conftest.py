"""What every test may use: one event loop, object store servers, short paths for sockets.

The servers run for the whole session; a test takes a prefix of its own. Imports stand in the
fixtures: most tests need none of it.

Two processes run the tests (`make test`), a file at a time: the dearest first, as recorded in
`tests/durations.json`.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import HealthCheck, settings

from tests.e2e import kill_table

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    from tests.harness.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer

pytest_plugins = ["tests.durations", "tests.promises"]

# An example's wall-clock time says how busy the machine is, not whether the code is right.
settings.register_profile(
    "kvlake",
    deadline=None,
    # The same examples at each run of CI: a new one is for those who can look into it.
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvlake")

KILL_MATRIX: Final = "KVLAKE_KILL_MATRIX"
"""An environment variable: the folder that the kill matrix is written to, with what is there."""
UNRECORDED_SECONDS: Final = 20.0
"""What a file is taken to need that `tests/durations.json` does not know yet."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run what is marked `nightly`, too")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[kill_table.ROWS] = {}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """Each file of tests goes to one process: its tests share models, engines and servers."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)


def dearest_first(items: list[pytest.Item]) -> None:
    """Order files so that the processes that take them end at about the same time."""
    # A plugin (`pytest_plugins`), which pytest must import itself.
    from tests import durations

    recorded = durations.load(durations.RECORD).files if durations.RECORD.is_file() else {}

    def seconds(item: pytest.Item) -> float:
        file = recorded.get(item.nodeid.partition("::")[0])
        return UNRECORDED_SECONDS if file is None else file.seconds

    items.sort(key=seconds, reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage away from what is imported to find the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs nightly; where two processes share the others, order them."""
    if not config.getoption("--nightly"):
        left_out = [item for item in items if item.get_closest_marker("nightly")]
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        dearest_first(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process that only runs tests: give its rows to the one that prints."""
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["kill_rows"] = kill_table.plain(session.config.stash[kill_table.ROWS])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take them. A process that died has none."""
    rows = getattr(node, "workeroutput", {}).get("kill_rows", [])
    node.config.stash[kill_table.ROWS] |= kill_table.from_plain(rows)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[kill_table.ROWS]
    if not rows:
        return
    whole = KILL_MATRIX in os.environ
    if whole:
        folder = Path(os.environ[KILL_MATRIX])
        rows = kill_table.read(folder) | rows
        kill_table.write(rows, folder)
    terminalreporter.section("kill matrix")
    terminalreporter.write(kill_table.markdown(rows, whole=whole))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The sidecar runs on asyncio (pyzmq and fsspec do), so its tests do too."""
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def collected() -> Iterator[None]:
    """What a module leaves is collected at its end; what it imported is looked at once.

    torch and vLLM make a million objects. A third of the time of these processes went into
    looking through them again and again.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A fresh directory with a short path: a Unix socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="kvl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def warm_server(request: pytest.FixtureRequest) -> None:
    """A process that has imported what the tests of this session need most (`tests/warm.py`)."""
    from tests import warm

    warm.serve(engines=any(item.get_closest_marker("engine") for item in request.session.items))


@pytest.fixture(scope="module")
def warm_sidecars(warm_server: None) -> Iterator[None]:
    """Sidecars of a module's tests are forked from that process."""
    from tests import places, warm

    with pytest.MonkeyPatch.context() as patch:
        places.patch(patch, "launch_sidecar", warm.sidecar)
        yield


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3: SeaweedFS."""
    from tests.harness.servers import s3_server

    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3, lighter, and AWS's STS: moto."""
    from tests.harness.servers import moto_server

    with moto_server(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GcsServer]:
    """GCS: fake-gcs-server."""
    from tests.object_servers import gcs_server

    with gcs_server(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    """Azure: Azurite."""
    from tests.object_servers import azure_server

    with azure_server(tmp_path_factory.mktemp("azure")) as server:
        yield server
