"""What every test may use: one event loop, and a directory short enough for Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

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
