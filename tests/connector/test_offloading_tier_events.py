"""KV events of chunks of vLLM's own offloading: from `KVLakeTier` to vLLM's publisher, and in the
sidecar's own stream, read with vLLM's definitions. The sidecars are real."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import Medium, OffloadKey

from sidecar.protocol import tiers_owner
from tests.connector.offloading_node import CHUNKS, CONFIG, ROW_BYTES, Node, node, words
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("warm_sidecars")

HELD_MAX = 2 << 20
"""Bytes of a small host pool."""

Place = tuple[Medium, OffloadKey]


class Listener:
    """What a subscriber that applies a node's events knows of the tiers."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.holds: set[Place] = set()
        self.removed: list[Place] = []
        """All that was told as removed, in order."""

    def until(self, true: Callable[[], bool]) -> None:
        def so_far() -> bool:
            self._take()
            return true()

        self._node.until(so_far)

    def _take(self) -> None:
        for event in self._node.manager.take_events():
            if not event.ownership:
                # vLLM's own host tier.
                continue
            assert event.ownership == self._node.tier.keys.owner
            # By this vLLM keeps which blocks are in it for as long as it holds.
            assert event.removal_expected == (not event.removed)
            for key in event.keys:
                place = (event.medium, key)
                if event.removed:
                    assert place in self.holds, "what was not told is not told as removed"
                    self.holds.remove(place)
                    self.removed.append(place)
                else:
                    assert place not in self.holds, "told once"
                    self.holds.add(place)

    def until_holds(self, **held: list[OffloadKey]) -> None:
        """Until it has just these chunks, by the name of the medium."""
        expected = {(Medium[name], key) for name, keys in held.items() for key in keys}
        self.until(lambda: self.holds == expected)


def store_in(folder: Path, **given: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    soon = {"refresh_seconds": "100ms", "catalog_flush": "100ms", "recompute": "never"}
    return {"url": f"file://{folder}", **soon, **given}


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def sidecar(tmp_path: Path, bucket: Path) -> Iterator[SidecarProcess]:
    config = {**CONFIG, "store": store_in(bucket), "events": {"enabled": True}}
    with SidecarProcess(tmp_path / "s", config) as sidecar:
        yield sidecar


@pytest.fixture
def subscribe() -> Iterator[Callable[[SidecarProcess], Subscriber]]:
    made: list[Subscriber] = []

    def make(sidecar: SidecarProcess) -> Subscriber:
        events = sidecar.status()["events"]
        made.append(Subscriber(events["endpoint"], events["replay_endpoint"]))
        return made[-1]

    yield make
    for subscriber in made:
        subscriber.close()


def keys_of(one: Node, prompt: list[str]) -> list[OffloadKey]:
    """What vLLM calls a prompt's chunks; the tier is not asked for them."""
    context, keys = one.request(f"names of {prompt[0]}", prompt)
    one.manager.on_request_finished(context)
    return list(keys)


# --- vLLM's publisher ----------------------------------------------------------------------------


@pytest.mark.promise("events-offloading")
def test_chunks_of_others_are_published_when_looked_up(sidecar: SidecarProcess) -> None:
    """What was there when the engine started, and what came later, in both tiers."""
    before, later, never = words(3), words(2), words(2)
    with node(sidecar) as other:
        other.store("a", before)
        other.settle()
        with node(sidecar) as first:
            listener = Listener(first)
            other.store("b", later)
            other.store("c", never)
            other.settle()
            told_of = len(before + later + never)
            sidecar.wait("all is written", lambda now: now["tiers"]["store"]["chunks"] == told_of)
            unnamed = first.tier.keys.unnamed
            listener.until(lambda: sum(map(len, unnamed.values())) == 2 * told_of)
            assert not listener.holds
            keys = keys_of(first, before)
            assert first.find("d", before) == len(before)
            listener.until_holds(CPU=keys, STORAGE=keys)
            assert first.find("e", later) == len(later)
            keys += keys_of(first, later)
            listener.until_holds(CPU=keys, STORAGE=keys)
            assert not listener.removed


def test_chunks_from_the_catalog_are_published(
    sidecar: SidecarProcess, tmp_path: Path, bucket: Path
) -> None:
    prompt = words(3)
    with node(sidecar) as other:
        other.store("a", prompt)
        other.settle()
        sidecar.wait("it is written", lambda now: now["tiers"]["store"]["chunks"] == len(prompt))
    config = {**CONFIG, "store": store_in(bucket)}
    with SidecarProcess(tmp_path / "o", config) as there, node(there) as first:
        listener = Listener(first)
        there.wait("it is listed", lambda now: now["tiers"]["store"]["chunks"] == len(prompt))
        context, keys = first.request("b", prompt)
        # Asked for, and not waited for: it is told of the store before it is in host memory.
        first.manager.lookup(keys[0], context)
        first.manager.on_request_finished(context)
        listener.until(lambda: (Medium.STORAGE, keys[0]) in listener.holds)
        assert first.find("c", prompt) == len(prompt)
        listener.until_holds(CPU=keys, STORAGE=keys)


def test_evicted_chunks_are_published_as_removed(tmp_path: Path, bucket: Path) -> None:
    small = {**CONFIG, "host": {"size": HELD_MAX}, "store": store_in(bucket)}
    prompt = words(3)
    with SidecarProcess(tmp_path / "s", small) as sidecar, node(sidecar) as first:
        listener = Listener(first)
        keys = keys_of(first, prompt)
        first.store("a", prompt)
        first.settle()
        listener.until_holds(CPU=keys, STORAGE=keys)
        for number in range(2 * HELD_MAX // ROW_BYTES // CHUNKS):
            first.store(f"fill-{number}", words(CHUNKS))
            first.settle()
        gone = {(Medium.CPU, key) for key in keys}
        listener.until(lambda: gone <= set(listener.removed))
        assert {(Medium.STORAGE, key) for key in keys} <= listener.holds
        # And it comes back.
        assert first.find("b", prompt) == len(prompt)
        listener.until(lambda: gone <= listener.holds)


@pytest.mark.promise("events-offloading")
def test_chunks_that_the_store_loses_are_published_as_removed(tmp_path: Path, bucket: Path) -> None:
    bounds = {
        "objects_max": 4,
        "deadline_seconds_max": "2s",
        "gc": {"every": "1s", "grace": "2200ms"},
    }
    config = {**CONFIG, "store": store_in(bucket, **bounds)}
    prompt = words(5)
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as first:
        listener = Listener(first)
        keys = keys_of(first, prompt)
        first.store("a", prompt)
        first.settle()
        listener.until(lambda: len(listener.removed) == len(prompt) - 4)
        assert {medium for medium, _ in listener.removed} == {Medium.STORAGE}
        left = [key for key in keys if (Medium.STORAGE, key) not in listener.removed]
        listener.until_holds(CPU=keys, STORAGE=left)


@pytest.mark.promise("events-offloading")
def test_after_a_reset_nothing_from_before_is_published(sidecar: SidecarProcess) -> None:
    prompt = words(3)
    with node(sidecar) as first, node(sidecar) as other:
        listener = Listener(first)
        keys = keys_of(first, prompt)
        first.store("a", prompt)
        first.settle()
        listener.until_holds(CPU=keys, STORAGE=keys)
        first.reset()
        listener.until_holds()
        # It is there for others, and not for this engine, which finds nothing by that name.
        assert other.find("b", prompt) == len(prompt)
        assert first.find("c", prompt) == 0
        listener.until_holds()
        first.store("d", prompt)
        first.settle()
        listener.until_holds(CPU=keys, STORAGE=keys)


def test_a_sidecar_that_is_gone_and_comes_back(tmp_path: Path, bucket: Path) -> None:
    config = {**CONFIG, "store": store_in(bucket)}
    prompt = words(3)
    with SidecarProcess(tmp_path / "s", config) as sidecar, node(sidecar) as first:
        listener = Listener(first)
        keys = keys_of(first, prompt)
        first.store("a", prompt)
        first.settle()
        listener.until_holds(CPU=keys, STORAGE=keys)
        assert sidecar.drain() == 0
        listener.until_holds()
        with SidecarProcess(tmp_path / "s", config):
            # Nobody asks for them: their names are known.
            listener.until_holds(STORAGE=keys)


# --- the sidecar's own stream --------------------------------------------------------------------


@pytest.mark.promise("events-offloading")
def test_events_have_no_tokens(
    sidecar: SidecarProcess,
    tmp_path: Path,
    bucket: Path,
    subscribe: Callable[[SidecarProcess], Subscriber],
) -> None:
    """A tier does not know which tokens are in a row, nor how many."""
    prompt = words(3)
    follower = subscribe(sidecar)
    with node(sidecar) as first:
        namespace = first.tier.keys.digest
        first.store("a", prompt)
        first.settle()
        follower.until(lambda: len(follower.names("STORAGE")) == len(prompt))
        late = subscribe(sidecar)
        late.see()
        for subscriber in (follower, late):
            assert_honest(subscriber, tiers_owner(namespace, "offloading", 1))
            hosted = subscriber.names("CPU")
            assert hosted == subscriber.names("STORAGE")
            # A chain all the same.
            parents = {parent_of(subscriber, name) for name in hosted}
            assert len(parents & hosted) == len(prompt) - 1
            assert None in parents
    config = {**CONFIG, "store": store_in(bucket), "events": {"enabled": True}}
    with SidecarProcess(tmp_path / "o", config) as there, node(there):
        listed = subscribe(there)
        listed.until(lambda: listed.names("STORAGE") == follower.names("STORAGE"))
        late = subscribe(there)
        late.see()
        for subscriber in (listed, late):
            assert_honest(subscriber, tiers_owner(namespace, "offloading", 1))


def assert_honest(subscriber: Subscriber, owner: str) -> None:
    held = [event for place in subscriber.blocks.values() for event in place.values()]
    assert held
    for event in held:
        assert event.token_ids == []
        assert event.block_size == 0
        assert event.group_idx is None
        assert event.ownership == owner


def parent_of(subscriber: Subscriber, name: bytes) -> bytes | None:
    (event,) = (
        held[name]
        for place, held in subscriber.blocks.items()
        if place.medium == "CPU" and name in held
    )
    parent: bytes | None = event.parent_block_hash
    return parent
