"""Leftovers: objects that no catalog names and that nobody reads any more.

Owns which those are, and removing them: damaged objects that were moved aside, once there was time
to look at them, and probes of sidecars that died before they could remove their own. Does not own
moving aside and probing (`store/object_tier.py`), temporary files of a folder (`store/folder.py`),
nor when it is done (`sidecar/catalog/garbage_collector.py`).

Invariants: a listing is of one slice, in parts with a deadline each, and what is too old of it goes
before the next; what this code did not name stays, and so does what is too young, or has no time;
ages are by the store's clock, from the moment when an object was moved aside.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from tiers.catalog.names import FORMAT, parse_name, parse_namespace
from tiers.catalog.orphans import listed_in, slices_there
from tiers.store.object_tier import PROBE_FOLDER, PROBE_NAME_BYTES, QUARANTINE_FOLDER

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiers.store.client import Found, Listing
    from tiers.store.object_tier import ObjectTier

PROBE_SECONDS_MAX: Final = 3600.0
"""A probe lasts as long as five requests; what is older is nobody's."""
REMOVED_TOGETHER: Final = 100
"""Objects that are removed between two looks at the lease."""
_ASIDE: Final = f"{QUARANTINE_FOLDER}/"
_PROBE: Final = re.compile(rf"{PROBE_FOLDER}/[0-9a-f]{{{2 * PROBE_NAME_BYTES}}}")


@dataclass(slots=True)
class Leftovers:
    """What was removed, or would be."""

    quarantined: int = 0
    quarantined_bytes: int = 0
    quarantine_kept: int = 0
    """Damaged objects that are younger than they may get."""
    quarantine_kept_bytes: int = 0
    probes: int = 0

    def count(self, found: Found) -> None:
        """Count one that was removed, or would be."""
        if found.name.startswith(_ASIDE):
            self.quarantined += 1
            self.quarantined_bytes += found.size_bytes
        else:
            self.probes += 1


async def remove_leftovers(
    tier: ObjectTier,
    now_seconds: float,
    *,
    quarantine_seconds: float | None,
    namespace: str = "",
    dry_run: bool = False,
    alive: Callable[[], Awaitable[bool]] | None = None,
) -> Leftovers:
    """Remove what is old enough. Raises the tier's errors; what is left then is for the next time.

    Args:
        tier: the store.
        now_seconds: the time by the store's clock.
        quarantine_seconds: how long damaged objects stay; None: for ever.
        namespace: only what was moved aside in the namespace of this folder; "": everything.
        dry_run: remove nothing.
        alive: asked now and then; False ends it, because somebody else is at it.
    """
    report = Leftovers()
    before = now_seconds - (math.inf if quarantine_seconds is None else quarantine_seconds)

    async def remove(doomed: Sequence[Found]) -> bool:
        # Asked though nothing is to be removed: very many slices take longer than a lease.
        for first in range(0, max(1, len(doomed)), REMOVED_TOGETHER):
            if alive is not None and not await alive():
                return False
            some = doomed[first : first + REMOVED_TOGETHER]
            if some and not dry_run:
                await tier.delete([found.name for found in some])
            for found in some:
                report.count(found)
        return True

    for folder in [f"{_ASIDE}{namespace}"] if namespace else await _namespaces(tier):
        for number in await slices_there(tier, folder):
            listing = await listed_in(tier, folder, number)
            doomed = await anyio.to_thread.run_sync(_too_old, listing, before, report)
            if not await remove(doomed):
                return report
    if not namespace:
        listing = await tier.list(PROBE_FOLDER)
        probes = [found for found in listing if _PROBE.fullmatch(found.name)]
        await remove([one for one in probes if _is_older(one, now_seconds - PROBE_SECONDS_MAX)])
    return report


async def _namespaces(tier: ObjectTier) -> list[str]:
    """The folders of all namespaces of which something was moved aside."""
    there = await tier.list(f"{_ASIDE}{FORMAT}", deep=False)
    found = [parse_namespace(entry.name.removeprefix(_ASIDE)) for entry in there]
    return sorted(f"{_ASIDE}{prefix}" for prefix in found if prefix is not None)


def _too_old(listing: Listing, before: float, report: Leftovers) -> Listing:
    """Those of the objects that were moved aside before a moment; the others are counted."""
    found: Listing = []
    for one in listing:
        if parse_name(one.name.removeprefix(_ASIDE)) is None:
            continue
        if _is_older(one, before):
            found.append(one)
        else:
            report.quarantine_kept += 1
            report.quarantine_kept_bytes += one.size_bytes
    return found


def _is_older(found: Found, moment: float) -> bool:
    return 0 < found.modified_seconds < moment
