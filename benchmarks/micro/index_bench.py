"""The shared index at a million slots: what one lookup of 400 keys and one insertion cost.

Prints one JSON object. Half of the keys that are looked up are present. The times are those of
this machine at this moment; compare only numbers taken side by side.

    python -m benchmarks.micro.index_bench [--slots 1048576] [--keys 400] [--rounds 4000]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time

from tiers.kv.index import FLAG_HOST, IndexReader, IndexWriter, tag_of, tags_of


def measure(slots: int, keys: int, rounds: int) -> dict[str, float]:
    """Fill an index to its capacity, then look up and insert. Times in microseconds."""
    generator = random.Random(1)
    salt = generator.randbytes(16)
    writer = IndexWriter(slots // 2)
    present = [generator.randbytes(32) for _ in range(writer.capacity_entries)]
    tags = [tag_of(key, salt) for key in present]
    started = time.perf_counter()
    for tag in tags:
        writer.set(tag, FLAG_HOST)
    insert_us = (time.perf_counter() - started) / len(tags) * 1e6
    reader = IndexReader(os.dup(writer.fd), writer.size_bytes)
    lookups_us: list[float] = []
    for _ in range(rounds):
        absent = [generator.randbytes(32) for _ in range(keys - keys // 2)]
        asked = tags_of(generator.sample(present, keys // 2) + absent, salt)
        started = time.perf_counter()
        flags = reader.lookup(asked)
        lookups_us.append((time.perf_counter() - started) * 1e6)
        if int(flags.sum()) != keys // 2:
            raise RuntimeError("the index lost an entry, or made one up")
    reader.close()
    writer.close()
    lookups_us.sort()
    return {
        f"lookup_{keys}_p50_us": round(lookups_us[rounds // 2], 1),
        "p99": round(lookups_us[rounds * 99 // 100], 1),
        "insert_us": round(insert_us, 2),
        "bytes_per_entry": round(writer.size_bytes / writer.capacity_entries, 1),
        "slots": writer.slots,
        "entries": len(present),
    }


def main() -> None:
    """Parse the options, measure, print."""
    parser = argparse.ArgumentParser(description="micro-benchmark of tiers/kv/index.py")
    parser.add_argument("--slots", type=int, default=1 << 20)
    parser.add_argument("--keys", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=4000)
    options = parser.parse_args()
    print(json.dumps(measure(options.slots, options.keys, options.rounds)))


if __name__ == "__main__":
    main()
