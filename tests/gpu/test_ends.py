"""GPUs that are lost or refused, and engines that leave them, on the double.

What the sidecar keeps of them, and when the memory may be freed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.child import Child
from tests.gpu.double.control import Double, uuid_of, wait_until
from tests.gpu.layouts import layout_in
from tests.gpu.sidecars import SidecarProcess
from tests.gpu.test_device import OWNER, READER
from tests.gpu.test_sidecar import rank_of

pytest.importorskip("cuda.bindings.driver")

FAILING = """
import traceback
from tiers.cuda.errors import DeviceLost
def copy_in_vain():
    for copy in (memory.gather, memory.scatter):
        try:
            copy(np.arange(3), pool[: 3 * 6144]).finish(see)
        except DeviceLost:
            continue
        raise AssertionError("the device is not lost")
def frames():
    return len(traceback.extract_tb(device.lost.__traceback__))
"""

REFUSING = """
import asyncio, gc, mmap, os, time, numpy as np
from sidecar.config.sections import GpuSettings
from sidecar.errors import AttachRefused
from sidecar.protocol import KIND_CUDA_IPC, Memory
from sidecar.sessions.gpus import Gpus
from tests import places
from tiers.cuda.errors import CudaFailed
gpus = Gpus(np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8), GpuSettings())
def refused(uuid):
    try:
        asyncio.run(gpus.prepare(Memory(KIND_CUDA_IPC, 4096, uuid, bytes(64))))
    except AttachRefused as error:
        return str(error)
    raise AssertionError("it is not refused")
def held():
    deadline = time.monotonic() + 30
    errors = 1
    while errors and time.monotonic() < deadline: # threads that end still have theirs
        gc.collect()
        errors = sum(isinstance(one, CudaFailed) for one in gc.get_objects())
    return sum(len(one) for one in vars(gpus).values() if isinstance(one, dict)), errors
"""


def test_the_error_of_a_lost_device_keeps_no_frames_of_copies(double: Double) -> None:
    """Each raise of a kept error adds frames, which hold what the copy was for."""
    layout = layout_in("LBHNC")
    with Child(double, setup=OWNER) as owner, Child(double, setup=READER + FAILING) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        reader.run("ready(uuid)", uuid=uuid_of(0))
        reader.run("enter(layout, handle)", layout=layout, handle=handle)
        double.fail("cuEventQuery", 700, times=2)
        assert reader.run("for _ in range(50): copy_in_vain()\nresult = frames()") == 0


def test_refused_devices_are_forgotten_after_their_time_but_not_lost_ones(double: Double) -> None:
    """Anybody who may attach can name another device each time."""
    with Child(double, setup=REFUSING) as child:
        for call in ("cuMemcpyBatchAsync", "cuMemHostUnregister", "cuMemFree"):
            double.fail(call, 719, times=1000)
        lost = child.run("result = refused(uuid)", uuid=uuid_of(0))
        assert "719" in lost
        double.heal()
        child.run("places.replace('FAILED_SECONDS', 0.0)")
        child.run("for _ in range(20): assert 'let the sidecar see' in refused(os.urandom(16))")
        # The lost one and the last; their reasons without the errors, which have frames.
        assert child.run("result = held()") == (2, 0)
        assert child.run("result = refused(uuid)", uuid=uuid_of(0)) == lost


@pytest.mark.parametrize("vmm", [False, True], ids=["ipc", "vmm"])
def test_an_engine_waits_until_memory_of_an_ipc_handle_may_be_freed(
    double: Double, short_directory: Path, vmm: bool
) -> None:
    with (
        SidecarProcess(double, short_directory) as sidecar,
        rank_of(double, sidecar, vmm=vmm) as rank,
    ):
        rank.run("rank.randomize(1); rank.image()")  # It has run before copies are held.
        double.page.hold = 1
        rank.run("rank.begin_store(1, b'k' * 32, [3])")
        wait_until(lambda: double.process(sidecar.pid).inflight_bytes[1] > 0)
        waits = rank.run(
            "import threading\n"
            "closing = threading.Thread(target=rank.role.close)\n"
            "closing.start(); closing.join(seconds); result = closing.is_alive()",
            seconds=60.0 if vmm else 0.5,
        )
        # Memory behind a descriptor stays as long as somebody maps it.
        assert waits is not vmm
        double.page.hold = 0
        rank.run("closing.join(60)")
        assert vmm or "import" not in sidecar.left
        rank.run("rank.close()")
