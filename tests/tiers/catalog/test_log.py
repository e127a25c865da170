"""A writer's log: batches, numbers, and a store that fails."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio.lowlevel
import pytest

from tests import places
from tests.faulty_tier import FaultRates, Faulty
from tests.tiers.catalog.kit import FOLDER, memory, new_rows, reader, row, writer
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.names import parse_log
from tiers.catalog.rows import rows_of
from tiers.errors import TierUnavailable
from tiers.store.middleware import Retrying, Verb, Wrapper

T = TypeVar("T")


def test_every_life_has_a_name_of_its_own() -> None:
    assert len({new_writer() for _ in range(100)}) == 100
    assert new_writer("c").startswith("c")


async def test_rows_wait_until_they_are_due() -> None:
    now = [0.0]
    log = LogWriter(
        memory(), FOLDER, new_writer(), rows_max=3, seconds_max=2.0, clock=lambda: now[0]
    )
    assert (log.due_in, len(log)) == (None, 0)
    log.append(row(1))
    assert log.due_in == 2.0
    now[0] = 1.5
    log.append(row(2))
    assert log.due_in == 0.5
    log.append(row(3))
    assert log.due_in == 0.0
    await log.flush()
    assert (log.files, len(log)) == (1, 0)
    await log.flush()
    assert log.files == 1


class OneMoreEachTime(Wrapper):
    """A store to which a row is written while it takes a file of rows, and another, and so on."""

    log: LogWriter
    rows = 1

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "write":
            assert self.rows < 100, "a file for each row"
            self.log.append(row(self.rows))
            self.rows += 1
        return await call()


async def test_rows_that_come_during_a_flush_wait_until_they_are_due() -> None:
    now = [0.0]
    inner = memory()
    tier = OneMoreEachTime(inner)
    log = tier.log = LogWriter(
        tier, FOLDER, new_writer(), rows_max=10, seconds_max=2.0, clock=lambda: now[0]
    )
    log.append(row(0))
    now[0] = 2.0
    await log.flush()
    assert (log.files, len(log), log.due_in) == (1, 1, 2.0)
    now[0] = 4.0
    await log.flush()
    assert await new_rows(reader(inner)) == [row(0), row(1)]


async def test_files_are_numbered_from_zero_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROWS_PER_FILE_MAX", "SEGMENTS_PER_FILE_MAX"):
        places.patch(monkeypatch, name, 2)
    tier = memory()
    log = writer(tier)
    for number in range(5):
        log.append(row(number))
    await log.flush()
    await log.write(rows_of([row(number) for number in range(5, 8)]))
    parsed = [parse_log(FOLDER, found.name) for found in await tier.list(FOLDER)]
    assert sorted(one.number for one in parsed if one) == [0, 1, 2, 3, 4]
    assert await new_rows(reader(tier)) == [row(number) for number in range(8)]


async def test_a_full_buffer_loses_rows_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    places.patch(monkeypatch, "ROWS_WAITING_MAX", 2, package="tiers")
    log = writer(memory())
    for number in range(5):
        log.append(row(number))
    assert (len(log), log.rows_lost) == (2, 3)


async def test_rows_that_come_while_the_store_is_away_are_kept_in_order() -> None:
    inner = memory()
    faulty = Faulty(inner, seed=3, rates=FaultRates(unavailable=0.4, answer_lost=0.4))
    log, dice = writer(faulty), random.Random(4)
    for number in range(60):
        log.append(row(number))
        if dice.random() < 0.5:
            try:
                await log.flush()
            except TierUnavailable:
                await anyio.lowlevel.checkpoint()
    log.tier = Retrying(faulty, attempts_max=50, pause_seconds=0)
    await log.flush()
    numbers = [int.from_bytes(one.key, "big") for one in await new_rows(reader(inner))]
    assert numbers == list(range(60))
    names = [parse_log(FOLDER, found.name) for found in await inner.list(FOLDER)]
    assert sorted(one.number for one in names if one) == list(range(log.files))
