"""`kvlake run`: a sidecar and an engine as one command.

Owns the engine's process and the end of both. The sidecar's is in `supervised.py`; each has a
session of its own.

Invariants:

* The exit code is the engine's (128 + n if signal n killed it), whatever the sidecar did.
* A signal for this process goes to the engine, once: a terminal's Ctrl-C reaches only this
  process, because the children have no terminal.
* Neither child speaks to the service manager: this process is the service's main one, says READY
  once the engine is started, and feeds the manager's watchdog while it runs.
"""

from __future__ import annotations

import os
import select
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from sidecar.cli.console import CommandError, NotStarted, Options, load_config
from sidecar.cli.run.engine_command import check_command, with_events
from sidecar.cli.run.supervised import (
    DRAIN_GRACE_SECONDS,
    Interrupted,
    SupervisedSidecar,
    forwarded,
    log,
    signals,
)
from sidecar.config.model import Config
from sidecar.service.systemd import Notifier, without_notify


def main(options: Options) -> int:
    """Start both, and end with the engine's exit code."""
    config = load_config(options.config)
    return run(config, serve_command(options.config), options.command, optional=options.optional)


def serve_command(config_path: Path | None) -> list[str]:
    """The command that starts the sidecar as a child of this process."""
    # -P: a `sidecar` in the current folder is not imported.
    command = [sys.executable, "-P", "-m", "sidecar.cli", "serve", "--parent-pid", str(os.getpid())]
    return command if config_path is None else [*command, "--config", str(config_path)]


def run(
    config: Config, serve: Sequence[str], command: Sequence[str], *, optional: bool = False
) -> int:
    """Start the sidecar with `serve`, then the engine with `command`; the engine's exit code.

    With `optional`, the engine is also started if the sidecar cannot be, which is then retried.
    Raises `CommandError` if one of the two cannot be started; the other is stopped again.
    """
    engine_command = with_events(check_command(command, config), config)
    sidecar = SupervisedSidecar(config, serve)
    notifier = Notifier()
    with signals() as wakeup:
        try:
            notifier.status("starting the sidecar")
            notifier.extend(sidecar.ready_seconds_max)
            try:
                sidecar.start(wakeup)
            except NotStarted as error:
                if not optional:
                    raise
                log(f"{error}; the engine starts without it, because of --optional")
                sidecar.retry()
            log(f"starting {shlex.join(engine_command)}")
            return _run_engine(engine_command, sidecar, wakeup, notifier)
        except Interrupted as interrupted:
            return 128 + interrupted.number
        finally:
            notifier.stopping("the sidecar drains")
            notifier.extend(config.limits.drain_seconds_max + DRAIN_GRACE_SECONDS)
            sidecar.stop(wakeup)


def _run_engine(
    command: Sequence[str], sidecar: SupervisedSidecar, wakeup: socket.socket, notifier: Notifier
) -> int:
    try:
        engine = subprocess.Popen(command, start_new_session=True, env=without_notify(os.environ))
    except OSError as error:
        raise CommandError(f"{command[0]}: cannot be started: {error}") from error
    try:
        notifier.ready("the engine runs, with a sidecar beside it")
        beat = None if notifier.watchdog_seconds is None else notifier.watchdog_seconds / 3
        while (code := engine.poll()) is None:
            notifier.alive()
            times = [seconds for seconds in (sidecar.watch(), beat) if seconds is not None]
            if select.select([wakeup], [], [], min(times, default=None))[0]:
                for number in forwarded(wakeup):
                    engine.send_signal(number)
    finally:
        # Only a bug of this file gets here with a living engine; it must not stay.
        if engine.poll() is None:
            engine.kill()
            engine.wait()
    return code if code >= 0 else 128 - code
