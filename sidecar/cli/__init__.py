"""The `kvlake` command: options, help, exit codes.

Owns the command line and how a result is printed: here what all of it is, in the other files its
commands with their options. What a command does is elsewhere: `sidecar/app.py`, `launch.py`,
`status.py`, `inspect.py`, `config/model.py`, `demo`. Those are imported when they are needed, so
that `kvlake --help` is quick and the connector's environment, which lacks the sidecar's packages,
gets a sentence rather than a traceback.

What the exit code says stands in `sidecar/exits.py`.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import os
import re
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from sidecar.cli.console import UsageError, complain
from sidecar.cli.looking import add_doctor, add_looking, add_pool
from sidecar.cli.preparing import add_config, add_keygen, add_tenant
from sidecar.cli.running import add_running
from sidecar.cli.storing import add_store
from sidecar.exits import Exit, leave

if TYPE_CHECKING:
    from collections.abc import Sequence

_DESCRIPTION: Final = """\
kvlake keeps vLLM's KV cache in host memory and in object stores, so that a prompt prefix that was
computed once is not computed again, by any engine that reaches the same sidecar or bucket.
"""
_EPILOG: Final = """\
first steps:
  kvlake demo                                  see a hit on this machine, without a GPU
  kvlake run -- vllm serve MODEL               an engine with a sidecar, in one command
  kvlake status                                what the sidecar holds and does

`kvlake COMMAND --help` tells more about each command. Exit codes: 0 done, 1 the answer is no,
2 change the command or the configuration, 3 the sidecar could not start, 4 it stopped with chunks
unwritten, 5 a second signal ended it, 70 a bug. `run` ends with the engine's own code.
"""


class _Parser(argparse.ArgumentParser):
    """Names what is most like a word that it does not know."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            known = re.findall(r"[\w-]+", unknown[2])
            near = difflib.get_close_matches(unknown[1], known, n=1, cutoff=0.5)
            suggestion = f"did you mean `{near[0]}`? " if near else ""
            message = f"no command `{unknown[1]}`; {suggestion}the commands are {', '.join(known)}"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Every command with its options."""
    top = _Parser(
        prog="kvlake",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"kvlake {_version()}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_running(commands)
    add_looking(commands)
    add_store(commands)
    add_doctor(commands)
    add_keygen(commands)
    add_pool(commands)
    add_tenant(commands)
    add_config(commands)
    return top


def _version() -> str:
    try:
        return importlib.metadata.version("kvlake")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out one command line; returns the exit code.

    Without `arguments` it is the process's own, and the process ends after it (`leave`). A program
    that gives some goes on, with its threads.
    """
    if arguments is None:
        return leave(_carry_out(sys.argv[1:]))
    return _carry_out(list(arguments))


def _carry_out(words: list[str]) -> int:
    # Everything after the first `--` is the engine's command, whatever it looks like.
    takes_command = words[:1] in (["run"], ["doctor"])
    own = words[: words.index("--")] if takes_command and "--" in words else words
    top = parser()
    options, unknown = top.parse_known_args(own)
    if unknown and takes_command:
        known = [word for word in own if word not in unknown]
        line = f"kvlake {shlex.join(known)} -- {shlex.join(unknown)}"
        complain(f"write -- before the engine's command: {line}")
        return Exit.USAGE
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.command = words[len(own) + 1 :]
    try:
        return int(options.command_function(options))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("sidecar", "connector", "tiers"):
            raise
        complain(
            f"{package} is not installed; the sidecar's packages are an extra. In a clone of "
            "kvlake: pip install '.[sidecar]' (and s3, gcs or azure for that store)"
        )
        return Exit.USAGE
    except UsageError as error:
        complain(str(error))
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) had enough. Standard output goes nowhere now, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        from sidecar.logs import story_whole

        complain(f"a bug ended this command, please report it:\n{story_whole(error)}")
        return Exit.INTERNAL
