"""One worker of an engine on a device, and what it lives through in the tests: one function each.

For child processes. A function raises `AssertionError` where something is not as promised, and
returns what a person wants to know. Each leaves its worker detached.
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from connector.export import ExportedMemory, ExportRefused, GroupTensors, export
from connector.plan import StepPlan
from sidecar.protocol import Memory
from tests.gpu.real.caches import Cache, open_cache
from tests.gpu.steps import BLOCKS_PER_CHUNK, Steps
from tiers.kv.layout import KVLayout

SOURCES = ([3, 4, 5, 9], [20, 1])
TARGETS = ([12, 0, 13, 14], [22, 21])
JOBS_AT_A_TIME = 8
CHUNKS_PER_JOB = 8


class Engine(Steps):
    """A worker with a KV cache of its own. `kind` is torch, or bare on the double."""

    def __init__(self, kind: str, layout: KVLayout, place: str = "malloc") -> None:
        self.cache: Cache = open_cache(kind, layout, place)
        self.layout = layout
        self.attachments = 0

    def export(self) -> ExportedMemory:
        """The cache through the connector's own export, on the engine's own stream."""
        group = GroupTensors(self.cache.tensors, self.layout.segment, "gpu")
        return export([group], None, stream=self.cache.stream)

    def attach(
        self,
        socket: str,
        *,
        engine_id: str = "gpu",
        layout: KVLayout | None = None,
        blocks_per_chunk: int = BLOCKS_PER_CHUNK,
    ) -> int:
        """Attach, with the same memory as `layout` if one is given; the sidecar's epoch."""
        if layout is not None:
            self.cache.view(layout)
            self.layout = layout
        self.memory = self.export()
        self.attachments += 1
        # As in another life: its keys and jobs are not those of the one before.
        self.join(
            socket,
            lambda: self.memory,
            engine_id=f"{engine_id}-{self.attachments}",
            blocks_per_chunk=blocks_per_chunk,
            namespace=self._namespace(blocks_per_chunk),
        )
        return self.attached()

    def _namespace(self, blocks_per_chunk: int) -> bytes:
        """For a model whose KV has this shape."""
        layout = self.layout
        shape = (layout.segment.num_layers, layout.segment.num_heads, layout.content_bytes)
        return json.dumps({"model": "tests/gpu", "shape": [*shape, blocks_per_chunk]}).encode()

    def drop(self) -> None:
        """Give the cache back, so that the next engine of this process starts as in a new one."""
        self.cache.drop()

    def detach(self) -> None:
        """Leave; what was queued on the stream is through."""
        self.cache.finish()
        self.leave()


engine: Engine


def start(**named: Any) -> None:
    """Make this process's engine."""
    global engine
    engine = Engine(**named)


def stop() -> None:
    """Give its cache back."""
    engine.drop()


def _key(*parts: object) -> bytes:
    return hashlib.sha256(repr(parts).encode()).digest()


def described() -> tuple[Memory, KVLayout]:
    """What this worker tells of its memory."""
    memory = engine.export()
    return memory.shared, memory.layouts[0]


def refusal() -> str:
    """Why this worker's memory cannot be shared; nothing if it can."""
    try:
        engine.export().close()
    except ExportRefused as error:
        return str(error)
    return ""


def round_trip(socket: str, name: str) -> tuple[str, int]:
    """Store blocks, overwrite everything, load them elsewhere: bit for bit, and nothing else.

    Returns how the memory was shared, and how far into its allocation it begins.
    """
    cache = engine.cache
    engine.attach(socket, engine_id=name)
    cache.randomize(1)
    wanted = [cache.block(block) for blocks in SOURCES for block in blocks]
    for job_id, blocks in enumerate(SOURCES):
        assert engine.store(job_id + 1, _key(name, job_id), blocks), f"store {job_id} failed"
    assert [cache.block(block) for blocks in SOURCES for block in blocks] == wanted
    cache.randomize(2)
    rest = set(range(engine.layout.num_blocks)) - {b for blocks in TARGETS for b in blocks} - {7}
    others = {block: cache.block(block) for block in sorted(rest)[:64]}
    for job_id, blocks in enumerate(TARGETS):
        assert engine.load(job_id + 10, _key(name, job_id), blocks), f"load {job_id} failed"
    assert engine.load(20, _key(name, 0), [7], 2), "the load of one block of a chunk failed"
    assert not engine.load(21, _key(name, "never stored"), [2])
    assert [cache.block(block) for blocks in TARGETS for block in blocks] == wanted
    assert cache.block(7) == wanted[2]
    assert others == {block: cache.block(block) for block in others}, "other blocks were written"
    lead_bytes = (
        engine.memory.layouts[0].layer_offsets_bytes[0] - engine.layout.layer_offsets_bytes[0]
    )
    kind = engine.memory.shared.kind
    engine.detach()
    return kind, lead_bytes


def torn_stores(socket: str, rounds: int, *, gated: bool) -> int:
    """Rounds in which what was stored is not what had been queued to be written before it."""
    cache, torn = engine.cache, 0
    engine.attach(socket, engine_id=f"stores-{gated}")
    if not gated:
        engine.no_fence()
    for number in range(1, rounds + 1):
        value = number % 250 + 1
        key = _key("stores", gated, number)
        cache.paint(1, value)
        stored = engine.store(2 * number, key, [1])
        # The control's next round must not be told of this one's writes.
        cache.finish()
        assert stored, f"round {number}"
        assert engine.load(2 * number + 1, key, [2]), f"round {number}"
        torn += cache.values(2) != {value}
        if torn and not gated:
            break
    engine.detach()
    return torn


def torn_loads(socket: str, rounds: int, *, gated: bool) -> int:
    """Rounds in which queued work that reads a block saw what was loaded into it after it."""
    cache, torn = engine.cache, 0
    engine.attach(socket, engine_id=f"loads-{gated}")
    key = _key("loads", gated)
    cache.paint(1, 255)
    assert engine.store(1, key, [1])
    if not gated:
        engine.no_fence()
    for number in range(1, rounds + 1):
        value = number % 250 + 1
        cache.paint(2, value)
        cache.snapshot(2)
        loaded = engine.load(number + 1, key, [2])
        torn += cache.seen() != {value}
        assert loaded, f"round {number}"
        if torn and not gated:
            break
        assert not gated or cache.values(2) == {255}
    engine.detach()
    return torn


def keep_copying(socket: str, name: str, seconds: float) -> int:
    """Store and load without a pause, several jobs at a time; returns how many went well.

    Until its time is over, or its sidecar is gone. It stays attached, with what is on its way:
    somebody is to be killed meanwhile.
    """
    engine.attach(socket, engine_id=name)
    good, number, waiting = 0, 0, list[int]()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and engine.session is not None:
        while len(waiting) < JOBS_AT_A_TIME:
            number += 1
            # Every third job loads what was stored some time before.
            if number % 3 or number <= 3 * JOBS_AT_A_TIME:
                plan = StepPlan(stores=[engine.store_job(number, _chunks(name, number))])
            else:
                before = _chunks(name, number - 3 * JOBS_AT_A_TIME + 1)
                plan = StepPlan(loads=[engine.load_job(number, before)])
            engine.role.submit(plan)
            waiting.append(number)
        engine.step()
        good += sum(engine.ended[job] for job in waiting if job in engine.ended)
        waiting = [job for job in waiting if job not in engine.ended]
    return good


def _chunks(name: str, number: int) -> list[tuple[bytes, list[int]]]:
    """Keys and blocks of a job, which are among those of other jobs too."""
    there = engine.layout.num_blocks // BLOCKS_PER_CHUNK
    return [
        (_key(name, number, chunk), [first * BLOCKS_PER_CHUNK + b for b in range(BLOCKS_PER_CHUNK)])
        for chunk in range(CHUNKS_PER_JOB)
        for first in [(number * CHUNKS_PER_JOB + chunk) % there]
    ]


def unharmed(socket: str, name: str) -> None:
    """After its sidecar was killed: every job ends, the device works, a new sidecar serves it."""
    cache = engine.cache
    deadline = time.monotonic() + 60.0
    while engine.role.outstanding:
        assert time.monotonic() < deadline, "jobs of the killed sidecar never ended"
        engine.step()
        time.sleep(0.001)
    cache.finish()
    cache.paint(5, 77)
    assert cache.values(5) == {77}, "the device does not compute what it should"
    engine.leave()
    round_trip(socket, name)
