"""HTTP: /metrics, /healthz, /readyz, /status, /host. Read-only; on loopback, or with a token.

Owns the listening TCP socket, its connections and their limits, the routes, and who may ask. Does
not own what they say (`report.py`, `service/watchdog.py`, `host_contents.py`).

Served by aiohttp's `AppRunner` on the sidecar's own loop. Chosen over uvicorn with starlette,
which runs under anyio but replaces the process's signal handlers while it serves and ends the
process when it cannot bind; aiohttp does neither when asked, says which port it was given, and is
there already wherever s3fs is. Its connection tasks are its own and are ended by `stop`, which
the server's task group waits for.

Invariants:

* /healthz answers as long as the loop turns; /readyz is 200 exactly while engines can attach and
  be served, and says in its body what is wrong; nothing here changes anything.
* With a token, whoever does not give it learns from /healthz and /readyz only which is which: codes
  but no reasons, since probes of an orchestrator have no token and reasons name places.
* A connection lasts `CONNECTION_SECONDS_MAX` at most, and a request has `HEADER_SECONDS_MAX` to
  arrive. There are never more than `CONNECTIONS_MAX`, and `PEER_CONNECTIONS_MAX` of one address: a
  client that sends its request byte by byte cannot use up descriptors.
* A new connection is let in all the same: the one that has been idle longest (its request not
  complete, or answered) is ended for it. So clients that only hold connections keep no probe out.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import socket
from typing import TYPE_CHECKING, Final, cast

from aiohttp import web

from sidecar.errors import StartError
from sidecar.observe.host_contents import QueryError, wanted_in
from sidecar.observe.metrics import HttpRefusals
from sidecar.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.observe.report import Reporter
    from sidecar.service.watchdog import Watchdog

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
BODY_BYTES_MAX: Final = 4096
"""Of a request. No route reads one."""
LINE_BYTES_MAX: Final = 4096
"""Of the request line and of each header; aiohttp takes at most 128 headers."""
SHUTDOWN_SECONDS_MAX: Final = 1.0
CONNECTIONS_MAX: Final = 64
CONNECTION_SECONDS_MAX: Final = 30.0
PEER_CONNECTIONS_MAX: Final = 48
ACCEPTED_TOGETHER_MAX: Final = 8
"""In one turn of the loop. Far fewer than a peer may have: a request that comes right behind its
connection is read before that connection is the one that has been idle longest."""
QUEUED_MAX: Final = 128
"""Connections that the kernel keeps until they are accepted; whom it drops tries again a second
later."""
HEADER_SECONDS_MAX: Final = 5.0
SWEEP_SECONDS: Final = 1.0
KEEPALIVE_SECONDS_MAX: Final = 15.0
LINGER_SECONDS_MAX: Final = 1.0


class _Connection(asyncio.Protocol):
    """Forwards to aiohttp's handler, and is in the server's list from its making until it is lost.

    aiohttp's own list has a connection only from its first turn of the loop on and says nothing
    when one ends; a limit that counts by it turns away who asks many times a second.
    """

    def __init__(self, handler: web.RequestHandler, server: HttpServer, begun: float) -> None:
        self._handler = handler
        self._server = server
        self._transport: asyncio.Transport | None = None
        self.begun = begun
        self.peer = ""
        self.answering = False
        """Whether a complete request of it is being answered."""
        self.idle_since = begun
        self.asking_since: float | None = begun
        """Since when a request has been due that is not complete; None: none has begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.peer = str(transport.get_extra_info("peername", ("",))[0])
        self._transport = cast("asyncio.Transport", transport)
        if self._server.enter(self._handler, self):
            self._handler.connection_made(transport)
        else:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.leave(self._handler)
        # Not of one that was turned away, which the handler never heard of.
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

    def cut(self) -> None:
        """End it at once, whatever is still to be sent: a client may never read that."""
        self._server.leave(self._handler)
        if self._transport is not None:
            self._transport.abort()


class HttpServer:
    """The server; `url` is known once it is started.

    It starts first of all, so that /healthz and /readyz answer while the rest is made ready; what
    there is to tell is given to it later (`report`).
    """

    def __init__(self, host: str, port: int, watchdog: Watchdog, *, token: str = "") -> None:
        self._host = host
        self._port = port
        self._watchdog = watchdog
        self._token = token.encode()
        self._reporter: Reporter | None = None
        self._servers: list[asyncio.Server] = []
        self._url = ""
        self._connections: dict[asyncio.BaseProtocol, _Connection] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self.refusals = HttpRefusals()
        application = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[self._answering])
        application.add_routes(
            [
                web.get("/metrics", self._guarded(self._metrics)),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/status", self._guarded(self._status)),
                web.get("/host", self._guarded(self._host_usage)),
                web.get("/host/chunks", self._guarded(self._host_chunks)),
            ]
        )
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS_MAX,
            keepalive_timeout=KEEPALIVE_SECONDS_MAX,
            lingering_time=LINGER_SECONDS_MAX,
            max_line_size=LINE_BYTES_MAX,
            max_field_size=LINE_BYTES_MAX,
        )

    async def start(self) -> None:
        """Bind and serve. Raises `StartError` where the address cannot be had."""
        sockets = listen_on(self._host, self._port)
        host, port = sockets[0].getsockname()[:2]
        self._url = f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for one in sockets:
            self._servers.append(
                await loop.create_server(self._protocol, sock=one, backlog=ACCEPTED_TOGETHER_MAX)
            )
            # asyncio takes one number for what it accepts in a turn and what the kernel queues.
            one.listen(QUEUED_MAX)
        self._sweep()

    @property
    def url(self) -> str:
        """Where it answers."""
        return self._url

    def report(self, reporter: Reporter | None) -> None:
        """Answer from this reporter; None: there is nothing to tell (yet, or any more)."""
        self._reporter = reporter

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
        return _Connection(server(), self, asyncio.get_running_loop().time())

    def enter(self, handler: asyncio.BaseProtocol, connection: _Connection) -> bool:
        """List a connection; False where it is turned away."""
        same = [one for one in self._connections.values() if one.peer == connection.peer]
        room = self._make_room(same, PEER_CONNECTIONS_MAX)
        if room and self._make_room(list(self._connections.values()), CONNECTIONS_MAX):
            self._connections[handler] = connection
            return True
        self.refusals.connections += 1
        return False

    def _make_room(self, among: list[_Connection], connections_max: int) -> bool:
        """End the one that has been idle longest where there are too many; False if none is."""
        if len(among) < connections_max:
            return True
        idle = [one for one in among if not one.answering]
        if not idle:
            return False
        self.refusals.connections += 1
        min(idle, key=lambda one: one.idle_since).cut()
        return True

    def leave(self, handler: asyncio.BaseProtocol) -> None:
        """A connection has ended."""
        self._connections.pop(handler, None)

    @web.middleware
    async def _answering(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        connection = self._connections.get(request.protocol)
        if connection is None:
            return await handler(request)
        connection.asking_since, connection.answering = None, True
        try:
            return await handler(request)
        finally:
            connection.answering = False
            connection.idle_since = asyncio.get_running_loop().time()

    def _sweep(self) -> None:
        """End the connections whose time is over."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in list(self._connections.values()):
            asking = 0.0 if connection.asking_since is None else now - connection.asking_since
            if asking > HEADER_SECONDS_MAX or now - connection.begun > CONNECTION_SECONDS_MAX:
                connection.cut()
        self._sweeper = loop.call_later(SWEEP_SECONDS, self._sweep)

    # --- routes ----------------------------------------------------------------------------

    def _authorized(self, request: web.Request) -> bool:
        if not self._token:
            return True
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        # In constant time: how long it takes must not say how much of it is right.
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._token)
        return same and scheme.lower() == "bearer"

    def _guarded(
        self, answer: Callable[[Reporter, web.Request], Awaitable[web.Response]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handler(request: web.Request) -> web.StreamResponse:
            if not self._authorized(request):
                self.refusals.requests += 1
                return web.Response(
                    status=401,
                    text="this address needs the token of http.token: Authorization: Bearer ...\n",
                    headers={"WWW-Authenticate": 'Bearer realm="kvlake"'},
                )
            if self._reporter is None:
                return _json(self._watchdog.readiness()[1], status=503)
            return await answer(self._reporter, request)

        return handler

    async def _metrics(self, reporter: Reporter, request: web.Request) -> web.Response:
        del request  # the same for everybody, as below
        body = redacted(reporter.metrics().decode()).encode()
        return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})

    async def _status(self, reporter: Reporter, request: web.Request) -> web.Response:
        del request
        return _json(reporter.status())

    async def _host_usage(self, reporter: Reporter, request: web.Request) -> web.Response:
        try:
            found = await reporter.host.usage(request.query.get("namespace", ""))
        except QueryError as error:
            return _misunderstood(error)
        return _json(found, indent=None)

    async def _host_chunks(self, reporter: Reporter, request: web.Request) -> web.Response:
        try:
            found = await reporter.host.chunks(wanted_in(request.query))
        except QueryError as error:
            return _misunderstood(error)
        return _json(found, indent=None)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        del request  # the same for everybody
        return web.Response(text="ok\n")

    async def _readiness(self, request: web.Request) -> web.StreamResponse:
        told = self._watchdog.readiness(reasons=self._authorized(request))
        return _json(told[1], status=200 if told[0] else 503)


def listen_on(host: str, port: int) -> list[socket.socket]:
    """Listening sockets, one for each address that a host has. Raises `StartError`."""
    listening: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(place)
            one.listen(QUEUED_MAX)
    except OSError as error:
        for one in listening:
            one.close()
        remedy = "choose another http.port, or 0 for any that is free"
        if error.errno == errno.EACCES:
            remedy = "only root may take ports below 1024: choose another http.port"
        elif error.errno != errno.EADDRINUSE:
            remedy = "http.host must be an address of this machine, such as 127.0.0.1"
        raise StartError(
            f"http.host={host}, http.port={port} cannot be bound: {error}; {remedy}"
        ) from error
    return listening


def _misunderstood(error: QueryError) -> web.Response:
    return web.Response(status=400, text=f"{error}\n")


def _json(document: object, *, status: int = 200, indent: int | None = 2) -> web.Response:
    # A long one comes without indents, which take ten times as long.
    text = redacted(json.dumps(document, indent=indent)) + "\n"
    return web.Response(text=text, status=status, content_type="application/json")
