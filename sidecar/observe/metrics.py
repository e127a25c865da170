"""What the sidecar counts and holds, as Prometheus metrics.

Owns the names of metrics. Does not say when they are asked for (`report.py`), and counts nothing:
counters live with what they count (`Counters` in the engine, `SocketStats` at the sockets,
`Metered` at the store), and are read when somebody asks.

Invariants: reading changes nothing and costs no more than the number of sessions, realms and slot
classes; names of metrics, once released, are kept: dashboards are built on them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.core.breaker import BreakerState
from sidecar.core.tenants import OTHER, TenantCounters
from sidecar.observe import metric_help as metrichelp
from sidecar.service.watchdog import PROBLEMS
from tiers.catalog.retention import BOUNDS
from tiers.catalog.usage import Usage
from tiers.store.middleware.billing import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sidecar.core.tenants import TenantSnapshot
    from sidecar.service.dispatcher import Dispatcher
    from sidecar.service.watchdog import Watchdog

PREFIX: Final = "kvlake"


def version() -> str:
    """The installed release."""
    try:
        return importlib.metadata.version("kvlake")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


class SidecarCollector(Collector):
    """Reads the dispatcher whenever Prometheus scrapes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._version = version()

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        yield _gauge("info", "The running release; always 1", {(self._version,): 1}, ["version"])
        told = "When this sidecar started, in seconds since 1970"
        yield _gauge("start_time_seconds", told, {(): self._dispatcher.started})
        told = "Objects that the sidecar before this one had not written when it stopped"
        yield _gauge("last_stop_objects_lost", told, {(): self._dispatcher.lost_before})
        yield from self._engine()
        yield from self._tenants()
        yield from self._host()
        yield from self._store()
        yield from self._sockets()
        yield from self._realms()
        yield from self._events()

    def _engine(self) -> Iterator[Metric]:
        engine = self._dispatcher.engine
        for name, value in dataclasses.asdict(engine.counters).items():
            yield _counter(name, metrichelp.COUNTERS[name], {(): value})
        now = engine.snapshot()
        chunks = {("host",): now.chunks_in_host, ("store",): now.chunks_in_store}
        yield _gauge(
            "chunks", "Chunks of which engines can load all parts, by tier", chunks, ["tier"]
        )
        yield _gauge("leases", "Pins held for loads", {(): now.leases})
        yield _gauge("lookups_waiting", "Lookups that pin or wait for chunks", {(): now.lookups})
        pending = {(name,): value for name, value in dataclasses.asdict(now.pending).items()}
        yield _gauge("pending", "Work that has not ended, by kind", pending, ["kind"])
        shares = engine.bounds.shares
        used = {(name,): share.used for name, share in shares.items()}
        yield _gauge("waiting", "What waits, by kind; memory as it is accounted", used, ["kind"])
        limits = {(name,): share.limit for name, share in shares.items()}
        yield _gauge("waiting_max", "Limit of what may wait, by kind", limits, ["kind"])
        refused = dict(engine.bounds.refused)
        yield _counter(
            "refused", "What was refused, and for want of what", refused, ["what", "why"]
        )
        yield _gauge("tasks", "Tasks of the event loop", {(): len(asyncio.all_tasks())})
        yield _gauge("draining", "1 while the sidecar stops", {(): int(now.draining)})

    def _tenants(self) -> Iterator[Metric]:
        told = self._dispatcher.engine.snapshot().tenants
        labels = ["tenant"]
        held = {(one.name,): one.host_bytes for one in told}
        yield _gauge(
            "tenant_host_bytes", "Bytes of slots that hold parts of a tenant", held, labels
        )
        limits = {(one.name,): one.host_bytes_max or 0 for one in told}
        yield _gauge("tenant_host_bytes_max", "Limit of it for each, 0: none", limits, labels)
        yield from self._tenants_in_store(told)
        for count in dataclasses.fields(TenantCounters):
            values = {(one.name,): getattr(one.counters, count.name) for one in told}
            about = metrichelp.TENANT_COUNTERS[count.name]
            yield _counter(f"tenant_{count.name}", about, values, labels)

    def _tenants_in_store(self, told: tuple[TenantSnapshot, ...]) -> Iterator[Metric]:
        if self._dispatcher.catalogs is None:
            return
        labels, held = ["tenant"], held_in_store(self._dispatcher)
        sizes = {(name,): one.size_bytes for name, one in held.items()}
        yield _gauge(
            "tenant_store_bytes",
            "Bytes of objects of a tenant that the catalogs offer",
            sizes,
            labels,
        )
        objects = {(name,): one.objects for name, one in held.items()}
        yield _gauge(
            "tenant_store_objects", "Objects of a tenant that the catalogs offer", objects, labels
        )
        about = "Limit of it in a namespace for each, 0: none"
        limits = {(one.name,): one.store_bytes_max or 0 for one in told}
        yield _gauge("tenant_store_bytes_max", about, limits, labels)
        limits = {(one.name,): one.store_objects_max or 0 for one in told}
        yield _gauge("tenant_store_objects_max", about, limits, labels)
        ages = {(one.name,): one.store_ttl_seconds or 0.0 for one in told}
        yield _gauge("tenant_store_ttl_seconds", "Age at which it goes, 0: none", ages, labels)

    def _host(self) -> Iterator[Metric]:
        stats = self._dispatcher.pool.stats()
        sizes = {
            ("size",): stats.size_bytes,
            ("used",): stats.used_bytes,
            ("slabs",): stats.slab_bytes,
            ("unclaimed",): self._dispatcher.engine.snapshot().unclaimed_bytes,
        }
        told = "Host memory: all, in used slots, in slabs, restored for engines that have not come"
        yield _gauge("host_bytes", told, sizes, ["kind"])
        slots: dict[tuple[str, ...], float] = {}
        for one in stats.classes:
            slots[str(one.slot_bytes), "used"] = one.slots_used
            slots[str(one.slot_bytes), "free"] = one.slots_free
        yield _gauge("host_slots", "Slots by size and state", slots, ["slot_bytes", "state"])

    def _store(self) -> Iterator[Metric]:
        store, watch = self._dispatcher.store, self._dispatcher.watch
        if store is None or watch is None:
            return
        told = "1 while the store answers: what was last asked of it has not failed"
        yield _gauge("store_well", told, {(): int(watch.health.well)})
        breakers = self._dispatcher.engine.breakers
        paused = {
            (way,): int(one.state is not BreakerState.CLOSED) for way, one in breakers.items()
        }
        yield _gauge("store_paused", "1 while reads or writes of the store pause", paused, ["way"])
        opened = {(way,): one.opened for way, one in breakers.items()}
        yield _counter(
            "store_pauses", "How often a pause of reads or writes began", opened, ["way"]
        )
        queued = self._dispatcher.engine.snapshot().write_queue_bytes
        yield _gauge(
            "write_queue_bytes", "Bytes of parts that wait to be written to the store", {(): queued}
        )
        told = "Catalogs refreshed, for each namespace and way of cutting the model"
        yield _counter("store_listings", told, {(): watch.listings})
        told = "Of these refreshes, those that the store failed"
        yield _counter("store_listings_failed", told, {(): watch.listings_failed})
        yield from self._catalog()
        if store.billed is not None:
            sent = {(name,): store.billed.requests[name] for name in OPERATIONS}
            told = "Requests to the store, retries included"
            yield _counter("store_requests", told, sent, ["operation"])
            moved = {(name,): store.billed.num_bytes[name] for name in ("get", "put")}
            yield _counter("store_request_bytes", "Bytes of requests", moved, ["operation"])
        verbs = store.snapshot()
        labels = ["verb"]
        calls = {(verb,): counts.calls for verb, counts in verbs.items()}
        yield _counter("store_calls", "Calls to the store", calls, labels)
        seconds = {(verb,): counts.seconds for verb, counts in verbs.items()}
        yield _counter("store_seconds", "Seconds spent in calls to the store", seconds, labels)
        num_bytes = {(verb,): counts.num_bytes for verb, counts in verbs.items()}
        yield _counter("store_bytes", "Bytes of objects of calls that succeeded", num_bytes, labels)
        inflight = {(verb,): counts.inflight for verb, counts in verbs.items()}
        yield _gauge("store_inflight", "Calls that run now", inflight, labels)
        failures = {
            (verb, cause): count
            for verb, counts in verbs.items()
            for cause, count in counts.failures.items()
        }
        yield _counter("store_failures", "Calls that failed, by cause", failures, ["verb", "cause"])
        retries = {(cause,): count for cause, count in store.retried().items()}
        yield _counter("store_retries", "Attempts tried again, by cause", retries, ["cause"])
        skipped = {(): store.entries_skipped}
        yield _counter("store_entries_skipped", "Odd entries left out of folder listings", skipped)

    def _catalog(self) -> Iterator[Metric]:
        catalogs = self._dispatcher.catalogs
        if catalogs is None:
            return
        for name, value in dataclasses.asdict(catalogs.counts).items():
            yield _counter(f"catalog_{name}", metrichelp.CATALOG[name], {(): value})
        told = "Log files that this sidecar added to catalogs"
        yield _counter("catalog_files_written", told, {(): catalogs.files_written})
        told = "Rows not announced because too many waited; reconciliation finds their objects"
        yield _counter("catalog_rows_lost", told, {(): catalogs.rows_lost})
        sweeps = self._dispatcher.watch.reconciler if self._dispatcher.watch is not None else None
        if sweeps is not None:
            yield _counter(
                "catalog_sweeps", "Namespaces listed whole because of a doubt", {(): sweeps.sweeps}
            )
            yield _counter(
                "catalog_found", "Objects that were listed and no row had named", {(): sweeps.found}
            )
        collector = self._dispatcher.collector
        if collector is not None:
            for name, value in dataclasses.asdict(collector.collected).items():
                yield _counter(f"collection_{name}", metrichelp.COLLECTION[name], {(): value})
            fallen = {(why.setting,): collector.withdrawn_by[why.setting] for why in BOUNDS}
            yield _counter(
                "collection_withdrawn_by_bound", "Objects withdrawn, by bound", fallen, ["bound"]
            )
        yield _gauge(
            "catalog_rows_waiting", "Rows that wait to be announced", {(): catalogs.rows_waiting}
        )

    def _sockets(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        roles: dict[tuple[str, ...], float] = {("scheduler",): 0, ("worker",): 0}
        for session in dispatcher.sessions.all():
            roles[str(session.attach.role),] += 1
        yield _gauge("sessions", "Attached clients", roles, ["role"])
        reasons = {(reason,): n for reason, n in dispatcher.uncached.by_reason().items()}
        told = "Engines of this node that serve without the cache, by reason"
        yield _gauge("engines_uncached", told, reasons, ["reason"])
        socket_stats = dispatcher.socket_stats
        yield _counter(
            "sessions_opened", "Clients that attached", {(): socket_stats.sessions_opened}
        )
        yield _counter(
            "sockets_renewed", "Removed socket files made again", {(): socket_stats.sockets_renewed}
        )
        yield _counter(
            "connections_cut",
            "Connections that ended before they attached",
            {(): socket_stats.connections_cut},
        )
        expired = {(): socket_stats.attaches_expired}
        yield _counter("attaches_expired", "Clients that took too long to attach", expired)
        yield _counter(
            "frames_received", "Messages from clients", {(): socket_stats.frames_received}
        )
        yield _counter(
            "replies_dropped",
            "Answers that their engine could not be sent",
            {(): socket_stats.replies_dropped},
        )
        refused = {(why,): count for why, count in dispatcher.handshakes_refused().items()}
        yield _counter(
            "handshakes_refused", "Connections for jobs refused unread", refused, ["why"]
        )
        refused = {(code,): count for code, count in socket_stats.frames_refused.items()}
        yield _counter("frames_refused", "Messages that were refused, by code", refused, ["code"])
        refused = {(code,): count for code, count in socket_stats.attaches_refused.items()}
        # An alarm looks at it: a counter that begins at 1 has not increased.
        refused.setdefault(("user",), 0)
        yield _counter("attaches_refused", "Clients refused, by code", refused, ["code"])

    def _realms(self) -> Iterator[Metric]:
        dispatcher = self._dispatcher
        yield _gauge(
            "realms", "Namespaces and topologies that are known", {(): len(dispatcher.realms)}
        )
        yield _gauge("realms_max", "Limit of it", {(): dispatcher.realms.realms_max})
        forgotten = {(): dispatcher.realms.forgotten}
        yield _counter("realms_forgotten", "Realms that gave way to others", forgotten)
        yield _gauge("index_bytes", "Shared memory of all indexes", {(): dispatcher.index_bytes})

    def _events(self) -> Iterator[Metric]:
        stream, sockets = self._dispatcher.events, self._dispatcher.event_sockets
        if stream is None or sockets is None:
            return
        yield _counter("events_told", "KV events published", {(): stream.events_told})
        yield _counter(
            "event_batches_dropped",
            "Batches that a subscriber did not get because it did not read",
            {(): sockets.batches_dropped},
        )
        yield _counter("event_replays", "Replays and snapshots", {(): sockets.requests_answered})
        yield _counter(
            "event_replays_dropped",
            "Requests for a replay or snapshot that were not answered to their end",
            {(): sockets.requests_dropped},
        )
        yield _gauge("event_buffer_bytes", "Kept for replay", {(): stream.history.size_bytes})


def _counter(
    name: str, told: str, values: Mapping[Any, float], labels: list[str] | None = None
) -> Metric:
    """A counter with one value for each tuple of label values."""
    family = CounterMetricFamily(f"{PREFIX}_{name}", told, labels=labels or [])
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family


def _gauge(
    name: str, told: str, values: Mapping[Any, float], labels: list[str] | None = None
) -> Metric:
    """A gauge with one value for each tuple of label values."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", told, labels=labels or [])
    for label_values, value in values.items():
        family.add_metric(list(label_values), value)
    return family


@dataclasses.dataclass(slots=True)
class HttpRefusals:
    """What the HTTP server turned away since the start."""

    connections: int = 0
    requests: int = 0
    """Requests without the token."""


class WatchdogCollector(Collector):
    """Whether engines can be served, and what keeps them from it."""

    def __init__(self, watchdog: Watchdog, http_refusals: HttpRefusals) -> None:
        self._watchdog = watchdog
        self._http_refusals = http_refusals

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        now = self._watchdog
        ready, _ = now.readiness(reasons=False)
        yield _gauge("ready", "1 while engines can attach and be served", {(): int(ready)})
        found = {(code,): 0 for code in PROBLEMS} | {(one.code,): 1 for one in now.problems()}
        yield _gauge("problem", "1 while this is wrong, by code", found, ["code"])
        yield _gauge(
            "loop_lag_seconds", "How late the event loop was, twice a second", {(): now.lag_seconds}
        )
        most = {(): now.lag_seconds_max}
        yield _gauge("loop_lag_seconds_max", "The most that the event loop was ever late", most)
        refused = {("connection",): self._http_refusals.connections}
        refused["token",] = self._http_refusals.requests
        yield _counter(
            "http_refused",
            "HTTP connections refused, or ended for another, and requests refused",
            refused,
            ["why"],
        )


def held_in_store(dispatcher: Dispatcher) -> dict[str, Usage]:
    """What the tenants of each label are known to hold in the store, all namespaces together."""
    names, catalogs = dispatcher.engine.tenants.names, dispatcher.catalogs
    if catalogs is None:
        return dict.fromkeys((*names.values(), OTHER), Usage())
    held = {name: catalogs.held(tenant) for tenant, name in names.items()}
    whole = catalogs.stored
    other = Usage(
        size_bytes=whole.size_bytes - sum(one.size_bytes for one in held.values()),
        objects=whole.objects - sum(one.objects for one in held.values()),
    )
    return held | {OTHER: other}
