"""When whole rounds delete, and what they leave alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests import places
from tests.tiers.catalog.kit import NAMESPACE, PREFIX, new_rows
from tests.tiers.catalog.world import GRACE, SEGMENT, World, chunk_key, view_of
from tests.tiers.tier_suite import image_of
from tiers.catalog.major_compaction import YOUNG_SECONDS
from tiers.catalog.names import object_name, parse_name
from tiers.catalog.orphans import rows_in_shard
from tiers.catalog.retention import RetentionLimits, RetentionRules
from tiers.catalog.rows import Row
from tiers.errors import TierExpired
from tiers.kv.layout import Segment
from tiers.store.client import Listing


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    places.patch(monkeypatch, "SNAPSHOT_ROWS", 7)
    return World()


async def test_steady_writing_does_not_put_off_what_waits_to_be_deleted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "OVERLAY_ROWS", 8)
    places.patch(monkeypatch, "OVERLAY_SHARE", 1000)
    bounds = RetentionRules(objects_max=20)
    deleted = 0
    for turn in range(20):
        await world.write(*range(10 * turn, 10 * turn + 10))
        world.bucket.now += 0.6 * GRACE
        report = await world.compact(bounds, major=False)
        assert report.major
        deleted += report.deleted
        # What is too much is withdrawn every other round, and deleted in the next but one.
        assert len(world.there()) <= 60
    assert deleted >= 140


async def test_what_others_withdraw_while_a_base_waits_has_a_grace_of_its_own(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "OVERLAY_ROWS", 8)
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1)
    world.bucket.now += 900
    await world.write(2)
    two = world.bucket.micros
    world.bucket.now += 200
    assert (await world.compact(bounds, major=False)).withdrawn == 1
    world.bucket.now += GRACE - 1
    # Object 2 goes, somebody finds none, and much is written.
    del world.bucket.objects[world.name(2)]
    world.log.append(Row(chunk_key(2), SEGMENT.name, two))
    await world.write(*range(10, 20))
    report = await world.compact(bounds, major=False)
    assert (report.major, report.deleted, report.waiting) == (True, 0, 2)
    assert await world.offered() == set(range(10, 20))
    world.bucket.now += 2
    report = await world.compact(bounds, major=False)
    assert (report.major, report.deleted, report.waiting) == (True, 1, 1)
    assert 1 not in world.there()
    world.bucket.now += GRACE - 1
    assert not (await world.compact(bounds, major=False)).major
    world.bucket.now += 2
    report = await world.compact(bounds, major=False)
    assert (report.deleted, report.waiting) == (0, 0)
    assert world.there() == set(range(10, 20)) == await world.offered()


async def test_row_that_may_not_be_deleted_makes_no_compaction_due_before_another_grace(
    world: World,
) -> None:
    """An object that is written again, and whose writer dies before it announces it."""
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1, 2)
    world.bucket.now += 2000
    assert (await world.compact(bounds, major=False)).withdrawn == 2
    world.bucket.now += GRACE + 1
    await world.put(1)
    for deleted in (1, 0):
        report = await world.compact(bounds, major=False)
        assert (report.major, report.deleted, report.waiting) == (True, deleted, 1)
        assert not (await world.compact(bounds, major=False)).major
        world.bucket.now += GRACE + 1
    assert world.there() == {1}


async def test_many_rows_that_others_withdraw_make_a_base_wait_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "OVERLAY_ROWS", 8)
    places.patch(monkeypatch, "LATE_ROWS_MAX", 3)
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1)
    world.bucket.now += 1100
    await world.write(*range(10, 20))
    then = world.bucket.micros
    assert (await world.compact(bounds, major=False)).withdrawn == 1
    world.bucket.now += GRACE - 1
    for number in range(10, 20):
        del world.bucket.objects[world.name(number)]
        world.log.append(Row(chunk_key(number), SEGMENT.name, then))
    await world.log.flush()
    assert (await world.compact(bounds, major=False)).waiting == 11
    world.bucket.now += 2
    assert not (await world.compact(bounds, major=False)).major
    world.bucket.now += GRACE
    # Those that came first were kept beyond the base.
    report = await world.compact(bounds, major=False)
    assert (report.deleted, report.waiting) == (1, 3)
    world.bucket.now += 2 * GRACE
    assert (await world.compact(bounds, major=False)).waiting == 0
    assert world.there() == set()


@pytest.mark.parametrize("late_rows_max", [100, 5])
async def test_an_operator_who_compacts_often_does_not_put_off_deletions(
    world: World, monkeypatch: pytest.MonkeyPatch, late_rows_max: int
) -> None:
    places.patch(monkeypatch, "LATE_ROWS_MAX", late_rows_max)
    bounds = RetentionRules(objects_max=20)
    reader, seen = world.reader(), list[Row]()
    for turn in range(29):
        await world.write(*range(10 * turn, 10 * turn + 10))
        world.bucket.now += 0.3 * GRACE
        report = await world.compact(bounds)
        seen += await new_rows(reader)
        if late_rows_max == 100:
            # The limit holds after each.
            assert len(view_of(seen)) <= 20
        assert view_of(seen) == await world.offered()
        assert len(world.there()) <= 100
        assert report.waiting == len(world.there()) - len(view_of(seen))


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
    assert (row.segment, row.size_bytes == 0) == (first.name, True)
    assert row.written_at == max(one.written_at for one in before)


async def test_what_somebody_missed_and_is_there_is_offered_again(world: World) -> None:
    old = world.reader()
    await world.write(1, 2)
    seen = await new_rows(old)
    # Both are reported, of another segment too, and later; one is gone.
    for row in seen:
        world.log.append(row._replace(size_bytes=0, num_blocks=0))
    world.log.append(Row(chunk_key(1), "0-4.0-4", world.bucket.micros + 7))
    await world.log.flush()
    del world.bucket.objects[world.name(2)]
    report = await world.compact()
    assert (report.deleted, report.waiting) == (0, 3)
    assert await world.offered() == set()
    world.bucket.now += GRACE + 1
    report = await world.compact()
    assert (report.deleted, report.found, report.waiting) == (0, 1, 0)
    assert world.there() == {1} == await world.offered()
    seen += await new_rows(old)
    assert view_of(seen) == {1}
    again = max(seen, key=lambda row: row.written_at)
    # Later than what was said of any segment of the chunk.
    assert again.written_at == int((world.bucket.now - GRACE - 1) * 1e6) + 8
    assert (again.segment, again.size_bytes) == (SEGMENT.name, 1000)
    world.bucket.now += GRACE + 1
    assert (await world.compact()).deleted == 0
    assert world.there() == {1} == await world.offered()


async def test_what_is_offered_again_is_whose_it_was(world: World) -> None:
    """A reader that missed it knows neither tenant nor parent."""
    tenant, parent = b"tenant-a", chunk_key(9)
    bounds = RetentionRules(named={b"": RetentionLimits(objects_max=0)})
    row = (await world.put(1))._replace(tenant=tenant, parent=parent)
    world.log.append(row)
    await world.log.flush()
    reader = world.reader()
    await new_rows(reader)
    world.log.append(Row(row.key, row.segment, row.written_at))
    await world.log.flush()
    await world.compact(bounds)
    world.bucket.now += GRACE + 1
    report = await world.compact(bounds)
    assert (report.found, report.withdrawn, report.deleted) == (1, 0, 0)
    again = max(await new_rows(reader), key=lambda one: one.written_at)
    assert (again.size_bytes == 0, again.tenant, again.parent) == (False, tenant, parent)
    assert await world.offered() == {1}


async def test_what_somebody_missed_and_is_there_still_falls_to_a_bound(world: World) -> None:
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1)
    world.bucket.now += 900
    [row] = await new_rows(world.reader())
    world.log.append(row._replace(size_bytes=0, num_blocks=0))
    await world.log.flush()
    await world.compact(bounds)
    world.bucket.now += 2 * GRACE
    report = await world.compact(bounds)
    assert (report.found, report.withdrawn, report.deleted) == (1, 1, 0)
    world.bucket.now += GRACE + 1
    assert (await world.compact(bounds)).deleted == 1
    assert world.there() == set() == await world.offered()


async def test_an_object_of_unknown_blocks_falls_to_a_bound_once(world: World) -> None:
    await world.put(1)
    world.bucket.now += 1000
    assert (await world.compact(reconcile=True)).found == 1
    bounds = RetentionRules(ttl_seconds=500.0)
    assert (await world.compact(bounds)).withdrawn == 1
    # Somebody misses it all the same, as of the same time.
    [*_, row] = await new_rows(world.reader())
    world.log.append(row._replace(size_bytes=0, num_blocks=0))
    await world.log.flush()
    world.bucket.now += GRACE + 1
    assert (await world.compact(bounds)).deleted == 1
    assert world.there() == set()


async def test_what_is_written_again_while_a_shard_is_deleted_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting a shard takes minutes where requests are limited, and its listing is older."""
    places.patch(monkeypatch, "DELETED_NAMES", 2)
    places.patch(monkeypatch, "LOOK_NAMES", 3)
    bounds = RetentionRules(ttl_seconds=1000.0)
    numbers = [256 * number for number in range(8)]
    assert len({chunk_key(number)[0] for number in numbers}) == 1
    await world.write(*numbers)
    world.bucket.now += 2000
    assert (await world.compact(bounds)).withdrawn == 8
    world.bucket.now += GRACE + 1
    batches: list[Sequence[str]] = []
    again = world.writer()
    inner = world.tier.delete

    async def delete(names: Sequence[str]) -> None:
        await inner(names)
        if parse_name(names[0]) is not None:
            batches.append(names)
            if len(batches) == 1:
                # Another cluster computes one of those to come, writes it and tells all.
                again.append(await world.put(numbers[5]))
                await again.flush()

    monkeypatch.setattr(world.tier, "delete", delete)
    report = await world.compact(bounds)
    assert (report.deleted, report.waiting) == (7, 0)
    assert max(len(names) for names in batches) == 2
    assert [name for name in world.bucket.objects if parse_name(name)] == [world.name(numbers[5])]
    await world.compact(bounds)
    assert await world.offered() == {numbers[5]}


async def test_a_shard_is_listed_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline would end a listing of very many names every time."""
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    inner = world.tier.list

    async def list_in_time(prefix: str, **asked: Any) -> Listing:
        found = await inner(prefix, **asked)
        if len(found) > 2 and "/catalog" not in prefix:
            raise TierExpired("not done in time", retryable=True)
        return found

    numbers = [256 * number for number in range(5)]
    for number in numbers:
        await world.put(number)
    world.bucket.now += YOUNG_SECONDS + 1
    monkeypatch.setattr(world.tier, "list", list_in_time)
    assert (await world.compact(reconcile=True)).found == 5
    assert len(await rows_in_shard(world.tier, PREFIX, chunk_key(0)[0])) == 5
