"""The catalog at ten million chunks: memory of one, time to read, look up, list, bound, compact.

Prints one JSON object. The store is a folder on this machine, so requests cost next to nothing and
the times are those of the work around them. Each part runs in a process of its own, so that what it
takes in memory is its own; times in the processor (`cpu`) are of all threads, and say more than
those of a clock on a machine that has other work. Lookups at this size are compared with those at
ten thousand chunks, in turn.

    python -m benchmarks.micro.catalog_bench [--chunks 10000000] [--directory DIR] [--parts ls gc]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from benchmarks.micro.catalog_world import (
    DAYS,
    NOW_SECONDS,
    SIZE_BYTES,
    TENANTS,
    LagProbe,
    Reading,
    World,
    rss_bytes,
)
from sidecar.cli.contents import chunk_documents, chunk_line, list_chunks, usage_of
from sidecar.cli.store import TenantNames
from sidecar.config.model import Config
from tiers.catalog.compaction import compact
from tiers.catalog.major_compaction import CompactionPlan, CompactionReport
from tiers.catalog.retention import RetentionLimits, RetentionRules
from tiers.kv.index import IndexReader, tags_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.catalog.rows import Rows

SMALL: Final = 10_000
NEWS: Final = 10_000
KEYS: Final = 400
ROUNDS: Final = 1000
IDLE_SECONDS: Final = 2.0
SAMPLE_PER_FILE: Final = 1000
SAMPLE_FILE: Final = "sample-{}"
PLAN: Final = CompactionPlan(RetentionRules(), grace_seconds=300.0, keep_seconds=0.0, major=True)
MEMORY_MIB_MAX: Final = 512
"""For a command that goes through the whole catalog, the interpreter and its packages included."""

BYTES_PER_CHUNK_MAX: Final = 100.0
US_PER_ROW_MAX: Final = 2.0
LAG_P99_MS_MAX: Final = 5.0

Report = dict[str, Any]


async def fill(directory: Path, chunks: int) -> Report:
    """Write both catalogs, and some of their keys for the parts that look them up."""
    started = time.perf_counter()
    for count in (SMALL, chunks):
        sample = await World(str(directory / "store"), count).fill(SAMPLE_PER_FILE)
        (directory / SAMPLE_FILE.format(count)).write_bytes(b"".join(sample))
    return {"fill_seconds": round(time.perf_counter() - started, 1)}


async def read(directory: Path, chunks: int) -> Report:
    """The first read, refreshes, and lookups."""
    small = await _read_small(directory)
    world = World(str(directory / "store"), chunks)
    reading, probe, idle = Reading(world), LagProbe(), LagProbe()
    async with reading.running():
        async with idle.running():
            await anyio.sleep(IDLE_SECONDS)
        before = rss_bytes()
        async with probe.running():
            first = await _timed(reading.refresh)
        grown = rss_bytes() - before
        known = reading.engine.directory.chunks_in_store
        if known != chunks or len(world.realm.index) != chunks:
            raise RuntimeError(f"{known} of {chunks} chunks were read")
        quiet = await _timed(reading.refresh)
        await world.announce(NEWS)
        async with (later := LagProbe()).running():
            news = await _timed(reading.refresh)
        if reading.engine.directory.chunks_in_store != chunks + NEWS:
            raise RuntimeError("a refresh lost some news")
    stored, index = reading.directory.stored, world.realm.index
    return {
        "chunks": chunks,
        "table_bytes_per_chunk": round(stored.size_bytes / len(stored), 1),
        "index_bytes_per_chunk": round(index.size_bytes / len(index), 1),
        "rss_bytes_per_chunk": round(grown / chunks, 1),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "first_read_seconds": round(first.wall, 1),
        "us_per_row": round(first.wall / chunks * 1e6, 2),
        "cpu_us_per_row": round(first.cpu / chunks * 1e6, 2),
        "lag_p99_ms": probe.lag(99),
        "idle_lag_p99_ms": idle.lag(99),
        "held_p99_ms": probe.held(99),
        "held_max_ms": probe.held(100),
        "refresh_without_news_ms": round(quiet.wall * 1e3, 1),
        f"refresh_with_{NEWS}_ms": round(news.wall * 1e3, 1),
        "refresh_held_max_ms": later.held(100),
        **_lookups(directory, small, reading, chunks),
    }


async def _read_small(directory: Path) -> Reading:
    reading = Reading(World(str(directory / "store"), SMALL))
    async with reading.running():
        await reading.refresh()
    return reading


def _lookups(directory: Path, small: Reading, large: Reading, chunks: int) -> Report:
    """Prompts of chunks that the store holds, in both sizes in turn, by the processor's time."""
    dice = random.Random(1)
    readings = {SMALL: small, chunks: large}
    samples: dict[int, list[bytes]] = {}
    for count in readings:
        joined = (directory / SAMPLE_FILE.format(count)).read_bytes()
        samples[count] = [joined[at : at + 32] for at in range(0, len(joined), 32)]
    readers = {
        count: IndexReader(os.dup(one.world.realm.index.fd), one.world.realm.index.size_bytes)
        for count, one in readings.items()
    }
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for count, one in readings.items():
            asked = dice.choices(samples[count], k=KEYS)
            tags = tags_of(asked, one.world.realm.index_salt)
            started = time.thread_time()
            found = int(readers[count].lookup(tags).astype(bool).sum())
            between = time.thread_time()
            held = sum(map(bool, map(one.directory.stored.mask, asked)))
            ended = time.thread_time()
            if (found, held) != (KEYS, KEYS):
                raise RuntimeError(f"{found} and {held} of {KEYS} chunks were found")
            times.setdefault(("index", count), []).append((between - started) * 1e6)
            times.setdefault(("table", count), []).append((ended - between) * 1e6)
    p50 = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    report: Report = {}
    for what in ("index", "table"):
        report[f"{what}_lookup_{KEYS}_p50_us"] = round(p50[what, chunks], 1)
        report[f"{what}_lookup_over_that_at_{SMALL}"] = round(
            p50[what, chunks] / p50[what, SMALL], 2
        )
    return report


async def whole(directory: Path, chunks: int) -> Report:
    """A whole round of compaction."""
    world, probe = World(str(directory / "store"), chunks), LagProbe()
    async with probe.running():
        took = await _timed(lambda: compact(world.tier, world.prefix, PLAN, time.time()))
    return {
        "whole_compaction_seconds": round(took.wall, 1),
        "whole_compaction_cpu_us_per_row": round(took.cpu / chunks * 1e6, 2),
        "whole_compaction_lag_p99_ms": probe.lag(99),
        "whole_compaction_held_p99_ms": probe.held(99),
        "whole_compaction_held_max_ms": probe.held(100),
        "whole_compaction_peak_rss_mib": _peak_mib(),
    }


async def du(directory: Path, chunks: int) -> Report:
    """What `kvlake du` does for one namespace."""
    world = World(str(directory / "store"), chunks)
    took = await _timed(lambda: usage_of(world.tier, world.prefix))
    return {"du_seconds": round(took.wall, 1), "du_peak_rss_mib": _peak_mib()}


async def ls(directory: Path, chunks: int) -> Report:
    """What `kvlake ls --limit` does that lists all chunks, as a table to nowhere."""
    world = World(str(directory / "store"), chunks)
    names = TenantNames(Config())

    def write(rows: Rows) -> None:
        for document in chunk_documents(rows, names):
            chunk_line(document)

    took = await _timed(lambda: list_chunks(world.tier, world.prefix, write, chunks_max=chunks))
    return {
        "ls_seconds": round(took.wall, 1),
        "ls_cpu_us_per_row": round(took.cpu / chunks * 1e6, 2),
        "ls_peak_rss_mib": _peak_mib(),
    }


async def gc(directory: Path, chunks: int) -> Report:
    """What `kvlake gc --dry-run` does where every kind of bound takes something."""
    world, probe = World(str(directory / "store"), chunks), LagProbe()
    tenants = {tenant: RetentionLimits(DAYS / 3 * 86_400) for tenant in world.tenants[:2]}
    tenants |= {
        tenant: RetentionLimits(None, chunks // TENANTS // 2 * SIZE_BYTES)
        for tenant in world.tenants[2:4]
    }
    tenants |= {
        tenant: RetentionLimits(None, None, chunks // TENANTS // 2) for tenant in world.tenants[4:6]
    }
    bounds = RetentionRules(DAYS * 0.9 * 86_400, None, chunks // 2, named=tenants)
    plan = PLAN._replace(retention=bounds, dry_run=True)
    reports: list[CompactionReport] = []

    async def collect() -> None:
        reports.append(await compact(world.tier, world.prefix, plan, NOW_SECONDS))

    async with probe.running():
        took = await _timed(collect)
    [report] = reports
    return {
        "gc_withdrawn_by": {name: count for name, count in report.withdrawn_by().items() if count},
        "gc_kept": report.usage.total.objects,
        "gc_seconds": round(took.wall, 1),
        "gc_cpu_us_per_row": round(took.cpu / chunks * 1e6, 2),
        "gc_lag_p99_ms": probe.lag(99),
        "gc_held_p99_ms": probe.held(99),
        "gc_held_max_ms": probe.held(100),
        "gc_peak_rss_mib": _peak_mib(),
    }


class _Timed:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall = time.perf_counter() - self._wall
        self.cpu = time.process_time() - self._cpu


async def _timed(work: Callable[[], Awaitable[object]]) -> _Timed:
    timed = _Timed()
    await work()
    timed.stop()
    return timed


def _peak_mib() -> int:
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


PARTS: Final[dict[str, Callable[[Path, int], Awaitable[Report]]]] = {
    "fill": fill,
    "read": read,
    "du": du,
    "ls": ls,
    "gc": gc,
    "whole": whole,
}


def holds(report: Report) -> dict[str, bool]:
    """What was asked of the figures."""
    per_chunk = report["table_bytes_per_chunk"] + report["index_bytes_per_chunk"]
    return {
        f"table + index bytes_per_chunk <= {BYTES_PER_CHUNK_MAX}": per_chunk <= BYTES_PER_CHUNK_MAX,
        f"rss_bytes_per_chunk <= {BYTES_PER_CHUNK_MAX}": report["rss_bytes_per_chunk"]
        <= BYTES_PER_CHUNK_MAX,
        f"us_per_row <= {US_PER_ROW_MAX}": report["us_per_row"] <= US_PER_ROW_MAX,
        f"cpu_us_per_row <= {US_PER_ROW_MAX}": report["cpu_us_per_row"] <= US_PER_ROW_MAX,
        f"lag_p99_ms <= {LAG_P99_MS_MAX}": report["lag_p99_ms"] <= LAG_P99_MS_MAX,
        f"held_p99_ms <= {LAG_P99_MS_MAX}": report["held_p99_ms"] <= LAG_P99_MS_MAX,
        **{
            f"{part}_peak_rss_mib <= {MEMORY_MIB_MAX}": report[f"{part}_peak_rss_mib"]
            <= MEMORY_MIB_MAX
            for part in ("du", "ls", "gc")
        },
    }


def main() -> None:
    """Parse the options, measure each part in a process of its own, print."""
    parser = argparse.ArgumentParser(description="micro-benchmark of tiers/catalog")
    parser.add_argument("--chunks", type=int, default=10_000_000)
    parser.add_argument("--directory", help="where the folder is made (default: the system's)")
    parser.add_argument("--part", choices=sorted(PARTS), help="only this, in the folder itself")
    parser.add_argument("--parts", nargs="*", choices=sorted(PARTS), help="only these (and fill)")
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(anyio.run(PARTS[options.part], Path(options.directory), options.chunks)))
        return
    report: Report = {}
    with tempfile.TemporaryDirectory(prefix="kvlake-catalog-", dir=options.directory) as folder:
        for part in PARTS:
            if part != "fill" and options.parts is not None and part not in options.parts:
                continue
            given = ["--part", part, "--chunks", str(options.chunks), "--directory", folder]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.micro.catalog_bench", *given],
                stdout=subprocess.PIPE,
                check=True,
            )
            report |= json.loads(done.stdout)
    if options.parts is None:
        report["holds"] = holds(report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
