"""A process of its own that does what the test tells it, with the double as its libcuda.

Code goes in as text and runs in one lasting namespace, where `gpu` is this module's device API;
`result` comes back. So a test reads as one story although it happens in several processes, each of
which can be killed at any line. One that does not answer is killed, after it has said
in which line it hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import time
import traceback
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

ANSWER_SECONDS_MAX = 500.0


class Process(Protocol):
    """What a `Child` needs of `subprocess.Popen`."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...


class Machine(Protocol):
    """Where processes find their devices: the double, or what is there."""

    def env(self, *, first_device: int = 0) -> dict[str, str]:
        """The environment of a process."""

    def start(
        self,
        module: str,
        arguments: Sequence[str | int],
        environment: dict[str, str],
        *,
        piped: bool = False,
    ) -> Process:
        """Start the `main` of a module. See `start`."""


def start(
    module: str,
    arguments: Sequence[str | int],
    environment: dict[str, str],
    *,
    piped: bool = False,
) -> subprocess.Popen[bytes]:
    """Start the `main` of a module in a new interpreter.

    A number among the arguments is a descriptor, which the process gets. `piped` connects its
    standard input and output with pipes.
    """
    pipe = subprocess.PIPE if piped else None
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        stdin=pipe,
        stdout=pipe,
        env=environment,
        pass_fds=[one for one in arguments if isinstance(one, int)],
    )


class ChildError(Exception):
    """The code raised in the child; the message is its traceback."""


class Child:
    """A process that runs code on request."""

    def __init__(
        self,
        machine: Machine,
        *,
        first_device: int = 0,
        setup: str = "",
        variables: dict[str, str] | None = None,
        answer_seconds_max: float = ANSWER_SECONDS_MAX,
    ) -> None:
        environment = machine.env(first_device=first_device) | (variables or {})
        self._process = machine.start("tests.gpu.child", [], environment, piped=True)
        self._answer_seconds_max = answer_seconds_max
        self._code = ""
        self.pid = self._process.pid
        try:
            self.run(setup)
        except BaseException:
            self.close()
            raise

    def run(self, code: str, **values: Any) -> Any:
        """Run `code` there with `values` as its names; returns what it left in `result`."""
        self.start(code, **values)
        return self.finish()

    def call(self, function: str, /, *, seconds_max: float | None = None, **named: Any) -> Any:
        """Call a function that has a name there; returns what it returns."""
        self.start(f"result = {function}(**named)", named=named)
        return self.finish(seconds_max)

    def start(self, code: str, **values: Any) -> None:
        """Begin to run `code`; `finish` waits for it."""
        assert self._process.stdin is not None
        self._code = code
        data = pickle.dumps((code, values))
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        self._process.stdin.flush()

    def finish(self, seconds_max: float | None = None) -> Any:
        """The result of what was started last. One that takes longer is killed."""
        deadline = time.monotonic() + (seconds_max or self._answer_seconds_max)
        (length,) = struct.unpack("<I", self._read(4, deadline))
        ok, result = pickle.loads(self._read(length, deadline))
        if not ok:
            raise ChildError(result)
        return result

    def _read(self, num_bytes: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        fd, data = self._process.stdout.fileno(), b""
        while len(data) < num_bytes:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                self._give_up()
            piece = os.read(fd, num_bytes - len(data))
            if not piece:
                raise ChildError(f"the child ended with {self._process.wait()}")
            data += piece
        return data

    def _give_up(self) -> None:
        """Let it print where it hangs, and end it. Raises `ChildError`."""
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        self.kill()
        raise ChildError(f"no answer in time, its stack is in stderr, from: {self._code}")

    @property
    def alive(self) -> bool:
        """Whether it can be asked."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.send_signal(signal.SIGKILL)
        # One that a driver holds does not go even so.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)

    def close(self) -> None:
        """Let it end by itself, or kill it where it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """The process: requests on standard input, answers on standard output."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    # What the code prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    namespace: dict[str, Any] = {}
    while len(header := sys.stdin.buffer.read(4)) == 4:
        code, values = pickle.loads(sys.stdin.buffer.read(struct.unpack("<I", header)[0]))
        namespace.update(values)
        namespace["result"] = None
        try:
            exec(code, namespace)
            answer = pickle.dumps((True, namespace["result"]))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        answers.write(struct.pack("<I", len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main()
