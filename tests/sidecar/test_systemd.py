"""sd_notify over a real datagram socket, from the sidecar and from `kvlake run`."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from sidecar.service.systemd import Notifier, without_notify
from tests import places
from tests.sidecar.client import Worker, key_of


class Manager:
    """The service manager's end of `$NOTIFY_SOCKET`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.lines: list[str] = []
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(path if not path.startswith("@") else f"\0{path[1:]}")
        self._datagrams: queue.SimpleQueue[str] = queue.SimpleQueue()
        # The kernel keeps a few only: who sends more loses them.
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while datagram := self._sock.recv(4096):
            self._datagrams.put(datagram.decode())

    def wait_for(self, wanted: str, seconds: float = 60) -> list[str]:
        """Read until a line begins with `wanted`; everything that came since the last call."""
        deadline, start = time.monotonic() + seconds, len(self.lines)
        while not any(line.startswith(wanted) for line in self.lines[start:]):
            left = max(0.01, deadline - time.monotonic())
            self.lines += self._datagrams.get(timeout=left).split("\n")
        return self.lines[start:]

    def close(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._sock.close()


@pytest.fixture
def manager(short_directory: Path) -> Iterator[Manager]:
    manager = Manager(str(short_directory / "notify"))
    yield manager
    manager.close()


def environment(manager: Manager, watchdog_seconds: float | None = None) -> dict[str, str]:
    given = {**os.environ, "NOTIFY_SOCKET": manager.path}
    if watchdog_seconds is not None:
        given["WATCHDOG_USEC"] = str(int(watchdog_seconds * 1e6))
    return given


def config_file(directory: Path, **more: object) -> Path:
    (directory / "pool").mkdir(exist_ok=True)
    file = directory / "kvlake.yaml"
    values = {
        "runtime": {"directory": str(directory / "run")},
        "host": {"size": "8MiB", "directory": str(directory / "pool")},
        "http": {"port": 0},
        **more,
    }
    file.write_text(yaml.safe_dump(values))
    return file


def serve(directory: Path, env: dict[str, str], **more: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, *places.program(), "serve", "--config"]
    return subprocess.Popen(
        [*command, str(config_file(directory, **more))], env=env, cwd=places.ROOT
    )


def test_the_manager_is_told_of_each_phase(short_directory: Path, manager: Manager) -> None:
    process = serve(short_directory, environment(manager, watchdog_seconds=1))
    try:
        told = manager.wait_for("READY=1")
        assert any(line.startswith("EXTEND_TIMEOUT_USEC=") for line in told), "a start takes time"
        manager.wait_for("WATCHDOG=1")
        manager.wait_for("WATCHDOG=1")
        # What READY=1 promises: engines can attach now.
        with Worker(short_directory / "run" / "default" / "attach.sock") as worker:
            assert worker.store(1, key_of(1), [0]).name == "OK"
        process.send_signal(signal.SIGTERM)
        told = manager.wait_for("STOPPING=1")
        manager.wait_for("EXTEND_TIMEOUT_USEC=")
        assert process.wait(20) == 0
        assert not any(line.startswith("MAINPID") for line in manager.lines)
        assert "STATUS=serving" in manager.lines
    finally:
        process.kill()
        process.wait()


def test_the_watchdog_is_not_fed_while_engines_cannot_be_served(
    short_directory: Path, manager: Manager
) -> None:
    script = """
        import sys
        from sidecar.cli import main
        from tests import places
        places.replace("Copies.stuck_seconds", lambda *_: 60.0)
        sys.exit(main(["serve", "--config", sys.argv[1]]))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(config_file(short_directory))],
        env=environment(manager, watchdog_seconds=0.5),
        cwd=places.ROOT,
    )
    try:
        manager.wait_for("STATUS=every copy thread")
        manager.lines.clear()
        with pytest.raises(queue.Empty):
            manager.wait_for("WATCHDOG=1", seconds=2)
    finally:
        process.kill()
        process.wait()


def test_under_run_only_the_main_process_speaks(short_directory: Path, manager: Manager) -> None:
    engine = short_directory / "vllm"
    engine.write_text(
        f"#!{sys.executable}\n"
        "import os, sys, time\n"
        "assert not [name for name in os.environ if name.startswith(('NOTIFY_', 'WATCHDOG_'))]\n"
        "sys.stdin.read()\n"
    )
    engine.chmod(0o755)
    command = [sys.executable, *places.program(), "run", "--config"]
    process = subprocess.Popen(
        [*command, str(config_file(short_directory)), "--", str(engine), "serve", "m"],
        env=environment(manager, watchdog_seconds=1),
        cwd=places.ROOT,
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    try:
        told = manager.wait_for("READY=1")
        assert [line for line in told if line.startswith("READY")] == ["READY=1"]
        manager.wait_for("WATCHDOG=1")
        process.stdin.close()
        manager.wait_for("STOPPING=1")
        assert process.wait(30) == 0
        assert "STATUS=serving" not in manager.lines, "that is the sidecar's own line"
        assert manager.lines.count("READY=1") == 1
        assert not any(line.startswith("MAINPID") for line in manager.lines)
    finally:
        process.kill()
        process.wait()


# --- the line itself -----------------------------------------------------------------------------


def test_a_socket_in_the_abstract_namespace() -> None:
    manager = Manager(f"@kvlake-test-{os.getpid()}")
    Notifier({"NOTIFY_SOCKET": manager.path}).ready("two\nlines")
    manager.wait_for("READY=1")
    assert "STATUS=two lines" in manager.lines
    manager.close()


@pytest.mark.parametrize("path", ["", "relative", "vsock:2:1234", "/does/not/exist", "/tmp"])
def test_a_manager_that_does_not_listen_is_no_fault(path: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "1000000"})
    notifier.ready("x")
    notifier.alive()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdogs_time(given: dict[str, str], seconds: float | None) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/x", **given}).watchdog_seconds == seconds


def test_children_are_not_given_the_line() -> None:
    given = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "PATH": "/bin"}
    assert without_notify(given) == {"PATH": "/bin"}
