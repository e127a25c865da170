"""How `kvlake run` stops its sidecar: with one signal, unless it drains already."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sidecar.cli.console import NotStarted
from sidecar.cli.run import SupervisedSidecar, is_locked, listener, serve_command, signals
from sidecar.config.model import load
from tests import places

WAIT_SECONDS_MAX = 60.0


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Node:
    """A folder with one configuration, and the signals for a `run`, of which none comes."""

    def __init__(self, directory: Path, wakeup: socket.socket) -> None:
        self.directory = directory
        self.home = directory / "run" / "one"
        self.attach = self.home / "attach.sock"
        self.host = directory / "pool"
        self.host.mkdir()
        self.wakeup = wakeup
        values = {
            "runtime": {"directory": str(self.home.parent), "name": "one"},
            "host": {"size": "4MiB", "directory": str(self.host), "after_stop": "remove"},
            "http": {"port": 0},
            "limits": {"drain_seconds_max": "1s"},
        }
        self.config = directory / "kvlake.yaml"
        self.config.write_text(yaml.safe_dump(values))
        self.serve = serve_command(self.config)

    def supervised(self, command: list[str] | None = None) -> SupervisedSidecar:
        return SupervisedSidecar(load(self.config), command or self.serve)

    def has_pool(self) -> bool:
        return any(self.host.iterdir())

    def serves(self) -> bool:
        try:
            return listener(self.attach).pid != 0
        except OSError:
            return False


@pytest.fixture
def node(short_directory: Path) -> Iterator[Node]:
    with signals() as wakeup:
        yield Node(short_directory, wakeup)


KILLED = "it is killed, unwritten chunks are lost"


def test_a_sidecar_that_is_not_ready_in_time_is_signalled(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was killed after all of the time that a drain may take, and its pool stayed."""
    places.patch(monkeypatch, "_READY_SECONDS_BASE", 0.01)
    sidecar = node.supervised()
    with pytest.raises(NotStarted, match="was not ready after"):
        sidecar.start(node.wakeup)
    wait_for(node.has_pool)
    sidecar.stop(node.wakeup)
    assert KILLED not in capfd.readouterr().err
    assert not node.has_pool()


def test_a_sidecar_whose_runtime_directory_was_removed_is_signalled(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its queued writes were lost. A file in place of the directory keeps it from a new one."""
    sidecar = node.supervised()
    sidecar.start(node.wakeup)
    shutil.rmtree(node.home.parent)
    node.home.parent.touch()
    sidecar.stop(node.wakeup)
    said = capfd.readouterr().err
    assert KILLED not in said
    assert "drained" in said
    assert not node.has_pool()


def test_a_dead_sidecars_socket_is_not_the_next_ones(
    node: Node, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = subprocess.Popen(node.serve)
    wait_for(node.serves)
    killed.kill()
    killed.wait()
    dead = node.attach.stat().st_ino
    sidecar = node.supervised()
    sidecar.retry()
    # Also once it runs, and has not yet removed the socket.
    while not is_locked(node.home):
        sidecar.watch()
        time.sleep(0.001)
    # It may have one of its own by now.
    wait_for(lambda: not node.attach.exists() or node.attach.stat().st_ino != dead)
    sidecar.stop(node.wakeup)
    assert KILLED not in capfd.readouterr().err
    assert not node.has_pool()


def test_a_sidecar_says_when_it_drains(node: Node) -> None:
    """The end of its pipe; a second signal would end the drain."""
    reader, writer = os.pipe()
    with subprocess.Popen([*node.serve, "--ready-fd", str(writer)], pass_fds=[writer]) as process:
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            assert pipe.readline().endswith(b"}\n")
            process.terminate()
            assert pipe.read(1) == b""
    assert process.returncode == 0


CHILD = """
    import os, signal, sys, time
    from pathlib import Path

    signals, pipe = Path(sys.argv[1]), int(sys.argv[3])

    def drain(*_):
        with signals.open("a") as file:
            print(os.getpid(), file=file)
        os.close(pipe)
        signals.with_suffix(".drains").touch()
        time.sleep(0.5)
        sys.exit()

    signal.signal(signal.SIGTERM, drain)
    os.write(pipe, b"{}")
    signals.with_suffix(".pid").write_text(str(os.getpid()))
    signal.pause()
"""
"""A stand-in for a sidecar: it serves, and drains at a signal."""


def test_a_sidecar_that_was_started_again_gets_no_second_signal(node: Node) -> None:
    """As where systemd stops a unit soon after its sidecar died."""
    received = node.directory / "received"
    pid = received.with_suffix(".pid")
    sidecar = node.supervised([sys.executable, "-c", textwrap.dedent(CHILD), str(received)])
    sidecar.retry()
    while sidecar.watch() is not None:
        time.sleep(0.01)
    wait_for(lambda: pid.exists() and pid.read_text())
    os.kill(int(pid.read_text()), signal.SIGTERM)
    wait_for(received.with_suffix(".drains").exists)
    sidecar.stop(node.wakeup)
    assert received.read_text().split() == [pid.read_text()]
