"""Writing snapshots: sorted rows, cut into files of a size.

Owns the files of one manifest to be. Does not own which rows (`compaction.py`,
`major_compaction.py`), nor their columns (`rows.py`).

Invariant: a file's name has its generation, its part and the digest of its bytes, so writing it
again, or by two at once, leaves the same file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread

from tiers.catalog.names import snapshot_name
from tiers.catalog.rows import Rows, cut, digest_of, encode, joined

if TYPE_CHECKING:
    from tiers.store.object_tier import ObjectTier

SNAPSHOT_ROWS: Final = 250_000
"""Rows in one file of a whole merge: 25 MB."""


class Snapshots:
    """Takes sorted rows as they come; `None` for a tier makes nothing but names."""

    def __init__(self, tier: ObjectTier | None, folder: str, generation: int) -> None:
        self._tier = tier
        self._folder = folder
        self._generation = generation
        self._rows: list[Rows] = []
        self._names: list[str] = []

    async def write(self, rows: Rows) -> None:
        """Write these now."""
        for part in cut(rows, SNAPSHOT_ROWS):
            await self._write(part)

    async def add(self, rows: Rows) -> None:
        """Take the rows of the next shard."""
        if len(rows):
            self._rows.append(rows)
        if sum(len(one) for one in self._rows) >= SNAPSHOT_ROWS:
            await self._flush()

    async def close(self) -> list[str]:
        """Write what is left; the names of all files."""
        if self._rows:
            await self._flush()
        return self._names

    async def _flush(self) -> None:
        for part in await anyio.to_thread.run_sync(_cut_all, self._rows):
            await self._write(part)
        self._rows = []

    async def _write(self, rows: Rows) -> None:
        if self._tier is None:
            self._names.append("")
            return
        body = await anyio.to_thread.run_sync(encode, rows)
        name = snapshot_name(self._folder, self._generation, len(self._names), digest_of(body))
        await self._tier.write(name, body)
        self._names.append(name)


def _cut_all(parts: list[Rows]) -> list[Rows]:
    return cut(joined(parts), SNAPSHOT_ROWS)
