"""Sweeping: what a store's objects themselves say that a namespace holds, one folder at a time.

Owns the slices, which are the 256 folders by a key's first two digits, and making rows of a
listing of one. Does not own what is done with them: a sidecar offers and announces what the
catalog lacks, a collector also withdraws what the catalog has too much.

Invariants: a slice is listed in pages, each with a deadline of its own, and held in memory alone;
names that are no segment's are left out; whatever is in a slice, listing it ends with what is
there or with an error of the tier.
A row made of a listing has no tenant, parent or number of blocks, and the store's own time: the
row of whoever wrote the object is newer, and holds, wherever it is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio.to_thread

from tiers.catalog.names import parse_name
from tiers.catalog.rows import SIZE_LARGEST, Row, Rows, rows_of
from tiers.errors import TierUnavailable

if TYPE_CHECKING:
    from tiers.store.client import Listing
    from tiers.store.object_tier import ObjectTier

SLICES: Final = 256
SWEEP_PAGE_NAMES: Final = 1000
"""Names that are asked for at a time: one request of S3, and of most others."""


def slice_folder(prefix: str, number: int) -> str:
    """The folder of slice `number` of a namespace."""
    return f"{prefix}/{number:02x}"


async def slices_there(tier: ObjectTier, prefix: str) -> list[int]:
    """The slices that hold anything, in order. One request. Raises the tier's errors."""
    there = {entry.name.rstrip("/") for entry in await tier.list(prefix, deep=False)}
    return [number for number in range(SLICES) if slice_folder(prefix, number) in there]


async def listed_in(tier: ObjectTier, prefix: str, number: int) -> Listing:
    """All objects in one slice. Raises the tier's errors."""
    folder = slice_folder(prefix, number)
    found: Listing = []
    after = ""
    while True:
        # All keys of a slice are of one length, so that servers agree on what comes after a name.
        page = await tier.list(folder, start_after=after, names_max=SWEEP_PAGE_NAMES)
        found += page
        if len(page) < SWEEP_PAGE_NAMES:
            return found
        # A foreign name, too: whatever it is, what comes after it is to come.
        before, after = after, max(one.name for one in page)
        if after <= before:
            raise TierUnavailable(
                f"list {tier.url}/{folder}: a listing does not go on after a name, and would "
                "have no end; look for a proxy before the store, or choose another store",
                retryable=False,
            )


async def objects_in(tier: ObjectTier, prefix: str, number: int) -> Rows:
    """A row for each segment in one slice. Raises the tier's errors."""
    listing = await listed_in(tier, prefix, number)
    return await anyio.to_thread.run_sync(rows_of_listing, listing, prefix)


def rows_of_listing(listing: Listing, prefix: str) -> Rows:
    """A row for each object of the namespace in folder `prefix` that is a segment."""
    rows: list[Row] = []
    for found in listing:
        name = parse_name(found.name)
        if name is None or not found.size_bytes or not found.name.startswith(f"{prefix}/"):
            continue
        # Never 0, which is how a store that tells no times would make it.
        written_at = max(1, int(found.modified_seconds * 1e6))
        size_bytes = min(found.size_bytes, SIZE_LARGEST)
        rows.append(Row(name.key, name.segment.name, written_at, size_bytes))
    return rows_of(rows)
