"""Every call of the driver, failing: a named error, nothing left, and the next try goes well."""

from __future__ import annotations

import re

import pytest

from tests import places
from tests.gpu.child import Child, ChildError
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
    return device.calibration.reasons
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
SELF_TESTED = {
    "cuEventCreate", "cuEventDestroy", "cuEventElapsedTime", "cuMemcpy2DAsync", "cuMemcpyAsync",
    "cuMemcpyBatchAsync",
}  # fmt: skip
"""The first of these is made by the self-test, which gives up a way to copy and says why."""
NOT_MADE = {"cuDeviceGetName", "cuDriverGetVersion", "cuGetProcAddress"}
"""By a doctor, and by a process that looks its functions up."""
SURVIVED = {("cuIpcGetMemHandle", 1), ("cuMemHostUnregister", 0), ("cuMemHostUnregister", 1)}
"""By memory that is shared as a descriptor, and by a page that stays."""
COPIES = {
    "cuMemcpyAsync": ("batch", 12040),
    "cuMemcpyBatchAsync": ("batch", 12080),
    "cuMemcpy2DAsync": ("2d", 12080),
}
"""The way to copy, and the driver, with which a KV cache is copied by this call."""


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
        made: set[str] = set()
        for call in calls:
            for handle in handles:
                before = dict(double.process(reader.pid).left) if call != calls[0] else {}
                double.fail(call.replace("WithPriority", ""), 2)
                told = reader.run("result = tried(handle)", handle=handle)
                double.heal()
                if not double.page.faults[0].hit:
                    assert told == [], (call, told)
                    continue
                made.add(call)
                if call in SELF_TESTED:
                    assert len(told) == 1, (call, told)
                    assert f"({call} failed with " in told[0], (call, told)
                else:
                    assert told[1:] == (call, 2), (call, told)
                    assert told[0] != "CudaFailed", (call, told)
                if call not in GIVES_BACK and told[0] != "DeviceLost":
                    assert double.process(reader.pid).left == before, (call, told)
        assert made == set(calls) - NOT_MADE
        assert reader.run("cycle(handle); result = device.calibration.reasons") == []


@pytest.mark.parametrize("direction", ["gather", "scatter"])
@pytest.mark.parametrize("call", COPIES)
def test_a_copy_that_the_driver_refuses_leaves_none_behind_and_the_next_one_runs(
    double: Double, call: str, direction: str
) -> None:
    strided, double.page.driver_version = COPIES[call]
    layout = layout_in("LBHNC", layers=9, blocks=64)
    with Child(double, setup=OWNER) as owner, Child(double, setup=READER) as reader:
        reader.run(
            "ready(uuid, inflight=1 << 14, chunk_bytes=1 << 20, strided=strided)\n"
            "enter(layout, handle)\n"
            "ids = np.arange(0, 64, 2); payload = pool[: 32 * layout.chunk(1).block_payload_bytes]",
            uuid=uuid_of(0),
            strided=strided,
            layout=layout,
            handle=owner.run("result = own(layout, 7, False)", layout=layout),
        )
        double.page.delay_us_max = 2000
        # In the middle of a copy of several batches.
        double.fail(call, 2, skip=2)
        copied = f"payload[:] = 1; memory.{direction}(ids, payload).finish(see)"
        with pytest.raises(ChildError, match=f"DeviceMemoryFull: {call}"):
            reader.run(copied)
        assert list(double.process(reader.pid).inflight_bytes) == [0, 0]
        reader.run(copied)
        found = reader.run("result = bytes(payload)")
        assert (set(found) == {1}) == (direction == "scatter")
        assert found == owner.run(
            "from tiers.kv.copy import CopyPlan\n"
            "now = np.frombuffer(gpu.read(base, len(raw)), dtype=np.uint8)\n"
            "found = np.empty(32 * layout.chunk(1).block_payload_bytes, dtype=np.uint8)\n"
            "CopyPlan(layout).gather(now, np.arange(0, 64, 2), found); result = bytes(found)"
        )
        reader.run("leave()")
        assert double.process(reader.pid).left == {}


def test_a_worker_names_the_failure_of_every_call_that_it_makes(double: Double) -> None:
    layout = layout_in("BLHNC")
    with Child(double, setup=SETUP + WORKER) as worker:
        worker.run(
            "bases = [gpu.allocate(layout.size_bytes), gpu.allocate_vmm(layout.size_bytes)]",
            layout=layout,
        )
        calls, made = _calls("share", "StreamFence"), set[str]()
        for call in calls:
            for number in (0, 1):
                left = double.process(worker.pid).left
                double.fail(call, 2)
                told = worker.run("result = tried(bases[number])", number=number)
                double.heal()
                if not double.page.faults[0].hit:
                    assert told is None, (call, told)
                    continue
                made.add(call)
                if (call, number) in SURVIVED:
                    assert told is None, (call, told)
                else:
                    assert told is not None, call
                    assert told[0] != "CudaFailed", (call, told)
                    assert f"{call} failed with " in told[1], (call, told)
                    assert "(2)" in told[1], (call, told)
                if call not in {*GIVES_BACK, "cuCtxPopCurrent"}:
                    assert double.process(worker.pid).left == left, (call, told)
        assert made == set(calls)
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


EXPORTING = """
gpu = Device()
def try_to_share(layout, **options):
    share(gpu, gpu.allocate_vmm(layout.size_bytes, **options), layout)
"""


def test_what_cannot_be_shared_is_refused_with_the_remedy(double: Double) -> None:
    layout = layout_in("BLHNC", blocks=64)
    with Child(double, setup=SETUP + EXPORTING) as child:
        child.run("try_to_share(layout)", layout=layout)
        for variable, told in (
            ("", r"by no variable\): take expandable_segments out.*--enable-cumem-allocator"),
            ("PYTORCH_CUDA_ALLOC_CONF", r"\(on in PYTORCH_CUDA_ALLOC_CONF\)"),
            ("PYTORCH_ALLOC_CONF", r"\(on in PYTORCH_ALLOC_CONF\)"),
        ):
            with pytest.raises(ChildError, match=rf"ExportRefused: .*{told}"):
                child.run(
                    "import os\n"
                    "os.environ.pop('PYTORCH_CUDA_ALLOC_CONF', 0)\n"
                    "if variable: os.environ[variable] = 'expandable_segments: True'\n"
                    "try_to_share(layout, pieces=layout.size_bytes >> 16)",
                    layout=layout,
                    variable=variable,
                )
        with pytest.raises(ChildError, match=r"ExportRefused: .*cudaMallocAsync"):
            child.run("try_to_share(layout, exportable=False)", layout=layout)
        assert "import" not in double.process(child.pid).left
        double.page.device_names[0].value = b"NVIDIA A100-SXM4-40GB MIG 1g.5gb"
        with pytest.raises(ChildError, match=r"ExportRefused: .*MIG.*a whole GPU"):
            child.run("try_to_share(layout)", layout=layout)
