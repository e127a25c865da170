"""`kvlake top` and `kvlake explain` of a running sidecar: what is drawn equals its metrics."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from sidecar.cli import main
from sidecar.cli.client import SidecarClient
from sidecar.cli.console import CommandError, NoAnswer, Options
from sidecar.cli.fleet import Fleet, Seen, _order, targets
from sidecar.cli.top import View, _as_text
from sidecar.observe.prompts import PROMPTS_MAX
from tests.sidecar.client import RunningSidecar
from tests.sidecar.prompt_records import reporting_sidecar, standing_in

pytestmark = pytest.mark.promise("prompt-tokens")


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[RunningSidecar]:
    with reporting_sidecar(short_directory) as sidecar:
        yield sidecar


def metric(sidecar: RunningSidecar, outcome: str, reason: str = "") -> float:
    labels = f'model_name="[^"]+",outcome="{outcome}",reason="{reason}"'
    text = sidecar.get("/metrics").decode()
    found = re.search(rf"^kvlake_prompt_tokens_total\{{{labels}\}} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_the_sums_are_in_metrics_and_status(sidecar: RunningSidecar) -> None:
    assert metric(sidecar, "host") == 600
    assert metric(sidecar, "local") == 100
    assert metric(sidecar, "computed", "evicted") == 200
    assert metric(sidecar, "computed", "late") == 0
    text = sidecar.get("/metrics").decode()
    for line in (
        "kvlake_prompts_total 2.0",
        "kvlake_gpu_seconds_saved_total 2.01",
        "kvlake_gpu_seconds_spent_total 0.01",
    ):
        assert f"\n{line}\n" in text
    prompts = sidecar.status()["prompts"]
    assert prompts["saved"]["money"] == pytest.approx(2.0)
    assert prompts["last"]["1h"]["hit_share"] == 0.7


def test_status_begins_with_whether_it_helps(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", "--url", sidecar.info.http_url]) == 0
    first, second, third = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("70% of 1,000 cacheable prompt tokens in the last ")
    assert "(local 10%, host 60%, store 0%, other 0%)" in first
    assert second.startswith("20% were computed because of evicted: they had left host memory")
    assert third.endswith(
        "since the start 2.0 GPU-seconds of computing were saved, after 0.0 for lookups and loads: "
        "0.00 GPU-hours, 2.00 EUR"
    )


def test_a_request_is_explained(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", sidecar.info.http_url]
    assert main(["explain", *url]) == 0
    assert "cmpl-2  200 tokens" in capsys.readouterr().out
    assert main(["explain", "cmpl-1", *url]) == 0
    out = capsys.readouterr().out
    assert "200     25%  computed: they had left host memory" in out
    assert "was not loaded, from token 600 on" in out
    assert main(["explain", "--last", "5", "--json", *url]) == 0
    shown = json.loads(capsys.readouterr().out)["prompts"]
    assert [one["request_id"] for one in shown] == ["cmpl-2", "cmpl-1"]
    assert main(["explain", "nobody", *url]) == 1
    assert "limits.prompts_kept" in capsys.readouterr().err
    assert main(["explain", "", *url]) == 2
    assert "REQUEST_ID '': it is empty; give vLLM's id" in capsys.readouterr().err
    assert main(["explain", "--last", str(PROMPTS_MAX), *url]) == 0


def test_the_address_refuses_a_query_that_it_does_not_understand(sidecar: RunningSidecar) -> None:
    for last in ("many", PROMPTS_MAX + 1):
        with pytest.raises(OSError, match="400"):
            sidecar.get(f"/prompts?last={last}")


def test_one_picture_of_one_sidecar(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--once", "--url", sidecar.info.http_url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    text = "\n".join(lines)
    assert re.search(r"host memory +60% +60% +60%", text)
    assert re.search(r"computed +30% +30% +30%", text)
    assert "20% evicted: they had left host memory" in text
    assert "is it healthy?" in text
    assert main(["top", "--json", "--url", sidecar.info.http_url]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["status"]["prompts"]["tokens"]["host"] == 600


def test_the_worst_of_several_sidecars_comes_first(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    dead = "http://127.0.0.1:9"
    assert main(["top", "--once", "--url", sidecar.info.http_url, "--url", dead]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if "127.0.0.1" in line]
    assert re.match(r"127\.0\.0\.1:9 +no answer", shown[0])
    assert "70%" in shown[1]
    assert max(map(len, lines)) <= 80
    assert main(["top", "--once", "--url", dead]) == 1


def test_the_order_of_sidecars() -> None:
    def seen(url: str, share: float | None, **status: object) -> Seen:
        last = {"1min": {"hit_share": share}}
        whole = {"ready": True, "version": "2", "problems": [], "prompts": {"last": last}}
        return Seen(url, whole | status)

    def sorted_by(sort: str) -> str:
        return "".join(one.url for one in sorted(ones, key=lambda one: _order(one, sort, "2")))

    ones = [
        Seen("g", None, "no answer"),
        seen("f", 0.9, ready=False),
        seen("e", 0.9, problems=[{}]),
        seen("d", 0.9, version="1"),
        seen("c", 0.1),
        seen("b", 0.5),
        seen("a", None),
    ]
    assert sorted_by("health") == "gfedcba"
    assert sorted_by("hits") == "cbdefag"
    assert sorted_by("name") == "abcdefg"


class StandIns:
    """Fifty stand-ins for sidecars: what one real sidecar answered, and five that are broken."""

    def __init__(self, status: dict[str, Any]) -> None:
        well = json.dumps(status).encode()
        ill = json.dumps(status | {"problems": [{"code": "store", "reason": "away"}]}).encode()
        old = json.dumps(status | {"version": "0.0.1"}).encode()
        unready = json.dumps(status | {"ready": False, "state": "starting"}).encode()
        self._hung = socket.create_server(("127.0.0.1", 0))
        self._servers = [standing_in(body) for body in [ill, old, unready, b"[]", *[well] * 45]]
        # The one that is accepted by the kernel only comes in the middle.
        ports = [server.server_address[1] for server in self._servers]
        self.broken = {f"127.0.0.1:{port}" for port in (*ports[:4], self._hung.getsockname()[1])}
        self.places = [f"127.0.0.1:{port}" for port in ports]
        self.places.insert(25, f"127.0.0.1:{self._hung.getsockname()[1]}")

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._hung.close()


def test_the_five_broken_ones_of_fifty_stand_on_top(
    sidecar: RunningSidecar, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins = StandIns(sidecar.status())
    try:
        file = tmp_path / "targets"
        file.write_text("# nodes\n" + "\n".join(stand_ins.places))
        # A server answers late on a busy machine: all are in this process.
        assert main(["fleet", "--targets", str(file), "--once", "--timeout", "5"]) == 0
        out = capsys.readouterr().out
        assert main(["fleet", "--targets", str(file), "--json"]) == 0
        answers = json.loads(capsys.readouterr().out)
    finally:
        stand_ins.close()
    first, *lines = out.splitlines()
    assert first.startswith("50 sidecars, 5 with problems; ")
    shown = [line.split()[0] for line in lines if line.startswith("127.0.0.1")]
    assert len(shown) == 50
    assert set(shown[:5]) == stand_ins.broken
    assert max(map(len, out.splitlines())) <= 80
    assert [one["url"] for one in answers] == [f"http://{place}" for place in stand_ins.places]


def test_targets_are_a_file_or_a_name(tmp_path: Path) -> None:
    file = tmp_path / "targets"
    file.write_text("node1:9400  # first\n\nhttp://node2:9400/\n[::1]:9400\nnode1:9400\n")
    assert targets(str(file)) == ["http://node1:9400", "http://node2:9400", "http://[::1]:9400"]
    assert targets("dns:localhost:9400")[0] in ("http://127.0.0.1:9400", "http://[::1]:9400")
    for line in ("node1", "node1:0", "node1:65536", "[fd00::1::2]:9321"):
        file.write_text(f"{line}\n")
        with pytest.raises(CommandError, match=re.escape(f"line 1: {line!r} is no address; give")):
            targets(str(file))
    for wrong, said in (
        (str(tmp_path / "none"), "cannot be read"),
        ("dns:localhost:0", "PORT from 1 to 65535"),
        ("dns:localhost:99999", "PORT from 1 to 65535"),
        ("dns:localhost", "give dns:NAME:PORT"),
        ("dns:nowhere.invalid:1", "is the name right?"),
        ("dns:a..b:9321", "is the name right?"),
    ):
        with pytest.raises(CommandError, match=re.escape(said)):
            targets(wrong)


@pytest.mark.parametrize(
    ("hosts", "urls"),
    [
        (["10.0.0.2", "10.0.0.1"], ["http://10.0.0.1:9400", "http://10.0.0.2:9400"]),
        (
            ["fd00::1", "fd00::2", "10.0.0.1", "10.0.0.2"],
            ["http://[fd00::1]:9400", "http://[fd00::2]:9400"],
        ),
    ],
)
def test_a_name_lists_each_sidecar_once(
    monkeypatch: pytest.MonkeyPatch, hosts: list[str], urls: list[str]
) -> None:
    """With addresses of both families, each was listed twice."""

    def resolved(_: str, port: int, type: int) -> list[object]:
        return [
            (socket.AF_INET6, type, 6, "", (host, port, 0, 0))
            if ":" in host
            else (socket.AF_INET, type, 6, "", (host, port))
            for host in hosts
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    assert targets("dns:nodes:9400") == urls


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompts", {}),
        ("problems", None),
        ("state", 7),
        ("uptime_seconds", 1e999),
        ("tiers", {"host": {}, "store": None}),
    ],
)
def test_a_malformed_answer_is_one_line_of_many(
    sidecar: RunningSidecar,
    capsys: pytest.CaptureFixture[str],
    field: str,
    value: object,
) -> None:
    """It ended `top` and `fleet` as a bug."""
    server = standing_in(json.dumps(sidecar.status() | {field: value}).encode())
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        assert main(["top", "--once", "--url", url, "--url", sidecar.info.http_url]) == 0
    finally:
        server.shutdown()
        server.server_close()
    shown = [line for line in capsys.readouterr().out.splitlines() if "127.0.0.1" in line]
    assert "no answer" in shown[0]
    assert "70%" in shown[1]


def test_an_answer_byte_by_byte_ends_at_the_deadline() -> None:
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            # The client closes first.
            with connection, contextlib.suppress(OSError):
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not ended.wait(0.02):
                    connection.sendall(b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        client = SidecarClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_seconds=0.3)
        # Of 100,000 bytes at 50 a second, it would wait for the last.
        with pytest.raises(NoAnswer, match="timed out"):
            client.get()
        ended.set()
        thread.join()


def test_an_address_that_drops_packets_leaves_time_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first had used up the time of the answer, however long it was."""
    server = standing_in(b"{}")
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        # The kernel drops what comes beyond the queue.
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        addresses = [full.getsockname(), server.server_address]
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)
        assert SidecarClient("http://node:9400", timeout_seconds=0.5).get() == {}
    server.shutdown()
    server.server_close()


def test_what_was_computed_in_an_hour_without_a_loss_in_the_last_minute(
    sidecar: RunningSidecar,
) -> None:
    status = sidecar.status()
    last = status["prompts"]["last"]
    last["1h"]["tokens"] = {"host": 100, "evicted": 900}
    for name in ("10s", "1min"):
        last[name]["tokens"] = {"host": 100}
    assert re.search(r"computed +0% +0% +90%", _as_text([Seen("http://one", status)], View()))


def test_a_minute_whose_losses_are_all_zero(sidecar: RunningSidecar) -> None:
    status = sidecar.status()
    status["prompts"]["last"]["1min"]["tokens"] = {"new": 0}
    assert "nothing was lost" in _as_text([Seen("http://one", status)], View())


def test_what_others_say_is_text() -> None:
    """Rich takes what is in brackets for markup."""
    seen = [Seen("http://[fd00::1]:9400", None, "no answer [/b]"), Seen("http://b:1", None, "[x]")]
    text = _as_text(seen, View())
    for part in ("[fd00::1]:9400", "no answer [/b]", "[x]"):
        assert part in text
    assert "no answer [/b]" in _as_text(seen[:1], View())


def test_targets_that_cannot_be_read_any_more(tmp_path: Path) -> None:
    file = tmp_path / "targets"
    file.write_text("127.0.0.1:9\n")
    options = Options(targets=str(file), url=None, config=None, timeout=0.2, token_file=None)
    fleet = Fleet(options)
    assert [one.url for one in fleet.ask()] == ["http://127.0.0.1:9"]
    file.unlink()
    lost, known = fleet.ask()
    assert "cannot be read" in lost.problem
    assert known.url == "http://127.0.0.1:9"
    with pytest.raises(CommandError, match="cannot be read"):
        Fleet(options).ask()


@pytest.mark.parametrize("status", [0, HTTPStatus.UNAUTHORIZED])
def test_a_line_of_a_fleet_names_no_option_that_it_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    server = standing_in(b"{}", status) if status else None
    port = 9 if server is None else server.server_address[1]
    file = tmp_path / "targets"
    file.write_text(f"127.0.0.1:{port}\n")
    try:
        assert main(["fleet", "--targets", str(file), "--once"]) == 1
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert ("--token-file" if status else "Does the sidecar run") in said
    assert "--config" not in said
    assert "--url" not in said


def test_only_a_single_sidecar_is_asked_for_its_contents(sidecar: RunningSidecar) -> None:
    """Each walked over its chunks for nothing; one that did so too slowly had "no answer"."""
    # To /host, it does not answer as a sidecar does.
    server = standing_in(json.dumps(sidecar.status()).encode())
    urls = [sidecar.info.http_url, f"http://127.0.0.1:{server.server_address[1]}"]

    def ask(*urls: str) -> list[Seen]:
        options = Options(targets=None, url=urls, config=None, timeout=5.0, token_file=None)
        return Fleet(options).ask(contents=True)

    try:
        several = ask(*urls)
        [broken] = ask(urls[1])
    finally:
        server.shutdown()
        server.server_close()
    assert [one.problem for one in several] == ["", ""]
    assert [one.contents for one in several] == [None, None]
    assert "has not the figures" in broken.problem
    [whole] = ask(urls[0])
    assert whole.contents is not None


def test_without_a_terminal_it_asks_for_once(
    sidecar: RunningSidecar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--url", sidecar.info.http_url]) == 2
    assert "use --once" in capsys.readouterr().err


def test_the_pages_of_a_picture(sidecar: RunningSidecar) -> None:
    seen = [Seen("http://one", sidecar.status())]
    contents = sidecar.get("/host")
    whole = [seen[0]._replace(contents=json.loads(contents))]
    shown = _as_text(whole, View(page="3"))
    assert "what is in it?" in shown
    for title in ("last used within: ", "tokens before, below: ", "largest tenants: "):
        assert title in shown
    assert "does it help?" not in _as_text(seen, View(page="2"))
    assert "paused" in _as_text(seen, View(paused=True))
