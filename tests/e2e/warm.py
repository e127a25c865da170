"""Engines that need not import vLLM: a server process has imported it, and forks.

An engine that is started cold imports torch and vLLM three times (client, engine core, worker),
which takes most of its half minute. Here one process imports them once, and `start` asks it for a
fork that runs the same code. The standard library's forkserver does that; this module owns what is
imported, and what a forked engine must be given by hand:

* vLLM's CPU platform spawns its processes, so that each reads its own OpenMP settings when it
  starts. They are forked here, as vLLM does on GPUs. The server has one OpenMP thread, and a worker
  gets its cores when it is forked.
* the environment, the session and the standard streams, which `subprocess` would have set.

`tests/e2e/test_run_http.py`, `test_readme.py` and `test_demo.py` start engines cold, as users do.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import subprocess
import sys
import time
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from sidecar.demo import engine

if TYPE_CHECKING:
    from collections.abc import Mapping

IMPORTED: Final = (
    # First: it must see the command line and the environment where the kernel put them.
    "setproctitle",
    "torch._dynamo",
    "transformers",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "connector.vllm",
    "connector.offloading",
    __name__,
)
ENVIRONMENT: Final = {
    # What is compiled is the rank of a log probability. Eager costs nothing, compiling seconds.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}

_context = multiprocessing.get_context("forkserver")
_sessions: set[int] = set()


class WarmProcess:
    """A forked engine, as `subprocess.Popen` would have it."""

    def __init__(self, argument: str, environment: Mapping[str, str], answers: int, log: IO[bytes]):
        commands_read, commands_write = os.pipe()
        self._process = _context.Process(
            target=_run,
            args=(
                argument,
                dict(environment) | ENVIRONMENT,
                reduction.DupFd(commands_read),
                reduction.DupFd(answers),
                reduction.DupFd(log.fileno()),
            ),
        )
        self._process.start()
        os.close(commands_read)
        self.stdin: IO[bytes] | None = os.fdopen(commands_write, "wb")
        assert self._process.pid is not None
        self.pid = self._process.pid
        _sessions.add(self.pid)
        # From now on a signal to its group reaches it.
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.001)

    def poll(self) -> int | None:
        """The exit code, where it has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self._process.exitcode


def serve() -> None:
    """Start the server, which goes on importing when this returns; it ends with this process."""
    with _environment(ENVIRONMENT):
        _context.set_forkserver_preload(list(IMPORTED))
        forkserver.ensure_running()


def start(argument: str, environment: Mapping[str, str], answers: int, log: IO[bytes]) -> Any:
    """In place of `Engine.launch`."""
    return WarmProcess(argument, environment, answers, log)


def left() -> list[str]:
    """Processes of all engines that were started here, as far as they are still there."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        # They come and go while they are looked at.
        with contextlib.suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in _sessions and state != "Z":
                found.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
    return found


class _environment:  # noqa: N801 (a context manager)
    """Variables that this process has for the length of a block."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


# --- in the fork ---------------------------------------------------------------------------------


def _run(
    argument: str,
    environment: dict[str, str],
    commands: Any,
    answers: Any,
    log: Any,
) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    for given, wanted in ((commands, (0,)), (log, (1, 2))):
        fd = given.detach()
        for number in wanted:
            os.dup2(fd, number)
        os.close(fd)
    sys.stdin = os.fdopen(0)
    os.environ[engine.ANSWERS_FD] = str(answers.detach())
    _fork_workers()
    os.register_at_fork(after_in_child=_bind)
    sys.argv = ["engine", argument]
    engine.main()


def _fork_workers() -> None:
    """Have vLLM fork its processes; the CPU platform chooses otherwise with every configuration."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(checked)


def _bind() -> None:
    """A worker's cores, which vLLM gives in the variables that OpenMP reads when it is loaded."""
    places = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES")
    if places:
        os.sched_setaffinity(0, map(int, re.findall(r"\d+", places)))
