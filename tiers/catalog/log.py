"""One writer's log: what this process wrote, announced in batches.

Owns the rows that are not announced yet and the numbers of one writer's files. Does not own when
`flush` is called (`sidecar/catalog/sync.py`). A crash loses the announcement of what was written
since the last flush; reconciliation finds the objects.

Invariants: a writer's name is random and new for each process, so no two processes share a folder
and numbers grow without gaps; rows leave the buffer only once the store has them; the buffer is
bounded, and what does not fit is counted and left to reconciliation.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import anyio

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
from tiers.catalog.usage import LogUsage
from tiers.store.client import run_in_thread
from tiers.store.object_tier import ObjectTier

ROWS_WAITING_MAX: Final = 200_000
"""While the store is unavailable: some 60 MiB."""


def new_writer(kind: str = "s") -> str:
    """A name that no other writer has: `s` for a sidecar, `c` for a compaction."""
    return kind + secrets.token_hex(8)[:15]


@dataclass(eq=False)
class LogWriter:
    """Appends to the catalog in `folder` under one writer's name, from `new_writer`.

    A file is due after `rows_max` rows, or once a row has waited for `seconds_max`. `usage` counts
    the rows that `append` takes, and their files.
    """

    tier: ObjectTier
    _folder: str
    writer: str
    _: KW_ONLY
    rows_max: int
    seconds_max: float
    clock: Callable[[], float] = time.monotonic
    usage: LogUsage | None = None
    files: int = field(default=0, init=False)
    """Files written; the next one's number."""
    rows_lost: int = field(default=0, init=False)
    """Rows that found the buffer full."""
    _rows: list[Row] = field(default_factory=list[Row], init=False)
    _oldest: float = field(default=0.0, init=False)
    _flushing: anyio.Lock = field(default_factory=anyio.Lock, init=False)
    _unsent: tuple[Bytes, int] | None = field(default=None, init=False)

    def __len__(self) -> int:
        return len(self._rows)

    def append(self, row: Row) -> None:
        """Announce a row with the next file."""
        if len(self._rows) >= ROWS_WAITING_MAX:
            self.rows_lost += 1
            return
        if not self._rows:
            self._oldest = self.clock()
        self._rows.append(row)
        if self.usage is not None:
            self.usage.add(row)

    @property
    def due_in(self) -> float | None:
        """Seconds until a flush is due (0: now); None without rows."""
        if not self._rows:
            return None
        if len(self._rows) >= self.rows_max:
            return 0.0
        return max(0.0, self._oldest + self.seconds_max - self.clock())

    async def flush(self) -> None:
        """Write the rows that wait now. Raises the tier's errors; the rows then stay.

        Rows that are appended meanwhile wait until they are due, or chunks that are written one
        after the other would have a file each.
        """
        async with self._flushing:
            left, begun = len(self._rows), self.clock()
            while left > 0:
                if self._unsent is None:
                    # A file names a limited number of segments, and each row may name another.
                    rows = self._rows[: min(left, SEGMENTS_PER_FILE_MAX)]
                    if self.usage is not None:
                        self.usage.cut()
                    columns = await run_in_thread(rows_of, rows)
                    body = await run_in_thread(encode, columns)
                    self._unsent = (body, len(rows))
                # The store's answer may have been lost. The same bytes are sent again under the
                # same name, so that a reader never finds two files of one number.
                body, count = self._unsent
                await self._send(body)
                self._unsent = None
                if self.usage is not None:
                    self.usage.sent(self.files - 1, count)
                del self._rows[:count]
                left -= count
                self._oldest = begun

    async def write(self, rows: Rows) -> None:
        """Write these rows at once, past the buffer. After an error, use a new writer's name."""
        async with self._flushing:
            for part in await run_in_thread(cut, rows, ROWS_PER_FILE_MAX):
                await self._send(await run_in_thread(encode, part))

    async def _send(self, body: Bytes) -> None:
        name = log_name(self._folder, LogName(self.writer, self.files), digest_of(body))
        await self.tier.write(name, body)
        self.files += 1
