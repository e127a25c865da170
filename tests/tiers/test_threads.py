"""Threads that receive, hash and copy stand behind the event loop for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import anyio

from tiers.store.client import run_to_end
from tiers.threads import NICENESS_ADDED, NICENESS_MAX, lower_priority

if TYPE_CHECKING:
    import pytest

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
