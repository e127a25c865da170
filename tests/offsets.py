"""Where a coordinate lies in a worker's memory, as `KVLayout` defines it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiers.kv.layout import KVLayout


def offset_of(kv: KVLayout, layer: int, block: int, head: int, token: int) -> int:
    """Byte offset of one coordinate, counted within the segment; `token` counts entries."""
    assert 0 <= layer < kv.segment.num_layers
    assert 0 <= block < kv.num_blocks
    assert 0 <= head < kv.segment.num_heads
    assert 0 <= token < kv.block_entries
    strides = kv.block_stride_bytes, kv.head_stride_bytes, kv.token_stride_bytes
    steps = (block, head, token)
    within = sum(stride * step for stride, step in zip(strides, steps, strict=True))
    return kv.layer_offsets_bytes[layer] + within
