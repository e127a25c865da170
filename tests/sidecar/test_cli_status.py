"""`kvlake status`: what it shows, and which answers it does not take for a sidecar's."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli.client import SidecarClient, url_of
from sidecar.cli.console import NoAnswer
from sidecar.cli.status import render
from sidecar.config.model import load
from tests.sidecar.commands import kvlake

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "name": "default",
    "pid": 7,
    "uptime_seconds": 3700.0,
    "state": "degraded",
    "tiers": {
        "host": {"policy": "lru", "size_bytes": 8 << 30, "used_bytes": 2 << 30, "chunks": 12},
        "store": {
            "url": "s3://b/kv",
            "write": "through",
            "read": "on",
            "state": "unwell",
            "reason": "no such bucket",
            "chunks": 40,
            "write_queue_bytes": 3 << 29,
            "monthly_bill": {"currency": "EUR", "total": 12.345},
        },
    },
    "problems": [{"code": "store", "reason": "the store is unwell: no such bucket"}],
    "hits": {"loads_served": 3, "loads_missed": 1, "lookups": 3, "lookups_expired": 1},
    "rates": {"seconds": 62.5, "bytes_per_second": {"stored": 3 << 20, "loaded": 0}},
    "counters": {
        "chunks_stored": 20,
        "bytes_stored": 3 << 30,
        "chunks_loaded": 99,
        "chunks_evicted": 8,
    },
    "realms": [{"realm_id": 1, "namespace": {"model": {"name": "org/model"}}}],
    "sessions": [
        {
            "role": "worker",
            "engine_id": "e1",
            "rank": 1,
            "world_size": 2,
            "realm_id": 1,
            "pid": 8,
            "attached_seconds": 59,
        }
    ],
}


class _Answer(http.server.BaseHTTPRequestHandler):
    status = 200
    body = b""

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/status" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # A proxy of the environment is for the world outside, not for this machine.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr(_Answer, "body", json.dumps(STATUS).encode())
    with http.server.HTTPServer(("127.0.0.1", 0), _Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_status_is_fetched_and_shown(capsys: pytest.CaptureFixture[str], address: str) -> None:
    code, out, _ = kvlake(capsys, "status", "--url", address)
    assert code == 0
    for text in (
        "kvlake 0.1.0 'default': degraded, up 1h1m, pid 7",
        "  store: the store is unwell: no such bucket",
        "2 GiB of 8 GiB (25%)",
        "s3://b/kv  write through, read on",
        "SINCE START                   CHUNKS    BYTES  PER SECOND, LAST 1M2S",
        "stored       engines to host  20        3 GiB  3 MiB",
        "loaded       host to engines  99 parts  0 B    0 B",
        "written      host to store    0         0 B    -",
        "loads            3 of 4 begun were served; engines count the tokens that hit and missed",
        "1.5 GiB of host memory wait to be written to the store",
        "12.35 EUR a month: objects of namespaces attached since the start (kvlake du shows all)",
        ", and requests of this sidecar as in the last 1h1m",
        "e1",
        "1/2",
        "org/model",
    ):
        assert text in out, out


def test_status_as_json_is_the_document(capsys: pytest.CaptureFixture[str], address: str) -> None:
    _, out, _ = kvlake(capsys, "status", "--json", "--url", f"{address}/status")
    assert json.loads(out) == STATUS


def test_an_unreachable_sidecar_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = kvlake(capsys, "status", "--url", "http://127.0.0.1:1")
    assert (code, out) == (1, "")
    assert "no answer from http://127.0.0.1:1/status" in err
    assert "Does the sidecar run" in err


@pytest.mark.parametrize("body", [b"<html>", b"[1]", b"\xff"])
def test_another_http_server_is_not_accepted_as_a_sidecar(
    address: str, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setattr(_Answer, "body", body)
    with pytest.raises(NoAnswer, match="is that a kvlake sidecar"):
        SidecarClient(address).get()
    monkeypatch.setattr(_Answer, "status", 500)
    with pytest.raises(NoAnswer, match="answered 500"):
        SidecarClient(address).get()
    monkeypatch.setattr(_Answer, "status", 503)
    with pytest.raises(NoAnswer, match="is starting or ending"):
        SidecarClient(address).get()


def test_a_server_that_is_no_http_server_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(NoAnswer, match=r"does not answer by HTTP .*is that a kvlake sidecar"):
            SidecarClient(f"http://127.0.0.1:{server.getsockname()[1]}").get()
        thread.join()


def test_an_empty_status_document_is_shown() -> None:
    assert "no engine is attached" in render({})
    assert "loads            -\n" in render({})


def test_the_address_comes_from_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {host: 0.0.0.0, port: 1234, token: 0123456789abcdef}")
    assert url_of(load(file)) == "http://127.0.0.1:1234"
    file.write_text("http: {host: '::', port: 1234, token: 0123456789abcdef}")
    assert url_of(load(file)) == "http://[::1]:1234"
    file.write_text("http: {port: 0}")
    with pytest.raises(NoAnswer, match="the port was chosen at start"):
        url_of(load(file))
