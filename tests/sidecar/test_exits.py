"""Exit codes of the real process, and their table in the docs."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.exits import Exit
from tests.sidecar.client import Worker, key_of

REPOSITORY = Path(__file__).parents[2]


def config_of(directory: Path, **more: dict[str, Any]) -> Path:
    (directory / "pool").mkdir(exist_ok=True)
    values: dict[str, Any] = {
        "runtime": {"directory": str(directory / "run")},
        "host": {"size": "8MiB", "directory": str(directory / "pool")},
        "http": {"port": 0},
    }
    for name, section in more.items():
        values[name] = {**values.get(name, {}), **section}
    file = directory / f"c{len(list(directory.glob('c*.yaml')))}.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


class Process:
    def __init__(self, config: Path, patch: str = "") -> None:
        reader, writer = os.pipe()
        script = textwrap.dedent(patch) + textwrap.dedent("""
            import sys
            from sidecar import cli
            sys.exit(cli.main(sys.argv[1:]))
        """)
        arguments = ["serve", "--config", str(config), "--ready-fd", str(writer)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *arguments],
            pass_fds=(writer,),
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )
        os.close(writer)
        with os.fdopen(reader) as ready:
            self.told = ready.readline()

    def end(self) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def test_a_clean_stop_is_0(short_directory: Path) -> None:
    one = Process(config_of(short_directory))
    one.process.send_signal(signal.SIGTERM)
    assert one.end()[0] == Exit.OK


def test_a_bad_configuration_is_2(short_directory: Path) -> None:
    code, errors = Process(config_of(short_directory, host={"sise": 1})).end()
    assert (code, "did you mean `size`" in errors) == (Exit.USAGE, True)


@pytest.mark.parametrize("what", ["port", "lock", "pool", "room", "directory"])
def test_a_failed_start_is_3(short_directory: Path, what: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = Process(config_of(short_directory)) if what in ("lock", "pool") else None
        config = {
            "port": {"http": {"port": port}},
            "lock": {},
            "pool": {"runtime": {"directory": str(short_directory / "other")}},
            "room": {"host": {"size": "900TiB"}},
            "directory": {"runtime": {"directory": "/proc/kvlake"}},
        }[what]
        code, errors = Process(config_of(short_directory, **config)).end()
        assert code == Exit.START, errors
        assert errors.startswith("kvlake: "), "a sentence, not a traceback"
        if first is not None:
            first.process.send_signal(signal.SIGTERM)
            assert first.end()[0] == Exit.OK


STUCK = """
    from sidecar import storage
    from tiers.wrap import Faulty, FaultRates
    whole = storage.Limited
    storage.Limited = lambda tier, **limits: whole(
        Faulty(tier, seed=1, rates=FaultRates(stall=1.0, stall_seconds=3600)), **limits
    )
"""


def storing(short_directory: Path, drain: str) -> Process:
    config = config_of(
        short_directory,
        store={"url": f"file://{short_directory}/bucket"},
        limits={"drain_seconds_max": drain},
    )
    return Process(config, STUCK)


def test_a_drain_with_loss_is_4(short_directory: Path) -> None:
    one = storing(short_directory, "200ms")
    with Worker(short_directory / "run" / "default" / "attach.sock") as worker:
        assert worker.store(1, key_of(1), [0]).name == "OK"
        one.process.send_signal(signal.SIGTERM)
        code, errors = one.end()
    assert code == Exit.LOSS, errors
    assert "writes_lost=1" in errors


def test_a_second_signal_is_5(short_directory: Path) -> None:
    one = storing(short_directory, "600s")
    path = short_directory / "run" / "default" / "attach.sock"
    with Worker(path) as worker:
        assert worker.store(1, key_of(1), [0]).name == "OK"
        one.process.send_signal(signal.SIGTERM)
        while path.exists():
            assert one.process.poll() is None
        one.process.send_signal(signal.SIGTERM)
        assert one.end()[0] == Exit.AT_ONCE


def test_a_bug_is_70_with_its_traceback(short_directory: Path) -> None:
    patch = """
        from sidecar import hub
        hub.Hub.connect = lambda *_: 1 / 0
    """
    code, errors = Process(config_of(short_directory), patch).end()
    assert code == Exit.INTERNAL
    assert "ZeroDivisionError" in errors
    assert "please report it" in errors


def test_the_docs_have_every_code() -> None:
    table = (REPOSITORY / "docs" / "operations.md").read_text()
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert rows == {int(code) for code in Exit}
