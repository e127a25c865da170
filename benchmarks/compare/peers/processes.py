"""Process groups that take turns: start, stop, resume, kill, and how much processor time they took.

Owns servers as process groups. Invariant: a group that is paused is resumed before it is asked to
end, and no process of a group outlives `end`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

ENGINE_CORE: Final = 0
"""The core that computes, of the engine whose turn it is."""
OTHER_CORE: Final = 1
"""The core of HTTP servers and load tools."""
START_SECONDS_MAX: Final = 300.0
END_SECONDS_MAX: Final = 20.0
LOG_CHARACTERS_MAX: Final = 3000
SHARED: Final = re.compile(r"/dev/shm/(?:psm_|sem\.mp-)\S+")
TICKS: Final = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """A server did not start, or ended; the message has the end of its log."""


class ServerGroup:
    """A server in a process group of its own, which may be started again after its end.

    `url` answers with status 200 when it serves.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        url: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._command = list(command)
        self._log = log
        self._url = url
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it, without waiting until it serves. Raises `ServerFailed`."""
        program = self._command[0]
        if not Path(program).exists():
            raise ServerFailed(f"{program} is missing; make compare sets it up")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._log.parent,
                env=os.environ | self._environment,
                start_new_session=True,
            )
        return self

    def wait(self, seconds: float = START_SECONDS_MAX) -> Self:
        """Wait until it serves. Raises `ServerFailed`."""
        deadline = time.monotonic() + seconds
        while not answers(self._url):
            if self._process is None or self._process.poll() is not None:
                raise ServerFailed(f"ended before it served:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"did not serve in {seconds:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)
        return self

    @property
    def pid(self) -> int:
        """The first process of the group."""
        assert self._process is not None, "started first"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its first process runs or is paused."""
        return self._process is not None and self._process.poll() is None

    def pause(self) -> None:
        """Stop the whole group. Does nothing after its end."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused group go on."""
        self._signal(signal.SIGCONT)

    def end(self) -> None:
        """SIGTERM, and SIGKILL for what is left of the group."""
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS_MAX)
        # vLLM's own processes end after it, and one of them removes the shared memory of all.
        deadline = time.monotonic() + END_SECONDS_MAX
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(END_SECONDS_MAX)

    def cpu_seconds(self) -> float:
        """Processor time of the processes of the group that are alive, in seconds."""
        return cpu_seconds(self.pids())

    def pids(self) -> list[int]:
        """Processes of the group."""
        return group_of(self.pid) if self._process is not None else []

    def log_tail(self) -> str:
        """The end of what it printed."""
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace")[-LOG_CHARACTERS_MAX:]
        return ""

    def count_in_log(self, text: str) -> int:
        """How often it printed a text."""
        with contextlib.suppress(OSError):
            return self._log.read_text(errors="replace").count(text)
        return 0

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


def answers(url: str) -> bool:
    """Whether a server answers with status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def group_of(group: int) -> list[int]:
    """Process ids of a process group, without those that have ended and nobody waited for."""
    pids = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    found = [(pid, fields) for pid in pids if (fields := stat_fields(pid))]
    return [pid for pid, fields in found if int(fields[2]) == group and fields[0] != "Z"]


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of these processes, in seconds; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        if fields := stat_fields(pid):
            ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS


def stat_fields(pid: int) -> list[str]:
    """`/proc/PID/stat` from the state on; empty if the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The name is in parentheses and may have spaces.
    return text.rpartition(")")[2].split()


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that Python's multiprocessing named and these processes map."""
    found: set[Path] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            names = SHARED.findall(Path(f"/proc/{pid}/maps").read_text())
            found.update(map(Path, names))
    return found


def pin(pid: int, core: int) -> None:
    """Pin all threads of a process that exist now; later ones inherit from theirs."""
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task.name), {core})
