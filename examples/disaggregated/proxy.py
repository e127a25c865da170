r"""A proxy in front of two kinds of vLLM engines: some compute prompts, the others generate.

Each request goes to a prefill engine first, with `max_tokens` 1. Its answer says how many tokens of
the prompt are in the cache or on their way to it; the request then goes to a decode engine with
that beside it, which loads them, and waits for them if it must. The decode engine's answer is
passed on as it comes, streamed or not.

A prompt that could not be prefilled is computed by the decode engine: that costs time and nothing
else. Requests that an engine refuses (4xx) are answered as it answered.

    python examples/disaggregated/proxy.py \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

It is an example: it keeps no queue, checks no health and takes turns between engines of one kind.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
from typing import TYPE_CHECKING, Any, Final

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

BODY_BYTES_MAX: Final = 64 << 20
# An answer may take as long as it takes; who is not there is noticed sooner.
TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10)
PASSED_HEADERS: Final = ("authorization", "x-request-id")
WAIT_SECONDS_MAX: Final = 60.0
"""Engines ignore a longer wait."""

logger = logging.getLogger("proxy")


class Refused(Exception):
    """An engine refused a request: its answer is the client's."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"{status}")
        self.status = status
        self.body = body
        self.content_type = content_type


class Proxy:
    """Sends each request to one engine of each kind.

    Args:
        wait_seconds: how long a decode engine waits for tokens that are on their way; None leaves
            it to the sidecar's `limits.lookup_wait`.
    """

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], *, wait_seconds: float | None = None
    ) -> None:
        self._prefill: Iterator[str] = itertools.cycle(url.rstrip("/") for url in prefill)
        self._decode: Iterator[str] = itertools.cycle(url.rstrip("/") for url in decode)
        self._wait_seconds = wait_seconds
        self._client: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        """The application to serve."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_get("/v1/models", self.ask_decode)
        app.router.add_get("/health", self.ask_decode)
        app.cleanup_ctx.append(self._session)
        return app

    async def _session(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as client:
            self._client = client
            yield

    @property
    def client(self) -> aiohttp.ClientSession:
        """Connections to the engines."""
        assert self._client is not None, "the application runs"
        return self._client

    async def ask_decode(self, request: web.Request) -> web.StreamResponse:
        """Pass a GET on to a decode engine."""
        try:
            url = next(self._decode) + request.path
            async with self.client.get(url, headers=_passed_headers(request)) as answer:
                return await _passed_on(request, answer)
        except aiohttp.ClientConnectionError as error:
            return _no_engine(error)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Prefill, then decode."""
        try:
            body = await request.json()
        except json.JSONDecodeError as error:
            return _error(400, f"the body is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the body is no JSON object")
        headers = _passed_headers(request)
        try:
            handed = await self._prefilled(request.path, body, headers)
        except Refused as refused:
            return web.Response(
                status=refused.status, body=refused.body, content_type=refused.content_type
            )
        params = dict(body.get("kv_transfer_params") or {})
        if handed:
            if self._wait_seconds is not None:
                handed = {**handed, "wait_seconds": self._wait_seconds}
            params["kvlake"] = {**(params.get("kvlake") or {}), **handed}
        if params:
            body = {**body, "kv_transfer_params": params}
        url = next(self._decode) + request.path
        try:
            async with self.client.post(url, json=body, headers=headers) as answer:
                return await _passed_on(request, answer)
        except aiohttp.ClientConnectionError as error:
            return _no_engine(error)

    async def _prefilled(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any]:
        """Have a prompt computed; what the decode engine is to be told of it. Raises `Refused`."""
        url = next(self._prefill) + path
        try:
            async with self.client.post(url, json=prefill_body(body), headers=headers) as answer:
                content = await answer.read()
                if 400 <= answer.status < 500:
                    raise Refused(answer.status, content, answer.content_type)
                answer.raise_for_status()
            told = json.loads(content).get("kv_transfer_params") or {}
            return dict(told.get("kvlake") or {})
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            logger.warning("%s computed no prompt, the decode engine does: %s", url, error)
            return {}


def prefill_body(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, for one token, whose answer says what was handed over."""
    params = dict(body.get("kv_transfer_params") or {})
    params["kvlake"] = {**(params.get("kvlake") or {}), "hand_over": True}
    prefill = {
        name: value
        for name, value in body.items()
        if name not in ("min_tokens", "stream_options", "max_completion_tokens")
    }
    return prefill | {"max_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": params}


def _passed_headers(request: web.Request) -> dict[str, str]:
    return {
        name: value for name, value in request.headers.items() if name.lower() in PASSED_HEADERS
    }


async def _passed_on(request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """The engine's answer, piece by piece as it comes."""
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    if answer.charset:
        response.charset = answer.charset
    await response.prepare(request)
    async for piece in answer.content.iter_any():
        await response.write(piece)
    await response.write_eof()
    return response


def _no_engine(error: Exception) -> web.Response:
    return _error(502, f"the decode engine cannot be reached: {error}")


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def wait_seconds(text: str) -> float:
    """The value of `--wait-seconds`. Raises `argparse.ArgumentTypeError`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # Not true of nan either.
    if not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"{text} is not a number from 0 to {WAIT_SECONDS_MAX:.0f}; give seconds in that range, "
            "or leave it out for limits.lookup_wait of the sidecar"
        )
    return seconds


def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL")
    parser.add_argument("--wait-seconds", type=wait_seconds, default=None, metavar="SECONDS")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    proxy = Proxy(given.prefill, given.decode, wait_seconds=given.wait_seconds)
    # A client that goes away ends its request, and the engine notices.
    web.run_app(proxy.app(), host=given.host, port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
