"""What is left to merge, and that announcing it leaves the event loop to others."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from sidecar.catalog.garbage_collector import CROWDED_FILES
from tests import places
from tests.tiers.catalog.kit import (
    FOLDER,
    PREFIX,
    memory,
    new_rows,
    reader,
    row,
    write_many_files,
    writer,
)
from tiers.catalog.compaction import compact
from tiers.catalog.major_compaction import CompactionPlan
from tiers.catalog.retention import RetentionRules
from tiers.catalog.rows import Row, Rows, rows_of
from tiers.errors import TierExpired

LONG = 1e9


@pytest.mark.parametrize("page_names", [100, 1000], ids=["listed in parts", "listed at once"])
async def test_logs_that_are_merged_and_young_are_no_crowd(
    monkeypatch: pytest.MonkeyPatch, page_names: int
) -> None:
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", page_names)
    tier = memory()
    log = writer(tier)
    one = reader(tier)
    for number in range(700):
        log.append(row(number))
        await log.flush()
        if number == 100:
            await new_rows(one)
            assert one.logs_unmerged == 101
    await new_rows(one)
    assert one.logs_unmerged == 700 > CROWDED_FILES
    await compact(tier, PREFIX, CompactionPlan(RetentionRules(), LONG, LONG), LONG)
    assert len(await tier.list(f"{FOLDER}/log")) == 700
    for added in range(3):
        log.append(row(1000 + added))
        await log.flush()
        assert await new_rows(one) == [row(1000 + added)]
        assert one.logs_unmerged == added + 1
    fresh = reader(tier)
    assert len(await new_rows(fresh)) == 703
    assert fresh.logs_unmerged == 3


async def test_rows_become_columns_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()

    def seen(rows: Sequence[Row]) -> Rows:
        threads.add(threading.get_ident())
        return rows_of(rows)

    places.patch(monkeypatch, "rows_of", seen)
    log = writer(memory())
    log.append(row(1))
    await log.flush()
    assert log.files == 1
    assert threads
    assert threading.get_ident() not in threads


async def test_after_a_failed_read_the_files_of_idle_writers_are_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listing in parts does not show them."""
    tier = memory()
    logs = await write_many_files(tier)
    places.patch(monkeypatch, "CATALOG_PAGE_NAMES", 5)
    one = reader(tier)
    await new_rows(one)
    logs[0].append(row(100))
    await logs[0].flush()

    async def fail(*_: object) -> None:
        raise TierExpired("slow", retryable=True)

    with monkeypatch.context() as failing:
        failing.setattr(tier, "read", fail)
        with pytest.raises(TierExpired):
            await new_rows(one)
    assert await new_rows(one) == [row(100)]
    assert await new_rows(one) == []
