from __future__ import annotations

import gc
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import yaml

from sidecar import cli
from sidecar.cli.client import SidecarClient, url_of
from sidecar.cli.console import NoAnswer
from sidecar.cli.status import render
from sidecar.config.model import load
from tests import places
from tests.harness.servers import S3Server
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.slot_image import SlotTemplate
from tiers.pool.host_pool import HostPool
from tiers.store.object_tier import UrlObjects

KEY = bytes(range(32))


def kvlake(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# --- the memory that is left -------------------------------------------------------------------


def test_pool_is_shown_and_removed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"host: {{size: 1MiB, directory: {tmp_path}}}\nruntime: {{name: mine}}\n")
    path = load(file).pool_path
    given = ("--config", str(file))
    assert kvlake(capsys, "pool", "show", *given) == (0, f"{path}: there is none\n", "")
    assert kvlake(capsys, "pool", "remove", *given) == (0, f"{path}: none\n", "")

    pool = HostPool.open(path, 1 << 20, prefault=False)
    offset = pool.allocate(pool.register_class(8192))
    assert offset is not None
    pool.seal(offset)
    code, out, _ = kvlake(capsys, "pool", "show", *given)
    assert (code, f"in use by process {os.getpid()}; it holds 8 KiB" in out) == (0, True), out
    code, out, err = kvlake(capsys, "pool", "remove", *given)
    assert (code, "pool is in use" in err) == (1, True)
    pool.close(keep=True)

    code, out, _ = kvlake(capsys, "pool", "show", "--json", *given)
    document = json.loads(out)
    assert document["state"] == "kept"
    assert document["size_bytes"] == 1 << 20
    assert document["classes"] == [{"slot_bytes": 8192, "slots": 1}]
    assert kvlake(capsys, "pool", "show", *given)[1].startswith(f"{path}: 1.54 MiB, kept")
    with path.open("r+b") as changed:
        changed.write(b"precious")
    assert "the next start will empty it" in kvlake(capsys, "pool", "show", *given)[1]
    assert "given back" in kvlake(capsys, "pool", "remove", *given)[1]
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_that_is_not_kvlakes_is_not_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"host: {{directory: {tmp_path}}}\n")
    path = load(file).pool_path
    path.write_text("precious")
    for _ in range(2):
        code, _, err = kvlake(capsys, "pool", "remove", "--config", str(file))
        assert (code, "was not made by kvlake" in err) == (1, True)
    assert "not made by kvlake" in kvlake(capsys, "pool", "show", "--config", str(file))[1]
    assert path.read_text() == "precious"
    assert set(tmp_path.iterdir()) == {file, path}


# --- help and configuration ----------------------------------------------------------------------


COMMANDS = [
    "run", "serve", "demo", "status", "inspect", "du", "ls", "gc", "doctor", "keygen", "pool",
    "pool show", "pool remove", "tenant", "tenant id", "config", "config check", "config show",
    "config schema",
]  # fmt: skip


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([*command.split(), "--help"])
    assert caught.value.code == 0
    assert "usage: kvlake" in capsys.readouterr().out


def test_help_and_serve_import_no_heavy_package() -> None:
    """`serve` sets the environment that numpy and pyarrow read when they are imported."""
    script = (
        "import sys, sidecar.cli.serve; from sidecar.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'pyarrow', 'pydantic', 'aiohttp', 'anyio', 'vllm', 'torch', 'fsspec'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("kvlake 0.")


def test_config_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("host: {size: 1GiB}\n")
    assert kvlake(capsys, "config", "check", str(file)) == (0, f"{file}: ok\n", "")
    file.write_text("host: {size: 1GiB}\nlogg: {}\n")
    code, out, err = kvlake(capsys, "config", "check", str(file))
    assert (code, out) == (2, "")
    assert f"{file}:2: logg: unknown setting; did you mean `log`?" in err


def test_config_show_masks_and_fills_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("store: {url: 's3://b', storage_options: {secret: hunter2}}\n")
    code, out, _ = kvlake(capsys, "config", "show", str(file))
    assert code == 0
    assert "hunter2" not in out
    assert "size: 8GiB" in out
    assert kvlake(capsys, "config", "show")[0] == 0


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = kvlake(capsys, "config", "schema")
    assert code == 0
    assert "host" in json.loads(out)["properties"]


def test_a_missing_package_is_reported_with_its_extra() -> None:
    script = (
        "import sys; from sidecar.cli import main\n"
        "sys.modules['pydantic'] = None\n"
        "sys.exit(main(['config', 'show']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert "pydantic is not installed" in done.stderr
    assert "pip install '.[sidecar]'" in done.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serv", "no command `serv`; did you mean `serve`?"),
        ("xyzzy", "no command `xyzzy`; the commands are run, serve,"),
        ("pool shw", "no command `shw`; did you mean `show`?"),
        ("run vllm serve m", "write -- before the engine's command: kvlake run -- vllm serve m"),
        ("run --config c vllm m", "kvlake run --config c -- vllm m"),
        ("doctor vllm serve m", "command: kvlake doctor -- vllm serve m"),
        ("gc", "the built-in defaults have no store; give the sidecar's own file"),
        ("keygen --out /nope/key", "No such file or directory; make its folder first"),
        ("status --timeout 0", "'0' is no number of seconds above 0"),
        ("status --timeout nan", "'nan' is no number of seconds above 0"),
        ("status --url=", "'' is no address; write http://HOST:PORT"),
        ("status --url localhost:9321", "'localhost:9321' is no address"),
        ("ls --limit -3", "'-3' is no whole number, 0 or more"),
        ("demo --model-only /proc/none/m", "--model-only /proc/none/m: No such file or directory"),
        ("status --colour", "unrecognized arguments: --colour"),
    ],
)
def test_a_wrong_argument_is_reported_with_a_remedy(
    capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    try:
        code: object = cli.main(line.split())
    except SystemExit as ended:
        # argparse ends the process.
        code = ended.code
    told = capsys.readouterr()
    assert (code, told.out) == (2, "")
    assert said in told.err


def test_a_configuration_without_a_store_is_reported_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("{}")
    code, _, err = kvlake(capsys, "gc", "--config", str(file))
    assert (code, f"{file} has no section store" in err) == (2, True), err


def test_a_public_key_contains_no_variable_syntax(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pairs = [(b"a$$b", b"first"), (b"a${b", b"second"), (b"ab", b"third")]
    monkeypatch.setattr("zmq.curve_keypair", lambda: pairs.pop(0))
    code, out, _ = kvlake(capsys, "keygen", "--out", str(tmp_path / "key"))
    assert (code, out.splitlines()[-1]) == (0, "As a CURVE key, its public part is ab")
    assert (tmp_path / "key").read_text().strip() == "third"


# --- run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "no command; write it after --"),
        (["run", "--"], "no command; write it after --"),
        (["run", "--", "no-such-program-here", "serve"], "no such command; is vLLM installed"),
        (["run", "--", sys.executable, "server.py"], "does not name vllm"),
        (["run", "--config", "no.yaml", "--", "vllm"], "no.yaml: no such file"),
    ],
)
def test_run_checks_its_arguments_before_it_starts_anything(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, _, err = kvlake(capsys, *arguments)
    assert code == 2
    assert said in err


def test_an_option_after_the_dashes_is_the_engines_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, _, err = kvlake(capsys, "run", "--", "no-such-program-here", "--config", "x", "--", "y")
    assert code == 2
    assert "no-such-program-here" in err


# --- status --------------------------------------------------------------------------------------

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
        "12.35 EUR a month: what it holds, and requests of this sidecar as in the last 1h1m",
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


# --- inspect -------------------------------------------------------------------------------------


@pytest.fixture
def image() -> bytes:
    layout = ChunkLayout(
        segment=Segment(first_layer=0, num_layers=2, first_head=0, num_heads=2),
        blocks_per_chunk=4,
        block_tokens=4,
        content_bytes=16,
        dtype="bfloat16",
        encoding="cuda",
    )
    template = SlotTemplate(layout, 4, bytes(32))
    slot = np.zeros(template.image_bytes, dtype=np.uint8)
    template.prepare(slot)
    template.payload(slot)[:] = 7
    template.seal(slot, KEY, bytes(32), np.arange(16, dtype="<i4").tobytes())
    return slot.tobytes()


def test_an_intact_file_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    file = tmp_path / "chunk.arrow"
    file.write_bytes(image)
    code, out, _ = kvlake(capsys, "inspect", str(file))
    assert code == 0
    assert f"{file}: intact" in out
    for text in (KEY.hex(), "none (starts a prompt)", "0-2.0-2", "bfloat16", "16 tokens: 0, 1, 2"):
        assert text in out, out
    assert "kv: extension<arrow.fixed_shape_tensor" in out

    code, out, _ = kvlake(capsys, "inspect", "--json", file.as_uri())
    (finding,) = json.loads(out)
    assert code == 0
    assert finding["intact"] is True
    assert finding["key"] == KEY.hex()
    assert finding["token_ids"] == list(range(16))


def test_a_file_in_a_bucket_is_read_with_the_access_settings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes, seaweed: S3Server
) -> None:
    async def put() -> None:
        tier = UrlObjects(f"{seaweed.url}/inspected", seaweed.access_at())
        await tier.write("chunk.arrow", np.frombuffer(image, dtype=np.uint8))
        await tier.close()

    anyio.run(put)
    config = tmp_path / "c.yaml"
    for backend in ("obstore", "fsspec"):
        config.write_text(
            yaml.safe_dump({"store": {"url": seaweed.url, "backend": backend, **seaweed.settings}})
        )
        there, gone = f"{seaweed.url}/inspected/chunk.arrow", f"{seaweed.url}/inspected/none.arrow"
        code, out, _ = kvlake(capsys, "inspect", "--config", str(config), there)
        assert (code, f"{there}: intact" in out) == (0, True), out
        code, out, _ = kvlake(capsys, "inspect", "--config", str(config), gone)
        assert (code, "no such object" in out) == (1, True), out


def test_a_damaged_file_is_reported_with_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    good, bad = tmp_path / "good.arrow", tmp_path / "bad.arrow"
    good.write_bytes(image)
    flipped = bytearray(image)
    flipped[4096] ^= 1
    bad.write_bytes(flipped)
    code, out, _ = kvlake(capsys, "inspect", str(good), str(bad))
    assert code == 1
    assert f"{good}: intact" in out
    assert f"{bad}: BAD: ImageChecksumMismatch" in out


def inspected(capsys: pytest.CaptureFixture[str], place: str) -> dict[str, Any]:
    (document,) = json.loads(kvlake(capsys, "inspect", "--json", place)[1])
    assert (document["intact"], document["columns"]) == (False, {})
    return dict(document)


def test_a_file_that_is_no_chunk_is_reported_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image: bytes
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("not arrow")
    (tmp_path / "cut").write_bytes(image[:5000])
    reasons = {
        name: inspected(capsys, str(tmp_path / name))["reason"]
        for name in ("empty", "text", "cut", "none", "")
    }
    assert reasons["empty"] == "the file is empty"
    assert "ImageHeaderMismatch" in reasons["text"]
    assert "ImageTruncated" in reasons["cut"]
    assert "No such file" in reasons["none"]
    assert "not a regular file" in reasons[""]
    assert "cannot be read" in inspected(capsys, "nosuch://x/y")["reason"]


def test_a_url_is_shown_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    finding = inspected(capsys, "memory://user:hunter2@x/none.arrow")
    assert "hunter2" not in finding["place"]


def test_objects_of_the_start_are_excluded_from_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection of garbage held the event loop up for 70 ms, whenever there was one."""
    from sidecar.app import ServerInfo

    frozen: list[int] = []

    async def serve(_: object, *, ready: Callable[[ServerInfo], None]) -> int:
        # The tests freeze, too.
        gc.unfreeze()
        ready(ServerInfo(1, tmp_path, "", lambda: None))
        frozen.append(gc.get_freeze_count())
        gc.unfreeze()
        return 0

    places.patch(monkeypatch, "serve", serve)
    assert cli.main(["serve"]) == 0
    assert frozen[0] > 10_000
