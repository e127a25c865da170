from __future__ import annotations

import mmap
import os
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offsets import offset_of
from tiers.errors import LayoutError
from tiers.kv.copy import CopyPlan
from tiers.kv.layout import KVLayout, Segment

pytest.importorskip("vllm")

from tests.tiers.vllm_views import LAYOUT_NAMES, Cache, build, caches


def ids(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def small(name: str = "LBHNC") -> Cache:
    return build(name, layers=2, blocks=6, heads=2, tokens=4, head_size=8)


@pytest.mark.promise("padded-pages")
@settings(max_examples=200)
@given(cache=caches(), data=st.data())
def test_gather_is_what_torch_reads_and_scatter_what_torch_writes(
    cache: Cache, data: st.DataObject
) -> None:
    block_ids = data.draw(
        st.lists(st.integers(0, cache.kv.num_blocks - 1), unique=True, max_size=7)
    )
    plan = CopyPlan(cache.kv)
    size = len(block_ids) * cache.kv.chunk(1).block_payload_bytes
    # A payload lies somewhere inside a slot; one byte off proves that alignment is not assumed.
    shift = data.draw(st.sampled_from([0, 1, 2, 4]))
    payload = np.full(shift + size + 3, 0xA5, dtype=np.uint8)
    plan.gather(cache.memory, ids(block_ids), payload[shift : shift + size])
    assert (payload[:shift] == 0xA5).all()
    assert (payload[shift + size :] == 0xA5).all()
    assert np.array_equal(payload[shift : shift + size], cache.canonical(block_ids))

    before = cache.memory.copy()
    fresh = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    plan.scatter(cache.memory, ids(block_ids), fresh)
    assert np.array_equal(cache.canonical(block_ids), fresh)
    # Nothing beside those blocks changed: putting the old payload back restores every byte.
    plan.scatter(cache.memory, ids(block_ids), payload[shift : shift + size])
    assert np.array_equal(cache.memory, before)


@pytest.mark.parametrize("source", LAYOUT_NAMES)
@pytest.mark.parametrize("target", LAYOUT_NAMES)
def test_a_chunk_moves_between_engines_of_different_layouts(source: str, target: str) -> None:
    sender, receiver = small(source), small(target)
    receiver.memory[:] = 0
    payload = np.empty(3 * sender.kv.chunk(1).block_payload_bytes, dtype=np.uint8)
    CopyPlan(sender.kv).gather(sender.memory, ids([5, 0, 2]), payload)
    CopyPlan(receiver.kv).scatter(receiver.memory, ids([1, 4, 3]), payload)
    assert np.array_equal(receiver.canonical([1, 4, 3]), sender.canonical([5, 0, 2]))
    assert not receiver.canonical([0, 2, 5]).any()


def odd_layout(content_bytes: int, layer_offsets_bytes: tuple[int, ...]) -> KVLayout:
    """Layers at distances that no page size divides."""
    heads, tokens, blocks = 2, 3, 5
    page = heads * tokens * content_bytes
    return KVLayout(
        segment=Segment(0, len(layer_offsets_bytes), 0, heads),
        num_blocks=blocks,
        block_tokens=tokens,
        content_bytes=content_bytes,
        dtype="uint8",
        encoding="raw",
        size_bytes=layer_offsets_bytes[-1] + blocks * page + 7,
        layer_offsets_bytes=layer_offsets_bytes,
        block_stride_bytes=page,
        head_stride_bytes=tokens * content_bytes,
        token_stride_bytes=content_bytes,
    )


@pytest.mark.parametrize("content_bytes", [1, 8, 33, 264])
@pytest.mark.parametrize("offsets", [(0,), (5, 10_007), (0, 8200, 20_000), (1, 9000, 18_000)])
@pytest.mark.parametrize("block_ids", [[0], [4, 3, 2], [1, 2, 3, 4], [0, 1, 3, 4, 2]])
def test_layers_at_odd_offsets_are_copied_coordinate_by_coordinate(
    content_bytes: int, offsets: tuple[int, ...], block_ids: list[int]
) -> None:
    kv = odd_layout(content_bytes, offsets)
    memory = np.random.default_rng(2).integers(0, 256, kv.size_bytes, dtype=np.uint8)
    expected = np.concatenate(
        [
            memory[start : start + content_bytes]
            for block in block_ids
            for layer in range(len(offsets))
            for head in range(2)
            for token in range(3)
            for start in [offset_of(kv, layer, block, head, token)]
        ]
    )
    payload = np.zeros_like(expected)
    CopyPlan(kv).gather(memory, ids(block_ids), payload)
    assert np.array_equal(payload, expected)
    blank = np.zeros_like(memory)
    CopyPlan(kv).scatter(blank, ids(block_ids), payload)
    again = np.zeros_like(expected)
    CopyPlan(kv).gather(blank, ids(block_ids), again)
    assert np.array_equal(again, expected)
    assert np.count_nonzero(blank) == np.count_nonzero(expected)


def test_no_blocks_is_no_copy() -> None:
    cache = small()
    before = cache.memory.copy()
    empty = np.empty(0, dtype=np.uint8)
    CopyPlan(cache.kv).gather(cache.memory, ids([]), empty)
    CopyPlan(cache.kv).scatter(cache.memory, ids([]), empty)
    assert np.array_equal(cache.memory, before)


@pytest.mark.parametrize("bad", [-1, 6, 1 << 40, -(1 << 62)])
def test_a_block_that_was_not_exported_is_refused_before_any_byte_moves(bad: int) -> None:
    cache = small()
    plan = CopyPlan(cache.kv)
    before = cache.memory.copy()
    payload = np.zeros(2 * cache.kv.chunk(1).block_payload_bytes, dtype=np.uint8)
    with pytest.raises(LayoutError, match="block_ids run from"):
        plan.scatter(cache.memory, ids([0, bad]), payload)
    with pytest.raises(LayoutError, match="block_ids run from"):
        plan.gather(cache.memory, ids([0, bad]), payload)
    assert np.array_equal(cache.memory, before)
    assert not payload.any()


def test_sizes_that_do_not_fit_are_refused() -> None:
    cache = small()
    plan = CopyPlan(cache.kv)
    block = cache.kv.chunk(1).block_payload_bytes
    payload = np.zeros(block, dtype=np.uint8)
    one = ids([0])
    refused: list[tuple[Any, Any, Any, str]] = [
        (cache.memory[1:], one, payload, "memory has"),
        (cache.memory, one, payload[1:], "payload has"),
        (cache.memory, ids([0, 1]), payload, "payload has"),
    ]
    for memory, block_ids, target, said in refused:
        with pytest.raises(LayoutError, match=said):
            plan.gather(memory, block_ids, target)


def test_a_read_only_mapping_can_be_gathered_from() -> None:
    cache = small("BLHNC")
    fd = os.memfd_create("kvlake-test")
    try:
        os.write(fd, cache.memory.tobytes())
        mapping = mmap.mmap(fd, cache.kv.size_bytes, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    payload = np.empty(cache.kv.chunk(1).block_payload_bytes, dtype=np.uint8)
    CopyPlan(cache.kv).gather(memory, ids([3]), payload)
    assert np.array_equal(payload, cache.canonical([3]))
    del memory
    mapping.close()


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_threads_share_one_plan(name: str) -> None:
    cache = build(name, layers=3, blocks=32, heads=2, tokens=4, head_size=32)
    plan = CopyPlan(cache.kv)
    block = cache.kv.chunk(1).block_payload_bytes
    payload = np.zeros(32 * block, dtype=np.uint8)
    order = np.random.default_rng(3).permutation(32).astype(np.int64)

    def part(first: int) -> None:
        plan.gather(
            cache.memory,
            order[first : first + 8],
            payload[first * block : (first + 8) * block],
        )

    threads = [threading.Thread(target=part, args=(first,)) for first in range(0, 32, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(payload, cache.canonical(order.tolist()))
