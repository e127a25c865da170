"""A real sidecar with an object store: what is carried on, damage, outages, draining."""

from __future__ import annotations

import json
import os
import re
import threading
import urllib.error
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import pytest

from sidecar.cli.status import paused_ways, render
from sidecar.exits import Exit
from sidecar.protocol import (
    LoadChunk,
    LoadJob,
    Outcome,
)
from tests import places
from tests.faulty_tier import FaultRates, Faulty
from tests.sidecar.client import (
    WAIT_SECONDS_MAX,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.errors import TierUnavailable
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.store.middleware import Verb, Wrapper
from tiers.store.object_tier import ObjectTier

T = TypeVar("T")


def folder_store(directory: Path, **settings: Any) -> dict[str, Any]:
    return {"url": f"file://{directory}/bucket", "refresh_seconds": 0.05, **settings}


def test_store_carries_chunks_to_an_empty_sidecar(short_directory: Path) -> None:
    keys = [key_of("prompt", number) for number in range(3)]
    store = folder_store(short_directory)
    cut: dict[str, Any] = {"world_size": 2, "topology": "tp2.pp1"}
    contents: list[list[bytes]] = []
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    with (
        RunningSidecar(first) as sidecar,
        Worker(sidecar.path, rank=0, **cut) as one,
        Worker(sidecar.path, rank=1, **cut) as two,
    ):
        for worker in (one, two):
            contents.append(worker.fill(range(12), seed=8))
            parent = bytes(32)
            for number, key in enumerate(keys):
                blocks = range(4 * number, 4 * number + 4)
                assert worker.store(number, key, blocks, parent) is Outcome.OK
                parent = key
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(second) as sidecar,
        Worker(sidecar.path, rank=0, **cut) as one,
        Worker(sidecar.path, rank=1, **cut) as two,
        Scheduler(sidecar.path, **cut) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
        assert scheduler.flags(*keys) == [FLAG_STORE] * 3
        answer = scheduler.lookup(1, [*keys, key_of("unknown")])
        assert answer.ready == 3
        assert scheduler.flags(*keys) == [FLAG_HOST | FLAG_STORE] * 3
        scheduler.lease(5, keys)
        chunks = [LoadChunk(key, 0, [n * 4 + b for b in range(4)]) for n, key in enumerate(keys)]
        for worker, content in zip((one, two), contents, strict=True):
            worker.poison()
            worker.submit(loads=[LoadJob(5, chunks)])
            assert worker.outcome(5) is Outcome.OK
            assert [worker.read(block) for block in range(12)] == content
        assert sidecar.status()["counters"]["chunks_read"] >= 3


def transfers(sidecar: RunningSidecar) -> dict[str, tuple[float, float]]:
    """How many transfers of each kind were counted, and their bytes."""
    text = sidecar.get("/metrics").decode()
    found: dict[str, tuple[float, float]] = {}
    for kind in ("store", "write", "read", "load"):
        sums = [
            re.search(rf'^kvlake_transfer_{what}{{kind="{kind}",.*}} (\S+)$', text, re.MULTILINE)
            for what in ("seconds_count", "bytes_count", "bytes_sum")
        ]
        if all(sums):
            seconds, count, size = (float(one[1]) for one in sums if one is not None)
            assert seconds == count
            found[kind] = (count, size)
    return found


def test_transfers_are_in_histograms(short_directory: Path) -> None:
    keys = [key_of("prompt", number) for number in range(2)]
    store = folder_store(short_directory)
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    with RunningSidecar(first) as sidecar, Worker(sidecar.path) as worker:
        worker.fill(range(8), seed=8)
        assert transfers(sidecar) == {}
        for number, key in enumerate(keys):
            blocks = range(4 * number, 4 * number + 4)
            assert worker.store(number, key, blocks, bytes(32)) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 2)
        counters = sidecar.status()["counters"]
        assert transfers(sidecar) == {
            "store": (2, counters["bytes_stored"]),
            "write": (2, counters["bytes_written"]),
        }
        causes = {one["cause"] for one in json.loads(sidecar.get("/transfers"))["transfers"]}
        assert causes == {"a request computed them", "it was stored (store.write: through)"}
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(second) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 2)
        assert scheduler.lookup(1, keys).ready == 2
        scheduler.lease(5, keys)
        chunks = [LoadChunk(key, 0, [n * 4 + b for b in range(4)]) for n, key in enumerate(keys)]
        worker.submit(loads=[LoadJob(5, chunks)])
        assert worker.outcome(5) is Outcome.OK
        counters = sidecar.status()["counters"]
        assert transfers(sidecar) == {
            "read": (2, counters["bytes_read"]),
            "load": (1, counters["bytes_loaded"]),
        }
        listed = json.loads(sidecar.get("/transfers"))
        assert [one["kind"] for one in listed["transfers"]] == ["read", "read", "load"]
        assert listed["transfers"][2]["about"].startswith("2 chunks, engine ")
        assert [one["cause"] for one in listed["transfers"]] == [
            *2 * ["a request looked it up"],
            "a request needs them",
        ]
        newer = json.loads(sidecar.get("/transfers?after=2"))["transfers"]
        assert newer == listed["transfers"][2:]
        assert listed["last"] == 3
        with pytest.raises(urllib.error.HTTPError, match="400"):
            sidecar.get("/transfers?after=now")
        waits = sidecar.get("/metrics").decode()
        assert re.search(r"^kvlake_lookup_wait_seconds_count\{.*\} 1\.0$", waits, re.MULTILINE)


def test_corrupt_object_is_quarantined(short_directory: Path) -> None:
    key = key_of("spoilt")
    store = folder_store(short_directory)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key, range(4)) is Outcome.OK
    bucket = short_directory / "bucket"
    (path,) = bucket.glob("v1/*/??/*/*.arrow")
    image = bytearray(path.read_bytes())
    image[5000] ^= 4
    path.write_bytes(image)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        answer = scheduler.lookup(1, [key])
        assert (answer.ready, answer.outcome) == (0, Outcome.CORRUPT)
        assert scheduler.flags(key) == [0]
        sidecar.wait_until(lambda _: not path.exists())
        [aside] = bucket.glob("quarantine/**/*.arrow")
    # A later sidecar that collects removes it, once it is as old as it may get.
    collecting = {**store, "gc": {"every": "1s", "quarantine_keep": "1s"}}
    with RunningSidecar(config_in(short_directory, store=collecting)) as sidecar:
        sidecar.wait_until(lambda _: not aside.exists())
        sidecar.wait_until(
            lambda now: now["tiers"]["store"]["collection"]["leftovers_removed"] == 1
        )


def faulty(**rates: float) -> Callable[[ObjectTier], ObjectTier]:
    return lambda tier: Faulty(tier, seed=1, rates=FaultRates(**rates))


@pytest.mark.promise("odd-entries")
def test_odd_objects_are_withdrawn_and_the_store_stays_well(short_directory: Path) -> None:
    keys = [key_of("odd", number) for number in range(8)]
    intact = key_of("intact")
    store = folder_store(short_directory, breaker={"failures_max": 2})
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        for number, key in enumerate([*keys, intact]):
            assert worker.store(number + 1, key, range(4)) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == len(keys) + 1)
    bucket = short_directory / "bucket"
    for number, key in enumerate(keys):
        [path] = bucket.glob(f"v1/*/??/{key.hex()}/*.arrow")
        path.unlink()
        if number % 2:
            os.mkfifo(path)
        else:
            path.symlink_to(path.name)
    [log_folder] = bucket.glob("v1/*/catalog/log")
    (log_folder / "odd").symlink_to("odd")
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == len(keys) + 1)
        for number, key in enumerate(keys):
            answer = scheduler.lookup(number + 1, [key])
            assert (answer.ready, answer.outcome) == (0, Outcome.CORRUPT)
        assert scheduler.lookup(100, [intact]).ready == 1
        now = sidecar.wait_until(lambda now: now["counters"]["quarantined_store"] == len(keys))
        assert now["counters"]["reads_unavailable"] == 0
        metrics = sidecar.get("/metrics").decode()
        [skipped] = [
            x for x in metrics.splitlines() if x.startswith("kvlake_store_entries_skipped")
        ]
        assert float(skipped.split()[-1]) > 0


def test_unwell_store_leaves_the_host_tier_working(short_directory: Path) -> None:
    store = folder_store(short_directory, retries_max=0)
    with (
        RunningSidecar(config_in(short_directory, store=store), faulty(unavailable=1.0)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["state"] == "unwell")
        readiness = json.loads(sidecar.get("/readyz"))
        assert readiness["state"] == "degraded"
        (problem,) = readiness["problems"]
        assert (problem["code"], problem["serious"]) == ("store", False)
        assert "injected" in problem["reason"]
        assert b"kvlake_store_well 0.0" in sidecar.get("/metrics")
        assert worker.store(1, key_of("anyway"), [0]) is Outcome.OK
        assert worker.load(2, key_of("anyway"), [1]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["writes_failed"] >= 1)


def test_a_store_that_is_only_read_is_asked_before_it_counts_as_available(
    short_directory: Path,
) -> None:
    store = folder_store(short_directory, retries_max=0, write="off")
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        sidecar.wait_until(lambda now: now["tiers"]["store"]["state"] == "ok")
        assert not (short_directory / "bucket").exists()
    (short_directory / "bucket").write_text("a file")
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        sidecar.wait_until(lambda now: now["tiers"]["store"]["state"] == "unwell")
        assert "list file://" in sidecar.status()["tiers"]["store"]["reason"]


class Unreadable(Wrapper):
    """A store that takes everything, and gives no chunk."""

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "read" and "/catalog/" not in name:
            raise TierUnavailable("busy", retryable=True)
        return await call()


@pytest.mark.parametrize(("seconds", "state"), [(600.0, "open"), (0.01, "untried")])
def test_a_pause_is_shown_while_it_lasts(short_directory: Path, seconds: float, state: str) -> None:
    key = key_of("away")
    breaker = {"failures_max": 1, "pause": seconds, "pause_max": seconds}
    store = folder_store(short_directory, retries_max=0, breaker=breaker)
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key, range(4)) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 1)
    with (
        RunningSidecar(config_in(short_directory, store=store), Unreadable) as sidecar,
        Worker(sidecar.path),
        Scheduler(sidecar.path) as scheduler,
    ):
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        assert scheduler.lookup(1, [key]).ready == 0
        now = sidecar.wait_until(lambda now: now["tiers"]["store"]["reads"] == state)
        lasts = state == "open"
        metrics = sidecar.get("/metrics").decode()
        assert f'kvlake_store_paused{{way="read"}} {float(lasts)}' in metrics
        assert 'kvlake_store_paused{way="write"} 0.0' in metrics
        assert ("reads of the object store pause: " in render(now)) is lasts
        untried = "reads of the object store failed too often, and none was tried since the pause"
        assert (untried in render(now)) is not lasts
        assert paused_ways(now["tiers"]["store"]) == ["reads"] * lasts
        assert now["tiers"]["store"]["writes"] == "closed"


class Held(Wrapper):
    """A store that answers, but takes no chunk, or no catalog file, until it is let."""

    def __init__(self, inner: ObjectTier, *, catalog: bool) -> None:
        super().__init__(inner)
        self._catalog = catalog
        self.asked = threading.Event()
        self.let = threading.Event()

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        held = name.startswith("v1/") and ("/catalog/" in name) is self._catalog
        if verb == "write" and held:
            self.asked.set()
            await anyio.to_thread.run_sync(self.let.wait, WAIT_SECONDS_MAX)
        return await call()


def holding(held: list[Held], *, catalog: bool) -> Callable[[ObjectTier], ObjectTier]:
    """Puts the one that it makes into `held`."""

    def hold(tier: ObjectTier) -> ObjectTier:
        held.append(Held(tier, catalog=catalog))
        return held[0]

    return hold


def test_drain_waits_for_a_slow_store(short_directory: Path) -> None:
    held: list[Held] = []
    store = folder_store(short_directory, writes_inflight_max=1)
    config = config_in(short_directory, store=store)
    with (
        RunningSidecar(config, holding(held, catalog=False)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        for number in range(5):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.info.stop()
        sidecar.wait_until(lambda now: now["state"] == "draining")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            sidecar.get("/readyz")
        assert worker.store(9, key_of(9), [0]) is not Outcome.OK, "nothing new is begun"
        held[0].let.set()
        sidecar.stop()
        assert worker.at_end()
    assert sidecar.code == 0
    assert len(list(short_directory.glob("bucket/v1/*/??/*/*.arrow"))) == 5


@pytest.mark.promise("drain-late-loads")
def test_drain_waits_for_loads_that_came_while_it_announced(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It announces for as long as it is held, and the load waits for its fence as long.
    places.patch(monkeypatch, "ANNOUNCE_SECONDS_MAX", WAIT_SECONDS_MAX)
    limits = {"load_deadline": WAIT_SECONDS_MAX, "lease_ttl": WAIT_SECONDS_MAX}
    held: list[Held] = []
    store = folder_store(short_directory, catalog_flush=3600)
    config = config_in(short_directory, store=store, limits=limits)
    with (
        RunningSidecar(config, holding(held, catalog=True)) as sidecar,
        Worker(sidecar.path) as worker,
    ):
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        sidecar.info.stop()
        assert held[0].asked.wait(WAIT_SECONDS_MAX)
        worker.submit(loads=[LoadJob(2, [LoadChunk(key_of(1), 0, [1])])], fence=7)
        sidecar.wait_until(lambda now: now["pending"]["copies_running"] == 1)
        held[0].let.set()
        sidecar.wait_until(lambda _: any(short_directory.glob("bucket/**/catalog/**/*.arrow")))
        worker.fence.signal(7)
        assert worker.outcome(2) is Outcome.OK
    assert sidecar.code == 0


@pytest.mark.promise("drain-ends")
def test_drain_is_bounded_and_tells_what_is_lost(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = folder_store(short_directory, writes_inflight_max=1)
    config = config_in(short_directory, store=store, limits={"drain_seconds_max": 0.2})
    stuck = faulty(stall=1.0, stall_seconds=3600)
    with RunningSidecar(config, stuck) as sidecar, Worker(sidecar.path) as worker:
        for number in range(3):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.stop()
    assert sidecar.code is Exit.LOSS
    (record,) = [one for one in caplog.records if "drained in part" in one.getMessage()]
    assert record.__dict__["kvlake_fields"]["writes_left"] == 3


def test_what_a_client_still_pins_at_the_end_is_no_leak(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        RunningSidecar(config_in(short_directory)) as sidecar,
        Worker(sidecar.path) as worker,
        Scheduler(sidecar.path) as scheduler,
    ):
        assert worker.store(1, key_of(1), [0]) is Outcome.OK
        scheduler.lease(1, [key_of(1)])
        sidecar.wait_until(lambda now: now["leases"] == 1)
        sidecar.stop()
    assert sidecar.code == 0
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []
