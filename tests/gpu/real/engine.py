"""One worker of an engine on a device, and what it lives through in the tests: one function each.

For child processes. A function raises `AssertionError` where something is not as promised, and
returns what a person wants to know. Each leaves its worker detached.
"""

from __future__ import annotations

import hashlib
import json
import os
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
PROMPT_CHUNKS = 4
CHUNKS_PER_JOB = 8


def namespace_of(layout: KVLayout, blocks_per_chunk: int = BLOCKS_PER_CHUNK) -> bytes:
    """For a model whose KV has this shape."""
    shape = (layout.segment.num_layers, layout.segment.num_heads, layout.content_bytes)
    return json.dumps(
        {"model": "tests/gpu", "dtype": layout.dtype, "shape": [*shape, blocks_per_chunk]}
    ).encode()


class Engine(Steps):
    """A worker with a KV cache of its own. `kind` is torch, or bare on the double."""

    def __init__(self, kind: str, layout: KVLayout, place: str = "malloc") -> None:
        self.cache: Cache = open_cache(kind, layout, place)
        self.layout = layout
        self.others: list[KVLayout] = []
        """Further KV cache groups in the same memory."""
        self.attachments = 0

    def export(self) -> ExportedMemory:
        """The cache through the connector's own export, on the engine's own stream."""
        groups = [
            GroupTensors(self.cache.tensors_of(layout), layout.segment, "gpu")
            for layout in (self.layout, *self.others)
        ]
        return export(groups, None, stream=self.cache.stream)

    def attach(
        self,
        socket: str,
        *,
        engine_id: str = "gpu",
        layout: KVLayout | None = None,
        blocks_per_chunk: int = BLOCKS_PER_CHUNK,
        rank: int = 0,
        world_size: int = 1,
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
            rank=rank,
            world_size=world_size,
            engine_id=f"{engine_id}-{self.attachments}",
            blocks_per_chunk=blocks_per_chunk,
            namespace=namespace_of(self.layout, blocks_per_chunk),
        )
        return self.attached()

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


def namespaces(names: tuple[str, ...]) -> dict[str, str]:
    """This process's own."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in names}


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


def groups(socket: str, name: str, second: KVLayout) -> None:
    """A second KV cache group in the same memory: each group's blocks come back in its layout."""
    cache, first = engine.cache, engine.layout
    engine.others = [second]
    engine.attach(socket, engine_id=name)
    cache.randomize(3)
    mine, other = [0, 1, 2, 3], [4, 5, 6, 7]
    wanted = [_blocks(first, mine), _blocks(second, other)]
    for number, blocks in enumerate((mine, other)):
        job = engine.store_job(number + 1, [(_key(name), blocks)], group=number)
        engine.role.submit(StepPlan(stores=[job]))
        assert engine.outcome(number + 1), f"the store of group {number} failed"
    cache.randomize(4)
    kept = _blocks(first, [20, 21])
    for number, blocks in enumerate(([8, 12, 9, 13], [10, 14, 11, 15])):
        load = engine.load_job(number + 10, [(_key(name), blocks)], group=number)
        engine.role.submit(StepPlan(loads=[load]))
        assert engine.outcome(number + 10), f"the load of group {number} failed"
    found = [_blocks(first, [8, 12, 9, 13]), _blocks(second, [10, 14, 11, 15])]
    assert found == wanted, "a group's blocks differ"
    assert _blocks(first, [20, 21]) == kept, "other blocks were written"
    engine.detach()
    engine.others = []
    cache.view(first)


def _blocks(layout: KVLayout, blocks: list[int]) -> list[bytes]:
    """Contents of blocks of a group."""
    engine.cache.view(layout)
    return [engine.cache.block(block) for block in blocks]


def prompt_keys() -> list[bytes]:
    """Keys of the chunks of the prompt that `compute_prompt` computes."""
    return [_key("prompt", number) for number in range(PROMPT_CHUNKS)]


def _prompt_chunks(blocks: list[int]) -> list[tuple[bytes, list[int]]]:
    return [
        (key, blocks[number * BLOCKS_PER_CHUNK : (number + 1) * BLOCKS_PER_CHUNK])
        for number, key in enumerate(prompt_keys())
    ]


def compute_prompt(socket: str, name: str) -> tuple[list[bytes], bytes]:
    """Compute the KV of a prompt and store it; its blocks' bytes, and the logits behind it."""
    cache, blocks = engine.cache, list(range(PROMPT_CHUNKS * BLOCKS_PER_CHUNK + 1))
    engine.attach(socket, engine_id=name)
    cache.prefill(blocks)
    engine.role.submit(StepPlan(stores=[engine.store_job(1, _prompt_chunks(blocks))]))
    assert engine.outcome(1), "the prompt was not stored"
    said = cache.answer(blocks)
    found = [cache.block(block) for block in blocks[:-1]]
    engine.detach()
    return found, said


def load_prompt() -> tuple[list[bytes], bytes]:
    """The same from the cache, in another engine and in other blocks, none side by side."""
    cache = engine.cache
    cache.randomize(9)
    last = 2 * PROMPT_CHUNKS * BLOCKS_PER_CHUNK + 2
    blocks = list(range(last, -1, -2))[: PROMPT_CHUNKS * BLOCKS_PER_CHUNK + 1]
    engine.role.submit(StepPlan(loads=[engine.load_job(1, _prompt_chunks(blocks))]))
    assert engine.outcome(1), "the prompt was not loaded"
    said = cache.answer(blocks)
    found = [cache.block(block) for block in blocks[:-1]]
    engine.detach()
    return found, said


def attach_as(socket: str, name: str, rank: int = 0, world_size: int = 1) -> None:
    """Attach as one of several ranks, or as the only one."""
    engine.attach(socket, engine_id=name, rank=rank, world_size=world_size)


def store_as_rank(rounds: int, rank: int) -> None:
    """Store all of the cache, as often as said. Ranks store other bytes under the same keys."""
    engine.cache.randomize(100 + rank)
    for number in range(rounds):
        engine.role.submit(
            StepPlan(stores=[engine.store_job(number + 1, _all_chunks("ranks", number))])
        )
    for number in range(rounds):
        assert engine.outcome(number + 1), f"round {number} was not stored"


def load_as_rank(rounds: int, rank: int) -> None:
    """Overwrite everything, and get this rank's own bytes back."""
    cache, looked_at = engine.cache, range(0, engine.layout.num_blocks, 7)
    wanted = [cache.block(block) for block in looked_at]
    cache.randomize(200 + rank)
    chunks = _all_chunks("ranks", rounds - 1)
    engine.role.submit(StepPlan(loads=[engine.load_job(1000, chunks)]))
    assert engine.outcome(1000), "the chunks were not loaded"
    assert [cache.block(block) for block in looked_at] == wanted, f"rank {rank} got other bytes"
    engine.detach()


def _all_chunks(*parts: object) -> list[tuple[bytes, list[int]]]:
    return [
        (_key(*parts, first), list(range(first, first + BLOCKS_PER_CHUNK)))
        for first in range(0, engine.layout.num_blocks, BLOCKS_PER_CHUNK)
    ]


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
