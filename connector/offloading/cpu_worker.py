"""Copies between the KV cache of a CPU engine and vLLM's host tier, in the order of submission.

vLLM's own worker needs CUDA streams. This one knows the same two layouts of the host tier: each
worker's pages side by side, or the canonical pages that vLLM's mappings describe.

Invariants: sub-block j of a row is the j-th block of its chunk in every tensor; what a job does not
cover is not touched; `wait` returns once the copies of its jobs are over, and copies depend only on
this process.
"""

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    CopyRun,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from connector.plan import IDLE_WAIT_MS

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of fragments in a layer's page, on both sides."""

    cache: Bytes
    """[blocks, fragments, bytes]"""
    host: Bytes
    """[chunks, blocks of a chunk, fragments, bytes]"""
    num_writers: int
    writer_index: int


class HostCopyWorker(OffloadingWorker):
    """vLLM's `OffloadingWorker` for caches in host memory.

    It closes `region`, vLLM's `SharedOffloadRegion`. `canonical` says whether rows hold canonical
    pages, `several` whether the engine has other workers.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        region: Any,
        blocks_per_chunk: int,
        *,
        canonical: bool,
        several: bool = False,
    ) -> None:
        self._region = region
        self._several = several
        self._per_chunk = blocks_per_chunk
        self._groups = _runs_of(kv_caches, region, blocks_per_chunk, canonical=canonical)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvlake-copy")
        self._expedited = ThreadPoolExecutor(1, thread_name_prefix="kvlake-copy-now")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy blocks of the cache to rows of the host tier."""
        pieces = list(self._pieces(src_spec, dst_spec))
        self._jobs[job_id] = self._thread.submit(self._copy, job_id, pieces, store=True)
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy rows of the host tier to blocks of the cache.

        vLLM 0.33 delays a step for an `expedited` load, so that waits for no other copies.
        """
        thread = self._expedited if expedited else self._thread
        pieces = list(self._pieces(dst_spec, src_spec))
        self._jobs[job_id] = thread.submit(self._copy, job_id, pieces, store=False)
        return True

    def _pieces(
        self, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec
    ) -> Iterator[tuple[int, Ids, Ids]]:
        """For each group: number, block ids, and where each block is: row × blocks per row + j."""
        assert isinstance(chunks, BlockIDsLoadStoreSpec)
        block_ids, chunk_ids = (one.block_ids.astype(np.int64) for one in (blocks, chunks))
        first_block = first_chunk = 0
        for group, (count, index) in enumerate(
            zip(blocks.group_sizes, blocks.block_indices, strict=True)
        ):
            if not count:
                continue
            # The first row may begin in the middle; the rows of a group follow each other.
            skipped = index % self._per_chunk
            num_chunks = -(-(skipped + count) // self._per_chunk)
            rows = chunk_ids[first_chunk : first_chunk + num_chunks]
            places = (rows[:, np.newaxis] * self._per_chunk + np.arange(self._per_chunk)).ravel()
            yield (
                group,
                block_ids[first_block : first_block + count],
                places[skipped : skipped + count],
            )
            first_block += count
            first_chunk += num_chunks

    def _copy(
        self, job_id: int, pieces: list[tuple[int, Ids, Ids]], *, store: bool
    ) -> TransferResult:
        started = time.perf_counter()
        size_bytes = 0
        for group, block_ids, places in pieces:
            for run in self._groups[group]:
                blocks, at = block_ids, places
                if store and run.num_writers > 1:
                    # Ranks that hold the same bytes share the work.
                    mine = places % run.num_writers == run.writer_index
                    blocks, at = block_ids[mine], places[mine]
                rows, inner = np.divmod(at, self._per_chunk)
                if store:
                    run.host[rows, inner] = run.cache[blocks]
                else:
                    run.cache[blocks] = run.host[rows, inner]
                size_bytes += run.cache[:1].size * len(blocks)
        return TransferResult(job_id, True, size_bytes, time.perf_counter() - started)

    def get_finished(self) -> list[TransferResult]:
        """Jobs that ended since the last call. Called once per step.

        vLLM repeats a step that computes nothing at once, to wait for a transfer. Several workers
        then spin and leave no core to the sidecar, so each sleeps for a moment, or until one of its
        copies has ended. A single worker does not spin.
        """
        if self._several and _computes_nothing():
            if self._jobs:
                wait_for(self._jobs.values(), IDLE_WAIT_MS / 1000, FIRST_COMPLETED)
            else:
                time.sleep(IDLE_WAIT_MS / 1000)
        ended = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._jobs.pop(job_id).result() for job_id in ended]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the copies of these jobs are over."""
        for job_id in job_ids:
            if (job := self._jobs.get(job_id)) is not None:
                job.result()

    def shutdown(self) -> None:
        """Finish what is queued, and close the region."""
        self._thread.shutdown()
        self._expedited.shutdown()
        self._groups.clear()
        self._region.cleanup()


def _computes_nothing() -> bool:
    """Whether this step has no forward pass."""
    if not is_forward_context_available():
        return False
    metadata: Any = get_forward_context().attn_metadata
    return metadata is None


def _runs_of(
    kv_caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int, *, canonical: bool
) -> list[list[_Run]]:
    """Runs of every layer of each group."""
    pages = [tensor.page_size_bytes for tensor in kv_caches.tensors]
    if canonical:
        pages = [0] * len(pages)
        for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
            assert ref.mapping is not None, "checked before"
            size = ref.mapping.canonical_page_size_bytes
            pages[ref.tensor_idx] = max(pages[ref.tensor_idx], size)
    take = region.create_next_canonical_view if canonical else region.create_next_worker_view
    rows = [_bytes(take(page * blocks_per_chunk)) for page in pages]
    hosts = [
        each.reshape(len(each), blocks_per_chunk, page)
        for each, page in zip(rows, pages, strict=True)
    ]

    def runs_of(ref: Any) -> list[_Run]:
        cache, host = _bytes(kv_caches.tensors[ref.tensor_idx].tensor), hosts[ref.tensor_idx]
        size = ref.page_size_bytes
        runs, num_writers, writer_index = (CopyRun(0, 0, size, 1, size, size),), 1, 0
        if canonical:
            mapping = ref.mapping
            runs, num_writers = mapping.runs, mapping.num_writers
            writer_index = mapping.writer_index
        return [
            _Run(
                _fragments(cache, run.local_offset, run.local_stride, run),
                _fragments(host, run.canonical_offset, run.canonical_stride, run),
                num_writers,
                writer_index,
            )
            for run in runs
        ]

    return [[run for ref in refs for run in runs_of(ref)] for refs in kv_caches.group_data_refs]


def _bytes(tensor: "torch.Tensor") -> Bytes:
    array: Bytes = tensor.numpy().view(np.uint8)
    return array


def _fragments(pages: Bytes, offset: int, stride: int, run: CopyRun) -> Bytes:
    """Views of a run's fragments in every page."""
    last = offset + (run.num_fragments - 1) * stride + run.fragment_size
    assert last <= pages.shape[-1], f"a run reaches byte {last} of a page of {pages.shape[-1]}"
    shape = (*pages.shape[:-1], run.num_fragments, run.fragment_size)
    return np.lib.stride_tricks.as_strided(
        pages[..., offset:], shape, (*pages.strides[:-1], stride, 1)
    )
