"""The collector: has catalogs compacted and bounds kept, by one sidecar at a time.

Owns when a round is due, taking the lease for it, the plan made of the configuration, and what
all rounds came to. Does not own a round (`tiers/catalog/compaction.py`) or the lease's rule
(`tiers/catalog/lease.py`).

Every sidecar looks now and then. One that finds that the lease has moved on since its last look
leaves it at that: somebody else has just done it, or is doing it. In the second case it looks again
when that lease is over unless it was renewed: a collector that was killed in a round keeps nobody
from it for longer than its lease.

Invariants: nothing is done where the store cannot create without replacing; a round that fails is
logged, counted and tried again at the next look, and keeps nothing else from being done; the lease
is given back whatever happens, or runs out by itself.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import anyio

from sidecar.logs import fields
from tiers.catalog.compaction import CompactionPlan, CompactionReport, Superseded, compact
from tiers.catalog.lease import CatalogLease
from tiers.catalog.leftovers import remove_leftovers
from tiers.catalog.manifest import Counts
from tiers.catalog.names import FORMAT, parse_namespace
from tiers.catalog.retention import RetentionLimits, RetentionRules
from tiers.errors import TierError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.catalog.sync import StoreHealth
    from sidecar.config.model import Config
    from sidecar.config.store import StoreSettings
    from sidecar.core.tenants import Quota
    from tiers.store.object_tier import ObjectTier

LEASE_SECONDS: Final = 60.0
GIVE_BACK_SECONDS_MAX: Final = 5.0
KEEP_SECONDS_MIN: Final = 600.0
KEEP_REFRESHES: Final = 20
CROWDED_SECONDS: Final = 30.0
CROWDED_FILES: Final = 500
"""Log files to be merged, half of a listing's page, that make a round due at once.

Those that were merged stay for a while, and looking more often would not end that.
"""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class Collected:
    """What all rounds of this sidecar came to. Never decreases."""

    rounds: int = 0
    rounds_failed: int = 0
    rounds_left: int = 0
    """Looks at which another sidecar had the lease, or had just been at it."""
    logs_merged: int = 0
    withdrawn: int = 0
    withdrawn_bytes: int = 0
    deleted: int = 0
    files_removed: int = 0
    leftovers_removed: int = 0
    """Damaged objects that were moved aside long ago, and probes of sidecars that died."""

    def add(self, report: CompactionReport) -> None:
        """Count one round."""
        self.rounds += 1
        self.logs_merged += report.logs_merged
        self.withdrawn += report.withdrawn
        self.withdrawn_bytes += report.withdrawn_bytes
        self.deleted += report.deleted
        self.files_removed += report.files_removed


def bounds_of(config: Config) -> RetentionRules:
    """What a namespace may hold. The configuration must have a store."""
    store, rules = config.store, config.tenants.rules()
    assert store is not None, "only a store has bounds"

    def limits(quota: Quota) -> RetentionLimits:
        return RetentionLimits(
            quota.store_ttl_seconds, quota.store_bytes_max, quota.store_objects_max
        )

    return RetentionRules(
        store.ttl,
        store.size_max,
        store.objects_max,
        tenant=limits(rules.default),
        named={tenant: limits(quota) for tenant, (_, quota) in rules.named.items()},
    )


def plan_of(config: Config, *, whole: bool = False, dry_run: bool = False) -> CompactionPlan:
    """What a round is to do under this configuration, which must have a store."""
    store = config.store
    assert store is not None, "only a store has bounds"
    return CompactionPlan(
        bounds=bounds_of(config),
        grace_seconds=store.gc.grace,
        keep_seconds=max(KEEP_SECONDS_MIN, KEEP_REFRESHES * store.refresh_seconds),
        whole=whole,
        reconcile_seconds=store.reconcile_every,
        dry_run=dry_run,
    )


def holder_name(name: str) -> str:
    """Who holds a lease, for people."""
    return f"{name} on {socket.gethostname()}, pid {os.getpid()}"


async def namespaces(store: ObjectTier) -> list[str]:
    """Folders of all namespaces in the store. Raises the tier's errors."""
    found = [parse_namespace(entry.name) for entry in await store.list(FORMAT, deep=False)]
    return sorted(prefix for prefix in found if prefix is not None)


async def collect(
    store: ObjectTier,
    lease: CatalogLease,
    plan: CompactionPlan,
    prefixes: Sequence[str],
    counts: Counts,
) -> tuple[list[CompactionReport], TierError | None]:
    """One round on each namespace, under a lease that is held. Raises `Superseded`.

    A namespace whose round fails does not keep the others from theirs. What all others came to is
    returned, and the first error.
    """
    reports: list[CompactionReport] = []
    failure: TierError | None = None
    for prefix in prefixes:
        if not await lease.renew(at_once=True):
            raise Superseded("the lease is somebody else's")
        try:
            report = await compact(
                store, prefix, plan, lease.store_seconds, alive=lease.renew, counts=counts
            )
        except TierError as error:
            failure = failure or error
        else:
            reports.append(report)
    return reports, failure


class Collector:
    """Looks, takes the lease, has rounds done.

    Args:
        store: the store.
        config: of this sidecar; it has a store.
        health: whether the store can create.
        crowd: log files to be merged that a catalog had at the last refresh, the one with most.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: ObjectTier,
        config: Config,
        health: StoreHealth,
        crowd: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.store is not None, "a store was opened"
        self._store = store
        self._settings: StoreSettings = config.store
        self._plan = plan_of(config)
        self._health = health
        self._crowd = crowd
        self._holder = holder_name(config.runtime.name)
        self._lease = CatalogLease(store, self._holder, seconds=LEASE_SECONDS, clock=clock)
        self._failing = False
        # The newest lease at the last look; None before the first.
        self._last_seen: int | None = None
        self.collected = Collected()
        self.withdrawn_by: Counter[str] = Counter()
        """Objects that were withdrawn, by the setting that they fell to."""
        self.counts = Counts()
        """What rounds read."""

    @property
    def state(self) -> str:
        """One sentence for an operator."""
        if not self._settings.gc.enabled:
            return "off: store.gc.enabled is false"
        if self._settings.write == "off":
            return "off: store.write is off"
        if self._health.creates is None:
            return "waits for the first probe of the store"
        if not self._health.creates:
            return "off: the store cannot create an object without replacing one that is there"
        return "on"

    async def run(self) -> None:
        """Look now and then, for ever."""
        every = self._settings.gc.every
        # Spread, so that sidecars that were started together do not come together.
        due_in = every * secrets.randbelow(1000) / 1000
        while True:
            waited = 0.0
            while waited < due_in:
                await anyio.sleep(min(CROWDED_SECONDS, due_in - waited))
                waited += CROWDED_SECONDS
                if self._crowd() >= CROWDED_FILES:
                    break
            due_in = every
            if self.state == "on":
                due_in = await self.look()

    async def look(self) -> float:
        """Look at the lease once, and collect where it is ours or free; seconds to the next look.

        Where somebody else holds it, that is when it is over unless it is renewed.
        """
        await self._look()
        # Where it is over and could not be taken, the store is asked again in its turn.
        return min(self._settings.gc.every, self._lease.over_in or self._settings.gc.every)

    async def _look(self) -> None:
        try:
            before, self._last_seen = self._last_seen, await self._lease.look()
            moved = before is not None and before != self._last_seen
            if moved or not await self._lease.take():
                self.collected.rounds_left += 1
                self._failing = False
                return
            try:
                await self._rounds()
                self._failing = False
            finally:
                with anyio.move_on_after(GIVE_BACK_SECONDS_MAX, shield=True):
                    await self._lease.give_back()
                    self._last_seen = await self._lease.look()
        except Superseded as error:
            self.collected.rounds_left += 1
            _logger.info("a round of collection is left to another", extra=fields(reason=error))
        except TierError as error:
            self.collected.rounds_failed += 1
            if not self._failing:
                _logger.warning("rounds of collection fail", extra=fields(reason=error))
            self._failing = True

    async def _rounds(self) -> None:
        prefixes = await namespaces(self._store)
        reports, failure = await collect(
            self._store, self._lease, self._plan, prefixes, self.counts
        )
        for report in reports:
            self.collected.add(report)
            self.withdrawn_by.update(report.withdrawn_by())
            if report.withdrawn or report.deleted:
                _logger.info(
                    "collected",
                    extra=fields(
                        namespace=report.prefix,
                        withdrawn=report.withdrawn,
                        withdrawn_bytes=report.withdrawn_bytes,
                        withdrawn_by={
                            setting: count
                            for setting, count in report.withdrawn_by().items()
                            if count
                        },
                        deleted=report.deleted,
                    ),
                )
        left = await remove_leftovers(
            self._store,
            self._lease.store_seconds,
            quarantine_seconds=self._settings.gc.quarantine_keep,
            alive=self._lease.renew,
        )
        removed = left.quarantined + left.probes
        self.collected.leftovers_removed += removed
        if removed:
            _logger.info(
                "leftovers removed", extra=fields(quarantined=left.quarantined, probes=left.probes)
            )
        if failure is not None:
            raise failure
