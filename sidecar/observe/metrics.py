"""The values of the sidecar's Prometheus metrics, read when somebody asks.

Owns where the value of each metric of `metric_table.py` comes from. Counts nothing: counters live
with what they count (`Counters` in the engine, `SocketStats` at the sockets, `Metered` at the
store).

Invariant: reading changes nothing and costs no more than the number of sessions, realms and slot
classes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sidecar.core.breaker import BreakerState
from sidecar.core.tenants import OTHER
from sidecar.observe.metric_table import COUNTERS, GAUGES
from sidecar.service.watchdog import PROBLEMS
from tiers.catalog.retention import REASONS
from tiers.catalog.usage import Usage
from tiers.store.middleware import OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sidecar.observe.http import HttpRefusals
    from sidecar.service.dispatcher import Dispatcher
    from sidecar.service.watchdog import Watchdog

PREFIX: Final = "kvlake_"

Values = dict[str, float | Mapping[Any, float]]
"""By name of the metric: one value, or one for each value of the label (each tuple of values)."""


def render_metrics(
    dispatcher: Dispatcher, watchdog: Watchdog, http_refusals: HttpRefusals
) -> bytes:
    """All metrics in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(dispatcher, watchdog, http_refusals))
    return generate_latest(registry)


class SidecarCollector(Collector):
    """Makes a metric of each row of the table that has a value now."""

    def __init__(
        self, dispatcher: Dispatcher, watchdog: Watchdog, http_refusals: HttpRefusals
    ) -> None:
        self._dispatcher = dispatcher
        self._watchdog = watchdog
        self._http_refusals = http_refusals

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        values = (
            _engine(self._dispatcher)
            | _tenants(self._dispatcher)
            | _host(self._dispatcher)
            | _store(self._dispatcher)
            | _catalog(self._dispatcher)
            | _sockets(self._dispatcher)
            | _events(self._dispatcher)
            | _health(self._watchdog, self._http_refusals)
        )
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for row, help_text in table.items():
                name, _, labels = row.rstrip("}").partition("{")
                if name not in values:
                    continue
                value = values.pop(name)
                metric = family(PREFIX + name, help_text, labels=labels.split(",") * bool(labels))
                by_label = value if isinstance(value, Mapping) else {(): value}
                for label, number in by_label.items():
                    metric.add_metric([label] if isinstance(label, str) else label, number)
                yield metric
        assert not values, f"the table lacks {sorted(values)}"


def _fields(prefix: str, counts: Any) -> Values:
    """One value for each field of a record of counts."""
    return {prefix + name: value for name, value in dataclasses.asdict(counts).items()}


def _engine(dispatcher: Dispatcher) -> Values:
    engine, shares = dispatcher.engine, dispatcher.engine.shares.shares
    directory = engine.directory
    return _fields("", engine.counters) | {
        "info": {version(): 1},
        "start_time_seconds": dispatcher.started,
        "last_stop_objects_lost": dispatcher.lost_before,
        "tasks": len(asyncio.all_tasks()),
        "draining": int(engine.draining),
        "chunks": {"host": directory.chunks_in_host, "store": directory.chunks_in_store},
        "leases": len(engine.leases),
        "lookups_waiting": len(engine.lookups),
        "pending": dataclasses.asdict(engine.pending_work()),
        "waiting": {name: share.used for name, share in shares.items()},
        "waiting_max": {name: share.limit for name, share in shares.items()},
        "refused": dict(engine.shares.refused),
    }


def _tenants(dispatcher: Dispatcher) -> Values:
    tenants = tenants_of(dispatcher)
    names = set(tenants[0]) - {"name"}
    if dispatcher.catalogs is None:
        names = {name for name in names if not name.startswith("store_")}
    return {f"tenant_{name}": {one["name"]: one[name] or 0 for one in tenants} for name in names}


def tenants_of(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Limits, counters and what is held of each tenant, by the names of the metrics."""
    names, catalogs = dispatcher.engine.tenants.names, dispatcher.catalogs
    held: defaultdict[str, Usage] = defaultdict(Usage)
    if catalogs is not None:
        held.update({name: catalogs.usage(tenant) for tenant, name in names.items()})
        whole = catalogs.total_usage
        held[OTHER] = Usage(
            size_bytes=whole.size_bytes - sum(one.size_bytes for one in held.values()),
            objects=whole.objects - sum(one.objects for one in held.values()),
        )
    return [
        {
            "name": one.name,
            "host_bytes": one.host_bytes,
            **dataclasses.asdict(one.quota),
            **dataclasses.asdict(one.counters),
            "store_bytes": held[one.name].size_bytes,
            "store_objects": held[one.name].objects,
        }
        for one in dispatcher.engine.tenants.snapshot()
    ]


def _host(dispatcher: Dispatcher) -> Values:
    stats, realms = dispatcher.pool.stats(), dispatcher.realms
    return {
        "host_bytes": {
            "size": stats.size_bytes,
            "used": stats.used_bytes,
            "slabs": stats.slab_bytes,
            "unclaimed": dispatcher.engine.host.restored_slots.num_bytes,
        },
        "host_slots": {(str(one.slot_bytes), "used"): one.slots_used for one in stats.classes}
        | {(str(one.slot_bytes), "free"): one.slots_free for one in stats.classes},
        "index_bytes": dispatcher.index_bytes,
        "realms": len(realms),
        "realms_max": realms.realms_max,
        "realms_forgotten": realms.forgotten,
    }


def _store(dispatcher: Dispatcher) -> Values:
    store, watch = dispatcher.store, dispatcher.watch
    if store is None or watch is None:
        return {}
    breakers, verbs = dispatcher.engine.breakers, store.snapshot()
    return {
        "store_well": int(watch.health.well),
        "store_paused": {
            way: int(one.state is not BreakerState.CLOSED) for way, one in breakers.items()
        },
        "store_pauses": {way: one.opened for way, one in breakers.items()},
        "write_queue_bytes": dispatcher.engine.writes.pending_bytes,
        "store_listings": watch.listings,
        "store_listings_failed": watch.listings_failed,
        "store_calls": {verb: counts.calls for verb, counts in verbs.items()},
        "store_seconds": {verb: counts.seconds for verb, counts in verbs.items()},
        "store_bytes": {verb: counts.num_bytes for verb, counts in verbs.items()},
        "store_inflight": {verb: counts.inflight for verb, counts in verbs.items()},
        "store_failures": {
            (verb, cause): count
            for verb, counts in verbs.items()
            for cause, count in counts.failures.items()
        },
        "store_retries": store.retried(),
        "store_entries_skipped": store.entries_skipped,
        "store_requests": {name: store.billed.requests[name] for name in OPERATIONS},
        "store_request_bytes": {name: store.billed.num_bytes[name] for name in ("get", "put")},
    }


def _catalog(dispatcher: Dispatcher) -> Values:
    collector = dispatcher.collector
    if collector is None:
        return {}
    counts = {f"catalog_{name}": count for name, count in catalog_counts(dispatcher).items()}
    withdrawn = {one.setting: collector.withdrawn_by[one.setting] for one in REASONS}
    collected = _fields("collection_", collector.collected)
    return counts | collected | {"collection_withdrawn_by_bound": withdrawn}


def catalog_counts(dispatcher: Dispatcher) -> dict[str, int]:
    """What was read from and written to the catalogs of a store."""
    catalogs, watch = dispatcher.catalogs, dispatcher.watch
    assert catalogs is not None, "a store was opened"
    assert watch is not None, "a store was opened"
    return {
        **dataclasses.asdict(catalogs.counts),
        "files_written": catalogs.files_written,
        "rows_waiting": catalogs.rows_waiting,
        "rows_lost": catalogs.rows_lost,
        "sweeps": watch.reconciler.sweeps,
        "found": watch.reconciler.found,
    }


def _sockets(dispatcher: Dispatcher) -> Values:
    stats = dispatcher.socket_stats
    roles = Counter(str(session.attach.role) for session in dispatcher.sessions.all())
    return _fields("", stats) | {
        "sessions": {role: roles[role] for role in ("scheduler", "worker")},
        "engines_uncached": dispatcher.uncached.by_reason(),
        "handshakes_refused": dispatcher.handshakes_refused(),
        # An alarm watches `user`: a counter that begins at 1 has not increased.
        "attaches_refused": {"user": 0} | stats.attaches_refused,
    }


def _events(dispatcher: Dispatcher) -> Values:
    stream, sockets = dispatcher.events, dispatcher.event_sockets
    if stream is None or sockets is None:
        return {}
    return {
        "events_told": stream.events_told,
        "event_batches_dropped": sockets.batches_dropped,
        "event_replays": sockets.requests_answered,
        "event_replays_dropped": sockets.requests_dropped,
        "event_buffer_bytes": stream.history.size_bytes,
    }


def _health(watchdog: Watchdog, http_refusals: HttpRefusals) -> Values:
    problems = {problem.code for problem in watchdog.problems()}
    return {
        "ready": int(watchdog.readiness(reasons=False)[0]),
        "problem": {code: int(code in problems) for code in PROBLEMS},
        "loop_lag_seconds": watchdog.lag_seconds,
        "loop_lag_seconds_max": watchdog.lag_seconds_max,
        "http_refused": {"connection": http_refusals.connections, "token": http_refusals.requests},
    }


def version() -> str:
    """The installed release."""
    try:
        return importlib.metadata.version("kvlake")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
