"""Which ranks' segments can be had from what the store holds, over random cuts of a model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiers.kv.layout import Segment
from tiers.kv.reshard import FOREIGN_MAX, SegmentSources

LAYERS, HEADS = 8, 8


def grid(pipelines: int, tensors: int) -> list[Segment]:
    """The segments of this many pipeline stages of this many ranks each."""
    layers, heads = LAYERS // pipelines, HEADS // tensors
    return [
        Segment(stage * layers, layers, rank * heads, heads)
        for stage in range(pipelines)
        for rank in range(tensors)
    ]


segment_sources = st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((1, 2, 4, 8)))


@given(own=segment_sources, others=st.lists(segment_sources, max_size=3), data=st.data())
def test_what_can_be_had_is_what_is_covered(
    own: tuple[int, int], others: list[tuple[int, int]], data: st.DataObject
) -> None:
    segments = grid(*own)
    realm = SegmentSources(len(segments))
    for rank, segment in enumerate(segments):
        realm.register(rank, segment)
    foreign: list[Segment] = []
    for other in others:
        foreign += [one for one in grid(*other) if one not in segments and one not in foreign]
    foreign = foreign[:FOREIGN_MAX]
    realm.register_foreign(foreign)
    known = [*segments, *foreign]
    assert realm.known_mask == (1 << len(known)) - 1
    mask = data.draw(st.integers(0, realm.known_mask))
    held = np.zeros((LAYERS, HEADS), dtype=np.bool_)
    for bit, segment in enumerate(known):
        if mask >> bit & 1:
            held[box(segment)] = True
    obtainable = realm.obtainable(mask)
    for rank, segment in enumerate(segments):
        assert bool(obtainable >> rank & 1) == bool(held[box(segment)].all())
        sources = realm.sources(mask, rank)
        assert bool(sources) == bool(obtainable >> rank & 1)
        covered = np.zeros_like(held)
        for bit in sources:
            assert mask >> bit & 1, "only what is there is read"
            covered[box(known[bit])] = True
        assert not sources or covered[box(segment)].all()
        if mask >> rank & 1:
            assert sources == (rank,), "a rank's own segment needs no assembling"


def box(segment: Segment) -> tuple[slice, slice]:
    return (
        slice(segment.first_layer, segment.first_layer + segment.num_layers),
        slice(segment.first_head, segment.first_head + segment.num_heads),
    )


def test_nothing_is_assembled_before_the_ranks_are_known() -> None:
    realm = SegmentSources(2)
    realm.register_foreign(grid(1, 1))
    assert realm.obtainable(0b100) == 0
    for rank, segment in enumerate(grid(1, 2)):
        realm.register(rank, segment)
    assert realm.obtainable(0b100) == 0b11


def test_bits_of_others_only_ever_grow() -> None:
    realm = SegmentSources(1)
    realm.register(0, grid(1, 1)[0])
    realm.register_foreign(grid(1, 2))
    realm.register_foreign(grid(1, 2)[:1])
    assert realm.obtainable(0b110) == 1
    realm.register_foreign([*grid(1, 2), *grid(1, 4), *grid(4, 8)])
    assert realm.known_mask == (1 << (1 + FOREIGN_MAX)) - 1
