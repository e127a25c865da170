"""KV caches as vLLM itself lays them out, for tests that compare with torch's own views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from tiers.kv.layout import KVLayout, Segment

if TYPE_CHECKING:
    import numpy.typing as npt

LAYOUT_NAMES = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "uint8": torch.uint8,
}


@dataclass(frozen=True)
class Cache:
    """One worker's memory, vLLM's views of it, and what kvlake makes of them."""

    raw: Any
    views: list[Any]
    kv: KVLayout

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The whole allocation as bytes, shared with the tensors."""
        memory: npt.NDArray[np.uint8] = self.raw.numpy().view(np.uint8)
        return memory

    def canonical(self, block_ids: list[int]) -> npt.NDArray[np.uint8]:
        """What torch says the payload of `block_ids` is: [blocks, layers, heads, tokens, C]."""
        stacked = torch.stack([view[block_ids] for view in self.views], dim=1)
        payload: npt.NDArray[np.uint8] = stacked.contiguous().view(torch.uint8).numpy().ravel()
        return payload


def build(
    name: str,
    *,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    head_size: int,
    dtype: str = "bfloat16",
    lead_bytes: int = 0,
    tail_bytes: int = 0,
    page_padding_bytes: int = 0,
    random_seed: int = 0,
) -> Cache:
    """A cache of random bytes, its views made by vLLM's own `create_kv_cache_views`."""
    spec = FullAttentionSpec(
        block_size=tokens, num_kv_heads=heads, head_size=head_size, dtype=DTYPES[dtype]
    )
    if page_padding_bytes:
        spec = FullAttentionSpec(
            block_size=tokens,
            num_kv_heads=heads,
            head_size=head_size,
            dtype=DTYPES[dtype],
            page_size_padded=spec.page_size_bytes + page_padding_bytes,
        )
    layout = KVCacheLayout[name]
    strides = compute_layout_strides(spec, blocks, layers, layout)
    shape = (layers, blocks, heads, tokens, spec.state_content_size_bytes)
    span = max(stride * count for stride, count in zip(strides, shape, strict=True))
    size = lead_bytes + span + tail_bytes
    random = np.random.default_rng(random_seed)
    raw = torch.from_numpy(random.integers(-128, 128, size, dtype=np.int8))
    tensor = KVCacheTensor(
        size=size,
        layers=[f"layer.{layer}" for layer in range(layers)],
        layer_stride=strides[0],
        block_stride=strides[1],
        offset=lead_bytes,
    )
    views = create_kv_cache_views(raw, spec, blocks, layout, tensor)
    itemsize = DTYPES[dtype].itemsize
    kv = KVLayout.from_views(
        Segment(0, layers, 0, heads),
        [
            (
                view.data_ptr() - raw.data_ptr(),
                tuple(view.shape),
                tuple(stride * itemsize for stride in view.stride()),
            )
            for view in views
        ],
        itemsize=itemsize,
        dtype=dtype,
        encoding="raw",
        size_bytes=size,
    )
    return Cache(raw, views, kv)


@st.composite
def caches(draw: st.DrawFn) -> Cache:
    """Small caches over all six layouts, with offsets, tails, odd head sizes and padded pages."""
    name = draw(st.sampled_from(LAYOUT_NAMES))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    itemsize = DTYPES[dtype].itemsize
    pages_are_outer = name in {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
    padding = st.sampled_from([0, 16, 64, 1024]) if pages_are_outer else st.just(0)
    return build(
        name,
        layers=draw(st.integers(1, 4)),
        blocks=draw(st.integers(1, 7)),
        heads=draw(st.integers(1, 4)),
        tokens=draw(st.sampled_from([1, 2, 3, 8])),
        head_size=draw(st.sampled_from([1, 3, 4, 16, 33])),
        dtype=dtype,
        lead_bytes=draw(st.sampled_from([0, 1, 3, 8, 100])) * itemsize,
        tail_bytes=draw(st.sampled_from([0, 1, 5, 64])) * itemsize,
        page_padding_bytes=draw(padding),
        random_seed=draw(st.integers(0, 1 << 16)),
    )
