"""Several `kvlake run` on one node, with real sidecars. Engines are scripts that wait."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from sidecar.cli.console import CommandError, NotStarted
from sidecar.cli.run import SupervisedSidecar, has_joined, is_locked, listener
from sidecar.config.model import load
from sidecar.exits import Exit
from tests import places

WAIT_SECONDS_MAX = 60.0
OTHER_UID = 54321


def wait_for(happened: Callable[[], object], said: Callable[[], str]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not happened():
        assert time.monotonic() < deadline, said()
        time.sleep(0.02)


class Node:
    """A folder with one configuration, and what was started by it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.home = directory / "run" / "one"
        self.host = directory / "pool"
        self.config = directory / "kvlake.yaml"
        values = {
            "runtime": {"directory": str(directory / "run"), "name": "one"},
            "host": {"size": "4MiB", "directory": str(self.host)},
            "http": {"port": 0},
        }
        self.config.write_text(yaml.safe_dump(values))
        vllm = directory / "vllm"
        vllm.write_text(
            f"#!{sys.executable}\nimport sys\nprint('engine', flush=True)\nsys.stdin.read()\n"
        )
        vllm.chmod(0o755)
        self.runs: list[Run] = []

    def run(self, *options: str) -> Run:
        self.runs.append(Run(self, len(self.runs), options))
        return self.runs[-1]

    @property
    def serving(self) -> int:
        """The process of the sidecar that serves; 0 for none."""
        with contextlib.suppress(OSError):
            return listener(self.home / "attach.sock").pid
        return 0


class Run:
    """One `kvlake run`."""

    def __init__(self, node: Node, number: int, options: tuple[str, ...]) -> None:
        self._log = node.directory / f"run-{number}.log"
        command = [*places.program(), "run", "--config", str(node.config), *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command, "--", str(node.directory / "vllm"), "serve", "model"],
                cwd=places.ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def log(self) -> str:
        return self._log.read_text()

    def wait_says(self, text: str) -> None:
        wait_for(lambda: text in self.log(), self.log)

    def end(self) -> int:
        """Have its engine end, and so itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(WAIT_SECONDS_MAX)


@pytest.fixture
def node(short_directory: Path) -> Iterator[Node]:
    node = Node(short_directory)
    node.host.mkdir()
    yield node
    for run in node.runs:
        assert run.process.stdin is not None
        run.process.stdin.close()
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    wait_for(lambda: not is_locked(node.home), lambda: f"pid {node.serving} serves still")


def test_the_second_run_joins_and_the_last_one_drains(node: Node) -> None:
    first = node.run()
    first.wait_says("engine\n")
    second = node.run()
    second.wait_says("engine\n")
    sidecar = node.serving
    assert f"a sidecar (pid {sidecar}) serves" in second.log()
    assert has_joined(node.home)
    assert first.end() == 0
    assert "continues for others that joined it" in first.log()
    assert node.serving == sidecar
    assert second.end() == 0
    # It writes to the log of the run that started it.
    first.wait_says("drained")
    wait_for(lambda: not is_locked(node.home), first.log)


@pytest.mark.promise("foreign-listener")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can listen as another user")
def test_a_sidecar_of_another_user_is_not_joined(node: Node) -> None:
    """It was, if that user had made the directory in /tmp first, and was sent the KV memory."""
    node.home.mkdir(parents=True)
    node.home.chmod(0o777)
    os.chown(node.home, OTHER_UID, OTHER_UID)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(node.home / "attach.sock"))
        os.seteuid(OTHER_UID)
        try:
            other.listen()
        finally:
            os.seteuid(0)
        # Also not with --optional: an engine with that socket would attach by itself.
        run = node.run("--optional")
        assert run.process.wait(WAIT_SECONDS_MAX) == Exit.USAGE
        assert f"belongs to uid {OTHER_UID}" in run.log()
        assert "joined" not in run.log()
        assert "engine" not in run.log()


def test_a_killed_starter_does_not_end_the_sidecar_of_others(node: Node) -> None:
    first = node.run()
    first.wait_says("engine\n")
    second = node.run()
    second.wait_says("engine\n")
    sidecar = node.serving
    first.process.kill()
    first.process.wait()
    assert node.serving == sidecar
    assert second.end() == 0
    first.wait_says("drained")


def kill_and_wait_for_the_next(node: Node) -> None:
    killed = node.serving
    os.kill(killed, signal.SIGKILL)
    wait_for(
        lambda: node.serving not in (0, killed),
        lambda: "\n".join(run.log() for run in node.runs),
    )


def test_after_a_dead_sidecar_one_run_starts_the_next_and_the_others_join(node: Node) -> None:
    runs = [node.run()]
    runs[0].wait_says("engine\n")
    runs += [node.run(), node.run()]
    for run in runs[1:]:
        run.wait_says("engine\n")
    for _ in range(2):
        kill_and_wait_for_the_next(node)
    assert [run.end() for run in runs] == [0, 0, 0]


def test_two_simultaneous_runs_have_one_sidecar(node: Node) -> None:
    runs = [node.run(), node.run()]
    for run in runs:
        run.wait_says("engine\n")
    joined = ["joined it" in run.log() for run in runs]
    assert sorted(joined) == [False, True]
    assert [run.end() for run in runs] == [0, 0]


def test_an_engine_starts_without_a_sidecar_only_with_optional(node: Node) -> None:
    node.host.rmdir()
    assert node.run().process.wait(WAIT_SECONDS_MAX) == Exit.START
    allowed = node.run("--optional")
    allowed.wait_says("engine\n")
    assert "does not exist; make that folder" in allowed.log()
    assert "the engine starts without it, because of --optional" in allowed.log()
    node.host.mkdir()
    wait_for(lambda: node.serving, allowed.log)
    assert allowed.end() == 0


def test_a_sidecar_that_is_ready_when_nobody_waits_serves(node: Node) -> None:
    """It ended as by a bug, and removed its host memory."""
    reader, writer = os.pipe()
    os.close(reader)
    command = ["serve", "--config", str(node.config), "--ready-fd", str(writer)]
    with subprocess.Popen(
        [sys.executable, *places.program(), *command], cwd=places.ROOT, pass_fds=[writer]
    ) as process:
        os.close(writer)
        try:
            wait_for(lambda: node.serving or process.poll() is not None, lambda: "")
            assert node.serving == process.pid
            time.sleep(0.2)
        finally:
            process.terminate()
        assert process.wait(WAIT_SECONDS_MAX) == 0


def test_a_runtime_directory_that_cannot_be_examined_is_refused(node: Node) -> None:
    """As in the directory of another user, it ended as by a bug."""
    values = yaml.safe_load(node.config.read_text())
    values["runtime"]["directory"] = str(node.config / "run")
    config = node.directory / "other.yaml"
    config.write_text(yaml.safe_dump(values))
    vllm = str(node.directory / "vllm")
    command = [*places.program(), "run", "--config", str(config), "--", vllm, "serve", "model"]
    done = subprocess.run(
        [sys.executable, *command], cwd=places.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == Exit.START, done.stderr
    assert "cannot be made" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("os.kill(os.getpid(), 9)", NotStarted),
        ("os._exit(70)", NotStarted),
        ("os._exit(2)", CommandError),
    ],
)
def test_a_sidecar_that_ends_while_it_starts(node: Node, ends: str, error: type[Exception]) -> None:
    """Only what is wrong in the configuration stays wrong."""
    sidecar = SupervisedSidecar(load(node.config), [sys.executable, "-c", f"import os; {ends}"])
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(CommandError, match="ended with code") as raised:
        sidecar.start(ours)
    assert type(raised.value) is error
    sidecar.stop(ours)
