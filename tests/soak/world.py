"""The processes of a soak: S3 server, throttling proxy, sidecar, engine; and what befalls them.

Owns starting, killing and restarting them. Does not own when (`run.py`). Invariants: the engine is
killed only while no request runs, so that every request must complete; everything is ended by its
own process id when the block is left.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import anyio.from_thread

from sidecar.demo.engine import Engine, EngineSpec
from sidecar.demo.model import write_model
from sidecar.demo.servers import HOST, S3Server, s3_server
from sidecar.demo.sidecars import SidecarProcess
from tests.faulty_proxy import Fault, FaultyProxy, faulty_proxy

BYTES_PER_SECOND: Final = 40 << 20
LATENCY_SECONDS: Final = 0.01
SERVER_SECONDS_MAX: Final = 60.0
ENGINE_ARGS: Final = {"max_model_len": 2048, "num_gpu_blocks_override": 256}
"""A prefix cache of its own that holds a sixth of the prompts' prefixes."""
HOST_SIZE: Final = "256MiB"
"""Less than the prompts' prefixes take: slots are evicted, and chunks read from the store."""


class World:
    """Everything that runs. Made by `world`."""

    def __init__(
        self, folder: Path, server: S3Server, proxy: FaultyProxy, portal: Any, module: str
    ) -> None:
        self._folder = folder
        self._portal = portal
        self.proxy = proxy
        self._server_command = _command_of(server.pid)
        self._server_pid = server.pid
        self._server: subprocess.Popen[bytes] | None = None
        self._model = str(write_model(folder / "model", layers=6, hidden=256, heads=4, kv_heads=4))
        config = {
            "host": {"size": HOST_SIZE},
            "store": {
                "url": server.url,
                "storage_options": server.options_at(proxy.endpoint),
                "refresh_seconds": "2s",
                "deadline_seconds_max": "5s",
            },
            "limits": {"drain_seconds_max": "5s"},
        }
        self.sidecar = SidecarProcess(folder / "sidecar", config, program=("-m", module))
        self.engine: Engine | None = None
        self._engines = 0
        self.sidecar_lives = 0

    # --- sidecar ---------------------------------------------------------------------------

    def start_sidecar(self) -> None:
        """The first one, or the next."""
        self.sidecar.start()
        self.sidecar_lives += 1

    def kill_sidecar(self) -> None:
        """SIGKILL, and another one after a moment."""
        self.sidecar.kill()
        time.sleep(0.5)
        self.start_sidecar()

    def drain_sidecar(self) -> None:
        """SIGTERM, as an upgrade does, and another one."""
        code = self.sidecar.drain()
        assert code == 0, f"a drained sidecar ended with {code}"
        self.start_sidecar()

    def stop_sidecar_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        assert self.sidecar.process is not None
        self.sidecar.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.sidecar.process.send_signal(signal.SIGCONT)

    # --- engine ----------------------------------------------------------------------------

    def start_engine(self) -> Engine:
        """A new engine; nothing of the last one may run."""
        self._engines += 1
        spec = EngineSpec(self._model, self.sidecar.socket, dict(ENGINE_ARGS))
        engine = Engine(spec, self._folder / f"engine-{self._engines}.log")
        self.engine = engine.wait_ready()
        return engine

    def kill_engine(self) -> None:
        """SIGKILL to it and all its processes."""
        assert self.engine is not None
        engine, self.engine = self.engine, None
        engine.kill()

    # --- store -----------------------------------------------------------------------------

    def restart_server_after(self, seconds: float) -> None:
        """SIGKILL to the S3 server; the same one again, on its data, after a while."""
        os.kill(self._server_pid, signal.SIGKILL)
        if self._server is not None:
            self._server.wait()
        time.sleep(seconds)
        command, directory, port = self._server_command
        with (self._folder / "server.log").open("ab") as log:
            self._server = subprocess.Popen(
                command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._server_pid = self._server.pid
        deadline = time.monotonic() + SERVER_SECONDS_MAX
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
                return
            time.sleep(0.2)

    def store_fault(self, fault: Fault, times: int) -> None:
        """The next exchanges with the store fail so."""

        async def become() -> None:
            await self.proxy.become(fault, times=times)

        self._portal.call(become)

    def close(self) -> None:
        """End what this started itself."""
        if self.engine is not None:
            self.engine.stop()
        if self.sidecar.process is not None and self.sidecar.process.poll() is None:
            self.sidecar.drain()
        self.sidecar.remove_pool()
        if self._server is not None:
            self._server.kill()
            self._server.wait()


def _command_of(pid: int) -> tuple[list[str], str, int]:
    """How a server was started, where, and its S3 port."""
    folder = Path("/proc") / str(pid)
    parts = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    command = [part.decode() for part in parts]
    port = next(int(part.partition("=")[2]) for part in command if part.startswith("-s3.port="))
    return command, os.readlink(folder / "cwd"), port


@contextlib.contextmanager
def world(folder: Path, *, module: str = "sidecar.cli") -> Generator[World]:
    """A running world; `module` is what serves as the sidecar."""
    with (
        s3_server(folder) as server,
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(faulty_proxy(server.endpoint)) as proxy,
    ):
        proxy.latency_seconds = LATENCY_SECONDS
        proxy.bytes_per_second_max = BYTES_PER_SECOND
        made = World(folder, server, proxy, portal, module)
        try:
            made.start_sidecar()
            made.start_engine()
            yield made
        finally:
            made.close()
