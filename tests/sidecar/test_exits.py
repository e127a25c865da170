"""Exit codes of the real process, that it ends at all, and their table in the docs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.exits import LEAVE_SECONDS_MAX, Exit
from tests import places
from tests.sidecar.client import Worker, key_of
from tests.sidecar.test_lives import wait_until


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


def script_of(patch: str) -> str:
    return textwrap.dedent(patch) + textwrap.dedent("""
        import sys
        from sidecar.cli import main
        sys.exit(main())
    """)


class Process:
    def __init__(self, config: Path, patch: str = "") -> None:
        reader, writer = os.pipe()
        arguments = ["serve", "--config", str(config), "--ready-fd", str(writer)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", script_of(patch), *arguments],
            pass_fds=(writer,),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=places.ROOT,
        )
        os.close(writer)
        with os.fdopen(reader) as ready:
            self.told = ready.readline()

    def end(self, seconds_max: float = 60) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=seconds_max)
        return self.process.returncode, errors

    def wait_for_store(self, state: str) -> None:
        url = f"{json.loads(self.told)['http_url']}/status"
        deadline = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(url, timeout=30) as answer:
                store = json.load(answer)["tiers"]["store"]
            if store["state"] == state:
                return
            assert time.monotonic() < deadline, store
            time.sleep(0.05)


def test_a_clean_stop_is_0(short_directory: Path) -> None:
    one = Process(config_of(short_directory))
    one.process.send_signal(signal.SIGTERM)
    assert one.end()[0] == Exit.OK


def test_a_bad_configuration_is_2(short_directory: Path) -> None:
    code, errors = Process(config_of(short_directory, host={"sise": 1})).end()
    assert (code, "did you mean `size`" in errors) == (Exit.USAGE, True)


def test_a_hangup_while_it_starts_does_not_end_it(short_directory: Path) -> None:
    patch = """
        import os, signal
        from tests import places
        open_pool = places.find("open_pool").value

        def hung_up(config, stop):
            os.kill(os.getpid(), signal.SIGHUP)
            return open_pool(config, stop)

        places.replace("open_pool", hung_up)
    """
    one = Process(config_of(short_directory), patch)
    assert json.loads(one.told)["attach"]
    one.process.send_signal(signal.SIGTERM)
    assert one.end()[0] == Exit.OK


def signalled(place: str, more: str = "pass") -> str:
    """Has the sidecar signal itself while its pool is opened, or filled, and then do `more`."""
    return f"""
        import os, signal, time
        from tests import places
        open_pool, populate = places.find("open_pool").value, places.find("populate").value

        def opened(config, stop):
            def signal_once():
                if not stop.is_set():
                    os.kill(os.getpid(), signal.SIGTERM)
                    assert stop.wait(60)
                    {more}

            def filled(piece, **options):
                signal_once()
                return populate(piece, **options)

            if {place == "fill"}:
                places.replace("populate", filled)
            else:
                signal_once()
            return open_pool(config, stop)

        places.replace("open_pool", opened)
    """


@pytest.mark.parametrize("place", ["fill", "open"])
def test_a_stop_while_memory_is_made_ready_leaves_none(short_directory: Path, place: str) -> None:
    config = config_of(short_directory, host={"size": "200MiB", "prefault": place == "fill"})
    one = Process(config, signalled(place))
    code, errors = one.end()
    assert (code, one.told) == (Exit.OK, ""), errors
    assert "stopping before it serves" in errors
    assert list((short_directory / "pool").iterdir()) == []
    assert not (short_directory / "run" / "default" / "attach.sock").exists()


def test_a_stop_while_it_starts_is_announced(short_directory: Path) -> None:
    """So that `kvlake run` sends no second signal, which would leave the file of the pool."""
    one = Process(config_of(short_directory), signalled("fill", "time.sleep(600)"))
    assert (one.told, one.process.poll()) == ("", None)
    one.process.send_signal(signal.SIGTERM)
    assert one.end()[0] == Exit.AT_ONCE


def test_a_second_signal_ends_a_start_at_once(short_directory: Path) -> None:
    more = "os.kill(os.getpid(), signal.SIGTERM); time.sleep(600)"
    assert Process(config_of(short_directory), signalled("fill", more)).end()[0] == Exit.AT_ONCE


def test_a_start_that_hangs_does_not_outlive_its_stop(short_directory: Path) -> None:
    hang = "time.sleep(600)"
    patch = (
        signalled("fill", hang)
        + """
        places.replace("HANGING_SECONDS_MAX", 0.2)
    """
    )
    code, errors = Process(config_of(short_directory), patch).end()
    assert code == Exit.LOSS
    assert "host memory is not made ready: the sidecar ends without it" in errors


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
        assert errors.splitlines()[-1].startswith("kvlake: "), "a sentence, not a traceback"
        if first is not None:
            first.process.send_signal(signal.SIGTERM)
            assert first.end()[0] == Exit.OK


STUCK = """
    from tests import places
    from tests.faulty_tier import Faulty, FaultRates
    from tiers.store.middleware import ConcurrencyLimited
    places.replace("ConcurrencyLimited", lambda tier, **limits: ConcurrencyLimited(
        Faulty(tier, seed=1, rates=FaultRates(stall=1.0, stall_seconds=3600)), **limits
    ))
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
    assert "writes_left=1 memory=keep" in errors


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


WRITE_HANGS = """
    import os, time
    from tests import places

    places.replace("ANNOUNCE_SECONDS_MAX", 0.2)
    places.replace("HANGING_SECONDS_MAX", 60.0)
    os.replace = lambda *paths: time.sleep(3600)
"""
"""In place of a mount whose server is gone: no thread that writes to the folder comes back."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_is_5_also_after_the_drain(
    short_directory: Path, number: signal.Signals
) -> None:
    config = config_of(
        short_directory,
        host={"after_stop": "remove"},
        store={"url": f"file://{short_directory}/bucket"},
        limits={"drain_seconds_max": "200ms"},
    )
    one = Process(config, WRITE_HANGS)
    run = short_directory / "run" / "default"
    with Worker(run / "attach.sock") as worker:
        assert worker.store(1, key_of(1), [0]).name == "OK"
        one.process.send_signal(signal.SIGTERM)
        # Written in the last step of the drain. From then on it waits for the thread.
        wait_until((run / "last-stop-lost").exists)
        one.process.send_signal(signal.SIGHUP)
        assert one.process.stderr is not None
        assert any("ignored: restart to read" in line for line in one.process.stderr)
        one.process.send_signal(number)
        code, errors = one.end()
    assert code == Exit.AT_ONCE, errors
    assert list((short_directory / "pool").iterdir()) == []
    assert not list(run.glob("*.sock"))


def test_a_bug_is_70_with_its_traceback(short_directory: Path) -> None:
    patch = """
        from tests import places
        places.replace("Dispatcher.feed", lambda *_: 1 / 0)
    """
    code, errors = Process(config_of(short_directory), patch).end()
    assert code == Exit.INTERNAL
    assert "ZeroDivisionError" in errors
    assert "please report it" in errors


HUNG = """
    import os, time
    whole = os.scandir

    def scandir(path):
        above, bucket, _ = str(path).partition("bucket")
        if not bucket:
            return whole(path)
        open(f"{above}hangs", "w").close()
        time.sleep(3600)

    os.scandir = scandir
"""
"""In place of a mount whose server is gone, in a system call that nothing interrupts.

A file beside the bucket says that one does not come back.
"""


def hung(short_directory: Path) -> Path:
    (short_directory / "bucket").mkdir()
    quick = {"deadline_seconds_max": "500ms", "refresh_seconds": "100ms"}
    return config_of(short_directory, store={"url": f"file://{short_directory}/bucket", **quick})


def test_a_listing_that_never_comes_back_keeps_no_sidecar(short_directory: Path) -> None:
    one = Process(hung(short_directory), HUNG)
    try:
        # A worker, for there is nothing to list without an engine.
        with Worker(short_directory / "run" / "default" / "attach.sock"):
            one.wait_for_store("unwell")
            # It may be so for being slow alone.
            wait_until((short_directory / "hangs").exists)
            one.process.send_signal(signal.SIGTERM)
        code, errors = one.end()
    finally:
        one.process.kill()
        one.process.wait()
    assert code == Exit.OK, errors
    assert "whose calls do not come back" in errors
    assert not list((short_directory / "run").glob("**/*.sock"))


def test_a_listing_that_never_comes_back_keeps_no_command(short_directory: Path) -> None:
    command = [sys.executable, "-c", script_of(HUNG), "du", "--config", str(hung(short_directory))]
    done = subprocess.run(command, capture_output=True, timeout=60, text=True, cwd=places.ROOT)
    assert done.returncode == Exit.NO
    assert done.stderr.startswith("kvlake: "), "a sentence, not a traceback"
    assert "whose calls do not come back" in done.stderr


LEAVING = """
    import atexit, sys, time
    from concurrent.futures import ThreadPoolExecutor
    from sidecar.exits import leave
    from tests import places

    atexit.register(print, ", and ended in order", end="")
    threads = ThreadPoolExecutor(1)
    threads.submit(time.sleep, float(sys.argv[1]))
    print("told", end="")
    places.replace("LEAVE_SECONDS_MAX", float(sys.argv[2]))
    sys.exit(leave(7))
"""


@pytest.mark.parametrize(
    ("seconds", "patience", "told"),
    [(0, 3600, "told, and ended in order"), (3600, LEAVE_SECONDS_MAX, "told")],
    ids=["idle", "hung"],
)
def test_threads_of_an_executor_that_hang_are_left(
    seconds: float, patience: float, told: str
) -> None:
    command = [sys.executable, "-c", textwrap.dedent(LEAVING), str(seconds), str(patience)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, text=True, cwd=places.ROOT)
    assert (done.returncode, done.stdout) == (7, told)


def test_the_docs_have_every_code() -> None:
    table = places.page("cli.md").read_text()
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    assert rows == {int(code) for code in Exit}
