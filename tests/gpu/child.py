"""A process of its own that does what the test tells it, with the double as its libcuda.

Code goes in as text and runs in one lasting namespace, where `gpu` is this module's device API;
`result` comes back. So a test reads as one story although it happens in several processes, each of
which can be killed at any line.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from typing import Any, Self

from tests.gpu.double.control import Double


class ChildError(Exception):
    """The code raised in the child; the message is its traceback."""


class Child:
    """A process that runs code on request."""

    def __init__(self, double: Double, *, first_device: int = 0, setup: str = "") -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=double.env(first_device=first_device),
        )
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

    def start(self, code: str, **values: Any) -> None:
        """Begin to run `code`; `finish` waits for it."""
        assert self._process.stdin is not None
        data = pickle.dumps((code, values))
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        self._process.stdin.flush()

    def finish(self) -> Any:
        """The result of what was started last."""
        assert self._process.stdout is not None
        header = self._process.stdout.read(4)
        if len(header) < 4:
            raise ChildError(f"the child ended with {self._process.wait()}")
        ok, result = pickle.loads(self._process.stdout.read(struct.unpack("<I", header)[0]))
        if not ok:
            raise ChildError(result)
        return result

    def kill(self) -> None:
        """End it as the kernel would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

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


def _serve() -> None:
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
    _serve()
