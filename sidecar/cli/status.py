"""`kvlake status`: ask a running sidecar over HTTP, show the answer to a person.

Owns finding the address, the request, and the page of text. Does not own what the document says:
that is `sidecar/observe/status.py`, and `--json` passes it through as it is.

Invariants: one request with a deadline; no proxy is used, since the sidecar is on this machine or
beside it; a document of another release is shown as far as it is understood.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, cast

from sidecar.sessions.model_names import model_name, printable
from tiers.sizes import approximate_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.config.model import Config

DOCUMENT_BYTES_MAX: Final = 16 << 20
MESSAGE_BYTES_MAX: Final = 4096
_TRAFFIC: Final = (
    ("stored", "engines to host"),
    ("loaded", "host to engines"),
    ("written", "host to store"),
    ("read", "store to host"),
)
_WILDCARDS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 (compared, not bound)

Document = dict[str, Any]


class StatusError(Exception):
    """The sidecar's answer cannot be had; the message says what to look at."""


class QuestionRefused(StatusError):
    """The sidecar did not understand the question; the message is its own."""


class StatusNotYet(StatusError):
    """Something listens there that does not answer yet: a sidecar that starts, ends or hangs."""


def url_of(config: Config) -> str:
    """Where the sidecar of this configuration answers.

    Raises:
        StatusError: the configuration leaves the port to the system.
    """
    http = config.http
    if http.port == 0:
        raise StatusError(
            "http.port is 0, so the port was chosen at start; the sidecar's first log line has "
            "it: kvlake status --url http://127.0.0.1:PORT"
        )
    host = _WILDCARDS.get(http.host, http.host)
    return f"http://[{host}]:{http.port}" if ":" in host else f"http://{host}:{http.port}"


def fetch(url: str, timeout_seconds: float, token: str = "", *, path: str = "/status") -> Document:
    """A document of the sidecar at `url`: its status, or what another path has.

    Raises `StatusError`.
    """
    if not url.startswith(("http://", "https://")):
        raise StatusError(f"{url!r} is no address; write http://HOST:PORT")
    target = f"{url.rstrip('/').removesuffix('/status')}{path}"
    asked, target = target, target.partition("?")[0]
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(asked)  # noqa: S310 (the scheme was checked above)
    if token:
        # Unredirected: a server that sends us elsewhere must not send the token along.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with opener.open(request, timeout=timeout_seconds) as answer:
            body: bytes = answer.read(DOCUMENT_BYTES_MAX)
        document: object = json.loads(body)
    except urllib.error.HTTPError as error:
        said = error.read(MESSAGE_BYTES_MAX) if error.code == HTTPStatus.BAD_REQUEST else b""
        error.close()
        if said:
            text = said.decode(errors="replace").strip()
            raise QuestionRefused(printable(text, MESSAGE_BYTES_MAX)) from error
        if error.code == HTTPStatus.UNAUTHORIZED:
            raise StatusError(
                f"{target} needs a token, and "
                + ("takes another one" if token else "none was given")
                + "; use --config with the sidecar's own file, or --token-file"
            ) from error
        if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
            raise StatusNotYet(f"{target}: the sidecar is starting or ending, ask again") from error
        if error.code == HTTPStatus.NOT_FOUND and path != "/status":
            raise StatusError(
                f"{target} answered 404: that is no kvlake sidecar, or one of an earlier release, "
                "which does not tell this; restart it with the release that is installed"
            ) from error
        raise StatusError(f"{target} answered {error.code}; is that a kvlake sidecar?") from error
    except (OSError, ValueError) as error:
        reason: object = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(error, ValueError):
            reason = "the answer is not JSON; is that a kvlake sidecar?"
        kind = StatusNotYet if isinstance(reason, TimeoutError) else StatusError
        raise kind(
            f"no answer from {target}: {reason}. Does the sidecar run, and are http.host and "
            "http.port those of its configuration? (--config or --url)"
        ) from error
    if not isinstance(document, dict):
        raise StatusError(f"{target} answered something else; is that a kvlake sidecar?")
    return cast("Document", document)


@dataclass(frozen=True, slots=True)
class SidecarAddress:
    """A running sidecar, as commands ask it."""

    url: str
    timeout_seconds: float = 5.0
    token: str = field(default="", repr=False)

    def ask(self, path: str) -> Document:
        """The document that a path has. Raises `StatusError`."""
        return fetch(self.url, self.timeout_seconds, self.token, path=path)


def render(document: Document) -> str:
    """The document as a page of text."""
    parts = [
        _head(document),
        _tiers(document),
        _tenants(document),
        _traffic(document),
        _engines(document),
        _uncached(document),
    ]
    return "\n\n".join(part for part in parts if part)


def _head(document: Document) -> str:
    state = document.get("state", "?")
    uptime = _duration(document.get("uptime_seconds", 0))
    who = f"kvlake {document.get('version', '?')} '{document.get('name', '?')}'"
    lines = [f"{who}: {state}, up {uptime}, pid {document.get('pid', '?')}"]
    store = _section(_section(document, "tiers"), "store")
    if store.get("state") not in (None, "ok"):
        lines.append(f"  object store is {store['state']}: {store.get('reason', '')}")
    paused = [way for way in ("reads", "writes") if store.get(way, "closed") != "closed"]
    if paused:
        lines.append(f"  {' and '.join(paused)} of the object store pause: it fails too often")
    return "\n".join(lines)


def _tiers(document: Document) -> str:
    tiers = _section(document, "tiers")
    host, store = _section(tiers, "host"), _section(tiers, "store")
    rows: list[Sequence[object]] = [("TIER", "CHUNKS", "USED", "")]
    size, used = host.get("size_bytes", 0), host.get("used_bytes", 0)
    share = f"{100 * used / size:.0f}%" if size else "-"
    occupied = f"{approximate_size(used)} of {approximate_size(size)} ({share})"
    about = str(host.get("policy", ""))
    if nodes := _section(host, "numa").get("nodes"):
        about += f"  NUMA {', '.join(map(str, nodes))}"
    if unclaimed := host.get("unclaimed_bytes", 0):
        about += f"  {approximate_size(unclaimed)} of an earlier run wait for their engine"
    rows.append(("host", host.get("chunks", 0), occupied, about))
    if store:
        about = f"{store.get('url', '')}  write {store.get('write')}, read {store.get('read')}"
        rows.append(("store", store.get("chunks", 0), "-", about))
    lines = [_table(rows)]
    uptime = _duration(document.get("uptime_seconds", 0))
    if index := _section(document, "index"):
        lines.append(
            f"shared index     {approximate_size(index.get('size_bytes', 0))} for "
            f"{index.get('realms', '?')} namespaces and topologies, at most "
            f"{index.get('realms_max', '?')}"
        )
    if waiting := store.get("write_queue_bytes", 0):
        lines.append(f"{approximate_size(waiting)} of host memory wait to be written to the store")
    if bill := _section(store, "monthly_bill"):
        lines.append(
            f"the store costs some {bill['total']:.2f} {bill['currency']} a month: what it holds, "
            f"and requests of this sidecar as in the last {uptime}"
        )
    return "\n".join(lines)


def _tenants(document: Document) -> str:
    """Whose chunks fill host memory; left out where no request had a cache salt."""
    rows: list[Sequence[object]] = [
        ("TENANT", "HOST", "LIMIT", "STORED", "EVICTED", "DROPPED", "IN STORE")
    ]
    for one in document.get("tenants", []):
        limit = one.get("host_bytes_max")
        rows.append(
            (
                one.get("name", "?"),
                approximate_size(one.get("host_bytes", 0)),
                "-" if limit is None else approximate_size(limit),
                approximate_size(one.get("bytes_stored", 0)),
                one.get("chunks_evicted", 0),
                one.get("dropped_quota", 0),
                approximate_size(one.get("store_bytes", 0)),
            )
        )
    names = {row[0] for row in rows[1:]}
    quiet = names <= {"unsalted", "other"} and all(
        row[3] == approximate_size(0) for row in rows[1:] if row[0] == "other"
    )
    return "" if quiet else _table(rows)


def _traffic(document: Document) -> str:
    counters, rates = _section(document, "counters"), _section(document, "rates")
    per_second = _section(rates, "bytes_per_second")
    over = f", LAST {_duration(rates['seconds']).upper()}" if rates else ""
    rows: list[Sequence[object]] = [("SINCE START", "", "CHUNKS", "BYTES", f"PER SECOND{over}")]
    for name, way in _TRAFFIC:
        chunks = counters.get(f"chunks_{name}", 0)
        rate = approximate_size(per_second[name]) if name in per_second else "-"
        # A chunk is counted when it is whole, but loaded by each rank for itself.
        counted = f"{chunks} parts" if name == "loaded" else chunks
        rows.append((name, way, counted, approximate_size(counters.get(f"bytes_{name}", 0)), rate))
    hits = _section(document, "hits")
    lookups = f"{hits.get('lookups', 0)} ({hits.get('lookups_expired', 0)} too slow)"
    lines = [
        f"loads            {_loads(hits)}",
        f"store lookups    {lookups}",
        f"evicted chunks   {counters.get('chunks_evicted', 0)}",
    ]
    return "\n".join([_table(rows), "", *lines])


def _loads(hits: Document) -> str:
    """How loads ended that engines began. Prompts that found nothing begin none."""
    served = hits.get("loads_served")
    if served is None:
        return "-"
    begun = served + hits.get("loads_missed", 0)
    if not begun:
        return "none begun yet"
    return f"{served} of {begun} begun were served; engines count the tokens that hit and missed"


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
                _duration(session.get("attached_seconds", 0)),
                realm.get("model") or model_name(_section(realm, "namespace")),
            )
        )
    if len(rows) == 1:
        return "no engine is attached"
    return _table(rows)


def _uncached(document: Document) -> str:
    """Engines that run without the cache, and why; left out where there are none."""
    rows: list[Sequence[object]] = [("WITHOUT THE CACHE", "PID", "FOR", "REASON")]
    rows.extend(
        (
            str(one.get("engine_id") or "?")[:24],
            one.get("pid", "?"),
            _duration(one.get("seconds", 0)),
            f"{one.get('reason', '?')}: {one.get('message', '')}",
        )
        for one in document.get("uncached", [])
    )
    return _table(rows) if len(rows) > 1 else ""


def _section(document: Document, name: str) -> Document:
    value: object = document.get(name)
    return cast("Document", value) if isinstance(value, dict) else {}


def _duration(seconds: float) -> str:
    whole = int(seconds)
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{whole % 60}s" if minutes else f"{whole}s"


def _table(rows: list[Sequence[object]]) -> str:
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
             for row in texts]  # fmt: skip
    return "\n".join(lines)
