"""What every test may use: one event loop, and a directory short enough for Unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


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
