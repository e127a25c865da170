"""Readers: several log files at a time, in order, and one of them fails."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import anyio
import pytest

from tests import places
from tests.tiers.catalog.kit import FOLDER, memory, new_rows, reader, row, writer
from tiers.catalog.names import parse_log
from tiers.catalog.reader import READS_MAX
from tiers.catalog.rows import Row
from tiers.errors import TierUnavailable
from tiers.store.middleware import Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.middleware import Verb

T = TypeVar("T")


class _SlowReads(Wrapper):
    """A log file is read once `together` are requested, or after a second; one may fail."""

    together = 1
    failing = ""
    running = 0
    most = 0

    def __init__(self) -> None:
        super().__init__(memory())
        self._enough = anyio.Event()

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb != "read" or parse_log(FOLDER, name) is None:
            return await call()
        if name == self.failing:
            raise TierUnavailable("refused", retryable=True)
        self.running += 1
        self.most = max(self.most, self.running)
        if self.most >= self.together:
            self._enough.set()
        with anyio.move_on_after(1.0):
            await self._enough.wait()
        try:
            return await call()
        finally:
            self.running -= 1


@pytest.mark.parametrize("bytes_max", [1 << 20, 1])
async def test_log_files_are_read_several_at_a_time_and_come_in_order(
    monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    places.patch(monkeypatch, "READ_BYTES_MAX", bytes_max)
    tier = _SlowReads()
    tier.together = READS_MAX if bytes_max > 1 else 1
    logs = [writer(tier) for _ in range(4)]
    for number in range(40):
        logs[number % 4].append(row(number))
        await logs[number % 4].flush()
    seen = await new_rows(reader(tier))
    assert sorted(seen) == [row(number) for number in range(40)]
    for first in range(4):
        own = [one for one in seen if int.from_bytes(one.key, "big") % 4 == first]
        assert own == sorted(own)
    assert tier.most == tier.together


async def test_files_before_one_that_cannot_be_read_come_once() -> None:
    tier = _SlowReads()
    log = writer(tier)
    for number in range(2 * READS_MAX):
        log.append(row(number))
        await log.flush()
    names = sorted(found.name for found in await tier.list(FOLDER))
    one, seen = reader(tier), list[Row]()
    tier.failing = names[READS_MAX + 3]
    for _ in range(2):
        with contextlib.suppress(TierUnavailable):
            async for rows in one.changes():
                seen += [rows.row(index) for index in range(len(rows))]
            pytest.fail("the refresh did not fail")
    assert seen == [row(number) for number in range(READS_MAX + 3)]
    tier.failing = ""
    assert await new_rows(one) == [row(n) for n in range(READS_MAX + 3, 2 * READS_MAX)]
