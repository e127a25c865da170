"""The directory at a million chunks: memory of one chunk, time of a lookup, a listing, a change.

Prints one JSON object. Memory is what Python allocated, keys included; it is measured in a run of
its own, because tracing allocations slows down everything that is timed. The times are those of
this machine at this moment; compare only numbers taken side by side.

    python -m benchmarks.micro.directory_bench [--chunks 1000000] [--keys 400] [--rounds 2000]
"""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from typing import TYPE_CHECKING

from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import IndexOffer, Listed, OpenedGroup
from sidecar.core.directory import Cause, Directory
from sidecar.core.outbox import EngineLimits, WritePolicy
from sidecar.core.stored_table import ListedRow
from sidecar.protocol import Role
from tests.sidecar.catalog_rows import listed_rows
from tests.sidecar.engine_names import make_engine, opened_session
from tiers.policy import POLICIES

if TYPE_CHECKING:
    pass

LIMITS = EngineLimits(
    writes_inflight_max=8,
    reads_inflight_max=8,
    write_queue_bytes_max=1 << 30,
    leases_max_per_session=64,
    lease_ttl_seconds_max=10.0,
    lookups_max_per_session=64,
    quarantine_keys_max=1024,
    recompute=True,
    regret_max=0.04,
    breaker=BreakerRules(),
    write=WritePolicy.THROUGH,
    flush_at_end=False,
    store_reads=True,
)


class NoSlots:
    """A pool that is never asked: the benchmark stores nothing."""

    def allocate(self, slot_bytes: int) -> int | None:
        """Nothing."""
        del slot_bytes
        return None

    def set_tag(self, offset: int, tag: bytes) -> None:
        """Nothing was allocated."""

    def seal(self, offset: int) -> None:
        """Nothing was allocated."""

    def unseal(self, offset: int) -> None:
        """Nothing was allocated."""

    def touch(self, offset: int, uses: int) -> None:
        """Nothing was allocated."""

    def free(self, offset: int) -> None:
        """Nothing was allocated."""

    def class_of(self, offset: int) -> int:
        """One class for all."""
        del offset
        return 0

    @property
    def size_bytes(self) -> int:
        """No memory."""
        return 0

    def free_bytes(self) -> int:
        """Nothing."""
        return 0


def keys_of(generator: random.Random, count: int) -> list[bytes]:
    """Keys as hashes give them."""
    return [generator.randbytes(32) for _ in range(count)]


def measure_memory(chunks: int) -> dict[str, float]:
    """Bytes of a chunk that only the store holds, and of one that is in the host tier."""
    generator = random.Random(1)
    directory = Directory(readable=True)
    realm = directory.open_realm(0, 1)
    tracemalloc.start()
    for _ in range(chunks):
        directory.set_stored(realm, generator.randbytes(32), 1, 1)
        if len(realm.stored) % 65_536 == 0:
            directory.take_changes()
    directory.take_changes()
    in_store = tracemalloc.get_traced_memory()[0]
    hosted = chunks // 10
    for _ in range(hosted):
        chunk = directory.open_chunk(realm, generator.randbytes(32))
        directory.move(chunk.segments[0], Cause.GATHER)
        directory.move(chunk.segments[0], Cause.FILLED)
        if len(realm.chunks) % 65_536 == 0:
            directory.take_changes()
    directory.take_changes()
    both = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "store_bytes_per_chunk": round(in_store / chunks, 1),
        "host_bytes_per_chunk": round((both - in_store) / hosted, 1),
    }


def measure_times(chunks: int, keys: int, rounds: int) -> dict[str, float]:
    """Listings through the engine, then lookups of present and absent keys in the directory."""
    generator = random.Random(1)
    present = keys_of(generator, chunks)
    engine = make_engine(NoSlots(), POLICIES["lru"](), LIMITS)
    engine.handle(opened_session(1, Role.SCHEDULER, [OpenedGroup(0)]), 0.0)
    listing = [ListedRow(key, 1, 5, withdrawn=False) for key in present]
    started = time.perf_counter()
    commands = engine.handle(Listed(0, listed_rows(listing)), 0.0)
    first_seconds = time.perf_counter() - started
    told = sum(len(one.keys) for one in commands if isinstance(one, IndexOffer))
    if told != chunks or engine.directory.chunks_in_store != chunks:
        raise RuntimeError("the directory lost a chunk, or made one up")
    listing[0] = ListedRow(present[0], 1, 5, withdrawn=True)
    started = time.perf_counter()
    told = len(engine.handle(Listed(0, listed_rows(listing)), 0.0))
    again_seconds = time.perf_counter() - started
    if told != 1:
        raise RuntimeError("a listing told more than what it changed")

    directory = Directory(readable=True)
    realm = directory.open_realm(0, 1)
    for key in present:
        directory.set_stored(realm, key, 1, 1)
    directory.take_changes()
    lookups_us: list[float] = []
    for _ in range(rounds):
        asked = generator.sample(present, keys // 2) + keys_of(generator, keys - keys // 2)
        started = time.perf_counter()
        found = sum(in_store for _, in_store in map(realm.flags, asked))
        lookups_us.append((time.perf_counter() - started) * 1e6)
        if found != keys // 2:
            raise RuntimeError("the directory lost a chunk, or made one up")
    lookups_us.sort()
    started = time.perf_counter()
    for key in present[:rounds]:
        directory.set_stored(realm, key, 0, 0)
        directory.take_changes()
    change_us = (time.perf_counter() - started) / rounds * 1e6
    return {
        f"lookup_{keys}_p50_us": round(lookups_us[rounds // 2], 1),
        f"lookup_{keys}_p99_us": round(lookups_us[rounds * 99 // 100], 1),
        "change_us": round(change_us, 2),
        "first_listing_seconds": round(first_seconds, 2),
        "next_listing_seconds": round(again_seconds, 2),
    }


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="micro-benchmark of sidecar/core/directory.py")
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    result: dict[str, float] = {"chunks": options.chunks}
    result |= measure_memory(options.chunks)
    result |= measure_times(options.chunks, options.keys, options.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
