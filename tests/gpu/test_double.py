"""The double itself: does it behave as the driver API says, and does it see broken rules?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.child import Child, ChildError
from tests.gpu.double.control import Double, uuid_of, wait_until

pytest.importorskip("cuda.bindings.driver")

SETUP = """
import ctypes, numpy as np
from tests.gpu.device import Device, Failed, call, driver
gpu = Device()
"""

BATCH = """
entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3, ctypes.c_size_t, ctypes.c_void_p,
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p)(
    call("cuGetProcAddress", b"cuMemcpyBatchAsync", 12080, 0)[0])
attributes = np.array([1, 0, 0, 0, 0, 1], dtype=np.int32)
def batch(dsts, srcs, sizes, stream):
    d, s, n = (np.array(a, dtype=np.uint64) for a in (dsts, srcs, sizes))
    first = np.zeros(1, dtype=np.uint64)
    return entry(d.ctypes.data, s.ctypes.data, n.ctypes.data, len(d), attributes.ctypes.data,
        first.ctypes.data, 1, None, stream)
"""

PINNED = """
import mmap
host = np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)
call("cuMemHostRegister", host.ctypes.data, host.size, 1)
"""


def _broken(double: Double, pid: int) -> bytes:
    """The rule that was broken; forgotten, as it was meant to be."""
    process = double.process(pid)
    assert process.violations
    process.violations = 0
    return bytes(process.first_violation)


def test_memory_of_another_process_is_reached_by_an_ipc_handle_and_outlives_its_owner(
    double: Double,
) -> None:
    with Child(double, setup=SETUP) as owner, Child(double, setup=SETUP) as reader:
        handle = owner.run(
            "p = gpu.allocate(1 << 16); gpu.write(p, b'kv' * 100); gpu.read(p, 1)\n"
            "result = ctypes.string_at(call('cuIpcGetMemHandle', p).getPtr(), 64)"
        )
        assert len(handle) == 64
        opened = (
            "h = driver.CUipcMemHandle(); ctypes.memmove(h.getPtr(), handle, 64)\n"
            "q = int(call('cuIpcOpenMemHandle', h, 1)); result = gpu.read(q, 200)"
        )
        assert reader.run(opened, handle=handle) == b"kv" * 100
        owner.kill()
        assert reader.run("result = gpu.read(q, 200)") == b"kv" * 100
        with (
            pytest.raises(ChildError, match="cuIpcOpenMemHandle: 400"),
            Child(double, setup=SETUP) as late,
        ):
            late.run(opened, handle=handle)
        reader.run("call('cuIpcCloseMemHandle', q)")
        assert "import" not in double.process(reader.pid).left


def test_a_stream_runs_later_and_in_its_own_time(double: Double) -> None:
    with Child(double, setup=SETUP + PINNED) as child:
        double.page.hold = 1
        child.run(
            "p = gpu.allocate(1 << 16); host[:4] = 7\n"
            "call('cuMemcpyHtoDAsync', p, host.ctypes.data, 4, gpu.stream)\n"
            "event = call('cuEventCreate', 2); call('cuEventRecord', event, gpu.stream)\n"
        )
        assert child.run("result = gpu.reached(event, 0.05)") is False
        double.page.hold = 0
        assert child.run("result = gpu.reached(event)") is True
        assert child.run("result = gpu.read(p, 4)") == b"\7" * 4
        assert double.process(child.pid).waits == 0


def test_with_a_clock_copies_take_their_time_and_move_nothing(double: Double) -> None:
    with Child(double, setup=SETUP + PINNED) as child:
        child.run("p = gpu.allocate(1 << 16); host[:4] = 7; gpu.write(p, b'kv'); gpu.read(p, 2)")
        double.page.clock_mb_per_s = 2
        child.run(
            "call('cuMemcpyHtoDAsync', p, host.ctypes.data, 1 << 16, gpu.stream)\n"
            "call('cuMemcpyDtoHAsync', host.ctypes.data, p, 1 << 12, gpu.stream)\n"
            "call('cuStreamSynchronize', gpu.stream)"
        )
        assert list(double.process(child.pid).busy_ns) == [32_768_000, 2_048_000]
        double.page.clock_mb_per_s = 0
        assert child.run("result = gpu.read(p, 2)") == b"kv"
        assert child.run("result = host[:4].tolist()") == [7] * 4


def test_a_cpu_that_follows_a_device_pointer_dies(double: Double) -> None:
    with Child(double, setup=SETUP) as child, pytest.raises(ChildError, match="ended with -11"):
        # Handlers of the libraries that the child imported allocate memory, and may end it first.
        child.run(
            "import faulthandler, signal\n"
            "faulthandler.disable()\n"
            "signal.signal(signal.SIGSEGV, signal.SIG_DFL)\n"
            "ctypes.c_char.from_address(gpu.allocate(4096)).value"
        )


def test_every_thread_needs_a_context_of_its_own(double: Double) -> None:
    with Child(double, setup=SETUP) as child:
        code = child.run(
            "import threading\n"
            "def use():\n"
            "    global result\n"
            "    try: gpu.allocate(4096)\n"
            "    except Failed as error: result = error.code\n"
            "thread = threading.Thread(target=use); thread.start(); thread.join()"
        )
        assert code == 201


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("batch([p], [host.ctypes.data], [64], None)", b"NULL stream"),
        ("batch([p], [host.ctypes.data + 65000], [1000], int(gpu.stream))", b"straddles"),
        ("batch([p + 65000], [host.ctypes.data], [1000], int(gpu.stream))", b"leaves"),
        ("batch([p] * 51828, [host.ctypes.data] * 51828, [8] * 51828, int(gpu.stream))", b"many"),
    ],
)
def test_a_batch_that_breaks_a_rule_is_refused_and_noted(
    double: Double, what: str, rule: bytes
) -> None:
    with Child(double, setup=SETUP + PINNED + BATCH) as child:
        assert child.run(f"p = gpu.allocate(1 << 16); result = {what}") == 1
        assert rule in _broken(double, child.pid)


def test_a_batch_copies_and_an_older_driver_has_none(double: Double) -> None:
    with Child(double, setup=SETUP + PINNED + BATCH) as child:
        answer = child.run(
            "p = gpu.allocate(1 << 16); host[:] = np.arange(1 << 16) % 251\n"
            "n = 1000; result = batch([p + 64 * i for i in range(n)],\n"
            "    [host.ctypes.data + 64 * (n - 1 - i) for i in range(n)], [64] * n,"
            "    int(gpu.stream))\n"
            "result = (result, gpu.read(p, 64 * n), host.tobytes())"
        )
        code, copied, host = answer
        assert code == 0
        assert copied == b"".join(host[64 * i : 64 * i + 64] for i in reversed(range(1000)))
        assert double.process(child.pid).descriptors_max == 1000
        double.page.driver_version = 12040
        found = "result = int(call('cuGetProcAddress', b'cuMemcpyBatchAsync', 12040, 0)[0])"
        assert child.run(found) == 0
        with pytest.raises(ChildError, match="cuGetProcAddress: 1"):
            child.run("call('cuGetProcAddress', b'cuMemcpyBatchAsync', 12080, 0)")


def test_unregistering_memory_that_queued_work_touches_is_noted(double: Double) -> None:
    with Child(double, setup=SETUP + PINNED) as child:
        double.page.hold = 1
        child.run(
            "p = gpu.allocate(1 << 16)\n"
            "call('cuMemcpyHtoDAsync', p, host.ctypes.data, 4, gpu.stream)\n"
        )
        child.start("call('cuMemHostUnregister', host.ctypes.data)")
        wait_until(lambda: double.process(child.pid).violations)
        double.page.hold = 0
        child.finish()
        assert b"unregistered" in _broken(double, child.pid)


def test_a_stream_writes_words_only_where_memory_is_registered(double: Double) -> None:
    with Child(double, setup=SETUP + PINNED) as child:
        child.run(
            "call('cuMemHostUnregister', host.ctypes.data)\n"
            "call('cuMemHostRegister', host.ctypes.data, host.size, 3)\n"
            "q = call('cuMemHostGetDevicePointer', host.ctypes.data, 0)\n"
            "call('cuStreamWriteValue64', gpu.stream, q, 77, 0)"
        )
        wait_until(lambda: child.run("result = int(host[:8].view(np.uint64)[0])") == 77)
        with pytest.raises(ChildError, match="cuStreamWriteValue64: 1"):
            child.run(
                "other = np.zeros(8, dtype=np.uint64)\n"
                "call('cuStreamWriteValue64', gpu.stream, other.ctypes.data, 1, 0)"
            )


def test_a_device_pointer_of_host_memory_that_is_not_mapped_is_refused_and_noted(
    double: Double,
) -> None:
    with Child(double, setup=SETUP + PINNED) as child:
        with pytest.raises(ChildError, match="cuMemHostGetDevicePointer: 1"):
            child.run("call('cuMemHostGetDevicePointer', host.ctypes.data, 0)")
        assert b"DEVICEMAP" in _broken(double, child.pid)


@pytest.mark.parametrize("portable", [True, False])
def test_host_memory_is_of_one_device_unless_it_is_portable(double: Double, portable: bool) -> None:
    double.page.num_devices = 2
    copy = (
        "call('cuMemHostUnregister', host.ctypes.data)\n"
        "call('cuMemHostRegister', host.ctypes.data, host.size, int(portable))\n"
        "call('cuCtxSetCurrent', call('cuDevicePrimaryCtxRetain', 1))\n"
        "p, stream = gpu.allocate(1 << 16), call('cuStreamCreate', 1)\n"
        "call('cuMemcpyHtoDAsync', p, host.ctypes.data, 4, stream)"
    )
    with Child(double, setup=SETUP + PINNED) as child:
        if portable:
            child.run(copy, portable=portable)
            return
        with pytest.raises(ChildError, match="cuMemcpyHtoDAsync: 1"):
            child.run(copy, portable=portable)
        assert b"PORTABLE" in _broken(double, child.pid)


def test_vmm_memory_is_exported_as_a_descriptor_only_where_it_was_asked_for(
    double: Double,
) -> None:
    with Child(double, setup=SETUP) as child:
        child.run(
            "p = gpu.allocate_vmm(1 << 17)\n"
            "h = call('cuMemRetainAllocationHandle', p)\n"
            "fd = call('cuMemExportToShareableHandle', h,"
            " driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)\n"
        )
        with pytest.raises(ChildError, match="cuIpcGetMemHandle: 1"):
            child.run("call('cuIpcGetMemHandle', p)")
        with pytest.raises(ChildError, match="cuMemExportToShareableHandle: 1"):
            child.run(
                "h = call('cuMemRetainAllocationHandle',"
                " gpu.allocate_vmm(1 << 17, exportable=False))\n"
                "call('cuMemExportToShareableHandle', h,"
                " driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)\n"
            )


def test_errors_come_where_they_were_asked_for_and_devices_have_identities(
    double: Double,
) -> None:
    double.page.num_devices = 2
    with Child(double, setup=SETUP, first_device=1) as child:
        uuid = child.run("result = bytes(call('cuDeviceGetUuid', 0).bytes)")
        assert uuid == uuid_of(1)
        double.fail("cuMemAlloc", 2, skip=1)
        child.run("gpu.allocate(4096)")
        with pytest.raises(ChildError, match="cuMemAlloc: 2"):
            child.run("gpu.allocate(4096)")
        child.run("gpu.allocate(4096)")
        assert double.process(child.pid).left["allocation"] == 2


def test_a_page_of_another_shape_is_refused(library: Path, tmp_path: Path) -> None:
    double = Double(library, tmp_path / "control")
    double.page.size += 8
    with pytest.raises(ChildError, match="ended with -6"):
        Child(double, setup=SETUP)
