"""The processes of a soak: S3 server, throttling proxy, sidecar, engines; and what befalls them.

Owns starting, killing and restarting them. Does not own when (`run.py`). Invariants: the engine is
killed only while no request runs, so that every request must complete; the reference, an engine
without kvlake, is never touched; everything is ended by its own process id when the block is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio.from_thread

from sidecar.demo.model import write_model
from sidecar.exits import Exit
from tests import places
from tests.faulty_proxy import Fault, FaultyProxy, faulty_proxy
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess
from tiers.store.object_tier import UrlObjects

SHM: Final = Path("/dev/shm")
BYTES_PER_SECOND: Final = 40 << 20
LATENCY_SECONDS: Final = 0.01
ENGINE_ARGS: Final = {"max_model_len": 2048, "num_gpu_blocks_override": 256}
"""A prefix cache of its own that holds a sixth of the prompts' prefixes."""
HOST_SIZE: Final = "256MiB"
"""Less than the prompts' prefixes take: slots are evicted, and chunks read from the store."""

STORE_SIZE: Final = 1 << 30
"""Bound of the bucket. The load would fill it in two or three minutes: chunks are collected."""


class World:
    """Everything that runs. Made by `world`."""

    def __init__(
        self,
        folder: Path,
        server: S3Server,
        proxy: FaultyProxy,
        portal: Any,
        program: Sequence[str],
        limits: dict[str, str],
    ) -> None:
        self._folder = folder
        self._portal = portal
        self._proxy = proxy
        self._server = server
        self._model = str(write_model(folder / "model", layers=6, hidden=256, heads=4, kv_heads=4))
        config = {
            "host": {"size": HOST_SIZE},
            "store": {
                "url": server.url,
                **server.settings_at(proxy.endpoint),
                "refresh_seconds": "2s",
                "deadline_seconds_max": "5s",
                # This model computes sooner than such a store is read: read it all the same.
                "recompute": "never",
                "size_max": STORE_SIZE,
                "gc": {"every": "10s", "grace": "8s"},
            },
            "limits": {"drain_seconds_max": "5s", **limits},
        }
        self.sidecar = SidecarProcess(folder / "sidecar", config, program=program)
        self._engine: EngineProcess | None = None
        self._reference: EngineProcess | None = None
        self._engines = 0
        self._started: list[EngineProcess] = []
        self.sidecar_lives = 0
        self.sidecar_exit: int | None = None
        """Exit code of the last one, once all has ended."""

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
        # The store is slow: what it did not take in `limits.drain_seconds_max` is lost, and told.
        assert code in (Exit.OK, Exit.LOSS), f"a drained sidecar ended with {code}"
        self.start_sidecar()

    def stop_sidecar_for(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        assert self.sidecar.process is not None
        self.sidecar.process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            self.sidecar.process.send_signal(signal.SIGCONT)

    def runtime_files(self) -> int:
        """How many files the sidecar keeps beside its sockets."""
        return sum(1 for _ in self.sidecar.runtime.rglob("*"))

    def shared_files(self) -> list[Path]:
        """Files of this sidecar in shared memory."""
        return sorted(SHM.glob(f"kvlake-*{self.sidecar.name}*"))

    # --- engines ---------------------------------------------------------------------------

    @property
    def engine(self) -> EngineProcess:
        """The one with kvlake; raises between two of them."""
        assert self._engine is not None, "it is replaced only while nothing runs"
        return self._engine

    @property
    def reference(self) -> EngineProcess:
        """The one without kvlake."""
        assert self._reference is not None, "it is started with the world"
        return self._reference

    @property
    def engine_pid(self) -> int | None:
        """Process of the engine with kvlake; None until it serves."""
        engine = self._engine
        return None if engine is None else engine.process.pid

    def start_engines(self) -> None:
        """The first one, and the reference, side by side."""
        reference = self._new_engine("reference", None)
        self.start_engine()
        self._reference = reference.wait_ready()

    def start_engine(self) -> None:
        """A new engine; nothing of the last one may run."""
        self._engines += 1
        engine = self._new_engine(f"engine-{self._engines}", self.sidecar.socket)
        self._engine = engine.wait_ready()

    def kill_engine(self) -> None:
        """SIGKILL to it and all its processes."""
        engine, self._engine = self.engine, None
        self._started.remove(engine)
        engine.kill()

    def engine_logs(self) -> list[Path]:
        """Logs of all engines with kvlake so far."""
        return sorted(self._folder.glob("engine-*.log"))

    def _new_engine(self, name: str, sidecar_socket: str | None) -> EngineProcess:
        spec = EngineSpec(self._model, sidecar_socket, dict(ENGINE_ARGS))
        engine = EngineProcess(spec, self._folder / f"{name}.log")
        self._started.append(engine)
        return engine

    # --- store -----------------------------------------------------------------------------

    def restart_server_after(self, seconds: float) -> None:
        """SIGKILL to the S3 server; the same one again, on its data, after a while."""
        self._server.process.kill()
        time.sleep(seconds)
        self._server.restart()

    def stored(self) -> tuple[int, int]:
        """How many objects the store holds, and their bytes: asked of the server itself."""

        async def add_up() -> tuple[int, int]:
            tier = UrlObjects(self._server.url, self._server.access_at())
            try:
                found = await tier.list("")
            finally:
                await tier.close()
            return len(found), sum(one.size_bytes for one in found)

        objects, num_bytes = self._portal.call(add_up)
        return int(objects), int(num_bytes)

    def store_fault(self, fault: Fault, times: int) -> None:
        """The next exchanges with the store fail so."""

        async def become() -> None:
            # What it was asked is of no interest here, and would be kept for half an hour.
            self._proxy.exchanges.clear()
            await self._proxy.become(fault, times=times)

        self._portal.call(become)

    def close(self) -> None:
        """End what this started itself."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_sidecar)
            for engine in self._started:
                stack.callback(engine.stop)

    def _end_sidecar(self) -> None:
        if self.sidecar.process is not None:
            ended = self.sidecar.process.poll()
            self.sidecar_exit = self.sidecar.drain() if ended is None else ended
        self.sidecar.remove_pool()

    def clean(self) -> None:
        """Once all has ended: keep the logs, and nothing else of it."""
        for path in self._folder.iterdir():
            if path.is_dir() and path != self.sidecar.folder:
                shutil.rmtree(path)
            elif path.is_socket():
                path.unlink()


@contextlib.contextmanager
def world(
    folder: Path, *, program: Sequence[str] = (), limits: dict[str, str] | None = None
) -> Generator[World]:
    """A running world; `program` serves as the sidecar, `limits` is what it has beside ours."""
    with (
        _environment(VLLM_RPC_BASE_PATH=str(folder)),
        s3_server(folder) as server,
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(faulty_proxy(server.endpoint)) as proxy,
    ):
        proxy.latency_seconds = LATENCY_SECONDS
        proxy.bytes_per_second_max = BYTES_PER_SECOND
        made = World(folder, server, proxy, portal, program or places.program(), limits or {})
        try:
            made.start_sidecar()
            made.start_engines()
            yield made
        finally:
            made.close()
    made.clean()


@contextlib.contextmanager
def _environment(**variables: str) -> Generator[None]:
    """vLLM's own sockets, which a killed engine leaves, go with the folder."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
