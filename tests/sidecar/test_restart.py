"""Real sidecars that end, by any means, and the next one that starts on what they left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import cli
from sidecar.core.engine import Engine
from sidecar.protocol import Outcome, StoreJob
from tests import places
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.client import (
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.kv.index import FLAG_HOST

pytestmark = pytest.mark.usefixtures("warm_sidecars")

SIZE_BYTES = 8 << 20
ENDINGS = pytest.mark.parametrize(
    "ending",
    [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)],
)


class Lives:
    """Sidecars that follow each other, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "pool").mkdir()
        self.process: SidecarProcess | None = None

    def begin(self, program: Sequence[str] = (), **sections: dict[str, Any]) -> Path:
        """Start one; where to attach."""
        host = {
            "size": SIZE_BYTES,
            "directory": str(self.directory / "pool"),
            "after_stop": "keep",
            **sections.pop("host", {}),
        }
        self.process = SidecarProcess(
            self.directory, {"host": host, **sections}, program=program or places.program()
        )
        self.process.start()
        return Path(self.process.socket)

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        assert self.process.process is not None
        self.process.process.send_signal(how)
        code = self.process.process.wait(20)
        assert code == (-how if how is signal.SIGKILL else 0), self.log()

    def status(self) -> dict[str, Any]:
        assert self.process is not None
        return self.process.status()

    def log(self) -> str:
        return (self.directory / "sidecar.log").read_text()

    @property
    def pool(self) -> Path:
        (path,) = (self.directory / "pool").glob("*.pool")
        return path

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "pool").iterdir())


@pytest.fixture
def lives(short_directory: Path) -> Iterator[Lives]:
    lives = Lives(short_directory)
    yield lives
    if lives.process is not None:
        lives.process.kill()


def fill(path: Path, count: int = 4) -> list[list[bytes]]:
    """Store chunks 0 to `count`, the last one partial; what is in their blocks."""
    with Worker(path) as worker:
        content = worker.fill(range(4 * count), seed=7)
        for number in range(count):
            blocks = range(4 * number, 4 * number + (4 if number < count - 1 else 2))
            assert worker.store(number, key_of(number), blocks) is Outcome.OK
    return [content[4 * number : 4 * number + 4] for number in range(count)]


# --- warm ----------------------------------------------------------------------------------------


@ENDINGS
def test_what_was_stored_is_loaded_from_the_next_life(lives: Lives, ending: signal.Signals) -> None:
    content = fill(lives.begin())
    lives.end(ending)
    assert len(lives.left()) == 2
    path = lives.begin()
    assert lives.status()["tiers"]["host"]["slots_unclaimed"] == 4
    with Scheduler(path) as scheduler, Worker(path) as worker:
        keys = [key_of(number) for number in range(4)]
        assert scheduler.flags(*keys) == [FLAG_HOST] * 4
        worker.poison()
        for number, key in enumerate(keys):
            length = 4 if number < 3 else 2
            blocks = list(range(8 * number, 8 * number + length))
            assert worker.load(number, key, blocks) is Outcome.OK
            assert [worker.read(block) for block in blocks] == content[number][:length]
        # Old and new live together, and the next life has both.
        worker.fill([0], seed=9)
        assert worker.store(9, key_of("new"), [0]) is Outcome.OK
    status = lives.status()
    assert status["tiers"]["host"]["unclaimed_bytes"] == 0
    assert status["counters"]["chunks_restored"] == 4
    lives.end(ending)
    path = lives.begin()
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(*keys, key_of("new")) == [FLAG_HOST] * 5
        assert worker.load(1, key_of("new"), [5]) is Outcome.OK


def test_two_ranks_come_back_as_one_chunk(lives: Lives) -> None:
    cut: dict[str, Any] = {"world_size": 2, "topology": "tp2.pp1"}
    path = lives.begin()
    with Worker(path, rank=0, **cut) as first, Worker(path, rank=1, **cut) as second:
        contents = [worker.fill(range(4), seed=3) for worker in (first, second)]
        for worker in (first, second):
            assert worker.store(1, key_of("both"), range(4)) is Outcome.OK
        assert first.store(2, key_of("half"), range(4)) is Outcome.OK
    lives.end()
    path = lives.begin()
    with (
        Scheduler(path, **cut) as scheduler,
        Worker(path, rank=1, **cut) as second,
        Worker(path, rank=0, **cut) as first,
    ):
        assert scheduler.flags(key_of("both"), key_of("half")) == [FLAG_HOST, 0]
        for worker, content in zip((first, second), contents, strict=True):
            assert worker.load(3, key_of("both"), [9, 8, 7, 6]) is Outcome.OK
            assert [worker.read(block) for block in (9, 8, 7, 6)] == content


def test_store_that_was_under_way_is_not_there(lives: Lives) -> None:
    path = lives.begin()
    with Worker(path) as worker:
        assert worker.store(1, key_of("whole"), [0, 1]) is Outcome.OK
        worker.submit(stores=[StoreJob(2, [worker.chunk(key_of("begun"), [2])])], fence=9)
        assert lives.process is not None
        lives.process.wait("the store is queued", lambda now: now["pending"]["copies_running"] == 1)
        lives.end()
    path = lives.begin()
    with Worker(path), Scheduler(path) as scheduler:
        assert scheduler.flags(key_of("whole"), key_of("begun")) == [FLAG_HOST, 0]
    lives.end(signal.SIGTERM)


def test_many_chunks_come_back_over_many_turns(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "ADOPTED_MAX", 1)
    keys = [key_of("many", number) for number in range(50)]
    config = config_in(short_directory, host={"after_stop": "keep"})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        chunks = [worker.chunk(key, [number % 64]) for number, key in enumerate(keys)]
        worker.submit(stores=[StoreJob(1, chunks)])
        assert worker.outcome(1) is Outcome.OK
    with (
        RunningSidecar(config) as sidecar,
        Scheduler(sidecar.path) as scheduler,
        Worker(sidecar.path) as worker,
    ):
        status = sidecar.wait_until(lambda now: now["counters"]["chunks_restored"] == 50)
        assert status["counters"]["slots_restored"] == 50
        assert scheduler.flags(*keys) == [FLAG_HOST] * 50
        assert worker.load(1, keys[-1], [7]) is Outcome.OK


# Whether a chunk's short time is over before the kill is the machine's business.
FORGETS_NOTHING = """
from sidecar.cli import main
from tests import places
places.replace("HostTier.expire", lambda *_: None)
main()
"""


@pytest.mark.promise("ttl")
def test_what_is_to_be_forgotten_is_so_in_the_next_life_too(lives: Lives) -> None:
    names = ("short", "long", "for ever")
    times = (0.3, 600.0, 0.0)
    with Worker(lives.begin(("-c", FORGETS_NOTHING))) as worker:
        for number, (name, seconds) in enumerate(zip(names, times, strict=True)):
            stored = worker.store(number, key_of(name), [number], ttl_seconds=seconds)
            assert stored is Outcome.OK
    lives.end()
    time.sleep(0.3)
    path = lives.begin()
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(*map(key_of, names)) == [0, FLAG_HOST, FLAG_HOST]
        assert worker.load(1, key_of("short"), [5]) is Outcome.MISSING
        assert worker.load(2, key_of("long"), [6]) is Outcome.OK
    assert lives.status()["counters"]["slots_unclaimed_dropped"] == 1


def test_other_engines_get_nothing_and_crowd_it_out(lives: Lives) -> None:
    fill(lives.begin(), count=2)
    lives.end()
    path = lives.begin()
    other: dict[str, Any] = {"namespace": b'{"model":"other"}'}
    with Worker(path, **other), Scheduler(path, **other) as scheduler:
        assert scheduler.flags(key_of(0)) == [0]
        assert lives.status()["tiers"]["host"]["slots_unclaimed"] == 2
    assert lives.process is not None
    assert "kvlake_host_bytes" in lives.process.get("/metrics")


def test_prefault_of_what_is_taken_over_goes_on_in_the_background(lives: Lives) -> None:
    content = fill(lives.begin(host={"prefault": True}))
    lives.end()
    path = lives.begin(host={"prefault": True})
    with Worker(path) as worker:
        assert worker.load(1, key_of(0), [30, 31, 32, 33]) is Outcome.OK
        assert [worker.read(block) for block in range(30, 34)] == content[0]
    lives.end(signal.SIGTERM)


def test_restored_chunks_reach_a_store_that_lacks_them(lives: Lives) -> None:
    fill(lives.begin())
    lives.end()
    bucket = lives.directory / "bucket"
    path = lives.begin(store={"url": f"file://{bucket}", "refresh_seconds": 0.05})
    with Worker(path):
        assert lives.process is not None
        lives.process.wait("all are written", lambda now: now["counters"]["chunks_written"] == 4)
    lives.end(signal.SIGTERM)
    assert len(list(bucket.glob("v1/*/??/*/*.arrow"))) == 4


# --- damaged, or of another make -----------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, 0.0])
def test_damaged_payload_is_found_at_its_first_use(lives: Lives, rate: float) -> None:
    content = fill(lives.begin())
    lives.end()
    data = bytearray(lives.pool.read_bytes())
    data[data.index(content[1][2]) + 99] ^= 16
    lives.pool.write_bytes(data)
    path = lives.begin(integrity={"verify_loads": rate})
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(key_of(0), key_of(1)) == [FLAG_HOST, FLAG_HOST]
        assert worker.load(1, key_of(1), [0, 1]) is Outcome.CORRUPT
        assert scheduler.flags(key_of(0), key_of(1)) == [FLAG_HOST, 0]
        assert worker.load(2, key_of(0), [0, 1, 2, 3]) is Outcome.OK
        # The engine computes and stores it again.
        assert worker.store(3, key_of(1), [0, 1, 2, 3]) is Outcome.OK
    assert lives.status()["counters"]["quarantined_host"] == 1
    lives.end()
    path = lives.begin()
    with Worker(path) as worker:
        assert worker.load(1, key_of(1), [5, 6, 7, 8]) is Outcome.OK
        assert [worker.read(block) for block in range(5, 9)] == content[0]


def test_damaged_header_costs_its_slot(lives: Lives) -> None:
    fill(lives.begin())
    lives.end()
    data = bytearray(lives.pool.read_bytes())
    data[data.index(key_of(2)) + 3] ^= 1
    lives.pool.write_bytes(data)
    path = lives.begin()
    with Worker(path), Scheduler(path) as scheduler:
        flags = scheduler.flags(*(key_of(number) for number in range(4)))
        assert flags == [FLAG_HOST, FLAG_HOST, 0, FLAG_HOST]
    assert "slots_damaged=1" in lives.log()


def overwritten(offset: int, data: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (overwritten(8, b"\2"), "its format has version 2, this release reads version 3"),
        (overwritten(0, b"precious"), "no superblock"),
        (lambda path: os.truncate(path, SIZE_BYTES), "its superblock says"),
        (overwritten(4096 + 9, b"\xff"), "contradicts itself"),
    ],
)
def test_pool_that_cannot_be_taken_over_is_told_and_emptied(
    lives: Lives, change: Callable[[Path], None], reason: str
) -> None:
    fill(lives.begin())
    lives.end()
    change(lives.pool)
    path = lives.begin()
    assert "host memory starts empty" in lives.log()
    assert reason in lives.log()
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(key_of(0)) == [0]
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        assert scheduler.flags(key_of(0)) == [FLAG_HOST]
    lives.end()
    path = lives.begin()
    with Worker(path), Scheduler(path) as scheduler:
        assert scheduler.flags(key_of(0)) == [FLAG_HOST]


@pytest.mark.parametrize("size_bytes", [2 * SIZE_BYTES, SIZE_BYTES // 2])
def test_another_size_keeps_what_fits(lives: Lives, size_bytes: int) -> None:
    fill(lives.begin())
    lives.end(signal.SIGTERM)
    path = lives.begin(host={"size": size_bytes})
    assert lives.status()["tiers"]["host"]["size_bytes"] == size_bytes
    assert f"resized_from_bytes={SIZE_BYTES}" in lives.log()
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(*(key_of(number) for number in range(4))) == [FLAG_HOST] * 4
        assert worker.load(1, key_of(0), [0, 1, 2, 3]) is Outcome.OK
    lives.end()


def test_memory_that_is_gone_is_no_problem(lives: Lives) -> None:
    """As after a reboot: nothing is there, and nothing is told."""
    fill(lives.begin())
    lives.end()
    for name in lives.left():
        (lives.directory / "pool" / name).unlink()
    path = lives.begin()
    with Worker(path) as worker, Scheduler(path) as scheduler:
        assert scheduler.flags(key_of(0)) == [0]
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
    assert "starts empty" not in lives.log()


def test_second_sidecar_on_a_pool_is_refused(lives: Lives) -> None:
    """With other sockets and the same memory: it names who has it, and changes nothing."""
    path = lives.begin()
    assert lives.process is not None
    assert lives.process.process is not None
    pid = lives.process.process.pid
    config = yaml.safe_load(lives.process.config_path.read_text())
    config["runtime"]["directory"] = str(lives.directory / "other")
    other = lives.directory / "other.yaml"
    other.write_text(yaml.safe_dump(config))
    for stopped in (False, True):
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        done = subprocess.run(
            [sys.executable, *places.program(), "serve", "--config", str(other)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 3
        assert f"locked by process {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    with Worker(path) as worker:
        assert worker.store(1, key_of(0), [0]) is Outcome.OK


def test_owner_that_wakes_up_leaves_the_memory_of_another(lives: Lives) -> None:
    """Stopped, its files removed by a person, another one in its place: it takes nothing away."""
    lives.begin()
    first = lives.process
    assert first is not None
    assert first.process is not None
    os.kill(first.process.pid, signal.SIGSTOP)
    for name in lives.left():
        (lives.directory / "pool" / name).unlink()
    config = yaml.safe_load(first.config_path.read_text())
    config["runtime"]["directory"] = str(lives.directory / "other")
    other = SidecarProcess(lives.directory / "o", {})
    other.config_path.write_text(yaml.safe_dump(config))
    with other:
        left = lives.left()
        assert len(left) == 2
        os.kill(first.process.pid, signal.SIGCONT)
        assert first.drain() == 0
        assert lives.left() == left
        socket = lives.directory / "other" / config["runtime"]["name"] / "attach.sock"
        with Worker(socket) as worker, Scheduler(socket) as scheduler:
            assert worker.store(1, key_of(0), [0]) is Outcome.OK
            assert scheduler.flags(key_of(0)) == [FLAG_HOST]


# --- what is left --------------------------------------------------------------------------------


def test_kept_memory_is_told_shown_and_given_back(
    lives: Lives, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(lives.begin())
    config = str(lives.directory / "sidecar.yaml")
    assert cli.main(["pool", "remove", "--config", config]) == 1
    assert "pool is in use" in capsys.readouterr().err
    lives.end(signal.SIGTERM)
    line = next(line for line in lives.log().splitlines() if "host memory is kept" in line)
    assert "kvlake pool remove" in line
    assert str(lives.pool) in line
    assert cli.main(["pool", "show", "--json", "--config", config]) == 0
    assert json.loads(capsys.readouterr().out)["sealed_slots"] == 4
    assert cli.main(["pool", "remove", "--config", config]) == 0
    assert lives.left() == []


@pytest.mark.parametrize("stored", [True, False])
def test_nothing_is_left_where_nothing_is_to_be_kept(lives: Lives, stored: bool) -> None:
    path = lives.begin(host={"after_stop": "remove" if stored else "keep"})
    if stored:
        fill(path)
    lives.end(signal.SIGTERM)
    assert lives.left() == []


def test_killed_with_remove_is_taken_over_and_then_removed(lives: Lives) -> None:
    fill(lives.begin(host={"after_stop": "remove"}))
    lives.end()
    path = lives.begin(host={"after_stop": "remove"})
    with Worker(path), Scheduler(path) as scheduler:
        assert scheduler.flags(key_of(0)) == [FLAG_HOST]
    lives.end(signal.SIGTERM)
    assert lives.left() == []


def test_port_that_is_taken_costs_no_memory(short_directory: Path) -> None:
    """Not to start is no reason to forget: what was kept is there at the next try."""
    config = config_in(short_directory, host={"after_stop": "keep"})
    with RunningSidecar(config) as running, Worker(running.path) as worker:
        assert worker.store(1, key_of(0), [0]) is Outcome.OK
        kept = config.pool_path
        taken = config_in(
            short_directory,
            runtime={"directory": short_directory / "other"},
            host={"after_stop": "keep"},
        )
        with pytest.raises(Exception, match="pool is in use"):
            RunningSidecar(taken)
    assert kept.exists()
    with RunningSidecar(config) as running, Worker(running.path), Scheduler(running.path) as one:
        assert one.flags(key_of(0)) == [FLAG_HOST]


def test_bug_leaves_no_memory_to_the_next_life(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(short_directory, host={"after_stop": "keep"})
    running = RunningSidecar(config)
    with Worker(running.path) as worker:
        assert worker.store(1, key_of(0), [0]) is Outcome.OK

        def broken(*arguments: object) -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(Engine, "handle_all", broken)
        worker.submit(stores=[StoreJob(2, [worker.chunk(key_of(1), [0])])])
        assert worker.at_end()
    with pytest.raises(BaseException, match=r"a bug|unhandled errors"):
        running.stop()
    assert not config.pool_path.exists()
