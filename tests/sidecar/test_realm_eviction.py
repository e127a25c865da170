"""More models than there is room for: what nobody uses is forgotten, what is in use stays."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread
import msgspec
import pytest

from sidecar.config.model import Config
from sidecar.events.records import name_of
from sidecar.protocol import Attached, Group, Outcome, Role, StoreJob, codec
from tests import places
from tests.mappings import open_fds, sizes_of
from tests.sidecar.client import (
    BLOCK_TOKENS,
    BLOCKS_PER_CHUNK,
    HEADS,
    WAIT_SECONDS_MAX,
    RefusedError,
    RunningSidecar,
    Scheduler,
    Worker,
    attach_message,
    config_in,
    key_of,
    layout_of,
)
from tests.sidecar.configurations import with_events
from tests.sidecar.subscriber import Subscriber
from tests.sidecar.test_groups import HybridWorker, hybrid_scheduler, store_of
from tiers.kv.index import FLAG_HOST, FLAG_STORE, GONE_EXPIRED, tags_of
from tiers.kv.layout import Segment
from tiers.store.middleware import Verb, Wrapper
from tiers.store.object_tier import ObjectTier

T = TypeVar("T")

ATTACHES = 1000
INDEX_BYTES_MAX = 256 << 10
"""Size of a new index, with its header."""


def model(number: object) -> bytes:
    return json.dumps({"model": f"tests/{number}"}).encode()


def limited(config: Config, realms_max: int) -> Config:
    """With fewer realms than an operator may ask for."""
    limits = config.limits.model_copy(update={"realms_max": realms_max})
    return config.model_copy(update={"limits": limits})


def folder_store(directory: Path, **settings: Any) -> dict[str, Any]:
    return {
        "url": f"file://{directory}/bucket",
        "refresh_seconds": 0.05,
        "catalog_flush": 0.05,
        **settings,
    }


class Engine:
    """A worker and a scheduler of a model."""

    def __init__(self, stack: ExitStack, sidecar: RunningSidecar, number: object) -> None:
        names: Any = {"namespace": model(number), "engine_id": f"engine {number}"}
        self.worker = stack.enter_context(Worker(sidecar.path, **names))
        self.scheduler = stack.enter_context(Scheduler(sidecar.path, **names))

    def stores(self, *keys: bytes) -> list[bytes]:
        """Store the same blocks under each key; returns what is in them."""
        content = self.worker.fill(range(4), seed=keys[0][0])
        for number, key in enumerate(keys):
            assert self.worker.store(number + 1, key, range(4)) is Outcome.OK
        return content

    def loads(self, key: bytes) -> list[bytes]:
        self.worker.poison()
        job_id = len(self.worker.done) + 100
        assert self.worker.load(job_id, key, range(4, 8)) is Outcome.OK
        return [self.worker.read(block) for block in range(4, 8)]


def left(sidecar: RunningSidecar) -> dict[str, Any]:
    """The status once nobody is attached any more."""
    return sidecar.wait_until(lambda now: not now["sessions"])


def visit(sidecar: RunningSidecar, number: object, *keys: bytes) -> list[bytes]:
    """A model's engine attaches, stores, and leaves. Returns what it stored under each key."""
    with ExitStack() as stack:
        engine = Engine(stack, sidecar, number)
        content = engine.stores(*keys) if keys else []
    left(sidecar)
    return content


def pass_by(sidecar: RunningSidecar, **changes: Any) -> None:
    """A scheduler attaches and leaves, without ZMQ; returns when its session is over."""
    message = attach_message(Role.SCHEDULER, **{"engine_id": "passes by", **changes})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(WAIT_SECONDS_MAX)
        client.connect(str(sidecar.path))
        client.sendall(codec.frame_stream(codec.encode(message)))
        data, fds, _, _ = socket.recv_fds(client, 1 << 16, 1)
        for fd in fds:
            socket.close(fd)
        reply = codec.decode_attach_reply(data[4:])
        assert isinstance(reply, Attached), reply
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


# --- how many ------------------------------------------------------------------------------------


@pytest.mark.promise("realm-limit")
def test_a_thousand_namespaces_one_after_another_take_no_more_than_the_limit(
    short_directory: Path,
) -> None:
    config = config_in(short_directory, limits={"realms_max": 64})
    # Indexes of earlier tests in this process, which are unmapped when they are collected.
    others = sizes_of("kvlake-index").keys()

    def index_bytes_mapped() -> int:
        sizes = sizes_of("kvlake-index")
        return sum(size for inode, size in sizes.items() if inode not in others)

    with RunningSidecar(config) as sidecar:
        for number in range(64):
            pass_by(sidecar, namespace=model(number))
        fds, mapped = open_fds(), index_bytes_mapped()
        assert mapped <= 64 * INDEX_BYTES_MAX
        assert left(sidecar)["index"]["size_bytes"] == mapped
        for number in range(64, ATTACHES):
            pass_by(sidecar, namespace=model(number))
        now = left(sidecar)
        assert index_bytes_mapped() == mapped
        # Both ends of the status page's connection may be open yet.
        assert open_fds() <= fds + 2
        assert now["index"] == {
            "size_bytes": mapped,
            "realms": 64,
            "realms_max": 64,
            "realms_forgotten": ATTACHES - 64,
        }
        names = [one["namespace"]["model"] for one in now["realms"]]
        assert names == [f"tests/{number}" for number in range(ATTACHES - 64, ATTACHES)]
        metrics = sidecar.get("/metrics").decode()
        told = dict(re.findall(r"^kvlake_((?:realms|index)\w*) (.*)$", metrics, re.MULTILINE))
        assert {name: float(value) for name, value in told.items()} == {
            "realms": 64,
            "realms_max": 64,
            "realms_forgotten_total": ATTACHES - 64,
            "index_bytes": mapped,
        }


@pytest.mark.promise("realm-limit")
def test_more_models_than_the_limit_are_served_one_after_another(short_directory: Path) -> None:
    config = limited(config_in(short_directory), 3)
    with RunningSidecar(config) as sidecar:
        for number in range(10):
            with ExitStack() as stack:
                engine = Engine(stack, sidecar, number)
                content = engine.stores(key_of(number))
                assert engine.scheduler.flags(key_of(number)) == [FLAG_HOST]
                assert engine.loads(key_of(number)) == content
            left(sidecar)
        ids = [one["realm_id"] for one in sidecar.status()["realms"]]
        assert ids == [8, 9, 10], "an id is used once"


# --- what stays ----------------------------------------------------------------------------------


@pytest.mark.promise("realm-limit")
def test_new_namespaces_push_out_none_that_is_used_or_has_chunks_in_host_memory(
    short_directory: Path,
) -> None:
    config = limited(config_in(short_directory), 4)
    kept, used = key_of("kept"), key_of("used")
    with RunningSidecar(config) as sidecar, ExitStack() as stack:
        expected = visit(sidecar, "kept", kept)
        visit(sidecar, "empty")
        engine = Engine(stack, sidecar, "used")
        content = engine.stores(used)
        for number in range(20):
            pass_by(sidecar, namespace=model(number))
        assert engine.scheduler.flags(used) == [FLAG_HOST]
        assert engine.loads(used) == content
        other = Engine(stack, sidecar, "kept")
        assert other.scheduler.flags(kept) == [FLAG_HOST]
        assert other.loads(kept) == expected
        assert sidecar.status()["counters"]["chunks_evicted"] == 0


def test_of_realms_that_all_have_chunks_in_host_memory_the_smallest_gives_way(
    short_directory: Path,
) -> None:
    config = limited(config_in(short_directory), 3)
    keys = {number: [key_of(number, n) for n in range(number)] for number in (3, 1, 2)}
    with RunningSidecar(config) as sidecar:
        contents = {number: visit(sidecar, number, *own) for number, own in keys.items()}
        pass_by(sidecar, namespace=model("new"))
        now = left(sidecar)
        assert now["tiers"]["host"]["chunks"] == now["tiers"]["host"]["classes"][0]["slots_used"]
        assert now["tiers"]["host"]["chunks"] == 5
        with ExitStack() as stack:
            # There is room for it: the new one left, and holds nothing.
            engine = Engine(stack, sidecar, 1)
            assert engine.scheduler.flags(*keys[1]) == [0]
            assert engine.worker.load(99, keys[1][0], range(4)) is Outcome.MISSING
            assert engine.stores(*keys[1]) == contents[1]
        for number in (3, 2):
            with ExitStack() as stack:
                engine = Engine(stack, sidecar, number)
                assert engine.scheduler.flags(*keys[number]) == [FLAG_HOST] * number
                for key in keys[number]:
                    assert engine.loads(key) == contents[number]
            left(sidecar)


def test_many_chunks_are_given_up_in_turns(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "CHUNKS_FORGOTTEN_MAX", 2)
    config = limited(config_in(short_directory), 1)
    with RunningSidecar(config) as sidecar:
        visit(sidecar, "old", *(key_of(number) for number in range(7)))
        assert left(sidecar)["tiers"]["host"]["chunks"] == 7
        content = visit(sidecar, "new", key_of("new"))
        now = left(sidecar)
        assert [one["namespace"]["model"] for one in now["realms"]] == ["tests/new"]
        assert (now["tiers"]["host"]["chunks"], now["counters"]["chunks_evicted"]) == (1, 7)
        with ExitStack() as stack:
            assert Engine(stack, sidecar, "new").loads(key_of("new")) == content


def test_a_client_is_refused_in_words_where_everything_is_in_use(short_directory: Path) -> None:
    config = limited(config_in(short_directory), 2)
    with RunningSidecar(config) as sidecar:
        with ExitStack() as stack:
            engines = [Engine(stack, sidecar, number) for number in range(2)]
            with pytest.raises(RefusedError, match=r"limits\.realms_max=2 .* raise the limit"):
                Scheduler(sidecar.path, namespace=model("new"), engine_id="new")
            for number, engine in enumerate(engines):
                assert engine.stores(key_of(number)) == engine.loads(key_of(number))
        left(sidecar)
        visit(sidecar, "new", key_of("new"))


def test_a_refused_client_pushes_nobody_out(short_directory: Path) -> None:
    config = limited(config_in(short_directory), 2)
    with RunningSidecar(config) as sidecar, ExitStack() as stack:
        Engine(stack, sidecar, "used")
        pass_by(sidecar, namespace=model("idle"))
        for changes in ({"engine_id": "x", "namespace": b"[]"}, {"engine_id": "engine used"}):
            with pytest.raises(RefusedError):
                Scheduler(sidecar.path, **{"namespace": model("x"), **changes})
        names = [one["namespace"]["model"] for one in sidecar.status()["realms"]]
        assert names == ["tests/used", "tests/idle"]


# --- several groups ------------------------------------------------------------------------------


def test_groups_go_with_their_home(short_directory: Path) -> None:
    config = limited(config_in(short_directory), 2)
    keys = [key_of("full"), key_of("window")]
    with RunningSidecar(config) as sidecar:
        with HybridWorker(sidecar.path) as worker:
            chunks = [store_of(0, keys[0], [1, 2, 3, 4]), store_of(1, keys[1], [9, 8])]
            worker.submit(stores=[StoreJob(1, chunks)])
            assert worker.outcome(1) is Outcome.OK
        assert left(sidecar)["tiers"]["host"]["chunks"] == 2
        pass_by(sidecar, namespace=model("new"))
        now = left(sidecar)
        assert [one["namespace"]["model"] for one in now["realms"]] == ["tests/new"]
        assert now["tiers"]["host"]["chunks"] == 0
        with HybridWorker(sidecar.path), hybrid_scheduler(sidecar.path) as scheduler:
            assert scheduler.flags(*keys) == [0, 0]
            assert len(sidecar.status()["realms"]) == 2


def lone_group(number: int) -> Group:
    return Group(model(f"group {number}"), BLOCK_TOKENS, BLOCKS_PER_CHUNK, None, None)


def test_groups_beside_a_home_that_is_used_are_forgotten_alone(short_directory: Path) -> None:
    """A client with a model's namespace and new groups cannot fill its family for ever."""
    config = limited(config_in(short_directory, store=folder_store(short_directory)), 2)
    keys = [key_of("full"), key_of("window")]
    with RunningSidecar(config) as sidecar:
        with HybridWorker(sidecar.path) as worker:
            chunks = [store_of(0, keys[0], [1, 2, 3, 4]), store_of(1, keys[1], [9, 8])]
            worker.submit(stores=[StoreJob(1, chunks)])
            assert worker.outcome(1) is Outcome.OK
            sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 2)
        left(sidecar)
        with Scheduler(sidecar.path) as scheduler:
            assert scheduler.flags(*keys) == [FLAG_HOST | FLAG_STORE] * 2
            for number in range(5):
                pass_by(sidecar, groups=(lone_group(number),))
                # Nothing is left of the group in the index that it shared.
                assert scheduler.flags(*keys) == [FLAG_HOST | FLAG_STORE, 0]
            assert sidecar.status()["index"]["realms"] == 2


def marks(scheduler: Scheduler, *keys: bytes) -> list[int]:
    """All flags of these keys, also why they are gone."""
    found: list[int] = scheduler.index.lookup(tags_of(keys, scheduler.attached.index_salt)).tolist()
    return found


def test_what_a_forgotten_group_has_lost_is_not_in_the_index_that_stays(
    short_directory: Path,
) -> None:
    config = limited(config_in(short_directory), 2)
    keys = [key_of("full"), key_of("window")]
    with RunningSidecar(config) as sidecar:
        with HybridWorker(sidecar.path) as worker, hybrid_scheduler(sidecar.path) as scheduler:
            worker.submit(stores=[StoreJob(1, [store_of(0, keys[0], [1, 2, 3, 4])])])
            worker.submit(stores=[StoreJob(2, [store_of(1, keys[1], [9, 8])], 50)])
            assert [worker.outcome(1), worker.outcome(2)] == [Outcome.OK] * 2
            sidecar.wait_until(lambda now: now["counters"]["chunks_expired"] == 1)
            assert marks(scheduler, *keys) == [FLAG_HOST, GONE_EXPIRED]
        left(sidecar)
        with Scheduler(sidecar.path) as scheduler:
            pass_by(sidecar, groups=(lone_group(1),))
            assert marks(scheduler, *keys) == [FLAG_HOST, 0]


# --- the object store, and who follows it --------------------------------------------------------


def announced(now: dict[str, Any], chunks: int) -> bool:
    catalog = now["tiers"]["store"]["catalog"]
    return now["counters"]["chunks_written"] == chunks and not catalog["rows_waiting"]


def held_in_store(now: dict[str, Any]) -> int:
    return sum(one["store_bytes"] for one in now["tenants"])


def test_a_forgotten_model_finds_in_the_store_what_it_wrote(
    short_directory: Path, subscribe: Callable[..., Subscriber]
) -> None:
    store = folder_store(short_directory)
    config = limited(with_events(short_directory, store=store), 1)
    keys = [key_of("old", number) for number in range(3)]
    names = {name_of(key) for key in keys}
    with RunningSidecar(config) as sidecar:
        follower = subscribe(sidecar)
        content = visit(sidecar, "old", *keys)
        before = sidecar.wait_until(lambda now: announced(now, 3))
        follower.until_equal({"STORAGE": names, "CPU": names})
        for _ in range(2):
            visit(sidecar, "new")
            now = left(sidecar)
            assert (now["tiers"]["store"]["chunks"], now["tiers"]["host"]["chunks"]) == (0, 0)
            assert held_in_store(now) == 0
            follower.until_equal({"STORAGE": set(), "CPU": set()})
            late = subscribe(sidecar)
            late.see()
            assert not late.grouped("STORAGE")
            with ExitStack() as stack:
                engine = Engine(stack, sidecar, "old")
                now = sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 3)
                assert held_in_store(now) == held_in_store(before)
                follower.until_equal({"STORAGE": names, "CPU": set()})
                assert engine.scheduler.flags(*keys) == [FLAG_STORE] * 3
                assert engine.scheduler.lookup(1, keys).ready == 3
                assert engine.loads(keys[1]) == content
                follower.until_equal({"STORAGE": names, "CPU": names})
            left(sidecar)
        files = [
            now["tiers"]["store"]["catalog"]["files_written"] for now in (before, sidecar.status())
        ]
        assert files[0] == files[1], "what is known is not announced again"


def test_what_is_not_announced_yet_is_announced_though_its_model_is_forgotten(
    short_directory: Path,
) -> None:
    store = folder_store(short_directory, catalog_flush=3600)
    config = limited(config_in(short_directory, store=store), 1)
    with RunningSidecar(config) as sidecar:
        content = visit(sidecar, "old", key_of("old"))
        sidecar.wait_until(lambda now: now["counters"]["chunks_written"] == 1)
        visit(sidecar, "new")
        assert sidecar.status()["tiers"]["store"]["catalog"]["rows_waiting"] == 1
    with RunningSidecar(config) as sidecar, ExitStack() as stack:
        engine = Engine(stack, sidecar, "old")
        now = sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 1)
        assert now["tiers"]["store"]["catalog"]["sweeps"] == 0
        assert engine.scheduler.lookup(1, [key_of("old")]).ready == 1
        assert engine.loads(key_of("old")) == content


class HeldCatalog(Wrapper):
    """A store that hands out no file of a catalog until it is let."""

    def __init__(self, inner: ObjectTier) -> None:
        super().__init__(inner)
        self.asked = threading.Event()
        self.let = threading.Event()

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "read" and "/catalog/" in name:
            self.asked.set()
            await anyio.to_thread.run_sync(self.let.wait, WAIT_SECONDS_MAX)
        return await call()


def test_a_model_may_be_forgotten_while_its_catalog_is_read(
    short_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = limited(config_in(short_directory, store=folder_store(short_directory)), 1)
    keys = [key_of("old", number) for number in range(2)]
    with RunningSidecar(config) as sidecar:
        content = visit(sidecar, "old", *keys)
        sidecar.wait_until(lambda now: announced(now, 2))
    held: list[HeldCatalog] = []

    def hold(tier: ObjectTier) -> ObjectTier:
        held.append(HeldCatalog(tier))
        return held[0]

    with RunningSidecar(config, hold) as sidecar:
        visit(sidecar, "old")
        assert held[0].asked.wait(WAIT_SECONDS_MAX)
        visit(sidecar, "new")
        assert sidecar.status()["index"]["realms_forgotten"] == 1
        held[0].let.set()
        with ExitStack() as stack:
            engine = Engine(stack, sidecar, "old")
            sidecar.wait_until(lambda now: now["tiers"]["store"]["chunks"] == 2)
            assert engine.scheduler.flags(*keys) == [FLAG_STORE] * 2
            assert engine.scheduler.lookup(1, keys).ready == 2
            assert engine.loads(keys[0]) == content
        now = left(sidecar)
        assert now["counters"]["stale_messages"] == 0
        assert len(now["realms"]) == 1
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


# --- sizes of slots ------------------------------------------------------------------------------


def test_models_of_more_sizes_than_a_pool_has_classes_are_served(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.patch(monkeypatch, "CLASSES_MAX", 3)
    config = limited(config_in(short_directory), 2)
    with RunningSidecar(config) as sidecar:
        for number in range(8):
            layers = number + 1
            layout = msgspec.structs.replace(
                layout_of(),
                segment=Segment(0, layers, 0, HEADS),
                size_bytes=layers * layout_of().size_bytes,
                layer_offsets_bytes=tuple(
                    layer * layout_of().size_bytes for layer in range(layers)
                ),
            )
            with Worker(sidecar.path, layout=layout, namespace=model(number)) as worker:
                content = worker.fill(range(4), seed=number)
                assert worker.store(1, key_of(number), range(4)) is Outcome.OK
                worker.poison()
                assert worker.load(2, key_of(number), range(4)) is Outcome.OK
                assert [worker.read(block) for block in range(4)] == content
            assert len(left(sidecar)["tiers"]["host"]["classes"]) <= 3
