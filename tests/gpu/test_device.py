"""`tiers/cuda` on the double: what is mapped, copied, paced, refused, and left at the end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.gpu.child import Child, ChildError
from tests.gpu.double.control import Double, uuid_of, wait_until
from tests.gpu.layouts import ORDERS, layout_in
from tiers.cuda.errors import CudaFailed, failure
from tiers.kv.layout import KVLayout

pytest.importorskip("cuda.bindings.driver")

OWNER = """
import ctypes, os, numpy as np
from tests.gpu.device import Device, call, driver
gpu = Device()
def own(layout, seed, vmm):
    global base, raw
    raw = np.random.default_rng(seed).integers(0, 256, layout.size_bytes, dtype=np.uint8)
    base = gpu.allocate_vmm(layout.size_bytes) if vmm else gpu.allocate(layout.size_bytes)
    gpu.write(base, raw.tobytes()); gpu.read(base, 1)
    if not vmm:
        return ctypes.string_at(call("cuIpcGetMemHandle", base).getPtr(), 64)
    h = call("cuMemRetainAllocationHandle", base)
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fd = int(call("cuMemExportToShareableHandle", h, kind, 0)); call("cuMemRelease", h)
    return (os.getpid(), fd)
"""

READER = """
import mmap, os, numpy as np
from tiers.kv.copy import CopyPlan
from tiers.cuda.device import Device, PinnedMemory
from tiers.cuda.driver import driver
pool = np.frombuffer(mmap.mmap(-1, 1 << 20), dtype=np.uint8)
def ready(uuid, inflight=1 << 20, chunk_bytes=1 << 16, strided="batch"):
    global device, pins
    device = Device(driver(), uuid, to_device_bytes_max=inflight, to_host_bytes_max=inflight,
        strided=strided)
    device.bind()
    pins = PinnedMemory(device.driver, pool, chunk_bytes=chunk_bytes)
def enter(layout, handle):
    global memory
    if isinstance(handle, bytes):
        memory = device.import_ipc(handle, layout, pins)
    else: # as SCM_RIGHTS would
        fd = os.open(f"/proc/{handle[0]}/fd/{handle[1]}", os.O_RDWR)
        memory = device.import_vmm(fd, layout, pins); os.close(fd)
def leave():
    memory.close(); device.bind(); pins.close(); device.close()
seen = []
def see(piece): seen.append(bytes(piece))
"""


def _reader(double: Double, **options: Any) -> Child:
    child = Child(double, setup=READER)
    child.run("ready(uuid, **options)", uuid=uuid_of(0), options=options)
    return child


@pytest.mark.parametrize("vmm", [False, True], ids=["ipc", "vmm"])
@pytest.mark.parametrize("order", ORDERS)
def test_blocks_come_and_go_bit_for_bit(double: Double, order: str, vmm: bool) -> None:
    double.page.delay_us_max, double.page.piece_bytes = 300, 512
    layout = layout_in(order)
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, vmm)", layout=layout, vmm=vmm)
        reader.run(
            "enter(layout, handle)\n"
            "ids = np.array([5, 6, 7, 2, 23, 0], dtype=np.int64)\n"
            # Across a border of the pins' grid on purpose.
            "payload = pool[65536 - 3000 :][: len(ids) * layout.chunk(1).block_payload_bytes]\n"
            "flight = memory.gather(ids, payload); flight.finish(see)\n"
            "wanted = np.empty_like(payload); CopyPlan(layout).gather(raw, ids, wanted)\n"
            "assert np.array_equal(wanted, payload) and b''.join(seen) == payload.tobytes()\n"
            "targets = np.array([20, 21, 9, 8, 1, 3], dtype=np.int64)\n"
            "memory.scatter(targets, payload).finish(see)\n"
            "CopyPlan(layout).scatter(raw, targets, payload)",
            layout=layout,
            handle=handle,
            raw=owner.run("result = raw"),
        )
        assert owner.run("result = gpu.read(base, len(raw))") == reader.run(
            "result = raw.tobytes()"
        )
        process = double.process(reader.pid)
        assert (process.waits, process.pageable_copies) == (0, 0)
        assert process.batches
        assert process.priority_lowest_streams == 2
        reader.run("leave()")
        assert process.left == {}


def _round_trip(owner: Child, reader: Child, layout: KVLayout) -> None:
    """Blocks come and go bit for bit, some of them across a border of the pins' grid."""
    handle = owner.run("result = own(layout, 7, False)", layout=layout)
    reader.run(
        "enter(layout, handle)\n"
        "ids = np.array([5, 6, 7, 2, 23, 0], dtype=np.int64)\n"
        "size = layout.chunk(1).block_payload_bytes\n"
        "payload = pool[262144 - 3 * size - 1000 :][: len(ids) * size]\n"
        "memory.gather(ids, payload).finish(see)\n"
        "wanted = np.empty_like(payload); CopyPlan(layout).gather(raw, ids, wanted)\n"
        "assert np.array_equal(wanted, payload)\n"
        "targets = np.array([20, 21, 9, 8, 1, 3], dtype=np.int64)\n"
        "memory.scatter(targets, payload).finish(see)\n"
        "CopyPlan(layout).scatter(raw, targets, payload)",
        layout=layout,
        handle=handle,
        raw=owner.run("result = raw"),
    )
    assert owner.run("result = gpu.read(base, len(raw))") == reader.run("result = raw.tobytes()")


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC"])
def test_runs_at_a_constant_distance_are_copied_as_planes(double: Double, order: str) -> None:
    double.page.delay_us_max = 100
    layout = layout_in(order, layers=9, tokens=8, content_bytes=48)
    with (
        Child(double, setup=OWNER) as owner,
        _reader(double, strided="2d", chunk_bytes=1 << 20) as reader,
    ):
        process = double.process(reader.pid)
        planes = process.plane_copies
        _round_trip(owner, reader, layout)
        assert process.plane_copies > planes
        assert (process.waits, process.pageable_copies) == (0, 0)
        reader.run("leave()")
        assert process.left == {}


def test_planes_are_paced(double: Double) -> None:
    layout = layout_in("LBHNC", layers=16, blocks=24)
    with (
        Child(double, setup=OWNER) as owner,
        _reader(double, inflight=1 << 14, strided="2d", chunk_bytes=1 << 20) as reader,
    ):
        _round_trip(owner, reader, layout)
        assert 1 << 13 <= max(double.process(reader.pid).inflight_bytes_max) <= 1 << 14


def test_which_way_is_faster_is_measured_before_the_first_copy(double: Double) -> None:
    layout = layout_in("LBHNC", layers=9)
    with (
        Child(double, setup=OWNER) as owner,
        _reader(double, inflight=1 << 25, strided="auto") as reader,
    ):
        rates = reader.run("result = device.calibration.rates")
        assert rates.keys() == {"to_device", "to_host"}
        for one in rates.values():
            assert list(one) == [8 << 10, 32 << 10, 128 << 10]
            assert all(rate > 0 for pair in one.values() for rate in pair)
        reader.run("device.calibration.rates['to_host'] = {8192: (1.0, 2.0), 32768: (2.0, 1.0)}")
        assert reader.run(
            "pays = device.calibration.pays\n"
            "result = [pays('to_host', size) for size in (4096, 8192, 16384, 32768, 1 << 20)]"
        ) == [True, True, True, False, False]
        _round_trip(owner, reader, layout)
        reader.run("leave()")
        assert double.process(reader.pid).left == {}


@pytest.mark.parametrize("why", ["wrong", "refused"])
def test_planes_that_cannot_be_trusted_are_not_used(double: Double, why: str) -> None:
    double.page.break_planes = why == "wrong"
    if why == "refused":
        double.fail("cuMemcpy2DAsync", 801)
    layout = layout_in("LBHNC", layers=9)
    with Child(double, setup=OWNER) as owner, _reader(double, strided="2d") as reader:
        assert reader.run("result = device.calibration.planes") is False
        (reason,) = reader.run("result = device.calibration.reasons")
        assert "2D copies failed their test" in reason
        planes = double.process(reader.pid).plane_copies
        _round_trip(owner, reader, layout)
        assert double.process(reader.pid).plane_copies == planes
        reader.run("leave()")
        assert double.process(reader.pid).left == {}


@pytest.mark.parametrize("call", ["cuEventQuery", "cuMemcpyBatchAsync", "cuEventRecord"])
def test_a_device_that_is_lost_in_its_self_test_is_named(double: Double, call: str) -> None:
    # As the real one: after the first, every call says so.
    double.fail(call, 719, times=1000)
    for later in ("cuMemHostUnregister", "cuMemFree", "cuStreamDestroy"):
        double.fail(later, 719, times=1000)
    with Child(double, setup=READER) as reader:
        with pytest.raises(ChildError, match=f"DeviceLost: {call} failed .*719.*Xid"):
            reader.run("ready(uuid, strided='auto')", uuid=uuid_of(0))
        double.heal()
        reader.run("ready(uuid, strided='auto'); pins.close(); device.close()")


def test_a_device_that_hangs_in_its_self_test_is_given_up(double: Double) -> None:
    with Child(double, setup=READER) as reader:
        double.page.hold = 1
        with pytest.raises(ChildError, match=r"DeviceLost: cuEventQuery failed .*600"):
            reader.run(
                "from tests import places; places.replace('SECONDS_MAX', 0.2); ready(uuid)",
                uuid=uuid_of(0),
            )
        double.page.hold = 0


def test_one_thread_polls_for_all_that_wait(double: Double) -> None:
    """Each poll needs the GIL, which threads that hash and the event loop need, too."""
    layout = layout_in("BLHNC")
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        double.page.hold = 1
        reader.run(
            "import threading, time\n"
            "enter(layout, handle)\n"
            "size = layout.chunk(1).block_payload_bytes\n"
            "flights = [memory.gather(np.array([n]), pool[n * size :][:size]) for n in range(8)]\n"
            "polls, query = [], device.to_host._query\n"
            "def counted(event): polls.append(threading.get_ident()); return query(event)\n"
            "device.to_host._query = counted\n"
            "waiting = [threading.Thread(target=one.finish, args=[see]) for one in flights]\n"
            "for one in waiting: one.start()\n"
            # Each polls once before it sleeps.
            "while len(set(polls)) < len(waiting): time.sleep(0.001)\n"
            "before = len(polls)\n"
            "while len(polls) < before + 50: time.sleep(0.001)",
            layout=layout,
            handle=handle,
        )
        assert reader.run("result = len(set(polls[before + 10 :]))") == 1
        double.page.hold = 0
        reader.run(
            "for one in waiting: one.join(60)\n"
            "wanted = np.empty_like(pool[: 8 * size])\n"
            "CopyPlan(layout).gather(raw, np.arange(8), wanted)\n"
            "assert np.array_equal(wanted, pool[: 8 * size]) and len(seen) == 8\n"
            "leave()",
            raw=owner.run("result = raw"),
        )


def test_another_group_in_the_same_memory(double: Double) -> None:
    """Layers of another KV cache group lie over those of the first, and are copied as their own."""
    layout = layout_in("BLHNC")
    last = layout.segment.num_layers - 1
    group = msgspec.structs.replace(
        layout,
        segment=msgspec.structs.replace(layout.segment, num_layers=1),
        layer_offsets_bytes=layout.layer_offsets_bytes[last:],
    )
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        reader.run(
            "enter(layout, handle); other = memory.part(group)\n"
            "ids = np.array([5, 2, 23], dtype=np.int64)\n"
            "payload = pool[: len(ids) * group.chunk(1).block_payload_bytes]\n"
            "other.gather(ids, payload).finish(see)\n"
            "wanted = np.empty_like(payload); CopyPlan(group).gather(raw, ids, wanted)\n"
            "assert np.array_equal(wanted, payload)\n"
            "other.scatter(np.array([1, 8, 20], dtype=np.int64), payload).finish(see)\n"
            "CopyPlan(group).scatter(raw, np.array([1, 8, 20], dtype=np.int64), payload)\n"
            "other.close()",
            layout=layout,
            group=group,
            handle=handle,
            raw=owner.run("result = raw"),
        )
        assert owner.run("result = gpu.read(base, len(raw))") == reader.run(
            "result = raw.tobytes()"
        )
        reader.run("leave()")
        assert double.process(reader.pid).left == {}


def test_runs_are_joined_before_they_are_copied(double: Double) -> None:
    layout = layout_in("BLHNC")
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        reader.run(
            "enter(layout, handle)",
            layout=layout,
            handle=owner.run("result = own(layout, 7, False)", layout=layout),
        )
        process = double.process(reader.pid)
        batches, plain = process.batches, process.plain_copies
        reader.run(
            "ids = np.arange(3, 11); payload = pool[: 8 * layout.chunk(1).block_payload_bytes]\n"
            "memory.gather(ids, payload).finish(see)"
        )
        assert (process.batches - batches, process.plain_copies - plain) == (0, 1)


def test_no_more_than_the_limit_is_ever_in_flight(double: Double) -> None:
    layout = layout_in("LBNHC", blocks=64)
    with Child(double, setup=OWNER) as owner, _reader(double, inflight=1 << 15) as reader:
        reader.run(
            "enter(layout, handle); import threading\n"
            "num = 64 * layout.chunk(1).block_payload_bytes\n"
            "def many():\n"
            "    for _ in range(5): memory.gather(np.arange(64)[::-1].copy(), pool[:num])"
            ".finish(see)\n"
            "threads = [threading.Thread(target=many) for _ in range(3)]\n"
            "[one.start() for one in threads]; [one.join() for one in threads]",
            layout=layout,
            handle=owner.run("result = own(layout, 7, False)", layout=layout),
        )
        process = double.process(reader.pid)
        assert 1 << 14 <= process.inflight_bytes_max[1] <= 1 << 15
        assert process.descriptors_max <= 1024


@pytest.mark.parametrize("why", ["old", "wrong", "refused"])
def test_without_batches_that_can_be_trusted_copies_go_one_by_one(double: Double, why: str) -> None:
    layout = layout_in("LBHNC")
    double.page.driver_version = 12040 if why == "old" else 12080
    double.page.break_batches = why == "wrong"
    if why == "refused":
        double.fail("cuMemcpyBatchAsync", 801)
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        assert reader.run("result = device.calibration.batches") is False
        reader.run(
            "enter(layout, handle)\n"
            "ids = np.array([5, 2, 23]); wanted = np.empty(3 * 6144, dtype=np.uint8)\n"
            "memory.gather(ids, pool[: 3 * 6144]).finish(see)\n"
            "CopyPlan(layout).gather(raw, ids, wanted)\n"
            "assert np.array_equal(wanted, pool[:18432])",
            layout=layout,
            handle=owner.run("result = own(layout, 7, False)", layout=layout),
            raw=owner.run("result = raw"),
        )
        assert double.process(reader.pid).plain_copies >= 9


@pytest.mark.parametrize(
    ("call", "code", "error"),
    [
        ("cuDeviceGetUuid", 101, "DeviceMissing"),
        ("cuDevicePrimaryCtxRetain", 2, "DeviceMemoryFull"),
        ("cuStreamCreate", 2, "DeviceMemoryFull"),
        ("cuMemAlloc", 2, "DeviceMemoryFull"),
        ("cuMemHostRegister", 800, "NotPermitted"),
        ("cuEventCreate", 2, ""),
        ("cuMemcpyAsync", 2, ""),
        ("cuInit", 803, "DriverMissing"),
    ],
)
def test_every_failure_of_getting_ready_has_a_name_and_leaves_nothing(
    double: Double, call: str, code: int, error: str
) -> None:
    double.fail(call, code)
    with Child(double, setup=READER) as reader:
        if error:
            with pytest.raises(ChildError, match=f"tiers.cuda.errors.{error}: .*{code}"):
                reader.run("ready(uuid)", uuid=uuid_of(0))
        else:
            reasons = reader.run(
                "ready(uuid); result = device.calibration.reasons", uuid=uuid_of(0)
            )
            assert [f"({call} failed with " in reason for reason in reasons] == [True]
            reader.run("pins.close(); device.close()")
        left = double.process(reader.pid).left
        assert left == {}


@pytest.mark.parametrize(
    ("call", "code", "error", "vmm"),
    [
        ("cuIpcOpenMemHandle", 400, "HandleInvalid", False),
        ("cuIpcOpenMemHandle", 801, "NotSupportedHere", False),
        ("cuMemGetAddressRange", 1, "CudaMisused", False),
        ("cuMemImportFromShareableHandle", 304, "NotPermitted", True),
        ("cuMemAddressReserve", 2, "DeviceMemoryFull", True),
        ("cuMemMap", 1, "CudaMisused", True),
        ("cuMemSetAccess", 801, "NotSupportedHere", True),
    ],
)
def test_every_failure_of_mapping_has_a_name_and_leaves_nothing(
    double: Double, call: str, code: int, error: str, vmm: bool
) -> None:
    layout = layout_in("BLHNC")
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, vmm)", layout=layout, vmm=vmm)
        double.fail(call, code)
        with pytest.raises(ChildError, match=f"tiers.cuda.errors.{error}: {call}"):
            reader.run("enter(layout, handle)", layout=layout, handle=handle)
        left = double.process(reader.pid).left
        assert not {"import", "handle", "reservation", "mapping"} & set(left)
        reader.run("enter(layout, handle); leave()")
        assert double.process(reader.pid).left == {}


def test_more_than_was_exported_is_not_mapped(double: Double) -> None:
    layout = layout_in("BLHNC")
    larger = layout_in("BLHNC", blocks=layout.num_blocks + 64)
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        for vmm, error in ((False, "NotSupportedHere"), (True, "CudaMisused")):
            handle = owner.run("result = own(layout, 7, vmm)", layout=layout, vmm=vmm)
            with pytest.raises(ChildError, match=error):
                reader.run("enter(layout, handle)", layout=larger, handle=handle)


def test_a_lost_device_ends_every_copy_by_name(double: Double) -> None:
    layout = layout_in("LBHNC")
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        reader.run("enter(layout, handle)", layout=layout, handle=handle)
        double.fail("cuEventQuery", 700)
        for _ in range(2):
            with pytest.raises(ChildError, match="DeviceLost: cuEventQuery"):
                reader.run("memory.gather(np.arange(3), pool[: 3 * 6144]).finish(see)")
        assert reader.run("result = str(device.lost)").endswith("Xid in dmesg)")


def test_a_device_is_found_by_its_identity_and_not_by_its_number(double: Double) -> None:
    double.page.num_devices = 3
    layout = layout_in("BLHNC")
    with Child(double, setup=OWNER, first_device=2) as owner, Child(double, setup=READER) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        reader.run(
            "ready(uuid); enter(layout, handle)", uuid=uuid_of(2), layout=layout, handle=handle
        )
        assert reader.run("result = device.ordinal") == 2
        with pytest.raises(ChildError, match=r"DeviceMissing: .*GPU-f{8}-f{4}-f{4}-f{4}-f{12} "):
            reader.run("ready(b'\\xff' * 16)")


def test_one_thread_copies_on_several_devices_in_turn(double: Double) -> None:
    double.page.num_devices, layout = 2, layout_in("LBHNC")
    with Child(double, setup=OWNER) as one, Child(double, setup=OWNER, first_device=1) as two:
        handles = [owner.run("result = own(lay, 7, False)", lay=layout) for owner in (one, two)]
        raw = one.run("result = raw")
        two.run("gpu.write(base, raw[::-1].tobytes()); gpu.read(base, 1)")
        with _reader(double) as reader:
            reader.run(
                "most = {'to_device_bytes_max': 1 << 20, 'to_host_bytes_max': 1 << 20}\n"
                "both = [device, Device(driver(), uuid, **most)]; ids = np.array([5, 2, 23])\n"
                "memory, other = (d.import_ipc(h, lay, pins) for d, h in zip(both, handles))\n"
                "three = [one.gather(ids, pool[n * 18432 :][:18432])"
                " for n, one in enumerate((memory, other, memory))]\n"
                "for flight in three: flight.finish(see)\n"
                "wanted = np.empty((2, 18432), dtype=np.uint8)\n"
                "for n, own in enumerate((raw, raw[::-1].copy())):"
                " CopyPlan(lay).gather(own, ids, wanted[n])\n"
                "assert seen == [wanted[n].tobytes() for n in (0, 1, 0)]\n"
                "other.close(); both[1].close(); leave()",
                uuid=uuid_of(1),
                lay=layout,
                handles=handles,
                raw=raw,
            )
            assert double.process(reader.pid).left == {}


def test_a_gone_exporter_is_named(double: Double) -> None:
    layout = layout_in("BLHNC")
    with _reader(double) as reader:
        with Child(double, setup=OWNER) as owner:
            handle = owner.run("result = own(layout, 7, False)", layout=layout)
        with pytest.raises(ChildError, match=r"HandleInvalid: .*hostIPC"):
            reader.run("enter(layout, handle)", layout=layout, handle=handle)


def test_memory_is_kept_by_a_mapping_until_that_is_closed(double: Double) -> None:
    layout = layout_in("BLHNC")
    with Child(double, setup=OWNER) as owner, _reader(double) as reader:
        handle = owner.run("result = own(layout, 7, False)", layout=layout)
        reader.run("enter(layout, handle)", layout=layout, handle=handle)
        owner.kill()
        reader.run("memory.gather(np.arange(3), pool[: 3 * 6144]).finish(see); leave()")
        wait_until(lambda: double.process(reader.pid).left == {})


def test_without_a_driver_the_message_says_what_to_install(double: Double) -> None:
    double.page.num_devices = 0
    with (
        Child(double, setup=READER) as reader,
        pytest.raises(ChildError, match=r"DriverMissing: .*\.\[cuda\]"),
    ):
        reader.run("ready(uuid)", uuid=uuid_of(0))


def test_an_unknown_code_is_reported_by_number() -> None:
    assert type(failure("cuX", 12345)) is CudaFailed
    assert "cuX failed with CUDA error (12345)" in str(failure("cuX", 12345))
