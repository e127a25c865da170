"""Rounds of compaction: what readers see, what is withdrawn, deleted, found and removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests import places
from tests.tiers.catalog.bucket import START_SECONDS, Killed, View
from tests.tiers.catalog.kit import (
    FOLDER,
    PREFIX,
    encode_manifest,
    new_rows,
    others_turns,
)
from tests.tiers.catalog.world import GRACE, KEEP, LATER, World, view_of
from tests.tiers.tier_suite import image_of
from tiers.catalog.compaction import ABANDONED_SECONDS, MANIFESTS_KEPT, compact
from tiers.catalog.major_compaction import CompactionPlan
from tiers.catalog.manifest import TENANTS_PER_SLICE, Counts, Manifest
from tiers.catalog.names import (
    NUMBER_MAX,
    manifest_name,
    parse_manifest,
    parse_snapshot,
)
from tiers.catalog.reader import READS_MAX, CatalogReader
from tiers.catalog.retention import Reasons, RetentionLimits, RetentionReason, RetentionRules
from tiers.catalog.rows import Row, Rows
from tiers.catalog.scan import Superseded
from tiers.catalog.usage import Usage
from tiers.errors import TierUnavailable


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    places.patch(monkeypatch, "SNAPSHOT_ROWS", 7)
    return World()


@pytest.mark.parametrize("major", [False, True])
async def test_old_and_new_readers_see_the_same(world: World, major: bool) -> None:
    counts = Counts()
    old = CatalogReader(world.tier, FOLDER, counts)
    seen: list[Row] = []
    for first in range(0, 60, 6):
        await world.write(*range(first, first + 6))
        world.bucket.now += LATER
        report = await world.compact(major=major)
        assert report.major is major
        assert report.logs_merged == 1
        seen += await new_rows(old)
        assert view_of(seen) == set(range(first + 6))
        assert await world.offered() == set(range(first + 6))
    assert counts.reloads == 0
    assert not old.take_suspect()
    assert len(world.bucket.names(f"{FOLDER}/log")) <= 2
    assert len(world.bucket.names(f"{FOLDER}/manifest")) <= MANIFESTS_KEPT + 1
    fresh = world.reader()
    assert await world.offered(fresh) == set(range(60))
    assert not fresh.take_suspect()


async def test_small_rounds_become_a_whole_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "OVERLAY_ROWS", 20)
    done: list[bool] = []
    for first in range(0, 80, 5):
        await world.write(*range(first, first + 5))
        done.append((await world.compact(major=False)).major)
    assert 0 < sum(done) < 5
    assert await world.offered() == set(range(80))


async def test_without_news_a_round_writes_nothing(world: World) -> None:
    await world.write(1)
    await world.compact()
    before = dict(world.bucket.objects)
    report = await world.compact(major=False)
    assert (report.logs_merged, report.major, report.generation) == (0, False, 0)
    assert world.bucket.objects == before


async def test_what_is_too_old_is_withdrawn_then_deleted(world: World) -> None:
    old = world.reader()
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1, 2)
    seen = await new_rows(old)
    world.bucket.now += 900
    await world.write(3)
    world.bucket.now += 200
    # Nobody has to ask for a whole round: it is due.
    report = await world.compact(bounds, major=False)
    assert (report.major, report.withdrawn, report.deleted) == (True, 2, 0)
    seen += await new_rows(old)
    assert view_of(seen) == {3} == await world.offered()
    assert world.there() == {1, 2, 3}
    world.bucket.now += GRACE - 1
    assert (await world.compact(bounds, major=False)).deleted == 0
    assert world.there() == {1, 2, 3}
    world.bucket.now += 2
    report = await world.compact(bounds, major=False)
    assert (report.major, report.deleted, report.waiting) == (True, 2, 0)
    assert world.there() == {3} == await world.offered()


async def test_the_grace_begins_when_readers_can_have_heard(world: World) -> None:
    async def slowly(*_: object) -> None:
        world.bucket.now += 2 * GRACE

    await world.write(1)
    world.bucket.now += LATER
    bounds = RetentionRules(ttl_seconds=LATER / 2)
    assert (await world.compact(bounds, on_withdrawn=slowly)).withdrawn == 1
    assert (await world.compact(bounds)).deleted == 0
    world.bucket.now += GRACE
    assert (await world.compact(bounds)).deleted == 1


async def test_the_byte_cap_takes_the_oldest(world: World) -> None:
    bounds = RetentionRules(size_bytes_max=4000)
    for number in range(8):
        await world.write(number)
        world.bucket.now += 60
    report = await world.compact(bounds, major=False)
    assert report.withdrawn == 4
    assert report.withdrawn_bytes == 4000
    assert await world.offered() == {4, 5, 6, 7}
    assert report.usage.total.size_bytes == 4000
    assert report.withdrawn_by()["store.size_max"] == 4


TENANT = b"tenant-a"


@pytest.mark.parametrize(
    ("limits", "setting"),
    [
        (RetentionLimits(ttl_seconds=150.0), "tenants.store_ttl"),
        (RetentionLimits(size_bytes_max=2500), "tenants.store_max"),
        (RetentionLimits(objects_max=2), "tenants.store_objects_max"),
    ],
    ids=["ttl", "bytes", "objects"],
)
@pytest.mark.parametrize("named", [False, True], ids=["default", "named"])
async def test_a_tenants_bound_makes_a_round_due_and_takes_its_own(
    world: World, limits: RetentionLimits, setting: str, named: bool
) -> None:
    bounds = (
        RetentionRules(named={TENANT: limits})
        if named
        else RetentionRules(tenant=limits, named={b"": RetentionLimits()})
    )
    for number in range(4):
        await world.write(number)
        await world.write(number + 10, tenant=TENANT)
        world.bucket.now += 60
    merged = await world.compact(major=False)
    assert not merged.major
    told: list[tuple[int, RetentionReason]] = []

    async def tell(rows: Rows, whys: Reasons) -> None:
        told.extend(
            (int.from_bytes(rows.row(at).key[1:], "big"), RetentionReason(why))
            for at, why in enumerate(whys.tolist())
        )

    report = await world.compact(bounds, major=False, on_withdrawn=tell)
    assert report.major
    assert await world.offered() == {0, 1, 2, 3, 12, 13}
    assert [(number, why.setting) for number, why in sorted(told)] == [(10, setting), (11, setting)]
    assert {name: count for name, count in report.withdrawn_by().items() if count} == {setting: 2}
    assert report.usage.largest(2)[TENANT][:2] == (2000, 2)
    world.bucket.now += 1
    # Nothing more is due before what was withdrawn can be deleted.
    assert not (await world.compact(bounds, major=False)).major


async def test_whether_a_tenant_has_too_much_is_found_out_in_turns_with_other_tasks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def exceeded(*_: object) -> bool:
        asked.append(turns())
        return False

    named = {f"{number:016x}": Usage(number, 1, 7, 1) for number in range(3 * TENANTS_PER_SLICE)}
    body = encode_manifest(Manifest(0, tenants=named))
    await world.tier.write(manifest_name(FOLDER, 0), body)
    await world.write(1, 2)
    monkeypatch.setattr(RetentionLimits, "exceeded", exceeded)
    async with others_turns() as turns:
        await world.compact(major=False)
    assert len(asked) > len(named)
    assert max(Counter(asked).values()) <= TENANTS_PER_SLICE + 2
    newest = world.reader()
    await new_rows(newest)
    tenants = {name: held for name, held in newest.manifest.tenants.items() if name in named}
    assert tenants == {**named, "0" * 16: Usage(2000, 3, 7, 3)}


async def test_a_manifest_names_the_tenants_that_hold_most(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "TENANTS_MAX", 3)
    for number in (4, 2, 5, 3, 1):
        await world.write(number, size_bytes=1000 * number, tenant=bytes(7) + bytes([number]))
    for major in (False, True):
        await world.compact(major=major)
        newest = world.reader()
        await new_rows(newest)
        assert set(newest.manifest.tenants) == {f"{number:016x}" for number in (3, 4, 5)}


async def test_what_was_announced_or_written_again_is_not_deleted(world: World) -> None:
    bounds = RetentionRules(ttl_seconds=1000.0)
    await world.write(1, 2, 3)
    world.bucket.now += 2000
    assert (await world.compact(bounds)).withdrawn == 3
    world.bucket.now += GRACE / 2
    await world.write(1)
    late = await world.put(2)
    world.bucket.now += GRACE
    report = await world.compact(bounds)
    assert report.deleted == 1
    assert world.there() == {1, 2}
    assert await world.offered() == {1}
    world.log.append(late)
    await world.log.flush()
    assert (await world.compact(bounds)).deleted == 0
    assert await world.offered() == {1, 2} == world.there()


async def test_a_dry_run_writes_nothing_and_tells_the_same(world: World) -> None:
    bounds = RetentionRules(objects_max=2)
    for number in range(5):
        await world.write(number)
        world.bucket.now += 60
    before = dict(world.bucket.objects)
    tried = await world.compact(bounds, dry_run=True)
    assert world.bucket.objects == before
    done = await world.compact(bounds)
    assert tried.withdrawn == done.withdrawn == 3


async def test_reconciling_finds_objects_and_lost_ones(world: World) -> None:
    await world.write(1, 2)
    await world.put(3)
    world.bucket.now += 1000
    await world.put(4)
    del world.bucket.objects[world.name(2)]
    reader = world.reader()
    seen = await new_rows(reader)
    report = await world.compact(reconcile=True)
    assert (report.found, report.lost) == (1, 1)
    seen += await new_rows(reader)
    # What is young may be announced any moment by its writer.
    assert view_of(seen) == await world.offered() == {1, 3}
    world.bucket.now += 1000
    assert (await world.compact(reconcile=True)).found == 1
    assert await world.offered() == {1, 3, 4}


async def test_an_object_that_was_withdrawn_and_written_again_is_found(world: World) -> None:
    await world.write(1)
    world.bucket.now += 2000
    await world.compact(RetentionRules(ttl_seconds=1000.0))
    await world.put(1)
    world.bucket.now += 700
    assert (await world.compact(reconcile=True)).found == 1
    assert await world.offered() == {1} == world.there()


async def test_a_damaged_manifest_or_snapshot_costs_no_chunk_for_long(world: World) -> None:
    await world.write(*range(20))
    world.bucket.now += 1000
    await world.compact()
    [snapshot, *_] = world.bucket.names(f"{FOLDER}/snapshot")
    await world.tier.write(snapshot, image_of(100))
    await world.compact(reconcile=True)
    assert await world.offered() == set(range(20))
    [*_, newest] = world.bucket.names(f"{FOLDER}/manifest")
    await world.tier.write(newest, image_of(100))
    await world.compact(reconcile=True)
    assert await world.offered() == set(range(20))
    for name in world.bucket.names(FOLDER):
        del world.bucket.objects[name]
    await world.compact(reconcile=True)
    assert await world.offered() == set(range(20))


async def test_a_log_that_was_lost_is_passed_when_it_cannot_come_any_more(world: World) -> None:
    for number in range(4):
        await world.write(number)
    names = world.bucket.names(f"{FOLDER}/log")
    del world.bucket.objects[names[1]]
    assert (await world.compact()).logs_merged == 1
    world.bucket.now += 1000
    assert (await world.compact()).logs_merged == 2
    await world.compact(reconcile=True)
    assert await world.offered() == {0, 1, 2, 3}


async def test_of_two_rounds_at_once_one_creates_the_manifest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.write(*range(10))
    inner = world.tier.write
    raced: list[str] = []

    async def write(name: str, image: np.ndarray, *, create: bool = False) -> None:
        if parse_manifest(FOLDER, name) is not None and not raced:
            raced.append(name)
            await world.compact()
        await inner(name, image, create=create)

    monkeypatch.setattr(world.tier, "write", write)
    await world.write(11)
    # Both make the same of the same files, so neither lost anything: one is told so.
    report = await world.compact()
    assert report.generation == 0
    await world.write(12)
    raced.clear()

    def digest_of(_: object) -> str:
        return f"{len(raced):032x}"

    places.patch(monkeypatch, "digest_of", digest_of, package="tiers")
    with pytest.raises(Superseded):
        await world.compact()
    monkeypatch.undo()
    names = world.bucket.names(f"{FOLDER}/snapshot")
    assert {parse_snapshot(FOLDER, name) for name in names} <= {0, 1}


async def test_files_of_rounds_that_died_are_removed(world: World) -> None:
    await world.write(1)
    stray = f"{FOLDER}/snapshot/000000000000-00005-{'0' * 32}.arrow"
    await world.tier.write(stray, image_of(100))
    await world.compact()
    assert stray in world.bucket.objects
    world.bucket.now += ABANDONED_SECONDS + 1
    await world.compact(major=False)
    assert stray not in world.bucket.objects
    assert await world.offered() == {1}


async def test_what_a_dead_round_began_is_not_taken_from_one_that_goes_on_with_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows make the same file: it is old in a listing, and then the new manifest's."""
    await world.write(1)
    await world.compact(major=False)
    plan = CompactionPlan(RetentionRules(), GRACE, KEEP, major=True)
    killed = View(world.bucket, steps=4)
    with pytest.raises(Killed):
        await compact(killed, PREFIX, plan, world.bucket.now)
    [begun] = [name for name in world.bucket.objects if parse_snapshot(FOLDER, name) == 1]
    world.bucket.now += ABANDONED_SECONDS + 1
    idle = View(world.bucket)
    inner = idle.delete

    async def delete(names: Sequence[str]) -> None:
        # One process has listed the files; now another compacts, and then the files go.
        await world.compact()
        await inner(names)

    monkeypatch.setattr(idle, "delete", delete)
    await compact(idle, PREFIX, plan._replace(major=False), world.bucket.now)
    if not world.bucket.names(f"{FOLDER}/manifest")[1:]:
        await world.compact()
    assert begun in world.bucket.objects
    assert await world.offered() == {1}


async def test_a_round_ends_when_the_lease_is_lost(world: World) -> None:
    await world.write(*range(10))

    async def lost() -> bool:
        return False

    plan = CompactionPlan(RetentionRules(), GRACE, KEEP, major=True)
    with pytest.raises(Superseded):
        await compact(world.tier, PREFIX, plan, world.bucket.now, renew_lease=lost)
    assert not world.bucket.names(f"{FOLDER}/manifest")
    assert not world.bucket.names(f"{FOLDER}/snapshot")


async def test_the_lease_is_renewed_while_files_are_read(world: World) -> None:
    """To read hours of logs takes longer than a lease lasts."""
    for number in range(40):
        await world.write(number)
        await world.log.flush()
        if number < 20:
            await world.compact(major=False)
    read_since: list[int] = []
    reads = 0
    inner = world.tier.read

    async def read(*args: Any, **kwargs: Any) -> int:
        nonlocal reads
        reads += 1
        return await inner(*args, **kwargs)

    async def renewed() -> bool:
        nonlocal reads
        read_since.append(reads)
        reads = 0
        return True

    with mock.patch.object(world.tier, "read", read):
        plan = CompactionPlan(RetentionRules(), GRACE, KEEP)
        await compact(world.tier, PREFIX, plan, world.bucket.now, renew_lease=renewed)
    # Beside a few files, the manifest was read.
    assert max(read_since) <= READS_MAX + 1
    assert sum(read_since) >= 40


async def test_clocks_of_writers_that_are_off_lose_nothing_that_is_young(world: World) -> None:
    for number, skew in enumerate((-86_400, 0, 3600, 86_000)):
        row = await world.put(number)
        world.log.append(row._replace(written_at=row.written_at + skew * 1_000_000))
    await world.log.flush()
    await world.compact(RetentionRules(ttl_seconds=7200.0))
    assert await world.offered() == {1, 2, 3}
    assert world.bucket.now == START_SECONDS


async def test_a_manifest_with_the_last_number_of_all_ends_rounds_and_not_readers() -> None:
    world = World()
    await world.write(1, 2)
    await world.compact()
    foreign = manifest_name(FOLDER, NUMBER_MAX)
    await world.tier.write(foreign, image_of(50))
    await world.write(3)
    with pytest.raises(
        TierUnavailable, match=f"{NUMBER_MAX} has the highest possible number.*delete it"
    ):
        await world.compact()
    assert await world.offered() == {1, 2, 3}
    await world.tier.delete([foreign])
    await world.compact()
    assert await world.offered() == {1, 2, 3}
