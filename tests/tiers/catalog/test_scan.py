"""Going through a catalog of which more is not merged than may be in memory."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests import places
from tests.tiers.catalog.kit import FOLDER, PREFIX, SEGMENT, memory
from tiers.catalog.compaction import compact
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import CompactionPlan
from tiers.catalog.manifest import Counts
from tiers.catalog.merge import SHARDS, merged
from tiers.catalog.reader import Files
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import Row, Rows, joined, rows_of
from tiers.catalog.scan import all_rows, in_shards

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.store.object_tier import ObjectTier

PLAN = CompactionPlan(RetentionRules(), 100.0, 300.0)
WIDTH = 50
"""Rows that a log file has."""


async def write(tier: ObjectTier, rows: Sequence[Row]) -> None:
    log = LogWriter(tier, FOLDER, new_writer(), rows_max=WIDTH, seconds_max=1.0)
    for first in range(0, len(rows), WIDTH):
        for row in rows[first : first + WIDTH]:
            log.append(row)
        await log.flush()


def random_rows(chooser: random.Random, count: int, keys: Sequence[bytes]) -> list[Row]:
    return [
        Row(
            chooser.choice(keys),
            chooser.choice((SEGMENT, "0-8.4-8")),
            chooser.randrange(1, 1000),
            chooser.choice((0, 100, 200)),
            1,
        )
        for _ in range(count)
    ]


def known(parts: Sequence[Rows]) -> list[Row]:
    return [rows.row(index) for rows in parts for index in range(len(rows))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("part", [range(SHARDS), range(64, 80), range(255, 256), range(17)])
async def test_all_rows_are_told_in_order_however_many_are_not_merged(
    monkeypatch: pytest.MonkeyPatch, seed: int, part: range
) -> None:
    """Whether or not a part of them is in snapshots; never are many at a time in memory."""
    chooser, tier = random.Random(seed), memory()
    keys = [chooser.randbytes(32) for _ in range(1500)]
    told = random_rows(chooser, 1000, keys)
    await write(tier, told)
    if seed % 3:
        await compact(tier, PREFIX, PLAN._replace(major=True), 1e9)
    if seed % 3 == 2:
        told += (more := random_rows(chooser, 300, keys))
        await write(tier, more)
        await compact(tier, PREFIX, PLAN, 1e9)
    told += (more := random_rows(chooser, 3000, keys))
    await write(tier, more)
    files = Files(tier, FOLDER, Counts())
    places.patch(monkeypatch, "PASS_ROWS_MAX", 500)
    held: Counter[range] = Counter()

    def counted(parts: Sequence[Rows | None], shards: range) -> list[Rows]:
        taken = in_shards(parts, shards)
        held[shards] += sum(map(len, taken))
        return taken

    places.patch(monkeypatch, "in_shards", counted)
    found = [rows async for rows in all_rows(files, 1e9, part)]
    assert len(found) == len(part)
    expected = [row for row in known([merged(rows_of(told))]) if row.key[0] in part]
    assert known(found) == expected
    most = max(held.values())
    # Of 3,000 rows in logs. Keys are random, and those of the snapshots come on top.
    assert most < 700
    assert (most > 0) == any(key[0] in part for key in keys)


async def test_little_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chooser, tier = random.Random(1), memory()
    keys = [chooser.randbytes(32) for _ in range(100)]
    told = random_rows(chooser, 400, keys)
    await write(tier, told)
    counts = Counts()
    found = [rows async for rows in all_rows(Files(tier, FOLDER, counts), 1e9)]
    assert known(found) == known([merged(rows_of(told))])
    assert counts.files_read == 400 // WIDTH


async def test_an_empty_catalog_has_no_rows() -> None:
    found = [rows async for rows in all_rows(Files(memory(), FOLDER, Counts()), 1e9)]
    assert len(found) == SHARDS
    assert not len(joined(found))
