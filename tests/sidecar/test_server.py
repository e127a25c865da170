"""The sidecar over its real sockets: what is stored and loaded, and its pages."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pyarrow as pa
import pytest

from sidecar.protocol import (
    LoadChunk,
    LoadJob,
    Outcome,
    StoreJob,
)
from sidecar.sessions.worker_memory import WorkerMemory
from tests import places
from tests.sidecar.bench import wait_for
from tests.sidecar.client import (
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.kv.index import FLAG_HOST
from tiers.pool.numa import PAGES_SAMPLED, memory_nodes


def test_load_gives_back_exactly_what_was_stored(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        key = key_of("chunk")
        content = worker.fill(range(4), seed=1)
        assert scheduler.flags(key) == [0]
        assert worker.store(1, key, [0, 1, 2, 3]) is Outcome.OK
        assert scheduler.flags(key) == [FLAG_HOST]

        worker.poison()
        scheduler.lease(2, [key])
        assert worker.load(2, key, [63, 7, 8, 20]) is Outcome.OK

        assert [worker.read(block) for block in (63, 7, 8, 20)] == content
        untouched = worker.memory.copy()
        for block in (63, 7, 8, 20):
            for place in worker.coordinates(block):
                untouched[place] = 0xEE
        assert (untouched == 0xEE).all(), "a load wrote beside its blocks"


def test_partial_chunks_and_parts_of_chunks(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        content = worker.fill(range(3), seed=2)
        assert worker.store(1, key_of("tail"), [2, 0, 1]) is Outcome.OK
        worker.poison()
        assert worker.load(2, key_of("tail"), [10, 11], first_block=1) is Outcome.OK
        assert [worker.read(10), worker.read(11)] == [content[0], content[1]]


def test_two_ranks_make_one_chunk(sidecar: RunningSidecar) -> None:
    key = key_of("tp2")
    cut: dict[str, Any] = {"world_size": 2, "topology": "tp2.pp1"}
    with (
        Worker(sidecar.path, rank=0, **cut) as first,
        Worker(sidecar.path, rank=1, **cut) as second,
        Scheduler(sidecar.path, **cut) as scheduler,
    ):
        contents = [worker.fill(range(4), seed=3) for worker in (first, second)]
        assert contents[0] != contents[1]
        assert first.store(1, key, range(4)) is Outcome.OK
        assert scheduler.flags(key) == [0], "half a chunk must not be offered"
        assert second.store(1, key, range(4)) is Outcome.OK
        assert scheduler.flags(key) == [FLAG_HOST]
        for worker, content in zip((first, second), contents, strict=True):
            worker.poison()
            assert worker.load(2, key, [40, 41, 42, 43]) is Outcome.OK
            assert [worker.read(block) for block in range(40, 44)] == content


def test_realms_do_not_see_each_other(sidecar: RunningSidecar) -> None:
    with (
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path, engine_id="other", namespace=b'{"model":"other"}') as other,
        Scheduler(sidecar.path, engine_id="cut", topology="pp1.tp1") as cut,
    ):
        assert worker.store(1, key_of("mine"), [0]) is Outcome.OK
        assert other.flags(key_of("mine")) == [0]
        assert cut.flags(key_of("mine")) == [0]
        assert other.attached.index_salt == worker.attached.index_salt
        assert cut.attached.index_salt != worker.attached.index_salt


def test_load_of_an_unknown_chunk_is_a_miss(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.poison()
        assert worker.load(1, key_of("never"), [0]) is Outcome.MISSING
        assert (worker.memory == 0xEE).all()


def test_jobs_wait_for_their_fence(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker:
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of("late"), [0])])], fence=5)
        worker.fence.signal(4)
        sidecar.wait_until(lambda now: now["pending"]["copies_running"] == 1)
        content = worker.fill([0], seed=4)
        worker.fence.signal(5)
        assert worker.outcome(1) is Outcome.OK
        assert worker.load(2, key_of("late"), [1]) is Outcome.OK
        assert worker.read(1) == content[0]


def test_revoked_jobs_touch_nothing(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        assert worker.store(1, key_of("kept"), [0]) is Outcome.OK
        worker.submit(
            stores=[StoreJob(2, [worker.chunk(key_of("void"), [1])])],
            loads=[LoadJob(3, [LoadChunk(key_of("kept"), 0, [2])])],
            fence=9,
        )
        assert worker.fence.try_revoke(4)
        worker.poison()
        worker.fence.signal(9)
        assert worker.outcome(2) is Outcome.REVOKED
        assert worker.outcome(3) is Outcome.REVOKED
        assert (worker.memory == 0xEE).all()
        assert scheduler.flags(key_of("void")) == [0]
        assert worker.load(4, key_of("kept"), [2]) is Outcome.OK, "later jobs are not void"


@pytest.mark.promise("damaged-slot")
def test_load_with_a_corrupt_slot_is_a_miss(sidecar: RunningSidecar, short_directory: Path) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path) as scheduler:
        good, bad = key_of("good"), key_of("bad")
        worker.fill(range(8), seed=5)
        marker = worker.read(6)
        assert worker.store(1, good, range(4)) is Outcome.OK
        assert worker.store(2, bad, [4, 5, 6, 7]) is Outcome.OK
        (pool,) = (short_directory / "pool").glob("*.pool")
        memory = np.memmap(pool, dtype=np.uint8, mode="r+")
        memory[memory.tobytes().index(marker) + 100] ^= 1
        worker.poison()
        worker.submit(loads=[LoadJob(3, [LoadChunk(good, 0, [0, 1]), LoadChunk(bad, 2, [2])])])
        assert worker.outcome(3) is Outcome.CORRUPT
        # Only blocks of the failed job may hold anything: the engine computes those again.
        rest = [block for block in range(worker.layout.num_blocks) if block not in (0, 1, 2)]
        assert all(set(worker.read(block)) == {0xEE} for block in rest)
        assert scheduler.flags(good, bad) == [FLAG_HOST, 0]


def test_index_grows_under_its_readers(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "INDEX_ENTRIES_FIRST", 8)
    keys = [key_of("many", number) for number in range(40)]
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        jobs = [StoreJob(n, [worker.chunk(key, [n])]) for n, key in enumerate(keys)]
        worker.submit(stores=jobs)
        assert {worker.outcome(number) for number in range(40)} == {Outcome.OK}
        before = scheduler.attached.index_bytes
        while scheduler.flags(*keys) != [FLAG_HOST] * 40:
            assert scheduler.take_moved_index().index_bytes > before
        with Scheduler(sidecar.path, engine_id="late") as late:
            assert late.flags(*keys) == [FLAG_HOST] * 40


def test_pages(sidecar: RunningSidecar) -> None:
    with Worker(sidecar.path) as worker, Scheduler(sidecar.path):
        assert worker.store(1, key_of(1), range(4)) is Outcome.OK
        assert sidecar.get("/healthz") == b"ok\n"
        assert json.loads(sidecar.get("/readyz"))["state"] == "ok"
        status = sidecar.status()
        assert {one["role"] for one in status["sessions"]} == {"worker", "scheduler"}
        assert {one["pid"] for one in status["sessions"]} == {os.getpid()}
        assert status["tiers"]["host"]["chunks"] == 1
        metrics = sidecar.get("/metrics").decode()
        assert "kvlake_chunks_stored_total 1.0" in metrics
        assert 'kvlake_sessions{role="worker"} 1.0' in metrics
        assert 'kvlake_chunks{tier="host"} 1.0' in metrics
        assert re.search(r"^kvlake_tasks [1-9]", metrics, re.MULTILINE)


def test_the_status_says_on_which_nodes_host_memory_is(short_directory: Path) -> None:
    config = config_in(short_directory, host={"numa": "off", "prefault": True})
    with RunningSidecar(config) as sidecar:
        told = sidecar.status()["tiers"]["host"]["numa"]
    assert (told["nodes"], told["reason"]) == ([], "host.numa is off")
    sampled = told["pages_sampled"]
    # A kernel that does not tell has none; one that does has a node for each of 64 pages.
    assert sum(sampled.values()) in (0, PAGES_SAMPLED)
    assert {int(node) for node in sampled} <= set(memory_nodes())


@pytest.mark.parametrize("room", [None, 1 << 40, 1 << 10])
def test_kv_memory_is_mapped_ahead_if_the_container_has_room(
    short_directory: Path,
    room: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its pages count for the container of the sidecar; beyond its limit the kernel kills it."""
    places.patch(monkeypatch, "cgroup_room", lambda: (room, "the cgroup /a"))
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path) as worker:
        needed = worker.layout.size_bytes
        if room is None or room > needed:
            wait_for(lambda: os.fstat(worker.memory_fd).st_blocks * 512 >= needed)
            return
        wait_for(lambda: "KV memory is not mapped ahead" in caplog.text)
        assert worker.store(1, key_of("chunk"), [0, 1, 2, 3]) is Outcome.OK
        assert os.fstat(worker.memory_fd).st_blocks * 512 < needed


def test_engines_that_attach_at_once_share_the_room_of_the_container(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun: list[int] = []

    async def prefault(memory: WorkerMemory) -> None:
        begun.append(memory.prefault_bytes_max)
        await anyio.sleep_forever()

    places.patch(monkeypatch, "WorkerMemory.prefault", prefault)
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path) as first:
        needed = first.layout.size_bytes
        wait_for(lambda: begun == [needed])
        places.patch(monkeypatch, "cgroup_room", lambda: (needed * 3 // 2, "the cgroup /a"))
        with Worker(sidecar.path, engine_id="second"):
            wait_for(lambda: "KV memory is not mapped ahead" in caplog.text)
        assert begun == [needed]


def test_arrow_has_one_thread(sidecar: RunningSidecar) -> None:
    assert pa.cpu_count() == 1
