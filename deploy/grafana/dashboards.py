"""Grafana's dashboards for kvlake: what each panel asks Prometheus, and the JSON made of it.

    python deploy/grafana/dashboards.py    writes fleet.json, node.json, store.json, tenants.json

The tests run every query of every panel against a real Prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

FOLDER: Final = Path(__file__).parent
WIDTH: Final = 24
"""Columns of Grafana's grid."""
HEIGHT: Final = 8
RATE: Final = "[$__rate_interval]"
NODE: Final = 'instance=~"$node"'


class Panel(NamedTuple):
    """A graph. `queries`: what is asked, by what its series are called."""

    title: str
    unit: str
    queries: dict[str, str]
    about: str = ""
    stacked: bool = False
    signed: bool = False
    """Whether values may be below 0; otherwise its axis begins there."""
    columns: int = 12


class Dashboard(NamedTuple):
    """A page of panels; with `by_node`, for chosen nodes."""

    title: str
    panels: tuple[Panel, ...]
    by_node: bool = True


def quantiles(name: str, by: str, where: str = NODE) -> dict[str, str]:
    """The median and the 99th percentile of a histogram."""
    buckets = f"sum by (le, {by}) (rate({name}_bucket{{{where}}}{RATE}))"
    return {
        f"p50 {{{{{by}}}}}": f"histogram_quantile(0.5, {buckets})",
        f"p99 {{{{{by}}}}}": f"histogram_quantile(0.99, {buckets})",
    }


def rates(name: str, by: str = "", where: str = NODE) -> str:
    """What a counter grows by in a second, summed up."""
    return f"sum{f' by ({by})' if by else ''} (rate({name}{{{where}}}{RATE}))"


FLEET: Final = Dashboard(
    "kvlake: fleet",
    (
        Panel(
            "Prompt tokens that were not computed",
            "percentunit",
            {
                "{{outcome}}": (
                    'sum by (outcome) (kvlake:prompt_tokens:rate5m{outcome!="computed"})'
                    " / ignoring (outcome) group_left"
                    ' sum (kvlake:prompt_tokens:rate5m{reason!="tail"})'
                )
            },
            "By source, of all tokens that a cache can have.",
            stacked=True,
        ),
        Panel(
            "GPU seconds saved per second",
            "none",
            {"all nodes": "sum (kvlake:gpu_seconds_saved:rate5m)"},
            "Computing what was loaded would have taken these, less lookups and loads. At 10, ten"
            " more GPUs would be needed without the cache; below 0, the cache costs time.",
            signed=True,
        ),
        Panel(
            "Why tokens were computed",
            "short",
            {
                "{{reason}}": (
                    "sum by (reason) (kvlake:prompt_tokens:rate5m"
                    '{outcome="computed", reason!="tail"})'
                )
            },
            "Tokens per second by reason; the metrics page of the docs has a remedy for each.",
            stacked=True,
        ),
        Panel(
            "The ten nodes with the fewest hits",
            "percentunit",
            {"{{instance}}": "bottomk(10, kvlake:hit_ratio:rate5m)"},
        ),
        Panel("Nodes with problems", "short", {"{{code}}": "sum by (code) (kvlake_problem)"}),
        Panel(
            "Engines without the cache",
            "short",
            {"{{reason}}": "sum by (reason) (kvlake_engines_uncached)"},
        ),
        Panel(
            "Releases", "short", {"{{version}}": "count by (version) (kvlake_info)"}, stacked=True
        ),
        Panel(
            "Host memory in use",
            "percentunit",
            {
                "{{instance}}": (
                    'kvlake_host_bytes{kind="used"}'
                    ' / ignoring (kind) kvlake_host_bytes{kind="size"}'
                )
            },
        ),
    ),
    by_node=False,
)

NODE_PAGE: Final = Dashboard(
    "kvlake: node",
    (
        Panel(
            "Prompt tokens by source",
            "short",
            {
                "{{outcome}} {{reason}}": rates(
                    "kvlake_prompt_tokens_total", "outcome, reason", NODE + ', reason!="tail"'
                )
            },
            stacked=True,
        ),
        Panel(
            "GPU seconds saved and spent per second",
            "none",
            {
                "saved": rates("kvlake_gpu_seconds_saved_total"),
                "spent": rates("kvlake_gpu_seconds_spent_total"),
                "saved less spent": (
                    rates("kvlake_gpu_seconds_saved_total")
                    + " - "
                    + rates("kvlake_gpu_seconds_spent_total")
                ),
            },
            "Where more is spent than saved, the cache costs time.",
            signed=True,
        ),
        Panel(
            "Host memory",
            "bytes",
            {"{{kind}}": f"sum by (kind) (kvlake_host_bytes{{{NODE}}})"},
        ),
        Panel(
            "Chunks stored, loaded and evicted per second",
            "short",
            {
                "stored": rates("kvlake_chunks_stored_total"),
                "loaded (parts)": rates("kvlake_chunks_loaded_total"),
                "evicted": rates("kvlake_chunks_evicted_total"),
            },
            "A stored or evicted chunk counts once; of a loaded one, each rank's part counts.",
        ),
        Panel(
            "Traffic",
            "Bps",
            {
                "engines to host": rates("kvlake_bytes_stored_total"),
                "host to engines": rates("kvlake_bytes_loaded_total"),
                "host to store": rates("kvlake_bytes_written_total"),
                "store to host": rates("kvlake_bytes_read_total"),
            },
        ),
        Panel("Time of transfers", "s", quantiles("kvlake_transfer_seconds", "kind")),
        Panel("Size of transfers", "bytes", quantiles("kvlake_transfer_bytes", "kind")),
        Panel("Wait for the store", "s", quantiles("kvlake_lookup_wait_seconds", "model_name")),
        Panel(
            "Loads that failed, per second",
            "short",
            {
                name: rates(f"kvlake_loads_{name}_total")
                for name in ("missing", "corrupt", "failed", "revoked", "expired", "dropped_full")
            },
        ),
        Panel(
            "Stores that were dropped, per second",
            "short",
            {
                name: rates(f"kvlake_stores_{name}_total")
                for name in (
                    *("dropped_full", "dropped_quota", "dropped_share"),
                    *("refused", "revoked", "failed", "expired"),
                )
            },
            "Parts of chunks. Refused: the policy keeps what would have to go, which is no fault.",
        ),
        Panel("Queued work", "short", {"{{kind}}": f"sum by (kind) (kvlake_waiting{{{NODE}}})"}),
        Panel(
            "Memory of queued work",
            "bytes",
            {"{{kind}}": f"sum by (kind) (kvlake_waiting_bytes{{{NODE}}})"},
        ),
        Panel(
            "Event loop",
            "s",
            {"{{instance}}": f"max by (instance) (kvlake_loop_lag_seconds{{{NODE}}})"},
            "How late it is. Above some milliseconds for long, the node has too few cores.",
        ),
        Panel(
            "The process",
            "percentunit",
            {
                # Every program that Prometheus scrapes may have process_*.
                "cores of {{instance}}": (
                    f"rate(process_cpu_seconds_total{{{NODE}}}{RATE})"
                    " and on (job, instance) kvlake_info"
                )
            },
        ),
    ),
)

STORE: Final = Dashboard(
    "kvlake: object store",
    (
        Panel(
            "Does it answer?",
            "short",
            {
                "{{instance}}": f"kvlake_store_well{{{NODE}}}",
                "{{way}} paused on {{instance}}": f"kvlake_store_paused{{{NODE}}}",
            },
        ),
        Panel(
            "Failures per second",
            "short",
            {"{{verb}}: {{cause}}": rates("kvlake_store_failures_total", "verb, cause")},
        ),
        Panel("Calls per second", "short", {"{{verb}}": rates("kvlake_store_calls_total", "verb")}),
        Panel(
            "Time of a call",
            "s",
            {
                "{{verb}}": (
                    rates("kvlake_store_seconds_total", "verb")
                    + " / ("
                    + rates("kvlake_store_calls_total", "verb")
                    + " > 0)"
                )
            },
        ),
        Panel("Bytes per second", "Bps", {"{{verb}}": rates("kvlake_store_bytes_total", "verb")}),
        Panel(
            "Waiting to be written",
            "bytes",
            {"{{instance}}": f"kvlake_write_queue_bytes{{{NODE}}}"},
        ),
        Panel(
            "Requests per second, as they are billed",
            "short",
            {"{{operation}}": rates("kvlake_store_requests_total", "operation")},
        ),
        Panel(
            "Chunks in the store",
            "short",
            {"{{instance}}": f'kvlake_chunks{{{NODE}, tier="store"}}'},
        ),
        Panel(
            "Withdrawn and deleted per second",
            "short",
            {
                "withdrawn by {{bound}}": rates(
                    "kvlake_collection_withdrawn_by_bound_total", "bound"
                ),
                "deleted": rates("kvlake_collection_deleted_total"),
            },
        ),
        Panel(
            "Damage",
            "short",
            {
                name: f"sum (increase(kvlake_{name}_total{{{NODE}}}[1h]))"
                for name in ("reads_corrupt", "quarantined_store", "reads_garbled")
            },
            "In an hour. Look for failing memory on the node that wrote these objects.",
        ),
    ),
)

TENANTS: Final = Dashboard(
    "kvlake: tenants",
    tuple(
        Panel(title, unit, {"{{tenant}}": query}, about, stacked=True)
        for title, unit, query, about in (
            ("Host memory", "bytes", f"sum by (tenant) (kvlake_tenant_host_bytes{{{NODE}}})", ""),
            (
                "In the store",
                "bytes",
                "max by (tenant) (kvlake_tenant_store_bytes)",
                (
                    "The most that any node counts, of namespaces attached since its start."
                    " `kvlake du` shows all."
                ),
            ),
            ("Loaded", "Bps", rates("kvlake_tenant_bytes_loaded_total", "tenant"), ""),
            ("Stored", "Bps", rates("kvlake_tenant_bytes_stored_total", "tenant"), ""),
            (
                "Chunks evicted per second",
                "short",
                rates("kvlake_tenant_chunks_evicted_total", "tenant"),
                "",
            ),
            (
                "Dropped at a limit, per second",
                "short",
                rates("kvlake_tenant_dropped_quota_total", "tenant"),
                "",
            ),
        )
    ),
)

DASHBOARDS: Final = {"fleet": FLEET, "node": NODE_PAGE, "store": STORE, "tenants": TENANTS}

SOURCE: Final = {"type": "prometheus", "uid": "${source}"}


def document(name: str) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    dashboard = DASHBOARDS[name]
    return {
        "uid": f"kvlake-{name}",
        "title": dashboard.title,
        "tags": ["kvlake", "vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": list(_variables(by_node=dashboard.by_node))},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variables(*, by_node: bool) -> list[dict[str, Any]]:
    source = {"name": "source", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    node = {
        "name": "node",
        "type": "query",
        "label": "Node",
        "datasource": SOURCE,
        "query": {"query": "label_values(kvlake_info, instance)", "refId": "node"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return [source, node] if by_node else [source]


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    per_row = WIDTH // panel.columns
    lowest = {} if panel.signed else {"min": 0}
    custom = {"fillOpacity": 15, "showPoints": "never"}
    if panel.stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 50}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {
            "x": number % per_row * panel.columns,
            "y": number // per_row * HEIGHT,
            "w": panel.columns,
            "h": HEIGHT,
        },
        "fieldConfig": {
            "defaults": {"unit": panel.unit, **lowest, "custom": custom},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "expr": query,
                "legendFormat": legend,
                "datasource": SOURCE,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def as_text(name: str) -> str:
    """The file of a dashboard."""
    return json.dumps(document(name), indent=1) + "\n"


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each}.json").write_text(as_text(each))
