"""1,000 objects of a real bucket, each damaged at random: no wrong byte of them is served.

What is damaged around row and payload only, as by another release that writes it, is served.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np
import pytest

from sidecar.protocol import Outcome, StoreJob
from tests.sidecar.client import (
    BLOCKS_PER_CHUNK,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.store.obstore_client import ObstoreClient

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

pytestmark = pytest.mark.slow

CHUNKS: Final = 200
CHUNKS_NIGHTLY: Final = 1000
BLOCKS: Final = 64
AT_ONCE: Final = 16
PAYLOAD_START: Final = 4096
FOOTER_BYTES: Final = 512


def flipped_bit(image: bytearray, other: bytes, dice: random.Random, start: int, end: int) -> None:
    image[dice.randrange(start, end)] ^= 1 << dice.randrange(8)


def in_header(image: bytearray, other: bytes, dice: random.Random) -> None:
    flipped_bit(image, other, dice, 0, PAYLOAD_START)


def in_payload(image: bytearray, other: bytes, dice: random.Random) -> None:
    flipped_bit(image, other, dice, PAYLOAD_START, len(image) - FOOTER_BYTES)


def in_footer(image: bytearray, other: bytes, dice: random.Random) -> None:
    flipped_bit(image, other, dice, len(image) - FOOTER_BYTES, len(image))


def noise(image: bytearray, other: bytes, dice: random.Random) -> None:
    start = dice.randrange(len(image))
    size = min(len(image) - start, dice.choice([1, 2, 16, 512, 4096, 40_000]))
    image[start : start + size] = dice.randbytes(size)


def lost_sector(image: bytearray, other: bytes, dice: random.Random) -> None:
    start = dice.randrange(len(image) // 512) * 512
    image[start : start + 512] = bytes(len(image[start : start + 512]))


def cut_short(image: bytearray, other: bytes, dice: random.Random) -> None:
    del image[dice.choice([0, 1, PAYLOAD_START, len(image) - 1, dice.randrange(len(image))]) :]


def lengthened(image: bytearray, other: bytes, dice: random.Random) -> None:
    image += dice.randbytes(dice.choice([1, 8, 4096]))


def pages_swapped(image: bytearray, other: bytes, dice: random.Random) -> None:
    a, b = (dice.randrange(len(image) // 4096) * 4096 for _ in range(2))
    image[a : a + 4096], image[b : b + 4096] = image[b : b + 4096], image[a : a + 4096]


def pages_of_another(image: bytearray, other: bytes, dice: random.Random) -> None:
    start = dice.randrange(len(image) // 4096) * 4096
    image[start : start + 4096] = other[start : start + 4096]


def another_chunk(image: bytearray, other: bytes, dice: random.Random) -> None:
    """Whole and intact, but not what its name says."""
    image[:] = other


def payload_of_another(image: bytearray, other: bytes, dice: random.Random) -> None:
    image[PAYLOAD_START:] = other[PAYLOAD_START:]


KINDS: Final[tuple[Callable[[bytearray, bytes, random.Random], None], ...]] = (
    in_header, in_payload, in_footer, noise, lost_sector, cut_short, lengthened, pages_swapped,
    pages_of_another, another_chunk, payload_of_another,
)  # fmt: skip


def damaged(image: bytes, other: bytes, dice: random.Random) -> bytes:
    """Something else than `image`."""
    while True:
        copy = bytearray(image)
        dice.choice(KINDS)(copy, other, dice)
        if copy != image:
            return bytes(copy)


async def damage_all(client: Any, names: list[str], dice: random.Random) -> None:
    import obstore

    limiter = anyio.CapacityLimiter(AT_ONCE)
    images: dict[str, bytes] = {}

    async def get(name: str) -> None:
        async with limiter:
            images[name] = bytes(await (await obstore.get_async(client, name)).bytes_async())

    async def put(name: str, image: bytes) -> None:
        async with limiter:
            await obstore.put_async(client, name, image, use_multipart=False)

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(get, name)
    async with anyio.create_task_group() as tasks:
        for number, name in enumerate(names):
            other = images[names[number - 1]]
            tasks.start_soon(put, name, damaged(images[name], other, dice))


def contents(worker: Worker, blocks: Sequence[int]) -> bytes:
    return b"".join(map(worker.read, blocks))


def save_all(path: Path, keys: list[bytes]) -> dict[bytes, bytes]:
    """Store chunks of random bytes, as many at a time as the engine's memory holds."""
    per_step = BLOCKS // BLOCKS_PER_CHUNK
    rng = np.random.default_rng(1)
    saved: dict[bytes, bytes] = {}
    with Worker(path, num_blocks=BLOCKS) as worker:
        for step in range(0, len(keys), per_step):
            worker.memory[:] = rng.integers(0, 256, worker.memory.size, dtype=np.uint8)
            part = keys[step : step + per_step]
            chunks = [
                worker.chunk(key, range(at * BLOCKS_PER_CHUNK, (at + 1) * BLOCKS_PER_CHUNK))
                for at, key in enumerate(part)
            ]
            jobs = [StoreJob(step + at + 1, [chunk]) for at, chunk in enumerate(chunks)]
            worker.submit(stores=jobs)
            assert all(worker.outcome(job.job_id) is Outcome.OK for job in jobs)
            saved |= {chunk.key: contents(worker, chunk.block_ids) for chunk in chunks}
    return saved


@pytest.mark.parametrize(
    "chunks", [CHUNKS, pytest.param(CHUNKS_NIGHTLY, marks=pytest.mark.nightly)]
)
def test_no_corruption_is_served(seaweed: S3Server, short_directory: Path, chunks: int) -> None:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    keys = [key_of("damaged", seed, number) for number in range(chunks)]
    intact = key_of("intact", seed)
    prefix = f"corrupt-{seed}"
    store = {"url": seaweed.url, "prefix": prefix, "refresh_seconds": 0.1, **seaweed.settings}

    def sidecar(name: str) -> RunningSidecar:
        directory = short_directory / name
        directory.mkdir()
        host = {"size": 128 << 20}
        return RunningSidecar(config_in(directory, store=store, host=host))

    with sidecar("writer") as writer:
        saved = save_all(writer.path, [*keys, intact])
        writer.wait_until(lambda now: now["counters"]["chunks_written"] == chunks + 1)
    client = ObstoreClient(f"{seaweed.url}/{prefix}", seaweed.access_at()).client

    async def damage() -> None:
        import obstore

        found = [one["path"] async for part in obstore.list(client) for one in part]
        names = [name for name in found if any(f"/{key.hex()}/" in name for key in keys)]
        assert len(names) == chunks
        await damage_all(client, sorted(names), dice)

    anyio.run(damage)
    with sidecar("reader") as reader, Worker(reader.path) as worker:
        with Scheduler(reader.path) as scheduler:
            reader.wait_until(lambda now: now["tiers"]["store"]["chunks"] == chunks + 1)
            assert set(scheduler.flags(*keys)) == {FLAG_STORE}
            ready = [
                key
                for number, key in enumerate([*keys, intact])
                if scheduler.lookup(number + 1, [key], 10_000).ready
            ]
            assert intact in ready
            assert len(ready) < chunks / 2
            flags = dict(zip(keys, scheduler.flags(*keys), strict=True))
            assert {key for key in keys if flags[key] & FLAG_HOST} == {*ready} - {intact}
        blocks = range(BLOCKS_PER_CHUNK)
        for number, key in enumerate(ready):
            worker.poison()
            assert worker.load(number + 1, key, blocks) is Outcome.OK
            assert contents(worker, blocks) == saved[key]
        lost = next(key for key in keys if key not in ready)
        assert worker.load(chunks + 2, lost, blocks) is Outcome.MISSING
        now = reader.wait_until(
            lambda now: now["counters"]["quarantined_store"] == now["counters"]["reads_corrupt"]
        )["counters"]
        assert now["chunks_read"] == len(ready)
        # A descriptor that was damaged may name another format.
        assert now["reads_corrupt"] + now["reads_unreadable"] == chunks + 1 - len(ready)
