"""Sweeps: what a listing of the objects themselves comes to."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests import places
from tests.faulty_tier import FaultRates, Faulty
from tests.tiers.catalog.bucket import Bucket, View
from tests.tiers.catalog.kit import FOLDER, NAMESPACE, PREFIX, SEGMENT, memory
from tests.tiers.tier_suite import image_of
from tiers.catalog.compaction import compact
from tiers.catalog.major_compaction import YOUNG_SECONDS, CompactionPlan
from tiers.catalog.names import object_name, segment_name
from tiers.catalog.orphans import (
    list_shard,
    nonempty_shards,
    rows_in_shard,
    rows_of_listing,
    shard_folder,
)
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import TIME_LATEST
from tiers.errors import TierUnavailable
from tiers.kv.layout import Segment
from tiers.store.client import Found
from tiers.store.object_tier import UrlObjects

if TYPE_CHECKING:
    from pathlib import Path

    from tiers.store.client import Listing

KEYS = [bytes([first]) * 32 for first in (0, 7, 7, 255)]


async def test_a_namespace_is_its_folders_by_two_digits() -> None:
    tier = memory()
    assert await nonempty_shards(tier, PREFIX) == []
    assert len(await rows_in_shard(tier, PREFIX, 7)) == 0
    for number, key in enumerate(KEYS):
        name = object_name(NAMESPACE, key, Segment(0, 8, number, 1))
        await tier.write(name, image_of(1000 + number))
    await tier.write(f"{FOLDER}/log/s{'0' * 15}/junk", image_of(10))
    assert await nonempty_shards(tier, PREFIX) == [0, 7, 255]
    rows = await rows_in_shard(tier, PREFIX, 7)
    found = sorted(rows.row(index) for index in range(len(rows)))
    assert [(one.key, one.segment, one.size_bytes) for one in found] == [
        (KEYS[1], "0-8.1-2", 1001),
        (KEYS[2], "0-8.2-3", 1002),
    ]
    assert all(one.written_at > 1e15 and one.tenant == b"" for one in found)


def test_foreign_objects_are_left_out() -> None:
    name = f"{shard_folder(PREFIX, 7)}/{KEYS[1].hex()}/{SEGMENT}.arrow"
    listing = [
        Found(name, 5, 0.0),
        Found(f"{name}.tmp", 5, 0.0),
        Found(name.replace("/07/", "/08/"), 5, 0.0),
        Found(f"quarantine/{name}", 5, 0.0),
        Found(name.replace(PREFIX, "v1/" + "f" * 16), 5, 0.0),
        Found(name.replace(SEGMENT, "1-8.0-4"), 0, 0.0),
    ]
    [row] = [rows_of_listing(listing, PREFIX).row(0)]
    assert (row.key, row.segment, row.size_bytes, row.written_at) == (KEYS[1], SEGMENT, 5, 1)
    assert len(rows_of_listing(listing, PREFIX)) == 1


@pytest.mark.promise("hostile-bucket")
def test_a_time_that_no_catalog_can_hold_is_the_latest_time() -> None:
    """Any user of a shared folder can set it, and it ended the sidecar."""
    rows = rows_of_listing([Found(segment_name(PREFIX, KEYS[1], SEGMENT), 5, 1e14)], PREFIX)
    assert rows.row(0).written_at == TIME_LATEST


async def test_a_store_that_fails_is_an_error_of_the_tier() -> None:
    tier = Faulty(memory(), seed=1, rates=FaultRates(unavailable=1.0))
    with pytest.raises(TierUnavailable):
        await rows_in_shard(tier, PREFIX, 0)


@pytest.mark.parametrize("foreign", ["~x", "x.arrow~", "sub folder/.nfs0000", "\u00e4"])
async def test_a_foreign_name_in_a_slice_does_not_end_a_sweep_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, foreign: str
) -> None:
    """The last name of a page is what the next one begins after."""
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    tier = UrlObjects(f"file://{tmp_path}")
    for number in range(3):
        name = object_name(NAMESPACE, bytes(32), Segment(0, 8, number, 1))
        await tier.write(name, image_of(1000))
    path = tmp_path / shard_folder(PREFIX, 0) / foreign
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"not ours")
    assert len(await rows_in_shard(tier, PREFIX, 0)) == 3
    plan = CompactionPlan(RetentionRules(), 100.0, 300.0, major=True, reconcile=True)
    report = await compact(tier, PREFIX, plan, time.time() + 2 * YOUNG_SECONDS)
    assert (report.found, report.lost) == (3, 0)
    assert path.exists()


class Paged(View):
    """Counts the pages that are requested."""

    pages = 0

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        self.pages += names_max is not None
        return await super().list(prefix, start_after=start_after, deep=deep, names_max=names_max)


async def test_the_lease_is_renewed_before_each_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard of many pages outlasted it, and every later collection ended there, too."""
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    tier = Paged(Bucket())
    for number in range(7):
        name = object_name(NAMESPACE, bytes(32), Segment(0, 8, number, 1))
        await tier.write(name, image_of(10))
    most = 0

    async def renew() -> bool:
        nonlocal most
        most, tier.pages = max(most, tier.pages), 0
        return True

    plan = CompactionPlan(RetentionRules(), 100.0, 300.0, major=True, reconcile=True)
    report = await compact(tier, PREFIX, plan, time.time() + 2 * YOUNG_SECONDS, renew_lease=renew)
    assert report.found == 7
    assert most == 1


class Deaf(View):
    """A server that begins at the start, whatever it was asked."""

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        return await super().list(prefix, deep=deep, names_max=names_max)


async def test_a_listing_that_does_not_go_on_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "LIST_PAGE_NAMES", 2)
    tier = Deaf(Bucket())
    for number in range(3):
        name = object_name(NAMESPACE, bytes(32), Segment(0, 8, number, 1))
        await tier.write(name, image_of(10))
    with pytest.raises(TierUnavailable, match="does not go on after a name") as info:
        await list_shard(tier, PREFIX, 0)
    assert not info.value.retryable
    assert f"{tier.url}/{shard_folder(PREFIX, 0)}" in str(info.value)
