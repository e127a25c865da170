"""`kvlake du`, `ls` and `gc` on a folder that sidecars have written, and the collector in one."""

from __future__ import annotations

import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import yaml

from sidecar.cli import gc, main
from sidecar.config.store import StoreSettings
from sidecar.protocol import Outcome, StoreJob, tenant_id
from sidecar.service.store_stack import WrapStore, open_store
from tests import places
from tests.sidecar.client import (
    NAMESPACE,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tiers.catalog.lease import CatalogLease
from tiers.catalog.scan import Superseded
from tiers.errors import TierUnavailable
from tiers.kv.index import FLAG_STORE
from tiers.store.middleware import Metered, Verb, Wrapper
from tiers.store.object_tier import UrlObjects

T = TypeVar("T")
QUICK: dict[str, Any] = {"refresh_seconds": 0.05, "catalog_flush": 0.05}
SOON: dict[str, Any] = {"deadline_seconds_max": 2.0, "gc": {"every": 1.0, "grace": 2.1}}
"""Where what is withdrawn has to be deleted while a test waits: a configuration is only taken with
requests that take no longer than that. See `patience`."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests take longer than `SOON` says: a machine that pauses is no store that fails."""

    def patient(settings: StoreSettings, wrap_store: WrapStore | None = None) -> Metered:
        longer = settings.model_copy(update={"deadline_seconds_max": 60.0})
        return open_store(longer, wrap_store)

    places.patch(monkeypatch, "open_store", patient)


@pytest.fixture
def store(short_directory: Path) -> dict[str, Any]:
    return {"url": f"file://{short_directory}/bucket", **QUICK}


def fill(short_directory: Path, store: dict[str, Any], chunks: int, *, first: int = 0) -> None:
    config = config_in(short_directory, store=store)
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        for number in range(chunks):
            assert worker.store(number, key_of(first + number), [number]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == chunks)


class Command:
    """Runs `kvlake` on a configuration file, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path = folder / "command.yaml"
        self._capsys = capsys

    def __call__(self, store: dict[str, Any], *words: str, code: int = 0, **sections: Any) -> str:
        """What it prints: its result, or with another code its message."""
        self._path.write_text(yaml.safe_dump({"store": store, **sections}))
        ended = main([*words, "--config", str(self._path)])
        told = self._capsys.readouterr()
        assert ended == code, told.err
        return told.err if code else told.out

    def json(self, store: dict[str, Any], *words: str, **sections: Any) -> Any:
        return json.loads(self(store, *words, "--json", **sections))


@pytest.fixture
def kvlake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def objects(short_directory: Path) -> int:
    # Unlike `Path.glob`, this does not raise where a sidecar removes a folder meanwhile.
    return len(glob.glob("v1/*/??/*/*.arrow", root_dir=short_directory / "bucket"))


def test_du_and_ls_show_the_store(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    assert "holds no chunks" in kvlake(store, "du")
    assert "holds no chunks" in kvlake(store, "ls")
    fill(short_directory, store, 5)
    [told] = kvlake.json(store, "du")["namespaces"]
    assert (told["chunks"], told["objects"]) == (5, 5)
    assert told["size_bytes"] > 5 * 4096
    assert [one["tenant"] for one in told["tenants"]] == ["unsalted"]
    assert told["namespace"] in kvlake(store, "du")
    assert kvlake(store, "ls").split() == ["NAMESPACE", "MODEL", told["namespace"], "tests/tiny"]
    assert kvlake.json(store, "ls")["namespaces"] == [told["namespace"]]
    listed = kvlake.json(store, "ls", told["namespace"][:4])
    assert {one["key"] for one in listed["chunks"]} == {key_of(n).hex() for n in range(5)}
    assert not listed["more"]
    page = kvlake(store, "ls", told["namespace"], "--limit", "2")
    assert "more than --limit" in page
    model, head, *rows, _ = page.splitlines()
    assert model == f"{told['namespace']}: tests/tiny"
    assert head.split() == ["KEY", "SIZE", "OBJECTS", "BLOCKS", "AGE", "TENANT"]
    assert [row.startswith("  file:///") for row in rows] == [False, True] * 2
    assert all(len(line) < 120 for line in (model, head, *rows[::2]))
    one = kvlake.json(store, "ls", told["namespace"], "--key", key_of(3).hex()[:9].upper())
    assert [chunk["key"] for chunk in one["chunks"]] == [key_of(3).hex()]
    assert len(one["chunks"][0]["segments"]) == one["chunks"][0]["objects"] == 1
    assert kvlake.json(store, "ls", told["namespace"], "--limit", "0") == {
        "url": listed["url"],
        "namespace": told["namespace"],
        "model": "tests/tiny",
        "layers": None,
        "about": json.loads(NAMESPACE),
        "chunks": [],
        "more": True,
    }
    empty = "0" * 15 + "1"
    assert kvlake.json(store, "ls", told["namespace"], "--tenant", empty)["chunks"] == []
    for nobody in ("team-a", "00"):
        said = kvlake(store, "ls", told["namespace"], "--tenant", nobody, code=2)
        assert f"tenant '{nobody}': known names are unknown, unsalted; give one of these" in said
    for unsalted in ("unsalted", "0" * 16):
        found = kvlake.json(store, "ls", told["namespace"], "--tenant", unsalted)
        assert len(found["chunks"]) == 5


def test_inspect_accepts_the_urls_of_ls(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    fill(short_directory, store, 3)
    [namespace] = kvlake.json(store, "ls")["namespaces"]
    urls = [url for one in kvlake.json(store, "ls", namespace)["chunks"] for url in one["urls"]]
    page = kvlake(store, "ls", namespace)
    assert [line.strip() for line in page.splitlines() if line.startswith("  ")] == urls
    found = kvlake.json(store, "inspect", *urls)
    assert [one["intact"] for one in found] == [True] * 3
    assert {one["key"] for one in found} == {key_of(number).hex() for number in range(3)}
    # As of a sidecar of before, or a file that somebody damaged: the digest is all that is known.
    about = short_directory / "bucket" / "v1" / namespace / "namespace.json"
    for text in (None, "", "{}", about.read_text().replace("tiny", "other")):
        about.unlink() if text is None else about.write_text(text)
        assert kvlake(store, "ls").split() == ["NAMESPACE", "MODEL", namespace, "-"]
        [told] = kvlake.json(store, "du")["namespaces"]
        assert (told["model"], told["about"], told["chunks"]) == (None, None, 3)


def test_a_model_in_a_folder_has_the_name_that_it_is_served_as(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    namespace = json.dumps({"model": {"digest": "ab" * 32}, "group": ["x"], "layers": 3}).encode()
    config = config_in(short_directory, store=store)
    with (
        RunningSidecar(config) as sidecar,
        Worker(sidecar.path, namespace=namespace, model="/models/llama") as worker,
    ):
        assert worker.store(1, key_of(1), [1]) is Outcome.OK
        now = sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 1)
        assert [realm["model"] for realm in now["realms"]] == ["/models/llama"]
    assert "/models/llama, 1 of 3 layers" in kvlake(store, "ls")
    assert "/models/llama, 1 of 3 layers" in kvlake(store, "du")


@pytest.mark.slow
def test_gc_withdraws_waits_and_deletes(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    fill(short_directory, store, 6)
    bounded = {**store, "objects_max": 2, **SOON}
    before = sorted(path for path in (short_directory / "bucket").rglob("*"))
    tried = kvlake.json(bounded, "gc", "--dry-run")
    assert tried["dry_run"]
    assert tried["namespaces"][0]["withdrawn"] == 4
    assert sorted(path for path in (short_directory / "bucket").rglob("*")) == before
    assert "nothing was changed" in kvlake(bounded, "gc", "--dry-run")
    [told] = kvlake.json(bounded, "gc")["namespaces"]
    assert (told["withdrawn"], told["deleted"], told["waiting"]) == (4, 0, 4)
    assert objects(short_directory) == 6
    # One more is withdrawn while the grace of the others runs, unless this takes long.
    [told] = kvlake.json({**bounded, "objects_max": 1}, "gc", "--wait")["namespaces"]
    assert (told["deleted"], told["waiting"]) == (5, 0)
    assert objects(short_directory) == 1
    assert kvlake.json(bounded, "du")["namespaces"][0]["objects"] == 1
    assert "KEPT" in kvlake(bounded, "gc")


def test_gc_removes_leftovers_once_they_are_old(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    fill(short_directory, store, 3)
    bucket = short_directory / "bucket"
    old, young, _ = (str(path.relative_to(bucket)) for path in bucket.glob("v1/*/??/*/*.arrow"))
    anyio.run(set_aside, store["url"], [old, young])
    probe, mine = bucket / "probe" / ("0" * 16), bucket / "quarantine" / "mine.txt"
    for path in (probe, mine):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"left")
    for path in (bucket / "quarantine" / old, probe, mine):
        os.utime(path, (1.0, 1.0))
    there = sorted(bucket.rglob("*"))
    tried = kvlake.json(store, "gc", "--dry-run")["leftovers"]
    assert (tried["quarantined"], tried["quarantine_kept"], tried["probes"]) == (1, 1, 1)
    assert tried["quarantined_bytes"] == tried["quarantine_kept_bytes"] > 4096
    page = kvlake(store, "gc", "--dry-run")
    assert "damaged objects in quarantine/: 1 (" in page
    assert "probes of sidecars that died: 1" in page
    assert sorted(bucket.rglob("*")) == there
    ever = {**store, "gc": {"quarantine_keep": None}}
    assert kvlake.json(ever, "gc", "--dry-run")["leftovers"]["quarantined"] == 0
    [namespace] = kvlake.json(store, "ls")["namespaces"]
    told = kvlake.json(store, "gc", "--namespace", namespace)["leftovers"]
    assert (told["quarantined"], told["probes"]) == (1, 0)
    assert not (bucket / "quarantine" / old).exists()
    told = kvlake.json(store, "gc")["leftovers"]
    assert (told["quarantined"], told["quarantine_kept"], told["probes"]) == (0, 1, 1)
    assert not probe.exists()
    assert (bucket / "quarantine" / young).exists()
    assert mine.exists()


async def set_aside(url: str, names: list[str]) -> None:
    tier = UrlObjects(url)
    for name in names:
        await tier.quarantine(name)
    await tier.close()


def test_commands_handle_more_unmerged_logs_than_fit_in_memory(
    short_directory: Path,
    store: dict[str, Any],
    kvlake: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a store that nobody compacts: three lives of a sidecar, each with a log of its own."""
    for life in range(3):
        fill(short_directory, {**store, "gc": {"enabled": False}}, 10, first=10 * life)
    logs = list((short_directory / "bucket").glob("v1/*/catalog/log/*/*.arrow"))
    for limit in ("FRESH_ROWS_MAX", "PASS_ROWS_MAX"):
        places.patch(monkeypatch, limit, 8)
    places.patch(monkeypatch, "READS_MAX", 1)
    [told] = kvlake.json(store, "du")["namespaces"]
    assert (told["chunks"], told["objects"]) == (30, 30)
    keys = sorted(key_of(number).hex() for number in range(30))
    listed = kvlake.json(store, "ls", told["namespace"])
    assert [one["key"] for one in listed["chunks"]] == keys
    for digits in (keys[7][:1], keys[7][:2], keys[7][:5], keys[7]):
        found = kvlake.json(store, "ls", told["namespace"], "--key", digits)["chunks"]
        assert [one["key"] for one in found] == [key for key in keys if key.startswith(digits)]
    [tried] = kvlake.json(store, "gc", "--dry-run")["namespaces"]
    assert 0 < tried["logs_left"] == len(logs) - tried["logs_merged"]
    assert "kvlake gc without --dry-run merges all" in kvlake(store, "gc", "--dry-run")
    [told] = kvlake.json(store, "gc")["namespaces"]
    assert (told["objects"], told["logs_left"], told["logs_merged"]) == (30, 0, len(logs))
    assert "without --dry-run merges" not in kvlake(store, "gc", "--dry-run")


A, B = tenant_id("a"), tenant_id("b")
TENANTS_CHUNKS = 4
"""Chunks of each of A, B, and those without a salt, written in turn."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """A folder with chunks of three tenants, and the size of one."""
    with tempfile.TemporaryDirectory(prefix="kvlake-") as folder:
        url = f"file://{folder}/bucket"
        config = config_in(Path(folder), store={"url": url, **QUICK})
        with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
            for number in range(3 * TENANTS_CHUNKS):
                chunk = worker.chunk(key_of(number), [number], tenant=(A, B, b"")[number % 3])
                worker.submit(stores=[StoreJob(number, [chunk])])
                assert worker.outcome(number) is Outcome.OK
                done = number + 1
                sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == done)  # noqa: B023
            written = sidecar.status()["counters"]["bytes_written"]
        yield url, written // (3 * TENANTS_CHUNKS)


@pytest.mark.parametrize(
    ("bound", "scope"),
    [
        pytest.param(bound, scope, marks=[] if kind == place else [pytest.mark.nightly])
        for kind, bound in enumerate(("ttl", "bytes", "objects"))
        for place, scope in enumerate(("namespace", "tenant", "named tenant"))
    ],
)
@pytest.mark.slow
def test_each_bound_withdraws_and_deletes_the_oldest(
    bound: str, scope: str, shared: tuple[str, int], tmp_path: Path, kvlake: Command
) -> None:
    """Seen in a dry run, with the setting that each chunk falls to, and then done."""
    url, size_bytes = shared
    shutil.copytree(url.removeprefix("file://"), tmp_path / "bucket")
    store = {"url": f"file://{tmp_path}/bucket", **QUICK}
    whole = scope == "namespace"
    keep = 6 if whole else 2
    limit = {"ttl": 1.0, "bytes": keep * size_bytes + size_bytes // 2, "objects": keep}[bound]
    name = {"ttl": "ttl", "bytes": "max", "objects": "objects_max"}[bound]
    tenants: dict[str, Any] = {"default": {}, "named": {"team-a": {"id": A.hex()}}}
    if whole:
        setting = f"store.{'size_max' if bound == 'bytes' else name}"
        store[setting.partition(".")[2]] = limit
    else:
        setting = f"tenants.store_{name}"
        place = tenants["default"] if scope == "tenant" else tenants["named"]["team-a"]
        place[f"store_{name}"] = limit
    owners = ["team-a", B.hex(), "unsalted"] if scope != "named tenant" else ["team-a"]
    each = TENANTS_CHUNKS if bound == "ttl" else TENANTS_CHUNKS - 2
    going = len(owners) * each

    def tried() -> Any:
        return kvlake.json(store, "gc", "--dry-run", "--list", tenants=tenants)

    until = time.monotonic() + 30
    while (told := tried())["namespaces"][0]["withdrawn"] < going and time.monotonic() < until:
        time.sleep(0.1)
    assert {victim["bound"] for victim in told["victims"]} == {setting}
    assert len(told["victims"]) == going
    by = told["namespaces"][0]["withdrawn_by"]
    assert {one["bound"] for one in by} == {setting}
    # Any chunk of one minute may go, so a namespace does not say whose.
    mixed = whole and bound != "ttl"
    if not mixed:
        assert {one["tenant"]: one["objects"] for one in by} == dict.fromkeys(owners, each)
    page = kvlake(store, "gc", "--dry-run", "--list", tenants=tenants)
    assert sum(line.endswith(setting) for line in page.splitlines()) == going
    assert "BOUND" in page
    assert "nothing was changed" in page
    [told] = kvlake.json({**store, **SOON}, "gc", "--wait", tenants=tenants)["namespaces"]
    assert (told["withdrawn"], told["deleted"]) == (going, going)
    assert len(list(tmp_path.glob("bucket/v1/*/??/*/*.arrow"))) == 3 * TENANTS_CHUNKS - going
    held = kvlake.json(store, "du", tenants=tenants)["namespaces"][0]["tenants"]
    left = {one["tenant"]: one["objects"] for one in held}
    assert sum(left.values()) == 3 * TENANTS_CHUNKS - going
    if mixed:
        return
    expected = dict.fromkeys(("team-a", B.hex(), "unsalted"), TENANTS_CHUNKS)
    expected |= dict.fromkeys(owners, TENANTS_CHUNKS - each)
    assert left == {owner: count for owner, count in expected.items() if count}


@pytest.mark.parametrize(
    ("words", "sections", "said"),
    [
        (["gc"], {}, "has no section store"),
        (["ls", "ffff"], {"store": {"url": "file:///nowhere/at/all"}}, "0 of the store's"),
        (["gc"], {"store": {"url": "file:///proc/nowhere"}}, "store.url"),
        (["gc", "--list"], {"store": {"url": "file:///tmp"}}, "give it together with --dry-run"),
        (["ls", "f", "--key", "xyz"], {"store": {"url": "file:///tmp"}}, "hexadecimal digits"),
        (
            ["gc"],
            {"store": {"url": "file:///tmp", "gc": {"grace": "5s"}}},
            "gc.grace=5s: a chunk may still be read",
        ),
    ],
)
def test_impossible_commands_are_refused_with_a_message(
    words: list[str],
    sections: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "command.yaml"
    path.write_text(yaml.safe_dump(sections))
    assert main([*words, "--config", str(path)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["du"], ["ls"], ["gc"], ["gc", "--dry-run"]])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TierUnavailable("the store is away", retryable=True), 1),
        (TierUnavailable("no such bucket", retryable=False), 2),
        (Superseded("another process has the lease"), 1),
    ],
)
def test_only_what_lasts_asks_for_another_command(
    words: list[str],
    error: Exception,
    code: int,
    store: dict[str, Any],
    kvlake: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of these ended with 2, after which scripts do not try again."""

    class Failing(Wrapper):
        async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
            raise error

    places.patch(monkeypatch, "open_store", lambda settings: open_store(settings, Failing))
    assert str(error) in kvlake(store, *words, code=code)


def test_gc_says_no_while_another_has_the_lease(
    store: dict[str, Any], kvlake: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def take() -> None:
        tier = UrlObjects(store["url"])
        assert await CatalogLease(tier, "another", seconds=600.0).acquire()
        await tier.close()

    anyio.run(take)
    monkeypatch.setattr(gc, "LEASE_SECONDS", 0.1)
    monkeypatch.setattr(gc, "LEASE_POLL_SECONDS", 0.1)
    assert "the store's lease is held by another" in kvlake(store, "gc", code=1)


def test_sidecars_collect_by_themselves(
    short_directory: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on one folder: what is too much goes from both, and from the folder."""
    places.patch(monkeypatch, "KEEP_SECONDS_MIN", 0.5)
    store = {**store, "objects_max": 6, **SOON}
    first = config_in(short_directory, store=store, runtime={"name": "first"})
    second = config_in(short_directory, store=store, runtime={"name": "second"})
    with (
        RunningSidecar(first) as here,
        RunningSidecar(second) as there,
        Worker(here.path) as worker,
        Worker(there.path),
        Scheduler(there.path) as scheduler,
    ):
        for number in range(8):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
        here.wait_until(lambda now: now["counters"]["chunks_written"] == 8)
        for sidecar in (here, there):
            sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 6)
        there.wait_until(lambda now: objects(short_directory) == 6)
        offered = [number for number in range(8) if scheduler.flags(key_of(number)) == [FLAG_STORE]]
        assert len(offered) == 6
        told = [one.status()["tiers"]["store"]["collection"] for one in (here, there)]
        assert [one["state"] for one in told] == ["on", "on"]
        assert sum(one["withdrawn"] for one in told) == 2
        assert sum(one["withdrawn_by"].get("store.objects_max", 0) for one in told) == 2
        counted = b'kvlake_collection_withdrawn_by_bound_total{bound="store.objects_max"}'
        assert counted in here.get("/metrics")
        assert b"kvlake_collection_rounds_total" in here.get("/metrics")


def test_a_store_without_exclusive_create_works_and_is_reported(
    short_directory: Path, store: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sidecar.replacing import Replacing

    store = {**store, "objects_max": 1, "gc": {"every": 1.0}}
    config = config_in(short_directory, store=store)
    with RunningSidecar(config, wrap_store=Replacing) as sidecar, Worker(sidecar.path) as worker:
        for number in range(3):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
        # It is well once it was read to its end, which may be after three chunks of its own.
        told = sidecar.wait_until(lambda now: now["tiers"]["store"]["state"] == "ok")
        told = told["tiers"]["store"]
        assert told["catalog"]["compacts"] is False
        assert "cannot create" in told["collection"]["state"]
    assert not list((short_directory / "bucket").glob("v1/lease/*"))
    lines = [one for one in caplog.messages if "its catalog is not compacted" in one]
    assert len(lines) == 1
