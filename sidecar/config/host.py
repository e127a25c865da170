"""The sections about host memory and the copies to and from it: chunks, pool, copying, verifying.

Owns `chunk`, `host`, `copy`, `gpu` and `integrity`. Does not own what engines may wait for
(`limits.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from sidecar.config.addresses import require_absolute
from sidecar.config.section import Section
from sidecar.config.types import Count, Directory, Flag, Nodes, Ratio, Size
from tiers.pool.prefault import default_threads


class ChunkSettings(Section):
    """The unit that is stored, looked up and evicted."""

    tokens: Count = Field(default=256, ge=1, le=65_536)
    """Tokens per chunk; a multiple of the engine's block size. Handed on by `kvlake run`."""


class HostSettings(Section):
    """The host memory tier."""

    size: Size = Field(default=8 << 30, ge=1 << 20)
    """Host memory for chunks, such as "8GiB"."""
    directory: Directory = Path("/dev/shm")  # noqa: S108 (a file system in memory, by design)
    """Absolute directory of the pool's file; in a memory file system such as /dev/shm."""
    policy: Literal["lru", "fifo"] = "lru"
    """Which chunk makes room: the least recently used, or the oldest."""
    prefault: Flag = True
    """Touch all of it at the start, so that no store pays for first use."""
    prefault_threads: Count | None = Field(default=None, ge=1, le=256)
    """Threads that touch it. null: half of the cores, at most 8."""
    numa: Nodes = "auto"
    """NUMA nodes to lie on: `auto` (next to the GPUs), `off`, or a list such as [0]."""
    after_stop: Literal["keep", "remove"] = "keep"
    """`keep`: the memory stays for the next start. `remove`: it is given back at SIGTERM."""

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return require_absolute(value)

    @property
    def touching_threads(self) -> int:
        """`prefault_threads`, or what is right for this machine."""
        return self.prefault_threads or default_threads()


class CopySettings(Section):
    """Copying between engines and host memory."""

    threads: Count = Field(default=1, ge=1, le=256)
    """Threads that copy; one saturates a core, and engines want theirs."""
    prefault: Flag = True
    """Map all of an engine's KV memory when it attaches; off, each page when it is first copied."""


class GpuSettings(Section):
    """Copying between GPUs and host memory, by their copy engines."""

    loads_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes on their way to one GPU at any time; a decode step's own copies wait behind them."""
    stores_inflight_max: Size = Field(default=32 << 20, ge=1 << 20)
    """Bytes on their way from one GPU at any time; a token's way back waits behind them."""
    strided_copies: Literal["auto", "batch", "2d"] = "auto"
    """How runs at a distance are copied: `auto` (measured when a GPU is first used), or one way."""


class IntegritySettings(Section):
    """How often bytes are compared with the checksum taken when they left an engine."""

    verify_loads: Ratio = Field(default=1.0, ge=0, le=1)
    """Part of the chunks loaded from host memory that is verified, from 0 to 1, spread evenly."""
    verify_writes: Ratio = Field(default=0.02, ge=0, le=1)
    """The same of what is written to the object store; whoever reads it verifies all of it."""
