"""One writer's log: what this process wrote, announced in batches.

Owns the rows that are not announced yet, when they are sent, and the numbers of one writer's
files. Does not own when `flush` is called beyond saying that it is `due` (the sidecar's watch
calls it), nor the local view of own writes: the engine has them at once.

A crash loses the announcement of what was written since the last flush; the objects are found
again by the reconciliation of `collection.py`.

Invariants: a writer's name is random, and new for each life, so no two processes share a folder
and numbers grow without gaps; rows leave the buffer only once the store has them; the buffer is
bounded, and what does not fit is counted and left to the reconciliation.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from tiers.catalog.names import LogName, log_name
from tiers.catalog.rows import (
    ROWS_PER_FILE_MAX,
    SEGMENTS_PER_FILE_MAX,
    Bytes,
    Row,
    Rows,
    cut,
    digest_of,
    encode,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.catalog.tally import LogUsage
    from tiers.store.object_tier import ObjectTier

ROWS_WAITING_MAX: Final = 200_000
"""While the store is away: some 60 MiB."""


def new_writer(kind: str = "s") -> str:
    """A name that nobody else has: `s` for a sidecar, `c` for a collector."""
    return kind + secrets.token_hex(8)[:15]


class LogWriter:
    """Appends to one catalog under one writer's name. One task at a time may flush.

    Args:
        tier: the store.
        folder: the catalog's folder.
        writer: from `new_writer`.
        rows_max: rows after which a file is due, whatever the time.
        seconds_max: how long a row waits.
        clock: monotonic seconds; the system's where it is left out.
        tally: is told of the rows that `append` takes, and of their files.
    """

    def __init__(
        self,
        tier: ObjectTier,
        folder: str,
        writer: str,
        *,
        rows_max: int,
        seconds_max: float,
        clock: Callable[[], float] | None = None,
        tally: LogUsage | None = None,
    ) -> None:
        self.tier = tier
        self._folder = folder
        self.writer = writer
        self._rows_max = rows_max
        self._seconds_max = seconds_max
        self._clock = clock or time.monotonic
        self._tally = tally
        self._rows: list[Row] = []
        self._oldest = 0.0
        self._flushing = anyio.Lock()
        self._unsent: tuple[Bytes, int] | None = None
        self.files = 0
        """Files written; the next one's number."""
        self.rows_lost = 0
        """Rows that found the buffer full."""

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: Row) -> None:
        """Announce a row with the next file."""
        if len(self._rows) >= ROWS_WAITING_MAX:
            self.rows_lost += 1
            return
        if not self._rows:
            self._oldest = self._clock()
        self._rows.append(row)
        if self._tally is not None:
            self._tally.add(row)

    @property
    def due_in(self) -> float | None:
        """Seconds until a flush is due (0: now); None while there is nothing to announce."""
        if not self._rows:
            return None
        if len(self._rows) >= self._rows_max:
            return 0.0
        return max(0.0, self._oldest + self._seconds_max - self._clock())

    async def flush(self) -> None:
        """Write everything that waits now. Raises the tier's errors; the rows then wait on.

        What comes meanwhile waits until it is due itself: chunks that are written one after the
        other would otherwise have a file each.
        """
        async with self._flushing:
            left, begun = len(self._rows), self._clock()
            while left > 0:
                if self._unsent is None:
                    # Each may name a segment of its own, and a file takes no more of these.
                    rows = self._rows[: min(left, SEGMENTS_PER_FILE_MAX)]
                    if self._tally is not None:
                        self._tally.cut()
                    self._unsent = (await anyio.to_thread.run_sync(_encoded, rows), len(rows))
                # An answer may have been lost, so the same bytes are sent again under the same
                # name: a reader never finds two files of one number.
                body, count = self._unsent
                await self._send(body)
                self._unsent = None
                if self._tally is not None:
                    self._tally.sent(self.files - 1, count)
                del self._rows[:count]
                left -= count
                self._oldest = begun

    async def write(self, rows: Rows) -> None:
        """Write these rows at once, past the buffer. After an error, use another writer's name."""
        async with self._flushing:
            for part in await anyio.to_thread.run_sync(cut, rows, ROWS_PER_FILE_MAX):
                body = await anyio.to_thread.run_sync(encode, part)
                await self._send(body)

    async def _send(self, body: Bytes) -> None:
        name = log_name(self._folder, LogName(self.writer, self.files), digest_of(body))
        await self.tier.write(name, body)
        self.files += 1


def _encoded(rows: list[Row]) -> Bytes:
    return encode(rows_of(rows))
