"""What must hold on a device, each a function of a `World`: the same ones run on the double.

Each returns what a person wants to know of it, in words.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Final

import msgspec
import pytest

from sidecar.protocol import Role
from tests.gpu.child import Child, ChildError
from tests.gpu.double.control import wait_until
from tests.gpu.real.apart import NAMESPACES
from tests.gpu.real.world import EXPANDABLE, Apart, World
from tests.gpu.sidecars import SidecarProcess
from tests.sidecar.client import Client, RefusedError, Scheduler, attach_message
from tiers.kv.fence import WorkerFence
from tiers.kv.index import FLAG_STORE

FENCE_SECONDS_MAX = 280.0
SETTLED_LOOKS: Final = 20


def legacy_memory(world: World) -> str:
    """Memory of cudaMalloc is shared by an IPC handle, in both orders of layers and blocks."""
    for order in ("BLHNC", "LBHNC"):
        with world.engine(world.layout(order, world.sizes.cache)) as child:
            found = child.call("engine.round_trip", socket=world.socket, name=world.name())
            assert found == ("cuda_ipc", 0), found
    return "bit-exact both ways in BLHNC and LBHNC"


def interior_pointers(world: World) -> str:
    """A cache that begins inside an allocation, as torch's allocator may place it."""
    with world.engine(world.layout("BLHNC", world.sizes.cache), "interior") as child:
        kind, lead_bytes = child.call("engine.round_trip", socket=world.socket, name=world.name())
        assert kind == "cuda_ipc"
        assert lead_bytes > 0, "the cache began where its allocation does: nothing was shown"
    return f"bit-exact {lead_bytes} bytes into the allocation"


def virtual_memory(world: World) -> str:
    """One exportable allocation of the virtual memory API travels as a descriptor."""
    with world.engine(world.layout("BLHNC", world.sizes.cache), "vmm") as child:
        kind, _ = child.call("engine.round_trip", socket=world.socket, name=world.name())
        assert kind == "cuda_vmm"
    return "bit-exact through a descriptor"


def expandable_segments(world: World) -> str:
    """PyTorch's expandable segments: one piece is shared or refused, several are refused."""
    said: list[str] = []
    for sizes in (world.sizes.small_cache, world.sizes.large_cache):
        layout = world.layout("BLHNC", sizes)
        with world.engine(layout, "segments", EXPANDABLE) as child:
            why = child.call("engine.refusal")
            if why:
                assert "expandable_segments" in why, why
                said.append(f"{layout.size_bytes >> 10} KiB refused with the remedy")
                continue
            kind, _ = child.call("engine.round_trip", socket=world.socket, name=world.name())
            said.append(f"{layout.size_bytes >> 10} KiB bit-exact as {kind}")
    return ", ".join(said)


def model_layouts(world: World) -> str:
    """Caches as models have them: attention, MLA, fp8, padded pages."""
    said: list[str] = []
    for name, shape in world.sizes.shapes.items():
        sizes = {"blocks": 64, **shape}
        with world.engine(world.layout(sizes.pop("order"), sizes)) as child:
            child.call("engine.round_trip", socket=world.socket, name=world.name())
        said.append(name)
    return f"bit-exact: {'; '.join(said)}"


def groups_in_one_allocation(world: World) -> str:
    """Two KV cache groups share pages, the smaller one's padded, as in hybrid models."""
    whole = {"layers": 4, "blocks": 32, "heads": 4, "content_bytes": 512}
    first = world.layout("LBHNC", whole)
    # Half the heads: the other half of each page is padding.
    half_bytes = 2 * first.block_tokens * first.content_bytes
    second = world.layout("LBHNC", whole | {"heads": 2, "padding_bytes": half_bytes})
    assert second.block_stride_bytes == first.block_stride_bytes
    with world.engine(first) as child:
        child.call("engine.groups", socket=world.socket, name=world.name(), second=second)
    return "each group's blocks bit-exact in its own layout"


def store_to_device(world: World) -> str:
    """A model's KV reaches a store; another engine has it by another sidecar, and answers alike."""
    sizes = {"layers": 4, "blocks": 40, "heads": 8, "content_bytes": 512, "dtype": "bfloat16"}
    layout = world.layout("BLHNC", sizes)
    with tempfile.TemporaryDirectory(prefix="kvl-store-") as folder:
        store = {"url": f"file://{folder}", "write": "through"}
        with World(world.place, store=store) as first, first.engine(layout) as child:
            before = child.call("engine.compute_prompt", socket=first.socket, name="computes")
            keys = child.run("result = engine.prompt_keys()")
            namespace = child.run("result = engine.namespace_of(engine.engine.layout)")
            wait_until(lambda: _counted(first.sidecar, "chunks_written") >= len(keys))
        with World(world.place, store=store) as second, second.engine(layout) as child:
            child.call("engine.attach_as", socket=second.socket, name="loads")
            asks = {"engine_id": "asks", "topology": "tp1", "namespace": namespace}
            with Scheduler(second.sidecar.socket, **asks) as scheduler:
                # Keys of the store are known once it was listed.
                wait_until(lambda: scheduler.flags(*keys) == [FLAG_STORE] * len(keys))
                assert scheduler.lookup(1, keys).ready == len(keys)
                after = child.call("engine.load_prompt")
    assert after[0] == before[0], "the KV from the store differs"
    assert after[1] == before[1], "the model's logits differ"
    size_bytes = sum(map(len, before[0]))
    return f"{size_bytes >> 20} MiB bit-exact, and so are the {len(before[1]) // 4} logits"


def several_ranks(world: World) -> str:
    """Ranks of one engine store and load at once; each gets its own bytes back."""
    sizes, rounds = world.sizes, world.sizes.rank_rounds
    name = world.name()
    with world.children(sizes.ranks) as children:
        for rank, child in enumerate(children):
            layout = world.layout("BLHNC", sizes.rank_cache | {"first_head": rank})
            child.call("engine.start", kind=world.place.kind, layout=layout)
            child.call(
                "engine.attach_as",
                socket=world.socket, name=name, rank=rank, world_size=sizes.ranks,
            )  # fmt: skip
        for function in ("store_as_rank", "load_as_rank"):
            for rank, child in enumerate(children):
                code = f"result = engine.{function}(rounds, rank)"
                child.start(code, rounds=rounds, rank=rank)
            for child in children:
                child.finish()
    return f"{sizes.ranks} ranks, {rounds} rounds"


def reattachment(world: World) -> str:
    """A worker leaves and comes back, with the same memory."""
    with world.engine(world.layout("BLHNC", world.sizes.cache)) as child:
        for _ in range(3):
            child.call("engine.round_trip", socket=world.socket, name=world.name())
    return "three times"


def _attach(
    world: World, child_says: tuple[object, object], *, pid: int = 0, **memory: object
) -> str:
    """Attach with a description that is not this process's own; how it was refused."""
    shared, layout = child_says
    fence = WorkerFence()
    try:
        message = attach_message(
            Role.WORKER,
            layout,  # type: ignore[arg-type]
            memory=msgspec.structs.replace(shared, **memory),  # type: ignore[type-var]
            pid=pid or os.getpid(),
        )
        with pytest.raises(RefusedError) as refused:
            Client(world.sidecar.socket, message, (fence.fd,))
    finally:
        fence.close()
    assert refused.value.code in ("gpu", "memory"), refused.value
    return refused.value.message


def wrong_device(world: World) -> str:
    """A device that the sidecar does not see is named."""
    with world.engine(world.layout("BLHNC", world.sizes.cache)) as child:
        said = _attach(world, child.call("engine.described"), device_uuid=b"\xfe" * 16)
    assert "GPU-fefefefe-fefe-fefe-fefe-fefefefefefe: " in said
    assert "CUDA_VISIBLE_DEVICES" in said
    return said


def dead_exporter(world: World) -> str:
    """A handle of a process that is gone is refused, and the sidecar serves the next worker."""
    layout = world.layout("BLHNC", world.sizes.cache)
    with world.engine(layout) as child:
        described = child.call("engine.described")
        child.kill()
    said = _attach(world, described)
    assert "cuIpcOpenMemHandle" in said
    with world.engine(layout) as child:
        child.call("engine.round_trip", socket=world.socket, name=world.name())
    return said


def _gated_and_not(world: World, function: str) -> str:
    sizes = world.sizes
    layout = world.layout("BLHNC", world.sizes.small_cache)
    world.place.slow(5_000)
    with world.engine(layout) as child:
        torn = child.call(
            function, seconds_max=FENCE_SECONDS_MAX,
            socket=world.socket, rounds=sizes.control_rounds, gated=False,
        )  # fmt: skip
        assert torn, f"no control of {sizes.control_rounds} tore: the test would show nothing"
        world.place.slow(500)
        begun = time.monotonic()
        torn = child.call(
            function, seconds_max=FENCE_SECONDS_MAX,
            socket=world.socket, rounds=sizes.fence_rounds, gated=True,
        )  # fmt: skip
    assert torn == 0, f"{torn} of {sizes.fence_rounds} rounds were torn"
    world.place.slow(0)
    seconds = time.monotonic() - begun
    return f"0 of {sizes.fence_rounds} torn in {seconds:.0f} s; the control without a fence tore"


def fenced_stores(world: World) -> str:
    """A store never sees half of a step, and without the fence it does."""
    return _gated_and_not(world, "engine.torn_stores")


def fenced_loads(world: World) -> str:
    """A load never overtakes queued work that reads its blocks, and without the fence it does."""
    return _gated_and_not(world, "engine.torn_loads")


def killed_worker(world: World) -> str:
    """A worker is killed while its blocks are copied: its device memory is back soon."""
    layout = world.layout("BLHNC", world.sizes.large_cache)
    found: list[float] = []
    with world.watcher() as watcher:
        # The sidecar's own context must be there before, or it would be taken for the worker's.
        with world.engine(world.layout("BLHNC", world.sizes.small_cache)) as child:
            child.call("engine.round_trip", socket=world.socket, name=world.name())
        for _ in range(world.sizes.kills):
            wanted = settled(watcher) - world.sizes.slack_bytes
            with world.engine(layout) as child:
                child.start(
                    "result = engine.keep_copying(socket, name, 120)",
                    socket=world.socket, name=world.name(),
                )  # fmt: skip
                _wait_taken(watcher, wanted - layout.size_bytes)
                time.sleep(world.sizes.copying_seconds)
                watcher.start("result = watcher.seconds_until(wanted, 60.0)", wanted=wanted)
                child.kill()
                seconds, free = watcher.finish()
            assert free >= wanted, f"{wanted - free} bytes of the killed worker are still held"
            found.append(seconds)
        assert world.sidecar.process.poll() is None, "the sidecar ended too"
    assert max(found) <= world.sizes.seconds_back_max, f"its memory came back after {found} s"
    times = ", ".join(f"{seconds:.2f}" for seconds in found)
    return f"{layout.size_bytes >> 20} MiB back after {times} s"


def _free(watcher: Child) -> int:
    return int(watcher.call("watcher.free"))


def _wait_taken(watcher: Child, free_bytes: int) -> None:
    """Wait until no more than that is free."""
    wait_until(lambda: _free(watcher) <= free_bytes)


def settled(watcher: Child) -> int:
    """Free memory, once it is the same for a while: processes that ended take their time."""
    before, same = -1, 0
    deadline = time.monotonic() + 30.0
    # Looks, not seconds: while the machine pauses, nothing is given back.
    while same < SETTLED_LOOKS and time.monotonic() < deadline:
        now = _free(watcher)
        same = same + 1 if now == before else 0
        before = now
        time.sleep(0.05)
    return before


def _counted(sidecar: SidecarProcess, counter: str) -> int:
    return int(sidecar.status()["counters"][counter])


def _stored(sidecar: SidecarProcess) -> int:
    return _counted(sidecar, "chunks_stored")


def _wait_stored(sidecar: SidecarProcess, chunks: int) -> None:
    wait_until(lambda: _stored(sidecar) >= chunks)


def killed_sidecar(world: World) -> str:
    """A sidecar is killed while it copies: the worker is unharmed, and served by the next one."""
    with world.engine(world.layout("BLHNC", world.sizes.large_cache)) as child:
        under_way = child.run("result = engine.JOBS_AT_A_TIME * engine.CHUNKS_PER_JOB")
        for _ in range(world.sizes.kills):
            first = world.sidecar
            stored = _stored(first)
            child.start(
                "result = engine.keep_copying(socket, name, 120)",
                socket=str(first.socket), name=world.name(),
            )  # fmt: skip
            # It answered more jobs than it has under way at a time.
            _wait_stored(first, stored + under_way + 1)
            time.sleep(world.sizes.copying_seconds)
            first.kill()
            assert child.finish() > 0, "nothing was copied before the kill"
            child.call("engine.unharmed", socket=world.socket, name=world.name())
    return f"{world.sizes.kills} times, each followed by a bit-exact round trip with the next one"


def require_namespaces() -> None:
    """Skip, with the reason, where this user may not make namespaces."""
    command = [sys.executable, "-m", "tests.gpu.real.apart", "9", "this"]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if "not permitted" in tried.stderr:
        pytest.skip(f"this user may not make namespaces: {tried.stderr.splitlines()[-1]}")
    assert tried.returncode == 0, tried.stderr


def separate_namespaces(world: World) -> str:
    """Engine and sidecar in containers that share no namespace, and each its own /dev/shm."""
    require_namespaces()
    found: list[str] = []
    layout = world.layout("BLHNC", world.sizes.cache)
    own = {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES}
    with World(Apart(100), host={"directory": "/dev/shm"}) as apart:
        for place in ("malloc", "vmm"):
            # The sidecar starts first, and has another process id.
            _ = apart.socket
            with apart.engine(layout, place) as child:
                theirs = child.call("engine.namespaces", names=NAMESPACES)
                assert not set(own.values()) & set(theirs.values()), "nothing was shown"
                kind, _ = child.call("engine.round_trip", socket=apart.socket, name=apart.name())
            found.append(kind)
    return f"{' and '.join(found)} bit-exact; {', '.join(NAMESPACES)} and /dev/shm apart"


def equal_process_ids(world: World) -> str:
    """In two PID namespaces, engine and sidecar may have one id: that is refused with a remedy."""
    require_namespaces()
    layout = world.layout("BLHNC", world.sizes.cache)
    with World(Apart(100), host={"directory": "/dev/shm"}) as apart:
        _ = apart.socket
        with World(Apart(100)) as other, other.engine(layout) as child:
            pid = child.run("import os; result = os.getpid()")
            said = _attach(apart, child.call("engine.described"), pid=pid)
    assert "process id 100" in said, said
    return said


CASES: Final[dict[str, Callable[[World], str]]] = {
    case.__name__: case
    for case in (
        legacy_memory,
        interior_pointers,
        virtual_memory,
        expandable_segments,
        model_layouts,
        groups_in_one_allocation,
        store_to_device,
        several_ranks,
        reattachment,
        wrong_device,
        dead_exporter,
        fenced_stores,
        fenced_loads,
        killed_worker,
        killed_sidecar,
        separate_namespaces,
        equal_process_ids,
    )
}
NOT_REHEARSED: Final = ("separate_namespaces", "equal_process_ids")
"""The double finds the memory of other processes by their ids, so they must share these."""


def told(case: str, world: World) -> str:
    """Run a case; what it says. Errors of a child come with its traceback and nothing around it."""
    try:
        return CASES[case](world)
    except ChildError as error:
        last = re.sub(r"\s+", " ", str(error).strip().splitlines()[-1])
        raise AssertionError(f"{last}\n{error}") from None
