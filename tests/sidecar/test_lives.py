"""Lives of sidecar and engine, with real processes: an earlier one touches no later one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sidecar.protocol import LoadChunk, LoadJob, Outcome, StoreJob
from tests import places
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of
from tiers.kv.fence import WorkerFence

SIDECAR = """
import json, sys
from pathlib import Path
import anyio
from sidecar.app import serve
from tests.sidecar.client import config_in

def ready(info):
    print(json.dumps([str(info.attach_path), info.http_url, info.epoch]), flush=True)

async def main():
    return await serve(config_in(Path(sys.argv[1])), ready=ready)

sys.exit(anyio.run(main))
"""

ENGINE = """
import sys, time
from pathlib import Path
from sidecar.protocol import Outcome
from tests.sidecar.client import Scheduler, Worker, key_of

path = Path(sys.argv[1])
worker, scheduler = Worker(path, engine_id="victim"), Scheduler(path, engine_id="victim")
assert worker.store(1, key_of("leased"), [0, 1]) is Outcome.OK
for lease_id in range(2, 7):
    scheduler.lease(lease_id, [key_of("leased")])
print("leased", flush=True)
time.sleep(3600)
"""


class Process:
    """A script in a process of its own that says one line when it is ready."""

    def __init__(self, script: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            cwd=places.ROOT,
            text=True,
        )
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            status = Path(f"/proc/{self._process.pid}/status")
            wait_until(lambda: "State:\tT" in status.read_text())

    def end(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.communicate(timeout=60)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class SidecarProcess(Process):
    def __init__(self, directory: Path) -> None:
        super().__init__(SIDECAR, directory)
        path, self._url, self.epoch = json.loads(self.said)
        self.path = Path(path)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/status", timeout=60) as answer:
            document: dict[str, Any] = json.load(answer)
            return document


@pytest.fixture
def sidecar(short_directory: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess(short_directory)
    yield process
    process.end()


@pytest.mark.promise("old-jobs-blocks")
@pytest.mark.parametrize("queued", ["in the socket", "behind the fence"])
def test_jobs_of_an_old_attachment_do_not_touch_the_blocks_of_the_new_one(
    sidecar: SidecarProcess, queued: str
) -> None:
    old = Worker(sidecar.path)
    kept, void, new = key_of("kept"), key_of("void"), key_of("new")
    old.fill(range(4), seed=1)
    assert old.store(1, kept, range(4)) is Outcome.OK
    loads = [LoadJob(5, [LoadChunk(kept, 0, [8, 9, 10, 11])])]
    stores = [StoreJob(6, [old.chunk(void, [12, 13, 14, 15])])]
    if queued == "behind the fence":
        old.submit(loads=loads, stores=stores, fence=1)
        wait_until(lambda: sidecar.status()["pending"]["copies_running"] == 2)
    sidecar.signal(signal.SIGSTOP)
    if queued == "in the socket":
        old.submit(loads=loads, stores=stores, fence=1)
    old.fence.signal(1)
    # The engine gives up waiting, takes its blocks back, computes something else in them, and
    # attaches again with the same memory and a fence page of its own.
    assert old.fence.try_revoke(7)
    content = old.fill(range(8, 16), seed=2)
    old.unix.shutdown(socket.SHUT_RDWR)
    fence = WorkerFence()
    attached: list[Worker] = []
    again = threading.Thread(
        target=lambda: attached.append(Worker(sidecar.path, fds=(old.memory_fd, fence.fd)))
    )
    again.start()
    sidecar.signal(signal.SIGCONT)
    again.join(60)
    (current,) = attached
    try:
        assert current.attached.epoch == old.epoch == sidecar.epoch
        assert current.store(10, new, range(8, 12)) is Outcome.OK
        wait_until(lambda: sidecar.status()["pending"]["copies_running"] == 0)
        assert [old.read(block) for block in range(8, 16)] == content, "a void job wrote"
        assert current.load(11, new, range(20, 24)) is Outcome.OK
        assert [old.read(block) for block in range(20, 24)] == content[:4]
        assert current.load(12, void, [24]) is Outcome.MISSING, "a void store was kept"
        assert len(sidecar.status()["sessions"]) == 1
    finally:
        current.close()
        fence.close()
        old.close()


@pytest.mark.promise("leases-of-the-dead")
def test_a_dead_engines_leases_are_gone_with_its_end_of_file(sidecar: SidecarProcess) -> None:
    engine = Process(ENGINE, sidecar.path)
    try:
        assert engine.said == "leased"
        wait_until(lambda: sidecar.status()["leases"] == 5)
    finally:
        engine.end()
    # Not by expiring: that would take limits.lease_ttl, and would be counted.
    wait_until(lambda: sidecar.status()["leases"] == 0)
    # The end of file of each is heard by itself.
    wait_until(lambda: not sidecar.status()["sessions"])
    assert sidecar.status()["counters"]["leases_expired"] == 0


@pytest.mark.promise("epoch-sidecar")
def test_a_message_of_another_life_is_refused_and_counted(short_directory: Path) -> None:
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path) as worker:
        worker.submit(stores=[StoreJob(1, [worker.chunk(key_of(1), [0])])], epoch=worker.epoch - 1)
        assert worker.error().code == "epoch"
        assert sidecar.status()["sockets"]["frames_refused"] == {"epoch": 1}


def test_a_client_that_never_attaches_is_cut_off_and_counted(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(short_directory)
    with (
        RunningSidecar(config) as sidecar,
        socket.socket(socket.AF_UNIX) as silent,
        Scheduler(sidecar.path) as scheduler,
    ):
        # Only now: a slow machine might have cut the scheduler off, too.
        monkeypatch.setitem(vars(config.limits), "attach_deadline", 0.05)
        silent.connect(os.fspath(sidecar.path))
        silent.settimeout(60)
        assert silent.recv(1) == b""
        sockets = sidecar.status()["sockets"]
        assert (sockets["attaches_expired"], sockets["connections_cut"]) == (1, 0)
        assert "kvlake_attaches_expired_total 1.0" in sidecar.get("/metrics").decode()
        assert scheduler.flags(key_of(1)) == [0]
