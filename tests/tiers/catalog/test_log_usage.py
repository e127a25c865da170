"""What a log's rows come to until a manifest counts them: once, and never too little."""

from __future__ import annotations

import random

import pytest

from tests.tiers.catalog.kit import memory
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.rows import NO_TENANT, Row
from tiers.catalog.usage import LOG_SUMS_MAX, UNKNOWN_TENANT, LogUsage, Usage

A, B = b"tenant-a", b"tenant-b"


def row(size_bytes: int, tenant: bytes = A, written_at: int = 500) -> Row:
    return Row(bytes(32), "0-1.0-1", written_at, size_bytes, 1, tenant=tenant)


def test_a_row_counts_until_its_file_is_merged() -> None:
    tally = LogUsage()
    tally.add(row(10))
    tally.cut()
    tally.add(row(20, B, 400))
    tally.add(row(7, b""))
    assert tally.of(A) == Usage(10, 1, 500, 1)
    tally.sent(0, 1)
    assert tally.total == Usage(37, 3, 400, 3)
    tally.merged(0)
    assert (tally.of(A), tally.of(B)) == (Usage(), Usage(20, 1, 400, 1))
    assert tally.of(NO_TENANT) == Usage(7, 1, 500, 1)
    tally.cut()
    tally.sent(1, 2)
    tally.merged(1)
    assert tally.total == Usage()


def test_an_object_that_a_listing_found_is_of_an_unknown_tenant() -> None:
    tally = LogUsage()
    tally.add(row(7, b"")._replace(num_blocks=0))
    assert tally.of(UNKNOWN_TENANT) == tally.total == Usage(7, 1, 500, 1)
    assert tally.of(NO_TENANT) == Usage()


def test_a_withdrawal_comes_to_nothing_and_has_its_place_in_a_file() -> None:
    tally = LogUsage()
    tally.add(row(0))
    tally.cut()
    tally.add(row(5))
    tally.cut()
    tally.sent(0, 1)
    tally.merged(0)
    assert tally.of(A) == Usage(5, 1, 500, 1)


def test_a_file_that_was_merged_before_its_writer_heard_that_it_is_there() -> None:
    """Its answer was lost, and it is sent again."""
    tally = LogUsage()
    tally.add(row(5))
    tally.cut()
    tally.merged(0)
    assert tally.of(A).size_bytes == 5
    tally.sent(0, 1)
    assert tally.total == Usage()


def test_what_waits_longer_than_one_file_takes_counts_until_its_last_row_is_merged() -> None:
    tally = LogUsage()
    for _ in range(5):
        tally.add(row(1))
    tally.cut()
    tally.sent(0, 3)
    tally.merged(0)
    assert tally.of(A).size_bytes == 5
    tally.sent(1, 2)
    tally.merged(1)
    assert tally.of(A).size_bytes == 0


@pytest.mark.parametrize("seed", range(40))
def test_random_lives_are_never_told_too_small(seed: int) -> None:
    """Against a list of all rows; while there are few files, to the byte."""
    chooser = random.Random(seed)
    tally, rows, files, taken, sent, merged = LogUsage(), list[int](), list[int](), 0, 0, -1
    for _ in range(400):
        what = chooser.choice(("add", "add", "cut", "sent", "merged"))
        if what == "add":
            rows.append(chooser.randrange(100))
            tally.add(row(rows[-1]))
        elif what == "cut" and taken == sent and taken < len(rows):
            # All that waits goes into one file, as a log does it.
            taken = len(rows)
            tally.cut()
        elif what == "sent" and taken > sent:
            tally.sent(len(files), taken - sent)
            files.append(taken)
            sent = taken
        elif what == "merged" and files and chooser.random() < 0.1:
            merged = chooser.randrange(max(0, merged), len(files))
            tally.merged(merged)
        left = rows[files[merged] if merged >= 0 else 0 :]
        told = tally.of(A)
        assert told.size_bytes >= sum(left)
        if len(files) - merged <= LOG_SUMS_MAX:
            assert told.size_bytes == sum(left)
            assert told.objects == sum(map(bool, left))
        assert told == tally.total


def test_many_files_are_few_sums() -> None:
    tally = LogUsage()
    for number in range(10 * LOG_SUMS_MAX):
        tally.add(row(1))
        tally.cut()
        tally.sent(number, 1)
    assert len(tally.sums) == LOG_SUMS_MAX  # pyright: ignore[reportPrivateUsage]
    assert tally.of(A) == Usage(10 * LOG_SUMS_MAX, 10 * LOG_SUMS_MAX, 500, 10 * LOG_SUMS_MAX)
    tally.merged(9 * LOG_SUMS_MAX)
    assert tally.of(A).objects == LOG_SUMS_MAX - 1


async def test_a_log_tells_its_tally() -> None:
    tally = LogUsage()
    log = LogWriter(memory(), "f", new_writer(), rows_max=10, seconds_max=1.0, usage=tally)
    log.append(row(3))
    log.append(row(4, B))
    assert tally.total.size_bytes == 7
    await log.flush()
    log.append(row(5))
    assert tally.total.size_bytes == 12
    tally.merged(0)
    assert tally.total.size_bytes == 5
    await log.flush()
    tally.merged(log.files - 1)
    assert tally.total == Usage()
