"""However the demo ends: no sidecar runs on, no memory is left, and no bug is reported."""

from __future__ import annotations

import os
import select
import signal
import tempfile
from pathlib import Path

import pytest

from sidecar.cli import main
from sidecar.demo import scenes
from sidecar.demo.processes import DemoSidecar, ProcessFailed
from sidecar.exits import Exit
from tests import places
from tests.sidecar.prompt_records import standing_in

DEAF = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), b'{"http_url": "http://127.0.0.1:9"}\\n')
time.sleep(600)
"""
SLOW = "import time; time.sleep(600)"
FAILING = "print('no room')"


@pytest.fixture(autouse=True)
def restored_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo changes these."""
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "")


def sidecar_of(folder: Path, program: str) -> DemoSidecar:
    sidecar = DemoSidecar(folder, {})
    sidecar.program = ("-c", program)
    return sidecar


def ended(sidecar: DemoSidecar) -> int:
    """How its process ended. Fails if it runs."""
    assert sidecar.process is not None
    code = sidecar.process.poll()
    assert code is not None
    return code


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_start_that_is_interrupted_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_of(tmp_path, SLOW)
    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sidecar.start()
    assert ended(sidecar) == -signal.SIGKILL


def test_a_sidecar_that_does_not_end_is_killed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_of(tmp_path, DEAF).start()
    places.patch(monkeypatch, "WAIT_SECONDS_MAX", 0.05, package="sidecar")
    with pytest.raises(ProcessFailed, match=r"did not end in 0\.05 s and was killed"):
        sidecar.drain()
    assert ended(sidecar) == -signal.SIGKILL


def test_an_interrupt_stays_one_if_the_sidecar_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_of(tmp_path, DEAF).start()
    places.patch(monkeypatch, "WAIT_SECONDS_MAX", 0.05, package="sidecar")
    with pytest.raises(KeyboardInterrupt), sidecar:
        interrupted()
    assert ended(sidecar) == -signal.SIGKILL


def test_a_proxy_of_the_environment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demo failed: its sidecars were asked through the proxy."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    server = standing_in(b"{}")
    answers: list[object] = []

    def run(demo: scenes.Demo) -> None:
        sidecar = demo.new_sidecar("a", {})
        sidecar.http_url = f"http://127.0.0.1:{server.server_address[1]}"
        answers.append(sidecar.status())

    monkeypatch.setattr(scenes.Demo, "run", run)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        main(["demo"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        server.shutdown()
        server.server_close()
    assert answers == [{}]


@pytest.mark.parametrize("end", ["no start", "interrupt", "no answer", "killed"])
def test_the_demo_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """The doubles leave the file of a pool, as a sidecar does that is killed while it starts."""
    places.patch(monkeypatch, "POOLS", tmp_path)
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: str(tmp_path / prefix))
    monkeypatch.setattr(DemoSidecar, "program", ("-c", FAILING if end == "no start" else DEAF))
    made: list[DemoSidecar] = []

    def run(demo: scenes.Demo) -> None:
        sidecar = demo.new_sidecar("a", {})
        made.append(sidecar)
        for suffix in ("pool", "pool.lock"):
            (tmp_path / f"kvlake-{os.getuid()}-{sidecar.name}.{suffix}").touch()
        with sidecar:
            if end == "killed":
                sidecar.kill()
            places.patch(monkeypatch, "WAIT_SECONDS_MAX", 0.05, package="sidecar")
            if end == "interrupt":
                interrupted()
            sidecar.status()

    monkeypatch.setattr(scenes.Demo, "run", run)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        code = main(["demo"])
    finally:
        signal.signal(signal.SIGTERM, handler)
    ended(made[0])
    assert not list(tmp_path.glob("kvlake-*.pool*"))
    told = capsys.readouterr().err
    assert "a bug" not in told
    if end == "interrupt":
        assert code == 128 + signal.SIGINT
        return
    assert code == Exit.NO
    said = "the sidecar did not start" if end == "no start" else "did a process of the demo end"
    assert said in told
    assert f"logs are in {tmp_path}" in told
