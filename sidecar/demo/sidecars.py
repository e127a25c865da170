"""A sidecar in a process of its own: `kvlake serve` with a configuration of the caller."""

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
from typing import IO, TYPE_CHECKING, Any, Final, Self

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WAIT_SECONDS_MAX: Final = 60.0
POOLS: Final = Path("/dev/shm")  # noqa: S108 (where the default configuration has them)


class SidecarFailed(Exception):
    """The sidecar did not start, or a condition did not become true in time."""


def launch_sidecar(
    program: Sequence[str], arguments: Sequence[str], ready: int, log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a sidecar's process, which writes a line to the descriptor `ready` when it serves.

    `program` are the arguments of Python that start `kvlake`, which gets `arguments`.
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


class DemoSidecar:
    """`kvlake serve`; a context manager that starts and drains it.

    `folder` has its configuration, sockets and log. A sidecar in the folder of an earlier one has
    the same sockets, so that engines attach to it. `config` are sections of the configuration.
    """

    program: Sequence[str] = ("-m", "sidecar.cli")

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder = folder
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
            "host": {"after_stop": "remove", **config.get("host", {})},
        }
        self.config_path.write_text(yaml.safe_dump(merged))
        self.process: subprocess.Popen[bytes] | None = None
        self._http = ""

    @property
    def socket(self) -> str:
        """Path of the socket that connectors attach to."""
        return str(self.runtime / self.name / "attach.sock")

    def start(self) -> Self:
        """Start it and wait until it serves. Raises `SidecarFailed`."""
        reader, writer = os.pipe()
        with self.log_path.open("ab") as log:
            arguments = ["serve", "--config", str(self.config_path)]
            self.process = launch_sidecar(self.program, arguments, writer, log)
        os.close(writer)
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            readable, _, _ = select.select([pipe], [], [], WAIT_SECONDS_MAX)
            line = pipe.readline() if readable else b""
        if not line:
            self.kill()
            tail = self.log_path.read_text(errors="replace")[-2000:]
            raise SidecarFailed(f"the sidecar did not start:\n{tail}")
        self._http = str(json.loads(line)["http_url"])
        return self

    def get(self, path: str) -> str:
        """The body of an HTTP path of the sidecar."""
        with urllib.request.urlopen(f"{self._http}{path}", timeout=WAIT_SECONDS_MAX) as answer:  # noqa: S310 (http)
            return str(answer.read().decode())

    def status(self) -> dict[str, Any]:
        """The status document."""
        status: dict[str, Any] = json.loads(self.get("/status"))
        return status

    def wait(
        self,
        what: str,
        condition: Callable[[dict[str, Any]], bool],
        seconds: float = WAIT_SECONDS_MAX,
    ) -> None:
        """Wait until `condition` is true of the status. Raises `SidecarFailed`."""
        deadline = time.monotonic() + seconds
        while not condition(status := self.status()):
            if time.monotonic() > deadline:
                raise SidecarFailed(f"{what}: not in {seconds:.0f} s; status {json.dumps(status)}")
            time.sleep(0.02)

    def drain(self) -> int:
        """SIGTERM and wait for its end; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT_SECONDS_MAX)

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            self.process.wait(WAIT_SECONDS_MAX)

    def remove_pool(self) -> None:
        """After `kill`: remove the pool's file, which the next sidecar of this name would reuse."""
        assert self.process is None or self.process.poll() is not None
        for suffix in ("pool", "pool.lock"):
            path = POOLS / f"kvlake-{os.getuid()}-{self.name}.{suffix}"
            path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self.start() if self.process is None else self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.drain()
