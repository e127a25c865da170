"""The sections `chunk`, `host`, `copy`, `gpu`, `integrity` and `limits`.

What happens at a limit is in `sidecar/core/fair_share.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, model_validator

from sidecar.config.types import (
    AbsolutePath,
    Count,
    Duration,
    Flag,
    Nodes,
    Ratio,
    Section,
    Size,
)
from sidecar.config.units import format_duration
from sidecar.protocol import GROUPS_MAX

PREFAULT_THREADS_MAX: Final = 8
"""Clearing pages is bound by memory bandwidth, and an engine starts beside the sidecar."""


class ChunkSettings(Section):
    """The unit that is stored, looked up and evicted."""

    tokens: Count = Field(default=256, ge=1, le=65_536)
    """Tokens per chunk; a multiple of the engine's block size. Handed on by `kvlake run`."""


class HostSettings(Section):
    """The host memory tier."""

    size: Size = Field(default=8 << 30, ge=1 << 20)
    """Host memory for chunks, such as "8GiB"."""
    directory: AbsolutePath = Path("/dev/shm")  # noqa: S108 (a file system in memory, by design)
    """Absolute directory of the pool's file; in a memory file system such as /dev/shm."""
    policy: Literal["lru", "fifo"] = "lru"
    """Which chunk makes room: the least recently used, or the oldest."""
    prefault: Flag = True
    """Touch all of it at startup, so that no store pays for first use."""
    prefault_threads: Count | None = Field(default=None, ge=1, le=256)
    """Threads that touch it. null: half of the cores, at most 8."""
    numa: Nodes = "auto"
    """NUMA nodes of its memory: `auto` (next to the GPUs), `off`, or a list such as [0]."""
    after_stop: Literal["keep", "remove"] = "keep"
    """`keep`: the memory stays for the next start. `remove`: it is freed at SIGTERM."""

    @property
    def touching_threads(self) -> int:
        """`prefault_threads`, or what is right for this machine."""
        cores = len(os.sched_getaffinity(0))
        return self.prefault_threads or min(PREFAULT_THREADS_MAX, max(1, cores // 2))


class CopySettings(Section):
    """Copying between engines and host memory."""

    threads: Count = Field(default=1, ge=1, le=256)
    """Threads that copy. Each can saturate a core that engines could use."""
    prefault: Flag = True
    """Map all of an engine's KV memory when it attaches; if off, each page when first copied."""


class GpuSettings(Section):
    """Copying between GPUs and host memory, by their copy engines."""

    loads_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes in flight to one GPU; a decode step's own copies queue behind them."""
    stores_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes in flight from one GPU; a token's copy to the host queues behind them."""
    strided_copies: Literal["auto", "batch", "2d"] = "auto"
    """How strided runs are copied: `auto` (measured when a GPU is first used), or one way."""


class IntegritySettings(Section):
    """How often bytes are compared with the checksum that was taken when they left an engine."""

    verify_loads: Ratio = Field(default=1.0, ge=0, le=1)
    """Share of the chunks loaded from host memory that is verified, from 0 to 1, spread evenly."""
    verify_writes: Ratio = Field(default=0.02, ge=0, le=1)
    """Share of the chunks written to the object store that is verified. Readers verify all."""


class LimitsSettings(Section):
    """Deadlines and bounds. Engines receive the first four when they attach."""

    lookup_wait: Duration = Field(default=0.5, le=60)
    """Longest that a request waits for chunks that only the object store holds."""
    load_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """Longest that an engine waits for a load; then it computes the tokens itself."""
    store_deadline: Duration = Field(default=10.0, ge=0.01, le=600)
    """Longest that an engine holds blocks for a store; then it takes them back."""
    lease_ttl: Duration = Field(default=10.0, ge=0.01, le=3600)
    """How long a pinned chunk stays pinned if its pin is not released."""
    attach_deadline: Duration = Field(default=5.0, ge=0.01, le=600)
    """How long a connected client may take to attach; then it is disconnected."""
    jobs_inflight_max: Count = Field(default=256, ge=1, le=4096)
    """Running jobs of one engine; at the limit, it stores nothing."""
    memory_max: Size = Field(default=256 << 20, ge=1 << 20)
    """Memory of the sidecar for pending lookups, leases, jobs and copies."""
    copies_queued_max: Count = Field(default=65_536, ge=16, le=10_000_000)
    """Chunks queued for copying; at the limit, loads miss and stores are dropped."""
    storing_max: Size | None = Field(default=None, ge=1)
    """Host memory of running stores. null: host.size."""
    pinned_max: Size | None = Field(default=None, ge=1)
    """Host memory that leases and lookups may pin. null: host.size."""
    lookups_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Lookups that are pending or hold chunks; further ones are refused."""
    leases_max: Count = Field(default=4096, ge=2, le=1_000_000)
    """Leases at a time; further loads run without one."""
    replies_queued_max: Count = Field(default=1024, ge=16, le=65_536)
    """Answers queued for one client; a client that does not read them is disconnected."""
    sessions_max: Count = Field(default=256, ge=1, le=65_536)
    """Attached clients: one scheduler and one worker per rank for each engine."""
    realms_max: Count = Field(default=256, ge=GROUPS_MAX, le=65_536)
    """Namespaces and topologies at a time; new ones replace unused ones."""
    drain_seconds_max: Duration = Field(default=30.0, le=3600)
    """Longest that a stopping sidecar writes to the object store."""

    @model_validator(mode="after")
    def _ordered(self) -> LimitsSettings:
        if self.lease_ttl < self.load_deadline:
            raise ValueError(
                f"lease_ttl={format_duration(self.lease_ttl)} ends before "
                f"load_deadline={format_duration(self.load_deadline)}; a lease must outlive the "
                "load that it protects, so raise lease_ttl or lower load_deadline"
            )
        return self
