"""The object tier against plain obstore: rate, processor time, and how long the loop is held up.

Every arm talks to one server on this machine, in turn, with the same objects, the same number of
requests at the same time and the same settings, in one process. Two servers: one that costs next to
nothing, so that the client is what is measured, and SeaweedFS, a real one.

Arms of a read: `plain` is obstore alone, which drops what it read; `landed` copies it to the slot,
as any user of obstore must who wants it there; `tier` is what the sidecar calls, with deadlines,
retries, limits and counters; `verified` is `tier` and the checksum of the payload, taken as it
arrives and compared, as the executor does. For a write: `plain`; `tier`; `sampled`, as the executor
writes by default, which checks one slot in fifty first; `verified`, which checks each; and obstore
alone with as much of a guarantee as that: `hashed` takes the same checksum before it, `sha256` has
obstore take the only one that it knows, which the server compares.

What is asked is asked over `plain`, the cheapest arm there is: of `tier`, of reads that are
`verified` and of writes that are `sampled`; and of a `verified` write over `hashed`, for hashing a
slot takes half as long as sending it.
Ratios are of the median round; processor time is that of this process with all of its threads, and
not the server's. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt
import obstore

from benchmarks.store.plain_server import PlainServer, plain_server
from sidecar.config.sections import IntegritySettings
from sidecar.config.store import StoreSettings
from sidecar.data.read import StreamingVerifier
from sidecar.service.store_stack import open_store
from sidecar.sessions.namespaces import RankLayout
from tests.harness.servers import S3Server, s3_server
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplate, SlotTemplates
from tiers.store.client import run_to_end
from tiers.store.obstore_client import ObstoreClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.middleware import Metered

MIB: Final = 1 << 20
READS: Final = 16
WRITES: Final = 4
TICK_SECONDS: Final = 0.001
IDLE_SECONDS: Final = 0.5
RATE_MIN: Final = 0.9
CPU_MAX: Final = 1.15
ASKED: Final = (("put", "tier"), ("put", "sampled"), ("get", "tier"), ("get", "verified"))

Bytes = npt.NDArray[np.uint8]


@dataclass
class Arm:
    """Seconds and processor seconds of each round."""

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])


def template_of(size_bytes: int) -> SlotTemplate:
    """An image with a payload of that size."""
    block_tokens, content, layers, heads = 16, 1024, 8, 8
    blocks = size_bytes // (block_tokens * content * layers * heads)
    layout = ChunkLayout(
        segment=Segment(0, layers, 0, heads),
        blocks_per_chunk=blocks,
        block_tokens=block_tokens,
        content_bytes=content,
        dtype="bfloat16",
        encoding="bench",
    )
    return SlotTemplate(layout, blocks, bytes(32))


def slots_of(template: SlotTemplate, count: int) -> list[Bytes]:
    """Slots as the pool has them: page-aligned, touched, filled with what does not compress."""
    size_bytes = -(-template.image_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, count * size_bytes), dtype=np.uint8)
    rng = np.random.default_rng(1)
    slots = [memory[at : at + template.image_bytes] for at in range(0, memory.nbytes, size_bytes)]
    for slot in slots:
        template.prepare(slot)
        payload = template.payload(slot)
        payload[:] = rng.integers(0, 256, payload.nbytes, dtype=np.uint8)
        template.seal(slot, bytes(32), bytes(32), bytes(template.token_bytes))
    return slots


class Bench:
    """One server, one size of objects."""

    def __init__(self, server: PlainServer | S3Server, size_bytes: int, count: int) -> None:
        settings = StoreSettings.model_validate(
            {
                "url": server.url,
                "backend": "obstore",
                "read_timeout": 120,
                "deadline_seconds_max": 200,
                **server.settings,
            }
        )
        self._tier: Metered = open_store(settings)
        cloud = ObstoreClient(settings.url, settings)
        # The same client, with the same settings.
        self._plain: Any = cloud.client
        config: Any = {**self._plain.config, "checksum_algorithm": "SHA256"}
        self._summing: Any = obstore.store.S3Store(
            config=config,
            client_options=self._plain.client_options,
            retry_config=self._plain.retry_config,
            credential_provider=self._plain.credential_provider,
        )
        self._template = template_of(size_bytes)
        layout = self._template.layout
        self._rank = RankLayout(layout, SlotTemplates(layout, self._template.namespace_digest))
        self._every = round(1 / IntegritySettings().verify_writes)
        self._sampled = 0
        self._slots = slots_of(self._template, READS)
        self._names = [f"bench/{size_bytes}/{number}" for number in range(count)]
        self._copying = anyio.CapacityLimiter(2)
        self._verifying = anyio.CapacityLimiter(1)
        self._lags: dict[str, list[float]] = {"idle": [], "get tier": [], "get plain": []}
        self._arms: dict[str, Arm] = {}

    async def run(self, rounds: int) -> dict[str, Any]:
        """All arms, in turn; the first round warms up and is not counted."""
        arms: list[tuple[str, Callable[[int, Bytes], Awaitable[object]], int]] = [
            ("put plain", self._put_plain, WRITES),
            ("put tier", self._put_tier, WRITES),
            ("put sampled", self._put_sampled, WRITES),
            ("put verified", self._put_verified, WRITES),
            ("put hashed", self._put_hashed, WRITES),
            ("put sha256", self._put_sha256, WRITES),
            ("get plain", self._get_plain, READS),
            ("get landed", self._get_landed, READS),
            ("get tier", self._get_tier, READS),
            ("get verified", self._get_verified, READS),
        ]
        for number in range(rounds + 1):
            # Turned around each time: what an arm leaves behind falls on the one before, too.
            for name, work, at_once in arms if number % 2 == 0 else reversed(arms):
                await self._timed(name, work, at_once)
            with anyio.move_on_after(IDLE_SECONDS):
                await watch_loop(self._lags["idle"])
            if number == 0:
                self._arms.clear()
                for lags in self._lags.values():
                    lags.clear()
        await self._tier.close()
        return self._summary()

    async def _timed(
        self, name: str, work: Callable[[int, Bytes], Awaitable[object]], at_once: int
    ) -> None:
        arm = self._arms.setdefault(name, Arm())
        numbers = iter(range(len(self._names)))

        async def worker(slot: Bytes) -> None:
            for number in numbers:
                await work(number, slot)

        async with anyio.create_task_group() as watching:
            if name in self._lags:
                watching.start_soon(watch_loop, self._lags[name])
            wall, cpu = time.perf_counter(), time.process_time()
            async with anyio.create_task_group() as tasks:
                for slot in self._slots[:at_once]:
                    tasks.start_soon(worker, slot)
            arm.wall.append(time.perf_counter() - wall)
            arm.cpu.append(time.process_time() - cpu)
            watching.cancel_scope.cancel()

    async def _put_plain(self, number: int, slot: Bytes) -> None:
        await obstore.put_async(self._plain, self._names[number], slot.data, use_multipart=False)

    async def _put_tier(self, number: int, slot: Bytes) -> None:
        await self._tier.write(self._names[number], slot)

    async def _put_sampled(self, number: int, slot: Bytes) -> None:
        self._sampled += 1
        if self._sampled % self._every:
            await self._put_tier(number, slot)
        else:
            await self._put_verified(number, slot)

    async def _put_verified(self, number: int, slot: Bytes) -> None:
        await run_to_end(lambda: self._template.verify_payload(slot), self._verifying)
        await self._tier.write(self._names[number], slot)

    async def _put_hashed(self, number: int, slot: Bytes) -> None:
        await anyio.to_thread.run_sync(self._template.verify_payload, slot, limiter=self._verifying)
        await self._put_plain(number, slot)

    async def _put_sha256(self, number: int, slot: Bytes) -> None:
        await obstore.put_async(self._summing, self._names[number], slot.data, use_multipart=False)

    async def _get_plain(self, number: int, _: Bytes) -> Any:
        found = await obstore.get_async(self._plain, self._names[number])
        return await found.bytes_async()

    async def _get_landed(self, number: int, slot: Bytes) -> None:
        found = np.frombuffer(await self._get_plain(number, slot), dtype=np.uint8)
        await anyio.to_thread.run_sync(np.copyto, slot, found, limiter=self._copying)

    async def _get_tier(self, number: int, slot: Bytes) -> None:
        await self._tier.read(self._names[number], slot)

    async def _get_verified(self, number: int, slot: Bytes) -> None:
        verifier = StreamingVerifier(self._rank, bytes(32), slot)
        size_bytes = await self._tier.read(self._names[number], slot, seen=verifier)
        if verifier.has_verified(size_bytes):
            meta = verifier.result(size_bytes)
        else:
            meta = await run_to_end(lambda: verifier.result(size_bytes), self._verifying)
        assert meta is not None

    def _summary(self) -> dict[str, Any]:
        gigabytes = len(self._names) * self._template.image_bytes / 1e9
        median = {
            name: (statistics.median(arm.wall), statistics.median(arm.cpu))
            for name, arm in self._arms.items()
        }
        result: dict[str, Any] = {}
        for name, (wall, cpu) in median.items():
            verb, arm = name.split()
            plain = median[f"{verb} plain"]
            told = result.setdefault(verb, {})
            told[arm] = {
                "gb_per_second": round(gigabytes / wall, 3),
                "cpu_seconds_per_gb": round(cpu / gigabytes, 3),
            }
            if arm != "plain":
                told[arm]["rate_ratio"] = round(plain[0] / wall, 3)
                told[arm]["cpu_ratio"] = round(cpu / plain[1], 3)
        told, hashed = result["put"]["verified"], median["put hashed"]
        told["rate_ratio_over_hashed"] = round(hashed[0] / median["put verified"][0], 3)
        told["cpu_ratio_over_hashed"] = round(median["put verified"][1] / hashed[1], 3)
        result["loop_lag_p99_ms"] = {
            name: percentile_ms(lags, 0.99) for name, lags in self._lags.items()
        }
        return result


async def watch_loop(lags: list[float]) -> None:
    """How much later than asked a task runs again, over and over."""
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await anyio.sleep(TICK_SECONDS)
        lags.append(max(0.0, time.perf_counter() - due))


def percentile_ms(lags: list[float], fraction: float) -> float:
    """That fraction of the lags is not above it."""
    return round(1000 * sorted(lags)[int(fraction * (len(lags) - 1))], 3)


def holds(report: dict[str, Any]) -> dict[str, bool]:
    """What was asked of each figure."""
    told: dict[str, bool] = {}
    for case, figures in report.items():
        for verb, arm in ASKED:
            found = figures[verb][arm]
            name = f"{case}.{verb}.{arm}"
            told[f"{name}.rate_ratio >= {RATE_MIN}"] = found["rate_ratio"] >= RATE_MIN
            told[f"{name}.cpu_ratio <= {CPU_MAX}"] = found["cpu_ratio"] <= CPU_MAX
        found, name = figures["put"]["verified"], f"{case}.put.verified"
        told[f"{name}.rate_ratio_over_hashed >= {RATE_MIN}"] = (
            found["rate_ratio_over_hashed"] >= RATE_MIN
        )
        told[f"{name}.cpu_ratio_over_hashed <= {CPU_MAX}"] = (
            found["cpu_ratio_over_hashed"] <= CPU_MAX
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=128, help="moved in each round")
    parser.add_argument("--servers", nargs="*", default=["plain", "seaweedfs"])
    options = parser.parse_args()
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        servers: dict[str, PlainServer | S3Server] = {}
        if "plain" in options.servers:
            servers["plain"] = stack.enter_context(plain_server())
        if "seaweedfs" in options.servers:
            servers["seaweedfs"] = stack.enter_context(s3_server(Path(folder)))
        for name, server in servers.items():
            # A real server on the same cores takes minutes for what the other does in seconds.
            for size_mib in (4, 32) if name == "plain" else (4,):
                # Twice as many as run at a time, or the end of one batch would be half of it all.
                count = max(2 * READS, options.megabytes // size_mib)
                bench = Bench(server, size_mib * MIB, count)
                report[f"{name}.{size_mib}_mib"] = anyio.run(bench.run, options.rounds)
    print(json.dumps({**report, "holds": holds(report)}))


if __name__ == "__main__":
    main()
