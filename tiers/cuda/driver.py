"""The CUDA driver: checked calls through cuda-python, and frequent ones through ctypes.

Owns loading it, and converting results to values or named errors. cuda-python converts every
argument, which takes 160 µs for a batch of 1,024 descriptors. The calls of every copy are therefore
made by address, with pointers into numpy arrays (4 µs). They do not hold the GIL.

Invariants: nothing is loaded before a `Driver` is made; no call here waits for the device.
"""

import ctypes
import functools
import importlib
import uuid
from typing import Any, Final

from tiers.cuda.errors import DeviceMissing, DriverMissing, NotSupportedHere, failure

API_VERSION: Final = 12080
"""API version of the argument lists in use: the first with `cuMemcpyBatchAsync`."""

_POINTER, _SIZE, _ADDRESS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64
_ENTRIES: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxSetCurrent": (_POINTER,),
    "cuEventQuery": (_POINTER,),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuMemcpyAsync": (_ADDRESS, _ADDRESS, _SIZE, _POINTER),
    "cuMemcpy2DAsync": (_POINTER, _POINTER),
    "cuMemcpyBatchAsync": (
        _POINTER, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER, _SIZE, _POINTER, _POINTER,
    ),
    "cuStreamWriteValue64": (_POINTER, _ADDRESS, ctypes.c_uint64, ctypes.c_uint),
}  # fmt: skip


class Driver:
    """The initialized driver; `driver()` shares one per process.

    Raises `DriverMissing` without a driver, cuda-python, or a device.
    """

    def __init__(self) -> None:
        try:
            api: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise DriverMissing(f"cuda-python cannot be imported ({error})") from error
        self._api = api
        self._entries: dict[str, Any] = {}
        try:
            self.call("cuInit", 0)
        except NotSupportedHere:
            raise
        except RuntimeError as error:
            # Raised by cuda-python when it finds no library.
            raise DriverMissing(str(error).split("\n", 1)[0]) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; returns its value, or a tuple of values. Raises `CudaFailed`."""
        try:
            code, *values = getattr(self._api, name)(*arguments)
        except RuntimeError as error:
            if name == "cuInit":
                raise
            # Raised by cuda-python for a function that this driver lacks.
            raise NotSupportedHere(name, 500, "CUDA_ERROR_NOT_FOUND") from error
        if int(code):
            raise failure(name, int(code), getattr(code, "name", ""))
        return values[0] if len(values) == 1 else tuple(values)

    def enum(self, kind: str, name: str) -> Any:
        """A constant of the API."""
        return getattr(getattr(self._api, kind), name)

    def make(self, kind: str) -> Any:
        """A structure of the API, zeroed."""
        return getattr(self._api, kind)()

    def entry(self, name: str) -> Any:
        """A function by its address: takes integers, returns the driver's code.

        Raises `NotSupportedHere` for one that this driver lacks.
        """
        found = self._entries.get(name)
        if found is None:
            # An older driver answers INVALID_VALUE for a version above its own.
            version = min(API_VERSION, int(self.call("cuDriverGetVersion")))
            address, _ = self.call("cuGetProcAddress", name.encode(), version, 0)
            if not int(address):
                raise NotSupportedHere(name, 500, "CUDA_ERROR_NOT_FOUND")
            found = ctypes.CFUNCTYPE(ctypes.c_int, *_ENTRIES[name])(int(address))
            self._entries[name] = found
        return found

    def uuid(self, ordinal: int) -> bytes:
        """Identity of a device, the same in every process."""
        return bytes_of(self.call("cuDeviceGetUuid", ordinal), 16)

    def name(self, ordinal: int) -> str:
        """The name of a device."""
        found = bytes(self.call("cuDeviceGetName", 256, ordinal))
        return found.split(b"\0", 1)[0].decode(errors="replace").strip()

    def ordinal_of(self, identity: bytes) -> int:
        """Number of a device in this process. Raises `DeviceMissing`."""
        for ordinal in range(int(self.call("cuDeviceGetCount"))):
            if self.uuid(ordinal) == identity:
                return ordinal
        raise DeviceMissing("cuDeviceGetUuid", 101, f"no device {gpu_name(identity)}")

    def attribute(self, name: str, ordinal: int) -> int:
        """An attribute of a device."""
        attribute = self.enum("CUdevice_attribute", f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self.call("cuDeviceGetAttribute", attribute, ordinal))


def gpu_name(identity: bytes) -> str:
    """A device's UUID of 16 bytes as nvidia-smi and CUDA_VISIBLE_DEVICES have it."""
    return f"GPU-{uuid.UUID(bytes=identity)}"


def bytes_of(structure: Any, size_bytes: int) -> bytes:
    """The bytes of a structure of the API."""
    # By its address: names of fields differ between releases of cuda-python.
    return ctypes.string_at(structure.getPtr(), size_bytes)


def check(name: str, code: int) -> None:
    """Raise `CudaFailed` unless the result of an `entry` is success."""
    if code:
        raise failure(name, code)


@functools.cache
def driver() -> Driver:
    """The driver of this process. Raises `DriverMissing`; a later call tries again."""
    return Driver()
