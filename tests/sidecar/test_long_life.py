"""Many stores and loads in one life of a sidecar: memory, descriptors and objects stay as they are.

The sidecar is a process of its own on a real S3 server, with a pool and a store that hold a small
part of what comes: chunks are evicted, written, refused, collected, missed. It is looked at while
it rests, after a warm-up in which all of its tables have been full.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.protocol import LoadChunk, LoadJob, Outcome, StoreJob
from tests.harness.sidecars import SidecarProcess
from tests.sidecar import altered
from tests.sidecar.client import BLOCKS_PER_CHUNK, PATIENT, WAIT_SECONDS_MAX, Worker, key_of
from tests.sidecar.fullrate import wide_layout
from tests.soak import probes

if TYPE_CHECKING:
    from tests.harness.servers import S3Server

JOBS_PER_STEP = 8
STEPS_AHEAD = 4
LOADED_AFTER = 40
"""A chunk is loaded this many stores after it was stored: it is in host memory still."""
CONTENT_BYTES = 16
CONNECTIONS_MAX = 40
BLOCKS = range(BLOCKS_PER_CHUNK)
TASK_SAMPLES = 10
CONFIG: dict[str, Any] = {
    "refresh_seconds": 0.1,
    "catalog_flush": 0.1,
    "deadline_seconds_max": 2.0,
    "objects_max": 200,
    "gc": {"every": 1.0, "grace": 2.2},
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_sidecars")]


def key(number: int) -> bytes:
    """In one of four folders of the store; the sidecar has a table for each, made when needed."""
    return bytes([number % 4, 0]) + key_of(number)[2:]


class Life:
    """One sidecar, and one worker that stores and loads."""

    def __init__(self, sidecar: SidecarProcess, worker: Worker, objects: Path) -> None:
        self._sidecar = sidecar
        self._worker = worker
        self._objects = objects
        self._jobs = itertools.count(1)
        self._stored = 0

    def run(self, stores: int) -> None:
        """Store and load this many chunks, one in a job, some steps ahead of the answers."""
        ahead: list[list[int]] = []
        for _ in range(stores // JOBS_PER_STEP):
            ahead.append(self._step())
            if len(ahead) > STEPS_AHEAD:
                self._settle(ahead.pop(0))
        for jobs in ahead:
            self._settle(jobs)

    def _step(self) -> list[int]:
        stores: list[StoreJob] = []
        loads: list[LoadJob] = []
        for _ in range(JOBS_PER_STEP):
            chunk = self._worker.chunk(key(self._stored), BLOCKS)
            stores.append(StoreJob(next(self._jobs), [chunk]))
            old = key(max(0, self._stored - LOADED_AFTER))
            loads.append(LoadJob(next(self._jobs), [LoadChunk(old, 0, list(BLOCKS))]))
            self._stored += 1
        self._worker.submit(stores=stores, loads=loads)
        return [one.job_id for one in stores] + [one.job_id for one in loads]

    def _settle(self, jobs: list[int]) -> None:
        for job in jobs:
            assert self._worker.outcome(job) in (Outcome.OK, Outcome.MISSING, Outcome.FULL)
            del self._worker.done[job]

    def at_rest(self) -> dict[str, float]:
        """What the process has, once nothing waits or runs."""
        self._sidecar.wait(
            "rest",
            lambda now: (
                not now["pending"]["writes_running"]
                and not now["tiers"]["store"]["write_queue_bytes"]
            ),
        )
        process = self._sidecar.process
        assert process is not None
        lines = len(self._lines())
        process.send_signal(altered.COUNT_SIGNAL)
        until = time.monotonic() + WAIT_SECONDS_MAX
        while len(self._lines()) == lines:
            assert time.monotonic() < until
            time.sleep(0.05)
        sample = probes.process_sample([process.pid], "sidecar")
        sample["sidecar.objects"] = int(self._lines()[-1])
        # The collector's tasks come and go; what is left behind stays.
        sample["sidecar.tasks"] = min(self._tasks() for _ in range(TASK_SAMPLES))
        return sample

    def _tasks(self) -> int:
        time.sleep(0.1)
        return int(self._sidecar.status()["tasks"])

    def counters(self) -> dict[str, int]:
        """The sidecar's."""
        counters: dict[str, int] = self._sidecar.status()["counters"]
        return counters

    def _lines(self) -> list[str]:
        return self._objects.read_text().splitlines() if self._objects.exists() else []


@pytest.mark.promise("flat-memory")
@pytest.mark.parametrize(
    ("warm", "stores"),
    [
        pytest.param(6_000, 4_000, id="short"),
        # The policy remembers some 33,000 chunks that left.
        pytest.param(40_000, 100_000, id="100000", marks=pytest.mark.nightly),
    ],
)
def test_stores_and_loads_leave_nothing_behind(
    short_directory: Path,
    seaweed: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    warm: int,
    stores: int,
) -> None:
    objects = short_directory / "objects"
    monkeypatch.setenv(altered.OBJECTS, str(objects))
    # Merged logs are kept for two minutes: all that time there would be more of them.
    constants = {"KEEP_SECONDS_MIN": 1.0, "KEEP_REFRESHES": 10, "ABANDONED_SECONDS": 5.0}
    monkeypatch.setenv(altered.CONSTANTS, json.dumps(constants))
    # A thread that starts late would bring an arena of its own, of some megabytes.
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    store = {"url": f"{seaweed.url}/{short_directory.name}", **seaweed.settings, **CONFIG}
    # What is remembered of chunks that left is full before the first count.
    limits = {"gone_keys_max": 2_000, **PATIENT}
    config = {"store": store, "host": {"size": "8MiB"}, "limits": limits}
    program = ("-m", altered.MODULE)
    with (
        SidecarProcess(short_directory / "one", config, program=program) as sidecar,
        Worker(Path(sidecar.socket), layout=wide_layout(CONTENT_BYTES)) as worker,
    ):
        life = Life(sidecar, worker, objects)
        life.run(warm)
        before, told = life.at_rest(), life.counters()
        life.run(stores)
        after, now = life.at_rest(), life.counters()
        print({name: (int(before[name]), int(after[name])) for name in before}, now)
        assert now["chunks_stored"] - told["chunks_stored"] == stores
        assert now["chunks_loaded"] - told["chunks_loaded"] > stores / 2
        assert now["chunks_evicted"] > stores / 2
        grown = {name: after[name] - value for name, value in before.items()}
        # One object that is kept for each store would be seen four times over in the short life,
        # and ten times in the long one. Caches and the last merge of logs account for some hundred.
        assert grown["sidecar.objects"] < max(1_000, stores / 10), grown
        assert grown["sidecar.anonymous_bytes"] < 8 << 20, grown
        # Connections to the store are kept: as many as there ever were requests side by side. One
        # that is lost in a hundred stores would be seen.
        assert grown["sidecar.sockets"] < CONNECTIONS_MAX, grown
        assert grown["sidecar.descriptors"] - grown["sidecar.sockets"] <= 4, grown
        assert grown["sidecar.tasks"] <= 2, grown
