"""Going through a whole catalog in bounded memory: its merged rows, shard by shard.

Owns loading a catalog as it is now (`load`: the newest manifest, what its snapshots do not have
yet), `Shards`, which yields the merged rows of each first byte of a key in order, and `all_rows`,
which does both. Does not own the rule of merging (`merge.py`), nor what is made of the rows
(`major_compaction.py`, `kvlake du`).

In memory are the rows of all logs and small snapshots, at most some `FRESH_ROWS_MAX` (100 MB), and
one file of the large ones, which are sorted by key and disjoint. Logs with more than that are left
to the next round by `load`. `all_rows` reads them several times if they have more than
`PASS_ROWS_MAX`, for a part of the keys each time: keys are digests, so it has as many as another.

Invariants: nothing is written; a file that is broken or lost is left out and is a doubt; of a
writer's log no file is taken before those with lower numbers, unless they are lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import anyio
import anyio.to_thread
import numpy as np

from tiers.catalog.event_loop import aside
from tiers.catalog.manifest import NOTHING, Manifest
from tiers.catalog.merge import SHARDS, is_sorted, merged, shard_starts
from tiers.catalog.reader import Contents, Files, LogFile, sort_out
from tiers.catalog.rows import Rows, joined
from tiers.errors import ChunkMissing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import numpy.typing as npt

FRESH_ROWS_MAX: Final = 1_000_000
PASS_ROWS_MAX: Final = 2_000_000
"""Rows that `all_rows` has at a time, without those that are merged: 200 MB."""
BLOCK_ROWS: Final = 100_000
ROW_BYTES_MIN: Final = 96
"""Of a row in a file: its columns of a fixed width."""
READS_MAX: Final = 8
GAP_SECONDS: Final = 60.0
"""A file that is missing before one of this age is lost, and not still to be seen."""


class Superseded(Exception):  # a condition, as `TierFull`
    """Somebody else has compacted this catalog meanwhile: begin again, or leave it."""


def _no_rows() -> Rows:
    return joined([])


@dataclass(slots=True)
class State:
    """A catalog as it was found."""

    contents: Contents
    manifest: Manifest
    fresh: Rows = field(default_factory=_no_rows)
    """Merged rows of all logs that were taken and of the snapshots beyond the base."""
    logs: list[LogFile] = field(default_factory=list[LogFile])
    """Log files that were taken: contiguous for each writer."""
    log_rows: Rows = field(default_factory=_no_rows)
    """Merged rows of the logs alone."""
    left: int = 0
    """Log files that were left for another time."""
    doubt: bool = False
    base: tuple[str, ...] = field(default=())

    @property
    def next_generation(self) -> int:
        """Of the next manifest: above every one that is there, whole or not."""
        return max(self.contents.manifests, default=self.manifest.generation) + 1


async def load(files: Files, now_seconds: float) -> State:
    """The catalog in `files`' folder. Raises the tier's errors, and `Superseded`.

    Args:
        files: reads the catalog's files.
        now_seconds: the time by the store's clock.
    """
    state, logs = await _begun(files, now_seconds)
    parts: list[Rows] = []
    num_rows = 0
    for first in range(0, len(logs), READS_MAX):
        if num_rows >= FRESH_ROWS_MAX:
            break
        some = logs[first : first + READS_MAX]
        found = await _read(files, _files_of(some))
        state.logs += some
        parts += [rows for rows in found if rows is not None]
        num_rows += sum(len(rows) for rows in found if rows is not None)
        state.doubt |= None in found
    state.left = len(logs) - len(state.logs)
    overlays = await _overlays(files, state)
    state.log_rows = await anyio.to_thread.run_sync(_merge, parts)
    state.fresh = state.log_rows
    if overlays:
        state.fresh = await anyio.to_thread.run_sync(_merge, [*overlays, state.log_rows])
    return state


async def _begun(files: Files, now_seconds: float) -> tuple[State, list[LogFile]]:
    """The catalog with none of its rows, and the log files that are not merged."""
    contents = sort_out(files.folder, await files.tier.list(files.folder))
    newest = await files.manifest(contents, -1)
    manifest = newest or NOTHING
    broken = bool(contents.manifests) and max(contents.manifests) != manifest.generation
    logs, gaps = _unmerged(contents, manifest, now_seconds)
    base = manifest.snapshots[: manifest.base]
    return State(contents, manifest, doubt=broken or gaps, base=base), logs


async def _overlays(files: Files, state: State) -> list[Rows]:
    """The snapshots beyond the base."""
    names = state.manifest.snapshots[state.manifest.base :]
    found = await _read(files, [(name, 0) for name in names])
    state.doubt |= None in found
    return [rows for rows in found if rows is not None]


def _files_of(logs: Sequence[LogFile]) -> list[tuple[str, int]]:
    return [(one.found.name, one.found.size_bytes) for one in logs]


async def all_rows(
    files: Files, now_seconds: float, shards: range = range(SHARDS)
) -> AsyncIterator[Rows]:
    """The merged rows of each of these shards, however many are in logs that are not merged.

    Raises the tier's errors, and `Superseded`.
    """
    state, logs = await _begun(files, now_seconds)
    overlays = await _overlays(files, state)
    base = _Base(files, state)
    # At most so many, since names of segments take something, too.
    num_rows = sum(one.found.size_bytes for one in logs) // ROW_BYTES_MIN
    passes = max(1, -(-num_rows * len(shards) // (SHARDS * PASS_ROWS_MAX)))
    step = -(-len(shards) // passes)
    for first in range(0, len(shards), step):
        some = shards[first : first + step]
        fresh = FreshRows(some)
        for one in overlays:
            await anyio.to_thread.run_sync(fresh.add, one)
        for at in range(0, len(logs), READS_MAX):
            for found in await _read(files, _files_of(logs[at : at + READS_MAX])):
                if found is not None:
                    await anyio.to_thread.run_sync(fresh.add, found)
        for shard in some:
            old = await base.take(shard)
            new = fresh.take(shard)
            yield await anyio.to_thread.run_sync(_merge, [old, *new]) if new else old


class FreshRows:
    """Rows of some shards that are next to each other, as they come; merged they are not."""

    def __init__(self, shards: range) -> None:
        self._shards = shards
        self._waiting: list[Rows] = []
        # Sorted by shard, and where each shard begins.
        self._blocks: list[tuple[Rows, npt.NDArray[np.intp]]] = []

    def __len__(self) -> int:
        return sum(map(len, self._waiting)) + sum(len(rows) for rows, _ in self._blocks)

    def add(self, rows: Rows) -> None:
        """Take those of the shards. As they are in a file or two, or many small ones."""
        if len(self._shards) < SHARDS:
            digits = rows.keys[:, 0]
            wanted = (digits >= self._shards.start) & (digits < self._shards.stop)
            rows = rows.take(np.flatnonzero(wanted))
        self._waiting.append(rows)
        if sum(map(len, self._waiting)) >= BLOCK_ROWS:
            self._close()

    def _close(self) -> None:
        rows, self._waiting = joined(self._waiting), []
        rows = rows.take(np.argsort(rows.keys[:, 0], kind="stable"))
        self._blocks.append((rows, shard_starts(rows)))

    def take(self, shard: int) -> list[Rows]:
        """Those of one shard, in no order; none of no rows."""
        if self._waiting:
            self._close()
        return [
            rows.take(np.arange(starts[shard], starts[shard + 1]))
            for rows, starts in self._blocks
            if starts[shard] < starts[shard + 1]
        ]


def _merge(parts: Sequence[Rows]) -> Rows:
    return merged(joined(parts))


def _unmerged(
    contents: Contents, manifest: Manifest, now_seconds: float
) -> tuple[list[LogFile], bool]:
    """Log files that are not in the snapshots, and whether one of them was lost."""
    found: list[LogFile] = []
    last: dict[str, int] = {name: one.number for name, one in manifest.merged.items()}
    stopped: set[str] = set()
    lost = False
    for file in contents.logs:
        writer, number = file.log.writer, file.log.number
        before = last.get(writer, -1)
        if number <= before or writer in stopped:
            continue
        if number > before + 1:
            if file.found.modified_seconds > now_seconds - GAP_SECONDS:
                stopped.add(writer)
                continue
            lost = True
        last[writer] = number
        found.append(file)
    return found, lost


async def _read(files: Files, wanted: Sequence[tuple[str, int]]) -> list[Rows | None]:
    """These files, in order; None for one that is broken or lost."""
    found: list[Rows | None] = [None] * len(wanted)
    limit = anyio.CapacityLimiter(READS_MAX)
    missing: list[str] = []

    async def read(index: int, name: str, size_bytes: int) -> None:
        async with limit:
            try:
                rows = files.rows(name, size_bytes) if size_bytes else files.rows(name)
                found[index] = await rows
            except ChunkMissing:
                missing.append(name)

    try:
        async with anyio.create_task_group() as tasks:
            for index, (name, size_bytes) in enumerate(wanted):
                tasks.start_soon(read, index, name, size_bytes)
    except BaseExceptionGroup as group:
        # The first error ended all others.
        raise group.exceptions[0] from None
    if missing:
        await _check_current(files, missing[0])
    return found


async def _check_current(files: Files, name: str) -> None:
    """Tell a file that is lost from one that somebody has merged and deleted meanwhile."""
    contents = sort_out(files.folder, await files.tier.list(files.folder))
    newest = await files.manifest(contents, -1)
    if newest is None:
        return
    for file in contents.logs:
        if file.found.name == name:
            raise Superseded(f"{name} is there again")
    writer = name.rpartition("/")[0].rpartition("/")[2]
    if name not in newest.snapshots and (
        "/log/" not in name or newest.merged.get(writer) is not None
    ):
        raise Superseded(f"{name} was merged by another, into generation {newest.generation}")


class Shards:
    """The merged rows of a catalog. Go through it once, or again from the start."""

    def __init__(self, files: Files, state: State) -> None:
        self._files = files
        self._state = state

    async def rows(self) -> AsyncIterator[tuple[int, Rows, Rows]]:
        """For each shard: its number, its merged rows, and those rows of the base that withdraw.

        Raises the tier's errors, and `Superseded`.
        """
        fresh = self._state.fresh
        starts = shard_starts(fresh)
        base = _Base(self._files, self._state)
        for shard in range(SHARDS):
            old = await base.take(shard)
            new = fresh.take(np.arange(starts[shard], starts[shard + 1]))
            if len(old) and len(new):
                rows = await aside(len(old) + len(new), _merge, [old, new])
            else:
                rows = old if len(old) else new
            yield shard, rows, old.take(old.size_bytes == 0)


class _Base:
    """Reads the large snapshots file by file, as the shards go by."""

    def __init__(self, files: Files, state: State) -> None:
        self._files = files
        self._state = state
        self._next = 0
        self._file: Rows | None = None
        self._starts = np.zeros(SHARDS + 1, dtype=np.intp)

    async def take(self, shard: int) -> Rows:
        parts: list[Rows] = []
        while self._file is not None or self._next < len(self._state.base):
            if self._file is None:
                await self._open()
                continue
            first, last = self._starts[shard], self._starts[shard + 1]
            if last > first:
                parts.append(self._file.take(np.arange(first, last)))
            if last < len(self._file):
                break
            self._file = None
        return parts[0] if len(parts) == 1 else joined(parts)

    async def _open(self) -> None:
        name = self._state.base[self._next]
        self._next += 1
        [rows] = await _read(self._files, [(name, 0)])
        if rows is None or not len(rows):
            self._state.doubt = True
            return
        if not is_sorted(rows):
            self._state.doubt = True
            rows = await anyio.to_thread.run_sync(merged, rows)
        self._file = rows
        self._starts = shard_starts(rows)
