"""/readyz over the real sidecar: 200 exactly while engines can attach and be served."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import math
import os
import re
import shutil
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import anyio
import pytest

from sidecar.app import ServerInfo, serve
from sidecar.config.model import Config
from sidecar.data.copies import Copies
from sidecar.data.host_pool import open_pool
from sidecar.errors import StartError
from sidecar.observe.host_contents import HostContents
from sidecar.observe.http import HttpServer
from sidecar.protocol import Outcome
from sidecar.service.systemd import Notifier
from sidecar.service.watchdog import PROBLEMS, Problem, Watchdog
from sidecar.transport.unix_socket import UnixListener
from tests import places
from tests.sidecar.bench import wait_for
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.pool.host_pool import HostPool


def readyz(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def codes(document: dict[str, Any]) -> list[str]:
    assert all(one["reason"] for one in document["problems"])
    return [one["code"] for one in document["problems"]]


def works(sidecar: RunningSidecar) -> None:
    with (
        Worker(sidecar.path, engine_id="again") as worker,
        Scheduler(sidecar.path, engine_id="again"),
    ):
        assert worker.store(1, key_of("again"), [0]) is Outcome.OK


def test_ready(sidecar: RunningSidecar) -> None:
    status, document = readyz(sidecar.info.http_url)
    assert (status, document) == (200, {"state": "ok", "ready": True, "problems": []})
    metrics = sidecar.get("/metrics").decode()
    assert "kvlake_ready 1.0" in metrics
    for code in PROBLEMS:
        assert f'kvlake_problem{{code="{code}"}} 0.0' in metrics


def test_not_ready_while_the_host_memory_is_made_ready(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()
    slow, start = HostPool.open, HttpServer.start
    started: list[HttpServer] = []

    def open_slowly(*args: Any, **kwargs: Any) -> HostPool:
        assert going_on.wait(WAIT_SECONDS_MAX)
        return slow(*args, **kwargs)

    async def note(server: HttpServer) -> None:
        await start(server)
        started.append(server)

    monkeypatch.setattr(HostPool, "open", open_slowly)
    monkeypatch.setattr(HttpServer, "start", note)
    told: list[ServerInfo] = []
    config = config_in(short_directory)
    thread = threading.Thread(target=lambda: anyio.run(lambda: serve(config, ready=told.append)))
    thread.start()
    wait_for(lambda: bool(started))
    url = started[0].url
    urllib.request.urlopen(f"{url}/healthz", timeout=20).close()
    status, document = readyz(url)
    assert (status, document["state"], codes(document)) == (503, "starting", ["starting"])
    for page in ("metrics", "status"):
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{url}/{page}", timeout=20)
    going_on.set()
    wait_for(lambda: readyz(url)[0] == 200)
    told[0].stop()
    thread.join(WAIT_SECONDS_MAX)


@pytest.mark.parametrize("name", ["attach.sock", "jobs.sock"])
def test_a_removed_socket_is_made_again(sidecar: RunningSidecar, name: str) -> None:
    with Worker(sidecar.path) as old:
        assert old.store(1, key_of("old"), [0]) is Outcome.OK
        (sidecar.path.parent / name).unlink()
        wait_for(lambda: sidecar.status()["ready"])
        wait_for(lambda: (sidecar.path.parent / name).exists())
        works(sidecar)
        assert b"kvlake_sockets_renewed_total 1.0" in sidecar.get("/metrics")
        assert old.load(2, key_of("old"), [1]) is Outcome.OK, "who was attached notices nothing"


def test_a_socket_that_cannot_be_made_again_is_unready(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "SelfChecks.repair", lambda _: None)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        sidecar.path.unlink()
        status, document = readyz(sidecar.info.http_url)
        assert (status, document["state"], codes(document)) == (503, "unready", ["socket"])
        assert str(sidecar.path) in document["problems"][0]["reason"]
        assert b'kvlake_problem{code="socket"} 1.0' in sidecar.get("/metrics")


def test_a_socket_that_cannot_be_bound_is_tried_again(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of room, say."""
    bind_again = UnixListener.bind_again
    left = [errno.ENOSPC, errno.EMFILE]

    def fails_twice(listener: UnixListener) -> None:
        if left:
            raise OSError(left.pop(), "no room")
        bind_again(listener)

    monkeypatch.setattr(UnixListener, "bind_again", fails_twice)
    with RunningSidecar(config_in(short_directory)) as sidecar:
        jobs = sidecar.path.parent / "jobs.sock"
        jobs.unlink()
        wait_for(jobs.exists)
        assert not left
        wait_for(lambda: sidecar.status()["ready"])
        works(sidecar)


def test_a_removed_runtime_directory_is_made_again(sidecar: RunningSidecar) -> None:
    shutil.rmtree(sidecar.path.parent)
    assert readyz(sidecar.info.http_url)[0] in (200, 503)
    wait_for(lambda: sidecar.path.exists() and readyz(sidecar.info.http_url)[0] == 200)
    works(sidecar)


def test_a_removed_lock_is_made_again(
    sidecar: RunningSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    """Else another sidecar could start, and this one was unready until a restart."""
    lock = sidecar.path.parent / "lock"
    lock.unlink()
    wait_for(lock.exists)
    wait_for(lambda: readyz(sidecar.info.http_url)[0] == 200)
    works(sidecar)
    assert b"kvlake_locks_renewed_total 1.0" in sidecar.get("/metrics")
    [line] = [one for one in caplog.records if "a lock was removed" in one.getMessage()]
    assert vars(line)["kvlake_fields"]["path"] == lock


def test_a_directory_that_another_sidecar_took_is_left_to_it(
    sidecar: RunningSidecar, short_directory: Path
) -> None:
    home = sidecar.path.parent
    home.rename(short_directory / "moved")
    other = config_in(short_directory, host={"directory": short_directory})
    try:
        with RunningSidecar(other) as successor:
            wait_for(lambda: readyz(sidecar.info.http_url)[0] == 503)
            assert "runtime_directory" in codes(readyz(sidecar.info.http_url)[1])
            works(successor)
            assert readyz(successor.info.http_url)[0] == 200
    except StartError:
        # The first one was quicker and has its directory again.
        works(sidecar)


@pytest.mark.promise("refuse-nodes")
def test_an_engine_that_lacks_ranks_is_told(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one over two nodes would: no chunk of it is ever whole, and it has no other way to say."""
    places.patch(monkeypatch, "RANKS_SECONDS_MAX", 0.0)
    with Worker(sidecar.path, engine_id="half", world_size=2, rank=1):
        status, document = readyz(sidecar.info.http_url)
        assert (status, document["state"], codes(document)) == (200, "degraded", ["ranks"])
        assert "2 ranks of engine half only 1" in document["problems"][0]["reason"]
        with Worker(sidecar.path, engine_id="half", world_size=2, rank=0):
            assert codes(readyz(sidecar.info.http_url)[1]) == []
    wait_for(lambda: not codes(readyz(sidecar.info.http_url)[1]))


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_removed_pool_file_is_told_and_engines_are_served(
    sidecar: RunningSidecar, short_directory: Path, suffix: str
) -> None:
    (path,) = (short_directory / "pool").glob(f"*.pool{suffix}")
    path.unlink()
    status, document = readyz(sidecar.info.http_url)
    assert (status, document["state"], codes(document)) == (200, "degraded", ["pool"])
    assert str(path) in document["problems"][0]["reason"]
    works(sidecar)


def test_copies_that_hang_are_unready(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copies, "stuck_seconds", lambda *_: 60.0)
    status, document = readyz(sidecar.info.http_url)
    assert (status, codes(document)) == (503, ["copies"])
    assert "60 s" in document["problems"][0]["reason"]


def test_a_loop_that_stood_still_is_unready_until_it_turns(
    sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "LAG_SECONDS_MAX", 0.2)
    seen: list[float] = []
    whole = Watchdog.problems

    def note(self: Watchdog) -> list[Problem]:
        found = whole(self)
        seen.extend(self.lag_seconds for problem in found if problem.code == "loop")
        return found

    places.patch(monkeypatch, "Watchdog.problems", note)

    # Whatever holds the loop: here, an answer that takes its time.
    async def slowly(*_: object) -> dict[str, object]:
        time.sleep(1.5)  # noqa: ASYNC251 (this is the fault)
        return {}

    monkeypatch.setattr(HostContents, "usage", slowly)
    sidecar.get("/host")
    wait_for(lambda: bool(seen))
    assert max(seen) > 0.2
    monkeypatch.undo()
    wait_for(lambda: readyz(sidecar.info.http_url)[0] == 200)
    (most,) = re.findall(rb"kvlake_loop_lag_seconds_max ([0-9.e+]+)", sidecar.get("/metrics"))
    assert float(most) > 0.2


def test_health_is_liveness_only(sidecar: RunningSidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copies, "stuck_seconds", lambda *_: 60.0)
    assert sidecar.get("/healthz") == b"ok\n"


def test_looking_leaves_no_descriptor_behind(sidecar: RunningSidecar) -> None:
    readyz(sidecar.info.http_url)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        readyz(sidecar.info.http_url)
    wait_for(lambda: len(os.listdir("/proc/self/fd")) <= before)


async def test_a_store_that_stays_down_has_one_line_however_it_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvlake.server")
    failures = itertools.count(1)
    down = [False]

    def check() -> list[Problem]:
        return [Problem("store", f"request {next(failures)} failed", serious=False)] * down[0]

    watchdog = Watchdog(Notifier({}))
    send, beat = anyio.create_memory_object_stream[None](math.inf)
    watchdog.serve(check, lambda: send.send_nowait(None))
    down[0] = True

    async def beats(count: int) -> None:
        for _ in range(count):
            await beat.receive()

    await beats(4)
    down[0] = False
    await beats(2)
    watchdog.stop()
    send.close()
    beat.close()
    reasons = [vars(one)["kvlake_fields"]["why"] for one in caplog.records]
    assert len(reasons) == 2, reasons
    assert re.fullmatch(r"request \d+ failed", reasons[0])
    assert reasons[1] == "serving"


async def test_a_start_that_is_cancelled_leaves_no_pool(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does. The pool that was being made had nobody to remove it."""
    begun, ended = threading.Event(), threading.Event()

    def slow(config: Config, stop: threading.Event) -> object:
        begun.set()
        time.sleep(0.05)
        try:
            return open_pool(config, stop)
        finally:
            ended.set()

    places.patch(monkeypatch, "open_pool", slow)
    config = config_in(short_directory)
    serving = asyncio.ensure_future(serve(config))
    await anyio.to_thread.run_sync(begun.wait, WAIT_SECONDS_MAX)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert ended.wait(WAIT_SECONDS_MAX)
    assert not config.pool_path.exists()
