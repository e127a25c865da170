"""Reading a catalog: what is new since the last call, in one listing as a rule.

Owns a reader's position in every writer's log and the manifest that it follows. Does not own what
the rows mean (the engine's directory, or `merge.py`), or when it is called.

A refresh lists the catalog's folder: one request while its files fit in one page, which compaction
ensures. Beyond it, the writers' folders are listed one by one from their positions on, where that
takes fewer requests, and the whole folder now and then. Snapshots are read at the first refresh,
and when log files that were not read have been merged and then deleted or damaged.

Invariants: rows come at least once, those of one writer in order; a position moves only when the
file before it was read, or was found broken or lost. Such a file is counted and not tried again,
and makes the catalog suspect, so that the objects themselves are listed. A failure of the store
leaves the rest to the next refresh. Whatever is in the folder, reading it ends with rows or with an
error of the tier: foreign names are skipped, sizes are bounded.
"""

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Final, NamedTuple

import anyio
import numpy as np

from tiers.catalog import manifest as manifests
from tiers.catalog.manifest import (
    EMPTY_MANIFEST,
    HISTORY,
    MANIFEST_BYTES_MAX,
    Counts,
    Manifest,
    run_in_slices,
)
from tiers.catalog.names import (
    LogName,
    digest_in,
    parse_log,
    parse_log_folder,
    parse_manifest,
    parse_snapshot,
)
from tiers.catalog.rows import FILE_BYTES_MAX, Bytes, CatalogCorrupt, Rows, decode
from tiers.errors import ChunkCorrupt, ChunkMissing, TierError, TierUnavailable
from tiers.store.client import Found, Listing, run_in_thread
from tiers.store.object_tier import ObjectTier

CATALOG_PAGE_NAMES: Final = 1000
"""Names in one request of a listing, of S3 and of most others."""
PAGED_MAX: Final = 64
"""Refreshes after which all names are listed again, because some may have been removed."""
BROKEN_KEPT_MAX: Final = 1024
READS_MAX: Final = 8
"""Files that are read at the same time."""
READ_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes of log files that are read at the same time, unless one has more."""
NAMES_PARSED_MAX: Final = 1000
"""Names of a listing that are parsed on the event loop: two or three milliseconds."""

_log = logging.getLogger("kvlake.store")


class LogFile(NamedTuple):
    """One log file of a listing."""

    log: LogName
    found: Found


class Contents(NamedTuple):
    """A catalog's folder, sorted out. Foreign names are left out."""

    logs: list[LogFile]
    """By writer and number."""
    manifests: dict[int, Found]
    snapshots: dict[str, Found]


async def sort_out(folder: str, listing: Listing) -> Contents:
    """The files in a listing of a catalog's folder."""
    if len(listing) > NAMES_PARSED_MAX:
        return await run_in_thread(_sort_out, folder, listing)
    return _sort_out(folder, listing)


def _sort_out(folder: str, listing: Listing) -> Contents:
    logs: list[LogFile] = []
    manifests_found: dict[int, Found] = {}
    snapshots: dict[str, Found] = {}
    for found in listing:
        log = parse_log(folder, found.name)
        if log is not None:
            logs.append(LogFile(log, found))
        elif (generation := parse_manifest(folder, found.name)) is not None:
            manifests_found[generation] = found
        elif parse_snapshot(folder, found.name) is not None:
            snapshots[found.name] = found
    logs.sort()
    return Contents(logs, manifests_found, snapshots)


class Files:
    """Reads single files, verified, and counts."""

    def __init__(self, tier: ObjectTier, folder: str, counts: Counts) -> None:
        self.tier = tier
        self.folder = folder
        self.counts = counts
        self.broken: dict[str, None] = {}
        """Files that were found broken, the latest `BROKEN_KEPT_MAX`."""

    async def rows(self, name: str, size_bytes: int = FILE_BYTES_MAX) -> Rows | None:
        """The rows of a file; None for a broken one. Raises `ChunkMissing`, `TierUnavailable`."""
        rows: Rows | None = None
        with self._unless_broken(name):
            body = await self._body(name, min(size_bytes, FILE_BYTES_MAX))
            rows = await run_in_thread(decode, body, digest_in(name))
            self.counts.files_read += 1
            self.counts.bytes_read += body.nbytes
            self.counts.rows_read += len(rows)
        return rows

    async def read(self, wanted: Listing) -> list[Rows | TierError | None]:
        """What `rows` returns or raises for each of these files, `READS_MAX` at the same time."""
        found: list[Rows | TierError | None] = [None] * len(wanted)
        limit = anyio.CapacityLimiter(READS_MAX)

        async def read(index: int, name: str, size_bytes: int) -> None:
            async with limit:
                try:
                    found[index] = await self.rows(name, size_bytes)
                except TierError as error:
                    found[index] = error

        try:
            async with anyio.create_task_group() as tasks:
                for index, file in enumerate(wanted):
                    tasks.start_soon(read, index, file.name, file.size_bytes)
        except BaseExceptionGroup as group:
            # The first error ended all others.
            raise group.exceptions[0] from None
        return found

    async def manifest(self, contents: Contents, above: int) -> Manifest | None:
        """The newest whole manifest with a generation of more than `above`, if there is one."""
        for generation in sorted(contents.manifests, reverse=True):
            if generation <= above:
                return None
            found = contents.manifests[generation]
            with self._unless_broken(found.name):
                body = await self._body(found.name, min(found.size_bytes, MANIFEST_BYTES_MAX))
                return await run_in_slices(manifests.decode(body, self.folder, generation))
        return None

    async def _body(self, name: str, size_bytes: int) -> Bytes:
        into = np.empty(max(1, size_bytes), dtype=np.uint8)
        return into[: await self.tier.read(name, into)]

    @contextlib.contextmanager
    def _unless_broken(self, name: str) -> Generator[None]:
        """Ignore a file that turns out to be damaged or foreign, and count it."""
        try:
            yield
        except (ChunkCorrupt, CatalogCorrupt) as error:
            self.counts.files_corrupt += 1
            self.broken[name] = None
            if len(self.broken) > BROKEN_KEPT_MAX:
                del self.broken[next(iter(self.broken))]
            _log.warning("catalog file %s is ignored: %s", name, error)


class CatalogReader:
    """One reader of the catalog in `folder`."""

    def __init__(self, tier: ObjectTier, folder: str, counts: Counts) -> None:
        self._files = Files(tier, folder, counts)
        self.counts = counts
        self.file: LogName | None = None
        """The log file of the rows that came last; None for a snapshot."""
        self.names_known = 0
        """Names in the catalog's folder at the last refresh."""
        self.logs_unmerged = 0
        """Log files that compaction has yet to merge, at the last refresh."""
        self.manifest = EMPTY_MANIFEST
        """The manifest that this reader follows."""
        self._positions: dict[str, LogFile] = {}
        self._merged: dict[str, int] = {}
        self._paged = 0
        """Refreshes since all names were listed."""
        self._suspect = False
        self._refreshed = False
        self._unfinished = False
        """Whether merged log files were perhaps not read, and may be gone at the next refresh."""
        self._broken_reported: set[str] = set()
        self._gaps: dict[str, int] = {}
        """Writer -> the last file before a gap, at the refresh before."""
        self._incomplete = -1
        """A generation with a missing snapshot."""

    async def changes(self) -> AsyncGenerator[Rows]:
        """Rows that are new since the last call, file by file. Raises `TierUnavailable`."""
        all_due = self._paged >= PAGED_MAX
        contents = await self._list()
        listed_all = not self._paged
        if self._fresh and not contents.manifests and not contents.logs:
            self._suspect = not self._refreshed
        self._refreshed = True
        if -1 < max(contents.manifests, default=-1) < self.manifest.generation:
            # All of them were lost, and compaction counts from 0 again.
            self.manifest, self._suspect = EMPTY_MANIFEST, True
        newer = await self._files.manifest(contents, self.manifest.generation)
        if newer is not None:
            # The compaction that made it has removed files: count them again.
            self._paged = PAGED_MAX
        if newer is not None or self._unfinished:
            manifest = newer or self.manifest
            if self._missed(manifest, contents):
                async for snapshot in self._reload(manifest):
                    yield snapshot
            self.manifest = manifest
        if listed_all and (newer is not None or self._unfinished or all_due):
            # A listing from the positions on has no files of writers without news.
            self._forget(contents)
        # A listing from the positions on has only new files. A new manifest leaves few, and all
        # names are listed at the next refresh.
        known = self.logs_unmerged if newer is None and not listed_all else 0
        self.logs_unmerged = known + sum(not self._is_merged(file.log) for file in contents.logs)
        self._unfinished = True
        async for rows in self._news(contents):
            yield rows

    async def _news(self, contents: Contents) -> AsyncIterator[Rows]:
        """The rows of log files that are new."""
        for some in _batches(self._unread(contents)):
            found = await self._files.read([file.found for file, _ in some])
            for (file, after_lost), rows in zip(some, found, strict=True):
                if file.log.number <= self._position(file.log.writer):
                    # A reload had its rows.
                    continue
                self._suspect |= after_lost
                if isinstance(rows, ChunkMissing):
                    # Merged and deleted since the listing: a manifest has its rows.
                    return
                if isinstance(rows, TierError):
                    raise rows
                if rows is not None:
                    self.file = file.log
                    yield rows
                elif self._is_merged(file.log):
                    # Compaction may have found it intact. Nobody announces its rows again.
                    async for snapshot in self._reload(self.manifest):
                        yield snapshot
                self._positions[file.log.writer] = file
        self._unfinished = False

    def _unread(self, contents: Contents) -> list[tuple[LogFile, bool]]:
        """Log files to read, in order, and whether files before each are lost."""
        gaps, self._gaps = self._gaps, {}
        unread: list[tuple[LogFile, bool]] = []
        last: dict[str, int] = {}
        for file in contents.logs:
            writer, number = file.log.writer, file.log.number
            before = last.setdefault(writer, self._position(writer))
            if number <= before or writer in self._gaps:
                continue
            if number > before + 1 and gaps.get(writer) != before:
                # A listing may show only the second of two files that were written while it ran.
                # The next listing has the first one too, or it is lost.
                self._gaps[writer] = before
                continue
            unread.append((file, number > before + 1))
            last[writer] = number
        return unread

    def take_suspect(self) -> bool:
        """Whether, since the last call, the catalog was absent, damaged or incomplete."""
        broken = self._files.broken.keys() - self._broken_reported
        suspect, self._suspect = self._suspect or bool(broken), False
        self._broken_reported = set(self._files.broken)
        return suspect

    async def _reload(self, manifest: Manifest) -> AsyncIterator[Rows]:
        """Everything that a manifest has merged, instead of the log files."""
        self.counts.reloads += not self._fresh
        incomplete = self._incomplete == manifest.generation
        for name in manifest.snapshots:
            try:
                rows = await self._files.rows(name)
            except ChunkMissing as error:
                if incomplete:
                    # No newer manifest has come since the last refresh: it is lost.
                    self._suspect = True
                    continue
                self._incomplete = manifest.generation
                raise TierUnavailable(
                    f"{error}: a newer manifest has replaced it; the next refresh reads that",
                    retryable=True,
                ) from error
            if rows is not None:
                self.file = None
                yield rows
        self._merged = {name: merged.number for name, merged in manifest.merged.items()}

    def _missed(self, newer: Manifest, contents: Contents) -> bool:
        """Whether files were merged and deleted that this reader has not seen."""
        if self._fresh or newer.generation - self.manifest.generation > HISTORY:
            return True
        ahead: Counter[str] = Counter()
        for file in contents.logs:
            merged = newer.merged.get(file.log.writer)
            if merged and self._position(file.log.writer) < file.log.number <= merged.number:
                ahead[file.log.writer] += 1
        return any(
            merged.number - self._position(writer) > ahead[writer]
            for writer, merged in newer.merged.items()
        )

    def _is_merged(self, log: LogName) -> bool:
        """Whether the snapshots of this reader's manifest have the rows of a log file."""
        merged = self.manifest.merged.get(log.writer)
        return merged is not None and log.number <= merged.number

    @property
    def _fresh(self) -> bool:
        """Whether nothing was read yet. A snapshot then costs less than its logs."""
        return self.manifest.generation < 0 and not self._positions

    def _position(self, writer: str) -> int:
        """The last file of a writer that was read or is in snapshots that were."""
        file = self._positions.get(writer)
        return max(self._merged.get(writer, -1), -1 if file is None else file.log.number)

    def _forget(self, contents: Contents) -> None:
        """Drop the positions of writers without files that the manifest does not name."""
        kept = {file.log.writer for file in contents.logs} | self.manifest.merged.keys()
        for known in (self._positions, self._merged):
            for writer in [writer for writer in known if writer not in kept]:
                del known[writer]

    async def _list(self) -> Contents:
        tier, folder = self._files.tier, self._files.folder
        requests = 1 + self.names_known // CATALOG_PAGE_NAMES
        if self._paged >= PAGED_MAX or requests <= 2 + len(self._positions):
            self._paged = 0
            listing = await tier.list(folder)
            self.names_known = len(listing)
            return await sort_out(folder, listing)
        self._paged += 1
        found = await tier.list(f"{folder}/manifest")
        for entry in await tier.list(f"{folder}/log", deep=False):
            writer = parse_log_folder(folder, entry.name)
            if writer is None:
                continue
            file = self._positions.get(writer)
            start_after = file.found.name if file is not None else ""
            found += await tier.list(entry.name, start_after=start_after)
        contents = await sort_out(folder, found)
        self.names_known += sum(
            file.log.number > self._position(file.log.writer) for file in contents.logs
        )
        return contents


def _batches(unread: list[tuple[LogFile, bool]]) -> Iterator[list[tuple[LogFile, bool]]]:
    """Files that are read together: `READS_MAX`, and `READ_BYTES_MAX` unless one has more."""
    batch: list[tuple[LogFile, bool]] = []
    num_bytes = 0
    for one in unread:
        size_bytes = one[0].found.size_bytes
        if batch and (len(batch) == READS_MAX or num_bytes + size_bytes > READ_BYTES_MAX):
            yield batch
            batch, num_bytes = [], 0
        batch.append(one)
        num_bytes += size_bytes
    if batch:
        yield batch
