"""Reading a whole catalog in bounded memory: its merged rows, shard by shard.

Owns loading a catalog as it is now (`load`: the newest manifest, and what its snapshots do not have
yet), `merged_shards`, which yields the merged rows of each first byte of a key in order, and
`all_rows`, which does both. Does not own the rule of merging (`merge.py`).

In memory are the rows of logs and small snapshots, and one of the large files, which are sorted by
key and disjoint. `load` leaves logs beyond `FRESH_ROWS_MAX` rows to the next compaction. `all_rows`
reads logs with more than `PASS_ROWS_MAX` several times, for a part of the keys each time: keys are
digests, so parts are of equal size.

Invariants: nothing is written; a file that is broken or lost is left out and makes the catalog
suspect; no file of a writer's log is taken before those with lower numbers, unless they are lost.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias, TypeVar, TypeVarTuple

import anyio.lowlevel
import numpy as np

from tiers.catalog.manifest import EMPTY_MANIFEST, Manifest
from tiers.catalog.merge import SHARDS, merged, shard_starts
from tiers.catalog.reader import READS_MAX, Contents, Files, LogFile, sort_out
from tiers.catalog.rows import FILE_BYTES_MAX, Rows, joined
from tiers.errors import ChunkMissing, TierError
from tiers.store.client import Found, Listing, run_in_thread

Check: TypeAlias = Callable[[], Awaitable[None]]
"""Returns while the work may go on."""
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FRESH_ROWS_MAX: Final = 1_000_000
PASS_ROWS_MAX: Final = 1_000_000
"""Rows of logs that `all_rows` has at a time: 100 MB, and as much again while they are merged."""
ROW_BYTES_MIN: Final = 96
"""A row in a file: its columns of a fixed width."""
GAP_SECONDS: Final = 60.0
"""A file that is missing before one of this age is lost; before a younger one it may still come."""
FEW_ROWS: Final = 256
"""Sorting and merging them takes a fraction of a millisecond."""


class Superseded(Exception):  # a condition, as `TierFull`
    """Another process has compacted this catalog meanwhile: begin again, or leave it."""


async def run_for_rows(num_rows: int, work: Callable[[*Ts], T], *given: *Ts) -> T:
    """`work(*given)` in a thread; for few rows at once, on the event loop."""
    if num_rows > FEW_ROWS:
        return await run_in_thread(work, *given)
    await anyio.lowlevel.checkpoint()
    return work(*given)


@dataclass(slots=True)
class CatalogState:
    """A catalog as it was found."""

    contents: Contents
    manifest: Manifest
    fresh: Rows = field(default_factory=lambda: joined([]))
    """Merged rows of all logs that were taken and of the snapshots beyond the base."""
    logs: list[LogFile] = field(default_factory=list[LogFile])
    """Log files that were taken: contiguous for each writer."""
    log_rows: Rows = field(default_factory=lambda: joined([]))
    """Merged rows of the logs alone."""
    left: int = 0
    """Log files that were left to the next compaction."""
    suspect: bool = False
    """Whether files were broken or lost."""

    @property
    def base(self) -> tuple[str, ...]:
        """The large snapshots."""
        return self.manifest.snapshots[: self.manifest.base]

    @property
    def next_generation(self) -> int:
        """Number of the next manifest: above all existing ones, damaged ones too."""
        return max(self.contents.manifests, default=self.manifest.generation) + 1


async def load(files: Files, now_seconds: float, check_lease: Check) -> CatalogState:
    """The catalog in `files`' folder; `now_seconds` is by the store's clock.

    `check_lease` is called before every few files: they may take longer than a lease lasts. Raises
    what it raises, the tier's errors, and `Superseded`.
    """
    state, logs = await _begin(files, now_seconds)
    parts: list[Rows] = []
    num_rows = 0
    for first in range(0, len(logs), READS_MAX):
        if num_rows >= FRESH_ROWS_MAX:
            break
        some = logs[first : first + READS_MAX]
        await check_lease()
        found = await _read(files, [one.found for one in some])
        state.logs += some
        parts += [rows for rows in found if rows is not None]
        num_rows += sum(len(rows) for rows in found if rows is not None)
        state.suspect |= None in found
    state.left = len(logs) - len(state.logs)
    overlays = await _overlays(files, state, check_lease)
    state.log_rows = await run_in_thread(_merge, parts)
    state.fresh = state.log_rows
    if overlays:
        state.fresh = await run_in_thread(_merge, [*overlays, state.log_rows])
    return state


async def _begin(files: Files, now_seconds: float) -> tuple[CatalogState, list[LogFile]]:
    """The catalog with none of its rows, and the log files that are not merged."""
    contents = await sort_out(files.folder, await files.tier.list(files.folder))
    newest = await files.manifest(contents, -1)
    manifest = newest or EMPTY_MANIFEST
    broken = bool(contents.manifests) and max(contents.manifests) != manifest.generation
    logs, gaps = _unmerged(contents, manifest, now_seconds)
    return CatalogState(contents, manifest, suspect=broken or gaps), logs


async def _overlays(
    files: Files, state: CatalogState, check_lease: Check | None = None
) -> list[Rows]:
    """The snapshots beyond the base."""
    names = state.manifest.snapshots[state.manifest.base :]
    wanted = [Found(name, FILE_BYTES_MAX, 0.0) for name in names]
    found: list[Rows | None] = []
    for first in range(0, len(wanted), READS_MAX):
        if check_lease is not None:
            await check_lease()
        found += await _read(files, wanted[first : first + READS_MAX])
    state.suspect |= None in found
    return [rows for rows in found if rows is not None]


async def all_rows(
    files: Files, now_seconds: float, shards: range = range(SHARDS)
) -> AsyncIterator[Rows]:
    """The merged rows of each of these shards, however many are in logs that are not merged.

    Raises the tier's errors, and `Superseded`.
    """
    state, logs = await _begin(files, now_seconds)
    overlays = await _overlays(files, state)
    base = BaseRows(files, state)
    # An upper bound: names of segments take room too.
    num_rows = sum(one.found.size_bytes for one in logs) // ROW_BYTES_MIN
    passes = max(1, -(-num_rows * len(shards) // (SHARDS * PASS_ROWS_MAX)))
    step = -(-len(shards) // passes)
    for first in range(0, len(shards), step):
        some = shards[first : first + step]
        parts = await run_in_thread(in_shards, overlays, some)
        for at in range(0, len(logs), READS_MAX):
            found = await _read(files, [one.found for one in logs[at : at + READS_MAX]])
            parts += await run_in_thread(in_shards, found, some)
        fresh = await run_in_thread(_merge, parts)
        async for _, rows, _ in merged_shards(base, fresh, some):
            yield rows


def in_shards(parts: Sequence[Rows | None], shards: range) -> list[Rows]:
    """The rows of consecutive shards, without files that are broken or lost."""
    found = [rows for rows in parts if rows is not None]
    if len(shards) == SHARDS:
        return found
    wanted = np.isin(np.arange(SHARDS), shards)
    return [rows.take(wanted[rows.keys[:, 0]]) for rows in found]


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


async def _read(files: Files, wanted: Listing) -> list[Rows | None]:
    """These files, in order; None for one that is broken or lost."""
    found: list[Rows | None] = []
    missing: list[str] = []
    for file, rows in zip(wanted, await files.read(wanted), strict=True):
        if isinstance(rows, ChunkMissing):
            missing.append(file.name)
            found.append(None)
        elif isinstance(rows, TierError):
            raise rows
        else:
            found.append(rows)
    if missing:
        await _check_current(files, missing[0])
    return found


async def _check_current(files: Files, name: str) -> None:
    """Raise `Superseded` where a missing file was merged and deleted meanwhile, and is not lost."""
    contents = await sort_out(files.folder, await files.tier.list(files.folder))
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
        raise Superseded(f"{name} was merged by another process: generation {newest.generation}")


async def merged_shards(
    base: "BaseRows", fresh: Rows, shards: range = range(SHARDS)
) -> AsyncIterator[tuple[int, Rows, Rows]]:
    """For each shard: its number, its merged rows, and those rows of the base that withdraw.

    Raises the tier's errors, and `Superseded`.
    """
    starts = shard_starts(fresh)
    for shard in shards:
        old = await base.take(shard)
        new = fresh.take(np.arange(starts[shard], starts[shard + 1]))
        if len(old) and len(new):
            rows = await run_for_rows(len(old) + len(new), _merge, [old, new])
        else:
            rows = old if len(old) else new
        yield shard, rows, old.take(old.size_bytes == 0)


class BaseRows:
    """Reads a catalog's large snapshots once, file by file, in the order of shards."""

    def __init__(self, files: Files, state: CatalogState) -> None:
        self._files = files
        self._state = state
        self._next = 0
        self._file: Rows | None = None
        self._starts = np.zeros(SHARDS + 1, dtype=np.intp)

    async def take(self, shard: int) -> Rows:
        """The rows of a shard; no later call may ask for an earlier one."""
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
        [rows] = await _read(self._files, [Found(name, FILE_BYTES_MAX, 0.0)])
        if rows is None or not len(rows):
            self._state.suspect = True
            return
        if np.any(rows.keys[1:, 0] < rows.keys[:-1, 0]):
            # Shards cannot be cut from these rows.
            self._state.suspect = True
            rows = await run_in_thread(merged, rows)
        self._file = rows
        self._starts = shard_starts(rows)
