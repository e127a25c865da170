"""A segment that is hashed while it arrives: the same result as afterwards, in any pieces."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.data.read import StreamingVerifier
from sidecar.sessions.namespaces import RankLayout
from tests.sidecar.client import layout_of
from tiers.errors import ChunkCorrupt, ImageChecksumMismatch, ImageKeyMismatch
from tiers.kv.slot_image import SlotTemplates

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

KEY, PARENT = b"k" * 32, b"p" * 32
LAYOUT = layout_of().chunk(4)
RANK = RankLayout(LAYOUT, SlotTemplates(LAYOUT, bytes(32)))


def slot_with(num_blocks: int) -> tuple[Bytes, int]:
    """A slot that holds an image of this many blocks, and the image's size."""
    template = RANK.templates[num_blocks]
    slot = np.zeros(RANK.templates.slot_bytes, dtype=np.uint8)
    template.prepare(slot)
    payload = template.payload(slot)
    payload[:] = np.random.default_rng(num_blocks).integers(0, 256, payload.size, dtype=np.uint8)
    template.seal(slot, KEY, PARENT, bytes(template.token_bytes))
    return slot, template.image_bytes


def arrive(verifier: StreamingVerifier, size_bytes: int, edges: list[int]) -> None:
    for first, last in pairwise(sorted({0, size_bytes, *(at for at in edges if at < size_bytes)})):
        verifier(size_bytes, first, last)


@given(
    num_blocks=st.integers(1, 4),
    edges=st.lists(st.integers(1, RANK.templates.slot_bytes), max_size=6),
    flipped=st.none() | st.integers(0, RANK.templates.slot_bytes * 8),
)
def test_the_verdict_is_that_of_verifying_afterwards(
    num_blocks: int, edges: list[int], flipped: int | None
) -> None:
    slot, size_bytes = slot_with(num_blocks)
    if flipped is not None:
        at = flipped // 8 % size_bytes
        slot[at] ^= 1 << flipped % 8
    verifier, later = StreamingVerifier(RANK, KEY, slot), StreamingVerifier(RANK, KEY, slot)
    arrive(verifier, size_bytes, edges)
    assert verifier.has_verified(size_bytes)
    assert not later.has_verified(size_bytes)
    told: list[str] = []
    for one in (verifier, later):
        try:
            meta = one.result(size_bytes)
        except ChunkCorrupt as error:
            told.append(repr(error))
        else:
            told.append("blocks of another size" if meta is None else repr(meta))
    assert told[0] == told[1]
    assert (flipped is None) == told[0].startswith("SegmentMeta")


def test_what_changes_after_it_was_hashed_is_not_looked_at_again() -> None:
    """So a tier that changes bytes on their way must not tell of them before."""
    slot, size_bytes = slot_with(4)
    verifier = StreamingVerifier(RANK, KEY, slot)
    arrive(verifier, size_bytes, [5000])
    slot[6000] ^= 1
    meta = verifier.result(size_bytes)
    assert meta is not None
    assert meta.key == KEY
    with pytest.raises(ImageChecksumMismatch):
        StreamingVerifier(RANK, KEY, slot).result(size_bytes)


def test_a_read_that_is_tried_again_is_hashed_anew() -> None:
    slot, size_bytes = slot_with(4)
    verifier = StreamingVerifier(RANK, KEY, slot)
    slot[9000] ^= 1
    arrive(verifier, size_bytes, [4096, 12_000])
    with pytest.raises(ImageChecksumMismatch):
        verifier.result(size_bytes)
    slot[9000] ^= 1
    verifier(size_bytes, 0, 10_000)
    assert not verifier.has_verified(size_bytes), "a try that is not over has no verdict"
    arrive(verifier, size_bytes, [10_000])
    meta = verifier.result(size_bytes)
    assert meta is not None
    assert meta.num_blocks == 4


def test_a_try_that_tells_nothing_is_not_judged_by_the_one_before() -> None:
    slot, size_bytes = slot_with(4)
    verifier = StreamingVerifier(RANK, KEY, slot)
    arrive(verifier, size_bytes, [10_000])
    assert verifier.has_verified(size_bytes)
    verifier(0, 0, 0)
    slot[9000] ^= 1
    assert not verifier.has_verified(size_bytes)
    with pytest.raises(ImageChecksumMismatch):
        verifier.result(size_bytes)


def test_without_all_pieces_in_order_there_is_no_verdict() -> None:
    slot, size_bytes = slot_with(2)
    for pieces in (
        [(0, 5000), (6000, size_bytes)],
        [(0, 5000), (4000, size_bytes)],
        [(5000, size_bytes)],
        [(0, size_bytes - 1)],
        [],
    ):
        verifier = StreamingVerifier(RANK, KEY, slot)
        for first, last in pieces:
            verifier(size_bytes, first, last)
        assert not verifier.has_verified(size_bytes)
        meta = verifier.result(size_bytes)
        assert meta is not None
        assert meta.num_blocks == 2
    verifier = StreamingVerifier(RANK, KEY, slot)
    arrive(verifier, size_bytes, [])
    assert not verifier.has_verified(size_bytes - 1), "another object than the one that arrived"


def test_of_whatever_length_it_is_judged_when_it_is_there() -> None:
    slot, size_bytes = slot_with(4)
    verifier = StreamingVerifier(RANK, KEY, slot)
    arrive(verifier, size_bytes - 1, [5000])
    assert not verifier.has_verified(size_bytes - 1)
    with pytest.raises(ChunkCorrupt):
        verifier.result(size_bytes - 1)
    other = StreamingVerifier(RANK, b"o" * 32, slot)
    arrive(other, size_bytes, [5000])
    with pytest.raises(ImageKeyMismatch):
        other.result(size_bytes)
