"""When whole rounds delete, and what they leave alone."""

from __future__ import annotations

import pytest

from tests.tiers.catalog.kit import NAMESPACE, new_rows
from tests.tiers.catalog.world import GRACE, SEGMENT, World, chunk_key
from tests.tiers.tier_suite import image_of
from tiers.catalog import compaction, snapshots
from tiers.catalog import whole as wholes
from tiers.catalog.bounds import Bounds
from tiers.catalog.comparing import YOUNG_SECONDS
from tiers.catalog.names import object_name
from tiers.catalog.rows import Row
from tiers.layout import Segment


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(snapshots, "SNAPSHOT_ROWS", 7)
    return World()


async def test_steady_writing_does_not_put_off_what_waits_to_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "OVERLAY_ROWS", 8)
    monkeypatch.setattr(compaction, "OVERLAY_SHARE", 1000)
    bounds = Bounds(objects_max=20)
    deleted = 0
    for turn in range(20):
        await world.write(*range(10 * turn, 10 * turn + 10))
        world.bucket.now += 0.6 * GRACE
        report = await world.compact(bounds, whole=False)
        assert report.whole
        deleted += report.deleted
        # What is too much is withdrawn every other round, and deleted in the next but one.
        assert len(world.there()) <= 60
    assert deleted >= 140


async def test_what_others_withdraw_while_a_base_waits_has_a_grace_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "OVERLAY_ROWS", 8)
    bounds = Bounds(ttl_seconds=1000.0)
    await world.write(1)
    world.bucket.now += 900
    await world.write(2)
    two = world.bucket.micros
    world.bucket.now += 200
    assert (await world.compact(bounds, whole=False)).withdrawn == 1
    world.bucket.now += GRACE - 1
    # Somebody found no object 2, and much is written.
    world.log.append(Row(chunk_key(2), SEGMENT.name, two))
    await world.write(*range(10, 20))
    report = await world.compact(bounds, whole=False)
    assert (report.whole, report.deleted, report.waiting) == (True, 0, 2)
    assert await world.offered() == set(range(10, 20))
    world.bucket.now += 2
    report = await world.compact(bounds, whole=False)
    assert (report.whole, report.deleted, report.waiting) == (True, 1, 1)
    assert 1 not in world.there()
    assert 2 in world.there()
    world.bucket.now += GRACE - 1
    assert (await world.compact(bounds, whole=False)).deleted == 0
    world.bucket.now += 2
    assert (await world.compact(bounds, whole=False)).deleted == 1
    assert world.there() == set(range(10, 20)) == await world.offered()


async def test_many_rows_that_others_withdraw_make_a_base_wait_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "OVERLAY_ROWS", 8)
    monkeypatch.setattr(wholes, "LATE_ROWS_MAX", 3)
    bounds = Bounds(ttl_seconds=1000.0)
    await world.write(1)
    world.bucket.now += 1100
    await world.write(*range(10, 20))
    then = world.bucket.micros
    assert (await world.compact(bounds, whole=False)).withdrawn == 1
    world.bucket.now += GRACE - 1
    for number in range(10, 20):
        world.log.append(Row(chunk_key(number), SEGMENT.name, then))
    await world.log.flush()
    assert (await world.compact(bounds, whole=False)).waiting == 11
    world.bucket.now += 2
    assert not (await world.compact(bounds, whole=False)).whole
    world.bucket.now += GRACE
    # Those that came first were kept beyond the base.
    report = await world.compact(bounds, whole=False)
    assert (report.deleted, report.waiting) == (8, 3)
    world.bucket.now += 2 * GRACE
    assert (await world.compact(bounds, whole=False)).deleted == 3
    assert world.there() == set()


async def test_what_is_lost_of_a_chunk_is_withdrawn_as_of_its_newest_segment(world: World) -> None:
    """Readers know one time for each chunk: the newest."""
    [first, second] = [Segment(0, 4, 0, 4), Segment(4, 8, 0, 4)]
    for segment in (first, second):
        await world.tier.write(object_name(NAMESPACE, chunk_key(1), segment), image_of(100))
        world.log.append(Row(chunk_key(1), segment.name, world.bucket.micros, 100, 1))
        world.bucket.now += 5
    await world.log.flush()
    del world.bucket.objects[object_name(NAMESPACE, chunk_key(1), first)]
    world.bucket.now += YOUNG_SECONDS - 7
    # The one that is there is young, and so is what is known of the chunk.
    assert (await world.compact(reconcile=True)).lost == 0
    world.bucket.now += 3
    reader = world.reader()
    before = await new_rows(reader)
    assert (await world.compact(reconcile=True)).lost == 1
    [row] = await new_rows(reader)
    assert (row.segment, row.withdrawn) == (first.name, True)
    assert row.written_at == max(one.written_at for one in before)
