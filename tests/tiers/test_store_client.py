"""What runs in a thread is waited for, also where its caller is cancelled."""

# ruff: noqa: ASYNC110 - threads are polled, and test files are small

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from tests.thread_limit import ANYIO, no_thread
from tests.tiers.tier_suite import NAME, image_of
from tiers.errors import TierUnavailable
from tiers.store.client import run_abandonable, run_in_thread, run_to_end
from tiers.store.folder import LISTINGS_MAX
from tiers.store.middleware import Deadline
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from collections.abc import Callable


async def cancel_scope(
    task: Callable[[], Any], begun: threading.Event, then: Callable[[], None] = lambda: None
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(task)
        while not begun.is_set():
            await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()
        then()


async def cancel_twice(
    task: Callable[[], Any], begun: threading.Event, then: Callable[[], None] = lambda: None
) -> None:
    """As asyncio does on SIGINT: past the shields of anyio."""
    running = asyncio.ensure_future(task())
    while not begun.is_set():
        await anyio.sleep(0.001)
    running.cancel()
    await anyio.sleep(0.005)
    running.cancel()
    then()
    with pytest.raises(asyncio.CancelledError):
        await running


class TestRunToEnd:
    @pytest.mark.parametrize("cancel", [cancel_scope, cancel_twice])
    async def test_a_cancelled_write_waits_for_its_thread(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancel: Callable[..., Any]
    ) -> None:
        begun, release, ended = threading.Event(), threading.Event(), threading.Event()
        write = os.write

        def slow(fd: int, data: memoryview) -> int:
            begun.set()
            release.wait(60)
            count = write(fd, data)
            ended.set()
            return count

        monkeypatch.setattr(os, "write", slow)
        tier = UrlObjects(f"file://{tmp_path}")

        def cancelled() -> None:
            # Later than a caller would return that does not wait.
            asyncio.get_running_loop().call_later(0.05, release.set)

        await cancel(lambda: tier.write(NAME, image_of(1000)), begun, cancelled)
        assert ended.is_set()

    @pytest.mark.parametrize("run", [run_to_end, run_abandonable])
    async def test_queued_work_never_starts_after_a_cancel(self, run: Callable[..., Any]) -> None:
        limiter = anyio.CapacityLimiter(1)
        release, begun = threading.Event(), threading.Event()
        ran: list[str] = []

        def hold() -> None:
            begun.set()
            release.wait(60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, hold, limiter)
            while not begun.is_set():
                await anyio.sleep(0.001)
            with anyio.move_on_after(0.01) as scope:
                await run(lambda: ran.append("late"), limiter)
            assert scope.cancelled_caught
            release.set()
        await anyio.sleep(0.01)
        assert ran == []

    async def test_errors_of_the_work_are_raised(self) -> None:
        with pytest.raises(ZeroDivisionError):
            await run_to_end(lambda: 1 // 0, anyio.CapacityLimiter(1))

    @pytest.mark.parametrize("run", [run_to_end, run_abandonable])
    async def test_where_no_thread_can_be_started_it_is_an_error_of_the_system(
        self, run: Callable[..., Any]
    ) -> None:
        limiter, ran = anyio.CapacityLimiter(1), list[str]()
        with no_thread(ANYIO), pytest.raises(OSError, match="no thread can be started") as caught:
            await run(lambda: ran.append("early"), limiter)
        assert caught.value.errno == errno.EAGAIN
        await run(lambda: ran.append("late"), limiter)
        assert ran == ["late"]

    async def test_another_error_of_python_stays_what_it_is(self) -> None:
        def bug() -> None:
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await run_to_end(bug, anyio.CapacityLimiter(1))


class TestRunAbandonable:
    @pytest.mark.parametrize("cancel", [cancel_scope, cancel_twice])
    async def test_a_cancelled_call_keeps_its_token_until_its_thread_ends(
        self, cancel: Callable[..., Any]
    ) -> None:
        limiter = anyio.CapacityLimiter(1)
        release, begun, ended = threading.Event(), threading.Event(), threading.Event()

        def hang() -> None:
            begun.set()
            release.wait(60)
            ended.set()

        await cancel(lambda: run_abandonable(hang, limiter), begun)
        assert not ended.is_set()
        with anyio.move_on_after(0.01) as scope:
            await run_abandonable(lambda: None, limiter)
        assert scope.cancelled_caught
        assert limiter.borrowed_tokens == 1
        release.set()
        assert await run_abandonable(ended.is_set, limiter)
        assert limiter.borrowed_tokens == 0

    async def test_a_call_that_is_cancelled_before_it_begins_gives_its_token_back(self) -> None:
        limiter, ran = anyio.CapacityLimiter(1), list[str]()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await run_abandonable(lambda: ran.append("late"), limiter)
        assert (ran, limiter.borrowed_tokens) == ([], 0)

    async def test_errors_of_the_work_are_raised(self) -> None:
        limiter = anyio.CapacityLimiter(1)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await run_abandonable(lambda: 1 // 0, limiter)


class TestRunInThread:
    async def test_where_no_thread_can_be_started_the_caller_tries_again(self) -> None:
        with (
            no_thread(ANYIO),
            pytest.raises(TierUnavailable, match="no thread can be started") as caught,
        ):
            await run_in_thread(divmod, 7, 2)
        assert caught.value.retryable
        assert await run_in_thread(divmod, 7, 2) == (3, 1)


class TestListingsOfAFolder:
    async def test_a_cancel_does_not_wait_for_a_blocked_listing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mount, begun, scandir = threading.Event(), threading.Event(), os.scandir

        def hang(path: str) -> Any:
            begun.set()
            mount.wait(60)
            return scandir(path)

        tier = UrlObjects(f"file://{tmp_path}")
        await tier.write(NAME, image_of(10))
        monkeypatch.setattr(os, "scandir", hang)
        for _ in range(LISTINGS_MAX):
            begun.clear()
            await cancel_scope(lambda: tier.list(""), begun)
        with pytest.raises(TierUnavailable, match=f"{LISTINGS_MAX} listings have not returned"):
            await tier.list("")
        mount.set()
        with anyio.fail_after(30):
            while True:
                try:
                    assert len(await tier.list("")) == 1
                    break
                except TierUnavailable:
                    await anyio.sleep(0.01)

    async def test_a_listing_that_never_began_is_not_counted(self, tmp_path: Path) -> None:
        tier = UrlObjects(f"file://{tmp_path}")
        for _ in range(LISTINGS_MAX + 1):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await tier.list("")
        assert await tier.list("") == []

    async def test_a_folder_whose_server_is_gone_meets_its_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mount, scandir = threading.Event(), os.scandir

        def hang(path: str) -> Any:
            mount.wait(60)
            return scandir(path)

        tier = UrlObjects(f"file://{tmp_path}")
        await tier.write(NAME, image_of(10))
        monkeypatch.setattr(os, "scandir", hang)
        with pytest.raises(TierUnavailable, match="deadline_seconds_max"):
            await Deadline(tier, seconds_max=0.1).list("")
        mount.set()
        assert len(await tier.list(NAME.rsplit("/", 1)[0])) == 1
