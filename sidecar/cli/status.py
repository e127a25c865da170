"""`kvlake status`: the status document of a running sidecar, as text or unchanged as JSON.

Does not own what the document says (`sidecar/observe/status.py`).

Invariant: fields that a document of another release lacks are left out or shown as "?".
"""

from collections.abc import Sequence
from typing import Final, cast

from sidecar.cli.client import client_of
from sidecar.cli.console import Document, Options, document_table, duration, show, table
from sidecar.observe.benefit import what_if
from sidecar.sessions.model_names import model_name
from tiers.sizes import approximate_size

_TRAFFIC: Final = (
    ("stored", "engines to host"),
    ("loaded", "host to engines"),
    ("written", "host to store"),
    ("read", "store to host"),
)

_WAYS: Final = ("reads", "writes")
_TENANT_COLUMNS: Final = {
    "TENANT": "name",
    "HOST": "host_bytes",
    "LIMIT": "host_bytes_max",
    "STORED": "bytes_stored",
    "EVICTED": "chunks_evicted",
    "DROPPED": "dropped_quota",
    "IN STORE": "store_bytes",
}


def main(options: Options) -> None:
    """Show the status."""
    show(client_of(options).get("/status"), render, as_json=options.json)


def render(document: Document) -> str:
    """The document as text."""
    parts = (_helps, _head, _tiers, _tenants, _traffic, _engines, _uncached, _off)
    return "\n\n".join(text for part in parts if (text := part(document)))


def _helps(document: Document) -> str:
    lines: list[str] = _section(document, "prompts").get("sentences", [])
    return "\n".join(lines)


def _head(document: Document) -> str:
    name, version, state, pid = (
        document.get(field, "?") for field in ("name", "version", "state", "pid")
    )
    lines = [f"kvlake {version} '{name}': {state}, up {_uptime(document)}, pid {pid}"]
    store = _section(_section(document, "tiers"), "store")
    problems: list[Document] = document.get("problems", [])
    lines += [f"  {one.get('code', '?')}: {one.get('reason', '')}" for one in problems]
    if paused := " and ".join(paused_ways(store)):
        lines.append(f"  {paused} of the object store pause: it fails too often")
    if untried := " and ".join(way for way in _WAYS if store.get(way) == "untried"):
        lines.append(
            f"  {untried} of the object store failed too often, and none was tried since the pause"
        )
    return "\n".join(lines)


def paused_ways(store: Document) -> list[str]:
    """Which of reads and writes the object store is not asked for now."""
    return [way for way in _WAYS if store.get(way) in ("open", "trial")]


def _tiers(document: Document) -> str:
    tiers = _section(document, "tiers")
    host, store = _section(tiers, "host"), _section(tiers, "store")
    size, used = host.get("size_bytes", 0), host.get("used_bytes", 0)
    share = f"{100 * used / size:.0f}%" if size else "-"
    about = str(host.get("policy", ""))
    if nodes := _section(host, "numa").get("nodes"):
        about += f"  NUMA {', '.join(map(str, nodes))}"
    if unclaimed := host.get("unclaimed_bytes", 0):
        about += f"  {approximate_size(unclaimed)} of an earlier run wait for their engine"
    occupied = f"{approximate_size(used)} of {approximate_size(size)} ({share})"
    rows: list[Sequence[object]] = [
        ("TIER", "CHUNKS", "USED", ""),
        ("host", host.get("chunks", 0), occupied, about),
    ]
    if store:
        about = f"{store.get('url', '')}  write {store.get('write')}, read {store.get('read')}"
        rows.append(("store", store.get("chunks", 0), "-", about))
    lines = [table(rows)]
    if index := _section(document, "index"):
        lines.append(
            f"shared index     {approximate_size(index.get('size_bytes', 0))} for "
            f"{index.get('realms', '?')} namespaces and topologies, at most "
            f"{index.get('realms_max', '?')}"
        )
    if ratios := _section(host, "expected_hit_ratio"):
        lines.append(what_if(ratios, size))
    if queued := store.get("write_queue_bytes", 0):
        lines.append(f"{approximate_size(queued)} of host memory wait to be written to the store")
    if bill := _section(store, "monthly_bill"):
        lines.append(
            f"the store costs some {bill['total']:.2f} {bill['currency']} a month: objects of "
            "namespaces attached since the start (kvlake du shows all), and requests "
            f"of this sidecar as in the last {_uptime(document)}"
        )
    return "\n".join(lines)


def _tenants(document: Document) -> str:
    """What each tenant holds; left out if no request had a cache salt."""
    tenants: list[Document] = document.get("tenants", [])
    named = {one.get("name") for one in tenants} - {"unsalted", "other"}
    other = any(one.get("host_bytes") for one in tenants if one.get("name") == "other")
    if not (named or other):
        return ""
    return document_table(tenants, _TENANT_COLUMNS)


def _traffic(document: Document) -> str:
    counters, rates = _section(document, "counters"), _section(document, "rates")
    per_second, hits = _section(rates, "bytes_per_second"), _section(document, "hits")
    over = f", LAST {duration(rates['seconds']).upper()}" if rates else ""
    rows: list[Sequence[object]] = [("SINCE START", "", "CHUNKS", "BYTES", f"PER SECOND{over}")]
    for name, way in _TRAFFIC:
        chunks = counters.get(f"chunks_{name}", 0)
        rate = approximate_size(per_second[name]) if name in per_second else "-"
        # Each rank loads its part of a chunk by itself.
        counted = f"{chunks} parts" if name == "loaded" else chunks
        rows.append((name, way, counted, approximate_size(counters.get(f"bytes_{name}", 0)), rate))
    served, loads = hits.get("loads_served"), "-"
    if served is not None:
        # Prompts without a hit begin none.
        begun = served + hits.get("loads_missed", 0)
        engines = "engines count the tokens that hit and missed"
        loads = f"{served} of {begun} begun were served; {engines}" if begun else "none begun yet"
    lookups = f"{hits.get('lookups', 0)} ({hits.get('lookups_expired', 0)} too slow)"
    return (
        f"{table(rows)}\n\n"
        f"loads            {loads}\n"
        f"store lookups    {lookups}\n"
        f"evicted chunks   {counters.get('chunks_evicted', 0)}"
    )


def _engines(document: Document) -> str:
    realms = {realm.get("realm_id"): realm for realm in document.get("realms", [])}
    rows: list[Sequence[object]] = [("ENGINE", "ROLE", "RANK", "PID", "ATTACHED", "MODEL")]
    for session in document.get("sessions", []):
        realm = realms.get(session.get("realm_id"), {})
        rows.append(
            (
                str(session.get("engine_id", "?"))[:24],
                session.get("role", "?"),
                f"{session.get('rank', 0)}/{session.get('world_size', 1)}",
                session.get("pid", "?"),
                duration(session.get("attached_seconds", 0)),
                realm.get("model") or model_name(_section(realm, "namespace")),
            )
        )
    return table(rows) if len(rows) > 1 else "no engine is attached"


def _uncached(document: Document) -> str:
    """Engines that run without the cache, and why; left out if there are none."""
    rows: list[Sequence[object]] = [("WITHOUT THE CACHE", "PID", "FOR", "REASON")]
    for one in document.get("uncached", []):
        engine, age = str(one.get("engine_id") or "?")[:24], duration(one.get("seconds", 0))
        reason = f"{one.get('reason', '?')}: {one.get('message', '')}"
        rows.append((engine, one.get("pid", "?"), age, reason))
    return table(rows) if len(rows) > 1 else ""


def _off(document: Document) -> str:
    """What the settings switch off; left out if it is nothing."""
    return "\n".join(_section(document, "off").values())


def _section(document: Document, name: str) -> Document:
    value: object = document.get(name)
    return cast("Document", value) if isinstance(value, dict) else {}


def _uptime(document: Document) -> str:
    return duration(document.get("uptime_seconds", 0))
