"""HTTP from outside: who may ask, and what a client that means harm can use up."""

from __future__ import annotations

import collections
import contextlib
import errno
import http.client
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar import cli
from sidecar.config.model import ConfigError, load, loads
from sidecar.errors import StartError
from sidecar.observe.http import MATCHES_OPEN_MAX, listen_on
from tests import places
from tests.mappings import open_fds
from tests.sidecar.client import WAIT_SECONDS_MAX, RunningSidecar, Worker, config_in

TOKEN = "t0ken-of-this-test"


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with RunningSidecar(config_in(short_directory)) as running:
        yield running


@pytest.fixture
def guarded(short_directory: Path) -> Iterator[RunningSidecar]:
    file = short_directory / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with RunningSidecar(config_in(short_directory, http={"token_file": file})) as running:
        yield running


def ask(url: str, authorization: str | None = None, **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(url, headers=headers)
    if authorization is not None:
        request.add_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def problems(sidecar: RunningSidecar, authorization: str | None = None) -> tuple[int, list[Any]]:
    """The code of /readyz and what is wrong."""
    status, body = ask(f"{sidecar.info.http_url}/readyz", authorization)
    return status, json.loads(body)["problems"]


# --- the token -----------------------------------------------------------------------------------


@pytest.mark.promise("http-content")
@pytest.mark.parametrize("page", ["/metrics", "/status"])
def test_pages_with_content_need_the_token(guarded: RunningSidecar, page: str) -> None:
    url = f"{guarded.info.http_url}{page}"
    refused = [None, "", "Bearer", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"]
    for given in refused:
        status, body = ask(url, given)
        assert status == 401, given
        assert TOKEN.encode() not in body
    assert ask(url, f"Bearer {TOKEN}")[0] == 200
    assert ask(url, f"bearer  {TOKEN} ")[0] == 200
    _, metrics = ask(f"{guarded.info.http_url}/metrics", f"Bearer {TOKEN}")
    # The page's first request has none. That must raise no alarm.
    assert b'kvlake_http_refused_total{why="no_token"} 1.0' in metrics
    assert f'kvlake_http_refused_total{{why="token"}} {len(refused) - 1}.0'.encode() in metrics


@pytest.mark.promise("http-rebinding")
def test_a_name_that_others_made_for_this_address_is_refused(sidecar: RunningSidecar) -> None:
    """A web page whose name comes to mean 127.0.0.1 is of the same origin, and read everything."""
    url = f"{sidecar.info.http_url}/prompts"
    for host in ("localhost:9", "127.0.0.1:9", "[::1]:9", "localhost"):
        assert ask(url, Host=host)[0] == 200, host
    for host in ("page.example:9", "127.0.0.1.page.example", "[x"):
        assert ask(url, Host=host)[0] == 421, host


def test_probes_need_none_and_learn_codes_only(
    guarded: RunningSidecar, short_directory: Path
) -> None:
    for path in (short_directory / "pool").glob("*.pool"):
        path.unlink()
    assert ask(f"{guarded.info.http_url}/healthz") == (200, b"ok\n")
    assert problems(guarded) == (200, [{"code": "pool", "serious": False}])
    _, (told,) = problems(guarded, f"Bearer {TOKEN}")
    assert "was removed" in told["reason"]


@pytest.mark.promise("http-token")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "node-7", "10.0.0.1"])
def test_an_address_that_others_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match=r"kvlake keygen.*http\.token") as caught:
        loads(f"http: {{host: '{host}'}}")
    assert host in str(caught.value)
    assert loads(f"http: {{host: '{host}', token: {TOKEN}}}").http.secret_token() == TOKEN


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_none(host: str) -> None:
    assert loads(f"http: {{host: '{host}'}}").http.secret_token() == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{token: short}", "at least 16"),
        (f"{{token: {TOKEN}, token_file: /x}}", "keep one"),
        ("{token_file: relative}", "absolute"),
    ],
)
def test_a_token_that_is_none_is_refused(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        loads(f"http: {given}")
    assert "short" not in str(caught.value).replace("string_too_short", "")


@pytest.mark.promise("secret-files")
@pytest.mark.parametrize(
    ("mode", "content", "said"),
    [
        (0o644, TOKEN, "mode 0644 other users"),
        (0o620, TOKEN, "mode 0620 other users"),
        (0o600, "", "is empty"),
        (0o600, "x" * 5000, "more than 4096"),
        (None, "", "cannot be read"),
    ],
)
def test_a_token_file_that_others_could_read_is_refused(
    short_directory: Path, mode: int | None, content: str, said: str
) -> None:
    file = short_directory / "token"
    if mode is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(StartError, match=said) as caught:
        RunningSidecar(config_in(short_directory, http={"token_file": file}))
    assert TOKEN not in str(caught.value)


def test_keygen_makes_a_file_for_its_owner_only(
    short_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = short_directory / "key"
    assert cli.main(["keygen", "--out", str(file)]) == 0
    secret = file.read_text().strip()
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(secret) == 40
    assert cli.main(["keygen", "--out", str(file)]) == 2
    assert file.read_text().strip() == secret, "a key is never replaced"
    (short_directory / "link").symlink_to(short_directory / "elsewhere")
    assert cli.main(["keygen", "--out", str(short_directory / "link")]) == 2
    assert not (short_directory / "elsewhere").exists()
    told = capsys.readouterr()
    assert secret not in told.out + told.err
    assert "exists, and is not replaced" in told.err


def test_status_gives_the_token(
    guarded: RunningSidecar, short_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, file = guarded.info.http_url, short_directory / "token"
    assert cli.main(["status", "--url", url]) == 1
    assert "needs a token, and none was given" in capsys.readouterr().err
    assert cli.main(["status", "--url", url, "--token-file", str(file)]) == 0
    port = url.rsplit(":", 1)[1]
    config = short_directory / "c.yaml"
    config.write_text(f"http: {{port: {port}, token_file: '{file}'}}")
    assert load(config).http.secret_token() == TOKEN
    assert cli.main(["status", "--config", str(config)]) == 0


# --- clients that mean harm ----------------------------------------------------------------------


def connect(sidecar: RunningSidecar) -> socket.socket:
    host, port = sidecar.info.http_url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=20)


def answer_to(sidecar: RunningSidecar, request: bytes) -> bytes:
    with connect(sidecar) as sock:
        try:
            sock.sendall(request)
            return sock.recv(65536)
        except (ConnectionResetError, BrokenPipeError):
            return b"reset"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X: a\r\n" * 1000 + b"\r\n",
        b"\x00\xff" * 1000,
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_requests_out_of_bounds_are_refused(sidecar: RunningSidecar, request_bytes: bytes) -> None:
    assert b"200 OK" not in answer_to(sidecar, request_bytes)
    assert sidecar.get("/healthz") == b"ok\n"


def test_a_body_is_not_read(sidecar: RunningSidecar) -> None:
    head = b"POST /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1099511627776\r\n\r\n"
    assert b" 405 " in answer_to(sidecar, head + bytes(1000))
    assert sidecar.get("/healthz") == b"ok\n"


def test_connections_that_ended_do_not_count(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They did until the next sweep, so that a client that asked often was turned away."""
    places.patch(monkeypatch, "CONNECTIONS_MAX", 8, package="sidecar")
    places.patch(monkeypatch, "SWEEP_SECONDS", 3600.0)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        for _ in range(100):
            assert sidecar.get("/healthz") == b"ok\n"


def at_end(sock: socket.socket) -> bool:
    """Wait for the sidecar to end a connection, without an answer."""
    sock.settimeout(WAIT_SECONDS_MAX)
    try:
        return sock.recv(10) == b""
    except ConnectionResetError:
        return True


@pytest.mark.slow
@pytest.mark.promise("http-slow")
def test_slow_clients_do_not_use_up_descriptors(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "CONNECTIONS_MAX", 8, package="sidecar")
    places.patch(monkeypatch, "CONNECTION_SECONDS_MAX", 3600.0)
    places.patch(monkeypatch, "SWEEP_SECONDS", 0.1)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        sidecar.get("/healthz")
        before = open_fds()
        slow: list[socket.socket] = []
        for _ in range(40):
            sock = connect(sidecar)
            sock.sendall(b"GET /healthz HTTP/1.1\r\nX-")
            slow.append(sock)
        # In the order of their coming; time cuts nobody off yet.
        for sock in slow[:32]:
            assert at_end(sock), "who has been idle longest makes room"
        # The test's own ends count too; of the sidecar's there are never more than allowed.
        assert open_fds() <= before + 40 + 8 + 1
        places.patch(monkeypatch, "CONNECTION_SECONDS_MAX", 0.1)
        for sock in slow[32:]:
            assert at_end(sock), "a request that is not over in time is cut off"
        for sock in slow:
            sock.close()
        # A client that is served now must not be cut off for a pause of the machine.
        places.patch(monkeypatch, "CONNECTION_SECONDS_MAX", 3600.0)
        assert sidecar.get("/healthz") == b"ok\n"
        assert b'why="connection"' in sidecar.get("/metrics")


MATCH = (
    b"POST /match HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 15\r\n\r\n{"tokens": [1]}'
)
PROBE = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_HEADERS = b"GET /healthz HTTP/1.1\r\nX-"
HALF_BODY = MATCH[:-1]


def half_sent(sidecar: RunningSidecar, half: bytes = HALF_HEADERS) -> socket.socket:
    sock = connect(sidecar)
    sock.sendall(half)
    return sock


@pytest.mark.promise("http-probes")
@pytest.mark.parametrize("held", [64, 200])
@pytest.mark.parametrize("half", [HALF_HEADERS, HALF_BODY], ids=["headers", "body"])
def test_probes_are_answered_while_requests_stand_half_sent(
    sidecar: RunningSidecar, half: bytes, held: int
) -> None:
    """64 of them shut out every probe: 0 of 641 were answered in 36 s."""
    slow = [half_sent(sidecar, half) for _ in range(held)]
    for _ in range(20):
        for page in ("/healthz", "/readyz"):
            assert ask(f"{sidecar.info.http_url}{page}")[0] == 200
        slow.append(half_sent(sidecar, half))
    for sock in slow:
        sock.close()


@pytest.mark.promise("http-probes")
def test_probes_are_answered_while_a_client_comes_back_at_once(sidecar: RunningSidecar) -> None:
    """Most of them: one may be ended for a newcomer while it is not scheduled."""
    stop = threading.Event()

    def probed() -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(f"{sidecar.info.http_url}/healthz") == (200, b"ok\n")
        return False

    def attack() -> None:
        slow: collections.deque[socket.socket] = collections.deque()
        while not stop.is_set():
            slow.append(half_sent(sidecar))
            if len(slow) > 100:
                slow.popleft().close()
        for sock in slow:
            sock.close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        assert sum(probed() for _ in range(100)) > 50
    finally:
        stop.set()
        attacker.join()


@pytest.mark.promise("http-slow")
def test_a_request_that_does_not_arrive_is_cut_off_before_the_connections_end(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "CONNECTION_SECONDS_MAX", 3600.0)
    places.patch(monkeypatch, "SWEEP_SECONDS", 0.05)
    places.patch(monkeypatch, "HEADER_SECONDS_MAX", 0.2)
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        half_sent(sidecar) as never_asked,
        half_sent(sidecar, HALF_BODY) as no_body,
        half_sent(sidecar, PROBE + HALF_BODY) as no_second_body,
        connect(sidecar) as silent,
    ):
        for sock in (never_asked, no_body, silent):
            assert at_end(sock)
        with contextlib.suppress(ConnectionResetError):
            while no_second_body.recv(65536):
                """The answer to the first request."""


@pytest.mark.promise("http-slow")
def test_who_never_reads_an_answer_is_cut_off(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waited for what was still to be sent, so that its descriptor stayed."""
    places.patch(monkeypatch, "SWEEP_SECONDS", 0.05)
    places.patch(monkeypatch, "CONNECTION_SECONDS_MAX", 1.0)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        before = open_fds()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            host, port = sidecar.info.http_url.removeprefix("http://").rsplit(":", 1)
            sock.connect((host, int(port)))
            with contextlib.suppress(ConnectionError):
                for _ in range(20_000):
                    sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            # The test's own end is left.
            while open_fds() > before + 1:
                assert time.monotonic() < deadline
                time.sleep(0.05)


@pytest.mark.promise("http-slow")
def test_one_address_leaves_room_for_others(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "PEER_CONNECTIONS_MAX", 4)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        host, port = sidecar.info.http_url.removeprefix("http://").rsplit(":", 1)
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0)) as other:
            slow = [half_sent(sidecar) for _ in range(8)]
            for sock in slow[:4]:
                assert at_end(sock), "of the address that has too many, the oldest makes room"
            other.sendall(PROBE)
            assert b"200 OK" in other.recv(65536)
            for sock in slow:
                sock.close()


class SlowKeys:
    """Makes the keys of prompts as the sidecar does, but not before `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self.parsed = 0
        parse, chain_of = places.find("parse_question").value, places.find("_chain_of").value

        def counted(body: bytes) -> object:
            self.parsed += 1
            return parse(body)

        def slow(*given: object) -> object:
            self.started.set()
            assert self.go.wait(WAIT_SECONDS_MAX)
            return chain_of(*given)

        places.patch(monkeypatch, "parse_question", counted)
        places.patch(monkeypatch, "_chain_of", slow)


def abandon(sock: socket.socket) -> None:
    """Leave, and wait until the sidecar has noticed: it takes this for a close."""
    sock.shutdown(socket.SHUT_WR)
    assert at_end(sock)


@pytest.mark.promise("http-slow")
def test_queries_of_clients_that_left_do_not_pile_up(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = SlowKeys(monkeypatch)
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        Worker(sidecar.path),
        contextlib.ExitStack() as clients,
    ):
        clients.callback(keys.go.set)

        def query() -> socket.socket:
            sock = clients.enter_context(connect(sidecar))
            sock.sendall(MATCH)
            return sock

        first = query()
        assert keys.started.wait(WAIT_SECONDS_MAX)
        waiting = [query() for _ in range(MATCHES_OPEN_MAX - 1)]
        assert b"503" in query().recv(65536), "as many as there are connections kept probes out"
        for _ in range(10):
            assert sidecar.get("/healthz") == b"ok\n"
        assert keys.parsed == 1, "a query that waits holds more than its body"
        for sock in (*waiting, first):
            abandon(sock)
        last = query()
        # The sidecar reads the query before it answers the last of these.
        for _ in range(10):
            assert sidecar.get("/healthz") == b"ok\n"
        assert keys.parsed == 1, "the next query did not wait for the thread of the first one"
        keys.go.set()
        assert b"200 OK" in last.recv(65536)
        assert keys.parsed == 2, "a query of a client that left was answered"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errno.EACCES, "only root may bind ports below 1024"),
        (errno.EADDRINUSE, "choose another http.port, or 0"),
        (errno.EADDRNOTAVAIL, "http.host must be an address of this machine"),
    ],
)
def test_an_address_that_cannot_be_had_is_told_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, error: int, remedy: str
) -> None:
    made: list[socket.socket] = []

    class Refused(socket.socket):
        def bind(self, address: object) -> None:
            made.append(self)
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(socket, "socket", Refused)
    with pytest.raises(StartError, match=rf"http\.port=80 cannot be bound: .*{remedy}"):
        listen_on("127.0.0.1", 80)
    # Not counted: threads of earlier tests may still close descriptors of theirs.
    assert made
    assert all(one.fileno() == -1 for one in made)
