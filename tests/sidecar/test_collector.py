"""Rounds over several namespaces: what one of them can keep from the others."""

from __future__ import annotations

import numpy as np
import pytest

from sidecar.collector import collect, namespaces
from tests.tiers.catalog.bucket import Bucket, View
from tiers.catalog.bounds import Bounds
from tiers.catalog.compaction import Plan
from tiers.catalog.lease import Lease
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import Counts
from tiers.catalog.names import NUMBER_MAX, catalog_folder, manifest_name, namespace_prefix
from tiers.catalog.rows import Row
from tiers.errors import TierExpired, TierUnavailable
from tiers.filesystems import Listing


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
    lease = Lease(view, "a test", seconds=60)
    assert await lease.take()
    with pytest.raises(TierUnavailable, match=f"{foreign} has the last number"):
        await collect(view, lease, Plan(Bounds(), 100.0, 300.0), prefixes, Counts())
    for prefix in prefixes[1:]:
        assert manifest_name(catalog_folder(prefix), 0) in bucket.objects
    await view.delete([foreign])
    reports = await collect(view, lease, Plan(Bounds(), 100.0, 300.0), prefixes, Counts())
    assert [report.generation for report in reports] == [0, 0, 0]


class Fails(View):
    """A bucket in which one folder cannot be listed."""

    folder = ""

    async def list(
        self,
        prefix: str,
        *,
        start_after: str = "",
        deep: bool = True,
        names_max: int | None = None,
    ) -> Listing:
        if self.folder and prefix.startswith(self.folder):
            raise TierExpired("not done in time", retryable=True)
        return await super().list(prefix, start_after=start_after, deep=deep, names_max=names_max)


async def test_a_namespace_that_fails_does_not_keep_those_after_it_from_their_rounds() -> None:
    bucket = Bucket()
    view = Fails(bucket)
    prefixes = [namespace_prefix(bytes([number] * 32)) for number in range(3)]
    for prefix in prefixes:
        log = LogWriter(view, catalog_folder(prefix), new_writer(), rows_max=10, seconds_max=1.0)
        log.append(Row(bytes(32), "0-8.0-4", bucket.micros, 1000, 1))
        await log.flush()
    view.folder = prefixes[0]
    lease = Lease(view, "a test", seconds=60)
    assert await lease.take()
    with pytest.raises(TierExpired):
        await collect(view, lease, Plan(Bounds(), 300.0, 600.0), prefixes, Counts())
    for prefix in prefixes:
        made = bucket.names(f"{catalog_folder(prefix)}/manifest")
        assert len(made) == (prefix != prefixes[0])
