from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.offsets import offset_of
from tiers.errors import LayoutError
from tiers.kv.layout import LAYERS_MAX, ChunkLayout, KVLayout, Segment, head_segment

pytest.importorskip("vllm")

from vllm.v1.kv_cache_layout import KVCacheLayout

from tests.tiers.vllm_views import LAYOUT_NAMES, Cache, build, caches

KV = KVLayout(
    segment=Segment(0, 2, 0, 4),
    num_blocks=8,
    block_tokens=16,
    content_bytes=64,
    dtype="bfloat16",
    encoding="raw",
    size_bytes=2 * 8 * 4096,
    layer_offsets_bytes=(0, 8 * 4096),
    block_stride_bytes=4096,
    head_stride_bytes=1024,
    token_stride_bytes=64,
)
CHUNK = KV.chunk(4)


def changed(layout: KVLayout, **fields: Any) -> KVLayout:
    return msgspec.structs.replace(layout, **fields)


def changed_chunk(layout: ChunkLayout, **fields: Any) -> ChunkLayout:
    return msgspec.structs.replace(layout, **fields)


def test_the_six_layouts_are_those_of_this_vllm() -> None:
    assert [layout.name for layout in KVCacheLayout] == LAYOUT_NAMES


@pytest.mark.promise("padded-pages")
@given(cache=caches(), data=st.data())
def test_offset_is_where_torch_finds_the_element(cache: Cache, data: st.DataObject) -> None:
    kv = cache.kv
    layer = data.draw(st.integers(0, kv.segment.num_layers - 1))
    block = data.draw(st.integers(0, kv.num_blocks - 1))
    head = data.draw(st.integers(0, kv.segment.num_heads - 1))
    token = data.draw(st.integers(0, kv.block_tokens - 1))
    element = cache.views[layer][block, head, token]
    assert offset_of(kv, layer, block, head, token) == element.data_ptr() - cache.raw.data_ptr()
    assert kv.content_bytes == element.numel() * element.element_size()


@given(cache=caches())
def test_a_layout_survives_the_wire(cache: Cache) -> None:
    frame = msgspec.msgpack.encode(cache.kv)
    assert msgspec.msgpack.decode(frame, type=KVLayout) == cache.kv


def test_a_size_that_a_layout_keeps_is_no_part_of_it() -> None:
    kv, other = (
        build(name, layers=2, blocks=5, heads=3, tokens=4, head_size=8).kv
        for name in (LAYOUT_NAMES[0], LAYOUT_NAMES[0])
    )
    assert kv.block_payload_bytes == kv.chunk(4).block_payload_bytes == 2 * 3 * 4 * 32
    assert (kv, hash(kv)) == (other, hash(other))
    assert msgspec.msgpack.encode(kv) == msgspec.msgpack.encode(other)


@pytest.mark.parametrize("name", LAYOUT_NAMES)
def test_chunk_geometry_does_not_depend_on_the_engine_s_layout(name: str) -> None:
    kv = build(name, layers=2, blocks=5, heads=3, tokens=4, head_size=8).kv
    chunk = kv.chunk(4)
    assert chunk.shape(4) == (4, 2, 3, 4, 16)
    assert chunk.block_payload_bytes == 2 * 3 * 4 * 32
    assert chunk.payload_bytes(3) == 3 * chunk.block_payload_bytes
    assert chunk.itemsize == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"block_tokens": 0}, "block_tokens=0"),
        ({"content_bytes": 63}, "content_bytes=63"),
        ({"content_bytes": 0}, "content_bytes=0"),
        ({"dtype": "int4"}, "dtype='int4'"),
        ({"encoding": ""}, "encoding=''"),
        ({"encoding": "a/../b"}, "encoding='a/../b'"),
        ({"encoding": "x" * 1000}, "encoding='xxx"),
        ({"size_bytes": 0}, "size_bytes=0"),
        ({"size_bytes": 2 * 8 * 4096 - 1}, r"layer_offsets_bytes\[1\]=32768"),
        ({"layer_offsets_bytes": (-1, 8 * 4096)}, r"layer_offsets_bytes\[0\]=-1"),
        ({"layer_offsets_bytes": (0, 1 << 70)}, r"layer_offsets_bytes\[1\]"),
        ({"layer_offsets_bytes": (0,)}, "has 1 entries"),
        ({"layer_offsets_bytes": (0, 0)}, "0 bytes apart"),
        ({"layer_offsets_bytes": (0, 4096)}, "4096 bytes apart"),
        ({"layer_offsets_bytes": (0, 8 * 4096 - 1)}, "32767 bytes apart"),
        ({"block_stride_bytes": 4095}, "block_stride_bytes=4095"),
        ({"block_stride_bytes": -4096}, "block_stride_bytes=-4096"),
        ({"block_stride_bytes": 1 << 80}, "block_stride_bytes="),
        ({"head_stride_bytes": 0}, "head_stride_bytes=0"),
        ({"head_stride_bytes": 64}, "stride_bytes=64"),
        ({"token_stride_bytes": 63}, "token_stride_bytes=63"),
        ({"entry_tokens": 0}, "entry_tokens=0"),
        ({"entry_tokens": 3}, "does not divide block_tokens=16"),
        ({"entry_tokens": 32}, "entry_tokens=32"),
    ],
)
def test_an_impossible_layout_is_refused_by_field_and_value(
    fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        changed(KV, **fields)


def test_a_peer_s_impossible_layout_is_refused_while_decoding() -> None:
    raw = msgspec.to_builtins(KV)
    raw["size_bytes"] = 4096
    with pytest.raises(msgspec.ValidationError, match="outside the allocation"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=KVLayout)
    raw["surprise"] = 1
    with pytest.raises(msgspec.ValidationError, match="surprise"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(raw), type=KVLayout)


def coordinates_overlap(
    offsets: tuple[int, ...], strides: tuple[int, int, int], counts: tuple[int, int, int], size: int
) -> bool:
    """Brute force: walk every coordinate and see whether a byte is met twice."""
    seen: set[int] = set()
    for offset in offsets:
        for block in range(counts[0]):
            for head in range(counts[1]):
                for token in range(counts[2]):
                    start = offset + block * strides[0] + head * strides[1] + token * strides[2]
                    for byte in range(start, start + size):
                        if byte in seen:
                            return True
                        seen.add(byte)
    return False


@settings(max_examples=300)
@given(
    offsets=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    strides=st.tuples(*[st.integers(0, 24)] * 3),
    counts=st.tuples(*[st.integers(1, 3)] * 3),
    size=st.integers(1, 3),
)
def test_no_accepted_layout_has_two_coordinates_on_one_byte(
    offsets: tuple[int, ...],
    strides: tuple[int, int, int],
    counts: tuple[int, int, int],
    size: int,
) -> None:
    try:
        KVLayout(
            segment=Segment(0, len(offsets), 0, counts[1]),
            num_blocks=counts[0],
            block_tokens=counts[2],
            content_bytes=size,
            dtype="uint8",
            encoding="raw",
            size_bytes=1000,
            layer_offsets_bytes=offsets,
            block_stride_bytes=strides[0],
            head_stride_bytes=strides[1],
            token_stride_bytes=strides[2],
        )
    except LayoutError as error:
        # Layers are checked exactly; inside a layer the rule (axes nest) may refuse more.
        if "share memory" in str(error):
            assert coordinates_overlap(offsets, strides, counts, size)
    else:
        assert not coordinates_overlap(offsets, strides, counts, size)


def test_the_largest_layout_that_a_peer_may_send_is_checked() -> None:
    offsets = tuple(layer * 100_003 for layer in range(LAYERS_MAX))
    kv = changed(
        KV,
        segment=Segment(0, LAYERS_MAX, 0, 4),
        size_bytes=1 << 40,
        layer_offsets_bytes=offsets,
        num_blocks=16,
    )
    assert offset_of(kv, LAYERS_MAX - 1, 15, 3, 15) == offsets[-1] + 15 * 4096 + 3 * 1024 + 15 * 64


VIEW = (0, (8, 4, 16, 32), (4096, 1024, 64, 2))


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ([(0, (8, 4, 16), (4096, 1024, 64))], "four axes"),
        ([VIEW, (1 << 16, (8, 4, 16, 16), (4096, 1024, 64, 2))], r"views\[1\] has shape"),
        ([VIEW, (1 << 16, (8, 4, 16, 32), (8192, 1024, 64, 2))], r"views\[1\] has shape"),
        ([(0, (8, 4, 16, 32), (4096, 1024, 64, 4))], "content stride 4"),
        ([(0, (8, 2, 16, 32), (4096, 1024, 64, 2))], "has 2 heads"),
    ],
)
def test_views_that_are_no_layout_are_refused(views: list[Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        KVLayout.from_views(
            Segment(0, max(len(views), 1), 0, 4),
            views,
            itemsize=2,
            dtype="bfloat16",
            encoding="raw",
            size_bytes=1 << 20,
        )


def test_an_element_size_that_is_not_the_dtype_s_is_refused() -> None:
    with pytest.raises(LayoutError, match="itemsize=1"):
        KVLayout.from_views(
            Segment(0, 1, 0, 4), [VIEW], itemsize=1, dtype="bfloat16", encoding="raw", size_bytes=99
        )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"blocks_per_chunk": 0}, "blocks_per_chunk=0"),
        ({"block_tokens": 1 << 20}, "block_tokens=1048576"),
        ({"content_bytes": 1 << 24}, "over the 2147483647"),
        ({"content_bytes": 1 << 25}, "content_bytes=33554432"),
        ({"dtype": "uint16"}, "dtype='uint16'"),
        ({"encoding": "naïve"}, "encoding="),
        ({"entry_tokens": 5}, "entry_tokens=5"),
    ],
)
def test_an_impossible_chunk_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        changed_chunk(CHUNK, **fields)


@pytest.mark.parametrize("num_blocks", [0, 5, -1])
def test_a_chunk_has_no_size_for_a_number_of_blocks_it_cannot_hold(num_blocks: int) -> None:
    with pytest.raises(LayoutError, match=f"num_blocks={num_blocks}"):
        CHUNK.payload_bytes(num_blocks)
    with pytest.raises(LayoutError, match=f"num_blocks={num_blocks}"):
        CHUNK.shape(num_blocks)


def test_a_state_is_one_entry_for_all_tokens_of_its_block() -> None:
    """As recurrent layers keep it."""
    state = changed(KV, entry_tokens=16)
    chunk = state.chunk(4)
    assert chunk.shape(3) == (3, 2, 4, 1, 32)
    assert chunk.payload_bytes(4) * 16 == CHUNK.payload_bytes(4)
    assert offset_of(state, 1, 2, 3, 0) == offset_of(KV, 1, 2, 3, 0)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=KVLayout) == state


segments = st.builds(
    Segment,
    st.integers(0, 1023),
    st.integers(1, 1024),
    st.integers(0, 65_535),
    st.integers(1, 65_536),
)


def test_a_segment_is_named_by_half_open_ranges() -> None:
    assert Segment(0, 8, 0, 4).name == "0-8.0-4"
    assert Segment.parse("8-16.4-8") == Segment(8, 8, 4, 4)


@given(segment=segments)
def test_a_segment_s_name_names_it(segment: Segment) -> None:
    assert Segment.parse(segment.name) == segment


@given(name=st.text(max_size=20) | st.from_regex(r"[0-9]{1,4}-[0-9]{1,4}\.[0-9]{1,4}-[0-9]{1,4}"))
def test_a_name_is_canonical_or_refused(name: str) -> None:
    try:
        segment = Segment.parse(name)
    except LayoutError:
        return
    assert segment.name == name


@pytest.mark.parametrize(
    "name", ["", "0-8", "0-8.0-4\n", "00-8.0-4", "8-0.0-4", "0-0.0-4", "\u0660-8.0-4", "1" * 10_000]
)
def test_a_name_that_is_no_segment_is_refused(name: str) -> None:
    with pytest.raises(LayoutError) as error:
        Segment.parse(name)
    assert len(str(error.value)) < 300


@given(ranks=st.sampled_from([1, 2, 4, 8]), layers=st.integers(1, 80))
def test_the_ranks_segments_cover_each_head_once(ranks: int, layers: int) -> None:
    segments = [head_segment(layers, 8, rank, ranks, first_layer=3) for rank in range(ranks)]
    heads = [
        head
        for segment in segments
        for head in range(segment.first_head, segment.first_head + segment.num_heads)
    ]
    assert heads == list(range(8))
    assert {(segment.first_layer, segment.num_layers) for segment in segments} == {(3, layers)}


@pytest.mark.parametrize(
    ("heads", "rank", "size", "said"),
    [
        (2, 0, 4, "copies of a head"),
        (6, 0, 4, "does not divide"),
        (8, 4, 4, "tp_rank=4"),
        (8, 0, 0, "tp_size=0"),
    ],
)
def test_a_rank_without_its_own_segment_gets_a_reason(
    heads: int, rank: int, size: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        head_segment(4, heads, rank, size)


def test_a_chunk_has_a_bounded_number_of_tokens() -> None:
    # Fuzzing found an attach that took 8 GiB for the ids of 2,147,418,112 tokens.
    with pytest.raises(LayoutError, match=r"blocks_per_chunk \* block_tokens=65552: .* 65536"):
        ChunkLayout(Segment(0, 1, 0, 1), 4097, 16, 8, "uint8", "raw")
    assert ChunkLayout(Segment(0, 1, 0, 1), 4096, 16, 8, "uint8", "raw")


def test_a_block_has_a_bounded_number_of_entries() -> None:
    with pytest.raises(
        LayoutError, match=r"layers \* heads \* block_entries=17408000: .* 16777216"
    ):
        ChunkLayout(Segment(0, 1, 0, 17_408), 1, 1000, 8, "uint8", "raw")
