"""Rows that hold to their format and mean harm: a bucket's bounds and its rounds survive them."""

from __future__ import annotations

import pytest

from sidecar.catalog.garbage_collector import Collector
from sidecar.catalog.sync import StoreHealth
from sidecar.config.model import loads
from tests import places
from tests.tiers.catalog.kit import FOLDER, NAMESPACE
from tests.tiers.catalog.world import World, chunk_key
from tiers.catalog.log import new_writer
from tiers.catalog.manifest import Counts
from tiers.catalog.names import LogName, log_name, object_name
from tiers.catalog.reader import Files, sort_out
from tiers.catalog.retention import Ages, RetentionDecision, RetentionLimits, RetentionRules
from tiers.catalog.rows import SIZE_LARGEST, Row, digest_of, encode, rows_of
from tiers.kv.layout import Segment

AS_IT_IS = (1 << 63) - 1


@pytest.fixture
def world() -> World:
    return World()


async def announce(world: World, rows: list[Row]) -> None:
    """A log of a writer that looks at nothing."""
    with places.patched("SIZE_LARGEST", AS_IT_IS):
        body = encode(rows_of(rows))
    await world.tier.write(log_name(FOLDER, LogName(new_writer(), 0), digest_of(body)), body)


@pytest.mark.promise("catalog-sizes")
@pytest.mark.parametrize("size_bytes", [1 << 62, (1 << 63) - 1, 1 << 61])
@pytest.mark.parametrize(
    "bounds", [RetentionRules(None, 5000), RetentionRules(tenant=RetentionLimits(None, 5000))]
)
async def test_sizes_that_cannot_be_added_up_keep_no_bound_from_holding(
    world: World, size_bytes: int, bounds: RetentionRules
) -> None:
    """Four sizes of 2^62 are 0 in 64 bits: nothing was withdrawn, whatever else was written."""
    await announce(
        world,
        [
            Row(chunk_key(number), Segment(0, 8, 0, 4).name, world.bucket.micros, size_bytes, 1)
            for number in range(4)
        ],
    )
    world.bucket.now += 120
    await world.write(*range(10, 14))
    report = await world.compact(bounds, major=False)
    assert report.major, "it was not found to hold too much"
    assert report.withdrawn == 4
    assert report.withdrawn_bytes == 4 * SIZE_LARGEST
    assert await world.offered() == set(range(10, 14))
    assert report.usage.total.size_bytes == 4000


@pytest.mark.promise("catalog-sizes")
async def test_sizes_of_a_namespace_come_to_what_they_are_counted_as(world: World) -> None:
    segment = Segment(0, 8, 0, 4).name
    rows = [Row(chunk_key(number), segment, 7, AS_IT_IS, 1) for number in range(9)]
    await announce(world, rows)
    report = await world.compact(RetentionRules(), major=True)
    assert report.usage.total.size_bytes == 9 * SIZE_LARGEST
    small = await world.compact(RetentionRules(), major=False)
    assert not small.major
    files = Files(world.tier, FOLDER, Counts())
    manifest = await files.manifest(await sort_out(FOLDER, await world.tier.list(FOLDER)), -1)
    assert manifest is not None
    assert manifest.held.size_bytes == 9 * SIZE_LARGEST


def test_bounds_that_no_store_reaches_are_none() -> None:
    for bounds in (
        RetentionRules(1e30, 1 << 70, 10**30),
        RetentionRules(tenant=RetentionLimits(1e30, 1 << 70, 10**30)),
    ):
        ages = Ages(bounds, 1e9)
        rows = rows_of([Row(chunk_key(1), Segment(0, 8, 0, 4).name, 7, 1000, 1)])
        ages.add(rows)
        assert not RetentionDecision(ages).reasons(rows).any()


@pytest.mark.promise("catalog-limits")
async def test_logs_that_name_more_segments_than_a_file_may_are_compacted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The snapshot of both was one that could not be written, and its error ended the sidecar."""
    places.patch(monkeypatch, "SEGMENTS_PER_FILE_MAX", 3)
    segments = [Segment(0, 8, 0, heads) for heads in range(1, 10)]
    for first in range(0, 9, 3):
        rows: list[Row] = []
        for number in range(first, first + 3):
            name = object_name(NAMESPACE, chunk_key(number), segments[number])
            world.bucket.objects[name] = b"x" * 1000, world.bucket.now
            rows.append(Row(chunk_key(number), segments[number].name, world.bucket.micros, 1000, 1))
        await announce(world, rows)
    config = loads(
        "store: {url: 'file:///not/used', objects_max: 5, gc: {grace: 40s}}", environment={}
    )
    collector = Collector(world.tier, config, StoreHealth(creates=True), lambda: 0)
    await collector.poll()
    assert (collector.collected.rounds, collector.collected.withdrawn) == (1, 4)
    assert len(await world.offered()) == 5
    world.bucket.now += 100
    await collector.poll()
    assert collector.collected.deleted == 4
    assert len(await world.offered()) == 5


@pytest.mark.promise("catalog-limits")
async def test_more_writers_than_a_manifest_may_name_are_merged_all_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "WRITERS_WRITTEN_MAX", 3)
    for number in range(8):
        await announce(world, [await world.put(number)])
    for _ in range(4):
        report = await world.compact(RetentionRules())
        files = Files(world.tier, FOLDER, Counts())
        manifest = await files.manifest(await sort_out(FOLDER, await world.tier.list(FOLDER)), -1)
        assert manifest is not None
        assert len(manifest.merged) == 3
        assert await world.offered() == set(range(8))
        world.bucket.now += 1000
    assert report.logs_merged < 8, "the files of those that it named were removed"
