"""The scheduler role in vLLM's own scheduler: hits, loads, stores, and what it holds meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from connector.keys import KeyChain, root_key
from connector.namespace import digest_of
from connector.plan import StepReport
from connector.requests import Stats
from connector.scheduler import SESSIONS_ASKED_MAX
from connector.storing import BLOCKS_WAIT_SECONDS_MAX
from sidecar.protocol import (
    Events,
    Lease,
    Limits,
    Lookup,
    LookupDone,
    Outcome,
    Release,
    RemovedEvent,
    StoredEvent,
    Submit,
    encode,
    tenant_id,
)
from tests.connector.double import LIMITS, SALT, session_of
from tests.connector.engine import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PER_CHUNK,
    Engine,
    request_of,
    write_model,
)
from tiers.index import FLAG_HOST, FLAG_STORE, tag_of

PROMPT = [number % 97 for number in range(300)]
"""Four full chunks, and a tail of two blocks and 12 tokens."""
FULL, TAIL_BLOCKS = len(PROMPT) // CHUNK_TOKENS, 2
CACHED = FULL * CHUNK_TOKENS + TAIL_BLOCKS * BLOCK_TOKENS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def engine_of(**options: Any) -> Engine:
        engines.append(Engine(model, **options))
        return engines[-1]

    yield engine_of
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    return make()


def chain_of(engine: Engine, tokens: list[int], salt: str = "") -> KeyChain:
    """The keys that these tokens have in this engine."""
    root = root_key(digest_of(engine.connector._engine.groups[0].namespace), salt=salt)
    chain = KeyChain(root, CHUNK_TOKENS, BLOCK_TOKENS)
    chain.extend(tokens)
    return chain


def seen(engine: Engine, tokens: list[int] | None = None, **fields: Any) -> None:
    """An earlier request computed these tokens; its engine then forgot them."""
    engine.run(request_of("earlier", tokens or PROMPT, max_tokens=1, **fields))
    engine.forget()


def last_load(engine: Engine) -> Any:
    (load,) = [load for submit in engine.ranks[0].client.sent_of(Submit) for load in submit.loads]
    return load


def counted(engine: Engine) -> list[Stats]:
    """Collect the counts that vLLM takes every step."""
    taken: list[Stats] = []
    take = engine.role.take_stats

    def record() -> Stats:
        taken.append(take())
        return taken[-1]

    engine.role.take_stats = record  # type: ignore[method-assign]
    return taken


def total(taken: list[Stats], name: str) -> int:
    return sum(getattr(stats, name) for stats in taken)


class TestHits:
    def test_none(self, engine: Engine) -> None:
        taken = counted(engine)
        engine.run(request_of("a", PROMPT))
        assert engine.computed["a"] >= len(PROMPT)
        assert total(taken, "requests_missed") == 1
        assert total(taken, "requests_hit") == 0
        # A miss sends nothing: no lookup, no lease.
        assert not engine.client.sent
        engine.check_idle()

    def test_the_tenant_is_told_and_the_salt_is_not(self, engine: Engine) -> None:
        seen(engine, salt="a salt that nobody may read")
        engine.sidecar.demote(chain_of(engine, PROMPT, salt="a salt that nobody may read").keys[0])
        request = request_of("a", PROMPT, max_tokens=1, salt="a salt that nobody may read")
        engine.role.new_request(request)
        engine.run(request)
        tenant = tenant_id("a salt that nobody may read")
        worker, scheduler = engine.ranks[0].client, engine.client
        stored = [chunk for submit in worker.sent_of(Submit) for job in submit.stores
                  for chunk in job.chunks]  # fmt: skip
        assert {chunk.tenant for chunk in stored} == {tenant}
        assert {lookup.tenant for lookup in scheduler.sent_of(Lookup)} == {tenant}
        assert {lease.tenant for lease in scheduler.sent_of(Lease)} <= {tenant}
        assert scheduler.sent_of(Lookup)
        for message in (*worker.sent, *scheduler.sent):
            assert b"nobody" not in encode(message)

    def test_all_chunks_and_the_tail(self, engine: Engine) -> None:
        seen(engine)
        taken = counted(engine)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert engine.computed["a"] == len(PROMPT) - CACHED
        assert total(taken, "requests_hit") == 1
        assert total(taken, "tokens_loaded_host") == CACHED
        chain = chain_of(engine, PROMPT)
        keys = [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]
        assert [chunk.key for chunk in last_load(engine).chunks] == keys
        (lease,) = engine.client.sent_of(Lease)
        assert lease.keys == keys
        assert lease.lease_id == last_load(engine).job_id
        engine.check_idle()

    @pytest.mark.parametrize(
        "length", [CHUNK_TOKENS, 5 * CHUNK_TOKENS, CHUNK_TOKENS + BLOCK_TOKENS]
    )
    def test_a_whole_prompt(self, engine: Engine, length: int) -> None:
        # Nothing is left to compute but the last token, which gives the first logits.
        prompt = PROMPT[:1] * length
        seen(engine, prompt)
        request = engine.run(request_of("a", prompt, max_tokens=3))
        assert engine.computed["a"] == 1 + 2
        assert len(request.output_token_ids) == 3
        engine.check_idle()

    def test_the_same_prompt_with_more_behind_it(self, engine: Engine) -> None:
        seen(engine)
        longer = [*PROMPT, *range(400, 500)]
        engine.run(request_of("a", longer, max_tokens=1))
        assert engine.computed["a"] == len(longer) - CACHED

    def test_a_prompt_that_parts_within_a_chunk(self, engine: Engine) -> None:
        seen(engine)
        parted = [*PROMPT[: 2 * CHUNK_TOKENS + 40], *[5] * 60]
        engine.run(request_of("a", parted, max_tokens=1))
        # Two chunks are equal; of the third there is no piece under its own key.
        assert engine.computed["a"] == len(parted) - 2 * CHUNK_TOKENS

    def test_a_gap_ends_the_run(self, engine: Engine) -> None:
        seen(engine)
        engine.sidecar.evict(chain_of(engine, PROMPT).keys[2])
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert engine.computed["a"] == len(PROMPT) - 2 * CHUNK_TOKENS
        # And closes it: what was missing was stored again.
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    def test_behind_the_engines_own_hit(self, engine: Engine) -> None:
        seen(engine)
        own = CHUNK_TOKENS + 2 * BLOCK_TOKENS
        engine.sidecar.detach()
        engine.run(request_of("own", PROMPT[: own + 1], max_tokens=1))
        engine.sidecar.attach()
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        # The load begins in the middle of the second chunk, at the first block that is not there.
        load = last_load(engine)
        table = engine.scheduler.kv_cache_manager.get_block_ids("a")[0]
        first = load.chunks[0]
        assert first.key == chain_of(engine, PROMPT).keys[1]
        assert first.first_block == 2
        loaded = [block_id for chunk in load.chunks for block_id in chunk.block_ids]
        assert loaded == table[own // BLOCK_TOKENS : CACHED // BLOCK_TOKENS]
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_what_the_engine_holds_is_not_loaded(self, engine: Engine) -> None:
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        engine.client.sent.clear()
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not engine.client.sent
        assert engine.computed["a"] == len(PROMPT) - CACHED

    def test_a_gain_that_is_not_worth_a_step(self, make: Callable[..., Engine]) -> None:
        engine = make(load_tokens_min=3 * CHUNK_TOKENS)
        seen(engine, PROMPT[: 2 * CHUNK_TOKENS + 1])
        engine.run(request_of("a", PROMPT[: 2 * CHUNK_TOKENS + 1], max_tokens=1))
        assert engine.computed["a"] == 2 * CHUNK_TOKENS + 1

    def test_asking_changes_nothing(self, engine: Engine) -> None:
        seen(engine)
        request = engine.add(request_of("a", PROMPT))
        answers = {engine.role.matched_tokens(request, 0) for _ in range(5)}
        assert answers == {CACHED}
        assert engine.role.matched_tokens(request, 96) == CACHED - 96
        assert engine.role.matched_tokens(request, 0) == CACHED
        assert not engine.client.sent

    def test_no_more_loads_than_the_sidecar_takes(self, make: Callable[..., Engine]) -> None:
        engine = make()
        seen(engine)
        session = engine.client.session
        assert session is not None
        limits = Limits(**{**_fields(LIMITS), "jobs_inflight_max": 2})
        engine.client.attach(session_of(engine.sidecar.index, limits=limits))
        requests = [engine.add(request_of(f"r{i}", PROMPT, max_tokens=1)) for i in range(3)]
        engine.step()
        loads = [load for submit in engine.ranks[0].client.sent_of(Submit) for load in submit.loads]
        assert len(loads) == 2
        engine.finish(*requests)
        engine.settle()
        engine.check_idle()


def _fields(limits: Limits) -> dict[str, int]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


class TestWhoShares:
    def test_tenants_do_not(self, engine: Engine) -> None:
        seen(engine, salt="one")
        engine.run(request_of("other", PROMPT, max_tokens=1, salt="other"))
        engine.run(request_of("nobody", PROMPT, max_tokens=1))
        engine.forget()
        assert engine.computed["other"] == engine.computed["nobody"] == len(PROMPT)
        engine.run(request_of("same", PROMPT, max_tokens=1, salt="one"))
        assert engine.computed["same"] == len(PROMPT) - CACHED

    def test_adapters_do_not(self, engine: Engine, tmp_path: Path) -> None:
        keys: list[bytes] = []
        for name, path in (("a", "org/a"), ("b", "org/b"), ("c", str(tmp_path))):
            request = request_of(name, PROMPT, lora_request=LoRARequest(name, 1, path))
            engine.role.new_request(request)
            keys.append(engine.role._requests[name].chain.keys[0])
        assert len({*keys, chain_of(engine, PROMPT).keys[0]}) == 4

    def test_an_adapter_that_was_trained_on_is_another(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        def key(number: int, *, inplace: bool) -> bytes:
            lora = LoRARequest("a", 1, str(tmp_path), load_inplace=inplace)
            engine.role.new_request(request_of(f"r{number}", PROMPT, lora_request=lora))
            return engine.role._requests[f"r{number}"].chain.keys[0]

        (tmp_path / "adapter_model.bin").write_bytes(b"1" * 100)
        first = key(1, inplace=False)
        (tmp_path / "adapter_model.bin").write_bytes(b"2" * 100)
        # vLLM goes on with what it has loaded, until it is told to load it again.
        assert key(2, inplace=False) == first
        assert key(3, inplace=True) != first

    def test_an_adapter_that_cannot_be_read_is_not_cached(
        self, engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "adapter_config.json").symlink_to(tmp_path / "adapter_config.json")
        (tmp_path / "adapter_model.bin").symlink_to(tmp_path / "adapter_model.bin")
        lora = LoRARequest("a", 1, str(tmp_path))
        engine.role.new_request(request_of("a", PROMPT, lora_request=lora))
        assert not engine.role._requests
        assert "is not cached" in caplog.text

    def test_images_do_not(self, engine: Engine) -> None:
        def first_key(name: str, identifier: str) -> bytes:
            feature = MultiModalFeatureSpec(
                data=None,
                modality="image",
                identifier=identifier,
                mm_position=PlaceholderRange(offset=10, length=20),
            )
            engine.role.new_request(request_of(name, PROMPT, mm_features=[feature]))
            return engine.role._requests[name].chain.keys[0]

        keys = {first_key("a", "cat"), first_key("b", "dog"), chain_of(engine, PROMPT).keys[0]}
        assert len(keys) == 3

    def test_embeddings_and_streams_are_not_cached(self, engine: Engine) -> None:
        embeds = request_of("e", PROMPT)
        embeds.prompt_embeds = torch.zeros(1)
        stream = request_of("s", PROMPT, resumable=True)
        for request in (embeds, stream):
            engine.role.new_request(request)
            assert engine.role.matched_tokens(request, 0) == 0
            engine.role.allocated(request, list, 0)
            engine.role.request_finished(request, [])
        assert not engine.role._requests

    def test_a_request_that_may_not_read_the_cache(self, engine: Engine) -> None:
        seen(engine)
        request = request_of("a", PROMPT, max_tokens=1)
        request.skip_reading_prefix_cache = True
        engine.run(request)
        assert engine.computed["a"] == len(PROMPT)

    @pytest.mark.parametrize(("kv_role", "reads"), [("kv_producer", False), ("kv_consumer", True)])
    def test_the_role_in_vllms_configuration(
        self, make: Callable[..., Engine], kv_role: str, reads: bool
    ) -> None:
        engine = make(kv_role=kv_role)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert bool(engine.sidecar.parts) is not reads
        keys = chain_of(engine, PROMPT).keys
        for key in keys:
            engine.sidecar.index.set(tag_of(key, SALT), FLAG_HOST)
        engine.forget()
        request = request_of("b", PROMPT)
        engine.role.new_request(request)
        expected = len(keys) * CHUNK_TOKENS if reads else 0
        assert engine.role.matched_tokens(request, 0) == expected


class TestStoreOnly:
    def demoted(self, engine: Engine, first: int = 0) -> KeyChain:
        """What an earlier request left, from chunk `first` on in the store alone."""
        seen(engine)
        chain = chain_of(engine, PROMPT)
        for key in [*chain.keys[first:], chain.partial(FULL, TAIL_BLOCKS)]:
            engine.sidecar.demote(key)
        return chain

    def test_asked_for_when_the_request_comes(self, engine: Engine) -> None:
        chain = self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        assert lookup.keys == [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]
        assert lookup.deadline_ms == LIMITS.lookup_wait_ms_max
        for _ in range(4):
            assert not engine.step().num_scheduled_tokens
        assert engine.role.matched_tokens(request, 0) is None
        engine.sidecar.receive()
        engine.sidecar.answer(lookup)
        taken = counted(engine)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - CACHED
        assert total(taken, "tokens_loaded_store") == CACHED
        assert total(taken, "tokens_loaded_host") == 0
        assert len(engine.client.sent_of(Lookup)) == 1
        engine.check_idle()

    def test_only_what_host_memory_lacks(self, engine: Engine) -> None:
        chain = self.demoted(engine, first=2)
        taken = counted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        assert lookup.keys == [*chain.keys[2:], chain.partial(FULL, TAIL_BLOCKS)]
        engine.finish(request)
        engine.settle()
        assert total(taken, "tokens_loaded_host") == 2 * CHUNK_TOKENS
        assert total(taken, "tokens_loaded_store") == CACHED - 2 * CHUNK_TOKENS
        source = engine.scheduler.connector_prefix_cache_stats
        assert source is not None

    def test_says_how_fast_the_engine_computes(self, engine: Engine) -> None:
        self.demoted(engine, first=2)
        engine.role._rate.step(engine.clock.now - 1.0, 512)
        engine.role._rate.step(engine.clock.now, 0)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        assert lookup.num_tokens == CACHED - 2 * CHUNK_TOKENS
        assert lookup.prefill_tokens_per_second == 512
        engine.finish(request)
        engine.settle()

    def test_an_answer_that_falls_short(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.sidecar.receive()
        engine.sidecar.answer(engine.sidecar.lookups[0], ready=2)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - 2 * CHUNK_TOKENS

    def test_the_deadline(self, engine: Engine) -> None:
        self.demoted(engine, first=2)
        taken = counted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.clock.now += LIMITS.lookup_wait_ms_max / 1000 - 0.01
        engine.step()
        assert engine.role.matched_tokens(request, 0) is None
        engine.clock.now += 0.02
        # What there is by then is used, and the store is not asked again.
        assert engine.role.matched_tokens(request, 0) == 2 * CHUNK_TOKENS
        assert len(engine.client.sent_of(Lookup)) == 1
        engine.sidecar.lookups.clear()
        engine.finish(request)
        engine.settle()
        assert total(taken, "lookups_expired") == 1
        engine.check_idle()

    def test_a_session_that_ends_meanwhile(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.role.matched_tokens(request, 0) is None
        engine.sidecar.detach()
        assert engine.role.matched_tokens(request, 0) == 0
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_the_next_session_is_asked_again(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (first,) = engine.client.sent_of(Lookup)
        engine.sidecar.attach()
        assert engine.role.matched_tokens(request, 0) is None
        _, second = engine.client.sent_of(Lookup)
        assert second.epoch > first.epoch
        assert second.keys == first.keys
        engine.finish(request)
        assert engine.computed["a"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_a_sidecar_that_comes_and_goes_holds_nothing_up(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        answers: list[int | None] = []
        for _ in range(SESSIONS_ASKED_MAX + 1):
            answers.append(engine.role.matched_tokens(request, 0))
            engine.sidecar.attach()
        assert answers == [None] * SESSIONS_ASKED_MAX + [0]
        assert len(engine.client.sent_of(Lookup)) == SESSIONS_ASKED_MAX
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_a_late_answer_is_nothing(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        (lookup,) = engine.client.sent_of(Lookup)
        engine.clock.now += 60
        engine.step()
        engine.client.inbox.append(LookupDone(lookup.epoch, lookup.lookup_id, 5, Outcome.OK))
        engine.finish(request)
        engine.settle()
        engine.check_idle()

    def test_a_request_that_ends_meanwhile_gives_it_back(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        (lookup,) = engine.client.sent_of(Lookup)
        engine.abort(request)
        assert engine.client.sent_of(Release) == [Release(lookup.epoch, [], [lookup.lookup_id])]
        engine.settle()
        engine.check_idle()

    def test_not_to_another_life_of_the_sidecar(self, engine: Engine) -> None:
        self.demoted(engine)
        request = engine.add(request_of("a", PROMPT))
        engine.sidecar.attach()
        engine.abort(request)
        assert not engine.client.sent_of(Release)
        engine.settle()
        engine.check_idle()

    def test_not_asked_for_what_the_engine_holds(self, engine: Engine) -> None:
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        for key in list(engine.sidecar.parts):
            engine.sidecar.demote(key)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not engine.client.sent_of(Lookup)

    def test_not_waited_for_a_little_more(self, make: Callable[..., Engine]) -> None:
        # All but the tail is in host memory: a read from the store to spare 32 tokens is none.
        engine = make(load_tokens_min=3 * BLOCK_TOKENS)
        self.demoted(engine, first=FULL)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not engine.client.sent_of(Lookup)
        assert engine.computed["a"] == len(PROMPT) - FULL * CHUNK_TOKENS

    def test_asked_once_though_the_queue_is_full(self, engine: Engine) -> None:
        self.demoted(engine)
        engine.client.accepting = False
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.role.matched_tokens(request, 0) == 0
        engine.finish(request)
        engine.client.accepting = True
        engine.settle()
        engine.check_idle()


class TestLoads:
    def start(self, engine: Engine, max_tokens: int = 1) -> Request:
        """A request whose load is under way."""
        seen(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=max_tokens))
        engine.step()
        assert len([copy for copy in engine.sidecar.copies if copy.load]) == 1
        assert request.num_computed_tokens == CACHED
        return request

    @pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.CORRUPT, Outcome.FAILED])
    def test_a_failed_one_is_computed(self, engine: Engine, outcome: Outcome) -> None:
        taken = counted(engine)
        request = self.start(engine)
        engine.sidecar.run(engine.sidecar.copies[0], outcome)
        engine.finish(request)
        engine.settle()
        # Not tried again: what made it fail may still be there.
        assert engine.computed["a"] == len(PROMPT)
        assert total(taken, "loads_failed") == 1
        assert total(taken, "requests_hit") == 0
        assert total(taken, "requests_missed") == 2
        engine.check_idle()

    def test_one_rank_failing_fails_it(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        request = self.start_on_two(engine)
        first, second = engine.sidecar.copies
        engine.sidecar.run(first, Outcome.FAILED)
        for _ in range(3):
            assert not engine.step().num_scheduled_tokens
        engine.sidecar.run(second)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        engine.check_idle()

    def start_on_two(self, engine: Engine) -> Request:
        seen(engine)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert {copy.rank for copy in engine.sidecar.copies} == {0, 1}
        return request

    def test_it_is_over_when_every_rank_is(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        request = self.start_on_two(engine)
        engine.sidecar.run(engine.sidecar.copies[1])
        for _ in range(3):
            assert not engine.step().num_scheduled_tokens
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT) - CACHED
        engine.check_idle()

    def test_a_lost_session_is_computed(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.sidecar.detach()
        engine.finish(request)
        assert engine.computed["a"] == len(PROMPT)
        engine.settle()
        engine.check_idle()

    def test_a_late_one_is_computed_and_cannot_run_any_more(self, engine: Engine) -> None:
        request = self.start(engine)
        (copy,) = engine.sidecar.copies
        engine.clock.now += 60
        engine.step()
        engine.step()
        # The sidecar wakes up with it now, when the blocks are in use again.
        engine.sidecar.run(copy)
        engine.finish(request)
        engine.settle()
        assert engine.computed["a"] == len(PROMPT)
        engine.check_idle()

    def test_aborted_meanwhile(self, engine: Engine) -> None:
        request = self.start(engine)
        stored = dict(engine.sidecar.parts)
        # Its chunks are evicted too, so that nothing keeps us from storing what never came.
        for key in stored:
            engine.sidecar.evict(key)
        engine.abort(request)
        for _ in range(3):
            engine.step()
        # vLLM holds the blocks until the load is over, whichever way.
        assert engine.pool.get_num_free_blocks() < engine.pool.num_gpu_blocks - 1
        assert engine.role.stores_outstanding == 0
        engine.settle()
        assert not engine.sidecar.parts
        engine.check_idle()

    def test_aborted_right_after(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.sidecar.run_all()
        engine.step(lambda: engine.abort(request))
        engine.settle()
        engine.check_idle()
        # What was loaded is there, whole.
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    def test_chunks_of_a_load_are_not_stored_again(self, engine: Engine) -> None:
        request = self.start(engine)
        engine.ranks[0].client.sent.clear()
        engine.finish(request)
        engine.settle()
        assert not any(submit.stores for submit in engine.ranks[0].client.sent_of(Submit))


class TestStores:
    def stores(self, engine: Engine, rank: int = 0) -> list[Any]:
        submits = engine.ranks[rank].client.sent_of(Submit)
        return [chunk for submit in submits for job in submit.stores for chunk in job.chunks]

    def test_chunks_the_prompts_tail_and_the_last_blocks(self, engine: Engine) -> None:
        request = engine.run(request_of("a", PROMPT, max_tokens=40))
        chain = chain_of(engine, list(request.all_token_ids))
        # 300 + 39 computed tokens: the fifth chunk was filled, and a block and a bit remain.
        assert [chunk.key for chunk in self.stores(engine)] == [
            *chain.keys[:FULL],
            chain.partial(FULL, TAIL_BLOCKS),
            chain.keys[FULL],
            chain.partial(FULL + 1, 1),
        ]
        parents = [chunk.parent for chunk in self.stores(engine)]
        keys = chain.keys
        assert parents == [bytes(32), *keys[:3], keys[3], keys[3], keys[4]]
        assert self.stores(engine)[4].token_ids == chain.tokens(FULL, TAIL_BLOCKS)
        assert engine.sidecar.parts.keys() == {chunk.key for chunk in self.stores(engine)}

    def test_prefill_in_pieces_stores_each_once(self, make: Callable[..., Engine]) -> None:
        engine = make(batch_tokens=50)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        keys = [chunk.key for chunk in self.stores(engine)]
        chain = chain_of(engine, PROMPT)
        assert keys == [*chain.keys, chain.partial(FULL, TAIL_BLOCKS)]

    def test_a_chunk_is_stored_once_though_two_compute_it(self, engine: Engine) -> None:
        requests = [engine.add(request_of(f"r{i}", PROMPT, max_tokens=1)) for i in range(2)]
        engine.finish(*requests)
        engine.settle()
        keys = [chunk.key for chunk in self.stores(engine)]
        assert len(keys) == len(set(keys))

    def test_a_generated_token_without_kv_is_not_stored(self, engine: Engine) -> None:
        # 63 + 1 tokens are known, 63 computed.
        engine.run(request_of("a", PROMPT[: CHUNK_TOKENS - 1], max_tokens=1))
        assert chain_of(engine, PROMPT[:63]).keys == []
        assert [len(chunk.block_ids) for chunk in self.stores(engine)] == [3]

    def test_blocks_are_held_until_every_rank_answered(self, make: Callable[..., Engine]) -> None:
        engine = make(ranks=2)
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert request.is_finished()
        blocks = [block_id for chunk in self.stores(engine) for block_id in chunk.block_ids]
        pool = engine.pool
        # The finished request's last block was never part of a store; the others have one
        # reference, which is ours.
        assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in blocks)
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(blocks)
        for copy in [copy for copy in engine.sidecar.copies if copy.rank == 1]:
            engine.sidecar.run(copy)
        assert engine.scheduler.has_requests()
        engine.step()
        assert all(pool.blocks[block_id].ref_cnt == 1 for block_id in blocks)
        engine.settle()
        assert not engine.scheduler.has_requests()
        engine.check_idle()

    def test_a_sidecar_that_dies_gives_them_back(self, engine: Engine) -> None:
        engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert engine.role.stores_outstanding
        engine.sidecar.detach()
        engine.step()
        engine.check_idle()

    def test_a_failed_store_is_made_by_the_next(self, engine: Engine) -> None:
        taken = counted(engine)
        engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        for copy in list(engine.sidecar.copies):
            engine.sidecar.run(copy, Outcome.FULL)
        engine.settle()
        assert not engine.sidecar.parts
        assert total(taken, "stores_failed") == 1
        engine.forget()
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert len(engine.sidecar.parts) == FULL + 1

    def test_no_more_jobs_than_the_sidecar_takes(self, engine: Engine) -> None:
        limits = Limits(**{**_fields(LIMITS), "jobs_inflight_max": 2})
        engine.client.attach(session_of(engine.sidecar.index, limits=limits))
        taken = counted(engine)
        for number in range(4):
            engine.add(request_of(f"r{number}", [number] * 200, max_tokens=1))
        for _ in range(3):
            engine.step()
        assert engine.role.stores_outstanding == 2
        assert total(taken, "stores_skipped") > 0
        engine.settle()
        engine.check_idle()

    def test_the_chunk_counts_again_after_a_lost_job(self, engine: Engine) -> None:
        engine.role.stores_ended(StepReport({999: 1}))
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert len(engine.sidecar.parts) == FULL + 1

    def test_an_engine_short_of_blocks_waits_for_them_but_not_for_ever(
        self, engine: Engine
    ) -> None:
        connector = engine.connector
        assert not connector.has_pending_block_frees()
        engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        engine.clock.now += 1
        assert connector.has_pending_block_frees()
        engine.clock.now += BLOCKS_WAIT_SECONDS_MAX
        assert not connector.has_pending_block_frees()
        engine.add(request_of("b", [9] * 100, max_tokens=1))
        engine.step()
        engine.sidecar.run(engine.sidecar.copies[-1])
        engine.step()
        # They come back again.
        assert connector.has_pending_block_frees()
        engine.settle()
        assert not connector.has_pending_push_work()


class TestPreemption:
    def test_a_preempted_request_finds_its_own_chunks(self, make: Callable[..., Engine]) -> None:
        # Two requests that do not fit together once they generate.
        engine = make(num_blocks=42)
        prompts = [PROMPT, [number + 1 for number in PROMPT]]
        requests = [
            engine.add(request_of(f"r{i}", prompt, max_tokens=60))
            for i, prompt in enumerate(prompts)
        ]
        engine.finish(*requests)
        engine.settle()
        assert sum(request.num_preemptions for request in requests) > 0
        assert [len(request.output_token_ids) for request in requests] == [60, 60]
        engine.check_idle()

    def test_held_blocks_outlive_it(self, engine: Engine) -> None:
        request = engine.add(request_of("a", PROMPT, max_tokens=20))
        engine.step()
        assert engine.role.stores_outstanding
        engine.scheduler.running.remove(request)
        engine.scheduler._preempt_request(request, 0.0)
        # Its stores were computed before; their blocks stay until they are copied.
        chunk_blocks = sum(len(ids) for copy in engine.sidecar.copies for _, ids in copy.store)
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1 - chunk_blocks
        engine.finish(request)
        engine.settle()
        engine.check_idle()


class TestReset:
    def test_nothing_from_before_is_found(self, engine: Engine) -> None:
        seen(engine)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.weights += 1
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert engine.computed["a"] == len(PROMPT)
        engine.forget()
        # What is computed from now on, is.
        engine.run(request_of("b", PROMPT, max_tokens=1))
        assert engine.computed["b"] == len(PROMPT) - CACHED

    def test_a_request_of_before_stores_nothing_more(self, engine: Engine) -> None:
        request = engine.add(request_of("a", PROMPT, max_tokens=60))
        engine.step()
        engine.sidecar.run_all()
        engine.step()
        before = set(engine.sidecar.parts)
        assert engine.scheduler.reset_prefix_cache(
            reset_running_requests=True, reset_connector=True
        )
        engine.weights += 1
        engine.finish(request)
        engine.settle()
        assert set(engine.sidecar.parts) == before
        engine.check_idle()


class TestEvents:
    def test_they_are_taken_once(self, engine: Engine) -> None:
        session = engine.client.session
        assert session is not None
        stored = StoredEvent(b"k" * 32, bytes(32), 64, "host")
        removed = RemovedEvent(b"k" * 32, "store")
        engine.client.inbox.append(Events(session.epoch, [stored], [removed]))
        engine.step()
        assert engine.role.take_events() == ([stored], [removed])
        assert engine.role.take_events() == ([], [])

    def test_vllms_words_for_them(self, engine: Engine) -> None:
        engine.connector._wants_events = True
        session = engine.client.session
        assert session is not None
        events = [
            StoredEvent(b"a" * 32, bytes(32), 64, "host"),
            StoredEvent(b"b" * 32, b"a" * 32, 16, "store"),
        ]
        engine.client.inbox.append(Events(session.epoch, events, [RemovedEvent(b"a" * 32, "host")]))
        engine.role.build_plan({}, lambda _: [])
        first, second, gone = list(engine.connector.take_events())
        assert (first.parent_block_hash, first.block_size) == (None, 64)
        assert (second.parent_block_hash, second.medium) == (b"a" * 16, "STORAGE")
        assert (second.locality, first.locality) == ("REMOTE", "LOCAL")
        assert gone.block_hashes == [b"a" * 16]
        assert {one.ownership for one in (first, second, gone)} == {
            engine.connector._engine.owner(0)
        }


class TestIndex:
    def test_a_longer_piece_serves_a_shorter_one(self, engine: Engine) -> None:
        # 48 tokens of the first chunk are stored; a prompt that shares all of them, then ends.
        seen(engine, PROMPT[:49])
        engine.run(request_of("a", PROMPT[:49], max_tokens=1))
        assert engine.computed["a"] == 1

    def test_the_longest_piece_is_taken(self, engine: Engine) -> None:
        chain = chain_of(engine, PROMPT)
        for count in (1, 2):
            engine.sidecar.index.set(tag_of(chain.partial(0, count), SALT), FLAG_HOST)
        request = request_of("a", PROMPT)
        engine.role.new_request(request)
        assert engine.role.matched_tokens(request, 0) == 2 * BLOCK_TOKENS

    def test_a_chunk_in_the_store_bridges_two_in_host_memory(self, engine: Engine) -> None:
        chain = chain_of(engine, PROMPT)
        flags = [FLAG_HOST, FLAG_STORE, FLAG_HOST | FLAG_STORE]
        for key, flag in zip(chain.keys, flags, strict=False):
            engine.sidecar.index.set(tag_of(key, SALT), flag)
        request = request_of("a", PROMPT)
        engine.role.new_request(request)
        (lookup,) = engine.client.sent_of(Lookup)
        # The third is asked for too: it must not be evicted while the second is read.
        assert lookup.keys == chain.keys[1:3]

    def test_another_life_has_another_salt(self, engine: Engine) -> None:
        chain = chain_of(engine, PROMPT)
        request = request_of("a", PROMPT)
        engine.role.new_request(request)
        assert engine.role.matched_tokens(request, 0) == 0
        salt = b"s" * 16
        engine.sidecar.index.set(tag_of(chain.keys[0], salt), FLAG_HOST)
        engine.sidecar.index.set(tag_of(chain.partial(1, PER_CHUNK - 1), salt), FLAG_HOST)
        engine.client.attach(session_of(engine.sidecar.index, salt=salt))
        expected = CHUNK_TOKENS + (PER_CHUNK - 1) * BLOCK_TOKENS
        assert engine.role.matched_tokens(request, 0) == expected

    def test_a_closed_index_is_a_miss(self, engine: Engine) -> None:
        seen(engine)
        engine.sidecar.index.close()
        request = engine.add(request_of("a", PROMPT, max_tokens=1))
        assert engine.role.matched_tokens(request, 0) == 0
        engine.finish(request)
