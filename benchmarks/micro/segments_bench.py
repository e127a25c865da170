"""What the event loop of a real sidecar computes for each segment that it loads and stores.

A worker sends jobs of many small chunks, a few at a time, and waits for their ends. A scheduler
sends the use and the lease of each load before it, as the connector does. What is counted is the
processor time of the sidecar's first thread, which runs the event loop, over the segments: copies
run in other threads and processes. Prints one JSON object.

    python -m benchmarks.micro.segments_bench [--chunks 128] [--jobs 100]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sidecar.protocol import LoadChunk, LoadJob, Outcome, StoreJob
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import BLOCKS_PER_CHUNK, ROOT, Scheduler, Worker, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

RUNNING: Final = 4
"""Jobs at a time."""
REPEATS: Final = 5
LOAD_US_MAX: Final = 10
STORE_US_MAX: Final = 15


class Loop:
    """The thread of a sidecar that runs its event loop."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        assert sidecar.process is not None
        pid = sidecar.process.pid
        self._place = Path(f"/proc/{pid}/task/{pid}/schedstat")

    def seconds(self) -> float:
        """Processor time so far."""
        return int(self._place.read_text().split()[0]) / 1e9


def run(worker: Worker, jobs: Iterator[int]) -> None:
    """Begin jobs, `RUNNING` at a time, until all have ended well."""
    running = deque[int]()
    for job_id in jobs:
        running.append(job_id)
        if len(running) >= RUNNING:
            _ended(worker, running.popleft())
    for job_id in running:
        _ended(worker, job_id)


def _ended(worker: Worker, job_id: int) -> None:
    outcome = worker.outcome(job_id)
    if outcome is not Outcome.OK:
        raise RuntimeError(f"job {job_id} ended with {outcome}")


class Bench:
    """One sidecar, one engine of one rank."""

    def __init__(self, sidecar: SidecarProcess, chunks: int, jobs: int) -> None:
        self._loop = Loop(sidecar)
        self._chunks = chunks
        self._jobs = jobs
        self._path = Path(sidecar.socket)
        self._number = 1

    def measure(self, *, full: bool = False) -> dict[str, Any]:
        """Microseconds for each segment, medians of `REPEATS`.

        `full`: host memory holds a part of a round, so every store evicts and nothing is loaded.
        """
        blocks = self._chunks * BLOCKS_PER_CHUNK
        found: dict[str, list[float]] = {}
        with Worker(self._path, num_blocks=blocks) as worker, Scheduler(self._path) as scheduler:
            for repeat in range(REPEATS + 1):
                prompts = [
                    [key_of(repeat, job, chunk) for chunk in range(self._chunks)]
                    for job in range(self._jobs)
                ]
                parts = {
                    "store": lambda prompts=prompts: self._stores(worker, prompts),
                    "load": lambda prompts=prompts: self._loads(worker, scheduler, prompts),
                }
                if full:
                    parts = {"store_into_full": parts["store"]}
                for name, jobs in parts.items():
                    microseconds = self._timed(worker, jobs)
                    if repeat:
                        found.setdefault(name, []).append(microseconds)
        return {f"{name}_us": round(statistics.median(values), 2) for name, values in found.items()}

    def _timed(self, worker: Worker, jobs: Callable[[], Iterator[int]]) -> float:
        before = self._loop.seconds()
        run(worker, jobs())
        return (self._loop.seconds() - before) * 1e6 / (self._jobs * self._chunks)

    def _stores(self, worker: Worker, prompts: Sequence[Sequence[bytes]]) -> Iterator[int]:
        for keys in prompts:
            self._number += 1
            parents = [ROOT, *keys]
            chunks = [
                worker.chunk(key, self._blocks(place), parent)
                for place, (key, parent) in enumerate(zip(keys, parents, strict=False))
            ]
            worker.submit(stores=[StoreJob(self._number, chunks)])
            yield self._number

    def _loads(
        self, worker: Worker, scheduler: Scheduler, prompts: Sequence[Sequence[bytes]]
    ) -> Iterator[int]:
        for keys in prompts:
            self._number += 1
            scheduler.use(*keys, num_tokens=len(keys) * 64)
            scheduler.lease(self._number, keys)
            chunks = [
                LoadChunk(key, 0, list(self._blocks(place))) for place, key in enumerate(keys)
            ]
            worker.submit(loads=[LoadJob(self._number, chunks)])
            yield self._number

    @staticmethod
    def _blocks(place: int) -> range:
        return range(place * BLOCKS_PER_CHUNK, (place + 1) * BLOCKS_PER_CHUNK)


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="processor time of the event loop per segment")
    parser.add_argument("--chunks", type=int, default=128)
    parser.add_argument("--jobs", type=int, default=100)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="kvlake-segments-", dir="/dev/shm"))
    try:
        found: dict[str, Any] = {}
        # All chunks of all rounds fit into the first.
        for size in ("4GiB", "128MiB"):
            limits = {"load_deadline": "60s", "lease_ttl": "60s"}
            with SidecarProcess(
                folder / size, {"host": {"size": size}, "limits": limits}
            ) as sidecar:
                bench = Bench(sidecar, options.chunks, options.jobs)
                found |= bench.measure(full=size == "128MiB")
    finally:
        shutil.rmtree(folder)
    holds = {
        f"load_us <= {LOAD_US_MAX}": found["load_us"] <= LOAD_US_MAX,
        f"store_us <= {STORE_US_MAX}": found["store_us"] <= STORE_US_MAX,
    }
    about = {"load_before": load, "chunks_per_job": options.chunks, "jobs": options.jobs}
    print(json.dumps({**about, **found, "holds": holds}))


if __name__ == "__main__":
    main()
