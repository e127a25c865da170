"""Every call of the driver, failing: a named error, nothing left, and the next try goes well."""

from __future__ import annotations

import re

import pytest

from tests import places
from tests.gpu.child import Child
from tests.gpu.double.control import Double, uuid_of
from tests.gpu.layouts import layout_in
from tests.gpu.test_device import OWNER, READER
from tests.gpu.test_sidecar import SETUP
from tiers.cuda.errors import CudaFailed, DeviceLost, failure

pytest.importorskip("cuda.bindings.driver")

SIDECAR = """
import tiers.cuda.errors as errors
def cycle(handle):
    global device, pins, memory
    ready(uuid, inflight=1 << 25, strided="auto")
    try:
        enter(layout, handle)
        try:
            memory.gather(np.arange(3), pool[: 3 * 6144 * 3]).finish(see)
            memory.scatter(np.arange(3), pool[: 3 * 6144 * 3]).finish(see)
        finally: memory.close()
    finally:
        device.bind(); pins.close(); device.close()
def tried(handle):
    try: cycle(handle)
    except errors.CudaFailed as error: return (type(error).__name__, error.call, error.code)
"""
WORKER = """
from tiers.cuda.errors import CudaFailed
from connector.export import ExportRefused
import tiers.cuda.stream_fence as fencing
gpu = Device()
def cycle(base):
    memory = share(gpu, base, layout)
    try:
        fence = memory.new_fence()
        try:
            fence.signal(1)
            gpu.read(base, 1)
        finally: fence.close()
    finally: memory.close()
def tried(base):
    try: cycle(base)
    except (CudaFailed, ExportRefused) as error: return (type(error).__name__, str(error))
"""
GIVES_BACK = {
    "cuMemFree", "cuMemHostUnregister", "cuStreamDestroy", "cuEventDestroy", "cuMemUnmap",
    "cuMemRelease", "cuMemAddressFree", "cuIpcCloseMemHandle", "cuDevicePrimaryCtxRelease",
}  # fmt: skip
"""What is left when one of these fails is the driver's."""


def _calls(*names: str) -> list[str]:
    """The functions of the driver that the modules of these names of the product name."""
    text = "".join(places.find(name).path.read_text() for name in names)
    return sorted(set(re.findall(r"\"(cu[A-Z][A-Za-z0-9]+)\"", text)) - {"cuInit"})


def test_a_sidecar_names_the_failure_of_every_call_that_it_makes(double: Double) -> None:
    layout = layout_in("LBHNC", layers=9)
    calls = _calls("DeviceMemory", "Driver", "CopyStream", "PinnedMemory.close", "Calibration")
    calls = [call for call in calls if call != "cuStreamWriteValue64"]
    assert len(calls) > 25
    with Child(double, setup=OWNER) as owner, Child(double, setup=READER + SIDECAR) as reader:
        handles = [
            owner.run("result = own(layout, 1, vmm)", layout=layout, vmm=vmm)
            for vmm in (False, True)
        ]
        reader.run("", uuid=uuid_of(0), layout=layout)
        for call in calls:
            for handle in handles:
                before = dict(double.process(reader.pid).left) if call != calls[0] else {}
                double.fail(call.replace("WithPriority", ""), 2)
                told = reader.run("result = tried(handle)", handle=handle)
                double.heal()
                assert told is None or told[1:] in ((call, 2), (call, 1), (call, 600)), call
                assert told is None or told[0] != "CudaFailed", (call, told)
                if call not in GIVES_BACK and told is not None and told[0] != "DeviceLost":
                    assert double.process(reader.pid).left == before, (call, told)
        reader.run("cycle(handle)", handle=handles[0])


def test_a_worker_names_the_failure_of_every_call_that_it_makes(double: Double) -> None:
    layout = layout_in("BLHNC")
    with Child(double, setup=SETUP + WORKER) as worker:
        worker.run(
            "bases = [gpu.allocate(layout.size_bytes), gpu.allocate_vmm(layout.size_bytes)]",
            layout=layout,
        )
        for call in _calls("share", "StreamFence"):
            for number in (0, 1):
                left = double.process(worker.pid).left
                double.fail(call, 2)
                told = worker.run("result = tried(bases[number])", number=number)
                double.heal()
                assert told is None or told[0] != "CudaFailed", (call, told)
                assert told is None or "(2)" in told[1], (call, told)
                if call not in {*GIVES_BACK, "cuCtxPopCurrent"}:
                    assert double.process(worker.pid).left == left, (call, told)
        worker.run("[cycle(base) for base in bases]")


def test_every_code_of_the_driver_is_an_error_that_says_call_code_and_remedy() -> None:
    from cuda.bindings import driver

    for code in driver.CUresult:
        if int(code) in (0, 600):
            continue
        error = failure("cuMemMap", int(code), code.name)
        assert isinstance(error, CudaFailed)
        assert "cuMemMap" in str(error)
        assert f"({int(code)})" in str(error)
        assert error.remedy in str(error)


def test_every_code_after_which_a_process_must_be_relaunched_is_a_lost_device() -> None:
    from cuda.bindings import driver

    final = [code for code in driver.CUresult if "relaunched" in (code.__doc__ or "")]
    assert len(final) > 10
    for code in final:
        assert isinstance(failure("cuEventQuery", int(code), code.name), DeviceLost), code
