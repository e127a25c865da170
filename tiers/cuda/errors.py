"""Errors of the CUDA driver, named by condition and by who must act.

Owns the table from the driver's codes to these names; other codes are a `CudaFailed`. Every message
names the call, its result and the remedy.
"""

from __future__ import annotations

from typing import Final

from tiers.errors import TierError

NOT_READY: Final = 600


class CudaFailed(TierError):
    """A call of the driver failed."""

    remedy = "see the driver's log (dmesg) and its documentation of this code"

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with {name or 'CUDA error'} ({code}): {self.remedy}")
        self.call = call
        self.code = code


class DriverMissing(CudaFailed):
    """There is no driver, no cuda-python, or no visible device."""

    remedy = (
        "install the NVIDIA driver and, in a clone of kvlake, '.[cuda]', and give the container "
        "its GPUs and libcuda.so.1"
    )

    def __init__(self, found: str, code: int = 100) -> None:
        TierError.__init__(self, f"CUDA cannot be used here: {found}; {self.remedy}")
        self.call = "cuInit"
        self.code = code


class DeviceMissing(CudaFailed):
    """The requested device is not visible in this process."""

    remedy = "let the sidecar see every GPU of its engines (CUDA_VISIBLE_DEVICES, --gpus)"


class DeviceMemoryFull(CudaFailed):
    """Device memory, or host memory that may be pinned, is exhausted."""

    remedy = (
        "leave about 1 GiB of device memory free for the sidecar's context "
        "(--gpu-memory-utilization), and raise the limit of locked memory (ulimit -l, LimitMEMLOCK)"
    )


class HandleInvalid(CudaFailed):
    """A handle is invalid, or its owner is gone."""

    remedy = (
        "the process that exported this memory has ended, or is in another container: share its "
        "IPC and PID namespaces with the sidecar's (docker --ipc, --pid; hostIPC, hostPID)"
    )


class NotSupportedHere(CudaFailed):
    """The driver or the device cannot do this."""

    remedy = "a driver of CUDA 12 or later on a device that is not MIG, on Linux, can"


class NotPermitted(CudaFailed):
    """The operating system or the driver forbids it."""

    remedy = (
        "run the sidecar as the engine's user, and let its container lock memory (IPC_LOCK, "
        "ulimit -l unlimited)"
    )


class DeviceLost(CudaFailed):
    """The context is broken for good: this process can run nothing on the device any more."""

    remedy = "restart the sidecar; if it comes back, check the GPU (nvidia-smi -q, Xid in dmesg)"


class CudaMisused(CudaFailed):
    """The driver refuses the arguments: a bug of kvlake, or false data of another process."""

    remedy = "please report it with the sidecar's log"


_BY_CODE: Final[dict[int, type[CudaFailed]]] = {
    1: CudaMisused,  # INVALID_VALUE
    2: DeviceMemoryFull,  # OUT_OF_MEMORY
    3: DeviceLost,  # NOT_INITIALIZED: after a fork
    4: DeviceLost,  # DEINITIALIZED: the process is ending
    34: DriverMissing,  # STUB_LIBRARY
    46: DeviceMissing,  # DEVICE_UNAVAILABLE
    100: DriverMissing,  # NO_DEVICE
    101: DeviceMissing,  # INVALID_DEVICE
    201: CudaMisused,  # INVALID_CONTEXT
    205: NotSupportedHere,  # MAP_FAILED
    208: CudaMisused,  # ALREADY_MAPPED
    214: DeviceLost,  # ECC_UNCORRECTABLE
    217: NotSupportedHere,  # PEER_ACCESS_UNSUPPORTED
    220: DeviceLost,  # NVLINK_UNCORRECTABLE
    304: NotPermitted,  # OPERATING_SYSTEM
    400: HandleInvalid,  # INVALID_HANDLE
    401: CudaMisused,  # ILLEGAL_STATE
    500: NotSupportedHere,  # NOT_FOUND
    700: DeviceLost,  # ILLEGAL_ADDRESS
    702: DeviceLost,  # LAUNCH_TIMEOUT
    709: DeviceLost,  # CONTEXT_IS_DESTROYED
    710: DeviceLost,  # ASSERT
    712: CudaMisused,  # HOST_MEMORY_ALREADY_REGISTERED
    713: CudaMisused,  # HOST_MEMORY_NOT_REGISTERED
    714: DeviceLost,  # HARDWARE_STACK_ERROR
    715: DeviceLost,  # ILLEGAL_INSTRUCTION
    716: DeviceLost,  # MISALIGNED_ADDRESS
    717: DeviceLost,  # INVALID_ADDRESS_SPACE
    718: DeviceLost,  # INVALID_PC
    719: DeviceLost,  # LAUNCH_FAILED
    800: NotPermitted,  # NOT_PERMITTED
    801: NotSupportedHere,  # NOT_SUPPORTED
    802: DriverMissing,  # SYSTEM_NOT_READY
    803: DriverMissing,  # SYSTEM_DRIVER_MISMATCH
    804: DriverMissing,  # COMPAT_NOT_SUPPORTED_ON_DEVICE
    999: DeviceLost,  # UNKNOWN
}


def failure(call: str, code: int, name: str = "") -> CudaFailed:
    """The error for a result of `call`."""
    kind = _BY_CODE.get(code, CudaFailed)
    if kind is DriverMissing:
        return DriverMissing(f"{call} failed with {name or 'CUDA error'} ({code})", code)
    return kind(call, code, name)
