"""`kvlake serve`: the process of a sidecar, its thread pools, parent and garbage collection.

The sidecar itself is in `sidecar/app.py`.
"""

import contextlib
import ctypes
import functools
import gc
import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Final

from sidecar.cli.console import CommandError, NotStarted, Options, load_config

if TYPE_CHECKING:
    from sidecar.app import ServerInfo

_THREAD_POOLS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG: Final = 1
GC_OBJECTS: Final = 10_000
"""New objects after which Python's garbage collector looks through them."""


def main(options: Options) -> int:
    """Run the sidecar until a signal ends it."""
    parent_pid: int | None = options.parent_pid
    if parent_pid is not None:
        _signal_at_parents_end(signal.SIGTERM)
        if os.getppid() != parent_pid:
            raise CommandError(f"--parent-pid {parent_pid} ended before the sidecar had started")
    if not os.isatty(0):
        # As the server does later (`app.py`): a reload must not end a start.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before numpy or pyarrow are imported, which read it then. The engine beside this process
    # needs the cores, and pools that spin on them made hits several times slower.
    for name in _THREAD_POOLS:
        os.environ[name] = "1"
    config = load_config(options.config)
    import anyio

    from sidecar import logs
    from sidecar.app import serve
    from sidecar.errors import StartError
    from sidecar.service.start_checks import allow_open_files

    allow_open_files()
    logs.configure(config.log.level, config.log.format)

    def ready(info: "ServerInfo") -> None:
        # What exists now stays. Collections that look through all of it held the event loop up
        # for 70 ms.
        gc.collect()
        gc.freeze()
        # What jobs need while they run is freed at their end, and is in no cycle. At Python's 700
        # objects, a tenth of the loop's time was collections that found nothing.
        gc.set_threshold(GC_OBJECTS)
        if parent_pid is not None:
            _signal_at_parents_end(0)
            arguments = (parent_pid, info)
            threading.Thread(
                target=_stop_with_last_run, args=arguments, name="kvlake-needed", daemon=True
            ).start()
        if options.ready_fd is not None:
            line = {"http_url": info.http_url, "attach": str(info.attach_path)}
            # `kvlake run --optional` does not wait for ever.
            with contextlib.suppress(BrokenPipeError):
                os.write(options.ready_fd, json.dumps(line).encode() + b"\n")

    def stopping() -> None:
        if options.ready_fd is not None:
            # So that `kvlake run` sends no signal to a sidecar that stops already.
            os.close(options.ready_fd)

    try:
        return anyio.run(functools.partial(serve, config, ready=ready, stopping=stopping))
    except StartError as error:
        raise NotStarted(str(error)) from error


def _signal_at_parents_end(number: int) -> None:
    """Have the kernel send this signal when the parent ends, however it ends; 0 for none."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _stop_with_last_run(parent_pid: int, info: "ServerInfo") -> None:
    """Drain when the parent has ended and no other `kvlake run` has joined."""
    from sidecar.cli.run import POLL_SECONDS, has_joined

    while os.getppid() == parent_pid or has_joined(info.attach_path.parent):
        time.sleep(POLL_SECONDS)
    info.stop()
