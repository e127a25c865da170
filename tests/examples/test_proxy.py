"""The example's proxy between engines that are doubles: what it asks of each, and passes on."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from connector.request_params import WAIT_MS_MAX
from examples.disaggregated.proxy import WAIT_SECONDS_MAX, Proxy, main, wait_seconds

pytestmark = pytest.mark.promise("disaggregated")

HANDED = {"kvlake": {"expect_tokens": 96}}
BODY = {"model": "m", "prompt": "w1 w2", "max_tokens": 50}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineDouble:
    """An HTTP server that notes what it is asked and answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Any] = []
        self.gone = asyncio.Event()
        self._answer = answer

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "POST":
            self.asked.append(await request.json())
        self.headers.append(request.headers)
        try:
            return await self._answer(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        async with TestServer(app) as server:
            assert server.runner is not None
            yield str(server.make_url(""))


def answering(status: int = 200, **content: Any) -> EngineDouble:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(content, status=status)

    return EngineDouble(answer)


@contextlib.asynccontextmanager
async def proxied(
    prefill: EngineDouble | str, decode: EngineDouble | str, **options: Any
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with contextlib.AsyncExitStack() as stack:
        urls = [
            one if isinstance(one, str) else await stack.enter_async_context(one.serving())
            for one in (prefill, decode)
        ]
        proxy = Proxy([urls[0]], [urls[1]], **options)
        server = await stack.enter_async_context(TestServer(proxy.app()))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        yield client, str(server.make_url("")).rstrip("/")


async def test_the_prompt_first_and_then_the_rest_with_what_was_handed_over() -> None:
    prefill, decode = answering(kv_transfer_params=HANDED), answering(choices=["text"])
    async with proxied(prefill, decode, wait_seconds=3) as (client, url):
        headers = {"Authorization": "Bearer key", "Cookie": "mine"}
        async with client.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer:
            assert await answer.json() == {"choices": ["text"]}
    (asked,) = prefill.asked
    assert (asked["max_tokens"], asked["stream"], asked["prompt"]) == (1, False, BODY["prompt"])
    assert asked["kv_transfer_params"] == {"kvlake": {"hand_over": True}}
    (asked,) = decode.asked
    handed = {"kvlake": {"expect_tokens": 96, "wait_seconds": 3}}
    assert asked == {**BODY, "kv_transfer_params": handed}
    for engine in (prefill, decode):
        assert engine.headers[0]["Authorization"] == "Bearer key"
        assert "Cookie" not in engine.headers[0]


async def test_a_get_is_passed_on_with_the_clients_key() -> None:
    decode = answering(data=[])
    async with proxied(answering(), decode) as (client, url):
        headers = {"Authorization": "Bearer key", "Cookie": "mine"}
        async with client.get(f"{url}/v1/models", headers=headers) as answer:
            assert await answer.json() == {"data": []}
    assert decode.headers[0]["Authorization"] == "Bearer key"
    assert "Cookie" not in decode.headers[0]


@pytest.mark.parametrize("given", ["-1", "60.5", "nan", "soon"])
def test_a_wait_that_engines_ignore_is_refused(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9"]
    monkeypatch.setattr(sys, "argv", ["proxy.py", *engines, f"--wait-seconds={given}"])
    monkeypatch.setattr(web, "run_app", lambda *_, **__: None)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert f"argument --wait-seconds: {given} is not a number from 0 to 60; give" in told


def test_the_longest_wait_is_that_of_engines() -> None:
    assert wait_seconds("60") == WAIT_SECONDS_MAX == WAIT_MS_MAX / 1000
    assert wait_seconds("0") == 0


async def test_what_a_request_asks_for_itself_goes_to_both() -> None:
    prefill, decode = answering(kv_transfer_params=HANDED), answering()
    own = {"kvlake": {"ttl_seconds": 60}, "other": {"a": 1}}
    body = {"stream": True, "stream_options": {}, "min_tokens": 9, "max_completion_tokens": 50}
    async with (
        proxied(prefill, decode) as (client, url),
        client.post(
            f"{url}/v1/chat/completions", json={**body, "kv_transfer_params": own}
        ) as answer,
    ):
        assert answer.status == 200
    assert prefill.asked[0] == {
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": {"kvlake": {"ttl_seconds": 60, "hand_over": True}, "other": {"a": 1}},
    }
    params = decode.asked[0]["kv_transfer_params"]
    assert params == {"kvlake": {"ttl_seconds": 60, "expect_tokens": 96}, "other": {"a": 1}}


async def test_a_stream_comes_as_it_is_made() -> None:
    told, go_on = asyncio.Event(), asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        told.set()
        await go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async with (
        proxied(answering(), EngineDouble(stream)) as (client, url),
        client.post(f"{url}/v1/completions", json=BODY) as answer,
    ):
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readuntil(b"\n\n") == b"data: one\n\n"
        go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"
    assert told.is_set()


async def test_a_refusal_of_the_prefill_engine_is_the_answer() -> None:
    prefill, decode = answering(status=400, error={"message": "too long"}), answering()
    async with (
        proxied(prefill, decode) as (client, url),
        client.post(f"{url}/v1/completions", json=BODY) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "too long"
    assert not decode.asked


@pytest.mark.parametrize("gone", [True, False])
async def test_without_a_prefill_engine_the_decode_engine_computes(gone: bool) -> None:
    prefill: EngineDouble | str = "http://127.0.0.1:9" if gone else answering(status=500)
    decode = answering(choices=["text"])
    async with (
        proxied(prefill, decode) as (client, url),
        client.post(f"{url}/v1/completions", json=BODY) as answer,
    ):
        assert await answer.json() == {"choices": ["text"]}
    assert decode.asked == [BODY]


async def test_errors_of_the_decode_engine_are_told() -> None:
    async with (
        proxied(answering(), answering(status=503, error="full")) as (client, url),
        client.post(f"{url}/v1/completions", json=BODY) as answer,
    ):
        assert (answer.status, await answer.json()) == (503, {"error": "full"})
    async with proxied(answering(), "http://127.0.0.1:9") as (client, url):
        async with client.post(f"{url}/v1/completions", json=BODY) as answer:
            assert answer.status == 502
        async with client.get(f"{url}/health") as answer:
            assert answer.status == 502


@pytest.mark.parametrize("body", [b"{", b"[1]"])
async def test_a_body_that_is_no_request(body: bytes) -> None:
    prefill = answering()
    async with (
        proxied(prefill, answering()) as (client, url),
        client.post(f"{url}/v1/completions", data=body) as answer,
    ):
        assert answer.status == 400
    assert not prefill.asked


async def test_engines_of_one_kind_take_turns() -> None:
    engines = [answering(), answering()]
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(engine.serving()) for engine in engines]
        server = await stack.enter_async_context(TestServer(Proxy(urls, urls).app()))
        client = await stack.enter_async_context(aiohttp.ClientSession())
        for _ in range(4):
            url = f"{server.make_url('/v1/completions')}"
            async with client.post(url, json=BODY) as answer:
                assert answer.status == 200
    assert [len(engine.asked) for engine in engines] == [4, 4]
