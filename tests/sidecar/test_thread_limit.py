"""A sidecar on a machine that has as many threads as there may be: it goes on with less."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from sidecar.data.host_pool import map_ahead
from sidecar.errors import StartError
from sidecar.protocol import Memory, Outcome, Role
from tests import places
from tests.mappings import sizes_of
from tests.sidecar.bench import wait_for
from tests.sidecar.client import (
    Client,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
    layout_of,
)
from tests.thread_limit import ANYIO, no_thread, none_idle
from tests.tiers.catalog.bucket import Bucket, View
from tiers.kv.fence import PAGE_BYTES
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.kv.memfd import sealed_memfd
from tiers.pool.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = key_of("kept")


@pytest.fixture(autouse=True)
def every_call_needs_a_thread() -> Iterator[None]:
    with none_idle():
        yield


def mapped_ahead(worker: Worker) -> bool:
    return os.fstat(worker.memory_fd).st_blocks * 512 >= worker.layout.size_bytes


def serves(worker: Worker) -> None:
    """It has what was stored first, and takes more."""
    worker.poison()
    assert worker.load(2, KEY, [1]) is Outcome.OK
    assert worker.store(3, key_of(worker.memory_fd), [2]) is Outcome.OK


def test_memory_that_cannot_be_mapped_ahead_is_used_as_it_is(
    sidecar: RunningSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    with Worker(sidecar.path, engine_id="first") as first:
        wait_for(lambda: mapped_ahead(first))
        assert first.store(1, KEY, [0]) is Outcome.OK
        with no_thread(ANYIO), Worker(sidecar.path, engine_id="second") as second:
            wait_for(lambda: "KV memory is not mapped ahead" in caplog.text)
            assert not mapped_ahead(second)
            serves(second)
            serves(first)
        with Worker(sidecar.path, engine_id="third") as third:
            wait_for(lambda: mapped_ahead(third))
            serves(third)


def test_memory_of_an_engine_that_left_is_unmapped_all_the_same(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "_unmapping", ThreadPoolExecutor(1, "kvlake-unmap"))
    with Worker(sidecar.path, engine_id="first") as first:
        assert first.store(1, KEY, [0]) is Outcome.OK
        with no_thread("kvlake-unmap") as refused:
            with Worker(sidecar.path, engine_id="second") as second:
                inode = os.fstat(second.memory_fd).st_ino
                serves(second)
            wait_for(lambda: inode not in sizes_of("test-kv"))
            serves(first)
            assert refused == ["kvlake-unmap_0"]
    with Worker(sidecar.path, engine_id="third") as third:
        serves(third)


def test_a_worker_whose_gpu_cannot_be_prepared_is_refused(sidecar: RunningSidecar) -> None:
    layout = layout_of()
    memory = Memory("cuda_vmm", layout.size_bytes, bytes(range(16)))
    with Worker(sidecar.path, engine_id="first") as first:
        assert first.store(1, KEY, [0]) is Outcome.OK
        fds = sealed_memfd("kv", layout.size_bytes), sealed_memfd("fence", PAGE_BYTES)
        with no_thread(ANYIO), pytest.raises(RefusedError) as caught:
            Client(sidecar.path, attach_message(Role.WORKER, layout, memory=memory), fds)
        assert (caught.value.code, "pids.max" in caught.value.message) == ("resources", True)
        # Again, now with a thread: this machine's own answer, whatever it is.
        with pytest.raises(RefusedError) as caught:
            Client(sidecar.path, attach_message(Role.WORKER, layout, memory=memory), fds)
        assert caught.value.code == "gpu"
        serves(first)
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("step", ["read", "count", "pass on"])
def test_a_catalog_is_announced_and_read_once_threads_can_be_started(
    short_directory: Path, step: str
) -> None:
    """A file of it takes a thread for each of these steps."""
    bucket = Bucket()
    # Mapping ahead takes threads, too.
    given = {"url": f"file://{short_directory}/bucket", "refresh_seconds": 0.05}
    first, second = (
        config_in(
            short_directory,
            store={**given, "catalog_flush": 0.05},
            runtime={"name": name},
            copy={"prefault": False},
        )
        for name in ("first", "second")
    )

    def is_ok(now: dict[str, Any]) -> bool:
        return bool(now["tiers"]["store"]["state"] == "ok")

    def lacks_threads(now: dict[str, Any]) -> bool:
        return not is_ok(now) and "pids.max" in now["tiers"]["store"]["reason"]

    def announced(_: object) -> bool:
        return any("/log/" in name for name in bucket.objects)

    with RunningSidecar(first, lambda _: View(bucket)) as sidecar, Worker(sidecar.path) as worker:
        sidecar.wait_until(is_ok)
        with no_thread(ANYIO):
            assert worker.store(1, KEY, [0]) is Outcome.OK
            sidecar.wait_until(lacks_threads)
            assert not announced(bucket)
            serves(worker)
        sidecar.wait_until(announced)
        sidecar.wait_until(is_ok)
    with RunningSidecar(second, lambda _: View(bucket)) as sidecar:
        sidecar.wait_until(is_ok)
        with contextlib.ExitStack() as clients:
            with no_thread(ANYIO, after=["read", "count", "pass on"].index(step)):
                clients.enter_context(Worker(sidecar.path))
                scheduler = clients.enter_context(Scheduler(sidecar.path))
                sidecar.wait_until(lacks_threads)
            sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 2)
            assert scheduler.flags(KEY) == [FLAG_STORE]
            assert scheduler.lookup(1, [KEY]).ready == 1


@pytest.mark.parametrize("name", ["kvlake-copy-1", ANYIO])
def test_a_sidecar_that_cannot_start_its_threads_keeps_what_it_took_over(
    short_directory: Path, name: str
) -> None:
    config = config_in(short_directory, host={"after_stop": "keep"}, copy={"threads": 2})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        assert worker.store(1, KEY, [0]) is Outcome.OK
    with no_thread(name), pytest.raises(StartError, match="no thread can be started"):
        RunningSidecar(config)
    assert not [one for one in threading.enumerate() if one.name.startswith("kvlake-copy")]
    with (
        RunningSidecar(config) as sidecar,
        Scheduler(sidecar.path) as scheduler,
        Worker(sidecar.path) as worker,
    ):
        sidecar.wait_until(lambda now: now["counters"]["chunks_restored"] == 1)
        assert scheduler.flags(KEY) == [FLAG_HOST]
        serves(worker)


async def test_host_memory_that_cannot_be_mapped_ahead_is_used_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = HostPool.open(tmp_path / "pool", 8 << 20, prefault=False)
    with no_thread(ANYIO), caplog.at_level(logging.WARNING), anyio.fail_after(60):
        await map_ahead(pool)
    assert "host memory is not mapped ahead" in caplog.text
    pool.close(keep=False)
