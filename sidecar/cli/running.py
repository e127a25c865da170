"""Commands that start something: `run`, `serve` and `demo`.

Owns their options, and the process that a sidecar is: its thread pools, its parent, its garbage.
What runs in it is `sidecar/app.py`, and beside an engine `sidecar/cli/launch.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from sidecar.cli.console import (
    Commands,
    NotStarted,
    UsageError,
    add_config_option,
    load_config,
    say,
)
from sidecar.exits import Exit

if TYPE_CHECKING:
    from sidecar.app import ServerInfo

_THREAD_POOLS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_PR_SET_PDEATHSIG: Final = 1


def add_running(commands: Commands) -> None:
    """`run`, `serve` and `demo`."""
    run = commands.add_parser(
        "run",
        help="start a sidecar, then vLLM beside it",
        description="Start a sidecar, wait until it serves, then start vLLM with the connector's "
        "options added to its command line. Signals go to vLLM, a sidecar that dies is started "
        "again, and the exit code is vLLM's. A sidecar that serves already is joined; it drains "
        "when the last engine is gone.",
        usage="kvlake run [-h] [--config FILE] [--optional] -- vllm serve MODEL ...",
        epilog="example: kvlake run --config configs/default.yaml -- vllm serve MODEL --port 8000",
    )
    add_config_option(run)
    run.add_argument(
        "--optional",
        action="store_true",
        help="start the engine also where the sidecar cannot be started, and go on trying",
    )
    run.set_defaults(command_function=_run)

    serve = commands.add_parser(
        "serve",
        help="run the sidecar alone",
        description="Run the sidecar until it gets SIGTERM or SIGINT. Engines attach to its "
        "socket by themselves, also when they were started earlier.",
    )
    add_config_option(serve)
    # For `kvlake run`: a byte is written when the sidecar serves; the sidecar ends with the pid.
    serve.add_argument("--ready-fd", type=int, help=argparse.SUPPRESS)
    serve.add_argument("--parent-pid", type=int, help=argparse.SUPPRESS)
    serve.set_defaults(command_function=_serve)

    demo = commands.add_parser(
        "demo",
        help="show a hit from host memory and from an object store",
        description="Make a small model, compute a long prompt once, and serve it to a second "
        "engine from host memory and from a bucket. Runs on this machine, without a GPU.",
    )
    demo.add_argument("--json", action="store_true", help="print the measurements as JSON")
    demo.add_argument(
        "--model-only",
        metavar="DIR",
        type=Path,
        help="only write the demo's model and tokenizer to DIR, to serve it yourself",
    )
    demo.set_defaults(command_function=_demo)


def _serve(options: argparse.Namespace) -> int:
    if options.parent_pid is not None:
        _end_with_parent(options.parent_pid)
    if not os.isatty(0):
        # As later, when the server sees to it (`app.py`): a reload must not end a start.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Before numpy or pyarrow are imported, which read it then. The engine beside this process
    # wants the cores, and pools that spin on them made hits several times slower.
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

    def ready(info: ServerInfo) -> None:
        # What is there now stays. Looking through all of it, time and again, held the event loop
        # up for 70 ms.
        gc.collect()
        gc.freeze()
        if options.parent_pid is not None:
            _end_with_last(options.parent_pid, info)
        if options.ready_fd is not None:
            line = {"http_url": info.http_url, "attach": str(info.attach_path)}
            os.write(options.ready_fd, json.dumps(line).encode() + b"\n")
            os.close(options.ready_fd)

    async def main() -> int:
        return await serve(config, ready=ready)

    try:
        return anyio.run(main)
    except StartError as error:
        raise NotStarted(str(error)) from error


def _end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, however it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        raise UsageError(f"--parent-pid {parent_pid} ended before the sidecar had started")


def _end_with_last(parent_pid: int, info: ServerInfo) -> None:
    """From now on, drain when the parent is gone and nobody has joined (`joined.py`)."""
    import ctypes
    import threading

    from sidecar.cli.joined import LOOK_SECONDS, needed

    def look() -> None:
        while os.getppid() == parent_pid or needed(info.attach_path.parent):
            time.sleep(LOOK_SECONDS)
        info.stop()

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0, 0, 0, 0)
    threading.Thread(target=look, name="kvlake-needed", daemon=True).start()


def _run(options: argparse.Namespace) -> int:
    from sidecar.cli.launch import LaunchError, run, serve_command

    config = load_config(options.config)
    try:
        return run(
            config,
            serve_command(options.config),
            cast("list[str]", options.command),
            optional=options.optional,
        )
    except LaunchError as error:
        raise (NotStarted if error.code is Exit.START else UsageError)(str(error)) from error


def _demo(options: argparse.Namespace) -> int:
    from sidecar.demo import scenes
    from sidecar.demo.model import write_model

    if options.model_only is not None:
        try:
            path = write_model(options.model_only)
        except OSError as error:
            raise UsageError(
                f"--model-only {options.model_only}: {error.strerror}; name a folder that is "
                "there, or that can be made"
            ) from error
        say(f"kvlake run -- vllm serve {path} --dtype bfloat16 --block-size 32")
        return Exit.OK

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    # As Ctrl-C does: its engines, servers and folder go before it does.
    signal.signal(signal.SIGTERM, end)
    return scenes.run(as_json=options.json)
