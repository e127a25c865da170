"""Engines on a GPU and the sidecar, in processes of their own, on the double.

What is real: the connector's export, worker role and fence, the sidecar, `tiers/cuda`, cuda-python,
the processes and their deaths. What is not: the device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sidecar.protocol import Role
from tests.gpu.child import Child
from tests.gpu.double.control import Double, wait_until
from tests.gpu.layouts import ORDERS, layout_in
from tests.gpu.sidecars import SidecarProcess
from tests.sidecar.client import Client, RefusedError, Worker, attach_message, key_of
from tests.sidecar.test_readiness import readyz
from tiers.kv.fence import WorkerFence

pytest.importorskip("cuda.bindings.driver")

SETUP = """
from tests.gpu.worker import Rank, share, trials, Device, offset_of
"""
CONTROL_ROUNDS_MAX = 50_000
"""The first round that is torn is the last."""
TORN_ROUNDS = pytest.mark.parametrize(
    "rounds", [400, pytest.param(1500, marks=pytest.mark.nightly)]
)
CONTROL_DELAY_US_MAX = 5_000
"""Queued work takes so long that a copy which does not wait meets it, though copies may be slow."""


@pytest.fixture
def sidecar(double: Double, short_directory: Path) -> Iterator[SidecarProcess]:
    with SidecarProcess(double, short_directory) as running:
        yield running


def rank_of(double: Double, sidecar: SidecarProcess, order: str = "BLHNC", **options: Any) -> Child:
    """A rank in a process of its own, attached."""
    changes = options.pop("layout", {})
    child = Child(double, setup=SETUP, first_device=options.pop("first_device", 0))
    try:
        child.run(
            "rank = Rank(socket, layout, **options); rank.attached()",
            socket=str(sidecar.socket),
            layout=layout_in(order, **changes),
            options=options,
        )
    except BaseException:
        child.close()
        raise
    return child


def test_what_was_stored_is_loaded_bit_for_bit_in_every_layout(
    double: Double, sidecar: SidecarProcess
) -> None:
    double.page.delay_us_max, double.page.piece_bytes = 200, 1024
    cases = [*((order, False) for order in ORDERS), ("BLHNC", True), ("LBHNC", True)]
    with Child(double, setup=SETUP) as child:
        for number, (order, vmm) in enumerate(cases):
            stored, loaded = child.run(
                "rank = Rank(socket, layout, vmm=vmm, engine_id=f'engine-{number}')\n"
                "rank.attached(); rank.randomize(number)\n"
                "assert rank.kind == ('cuda_vmm' if vmm else 'cuda_ipc')\n"
                "assert rank.store(1, keys[0], [3, 4, 5, 9]) and rank.store(2, keys[1], [20, 1])\n"
                "before = rank.image(); rank.randomize(100)\n"
                "assert rank.load(3, keys[0], [12, 0, 13, 14])\n"
                "assert rank.load(4, keys[0], [7], 2) and rank.load(5, keys[1], [22, 21])\n"
                "assert not rank.load(6, b'never stored'.ljust(32), [2])\n"
                "after = rank.image()\n"
                "pairs = [(3, 12), (4, 0), (5, 13), (9, 14), (5, 7), (20, 22), (1, 21)]\n"
                "result = ([rank.block(a, before) for a, _ in pairs],"
                " [rank.block(b, after) for _, b in pairs])\n"
                "rank.close()",
                socket=str(sidecar.socket),
                layout=layout_in(order),
                vmm=vmm,
                number=number,
                keys=[key_of(order, vmm, 1), key_of(order, vmm, 2)],
            )
            assert stored == loaded, (order, vmm)
        assert "registration" not in double.process(child.pid).left
        wait_until(lambda: "import" not in sidecar.left and "mapping" not in sidecar.left)
    sidecar.stop()
    assert sidecar.left == {}
    process = double.process(sidecar.pid)
    assert (process.waits, process.pageable_copies) == (0, 0)


@pytest.mark.slow
def test_four_ranks_on_four_devices_store_and_load_their_heads_in_every_layout(
    double: Double, sidecar: SidecarProcess
) -> None:
    double.page.num_devices = 4
    double.page.delay_us_max, double.page.piece_bytes = 200, 1024
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(Child(double, setup=SETUP, first_device=number))
            for number in range(4)
        ]
        for order in ORDERS:
            for number, rank in enumerate(ranks):
                rank.run(
                    "rank = Rank(socket, layout, rank=number, world_size=4, engine_id=order)\n"
                    "rank.attached(); rank.randomize(number)",
                    socket=str(sidecar.socket),
                    layout=layout_in(order, heads=1, first_head=number),
                    number=number,
                    order=order,
                )
            for rank in ranks:
                rank.run("rank.begin_store(1, key, [3, 4, 5, 9])", key=key_of(order))
            for rank in ranks:
                assert rank.run("result = rank.outcome(1)"), order
            for rank in ranks:
                rank.run(
                    "wanted = [rank.block(b) for b in (3, 4, 5, 9)]; rank.randomize(99)\n"
                    "assert rank.load(2, key, [10, 11, 12, 13])\n"
                    "assert wanted == [rank.block(b) for b in (10, 11, 12, 13)]\n"
                    "rank.close()",
                    key=key_of(order),
                )
        assert sidecar.left["context"] == 4
    sidecar.stop()
    assert sidecar.left == {}


def _stored_while_it_was_written(rank: Child, rounds: int, *, gated: bool) -> int:
    """Rounds in which what was stored is not what the stream had been told to write before."""
    return int(
        rank.run(
            "if not gated: rank.no_fence()\n"
            "torn = 0\n"
            "for round in range(1, rounds):\n"
            "    value = round % 250 + 1\n"
            "    key = round.to_bytes(32, 'big')\n"
            "    rank.paint(1, value)\n"
            "    stored = rank.store(2 * round, key, [1])\n"
            "    rank.gpu.read(rank.base, 1)\n"
            "    assert stored and rank.load(2 * round + 1, key, [2])\n"
            "    torn += set(rank.block(2)) != {value}\n"
            "    if torn and not gated: break\n"
            "result = torn",
            rounds=rounds,
            gated=gated,
        )
    )


@pytest.mark.promise("gpu-fence")
@pytest.mark.slow
@TORN_ROUNDS
def test_a_store_never_sees_half_of_a_step_and_without_the_fence_it_does(
    double: Double, sidecar: SidecarProcess, rounds: int
) -> None:
    double.page.delay_us_max = 200
    layout = {"blocks": 4, "layers": 4}
    with rank_of(double, sidecar, layout=layout) as rank:
        assert _stored_while_it_was_written(rank, rounds, gated=True) == 0
    double.page.delay_us_max = CONTROL_DELAY_US_MAX
    with rank_of(double, sidecar, layout=layout, engine_id="control") as control:
        assert _stored_while_it_was_written(control, CONTROL_ROUNDS_MAX, gated=False) > 0


def _loaded_while_it_was_read(rank: Child, rounds: int, *, gated: bool) -> int:
    """Rounds in which a kernel that reads a block saw what was loaded into it afterwards."""
    return int(
        rank.run(
            "import mmap, numpy as np\n"
            "from tests.gpu.device import call\n"
            "if not gated: rank.no_fence()\n"
            "seen = np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)\n"
            "call('cuMemHostRegister', seen.ctypes.data, seen.size, 1)\n"
            "lay = rank.layout\n"
            "size = lay.segment.num_heads * lay.block_tokens * lay.content_bytes\n"
            "rank.paint(1, 255); assert rank.store(1, b'k' * 32, [1])\n"
            "torn = 0\n"
            "for round in range(1, rounds):\n"
            "    value = round % 250 + 1\n"
            "    rank.paint(2, value)\n"
            "    for layer in range(lay.segment.num_layers):\n"
            "        call('cuMemcpyDtoHAsync', seen.ctypes.data + layer * size,\n"
            "             rank.base + offset_of(lay, layer, 2, 0, 0), size, rank.gpu.stream)\n"
            "    assert rank.load(round + 1, b'k' * 32, [2])\n"
            "    rank.gpu.read(rank.base, 1)\n"
            "    torn += set(seen[: size * lay.segment.num_layers].tolist()) != {value}\n"
            "    if torn and not gated: break\n"
            "call('cuMemHostUnregister', seen.ctypes.data)\n"
            "result = torn",
            rounds=rounds,
            gated=gated,
        )
    )


@pytest.mark.promise("gpu-fence")
@pytest.mark.slow
@TORN_ROUNDS
def test_a_load_never_overtakes_queued_work_and_without_the_fence_it_does(
    double: Double, sidecar: SidecarProcess, rounds: int
) -> None:
    double.page.delay_us_max = 200
    layout = {"blocks": 4, "layers": 4}
    with rank_of(double, sidecar, layout=layout) as rank:
        assert _loaded_while_it_was_read(rank, rounds, gated=True) == 0
    double.page.delay_us_max = CONTROL_DELAY_US_MAX
    with rank_of(double, sidecar, layout=layout, engine_id="control") as control:
        assert _loaded_while_it_was_read(control, CONTROL_ROUNDS_MAX, gated=False) > 0


STAGES = {
    "before the fence": ("rank.begin_store(50, key, [1, 2])", 2),
    "in the middle of a store": ("rank.begin_store(50, key, [1, 2])", 1),
    "in the middle of a load": ("rank.begin_load(50, b'k' * 32, [5])", 1),
}

FOUND = (
    "result = not rank.load(59, key, [8, 9])"
    " or [rank.block(8), rank.block(9)] == [rank.block(1), rank.block(2)]"
)
"""What was being stored is a miss, or right."""


def _arrive(double: Double, sidecar: SidecarProcess, rank: Child, stage: str) -> None:
    """Bring a job to a stage, and hold it there."""
    what, hold = STAGES[stage]
    rank.run("rank.randomize(1); assert rank.store(1, b'k' * 32, [1]); rank.gpu.read(rank.base, 1)")
    double.page.hold = hold
    rank.run(what, key=key_of(stage))
    if hold == 1:
        direction = 0 if "load" in stage else 1
        wait_until(lambda: double.process(sidecar.pid).inflight_bytes[direction] > 0)


@pytest.mark.parametrize("vmm", [False, True], ids=["ipc", "vmm"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_worker_gives_its_device_memory_back(
    double: Double, sidecar: SidecarProcess, stage: str, vmm: bool
) -> None:
    with rank_of(double, sidecar, vmm=vmm) as rank:
        _arrive(double, sidecar, rank, stage)
        rank.kill()
        double.page.hold = 0
        wait_until(lambda: not {"import", "mapping", "reservation", "handle"} & set(sidecar.left))
    with rank_of(double, sidecar) as rank:
        assert rank.run("rank.randomize(1); result = rank.store(1, b'z' * 32, [1])")
        assert rank.run(FOUND, key=key_of(stage))


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_sidecar_harms_no_worker_which_attaches_to_the_next(
    double: Double, short_directory: Path, stage: str
) -> None:
    with SidecarProcess(double, short_directory) as first:
        rank = rank_of(double, first)
        with rank:
            _arrive(double, first, rank, stage)
            epoch = rank.run("result = rank.attached()")
            first.kill()
            double.page.hold = 0
            assert rank.run("result = rank.outcome(50)") is False
            with SidecarProcess(double, short_directory):
                rank.run("rank.attached(other_than=epoch)", epoch=epoch)
                assert rank.run(FOUND, key=key_of(stage))
                stored, loaded = rank.run(
                    "rank.randomize(3)\n"
                    "assert rank.store(60, key, [1, 2]) and rank.load(61, key, [8, 9])\n"
                    "image = rank.image()\n"
                    "result = ([rank.block(b, image) for b in (1, 2)],"
                    " [rank.block(b, image) for b in (8, 9)])",
                    key=key_of(60),
                )
                assert stored == loaded
                rank.run("rank.close()")
                # The pages of both attachments were given back.
                assert "registration" not in double.process(rank.pid).left


@pytest.mark.promise("gpu-bytes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_under_random_kills_and_delays_no_byte_is_wrong(
    double: Double, short_directory: Path, seed: int
) -> None:
    chance = random.Random(seed)
    double.page.delay_us_max, double.page.piece_bytes = 400, 512
    with ExitStack() as stack:
        running = SidecarProcess(double, short_directory)
        stack.callback(lambda: running.stop())
        order = chance.choice(ORDERS)
        rank = rank_of(double, running, order, vmm=bool(seed % 2))
        stack.callback(lambda: rank.close())
        for life in range(5):
            double.page.seed = chance.getrandbits(31)
            epoch = rank.run("result = rank.attached()")
            these: dict[str, Any] = {"seed": seed * 100 + life, "first": 1000 * life + 1}
            rank.start(
                "good = 0\n"
                "for job, source, target, key in trials(seed, first):\n"
                "    rank.randomize(job)\n"
                "    stored = rank.store(job, key, [source])\n"
                "    wanted = rank.block(source)\n"
                "    if stored and rank.load(job + 1, key, [target]):\n"
                "        assert rank.block(target) == wanted; good += 1\n"
                "    if good == 12 or (job > first + 60 and rank._client.session is None): break\n"
                "result = good",
                **these,
            )
            time.sleep(chance.random() / 2)
            victim = chance.choice(("sidecar", "worker", "sleeper", "nobody"))
            writer, good = layout_in(order), 0
            if victim == "worker":
                rank.kill()
                rank.close()
                order, vmm = chance.choice(ORDERS), chance.random() < 0.5
                rank = rank_of(double, running, order, vmm=vmm, engine_id=f"life-{life}")
            elif victim == "sidecar":
                running.kill()
                running = SidecarProcess(double, short_directory)
            if victim != "worker":
                good = rank.finish()
                assert good == 12 or victim == "sidecar", (life, victim, good)
            if victim == "sleeper" and rank.run("result = rank.kind") == "cuda_vmm":
                rank.run("rank.go_to_sleep(); rank.wake_up()")
            other_than = epoch if victim == "sidecar" else 0
            rank.run("rank.attached(other_than=other_than)", other_than=other_than)
            # What was being stored when its worker or the sidecar was killed, too.
            found = rank.run(
                "result = rank.loaded_again(seed, first, writer)", writer=writer, **these
            )
            assert found >= good or victim == "sidecar", (life, victim, found)
        rank.close()
        wait_until(lambda: not {"import", "mapping"} & set(running.left))


def test_a_cpu_worker_and_a_gpu_worker_share_a_sidecar(
    double: Double, sidecar: SidecarProcess
) -> None:
    with Worker(sidecar.socket, engine_id="cpu") as cpu, rank_of(double, sidecar) as rank:
        content = cpu.fill([0, 1], seed=1)
        rank.run("rank.randomize(1); rank.begin_store(1, key, [1, 2])", key=key_of("gpu"))
        cpu.store(1, key_of("cpu"), [0, 1])
        assert rank.run("result = rank.outcome(1)")
        cpu.load(2, key_of("cpu"), [5, 6])
        assert [cpu.read(5), cpu.read(6)] == content
        assert rank.run(
            "assert rank.load(2, key, [8, 9]); result = rank.block(1) == rank.block(8)",
            key=key_of("gpu"),
        )


def test_a_device_that_is_lost_fails_its_copies_and_serves_nobody_more(
    double: Double, sidecar: SidecarProcess
) -> None:
    with rank_of(double, sidecar) as rank:
        double.fail("cuEventQuery", 700)
        assert not rank.run("rank.randomize(1); result = rank.store(1, b'k' * 32, [1])")
        assert not rank.run("result = rank.store(2, b'l' * 32, [1])")
        # Its session ended, and it was refused again: its log says why it is served uncached.
        said = rank.run(
            "import time; until = time.monotonic() + 60\n"
            "while 'refused' not in (said := rank._client.last_log):\n"
            "    assert time.monotonic() < until, said; time.sleep(0.01)\n"
            "result = said, rank.session is None"
        )
        assert "refused (gpu): GPU-d0d0d0d0-" in said[0]
        assert "cuEventQuery failed with CUDA error (700)" in said[0]
        assert said[1]
        with Child(double, setup=SETUP) as second:
            told = second.run(
                "import time; rank = Rank(socket, layout, engine_id='second')\n"
                "until = time.monotonic() + 60\n"
                "while not rank._client.last_log and rank.session is None:\n"
                "    assert time.monotonic() < until; time.sleep(0.01)\n"
                "result = rank._client.last_log, rank.session is None",
                socket=str(sidecar.socket),
                layout=layout_in("BLHNC"),
            )
            # As nvidia-smi and CUDA_VISIBLE_DEVICES name it.
            assert "refused (gpu): GPU-d0d0d0d0-d0d0-d0d0-d0d0-d0d0d0d0d000: " in told[0]
            assert "cuEventQuery failed with CUDA error (700)" in told[0]
            assert told[1]
        # Memory that it mapped stays allocated while it runs, also of engines that ended.
        status, found = readyz(sidecar.url)
        assert (status, found["problems"][0]["code"]) == (503, "gpu")
        assert "restart the sidecar" in found["problems"][0]["reason"]


def test_a_device_that_is_lost_in_its_self_test_costs_its_own_workers_the_cache_and_nobody_else(
    double: Double, sidecar: SidecarProcess
) -> None:
    double.page.num_devices = 2
    for call in ("cuMemcpyBatchAsync", "cuMemHostUnregister", "cuMemFree"):
        double.fail(call, 719, times=1000)
    with Child(double, setup=SETUP) as lost:
        lost.run(
            "rank = Rank(socket, layout, engine_id='lost'); rank.randomize(1)\n"
            "while 'DeviceLost' not in (log := rank._client.last_log) and '719' not in log:\n"
            "    import time; time.sleep(0.01)\n"
            "assert not rank.store(1, b'k' * 32, [1]); result = log",
            socket=str(sidecar.socket),
            layout=layout_in("BLHNC"),
        )
        # It attaches again all the time. Each trial would leave memory that cannot be unmapped.
        left = sidecar.left
        time.sleep(1.0)
        assert sidecar.left == left
        with Worker(sidecar.socket, engine_id="cpu") as cpu:
            content = cpu.fill([0, 1], seed=1)
            cpu.store(1, key_of("cpu"), [0, 1])
            cpu.load(2, key_of("cpu"), [5, 6])
            assert [cpu.read(5), cpu.read(6)] == content
        double.heal()
        with rank_of(double, sidecar, first_device=1, engine_id="other") as other:
            assert other.run("rank.randomize(1); result = rank.store(1, b'z' * 32, [1])")
            assert other.run("result = rank.load(2, b'z' * 32, [3])")


def test_a_stream_that_cannot_write_words_serves_without_the_cache(
    double: Double, sidecar: SidecarProcess
) -> None:
    double.page.no_stream_writes = 1
    with rank_of(double, sidecar) as rank:
        # Not one that waits in the sidecar for a word that is never written.
        rank.run("rank.begin_store(1, b'k' * 32, [1]); assert rank.role.outstanding == {}")
        assert rank.run("result = rank.outcome(1)") is False
        # The scheduler leaves with it: else each hit would be loaded in vain.
        assert "cuStreamWriteValue64" in rank.run("result = rank.role.refusal")


def test_a_worker_with_the_process_id_of_the_sidecar_is_refused_with_the_remedy(
    double: Double, sidecar: SidecarProcess
) -> None:
    """In PID namespaces of their own both may have one id. A real driver then says 201."""
    with Child(double, setup=SETUP) as child:
        shared, layout = child.run(
            "gpu = Device(); exported = share(gpu, gpu.allocate(layout.size_bytes), layout)\n"
            "result = exported.shared, exported.layouts[0]",
            layout=layout_in("BLHNC"),
        )
        double.fail("cuIpcOpenMemHandle", 201, times=2)
        fence = WorkerFence()
        for pid, told in (
            (sidecar.pid, rf"201.*same process id {sidecar.pid} .*restart one of them.*hostPID"),
            (child.pid, "cuIpcOpenMemHandle failed .*report it"),
        ):
            message = attach_message(Role.WORKER, layout, memory=shared, pid=pid)
            with pytest.raises(RefusedError, match=told):
                Client(sidecar.socket, message, (fence.fd,))
        fence.close()


def test_a_page_that_a_stream_may_still_write_is_not_taken_from_under_it(
    double: Double, sidecar: SidecarProcess
) -> None:
    with rank_of(double, sidecar) as rank:
        double.page.hold = 2
        rank.run(
            "fill = rank.gpu.write(rank.base, bytes(1 << 16))\n"
            "rank.begin_store(1, b'k' * 32, [1]); rank.close_now = rank.role.fence.close()"
        )
        assert double.process(rank.pid).left["registration"] == 1
        double.page.hold = 0
        rank.run("rank.gpu.read(rank.base, 1)")
