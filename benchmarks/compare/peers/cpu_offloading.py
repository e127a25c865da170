"""vLLM's own offloading on the CPU platform: its scheduler, its tiers, and a copy worker of ours.

vLLM's worker copies with CUDA streams and refuses CPUs. Everything else is vLLM's: what is stored,
what is looked up, when it is evicted, and the file tier below the host tier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from connector.offloading.cpu_worker import HostCopyWorker

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with kvlake's copy worker; it has no other part of kvlake."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Make the worker that copies between the KV cache and vLLM's host tier."""
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return HostCopyWorker(
            kv_caches, region, self.blocks_per_chunk, canonical=self.config.canonical_layout
        )
