"""Which doubted namespace is gone through when, over a double of the store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from sidecar.catalog.reconcile import Reconciler
from tests import places
from tiers.catalog.names import namespace_prefix
from tiers.catalog.rows import Row, Rows, rows_of
from tiers.errors import TierUnavailable

pytestmark = pytest.mark.anyio
ONE, OTHER = b"1" * 32, b"2" * 32


class Store:
    """Has three slices of each namespace; looking through those in `fails` fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: set[tuple[str, int]] = set()
        self.failed = 0
        self.listed: list[tuple[str, int]] = []
        places.patch(monkeypatch, "nonempty_shards", self.nonempty_shards)
        places.patch(monkeypatch, "rows_in_shard", self.rows_in_shard)

    async def nonempty_shards(self, _: object, prefix: str) -> list[int]:
        self._fail(prefix, 0)
        return [3, 5, 8]

    async def rows_in_shard(self, _: object, prefix: str, number: int) -> list[Any]:
        self._fail(prefix, number)
        self.listed.append((prefix, number))
        return []

    def _fail(self, prefix: str, number: int) -> None:
        if (prefix, number) in self.fails:
            self.failed += 1
            raise TierUnavailable("not for you", retryable=True)

    def of(self, digest: bytes) -> list[int]:
        return [number for prefix, number in self.listed if prefix == namespace_prefix(digest)]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    places.patch(monkeypatch, "RECONCILE_RETRY_SECONDS", 0.01)
    return Store(monkeypatch)


@pytest.fixture
def reconciler() -> Reconciler:
    double = SimpleNamespace(rows_waiting=0, all=list)
    return Reconciler(
        cast("Any", None),
        cast("Any", double),
        cast("Any", double),
        feed_rows=cast("Any", None),
        held=lambda _realm, _key: 0,
        announces=False,
        every_seconds=1e9,
    )


@asynccontextmanager
async def running(reconciler: Reconciler) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(reconciler.run)
        yield
        tasks.cancel_scope.cancel()


def request(reconciler: Reconciler, digest: bytes) -> None:
    reconciler.request(cast("Any", SimpleNamespace(namespace_digest=digest)))


async def until(happened: Callable[[], bool]) -> None:
    with anyio.fail_after(30):
        while not happened():  # noqa: ASYNC110
            await anyio.sleep(0.001)


async def test_one_that_was_gone_through_lately_holds_up_no_other(
    store: Store, reconciler: Reconciler
) -> None:
    async with running(reconciler):
        request(reconciler, ONE)
        await until(lambda: reconciler.sweeps == 1)
        request(reconciler, ONE)
        await anyio.wait_all_tasks_blocked()
        request(reconciler, OTHER)
        await until(lambda: reconciler.sweeps == 2)
    assert store.of(ONE) == store.of(OTHER) == [3, 5, 8]


@pytest.mark.parametrize("number", [0, 5])
async def test_one_that_fails_holds_up_no_other(
    store: Store, reconciler: Reconciler, number: int
) -> None:
    store.fails = {(namespace_prefix(ONE), number)}
    async with running(reconciler):
        request(reconciler, ONE)
        await until(lambda: store.failed > 0)
        request(reconciler, OTHER)
        await until(lambda: reconciler.sweeps == 1)
        assert store.of(OTHER) == [3, 5, 8]
        await until(lambda: store.failed > 2)
        store.fails.clear()
        await until(lambda: reconciler.sweeps == 2)
    assert store.of(ONE) == [3, 5, 8], "from where it was"


async def test_one_whose_rows_cannot_be_taken_in_is_gone_through_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, fed = rows_of([Row(bytes(32), "0-1.0-1", 1, size_bytes=1, num_blocks=1)]), list[int]()
    realm = SimpleNamespace(
        namespace_digest=ONE, complete=True, realm_id=1, masks_by_segment=lambda: {"0-1.0-1": 1}
    )

    async def rows_in_shard(*given: Any) -> Rows:
        await store.rows_in_shard(*given)
        return found

    async def feed_rows(_: object, rows: Rows) -> None:
        fed.append(len(rows))
        if len(fed) == 2:
            raise TierUnavailable("no thread", retryable=True)

    places.patch(monkeypatch, "rows_in_shard", rows_in_shard)
    double = SimpleNamespace(rows_waiting=0, all=lambda: [realm], knows=lambda _: True)
    reconciler = Reconciler(
        cast("Any", None),
        cast("Any", double),
        cast("Any", double),
        feed_rows=feed_rows,
        held=lambda _realm, _key: 0,
        announces=False,
        every_seconds=1e9,
    )
    async with running(reconciler):
        request(reconciler, ONE)
        await until(lambda: reconciler.sweeps == 1)
    assert store.of(ONE) == [3, 5, 5, 8]
    assert fed == [1] * 4


async def test_one_that_is_doubted_again_while_it_fails_is_gone_through_from_the_start(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_fail", lambda _, number: fail_once(number))
    left = [5]

    def fail_once(number: int) -> None:
        if number in left:
            left.remove(number)
            request(reconciler, ONE)
            raise TierUnavailable("not now", retryable=True)

    async with running(reconciler):
        request(reconciler, ONE)
        await until(lambda: reconciler.sweeps == 1)
    assert store.of(ONE) == [3, 3, 5, 8]


async def test_one_that_is_forgotten_while_it_is_gone_through_begins_from_the_start(
    store: Store, reconciler: Reconciler, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [5]

    def forget_once(_: str, number: int) -> None:
        if number in left:
            left.remove(number)
            reconciler.forget(ONE)

    monkeypatch.setattr(store, "_fail", forget_once)
    async with running(reconciler):
        request(reconciler, ONE)
        await until(lambda: not left)
        await anyio.wait_all_tasks_blocked()
        assert (store.of(ONE), reconciler.sweeps) == ([3, 5], 0)
        # Its model's engine is back.
        request(reconciler, ONE)
        await until(lambda: reconciler.sweeps == 1)
    assert store.of(ONE) == [3, 5, 3, 5, 8]
