"""Rounds over several namespaces: what one of them can keep from the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import numpy as np
import pytest

from sidecar.catalog.garbage_collector import (
    CROWDED_FILES,
    Collected,
    Collector,
    collect,
    namespaces,
)
from sidecar.catalog.sync import StoreHealth
from sidecar.config.model import loads
from tests import places
from tests.tiers.catalog.bucket import Bucket, View
from tiers.catalog.lease import CatalogLease
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import CompactionPlan, CompactionReport
from tiers.catalog.manifest import Counts
from tiers.catalog.names import (
    FORMAT,
    NUMBER_MAX,
    catalog_folder,
    manifest_name,
    namespace_prefix,
    segment_name,
)
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import Row
from tiers.catalog.scan import Superseded
from tiers.errors import TierExpired

if TYPE_CHECKING:
    from tiers.store.client import Bytes, Listing


async def test_a_namespace_that_waits_for_a_person_does_not_keep_the_others_from_their_rounds() -> (
    None
):
    bucket = Bucket()
    view = View(bucket)
    prefixes = [namespace_prefix(bytes([number] * 32)) for number in range(3)]
    for prefix in prefixes:
        folder = catalog_folder(prefix)
        log = LogWriter(view, folder, new_writer(), rows_max=10, seconds_max=1.0)
        log.append(Row(bytes(32), "0-8.0-4", bucket.micros, 1000, 1))
        await log.flush()
    foreign = manifest_name(catalog_folder(prefixes[0]), NUMBER_MAX)
    await view.write(foreign, np.ones(50, dtype=np.uint8))
    assert await namespaces(view) == prefixes
    lease = CatalogLease(view, "a test", seconds=60)
    assert await lease.acquire()
    reports, failure = await collect(
        view, lease, CompactionPlan(RetentionRules(), 100.0, 300.0), prefixes, Counts()
    )
    assert f"{foreign} has the highest possible number" in str(failure)
    assert [report.prefix for report in reports] == prefixes[1:]
    for prefix in prefixes[1:]:
        assert manifest_name(catalog_folder(prefix), 0) in bucket.objects
    await view.delete([foreign])
    reports, failure = await collect(
        view, lease, CompactionPlan(RetentionRules(), 100.0, 300.0), prefixes, Counts()
    )
    assert failure is None
    assert [report.generation for report in reports] == [0, 0, 0]


async def test_a_namespace_that_fails_does_not_keep_those_after_it_from_their_rounds() -> None:
    bucket = Bucket()
    view = View(bucket)
    prefixes = [namespace_prefix(bytes([number] * 32)) for number in range(3)]
    for prefix in prefixes:
        log = LogWriter(view, catalog_folder(prefix), new_writer(), rows_max=10, seconds_max=1.0)
        log.append(Row(bytes(32), "0-8.0-4", bucket.micros, 1000, 1))
        await log.flush()
    bucket.late = lambda prefix, listing: prefix.startswith(prefixes[0])
    lease = CatalogLease(view, "a test", seconds=60)
    assert await lease.acquire()
    _, failure = await collect(
        view, lease, CompactionPlan(RetentionRules(), 300.0, 600.0), prefixes, Counts()
    )
    assert isinstance(failure, TierExpired)
    for prefix in prefixes:
        made = bucket.names(f"{catalog_folder(prefix)}/manifest")
        assert len(made) == (prefix != prefixes[0])


@pytest.mark.parametrize("lost", [False, True], ids=["lease held", "lease lost"])
async def test_namespaces_after_one_that_another_process_compacts_are_compacted_with_the_lease(
    monkeypatch: pytest.MonkeyPatch, *, lost: bool
) -> None:
    view = View(Bucket())
    lease = CatalogLease(view, "a test", seconds=60)
    assert await lease.acquire()
    compacted: list[str] = []

    async def superseded(_: object, prefix: str, *__: object, **___: object) -> CompactionReport:
        compacted.append(prefix)
        if prefix == "first":
            if lost:
                await lease.release()
            raise Superseded("generation 7 is there already")
        return CompactionReport(prefix)

    places.patch(monkeypatch, "compact", superseded)
    plan = CompactionPlan(RetentionRules(), 300.0, 600.0)
    work = collect(view, lease, plan, ["first", "second"], Counts())
    if lost:
        with pytest.raises(Superseded):
            await work
    else:
        reports, failure = await work
        assert ([report.prefix for report in reports], failure) == (["second"], None)
    assert compacted == (["first"] if lost else ["first", "second"])


async def test_a_namespace_that_always_fails_takes_nothing_from_the_counts_nor_from_the_leftovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bucket = Bucket()
    view = View(bucket)
    prefixes = [namespace_prefix(bytes([number] * 32)) for number in range(3)]
    for prefix in prefixes:
        log = LogWriter(view, catalog_folder(prefix), new_writer(), rows_max=10, seconds_max=1.0)
        log.append(Row(bytes(32), "0-8.0-4", bucket.micros, 1000, 1))
        await log.flush()
        await view.write(segment_name(prefix, bytes(32), "0-8.0-4"), np.ones(1000, dtype=np.uint8))
    aside = f"quarantine/{segment_name(prefixes[0], bytes(32), '0-8.0-4')}"
    bucket.objects[aside] = b"damaged", bucket.now
    config = loads("store:\n  url: file:///not/used\n  ttl: 1d\n", environment={})
    collector = Collector(view, config, StoreHealth(creates=True), lambda: 0)
    await collector.poll()
    assert collector.collected == Collected(rounds=3, logs_merged=3)
    bucket.now += 8 * 86_400.0
    bucket.late = lambda prefix, listing: prefix.startswith(prefixes[0])
    with caplog.at_level("INFO", "kvlake.store"):
        await collector.poll()
    assert collector.collected == Collected(
        rounds=5,
        rounds_failed=1,
        logs_merged=3,
        withdrawn=2,
        withdrawn_bytes=2000,
        files_removed=collector.collected.files_removed,
        leftovers_removed=1,
    )
    assert collector.withdrawn_by["store.ttl"] == 2
    assert aside not in bucket.objects
    told = [record.message for record in caplog.records if record.name == "kvlake.store"]
    assert told == [
        "collected",
        "collected",
        "leftovers removed",
        "collection failed",
    ]
    caplog.clear()
    with caplog.at_level("WARNING", "kvlake.store"):
        await collector.poll()
        assert collector.collected.rounds_failed == 2
        assert not caplog.records, "it said so already"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.promise("killed-collector")
async def test_one_that_was_killed_keeps_nobody_from_collecting_beyond_its_lease() -> None:
    bucket, clock = Bucket(), Clock()
    config = loads("store:\n  url: file:///not/used\n  gc: {every: 10m}\n", environment={})
    collector = Collector(View(bucket), config, StoreHealth(creates=True), lambda: 0, clock)
    assert await collector.poll() == 600.0
    clock.now += 600.0
    killed = CatalogLease(View(bucket), "killed", seconds=60, clock=clock)
    assert await killed.acquire()
    # It may be at it: it is not looked at again before it must have renewed its lease.
    assert await collector.poll() == 60.0
    clock.now += 20.0
    assert await killed.renew(now=True)
    clock.now += 40.0
    assert await collector.poll() == 60.0
    assert collector.collected.rounds_left == 2
    # Killed now, and its lease is over a minute after it was last seen to be renewed.
    clock.now += 60.0
    assert await collector.poll() == 600.0
    assert collector.collected.rounds_left == 2, "it was left to one that is dead"
    assert await CatalogLease(View(bucket), "next", seconds=60, clock=clock).acquire()


async def test_a_round_with_a_fault_of_ours_does_not_end_the_sidecar(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Odd(View):
        async def list(self, *_: object, **__: object) -> Listing:
            raise ZeroDivisionError("a bug")

    config = loads("store:\n  url: file:///not/used\n  gc: {every: 10m}\n", environment={})
    collector = Collector(Odd(Bucket()), config, StoreHealth(creates=True), lambda: 0)
    assert await collector.poll() == 600.0
    assert collector.collected.rounds_failed == 1
    assert "a bug" in caplog.text


async def test_a_lease_that_is_over_and_cannot_be_taken_is_asked_for_in_its_turn() -> None:
    class Full(View):
        async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
            raise TierExpired("full", retryable=True)

    bucket, clock = Bucket(), Clock()
    assert await CatalogLease(View(bucket), "killed", seconds=60, clock=clock).acquire()
    config = loads("store:\n  url: file:///not/used\n  gc: {every: 10m}\n", environment={})
    collector = Collector(Full(bucket), config, StoreHealth(creates=True), lambda: 0, clock)
    assert await collector.poll() == 60.0
    clock.now += 60.0
    assert await collector.poll() == 600.0
    assert collector.collected.rounds_failed == 1


class Failing(View):
    """A way to a bucket on which namespaces cannot be listed."""

    error: Exception = TierExpired("slow", retryable=True)

    async def list(self, *args: Any, **options: Any) -> Listing:
        if args[0] == FORMAT:
            raise self.error
        return await super().list(*args, **options)


@pytest.mark.parametrize("error", [Failing.error, ValueError("a bug")])
async def test_a_sidecar_whose_rounds_fail_leaves_a_turn_to_the_others(error: Exception) -> None:
    bucket, clock = Bucket(), Clock()
    config = loads("store:\n  url: file:///not/used\n  gc: {every: 10m}\n", environment={})
    health = StoreHealth(creates=True)
    view = Failing(bucket)
    view.error = error
    failing = Collector(view, config, health, lambda: 0, clock)
    other = Collector(View(bucket), config, health, lambda: 0, clock)
    due = {failing: 1.0, other: 0.0}
    for _ in range(12):
        one = min(due, key=lambda one: due[one])
        clock.now = due[one]
        due[one] += await one.poll()
    assert failing.collected.rounds_failed > 0
    assert other.collected.rounds_left < 5


async def test_a_crowded_catalog_is_polled_early_unless_the_last_round_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Over(Exception):
        pass

    class Counting(Collector):
        polls = 0

        async def poll(self) -> float:
            self.polls += 1
            return await super().poll()

    async def sleep(seconds: float) -> None:
        await anyio.lowlevel.checkpoint()
        clock.now += seconds
        if clock.now > 7200.0:
            raise Over

    monkeypatch.setattr(anyio, "sleep", sleep)
    config = loads("store:\n  url: file:///not/used\n  gc: {every: 10m}\n", environment={})
    health, polls = StoreHealth(creates=True), list[int]()
    for way in (View, Failing):
        clock = Clock()
        collector = Counting(way(Bucket()), config, health, lambda: CROWDED_FILES, clock)
        with pytest.raises(Over):
            await collector.run()
        polls.append(collector.polls)
    assert polls[0] > 12 > polls[1]
