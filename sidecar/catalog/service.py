"""The catalogs of this sidecar: one log that it writes per namespace, one reader per realm.

Owns what waits to be announced, readers' positions, and what the tenants are known to hold in the
store. Does not own when to refresh or flush (`sync.py`), nor what rows mean (the engine).

Own writes are known to the engine at once; here they wait to be told to others, and count as what
their tenant holds from the moment that they are done.

What a namespace is, is written beside its first rows, for people who look into the store.

Invariants: each log has a writer's name of its own, and a log that was closed does not go on. When
a namespace comes back after its realms were forgotten, its catalog is read from the start, and what
was written here before counts as what others wrote. A realm has a reader of its own, because it may
be opened when another of its namespace has read the catalog already. What a tenant holds is an
estimate between two compactions: rows add to it as they come, and a manifest sets it right. Own
rows count once, and never too little (`tiers/catalog/tally.py`); those of others from when they are
read. What is noted costs in proportion to the tenants of the new rows, not to those that a manifest
names: they may be 65,536, and the event loop does it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from sidecar.logs import fields
from tiers.catalog.about import About, write_about
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.manifest import NOTHING, Counts, Manifest
from tiers.catalog.names import catalog_folder, namespace_prefix
from tiers.catalog.reader import CatalogReader
from tiers.catalog.rows import NO_TENANT
from tiers.catalog.tally import LogUsage
from tiers.catalog.usage import Usage
from tiers.errors import TierError, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidecar.sessions.namespaces import RealmLayout
    from tiers.catalog.names import LogName
    from tiers.catalog.rows import Row
    from tiers.store.object_tier import ObjectTier

NOTHING_HELD: Final = Usage()
HEARD_MAX: Final = 4096
"""Files of others' logs that no manifest has merged, each with what its tenants have in it."""

_logger = logging.getLogger("kvlake.store")


class Catalogs:
    """Logs and readers, made when they are first needed.

    Where `reads` is false nobody says when a manifest has counted what was written, or what was
    collected since: then nothing is known to be held.
    """

    def __init__(
        self, store: ObjectTier, *, rows_max: int, flush_seconds: float, reads: bool = True
    ) -> None:
        self._store = store
        self._reads = reads
        self._rows_max = rows_max
        self._flush_seconds = flush_seconds
        self._logs: dict[bytes, LogWriter] = {}
        self._abouts: dict[bytes, About] = {}
        """What is still to be written of namespaces that have rows."""
        self._readers: dict[int, CatalogReader] = {}
        self._usage: dict[bytes, _Usage] = {}
        self._given_up: set[bytes] = set()
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
        """Rows that nobody else can know yet."""
        return sum(len(log) for log in self._logs.values())

    @property
    def undescribed(self) -> bool:
        """Whether it is still to be written what some namespace is."""
        return bool(self._abouts)

    @property
    def rows_lost(self) -> int:
        """Rows that found the buffer full; reconciliation finds their objects."""
        return self._rows_lost_before + sum(log.rows_lost for log in self._logs.values())

    @property
    def crowd(self) -> int:
        """Log files of a catalog that wait to be merged, of the one that has most."""
        return max((reader.logs_unmerged for reader in self._readers.values()), default=0)

    @property
    def due_in(self) -> float | None:
        """Seconds until something is to be flushed, or None while nothing waits."""
        due = [log.due_in for log in self._logs.values()]
        return min((seconds for seconds in due if seconds is not None), default=None)

    def wrote(self, realm: RealmLayout, row: Row, *, later_than: int) -> int:
        """Announce a segment that is in the store now; returns when, in microseconds."""
        written_at = max(time.time_ns() // 1000, later_than + 1)
        self._log(realm).append(row._replace(written_at=written_at))
        return written_at

    def lost(self, realm: RealmLayout, row: Row) -> None:
        """Announce that a segment is not there any more."""
        self._log(realm).append(row)

    def found(self, realm: RealmLayout, row: Row) -> None:
        """Announce a segment that is in the store, and of which no row was known."""
        self._log(realm).append(row)

    async def flush(self) -> None:
        """Write what waits. Raises the tier's errors; what is left then waits on."""
        try:
            for log in list(self._logs.values()):
                await log.flush()
            for digest in list(self._abouts):
                await self._describe(digest)
        finally:
            self._close_logs()

    async def _describe(self, digest: bytes) -> None:
        """Write what a namespace is, once. Where the store refuses, it is only less readable."""
        about = self._abouts.get(digest)
        if about is None:
            # Another flush has written it meanwhile.
            return
        try:
            await write_about(self._store, namespace_prefix(digest), about)
        except TierError as error:
            _logger.debug("a namespace is not described", extra=fields(error=error))
            if isinstance(error, TierUnavailable) and error.retryable:
                return
        self._abouts.pop(digest, None)

    def reader(self, realm: RealmLayout) -> CatalogReader:
        """The reader that feeds this realm."""
        reader = self._readers.get(realm.realm_id)
        if reader is None:
            self._given_up.discard(realm.namespace_digest)
            folder = catalog_folder(namespace_prefix(realm.namespace_digest))
            reader = CatalogReader(self._store, folder, self.counts)
            self._readers[realm.realm_id] = reader
        return reader

    def writer_of(self, realm: RealmLayout) -> str | None:
        """The name of the log that this realm's rows go to; None where there was none yet."""
        log = self._logs.get(realm.namespace_digest)
        return None if log is None else log.writer

    def forget(self, realm: RealmLayout, *, last: bool) -> None:
        """A realm is forgotten; with `last`, no other one is of its namespace."""
        digest = realm.namespace_digest
        self._readers.pop(realm.realm_id, None)
        usage = self._usage.get(digest)
        if usage is not None and usage.realm_id == realm.realm_id:
            # The next one that reads goes on. What both read counts twice until a manifest comes.
            usage.realm_id = None
        if last:
            self._given_up.add(digest)
            if usage is not None:
                usage.go_by(NOTHING)
            self._close_logs()

    def _close_logs(self) -> None:
        """Forget namespaces without a realm of which nothing waits to be announced."""
        for digest in list(self._given_up):
            log = self._logs.get(digest)
            if log is not None and len(log):
                continue
            if log is not None:
                del self._logs[digest]
                self._files_before += log.files
                self._rows_lost_before += log.rows_lost
            self._usage.pop(digest, None)
            self._given_up.remove(digest)

    def note(
        self, realm: RealmLayout, held: Mapping[bytes, Usage], file: LogName | None = None
    ) -> None:
        """Count what rows say of tenants; those of a namespace are counted for one realm only.

        `file` is the log file that they are in: they count until a manifest has merged it.
        """
        usage = self._usage_in(realm)
        if usage.realm_id is None:
            usage.realm_id = realm.realm_id
        if usage.realm_id != realm.realm_id:
            return
        manifest = self.reader(realm).manifest
        if manifest.generation != usage.manifest.generation:
            usage.go_by(manifest)
            writer = self.writer_of(realm)
            merged = None if writer is None else manifest.merged.get(writer)
            if merged is not None:
                usage.own.merged(merged.number)
        if held:
            usage.add(held, file)

    @property
    def stored(self) -> Usage:
        """What all tenants of the namespaces that are known here hold in the store."""
        whole = NOTHING_HELD
        for usage in self._usage.values():
            whole = whole.plus(usage.whole)
        return whole

    def held_in(self, namespace_digest: bytes) -> Usage:
        """What all tenants of a namespace are known to hold in the store."""
        usage = self._usage.get(namespace_digest)
        return NOTHING_HELD if usage is None else usage.whole

    def held(self, tenant: bytes, namespace_digest: bytes | None = None) -> Usage:
        """What a tenant is known to hold in the store: in one namespace, or in all together."""
        whole = NOTHING_HELD
        for usage in self._of(namespace_digest):
            whole = whole.plus(usage.held(tenant or NO_TENANT))
        return whole

    def _of(self, namespace_digest: bytes | None) -> Iterator[_Usage]:
        if namespace_digest is None:
            yield from self._usage.values()
        elif namespace_digest in self._usage:
            yield self._usage[namespace_digest]

    def _usage_in(self, realm: RealmLayout) -> _Usage:
        self._given_up.discard(realm.namespace_digest)
        return self._usage.setdefault(realm.namespace_digest, _Usage())

    def _log(self, realm: RealmLayout) -> LogWriter:
        self._given_up.discard(realm.namespace_digest)
        log = self._logs.get(realm.namespace_digest)
        if log is None:
            log = LogWriter(
                self._store,
                catalog_folder(namespace_prefix(realm.namespace_digest)),
                new_writer(),
                rows_max=self._rows_max,
                seconds_max=self._flush_seconds,
                tally=self._usage_in(realm).own if self._reads else None,
            )
            self._logs[realm.namespace_digest] = log
            self._abouts[realm.namespace_digest] = About(realm.namespace, realm.model)
        return log


class _Usage:
    """What the tenants of one namespace hold, as told to one realm."""

    def __init__(self) -> None:
        self.realm_id: int | None = None
        """The one that is told."""
        self.manifest: Manifest = NOTHING
        self.own = LogUsage()
        """What was written here and no manifest counts yet."""
        self._since = NOTHING_HELD
        self._since_by: dict[bytes, Usage] = {}
        """What rows of others added to what the manifest says, in all and by tenant."""
        self._heard: deque[tuple[LogName, Mapping[bytes, Usage]]] = deque()
        """The same by the file that they are in, the newest."""

    def go_by(self, manifest: Manifest) -> None:
        """Start again from what a manifest says. It is looked at where it is, tenant by tenant.

        A round takes its time: what was written meanwhile is in no manifest, and counts on.
        """
        self.manifest = manifest
        self._since, self._since_by = NOTHING_HELD, {}
        heard, self._heard = self._heard, deque()
        for file, held in heard:
            self.add(held, file)

    def add(self, held: Mapping[bytes, Usage], file: LogName | None) -> None:
        """Count what rows of others say of tenants, unless the manifest does."""
        if file is not None:
            merged = self.manifest.merged.get(file.writer)
            if merged is not None and file.number <= merged.number:
                return
            self._heard.append((file, held))
            if len(self._heard) > HEARD_MAX:
                # It counts to the next manifest.
                self._heard.popleft()
        for tenant, others in held.items():
            self._since_by[tenant] = self._since_by.get(tenant, NOTHING_HELD).plus(others)
            self._since = self._since.plus(others)

    @property
    def whole(self) -> Usage:
        """What all tenants hold."""
        return self.manifest.held.plus(self._since).plus(self.own.whole)

    def held(self, tenant: bytes) -> Usage:
        """What one tenant holds."""
        named = self.manifest.tenants.get(tenant.hex(), NOTHING_HELD)
        return named.plus(self._since_by.get(tenant, NOTHING_HELD)).plus(self.own.held(tenant))
