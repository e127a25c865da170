"""Real `kvlake` commands without the second that each would take to import its packages.

One process imports them, and is forked for each command. `kvlake` carries a command out in the
test's own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sidecar import cli
from tests import places

SERVER = """
import contextlib, json, os, sys, traceback
import anyio._backends._asyncio
from sidecar import app, cli, logs
from sidecar.cli import doctor
from sidecar.config import model

with contextlib.suppress(ImportError):
    import cuda.bindings.driver

for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            for name, fd in (("out", 1), ("err", 2)):
                os.dup2(os.open(asked[name], os.O_WRONLY), fd)
            os.environ.update(asked["environment"])
            sys.argv[1:] = asked["arguments"]
            code = cli.main()
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """A command that ended: its exit code, and what it said."""

    code: int
    out: str
    err: str

    def lines(self, verdict: str) -> list[str]:
        """Findings of `kvlake doctor` with this verdict."""
        marked = [line.partition("  ") for line in self.out.splitlines()]
        return [told for mark, _, told in marked if mark.strip() == verdict]


class Commands:
    """The process that is forked. A context."""

    def __enter__(self) -> Commands:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=places.ROOT,
            # Its own: what the session was started with is not the tests'.
            env={k: v for k, v in os.environ.items() if k not in ("VLLM_PLUGINS", "NOTIFY_SOCKET")},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run(self, *arguments: str, **environment: str) -> Ended:
        """Carry out one command to its end."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            asked: dict[str, Any] = {"arguments": arguments, "environment": environment}
            stdin.write(json.dumps({**asked, "out": out.name, "err": err.name}) + "\n")
            stdin.flush()
            return Ended(int(stdout.readline()), out.read(), err.read())


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with Commands() as one:
        yield one


def tree(directory: Path) -> dict[str, tuple[int, ...]]:
    """All that is below a directory, with what a change of it would change."""
    return {
        str(path): (found.st_mode, found.st_uid, found.st_ino, found.st_size, found.st_ctime_ns)
        for path in [directory, *sorted(directory.rglob("*"))]
        for found in [path.lstat()]
    }


def kvlake(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
