"""The object tier against plain obstore: rate, processor time, and how long the loop is held up.

Both arms talk to one SeaweedFS on this machine, in turn, with the same objects, the same number of
requests at the same time and the same client settings, in one process. The tier's arm is what the
sidecar runs: deadlines, retries, limits and counters around the client, bodies from and into slots.
The plain arm hands over the same memory and drops what it reads. Ratios are tier over plain, of the
median round; processor time is that of this process with all of its threads, and not the server's.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import numpy.typing as npt
import obstore

from sidecar.config import Store
from sidecar.demo.servers import s3_server
from sidecar.storage import open_store
from tiers.cloud import CloudStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.demo.servers import S3Server

MIB = 1 << 20
READS, WRITES = 16, 4
TICK_SECONDS = 0.001
IDLE_SECONDS = 0.5
LAG_MS_MAX, RATE_MIN, CPU_MAX = 5.0, 0.9, 1.15

Bytes = npt.NDArray[np.uint8]


@dataclass
class Arm:
    """Seconds and processor seconds of each round."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


async def all_of(
    count: int, at_once: int, work: Callable[[int], Awaitable[object]], arm: Arm
) -> None:
    """Do `work` for each number below `count`, `at_once` at a time, and note what it took."""
    numbers = iter(range(count))

    async def worker() -> None:
        for number in numbers:
            await work(number)

    wall, cpu = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(worker)
    arm.wall.append(time.perf_counter() - wall)
    arm.cpu.append(time.process_time() - cpu)


async def watch_loop(lags: list[float]) -> None:
    """How much later than asked a task runs again, over and over."""
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await anyio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))


def slots_of(count: int, size_bytes: int) -> list[Bytes]:
    """Slots as the pool has them: page-aligned, touched, filled with what does not compress."""
    memory = np.frombuffer(mmap.mmap(-1, count * size_bytes), dtype=np.uint8)
    rng = np.random.default_rng(1)
    slots = [memory[at : at + size_bytes] for at in range(0, memory.nbytes, size_bytes)]
    for slot in slots:
        slot[:] = rng.integers(0, 256, size_bytes, dtype=np.uint8)
    return slots


async def measure(
    server: S3Server, size_bytes: int, count: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Both verbs, both arms."""
    settings = Store.model_validate(
        {"url": server.url, "backend": "obstore", "deadline_seconds_max": 200, **server.settings}
    )
    tier = open_store(settings)
    plain: Any = CloudStore(settings.url, settings.access)._client  # noqa: SLF001 (the same client)
    slots = slots_of(READS, size_bytes)
    names = [f"bench/{size_bytes}/{number}" for number in range(count)]
    lags: dict[str, list[float]] = {"idle": [], "get tier": [], "get plain": []}
    arms = {name: Arm() for name in ("put tier", "put plain", "get tier", "get plain")}

    async def put_tier(number: int) -> None:
        await tier.write(names[number], slots[number % READS])

    async def put_plain(number: int) -> None:
        body = slots[number % READS].data
        await obstore.put_async(plain, names[number], body, use_multipart=False)

    async def get_tier(number: int) -> None:
        await tier.read(names[number], slots[number % READS])

    async def get_plain(number: int) -> None:
        found = await obstore.get_async(plain, names[number])
        await found.bytes_async()

    async def timed(name: str, work: Callable[[int], Awaitable[object]], at_once: int) -> None:
        async with anyio.create_task_group() as tasks:
            if name in lags:
                tasks.start_soon(watch_loop, lags[name])
            await all_of(count, at_once, work, arms[name])
            tasks.cancel_scope.cancel()

    # The first round of each warms connections, threads and memory up, and is not counted.
    for number in range(rounds + 1):
        await timed("put tier", put_tier, WRITES)
        await timed("put plain", put_plain, WRITES)
        await timed("get tier", get_tier, READS)
        await timed("get plain", get_plain, READS)
        with anyio.move_on_after(IDLE_SECONDS):
            await watch_loop(lags["idle"])
        if number == 0:
            for found in lags.values():
                found.clear()
    await tier.close()
    return summary(arms, lags, count * size_bytes / 1e9)


def summary(arms: dict[str, Arm], lags: dict[str, list[float]], gigabytes: float) -> dict[str, Any]:
    """Medians of the counted rounds."""
    result: dict[str, Any] = {}
    for verb in ("put", "get"):
        tier, plain = arms[f"{verb} tier"], arms[f"{verb} plain"]
        wall = statistics.median(tier.wall[1:]), statistics.median(plain.wall[1:])
        cpu = statistics.median(tier.cpu[1:]), statistics.median(plain.cpu[1:])
        result[verb] = {
            "rate_ratio": round(wall[1] / wall[0], 3),
            "cpu_ratio": round(cpu[0] / cpu[1], 3),
            "tier_gb_per_second": round(gigabytes / wall[0], 3),
            "plain_gb_per_second": round(gigabytes / wall[1], 3),
            "tier_cpu_seconds_per_gb": round(cpu[0] / gigabytes, 3),
            "plain_cpu_seconds_per_gb": round(cpu[1] / gigabytes, 3),
        }
    # The machine's own part is in all three: what the tier does to the loop is what it adds.
    for name, field_name in (
        ("get tier", "loop_lag_p99_ms"),
        ("get plain", "plain_loop_lag_p99_ms"),
        ("idle", "idle_loop_lag_p99_ms"),
    ):
        ordered = sorted(lags[name])
        result[field_name] = round(1000 * ordered[int(0.99 * (len(ordered) - 1))], 3)
    return result


def holds(report: dict[str, Any]) -> dict[str, bool]:
    """What was asked of each figure."""
    told: dict[str, bool] = {}
    for size, figures in report.items():
        for verb in ("put", "get"):
            told[f"{size}.{verb}.rate_ratio >= {RATE_MIN}"] = (
                figures[verb]["rate_ratio"] >= RATE_MIN
            )
            told[f"{size}.{verb}.cpu_ratio <= {CPU_MAX}"] = figures[verb]["cpu_ratio"] <= CPU_MAX
        told[f"{size}.loop_lag_p99_ms <= {LAG_MS_MAX}"] = figures["loop_lag_p99_ms"] <= LAG_MS_MAX
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=256, help="moved in each round")
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        s3_server(Path(folder)) as server,
    ):
        for size_mib in (4, 32):
            count = max(READS, options.megabytes // size_mib)
            report[f"{size_mib}_mib"] = anyio.run(
                measure, server, size_mib * MIB, count, options.rounds
            )
    print(json.dumps({**report, "holds": holds(report)}))


if __name__ == "__main__":
    main()
