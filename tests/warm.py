"""Processes that need not import torch and vLLM: a server has imported them, and forks.

An engine that is started cold imports torch and vLLM three times (client, engine core, worker),
which takes most of its half minute. Here one process imports them once, and is asked for a fork
that runs the `main` of a module. The standard library's forkserver does that. This module owns what
is imported, and what `subprocess` would have given the process: its environment, session, streams
and descriptors.

An engine needs more (`engine`). vLLM's CPU platform spawns its processes, so that each of them
reads its own OpenMP settings when it starts. They are forked here, as vLLM does by default on GPUs:
the server has one OpenMP thread, and a worker gets its cores when it is forked.

`tests/e2e/test_readme.py` starts engines and sidecars cold, as users do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver, reduction
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from sidecar.demo.processes import launch_sidecar
from tests import places
from tests.harness import engine_host

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

FIRST: Final = "tests.warm_server"
ENGINES: Final = (
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
)
"""What a server of engines has imported."""
OTHERS: Final = (
    "torch",
    "anyio._backends._asyncio",
    "connector.worker",
    places.find("Config", package="sidecar").module_name,
    places.find("Server").module_name,
    places.find("open_store").module_name,
    "s3fs",
    "obstore.store",
    __name__,
)
"""What every server has imported."""
ENVIRONMENT: Final = {
    # What is compiled is the rank of a log probability. Eager costs nothing, compiling seconds.
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
SPIN_SECONDS: Final = 0.001
RECHECK_MS: Final = 20
PR_SET_PDEATHSIG: Final = 1

_context = multiprocessing.get_context("forkserver")
_sessions: set[int] = set()
_sentinels: list[int] = []
"""In a fork: its end of the pipe by which the one that forked it knows that it has not ended."""


def serve(*, engines: bool) -> None:
    """Start the server, which goes on importing when this returns; it ends with this process.

    A server that runs already stays as it is.
    """
    with _environment(ENVIRONMENT):
        _context.set_forkserver_preload([FIRST, *(ENGINES if engines else ()), *OTHERS])
        forkserver.ensure_running()


class WarmProcess:
    """A fork that runs a module's `main`, as `subprocess.Popen` would have it, in its own session.

    Args:
        module: its name; `main` takes no argument and reads `sys.argv`.
        arguments: of the command line. A number is a descriptor, which gets another number there.
        environment: all of it, likewise.
        stdin: a descriptor, `subprocess.PIPE`, or None for the server's. So are the others.
        prepare: a function of a module that the process calls before.
        libraries: shared libraries that are loaded before anything else.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str | int],
        environment: Mapping[str, str | int],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        prepare: Callable[[], None] | None = None,
        libraries: Sequence[str] = (),
    ) -> None:
        theirs: list[int] = []
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        if stdin == subprocess.PIPE:
            stdin, ours = os.pipe()
            theirs.append(stdin)
            self.stdin = os.fdopen(ours, "wb")
        if stdout == subprocess.PIPE:
            ours, stdout = os.pipe()
            theirs.append(stdout)
            self.stdout = os.fdopen(ours, "rb", buffering=0)
        streams = [None if fd is None else reduction.DupFd(fd) for fd in (stdin, stdout, stderr)]
        given = [_sent(argument) for argument in arguments]
        variables = {name: _sent(value) for name, value in environment.items()}
        self._process = _context.Process(
            target=_run, args=(module, given, variables, streams, prepare, [*libraries])
        )
        self._process.start()
        for fd in theirs:
            os.close(fd)
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

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def engine(
    argument: str, environment: Mapping[str, str], answers: int, log: IO[bytes]
) -> WarmProcess:
    """An engine, in place of `launch` of the module `tests.harness.engine`."""
    return _engine(engine_host, [argument], environment, answers, log)


def demo_engine(
    model: str, socket: str, environment: Mapping[str, str], answers: int, log: IO[bytes]
) -> WarmProcess:
    """An engine of the demo, in place of `launch_engine`."""
    module = places.find("launch_engine").module
    return _engine(module, [model, socket], environment, answers, log)


def _engine(
    module: Any,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    answers: int,
    log: IO[bytes],
) -> WarmProcess:
    bind = "VLLM_CPU_OMP_THREADS_BIND"
    return WarmProcess(
        module.__name__,
        arguments,
        {
            **environment,
            **ENVIRONMENT,
            bind: _other_cores(environment[bind]),
            module.ANSWERS_FD: answers,
        },
        prepare=_fork_workers,
        stdin=subprocess.PIPE,
        stdout=log.fileno(),
        stderr=log.fileno(),
    )


def sidecar(
    program: Sequence[str], arguments: Sequence[str], ready: int, log: IO[bytes]
) -> WarmProcess | subprocess.Popen[bytes]:
    """A sidecar, in place of `launch_sidecar`, if the program is a module with a `main`."""
    option, module, *before = program
    if option != "-m":
        return launch_sidecar(program, arguments, ready, log)
    with Path(os.devnull).open("rb") as nothing:
        return WarmProcess(
            module,
            [*before, *arguments, "--ready-fd", ready],
            os.environ,
            prepare=_end_with_server,
            stdin=nothing.fileno(),
            stdout=log.fileno(),
            stderr=log.fileno(),
        )


def left() -> list[str]:
    """Processes of all sessions that were started here, as far as they are still there."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        # They come and go while they are looked at.
        with contextlib.suppress(OSError):
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(session) in _sessions and state != "Z":
                found.append(f"process {process.name}: {(process / 'comm').read_text().strip()}")
    return found


def _other_cores(bound: str) -> str:
    """Cores of an engine, the first one differing between the processes that run the tests."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))
    return re.sub(r"\d+", lambda core: str(cores[(int(core[0]) + worker) % len(cores)]), bound)


def _sent(value: str | int) -> Any:
    """What the fork is sent in place of a value; `_received` is its end."""
    return reduction.DupFd(value) if isinstance(value, int) else value


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Generator[None]:
    """Variables that this process has for the length of a block."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# --- in the fork ---------------------------------------------------------------------------------


def _run(
    module: str,
    arguments: list[Any],
    environment: dict[str, Any],
    streams: list[Any],
    prepare: Callable[[], None] | None,
    libraries: list[str],
) -> None:
    os.setsid()
    # A collection would look at all that the server has imported, and copy its pages.
    gc.freeze()
    gc.enable()
    os.environ.clear()
    for name, value in environment.items():
        os.environ[name] = _received(value)
    _redirect(streams)
    for library in libraries:
        # Every request for a library of its name gets this one.
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    if prepare is not None:
        prepare()
    sys.argv = [module, *map(_received, arguments)]
    raise SystemExit(importlib.import_module(module).main())


def _received(value: Any) -> str:
    return value if isinstance(value, str) else str(value.detach())


def _redirect(streams: list[Any]) -> None:
    """Standard input, output and error, all of which may be one descriptor."""
    fds = [None if stream is None else stream.detach() for stream in streams]
    for number, fd in enumerate(fds):
        if fd is not None:
            os.dup2(fd, number)
    for fd in {fd for fd in fds if fd is not None}:
        os.close(fd)
    if fds[0] is not None:
        sys.stdin = os.fdopen(0)


def _end_with_server() -> None:
    """The server ends with the process that runs the tests."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _fork_workers() -> None:
    """Have vLLM fork its processes; the CPU platform chooses otherwise with every configuration."""
    from vllm.distributed.device_communicators import shm_broadcast
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # vLLM's processes spin for a second after each message. Two of them take both cores.
    _spin_shortly(shm_broadcast.SpinCondition)
    # One that does not spin may miss that a message came. vLLM looks again after five seconds.
    shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = RECHECK_MS
    # To learn about the class of a model that it does not know, vLLM starts another Python.
    registry._run_in_subprocess = lambda inspect: inspect()  # noqa: SLF001 (vLLM's)
    os.register_at_fork(after_in_child=_bind)
    os.register_at_fork(after_in_child=_close_sentinels)

    platform = type(current_platform)
    check = platform.check_and_update_config.__func__

    def checked(cls: Any, config: Any) -> None:
        check(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = classmethod(checked)


def _spin_shortly(condition: Any) -> None:
    initialize = condition.__init__

    def initialized(self: Any, *given: Any, **named: Any) -> None:
        initialize(self, *given, **named)
        self.busy_loop_s = min(self.busy_loop_s, SPIN_SECONDS)

    condition.__init__ = initialized


def _bind() -> None:
    """A worker's cores, which vLLM gives in the variables that OpenMP reads when it is loaded."""
    places = os.environ.get("GOMP_CPU_AFFINITY") or os.environ.get("OMP_PLACES")
    if places:
        os.sched_setaffinity(0, map(int, re.findall(r"\d+", places)))


def _close_sentinels() -> None:
    """A process is known to have ended when its pipe does: no process that it forked may hold it.

    Else a worker that hangs hides that its engine core was killed.
    """
    frame = inspect.currentframe()
    while frame is not None and "child_w" not in frame.f_locals:
        frame = frame.f_back
    for fd in _sentinels:
        os.close(fd)
    _sentinels[:] = [frame.f_locals["child_w"]] if frame is not None else []
