"""Copies and the mover: order, fences, locks, and how each command ends."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from sidecar import copies, copyqueue, indexing
from sidecar.catalogs import Catalogs
from sidecar.commands import (
    Copied,
    CopyOutcome,
    Event,
    Gather,
    IndexOffer,
    IndexSet,
    Quarantine,
    Read,
    ReadDone,
    Scatter,
    StoreOutcome,
    Write,
    Written,
)
from sidecar.copies import Copies
from sidecar.copyqueue import Group
from sidecar.memory import HostRegion, WorkerMemory, take_memory
from sidecar.mover import Mover
from sidecar.protocol import Role
from sidecar.realms import Rank, Realm, Realms
from sidecar.session import Session, Sessions
from tests.sidecar.client import attach_message, key_of, layout_of
from tiers.arrow import SlotTemplates
from tiers.catalog.names import object_name
from tiers.errors import ChunkMissing, ImageTruncated, TierUnavailable
from tiers.fence import PAGE_BYTES, WorkerFence
from tiers.index import IndexWriter
from tiers.memfd import sealed_memfd
from tiers.objects import ObjectTier, UrlObjects

SLOTS = 8
LAYOUT = layout_of(num_blocks=16)


async def until(true: Callable[[], bool]) -> None:
    """Poll: what is waited for is seen through its effects, as its callers see it."""
    with anyio.fail_after(10):
        while not true():  # noqa: ASYNC110
            await anyio.sleep(0.001)


def is_mapped(bench: Bench) -> bool:
    return bench.memory.mapped


def objects_in(directory: Path) -> list[Path]:
    return list(directory.rglob("*.arrow"))


def rename(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    source.rename(target)


@dataclass
class Bench:
    """A session with memory and a pool of slots, without sockets."""

    realms: Realms
    realm: Realm
    rank: Rank
    memory: WorkerMemory
    session: Session
    fence: WorkerFence
    bytes: npt.NDArray[np.uint8]
    pool: npt.NDArray[np.uint8]
    sessions: Sessions
    ended: list[Copied] = field(default_factory=list[Copied])
    told: list[Event] = field(default_factory=list[Event])

    def slot(self, number: int) -> int:
        return number * self.rank.templates.slot_bytes

    def gather(self, number: int, *, job: int = 1, fence: int = 0, blocks: int = 1) -> Gather:
        tokens = bytes(4 * blocks * LAYOUT.block_tokens)
        ids = tuple(range(number, number + blocks))
        key = key_of(number)
        return Gather(number, 1, job, fence, 1, 0, self.slot(number), key, bytes(32), tokens, ids)

    def scatter(self, number: int, target: int, *, job: int = 2, fence: int = 0) -> Scatter:
        return Scatter(
            100 + number, 1, job, fence, 1, 0, self.slot(number), key_of(number), 1, 0, (target,)
        )

    def group(self, *commands: Gather | Scatter, seconds: float = 60) -> Group:
        return Group(self.session, self.memory, self.rank, commands, time.monotonic() + seconds)

    async def wait(self, count: int) -> dict[int, CopyOutcome]:
        await until(lambda: len(self.ended) >= count)
        return {event.copy_id: event.outcome for event in self.ended}


@pytest.fixture
def bench() -> Iterator[Bench]:
    fence = WorkerFence()
    memory_fd = sealed_memfd("kv", LAYOUT.size_bytes)
    attach = attach_message(Role.WORKER, LAYOUT)
    memory = take_memory(attach, [os.dup(memory_fd), os.dup(fence.fd)])
    assert memory is not None
    view: npt.NDArray[np.uint8] = np.memmap(f"/proc/self/fd/{memory_fd}", dtype=np.uint8, mode="r+")
    view[:] = np.random.default_rng(1).integers(0, 256, view.size, dtype=np.uint8)
    realms = Realms()
    (realm,) = realms.join(attach.parts)
    realm.learn(0, LAYOUT.chunk(attach.blocks_per_chunk))
    sessions = Sessions(8)
    connection = cast("Any", None)
    session = sessions.open(attach, connection, (realm,), memory)
    rank = realm.ranks[0]
    pool = np.zeros(SLOTS * rank.templates.slot_bytes, dtype=np.uint8)
    yield Bench(realms, realm, rank, memory, session, fence, view, pool, sessions)
    sessions.close(session)
    assert not memory.mapped
    realms.close()
    fence.close()
    os.close(memory_fd)


@asynccontextmanager
async def running(bench: Bench, threads: int = 1) -> AsyncIterator[Copies]:
    work = Copies(bench.pool, threads, bench.ended.extend)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.run)
        yield work
        tasks.cancel_scope.cancel()


async def test_gathered_slots_verify_and_scatter_back(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, blocks=4), bench.gather(4, blocks=2)))
        assert set((await bench.wait(2)).values()) == {CopyOutcome.OK}
        template = bench.rank.templates[4]
        meta = template.verify(bench.pool[: template.image_bytes], key_of(0))
        assert meta.num_blocks == 4
        work.add(bench.group(Scatter(9, 1, 2, 0, 1, 0, 0, key_of(0), 4, 1, (10, 11, 12))))
        assert (await bench.wait(3))[9] is CopyOutcome.OK
        for source, target in ((1, 10), (2, 11), (3, 12)):
            places = [LAYOUT.offset(2, block, 3, 15) for block in (source, target)]
            first, second = (bench.bytes[place : place + 64] for place in places)
            assert np.array_equal(first, second)


async def test_fence_that_is_never_reached_expires_at_the_deadline(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, fence=3), seconds=0.02))
        work.add(bench.group(bench.gather(1, fence=3, job=2)))
        assert await bench.wait(1) == {0: CopyOutcome.EXPIRED}
        assert "fence 3" in bench.ended[0].detail
        bench.fence.signal(3)
        assert (await bench.wait(2))[1] is CopyOutcome.OK
        assert work.pending == 0


async def test_loads_overtake_stores_but_do_not_starve_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copyqueue, "LOADS_IN_A_ROW_MAX", 2)
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0)))
        await bench.wait(1)
        # All wait for one fence, so that they become ready together, stores first in the queue.
        for number in (1, 2):
            work.add(bench.group(bench.gather(number, fence=1)))
        for number in range(5):
            load = Scatter(200 + number, 1, 2, 1, 1, 0, 0, key_of(0), 1, 0, (number + 8,))
            work.add(bench.group(load))
        bench.fence.signal(1)
        await bench.wait(8)
    order = [event.copy_id for event in bench.ended[1:]]
    assert order == [200, 201, 1, 202, 203, 2, 204]


async def test_sessions_take_turns(bench: Bench) -> None:
    """One session's backlog delays another's next copy by one copy."""
    other = bench.sessions.open(
        attach_message(Role.WORKER, LAYOUT, engine_id="other"),
        cast("Any", None),
        (bench.realm,),
        bench.memory,
    )
    async with running(bench) as work:
        for number in range(6):
            work.add(bench.group(bench.gather(number, fence=1)))
        for number in (6, 7):
            group = bench.group(bench.gather(number, fence=1))
            group.session = other
            work.add(group)
        bench.fence.signal(1)
        await bench.wait(8)
    assert [event.copy_id for event in bench.ended] == [0, 6, 1, 7, 2, 3, 4, 5]


async def test_a_copy_whose_turn_comes_too_late_does_not_start(bench: Bench) -> None:
    before = bench.pool.copy()
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), seconds=-1))
        assert await bench.wait(1) == {0: CopyOutcome.EXPIRED}
    assert np.array_equal(before, bench.pool)


async def test_no_copy_starts_while_the_worker_waits_to_revoke(bench: Bench) -> None:
    with bench.memory.fence.copying(1):
        assert not bench.fence.try_revoke(2)
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0)))
        work.add(bench.group(bench.gather(1, job=2)))
        await anyio.sleep(0.02)
        assert not bench.ended
        assert bench.fence.try_revoke(2)
        assert await bench.wait(2) == {0: CopyOutcome.REVOKED, 1: CopyOutcome.OK}


async def test_large_stores_are_cut_into_hops(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "HOP_BYTES_MAX", 2 * LAYOUT.chunk(4).payload_bytes(4))
    async with running(bench) as work:
        work.add(bench.group(*(bench.gather(number) for number in range(5))))
        assert work.pending == 3
        assert set((await bench.wait(5)).values()) == {CopyOutcome.OK}


async def test_revoked_group_touches_nothing(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bench.gather(1)))
        await bench.wait(2)
        before = bench.bytes.copy()
        assert bench.fence.try_revoke(3)
        work.add(bench.group(bench.scatter(0, 9), bench.scatter(1, 8)))
        ended = await bench.wait(4)
        assert ended[100] is ended[101] is CopyOutcome.REVOKED
        assert np.array_equal(before, bench.bytes)


async def test_worker_stopped_while_it_revokes_holds_up_nobody(bench: Bench) -> None:
    lock = os.open(f"/proc/self/fd/{bench.fence.fd}", os.O_RDWR)
    kind = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, 0, 0, PAGE_BYTES, 0)
    fcntl.fcntl(lock, 37, kind)
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), seconds=0.02))
        assert await bench.wait(1) == {0: CopyOutcome.EXPIRED}
        work.add(bench.group(bench.gather(1)))
        await anyio.sleep(0.02)
        assert len(bench.ended) == 1
        os.close(lock)
        assert (await bench.wait(2))[1] is CopyOutcome.OK


async def test_bad_blocks_fail_alone(bench: Bench) -> None:
    bad = Gather(5, 1, 1, 0, 1, 0, bench.slot(5), key_of(5), bytes(32), bytes(64), (999,))
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bad, bench.gather(1)))
        ended = await bench.wait(3)
    assert ended == {0: CopyOutcome.OK, 5: CopyOutcome.FAILED, 1: CopyOutcome.OK}


async def test_corrupt_chunk_makes_a_miss_of_the_whole_job(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bench.gather(1)))
        await bench.wait(2)
        bench.pool[bench.slot(1) + 5000] ^= 1
        work.add(bench.group(bench.scatter(0, 9), bench.scatter(1, 8)))
        ended = await bench.wait(4)
    # Its blocks hold whatever was copied; the engine reads none of them before computing them.
    assert ended[100] is CopyOutcome.FAILED
    assert ended[101] is CopyOutcome.CORRUPT


async def test_end_of_session_revokes_what_has_not_started(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, fence=9), bench.gather(1, fence=9)))
        bench.sessions.close(bench.session)
        work.drop(bench.session)
        assert set((await bench.wait(2)).values()) == {CopyOutcome.REVOKED}
        assert work.pending == 0
        assert not bench.memory.mapped


async def test_memory_stays_while_a_copy_uses_it(bench: Bench) -> None:
    with bench.memory.in_use() as mapped:
        assert mapped
        bench.sessions.close(bench.session)
        assert is_mapped(bench)
        assert isinstance(bench.memory.region, HostRegion)
        assert bench.memory.region.view[0] == bench.bytes[0]
    assert not is_mapped(bench)
    with bench.memory.in_use() as mapped:
        assert not mapped


async def test_idle_copier_holds_no_memory(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0)))
        work.add(bench.group(bench.gather(1)))
        await bench.wait(2)
        await until(lambda: work.pending == 0)
        bench.sessions.close(bench.session)
        assert not bench.memory.mapped, "copier and thread are idle, and must have let go"


# --- the mover and the store ---------------------------------------------------------------------


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
async def moving(bench: Bench, store: ObjectTier) -> AsyncIterator[Mover]:
    work = Copies(bench.pool, 1, bench.told.extend)
    mover = Mover(
        realms=bench.realms,
        sessions=bench.sessions,
        pool=bench.pool,
        store=store,
        catalogs=Catalogs(store, rows_max=1000, flush_seconds=60),
        copies=work,
        load_deadline_seconds=5,
        store_deadline_seconds=5,
        feed=bench.told.append,
        reply=lambda *_: None,
        index_moved=lambda _: None,
        store_failed=None,
    )
    async with anyio.create_task_group() as tasks:
        await tasks.start(mover.run)
        tasks.start_soon(work.run)
        yield mover
        tasks.cancel_scope.cancel()


async def told(bench: Bench, count: int) -> Event:
    await until(lambda: len(bench.told) >= count)
    assert len(bench.told) == count
    return bench.told[-1]


async def test_written_object_is_read_into_another_slot(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        mover.execute([bench.gather(0, blocks=2)])
        await told(bench, 1)
        mover.execute([Write(1, 1, 0, bench.slot(0), key_of(0), 2)])
        size = bench.rank.templates[2].image_bytes
        event = await told(bench, 2)
        assert isinstance(event, Written)
        assert event.written_at > 0
        assert event == Written(1, StoreOutcome.OK, size, event.written_at)
        mover.execute([Read(2, 1, 0, bench.slot(3), key_of(0), (0,))])
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
    rank = bench.realm.ranks[0] = Rank(own, SlotTemplates(own, digest))
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
    async with moving(bench, store) as mover:
        mover.execute([Read(1, 1, 0, bench.slot(1), key_of(0), (0,))])
        done = ReadDone(1, StoreOutcome.OK, 4, bytes(32), images[1].size)
        assert await told(bench, 1) == done
        assert np.array_equal(bench.pool[bench.slot(1) :][: images[0].size], images[0])
        images[1][images[1].size // 2] ^= 1
        await store.write(object_name(digest, key_of(0), own.segment), images[1])
        mover.execute([Read(2, 1, 0, bench.slot(2), key_of(0), (0,))])
        ended = await told(bench, 2)
        assert isinstance(ended, ReadDone)
        assert ended.outcome is StoreOutcome.CORRUPT, "its own segment, and nobody can read it"


async def test_corrupt_slot_is_not_written(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        mover.execute([bench.gather(0)])
        await told(bench, 1)
        bench.pool[5000] ^= 1
        mover.execute([Write(1, 1, 0, 0, key_of(0), 1)])
        assert await told(bench, 2) == Written(1, StoreOutcome.CORRUPT, 0)
    assert objects_in(tmp_path) == []


async def test_a_slot_damaged_before_a_write_that_does_not_look_is_found_by_its_reader(
    bench: Bench, tmp_path: Path
) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        mover.execute([bench.gather(0)])
        await told(bench, 1)
        bench.pool[5000] ^= 1
        mover.execute([Write(1, 1, 0, 0, key_of(0), 1, verify=False)])
        event = await told(bench, 2)
        assert isinstance(event, Written)
        assert event.outcome is StoreOutcome.OK
        mover.execute([Read(2, 1, 0, bench.slot(3), key_of(0), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.CORRUPT)


async def test_what_a_store_says_nothing_of_is_verified_when_it_is_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UrlObjects(f"file://{tmp_path}")
    read = store.read

    async def silent(name: str, into: npt.NDArray[np.uint8], **_: object) -> int:
        return await read(name, into)

    monkeypatch.setattr(store, "read", silent)
    async with moving(bench, store) as mover:
        for number in range(2):
            mover.execute([bench.gather(number)])
            await told(bench, 2 * number + 1)
            # The second is damaged.
            bench.pool[bench.slot(1) + 5000] ^= number
            write = Write(number, 1, 0, bench.slot(number), key_of(number), 1, verify=False)
            mover.execute([write])
            await told(bench, 2 * number + 2)
        size = bench.rank.templates[1].image_bytes
        for number, (outcome, num_bytes) in enumerate(
            [(StoreOutcome.OK, size), (StoreOutcome.CORRUPT, 0)]
        ):
            mover.execute([Read(number, 1, 0, bench.slot(3), key_of(number), (0,))])
            ended = await told(bench, 5 + number)
            assert isinstance(ended, ReadDone)
            assert (ended.outcome, ended.num_bytes) == (outcome, num_bytes)


async def test_object_under_a_wrong_name_is_corrupt(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        mover.execute([bench.gather(0)])
        await told(bench, 1)
        mover.execute([Write(1, 1, 0, 0, key_of(0), 1)])
        await told(bench, 2)
        segment = LAYOUT.segment
        digest = bench.realm.namespace_digest
        right, wrong = (tmp_path / object_name(digest, key_of(n), segment) for n in (0, 1))
        rename(right, wrong)
        mover.execute([Read(2, 1, 0, bench.slot(2), key_of(1), (0,))])
        assert await told(bench, 3) == ReadDone(2, StoreOutcome.CORRUPT)
        mover.execute([Quarantine(1, 0, key_of(1))])
        await until(lambda: not wrong.exists())
        mover.execute([Read(3, 1, 0, bench.slot(2), key_of(1), (0,))])
        assert await told(bench, 4) == ReadDone(3, StoreOutcome.MISSING)


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
    async with moving(bench, cast("ObjectTier", Broken(error))) as mover:
        mover.execute([Read(1, 1, 0, bench.slot(1), key_of(1), (0,))])
        assert await told(bench, 1) == ReadDone(1, outcome)
        mover.execute([bench.gather(0)])
        await told(bench, 2)
        mover.execute([Write(2, 1, 0, 0, key_of(0), 1), Quarantine(1, 0, key_of(0))])
        assert await told(bench, 3) == Written(2, StoreOutcome.UNAVAILABLE, 0)


async def test_copies_of_a_session_that_is_gone_are_revoked(bench: Bench, tmp_path: Path) -> None:
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        bench.sessions.close(bench.session)
        mover.execute([bench.gather(0), IndexSet(1, key_of(0), in_host=True, in_store=False)])
        ended = await told(bench, 1)
        assert isinstance(ended, Copied)
        assert ended.outcome is CopyOutcome.REVOKED


async def test_a_large_index_grows_beside_the_other_commands(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "SLOTS_AT_ONCE_MAX", 1024)
    bench.realm.index.close()
    smaller = bench.realm.index = IndexWriter(1000)
    count = smaller.capacity_entries + 1
    keys = np.random.default_rng(1).integers(0, 256, (count, 32), dtype=np.uint8)
    async with moving(bench, UrlObjects(f"file://{tmp_path}")) as mover:
        mover.execute([IndexOffer(bench.realm.realm_id, keys)])
        assert bench.realm.index is smaller
        with anyio.fail_after(60):
            await mover.indexing.settled(bench.realm)
    assert bench.realm.index.slots == 2 * smaller.slots
    assert len(bench.realm.index) == count
