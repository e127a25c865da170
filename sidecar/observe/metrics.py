"""The sidecar's Prometheus metrics: name, labels and help text, and where the value of each is.

Owns the tables, and reading the values when somebody asks. Counts nothing: counters live with what
they count (`Counters` in the engine, `SocketStats` at the sockets, `Metered` at the store).

Invariants: reading changes nothing and costs no more than the number of sessions, realms and slot
classes. Released names never change, since dashboards and alerts use them; a test compares the
tables with what the sidecar exports. A *part* is one rank's segment of a chunk, so an engine with
two ranks stores and loads two parts of each chunk.
"""

import asyncio
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client import ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from sidecar import version
from sidecar.core.tenants import OTHER
from sidecar.data.transfer_times import TransferTimes
from sidecar.protocol.prompts import PromptOutcome
from sidecar.service.dispatcher import Dispatcher, SharedStore
from sidecar.service.uncached import REASONS
from sidecar.service.watchdog import PROBLEMS, Watchdog
from tiers.catalog import retention
from tiers.catalog.usage import Usage
from tiers.store.middleware import OPERATIONS

PREFIX: Final = "kvlake_"
BYTES: Final = "_bytes"

GAUGES: Final = {
    "info{version}": "The running release; always 1",
    "start_time_seconds": "When this sidecar started, in seconds since 1970",
    "last_stop_objects_lost": "Objects that the previous sidecar had not written when it stopped",
    "ready": "1 while engines can attach and be served",
    "problem{code}": "1 while this problem exists, by code",
    "loop_lag_seconds": "How late the event loop was, measured twice a second",
    "loop_lag_seconds_max": "The longest delay of the event loop since the start",
    "tasks": "Tasks of the event loop",
    "draining": "1 while the sidecar stops",
    "chunks{tier}": "Chunks of which engines can load all parts, by tier",
    "leases": "Pins held for loads",
    "lookups_waiting": "Lookups that pin chunks or wait for them",
    "pending{kind}": "Work in progress, by kind",
    "waiting{kind}": "Queued work that is counted, by kind",
    "waiting_max{kind}": "Limit of kvlake_waiting, by kind",
    "waiting_bytes{kind}": "Memory of queued and pinned work as it is accounted, by kind",
    "waiting_bytes_max{kind}": "Limit of kvlake_waiting_bytes, by kind",
    "tenant_host_bytes{tenant}": "Bytes of slots that hold parts of a tenant",
    "tenant_host_bytes_max{tenant}": "Limit of tenant_host_bytes, 0: none",
    "tenant_store_bytes{tenant}": "Bytes of objects of a tenant, in namespaces attached since the"
    " start (kvlake du shows all)",
    "tenant_store_objects{tenant}": "As kvlake_tenant_store_bytes, the number of objects",
    "tenant_store_bytes_max{tenant}": "Limit of them in one namespace, 0: none",
    "tenant_store_objects_max{tenant}": "Limit of objects in one namespace, 0: none",
    "tenant_store_ttl_seconds{tenant}": "Age at which objects of a tenant are deleted, 0: never",
    "expected_hit_ratio{memory}": "Part of the chunks of prompts that an LRU would find in host "
    "memory of another size, by multiple of this one; estimated from the last prompts",
    "host_bytes{kind}": "Host memory: all, in used slots, in slabs, restored and not used yet",
    "host_slots{slot_bytes,state}": "Slots by size and state",
    "index_bytes": "Shared memory of all indexes",
    "realms": "Realms that are known: namespace, topology and chunk size",
    "realms_max": "Limit of kvlake_realms",
    "store_well": "1 while the store answers: the last call did not fail",
    "store_paused{way}": "1 while reads or writes of the store pause, or one tries it again",
    "write_queue_bytes": "Bytes of parts queued for writing to the store",
    "store_inflight{verb}": "Calls to the store in progress",
    "catalog_rows_waiting": "Rows queued for the catalog",
    "sessions{role}": "Attached clients",
    "engines_uncached{reason}": "Engines of this node that serve without the cache, by reason",
    "event_buffer_bytes": "Bytes of events kept for replay",
}
"""By name, without the prefix, with its labels in braces."""

COUNTERS: Final = {
    "http_refused{why}": "HTTP connections refused or closed for another one, and requests refused",
    "chunks_stored": "Chunks complete in host memory after an engine stored their last part",
    "chunks_loaded": "Parts of chunks copied from host memory to engines, each rank counted",
    "chunks_evicted": "Chunks, complete or not, evicted from host memory to make room",
    "chunks_expired": "Chunks dropped from host memory when their ttl_seconds ended",
    "chunks_pinned": "Chunks pinned for requests with pin_seconds",
    "chunks_written": "Chunks complete in the object store after their last part was written",
    "chunks_read": "Chunks complete in host memory after their last part was read from the store",
    "chunks_restored": "Chunks of an earlier run, complete again when their engine attached",
    "bytes_stored": "Bytes copied from engines to host memory, all ranks",
    "bytes_loaded": "Bytes copied from host memory to engines, all ranks",
    "bytes_written": "Bytes of objects written to the object store",
    "bytes_read": "Bytes of objects read from the object store and found intact",
    "stores_duplicate": "Parts stored by an engine that host memory had, or was receiving",
    "stores_dropped_full": "Parts not stored because no slot could be freed",
    "stores_refused": "Parts not stored because the policy keeps what would have to go",
    "stores_dropped_quota": "Parts not stored because their tenant was at its limit",
    "stores_dropped_share": "Parts not stored because a queue was full (see refused_total)",
    "stores_dropped_draining": "Parts not stored because the sidecar was stopping",
    "stores_failed": "Parts not stored because their copy failed or their message was invalid",
    "stores_revoked": "Parts not stored because the worker had taken their blocks back",
    "stores_expired": "Parts whose copy had not begun within limits.store_deadline",
    "loads_served": "Loads that copied all chunks they asked for, one per rank of a request",
    "loads_dropped_full": "Loads refused because a queue was full (see refused_total)",
    "loads_unverified": "Parts loaded without comparing the checksum (integrity.verify_loads)",
    "loads_missing": "Loads with a chunk that had left host memory since its lookup",
    "loads_corrupt": "Loads with a chunk that did not match its checksum",
    "loads_failed": "Loads with a copy that failed, or with an invalid message",
    "loads_revoked": "Loads whose blocks the worker had taken back",
    "loads_expired": "Loads with a copy that had not begun within limits.load_deadline",
    "lookups": "Requests for which an engine asked for chunks of the object store",
    "lookups_refused": "Lookups refused because a queue was full, or while stopping",
    "lookups_expired": "Lookups answered with the chunks read so far: reading took longer than"
    " limits.lookup_wait, or than computing would have",
    "lookups_recomputed": "Lookups for which nothing was read because computing was faster",
    "reads_paused": "Lookups and chunks not read because reading is paused (store.breaker)",
    "reads_unreadable": "Objects read that this sidecar cannot use; they stay in the store",
    "leases_refused": "Loads that began without a pin on their chunks",
    "leases_expired": "Pins of loads and lookups that were not released in time",
    "pins_refused": "Chunks of requests with pin_seconds that did not fit the limit for pins",
    "reads_dropped_full": "Parts not read because no slot could be freed",
    "reads_dropped_quota": "Parts not read because their tenant was at its limit",
    "reads_missing": "Objects to be read that the store did not have",
    "reads_corrupt": "Objects that were damaged or foreign",
    "reads_unavailable": "Reads that the store did not answer, or answered differently twice",
    "reads_garbled": "Reads included in reads_unavailable that differed when they were retried",
    "reads_expired": "Reads of objects that took longer than store.deadline_seconds_max",
    "writes_dropped": "Chunks not written: the queue was full and they stay in host memory, or they"
    " left host memory first",
    "writes_refused_bound": "Chunks not written because the store was at its limit",
    "writes_refused_quota": "Chunks not written because their tenant was at its limit in the store",
    "writes_failed": "Writes of objects that failed, each attempt counted",
    "writes_unverified": "Objects written without comparing the checksum (integrity.verify_writes)",
    "writes_expired": "Writes of objects that took longer than store.deadline_seconds_max, each"
    " attempt counted",
    "slots_restored": "Slots that an earlier run had left in host memory",
    "slots_unclaimed_dropped": "Restored slots dropped before an engine used them: for room, past"
    " their time, or beyond their tenant's limit",
    "quarantined_host": "Chunks dropped from host memory because a part was damaged",
    "quarantined_store": "Objects found damaged or foreign, to be moved to quarantine/",
    "stale_messages": "Messages of engines, and rows of the catalog, that arrived after their"
    " session or namespace had ended",
    "refused{what,why}": "Requests refused, by kind and by the limit that was reached",
    "tenant_leases{tenant}": "Loads of a tenant whose chunks were pinned",
    "tenant_dropped_quota{tenant}": "Parts not stored or read because it was at its limit",
    "tenant_writes_refused{tenant}": "As kvlake_writes_refused_quota_total, for one tenant",
    "tenant_chunks_stored{tenant}": "As kvlake_chunks_stored_total, for one tenant",
    "tenant_chunks_loaded{tenant}": "As kvlake_chunks_loaded_total, for one tenant",
    "tenant_chunks_evicted{tenant}": "As kvlake_chunks_evicted_total, for one tenant",
    "tenant_bytes_stored{tenant}": "As kvlake_bytes_stored_total, for one tenant",
    "tenant_bytes_loaded{tenant}": "As kvlake_bytes_loaded_total, for one tenant",
    "tenant_bytes_written{tenant}": "As kvlake_bytes_written_total, for one tenant",
    "tenant_bytes_read{tenant}": "As kvlake_bytes_read_total, for one tenant",
    "tenant_lookups{tenant}": "As kvlake_lookups_total, for one tenant",
    "realms_forgotten": "Realms forgotten to make room for others",
    "store_pauses{way}": "Pauses of reads or writes of the store",
    "store_listings": "Refreshes of catalogs, each realm counted",
    "store_listings_failed": "Refreshes of catalogs that failed because of the store",
    "store_requests{operation}": "Requests to the store, retries included",
    "store_request_bytes{operation}": "Bytes of requests to the store",
    "store_calls{verb}": "Calls to the store",
    "store_seconds{verb}": "Seconds spent in calls to the store",
    "store_bytes{verb}": "Bytes of objects of calls that succeeded",
    "store_failures{verb,cause}": "Calls that failed, by cause",
    "store_retries{cause}": "Attempts that failed and were retried, by cause",
    "store_entries_skipped": "Entries left out of folder listings: no regular files",
    "catalog_files_read": "Catalog files read, each realm counted",
    "catalog_bytes_read": "Bytes of catalog files read",
    "catalog_rows_read": "Rows of catalog files read",
    "catalog_files_corrupt": "Catalog files ignored because they were damaged or foreign",
    "catalog_reloads": "Times that all snapshots were read again: files were missing or damaged",
    "catalog_files_written": "Log files that this sidecar added to catalogs",
    "catalog_rows_lost": "Rows dropped: the queue was full. Reconciliation finds their objects",
    "catalog_sweeps": "Namespaces listed completely to reconcile the catalog",
    "catalog_found": "Objects found by listing that no row had named",
    "collection_rounds": "Rounds of collection, each namespace counted",
    "collection_rounds_failed": "Rounds of collection that ended with an error of the store",
    "collection_rounds_left": "Rounds skipped because another sidecar collected, or just had",
    "collection_logs_merged": "Log files merged into snapshots",
    "collection_withdrawn": "Objects withdrawn, to be deleted after store.gc.grace",
    "collection_withdrawn_bytes": "Bytes of objects withdrawn",
    "collection_withdrawn_by_bound{bound}": "Objects withdrawn, by limit",
    "collection_deleted": "Objects deleted",
    "collection_files_removed": "Catalog files deleted because others replace them",
    "collection_leftovers_removed": "Damaged objects and abandoned probes deleted",
    "sessions_opened": "Clients that attached",
    "prompts": "Prompts whose first token was generated, as schedulers report them",
    "prompt_tokens{model_name,outcome,reason}": "Tokens of these prompts, by where their KV came"
    " from, and the computed ones by reason",
    "gpu_seconds_saved": "Seconds that computing the loaded tokens would have taken, at the speed"
    " that each engine measured for itself, times its ranks",
    "gpu_seconds_spent": "Seconds that lookups, waiting for the store, and loads took, times the"
    " ranks of the engine. Saved less spent is what the cache brings; it may be negative",
    "sockets_renewed": "Socket files created again after they had been removed",
    "locks_renewed": "Lock files created again after they had been removed",
    "connections_cut": "Connections that ended before they attached",
    "attaches_expired": "Clients that took too long to attach",
    "attaches_refused{code}": "Clients refused, by code",
    "frames_received": "Messages from clients",
    "frames_refused{code}": "Messages refused, by code",
    "replies_dropped": "Replies that could not be sent to their engine",
    "handshakes_refused{why}": "Connections for jobs refused before a message was read",
    "events_told": "KV events published",
    "event_batches_dropped": "Batches not sent to a subscriber because it did not read",
    "event_replays": "Replays and snapshots",
    "event_replays_dropped": "Requests for a replay or snapshot that were not answered completely",
}

HISTOGRAMS: Final = {
    "transfer_seconds{kind,model_name}": "Time of transfers that succeeded. load and store: chunks"
    " of one request, rank and KV cache group between an engine and host memory, or the part of"
    " them that one thread copied, from the job's arrival to the end of the copy. read and write:"
    " one part of a chunk, from and to the store",
    "transfer_bytes{kind,model_name}": "Size of the transfers in kvlake_transfer_seconds",
    "lookup_wait_seconds{model_name}": "Time from the arrival of a lookup to its answer",
}

Values = dict[str, float | Mapping[Any, float]]
"""By name of the metric: one value, or one for each value of the label (each tuple of values)."""


class SidecarMetrics(Collector):
    """Makes a metric of each row of the table that has a value now."""

    def __init__(
        self, dispatcher: Dispatcher, watchdog: Watchdog, http_refused: Mapping[str, int]
    ) -> None:
        self._dispatcher = dispatcher
        self._watchdog = watchdog
        self._http_refused = http_refused
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterator[Metric]:
        """Every metric, as of now."""
        values = _health(self._watchdog) | {"http_refused": self._http_refused}
        for read in (_engine, _tenants, _host, _store, _sockets, _events):
            values |= read(self._dispatcher)
        for family, table in ((GaugeMetricFamily, GAUGES), (CounterMetricFamily, COUNTERS)):
            for row, help_text in table.items():
                name, labels = name_of(row)
                if name not in values:
                    continue
                value = values.pop(name)
                metric = family(PREFIX + name, help_text + ".", labels=labels)
                by_label = value if isinstance(value, Mapping) else {(): value}
                for label, number in by_label.items():
                    metric.add_metric([label] if isinstance(label, str) else label, number)
                yield metric
        yield from _histograms(self._dispatcher.copies.times)
        yield from self._process.collect()
        assert not values, f"the table lacks {sorted(values)}"


def name_of(row: str) -> tuple[str, list[str]]:
    """The name and the labels of a row of a table."""
    name, _, labels = row.rstrip("}").partition("{")
    return name, labels.split(",") if labels else []


def _histograms(times: TransferTimes) -> Iterator[Metric]:
    found = (times.seconds, times.num_bytes, times.lookups)
    for row, series in zip(HISTOGRAMS, found, strict=True):
        name, labels = name_of(row)
        metric = HistogramMetricFamily(PREFIX + name, HISTOGRAMS[row] + ".", labels=labels)
        for values, one in series.items():
            metric.add_metric(values, one.buckets(), one.total)
        yield metric


def _fields(prefix: str, counts: Any) -> Values:
    """One value for each field of a record of counts."""
    # Not `asdict`, which makes a `Counter` of another one's items: each is counted once then.
    return {prefix + one.name: getattr(counts, one.name) for one in dataclasses.fields(counts)}


def _engine(dispatcher: Dispatcher) -> Values:
    engine, shares = dispatcher.engine, dispatcher.engine.shares.shares
    directory, prompts = engine.directory, dispatcher.prompts
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
        **_shares("waiting", {name: share.used for name, share in shares.items()}),
        **_shares("waiting_max", {name: share.limit for name, share in shares.items()}),
        "refused": dict(engine.shares.refused),
        "prompts": prompts.prompts,
        "gpu_seconds_saved": prompts.seconds.gpu_saved,
        "gpu_seconds_spent": prompts.seconds.gpu_spent,
        "prompt_tokens": {
            (model, *outcome.labels): tokens[outcome]
            for model, tokens in prompts.tokens_by_model.items()
            for outcome in PromptOutcome
        },
    }


def _shares(name: str, values: Mapping[str, float]) -> Values:
    """What is counted, and what is in bytes, apart."""
    in_bytes = {kind for kind in values if kind.endswith(BYTES)}
    return {
        name: {kind: values[kind] for kind in values.keys() - in_bytes},
        name.replace("waiting", "waiting_bytes"): {
            kind.removesuffix(BYTES): values[kind] for kind in in_bytes
        },
    }


def _tenants(dispatcher: Dispatcher) -> Values:
    tenants = tenants_of(dispatcher)
    names = set(tenants[0]) - {"name"}
    if dispatcher.store is None:
        names = {name for name in names if not name.startswith("store_")}
    return {f"tenant_{name}": {one["name"]: one[name] or 0 for one in tenants} for name in names}


def tenants_of(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """Limits, counters and what is held of each tenant, by the names of the metrics."""
    held: defaultdict[str, Usage] = defaultdict(Usage)
    if dispatcher.store is not None:
        catalogs, names = dispatcher.store.catalogs, dispatcher.engine.tenants.names
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
    curve: Values = {
        "expected_hit_ratio": {
            f"{factor:g}x": ratio
            for factor, ratio in dispatcher.engine.host.expected_hit_ratios().items()
        }
    }
    return (curve if dispatcher.config.limits.curve_keys_max else {}) | {
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
    if dispatcher.store is None:
        return {}
    store, watch = dispatcher.store.tier, dispatcher.store.watch
    collector, breakers = dispatcher.store.collector, dispatcher.engine.breakers
    verbs, now = store.counts, time.monotonic()
    counts = {f"catalog_{name}": count for name, count in catalog_counts(dispatcher.store).items()}
    withdrawn = {one.setting: collector.withdrawn_by[one.setting] for one in retention.REASONS}
    collected = _fields("collection_", collector.collected)
    return collected | {
        **counts,
        "collection_withdrawn_by_bound": withdrawn,
        "store_well": int(watch.health.state == "ok"),
        "store_paused": {way: int(not one.passes(now)) for way, one in breakers.items()},
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
        "store_retries": dict(store.retried),
        "store_entries_skipped": store.entries_skipped,
        "store_requests": {name: store.billed.requests[name] for name in OPERATIONS},
        "store_request_bytes": {name: store.billed.num_bytes[name] for name in ("get", "put")},
    }


def catalog_counts(store: SharedStore) -> dict[str, int]:
    """What was read from and written to the catalogs of a store."""
    catalogs, watch = store.catalogs, store.watch
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
    uncached = Counter(engine.reason for engine in dispatcher.uncached.all())
    return _fields("", stats) | {
        "sessions": {role: roles[role] for role in ("scheduler", "worker")},
        "engines_uncached": {reason: uncached[reason] for reason in REASONS},
        "handshakes_refused": {"user": dispatcher.jobs.users_refused if dispatcher.jobs else 0},
        # An alarm watches `user`: a counter that begins at 1 has not increased.
        "attaches_refused": {"user": 0} | stats.attaches_refused,
    }


def _events(dispatcher: Dispatcher) -> Values:
    stream = dispatcher.events
    if stream is None:
        return {}
    return {
        "events_told": stream.events_told,
        "event_batches_dropped": stream.sockets.batches_dropped,
        "event_replays": stream.sockets.requests_answered,
        "event_replays_dropped": stream.sockets.requests_dropped,
        "event_buffer_bytes": stream.history.size_bytes,
    }


def _health(watchdog: Watchdog) -> Values:
    problems = {problem.code for problem in watchdog.problems()}
    return {
        "ready": int(watchdog.readiness(reasons=False)[0]),
        "problem": {code: int(code in problems) for code in PROBLEMS},
        "loop_lag_seconds": watchdog.lag_seconds,
        "loop_lag_seconds_max": watchdog.lag_seconds_max,
    }
