"""A namespace in a bucket: a sidecar that writes to it, readers, and rounds of compaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tests.tiers.catalog.bucket import Bucket, View
from tests.tiers.catalog.kit import FOLDER, NAMESPACE, PREFIX, new_rows
from tests.tiers.tier_suite import image_of
from tiers.catalog.compaction import compact
from tiers.catalog.log import LogWriter, new_writer
from tiers.catalog.major_compaction import CompactionPlan, CompactionReport
from tiers.catalog.manifest import Counts
from tiers.catalog.names import object_name
from tiers.catalog.reader import CatalogReader
from tiers.catalog.retention import Reasons, RetentionRules
from tiers.catalog.rows import Row, Rows
from tiers.kv.layout import Segment

SEGMENT = Segment(0, 8, 0, 4)
GRACE, KEEP = 100.0, 200.0
LATER = 10_000.0


def chunk_key(number: int) -> bytes:
    return bytes([number * 37 % 256]) + number.to_bytes(31, "big")


class World:
    """A bucket, one sidecar that writes to it, and readers."""

    def __init__(self) -> None:
        self.bucket = Bucket()
        self.tier = View(self.bucket)
        self.log = self.writer()

    def writer(self) -> LogWriter:
        return LogWriter(self.tier, FOLDER, new_writer(), rows_max=10, seconds_max=1.0)

    def reader(self) -> CatalogReader:
        return CatalogReader(self.tier, FOLDER, Counts())

    def name(self, number: int) -> str:
        return object_name(NAMESPACE, chunk_key(number), SEGMENT)

    async def put(self, number: int, size_bytes: int = 1000) -> Row:
        """Write an object; the row that announces it."""
        await self.tier.write(self.name(number), image_of(size_bytes))
        return Row(chunk_key(number), SEGMENT.name, self.bucket.micros, size_bytes, 1)

    async def write(self, *numbers: int, size_bytes: int = 1000, tenant: bytes = b"") -> None:
        """Write objects, and announce them in one file."""
        for number in numbers:
            row = await self.put(number, size_bytes)
            self.log.append(row._replace(tenant=tenant))
        await self.log.flush()

    async def compact(
        self,
        bounds: RetentionRules | None = None,
        *,
        major: bool = True,
        reconcile: bool = False,
        dry_run: bool = False,
        on_withdrawn: Callable[[Rows, Reasons], Awaitable[None]] | None = None,
    ) -> CompactionReport:
        plan = CompactionPlan(
            bounds or RetentionRules(), GRACE, KEEP, major, reconcile, None, dry_run
        )
        return await compact(
            self.tier,
            PREFIX,
            plan,
            self.bucket.now,
            on_withdrawn=on_withdrawn,
            clock=lambda: self.bucket.now,
        )

    async def offered(self, reader: CatalogReader | None = None) -> set[int]:
        """What a reader that starts now offers."""
        return view_of(await new_rows(reader or self.reader()))

    def there(self) -> set[int]:
        return {n for n in range(300) if self.name(n) in self.bucket.objects}


def view_of(rows: Sequence[Row]) -> set[int]:
    held: dict[bytes, tuple[int, bool]] = {}
    for row in rows:
        held[row.key] = max(held.get(row.key, (0, False)), (row.written_at, row.size_bytes == 0))
    return {int.from_bytes(key[1:], "big") for key, (_, withdrawn) in held.items() if not withdrawn}
