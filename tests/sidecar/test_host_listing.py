"""`kvlake du` and `ls` on host memory: of a real sidecar, with a store and without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sidecar.cli import main
from sidecar.observe.host_contents import QueryError, parse_query
from sidecar.protocol import Outcome, Role, StoreJob, tenant_id
from tests import places
from tests.sidecar.client import (
    NAMESPACE,
    RunningSidecar,
    Scheduler,
    Worker,
    config_in,
    key_of,
)
from tests.sidecar.engine_names import key
from tests.sidecar.worlds import no_writes

A, B = tenant_id("a"), tenant_id("b")
OTHER = json.dumps({"model": {"digest": "ab" * 32}}).encode()
CHUNKS = 7


class Command:
    """Runs `kvlake` in this process, with `--url` or a configuration without a store."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = folder / "command.yaml"
        self._capsys = capsys
        self.sections: dict[str, Any] = {}

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it prints: its result, or with another code its message."""
        self.path.write_text(yaml.safe_dump(self.sections))
        ended = main([*words, *([] if "--url" in words else ["--config", str(self.path)])])
        told = self._capsys.readouterr()
        assert ended == code, told.err
        return told.err if code else told.out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--json"))


@pytest.fixture
def kvlake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(tmp_path, capsys)


def fill(worker: Worker, chunks: int = CHUNKS, first: int = 0) -> None:
    """Chunks of tenant A, tenant B and nobody, in turn."""
    for number in range(first, first + chunks):
        chunk = worker.chunk(key_of(number), [number % 32], tenant=(A, B, b"")[number % 3])
        worker.submit(stores=[StoreJob(number, [chunk])])
        assert worker.outcome(number) is Outcome.OK


def keys(numbers: range = range(CHUNKS)) -> list[str]:
    return sorted(key_of(number).hex() for number in numbers)


def test_host_memory_is_listed_without_a_store(short_directory: Path, kvlake: Command) -> None:
    tenants = {"named": {"team-a": {"id": A.hex()}}}
    config = config_in(short_directory, tenants=tenants)
    with RunningSidecar(config) as sidecar:
        url = sidecar.info.http_url
        kvlake.sections = {"http": {"port": int(url.rpartition(":")[2])}}
        assert "no engine has attached yet" in kvlake("du")
        assert "no engine has attached yet" in kvlake("ls")
        with (
            Worker(sidecar.path) as worker,
            Worker(
                sidecar.path, namespace=OTHER, model="/models/llama", engine_id="other"
            ) as other,
        ):
            fill(worker)
            fill(other, 2, first=100)
            used_bytes = sidecar.status()["tiers"]["host"]["used_bytes"]
            told = kvlake.json("du")
            assert told["host"] == url
            by_model = {one["model"]: one for one in told["namespaces"]}
            assert {name: one["chunks"] for name, one in by_model.items()} == {
                "tests/tiny": CHUNKS,
                "/models/llama": 2,
            }
            assert sum(one["size_bytes"] for one in told["namespaces"]) == used_bytes
            tiny = by_model["tests/tiny"]
            assert {one["tenant"]: one["parts"] for one in tiny["tenants"]} == {
                "team-a": 3,
                B.hex(): 2,
                "unsalted": 2,
            }
            assert tiny["about"] == json.loads(NAMESPACE)
            page = kvlake("du")
            assert page.startswith(f"host memory of the sidecar at {url}\nNAMESPACE ")
            assert "/models/llama" in page
            assert kvlake.json("du", "--namespace", tiny["namespace"])["namespaces"] == [tiny]
            assert kvlake.json("ls")["namespaces"] == [
                one["namespace"] for one in told["namespaces"]
            ]
            assert "tests/tiny" in kvlake("ls")
            listed = kvlake.json("ls", tiny["namespace"][:5])
            assert [one["key"] for one in listed["chunks"]] == keys()
            assert not listed["more"]
            page = kvlake("ls", tiny["namespace"])
            assert [line.split()[0] for line in page.splitlines()[3:]] == keys()
            assert all(len(line) < 120 for line in page.splitlines())
            assert page.count("loadable") == CHUNKS
            assert page.count("team-a") == 3


def test_a_listing_is_fetched_page_by_page(
    short_directory: Path, kvlake: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "PAGE_CHUNKS", 2)
    places.patch(monkeypatch, "CHUNKS_PER_SLICE", 3)
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path) as worker:
        fill(worker)
        url = sidecar.info.http_url
        [namespace] = kvlake.json("ls", "--url", url)["namespaces"]
        for limit in range(CHUNKS + 2):
            told = kvlake.json("ls", namespace, "--url", url, "--limit", str(limit))
            assert [one["key"] for one in told["chunks"]] == keys()[:limit]
            assert told["more"] == (limit < CHUNKS)
        page = kvlake("ls", namespace, "--url", url, "--limit", "3")
        assert page.endswith("more than --limit; raise it, or narrow it with --key\n")
        for words, numbers in (
            (("--key", keys()[2][:9].upper()), None),
            (("--tenant", A.hex()), range(0, CHUNKS, 3)),
            (("--tenant", "unsalted"), range(2, CHUNKS, 3)),
            (("--tenant", "0" * 16), range(2, CHUNKS, 3)),
            (("--tenant", "1" * 16), range(0)),
        ):
            told = kvlake.json("ls", namespace, "--url", url, *words)
            expected = keys()[2:3] if numbers is None else keys(numbers)
            assert [one["key"] for one in told["chunks"]] == expected


def test_a_chunk_shows_its_state(short_directory: Path, kvlake: Command) -> None:
    store = {"url": f"file://{short_directory}/bucket"}
    with (
        RunningSidecar(config_in(short_directory, store=store)) as sidecar,
        Worker(sidecar.path, world_size=2, topology="two", engine_id="two") as worker,
        Worker(sidecar.path) as alone,
        Scheduler(sidecar.path) as scheduler,
    ):
        assert worker.store(1, key_of(1), [1]) is Outcome.OK
        assert alone.store(2, key_of(1), [1]) is Outcome.OK
        assert alone.store(3, key_of(2), [2]) is Outcome.OK
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 2)
        scheduler.lease(7, [key_of(2)])
        sidecar.wait_until(lambda now: now["leases"] == 1)
        url = sidecar.info.http_url
        # The configuration has a store: host memory is asked for by name.
        kvlake.sections = {"store": store}
        assert "holds" not in kvlake("du")
        [namespace] = kvlake.json("ls", "--url", url)["namespaces"]
        told = kvlake.json("ls", namespace, "--url", url)["chunks"]
        # Two ways of cutting the model have a chunk of one key each.
        found = {(one["key"], one["loadable"], one["pinned"], one["in_store"]) for one in told}
        assert found == {
            (key_of(1).hex(), False, False, False),
            (key_of(1).hex(), True, False, True),
            (key_of(2).hex(), True, True, True),
        }
        assert "in part" in kvlake("ls", namespace, "--url", url)
        assert "loadable, pinned, in the store" in kvlake("ls", namespace, "--url", url)
        # No token ids, and no cache salt.
        assert set(told[0]) == {
            *("key", "parent", "size_bytes", "parts", "num_blocks", "tenant"),
            *("loadable", "pinned", "in_store"),
        }


def test_invalid_queries_are_refused_with_a_message(short_directory: Path, kvlake: Command) -> None:
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path):
        url = sidecar.info.http_url
        for words, said in (
            (("ls", "ffff"), "namespace 'ffff': 0 of the namespaces in host memory begin with it"),
            (("du", "--namespace", "ffff"), "namespace 'ffff': 0 of the namespaces in host memory"),
            (("ls", "", "--key", "xyz"), "key='xyz': keys are 64 hexadecimal digits"),
            (("ls", "", "--tenant", "team-a"), "tenant 'team-a': the configuration names unsalted"),
        ):
            assert said in kvlake(*words, "--url", url, code=2)
    assert "no answer from" in kvlake("du", "--host", "--url", url, code=1)
    kvlake.sections = {"http": {"port": int(url.rpartition(":")[2])}}
    said = kvlake("ls", code=1)
    assert "the configuration has no store, so host memory is asked for: no answer from" in said


def test_the_token_is_required(short_directory: Path, kvlake: Command, tmp_path: Path) -> None:
    token = "a-token-of-enough-characters"
    config = config_in(short_directory, http={"port": 0, "token": token})
    with RunningSidecar(config) as sidecar:
        url = sidecar.info.http_url
        for path in ("/host", "/host/chunks"):
            said = kvlake("du", "--url", url, code=1)
            assert "needs a token, and none was given; give --config" in said, path
            assert "in place of --url, or --token-file" in said, path
        kept = tmp_path / "token"
        kept.write_text(token)
        kept.chmod(0o600)
        assert "no engine" in kvlake("du", "--url", url, "--token-file", str(kept))


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": "1001"}, "limit"),
        ({"limit": "-1"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"limit": "00000000099999"}, "limit"),
        ({"key": "0" * 65}, "key"),
        ({"after": "0" * 64}, "after"),
        ({"after": "x"}, "after"),
    ],
)
def test_a_query_outside_its_bounds(query: dict[str, str], field: str) -> None:
    with pytest.raises(QueryError, match=f"^{field}="):
        parse_query(query)


def test_host_memory_by_depth_and_age(short_directory: Path, kvlake: Command) -> None:
    with RunningSidecar(config_in(short_directory)) as sidecar, Worker(sidecar.path) as worker:
        kvlake.sections = {"http": {"port": int(sidecar.info.http_url.rpartition(":")[2])}}
        assert "LAST USED" not in kvlake("du")
        parent = bytes(32)
        # Chunks of 64 tokens: 16 begin below 1,024 tokens.
        for number in range(20):
            key = key_of("chain", number)
            assert worker.store(number, key, [number % 8], parent) is Outcome.OK
            parent = key
        assert worker.store(20, key_of("orphan"), [0], key_of("elsewhere")) is Outcome.OK
        (tiny,) = kvlake.json("du")["namespaces"]
        chunks = {name: sums["chunks"] for name, sums in tiny["depths"].items()}
        assert chunks == {"1k": 16, "4k": 4, "16k": 0, "64k": 0, "more": 0, "unknown": 1}
        assert {name for name, sums in tiny["ages"].items() if sums["chunks"]} == {"1 min"}
        assert tiny["ages"]["1 min"]["size_bytes"] == tiny["size_bytes"]
        page = kvlake("du").splitlines()
        (heading,) = (number for number, line in enumerate(page) if "TOKENS BEFORE" in line)
        assert page[heading + 1].split()[1:] == ["76%", "19%", "0%", "0%", "0%", "5%"]


def test_a_use_makes_a_chunk_young() -> None:
    world = no_writes(slabs=1, slab_slots=4)
    worker, scheduler = world.open(Role.WORKER), world.open(Role.SCHEDULER)
    world.stored(worker, 1, [1])
    world.now += 100.0
    world.stored(worker, 2, [2])
    chunks = world.engine.directory.realms[0].chunks
    assert chunks[key(2)].used_at - chunks[key(1)].used_at == 100.0
    world.now += 50.0
    world.use(scheduler, [1])
    assert chunks[key(1)].used_at - chunks[key(2)].used_at == 50.0
