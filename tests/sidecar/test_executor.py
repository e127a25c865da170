"""The executor: what becomes of each command, with a store that works and with one that fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from sidecar.catalog.service import Catalogs
from sidecar.config.sections import LimitsSettings
from sidecar.config.store import StoreSettings
from sidecar.core.commands import (
    Copied,
    Event,
    IndexOffer,
    IndexSet,
    Quarantine,
    Read,
    ReadDone,
    StoreOutcome,
    Write,
    Written,
)
from sidecar.data.copies import Copies
from sidecar.data.executor import Executor
from sidecar.data.transfer_times import TransferTimes
from sidecar.protocol import Outcome
from sidecar.sessions.namespaces import RankLayout
from tests.sidecar.bench import LAYOUT, Bench, until
from tests.sidecar.client import key_of
from tiers.catalog.names import object_name
from tiers.errors import ChunkMissing, ImageTruncated, TierUnavailable
from tiers.kv.index import IndexWriter
from tiers.kv.slot_image import SlotTemplates
from tiers.store.object_tier import ObjectTier, UrlObjects


def objects_in(directory: Path) -> list[Path]:
    return list(directory.rglob("*.arrow"))


def rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    source.rename(target)


class Broken:
    """A store that fails in a chosen way."""

    url = "broken://"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getattr__(self, name: str) -> Any:
        async def verb(*_: object, **__: object) -> None:
            raise self.error

        return verb


@asynccontextmanager
async def moving(bench: Bench, store: ObjectTier) -> AsyncIterator[Executor]:
    work = Copies(bench.pool, 1, bench.told.extend, TransferTimes(8))
    executor = Executor(
        realms=bench.realms,
        sessions=bench.sessions,
        pool=bench.pool,
        store=store,
        catalogs=Catalogs(store, StoreSettings(url="memory://", catalog_flush=60.0)),
        copies=work,
        limits=LimitsSettings(load_deadline=60.0, store_deadline=60.0, lease_ttl=60.0),
        feed=bench.told.append,
        reply=lambda *_: None,
        index_moved=lambda _: None,
        store_failed=lambda _: None,
    )
    async with anyio.create_task_group() as tasks:
        executor.tasks = tasks
        tasks.start_soon(work.run)
        yield executor
        tasks.cancel_scope.cancel()


async def told(bench: Bench, count: int) -> Event:
    await until(lambda: len(bench.told) >= count)
    assert len(bench.told) == count
    return bench.told[-1]


async def test_written_object_is_read_into_another_slot(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        executor.execute([bench.gather(0, blocks=2)])
        await told(bench, 1)
        executor.execute([Write(1, 1, 0, bench.slot(0), key_of(0), 2)])
        size = bench.rank.templates[2].image_bytes
        event = await told(bench, 2)
        assert isinstance(event, Written)
        assert event.written_at > 0
        assert event == Written(1, StoreOutcome.OK, size, event.written_at)
        executor.execute([Read(2, 1, 0, bench.slot(3), key_of(0), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.OK, 2, bytes(32), size)
        first, second = (bench.pool[bench.slot(n) :][:size] for n in (0, 3))
        assert np.array_equal(first, second)


@pytest.mark.parametrize("fits", [True, False])
async def test_an_object_in_blocks_of_another_size_becomes_this_ranks_own(
    bench: Bench, tmp_path: Path, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(bench.rank.layout, encoding="plain+token")
    other = replace(own, block_tokens=own.block_tokens * 2, blocks_per_chunk=2)
    digest = bench.realm.namespace_digest
    rank = bench.realm.ranks[0] = RankLayout(own, SlotTemplates(own, digest))
    values = np.random.default_rng(2).integers(0, 256, (4, 3, 4, 16, 64), dtype=np.uint8)
    assert values.size == own.payload_bytes(4)
    wide = values.reshape(2, 2, *values.shape[1:]).transpose(0, 2, 3, 1, 4, 5)
    images: list[npt.NDArray[np.uint8]] = []
    for templates, payload in (
        (rank.templates[4], values),
        (SlotTemplates(other, digest)[2], wide),
    ):
        image = np.zeros(templates.image_bytes, dtype=np.uint8)
        templates.prepare(image)
        templates.payload(image)[:] = payload.reshape(-1)
        templates.seal(image, key_of(0), bytes(32), bytes(4 * 64))
        images.append(image)
    store = UrlObjects(f"file://{tmp_path}")
    await store.write(object_name(digest, key_of(0), own.segment), images[1])
    if not fits:
        # As a longer header would have it: the slot has no room for it.
        read = store.read

        async def narrow(name: str, into: npt.NDArray[np.uint8], **_: object) -> int:
            if into.size <= rank.templates.slot_bytes:
                raise ImageTruncated("does not fit")
            return await read(name, into)

        monkeypatch.setattr(store, "read", narrow)
    async with moving(bench, store) as executor:
        executor.execute([Read(1, 1, 0, bench.slot(1), key_of(0), (0,))])
        done = ReadDone(1, StoreOutcome.OK, 4, bytes(32), images[1].size)
        assert await told(bench, 1) == done
        assert np.array_equal(bench.pool[bench.slot(1) :][: images[0].size], images[0])
        images[1][images[1].size // 2] ^= 1
        await store.write(object_name(digest, key_of(0), own.segment), images[1])
        executor.execute([Read(2, 1, 0, bench.slot(2), key_of(0), (0,))])
        ended = await told(bench, 2)
        assert isinstance(ended, ReadDone)
        assert ended.outcome is StoreOutcome.CORRUPT, "its own segment, and nobody can read it"


async def test_corrupt_slot_is_not_written(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        executor.execute([bench.gather(0)])
        await told(bench, 1)
        bench.pool[5000] ^= 1
        executor.execute([Write(1, 1, 0, 0, key_of(0), 1)])
        assert await told(bench, 2) == Written(1, StoreOutcome.CORRUPT, 0)
    assert objects_in(tmp_path) == []


async def test_a_slot_damaged_before_a_write_that_does_not_look_is_found_by_its_reader(
    bench: Bench, tmp_path: Path
) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        executor.execute([bench.gather(0)])
        await told(bench, 1)
        bench.pool[5000] ^= 1
        executor.execute([Write(1, 1, 0, 0, key_of(0), 1, verify=False)])
        event = await told(bench, 2)
        assert isinstance(event, Written)
        assert event.outcome is StoreOutcome.OK
        executor.execute([Read(2, 1, 0, bench.slot(3), key_of(0), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.CORRUPT)


async def test_what_a_store_says_nothing_of_is_verified_when_it_is_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    read = store.read

    async def silent(name: str, into: npt.NDArray[np.uint8], **_: object) -> int:
        return await read(name, into)

    monkeypatch.setattr(store, "read", silent)
    async with moving(bench, store) as executor:
        for number in range(2):
            executor.execute([bench.gather(number)])
            await told(bench, 2 * number + 1)
            # The second is damaged.
            bench.pool[bench.slot(1) + 5000] ^= number
            write = Write(number, 1, 0, bench.slot(number), key_of(number), 1, verify=False)
            executor.execute([write])
            await told(bench, 2 * number + 2)
        size = bench.rank.templates[1].image_bytes
        for number, (outcome, num_bytes) in enumerate(
            [(StoreOutcome.OK, size), (StoreOutcome.CORRUPT, 0)]
        ):
            executor.execute([Read(number, 1, 0, bench.slot(3), key_of(number), (0,))])
            ended = await told(bench, 5 + number)
            assert isinstance(ended, ReadDone)
            assert (ended.outcome, ended.num_bytes) == (outcome, num_bytes)


@pytest.mark.parametrize("times", [1, 2], ids=["once", "otherwise each time"])
async def test_what_arrives_damaged_in_two_ways_is_no_fault_of_the_object(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    read, damages = store.read, list(range(times))

    async def garbling(name: str, into: npt.NDArray[np.uint8], **_: object) -> int:
        num_bytes = await read(name, into)
        if damages:
            into[5000] ^= 1 << damages.pop()
        return num_bytes

    monkeypatch.setattr(store, "read", garbling)
    async with moving(bench, store) as executor:
        executor.execute([bench.gather(0)])
        await told(bench, 1)
        executor.execute([Write(1, 1, 0, 0, key_of(0), 1)])
        await told(bench, 2)
        executor.execute([Read(2, 1, 0, bench.slot(3), key_of(0), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.UNAVAILABLE, garbled=True)
        assert not damages
        executor.execute([Read(3, 1, 0, bench.slot(3), key_of(0), (0,))])
        ended = await told(bench, 4)
        assert isinstance(ended, ReadDone)
        assert ended.outcome is StoreOutcome.OK


async def test_object_under_a_wrong_name_is_corrupt(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        executor.execute([bench.gather(0)])
        await told(bench, 1)
        executor.execute([Write(1, 1, 0, 0, key_of(0), 1)])
        await told(bench, 2)
        segment = LAYOUT.segment
        digest = bench.realm.namespace_digest
        right, wrong = (tmp_path / object_name(digest, key_of(n), segment) for n in (0, 1))
        rename(right, wrong)
        executor.execute([Read(2, 1, 0, bench.slot(2), key_of(1), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.CORRUPT)
        executor.execute([Quarantine(1, 0, key_of(1))])
        await until(lambda: not wrong.exists())
        executor.execute([Read(3, 1, 0, bench.slot(2), key_of(1), (0,))])
        assert await told(bench, 4) == ReadDone(3, StoreOutcome.MISSING)


@pytest.mark.promise("failures-are-events")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (TierUnavailable("down", retryable=True), StoreOutcome.UNAVAILABLE),
        (ChunkMissing("none"), StoreOutcome.MISSING),
        (RuntimeError("a bug in a client library"), StoreOutcome.UNAVAILABLE),
    ],
)
async def test_every_failure_of_the_store_ends_in_an_event(
    bench: Bench, error: Exception, outcome: StoreOutcome
) -> None:
    async with moving(bench, cast("ObjectTier", Broken(error))) as executor:
        executor.execute([Read(1, 1, 0, bench.slot(1), key_of(1), (0,))])
        assert await told(bench, 1) == ReadDone(1, outcome)
        executor.execute([bench.gather(0)])
        await told(bench, 2)
        executor.execute([Write(2, 1, 0, 0, key_of(0), 1), Quarantine(1, 0, key_of(0))])
        assert await told(bench, 3) == Written(2, StoreOutcome.UNAVAILABLE, 0)


async def test_copies_of_a_session_that_is_gone_are_revoked(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        bench.sessions.close(bench.session)
        executor.execute([bench.gather(0), IndexSet(1, key_of(0), in_host=True, in_store=False)])
        ended = await told(bench, 1)
        assert isinstance(ended, Copied)
        assert ended.outcome is Outcome.REVOKED


async def test_an_index_grows_beside_the_other_commands(bench: Bench, tmp_path: Path) -> None:
    bench.realm.index.close()
    smaller = bench.realm.index = IndexWriter(1000)
    count = smaller.capacity_entries + 1
    keys = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as executor:
        executor.execute([IndexOffer(bench.realm.realm_id, keys)])
        assert bench.realm.index is smaller
        with anyio.fail_after(60):
            await executor.indexes.settled(bench.realm)
    assert bench.realm.index.slots == 2 * smaller.slots
    assert len(bench.realm.index) == count
