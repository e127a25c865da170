"""Whether one sidecar keeps the copy engines of eight GPUs busy: on the double, with a clock.

The double of libcuda stands in for the devices. With its clock a copy moves nothing, but takes as
long as at a given rate; each device has an engine for each direction. Workers, sidecar, messages,
slots and checksums are real. Sizes are 1/32 of those of a node whose eight ranks hold 40 KiB of KV
per token each: a chunk of 256 tokens has 10 MiB there, takes 0.19 ms at 55 GB/s, and the limit of
32 MiB in flight is three of them. A prompt of 32,000 tokens is a job of 125 chunks for each rank,
a thousand in all. At that scale hashing is cheap: on a node it needs cores, not the event loop.

Prints one JSON object; `busy` is the part of the time in which an engine copies, mean of the eight.
Times are processor time of the sidecar for each chunk: of its event loop, and of all threads, the
double's own included.

    python -m benchmarks.gpu.clock_bench [--threads 4 8] [--jobs 20]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.effort import LOADS, STORES
from tests.gpu.child import Child
from tests.gpu.double.control import DEVICES_MAX, Double, build
from tests.gpu.layouts import layout_in
from tests.gpu.real.world import Rehearsal, World

SCALE: Final = 32
BLOCKS_PER_CHUNK: Final = 16
CHUNK_BYTES: Final = (10 << 20) // SCALE
CHUNKS: Final = 125
"""Chunks that a job of one rank has."""
MB_PER_SECOND: Final = 55_000 // SCALE
INFLIGHT_BYTES: Final = (32 << 20) // SCALE
TRAFFIC: Final = "from benchmarks.gpu import traffic"
BUSY_MIN: Final = 0.9
ORDERS: Final = ("BLHNC", "LBHNC")
"""A block's layers side by side, and layers outermost: ten times as many runs."""


def processor_seconds(pid: int) -> dict[int, float]:
    """What each thread of a process has computed."""
    found: dict[int, float] = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        found[int(thread.name)] = int((thread / "schedstat").read_text().split()[0]) / 1e9
    return found


def moved(double: Double, direction: int) -> tuple[int, int]:
    """Bytes copied in this direction so far, and nanoseconds that the engines took for them."""
    sides = double.processes()
    return (
        sum(side.copied_bytes[direction] for side in sides),
        sum(side.busy_ns[direction] for side in sides),
    )


def measure(double: Double, threads: int, way: str, order: str, jobs: int) -> dict[str, Any]:
    """One direction, all devices at once."""
    layers, content = 10, 128
    layout = layout_in(
        order, layers=layers, blocks=2048, heads=1, content_bytes=content, lead_bytes=0
    )
    job_bytes = CHUNKS * CHUNK_BYTES
    with ExitStack() as stack:
        world = stack.enter_context(
            World(
                Rehearsal(double),
                host={"size": "2GiB"},
                copy={"threads": threads},
                gpu={"loads_inflight_max": INFLIGHT_BYTES, "stores_inflight_max": INFLIGHT_BYTES},
            )
        )
        workers = [
            stack.enter_context(Child(world.place, first_device=device, setup=TRAFFIC))
            for device in range(DEVICES_MAX)
        ]
        for worker in workers:
            worker.call("traffic.start", kind="bare", layout=layout)
            worker.call(
                "traffic.attach",
                socket=world.socket,
                layout=layout,
                ways=[way],
                blocks_per_chunk=BLOCKS_PER_CHUNK,
                job_bytes=job_bytes,
                waiting_bytes=3 * job_bytes,
                round_bytes=2 * job_bytes,
            )
        double.page.clock_mb_per_s = MB_PER_SECOND
        pid = world.sidecar.pid
        direction = int(way == STORES)
        before, computed = moved(double, direction), processor_seconds(pid)
        began = time.perf_counter()
        for worker in workers:
            worker.start("result = traffic.seconds(num_bytes)", num_bytes=jobs * job_bytes)
        for worker in workers:
            worker.finish()
        seconds = time.perf_counter() - began
        copied, busy = (
            now - then for now, then in zip(moved(double, direction), before, strict=True)
        )
        after = processor_seconds(pid)
        loop = after[pid] - computed[pid]
        chunks = copied / CHUNK_BYTES
        found = {
            "busy": round(busy / 1e9 / seconds / DEVICES_MAX, 3),
            "chunks_per_second": round(chunks / seconds),
            "loop_us": round(loop / chunks * 1e6, 1),
            "all_threads_us": round(
                sum(used - computed.get(one, 0.0) for one, used in after.items()) / chunks * 1e6, 1
            ),
        }
        double.page.clock_mb_per_s = 0
        for worker in workers:
            worker.call("traffic.detach")
    double.no_violations()
    return found


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="how busy one sidecar keeps eight copy engines")
    parser.add_argument("--threads", type=int, nargs="+", default=[4])
    parser.add_argument("--jobs", type=int, default=20, help="of each rank")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=ORDERS)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "load_before": os.getloadavg()[0],
        "needed_chunks_per_second": round(DEVICES_MAX * MB_PER_SECOND * 1e6 / CHUNK_BYTES),
        "holds": {},
    }
    with tempfile.TemporaryDirectory(prefix="kvlake-clock-") as folder:
        library = build(Path(folder))
        for threads in options.threads:
            for order in options.orders:
                for way in (STORES, LOADS):
                    name = f"{way}_{order}_{threads}_threads"
                    # A page has room for a limited number of processes.
                    double = Double(library, Path(folder) / name)
                    double.page.num_devices = DEVICES_MAX
                    found[name] = measure(double, threads, way, order, options.jobs)
                    found["holds"][f"{name} busy >= {BUSY_MIN}"] = found[name]["busy"] >= BUSY_MIN
    print(json.dumps(found))


if __name__ == "__main__":
    main()
