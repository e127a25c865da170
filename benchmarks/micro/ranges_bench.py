"""A part of an object by ranges, against all of it in one GET: what ADR 0022 rests on.

    python -m benchmarks.micro.ranges_bench

The object is a chunk of 256 tokens of a model with 32 layers and 8 KV heads, in SeaweedFS on this
machine. Read as ratios: there is no network between.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore.store import S3Store

from tests.harness.servers import s3_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BLOCKS, LAYERS, HEADS, TOKENS, CONTENT_BYTES = 16, 32, 8, 16, 512
REQUESTS_MAX: Final = 16
ROUNDS: Final = 7
NAME: Final = "chunk"

Runs = list[tuple[int, int]]


def runs_of_half_the_heads() -> Runs:
    """Offset and length of each run: one for every layer of every block."""
    layer_bytes = HEADS * TOKENS * CONTENT_BYTES
    return [(number * layer_bytes, layer_bytes // 2) for number in range(BLOCKS * LAYERS)]


def runs_of_half_the_layers() -> Runs:
    """Offset and length of each run: one for every block."""
    block_bytes = LAYERS * HEADS * TOKENS * CONTENT_BYTES
    return [(number * block_bytes, block_bytes // 2) for number in range(BLOCKS)]


async def whole(store: Any) -> int:
    """One GET; the bytes that came."""
    answer = await obstore.get_async(store, NAME)
    return len(await answer.bytes_async())


async def by_ranges(store: Any, runs: Runs) -> int:
    """A GET for each run; the bytes that came."""
    turns = asyncio.Semaphore(REQUESTS_MAX)

    async def one(start: int, length: int) -> int:
        async with turns:
            return len(await obstore.get_range_async(store, NAME, start=start, length=length))

    return sum(await asyncio.gather(*(one(start, length) for start, length in runs)))


async def measured(read: Callable[[], Awaitable[int]]) -> tuple[float, float, int]:
    """Median seconds and CPU seconds of a few rounds, and the bytes of one."""
    num_bytes = await read()
    wall: list[float] = []
    cpu: list[float] = []
    for _ in range(ROUNDS):
        began, spent = time.perf_counter(), time.process_time()
        await read()
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - spent)
    return statistics.median(wall), statistics.median(cpu), num_bytes


async def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as server:
        store = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            access_key_id=server.access_key,
            secret_access_key=server.secret_key,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )
        size_bytes = BLOCKS * LAYERS * HEADS * TOKENS * CONTENT_BYTES
        await obstore.put_async(store, NAME, bytes(size_bytes), use_multipart=False)
        heads, layers = runs_of_half_the_heads(), runs_of_half_the_layers()
        base_wall, base_cpu, _ = await measured(lambda: whole(store))
        print(f"{'':24} {'GETs':>6} {'MiB':>6} {'time':>6} {'CPU':>6}")
        for name, runs in (("half of the heads", heads), ("half of the layers", layers)):
            wall, cpu, num_bytes = await measured(partial(by_ranges, store, runs))
            ratios = f"{wall / base_wall:6.2f} {cpu / base_cpu:6.2f}"
            print(f"{name:24} {len(runs):6} {num_bytes >> 20:6} {ratios}")


if __name__ == "__main__":
    asyncio.run(main())
