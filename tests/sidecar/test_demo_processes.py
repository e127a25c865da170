"""However the demo ends: no sidecar runs on, no memory is left, and no bug is reported."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from sidecar.cli import main
from sidecar.demo import scenes
from sidecar.demo.engine import DemoEngine
from sidecar.demo.processes import SEAWEED_READY, DemoSidecar, ProcessFailed, s3_bucket
from sidecar.exits import Exit
from tests import places
from tests.sidecar.prompt_records import standing_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


class Engine(subprocess.Popen[bytes]):
    """In place of an engine's process: it ends by SIGKILL only."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        program = "trap '' TERM; echo ready; exec sleep 600"
        pipe = subprocess.PIPE
        super().__init__(["sh", "-c", program], stdin=pipe, stdout=pipe, start_new_session=True)
        assert self.stdout is not None
        with self.stdout:
            assert self.stdout.readline() == b"ready\n"
        self.environment = environment
        self.interrupts = 1

    def wait(self, timeout: float | None = None) -> int:
        """As its base, after a Ctrl-C."""
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        return super().wait(timeout)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """The processes that were started as engines."""
    started: list[Engine] = []

    def launch(_model: str, _socket: str, environment: Mapping[str, str], *_: object) -> Engine:
        started.append(Engine(environment))
        return started[-1]

    places.patch(monkeypatch, "launch_engine", launch)
    yield started
    for one in started:
        one.kill()
        one.interrupts = 0
        one.wait()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_no_prompt_of_the_demo_is_computed_because_the_store_is_slow(tmp_path: Path) -> None:
    """On a slow machine a scene of a hit loaded nothing, and the demo failed."""
    demo = scenes.Demo(tmp_path, scenes.Output(quiet=True))
    sidecar = demo.new_sidecar("a", {"url": f"file://{tmp_path}/store"})
    config = yaml.safe_load(sidecar.config_path.read_text())
    assert config["store"]["recompute"] == "never"


def test_a_start_that_is_interrupted_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = sidecar_of(tmp_path, SLOW)
    with monkeypatch.context() as patch:
        patch.setattr(select, "select", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sidecar.start()
    assert ended(sidecar) == -signal.SIGKILL


def test_a_second_interrupt_leaves_no_engine(tmp_path: Path, engines: list[Engine]) -> None:
    """The first had it end, and the second came while it was waited for."""
    with pytest.raises(KeyboardInterrupt), DemoEngine("model", "socket", tmp_path / "log"):
        pass
    assert engines[0].poll() == -signal.SIGKILL


def test_an_engine_keeps_what_is_of_no_use_later_in_the_folder_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Engine]
) -> None:
    """Digests of removed models were left behind in the user's folder, at each run."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    monkeypatch.setenv("VLLM_CACHE_ROOT", "")
    monkeypatch.delenv("VLLM_CACHE_ROOT")
    with pytest.raises(KeyboardInterrupt), DemoEngine("model", "socket", tmp_path / "log"):
        pass
    assert engines[0].environment["XDG_CACHE_HOME"] == str(tmp_path / "cache")
    assert engines[0].environment["VLLM_CACHE_ROOT"] == "/caches/vllm"


def test_an_interrupt_does_not_reach_the_s3_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended before the sidecars that wrote to it."""
    program = tmp_path / "weed"
    program.write_text(
        f"#!{sys.executable} -S\nimport os, time\n"
        f"print(os.getsid(0) == os.getpid(), {SEAWEED_READY!r}, flush=True)\ntime.sleep(600)\n"
    )
    program.chmod(0o755)
    places.patch(monkeypatch, "find_program", lambda _: str(program))
    with s3_bucket(tmp_path / "s3"):
        assert (tmp_path / "s3/log").read_text().startswith("True")


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
