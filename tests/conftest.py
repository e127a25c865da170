"""What every test may use: one event loop, object store servers, short paths for sockets.

The servers run for the whole session; a test takes a prefix of its own. Imports stand in the
fixtures: most tests need none of it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from sidecar.demo.servers import S3Server
    from tests.object_servers import AzureServer, GcsServer

# An example's wall-clock time says how busy the machine is, not whether the code is right.
settings.register_profile(
    "kvlake",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kvlake")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The sidecar runs on asyncio (pyzmq and fsspec do), so its tests do too."""
    return "asyncio"


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A fresh directory with a short path: a Unix socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="kvl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3: SeaweedFS."""
    from sidecar.demo.servers import s3_server

    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """S3, lighter, and AWS's STS: moto."""
    from sidecar.demo.servers import moto_server

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
