"""How an engine's cache of torch is seen and worked on, in memory of the CPU: the kernels' side."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.layouts import ORDERS, layout_in
from tests.gpu.real import caches
from tests.offsets import offset_of
from tiers.kv.layout import KVLayout


@pytest.fixture(autouse=True)
def _without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "DEVICE", "cpu")
    monkeypatch.setattr(caches, "BUSY_BYTES", 4096)
    monkeypatch.setattr(caches, "MATMUL_SIZE", 16)
    for name in ("init", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)


def _block(whole: bytes, layout: KVLayout, block: int) -> bytes:
    return b"".join(
        whole[place : place + layout.content_bytes]
        for layer in range(layout.segment.num_layers)
        for head in range(layout.segment.num_heads)
        for token in range(layout.block_tokens)
        for place in [offset_of(layout, layer, block, head, token)]
    )


def _whole(cache: caches.TorchCache) -> bytes:
    return bytes(cache.buffer.numpy().tobytes())


@pytest.mark.parametrize("place", ["malloc", "interior", "segments"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_block_is_where_its_layout_says(order: str, place: str) -> None:
    layout = layout_in(order, lead_bytes=0)
    cache = caches.TorchCache(layout, place)
    cache.randomize(1)
    before = _whole(cache)
    assert len(set(before)) > 200
    for block in (0, 7, layout.num_blocks - 1):
        assert cache.block(block) == _block(before, layout, block)
    cache.paint(7, 77)
    assert cache.values(7) == {77}
    cache.snapshot(7)
    cache.paint(7, 78)
    assert cache.seen() == {77}
    after = _whole(cache)
    assert [_block(after, layout, block) for block in (6, 8)] == [
        _block(before, layout, block) for block in (6, 8)
    ]
    assert [tuple(tensor.shape) for tensor in cache.tensors] == 3 * [(24, 2, 16, 32)]
    assert {tensor.dtype for tensor in cache.tensors} == {torch.float16}
    cache.compute()
    cache.drop()


def test_the_same_memory_is_seen_in_another_shape() -> None:
    layout, other = layout_in("BLHNC", lead_bytes=0), layout_in("LBHNC", lead_bytes=0)
    cache = caches.TorchCache(layout, "malloc")
    cache.randomize(1)
    cache.view(other)
    assert cache.block(5) == _block(_whole(cache), other, 5)
    storage = cache.tensors[0].untyped_storage()
    assert (storage.data_ptr(), storage.nbytes()) == (cache.buffer.data_ptr(), other.size_bytes)
