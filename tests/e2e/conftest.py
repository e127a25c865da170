"""Fixtures of the end-to-end tests: one model, one folder per module, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from sidecar.demo.model import write_model
from tests import places, warm
from tests.harness.engine import EngineProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

MARK: Final = "KVLAKE_E2E"
"""An environment variable that every process of a module inherits, orphans included."""
POOLS: Final = Path("/dev/shm")
SOCKETS: Final = ("attach.sock", "jobs.sock")
LEFTOVER_SECONDS_MAX: Final = 60.0


def pytest_itemcollected(item: pytest.Item) -> None:
    """A module that takes tests of another one names those that it only runs nightly."""
    name = item.originalname if isinstance(item, pytest.Function) else ""
    if name in getattr(getattr(item, "module", None), "NIGHTLY", ()):
        item.add_marker("nightly")


@pytest.fixture(scope="session", autouse=True)
def warm_engines(warm_server: None) -> Iterator[None]:
    """Engines of these tests are forked from a process that has imported vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineProcess, "launch", staticmethod(warm.engine))
        places.patch(patch, "launch_engine", warm.demo_engine)
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_processes(warm_sidecars: None) -> None:
    """So are their sidecars."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small llama: 6 KiB of KV per token in bfloat16, four KV heads, so that two ranks share."""
    folder = tmp_path_factory.mktemp("model")
    return str(write_model(folder, layers=6, hidden=256, heads=4, kv_heads=4))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Where a module's sockets, logs and stores are: short, as Unix sockets need it.

    Set up before, and so taken down after, every engine and sidecar of the module; then it looks
    for what they left.
    """
    directory = Path(tempfile.mkdtemp(prefix="kvl-e2e-", dir="/tmp"))
    token = secrets.token_hex(8)
    pools_before = _pools()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, token)
        # vLLM's own sockets, which a killed engine leaves, go with the folder.
        patch.setenv("VLLM_RPC_BASE_PATH", str(directory))
        yield directory
        left = _leftovers(directory, token, pools_before)
    assert not left, f"left behind: {left}; logs are in {directory}"
    shutil.rmtree(directory)


def _pools() -> set[Path]:
    return set(POOLS.glob(f"kvlake-{os.getuid()}-demo-{os.getpid()}-*"))


def _leftovers(directory: Path, token: str, pools_before: set[Path]) -> list[str]:
    deadline = time.monotonic() + LEFTOVER_SECONDS_MAX
    while True:
        left = [*_processes(f"{MARK}={token}"), *warm.left(), *map(str, _pools() - pools_before)]
        left += [str(path) for name in SOCKETS for path in directory.rglob(name)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


def _processes(entry: str) -> list[str]:
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        # They come and go while they are looked at.
        with contextlib.suppress(OSError):
            environment = (process / "environ").read_bytes().split(b"\0")
            if entry.encode() in environment and process.name != str(os.getpid()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found.append(f"process {process.name}: {command.decode(errors='replace')[:120]}")
    return found
