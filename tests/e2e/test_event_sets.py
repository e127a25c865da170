"""A subscriber of the stream has what the engine's own cache, host memory and the store hold.

Random requests in small caches, several at a time and many of them again: blocks are evicted in
the engine and from host memory, the store's oldest are collected, and vLLM has some blocks twice.
In between vLLM's cache is reset, the sidecar is started again beneath the engine, and the engine
is. Compared are names alone: the hashes in vLLM's block pool, and the keys in the sidecar's
directory. So is what vLLM's own publisher tells of host memory and the store, after a step.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.e2e import telling
from tests.e2e.arms import BLOCK_TOKENS, SESSIONS, counters, idle, words
from tests.e2e.group_suite import ENGINE_ARGS
from tests.e2e.setups import folder_store
from tests.e2e.test_hybrid import WINDOW, write_gemma
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.sidecars import SidecarProcess
from tests.sidecar.subscriber import Place, Subscriber

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.engine,
    pytest.mark.promise("connector", "events-any-order", "suite-events"),
]

TIERS: Final = ("CPU", "STORAGE")
MEDIA: Final = ("GPU", *TIERS)
TOKENS_MAX: Final = 850
PROMPTS: Final = 8
"""Prompts of one number begin alike, whatever their length."""
EQUAL_SECONDS_MAX: Final = 30.0
SMALL_STORE: Final[dict[str, Any]] = {
    # Per group of chunks.
    "objects_max": 12,
    "deadline_seconds_max": "3s",
    "gc": {"every": "1s", "grace": "3200ms"},
}


@dataclass(frozen=True)
class Case:
    """A model, and how many engines of it follow each other on the sidecar."""

    model: str
    engines: int
    blocks: int
    """Blocks of an engine's cache."""
    groups: frozenset[int]

    def __str__(self) -> str:
        return f"{self.model}-{self.engines}"


CASES: Final = [
    Case("llama", 1, 96, frozenset({0})),
    pytest.param(Case("llama", 2, 96, frozenset({0})), marks=pytest.mark.nightly),
    # A group of full attention and two of windows.
    pytest.param(Case("gemma", 2, 160, frozenset({0, 1, 2})), marks=pytest.mark.nightly),
]


def bucket_of(folder: Path, case: Case) -> Path:
    return folder / f"{case}-store"


@pytest.fixture
def sidecar(folder: Path, case: Case) -> Iterator[SidecarProcess]:
    config: dict[str, Any] = {
        "host": {"size": "24MiB", "after_stop": "keep"},
        "store": {**folder_store(bucket_of(folder, case)), **SMALL_STORE},
        "events": {"enabled": True},
    }
    sidecar = SidecarProcess(folder / str(case), config, program=telling.PROGRAM)
    try:
        yield sidecar.start()
    finally:
        if sidecar.process is not None and sidecar.process.poll() is None:
            sidecar.drain()
        sidecar.remove_pool()


@pytest.fixture
def spec(
    folder: Path,
    case: Case,
    model: str,
    sidecar: SidecarProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> EngineSpec:
    if case.model == "gemma":
        model = str(tmp_path)
        write_gemma(tmp_path)
    # Names as numbers of 64 bits, and as whole hashes.
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(case.model == "llama")))
    engine_args = {
        **ENGINE_ARGS,
        "num_gpu_blocks_override": case.blocks,
        "max_model_len": 1024,
        "kv_events_config": telling.events_in(folder / str(case)),
    }
    return EngineSpec(model, sidecar.socket, engine_args, telling.connector_of(sidecar.socket))


@pytest.fixture
def followers(sidecar: SidecarProcess, spec: EngineSpec) -> Iterator[Followers]:
    followers = Followers(sidecar, spec.engine_args["kv_events_config"])
    yield followers
    followers.close()


class Followers:
    """A subscriber that was there from the start, and others that come late; and one of an
    engine's own publisher."""

    def __init__(self, sidecar: SidecarProcess, published: dict[str, Any]) -> None:
        self._sidecar = sidecar
        self._published = published
        self._made: list[Subscriber] = []
        self.first = self._subscribe(sidecar.status()["events"])
        self.own: Subscriber | None = None
        self.seen: telling.Blocks = set()
        """All that the engine's cache was found to hold."""
        self.stored: telling.Blocks = set()
        """All that the store was found to hold."""
        self.copies = 0
        """The most of one block."""

    def close(self) -> None:
        for subscriber in self._made:
            subscriber.close()

    def check(self, engine: EngineProcess | None) -> dict[str, telling.Blocks]:
        """Assert that each has what there is, and what that is. Without an engine it is gone."""
        self._equal(self.first, engine)
        late = self._subscribe(self._sidecar.status()["events"])
        late.see()
        return self._equal(late, engine)

    def meet(self) -> None:
        """Subscribe to what an engine publishes itself, from its start."""
        self.own = self._subscribe(self._published)

    def check_published(self, engine: EngineProcess) -> None:
        """Assert that the engine itself has told what the tiers hold."""
        assert self.own is not None
        deadline = time.monotonic() + EQUAL_SECONDS_MAX
        while True:
            # It tells with its steps. Less than a block is not cached.
            engine.generate(words(BLOCK_TOKENS // 2, 0), max_tokens=1, cache_salt="all")
            self.own.take(50)
            self.own.recover()
            held = telling.in_directory(self._sidecar)
            had = {medium: telling.followed(self.own, medium) for medium in TIERS}
            if held == had:
                break
            assert time.monotonic() < deadline, apart(held, had)
        assert not self.own.snapshots, "vLLM gives none"
        assert places(self.own) == places(self.first)

    def _subscribe(self, events: dict[str, Any]) -> Subscriber:
        self._made.append(Subscriber(events["endpoint"], events["replay_endpoint"]))
        return self._made[-1]

    def _equal(
        self, subscriber: Subscriber, engine: EngineProcess | None
    ) -> dict[str, telling.Blocks]:
        deadline = time.monotonic() + EQUAL_SECONDS_MAX
        while True:
            held = self._held(engine)
            had = {medium: telling.followed(subscriber, medium) for medium in MEDIA}
            if held == had:
                return held
            if time.monotonic() > deadline:
                break
            subscriber.take(50)
            subscriber.recover()
        raise AssertionError(apart(held, had))

    def _held(self, engine: EngineProcess | None) -> dict[str, telling.Blocks]:
        copies: dict[telling.Block, int] = {}
        if engine is not None:
            copies = telling.copies_of(engine)
        self.seen |= copies.keys()
        self.copies = max(self.copies, *copies.values(), 0)
        tiers = telling.in_directory(self._sidecar)
        self.stored |= tiers["STORAGE"]
        return {"GPU": set(copies), **tiers}


def apart(
    held: dict[str, telling.Blocks], had: dict[str, telling.Blocks]
) -> dict[str, tuple[int, telling.Blocks, telling.Blocks]]:
    """Per medium: how many are held, what of it was not told, and what else was told."""
    return {
        medium: (len(blocks), blocks - had[medium], had[medium] - blocks)
        for medium, blocks in held.items()
    }


def places(subscriber: Subscriber) -> set[Place]:
    """Where a subscriber has chunks of the tiers: medium, owner and group."""
    return {place for place, held in subscriber.blocks.items() if held and place.medium in TIERS}


def check_groups(subscriber: Subscriber) -> None:
    """Assert that chunks are of the group whose blocks they hold: those of windows are shorter."""
    kinds: dict[int | None, set[str | None]] = {}
    sizes: dict[int | None, int] = {}
    for place, held in subscriber.blocks.items():
        for event in held.values():
            if place.medium == "GPU":
                kinds.setdefault(place.group, set()).add(event.kv_cache_spec_kind)
            elif place.medium == "CPU":
                sizes[place.group] = max(sizes.get(place.group, 0), event.block_size)
    assert kinds.keys() == sizes.keys()
    full = {group for group, size in sizes.items() if size > WINDOW}
    assert len(full) == 1
    for group, kind in kinds.items():
        assert kind == {"full_attention" if group in full else "sliding_window"}


def attached(sidecar: SidecarProcess) -> None:
    sidecar.wait("the engine attaches", lambda now: len(now["sessions"]) == SESSIONS)


def run(engine: EngineProcess, chooser: random.Random, rounds: int) -> None:
    """Several requests at a time; some are aborted, some have nothing but whole blocks."""
    for _ in range(rounds):
        handles: list[int] = []
        for _ in range(chooser.randrange(1, 5)):
            tokens = chooser.randrange(2 * BLOCK_TOKENS, TOKENS_MAX)
            if chooser.random() < 0.5:
                tokens -= tokens % BLOCK_TOKENS
            prompt = words(tokens, chooser.randrange(PROMPTS))
            max_tokens = chooser.randrange(1, 13)
            handles.append(engine.begin(prompt, max_tokens=max_tokens, cache_salt="all"))
        if chooser.random() < 0.3:
            engine.abort(handles[-1])
        for handle in handles:
            engine.finish(handle)


def twice(engine: EngineProcess) -> None:
    """A prompt of whole blocks, of which vLLM computes the last one again."""
    for _ in range(2):
        engine.generate(words(4 * BLOCK_TOKENS, 0), max_tokens=1, cache_salt="all")


def first_life(
    engine: EngineProcess,
    sidecar: SidecarProcess,
    case: Case,
    followers: Followers,
    chooser: random.Random,
) -> None:
    """One of the two engines at the sidecar."""
    for rounds in (2, 4, 6):
        run(engine, chooser, rounds)
        twice(engine)
        held = followers.check(engine)
        followers.check_published(engine)
    assert all(held.values())
    assert {group for group, _ in held["GPU"]} == case.groups
    if len(case.groups) > 1:
        check_groups(followers.first)
    assert len(followers.seen) > case.blocks, "blocks were evicted"
    assert followers.copies > 1
    engine.reset_prefix_cache()
    # vLLM tells of that with its next step.
    run(engine, chooser, 1)
    followers.check(engine)
    followers.check_published(engine)
    run(engine, chooser, 6)
    held = followers.check(engine)
    # The store is seen to in its own time.
    sidecar.wait(
        "chunks are collected",
        lambda _: bool(followers.stored - telling.in_directory(sidecar)["STORAGE"]),
    )
    held = followers.check(engine)
    assert followers.stored - held["STORAGE"]
    sidecar.wait("everything ended", idle)
    assert counters(sidecar)["chunks_evicted"] > 0
    assert sidecar.drain() == 0
    sidecar.start()
    attached(sidecar)
    sidecar.wait("the catalog is read", lambda now: now["tiers"]["store"]["chunks"])
    # The engine has made no step, and its blocks are known; so is what outlived the sidecar.
    again = followers.check(engine)
    assert again["GPU"] == held["GPU"]
    assert all(again.values())
    run(engine, chooser, 6)
    followers.check(engine)
    followers.check_published(engine)
    (joined,) = sidecar.status()["events"]["engines"]
    assert joined["gaps"] == 0


@pytest.mark.promise("events-engine", "events-tiers", "events-vllm-stream")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_random_life_with_evictions_and_restarts(
    folder: Path, case: Case, sidecar: SidecarProcess, spec: EngineSpec, followers: Followers
) -> None:
    chooser = random.Random(5)
    with EngineProcess(spec, folder / "engine.log") as engine:
        engine.wait_ready()
        attached(sidecar)
        followers.meet()
        first_life(engine, sidecar, case, followers, chooser)
    sidecar.wait("the engine is gone", lambda now: not now["sessions"])
    left = followers.check(None)
    assert left["CPU"]
    assert left["STORAGE"]
    for _ in range(1, case.engines):
        with EngineProcess(spec, folder / "engine.log") as engine:
            engine.wait_ready()
            attached(sidecar)
            followers.meet()
            run(engine, chooser, 6)
            assert all(followers.check(engine).values())
            followers.check_published(engine)
