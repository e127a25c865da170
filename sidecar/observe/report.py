"""What the sidecar says of itself when it is asked: metrics, and the status document.

Owns the names of status fields. Does not own those of metrics (`metrics.py`), what host memory
holds chunk by chunk (`host_contents.py`), nor what is counted:
that lives with what counts it, and is read when somebody asks.

Invariant: reading changes nothing and costs no more than the number of sessions, realms and slot
classes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, generate_latest

from sidecar.observe.host_contents import HostContents
from sidecar.observe.metrics import SidecarCollector, WatchdogCollector, held_in_store, version
from sidecar.observe.rates import Rates
from sidecar.protocol import PROTOCOL_VERSION
from sidecar.sessions.model_names import model_name
from tiers.store.middleware.billing import monthly

if TYPE_CHECKING:
    from sidecar.core.parts import EngineSnapshot
    from sidecar.core.tenants import TenantSnapshot
    from sidecar.observe.metrics import HttpRefusals
    from sidecar.service.dispatcher import Dispatcher
    from sidecar.service.watchdog import Watchdog
    from sidecar.sessions.namespaces import RealmLayout

_LOADS_MISSED: Final = ("dropped_full", "missing", "corrupt", "failed", "revoked", "expired")


class Reporter:
    """Renders metrics and status."""

    def __init__(
        self, dispatcher: Dispatcher, watchdog: Watchdog, http_refusals: HttpRefusals
    ) -> None:
        self._dispatcher = dispatcher
        self.host = HostContents(dispatcher)
        self._watchdog = watchdog
        self._started = time.monotonic()
        self._rates = Rates(dispatcher.engine.counters)
        watchdog.each_beat(self._rates.note)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(SidecarCollector(dispatcher))
        self._registry.register(WatchdogCollector(watchdog, http_refusals))

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def status(self) -> dict[str, object]:
        """Everything that `kvlake status` shows."""
        dispatcher = self._dispatcher
        now = dispatcher.engine.snapshot()
        ready, readiness = self._watchdog.readiness()
        counters = dataclasses.asdict(dispatcher.engine.counters)
        return {
            "version": version(),
            "protocol_version": PROTOCOL_VERSION,
            "name": dispatcher.config.runtime.name,
            "pid": os.getpid(),
            "epoch": dispatcher.epoch,
            "last_stop_objects_lost": dispatcher.lost_before,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "ready": ready,
            "state": readiness["state"],
            "problems": readiness["problems"],
            "tiers": {"host": self._host_tier(now), "store": self._store_tier()},
            "hits": {
                "chunks_loaded": counters["chunks_loaded"],
                "bytes_loaded": counters["bytes_loaded"],
                "loads_served": counters["loads_served"],
                "loads_missed": sum(counters[f"loads_{how}"] for how in _LOADS_MISSED),
                "lookups": counters["lookups"],
                "lookups_expired": counters["lookups_expired"],
                "chunks_read": counters["chunks_read"],
            },
            "counters": counters,
            "rates": self._rates.document(),
            "pending": dataclasses.asdict(now.pending),
            "leases": now.leases,
            "lookups": now.lookups,
            "tasks": len(asyncio.all_tasks()),
            "sockets": {
                "sessions_opened": dispatcher.socket_stats.sessions_opened,
                "connections_cut": dispatcher.socket_stats.connections_cut,
                "attaches_expired": dispatcher.socket_stats.attaches_expired,
                "frames_received": dispatcher.socket_stats.frames_received,
                "replies_dropped": dispatcher.socket_stats.replies_dropped,
                "frames_refused": dict(dispatcher.socket_stats.frames_refused),
                "attaches_refused": dict(dispatcher.socket_stats.attaches_refused),
            },
            "realms": [
                _realm(dispatcher.realms[one.realm_id])
                | {"sessions": one.sessions}
                | {"chunks_in_host": one.chunks_in_host, "chunks_in_store": one.chunks_in_store}
                for one in now.realms
            ],
            "index": {
                "size_bytes": dispatcher.index_bytes,
                "realms": len(dispatcher.realms),
                "realms_max": dispatcher.realms.realms_max,
                "realms_forgotten": dispatcher.realms.forgotten,
            },
            "waiting": {
                name: {
                    "used": share.used,
                    "limit": share.limit,
                    "largest_session": max(share.by_session.values(), default=0),
                }
                for name, share in dispatcher.engine.bounds.shares.items()
            },
            "refused": {
                f"{what}/{why}": count
                for (what, why), count in dispatcher.engine.bounds.refused.items()
            },
            "tenants": self._tenants(now),
            "events": self._event_stream(),
            "sessions": self._sessions(),
            "uncached": self._uncached(),
        }

    def _tenants(self, now: EngineSnapshot) -> list[dict[str, object]]:
        held = held_in_store(self._dispatcher)
        return [
            _tenant(one)
            | {"store_bytes": held[one.name].size_bytes, "store_objects": held[one.name].objects}
            for one in now.tenants
        ]

    def _event_stream(self) -> dict[str, object] | None:
        stream, sockets = self._dispatcher.events, self._dispatcher.event_sockets
        if stream is None or sockets is None:
            return None
        return {
            "endpoint": sockets.endpoint,
            "replay_endpoint": sockets.replay_endpoint,
            "next_number": stream.history.next_number,
            "events_told": stream.events_told,
            "batches_kept": len(stream.history),
            "batches_dropped": sockets.batches_dropped,
            "requests_answered": sockets.requests_answered,
            "requests_dropped": sockets.requests_dropped,
            "handshakes_refused": sockets.handshakes_refused,
            "engines": [
                {"owner": feed.blocks.owner, "blocks": len(feed.blocks), "gaps": feed.gaps}
                for feed in stream.engines.values()
            ],
        }

    def _host_tier(self, now: EngineSnapshot) -> dict[str, object]:
        stats = self._dispatcher.pool.stats()
        return {
            "policy": self._dispatcher.config.host.policy,
            "size_bytes": stats.size_bytes,
            "used_bytes": stats.used_bytes,
            "slab_bytes": stats.slab_bytes,
            "unclaimed_bytes": now.unclaimed_bytes,
            "slots_unclaimed": now.slots_unclaimed,
            "chunks": now.chunks_in_host,
            "numa": self._dispatcher.pool.placement.describe(self._dispatcher.pool.memory),
            "classes": [dataclasses.asdict(one) for one in stats.classes],
        }

    def _store_tier(self) -> dict[str, object] | None:
        store, watch, settings = (
            self._dispatcher.store,
            self._dispatcher.watch,
            self._dispatcher.config.store,
        )
        if store is None or watch is None or settings is None:
            return None
        return {
            "url": store.url,
            "write": settings.write,
            "read": settings.read,
            "state": watch.health.state,
            "reason": watch.health.reason,
            "reads": self._dispatcher.engine.breakers["read"].state,
            "writes": self._dispatcher.engine.breakers["write"].state,
            "write_queue_bytes": self._dispatcher.engine.snapshot().write_queue_bytes,
            "chunks": self._dispatcher.engine.snapshot().chunks_in_store,
            "listings": watch.listings,
            "catalog": self._catalog_status(),
            "collection": self._collection_status(),
            "requests": {} if store.billed is None else dict(store.billed.requests),
            "request_bytes": {} if store.billed is None else dict(store.billed.num_bytes),
            "monthly_bill": self._bill(),
            "retries": store.retried(),
            "verbs": {
                verb: dataclasses.asdict(counts) for verb, counts in store.snapshot().items()
            },
        }

    def _catalog_status(self) -> dict[str, object]:
        catalogs, watch = self._dispatcher.catalogs, self._dispatcher.watch
        assert catalogs is not None, "a store was opened"
        assert watch is not None, "a store was opened"
        return {
            **dataclasses.asdict(catalogs.counts),
            "files_written": catalogs.files_written,
            "rows_waiting": catalogs.rows_waiting,
            "rows_lost": catalogs.rows_lost,
            "sweeps": watch.reconciler.sweeps,
            "found": watch.reconciler.found,
            "compacts": watch.health.creates,
        }

    def _bill(self) -> dict[str, object] | None:
        """An estimate; None where no prices are given."""
        store, catalogs, settings = (
            self._dispatcher.store,
            self._dispatcher.catalogs,
            self._dispatcher.config.store,
        )
        if store is None or store.billed is None or catalogs is None or settings is None:
            return None
        if settings.prices is None:
            return None
        seconds = time.monotonic() - self._started
        items = monthly(
            settings.prices.table(),
            store.billed,
            stored_bytes=catalogs.stored.size_bytes,
            seconds=seconds,
        )
        return {"currency": settings.prices.currency, **items}

    def _collection_status(self) -> dict[str, object]:
        collector = self._dispatcher.collector
        assert collector is not None, "a store was opened"
        return {
            "state": collector.state,
            **dataclasses.asdict(collector.collected),
            "withdrawn_by": dict(collector.withdrawn_by),
        }

    def _sessions(self) -> list[dict[str, object]]:
        now = time.monotonic()
        return [
            {
                "session_id": session.session_id,
                "role": str(session.attach.role),
                "engine_id": session.attach.engine_id,
                "rank": session.attach.rank,
                "world_size": session.attach.world_size,
                "realm_id": session.realm.realm_id,
                "pid": session.connection.peer.pid,
                "attached_seconds": round(now - session.opened, 3),
            }
            for session in self._dispatcher.sessions.all()
        ]

    def _uncached(self) -> list[dict[str, object]]:
        """Engines that run without the cache."""
        now = time.monotonic()
        return [
            {
                "engine_id": one.engine_id,
                "pid": one.pid,
                "uid": one.uid,
                "reason": one.reason,
                "message": one.message,
                "seconds": round(now - one.since, 3),
            }
            for one in self._dispatcher.uncached.all()
        ]


def _tenant(tenant: TenantSnapshot) -> dict[str, object]:
    told = dataclasses.asdict(tenant)
    counters: dict[str, int] = told.pop("counters")
    return {**told, **counters}


def _realm(realm: RealmLayout) -> dict[str, object]:
    namespace = json.loads(realm.namespace)
    return {
        "realm_id": realm.realm_id,
        "model": model_name(namespace, realm.model),
        "namespace": namespace,
        "namespace_digest": realm.namespace_digest.hex(),
        "topology": realm.topology,
        "world_size": realm.world_size,
        "block_tokens": realm.block_tokens,
        "blocks_per_chunk": realm.blocks_per_chunk,
        "ranks_known": sorted(realm.ranks),
    }
