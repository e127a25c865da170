"""HTTP on loopback: /metrics, /healthz, /readyz, /status. Read-only, no authentication.

Owns the listening TCP socket and the routes. Does not own what they say (`metrics.py`).

Served by aiohttp's `AppRunner` on the sidecar's own loop. Chosen over uvicorn with starlette,
which runs under anyio but replaces the process's signal handlers while it serves and ends the
process when it cannot bind; aiohttp does neither when asked, says which port it was given, and is
there already wherever s3fs is. Its connection tasks are its own and are ended by `stop`, which
the server's task group waits for.

Invariants: /healthz answers as long as the loop turns; /readyz is 200 exactly while engines can
attach, and says in its body what is degraded; nothing here changes anything.
"""

from __future__ import annotations

import errno
import json
from typing import TYPE_CHECKING, Final

from aiohttp import web

from sidecar.attach import StartError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sidecar.metrics import Reporter

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_BYTES_MAX: Final = 64 * 1024
SHUTDOWN_SECONDS_MAX: Final = 1.0


class HttpServer:
    """The server; `url` is known once it is started."""

    def __init__(self, host: str, port: int, reporter: Reporter) -> None:
        self._host = host
        self._port = port
        self._reporter = reporter
        application = web.Application(client_max_size=REQUEST_BYTES_MAX)
        application.add_routes(
            [
                web.get("/metrics", _answered(self._metrics)),
                web.get("/healthz", _answered(self._health)),
                web.get("/readyz", _answered(self._readiness)),
                web.get("/status", _answered(self._status)),
            ]
        )
        self._runner = web.AppRunner(
            application,
            handle_signals=False,
            access_log=None,
            shutdown_timeout=SHUTDOWN_SECONDS_MAX,
        )

    async def start(self) -> None:
        """Bind and serve. Raises `StartError` where the address cannot be had."""
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            await self._runner.cleanup()
            remedy = "choose another http.port, or 0 for any that is free"
            if error.errno != errno.EADDRINUSE:
                remedy = "http.host must be an address of this machine, such as 127.0.0.1"
            raise StartError(
                f"http.host={self._host}, http.port={self._port} cannot be bound: {error}; {remedy}"
            ) from error

    @property
    def url(self) -> str:
        """Where it answers."""
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in str(host) else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Close the socket and every connection."""
        await self._runner.cleanup()

    def _metrics(self) -> web.Response:
        return web.Response(body=self._reporter.metrics(), headers={"Content-Type": METRICS_TYPE})

    def _health(self) -> web.Response:
        return web.Response(text="ok\n")

    def _readiness(self) -> web.Response:
        ready, document = self._reporter.readiness()
        return _json(document, status=200 if ready else 503)

    def _status(self) -> web.Response:
        return _json(self._reporter.status())


def _answered(
    answer: Callable[[], web.Response],
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handler(request: web.Request) -> web.StreamResponse:
        del request  # every answer is the same for everybody
        return answer()

    return handler


def _json(document: object, *, status: int = 200) -> web.Response:
    text = json.dumps(document, indent=2) + "\n"
    return web.Response(text=text, status=status, content_type="application/json")
