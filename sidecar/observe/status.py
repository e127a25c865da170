"""The document of /status, which `kvlake status` shows.

Owns the names of its fields. Does not own metrics (`metrics.py`), the contents of host memory
(`host_contents.py`), the last hour (`history.py`), nor what is counted: that lives with what counts
it, and is read when somebody asks.

Invariants: reading changes nothing and costs no more than the number of sessions, realms and slot
classes; memory is fixed, however long the sidecar runs.
"""

import asyncio
import dataclasses
import json
import os
import time
from collections import Counter
from typing import Any, Final

from sidecar import version
from sidecar.config.store import PriceSettings
from sidecar.core.breaker import Breaker, BreakerState
from sidecar.observe.history import FigureHistory, figures_of
from sidecar.observe.metrics import catalog_counts, tenants_of
from sidecar.observe.off import switched_off
from sidecar.observe.prompts import prompts_summary
from sidecar.protocol import PROTOCOL_VERSION
from sidecar.service.dispatcher import Dispatcher, SharedStore
from sidecar.service.watchdog import Watchdog
from sidecar.sessions.namespaces import RealmLayout
from tiers.store.middleware import OPERATIONS, Billed

RATES_SECONDS: Final = 60.0
MONTH_SECONDS: Final = 30 * 86_400.0
GIGABYTE: Final = 10**9
_LOADS_MISSED: Final = ("dropped_full", "missing", "corrupt", "failed", "revoked", "expired")

Document = dict[str, Any]


class SidecarStatus:
    """Makes the document; its seconds count from when this object was made."""

    def __init__(self, dispatcher: Dispatcher, watchdog: Watchdog) -> None:
        self._dispatcher = dispatcher
        self._watchdog = watchdog
        self._started = time.monotonic()
        self.history = FigureHistory(
            lambda: figures_of(dispatcher), dispatcher.config.limits.history_seconds
        )
        watchdog.each_beat(self.history.sample)

    def document(self) -> Document:
        """The status as of now."""
        dispatcher = self._dispatcher
        engine = dispatcher.engine
        counters = dataclasses.asdict(engine.counters)
        minute = self.history.over_last(RATES_SECONDS)
        sessions = Counter(session.groups[0].realm_id for session in engine.sessions.values())
        return {
            "version": version(),
            "protocol_version": PROTOCOL_VERSION,
            "name": dispatcher.config.runtime.name,
            "pid": os.getpid(),
            "epoch": dispatcher.epoch,
            "last_stop_objects_lost": dispatcher.lost_before,
            "uptime_seconds": _seconds_since(self._started),
            **self._watchdog.readiness()[1],
            "off": switched_off(dispatcher.config.limits),
            "tiers": {"host": _host_tier(dispatcher), "store": self._store_tier()},
            "hits": {
                **_pick(engine.counters, "chunks_loaded bytes_loaded loads_served"),
                "loads_missed": sum(counters[f"loads_{how}"] for how in _LOADS_MISSED),
                **_pick(engine.counters, "lookups lookups_expired chunks_read"),
            },
            "prompts": prompts_summary(dispatcher, self.history),
            "counters": counters,
            "rates": {"seconds": round(minute.seconds, 3), "bytes_per_second": minute.rates},
            "pending": dataclasses.asdict(engine.pending_work()),
            "leases": len(engine.leases),
            "lookups": len(engine.lookups),
            "tasks": len(asyncio.all_tasks()),
            "sockets": _pick(
                dispatcher.socket_stats,
                "sessions_opened connections_cut attaches_expired frames_received replies_dropped "
                "frames_refused attaches_refused",
            ),
            "realms": [
                _realm(dispatcher.realms[one.realm_id])
                | {
                    "sessions": sessions[one.realm_id],
                    "chunks_in_host": one.hosted_chunks,
                    "chunks_in_store": one.stored_chunks,
                }
                for one in engine.directory.realms.values()
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
                for name, share in engine.shares.shares.items()
            },
            "refused": {
                f"{what}/{why}": count for (what, why), count in engine.shares.refused.items()
            },
            "tenants": tenants_of(dispatcher),
            "events": _event_stream(dispatcher),
            "sessions": _sessions(dispatcher),
            "uncached": [
                _pick(one, "engine_id pid uid reason message")
                | {"seconds": _seconds_since(one.since)}
                for one in dispatcher.uncached.all()
            ],
        }

    def _store_tier(self) -> Document | None:
        dispatcher = self._dispatcher
        if dispatcher.store is None:
            return None
        store, watch = dispatcher.store.tier, dispatcher.store.watch
        settings, collector = dispatcher.store.settings, dispatcher.store.collector
        return {
            "url": store.url,
            **_pick(settings, "write read"),
            **_pick(watch.health, "state reason"),
            "reads": _breaker_state(dispatcher.engine.breakers["read"]),
            "writes": _breaker_state(dispatcher.engine.breakers["write"]),
            "write_queue_bytes": dispatcher.engine.writes.pending_bytes,
            "chunks": dispatcher.engine.directory.chunks_in_store,
            "listings": watch.listings,
            "catalog": catalog_counts(dispatcher.store) | {"compacts": watch.health.creates},
            "collection": {
                "state": collector.state,
                **dataclasses.asdict(collector.collected),
                "withdrawn_by": dict(collector.withdrawn_by),
            },
            "requests": dict(store.billed.requests),
            "request_bytes": dict(store.billed.num_bytes),
            "monthly_bill": self._bill(dispatcher.store),
            "retries": dict(store.retried),
            "verbs": {verb: dataclasses.asdict(counts) for verb, counts in store.counts.items()},
        }

    def _bill(self, store: SharedStore) -> Document | None:
        """An estimate; None without prices in the configuration.

        What is stored is known of namespaces whose engines attached here only.
        """
        prices = store.settings.prices
        if prices is None:
            return None
        stored_bytes = store.catalogs.total_usage.size_bytes
        seconds = time.monotonic() - self._started
        items = monthly(prices, store.tier.billed, stored_bytes=stored_bytes, seconds=seconds)
        return {"currency": prices.currency, **items}


def monthly(
    prices: PriceSettings, billed: Billed, *, stored_bytes: int, seconds: float
) -> dict[str, float]:
    """Costs of a month that goes on like the last `seconds`, by item, with their `total`.

    Requests are this sidecar's; stored bytes are those that all sidecars wrote.
    """
    scale = MONTH_SECONDS / max(seconds, 1.0)
    items = {
        f"{name}_requests": billed.requests[name] / 1000 * getattr(prices, name) * scale
        for name in OPERATIONS
    }
    items["read"] = billed.num_bytes["get"] / GIGABYTE * prices.gb_read * scale
    items["written"] = billed.num_bytes["put"] / GIGABYTE * prices.gb_written * scale
    items["stored"] = stored_bytes / GIGABYTE * prices.gb_month
    items["total"] = sum(items.values())
    return {name: round(value, 4) for name, value in items.items()}


def _pick(source: object, names: str) -> Document:
    """Some attributes of an object, whose names are separated by spaces."""
    return {name: getattr(source, name) for name in names.split()}


def _breaker_state(breaker: Breaker) -> str:
    """`untried` if the pause is over, and no request came since that could try the store."""
    if breaker.state is not BreakerState.CLOSED and breaker.passes(time.monotonic()):
        return "untried"
    return breaker.state


def _seconds_since(moment: float) -> float:
    return round(time.monotonic() - moment, 3)


def _host_tier(dispatcher: Dispatcher) -> Document:
    stats, pool, engine = dispatcher.pool.stats(), dispatcher.pool, dispatcher.engine
    return {
        "policy": dispatcher.config.host.policy,
        **_pick(stats, "size_bytes used_bytes slab_bytes"),
        "unclaimed_bytes": engine.host.restored_slots.num_bytes,
        "slots_unclaimed": len(engine.host.restored_slots),
        "chunks": engine.directory.chunks_in_host,
        "expected_hit_ratio": {
            f"{factor:g}x": round(ratio, 4)
            for factor, ratio in engine.host.expected_hit_ratios().items()
        },
        "numa": pool.placement.describe(pool.memory),
        "classes": [dataclasses.asdict(one) for one in stats.classes],
    }


def _realm(realm: RealmLayout) -> Document:
    namespace = json.loads(realm.namespace)
    return {
        "realm_id": realm.realm_id,
        "model": realm.model_name,
        "namespace": namespace,
        "namespace_digest": realm.namespace_digest.hex(),
        **_pick(realm, "topology world_size block_tokens blocks_per_chunk"),
        "ranks_known": sorted(realm.ranks),
    }


def _event_stream(dispatcher: Dispatcher) -> Document | None:
    stream = dispatcher.events
    if stream is None:
        return None
    sockets = stream.sockets
    return {
        **_pick(sockets, "endpoint replay_endpoint"),
        "next_number": stream.history.next_number,
        "events_told": stream.events_told,
        "batches_kept": len(stream.history),
        **_pick(sockets, "batches_dropped requests_answered requests_dropped handshakes_refused"),
        "engines": [
            {"owner": feed.blocks.owner, "blocks": len(feed.blocks), "gaps": feed.gaps}
            for feed in stream.engines.values()
        ],
    }


def _sessions(dispatcher: Dispatcher) -> list[Document]:
    return [
        {
            "session_id": session.session_id,
            "role": str(session.attach.role),
            **_pick(session.attach, "engine_id rank world_size"),
            "realm_id": session.realm.realm_id,
            "pid": session.connection.peer.pid,
            "attached_seconds": _seconds_since(session.opened),
        }
        for session in dispatcher.sessions.all()
    ]
