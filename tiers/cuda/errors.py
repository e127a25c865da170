"""Errors of the CUDA driver, named by condition and by who must act.

Owns which of the driver's codes have which name; others are a `CudaFailed`. Every message names the
call, its result and the remedy.
"""

from typing import Final

from tiers.errors import TierError

NOT_READY: Final = 600


class CudaFailed(TierError):
    """A call of the driver failed."""

    codes: tuple[int, ...] = ()
    remedy = "see the driver's log (dmesg) and its documentation of this code"

    def __init__(self, call: str, code: int, name: str = "") -> None:
        super().__init__(f"{call} failed with {name or 'CUDA error'} ({code}): {self.remedy}")
        self.call = call
        self.code = code


class DriverMissing(CudaFailed):
    """There is no driver, no cuda-python, or no visible device."""

    # STUB_LIBRARY, NO_DEVICE, SYSTEM_NOT_READY, SYSTEM_DRIVER_MISMATCH,
    # COMPAT_NOT_SUPPORTED_ON_DEVICE.
    codes = (34, 100, 802, 803, 804)
    remedy = (
        "install the NVIDIA driver and, in a clone of kvlake, '.[cuda]', and give the container "
        "its GPUs and libcuda.so.1"
    )

    def __init__(self, found: str, code: int = 100) -> None:
        TierError.__init__(self, f"CUDA cannot be used here: {found}; {self.remedy}")
        self.call = "cuInit"
        self.code = code


class DeviceMissing(CudaFailed):
    """The requested device is not visible in this process, or takes no other process."""

    # DEVICE_UNAVAILABLE, INVALID_DEVICE.
    codes = (46, 101)
    remedy = (
        "let the sidecar see every GPU of its engines (CUDA_VISIBLE_DEVICES, --gpus), in compute "
        "mode Default (nvidia-smi -c DEFAULT): in another mode only the engine can use it"
    )


class DeviceMemoryFull(CudaFailed):
    """Device memory, or host memory that may be pinned, is exhausted."""

    # OUT_OF_MEMORY.
    codes = (2,)
    remedy = (
        "leave about 1 GiB of device memory free for the sidecar's context "
        "(--gpu-memory-utilization), and raise the limit of locked memory (ulimit -l, LimitMEMLOCK)"
    )


class HandleInvalid(CudaFailed):
    """A handle is invalid, or its owner is gone."""

    # INVALID_HANDLE.
    codes = (400,)
    remedy = (
        "the process that exported this memory has ended; if it runs, in another container, the "
        "driver is too old for that: share its IPC and PID namespaces with the sidecar's (docker "
        "--ipc, --pid; hostIPC, hostPID)"
    )


class NotSupportedHere(CudaFailed):
    """The driver or the device cannot do this."""

    # MAP_FAILED, PEER_ACCESS_UNSUPPORTED, NOT_FOUND, NOT_SUPPORTED.
    codes = (205, 217, 500, 801)
    remedy = "a driver of CUDA 12 or later on a device that is not MIG, on Linux, can"


class NotPermitted(CudaFailed):
    """The operating system or the driver forbids it."""

    # OPERATING_SYSTEM, NOT_PERMITTED.
    codes = (304, 800)
    remedy = (
        "run the sidecar as the engine's user, and let its container lock memory (IPC_LOCK, "
        "ulimit -l unlimited)"
    )


class DeviceLost(CudaFailed):
    """The context is broken for good: this process can run nothing on the device any more."""

    # NOT_INITIALIZED (after a fork), DEINITIALIZED (the process is ending), ECC_UNCORRECTABLE,
    # NVLINK_UNCORRECTABLE, CONTAINED, ILLEGAL_ADDRESS, LAUNCH_TIMEOUT, CONTEXT_IS_DESTROYED,
    # ASSERT, HARDWARE_STACK_ERROR, ILLEGAL_INSTRUCTION, MISALIGNED_ADDRESS,
    # INVALID_ADDRESS_SPACE, INVALID_PC, LAUNCH_FAILED, TENSOR_MEMORY_LEAK,
    # MPS_CLIENT_TERMINATED, EXTERNAL_DEVICE, UNKNOWN.
    codes = (
        3, 4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999,
    )  # fmt: skip
    remedy = "restart the sidecar; if it comes back, check the GPU (nvidia-smi -q, Xid in dmesg)"

    def again(self) -> "DeviceLost":
        """An equal error, to raise.

        One that is kept, and raised again and again, would keep the frames of every copy that it
        ended, and what they hold.
        """
        return DeviceLost(self.call, self.code)


class CudaMisused(CudaFailed):
    """The driver refuses the arguments: a bug of kvlake, or false data of another process."""

    # INVALID_VALUE, INVALID_CONTEXT, ALREADY_MAPPED, ILLEGAL_STATE,
    # HOST_MEMORY_ALREADY_REGISTERED, HOST_MEMORY_NOT_REGISTERED.
    codes = (1, 201, 208, 401, 712, 713)
    remedy = "please report it with the sidecar's log"


_BY_CODE: Final = {code: kind for kind in CudaFailed.__subclasses__() for code in kind.codes}


def failure(call: str, code: int, name: str = "") -> CudaFailed:
    """The error for a result of `call`."""
    kind = _BY_CODE.get(code, CudaFailed)
    if kind is DriverMissing:
        return DriverMissing(f"{call} failed with {name or 'CUDA error'} ({code})", code)
    return kind(call, code, name)
