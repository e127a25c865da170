"""Sidecars that share a store through its catalog, on a folder and on a real S3 server."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from sidecar.cli.status import render
from sidecar.protocol import Outcome
from tests import places
from tests.harness.servers import s3_server
from tests.sidecar.client import (
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tests.sidecar.replacing import Replacing
from tiers.errors import TierUnavailable
from tiers.kv.index import FLAG_HOST, FLAG_STORE
from tiers.store.middleware import Verb, Wrapper

if TYPE_CHECKING:
    from tiers.store.client import Bytes, Seen
    from tiers.store.object_tier import ObjectTier

QUICK = {"refresh_seconds": 0.05, "catalog_flush": 0.05}


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with s3_server(tmp_path_factory.mktemp("seaweed")) as server:
        yield {"url": server.url, **server.settings}


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, short_directory: Path) -> dict[str, Any]:
    if request.param == "folder":
        return {"url": f"file://{short_directory}/bucket", **QUICK}
    bucket: dict[str, Any] = request.getfixturevalue("bucket")
    return {**bucket, "prefix": secrets.token_hex(4), **QUICK}


def stored(now: dict[str, Any]) -> int:
    return int(now["tiers"]["store"]["chunks"])


def holds(chunks: int) -> Callable[[dict[str, Any]], bool]:
    return lambda now: stored(now) == chunks


def read(rows: int) -> Callable[[dict[str, Any]], bool]:
    return lambda now: catalog(now)["rows_read"] == rows


def looked_through(sidecar: RunningSidecar) -> None:
    """Wait until it has gone through a store without a catalog, for which it needs a worker.

    It may see an object that is written meanwhile before it knows of the write, and tell of it a
    second time.
    """
    sidecar.wait_until(lambda now: catalog(now)["sweeps"] == 1)


def catalog(now: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = now["tiers"]["store"]["catalog"]
    return found


def test_what_one_sidecar_writes_the_other_offers(
    short_directory: Path, store: dict[str, Any]
) -> None:
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(first) as here,
        RunningSidecar(second) as there,
        Worker(here.path) as worker,
        Worker(there.path) as other,
        Scheduler(there.path) as scheduler,
    ):
        for round_ in range(3):
            key = key_of("shared", round_)
            content = worker.fill(range(4), seed=round_)
            assert worker.store(round_, key, range(4)) is Outcome.OK
            there.wait_until(holds(round_ + 1))
            assert scheduler.flags(key) == [FLAG_STORE]
            assert scheduler.lookup(round_, [key]).ready == 1
            assert scheduler.flags(key) == [FLAG_STORE | FLAG_HOST]
            scheduler.lease(100 + round_, [key])
            assert other.load(100 + round_, key, [9, 10, 11, 12]) is Outcome.OK
            assert [other.read(block) for block in (9, 10, 11, 12)] == content
        # What came from the store is not written to it again.
        assert there.status()["counters"]["chunks_written"] == 0
        assert catalog(there.status())["compacts"] is True
        # A look through the store at the start may bring a row a second time.
        told = re.search(
            rb"^kvlake_catalog_rows_read_total (\S+)$", there.get("/metrics"), re.MULTILINE
        )
        assert told is not None
        assert float(told[1]) >= 3


def test_what_was_not_due_is_announced_when_a_sidecar_stops(
    short_directory: Path, store: dict[str, Any]
) -> None:
    patient = {**store, "catalog_flush": 3600.0}
    first = config_in(short_directory, store=patient, runtime={"name": "first"})
    with RunningSidecar(first) as here, Worker(here.path) as worker:
        looked_through(here)
        assert worker.store(1, key_of("late"), [0]) is Outcome.OK
        here.wait_until(lambda now: now["counters"]["chunks_written"] == 1)
        here.wait_until(lambda now: stored(now) == 1)
        assert catalog(here.status())["rows_waiting"] == 1
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(second) as there,
        Worker(there.path),
        Scheduler(there.path) as scheduler,
    ):
        there.wait_until(lambda now: stored(now) == 1)
        assert scheduler.flags(key_of("late")) == [FLAG_STORE]


def test_a_chunk_that_is_gone_is_withdrawn_for_all(short_directory: Path) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with RunningSidecar(first) as here, Worker(here.path) as worker:
        assert worker.store(1, key_of("lost"), [0]) is Outcome.OK
    for path in (short_directory / "bucket").glob("v1/*/??/*/*.arrow"):
        path.unlink()
    with (
        RunningSidecar(first) as here,
        RunningSidecar(second) as there,
        Worker(here.path),
        Worker(there.path),
        Scheduler(there.path) as scheduler,
    ):
        for sidecar in (here, there):
            sidecar.wait_until(lambda now: stored(now) == 1)
        assert scheduler.lookup(1, [key_of("lost")]).outcome is Outcome.MISSING
        for sidecar in (here, there):
            sidecar.wait_until(lambda now: stored(now) == 0)


@pytest.mark.promise("damaged-write")
def test_damage_in_a_writers_memory_is_found_by_a_reader_and_put_right(
    short_directory: Path, store: dict[str, Any]
) -> None:
    """As it is found where writes are not verified: nobody is served it, and it does not last."""

    class Failing(Wrapper):
        """The memory of the first chunk that is written goes bad just before it is sent."""

        def __init__(self, inner: ObjectTier) -> None:
            super().__init__(inner)
            self.damaged = 0

        async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
            if "/catalog/" not in name and not name.startswith("probe/") and not self.damaged:
                image[image.nbytes // 2] ^= 1
                self.damaged += 1
            await super().write(name, image, create=create)

        async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
            return await call()

    unlooked = {"integrity": {"verify_writes": 0.0, "verify_loads": 0.0}, "store": store}
    first = config_in(short_directory, runtime={"name": "first"}, **unlooked)
    second = config_in(short_directory, runtime={"name": "second"}, **unlooked)
    key = key_of("goes bad")
    with (
        RunningSidecar(first, wrap_store=Failing) as here,
        RunningSidecar(second) as there,
        Worker(here.path) as worker,
        Worker(there.path) as other,
        Scheduler(there.path) as scheduler,
    ):
        # A look through the store might find the object before its row is read: what is withdrawn
        # as of then is offered by the row, which is later.
        for sidecar in (here, there):
            looked_through(sidecar)
        content = worker.fill(range(4), seed=7)
        assert worker.store(1, key, range(4)) is Outcome.OK
        there.wait_until(read(1))
        there.wait_until(holds(1))
        assert scheduler.lookup(1, [key]).ready == 0
        status = there.wait_until(lambda now: now["counters"]["quarantined_store"] == 1)
        assert status["counters"]["reads_corrupt"] == 1
        # The writer hears of it, and compares what it has in memory the next time that it is used.
        here.wait_until(holds(0))
        assert worker.load(2, key, range(4)) is Outcome.CORRUPT
        # The engine that needed it has computed it, and stores and writes it again.
        assert other.fill(range(4), seed=7) == content
        assert other.store(3, key, range(4)) is Outcome.OK
        here.wait_until(holds(1))
        with Scheduler(here.path) as asking:
            assert asking.lookup(1, [key]).ready == 1
            asking.lease(4, [key])
            assert worker.load(4, key, [9, 10, 11, 12]) is Outcome.OK
        assert [worker.read(block) for block in (9, 10, 11, 12)] == content
        assert here.status()["counters"]["writes_unverified"] == 1


@pytest.mark.parametrize("limit", [{"store_max": 150_000}, {"store_objects_max": 3}], ids=str)
def test_a_tenant_at_its_limit_writes_no_more(short_directory: Path, limit: dict[str, int]) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    config = config_in(short_directory, store=store, tenants={"default": limit})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        looked_through(sidecar)
        for number in range(30):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
            sidecar.wait_until(
                lambda now: (
                    not now["pending"]["writes_running"]
                    and catalog(now)["rows_read"] == now["counters"]["chunks_written"]
                )
            )
            if sidecar.status()["counters"]["writes_refused_quota"]:
                break
        status = sidecar.status()
        counters, [unsalted, _] = status["counters"], status["tenants"]
        assert counters["writes_refused_quota"] == 1
        assert 0 < unsalted["store_bytes"] == counters["bytes_written"] <= 150_000
        assert unsalted["store_objects"] == counters["chunks_written"]
        if "store_objects_max" in limit:
            assert unsalted["store_objects"] == unsalted["store_objects_max"] == 3
        page = sidecar.get("/metrics").decode()
        held = f'kvlake_tenant_store_bytes{{tenant="unsalted"}} {float(unsalted["store_bytes"])}'
        assert held in page
        assert 'kvlake_tenant_store_ttl_seconds{tenant="other"} 0.0' in page


@pytest.mark.parametrize("limit", [{"store_max": 150_000}, {"store_objects_max": 3}], ids=str)
def test_a_tenants_limit_holds_for_what_nobody_was_told_of_yet(
    short_directory: Path, limit: dict[str, int]
) -> None:
    """The catalog is not flushed while the sidecar lives: it knows itself what it wrote."""
    store = {"url": f"file://{short_directory}/bucket", **QUICK, "catalog_flush": 3600.0}
    config = config_in(short_directory, store=store, tenants={"default": limit})
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        looked_through(sidecar)
        for number in range(10):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
            sidecar.wait_until(lambda now: not now["pending"]["writes_running"])
        status = sidecar.status()
        assert catalog(status)["files_written"] == catalog(status)["rows_read"] == 0
        counters, [unsalted, _] = status["counters"], status["tenants"]
        written = counters["chunks_written"]
        assert 0 < written == 10 - counters["writes_refused_quota"] < 10
        assert unsalted["store_bytes"] == counters["bytes_written"] <= 150_000
        assert unsalted["store_objects"] == written <= limit.get("store_objects_max", written)


def test_what_a_tenant_wrote_counts_once_when_it_is_listed_and_merged(
    short_directory: Path,
) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK, "gc": {"every": 1.0}}
    one, two = (
        config_in(short_directory, store=store, runtime={"name": name}) for name in ("one", "two")
    )
    with (
        RunningSidecar(one) as here,
        RunningSidecar(two) as there,
        Worker(here.path) as worker,
        Worker(there.path),
    ):

        def held(now: dict[str, Any]) -> tuple[int, int]:
            return now["tenants"][0]["store_bytes"], now["tenants"][0]["store_objects"]

        def written() -> tuple[int, int]:
            counters = here.status()["counters"]
            return counters["bytes_written"], counters["chunks_written"]

        def merged(_: dict[str, Any]) -> bool:
            logs = [one.status()["tiers"]["store"]["collection"] for one in (here, there)]
            files = catalog(here.status())["files_written"]
            return bool(sum(one["logs_merged"] for one in logs) == files)

        for sidecar in (here, there):
            looked_through(sidecar)
        for number in range(5):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
            here.wait_until(lambda now: now["counters"]["chunks_written"] == number + 1)  # noqa: B023
            assert held(here.status()) == written()
            there.wait_until(lambda now: held(now) == written())
            assert held(here.status()) == written()
        here.wait_until(merged)
        for sidecar in (here, there):
            sidecar.wait_until(lambda now: held(now) == written())


class LogReads(Wrapper):
    """Log files can be read, or cannot, or arrive damaged."""

    mode: Literal["whole", "none", "damaged"] = "whole"

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        del verb, name
        return await call()

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        if "/log/" in name and self.mode == "none":
            raise TierUnavailable("not yet", retryable=False)
        size_bytes = await super().read(name, into, seen=seen)
        if "/log/" in name and self.mode == "damaged":
            into[:size_bytes] ^= 255
        return size_bytes


def test_what_is_read_from_snapshots_counts_once(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted twice for a tenant's limit, in the manifest and row by row."""
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    first = config_in(short_directory, store={**store, "gc": {"every": 1.0}})
    second = config_in(
        short_directory, store={**store, "gc": {"enabled": False}}, runtime={"name": "second"}
    )
    with (
        RunningSidecar(first) as here,
        RunningSidecar(second, wrap_store=LogReads) as there,
        Worker(here.path) as worker,
        Worker(there.path),
    ):
        for sidecar in (here, there):
            looked_through(sidecar)
        assert worker.store(0, key_of(0), [0]) is Outcome.OK
        there.wait_until(holds(1))
        monkeypatch.setattr(LogReads, "mode", "none")
        for number in (1, 2):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        here.wait_until(
            lambda now: (
                now["counters"]["chunks_written"] == 3
                and not catalog(now)["rows_waiting"]
                and now["tiers"]["store"]["collection"]["logs_merged"]
                >= catalog(now)["files_written"]
            )
        )
        monkeypatch.setattr(LogReads, "mode", "damaged")
        there.wait_until(holds(3))
        there.wait_until(lambda now: catalog(now)["files_corrupt"] > 0)
        [tenant, _] = there.status()["tenants"]
        assert tenant["store_objects"] == 3


def test_a_tenants_limit_does_not_hold_where_nothing_is_collected(short_directory: Path) -> None:
    """Nothing says what a rule of the store has deleted: once full, it never wrote again."""
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    config = config_in(short_directory, store=store, tenants={"default": {"store_objects_max": 2}})
    with RunningSidecar(config, wrap_store=Replacing) as sidecar, Worker(sidecar.path) as worker:
        looked_through(sidecar)
        for number in range(4):
            assert worker.store(number, key_of(number), [0]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 4)
        assert not sidecar.status()["counters"]["writes_refused_quota"]


def found(now: dict[str, Any]) -> int:
    return int(catalog(now)["found"])


def test_objects_without_a_catalog_are_found_and_announced(
    short_directory: Path, store: dict[str, Any]
) -> None:
    """As an earlier release left them, or somebody who removed the catalog's folder."""
    patient = {**store, "catalog_flush": 3600.0}
    first = config_in(short_directory, store=patient, runtime={"name": "first"})
    keys = [key_of("old", number) for number in range(6)]

    class Silent(Wrapper):
        async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
            if verb == "write" and "/catalog/" in name:
                raise TierUnavailable("no catalog", retryable=False)
            return await call()

    with RunningSidecar(first, wrap_store=Silent) as here, Worker(here.path) as worker:
        for number, key in enumerate(keys):
            assert worker.store(number, key, [number]) is Outcome.OK
        here.wait_until(lambda now: now["counters"]["chunks_written"] == len(keys))
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    third = config_in(short_directory, store=store, runtime={"name": "third"})
    with RunningSidecar(second) as there:
        with Worker(there.path), Scheduler(there.path) as scheduler:
            there.wait_until(holds(len(keys)))
            assert all(scheduler.flags(key) == [FLAG_STORE] for key in keys)
            assert found(there.status()) == len(keys)
            there.wait_until(lambda now: catalog(now)["rows_waiting"] == 0)
        with RunningSidecar(third) as other, Worker(other.path):
            other.wait_until(holds(len(keys)))
            assert found(other.status()) == 0
            # Its own announcement does not come back as news.
            assert found(there.status()) == len(keys)


def test_a_damaged_catalog_costs_no_chunk(short_directory: Path) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    with RunningSidecar(first) as here, Worker(here.path) as worker:
        looked_through(here)
        for number in range(4):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
            here.wait_until(read(number + 1))
    logs = sorted((short_directory / "bucket").glob("v1/*/catalog/log/*/*.arrow"))
    logs[0].write_bytes(b"not a catalog")
    logs[2].unlink()
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with RunningSidecar(second) as there, Worker(there.path):
        there.wait_until(holds(4))
        assert found(there.status()) > 0


@pytest.mark.slow
def test_a_slow_pass_finds_what_nobody_announced(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK, "reconcile_every": 4.0}
    config = config_in(short_directory, store=store)
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        looked_through(sidecar)
        for number in range(2):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
        sidecar.wait_until(holds(2))
        [one, _] = (short_directory / "bucket").glob("v1/*/??/*/*.arrow")
        copied = key_of("copied").hex()
        target = one.parent.parent.parent / copied[:2] / copied / one.name
        target.parent.mkdir(parents=True)
        target.write_bytes(one.read_bytes())
        # Only now that it is whole, and that what was written here is known.
        places.patch(monkeypatch, "YOUNG_SECONDS", 0.0)
        sidecar.wait_until(holds(3))
        sidecar.wait_until(lambda now: catalog(now)["rows_waiting"] == 0)
        assert found(sidecar.status()) == 1


def test_a_sidecar_that_may_only_read_offers_and_writes_nothing(short_directory: Path) -> None:
    store = {"url": f"file://{short_directory}/bucket", **QUICK}
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    with RunningSidecar(first) as here, Worker(here.path) as worker:
        assert worker.store(1, key_of("old"), [0]) is Outcome.OK
    for path in (short_directory / "bucket").glob("v1/*/catalog/log/*/*.arrow"):
        path.unlink()
    second = config_in(short_directory, store={**store, "write": "off"}, runtime={"name": "second"})
    with RunningSidecar(second) as there, Worker(there.path):
        there.wait_until(holds(1))
        assert catalog(there.status())["rows_waiting"] == 0
    assert not list((short_directory / "bucket").glob("v1/*/catalog/log/*/*.arrow"))


def test_requests_and_a_bill_are_told(short_directory: Path) -> None:
    prices = {"put": 1000.0, "gb_month": 5.0, "currency": "EUR"}
    store = {"url": f"file://{short_directory}/bucket", **QUICK, "prices": prices}
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        with Worker(sidecar.path) as worker:
            assert worker.store(1, key_of("billed"), [0]) is Outcome.OK
            # The chunk, and then its row of the catalog.
            now = sidecar.wait_until(
                lambda now: (
                    now["counters"]["chunks_written"] == 1
                    and now["tiers"]["store"]["requests"]["put"] > 1
                )
            )
        told = now["tiers"]["store"]
        assert told["request_bytes"]["put"] > 4096
        assert told["monthly_bill"]["currency"] == "EUR"
        assert told["monthly_bill"]["total"] > 0
        assert b'kvlake_store_requests_total{operation="put"}' in sidecar.get("/metrics")
    # What the store holds is known of namespaces whose engines attached, and that is said.
    with RunningSidecar(config_in(short_directory, store=store)) as sidecar:
        now = sidecar.status()
        assert (
            now["tenants"][0]["store_bytes"] == now["tiers"]["store"]["monthly_bill"]["stored"] == 0
        )
        assert "(kvlake du shows all)" in render(now)
        help_text = (
            b"kvlake_tenant_store_bytes Bytes of objects of a tenant, in namespaces attached"
        )
        assert help_text in sidecar.get("/metrics")
