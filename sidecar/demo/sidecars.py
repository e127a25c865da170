"""A sidecar in a process of its own, for the demo and the end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Final, Protocol

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

READY_SECONDS_MAX: Final = 60.0
WAIT_SECONDS_MAX: Final = 60.0
STOP_SECONDS_MAX: Final = 60.0
POOLS: Final = Path("/dev/shm")  # noqa: S108 (where the default configuration has them)


class SidecarFailed(Exception):
    """The sidecar did not start, or did not do in time what was waited for."""


class Process(Protocol):
    """What `SidecarProcess` needs of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code. Raises `subprocess.TimeoutExpired`."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, unless it has ended."""
        ...

    def kill(self) -> None:
        """SIGKILL."""
        ...


def launch(program: Sequence[str], arguments: Sequence[str], ready: int, log: IO[bytes]) -> Process:
    """Start the process of a sidecar in a session of its own.

    Args:
        program: what Python runs.
        arguments: of `kvlake`, but for the two about this process: where it says that it is ready,
            and whom it ends with.
        ready: that descriptor.
        log: what it prints goes there.
    """
    return subprocess.Popen(
        [
            *(sys.executable, *program, *arguments),
            *("--ready-fd", str(ready), "--parent-pid", str(os.getpid())),
        ],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=[ready],
        start_new_session=True,
    )


class SidecarProcess:
    """`kvlake serve` with a configuration of its own; a context manager that kills it.

    Args:
        folder: where its configuration, sockets and log go. Sidecars that take over from one
            another use the same folder, and so the same sockets.
        config: sections of the configuration; sockets and an unused HTTP port are filled in.
        program: what Python runs; it takes the arguments of `kvlake`.
    """

    launch: ClassVar[Callable[[Sequence[str], Sequence[str], int, IO[bytes]], Process]] = (
        staticmethod(launch)
    )
    """How its process is started. Tests put a faster way in its place."""

    def __init__(
        self,
        folder: Path,
        config: dict[str, Any],
        *,
        program: Sequence[str] = ("-m", "sidecar.cli"),
    ) -> None:
        self.folder = folder
        self._program = program
        self.runtime = folder / "run"
        self.log_path = folder / "sidecar.log"
        self.config_path = folder / "sidecar.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        # The pool's file is named after the sidecar, so two on one machine need two names.
        self.name = f"demo-{os.getpid()}-{folder.name}"
        merged = {
            "runtime": {"directory": str(self.runtime), "name": self.name},
            "http": {"port": 0},
            **config,
            # Nobody comes back for what a demo or a test leaves, unless it says so.
            "host": {"after_stop": "remove", **config.get("host", {})},
        }
        self.config_path.write_text(yaml.safe_dump(merged))
        self.process: Process | None = None
        self._http = ""

    @property
    def socket(self) -> str:
        """Path of the socket that connectors attach to."""
        return str(self.runtime / self.name / "attach.sock")

    def start(self) -> SidecarProcess:
        """Start and wait until it serves. Raises `SidecarFailed`."""
        reader, writer = os.pipe()
        with self.log_path.open("ab") as log:
            arguments = ["serve", "--config", str(self.config_path)]
            self.process = type(self).launch(self._program, arguments, writer, log)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            readable, _, _ = select.select([pipe], [], [], READY_SECONDS_MAX)
            line = pipe.readline() if readable else b""
            if not line:
                tail = self.log_path.read_text(errors="replace")[-2000:]
                self.kill()
                raise SidecarFailed(f"the sidecar did not start:\n{tail}")
        self._http = str(json.loads(line)["http_url"])
        return self

    def status(self) -> dict[str, Any]:
        """What `/status` says."""
        status: dict[str, Any] = json.loads(self.get("/status"))
        return status

    def get(self, path: str) -> str:
        """The body of an HTTP path of the sidecar."""
        with urllib.request.urlopen(f"{self._http}{path}", timeout=WAIT_SECONDS_MAX) as answer:  # noqa: S310 (http)
            return str(answer.read().decode())

    def wait(
        self,
        what: str,
        condition: Callable[[dict[str, Any]], bool],
        seconds: float = WAIT_SECONDS_MAX,
    ) -> None:
        """Wait until `condition` holds of the status."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise SidecarFailed(f"{what}: not in {seconds:.0f} s; status {json.dumps(status)}")
            time.sleep(0.02)

    def drain(self) -> int:
        """SIGTERM and wait for its end; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS_MAX)

    def kill(self) -> None:
        """SIGKILL: as a crash or the kernel would."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(STOP_SECONDS_MAX)

    def remove_pool(self) -> None:
        """After `kill`: remove the memory that the next sidecar of this name would have taken over.

        A killed sidecar's pool stays in /dev/shm, and uses it, until somebody does.
        """
        assert self.process is None or self.process.poll() is not None
        for suffix in ("pool", "pool.lock"):
            path = POOLS / f"kvlake-{os.getuid()}-{self.name}.{suffix}"
            path.unlink(missing_ok=True)

    def __enter__(self) -> SidecarProcess:
        return self.start() if self.process is None else self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.drain()
