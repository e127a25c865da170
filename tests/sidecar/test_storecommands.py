"""`kvlake du`, `ls` and `gc` on a folder that sidecars have written, and the collector in one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar import collector
from sidecar.cli import main
from sidecar.protocol import Outcome, tenant_id
from tests.sidecar.client import RunningSidecar, Scheduler, Worker, config_in, key_of
from tiers.index import FLAG_STORE

QUICK: dict[str, Any] = {
    "refresh_seconds": 0.05,
    "catalog_flush": 0.05,
    "deadline_seconds_max": 0.5,
}


@pytest.fixture
def store(short_directory: Path) -> dict[str, Any]:
    return {"url": f"file://{short_directory}/bucket", **QUICK}


def fill(short_directory: Path, store: dict[str, Any], chunks: int) -> None:
    config = config_in(short_directory, store=store)
    with RunningSidecar(config) as sidecar, Worker(sidecar.path) as worker:
        for number in range(chunks):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == chunks)


class Command:
    """Runs `kvlake` on a configuration file, in this process."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._path = folder / "command.yaml"
        self._capsys = capsys

    def __call__(self, store: dict[str, Any], *words: str, **sections: Any) -> str:
        self._path.write_text(yaml.safe_dump({"store": store, **sections}))
        code = main([*words, "--config", str(self._path)])
        told = self._capsys.readouterr()
        assert code == 0, told.err
        return told.out

    def json(self, store: dict[str, Any], *words: str, **sections: Any) -> Any:
        return json.loads(self(store, *words, "--json", **sections))


@pytest.fixture
def kvlake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def objects(short_directory: Path) -> int:
    return len(list((short_directory / "bucket").glob("v1/*/??/*/*.arrow")))


def test_du_and_ls_tell_what_is_there(
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
    assert kvlake(store, "ls").split() == [told["namespace"]]
    listed = kvlake.json(store, "ls", told["namespace"][:4])
    assert {one["key"] for one in listed["chunks"]} == {key_of(n).hex() for n in range(5)}
    assert not listed["more"]
    page = kvlake(store, "ls", told["namespace"], "--limit", "2")
    assert "more than --limit" in page
    assert len(page.splitlines()) == 4
    one = kvlake.json(store, "ls", told["namespace"], "--key", key_of(3).hex()[:9])
    assert [chunk["key"] for chunk in one["chunks"]] == [key_of(3).hex()]
    assert kvlake.json(store, "ls", told["namespace"], "--tenant", "team-a")["chunks"] == []


def test_gc_withdraws_waits_and_deletes(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    fill(short_directory, store, 6)
    bounded = {**store, "objects_max": 2, "gc": {"grace": 1.0}}
    before = sorted(path for path in (short_directory / "bucket").rglob("*"))
    tried = kvlake.json(bounded, "gc", "--dry-run")
    assert tried["dry_run"]
    assert tried["namespaces"][0]["withdrawn"] == 4
    assert sorted(path for path in (short_directory / "bucket").rglob("*")) == before
    assert "nothing was changed" in kvlake(bounded, "gc", "--dry-run")
    [told] = kvlake.json(bounded, "gc")["namespaces"]
    assert (told["withdrawn"], told["deleted"], told["waiting"]) == (4, 0, 4)
    assert objects(short_directory) == 6
    assert kvlake.json(bounded, "du")["namespaces"][0]["objects"] == 2
    [told] = kvlake.json(bounded, "gc", "--wait")["namespaces"]
    assert (told["deleted"], told["waiting"]) == (4, 0)
    assert objects(short_directory) == 2
    assert "KEPT" in kvlake(bounded, "gc")


def test_a_tenants_limit_takes_its_own_oldest(
    short_directory: Path, store: dict[str, Any], kvlake: Command
) -> None:
    fill(short_directory, store, 4)
    salted = {"default": {"store_max": 1}, "named": {"team-a": {"id": tenant_id("a").hex()}}}
    [told] = kvlake.json(store, "gc", tenants=salted)["namespaces"]
    assert told["withdrawn"] == 4


@pytest.mark.parametrize(
    ("words", "sections", "said"),
    [
        (["du"], {}, "has no store"),
        (["ls", "ffff"], {"store": {"url": "file:///nowhere/at/all"}}, "0 of the store's"),
        (["gc"], {"store": {"url": "file:///proc/nowhere"}}, "store.url"),
        (
            ["gc"],
            {"store": {"url": "file:///tmp", "gc": {"grace": "5s"}}},
            "gc.grace=5s: a chunk may still be read",
        ),
    ],
)
def test_what_cannot_be_done_is_said(
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


def test_sidecars_collect_by_themselves(
    short_directory: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two on one folder: what is too much goes from both, and from the folder."""
    monkeypatch.setattr(collector, "KEEP_SECONDS_MIN", 0.5)
    store = {**store, "objects_max": 3, "gc": {"every": 1.0, "grace": 1.0}}
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
            sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
        there.wait_until(lambda now: objects(short_directory) == 3)
        offered = [number for number in range(8) if scheduler.flags(key_of(number)) == [FLAG_STORE]]
        assert len(offered) == 3
        told = [one.status()["tiers"]["store"]["collection"] for one in (here, there)]
        assert [one["state"] for one in told] == ["on", "on"]
        assert sum(one["withdrawn"] for one in told) == 5
        assert b"kvlake_collection_rounds_total" in here.get("/metrics")


def test_a_store_that_cannot_create_works_and_says_so(
    short_directory: Path, store: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    from tests.sidecar.replacing import Replacing

    store = {**store, "objects_max": 1, "gc": {"every": 1.0, "grace": 1.0}}
    config = config_in(short_directory, store=store)
    with RunningSidecar(config, wrap_store=Replacing) as sidecar, Worker(sidecar.path) as worker:
        for number in range(3):
            assert worker.store(number, key_of(number), [number]) is Outcome.OK
        sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
        told = sidecar.status()["tiers"]["store"]
        assert told["state"] == "ok"
        assert told["catalog"]["compacts"] is False
        assert "cannot create" in told["collection"]["state"]
    assert not list((short_directory / "bucket").glob("v1/lease/*"))
    lines = [one for one in caplog.messages if "its catalog is not compacted" in one]
    assert len(lines) == 1
