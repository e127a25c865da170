"""The `kvlake` command: reads the command line, runs one command, ends with its exit code.

The options are in `parser.py`. Each command has a module with a function `main(options)`, which is
imported when the command runs: `kvlake --help` stays quick, and an environment without the
sidecar's packages gets a message rather than a traceback. Exit codes are in `sidecar/exits.py`.
"""

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Sequence

from sidecar.cli.console import CommandError, complain
from sidecar.cli.parser import parser
from sidecar.exits import Exit, leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    Without `arguments` it is the command line of this process, which ends after it (`leave`).
    """
    return leave(_run(sys.argv[1:])) if arguments is None else _run(list(arguments))


def _run(words: list[str]) -> int:
    # Everything after the first `--` is the engine's command.
    takes_command = words[:1] in (["run"], ["doctor"])
    own = words[: words.index("--")] if takes_command and "--" in words else words
    top = parser()
    options, unknown = top.parse_known_args(own)
    if unknown and takes_command:
        known = [word for word in own if word not in unknown]
        from sidecar.cli.run.engine_command import shown

        line = f"kvlake {shlex.join(known)} -- {shown(unknown)}"
        complain(f"write -- before the engine's command: {line}")
        return Exit.USAGE
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.command = words[len(own) + 1 :]
    try:
        return importlib.import_module(options.module).main(options) or Exit.OK
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("sidecar", "connector", "tiers"):
            raise
        complain(
            f"{package} is not installed; the sidecar's packages are an extra. In a clone of "
            "kvlake: pip install '.[sidecar]' (and s3, gcs or azure for that store)"
        )
        return Exit.USAGE
    except CommandError as error:
        complain(str(error))
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (`| head`) has ended. Standard output goes nowhere now, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        from sidecar.logs import traceback_whole

        complain(f"a bug ended this command, please report it:\n{traceback_whole(error)}")
        return Exit.INTERNAL
