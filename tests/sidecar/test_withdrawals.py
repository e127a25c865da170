"""What a round of collection withdraws, as engines hear of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import anyio
import pytest

from sidecar.core.commands import Listed
from sidecar.core.stored_table import ListedRow
from sidecar.protocol import Outcome, Role
from tests import places
from tests.sidecar.catalog_rows import listed_rows
from tests.sidecar.client import RunningSidecar, Worker, config_in, key_of
from tests.sidecar.engine_names import key
from tests.sidecar.worlds import make_world
from tests.tiers.catalog.bucket import Bucket, View
from tests.tiers.catalog.kit import FOLDER, PREFIX, new_rows, reader, writer
from tiers.catalog.compaction import compact
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import CompactionPlan
from tiers.catalog.manifest import Counts
from tiers.catalog.names import catalog_folder
from tiers.catalog.orphans import rows_in_shard
from tiers.catalog.reader import CatalogReader
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import Row, Rows
from tiers.kv.layout import Segment
from tiers.store.object_tier import ObjectTier, UrlObjects

RANKS = ("0-8.0-2", "0-8.2-4")
WHOLE = "0-8.0-4"
FOREIGN_MASK = 1 << len(RANKS)


async def collected(*segments: str) -> tuple[list[Row], list[Row]]:
    """The rows that announce a chunk, each segment later than the one before; then the others."""
    bucket = Bucket()
    view = View(bucket)
    log, one = writer(view), reader(view)
    for segment in segments:
        log.append(Row(key(1), segment, bucket.micros, 1000, 1))
        bucket.now += 0.001
    await log.flush()
    offered = await new_rows(one)
    bucket.now += 1000
    plan = CompactionPlan(RetentionRules(ttl_seconds=500.0), 100.0, 1000.0)
    assert (await compact(view, PREFIX, plan, bucket.now)).withdrawn == len(segments)
    withdrawn = await new_rows(one)
    assert len(withdrawn) == len(segments)
    assert len(bucket.names(FOLDER)) > 2
    return offered, withdrawn


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "turned round"])
@pytest.mark.parametrize(
    "segments", [RANKS, (WHOLE, *RANKS), (*RANKS, WHOLE)], ids=["own", "whole first", "whole last"]
)
async def test_a_collected_chunk_is_forgotten_with_all_its_segments(
    segments: tuple[str, ...], turned: bool
) -> None:
    masks = {RANKS[0]: 1, RANKS[1]: 2, WHOLE: FOREIGN_MASK}
    world = make_world()
    workers = [world.open(Role.WORKER, rank=rank, world_size=2) for rank in range(2)]
    offered, withdrawn = await collected(*segments)
    if turned:
        withdrawn.reverse()
    [realm] = world.engine.directory.realms.values()
    for rows in (offered, withdrawn):
        lines = [
            ListedRow(row.key, masks[row.segment], row.written_at, row.size_bytes == 0)
            for row in rows
        ]
        world.send(Listed(0, listed_rows(lines), [Segment.parse(WHOLE)]))
        if rows is offered:
            assert realm.stored.mask(key(1)) == sum(masks[name] for name in segments)
    assert realm.stored.mask(key(1)) == 0
    assert not world.index
    # An engine that computes it again has all of it written.
    for worker in workers:
        world.stored(worker, 1, [1])
    assert sorted(write.rank for write in world.writes.values()) == [0, 1]


@pytest.mark.slow
def test_a_look_through_the_objects_makes_nothing_newer_than_its_row(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    """At the slice of the two."""

    async def noted(tier: ObjectTier, prefix: str, number: int) -> Rows:
        if number == key_of("one")[0]:
            looks.append(number)
        return await rows_in_shard(tier, prefix, number)

    places.patch(monkeypatch, "rows_in_shard", noted)
    bucket = short_directory / "bucket"
    store = {"url": f"file://{bucket}", "refresh_seconds": 0.05, "catalog_flush": 0.05}
    config = config_in(short_directory, store={**store, "reconcile_every": 4.0})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:

        def wait_held(chunks: int) -> None:
            sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == chunks)

        # It would announce what is written meanwhile a second time.
        sidecar.wait_until(lambda now: now["tiers"]["store"]["catalog"]["sweeps"] >= 1)
        assert worker.store(1, key_of("one"), [0]) is Outcome.OK
        wait_held(1)
        sidecar.wait_until(lambda now: now["tiers"]["store"]["catalog"]["rows_waiting"] == 0)
        [one] = bucket.glob("v1/*/??/*/*.arrow")
        # By a store's clock that is ahead of the writer's.
        os.utime(one, (time.time(), time.time()))
        # Another that nobody announced, in the same slice.
        folder = one.parent.parent / (one.parent.name[:2] + key_of("two").hex()[2:])
        folder.mkdir()
        (folder / one.name).write_bytes(one.read_bytes())
        # Only now that what was written here is announced: until then a slow pass skips it.
        places.patch(monkeypatch, "YOUNG_SECONDS", 0.0)
        wait_held(2)

        async def withdraw() -> None:
            tier = UrlObjects(f"file://{bucket}")
            catalog = catalog_folder(f"v1/{one.parent.parent.parent.name}")
            rows = await new_rows(CatalogReader(tier, catalog, Counts()))
            [row] = [row for row in rows if row.key == key_of("one")]
            log = LogWriter(tier, catalog, new_writer("c"), rows_max=1, seconds_max=0.0)
            log.append(row._replace(size_bytes=0))
            await log.flush()

        anyio.run(withdraw)
        wait_held(1)
        # It is there until it is deleted, and newer than what withdrew it by the store's clock.
        looked = len(looks)
        sidecar.wait_until(lambda _: len(looks) >= looked + 2)
        assert sidecar.status()["tiers"]["store"]["chunks"] == 1
