"""`kvlake demo --json`: what a newcomer runs first says the truth, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.demo.processes import DemoSidecar
from sidecar.demo.scenes import Demo, Output
from tests import places
from tests.harness.sidecars import ERROR_LINE, STOOD_STILL

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-commands")]

START_SECONDS_MAX = 120.0

SCENES = [
    "cold",
    "engine_prefix_hit",
    "host_hit",
    "engine_restart_hit",
    "object_store_hit",
    "other_cluster_hit",
    "sidecar_killed",
]


def started(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *places.program(), "demo", "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},
    )


Ends = list[tuple[str, int, list[str]]]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Each sidecar of the demo that was drained: its name, exit code, and errors in its log.

    A machine that paused is none of the demo's errors.
    """
    found: Ends = []
    drain = DemoSidecar.drain

    def drained(sidecar: DemoSidecar) -> int:
        code = drain(sidecar)
        lines = sidecar.log_path.read_text().splitlines()
        errors = [line for line in lines if ERROR_LINE.search(line) and STOOD_STILL not in line]
        found.append((sidecar.folder.name, code, errors))
        return code

    monkeypatch.setattr(DemoSidecar, "drain", drained)
    return found


@pytest.mark.parametrize("s3", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_every_scene_is_right(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: Ends,
    s3: bool,
) -> None:
    """In this process, so that its engines start warm. With an S3 server installed, and without."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    for name in ("no_proxy", "NO_PROXY"):
        # Restored afterwards: the demo changes them.
        monkeypatch.setenv(name, "")
    places.patch(monkeypatch, "has_s3_server", lambda: s3)
    assert main(["demo", "--json"]) == 0
    check(json.loads(capsys.readouterr().out))
    # The third one is killed.
    assert ends == [("a", 0, []), ("b", 0, []), ("b", 0, [])]
    assert not list(folder.glob("kvlake-demo-*")), "its folder is removed where nothing failed"


class Enough(Exception):
    """The scene that a test is about is over."""


class UntilHostHit(Output):
    """Ends the demo once it has told of this scene."""

    def line(self, text: str) -> None:
        if text.startswith("host_hit"):
            raise Enough


def test_a_load_that_copies_nothing_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that is not poisoned has what the hit needs: `loading_nothing.py` sees to it."""
    monkeypatch.setattr(DemoSidecar, "program", ("-m", "tests.e2e.loading_nothing"))
    place = folder / "nothing"
    place.mkdir()
    demo = Demo(place, UntilHostHit(quiet=True))
    with pytest.raises(Enough):
        demo.run()
    found = demo.results
    assert found.tokens_loaded == {"cold": 0, "engine_prefix_hit": 0, "host_hit": 2976}
    assert found.logprobs_equal == {"cold": True, "engine_prefix_hit": True, "host_hit": False}
    assert not found.good


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_json_is_the_only_output_of_the_command(folder: Path) -> None:
    with started(folder) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors[-3000:]
    lines = output.splitlines()
    assert len(lines) == 1
    check(json.loads(lines[0]))
    assert not list(folder.glob("kvlake-demo-*")), "its folder is removed where nothing failed"
    assert not list(Path("/dev/shm").glob(f"kvlake-*-demo-{process.pid}-*"))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.nightly)]
)
def test_told_to_end_it_takes_all_with_it(folder: Path, number: signal.Signals) -> None:
    with started(folder) as process:
        # A server, a sidecar and an engine run by then.
        deadline = time.monotonic() + START_SECONDS_MAX
        while not list(folder.glob("kvlake-demo-*/engine-1.log")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        output, errors = process.communicate(timeout=START_SECONDS_MAX)
    assert process.returncode == 128 + number, errors
    assert not output
    # Processes and pools that are left over fail the module's fixture.
    assert not list(folder.glob("kvlake-demo-*"))


def check(result: dict[str, Any]) -> None:
    assert list(result) == ["engine", "prompt_tokens", "ttft_ms", "tokens_loaded", "logprobs_equal"]
    assert result["engine"].startswith("vllm ")
    assert result["prompt_tokens"] == 3000
    for measured in (result["ttft_ms"], result["tokens_loaded"], result["logprobs_equal"]):
        assert list(measured) == SCENES
    assert all(equal is True for equal in result["logprobs_equal"].values())
    assert all(ttft > 0 for ttft in result["ttft_ms"].values())
    loaded = result["tokens_loaded"]
    assert loaded["cold"] == loaded["engine_prefix_hit"] == 0
    hits = ["host_hit", "engine_restart_hit", "object_store_hit", "other_cluster_hit"]
    assert {loaded[scene] for scene in hits} == {2976}
    # Killed before, during or after the load: all of it, or nothing.
    assert loaded["sidecar_killed"] in (0, 2976)
