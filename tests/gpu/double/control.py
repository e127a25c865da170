"""The double of libcuda from Python: build it, say how its devices behave, read what was done.

Owns the compiled library and the control page that all processes of one test share. What the
double does is in `libcuda.c`; the page's bytes are described in `double.h` and, again, here. The
library refuses a page of another size.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from tests.warm import WarmProcess

HERE: Final = Path(__file__).parent
MAGIC: Final = 0x6B766C32
DEVICES_MAX: Final = 8
FAULTS_MAX: Final = 8
PROCESSES_MAX: Final = 64
KINDS: Final = (
    "context", "stream", "event", "allocation", "import", "handle", "reservation", "mapping",
    "registration",
)  # fmt: skip


class _Fault(ctypes.Structure):
    _fields_ = [
        ("call", ctypes.c_char * 64),
        ("code", ctypes.c_uint32),
        ("skip", ctypes.c_uint32),
        ("times", ctypes.c_uint32),
        ("hit", ctypes.c_uint32),
    ]


class Process(ctypes.Structure):
    """What one process did and holds."""

    _fields_ = [
        ("pid", ctypes.c_uint32),
        ("violations", ctypes.c_uint32),
        ("first_violation", ctypes.c_char * 192),
        ("live", ctypes.c_int32 * len(KINDS)),
        ("waits", ctypes.c_uint32),
        ("batches", ctypes.c_uint32),
        ("descriptors_max", ctypes.c_uint32),
        ("descriptors", ctypes.c_uint64),
        ("plain_copies", ctypes.c_uint32),
        ("pageable_copies", ctypes.c_uint32),
        ("copied_bytes", ctypes.c_uint64 * 2),
        ("inflight_bytes", ctypes.c_int64 * 2),
        ("inflight_bytes_max", ctypes.c_int64 * 2),
        ("busy_ns", ctypes.c_uint64 * 2),
        ("stream_writes", ctypes.c_uint32),
        ("plane_copies", ctypes.c_uint32),
        ("priority_lowest_streams", ctypes.c_int32),
    ]

    @property
    def left(self) -> dict[str, int]:
        """What is alive, by kind; nothing that is not."""
        return {kind: count for kind, count in zip(KINDS, self.live, strict=True) if count}


class _Page(ctypes.Structure):
    _fields_ = [
        ("magic", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
        ("num_devices", ctypes.c_uint32),
        ("driver_version", ctypes.c_uint32),
        ("hold", ctypes.c_uint32),
        ("delay_us_max", ctypes.c_uint32),
        ("piece_bytes", ctypes.c_uint32),
        ("batch_descriptors_max", ctypes.c_uint32),
        ("break_batches", ctypes.c_uint32),
        ("no_stream_writes", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("break_planes", ctypes.c_uint32),
        ("clock_mb_per_s", ctypes.c_uint32),
        ("device_names", (ctypes.c_char * 64) * DEVICES_MAX),
        ("faults", _Fault * FAULTS_MAX),
        ("processes", Process * PROCESSES_MAX),
    ]


def build(directory: Path) -> Path:
    """Compile `libcuda.so.1` into `directory`; returns its path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "the double is compiled when its tests run: install gcc"
    library = directory / "libcuda.so.1"
    subprocess.run(
        [
            compiler, "-shared", "-fPIC", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror",
            "-Wno-unused-parameter", "-o", str(library), str(HERE / "libcuda.c"),
            "-Wl,-soname,libcuda.so.1", "-ldl",
        ],
        check=True,
    )  # fmt: skip
    return library


def uuid_of(device: int) -> bytes:
    """What the double says of the device with this identity."""
    return b"\xd0" * 15 + bytes([device])


class Double:
    """The control page, and the environment in which processes use the double."""

    def __init__(self, library: Path, page: Path) -> None:
        self._library = library
        self._path = page
        page.write_bytes(bytes(ctypes.sizeof(_Page)))
        with page.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.page = _Page.from_buffer(self._map)
        self.page.magic = MAGIC
        self.page.size = ctypes.sizeof(_Page)
        self.page.num_devices = 1
        self.page.driver_version = 12080
        self.page.batch_descriptors_max = 51_827

    def env(self, *, first_device: int = 0) -> dict[str, str]:
        """What a process needs in its environment; `first_device` is its ordinal 0."""
        found = os.environ.get("LD_LIBRARY_PATH", "")
        return {
            **os.environ,
            "LD_LIBRARY_PATH": f"{self._library.parent}:{found}".rstrip(":"),
            "KVLAKE_CUDA_DOUBLE": str(self._path),
            "KVLAKE_CUDA_DOUBLE_FIRST": str(first_device),
        }

    def start(
        self,
        module: str,
        arguments: Sequence[str | int],
        environment: dict[str, str],
        *,
        piped: bool = False,
    ) -> WarmProcess:
        """A process with the double. See `tests.gpu.child.start`."""
        return WarmProcess(
            module,
            arguments,
            environment,
            stdin=subprocess.PIPE if piped else None,
            stdout=subprocess.PIPE if piped else None,
            libraries=[str(self._library)],
        )

    def fail(self, call: str, code: int, *, skip: int = 0, times: int = 1) -> None:
        """Let the next calls of `call` return `code`, in whichever process."""
        for fault in self.page.faults:
            if fault.times == 0:
                fault.call, fault.code, fault.skip, fault.hit = call.encode(), code, skip, 0
                fault.times = times
                return
        raise AssertionError("all faults are in use")

    def heal(self) -> None:
        """Take every fault back."""
        for fault in self.page.faults:
            fault.times = 0

    def process(self, pid: int) -> Process:
        """What process `pid` did. `KeyError` if it never used the double."""
        for process in self.page.processes:
            if process.pid == pid:
                assert isinstance(process, Process)
                return process
        raise KeyError(pid)

    def processes(self) -> list[Process]:
        """Every process that used the double, dead ones too."""
        return [process for process in self.page.processes if process.pid]

    def no_violations(self) -> None:
        """Raise if any process broke a rule of the driver."""
        broken = {one.pid: one.first_violation for one in self.processes() if one.violations}
        assert not broken, broken


def wait_until(condition: Callable[[], Any], seconds_max: float = 90.0) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
