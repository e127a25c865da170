"""Has catalogs compacted and limits kept, by one sidecar at a time.

Owns when a round of compactions is due, the lease for it, the plan made of the configuration, and
the totals of all rounds. Does not own a compaction (`tiers/catalog/compaction.py`) or the lease's
rule (`tiers/catalog/lease.py`).

Where the lease has moved since a sidecar's last poll, another one has just run a round or runs one,
and this one runs none. It polls again when that lease expires unless renewed: a collector that was
killed delays the others by no more than that.

Invariants: nothing is done where the store cannot create without replacing; a round that fails is
logged, counted and tried again at the next poll, and prevents nothing else; the lease is released
whatever happens, or expires by itself.
"""

import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import anyio

from sidecar.catalog.sync import StoreHealth
from sidecar.config.model import Config
from sidecar.core.tenants import Quota
from sidecar.logs import fields
from tiers.catalog.compaction import compact
from tiers.catalog.lease import CatalogLease
from tiers.catalog.major_compaction import CompactionPlan, CompactionReport
from tiers.catalog.manifest import Counts
from tiers.catalog.names import FORMAT, parse_namespace
from tiers.catalog.orphans import remove_leftovers
from tiers.catalog.retention import RetentionLimits, RetentionRules
from tiers.catalog.scan import Superseded
from tiers.errors import TierError
from tiers.store.object_tier import ObjectTier

LEASE_SECONDS: Final = 60.0
RELEASE_SECONDS_MAX: Final = 5.0
KEEP_SECONDS_MIN: Final = 120.0
"""How long merged logs stay, for readers that have not read them. Each refresh lists them."""
KEEP_REFRESHES: Final = 20
CROWDED_SECONDS: Final = 30.0
CROWDED_FILES: Final = 500
"""Unmerged log files, half of a listing's page, that make a round due at once."""

_logger = logging.getLogger("kvlake.store")


@dataclass(slots=True)
class Collected:
    """Totals of all rounds of this sidecar. Never decreases."""

    rounds: int = 0
    rounds_failed: int = 0
    rounds_left: int = 0
    """Polls at which another sidecar had the lease, or had just had it."""
    logs_merged: int = 0
    withdrawn: int = 0
    withdrawn_bytes: int = 0
    deleted: int = 0
    files_removed: int = 0
    leftovers_removed: int = 0
    """Damaged objects that were moved aside long ago, and probes of sidecars that died."""

    def add(self, report: CompactionReport) -> None:
        """Count one compaction."""
        self.rounds += 1
        self.logs_merged += report.logs_merged
        self.withdrawn += report.withdrawn
        self.withdrawn_bytes += report.withdrawn_bytes
        self.deleted += report.deleted
        self.files_removed += report.files_removed


def plan_of(config: Config, *, major: bool = False, dry_run: bool = False) -> CompactionPlan:
    """The plan of a compaction under this configuration, which must have a store."""
    store, rules = config.store, config.tenants.rules()
    assert store is not None, "only a store is compacted"

    def limits(quota: Quota) -> RetentionLimits:
        return RetentionLimits(
            quota.store_ttl_seconds, quota.store_bytes_max, quota.store_objects_max
        )

    return CompactionPlan(
        retention=RetentionRules(
            store.ttl,
            store.size_max,
            store.objects_max,
            tenant=limits(rules.default),
            named={tenant: limits(quota) for tenant, (_, quota) in rules.named.items()},
        ),
        grace_seconds=store.gc.grace,
        keep_seconds=max(KEEP_SECONDS_MIN, KEEP_REFRESHES * store.refresh_seconds),
        major=major,
        reconcile_seconds=store.reconcile_every,
        dry_run=dry_run,
    )


def holder_name(name: str) -> str:
    """The holder of a lease, for people."""
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
    """One round: a compaction of each namespace, under a lease that is held.

    A namespace that fails, or that another process compacts meanwhile, does not stop the others.
    Returns their reports, and the first error. Raises `Superseded` if the lease is lost.
    """
    reports: list[CompactionReport] = []
    failure: TierError | None = None
    for prefix in prefixes:
        if not await lease.renew(now=True):
            raise Superseded("another process has the lease")
        try:
            report = await compact(
                store, prefix, plan, lease.store_seconds, renew_lease=lease.renew, counts=counts
            )
        except TierError as error:
            failure = failure or error
        except Superseded:
            # Another process has compacted this namespace, or it has the lease.
            if not await lease.renew(now=True):
                raise
        else:
            reports.append(report)
    return reports, failure


class Collector:
    """Polls the lease, acquires it, and runs rounds.

    `logs_unmerged` gives the unmerged log files of the catalog with most, at the last refresh.
    """

    def __init__(
        self,
        store: ObjectTier,
        config: Config,
        health: StoreHealth,
        logs_unmerged: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.store is not None, "a store was opened"
        self._store = store
        self._settings = config.store
        self._plan = plan_of(config)
        self._health = health
        self._logs_unmerged = logs_unmerged
        holder = holder_name(config.runtime.name)
        self._lease = CatalogLease(store, holder, seconds=LEASE_SECONDS, clock=clock)
        self._failing = False
        self._last_seen: int | None = None
        """The newest lease at the last poll."""
        self.collected = Collected()
        self.withdrawn_by: Counter[str] = Counter()
        """Objects that were withdrawn, by the setting that limits them."""
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
        """Poll now and then, for ever."""
        every = self._settings.gc.every
        # Spread, so that sidecars that were started together do not poll together.
        due_in = every * secrets.randbelow(1000) / 1000
        while True:
            waited = 0.0
            while waited < due_in:
                await anyio.sleep(min(CROWDED_SECONDS, due_in - waited))
                waited += CROWDED_SECONDS
                # After a failed round the others may be able to, unless this one keeps polling.
                if self._logs_unmerged() >= CROWDED_FILES and not self._failing:
                    break
            due_in = every
            if self.state == "on":
                due_in = await self.poll()

    async def poll(self) -> float:
        """Poll the lease once, and collect where it can be acquired. Returns seconds to the next.

        Where another sidecar holds the lease, that is when it expires unless renewed.
        """
        every = self._settings.gc.every
        try:
            before, self._last_seen = self._last_seen, await self._lease.poll()
            moved = before is not None and before != self._last_seen
            if moved or not await self._lease.acquire():
                self.collected.rounds_left += 1
            else:
                try:
                    await self._round()
                finally:
                    with anyio.move_on_after(RELEASE_SECONDS_MAX, shield=True):
                        await self._lease.release()
                        self._last_seen = await self._lease.poll()
            self._failing = False
        except Superseded as error:
            self.collected.rounds_left += 1
            _logger.info("collection is left to another sidecar", extra=fields(reason=error))
        except Exception as error:
            self.collected.rounds_failed += 1
            if not isinstance(error, TierError):
                # What is in a bucket is foreign. It must not end the sidecar, which serves engines.
                _logger.exception("collection failed")
            elif not self._failing:
                _logger.warning("collection failed", extra=fields(reason=error))
            if self._failing:
                # The others see the lease move at each of these polls, and run no round. They may
                # be able to.
                every *= 2
            self._failing = True
        return min(every, self._lease.expires_in or every)

    async def _round(self) -> None:
        prefixes = await namespaces(self._store)
        reports, failure = await collect(
            self._store, self._lease, self._plan, prefixes, self.counts
        )
        for report in reports:
            self.collected.add(report)
            withdrawn_by = report.withdrawn_by()
            self.withdrawn_by.update(withdrawn_by)
            if report.withdrawn or report.deleted:
                _logger.info(
                    "collected",
                    extra=fields(
                        namespace=report.prefix,
                        withdrawn=report.withdrawn,
                        withdrawn_bytes=report.withdrawn_bytes,
                        withdrawn_by={name: count for name, count in withdrawn_by.items() if count},
                        deleted=report.deleted,
                    ),
                )
        left = await remove_leftovers(
            self._store,
            self._lease.store_seconds,
            quarantine_seconds=self._settings.gc.quarantine_keep,
            renew_lease=self._lease.renew,
        )
        removed = left.quarantined + left.probes
        self.collected.leftovers_removed += removed
        if removed:
            _logger.info(
                "leftovers removed", extra=fields(quarantined=left.quarantined, probes=left.probes)
            )
        if failure is not None:
            raise failure
