"""Prompts computed by one engine, generated on by another: on one node, and over a bucket.

Engines in vLLM's roles: a producer that only stores, a consumer that only loads. The oracle is the
consumer's own prefix hit: log probabilities and KV bytes must be those of a single engine.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pytest

from tests.e2e.arms import (
    PATIENT,
    SESSIONS,
    Call,
    Measured,
    blocks_of,
    check_equal,
    counters,
    empty,
    fresh_salt,
    own_hit,
    words,
)
from tests.e2e.setups import SMALL, Bucket
from tests.harness.engine import EngineProcess, EngineSpec
from tests.harness.servers import S3Server, s3_server
from tests.harness.sidecars import SidecarProcess

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.promise("connector", "suite-disaggregated")]

TOKENS: Final = 1500
HANDED_TOKENS: Final = 1472
CHUNKS: Final = 6
WAIT_SECONDS: Final = 60
HAND_OVER: Final = {"kvlake": {"hand_over": True}}
CALL: Final = Call(words(TOKENS, 77))


class Pair(NamedTuple):
    """Two engines, and the folders of the sidecars that they attach to."""

    producer: EngineProcess
    consumer: EngineProcess
    places: tuple[Path, Path]


@pytest.fixture(scope="module")
def pair(folder: Path, model: str) -> Iterator[Pair]:
    places = (folder / "one", folder / "two")
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                EngineProcess(
                    EngineSpec(
                        model,
                        SidecarProcess(place, {}).socket,
                        SMALL,
                        kv_role=role,
                    ),
                    folder / f"{role}.log",
                )
            )
            for place, role in zip(places, ("kv_producer", "kv_consumer"), strict=True)
        ]
        for engine in engines:
            engine.wait_ready()
        yield Pair(engines[0], engines[1], places)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[S3Server]:
    with s3_server(folder) as server:
        yield server


@contextlib.contextmanager
def serving(place: Path, sessions: int, **sections: Any) -> Generator[SidecarProcess]:
    """A sidecar with this many sessions."""
    config = {
        "host": {"size": "128MiB"},
        "limits": PATIENT,
        **sections,
    }
    with SidecarProcess(place, config) as sidecar:
        sidecar.wait("all attach", lambda now: len(now["sessions"]) == sessions)
        yield sidecar


@pytest.fixture
def node(pair: Pair) -> Iterator[SidecarProcess]:
    """One sidecar that both engines are attached to."""
    one, two = (SidecarProcess(place, {}) for place in pair.places)
    two.runtime.mkdir(mode=0o700, exist_ok=True)
    link = two.runtime / two.name
    link.symlink_to(one.runtime / one.name)
    try:
        with serving(pair.places[0], 2 * SESSIONS) as sidecar:
            attached(pair)
            yield sidecar
    finally:
        link.unlink()


def attached(pair: Pair) -> None:
    """A sidecar knows a session a moment before the engine does: a hit proves that both do."""
    prompt = words(128, 5)
    for _ in range(200):
        salt = fresh_salt()
        expect = handed(pair, Call(prompt, max_tokens=1), salt)
        if expect and decoded(pair, Call(prompt), salt, expect).generation.cached_tokens:
            return
    raise AssertionError("the engines hand nothing over")


def handed(pair: Pair, call: Call, salt: str) -> dict[str, Any]:
    """Prefill: what its answer says."""
    empty(pair.producer)
    answer = pair.producer.generate(
        call.prompt, max_tokens=1, cache_salt=salt, kv_transfer_params=HAND_OVER
    )
    return answer.kv_transfer_params or {}


def expecting(tokens: int, seconds: float = WAIT_SECONDS) -> dict[str, Any]:
    return {"kvlake": {"expect_tokens": tokens, "wait_seconds": seconds}}


def decoded(pair: Pair, call: Call, salt: str, params: dict[str, Any]) -> Measured:
    empty(pair.consumer)
    params = {"kvlake": {"wait_seconds": WAIT_SECONDS, **params["kvlake"]}}
    generation = pair.consumer.generate(
        call.prompt, max_tokens=call.max_tokens, cache_salt=salt, kv_transfer_params=params
    )
    return Measured(generation, blocks_of(pair.consumer), salt)


@pytest.mark.promise("disaggregated")
def test_on_one_node_through_host_memory(pair: Pair, node: SidecarProcess) -> None:
    oracle = own_hit(pair.consumer, CALL, before=[CALL])
    assert oracle.generation.cached_tokens == HANDED_TOKENS
    salt = fresh_salt()
    expect = handed(pair, CALL, salt)
    assert expect == {"kvlake": {"expect_tokens": HANDED_TOKENS}}
    check_equal(decoded(pair, CALL, salt, expect), oracle)

    # The decode request is there long before the prompt is even computed.
    salt = fresh_salt()
    empty(pair.consumer)
    early = pair.consumer.begin(
        CALL.prompt, cache_salt=salt, kv_transfer_params=expecting(HANDED_TOKENS)
    )
    assert handed(pair, CALL, salt) == expect
    measured = Measured(pair.consumer.finish(early), blocks_of(pair.consumer), salt)
    check_equal(measured, oracle)

    # What never comes is not waited for longer than was said, and computed.
    empty(pair.consumer)
    late = pair.consumer.generate(
        CALL.prompt, cache_salt=fresh_salt(), kv_transfer_params=expecting(HANDED_TOKENS, 0.2)
    )
    assert late.cached_tokens == 0
    assert len(late.tokens) == CALL.max_tokens
    assert counters(node)["chunks_loaded"] >= 2 * CHUNKS


@pytest.mark.promise("roles")
def test_a_producer_only_stores_and_a_consumer_only_loads(pair: Pair, node: SidecarProcess) -> None:
    """Also of requests that hand nothing over."""
    producer, consumer, _ = pair
    oracle = own_hit(consumer, CALL, before=[CALL])
    cold = own_hit(consumer, CALL)
    empty(consumer)
    stored = counters(node)["chunks_stored"]
    # Neither finds anything that a consumer computed.
    salt = fresh_salt()
    CALL.generate(consumer, salt)
    empty(consumer)
    assert counters(node)["chunks_stored"] == stored
    check_equal(Measured(CALL.generate(consumer, salt), blocks_of(consumer), salt), cold)
    loaded = counters(node)["chunks_loaded"]
    for _ in range(2):
        empty(producer)
        assert CALL.generate(producer, salt).cached_tokens == 0
    empty(producer)
    assert counters(node)["chunks_loaded"] == loaded
    assert counters(node)["chunks_stored"] >= stored + CHUNKS
    empty(consumer)
    check_equal(Measured(CALL.generate(consumer, salt), blocks_of(consumer), salt), oracle)
    empty(consumer)
    assert counters(node)["chunks_loaded"] == loaded + CHUNKS


@pytest.mark.promise("disaggregated")
def test_across_nodes_through_the_bucket(pair: Pair, server: S3Server) -> None:
    """A bucket of a real S3 server."""
    oracle = own_hit(pair.consumer, CALL, before=[CALL])
    store = {**Bucket(server, "handed").store, "catalog_flush": "50ms"}
    with (
        serving(pair.places[0], SESSIONS, store=store),
        serving(pair.places[1], SESSIONS, store=store) as reader,
    ):
        attached(pair)
        before = counters(reader)["chunks_read"]
        salt = fresh_salt()
        expect = handed(pair, CALL, salt)
        assert expect == {"kvlake": {"expect_tokens": HANDED_TOKENS}}
        check_equal(decoded(pair, CALL, salt, expect), oracle)
        assert counters(reader)["chunks_read"] == before + CHUNKS
        assert counters(reader)["chunks_stored"] == 0
