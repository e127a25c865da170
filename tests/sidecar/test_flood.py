"""Floods against a sidecar in a process of its own, and what its memory comes to meanwhile.

A client that floods gets its share and no more: another one is served as ever, and what does not
fit is refused and counted. Ten thousand requests may wait, and take no more than is configured.
"""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sidecar.protocol import FRAME_BYTES_MAX, Outcome
from sidecar.transport.zmtp_server import CUT_BYTES_MAX
from tests.sidecar.client import Scheduler, Worker, key_of
from tests.sidecar.stores import announce
from tests.sidecar.test_lives import Process, wait_until

pytestmark = pytest.mark.slow

MIB = 1 << 20

SIDECAR = """
import json, os, sys
from pathlib import Path
import anyio
from sidecar.app import serve
from tests.sidecar.client import config_in
from tests.sidecar.stores import Stalled

directory, limits = Path(sys.argv[1]), json.loads(sys.argv[2])
config = config_in(
    directory,
    host={"size": 256 << 20},
    store={"url": f"file://{directory}/bucket", "refresh_seconds": 3600.0, "write": "off",
           "deadline_seconds_max": 3600.0, "recompute": "never", "gc": {"grace": "3h"}},
    limits={"jobs_inflight_max": 4096, "lookups_max": 65536, "lookup_wait": 60.0,
            "load_deadline": 600.0, "store_deadline": 600.0, "lease_ttl": 600.0, **limits},
)

def ready(info):
    print(json.dumps([str(info.attach_path), info.http_url, os.getpid()]), flush=True)

def wrap(tier):
    return Stalled(tier, "read")

sys.exit(anyio.run(lambda: serve(config, ready=ready, wrap_store=wrap)))
"""

TOLD = """
import collections, json, sys, time
from pathlib import Path
from sidecar.protocol import Done, LoadChunk, LoadJob, Lookup, LookupDone, StoreJob
from tests.sidecar.client import Scheduler, Worker, key_of

NEVER = 1 << 40
LAST = 1 << 41
told, last = collections.Counter(), set()

def read(client):
    while client.dealer.poll(0):
        message = client.receive()
        if isinstance(message, LookupDone):
            note("lookup", message.lookup_id, message.outcome)
        elif isinstance(message, Done):
            for job in message.jobs:
                note("job", job.job_id, job.outcome)

def note(what, number, outcome):
    if number >= LAST:
        last.add(number)
    else:
        told[f"{what}/{outcome.name}"] += 1

def stay(clients):
    # What a client sends is read in order: once its last request is answered, which nothing holds
    # up, all before it has been read, and what was not let in has been told so.
    for number, client in enumerate(clients, LAST):
        nowhere = key_of("nowhere")
        if isinstance(client, Worker):
            client.submit(loads=[LoadJob(number, [LoadChunk(nowhere, 0, [0])])], fence=NEVER)
        else:
            client.send(Lookup(client.epoch, number, [nowhere], 600_000))
    while len(last) < len(clients):
        for client in clients:
            read(client)
        time.sleep(0.01)
    print(json.dumps(told), flush=True)
    time.sleep(3600)

path, count = Path(sys.argv[1]), int(sys.argv[2])
"""

FLOOD = f"""{TOLD}
worker = Worker(path, engine_id="flood")
scheduler = Scheduler(path, engine_id="flood")
keys = [key_of(number) for number in range(2000)]
for number in range(count):
    first = number * 7 % 1900
    scheduler.send(Lookup(scheduler.epoch, number, keys[first : first + 100], 600_000))
    chunk = worker.chunk(key_of(100_000 + number), [number % 60])
    worker.submit(stores=[StoreJob(number, [chunk])], fence=NEVER)
    read(scheduler)
    read(worker)
stay([worker, scheduler])
"""

WAITING = f"""{TOLD}
engines, clients = 4, []
for engine in range(engines):
    worker = Worker(path, engine_id=f"waiting {{engine}}")
    scheduler = Scheduler(path, engine_id=f"waiting {{engine}}")
    clients += [worker, scheduler]
    for number in range(engine * count, engine * count + count, 2):
        keys = [key_of(2 * number + part) for part in range(4)]
        scheduler.send(Lookup(scheduler.epoch, number, keys, 600_000))
        block = [number % 60]
        if number % 4:
            load = LoadJob(number, [LoadChunk(key_of("good"), 0, block)])
            worker.submit(loads=[load], fence=NEVER)
        else:
            chunk = worker.chunk(key_of(100_000 + number), block)
            worker.submit(stores=[StoreJob(number, [chunk])], fence=NEVER)
stay(clients)
"""

FRAMES = f"""{TOLD}
client = Scheduler(path, engine_id="flood")
keys = [number.to_bytes(32, "big") for number in range(65_536)]
frames = [bytes({FRAME_BYTES_MAX}), bytes({FRAME_BYTES_MAX} + 1)]
frames.append(Lookup(client.epoch, 1, keys, 600_000))
for number in range(count):
    frame = frames[number % 3]
    client.send(frame)
    read(client)
stay([client])
"""


class Flooded:
    """A sidecar with a store of which nothing can be read, and one good client."""

    def __init__(self, directory: Path, chunks: int, **limits: Any) -> None:
        announce(directory / "bucket", chunks)
        self._chunks = chunks
        self.sidecar = Process(SIDECAR, directory, json.dumps(limits))
        path, self._url, self._pid = json.loads(self.sidecar.said)
        self.path = Path(path)
        self._rounds = 0
        self.largest_bytes = 0

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._url}/status", timeout=60) as answer:
            document: dict[str, Any] = json.load(answer)
            return document

    def waiting(self) -> dict[str, int]:
        return {name: share["used"] for name, share in self.status()["waiting"].items()}

    def anonymous_bytes(self) -> int:
        """Resident memory that is the process's own: neither the pool nor engines' KV memory."""
        for line in Path(f"/proc/{self._pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def serve(self, worker: Worker, scheduler: Scheduler) -> None:
        """One round of a good client: a lease, a load, a store."""
        self._rounds += 1
        number = self._rounds
        scheduler.lease(10 + number, [key_of("good")])
        assert worker.load(10 + number, key_of("good"), [1]) is Outcome.OK
        assert worker.read(1) == worker.read(0)
        assert worker.store(100_000 + number, key_of(f"g{number}"), [0]) is Outcome.OK
        self.largest_bytes = max(self.largest_bytes, self.anonymous_bytes())

    @contextmanager
    def under(self, script: str, count: int) -> Iterator[tuple[dict[str, int], int]]:
        """A flood, once all of it was sent, and the rounds served meanwhile; ended afterwards."""
        with (
            Worker(self.path, engine_id="good") as worker,
            Scheduler(self.path, engine_id="good") as scheduler,
        ):
            wait_until(lambda: self.status()["tiers"]["store"]["chunks"] == self._chunks)
            worker.fill([0], seed=1)
            assert worker.store(1, key_of("good"), [0]) is Outcome.OK
            self.base_bytes = self.anonymous_bytes()
            flood: list[Process] = []
            starter = threading.Thread(
                target=lambda: flood.append(Process(script, self.path, count))
            )
            starter.start()
            first = self._rounds
            while starter.is_alive():
                self.serve(worker, scheduler)
            try:
                yield json.loads(flood[0].said), self._rounds - first
            finally:
                flood[0].signal(signal.SIGKILL)
                flood[0].end()

    def assert_empty(self) -> None:
        """Whatever waited is gone with its clients."""
        wait_until(lambda: not any(self.waiting().values()))
        now = self.status()
        assert (now["lookups"], now["leases"]) == (0, 0)
        assert now["pending"]["copies_running"] == now["pending"]["reads_queued"] == 0


def requests(waiting: dict[str, int]) -> int:
    """Lookups, and jobs of one chunk."""
    return waiting["lookups"] + waiting["copies"]


@pytest.mark.promise("share-of-memory")
def test_a_client_that_floods_gets_its_share_and_no_more(short_directory: Path) -> None:
    world = Flooded(short_directory, 2000, memory_max=16 * MIB)
    count = 5000
    try:
        with world.under(FLOOD, count) as (told, rounds):
            now = world.status()
            assert rounds > 20
            assert told["lookup/FULL"] > count // 2
            assert told["job/FULL"] > count // 2
            assert now["refused"]["lookup/memory"] > 0
            assert now["counters"]["stores_dropped_share"] == told["job/FULL"]
            assert now["waiting"]["memory_bytes"]["used"] <= 16 * MIB
            grown_bytes = world.largest_bytes - world.base_bytes
            assert grown_bytes < 16 * MIB, f"{grown_bytes / MIB} MiB grown"
            assert len(now["sessions"]) == 4, "somebody was cut off"
        world.assert_empty()
    finally:
        world.sidecar.end()


@pytest.mark.promise("memory-limit")
def test_ten_thousand_requests_wait_within_the_configured_memory(short_directory: Path) -> None:
    """All of them are let in; after they are gone, the same again needs no more than the first."""
    bound = 128 * MIB
    world = Flooded(short_directory, 20_000, memory_max=bound, pinned_max=1 << 40)
    base_bytes = None
    try:
        for _ in range(2):
            with world.under(WAITING, 2500) as (told, rounds):
                base_bytes = base_bytes or world.base_bytes
                assert rounds > 20
                # All is sent; what the sidecar has not read yet waits in the client.
                wait_until(lambda: requests(world.waiting()) == 10_000)
                assert told == {}, "one of them does not wait"
                now = world.waiting()
                grown_bytes = max(world.largest_bytes, world.anonymous_bytes()) - base_bytes
                print(
                    f"accounted {now['memory_bytes'] / MIB:.0f} MiB, {grown_bytes / MIB:.0f} grown"
                )
                assert grown_bytes < now["memory_bytes"] < bound
            world.assert_empty()
    finally:
        world.sidecar.end()


@pytest.mark.promise("share-of-loop")
def test_the_largest_frames_wait_in_the_client_that_sends_them(short_directory: Path) -> None:
    world = Flooded(short_directory, 10, memory_max=16 * MIB)
    try:
        with world.under(FRAMES, 300) as (told, rounds):
            now = world.status()
            assert rounds > 20
            assert told == {"lookup/FULL": 100}
            assert now["sockets"]["frames_refused"] == {"field": 100, "frame_too_large": 100}
            grown_bytes = world.largest_bytes - world.base_bytes
            assert grown_bytes < 16 * MIB + 8 * CUT_BYTES_MAX
    finally:
        world.sidecar.end()
