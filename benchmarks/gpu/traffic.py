"""An engine that keeps its sidecar copying, and what that costs the engine's own work.

For a child process. Jobs go through the real connector worker, each behind a fence on the engine's
own stream, and enough of them wait that the copy engines do not run dry.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from benchmarks.gpu.effort import STORES
from connector.plan import StepPlan
from tests.gpu.real.engine import Engine

if TYPE_CHECKING:
    from sidecar.protocol import Memory
    from tiers.kv.layout import KVLayout

STEPS_AHEAD: Final = 2
"""Steps that an engine queues before the first of them has ended."""
TALK_EVERY: Final = 16
"""Reads of four bytes between two talks with the sidecar."""
SECONDS_MAX: Final = 120.0


class Traffic:
    """Jobs of one worker, in one direction or both."""

    def __init__(
        self,
        engine: Engine,
        ways: list[str],
        *,
        blocks_per_chunk: int,
        job_bytes: int,
        waiting_bytes: int,
        round_bytes: int,
    ) -> None:
        self._engine = engine
        self._ways = itertools.cycle(ways)
        layout = engine.layout
        chunk_bytes = layout.chunk(blocks_per_chunk).payload_bytes(blocks_per_chunk)
        self._chunks_per_job = max(1, job_bytes // chunk_bytes)
        self.job_bytes = self._chunks_per_job * chunk_bytes
        # No two blocks of a chunk are neighbours.
        self._blocks = [
            list(range(first, first + 2 * blocks_per_chunk, 2))
            for first in range(
                0, layout.num_blocks - 2 * blocks_per_chunk + 1, 2 * blocks_per_chunk
            )
        ]
        self._jobs_waiting_max = max(1, waiting_bytes // self.job_bytes)
        self._sets = max(1, round_bytes // self.job_bytes)
        self._waiting: dict[int, int] = {}
        """Jobs under way; of a store, the number of what it stores, else 0."""
        self._number = 0
        self._stored = 0
        self._there: deque[tuple[str, int]] = deque()
        """Jobs' worth of chunks that can be loaded. What stores leave takes the place of what was
        there first: nobody looks the chunks up, so that these are the first to be evicted."""
        self.done_bytes = 0

    @property
    def failed(self) -> int:
        """Jobs that did not end whole."""
        return self._engine.role.incomplete

    def _key(self, *parts: object) -> bytes:
        # Two engines with one key would share its bytes, and copy them once.
        own = (os.getpid(), self._engine.attachments)
        return hashlib.sha256(repr((*own, *parts)).encode()).digest()

    def chunks(self, name: str, number: int) -> list[tuple[bytes, list[int]]]:
        """Keys and blocks of a job."""
        first = number * self._chunks_per_job
        return [
            (self._key(name, first + i), self._blocks[(first + i) % len(self._blocks)])
            for i in range(self._chunks_per_job)
        ]

    def _submit(self, plan: StepPlan, stored: int = 0) -> None:
        plan.idle = True
        self._engine.role.submit(plan)
        self._waiting[self._number] = stored

    def prepare(self) -> None:
        """Store what loads will ask for, and wait for it."""
        for number in range(self._sets):
            self._number += 1
            job = self._engine.store_job(self._number, self.chunks("kept", number))
            self._submit(StepPlan(stores=[job]))
        self.drain()
        self._there.extend(("kept", number) for number in range(self._sets))
        assert not self.failed, "the chunks to be loaded could not be stored"
        self.done_bytes = 0

    def pump(self, jobs_max: int = 1 << 30) -> int:
        """Ask what has ended, and fill the queue; returns how many jobs were submitted."""
        self._collect()
        submitted = 0
        while len(self._waiting) < self._jobs_waiting_max and submitted < jobs_max:
            self._number += 1
            submitted += 1
            if next(self._ways) == STORES:
                # Never the same key: what is there already would not be copied.
                self._stored += 1
                chunks = self.chunks("new", self._stored)
                plan = StepPlan(stores=[self._engine.store_job(self._number, chunks)])
                self._submit(plan, self._stored)
            else:
                self._there.rotate(-1)
                chunks = self.chunks(*self._there[-1])
                self._submit(StepPlan(loads=[self._engine.load_job(self._number, chunks)]))
        return submitted

    def _collect(self) -> None:
        ended = self._engine.ended
        self._engine.step()
        for job_id in [job_id for job_id in ended if job_id in self._waiting]:
            stored = self._waiting.pop(job_id)
            if ended.pop(job_id):
                self.done_bytes += self.job_bytes
                if stored:
                    self._there.popleft()
                    self._there.append(("new", stored))

    def drain(self) -> None:
        """Wait until nothing is on its way."""
        deadline = time.monotonic() + SECONDS_MAX
        while self._waiting:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._waiting)} jobs never ended")
            self._collect()


engine: Engine
traffic: Traffic


def start(**named: Any) -> None:
    """Make this process's engine."""
    global engine
    engine = Engine(**named)


def described() -> tuple[Memory, KVLayout]:
    """What this worker tells of its memory."""
    memory = engine.export()
    return memory.shared, memory.layouts[0]


def attach(socket: str, layout: KVLayout, ways: list[str], **jobs: int) -> None:
    """Attach with the cache seen as `layout`, and store what is to be loaded."""
    global traffic
    engine.attach(
        socket,
        engine_id=f"gpu-{os.getpid()}",
        layout=layout,
        blocks_per_chunk=jobs["blocks_per_chunk"],
    )
    traffic = Traffic(engine, ways, **jobs)
    traffic.prepare()


def detach() -> None:
    """Let all jobs end, and leave."""
    traffic.drain()
    engine.detach()


def seconds(num_bytes: int) -> float:
    """How long this many bytes take through the sidecar."""
    jobs = max(1, num_bytes // traffic.job_bytes)
    before, failed, begun = traffic.done_bytes, traffic.failed, time.perf_counter()
    while jobs:
        jobs -= traffic.pump(jobs)
    traffic.drain()
    passed = time.perf_counter() - begun
    assert traffic.failed == failed, f"{traffic.failed - failed} jobs failed"
    return passed * num_bytes / (traffic.done_bytes - before)


def computing(window_seconds: float, *, copying: bool) -> tuple[float, float]:
    """Steps per second of a decode loop, and bytes per second that were copied beside it."""
    cache, marks = engine.cache, deque[Any]()
    for _ in range(STEPS_AHEAD + 1):
        if copying:
            traffic.pump()
        cache.compute()
        marks.append(cache.mark())
    before, steps, begun = traffic.done_bytes, 0, time.perf_counter()
    while time.perf_counter() - begun < window_seconds or not steps:
        cache.compute()
        marks.append(cache.mark())
        cache.reached(marks.popleft())
        if copying:
            traffic.pump()
        steps += 1
    passed = time.perf_counter() - begun
    copied = traffic.done_bytes - before
    while marks:
        cache.reached(marks.popleft())
    traffic.drain()
    return steps / passed, copied / passed


def reading(reads: int, warm_up: int, *, copying: bool) -> tuple[list[float], float]:
    """Microseconds of reads of four bytes, and bytes per second that were copied beside them."""
    cache, found = engine.cache, list[float]()
    for _ in range(warm_up):
        cache.read_word()
    if copying:
        traffic.pump()
    before, started = traffic.done_bytes, time.perf_counter()
    while len(found) < reads:
        for _ in range(TALK_EVERY):
            begun = time.perf_counter_ns()
            cache.read_word()
            found.append((time.perf_counter_ns() - begun) / 1000)
        if copying:
            traffic.pump()
    passed = time.perf_counter() - started
    copied = traffic.done_bytes - before
    traffic.drain()
    return found, copied / passed


def steps_with_jobs(steps: int, warm_up: int) -> tuple[list[float], list[float], list[float]]:
    """Microseconds that submitting a step's jobs takes the engine: the fence and the message.

    The second list is of the fence's write alone, and the third of one small kernel's launch.
    """
    found, writes, launches = list[float](), list[float](), list[float]()
    fence = engine.role.fence
    assert fence is not None
    signal = fence.signal

    def timed(sequence: int) -> None:
        begun = time.perf_counter_ns()
        signal(sequence)
        writes.append((time.perf_counter_ns() - begun) / 1000)

    fence.signal = timed  # type: ignore[method-assign]
    for number in range(warm_up + steps):
        store, load = 2 * number + 1_000_000, 2 * number + 1_000_001
        plan = StepPlan(
            stores=[engine.store_job(store, traffic.chunks("step", number)[:1])],
            loads=[engine.load_job(load, traffic.chunks("kept", 0)[:1])],
        )
        begun = time.perf_counter_ns()
        engine.cache.launch()
        launched = time.perf_counter_ns()
        engine.role.submit(plan)
        passed = (time.perf_counter_ns() - launched) / 1000
        if number >= warm_up:
            found.append(passed)
            launches.append((launched - begun) / 1000)
        for job_id in (store, load):
            assert engine.outcome(job_id), f"job {job_id} failed"
            del engine.ended[job_id]
    fence.signal = signal  # type: ignore[method-assign]
    return found, writes[warm_up:], launches
