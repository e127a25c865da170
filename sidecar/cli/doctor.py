"""`kvlake doctor`: what of this machine a sidecar will stumble over, and what to do about each.

Owns the checks. Each looks at one thing as the sidecar would use it, and answers in one line. Does
not own the configuration, nor how lines are printed (`cli/`). Nothing here needs a running
sidecar or changes one; a GPU is used for a moment, with a context of its own.
"""

from __future__ import annotations

import enum
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from sidecar.errors import StartError
from sidecar.service.store_stack import open_store
from tiers.cuda.calibration import describe_rates
from tiers.cuda.device import Device
from tiers.cuda.driver import Driver
from tiers.cuda.errors import CudaFailed
from tiers.errors import PoolError, TierError
from tiers.pool.numa import Placement, sample

if TYPE_CHECKING:
    from sidecar.config.model import Config

_INFLIGHT_BYTES: Final = 32 << 20
_SCRATCH_BYTES: Final = 1 << 20


class CheckResult(enum.StrEnum):
    """What one check found."""

    PASS = "pass"  # noqa: S105 (no password)
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, what was found, and what to do unless it passed."""

    verdict: CheckResult
    about: str
    found: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.verdict:4}  {self.about}: {self.found}"
        return f"{line}; {self.remedy}" if self.remedy else line


async def examine(config: Config) -> list[Check]:
    """Every check, in the order in which one rests on another."""
    found = [_room(config), _locked_memory(config), _namespaces(), numa_finding(config), *_gpus()]
    found.append(await _store(config))
    return found


def _room(config: Config) -> Check:
    directory, wanted = config.host.directory, config.host.size
    about = f"host.directory {directory}"
    try:
        stats = os.statvfs(directory)
    except OSError as error:
        return Check(CheckResult.FAIL, about, str(error), "choose another host.directory")
    room = stats.f_bavail * stats.f_frsize
    # A tmpfs that is mounted without a limit reports no blocks at all.
    if room < wanted and stats.f_blocks:
        return Check(
            CheckResult.FAIL,
            about,
            f"{room} bytes are free, host.size is {wanted}",
            f"lower host.size, or mount -o remount,size=... {directory} (docker --shm-size)",
        )
    return Check(CheckResult.PASS, about, f"room for host.size={wanted}")


def _locked_memory(config: Config) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or limit >= config.host.size:
        return Check(CheckResult.PASS, "locked memory", "the limit allows all of host.size")
    return Check(
        CheckResult.WARN,
        "locked memory",
        f"the limit is {limit} bytes, and GPUs need all {config.host.size} of host.size pinned",
        "set ulimit -l unlimited (LimitMEMLOCK=infinity) if pinning fails; CPU engines need none",
    )


def _namespaces() -> Check:
    # Which is right only the engine's side can say: the numbers are there to be compared.
    names = [Path(f"/proc/self/ns/{kind}").readlink().name for kind in ("ipc", "pid")]
    return Check(
        CheckResult.PASS, "namespaces", f"{' '.join(names)}, and GPU engines must be in the same"
    )


def numa_finding(config: Config, root: Path = Path("/")) -> Check:
    """Whether new pages of the pool go to the nodes that they should go to."""
    about = "NUMA"
    try:
        placement = Placement.of(config.host.numa, root)
        placement.settle()
    except PoolError as error:
        return Check(CheckResult.FAIL, about, str(error))
    if placement.refused:
        remedy = "or start the sidecar with numactl --membind=N, N the nodes of its GPUs"
        return Check(CheckResult.WARN, about, placement.reason, remedy)
    if not placement.nodes:
        return Check(CheckResult.PASS, about, f"the pool is not placed: {placement.reason}")
    told = f"new pages of the pool go to {_named(placement.nodes)}"
    pages = _pages_of(config.pool_path)
    if not pages:
        return Check(CheckResult.PASS, about, told)
    told += f"; of {sum(pages.values())} pages of the pool that is there, " + ", ".join(
        f"{count} are on {_named((node,))}" for node, count in pages.items()
    )
    if set(pages) <= set(placement.nodes):
        return Check(CheckResult.PASS, about, told)
    remedy = "stop the sidecar and run `kvlake pool remove` with its --config"
    return Check(CheckResult.WARN, about, told, remedy)


def _named(nodes: tuple[int, ...]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def _pages_of(path: Path) -> dict[int, int]:
    """On which nodes a pool's file is now; nothing where there is none, or it is not ours."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            return sample(np.frombuffer(mapping, dtype=np.uint8))
    except (OSError, ValueError, BufferError):
        return {}


def _gpus() -> list[Check]:
    try:
        driver = Driver()
        count = int(driver.call("cuDeviceGetCount"))
    except CudaFailed as error:
        return [Check(CheckResult.WARN, "GPUs", str(error), "nothing to do for engines on CPUs")]
    found = [
        Check(CheckResult.PASS, "GPUs", f"{count}, driver API {driver.call('cuDriverGetVersion')}")
    ]
    for ordinal in range(count):
        try:
            found += _gpu(driver, ordinal)
        except CudaFailed as error:
            found.append(Check(CheckResult.FAIL, f"GPU {ordinal}", str(error)))
    if count > 1:
        pairs = [
            (one, other)
            for one in range(count)
            for other in range(count)
            if one != other and not driver.call("cuDeviceCanAccessPeer", one, other)
        ]
        # For information: each worker's memory is mapped on its own device.
        found.append(Check(CheckResult.PASS, "peer access", f"missing between {pairs or 'none'}"))
    return found


def _gpu(driver: Driver, ordinal: int) -> list[Check]:
    about = f"GPU {ordinal} ({driver.name(ordinal)})"
    if " MIG " in f" {driver.name(ordinal)} ":
        return [Check(CheckResult.FAIL, about, "a slice (MIG) cannot be shared", "use a whole GPU")]
    found: list[Check] = []
    for attribute, what in (
        ("CAN_USE_64_BIT_STREAM_MEM_OPS", "fences written by streams"),
        ("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", "memory exported as descriptors (VMM)"),
    ):
        able = bool(driver.attribute(attribute, ordinal))
        found.append(
            Check(CheckResult.PASS, about, f"{what}: yes")
            if able
            else Check(CheckResult.WARN, about, f"{what}: no", "use a newer driver or device")
        )
    device = Device(
        driver,
        driver.uuid(ordinal),
        to_device_bytes_max=_INFLIGHT_BYTES,
        to_host_bytes_max=_INFLIGHT_BYTES,
    )
    try:
        found.append(
            Check(CheckResult.PASS, about, "batch copies: yes")
            if device.batches
            else Check(CheckResult.WARN, about, "batch copies: no", "use a driver of CUDA 12.8")
        )
        found.append(_strided(device, about))
        found.append(_ipc(driver, about))
    finally:
        device.close()
    return found


def _strided(device: Device, about: str) -> Check:
    rates = describe_rates(device.findings)
    if not device.findings.planes:
        reason = "; ".join(device.findings.reasons)
        return Check(CheckResult.WARN, about, f"2D copies: no ({reason})", "nothing: batches do it")
    told = "; ".join(
        f"{name} {', '.join(f'{width} {rate}' for width, rate in one.items())}"
        for name, one in rates.items()
    )
    return Check(CheckResult.PASS, about, f"GB/s of runs at a distance, batch/2D: {told}")


def _ipc(driver: Driver, about: str) -> Check:
    address = driver.call("cuMemAlloc", _SCRATCH_BYTES)
    try:
        driver.call("cuIpcGetMemHandle", address)
    except CudaFailed as error:
        return Check(CheckResult.FAIL, about, f"IPC handles: {error}")
    finally:
        driver.call("cuMemFree", address)
    return Check(CheckResult.PASS, about, "IPC handles: yes")


async def _store(config: Config) -> Check:
    if config.store is None:
        return Check(CheckResult.PASS, "store", "none configured")
    try:
        store = open_store(config.store)
    except StartError as error:
        return Check(CheckResult.FAIL, "store", str(error), "change store in the configuration")
    try:
        await store.probe()
    except TierError as error:
        return Check(CheckResult.FAIL, f"store {store.url}", str(error))
    finally:
        await store.close()
    return Check(CheckResult.PASS, f"store {store.url}", "writes, reads, lists and deletes")
