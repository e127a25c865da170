"""Segments of one cut read by another: every byte against a reference built in numpy."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiers.packed import packed
from tiers.errors import LayoutError
from tiers.kv.layout import ChunkLayout, Segment
from tiers.kv.reshard import SOURCES_MAX, copy_overlap, cover, refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

Bytes = npt.NDArray[np.uint8]

CONTENT_BYTES = 4


def layout(
    segment: Segment,
    block_tokens: int = 4,
    encoding: str = "cuda+token",
    content_bytes: int = CONTENT_BYTES,
) -> ChunkLayout:
    return ChunkLayout(segment, 64, block_tokens, content_bytes, "bfloat16", encoding)


def model_bytes(
    layers: int, heads: int, num_tokens: int, content_bytes: int = CONTENT_BYTES
) -> Bytes:
    """What the model computed: `[tokens, layers, heads, content]`, no two alike where possible."""
    random = np.random.default_rng(layers * 1000 + heads * 10 + num_tokens)
    shape = (num_tokens, layers, heads, content_bytes)
    return random.integers(0, 256, shape, dtype=np.uint8)


def stored(model: Bytes, chunk: ChunkLayout) -> Bytes:
    """The payload of one segment, by the definition of the format, one loop per axis."""
    one = chunk.segment
    num_blocks = len(model) // chunk.block_tokens
    shape = (num_blocks, one.num_layers, one.num_heads, chunk.block_tokens * chunk.content_bytes)
    payload = np.empty(shape, dtype=np.uint8)
    for block in range(num_blocks):
        tokens = model[block * chunk.block_tokens : (block + 1) * chunk.block_tokens]
        for layer in range(one.num_layers):
            for head in range(one.num_heads):
                content = tokens[:, one.first_layer + layer, one.first_head + head]
                payload[block, layer, head] = packed(content, chunk.encoding)
    return payload.reshape(-1)


def segment_sources(size: int, inner: Sequence[int]) -> list[tuple[int, int]]:
    edges = sorted({0, size, *(edge for edge in inner if edge < size)})
    return list(pairwise(edges))


def grid(layers: list[tuple[int, int]], heads: list[tuple[int, int]]) -> list[Segment]:
    return [
        Segment(first_layer, last_layer - first_layer, first_head, last_head - first_head)
        for first_layer, last_layer in layers
        for first_head, last_head in heads
    ]


@st.composite
def grids(draw: st.DrawFn, layers: int, heads: int) -> list[Segment]:
    """A way to cut a model over ranks: pipeline stages of any size, heads as TP or unevenly."""
    layer_cuts = segment_sources(
        layers, draw(st.lists(st.integers(1, max(1, layers - 1)), max_size=3))
    )
    head_cuts = segment_sources(
        heads, draw(st.lists(st.integers(1, max(1, heads - 1)), max_size=3))
    )
    return grid(layer_cuts, head_cuts)


@st.composite
def cases(
    draw: st.DrawFn,
) -> tuple[int, int, int, int, int, list[list[Segment]], Segment]:
    layers, heads = draw(st.integers(1, 7)), draw(st.integers(1, 8))
    source_tokens, target_tokens = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    num_tokens = int(np.lcm(source_tokens, target_tokens)) * draw(st.integers(1, 3))
    sources = draw(st.lists(grids(layers, heads), min_size=1, max_size=2))
    target = draw(st.sampled_from(draw(grids(layers, heads))))
    return layers, heads, source_tokens, target_tokens, num_tokens, sources, target


@pytest.mark.promise("other-stages", "other-tp-ratios")
@given(cases())
def test_any_cut_is_read_by_any_other(
    case: tuple[int, int, int, int, int, list[list[Segment]], Segment],
) -> None:
    layers, heads, source_tokens, target_tokens, num_tokens, sources, target = case
    model = model_bytes(layers, heads, num_tokens)
    chosen = cover(target, {segment for cut in sources for segment in cut})
    assert chosen is not None, "a whole model covers every part of it"
    wanted = layout(target, target_tokens)
    into = np.full(num_tokens // target_tokens * wanted.block_payload_bytes, 0xEE, dtype=np.uint8)
    for segment in chosen:
        source = layout(segment, source_tokens)
        copied = copy_overlap(source, stored(model, source), wanted, into, num_tokens)
        assert copied > 0
    np.testing.assert_array_equal(into, stored(model, wanted))


@given(cases())
def test_what_does_not_overlap_is_not_touched(
    case: tuple[int, int, int, int, int, list[list[Segment]], Segment],
) -> None:
    layers, heads, source_tokens, target_tokens, num_tokens, sources, target = case
    model = model_bytes(layers, heads, num_tokens)
    wanted = layout(target, target_tokens)
    # The complement of every byte: where the copy writes, it writes the other value.
    expected = stored(~model, wanted).copy()
    into = expected.copy()
    source = layout(sources[0][0], source_tokens)
    count = copy_overlap(source, stored(model, source), wanted, into, num_tokens)
    assert np.count_nonzero(into != expected) == count
    changed = into != expected
    np.testing.assert_array_equal(into[changed], stored(model, wanted)[changed])


@pytest.mark.promise("other-block-sizes")
@given(
    encoding=st.sampled_from(["cpu-x86-vec", "cpu-x86-vec16", "cpu-x86-amx", "cuda-9.0+token"]),
    source_blocks=st.integers(1, 4),
    target_blocks=st.integers(1, 4),
    times=st.integers(1, 2),
    data=st.data(),
)
def test_blocks_of_any_size_are_made_of_blocks_of_any_other(
    encoding: str, source_blocks: int, target_blocks: int, times: int, data: st.DataObject
) -> None:
    layers, heads, content_bytes = 2, 4, 128
    sizes = source_blocks * 16, target_blocks * 16
    num_tokens = int(np.lcm(*sizes)) * times
    model = model_bytes(layers, heads, num_tokens, content_bytes)
    target = data.draw(st.sampled_from(data.draw(grids(layers, heads))))
    wanted = layout(target, sizes[1], encoding, content_bytes)
    into = np.full(num_tokens * wanted.block_payload_bytes // sizes[1], 0xEE, dtype=np.uint8)
    cut = set(data.draw(grids(layers, heads)))
    for segment in cover(target, cut) or ():
        source = layout(segment, sizes[0], encoding, content_bytes)
        copy_overlap(source, stored(model, source), wanted, into, num_tokens)
    np.testing.assert_array_equal(into, stored(model, wanted))


class TestCover:
    def test_a_segment_with_a_hole_beside_it_is_no_cover(self) -> None:
        assert cover(Segment(0, 8, 0, 4), [Segment(0, 8, 0, 2)]) is None
        assert cover(Segment(0, 8, 0, 4), []) is None

    def test_the_same_segment_is_preferred_to_larger_ones(self) -> None:
        mine, whole = Segment(0, 8, 0, 2), Segment(0, 8, 0, 4)
        assert cover(mine, [whole, mine]) == (mine,)
        assert cover(mine, [whole]) == (whole,)

    @pytest.mark.promise("other-tp-ratios")
    @pytest.mark.parametrize("tensor_parallel", [1, 2, 4, 8])
    @pytest.mark.parametrize("reader", [1, 2, 4, 8])
    def test_reads_no_more_than_it_needs(self, tensor_parallel: int, reader: int) -> None:
        written = grid(
            [(0, 32)], segment_sources(8, range(8 // tensor_parallel, 8, 8 // tensor_parallel))
        )
        wanted = Segment(0, 32, 0, 8 // reader)
        chosen = cover(wanted, written)
        assert chosen is not None
        assert len(chosen) == max(1, tensor_parallel // reader)

    def test_pipeline_stages_are_joined(self) -> None:
        stages = grid([(0, 3), (3, 8)], [(0, 4)])
        assert cover(Segment(0, 8, 0, 4), stages) == tuple(stages)
        assert cover(Segment(1, 2, 0, 4), stages) == (stages[0],)

    def test_too_fine_a_cut_is_a_miss(self) -> None:
        fine = [Segment(0, 1, head, 1) for head in range(SOURCES_MAX + 1)]
        assert cover(Segment(0, 1, 0, SOURCES_MAX + 1), fine) is None
        assert cover(Segment(0, 1, 0, SOURCES_MAX), fine) is not None


class TestRefusal:
    def test_other_kinds_of_bytes_are_refused_by_name(self) -> None:
        mine = layout(Segment(0, 2, 0, 2))
        assert refusal(mine, mine) is None
        other = ChunkLayout(mine.segment, 64, 4, CONTENT_BYTES, "float16", "cuda")
        assert "dtype='float16'" in str(refusal(other, mine))
        assert "encoding='rocm'" in str(refusal(layout(mine.segment, encoding="rocm"), mine))

    def test_blocks_of_another_size_need_an_encoding_by_token(self) -> None:
        segment = Segment(0, 2, 0, 2)
        assert refusal(layout(segment, 2), layout(segment, 4)) is None
        for unknown in ("cuda-9.0-auto", "cpu-arm-neon", "cpu-x86-fp8"):
            reason = refusal(layout(segment, 2, unknown), layout(segment, 4, unknown))
            assert reason is not None
            assert "block_tokens=2" in reason
            assert refusal(layout(segment, 4, unknown), layout(segment, 4, unknown)) is None

    def test_blocks_hold_whole_groups_of_what_is_packed_together(self) -> None:
        segment, tiles = Segment(0, 2, 0, 2), "cpu-x86-amx"
        wide, narrow = layout(segment, 32, tiles, 128), layout(segment, 8, tiles, 128)
        assert "packs 16 tokens together" in str(refusal(wide, narrow))
        assert "packs 16 tokens together" in str(refusal(narrow, wide))
        assert refusal(wide, layout(segment, 48, tiles, 128)) is None
        odd = layout(segment, 32, tiles, 72), layout(segment, 64, tiles, 72)
        assert "is not known" in str(refusal(*odd)), "heads that are no whole tiles"

    def test_arrays_of_another_size_are_refused_before_a_byte_moves(self) -> None:
        segment = Segment(0, 2, 0, 2)
        source, target = layout(segment, 2), layout(segment, 4)
        payload = stored(model_bytes(2, 2, 8), source)
        into = np.zeros(8 // 4 * target.block_payload_bytes, dtype=np.uint8)
        with pytest.raises(LayoutError, match="num_tokens=7"):
            copy_overlap(source, payload, target, into, 7)
        with pytest.raises(LayoutError, match="payload has"):
            copy_overlap(source, payload[:-1], target, into, 8)
        with pytest.raises(LayoutError, match="into has"):
            copy_overlap(source, payload, target, into[:-1], 8)
        assert not into.any()
