from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig

from sidecar.app import ANNOUNCE_SECONDS_MAX, HANGING_SECONDS_MAX, STORE_CLOSE_SECONDS_MAX
from sidecar.cli.console import CommandError
from sidecar.cli.run import DRAIN_GRACE_SECONDS, run, serve_command
from sidecar.cli.run.engine_command import (
    event_sockets,
    misfit,
    shown,
    transfer_config,
    with_connector,
    with_events,
)
from sidecar.config.model import Config, loads
from sidecar.config.sections import EventsSettings
from sidecar.exits import LEAVE_SECONDS_MAX

SOCKET = "/run/kvlake/a/attach.sock"


@pytest.fixture
def config() -> Config:
    return loads("runtime: {directory: /run/kvlake, name: a}")


def given(command: list[str]) -> dict[str, Any]:
    index = command.index("--kv-transfer-config")
    value: dict[str, Any] = json.loads(command[index + 1])
    return value


# --- the engine's command line -------------------------------------------------------------------


def test_the_connector_is_added_to_vllm_serve(config: Config) -> None:
    command = with_connector(["vllm", "serve", "M", "--port", "1"], config)
    assert command[:5] == ["vllm", "serve", "M", "--port", "1"]
    assert given(command) == {
        "kv_connector": "KVLakeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": SOCKET},
    }


@pytest.mark.parametrize(
    "command",
    [
        ["/opt/venv/bin/vllm", "serve", "M"],
        ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"],
        ["numactl", "-N0", "vllm", "serve", "M"],
    ],
)
def test_vllm_is_found_however_it_is_started(config: Config, command: list[str]) -> None:
    assert given(with_connector(command, config))["kv_connector"] == "KVLakeConnector"


def test_the_engines_own_events_are_enabled_if_events_are(config: Config) -> None:
    command = ["vllm", "serve", "M"]
    sockets = event_sockets(config.runtime.home)
    assert with_events(command, config, sockets) == command
    joining = config.model_copy(update={"events": EventsSettings(enabled=True)})
    *rest, option, value = with_events(command, joining, sockets)
    assert (rest, option) == (command, "--kv-events-config")
    wanted = json.loads(value)
    assert [wanted["endpoint"], wanted["replay_endpoint"]] == [f"ipc://{one}" for one in sockets]
    assert KVEventsConfig(**wanted).publisher == "zmq"


def test_engines_that_share_a_sidecar_have_sockets_of_their_own_for_events(config: Config) -> None:
    runtime = config.runtime
    paths = [path for _ in range(2) for path in event_sockets(runtime.home)]
    assert len(set(paths)) == 4
    assert {path.parent for path in paths} == {runtime.home}
    assert max(len(path.name) for path in paths) <= len(runtime.attach_path.name)


@pytest.mark.parametrize(
    "own", [["--kv-events-config", "{}"], ["--kv_events_config={}"], ["--data-parallel-size=2"]]
)
def test_the_users_own_event_options_are_kept(config: Config, own: list[str]) -> None:
    joining = config.model_copy(update={"events": EventsSettings(enabled=True)})
    sockets = event_sockets(config.runtime.home)
    assert with_events(["vllm", "serve", *own], joining, sockets) == ["vllm", "serve", *own]


def test_chunk_tokens_are_passed_if_the_file_has_them() -> None:
    config = loads("chunk: {tokens: 128}")
    extra = transfer_config(config)["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert extra["chunk_tokens"] == 128
    # So that a message names what the operator wrote, and where.
    assert extra["chunk_tokens_from"] == "chunk.tokens"
    own = json.dumps({"kv_connector_extra_config": {"chunk_tokens": 64}})
    merged = given(with_connector(["vllm", "serve", "M", "--kv-transfer-config", own], config))
    assert merged["kv_connector_extra_config"] == {"socket": extra["socket"], "chunk_tokens": 64}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--block-size", "32"],
            "^chunk.tokens=100 is not a multiple of --block-size 32: .* 96 or ",
        ),
        (["--block_size=64"], "not a multiple of --block-size 64: .* choose 64 or 128"),
        (["--block-size", "50", "--block-size=128"], "--block-size 128: .* choose 128, or leave"),
        ([], "not a multiple of 16, as vLLM's block sizes are: .* choose 96 or 112"),
        (
            ["--kv-transfer-config", '{"kv_connector_extra_config": {"chunk_tokens": 72}}'],
            r"kv_connector_extra_config\['chunk_tokens'\]=72 is not a multiple of 16.* 64 or 80",
        ),
    ],
)
def test_chunks_that_do_not_fit_the_engines_blocks_are_refused(words: list[str], said: str) -> None:
    config = loads("chunk: {tokens: 100}")
    assert re.search(said, misfit(with_connector(["vllm", "serve", "M", *words], config)))


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        ("{tokens: 96}", ["--block-size", "32"]),
        ("{tokens: 96}", []),
        # What it is then only vLLM knows.
        ("{tokens: 100}", ["--config", "vllm.yaml"]),
        ("{tokens: 100}", ["--block-size", "x"]),
        ("{tokens: 100}", ["--block-size=0"]),
        ("{tokens: 100}", ["--block-size", "50"]),
        ("{}", ["--block-size", "48"]),
    ],
)
def test_chunks_that_fit_or_may_fit_are_not_refused(chunk: str, words: list[str]) -> None:
    config = loads(f"chunk: {chunk}")
    assert misfit(with_connector(["vllm", "serve", "M", *words], config)) == ""


@pytest.mark.promise("uncached-engines")
def test_nothing_is_started_if_chunks_do_not_fit(tmp_path: Path) -> None:
    config = loads("chunk: {tokens: 100}")
    vllm = tmp_path / "vllm"
    vllm.write_text("#!/bin/sh\n")
    vllm.chmod(0o755)
    with pytest.raises(CommandError, match="is not a multiple of --block-size 32"):
        run(config, ["/nowhere/kvlake"], [str(vllm), "serve", "M", "--block-size", "32"])


def test_another_program_is_refused_with_a_remedy(config: Config) -> None:
    with pytest.raises(CommandError, match=r"does not name vllm.*kvlake serve.*KVLakeConnector"):
        with_connector(["python", "server.py"], config)


@pytest.mark.promise("secrets-commands")
@pytest.mark.parametrize(
    ("given", "logged"),
    [
        ("--api-key sk-1 sk-2 --port 1", "--api-key '***' '***' --port 1"),
        ("--api_key=sk-1 --hf-token sk-1", "'--api_key=***' --hf-token '***'"),
        ("--max-num-batched-tokens 8192", "--max-num-batched-tokens 8192"),
        ("--ssl-keyfile /key.pem", "--ssl-keyfile /key.pem"),
    ],
)
def test_secrets_of_the_engine_are_not_logged(given: str, logged: str) -> None:
    assert shown(["vllm", "serve", "M", *given.split()]) == f"vllm serve M {logged}"
    variable = shown(["srun", "--export=A=1,HF_TOKEN=sk-1,B=2", "env", "VLLM_API_KEY=sk-1", "key"])
    assert variable == "srun '--export=A=1,HF_TOKEN=***,B=2' env 'VLLM_API_KEY=***' key"


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv_transfer_config"])
def test_the_users_own_connector_options_are_kept(config: Config, option: str) -> None:
    own = json.dumps(
        {
            "kv_connector": "KVLakeConnector",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"attach_timeout": 3},
        }
    )
    merged = json.loads(with_connector(["vllm", "serve", option, own], config)[3])
    assert merged["kv_role"] == "kv_both"
    assert merged["kv_load_failure_policy"] == "fail"
    assert merged["kv_connector_extra_config"] == {"socket": SOCKET, "attach_timeout": 3}

    joined = with_connector(["vllm", "serve", f"{option}={own}", "M"], config)
    assert json.loads(joined[2].partition("=")[2]) == merged
    assert joined[3:] == ["M"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "MultiConnector"),
        (["--kv-transfer-config", "{"], "is not JSON"),
        (["--kv-transfer-config=[]"], "is not a JSON object"),
        (["--kv-transfer-config"], "has no value"),
        (["--kv-transfer-config.kv_connector", "X"], "give the whole of it as JSON"),
        (
            ["--kv-transfer-config", '{"kv_connector_extra_config": {"socket": "/x"}}'],
            "leave the socket out",
        ),
        (["--kv-transfer-config", '{"kv_connector_extra_config": 3}'], "must be an object"),
    ],
)
def test_contradicting_options_are_refused_with_a_remedy(
    config: Config, words: list[str], said: str
) -> None:
    with pytest.raises(CommandError, match=said):
        with_connector(["vllm", "serve", "M", *words], config)


def test_the_sidecar_is_not_imported_from_the_current_folder() -> None:
    assert serve_command(Path("c.yaml"))[:2] == [sys.executable, "-P"]
    assert serve_command(Path("c.yaml"))[-2:] == ["--config", "c.yaml"]


# --- the two processes ---------------------------------------------------------------------------

# Both children append what happens to them to one file, which the tests read.
CHILD = """
import os, signal, sys, time
PARENT = os.getppid()
def note(text):
    with open(LOG, "a") as log:
        log.write(text + "\\n")
"""
SIDECAR = """
SOCKET = os.path.join(os.path.dirname(LOG), "a", "attach.sock")
def end(number, frame):
    os.remove(SOCKET)  # fails for a second signal
    os.close(fd)
    while DRAINS and os.getppid() == PARENT and "engine got SIGTERM" not in open(LOG).read():
        time.sleep(0.01)
    time.sleep(DRAINS)
    note("sidecar drained")
    sys.exit(0)
fd = int(sys.argv[sys.argv.index("--ready-fd") + 1])
os.makedirs(os.path.dirname(SOCKET), exist_ok=True)
open(SOCKET, "w").close()
signal.signal(signal.SIGTERM, end)
note(f"sidecar {os.getpid()} session {os.getsid(0) == os.getpid()}")
if READY:
    os.write(fd, b"1")
if CODE is not None:
    sys.exit(CODE)
while os.getppid() == PARENT:
    time.sleep(0.05)
"""
ENGINE = """
def got(number, frame):
    note(f"engine got {signal.Signals(number).name}")
    if number == signal.SIGTERM:
        sys.exit(7)
signal.signal(signal.SIGTERM, got)
signal.signal(signal.SIGINT, got)
signal.signal(signal.SIGUSR2, got)
note("engine " + " ".join(sys.argv[1:]))
if CODE is not None:
    sys.exit(CODE)
while os.getppid() == PARENT:
    time.sleep(0.05)
"""
# The parent of the tests may ignore a signal, as a shell has what it starts in the background do
# with SIGINT: what is ignored here is what the test says.
LAUNCH = """
import os, signal, sys
from sidecar.config.model import loads
from sidecar.cli.console import CommandError
from sidecar.cli.run import FORWARDED, run
from tests import places
IGNORED = [int(number) for number in sys.argv.pop(1).split()]
for number in FORWARDED:
    signal.signal(number, signal.SIG_IGN if number in IGNORED else signal.SIG_DFL)
places.replace("RESTART_SECONDS_FIRST", 0.05)
config = loads(f"runtime: {{directory: {os.path.dirname(sys.argv[1])}, name: a}}\\n"
               "host: {prefault: false}\\nlimits: {drain_seconds_max: 5s}")
try:
    sys.exit(run(config, sys.argv[1:3], sys.argv[3:]))
except CommandError as error:
    sys.exit(f"refused: {error}")
"""


class Launched:
    """One `kvlake run` of a stand-in engine beside a stand-in sidecar."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.python = directory / "python"
        """What the sidecar is started with; without it, it cannot be."""
        self._errors = directory / "errors"
        self.process: subprocess.Popen[bytes] | None = None

    def start(
        self,
        *,
        engine: int | None = None,
        sidecar: int | None = None,
        ready: bool = True,
        drains: float = 0.0,
        ignored: tuple[int, ...] = (),
    ) -> None:
        self._script("sidecar.py", SIDECAR, CODE=sidecar, READY=ready, DRAINS=drains)
        self._script("engine.py", ENGINE, CODE=engine)
        if not self.python.exists():
            self.python.symlink_to(sys.executable)
        # An executable called vllm, as the real one is.
        vllm = self.directory / "vllm"
        vllm.write_text(f'#!/bin/sh\nexec {sys.executable} {self.directory}/engine.py "$@"\n')
        vllm.chmod(0o755)
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", LAUNCH, " ".join(str(int(n)) for n in ignored)),
                    *(str(self.python), str(self.directory / "sidecar.py")),
                    *(str(vllm), "serve"),
                ],
                stderr=errors,
            )

    def _script(self, name: str, text: str, **values: object) -> None:
        head = "".join(f"{key} = {value!r}\n" for key, value in values.items())
        path = self.directory / name
        path.write_text(f"LOG = {str(self.log)!r}\n{head}{CHILD}{textwrap.dedent(text)}")

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def errors(self) -> str:
        return self._errors.read_text()

    def wait_for(self, happened: Callable[[list[str]], bool]) -> list[str]:
        for _ in range(600):
            if happened(self.lines()):
                return self.lines()
            time.sleep(0.05)
        raise AssertionError(f"did not happen; the log is {self.lines()}")

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        assert self.process is not None
        code = self.process.wait(timeout=60)
        return code, self.errors()

    def sidecar_pids(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines() if " session " in line]


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    process = launched.process
    if process is not None and process.poll() is None:
        process.kill()
        process.wait()


def started(lines: list[str]) -> bool:
    return any(line.startswith("engine serve") for line in lines)


def test_the_sidecar_starts_first_and_drains_last(launched: Launched) -> None:
    launched.start(engine=3)
    code, errors = launched.end()
    assert code == 3, errors
    first, second, last = launched.lines()
    assert first.endswith("session True")
    assert second.startswith("engine serve --kv-transfer-config")
    assert last == "sidecar drained"


def test_signals_go_to_the_engine_and_its_exit_code_is_returned(launched: Launched) -> None:
    launched.start()
    launched.wait_for(started)
    launched.signal(signal.SIGINT)
    launched.wait_for(lambda lines: "engine got SIGINT" in lines)
    launched.signal(signal.SIGTERM)
    code, errors = launched.end()
    assert code == 7, errors
    assert launched.lines()[-2:] == ["engine got SIGTERM", "sidecar drained"]


def test_a_sidecar_that_drains_already_gets_no_second_signal(launched: Launched) -> None:
    """As where systemd signals every process of a unit: a second one ends the drain at once."""
    launched.start(drains=1.0)
    launched.wait_for(started)
    os.kill(launched.sidecar_pids()[0], signal.SIGTERM)
    launched.wait_for(lambda _: not (launched.directory / "a" / "attach.sock").exists())
    launched.signal(signal.SIGTERM)
    code, errors = launched.end()
    assert code == 7, errors
    assert launched.lines()[-2:] == ["engine got SIGTERM", "sidecar drained"]


def test_the_grace_after_a_drain_covers_the_sidecars_own_end() -> None:
    hanging = ANNOUNCE_SECONDS_MAX + HANGING_SECONDS_MAX
    closing = STORE_CLOSE_SECONDS_MAX + LEAVE_SECONDS_MAX
    assert hanging + closing < DRAIN_GRACE_SECONDS


def test_a_sidecar_that_died_is_restarted_while_the_engine_runs(launched: Launched) -> None:
    launched.start()
    launched.wait_for(started)
    os.kill(launched.sidecar_pids()[0], signal.SIGKILL)
    launched.wait_for(lambda lines: sum(" session " in line for line in lines) == 2)
    launched.signal(signal.SIGTERM)
    code, errors = launched.end()
    assert code == 7
    assert "the sidecar ended (SIGKILL); the engine continues without a cache" in errors
    assert launched.lines()[-1] == "sidecar drained"


def test_a_sidecar_that_cannot_be_restarted_does_not_end_the_engine(launched: Launched) -> None:
    launched.start()
    launched.wait_for(started)
    launched.python.unlink()
    os.kill(launched.sidecar_pids()[0], signal.SIGKILL)
    launched.signal(signal.SIGINT)
    launched.wait_for(lambda lines: "engine got SIGINT" in lines)
    launched.wait_for(lambda _: "the sidecar cannot be started (" in launched.errors())
    launched.python.symlink_to(sys.executable)
    launched.wait_for(lambda lines: sum(" session " in line for line in lines) == 2)
    launched.signal(signal.SIGTERM)
    code, errors = launched.end()
    assert code == 7, errors
    assert "the sidecar cannot be started ([Errno 2] No such file" in errors


def test_a_sidecar_that_cannot_be_started_is_reported(launched: Launched) -> None:
    launched.python = Path(os.devnull)
    launched.start()
    code, errors = launched.end()
    assert code == 1
    assert "refused: the sidecar cannot be started: [Errno 13]" in errors


def test_simultaneous_signals_all_go_to_the_engine(launched: Launched) -> None:
    launched.start()
    launched.wait_for(started)
    launched.signal(signal.SIGSTOP)
    launched.signal(signal.SIGINT)
    launched.signal(signal.SIGUSR2)
    launched.signal(signal.SIGCONT)
    launched.wait_for(lambda lines: {"engine got SIGINT", "engine got SIGUSR2"} <= {*lines})
    launched.signal(signal.SIGTERM)
    assert launched.end()[0] == 7


def test_ignored_signals_stay_ignored_as_under_nohup(launched: Launched) -> None:
    launched.start(ignored=(signal.SIGHUP, signal.SIGUSR1))
    launched.wait_for(started)
    launched.signal(signal.SIGHUP)
    launched.signal(signal.SIGUSR1)
    launched.signal(signal.SIGINT)
    launched.wait_for(lambda lines: "engine got SIGINT" in lines)
    launched.signal(signal.SIGTERM)
    assert launched.end()[0] == 7


def test_an_engine_killed_by_a_signal_has_the_exit_code_of_a_shell(launched: Launched) -> None:
    launched.start()
    launched.wait_for(started)
    launched.signal(signal.SIGUSR1)
    assert launched.end()[0] == 128 + signal.SIGUSR1


def test_no_engine_is_started_without_a_ready_sidecar(launched: Launched) -> None:
    launched.start(sidecar=2, ready=False)
    code, errors = launched.end()
    assert code == 1
    assert "refused: the sidecar ended with code 2" in errors
    assert not started(launched.lines())


def test_a_signal_before_the_engine_starts_ends_the_command(launched: Launched) -> None:
    launched.start(ready=False)
    launched.wait_for(lambda lines: bool(lines))
    launched.signal(signal.SIGINT)
    code, errors = launched.end()
    assert code == 128 + signal.SIGINT, errors
    assert launched.lines()[1:] == ["sidecar drained"]
