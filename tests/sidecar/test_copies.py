"""Copies between engines and slots: order, fences, locks, and how each ends."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import numpy as np
import pytest

from sidecar.core.commands import (
    Gather,
    Scatter,
)
from sidecar.data.copies import Copies, gather_group
from sidecar.data.copy_queue import CopyGroup
from sidecar.data.transfer_times import TransferTimes
from sidecar.protocol import Outcome, Role
from sidecar.sessions.worker_memory import HostMapping
from tests import places
from tests.offsets import offset_of
from tests.sidecar.bench import LAYOUT, Bench, until
from tests.sidecar.client import attach_message, key_of
from tiers.kv.fence import PAGE_BYTES
from tiers.store.client import run_to_end


def is_mapped(bench: Bench) -> bool:
    return bench.memory.mapping.mapped


@asynccontextmanager
async def running(bench: Bench, threads: int = 1) -> AsyncIterator[Copies]:
    work = Copies(bench.pool, threads, bench.ended.extend, TransferTimes(8))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(work.run)
        yield work
        tasks.cancel_scope.cancel()


async def test_gathered_slots_verify_and_scatter_back(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, blocks=4), bench.gather(4, blocks=2)))
        assert set((await bench.wait(2)).values()) == {Outcome.OK}
        template = bench.rank.templates[4]
        meta = template.verify(bench.pool[: template.image_bytes], key_of(0))
        assert meta.num_blocks == 4
        work.add(bench.group(Scatter(9, 1, 2, 0, 1, 0, 0, key_of(0), (10, 11, 12), 4, 1)))
        assert (await bench.wait(3))[9] is Outcome.OK
        for source, target in ((1, 10), (2, 11), (3, 12)):
            places = [offset_of(LAYOUT, 2, block, 3, 15) for block in (source, target)]
            first, second = (bench.bytes[place : place + 64] for place in places)
            assert np.array_equal(first, second)


async def test_a_copy_does_not_stand_behind_others_where_work_for_the_store_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    found = list[int]()
    gather = gather_group

    def noted(group: CopyGroup, pool: Any) -> Any:
        found.append(niceness())
        return gather(group, pool)

    places.patch(monkeypatch, "gather_group", noted)
    async with running(bench) as work:
        # Its thread is free then, and would be the one to be used again.
        assert await run_to_end(niceness, anyio.CapacityLimiter(1)) > niceness()
        work.add(bench.group(bench.gather(0)))
        assert set((await bench.wait(1)).values()) == {Outcome.OK}
    assert found == [niceness()]


async def test_fence_that_is_never_reached_expires_at_the_deadline(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, fence=3), seconds=0.02))
        work.add(bench.group(bench.gather(1, fence=3, job=2)))
        assert await bench.wait(1) == {0: Outcome.EXPIRED}
        assert "fence 3" in bench.ended[0].detail
        bench.fence.signal(3)
        assert (await bench.wait(2))[1] is Outcome.OK
        assert len(work.queue) == 0


async def test_loads_overtake_stores_but_do_not_starve_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "LOADS_IN_A_ROW_MAX", 2)
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0)))
        await bench.wait(1)
        # All wait for one fence, so that they become ready together, stores first in the queue.
        for number in (1, 2):
            work.add(bench.group(bench.gather(number, fence=1)))
        for number in range(5):
            load = Scatter(200 + number, 1, 2, 1, 1, 0, 0, key_of(0), (number + 8,), 1, 0)
            work.add(bench.group(load))
        bench.fence.signal(1)
        await bench.wait(8)
    order = [one for event in bench.ended[1:] for one in event.copy_ids]
    assert order == [200, 201, 1, 202, 203, 2, 204]


@pytest.mark.promise("share-of-copies")
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
    assert [one for event in bench.ended for one in event.copy_ids] == [0, 6, 1, 7, 2, 3, 4, 5]


async def test_a_copy_whose_turn_comes_too_late_does_not_start(bench: Bench) -> None:
    before = bench.pool.copy()
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), seconds=-1))
        assert await bench.wait(1) == {0: Outcome.EXPIRED}
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
        assert await bench.wait(2) == {0: Outcome.REVOKED, 1: Outcome.OK}


async def test_large_stores_are_cut_into_parts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "STORE_BYTES_MAX", 2 * LAYOUT.chunk(4).payload_bytes(4))
    async with running(bench) as work:
        work.add(bench.group(*(bench.gather(number) for number in range(5))))
        assert len(work.queue) == 3
        assert set((await bench.wait(5)).values()) == {Outcome.OK}


class TestALoadThatSeveralThreadsCopy:
    """Four chunks in host memory, and a load of them."""

    @pytest.fixture(autouse=True)
    def _parts_of_a_chunk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        places.patch(monkeypatch, "LOAD_BYTES_MIN", 1)

    @staticmethod
    async def stored(bench: Bench, work: Copies) -> None:
        work.add(bench.group(*(bench.gather(number) for number in range(4))))
        await bench.wait(4)

    @staticmethod
    def load(bench: Bench, *, job: int = 2, fence: int = 0) -> CopyGroup:
        loads = (bench.scatter(number, number + 8, job=job, fence=fence) for number in range(4))
        return bench.group(*loads)

    async def test_each_free_thread_gets_a_part(self, bench: Bench) -> None:
        async with running(bench, threads=2) as work:
            await self.stored(bench, work)
            work.add(self.load(bench, fence=1))
            assert work.queue.loads == 2
            bench.fence.signal(1)
            ended = await bench.wait(8)
        assert set(ended.values()) == {Outcome.OK}
        for layer, head, token in ((0, 0, 0), (2, 3, 15)):
            for number in range(4):
                source, target = (
                    offset_of(LAYOUT, layer, block, head, token) for block in (number, number + 8)
                )
                first, second = (bench.bytes[place : place + 64] for place in (source, target))
                assert np.array_equal(first, second)

    async def test_loads_that_find_no_free_thread_are_not_cut(self, bench: Bench) -> None:
        async with running(bench, threads=3) as work:
            await self.stored(bench, work)
            for number, loads in ((2, 2), (3, 3), (4, 4)):
                work.add(self.load(bench, job=number, fence=1))
                assert work.queue.loads == loads
            work.drop(bench.session)

    @pytest.mark.parametrize(
        ("threads", "chunks_min", "parts"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (4, 3, 2)]
    )
    async def test_there_is_a_part_for_each_thread_unless_it_were_too_small(
        self,
        bench: Bench,
        monkeypatch: pytest.MonkeyPatch,
        threads: int,
        chunks_min: int,
        parts: int,
    ) -> None:
        chunk_bytes = LAYOUT.chunk(4).payload_bytes(4)
        places.patch(monkeypatch, "LOAD_BYTES_MIN", chunks_min * chunk_bytes)
        async with running(bench, threads=threads) as work:
            await self.stored(bench, work)
            work.add(self.load(bench, fence=1))
            assert work.queue.loads == parts
            work.drop(bench.session)

    async def test_a_corrupt_chunk_makes_a_miss_of_its_part(self, bench: Bench) -> None:
        async with running(bench, threads=2) as work:
            await self.stored(bench, work)
            bench.pool[bench.slot(3) + 5000] ^= 1
            work.add(self.load(bench))
            ended = await bench.wait(8)
        outcomes = [ended[100 + number] for number in range(4)]
        assert outcomes == [Outcome.OK, Outcome.OK, Outcome.FAILED, Outcome.CORRUPT]


async def test_revoked_group_touches_nothing(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bench.gather(1)))
        await bench.wait(2)
        before = bench.bytes.copy()
        assert bench.fence.try_revoke(3)
        work.add(bench.group(bench.scatter(0, 9), bench.scatter(1, 8)))
        ended = await bench.wait(4)
        assert ended[100] is ended[101] is Outcome.REVOKED
        assert np.array_equal(before, bench.bytes)


async def test_worker_stopped_while_it_revokes_holds_up_nobody(bench: Bench) -> None:
    lock = os.open(f"/proc/self/fd/{bench.fence.fd}", os.O_RDWR)
    kind = struct.pack("hhxxxxqqixxxx", fcntl.F_WRLCK, 0, 0, PAGE_BYTES, 0)
    fcntl.fcntl(lock, 37, kind)
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), seconds=0.02))
        assert await bench.wait(1) == {0: Outcome.EXPIRED}
        work.add(bench.group(bench.gather(1)))
        await anyio.sleep(0.02)
        assert len(bench.ended) == 1
        os.close(lock)
        assert (await bench.wait(2))[1] is Outcome.OK


async def test_bad_blocks_fail_alone(bench: Bench) -> None:
    bad = Gather(5, 1, 1, 0, 1, 0, bench.slot(5), key_of(5), (999,), bytes(32), bytes(64))
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bad, bench.gather(1)))
        ended = await bench.wait(3)
    assert ended == {0: Outcome.OK, 5: Outcome.FAILED, 1: Outcome.OK}


async def test_corrupt_chunk_makes_a_miss_of_the_whole_job(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0), bench.gather(1)))
        await bench.wait(2)
        bench.pool[bench.slot(1) + 5000] ^= 1
        work.add(bench.group(bench.scatter(0, 9), bench.scatter(1, 8)))
        ended = await bench.wait(4)
    # Its blocks hold whatever was copied; the engine reads none of them before computing them.
    assert ended[100] is Outcome.FAILED
    assert ended[101] is Outcome.CORRUPT


async def test_end_of_session_revokes_what_has_not_started(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0, fence=9), bench.gather(1, fence=9)))
        bench.sessions.close(bench.session)
        work.drop(bench.session)
        assert set((await bench.wait(2)).values()) == {Outcome.REVOKED}
        assert len(work.queue) == 0
        await until(lambda: not is_mapped(bench))


async def test_memory_stays_while_a_copy_uses_it(bench: Bench) -> None:
    bench.memory.hold()
    bench.sessions.close(bench.session)
    assert is_mapped(bench)
    assert isinstance(bench.memory.mapping, HostMapping)
    assert bench.memory.mapping.view[0] == bench.bytes[0]
    bench.memory.release()
    await until(lambda: not is_mapped(bench))


async def test_memory_is_not_unmapped_on_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free the memory of a large engine that died takes seconds."""
    unmapping = threading.Event()
    unmap = places.find("HostMapping._unmap").value

    def slow(mapping: HostMapping) -> None:
        unmapping.wait()
        unmap(mapping)

    places.patch(monkeypatch, "HostMapping._unmap", slow)
    bench.sessions.close(bench.session)
    try:
        assert is_mapped(bench), "its engine waits for the end"
    finally:
        unmapping.set()
    await until(lambda: not is_mapped(bench))


async def test_idle_copier_holds_no_memory(bench: Bench) -> None:
    async with running(bench) as work:
        work.add(bench.group(bench.gather(0)))
        work.add(bench.group(bench.gather(1)))
        await bench.wait(2)
        await until(lambda: len(work.queue) == 0)
        bench.sessions.close(bench.session)
        # Copier and thread are idle, and must have let go.
        await until(lambda: not is_mapped(bench))
