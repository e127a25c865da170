"""Threads that receive, hash and copy stand behind the event loop for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest

from tests.sidecar.bench import until
from tests.thread_limit import no_thread
from tiers.store.client import run_to_end
from tiers.threads import (
    NICENESS_ADDED,
    NICENESS_MAX,
    DedicatedThreads,
    NoThread,
    lower_priority,
    submit_or_do,
)

if TYPE_CHECKING:
    from collections.abc import Callable

OBSTORE = """
import anyio, os
from tiers.store.access import Access, Credentials
from tiers.store.obstore_client import ObstoreClient

def niceness():
    threads = os.listdir("/proc/self/task")
    return {thread: os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads}

own = niceness()
keys = Credentials(kind="static", access_key="anybody", secret_key="anything")
access = Access(endpoint="http://127.0.0.1:9", region="us-east-1", credentials=keys)
for _ in range(2):
    ObstoreClient("s3://bucket", access)
others = niceness()
print(*(others.pop(task) for task in own))
print(*sorted(set(others.values())))
"""


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


class TestStepBack:
    async def test_work_of_a_store_stands_behind_the_loop_that_asks_for_it(self) -> None:
        own = niceness()
        limiter = anyio.CapacityLimiter(1)
        for _ in range(2):
            # A thread that is used again steps back once.
            found = await run_to_end(niceness, limiter)
            assert found == min(own + NICENESS_ADDED, NICENESS_MAX)
        assert niceness() == own

    async def test_a_loop_that_does_a_threads_work_stays_where_it_is(self) -> None:
        own = niceness()
        lower_priority()
        assert niceness() == own

    def test_what_obstore_starts_stands_behind_the_loop(self) -> None:
        words = [sys.executable, "-c", OBSTORE]
        told = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        own, others = ([int(one) for one in line.split()] for line in told.splitlines())
        assert len(set(own)) == 1
        assert others == [min(own[0] + NICENESS_ADDED, NICENESS_MAX)]

    def test_a_sandbox_that_forbids_it_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def forbidden(*_: int) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "setpriority", forbidden)
        own, found = niceness(), list[int]()

        def work() -> None:
            lower_priority()
            found.append(niceness())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [own]


class Work:
    """Numbers to be done, by `DedicatedThreads`."""

    def __init__(
        self, threads: int = 2, ended: Callable[[list[tuple[int, int]]], None] | None = None
    ) -> None:
        self.left: deque[int] = deque()
        self.ended: list[tuple[int, int]] = []
        self.held = threading.Event()
        self.held.set()
        self.threads = DedicatedThreads(
            threads,
            "test",
            take=self.take,
            carry_out=self.carry_out,
            ended=ended or self.ended.extend,
        )

    def take(self) -> int | None:
        return self.left.popleft() if self.left else None

    def carry_out(self, number: int) -> int:
        self.held.wait()
        return -number

    def add(self, *numbers: int) -> None:
        self.left.extend(numbers)
        self.threads.wake(len(numbers))


class TestDedicatedThreads:
    async def test_each_piece_of_work_is_taken_and_reported_once(self) -> None:
        work = Work()
        work.add(*range(100))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.threads.run)
            await until(lambda: len(work.ended) >= 100)
            work.add(100)
            await until(lambda: len(work.ended) >= 101)
            tasks.cancel_scope.cancel()
        assert sorted(work.ended) == [(number, -number) for number in range(101)]

    async def test_a_call_for_work_that_is_gone_does_nothing(self) -> None:
        work = Work()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.threads.run)
            work.threads.wake(3)
            work.add(1)
            await until(lambda: bool(work.ended))
            tasks.cancel_scope.cancel()
        assert work.ended == [(1, -1)]

    async def test_it_says_what_runs_and_since_when(self) -> None:
        work = Work()
        work.held.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.threads.run)
            work.add(7)
            await until(lambda: any(work.threads.running))
            (running,) = [one for one in work.threads.running if one is not None]
            assert running[1] == 7
            work.held.set()
            await until(lambda: not any(work.threads.running))
            tasks.cancel_scope.cancel()

    async def test_a_cancel_waits_for_what_runs_and_starts_nothing_more(self) -> None:
        work = Work(threads=1)
        work.held.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.threads.run)
            work.add(1, 2)
            await until(lambda: any(work.threads.running))
            tasks.cancel_scope.cancel()
            threading.Timer(0.05, work.held.set).start()
        assert work.ended == [(1, -1)]
        assert list(work.left) == [2]

    async def test_what_hears_of_the_end_may_use_the_event_loop(self) -> None:
        heard = list[anyio.Event]()
        work = Work(ended=lambda _: heard.append(anyio.Event()))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work.threads.run)
            work.add(1)
            await until(lambda: bool(heard))
            tasks.cancel_scope.cancel()

    async def test_an_error_of_what_hears_of_the_end_ends_it(self) -> None:
        def broken(_: list[tuple[int, int]]) -> None:
            raise RuntimeError("a bug")

        work = Work(ended=broken)
        work.add(1)
        with anyio.fail_after(60), pytest.raises(RuntimeError, match="a bug"):
            await work.threads.run()

    async def test_where_one_thread_cannot_be_started_the_others_end(self) -> None:
        work = Work(threads=3)
        with (
            anyio.fail_after(60),
            no_thread("test-1"),
            pytest.raises(NoThread, match="no thread can be started"),
        ):
            await work.threads.run()
        assert not [one for one in threading.enumerate() if one.name.startswith("test-")]


class TestSubmitOrDo:
    def test_without_a_thread_it_is_done_here_and_once(self) -> None:
        done = list[str]()
        here, there = threading.current_thread().name, "test-unmap_0"
        with ThreadPoolExecutor(1, "test-unmap") as threads:
            with no_thread("test-unmap") as refused:
                submit_or_do(threads, lambda: done.append(threading.current_thread().name))
            assert (refused, done) == ([there], [here])
            submit_or_do(threads, lambda: done.append(threading.current_thread().name))
        assert done == [here, there]
