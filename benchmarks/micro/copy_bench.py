"""Store and load on the CPU path against `np.copyto` of the same bytes.

All three move the same bytes between the same two mappings (an engine's memfd and the pool's
file), in turn, in one process. Prints one JSON object; ratios are rate over `np.copyto`'s rate.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tiers.kv.copy import CopyPlan
from tiers.kv.layout import KVLayout, Segment
from tiers.kv.mapping import map_shared, populate
from tiers.kv.slot_image import SlotTemplates, payload_hasher
from tiers.pool.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, HEADS, TOKENS, CONTENT, BLOCKS_PER_CHUNK = 8, 4, 32, 256, 8


def _memory(num_blocks: int) -> tuple[npt.NDArray[np.uint8], KVLayout]:
    page = HEADS * TOKENS * CONTENT
    layer = num_blocks * page
    layout = KVLayout(
        segment=Segment(0, LAYERS, 0, HEADS),
        num_blocks=num_blocks,
        block_tokens=TOKENS,
        content_bytes=CONTENT,
        dtype="bfloat16",
        encoding="bench",
        size_bytes=LAYERS * layer,
        layer_offsets_bytes=tuple(i * layer for i in range(LAYERS)),
        block_stride_bytes=page,
        head_stride_bytes=TOKENS * CONTENT,
        token_stride_bytes=CONTENT,
    )
    fd = os.memfd_create("bench", os.MFD_CLOEXEC)
    os.ftruncate(fd, layout.size_bytes)
    _, memory = map_shared(fd, layout.size_bytes)
    populate(memory)
    memory[:] = np.random.default_rng(1).integers(0, 255, layout.size_bytes, dtype=np.uint8)
    return memory, layout


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Copies:
    """The ways to move one set of chunks, over memory, slots and blocks that are set before."""

    def __init__(self, chunks: int, pool: HostPool) -> None:
        self.memory, self.layout = _memory(num_blocks=4 * chunks * BLOCKS_PER_CHUNK)
        chunk = self.layout.chunk(BLOCKS_PER_CHUNK)
        self.templates = SlotTemplates(chunk, bytes(32))
        self.template = self.templates[BLOCKS_PER_CHUNK]
        self.plan = CopyPlan(self.layout)
        self.chunks = chunks
        self.payload_bytes = chunk.payload_bytes(BLOCKS_PER_CHUNK)
        self.tokens = np.arange(BLOCKS_PER_CHUNK * TOKENS, dtype=np.int32).tobytes()
        class_id = pool.register_class(self.templates.slot_bytes)
        self.offsets = [pool.allocate(class_id) or 0 for _ in range(chunks)]
        self.slots = [pool.memory[o : o + self.templates.slot_bytes] for o in self.offsets]
        for slot in self.slots:
            self.template.prepare(slot)
        self._chooser = np.random.default_rng(2)
        self.shuffle()

    def shuffle(self) -> None:
        """Other blocks, and other places for the plain copies."""
        count = self.chunks * BLOCKS_PER_CHUNK
        blocks = self._chooser.permutation(self.layout.num_blocks)[:count]
        self.pieces = blocks.reshape(self.chunks, BLOCKS_PER_CHUNK).astype(np.int64)
        starts = self._chooser.permutation(4 * self.chunks)[: self.chunks] * self.payload_bytes
        self.runs = [self.memory[start : start + self.payload_bytes] for start in starts]

    def copyto_out(self) -> None:
        for run, slot in zip(self.runs, self.slots, strict=True):
            np.copyto(self.template.payload(slot), run)

    def copyto_in(self) -> None:
        for run, slot in zip(self.runs, self.slots, strict=True):
            np.copyto(run, self.template.payload(slot))

    def gather(self) -> None:
        for blocks, slot in zip(self.pieces, self.slots, strict=True):
            self.plan.gather(self.memory, blocks, self.template.payload(slot))

    def store(self) -> None:
        for blocks, slot in zip(self.pieces, self.slots, strict=True):
            hasher = payload_hasher()
            payload = self.template.payload(slot)
            self.plan.gather(self.memory, blocks, payload, visit=hasher.update)
            checksum = hasher.digest()
            self.template.seal(slot, bytes(32), bytes(32), self.tokens, checksum=checksum)

    def scatter(self) -> None:
        for blocks, slot in zip(self.pieces, self.slots, strict=True):
            self.plan.scatter(self.memory, blocks, self.template.payload(slot))

    def load(self) -> None:
        for blocks, slot in zip(self.pieces, self.slots, strict=True):
            hasher = payload_hasher()
            payload = self.template.payload(slot)
            self.plan.scatter(self.memory, blocks, payload, visit=hasher.update)
            self.template.check(slot, hasher.digest())


def measure(chunks: int, rounds: int) -> dict[str, float]:
    """Median ratios over `rounds` rounds of `chunks` chunks each."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        pool = HostPool.open(Path(folder) / "pool", chunks * (4 << 20) + (64 << 20))
        copies = Copies(chunks, pool)
        total = chunks * copies.payload_bytes
        copies.store()
        timed: dict[str, list[float]] = {}
        for _ in range(rounds):
            copies.shuffle()
            for function in (
                *(copies.copyto_out, copies.gather, copies.store),
                *(copies.copyto_in, copies.scatter, copies.load),
            ):
                timed.setdefault(function.__name__, []).append(_seconds(function))
        offsets = copies.offsets
        del copies, function
        for offset in offsets:
            pool.free(offset)
        pool.close()
    median = {name: statistics.median(seconds) for name, seconds in timed.items()}
    return {
        "bytes": total,
        "copyto_gb_per_s": round(total / median["copyto_out"] / 1e9, 2),
        "gather_ratio": round(median["copyto_out"] / median["gather"], 3),
        "store_ratio": round(median["copyto_out"] / median["store"], 3),
        "scatter_ratio": round(median["copyto_in"] / median["scatter"], 3),
        "load_ratio": round(median["copyto_in"] / median["load"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(json.dumps(measure(options.chunks, options.rounds)))


if __name__ == "__main__":
    main()
