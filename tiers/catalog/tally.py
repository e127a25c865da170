"""Usage of one log: what the rows of one log come to, for as long as no manifest has counted them.

Owns sums by tenant and by file of the log. Does not own rows or files (`log.py`), nor what others
wrote.

A manifest counts whole files of a log, and says up to which. So rows are summed by the file that
they went into, and those that wait for the next file together.

Invariants: a row counts from `add` on, once, and until `merged` says that its file is; there are at
most `FILES_MAX` sums of files. Of more, the two oldest become one, and count until the later of
their files is merged: too much for a while, never too little.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from tiers.catalog.rows import NO_TENANT
from tiers.catalog.usage import Usage

if TYPE_CHECKING:
    from tiers.catalog.rows import Row

FILES_MAX: Final = 32
"""To ask for a tenant costs a look into each sum."""
_NOT_SENT: Final = -1


class _Sum:
    """What some rows of a log, one after the other, come to."""

    __slots__ = ("end", "number", "tenants", "whole")

    def __init__(self, end: int) -> None:
        self.end = end
        """Rows of the log up to its last one."""
        self.number = _NOT_SENT
        """Of the file that has its last row."""
        self.tenants: dict[bytes, Usage] = {}
        self.whole = Usage()

    def add(self, tenant: bytes, own: Usage) -> None:
        self.tenants[tenant] = self.tenants.get(tenant, _NOTHING).plus(own)
        self.whole = self.whole.plus(own)

    def absorb(self, later: _Sum) -> None:
        for tenant, own in later.tenants.items():
            self.add(tenant, own)
        self.end, self.number = later.end, later.number


_NOTHING: Final = Usage()


class LogUsage:
    """Sums of one log. Rows come and are sent in one order; files are numbered from 0."""

    def __init__(self) -> None:
        self.sums: deque[_Sum] = deque()
        self._open = False
        """Whether the last sum takes more rows."""
        self._rows = 0
        self._rows_sent = 0
        self._merged = -1

    def add(self, row: Row) -> None:
        """A row waits to be sent. One that withdraws comes to nothing."""
        self._rows += 1
        if not self._open:
            self.sums.append(_Sum(self._rows))
            self._open = True
        last = self.sums[-1]
        last.end = self._rows
        if row.size_bytes:
            last.add(row.tenant or NO_TENANT, Usage(row.size_bytes, 1, row.written_at, 1))

    def cut(self) -> None:
        """A file is made of rows that came so far: later ones are in another."""
        self._open = False

    def sent(self, number: int, rows: int) -> None:
        """File `number` is in the store: the next so many rows."""
        self._rows_sent += rows
        for one in self.sums:
            if one.number == _NOT_SENT and one.end <= self._rows_sent:
                one.number = number
        self._settle()

    def merged(self, number: int) -> None:
        """A manifest counts what is in the files up to this one."""
        self._merged = number
        self._settle()

    def _settle(self) -> None:
        sums = self.sums
        while sums and _NOT_SENT < sums[0].number <= self._merged:
            sums.popleft()
        while len(sums) > FILES_MAX and sums[1].number != _NOT_SENT:
            first = sums.popleft()
            first.absorb(sums.popleft())
            sums.appendleft(first)

    @property
    def whole(self) -> Usage:
        """Of all tenants together."""
        found = _NOTHING
        for one in self.sums:
            found = found.plus(one.whole)
        return found

    def held(self, tenant: bytes) -> Usage:
        """Of one tenant, as rows name it."""
        found = _NOTHING
        for one in self.sums:
            if (own := one.tenants.get(tenant)) is not None:
                found = found.plus(own)
        return found
