"""GCS's XML interface in front of fake-gcs-server, which has only the reading half of it.

obstore writes and copies with `PUT /bucket/object`, as GCS's XML interface has it; fake-gcs-server
answers that with 400 and knows the JSON interface's uploads and copies. This program translates
those two requests and their answers; everything else passes as it is, in both directions.

Run as `python gcs_xml.py PORT UPSTREAM`, where UPSTREAM is such as http://127.0.0.1:4443.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
from aiohttp import web
from yarl import URL

BODY_BYTES_MAX = 1 << 30
_PART = b"--part\r\nContent-Type: %b\r\n\r\n%b\r\n"
_HOP_HEADERS = {"host", "connection", "transfer-encoding", "content-length", "keep-alive"}
_JSON_PREFIXES = ("/storage/", "/upload/", "/download/", "/batch/", "/b/", "/_internal/")


class Translator:
    """Answers requests by asking the server behind it."""

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._session = session

    async def answer(self, request: web.Request) -> web.Response:
        path = request.rel_url.raw_path
        bucket, _, name = path.lstrip("/").partition("/")
        if request.method != "PUT" or path.startswith(_JSON_PREFIXES) or not name:
            return await self._pass(request)
        source = request.headers.get("x-goog-copy-source")
        generation = request.headers.get("x-goog-if-generation-match")
        query = {} if generation is None else {"ifGenerationMatch": generation}
        if source is not None:
            from_bucket, _, from_name = source.lstrip("/").partition("/")
            way = f"/storage/v1/b/{from_bucket}/o/{quote(unquote(from_name), safe='')}"
            way += f"/copyTo/b/{bucket}/o/{quote(unquote(name), safe='')}"
            return await self._json(way, query, b"")
        way = f"/upload/storage/v1/b/{bucket}/o"
        # Not the simpler `media`: of its preconditions the server takes no notice.
        upload = {"uploadType": "multipart", **query}
        about = json.dumps({"name": unquote(name)}).encode()
        body = _PART % (b"application/json", about) + _PART % (
            b"application/octet-stream",
            await request.read(),
        )
        return await self._json(way, upload, body + b"--part--")

    async def _json(self, way: str, query: dict[str, str], body: bytes) -> web.Response:
        text = "&".join(f"{key}={quote(value, safe='')}" for key, value in query.items())
        target = URL(f"{self._upstream}{way}" + (f"?{text}" if text else ""), encoded=True)
        kind = {"Content-Type": "multipart/related; boundary=part"} if body else {}
        async with self._session.post(target, data=body, headers=kind) as answer:
            told = await answer.read()
            if answer.status != 200:
                return web.Response(status=answer.status, text=_error(answer.status, way))
            stored: dict[str, Any] = json.loads(told)
            headers = {
                "ETag": f'"{stored.get("etag", "0").strip(chr(34))}"',
                "x-goog-generation": str(stored.get("generation", "1")),
            }
            xml = f"<CopyObjectResult><ETag>{headers['ETag']}</ETag></CopyObjectResult>"
            return web.Response(text=xml, content_type="application/xml", headers=headers)

    async def _pass(self, request: web.Request) -> web.Response:
        headers = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in _HOP_HEADERS
        }
        target = URL(f"{self._upstream}{request.rel_url.raw_path_qs}", encoded=True)
        async with self._session.request(
            request.method, target, headers=headers, data=await request.read()
        ) as answer:
            body = await answer.read()
            kept = {
                name: value
                for name, value in answer.headers.items()
                if name.lower() not in _HOP_HEADERS
            }
            if request.method == "HEAD":
                kept["Content-Length"] = answer.headers.get("Content-Length", "0")
            if answer.status == 404 and request.method != "HEAD":
                # The XML API names what is missing; the server below says nothing or prose.
                listing = "list-type" in request.query
                body = _error(404, "bucket" if listing else "object").encode()
            return web.Response(status=answer.status, headers=kept, body=body)


def _error(status: int, way: str) -> str:
    missing = "NoSuchKey" if way == "object" or "copyTo" in way else "NoSuchBucket"
    code = {404: missing, 412: "PreconditionFailed"}
    return f"<Error><Code>{code.get(status, 'InternalError')}</Code></Error>"


async def main(port: int, upstream: str) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.router.add_route("*", "/{tail:.*}", Translator(upstream, session).answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
