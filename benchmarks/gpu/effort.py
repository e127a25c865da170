"""How much the benchmarks of a GPU do, there and in a rehearsal on the double."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.gpu.layouts import layout_in

if TYPE_CHECKING:
    from tiers.kv.layout import KVLayout

STORES: Final = "stores"
LOADS: Final = "loads"
PIECES_BYTES: Final = (2 << 20, 1 << 20, 64 << 10, 32 << 10, 16 << 10, 8 << 10)
"""Runs of adjacent bytes in a cache. Of 1 MiB and more: whole blocks, layers inside (BLHNC). Less:
one layer of a block (LBHNC)."""
LAYER_BYTES: Final = 64 << 10
"""Bytes of one layer of a block in BLHNC: 8 heads of 128 in bfloat16, 16 tokens."""


@dataclass(frozen=True)
class Effort:
    """Sizes and numbers."""

    cache_bytes: int
    round_bytes: int
    """What one round copies; half of the cache, so that no two blocks of it are neighbours."""
    rounds: int
    sidecar_rounds: int
    """Rounds' bytes that go through the sidecar in one measurement."""
    pool: str
    layers: int
    blocks_per_chunk: int
    job_bytes: int
    waiting_bytes: int
    """Copies that are kept waiting for the sidecar, so that it never runs dry."""
    windows: int
    window_seconds: float
    reads: int
    steps: int
    warm_up: int
    """Reads and steps before those that are counted."""
    limits_bytes: tuple[int, ...]
    """In flight per direction; 32 MiB is the default."""
    size_multiple: int
    ranks: int
    threads: tuple[int, ...]
    """Values of `copy.threads`."""

    def rank_layout(self) -> KVLayout:
        """A rank's cache: as `layout` of 1 MiB, and its share of the whole."""
        return self.layout(1 << 20, self.cache_bytes // self.ranks)

    def layout(self, piece_bytes: int, cache_bytes: int = 0) -> KVLayout:
        """A cache whose blocks lie in runs of `piece_bytes`."""
        if piece_bytes >= 1 << 20:
            order, layers, heads, content = "BLHNC", piece_bytes // LAYER_BYTES, 8, 512
            block_bytes = piece_bytes
        else:
            order, layers, heads, content = "LBHNC", self.layers, piece_bytes // 4096, 256
            block_bytes = layers * piece_bytes
        return layout_in(
            order,
            layers=layers,
            heads=heads,
            content_bytes=content,
            blocks=(cache_bytes or self.cache_bytes) // block_bytes,
            lead_bytes=0,
            size_multiple=self.size_multiple,
        )


FULL: Final = Effort(
    cache_bytes=2 << 30,
    round_bytes=1 << 30,
    rounds=7,
    sidecar_rounds=8,
    pool="4GiB",
    layers=32,
    blocks_per_chunk=16,
    job_bytes=32 << 20,
    waiting_bytes=1 << 30,
    windows=3,
    window_seconds=2.0,
    reads=20_000,
    steps=3_000,
    warm_up=100,
    limits_bytes=(32 << 20, 8 << 20, 2 << 20, 128 << 20),
    size_multiple=2 << 20,
    ranks=8,
    threads=(4, 8, 12),
)
SMALL: Final = Effort(
    cache_bytes=16 << 20,
    round_bytes=8 << 20,
    rounds=2,
    sidecar_rounds=1,
    pool="40MiB",
    layers=4,
    blocks_per_chunk=2,
    job_bytes=1 << 20,
    waiting_bytes=2 << 20,
    windows=1,
    window_seconds=0.1,
    reads=10,
    steps=10,
    warm_up=2,
    limits_bytes=(1 << 20,),
    size_multiple=1 << 16,
    ranks=2,
    threads=(1, 2),
)
