"""`kvlake` and its help, arguments and configuration, `kvlake pool`, and what `run` refuses."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sidecar import cli
from sidecar.config.model import load
from tests import places
from tests.sidecar.commands import kvlake
from tiers.pool.host_pool import HostPool

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
        ("status --url http://a:99999", "'http://a:99999' is no address: Port out of range"),
        ("status --url http://a:0", "'http://a:0' is no address: port 0"),
        ("status --url https://a", "'https://a': commands do not speak TLS; write http://"),
        ("top --url https://a", "'https://a': commands do not speak TLS; write http://"),
        ("status --url http://a:b", "'http://a:b' is no address: Port could not be cast"),
        ("du --config c --url http://a", "--url: not allowed with argument --config"),
        ("ls --url http://a --config c", "--config: not allowed with argument --url"),
        ("explain --last 0 --url http://a", "--last 0: give a number from 1 to 1,000"),
        ("explain --last 5000 --url http://a", "--last 5000: give a number from 1 to 1,000"),
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


def test_objects_of_the_start_are_excluded_from_garbage_collection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full collection of garbage held the event loop up for 70 ms, whenever there was one."""
    from sidecar.app import ServerInfo

    frozen: list[int] = []

    async def serve(_: object, *, ready: Callable[[ServerInfo], None], **_more: object) -> int:
        # The tests freeze, too.
        gc.unfreeze()
        ready(ServerInfo(1, tmp_path, "", lambda: None))
        frozen.append(gc.get_freeze_count())
        gc.unfreeze()
        return 0

    places.patch(monkeypatch, "serve", serve)
    assert cli.main(["serve"]) == 0
    assert frozen[0] > 10_000
