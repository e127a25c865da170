"""Indexes that grow while entries come and go, and what happens without memory."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import resource
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
import numpy.typing as npt
import pytest

from sidecar.core.commands import IndexOffer, IndexSet
from sidecar.data.index_writer import IndexUpdater
from sidecar.protocol import Role
from sidecar.sessions.namespaces import RealmLayout, Realms
from tests import places
from tests.sidecar.client import attach_message
from tests.thread_limit import ANYIO, no_thread
from tiers.kv.index import (
    FLAG_HOST,
    FLAG_STORE,
    SLOTS_PER_PASS,
    IndexGrowth,
    IndexReader,
    IndexWriter,
    tags_in,
)

Keys = npt.NDArray[np.uint8]

SMALL_ENTRIES, LARGE_ENTRIES = 10_000, 40_000


@dataclass
class Bench:
    """A realm, its index, and who hears of it."""

    realms: Realms
    realm: RealmLayout
    indexes: IndexUpdater
    moved: list[IndexWriter] = field(default_factory=list[IndexWriter])
    starts: list[RealmLayout] = field(default_factory=list[RealmLayout])
    """Growths that were asked for and not run yet."""
    readers: list[IndexReader] = field(default_factory=list[IndexReader])

    def read(self) -> IndexReader:
        """A reader of what the realm has now."""
        index = self.realm.index
        self.readers.append(IndexReader(os.dup(index.fd), index.size_bytes))
        return self.readers[-1]

    def flags(self, keys: Keys, reader: IndexReader | None = None) -> list[int]:
        """What different flags the keys have."""
        reader = reader or self.read()
        found = reader.lookup(tags_in(keys, self.realm.index_salt))
        return sorted({int(flags) for flags in np.unique(found)})

    def offer(self, keys: Keys) -> None:
        self.indexes.offer(self.realm, IndexOffer(self.realm.realm_id, keys))

    def set(self, key: npt.NDArray[np.uint8], *, host: bool, store: bool) -> None:
        self.indexes.set(self.realm, [IndexSet(self.realm.realm_id, key.tobytes(), host, store)])


@pytest.fixture
def bench() -> Iterator[Bench]:
    realms = Realms()
    (realm,) = realms.join(attach_message(Role.SCHEDULER).parts)
    made = Bench(
        realms,
        realm,
        IndexUpdater(
            lambda moved: made.moved.append(moved.index), lambda one: made.starts.append(one)
        ),
    )
    yield made
    for reader in made.readers:
        reader.close()
    realms.close()


def indexed(bench: Bench, entries: int) -> IndexWriter:
    """Give the realm another index."""
    bench.realm.index.close()
    bench.realm.index = IndexWriter(entries)
    return bench.realm.index


def keys_of(count: int, seed: int = 1) -> Keys:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


def filled(bench: Bench) -> Keys:
    """Offer as many as fit, and one more."""
    keys = keys_of(bench.realm.index.capacity_entries + 1)
    bench.offer(keys)
    return keys


@contextmanager
def no_memory() -> Generator[None]:
    """The kernel refuses whatever has more than a page: it counts a memfd as a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mappings() -> int:
    """How many indexes this process has open."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += "kvlake-index" in str(link.readlink())
    return count


async def test_an_index_grows_until_everything_has_room(bench: Bench) -> None:
    smaller, reader = indexed(bench, SMALL_ENTRIES), bench.read()
    keys = keys_of(3 * smaller.capacity_entries)
    bench.offer(keys)
    assert bench.starts == [bench.realm]
    await bench.indexes.grow(bench.realm)
    assert len(bench.moved) == 2
    assert bench.moved[-1] is bench.realm.index
    assert bench.realm.index.slots == 4 * smaller.slots
    assert bench.flags(keys) == [FLAG_STORE]
    assert bench.flags(keys, reader) == [0], "who reads the old mapping misses"


async def test_a_large_index_grows_while_entries_come_and_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller, reader = indexed(bench, LARGE_ENTRIES), bench.read()
    keys = filled(bench)
    bench.offer(keys[:100])
    assert bench.starts == [bench.realm], "one growth of a realm runs at a time"
    assert bench.realm.index is smaller
    expected = np.full(len(keys), FLAG_STORE, dtype=np.uint8)
    generator, turn, turns_at_steps = random.Random(3), 0, list[int]()

    class Watched(IndexGrowth):
        def step(self) -> bool:
            turns_at_steps.append(turn)
            return super().step()

    async def come_and_go() -> None:
        nonlocal turn
        while bench.realm.index is smaller:
            number, flags = generator.randrange(1000), generator.randrange(4)
            bench.set(keys[number], host=bool(flags & FLAG_HOST), store=bool(flags & FLAG_STORE))
            expected[number] = flags
            assert bench.flags(keys[1000:1100], reader) == [FLAG_STORE], "it serves meanwhile"
            turn += 1
            await anyio.lowlevel.checkpoint()

    places.patch(monkeypatch, "IndexGrowth", Watched)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_and_go)
            tasks.start_soon(bench.indexes.grow, bench.realm)
            await bench.indexes.settled(bench.realm)
            assert bench.realm.index is not smaller, "settled before it has grown"
    assert len(turns_at_steps) == smaller.slots // SLOTS_PER_PASS
    assert len(set(turns_at_steps)) == len(turns_at_steps), "others had no turn between two steps"
    assert bench.moved == [bench.realm.index]
    assert bench.realm.index.slots == 2 * smaller.slots
    found = bench.read().lookup(tags_in(keys, bench.realm.index_salt))
    assert np.array_equal(found, expected)
    assert bench.flags(keys, reader) == [0]
    # It is over: nobody waits, and the next one may start.
    await bench.indexes.settled(bench.realm)
    bench.offer(keys_of(bench.realm.index.capacity_entries, seed=3))
    assert bench.starts == [bench.realm] * 2


async def test_a_growth_that_is_cut_short_leaves_nothing(bench: Bench) -> None:
    smaller, before = indexed(bench, LARGE_ENTRIES), mappings()
    keys = filled(bench)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.indexes.grow, bench.realm)
        with anyio.fail_after(120):
            while mappings() == before:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert mappings() == before
    assert bench.realm.index is smaller
    assert not bench.moved
    assert FLAG_STORE in bench.flags(keys)


@pytest.mark.parametrize("entries", [SMALL_ENTRIES, LARGE_ENTRIES])
async def test_without_memory_the_smaller_index_stays_and_it_is_tried_again(
    bench: Bench,
    entries: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    places.patch(monkeypatch, "INDEX_RETRY_SECONDS", 0.01)
    smaller, reader = indexed(bench, entries), bench.read()
    before = mappings()
    with no_memory(), caplog.at_level(logging.ERROR), anyio.fail_after(120):
        keys = filled(bench)
        assert bench.starts == [bench.realm]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.indexes.grow, bench.realm)
            # Taking in a catalog waits for no growth that does not run.
            await bench.indexes.settled(bench.realm)
    assert "an index cannot grow" in caplog.text
    assert bench.realm.index is smaller
    assert not bench.moved
    assert mappings() == before
    found = reader.lookup(tags_in(keys, bench.realm.index_salt))
    assert np.count_nonzero(found) == len(smaller) - len(smaller.overflow), "it is still true"
    assert np.count_nonzero(found) > 0.99 * len(keys)

    bench.set(keys[0], host=True, store=True)
    assert bench.starts == [bench.realm] * 2
    await bench.indexes.grow(bench.realm)
    assert bench.moved == [bench.realm.index]
    assert bench.realm.index.slots == 2 * smaller.slots
    assert bench.flags(keys[:1]) == [FLAG_HOST | FLAG_STORE]
    assert bench.flags(keys[1:]) == [FLAG_STORE]


async def test_the_largest_index_stays_and_serves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places.patch(monkeypatch, "INDEX_RETRY_SECONDS", 0.01)
    largest = indexed(bench, SMALL_ENTRIES)
    places.patch(monkeypatch, "CAPACITY_ENTRIES_MAX", largest.capacity_entries)
    keys = filled(bench)
    for number in range(2):
        with caplog.at_level(logging.ERROR), anyio.fail_after(120):
            await bench.indexes.grow(bench.realm)
        assert "an index cannot grow" in caplog.text
        assert bench.realm.index is largest
        assert not bench.moved
        bench.set(keys[number], host=True, store=True)
        assert bench.starts == [bench.realm] * (number + 2), "it is tried again"
    assert bench.flags(keys[:2]) == [FLAG_HOST | FLAG_STORE]


async def test_without_a_thread_the_smaller_index_stays_and_it_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    places.patch(monkeypatch, "INDEX_RETRY_SECONDS", 0.01)
    smaller = indexed(bench, SMALL_ENTRIES)
    keys = filled(bench)
    with no_thread(ANYIO), caplog.at_level(logging.ERROR), anyio.fail_after(120):
        await bench.indexes.grow(bench.realm)
    assert "an index cannot grow" in caplog.text
    assert bench.realm.index is smaller
    bench.set(keys[0], host=True, store=True)
    await bench.indexes.grow(bench.realm)
    assert bench.moved == [bench.realm.index]
    assert bench.flags(keys[1:]) == [FLAG_STORE]


async def test_a_growth_ends_when_its_realm_is_forgotten(bench: Bench) -> None:
    gc.collect()
    before = mappings()
    indexed(bench, LARGE_ENTRIES)
    filled(bench)
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(bench.indexes.grow, bench.realm)
            while not bench.indexes.growing_bytes:
                await anyio.lowlevel.checkpoint()
            bench.realms.forget([bench.realm])
    assert not bench.moved
    assert (mappings(), bench.indexes.growing_bytes) == (before - 1, 0)
    await bench.indexes.settled(bench.realm)


def test_chunks_are_withdrawn_by_the_first_halves_of_their_keys(bench: Bench) -> None:
    keys = keys_of(100)
    bench.offer(keys)
    bench.indexes.withdraw(bench.realm, [key[:16].tobytes() for key in keys[:60]])
    assert bench.flags(keys[:60]) == [0]
    assert bench.flags(keys[60:]) == [FLAG_STORE]
    assert len(bench.realm.index) == 40
