"""The catalog at ten million chunks: memory of one, time to compact, to read and to refresh.

Prints one JSON object. The store is a folder on this machine, so requests cost next to nothing and
the times are those of the work around them. What a chunk takes is the sidecar's own table; the
shared index has its own benchmark. Times are those of this machine at this moment.

    python -m benchmarks.micro.catalog_bench [--chunks 10000000] [--keys 400] [--directory DIR]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from typing import Any, Final

import anyio
import numpy as np

from benchmarks.micro.directory_bench import LIMITS, NoSlots
from sidecar.commands import Listed, ListedRow, SessionOpened
from sidecar.engine import Engine
from sidecar.protocol import Role
from tiers.catalog.compaction import Plan, compact
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import Counts
from tiers.catalog.merge import Bounds
from tiers.catalog.names import catalog_folder, namespace_prefix
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import Rows
from tiers.objects import UrlObjects
from tiers.policy import make

PREFIX: Final = namespace_prefix(bytes(32))
FOLDER: Final = catalog_folder(PREFIX)
ROWS_PER_ROUND: Final = 1_000_000
ROWS_PER_SLICE: Final = 1024
NEWS: Final = 1000
PLAN: Final = Plan(Bounds(), grace_seconds=300.0, keep_seconds=0.0)
BYTES_PER_CHUNK_MAX: Final = 100.0


def rows_of(generator: np.random.Generator, count: int) -> Rows:
    """Rows of as many chunks, with keys as hashes give them."""
    return Rows(
        keys=generator.integers(0, 256, (count, 32), dtype=np.uint8),
        parents=np.zeros((count, 32), dtype=np.uint8),
        segments=("0-32.0-8",),
        segment_ids=np.zeros(count, dtype=np.int32),
        num_blocks=np.full(count, 16, dtype=np.int32),
        size_bytes=np.full(count, 1 << 20, dtype=np.int64),
        written_at=np.full(count, 1_700_000_000_000_000, dtype=np.int64),
        tenants=np.zeros((count, 8), dtype=np.uint8),
    )


def feed(engine: Engine, rows: Rows) -> None:
    """Tell the engine, as `sidecar/watch.py` does it."""
    for first in range(0, len(rows), ROWS_PER_SLICE):
        part = slice(first, first + ROWS_PER_SLICE)
        times = rows.written_at[part].tolist()
        keys = rows.key_list(first, first + len(times))
        columns = zip(keys, times, strict=True)
        listed = [ListedRow(key, 1, written_at, withdrawn=False) for key, written_at in columns]
        engine.handle(Listed(0, listed), 0.0)


async def measure(directory: str, chunks: int, keys: int) -> dict[str, Any]:
    """Write, compact, read, refresh, look up."""
    generator, dice = np.random.default_rng(1), random.Random(1)
    tier = UrlObjects(f"file://{directory}")
    log = LogWriter(tier, FOLDER, new_writer(), rows_max=1, seconds_max=0.0)
    compact_seconds = 0.0
    sample: list[bytes] = []
    for done in range(0, chunks, ROWS_PER_ROUND):
        rows = rows_of(generator, min(ROWS_PER_ROUND, chunks - done))
        sample += rows.key_list(0, keys)
        await log.write(rows)
        started = time.perf_counter()
        await compact(tier, PREFIX, PLAN, time.time())
        compact_seconds += time.perf_counter() - started
    started = time.perf_counter()
    await compact(tier, PREFIX, PLAN._replace(whole=True), time.time())
    whole_seconds = time.perf_counter() - started

    engine = Engine(NoSlots(), make("lru"), LIMITS, epoch=1)
    engine.handle(SessionOpened(1, Role.SCHEDULER, "engine", 0, 1, 0, False, None), 0.0)
    reader = CatalogReader(tier, FOLDER, Counts())
    started = time.perf_counter()
    async for found in reader.changes():
        feed(engine, found)
    first_seconds = time.perf_counter() - started
    known = engine.snapshot().chunks_in_store
    if known != chunks:
        raise RuntimeError(f"{known} of {chunks} chunks were read")
    started = time.perf_counter()
    async for _ in reader.changes():
        raise RuntimeError("a refresh without news told some")
    idle_ms = (time.perf_counter() - started) * 1e3
    await log.write(rows_of(generator, NEWS))
    started = time.perf_counter()
    async for found in reader.changes():
        feed(engine, found)
    news_ms = (time.perf_counter() - started) * 1e3
    stored = engine._directory.realms[0].stored  # noqa: SLF001
    times: list[float] = []
    for _ in range(1000):
        asked = dice.choices(sample, k=keys)
        started = time.perf_counter()
        held = sum(map(stored.get, asked))
        times.append((time.perf_counter() - started) * 1e6)
        if held != keys:
            raise RuntimeError("the table lost a chunk")
    per_chunk = stored.size_bytes / len(stored)
    return {
        "chunks": chunks,
        "bytes_per_chunk": round(per_chunk, 1),
        "compaction_us_per_chunk": round(compact_seconds / chunks * 1e6, 2),
        "whole_compaction_seconds": round(whole_seconds, 1),
        "first_read_seconds": round(first_seconds, 1),
        "refresh_without_news_ms": round(idle_ms, 1),
        f"refresh_with_{NEWS}_ms": round(news_ms, 1),
        f"lookup_{keys}_p50_us": round(sorted(times)[len(times) // 2], 1),
        "holds": {f"bytes_per_chunk <= {BYTES_PER_CHUNK_MAX}": per_chunk <= BYTES_PER_CHUNK_MAX},
    }


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="micro-benchmark of tiers/catalog")
    parser.add_argument("--chunks", type=int, default=10_000_000)
    parser.add_argument("--keys", type=int, default=400)
    parser.add_argument("--directory", help="where the folder is made (default: the system's)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvlake-catalog-", dir=options.directory) as folder:
        print(json.dumps(anyio.run(measure, folder, options.chunks, options.keys)))


if __name__ == "__main__":
    main()
