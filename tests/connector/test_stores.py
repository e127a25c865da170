"""Stores under vLLM's own scheduler: what is stored, and how long its blocks are held."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from connector.plan import Load, StepPlan, StepReport, Store
from connector.scheduler.stores import BLOCKS_WAIT_SECONDS_MAX
from connector.vllm import KVLakeConnector, KVLakeMetadata, KVLakeWorkerMetadata
from sidecar.protocol import (
    Limits,
    LoadJob,
    Outcome,
    StoreJob,
    Submit,
)
from tests import places
from tests.connector.configurations import (
    CHUNK_TOKENS,
    kv_cache_config,
    request_of,
    vllm_config,
)
from tests.connector.double import LIMITS, session_of
from tests.connector.engine import Engine
from tests.connector.prompts import (
    FULL,
    PROMPT,
    TAIL_BLOCKS,
    chain_of,
    counted,
    fields_of,
    total,
)


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
        assert engine.role.stores.jobs
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
        limits = Limits(**{**fields_of(LIMITS), "jobs_inflight_max": 2})
        engine.client.attach(session_of(engine.sidecar.index, limits=limits))
        taken = counted(engine)
        for number in range(4):
            engine.add(request_of(f"r{number}", [number] * 200, max_tokens=1))
        for _ in range(3):
            engine.step()
        assert len(engine.role.stores.jobs) == 2
        assert total(taken, "stores_skipped") > 0
        engine.settle()
        engine.check_idle()

    def test_a_job_fits_into_a_message(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A prompt of a million tokens would exceed it."""
        places.patch(monkeypatch, "JOB_BYTES_MAX", 1_000)
        engine.add(request_of("a", PROMPT, max_tokens=1))
        engine.step()
        assert len(engine.role.stores.jobs) == FULL // 2 + 1
        engine.settle()
        assert len(engine.sidecar.parts) == FULL + 1
        engine.check_idle()

    def test_the_chunk_counts_again_after_a_lost_job(self, engine: Engine) -> None:
        engine.role.stores_ended(StepReport({999: 1}))
        engine.run(request_of("a", PROMPT, max_tokens=1))
        assert len(engine.sidecar.parts) == FULL + 1

    def test_an_engine_short_of_blocks_waits_for_a_limited_time(self, engine: Engine) -> None:
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


def test_a_rank_that_is_not_served_ends_every_job(model: Path) -> None:
    """With drafts, model runner V1 takes a step's results before it tells of the step's jobs."""
    rank = KVLakeConnector(vllm_config(model), KVConnectorRole.WORKER, kv_cache_config())
    with places.patched("ParallelLayout.this_rank", lambda _layout: 0):
        rank.register_kv_caches({})

    def told(plan: StepPlan, *, late: bool) -> tuple[set[str], set[int]]:
        """Requests and stores that ended, of a step with these jobs."""
        rank.bind_connector_metadata(KVLakeMetadata(plan))
        if not late:
            rank.wait_for_save()
        failed = rank.get_transfer_results(set()).failed_recving
        metadata = rank.build_connector_worker_meta()
        if late:
            rank.wait_for_save()
        rank.clear_connector_metadata()
        assert metadata is None or isinstance(metadata, KVLakeWorkerMetadata)
        return set(failed), set() if metadata is None else set(metadata.report.ended)

    first = StepPlan([Load("a", LoadJob(1, []))], [Store(StoreJob(2, []))])
    assert told(first, late=True) == (set(), set())
    # One that computes nothing tells in the usual order.
    second = StepPlan([Load("b", LoadJob(3, []))], [Store(StoreJob(4, []))])
    assert told(second, late=False) == ({"a", "b"}, {2, 4})
    assert told(StepPlan(), late=False) == (set(), set())
