"""How long host memory takes to be back after a restart: 8 GiB of sealed slots by default.

Fills a pool as a sidecar does (all but payloads, which nobody looks at before their first use),
leaves it, and measures what the next one does: take the file over, look at every slot, and make
chunks of them when their engine attaches. Then the whole of it: a sidecar from its start until it
is ready, on that pool and on an empty one. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sidecar.config.model import Config
from sidecar.core.breaker import BreakerRules
from sidecar.core.commands import OpenedGroup, Restored
from sidecar.core.outbox import EngineLimits, WritePolicy
from sidecar.data.host_pool import open_pool
from sidecar.protocol import Role
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.engine_names import make_engine, opened_session
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplates
from tiers.policy import POLICIES
from tiers.pool.host_pool import HostPool

if TYPE_CHECKING:
    from sidecar.core.commands import RestoredSlot

LAYOUT = ChunkLayout(
    segment=Segment(0, 8, 0, 4),
    blocks_per_chunk=8,
    block_tokens=32,
    content_bytes=256,
    dtype="bfloat16",
    encoding="bench",
)
"""2 MiB per chunk of 256 tokens."""
DIGEST = bytes(range(32))
GOAL_SECONDS = 2.0
SHARED_MEMORY = Path("/dev/shm")


def fill(config: Config) -> int:
    """Leave a pool that is full of sealed slots; how many."""
    templates = SlotTemplates(LAYOUT, DIGEST)
    template = templates[LAYOUT.blocks_per_chunk]
    pool = HostPool.open(config.pool_path, config.host.size, prefault=False)
    class_id = pool.register_class(templates.slot_bytes)
    tokens, parent, slots = bytes(template.token_bytes), bytes(32), 0
    while (offset := pool.allocate(class_id)) is not None:
        slot = pool.memory[offset : offset + template.image_bytes]
        template.prepare(slot)
        key = np.random.default_rng(slots).bytes(32)
        template.seal(slot, key, parent, tokens, checksum=bytes(16))
        pool.seal(offset)
        # Chains of 16 chunks, as prompts make them.
        slots += 1
        parent = key if slots % 16 else bytes(32)
    pool.close(keep=True)
    return slots


def adopt(pool: HostPool, restored: tuple[RestoredSlot, ...]) -> int:
    """As when the engine attaches; how many chunks it finds."""
    slot_bytes = pool.register_class(SlotTemplates(LAYOUT, DIGEST).slot_bytes)
    limits = EngineLimits(
        writes_inflight_max=1,
        reads_inflight_max=1,
        write_queue_bytes_max=1,
        leases_max_per_session=1,
        lease_ttl_seconds_max=1.0,
        lookups_max_per_session=1,
        quarantine_keys_max=1,
        recompute=True,
        regret_max=0.0,
        breaker=BreakerRules(),
        write=WritePolicy.OFF,
        flush_at_end=False,
        store_reads=False,
    )
    engine = make_engine(pool, POLICIES["density"](), limits)
    engine.handle(Restored(restored), 0.0)
    group = OpenedGroup(0, LAYOUT, DIGEST, slot_bytes)
    opened = opened_session(1, Role.WORKER, [group])
    return sum(type(one).__name__ == "IndexSet" for one in engine.handle(opened, 0.0))


def start_seconds(folder: Path, config: Config, slots: int) -> float:
    """From the start of a sidecar process until it says that it is ready."""
    names = ("size", "directory", "prefault")
    sections = {"host": config.model_dump(mode="json", include={"host": set(names)})["host"]}
    sidecar = SidecarProcess(folder, {**sections, "log": {"level": "warning"}})
    for suffix in ("", ".lock"):
        kept = Path(f"{config.pool_path}{suffix}")
        name = f"kvlake-{os.getuid()}-{sidecar.name}.pool{suffix}"
        if kept.exists():
            kept.rename(config.host.directory / name)
    began = time.perf_counter()
    sidecar.start()
    seconds = time.perf_counter() - began
    assert sidecar.status()["tiers"]["host"]["slots_unclaimed"] == slots
    sidecar.drain()
    return seconds


def measure(gib: float, rounds: int, directory: Path) -> dict[str, object]:
    """Medians over `rounds` restarts within this process, and one of a sidecar."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        host = {
            "size": int(gib * (1 << 30)),
            "directory": folder,
            # Elsewhere it would write all of it to a disk, in the background.
            "prefault": directory == SHARED_MEMORY,
        }
        config = Config.model_validate({"host": host, "runtime": {"name": "bench"}})
        slots = fill(config)
        opened: list[float] = []
        adopted: list[float] = []
        for _ in range(rounds):
            began = time.perf_counter()
            pool, restored = open_pool(config)
            middle = time.perf_counter()
            chunks = adopt(pool, restored)
            opened.append(middle - began)
            adopted.append(time.perf_counter() - middle)
            assert (len(restored), chunks) == (slots, slots)
            del restored
            pool.close(keep=True)
        with tempfile.TemporaryDirectory(dir="/tmp") as sockets:
            warm = start_seconds(Path(sockets) / "w", config, slots)
            tiny = config.model_copy(
                update={"host": config.host.model_copy(update={"size": 1 << 20})}
            )
            cold = start_seconds(Path(sockets) / "c", tiny, 0)
    back = statistics.median(opened) + statistics.median(adopted)
    return {
        "bytes": slots * SlotTemplates(LAYOUT, DIGEST).slot_bytes,
        "slots": slots,
        "take_over_seconds": round(statistics.median(opened), 3),
        "attach_seconds": round(statistics.median(adopted), 3),
        "back_seconds": round(back, 3),
        "sidecar_start_warm_seconds": round(warm, 3),
        "sidecar_start_empty_seconds": round(cold, 3),
        "holds": {f"{gib:g} GiB of slots are back in < {GOAL_SECONDS:g} s": back < GOAL_SECONDS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--directory",
        type=Path,
        default=SHARED_MEMORY,
        help="a disk will do where there is not so much memory: only headers are written and read",
    )
    options = parser.parse_args()
    room = os.statvfs(options.directory)
    if room.f_bavail * room.f_frsize < (options.gib + 1) * (1 << 30):
        sys.exit(f"{options.directory} has no room for {options.gib} GiB; try --gib 1")
    print(json.dumps(measure(options.gib, options.rounds, options.directory)))


if __name__ == "__main__":
    main()
