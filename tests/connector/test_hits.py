"""Hits in host memory, in vLLM's own scheduler: how far they reach, and what is loaded for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sidecar.protocol import Lease, Limits, Lookup, Submit, Use, tenant_id
from sidecar.protocol.codec import encode
from sidecar.protocol.prompts import Prompts
from tests.connector.configurations import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    PER_CHUNK,
    request_of,
)
from tests.connector.double import LIMITS, SALT, session_of
from tests.connector.engine import Engine
from tests.connector.prompts import (
    CACHED,
    FULL,
    PROMPT,
    TAIL_BLOCKS,
    chain_of,
    counted,
    fields_of,
    last_load,
    seen,
    total,
)
from tiers.kv.index import FLAG_HOST, FLAG_STORE, tag_of


class TestHits:
    def test_none(self, engine: Engine) -> None:
        taken = counted(engine)
        engine.run(request_of("a", PROMPT))
        assert engine.computed["a"] >= len(PROMPT)
        assert total(taken, "requests_missed") == 1
        assert total(taken, "requests_hit") == 0
        # A miss asks for nothing: no lookup, no lease.
        assert not [one for one in engine.client.sent if not isinstance(one, Prompts | Use)]
        engine.check_idle()

    def test_the_sidecar_gets_the_tenant_and_not_the_salt(self, engine: Engine) -> None:
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

    def test_blocks_of_vllms_own_hit_are_not_loaded(self, engine: Engine) -> None:
        engine.run(request_of("earlier", PROMPT, max_tokens=1))
        engine.client.sent.clear()
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert not [one for one in engine.client.sent if not isinstance(one, Prompts | Use)]
        assert engine.computed["a"] == len(PROMPT) - CACHED

    @pytest.mark.parametrize(
        ("held", "asked", "missed"),
        [
            pytest.param(PROMPT, PROMPT, 0, id="all of it"),
            pytest.param(PROMPT[:-50], PROMPT, 0, id="all but less than a load"),
            pytest.param(PROMPT[:CHUNK_TOKENS], PROMPT[:CHUNK_TOKENS], 0, id="whole blocks"),
            pytest.param(PROMPT[:-130], PROMPT, 1, id="all but a load"),
            pytest.param([5] * 300, PROMPT, 1, id="nothing"),
            pytest.param([5] * 300, PROMPT[:BLOCK_TOKENS], 0, id="nothing of a short one"),
        ],
    )
    def test_vllms_own_hit_is_no_miss(
        self, make: Callable[..., Engine], held: list[int], asked: list[int], missed: int
    ) -> None:
        engine = make(load_tokens_min=64)
        engine.sidecar.detach()
        engine.run(request_of("earlier", held, max_tokens=1))
        engine.sidecar.attach()
        taken = counted(engine)
        engine.run(request_of("a", asked, max_tokens=1))
        assert total(taken, "requests_missed") == missed
        assert total(taken, "requests_hit") == 0

    def test_an_engine_that_only_stores_misses_nothing(self, make: Callable[..., Engine]) -> None:
        engine = make(kv_role="kv_producer")
        taken = counted(engine)
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert total(taken, "requests_missed") == 0

    def test_a_gain_that_is_not_worth_a_step(self, make: Callable[..., Engine]) -> None:
        engine = make(load_tokens_min=3 * CHUNK_TOKENS)
        seen(engine, PROMPT[: 2 * CHUNK_TOKENS + 1])
        engine.run(request_of("a", PROMPT[: 2 * CHUNK_TOKENS + 1], max_tokens=1))
        assert engine.computed["a"] == 2 * CHUNK_TOKENS + 1

    def test_a_lookup_changes_nothing(self, engine: Engine) -> None:
        seen(engine)
        request = engine.add(request_of("a", PROMPT))
        answers = {engine.role.matched_tokens(request, 0) for _ in range(5)}
        assert answers == {CACHED}
        assert engine.role.matched_tokens(request, 96) == CACHED - 96
        assert engine.role.matched_tokens(request, 0) == CACHED
        assert not [one for one in engine.client.sent if not isinstance(one, Prompts | Use)]

    def test_no_more_loads_than_the_sidecar_takes(self, make: Callable[..., Engine]) -> None:
        engine = make()
        seen(engine)
        session = engine.client.session
        assert session is not None
        limits = Limits(**{**fields_of(LIMITS), "jobs_inflight_max": 2})
        engine.client.attach(session_of(engine.sidecar.index, limits=limits))
        requests = [engine.add(request_of(f"r{i}", PROMPT, max_tokens=1)) for i in range(3)]
        engine.step()
        loads = [load for submit in engine.ranks[0].client.sent_of(Submit) for load in submit.loads]
        assert len(loads) == 2
        engine.finish(*requests)
        engine.settle()
        engine.check_idle()


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
        # The others are asked for too: they must not be evicted while the second is read.
        assert lookup.keys == chain.keys[:3]

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
