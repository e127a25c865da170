"""Leftovers in a store: what is old enough goes, what is not ours stays."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from tests import places
from tests.tiers.catalog.bucket import START_SECONDS, Bucket, View
from tests.tiers.tier_suite import NAME, image_of, sized
from tiers.catalog.names import namespace_prefix, object_name
from tiers.catalog.orphans import (
    PROBE_SECONDS_MAX,
    REMOVED_TOGETHER,
    Leftovers,
    remove_leftovers,
)
from tiers.errors import TierExpired
from tiers.kv.layout import Segment
from tiers.store.object_tier import UrlObjects

WEEK = 7 * 86_400.0
ONE, OTHER = bytes(range(32)), bytes(range(1, 33))


def aside(number: int, namespace: bytes = ONE) -> str:
    name = object_name(namespace, number.to_bytes(32, "big"), Segment(0, 2, 0, 4))
    return f"quarantine/{name}"


def put(bucket: Bucket, name: str, age_seconds: float, size_bytes: int = 10) -> None:
    bucket.objects[name] = bytes(size_bytes), START_SECONDS - age_seconds


FOREIGN = (
    "quarantine/v1/notes.txt",
    "quarantine/v2/0001020304050607/00/x.arrow",
    "quarantine/holiday.jpg",
    "probe/readme",
    f"probe/{'0' * 15}",
    f"probe/{'0' * 16}/x",
    f"v1/0001020304050607/00/{'0' * 64}/0-2.0-4.arrow",
)


async def test_what_is_old_enough_goes_and_the_rest_stays() -> None:
    bucket = Bucket()
    for name in FOREIGN:
        put(bucket, name, 10 * WEEK)
    old = [(aside(1), WEEK + 1), (aside(2, OTHER), 2 * WEEK), ("probe/0123456789abcdef", 3601.0)]
    young = [(aside(3), WEEK - 1), (f"probe/{'f' * 16}", PROBE_SECONDS_MAX - 1)]
    for name, age_seconds in (*old, *young):
        put(bucket, name, age_seconds)
    before = dict(bucket.objects)
    expected = Leftovers(2, 20, 1, 10, 1)
    left = await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=WEEK, dry_run=True)
    assert (left, bucket.objects) == (expected, before)
    assert await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=WEEK) == expected
    assert sorted(bucket.objects) == sorted([*FOREIGN, *(name for name, _ in young)])


async def test_damaged_objects_may_stay_for_ever() -> None:
    bucket = Bucket()
    put(bucket, aside(1), 1000 * WEEK)
    left = await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=None)
    assert left == Leftovers(quarantine_kept=1, quarantine_kept_bytes=10)
    assert list(bucket.objects) == [aside(1)]


async def test_what_a_store_tells_no_time_of_stays() -> None:
    bucket = Bucket()
    bucket.objects[aside(1)] = b"x", 0.0
    bucket.objects["probe/0123456789abcdef"] = b"x", 0.0
    await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=1.0)
    assert len(bucket.objects) == 2


async def test_of_one_namespace_only() -> None:
    bucket = Bucket()
    for name in (aside(1), aside(2, OTHER), "probe/0123456789abcdef"):
        put(bucket, name, 2 * WEEK)
    left = await remove_leftovers(
        View(bucket), bucket.now, quarantine_seconds=WEEK, namespace=namespace_prefix(OTHER)
    )
    assert left == Leftovers(1, 10)
    assert sorted(bucket.objects) == ["probe/0123456789abcdef", aside(1)]


async def test_a_full_quarantine_is_listed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one listing it would never be done by the deadline, and only grow."""
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    bucket = Bucket()
    bucket.late = lambda prefix, listing: len(listing) > 2
    for number in (*range(5), 1 << 248):
        for namespace in (ONE, OTHER):
            put(bucket, aside(number, namespace), 2 * WEEK)
    put(bucket, aside(7), WEEK - 1)
    put(bucket, f"{aside(7)}~", 2 * WEEK)
    left = await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=WEEK)
    assert left == Leftovers(12, 120, 1, 10)
    assert sorted(bucket.objects) == [aside(7), f"{aside(7)}~"]


async def test_what_is_too_old_of_a_slice_goes_before_the_next_is_listed() -> None:
    bucket = Bucket()
    bucket.late = lambda prefix, listing: prefix.endswith("/01")
    for number in (3, 1 << 248):
        put(bucket, aside(number), 2 * WEEK)
    with pytest.raises(TierExpired):
        await remove_leftovers(View(bucket), bucket.now, quarantine_seconds=WEEK)
    assert list(bucket.objects) == [aside(1 << 248)]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_it_ends_when_the_lease_is_somebody_elses(turns: int) -> None:
    bucket = Bucket()
    for number in range(3 * REMOVED_TOGETHER + 5):
        put(bucket, aside(number), 2 * WEEK)
    asked = 0

    async def alive() -> bool:
        nonlocal asked
        asked += 1
        return asked <= turns

    left = await remove_leftovers(
        View(bucket), bucket.now, quarantine_seconds=WEEK, renew_lease=alive
    )
    assert left.quarantined == turns * REMOVED_TOGETHER
    assert len(bucket.objects) == 3 * REMOVED_TOGETHER + 5 - left.quarantined


async def test_a_lost_lease_ends_the_listing_of_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    bucket = Bucket()
    for number in range(9):
        put(bucket, aside(number), 2 * WEEK)
    pages: list[str] = []

    def noted(prefix: str, _: object) -> bool:
        pages.extend([prefix] if prefix.endswith("/00") else [])
        return False

    bucket.late = noted

    async def lost() -> bool:
        return False

    left = await remove_leftovers(
        View(bucket), bucket.now, quarantine_seconds=WEEK, renew_lease=lost
    )
    assert (left, len(bucket.objects), len(pages)) == (Leftovers(), 9, 1)


@pytest.fixture
def in_folder(tmp_path: Path) -> UrlObjects:
    return UrlObjects(f"file://{tmp_path}")


async def test_what_is_moved_aside_is_as_old_as_the_moving(
    tmp_path: Path, in_folder: UrlObjects
) -> None:
    """In a folder as in a bucket, where it is copied: it stays for a while from then on."""
    await in_folder.write(NAME, image_of(10))
    os.utime(tmp_path / NAME, (1.0, 1.0))
    assert [one.modified_seconds for one in await in_folder.list("v1")] == [1.0]
    began = time.time() - 60
    await in_folder.quarantine(NAME)
    [found] = await in_folder.list("quarantine")
    assert found.modified_seconds > began


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS])
async def test_what_cannot_be_given_a_time_is_moved_aside_with_its_own(
    in_folder: UrlObjects, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Another user's object, or any on a mount that sets no times."""
    await in_folder.write(NAME, image_of(10))

    def forbid(path: str, *, follow_symlinks: bool) -> None:
        raise OSError(code, os.strerror(code), path)

    monkeypatch.setattr(os, "utime", forbid)
    await in_folder.quarantine(NAME)
    assert sized(await in_folder.list("")) == [(f"quarantine/{NAME}", 10)]
