"""A sidecar as a process of its own: signals, successors, ends, and what stays behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from sidecar.core.engine import Engine
from sidecar.errors import StartError
from sidecar.exits import Exit
from sidecar.protocol import (
    Outcome,
    StoreJob,
)
from tests import places
from tests.sidecar.client import (
    RunningSidecar,
    Worker,
    config_in,
    key_of,
)

PROCESS = """
import sys, json
from pathlib import Path
import anyio
from sidecar.app import serve
from tests.sidecar.client import config_in
from tests.faulty_tier import Faulty, FaultRates

directory, stall_seconds = Path(sys.argv[1]), float(sys.argv[2])
config = config_in(
    directory,
    store={"url": f"file://{directory}/bucket", "writes_inflight_max": 1},
    limits={"drain_seconds_max": 600},
)
rates = FaultRates(stall=1.0, stall_seconds=stall_seconds)

async def main() -> int:
    return await serve(
        config,
        ready=lambda info: print(info.attach_path, flush=True),
        wrap_store=lambda tier: Faulty(tier, seed=1, rates=rates),
    )

sys.exit(anyio.run(main))
"""

HANGING = (
    PROCESS.replace('"drain_seconds_max": 600', '"drain_seconds_max": 1')
    .replace("ready=lambda info:", "ready=lambda info: hang() or")
    .replace(
        "async def main",
        """
def hang():
    import os, time
    from tests import places

    places.replace("ANNOUNCE_SECONDS_MAX", 0.5)
    places.replace("HANGING_SECONDS_MAX", 0.5)
    os.replace = lambda *paths: time.sleep(3600)

async def main""",
    )
)


class SidecarProcess:
    def __init__(
        self,
        directory: Path,
        stall_seconds: float,
        program: str = PROCESS,
        *,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(directory), str(stall_seconds)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            cwd=places.ROOT,
            text=True,
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def end(self) -> int:
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def left_in(directory: Path) -> list[str]:
    files = [path for path in directory.rglob("*") if not path.is_dir() and path.name != "lock"]
    return sorted(path.name for path in files if "bucket" not in path.parts)


def test_sigterm_drains_and_leaves_nothing(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0.1)
    with Worker(sidecar.path) as worker:
        for number in range(4):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == 0
    assert len(list(short_directory.glob("bucket/v1/*/??/*/*.arrow"))) == 4
    assert left_in(short_directory) == []


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2],
    ids=lambda one: one.name,
)
def test_it_drains_at_every_signal_that_would_end_it(
    short_directory: Path, number: signal.Signals
) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0)
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.process.send_signal(number)
        assert worker.at_end()
    assert sidecar.end() == 0
    assert len(list(short_directory.glob("bucket/v1/*/??/*/*.arrow"))) == 1


def test_a_request_to_reload_ends_nothing(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0)
    with Worker(sidecar.path) as worker:
        sidecar.process.send_signal(signal.SIGHUP)
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == 0


def test_a_terminal_that_is_closed_ends_it(short_directory: Path) -> None:
    ours, theirs = pty.openpty()
    sidecar = SidecarProcess(short_directory, stall_seconds=0, stdin=theirs)
    with Worker(sidecar.path) as worker:
        sidecar.process.send_signal(signal.SIGHUP)
        assert worker.at_end()
    assert sidecar.end() == 0
    os.close(theirs)
    os.close(ours)


def test_second_signal_ends_it_at_once(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=600)
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGINT)
        while sidecar.path.exists():
            time.sleep(0.01)
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == Exit.AT_ONCE
    left = [name for name in left_in(short_directory) if not name.endswith(".lock")]
    assert left == ["last-stop-lost"], "the next one tells of it"


def test_a_write_that_never_comes_back_does_not_keep_it(short_directory: Path) -> None:
    # In place of a mount whose server is gone, in a system call that nothing interrupts.
    sidecar = SidecarProcess(short_directory, stall_seconds=0, program=HANGING)
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.process.send_signal(signal.SIGTERM)
        assert worker.at_end()
    assert sidecar.end() == Exit.LOSS
    left = [name for name in left_in(short_directory) if not name.endswith(".lock")]
    assert left == ["last-stop-lost"], "the next one tells of it"


def test_killed_sidecar_is_replaced(short_directory: Path) -> None:
    sidecar = SidecarProcess(short_directory, stall_seconds=0)
    worker = Worker(sidecar.path)
    sidecar.process.kill()
    assert worker.at_end()
    worker.close()
    sidecar.end()
    assert sidecar.path.exists(), "a killed process removes nothing"
    with (
        RunningSidecar(config_in(short_directory)) as running,
        Worker(running.path) as again,
    ):
        assert again.epoch != worker.epoch
        assert again.store(1, key_of(1), [0]) is Outcome.OK
    assert left_in(short_directory) == []


def test_live_sidecar_is_not_replaced(sidecar: RunningSidecar, short_directory: Path) -> None:
    with pytest.raises(StartError, match=rf"pid {os.getpid()}\) already serves"):
        RunningSidecar(config_in(short_directory))
    with Worker(sidecar.path) as worker:
        assert worker.store(1, key_of(1), [0]) is Outcome.OK


def test_taken_port_is_told(sidecar: RunningSidecar, short_directory: Path) -> None:
    port = int(sidecar.info.http_url.rsplit(":", 1)[1])
    config = config_in(short_directory, runtime={"name": "two"}, http={"port": port})
    with pytest.raises(StartError, match=r"choose another http\.port"):
        RunningSidecar(config)
    assert [name for name in left_in(short_directory) if "two" in name] == []


def test_bug_in_the_engine_ends_the_sidecar(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar = RunningSidecar(config_in(short_directory))
    with Worker(sidecar.path) as worker:
        monkeypatch.setattr(Engine, "_submit", lambda *_: 1 / 0)
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of(1), [0])])])
        assert worker.at_end()
        with pytest.raises(ZeroDivisionError):
            sidecar.stop()
    assert left_in(short_directory) == []
