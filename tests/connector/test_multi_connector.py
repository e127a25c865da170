"""Beside other connectors in vLLM's `MultiConnector`: what they load or fail to load, and kvlake
stores.

On vLLM's own scheduler and its own wrapper. The other connector is `others.LoadingConnector`, which
loads at once or while a request waits. In any case the tiers hold under a key exactly
the bytes that the model computes for the tokens of that key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.request import Request

from connector.vllm import KVLakeConnector
from sidecar.protocol.prompts import PromptOutcome, Prompts, TokenRun
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    kv_cache_config,
    request_of,
    vllm_config,
)
from tests.connector.content import content_of
from tests.connector.conversations import prompt_of
from tests.connector.engine import Engine
from tests.connector.others import EmptyConnector, LoadingConnector
from tests.connector.prompts import CACHED, PROMPT, chain_of

pytestmark = pytest.mark.promise("beside-others", "rank-aggregation")

OFFERED = 2 * CHUNK_TOKENS


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    LoadingConnector.offered_tokens = 0
    LoadingConnector.waits = LoadingConnector.fails = False
    LoadingConnector.arrived = set()
    EmptyConnector.finished.clear()


def beside(
    make: Callable[..., Engine], *, waits: bool = False, fails: bool = False, **options: object
) -> Engine:
    """An engine whose other connector offers the first chunks of every prompt."""
    LoadingConnector.offered_tokens = OFFERED
    LoadingConnector.waits, LoadingConnector.fails = waits, fails
    engine = make(others=["LoadingConnector"], **options)
    engine.garbled = fails
    for rank in engine.ranks:

        def fill(
            request_id: str,
            block_ids: list[int],
            rank_: int = rank.rank,
            memory: object = rank.memory,
        ) -> None:
            assert isinstance(memory, list)
            tokens = engine.scheduler.requests[request_id].all_token_ids
            known = content_of(tokens, "", engine.weights, rank_)
            for number in range(OFFERED // BLOCK_TOKENS):
                first = number * BLOCK_TOKENS
                memory[block_ids[number]][:] = known[first : first + BLOCK_TOKENS]

        rank.loaded.sub_connectors[1].fill = fill
    for rank in engine.ranks:
        for block in rank.memory:
            block[:] = [b"of others"] * len(block)
    return engine


def stored_tokens(engine: Engine, *prompts: list[int]) -> int:
    """Check all that lies in the tiers, of these prompts; how far into the first it reaches."""
    expected: dict[bytes, tuple[int, list[int]]] = {}
    for tokens in prompts:
        chain = chain_of(engine, tokens)
        for chunk in range(len(tokens) // CHUNK_TOKENS + 1):
            first = chunk * CHUNK_TOKENS
            for blocks in range(1, (min(len(tokens) - first, CHUNK_TOKENS)) // BLOCK_TOKENS + 1):
                whole = blocks * BLOCK_TOKENS == CHUNK_TOKENS
                key = chain.keys[chunk] if whole else chain.partial(chunk, blocks)
                expected[key] = first, tokens[: first + blocks * BLOCK_TOKENS]
    longest = 0
    for key, parts in engine.sidecar.parts.items():
        first, tokens = expected[key]
        for rank, memory in parts.items():
            slots = [slot for block in memory for slot in block]
            assert slots == content_of(tokens, "", engine.weights, rank)[first:], (
                f"wrong KV is stored at {first}"
            )
        if tokens == prompts[0][: len(tokens)]:
            longest = max(longest, len(tokens))
    return longest


def told(request: Request) -> list[int]:
    return list(request.all_token_ids)


class TestLoadsWhileARequestWaits:
    def test_loaded_kv_is_stored(self, make: Callable[..., Engine]) -> None:
        engine = beside(make, waits=True)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        LoadingConnector.arrived = {"a"}
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - OFFERED
        assert stored_tokens(engine, PROMPT) == CACHED
        engine.check_idle()

    def test_its_tokens_are_counted_as_loaded_by_another(self, make: Callable[..., Engine]) -> None:
        engine = beside(make, waits=True)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        LoadingConnector.arrived = {"a"}
        engine.finish(request)
        engine.settle()
        (message,) = engine.client.sent_of(Prompts)
        (record,) = message.prompts
        assert record.runs == [
            TokenRun(PromptOutcome.OTHER, OFFERED),
            TokenRun(PromptOutcome.NEW, CACHED),
            TokenRun(PromptOutcome.TAIL, len(PROMPT)),
        ]
        assert record.tokens[PromptOutcome.OTHER] == OFFERED
        engine.check_idle()

    @pytest.mark.promise("abort")
    def test_an_aborted_request_stores_nothing(self, make: Callable[..., Engine]) -> None:
        """vLLM counts tokens as computed before the other connector has loaded them."""
        engine = beside(make, waits=True)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert request.num_computed_tokens == OFFERED
        engine.abort(request)
        LoadingConnector.fails, LoadingConnector.arrived = True, {"a"}
        engine.settle()
        assert stored_tokens(engine, PROMPT) == 0
        engine.check_idle()

    @pytest.mark.promise("abort")
    def test_preempted_and_then_aborted(self, make: Callable[..., Engine]) -> None:
        """What it computed before does not count for what it waits for now."""
        engine = beside(make)
        LoadingConnector.offered_tokens = 0
        engine.sidecar.detach()
        request = engine.add(request_of("a", PROMPT, max_tokens=9))
        engine.step()
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        for rank in engine.ranks:
            for block in rank.memory:
                block[:] = [b"of others"] * len(block)
        engine.sidecar.attach()
        LoadingConnector.offered_tokens, LoadingConnector.waits = OFFERED, True
        engine.step()
        assert request.num_computed_tokens == OFFERED
        engine.abort(request)
        LoadingConnector.fails, LoadingConnector.arrived = True, {"a"}
        engine.settle()
        assert stored_tokens(engine, told(request)) == 0
        engine.check_idle()

    def test_a_load_that_fails(self, make: Callable[..., Engine]) -> None:
        engine = beside(make, waits=True, fails=True)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        LoadingConnector.arrived = {"a"}
        engine.step()
        LoadingConnector.offered_tokens = 0
        engine.finish(request)
        engine.settle()
        assert stored_tokens(engine, PROMPT) == CACHED
        engine.check_idle()

    def test_kv_that_another_did_not_load_is_computed(self, make: Callable[..., Engine]) -> None:
        """vLLM reserves its blocks twice then, and would never begin a load of kvlake's."""
        engine = beside(make, waits=True, num_blocks=30)
        LoadingConnector.offered_tokens = 0
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        engine.forget()
        # What is there is known again only after the other's load was begun.
        engine.sidecar.detach()
        LoadingConnector.offered_tokens = OFFERED
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        LoadingConnector.offered_tokens = 0
        LoadingConnector.fails, LoadingConnector.arrived = True, {"a"}
        engine.sidecar.attach()
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        engine.check_idle()


@pytest.mark.parametrize("stages", [1, 2])
class TestLoadsWithinAStep:
    def test_loaded_kv_is_stored(self, make: Callable[..., Engine], stages: int) -> None:
        engine = beside(make, stages=stages)
        engine.run(request_of("a", PROMPT, max_tokens=3))
        assert engine.computed["a"] == len(PROMPT) - OFFERED + 2
        assert stored_tokens(engine, PROMPT) == CACHED
        engine.check_idle()

    @pytest.mark.parametrize("max_tokens", [1, 5])
    def test_kv_that_was_not_loaded_is_not_stored(
        self, make: Callable[..., Engine], stages: int, max_tokens: int
    ) -> None:
        """vLLM reports it after the step, when stores are in flight, and computes it."""
        engine = beside(make, fails=True, stages=stages, batch_tokens=96)
        request = engine.add(request_of("a", PROMPT, max_tokens=max_tokens))
        other = engine.add(request_of("b", prompt_of(200, 3), max_tokens=5))
        engine.finish(request, other)
        engine.settle()
        stored_tokens(engine, told(request), told(other))
        LoadingConnector.offered_tokens = 0
        engine.garbled = False
        engine.forget()
        again = prompt_of(80, 9)
        engine.run(request_of("c", again, max_tokens=1))
        assert stored_tokens(engine, again, told(request), told(other)) == 80
        engine.check_idle()

    def test_requests_that_share_its_blocks_do_not_store_them(
        self, make: Callable[..., Engine], stages: int
    ) -> None:
        """vLLM's prefix cache has them before they are loaded, and keeps them afterwards."""
        engine = beside(make, fails=True, stages=stages)
        requests = [
            engine.add(request_of(name, [*PROMPT, *tail], max_tokens=4))
            for name, tail in (("a", []), ("b", [5, 6, 7]), ("c", prompt_of(40, 8)))
        ]
        engine.step()
        late = engine.add(request_of("d", [*PROMPT, 9], max_tokens=4))
        LoadingConnector.offered_tokens = 0
        engine.finish(*requests, late)
        engine.settle()
        stored_tokens(engine, *(told(request) for request in (*requests, late)))
        engine.check_idle()

    @pytest.mark.promise("abort")
    def test_aborted_while_it_is_computed(self, make: Callable[..., Engine], stages: int) -> None:
        engine = beside(make, fails=True, stages=stages)
        request = engine.add(request_of("a", PROMPT, max_tokens=4))
        engine.step(between=lambda: engine.abort(request))
        engine.settle()
        assert stored_tokens(engine, told(request)) == 0
        engine.check_idle()


def test_requests_that_vllm_fails_store_nothing(make: Callable[..., Engine]) -> None:
    """With another policy than `recompute`; a second request shares what the first did not load."""
    engine = beside(make, fails=True, failure_policy="fail")
    requests = [engine.add(request_of(name, PROMPT, max_tokens=4)) for name in "ab"]
    engine.finish(*requests)
    engine.settle()
    assert stored_tokens(engine, PROMPT) == 0
    engine.check_idle()


class TestFailurePolicy:
    """The outer connector's configuration decides, and vLLM does not show it to a child."""

    def test_nothing_is_loaded_where_that_would_fail_requests(
        self, make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make(others=["EmptyConnector"], failure_policy="fail")
        assert "kv_load_failure_policy='fail' of the MultiConnector" in caplog.text
        assert "is set to" not in caplog.text
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert stored_tokens(engine, PROMPT) == CACHED
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT)
        engine.check_idle()

    def test_nothing_is_logged_where_loads_are_recomputed(
        self, make: Callable[..., Engine], caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        make(others=["EmptyConnector"])
        assert "kv_load_failure_policy" not in caplog.text

    def test_a_lone_connector_sets_the_policy(
        self, model: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "vllm.kvlake")
        config = vllm_config(model)
        assert config.kv_transfer_config is not None
        assert config.kv_transfer_config.kv_load_failure_policy == "fail"
        KVLakeConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config())
        assert config.kv_transfer_config.kv_load_failure_policy == "recompute"
        assert "is set to 'recompute'" in caplog.text


def test_a_lone_connector_stores_in_the_first_step(make: Callable[..., Engine]) -> None:
    """It need not wait for loads of other connectors."""
    engine = make()
    engine.add(request_of("a", PROMPT, max_tokens=9))
    engine.step()
    assert engine.role.stores.jobs
    engine.settle()
