"""Reading a catalog: what is new since last time, in one listing as a rule.

Owns a reader's position in every writer's log and the manifest that it goes by. Does not own what
rows come to (the engine's directory, or `merge.py`), nor when it is asked.

A refresh lists the catalog's folder. While its files fit in one page of a listing, which
compaction sees to, that is one request whatever the number of writers; beyond it, the writers'
folders are listed one by one from their positions on, where that takes fewer requests, and all of
it now and then, to count what was removed. A new
manifest costs one read. Snapshots are read at the first refresh, and when log files that were not
seen have been merged and then deleted or damaged.

Invariants: rows come at least once, those of one writer in order; a position moves only when the
file before it was read, or was found broken or lost: that is counted, and not tried again, and it
is a doubt, which has somebody look at the objects themselves. A failure of the store leaves the
rest to the next refresh. Whatever is in the catalog's folder, reading it ends
with rows or with an error of the tier: foreign names are skipped, sizes are bounded.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, NamedTuple

import anyio
import anyio.to_thread
import numpy as np

from tiers.catalog import manifest as manifests
from tiers.catalog.event_loop import in_turns
from tiers.catalog.manifest import HISTORY, MANIFEST_BYTES_MAX, NOTHING, Counts, Manifest
from tiers.catalog.names import (
    LogName,
    digest_in,
    parse_log,
    parse_log_folder,
    parse_manifest,
    parse_snapshot,
)
from tiers.catalog.rows import FILE_BYTES_MAX, CatalogCorrupt, Rows, decode
from tiers.errors import ChunkCorrupt, ChunkMissing, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from tiers.catalog.rows import Bytes
    from tiers.store.client import Found, Listing
    from tiers.store.object_tier import ObjectTier

PAGE_NAMES: Final = 1000
"""Names in one request of a listing, of S3 and of most others."""
PAGED_MAX: Final = 64
"""Refreshes after which all names are listed again: some may have been removed."""
BROKEN_KEPT_MAX: Final = 1024

_log = logging.getLogger(__name__)


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


def sort_out(folder: str, listing: Listing) -> Contents:
    """What a listing of a catalog's folder holds."""
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
        body = await self._body(name, min(size_bytes, FILE_BYTES_MAX))
        if body is None:
            return None
        try:
            rows = await anyio.to_thread.run_sync(decode, body, digest_in(name))
        except CatalogCorrupt as error:
            self._broken(name, error)
            return None
        self.counts.files_read += 1
        self.counts.bytes_read += body.nbytes
        self.counts.rows_read += len(rows)
        return rows

    async def manifest(self, contents: Contents, above: int) -> Manifest | None:
        """The newest whole manifest with a generation of more than `above`, if there is one."""
        for generation in sorted(contents.manifests, reverse=True):
            if generation <= above:
                return None
            found = contents.manifests[generation]
            body = await self._body(found.name, min(found.size_bytes, MANIFEST_BYTES_MAX))
            if body is None:
                continue
            try:
                return await in_turns(manifests.decoding(body, self.folder, generation))
            except CatalogCorrupt as error:
                self._broken(found.name, error)
        return None

    async def _body(self, name: str, size_bytes: int) -> Bytes | None:
        into = np.empty(max(1, size_bytes), dtype=np.uint8)
        try:
            return into[: await self.tier.read(name, into)]
        except ChunkCorrupt as error:
            self._broken(name, error)
            return None

    def _broken(self, name: str, error: Exception) -> None:
        self.counts.files_corrupt += 1
        self.broken[name] = None
        if len(self.broken) > BROKEN_KEPT_MAX:
            del self.broken[next(iter(self.broken))]
        _log.warning("catalog file %s is ignored: %s", name, error)


class CatalogReader:
    """One reader of one catalog.

    Args:
        tier: the store.
        folder: the catalog's folder.
        counts: where to count.
        page_names: how many names a listing has per request.
    """

    def __init__(
        self, tier: ObjectTier, folder: str, counts: Counts, *, page_names: int = PAGE_NAMES
    ) -> None:
        self._tier = tier
        self._folder = folder
        self._files = Files(tier, folder, counts)
        self.counts = counts
        self.writer = ""
        """Whose log has the rows that came last; "" for those of a snapshot."""
        self.file: LogName | None = None
        """The file of a log that has them; None for a snapshot."""
        self._page_names = page_names
        self._manifest = NOTHING
        self._positions: dict[str, LogFile] = {}
        self._merged: dict[str, int] = {}
        self._names_known = 0
        self._unmerged = 0
        self._paged = 0
        """Refreshes since all names were listed."""
        self._doubt = False
        self._looked = False
        self._unfinished = False
        """Whether log files that the manifest has merged may not have been read, and go unread."""
        self._broken_told: set[str] = set()
        # Writer -> the last file before a gap, as seen by the refresh before.
        self._gaps: dict[str, int] = {}
        self._incomplete = -1

    @property
    def manifest(self) -> Manifest:
        """The manifest that this reader goes by."""
        return self._manifest

    @property
    def generation(self) -> int:
        """Of its manifest; -1 before the first."""
        return self._manifest.generation

    async def changes(self) -> AsyncGenerator[Rows]:
        """Rows that are new since the last call, file by file. Raises `TierUnavailable`."""
        contents = await self._list()
        listed_all = not self._paged
        if self._fresh and not contents.manifests and not contents.logs:
            self._doubt = not self._looked
        self._looked = True
        if -1 < max(contents.manifests, default=-1) < self.generation:
            # All of them were lost, and compaction has begun to count anew.
            self._manifest, self._doubt = NOTHING, True
        newer = await self._files.manifest(contents, self.generation)
        if newer is not None:
            # Who made it has removed files: how many there are is counted anew.
            self._paged = PAGED_MAX
        if newer is not None or self._unfinished:
            manifest = newer or self._manifest
            if self._missed(manifest, contents):
                async for snapshot in self._reload(manifest):
                    yield snapshot
            self._manifest = manifest
            self._forget(contents)
        self._count_unmerged(contents, whole=listed_all or newer is not None)
        self._unfinished = True
        gaps, self._gaps = self._gaps, {}
        for file in contents.logs:
            writer, before = file.log.writer, self._position(file.log.writer)
            if file.log.number <= before or writer in self._gaps:
                continue
            if file.log.number > before + 1 and gaps.get(writer) != before:
                # A listing may show the second of two files that were written while it ran. The
                # next one has the first, or it is lost.
                self._gaps[writer] = before
                continue
            self._doubt |= file.log.number > before + 1
            try:
                rows = await self._files.rows(file.found.name, file.found.size_bytes)
            except ChunkMissing:
                # Merged and deleted since the listing: a manifest has its rows.
                return
            if rows is not None:
                self.writer, self.file = writer, file.log
                yield rows
            elif self._is_merged(file.log):
                # It may have been whole then, and nobody announces again what the snapshots have.
                async for snapshot in self._reload(self._manifest):
                    yield snapshot
            self._positions[writer] = file
        self._unfinished = False

    @property
    def names_known(self) -> int:
        """Names in the catalog's folder at the last refresh."""
        return self._names_known

    @property
    def logs_unmerged(self) -> int:
        """Log files that compaction has yet to merge, at the last refresh."""
        return self._unmerged

    def _count_unmerged(self, contents: Contents, *, whole: bool) -> None:
        # What is not a listing of all names adds what is new; after a new manifest, which leaves
        # little, all are listed the next time.
        known = 0 if whole else self._unmerged
        self._unmerged = known + sum(not self._is_merged(file.log) for file in contents.logs)

    def take_doubt(self) -> bool:
        """Whether, since the last call, the catalog was found absent, damaged or incomplete."""
        broken = self._files.broken.keys() - self._broken_told
        doubt, self._doubt = self._doubt or bool(broken), False
        self._broken_told = set(self._files.broken)
        return doubt

    async def _reload(self, manifest: Manifest) -> AsyncIterator[Rows]:
        """Everything that a manifest has merged, in place of the log files that it was in."""
        self.counts.reloads += not self._fresh
        async for snapshot in self._snapshots(manifest):
            yield snapshot
        self._merged = {name: merged.number for name, merged in manifest.merged.items()}

    async def _snapshots(self, manifest: Manifest) -> AsyncIterator[Rows]:
        incomplete = self._incomplete == manifest.generation
        for name in manifest.snapshots:
            try:
                rows = await self._files.rows(name)
            except ChunkMissing as error:
                if incomplete:
                    # No newer manifest has come since the last time: it is lost.
                    self._doubt = True
                    continue
                self._incomplete = manifest.generation
                raise TierUnavailable(
                    f"{error}: a newer manifest has replaced the snapshot; it is read next time",
                    retryable=True,
                ) from error
            if rows is not None:
                self.writer, self.file = "", None
                yield rows

    def _missed(self, newer: Manifest, contents: Contents) -> bool:
        """Whether files were merged and deleted that this reader has not seen."""
        if self._fresh or newer.generation - self.generation > HISTORY:
            return True
        ahead: dict[str, int] = {}
        for file in contents.logs:
            merged = newer.merged.get(file.log.writer)
            if merged and self._position(file.log.writer) < file.log.number <= merged.number:
                ahead[file.log.writer] = ahead.get(file.log.writer, 0) + 1
        return any(
            merged.number - self._position(writer) > ahead.get(writer, 0)
            for writer, merged in newer.merged.items()
        )

    def _is_merged(self, log: LogName) -> bool:
        """Whether the snapshots of this reader's manifest have what is, or was, in a log file."""
        merged = self._manifest.merged.get(log.writer)
        return merged is not None and log.number <= merged.number

    @property
    def _fresh(self) -> bool:
        """Whether nothing was read yet: then a snapshot costs less than the logs behind it."""
        return self.generation < 0 and not self._positions

    def _position(self, writer: str) -> int:
        """The last file of a writer that need not be read."""
        file = self._positions.get(writer)
        return max(self._merged.get(writer, -1), -1 if file is None else file.log.number)

    def _forget(self, contents: Contents) -> None:
        """Drop the positions of writers whose files are gone and remembered by no manifest."""
        kept = {file.log.writer for file in contents.logs} | self._manifest.merged.keys()
        for known in (self._positions, self._merged):
            for writer in [writer for writer in known if writer not in kept]:
                del known[writer]

    async def _list(self) -> Contents:
        whole = 1 + self._names_known // self._page_names
        if self._paged >= PAGED_MAX or whole <= 2 + len(self._positions):
            self._paged = 0
            listing = await self._tier.list(self._folder)
            self._names_known = len(listing)
            return sort_out(self._folder, listing)
        self._paged += 1
        found = await self._tier.list(f"{self._folder}/manifest")
        for entry in await self._tier.list(f"{self._folder}/log", deep=False):
            writer = parse_log_folder(self._folder, entry.name)
            if writer is None:
                continue
            file = self._positions.get(writer)
            start_after = file.found.name if file is not None else ""
            found += await self._tier.list(entry.name, start_after=start_after)
        contents = sort_out(self._folder, found)
        self._names_known += sum(
            file.log.number > self._position(file.log.writer) for file in contents.logs
        )
        return contents
