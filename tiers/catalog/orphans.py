"""Objects that no catalog names: listed shard by shard, and removed where nobody needs them.

Owns listing a namespace's objects by shard, which is a folder named by a key's first two digits;
making rows of such a listing; and which leftovers are removed: damaged objects that were moved
aside long ago, and probes of sidecars that died. Does not own what is done with the rows, moving
aside and probing (`store/object_tier.py`), or temporary files of a folder (`store/folder.py`).

Invariants: a shard is listed in pages, each with a deadline of its own, and no more than one shard
is in memory; whatever is in a shard, listing it ends with what is there or with an error of the
tier. What this code did not name stays, and so does what is too young or has no time. Ages are by
the store's clock, for damaged objects from the moment when they were moved aside.
A row made of a listing has no tenant, parent or number of blocks, because an object does not say
whose it is, and the store's own time: where the writer's own row is known, it is newer and holds.
"""

import contextlib
import math
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from tiers.catalog.merge import SHARDS
from tiers.catalog.names import FORMAT, parse_name, parse_namespace
from tiers.catalog.rows import SIZE_LARGEST, TIME_LATEST, Row, Rows, rows_of
from tiers.catalog.scan import Superseded
from tiers.errors import TierUnavailable
from tiers.store.client import Found, Listing, run_in_thread
from tiers.store.object_tier import PROBE_FOLDER, PROBE_NAME_BYTES, QUARANTINE_FOLDER, ObjectTier

LIST_PAGE_NAMES: Final = 1000
"""Names that are requested at a time: one request of S3, and of most other stores."""
PROBE_SECONDS_MAX: Final = 3600.0
"""A probe takes five requests. No sidecar waits for an older one."""
REMOVED_TOGETHER: Final = 100
"""Objects that are removed between two renewals of the lease."""
_QUARANTINED: Final = f"{QUARANTINE_FOLDER}/"
_PROBE: Final = re.compile(rf"{PROBE_FOLDER}/[0-9a-f]{{{2 * PROBE_NAME_BYTES}}}")


def shard_folder(prefix: str, shard: int) -> str:
    """The folder of one shard of a namespace."""
    return f"{prefix}/{shard:02x}"


async def nonempty_shards(tier: ObjectTier, prefix: str) -> list[int]:
    """The shards that hold anything, in order. One request. Raises the tier's errors."""
    there = {entry.name.rstrip("/") for entry in await tier.list(prefix, deep=False)}
    return [shard for shard in range(SHARDS) if shard_folder(prefix, shard) in there]


async def list_shard(
    tier: ObjectTier,
    prefix: str,
    shard: int,
    between: Callable[[], Awaitable[None]] | None = None,
) -> Listing:
    """All objects in one shard. Raises the tier's errors.

    `between` is called between two pages: a large shard may take longer than a lease lasts. What
    it raises ends the listing.
    """
    folder = shard_folder(prefix, shard)
    found: Listing = []
    after = ""
    while True:
        # All keys of a shard have one length, so servers agree on what comes after a name.
        page = await tier.list(folder, start_after=after, names_max=LIST_PAGE_NAMES)
        found += page
        if len(page) < LIST_PAGE_NAMES:
            return found
        if between is not None:
            await between()
        # The last name may be foreign. The next page begins after it all the same.
        before, after = after, max(one.name for one in page)
        if after <= before:
            raise TierUnavailable(
                f"list {tier.url}/{folder}: a listing does not go on after a name, and would "
                "have no end; look for a proxy before the store, or choose another store",
                retryable=False,
            )


async def rows_in_shard(tier: ObjectTier, prefix: str, shard: int) -> Rows:
    """A row for each segment in one shard. Raises the tier's errors."""
    listing = await list_shard(tier, prefix, shard)
    return await run_in_thread(rows_of_listing, listing, prefix)


def rows_of_listing(listing: Listing, prefix: str) -> Rows:
    """A row for each object of the namespace in folder `prefix` that is a segment."""
    rows: list[Row] = []
    for found in listing:
        name = parse_name(found.name)
        if name is None or not found.size_bytes or not found.name.startswith(f"{prefix}/"):
            continue
        # 0, of a store that gives no times, is not a valid time of a row.
        written_at = min(max(1, int(found.modified_seconds * 1e6)), TIME_LATEST)
        size_bytes = min(found.size_bytes, SIZE_LARGEST)
        rows.append(Row(name.key, name.segment.name, written_at, size_bytes))
    return rows_of(rows)


@dataclass(slots=True)
class Leftovers:
    """What was removed, or with `dry_run` would have been."""

    quarantined: int = 0
    quarantined_bytes: int = 0
    quarantine_kept: int = 0
    """Damaged objects that are not old enough."""
    quarantine_kept_bytes: int = 0
    probes: int = 0


async def remove_leftovers(
    tier: ObjectTier,
    now_seconds: float,
    *,
    quarantine_seconds: float | None,
    namespace: str = "",
    dry_run: bool = False,
    renew_lease: Callable[[], Awaitable[bool]] | None = None,
) -> Leftovers:
    """Remove what is old enough. Raises the tier's errors; the rest is left to the next call.

    `now_seconds` is by the store's clock. Damaged objects stay for `quarantine_seconds`, or for
    ever. `namespace`: only what was moved aside in the namespace of this folder. `renew_lease` is
    called now and then; False ends it, because another process has the lease.
    """
    report = Leftovers()
    before = now_seconds - (math.inf if quarantine_seconds is None else quarantine_seconds)

    async def check_lease() -> None:
        if renew_lease is not None and not await renew_lease():
            raise Superseded("another process has the lease")

    async def remove(doomed: Listing) -> None:
        # The lease is renewed though nothing is removed: many empty shards outlast it.
        for first in range(0, max(1, len(doomed)), REMOVED_TOGETHER):
            await check_lease()
            some = doomed[first : first + REMOVED_TOGETHER]
            if some and not dry_run:
                await tier.delete([found.name for found in some])
            moved = [found for found in some if found.name.startswith(_QUARANTINED)]
            report.quarantined += len(moved)
            report.quarantined_bytes += sum(found.size_bytes for found in moved)
            report.probes += len(some) - len(moved)

    prefixes: list[str | None] = [namespace]
    if not namespace:
        there = await tier.list(f"{_QUARANTINED}{FORMAT}", deep=False)
        prefixes = [parse_namespace(found.name.removeprefix(_QUARANTINED)) for found in there]
    folders = sorted(f"{_QUARANTINED}{prefix}" for prefix in prefixes if prefix is not None)
    with contextlib.suppress(Superseded):
        for folder in folders:
            for shard in await nonempty_shards(tier, folder):
                listing = await list_shard(tier, folder, shard, check_lease)
                await remove(await run_in_thread(_too_old, listing, before, report))
        if not namespace:
            listing = await tier.list(PROBE_FOLDER)
            probes = [found for found in listing if _PROBE.fullmatch(found.name)]
            await remove([one for one in probes if _is_older(one, now_seconds - PROBE_SECONDS_MAX)])
    return report


def _too_old(listing: Listing, before: float, report: Leftovers) -> Listing:
    """The objects that were moved aside before a moment; `report` counts the others."""
    found: Listing = []
    for one in listing:
        if parse_name(one.name.removeprefix(_QUARANTINED)) is None:
            continue
        if _is_older(one, before):
            found.append(one)
        else:
            report.quarantine_kept += 1
            report.quarantine_kept_bytes += one.size_bytes
    return found


def _is_older(found: Found, moment: float) -> bool:
    return 0 < found.modified_seconds < moment
