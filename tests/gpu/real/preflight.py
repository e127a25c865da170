"""Can the tests and benchmarks of a device run here? Says what is missing, and the remedy.

    python -m tests.gpu.real.preflight

Prints one JSON object about the device, or says on stderr why not and ends with 2. It runs in a
process of its own: a driver that hangs is then a process that is given up.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any, Final

CANNOT_RUN: Final = 2
"""Exit code: nothing is wrong with kvlake, but this machine is not one for it."""
PACKAGES: Final = {
    "torch": "torch",
    "cuda.bindings.driver": "cuda-bindings",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "anyio": "anyio",
    "aiohttp": "aiohttp",
    "pydantic": "pydantic",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus_client",
    "xxhash": "xxhash",
    "fsspec": "fsspec",
    "hypothesis": "hypothesis",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}
"""Module to distribution. vLLM is not among them."""
SHARED_MEMORY_BYTES_MIN: Final = 6 << 30
DEVICE_BYTES_MIN: Final = 16 << 30
SECONDS_MAX: Final = 120.0


class CannotRun(Exception):
    """Not on this machine; the message says why and what would help."""


@dataclass(frozen=True)
class Device:
    """What the results were taken on."""

    name: str
    memory_bytes: int
    driver_version: int
    torch: str
    cuda_bindings: str
    python: str
    cores: int

    @property
    def slug(self) -> str:
        """The name as a part of a file's name."""
        kept = "".join(c if c.isalnum() else "-" for c in self.name.lower())
        return "-".join(part for part in kept.split("-") if part)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _require_packages() -> None:
    missing = [distribution for module, distribution in PACKAGES.items() if not _found(module)]
    if missing:
        raise CannotRun(
            f"{sys.executable} has no {', '.join(missing)}. Install it there, name an interpreter "
            "that has them (GPU_PYTHON=...), or, without a network, put wheels into a folder and "
            "name it: WHEELS=folder (docs/evidence/testing.md, On a GPU)"
        )


def _require_imports() -> None:
    # Last, for it takes long: what is there may still be for another Python or another release.
    for module, distribution in PACKAGES.items():
        try:
            importlib.import_module(module)
        except Exception as error:
            raise CannotRun(
                f"{distribution} is there, but its import fails ({type(error).__name__}: {error}); "
                "install a release of it for this Python, or carry its wheel: WHEELS=folder"
            ) from error


def _require_device() -> Device:
    from tiers.cuda.driver import driver
    from tiers.cuda.errors import CudaFailed

    try:
        cuda = driver()
        if not int(cuda.call("cuDeviceGetCount")):
            raise CannotRun("the driver shows no device; see CUDA_VISIBLE_DEVICES and nvidia-smi")
        name, memory_bytes = cuda.name(0), int(cuda.call("cuDeviceTotalMem", 0))
        version = int(cuda.call("cuDriverGetVersion"))
    except CudaFailed as error:
        raise CannotRun(f"no GPU that can be used: {error}") from error
    if " MIG " in f" {name} ":
        raise CannotRun(
            f"device {name!r} is a slice of a GPU (MIG), whose memory no other process can map; "
            "run on a whole GPU"
        )
    if "double" in name.lower():
        raise CannotRun(
            f"device {name!r} is the double of libcuda, on LD_LIBRARY_PATH; what it measures means "
            "nothing. `make test` rehearses on it; take it off the path"
        )
    _require_imports()
    import torch

    if not torch.cuda.is_available():
        raise CannotRun(
            f"torch {torch.__version__} cannot use the GPU {name!r}: it needs a build with CUDA "
            "that this driver can run; name an interpreter that has one: GPU_PYTHON=..."
        )
    if memory_bytes < DEVICE_BYTES_MIN:
        raise CannotRun(
            f"device {name!r} has {memory_bytes >> 30} GiB; caches of these sizes need "
            f"{DEVICE_BYTES_MIN >> 30} GiB"
        )
    bindings: Any = importlib.import_module("cuda.bindings")
    return Device(
        name=name,
        memory_bytes=memory_bytes,
        driver_version=version,
        torch=torch.__version__,
        cuda_bindings=str(getattr(bindings, "__version__", "")),
        python=platform.python_version(),
        cores=os.cpu_count() or 0,
    )


def _require_shared_memory() -> None:
    free = shutil.disk_usage("/dev/shm").free
    if free < SHARED_MEMORY_BYTES_MIN:
        raise CannotRun(
            f"/dev/shm has {free >> 20} MiB free, the pools need {SHARED_MEMORY_BYTES_MIN >> 30} "
            "GiB; give it more (mount -o remount,size=16G /dev/shm, docker --shm-size=16g)"
        )


def look() -> Device:
    """The device. Raises `CannotRun`. In this process: it loads torch and the driver."""
    _require_packages()
    found = _require_device()
    _require_shared_memory()
    return found


def look_from_outside() -> Device:
    """The device, by a process of its own. Raises `CannotRun`."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.real.preflight"],
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotRun(
            f"the driver did not answer within {SECONDS_MAX:.0f} s; see nvidia-smi and dmesg"
        ) from None
    if done.returncode:
        raise CannotRun(done.stderr.strip() or f"the check itself ended with {done.returncode}")
    return Device(**json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    try:
        print(json.dumps(asdict(look())))
    except CannotRun as error:
        print(error, file=sys.stderr)
        sys.exit(CANNOT_RUN)
