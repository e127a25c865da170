"""Copies between a CPU engine's cache and vLLM's host tier, in both of its layouts."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    CanonicalPageMapping,
    CopyRun,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from connector.offloading.cpu_worker import HostCopyWorker

BLOCKS = 12
PAGE = 1024
PER_CHUNK = 4
CHUNKS = 6
ROW_BYTES = 2 * PAGE * PER_CHUNK


def cache(seed: int) -> torch.Tensor:
    bytes_ = np.random.default_rng(seed).integers(0, 256, (BLOCKS, PAGE), dtype=np.uint8)
    return torch.from_numpy(bytes_).view(torch.int8)


def caches_of(
    tensors: list[torch.Tensor],
    groups: list[list[int]],
    mapping: CanonicalPageMapping | None = None,
) -> CanonicalKVCaches:
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, PAGE) for tensor in tensors],
        [[CanonicalKVCacheRef(number, PAGE, mapping) for number in group] for group in groups],
    )


def region(engine_id: str, rank: int = 0, worker_bytes: int = ROW_BYTES) -> SharedOffloadRegion:
    return SharedOffloadRegion(engine_id, CHUNKS, rank, ROW_BYTES, worker_bytes)


@pytest.fixture
def engine_id() -> str:
    return f"hostcopy-{secrets.token_hex(8)}"


def spec(blocks: list[int], sizes: list[int], indices: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)


def done(worker: HostCopyWorker, job_id: int) -> int:
    """Wait for a job; the bytes that it copied."""
    worker.wait({job_id, 999})
    (result,) = worker.get_finished()
    assert (result.job_id, result.success) == (job_id, True)
    assert result.transfer_size is not None
    assert not worker.get_finished()
    return int(result.transfer_size)


def test_blocks_are_loaded_into_other_blocks(engine_id: str) -> None:
    tensors = [cache(1), cache(2)]
    worker = HostCopyWorker(
        caches_of(tensors, [[0, 1]]), region(engine_id), PER_CHUNK, canonical=False
    )
    before = [tensor.clone() for tensor in tensors]
    blocks = [7, 2, 9, 4, 0, 1, 3, 5]
    assert worker.submit_store(1, spec(blocks, [8], [0]), CPULoadStoreSpec([5, 2]))
    assert done(worker, 1) == 8 * 2 * PAGE
    for tensor in tensors:
        tensor.fill_(0x7B)
    # The second half of the first chunk, and the first of the second.
    wanted = [10, 11, 6]
    assert worker.submit_load(2, CPULoadStoreSpec([5, 2]), spec(wanted, [3], [2]), expedited=True)
    done(worker, 2)
    for tensor, old in zip(tensors, before, strict=True):
        for block, source in zip(wanted, blocks[2:5], strict=True):
            assert torch.equal(tensor[block], old[source])
        others = [block for block in range(BLOCKS) if block not in wanted]
        assert (tensor[others] == 0x7B).all()
    worker.shutdown()


@pytest.mark.promise("offloading-groups")
def test_groups_and_jobs_that_begin_within_a_chunk(engine_id: str) -> None:
    """Rows of groups follow each other, and each group writes only its own layers."""
    tensors = [cache(3), cache(4)]
    worker = HostCopyWorker(
        caches_of(tensors, [[0], [1]]), region(engine_id), PER_CHUNK, canonical=False
    )
    try:
        before = [tensor.clone() for tensor in tensors]
        stored = spec([1, 2, 3, 4, 8, 9, 10, 11], [4, 4], [0, 4])
        worker.submit_store(1, stored, CPULoadStoreSpec([0, 1]))
        done(worker, 1)
        for tensor in tensors:
            tensor.fill_(0)
        worker.submit_load(2, CPULoadStoreSpec([0, 1]), spec([6, 7, 5], [1, 2], [3, 6]))
        done(worker, 2)
        assert torch.equal(tensors[0][6], before[0][4])
        assert torch.equal(tensors[1][7], before[1][10])
        assert torch.equal(tensors[1][5], before[1][11])
        assert not tensors[0][7].any()
        assert not tensors[1][6].any()
    finally:
        worker.shutdown()


@pytest.mark.promise("offloading-canonical")
def test_ranks_make_canonical_pages_together(engine_id: str) -> None:
    """Two ranks with half of the heads each store what a single rank loads."""
    tokens = 16
    row = PAGE // tokens

    def rank_mapping(rank: int) -> CanonicalPageMapping:
        # By token: each rank's part of a token's row lies beside the other's.
        run = CopyRun(0, rank * row, row, tokens, row, 2 * row)
        return CanonicalPageMapping(2 * PAGE, PAGE, (run,), 1, 0, True)

    ranks = [cache(5), cache(6)]
    workers = [
        HostCopyWorker(
            caches_of([ranks[rank]], [[0]], rank_mapping(rank)),
            region(engine_id, rank, ROW_BYTES // 2),
            PER_CHUNK,
            canonical=True,
        )
        for rank in range(2)
    ]
    reader = region(engine_id)
    try:
        for worker in workers:
            worker.submit_store(1, spec([3, 1, 4, 0], [4], [0]), CPULoadStoreSpec([2]))
            done(worker, 1)
        rows = np.asarray(reader.create_kv_memoryview()).view(np.uint8)
        page = rows[2, : 2 * PAGE].reshape(tokens, 2, row)
        for rank in range(2):
            expected = ranks[rank][3].view(torch.uint8).numpy().reshape(tokens, row)
            assert (page[:, rank] == expected).all()
        for worker, tensor in zip(workers, ranks, strict=True):
            before = tensor.clone()
            tensor.fill_(0)
            worker.submit_load(2, CPULoadStoreSpec([2]), spec([5], [1], [1]))
            done(worker, 2)
            assert torch.equal(tensor[5], before[1])
    finally:
        for worker in workers:
            worker.shutdown()
        reader.cleanup()


def test_ranks_with_the_same_bytes_share_the_work(engine_id: str) -> None:
    run = CopyRun(0, 0, PAGE, 1, PAGE, PAGE)
    mapping = CanonicalPageMapping(PAGE, PAGE, (run,), 2, 1, True)
    worker = HostCopyWorker(
        caches_of([cache(7)], [[0]], mapping), region(engine_id), PER_CHUNK, canonical=True
    )
    try:
        worker.submit_store(1, spec([0, 1, 2, 3], [4], [0]), CPULoadStoreSpec([0]))
        assert done(worker, 1) == 2 * PAGE
    finally:
        worker.shutdown()


def step(*, computes: bool) -> ForwardContext:
    """As vLLM's runner makes it: of a step that computes nothing there is no metadata."""
    metadata: Any = {} if computes else None
    return ForwardContext(no_compile_layers={}, attn_metadata=metadata, slot_mapping={})


def test_idle_workers_leave_their_cores_to_the_sidecar(
    engine_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They sleep instead of repeating the step; one with a copy waits for that."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    for several in (False, True):
        caches = caches_of([cache(1)], [[0]])
        memory = region(engine_id)
        worker = HostCopyWorker(caches, memory, PER_CHUNK, canonical=False, several=several)
        for computes in (True, False):
            with override_forward_context(step(computes=computes)):
                assert not worker.get_finished()
            assert bool(pauses) == (several and not computes)
    assert len(pauses) == 1
    begin = threading.Event()
    worker._thread.submit(begin.wait)  # noqa: SLF001 (its public names are vLLM's)
    worker.submit_store(1, spec([1], [1], [0]), CPULoadStoreSpec([0]))
    with override_forward_context(step(computes=False)):
        assert not worker.get_finished()
        begin.set()
        worker.wait({1})
        assert [result.job_id for result in worker.get_finished()] == [1]
    assert len(pauses) == 1, "it slept beside a copy of its own"
    worker.shutdown()


def test_an_expedited_load_waits_for_no_other_copy(engine_id: str) -> None:
    tensor = cache(1)
    worker = HostCopyWorker(
        caches_of([tensor], [[0]]), region(engine_id), PER_CHUNK, canonical=False
    )
    begin = threading.Event()
    try:
        worker.submit_store(1, spec([1], [1], [0]), CPULoadStoreSpec([0]))
        done(worker, 1)
        expected = tensor[1].clone()
        worker._thread.submit(begin.wait)  # noqa: SLF001 (its public names are vLLM's)
        worker.submit_store(2, spec([2], [1], [0]), CPULoadStoreSpec([1]))
        worker.submit_load(3, CPULoadStoreSpec([0]), spec([4], [1], [0]), expedited=True)
        worker.wait({3})
        assert [result.job_id for result in worker.get_finished()] == [3]
        assert torch.equal(tensor[4], expected)
    finally:
        begin.set()
        worker.shutdown()
