"""The catalogs of this sidecar: one log that it writes per namespace, one reader per realm.

Owns the rows that wait to be announced, readers' positions, and what tenants are known to have in
the store. Does not own when to refresh or flush (`sync.py`), or what rows mean (the engine, which
knows this sidecar's own writes at once).

Invariants: each log has a writer's name of its own, and a closed log does not go on. When a
namespace comes back after its realms were forgotten, its catalog is read from the start, and what
was written here before counts as others' rows. A realm may be opened when another of its namespace
has read the catalog already. A tenant's usage is an estimate between two compactions: rows add to
it as they come, and a manifest corrects it. The event loop counts, so that costs in proportion to
the tenants of the new rows, not to the up to 65,536 that a manifest names.
"""

import logging
import time
from collections import deque
from collections.abc import Mapping
from typing import Final

from sidecar.config.store import StoreSettings
from sidecar.logs import fields
from sidecar.sessions.namespaces import RealmLayout
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import EMPTY_MANIFEST, Counts, Manifest
from tiers.catalog.names import LogName, catalog_folder, namespace_prefix
from tiers.catalog.namespace_info import NamespaceInfo, write_info
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import NO_TENANT, Row
from tiers.catalog.usage import NO_USAGE, LogUsage, TenantUsage, Usage, sum_of
from tiers.errors import TierError, TierUnavailable
from tiers.store.object_tier import ObjectTier

OTHERS_FILES_MAX: Final = 4096
"""Files of others' logs that no manifest has merged, each with the usage of its tenants."""

_logger = logging.getLogger("kvlake.store")


class Catalogs:
    """Logs and readers, made when they are first needed.

    Without reads no manifest says when a row was counted or collected, so no usage is known.
    """

    def __init__(self, store: ObjectTier, settings: StoreSettings) -> None:
        self._store = store
        self._settings = settings
        self._logs: dict[bytes, LogWriter] = {}
        self._infos: dict[bytes, NamespaceInfo] = {}
        """What is still to be written of namespaces with rows."""
        self._readers: dict[int, CatalogReader] = {}
        self._usage: dict[bytes, _NamespaceUsage] = {}
        self._closing: set[bytes] = set()
        """Namespaces without a realm, whose log is closed when its last row is written."""
        self._files_before = 0
        self._rows_lost_before = 0
        self.counts = Counts()
        """What all readers read."""

    @property
    def files_written(self) -> int:
        """Log files that this sidecar wrote."""
        return self._files_before + sum(log.files for log in self._logs.values())

    @property
    def rows_waiting(self) -> int:
        """Rows that are not announced yet."""
        return sum(len(log) for log in self._logs.values())

    @property
    def rows_lost(self) -> int:
        """Rows that found the buffer full; reconciliation finds their objects."""
        return self._rows_lost_before + sum(log.rows_lost for log in self._logs.values())

    @property
    def infos_waiting(self) -> bool:
        """Whether the record of some namespace is not written yet."""
        return bool(self._infos)

    @property
    def logs_unmerged_max(self) -> int:
        """Unmerged log files of the catalog that has most."""
        return max((reader.logs_unmerged for reader in self._readers.values()), default=0)

    @property
    def due_in(self) -> float | None:
        """Seconds until a flush is due; None without rows."""
        due = [log.due_in for log in self._logs.values()]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def announce(self, realm: RealmLayout, row: Row) -> None:
        """Announce a segment that was found in the store, or withdraw one that is missing."""
        self._log(realm).append(row)

    def announce_written(self, realm: RealmLayout, row: Row, *, later_than: int) -> int:
        """Announce a segment that was just written; returns when, in microseconds."""
        written_at = max(time.time_ns() // 1000, later_than + 1)
        self._log(realm).append(row._replace(written_at=written_at))
        return written_at

    async def flush(self) -> None:
        """Write queued rows. Raises the tier's errors; the rest then stays queued."""
        try:
            for log in list(self._logs.values()):
                await log.flush()
            for digest in list(self._infos):
                await self._write_info(digest)
        finally:
            self._close_logs()

    async def _write_info(self, digest: bytes) -> None:
        """Write a namespace's record, once. It is for people: a store may refuse it."""
        info = self._infos.get(digest)
        if info is None:
            # Another flush has written it meanwhile.
            return
        try:
            await write_info(self._store, namespace_prefix(digest), info)
        except TierError as error:
            _logger.debug("the record of a namespace is not written", extra=fields(error=error))
            if isinstance(error, TierUnavailable) and error.retryable:
                return
        self._infos.pop(digest, None)

    def reader(self, realm: RealmLayout) -> CatalogReader:
        """The reader of this realm."""
        reader = self._readers.get(realm.realm_id)
        if reader is None:
            self._closing.discard(realm.namespace_digest)
            folder = catalog_folder(namespace_prefix(realm.namespace_digest))
            reader = self._readers[realm.realm_id] = CatalogReader(self._store, folder, self.counts)
        return reader

    def writer_of(self, realm: RealmLayout) -> str | None:
        """The name of the log that this realm's rows go to; None before the first."""
        log = self._logs.get(realm.namespace_digest)
        return None if log is None else log.writer

    def forget(self, realm: RealmLayout, *, last: bool) -> None:
        """A realm is forgotten; with `last`, it was the last one of its namespace."""
        digest = realm.namespace_digest
        self._readers.pop(realm.realm_id, None)
        usage = self._usage.get(digest)
        if usage is not None and usage.realm_id == realm.realm_id:
            # The next realm that reads goes on. What both read counts twice until a manifest comes.
            usage.realm_id = None
        if last:
            self._closing.add(digest)
            if usage is not None:
                usage.start_from(EMPTY_MANIFEST)
            self._close_logs()

    def _close_logs(self) -> None:
        """Forget namespaces without a realm and without rows that wait."""
        for digest in list(self._closing):
            log = self._logs.get(digest)
            if log is not None and len(log):
                continue
            if log is not None:
                del self._logs[digest]
                self._files_before += log.files
                self._rows_lost_before += log.rows_lost
            self._usage.pop(digest, None)
            self._closing.remove(digest)

    def count(
        self, realm: RealmLayout, usage: Mapping[bytes, Usage], file: LogName | None = None
    ) -> None:
        """Count the usage of others' rows by tenant. Only one realm of a namespace counts.

        `file` is the log file of the rows: they count until a manifest has merged it.
        """
        known = self._usage_in(realm)
        if known.realm_id is None:
            known.realm_id = realm.realm_id
        if known.realm_id != realm.realm_id:
            return
        manifest = self.reader(realm).manifest
        if manifest.generation != known.manifest.generation:
            known.start_from(manifest)
            merged = manifest.merged.get(self.writer_of(realm) or "")
            if merged is not None:
                known.own.merged(merged.number)
        if usage:
            known.add(usage, file)

    @property
    def total_usage(self) -> Usage:
        """The usage of all tenants, in namespaces whose engines attached here.

        Of others nothing is known, and nothing of any with `store.read: "off"`.
        """
        return sum_of(known.total for known in self._usage.values())

    def namespace_usage(self, namespace_digest: bytes) -> Usage:
        """The known usage of all tenants of a namespace."""
        known = self._usage.get(namespace_digest)
        return NO_USAGE if known is None else known.total

    def usage(self, tenant: bytes, namespace_digest: bytes | None = None) -> Usage:
        """The known usage of a tenant: in one namespace, or in all that `total_usage` counts."""
        return sum_of(
            known.of(tenant or NO_TENANT)
            for digest, known in self._usage.items()
            if namespace_digest in (None, digest)
        )

    def _usage_in(self, realm: RealmLayout) -> "_NamespaceUsage":
        self._closing.discard(realm.namespace_digest)
        return self._usage.setdefault(realm.namespace_digest, _NamespaceUsage())

    def _log(self, realm: RealmLayout) -> LogWriter:
        digest = realm.namespace_digest
        self._closing.discard(digest)
        log = self._logs.get(digest)
        if log is None:
            log = self._logs[digest] = LogWriter(
                self._store,
                catalog_folder(namespace_prefix(digest)),
                new_writer(),
                rows_max=self._settings.catalog_rows_max,
                seconds_max=self._settings.catalog_flush,
                usage=self._usage_in(realm).own if self._settings.read == "on" else None,
            )
            self._infos[digest] = NamespaceInfo(realm.namespace, realm.model)
        return log


class _NamespaceUsage:
    """The usage of the tenants of one namespace, as one realm counts it."""

    def __init__(self) -> None:
        self.realm_id: int | None = None
        """The realm that counts."""
        self.manifest: Manifest = EMPTY_MANIFEST
        self.own = LogUsage()
        """What was written here and no manifest counts yet."""
        self._others = TenantUsage()
        """What others' rows added to the manifest."""
        self._files: deque[tuple[LogName, Mapping[bytes, Usage]]] = deque()
        """The same by log file, the newest."""

    def start_from(self, manifest: Manifest) -> None:
        """Count from a manifest, and the files that it has not merged.

        The manifest's tenants are not copied.
        """
        self.manifest = manifest
        self._others = TenantUsage()
        files, self._files = self._files, deque()
        for file, usage in files:
            self.add(usage, file)

    def add(self, usage: Mapping[bytes, Usage], file: LogName | None) -> None:
        """Count others' rows, unless the manifest does."""
        if file is not None:
            merged = self.manifest.merged.get(file.writer)
            if merged is not None and file.number <= merged.number:
                return
            self._files.append((file, usage))
            if len(self._files) > OTHERS_FILES_MAX:
                # It counts until the next manifest.
                self._files.popleft()
        self._others.add(usage)

    @property
    def total(self) -> Usage:
        """Usage of all tenants."""
        return self.manifest.held.plus(self._others.total).plus(self.own.total)

    def of(self, tenant: bytes) -> Usage:
        """Usage of one tenant."""
        named = self.manifest.tenants.get(tenant.hex(), NO_USAGE)
        others = self._others.tenants.get(tenant, NO_USAGE)
        return named.plus(others).plus(self.own.of(tenant))
