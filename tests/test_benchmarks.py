"""Benchmarks follow the product, and their runner leaves nothing behind when it is ended early."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from benchmarks.compare.turns import hit_places
from benchmarks.store.loop_bench import control_loop
from tests import places

ARGUMENTS: Final = ("-m", "benchmarks.run", "--only", "copy")
WAIT_SECONDS_MAX: Final = 120.0


def folder_of(benchmark: int) -> Path | None:
    """The folder in memory that a running benchmark works in, by what it has mapped."""
    try:
        maps = Path(f"/proc/{benchmark}/maps").read_text()
    except OSError:
        return None
    found = re.search(r"(/dev/shm/tmp[^/\s]+)/", maps)
    return Path(found[1]) if found else None


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(one) for one in listed.read_text().split()]


def test_a_benchmark_that_is_ended_early_removes_its_folders() -> None:
    runner = subprocess.Popen(
        # As a shell starts what runs in the background: without SIGINT.
        ["sh", "-c", 'trap "" INT; exec "$@"', "-", sys.executable, *ARGUMENTS],
        cwd=places.ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    folder, deadline = None, time.monotonic() + WAIT_SECONDS_MAX
    while folder is None and runner.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
        folder = next((one for child in children(runner.pid) if (one := folder_of(child))), None)
    runner.send_signal(signal.SIGTERM)
    _, errors = runner.communicate(timeout=WAIT_SECONDS_MAX)
    assert folder is not None, errors
    assert not folder.exists()
    assert runner.returncode == 128 + signal.SIGTERM, errors


def test_a_measurement_that_fails_ends_its_idle_process(tmp_path: Path) -> None:
    """`make bench` waited for that process for good."""

    def measure() -> None:
        with control_loop(tmp_path / "control"):
            raise RuntimeError("no chunk came")

    with ThreadPoolExecutor(1) as pool:
        failure = pool.submit(measure).exception(WAIT_SECONDS_MAX)
    assert str(failure) == "no chunk came"


class Recorded:
    """An engine and its sidecar, of which only the order of the calls is of interest."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    def wait(self, what: str, ready: object) -> None:
        self.calls.append("wait")


def test_each_place_of_a_hit_is_as_often_the_first_after_a_wait() -> None:
    """Hits from host memory always came after a wait, and those of the engine's cache never."""
    both: Any = Recorded()
    for number in range(2):
        for place in hit_places(both, both, number):
            both.calls.append(place)
    assert both.calls == ["wait", "reset", "host", "own", "wait", "own", "reset", "host"]


def names_in(module: str) -> set[str]:
    """What can be imported from a module or package of this repository."""
    place = places.ROOT / module.replace(".", "/")
    if place.is_dir():
        found = {one.stem for one in place.iterdir()}
        source = place / "__init__.py"
    else:
        found, source = set[str](), place.with_suffix(".py")
    for node in ast.walk(ast.parse(source.read_text() if source.exists() else "")):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {one.asname or one.name for one in node.names}
    return found


@pytest.mark.parametrize(
    "path", sorted((places.ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem
)
def test_a_benchmark_imports_what_there_is(path: Path) -> None:
    """Type checks leave benchmarks out, and most of them run only by hand."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if (places.ROOT / node.module.partition(".")[0]).is_dir():
            assert {one.name for one in node.names} <= names_in(node.module), node.module
