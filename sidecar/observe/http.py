"""HTTP: metrics, health, and documents about the sidecar. On loopback, or with a token.

Owns the listening TCP socket, its connections and their limits, the routes, and authorization. Does
not own the documents (`metrics.py`, `status.py`, `host_contents.py`, `service/watchdog.py`).
aiohttp's `AppRunner` serves on the sidecar's own loop. Rejected: uvicorn, which replaces the
process's signal handlers, and ends the process when it cannot bind.

Invariants:

* /healthz answers as long as the loop turns. /readyz is 200 exactly while engines can attach and
  be served. With a token configured, requests without it get codes only, without reasons: probes
  of an orchestrator have no token, and reasons name paths.
* A connection lasts `CONNECTION_SECONDS_MAX` at most, and a request has `HEADER_SECONDS_MAX` to
  arrive. There are at most `CONNECTIONS_MAX`, and `PEER_CONNECTIONS_MAX` of one address. Beyond
  these a new connection replaces the one that has been idle longest (its request is incomplete, or
  answered): clients that only hold connections keep no probe out.
* The sidecar stops answering a request when its connection is lost.
"""

import asyncio
import errno
import hmac
import ipaddress
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Final, cast
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import generate_latest

from sidecar.config.sections import HttpSettings
from sidecar.errors import StartError
from sidecar.observe import page
from sidecar.observe.host_contents import HostContents, QueryError, parse_query
from sidecar.observe.metrics import SidecarMetrics
from sidecar.observe.off import switched_off
from sidecar.observe.prompt_match import BODY_BYTES_MAX, PromptMatches
from sidecar.observe.prompts import PROMPTS_MAX, PROMPTS_SHOWN, PromptDocuments
from sidecar.observe.status import SidecarStatus
from sidecar.service.dispatcher import Dispatcher
from sidecar.service.watchdog import Watchdog
from tiers.redaction import redacted, redacted_texts

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LABEL: Final = re.compile(r'(?<==)"(?:[^"\\]|\\.)*"')
"""The value of a label in the text of metrics."""
LINE_BYTES_MAX: Final = 4096
"""Length of the request line and of each header; aiohttp takes at most 128 headers."""
SHUTDOWN_SECONDS_MAX: Final = 1.0
CONNECTIONS_MAX: Final = 64
CONNECTION_SECONDS_MAX: Final = 30.0
PEER_CONNECTIONS_MAX: Final = 48
MATCHES_OPEN_MAX: Final = 8
"""Queries of `/match` at a time, far fewer than connections."""
ACCEPTED_TOGETHER_MAX: Final = 8
"""In one iteration of the loop. Far fewer than a peer may have: a request that follows its
connection at once is read before that connection is the one that has been idle longest."""
QUEUED_MAX: Final = 128
"""Connections that the kernel keeps until they are accepted."""
HEADER_SECONDS_MAX: Final = 5.0
"""From the first byte of a request to its last, its body included if a route reads it."""
SWEEP_SECONDS: Final = 1.0
KEEPALIVE_SECONDS_MAX: Final = 15.0
LINGER_SECONDS_MAX: Final = 1.0


class Documents:
    """What the routes answer with. Each reads the state of its moment."""

    def __init__(self, dispatcher: Dispatcher, watchdog: Watchdog, refused: dict[str, int]) -> None:
        self.metrics = SidecarMetrics(dispatcher, watchdog, refused)
        self.status = SidecarStatus(dispatcher, watchdog)
        self.host = HostContents(dispatcher)
        self.matches = PromptMatches(dispatcher, self.host)
        self.matches_open = 0
        """Queries of `/match` that are being received or answered, or wait."""
        self.prompts = PromptDocuments(dispatcher)
        self.times = dispatcher.copies.times
        self.uses = dispatcher.uses
        self.epoch = dispatcher.epoch
        self._off = switched_off(dispatcher.config.limits)

    def off(self, setting: str) -> dict[str, str]:
        """Why a list is empty, as a part of its document: this setting is 0."""
        return {"off": self._off[setting]} if setting in self._off else {}


class _Connection(asyncio.Protocol):
    """Forwards to aiohttp's handler, and is in the server's list until the connection is lost.

    aiohttp's own list gets a connection one iteration of the loop later and does not say when it
    ends: a limit based on it would refuse clients that ask many times a second.
    """

    def __init__(self, handler: web.RequestHandler, server: "HttpServer") -> None:
        self._handler = handler
        self._server = server
        self.begun = begun = asyncio.get_running_loop().time()
        self.peer = ""
        self.answering = False
        self.idle_since = begun
        self.asking_since: float | None = begun
        """When the request that arrives or is answered began to arrive; None: none has begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = str(transport.get_extra_info("peername", ("",))[0])
        self._transport = cast("asyncio.Transport", transport)
        if self._server.enter(self._handler, self):
            self._handler.connection_made(transport)
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self._handler, None)
        # The handler never saw a refused connection.
        if self._handler.transport is not None:
            self._handler.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.asking_since is None and not self.answering:
            self.asking_since = asyncio.get_running_loop().time()
        self._handler.data_received(data)

    def eof_received(self) -> None:
        self._handler.eof_received()

    def pause_writing(self) -> None:
        self._handler.pause_writing()

    def resume_writing(self) -> None:
        self._handler.resume_writing()

    async def body_of(self, request: web.Request) -> bytes:
        """Read a body. Until it is complete, the limits of an incomplete request apply."""
        self.answering = False
        # A request behind another one may have arrived while that one was answered.
        self.asking_since = self.asking_since or asyncio.get_running_loop().time()
        try:
            return await request.read()
        finally:
            self.answering = True

    def cut(self) -> None:
        """Close at once, without sending the rest: the client may never read it."""
        self._server.connections.pop(self._handler, None)
        self._transport.abort()


class HttpServer:
    """The server. It starts first, so that probes are answered while the rest starts.

    The other routes answer once `serve` named the sidecar. `url` is known after `start`.
    Raises `StartError` where the token cannot be read.
    """

    def __init__(self, settings: HttpSettings, watchdog: Watchdog) -> None:
        self._settings = settings
        self._watchdog = watchdog
        self._token = settings.secret_token().encode()
        self._documents: Documents | None = None
        self._servers: list[asyncio.Server] = []
        self.url = ""
        self.connections: dict[asyncio.BaseProtocol, _Connection] = {}
        """By aiohttp's handler."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._page_text, self._page_headers = page.load()
        self.refused = {"connection": 0, "token": 0, "no_token": 0, "host": 0}
        """Connections, and requests with a wrong token, without any, and for another host."""
        application = web.Application(middlewares=[self._answering], client_max_size=BODY_BYTES_MAX)
        application.router.add_get("/", self._page)
        application.router.add_get("/healthz", _health)
        application.router.add_get("/readyz", self._readiness)
        for path in _GUARDED:
            # The only one whose question is too long for an address.
            add = application.router.add_post if path == "/match" else application.router.add_get
            add(path, self._guarded)
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            # A connection that is lost no longer counts, so its query must not stay in the queue.
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS_MAX,
            keepalive_timeout=KEEPALIVE_SECONDS_MAX,
            lingering_time=LINGER_SECONDS_MAX,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def start(self) -> None:
        """Bind and serve. Raises `StartError` if the address cannot be bound."""
        sockets = listen_on(self._settings.host, self._settings.port)
        host, port = sockets[0].getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._servers.append(
                await loop.create_server(self._protocol, sock=one, backlog=ACCEPTED_TOGETHER_MAX)
            )
            # asyncio has one number for both what it accepts at once and what the kernel queues.
            one.listen(QUEUED_MAX)
        self._sweep()

    def serve(self, dispatcher: Dispatcher | None) -> None:
        """Answer with the documents of a sidecar; None: it starts or has stopped."""
        self._documents = None
        if dispatcher is not None:
            self._documents = Documents(dispatcher, self._watchdog, self.refused)

    async def stop(self) -> None:
        """Close the socket and every connection."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    # --- connections -----------------------------------------------------------------------

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "the socket is closed before the runner is cleaned up"
        return _Connection(server(), self)

    def enter(self, handler: asyncio.BaseProtocol, connection: _Connection) -> bool:
        """List a connection; False if it is refused."""
        limits = ((connection.peer, PEER_CONNECTIONS_MAX), (None, CONNECTIONS_MAX))
        for peer, connections_max in limits:
            among = [one for one in self.connections.values() if peer in (None, one.peer)]
            if len(among) < connections_max:
                continue
            self.refused["connection"] += 1
            idle = [one for one in among if not one.answering]
            if not idle:
                return False
            min(idle, key=lambda one: one.idle_since).cut()
        self.connections[handler] = connection
        return True

    @web.middleware
    async def _answering(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        connection = self.connections.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.answering = True
        try:
            return await handler(request)
        finally:
            connection.asking_since, connection.answering = None, False
            connection.idle_since = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        """Close the connections that exceed their time."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self.connections.values()):
            began = now if connection.answering else connection.asking_since or now
            if now - began > HEADER_SECONDS_MAX or now - connection.begun > CONNECTION_SECONDS_MAX:
                connection.cut()
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)

    # --- routes ----------------------------------------------------------------------------

    def _authorized(self, request: web.Request) -> bool:
        if not self._token:
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # In constant time: the duration must not reveal how much of the token is right.
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        return same and scheme.lower() == "bearer"

    def _addressed(self, request: web.Request) -> bool:
        """Whether a request without a token is for this address, and not for a name of others.

        A page whose own name was made to resolve to this address after it was loaded is of the same
        origin for its browser, and may read the answers.
        """
        given = request.headers.get("Host")
        if self._token or given is None:
            return True
        try:
            name = urlsplit(f"//{given}").hostname or ""
            if name != "localhost":
                ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def _guarded(self, request: web.Request) -> web.StreamResponse:
        if not self._addressed(request):
            self.refused["host"] += 1
            return web.Response(
                status=421,
                text=f"Host: {request.headers['Host'][:64]!r}: without http.token this address "
                "answers to localhost and to IP addresses only; use one, or set http.token_file\n",
            )
        if not self._authorized(request):
            # The page asks without one first, and its user then gives the token.
            self.refused["token" if "Authorization" in request.headers else "no_token"] += 1
            return web.Response(
                status=401,
                text="this address needs the token of http.token: Authorization: Bearer ...\n",
                headers={"WWW-Authenticate": 'Bearer realm="kvlake"'},
            )
        if self._documents is None:
            return _json(self._watchdog.readiness()[1], status=503)
        try:
            return await _GUARDED[request.path](self._documents, request)
        except QueryError as error:
            return web.Response(status=400, text=f"{error}\n")

    async def _page(self, _: web.Request) -> web.StreamResponse:
        headers = self._page_headers
        return web.Response(text=self._page_text, headers=headers, content_type="text/html")

    async def _readiness(self, request: web.Request) -> web.StreamResponse:
        reasons = self._addressed(request) and self._authorized(request)
        ready, document = self._watchdog.readiness(reasons=reasons)
        return _json(document, status=200 if ready else 503)


async def _health(_: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


async def _metrics(documents: Documents, _: web.Request) -> web.Response:
    text = generate_latest(documents.metrics).decode()
    if redacted(text) != text:
        text = _LABEL.sub(lambda match: redacted(match[0]), text)
    return web.Response(body=text.encode(), headers={"Content-Type": METRICS_TYPE})


async def _status(documents: Documents, _: web.Request) -> web.Response:
    return _json(documents.status.document())


async def _host_usage(documents: Documents, request: web.Request) -> web.Response:
    usage = await documents.host.usage(request.query.get("namespace", ""))
    return _json(usage, indent=None)


async def _host_chunks(documents: Documents, request: web.Request) -> web.Response:
    return _json(await documents.host.chunks(parse_query(request.query)), indent=None)


async def _prompts(documents: Documents, request: web.Request) -> web.Response:
    last = request.query.get("last", str(PROMPTS_SHOWN))
    if not re.fullmatch(r"[0-9]{1,6}", last) or int(last) > PROMPTS_MAX:
        raise QueryError(f"last={last[:64]!r}: a number of prompts up to {PROMPTS_MAX}, such as 20")
    found = documents.prompts.document(int(last), request.query.get("request", ""))
    return _json(found | documents.off("prompts_kept"), indent=None)


async def _match(documents: Documents, request: web.Request) -> web.Response:
    if request.content_type != "application/json":
        # A page of another site can send what is not JSON without asking.
        raise QueryError(f"Content-Type: {request.content_type[:64]}; send application/json")
    if documents.matches_open >= MATCHES_OPEN_MAX:
        # One is answered at a time. Each has a body in memory, and a connection that is not cut.
        return web.Response(
            status=503,
            text=f"{MATCHES_OPEN_MAX} queries are open already; ask again later\n",
            headers={"Retry-After": "1"},
        )
    assert request.transport is not None, "the loss of a connection cancels its handler"
    connection = cast("_Connection", request.transport.get_protocol())
    documents.matches_open += 1
    try:
        return _json(await documents.matches.document(await connection.body_of(request)))
    finally:
        documents.matches_open -= 1


async def _transfers(documents: Documents, request: web.Request) -> web.Response:
    after, recent = _after(request), documents.times.recent
    found = [one._asdict() for one in recent if one.number > after]
    last = recent[-1].number if recent else 0
    answer = {"transfers": found, "last": last, "now": time.time()}
    return _json(answer | documents.off("transfers_kept"), indent=None)


async def _uses(documents: Documents, request: web.Request) -> web.Response:
    found, more = documents.uses.after(_after(request))
    prompts = [
        {
            "number": one.number,
            "at": round(one.at, 3),
            "model": one.model,
            "tokens": one.num_tokens,
            "tokens_per_key": one.tokens_per_key,
            "keys": one.keys,
        }
        for one in found
    ]
    last = found[-1].number if more else documents.uses.number
    answer = {"uses": prompts, "last": last, "more": more, "epoch": documents.epoch}
    return _json(answer | documents.off("prompts_kept"), indent=None)


def _after(request: web.Request) -> int:
    after = request.query.get("after", "0")
    if not re.fullmatch(r"[0-9]{1,18}", after):
        raise QueryError(f"after={after[:64]!r}: the `last` of an earlier answer, such as 0")
    return int(after)


async def _history(documents: Documents, _: web.Request) -> web.Response:
    history = documents.status.history.document()
    return _json(history | documents.off("history_seconds"), indent=None)


_GUARDED: Final = {
    "/metrics": _metrics,
    "/status": _status,
    "/prompts": _prompts,
    "/history": _history,
    "/transfers": _transfers,
    "/uses": _uses,
    "/host": _host_usage,
    "/host/chunks": _host_chunks,
    "/match": _match,
}
"""Routes that need the token, and answer once there are documents."""


def listen_on(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, one for each address of a host. Raises `StartError`."""
    listening: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, place in dict.fromkeys(found):
            listening.append(socket.create_server(place, family=family, backlog=QUEUED_MAX))
    except OSError as error:
        for one in listening:
            one.close()
        remedy = "choose another http.port, or 0 for any free port"
        if error.errno == errno.EACCES:
            remedy = "only root may bind ports below 1024: choose another http.port"
        elif error.errno != errno.EADDRINUSE:
            remedy = "http.host must be an address of this machine, such as 127.0.0.1"
        raise StartError(
            f"http.host={host}, http.port={port} cannot be bound: {error}; {remedy}"
        ) from error
    return listening


def _json(document: object, *, status: int = 200, indent: int | None = 2) -> web.Response:
    # Long documents come without indents: these take ten times as long.
    text = json.dumps(document, indent=indent)
    if redacted(text) != text:
        # Not in the text: a secret such as `kvlake` or a number would damage names and numbers.
        text = json.dumps(redacted_texts(document), indent=indent)
    return web.Response(text=f"{text}\n", status=status, content_type="application/json")
