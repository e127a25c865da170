"""Checks of GPUs: the driver, the devices, and the limits and namespaces that GPU memory needs.

A GPU is used for a moment, with a context of its own.
"""

from __future__ import annotations

import itertools
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sidecar.cli.doctor.findings import Check, failed, passed, warning
from tiers.cuda.device import Device
from tiers.cuda.driver import Driver
from tiers.cuda.errors import CudaFailed

if TYPE_CHECKING:
    from sidecar.config.model import Config

_INFLIGHT_BYTES: Final = 32 << 20
_SCRATCH_BYTES: Final = 1 << 20


def gpu_findings(config: Config) -> list[Check]:
    """Every check for engines on GPUs."""
    found = [_locked_memory(config)]
    # For comparison with the engine's: they cannot be checked from here.
    names = [Path(f"/proc/self/ns/{kind}").readlink().name for kind in ("ipc", "pid")]
    found.append(passed("namespaces", f"{' '.join(names)}, and GPU engines must be in the same"))
    try:
        driver = Driver()
        count = int(driver.call("cuDeviceGetCount"))
    except CudaFailed as error:
        return [*found, warning("GPUs", str(error), "nothing to do for engines on CPUs")]
    found.append(passed("GPUs", f"{count}, driver API {driver.call('cuDriverGetVersion')}"))
    for ordinal in range(count):
        try:
            found += _gpu(driver, ordinal)
        except CudaFailed as error:
            found.append(failed(f"GPU {ordinal}", str(error)))
    if count > 1:
        pairs = [
            (one, other)
            for one, other in itertools.permutations(range(count), 2)
            if not driver.call("cuDeviceCanAccessPeer", one, other)
        ]
        # For information: each worker's memory is mapped on its own device.
        found.append(passed("peer access", f"missing between {pairs or 'none'}"))
    return found


def _locked_memory(config: Config) -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (resource.RLIM_INFINITY, -1) or limit >= config.host.size:
        return passed("locked memory", "the limit allows all of host.size")
    return warning(
        "locked memory",
        f"the limit is {limit} bytes, and GPUs need all {config.host.size} of host.size pinned",
        "set ulimit -l unlimited (LimitMEMLOCK=infinity) if pinning fails; CPU engines need none",
    )


def _gpu(driver: Driver, ordinal: int) -> list[Check]:
    about = f"GPU {ordinal} ({driver.name(ordinal)})"
    if " MIG " in f" {driver.name(ordinal)} ":
        return [failed(about, "a slice (MIG) cannot be shared", "use a whole GPU")]
    stream_writes = driver.attribute("CAN_USE_64_BIT_STREAM_MEM_OPS", ordinal)
    exports = driver.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", ordinal)
    device = Device(
        driver,
        driver.uuid(ordinal),
        to_device_bytes_max=_INFLIGHT_BYTES,
        to_host_bytes_max=_INFLIGHT_BYTES,
    )
    newer = "use a newer driver or device"
    features = (
        ("fences written by streams", stream_writes, newer),
        ("memory exported as descriptors (VMM)", exports, newer),
        ("batch copies", device.calibration.batches, "use a driver of CUDA 12.8"),
    )
    try:
        return [
            *(
                passed(about, f"{what}: yes") if has else warning(about, f"{what}: no", remedy)
                for what, has, remedy in features
            ),
            _strided(device, about),
            _ipc(driver, about),
        ]
    finally:
        device.close()


def _strided(device: Device, about: str) -> Check:
    if not device.calibration.planes:
        reason = "; ".join(device.calibration.reasons)
        return warning(about, f"2D copies: no ({reason})", "nothing: batches do it")
    rates = "; ".join(
        f"{name} {', '.join(f'{width} {rate}' for width, rate in one.items())}"
        for name, one in device.calibration.describe_rates().items()
    )
    return passed(about, f"GB/s of runs at a distance, batch/2D: {rates}")


def _ipc(driver: Driver, about: str) -> Check:
    address = driver.call("cuMemAlloc", _SCRATCH_BYTES)
    try:
        driver.call("cuIpcGetMemHandle", address)
    except CudaFailed as error:
        return failed(about, f"IPC handles: {error}")
    finally:
        driver.call("cuMemFree", address)
    return passed(about, "IPC handles: yes")
