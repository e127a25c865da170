"""An engine of a kill matrix: its processes, and what vLLM leaves of them when they are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.e2e.leftovers import called, group_of, shared_memory_of
from tests.harness.engine import EngineSpec

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.kill_seams import Seam

ENGINE_ARGS: Final[dict[str, Any]] = {"num_gpu_blocks_override": 128, "max_model_len": 2048}
HOLDS: Final = "holds"
"""The folder, beside the engines' logs, of what holds their processes up."""


class Struck:
    """An engine, with the processes of it that are struck."""

    def __init__(self, seam: Seam, model: str, folder: Path, name: str, threads_bind: str) -> None:
        self._seam = seam
        # A name of its own for the sidecar's socket, which exists from `introduce` on.
        self._socket = folder / f"{name}.sock"
        spec = EngineSpec(
            model,
            str(self._socket),
            ENGINE_ARGS,
            connector_extra={"attach_seconds": 0, "holds": str(folder / HOLDS)},
            threads_bind=threads_bind,
        )
        self.engine = seam.make_engine(spec, folder / f"{name}.log")

    def introduce(self, socket: str) -> None:
        """Let it attach to the sidecar at this socket."""
        self._socket.symlink_to(socket)

    def wait_ready(self) -> Struck:
        """Wait until it serves, and find its processes."""
        self.engine.wait_ready()
        self.pids = group_of(self.engine.process.pid)
        self.core = called(self.pids, "VLLM::EngineCore")
        self.worker = called(self.pids, "VLLM::Worker")
        self.clients = self._seam.clients(self.core, self.worker)
        self.shared_memory = shared_memory_of(self.pids)
        return self

    def end(self) -> int:
        """Kill what is left of it; returns how many files vLLM left in shared memory."""
        self.engine.kill()
        left = [path for path in self.shared_memory if path.exists()]
        for path in left:
            path.unlink()
        return len(left)
