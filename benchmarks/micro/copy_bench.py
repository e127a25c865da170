"""Store and load on the CPU path against one `np.copyto` of the same bytes.

All three move the same bytes between the same two mappings (an engine's memfd and the pool's
file), in turn, in one process. Prints one JSON object; ratios are rate over `np.copyto`'s rate.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tiers.arrow import SlotTemplates
from tiers.copy import CopyPlan
from tiers.layout import KVLayout, Segment
from tiers.pool import HostPool

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
    memory = np.frombuffer(mmap.mmap(fd, layout.size_bytes), dtype=np.uint8)
    memory[:] = np.random.default_rng(1).integers(0, 255, layout.size_bytes, dtype=np.uint8)
    return memory, layout


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(chunks: int, rounds: int) -> dict[str, float]:
    """Median ratios over `rounds` rounds of `chunks` chunks each."""
    memory, layout = _memory(num_blocks=4 * chunks * BLOCKS_PER_CHUNK)
    chunk = layout.chunk(BLOCKS_PER_CHUNK)
    templates = SlotTemplates(chunk, bytes(32))
    template = templates[BLOCKS_PER_CHUNK]
    plan = CopyPlan(layout)
    payload_bytes = chunk.payload_bytes(BLOCKS_PER_CHUNK)
    chooser = np.random.default_rng(2)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        size = 2 * chunks * templates.slot_bytes + (64 << 20)
        pool = HostPool.open(Path(folder) / "pool", size)
        class_id = pool.register_class(templates.slot_bytes)
        offsets = [pool.allocate(class_id) for _ in range(chunks)]
        slots = [pool.memory[o : o + templates.slot_bytes] for o in offsets if o is not None]
        assert len(slots) == chunks
        for slot in slots:
            template.prepare(slot)
        tokens = np.arange(BLOCKS_PER_CHUNK * TOKENS, dtype=np.int32).tobytes()
        timed: dict[str, list[float]] = {}
        for _ in range(rounds):
            ids = chooser.permutation(layout.num_blocks)[: chunks * BLOCKS_PER_CHUNK]
            pieces = ids.reshape(chunks, BLOCKS_PER_CHUNK).astype(np.int64)
            starts = chooser.permutation(4 * chunks)[:chunks] * payload_bytes

            def copyto_out() -> None:
                for start, slot in zip(starts, slots, strict=True):
                    np.copyto(template.payload(slot), memory[start : start + payload_bytes])

            def copyto_in() -> None:
                for start, slot in zip(starts, slots, strict=True):
                    np.copyto(memory[start : start + payload_bytes], template.payload(slot))

            def gather() -> None:
                for blocks, slot in zip(pieces, slots, strict=True):
                    plan.gather(memory, blocks, template.payload(slot))

            def store() -> None:
                for blocks, slot in zip(pieces, slots, strict=True):
                    plan.gather(memory, blocks, template.payload(slot))
                    template.seal(slot, bytes(32), bytes(32), tokens)

            def scatter() -> None:
                for blocks, slot in zip(pieces, slots, strict=True):
                    plan.scatter(memory, blocks, template.payload(slot))

            def load() -> None:
                for blocks, slot in zip(pieces, slots, strict=True):
                    template.verify_payload(slot)
                    plan.scatter(memory, blocks, template.payload(slot))

            store()
            for function in (copyto_out, gather, store, copyto_in, scatter, load):
                timed.setdefault(function.__name__, []).append(_seconds(function))
        for offset in offsets:
            assert offset is not None
            pool.free(offset)
        del slots
        pool.close()
    median = {name: statistics.median(seconds) for name, seconds in timed.items()}
    total = chunks * payload_bytes
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
