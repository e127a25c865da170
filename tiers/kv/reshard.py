"""Resharding: one worker's segment of a chunk out of segments with other layers and heads.

Owns the choice of segments that cover a target, and the copy of their overlap: engines split a
model over ranks in different ways, use blocks of different sizes, and read each other's chunks.
Does not own reading, verifying or sealing. A source is verified as a whole before anything is
copied out of it (so nothing here reads ranges), and the result gets its own checksum.

Invariants: a byte of the target is copied from the same (layer, head, token) of a source or not at
all; `cover` returns sources that leave no hole.
"""

import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from tiers.errors import LayoutError
from tiers.kv.layout import Bytes, ChunkLayout, Plane, Segment, planes_of

SOURCES_MAX: Final = 64
"""Sources of one target; with more, the chunk is a miss."""
FOREIGN_MAX: Final = 32
"""Segments of other parallel layouts in a realm: 1, 2, 4, 8 and 16 ranks have 31."""
ANSWERS_MAX: Final = 4096


def cover(target: Segment, available: Collection[Segment]) -> tuple[Segment, ...] | None:
    """The fewest of `available` that together hold all of `target`, or None.

    If single segments hold all of it, the smallest of them. Otherwise greedily those that add most:
    optimal for the grids of parallel engines, whose segments never overlap, and else at worst
    somewhat more than the fewest.
    """
    whole = [segment for segment in available if overlap(target, segment) == target]
    if whole:
        return (min(whole, key=lambda one: (one.num_layers * one.num_heads, one)),)
    missing = np.ones((target.num_layers, target.num_heads), dtype=np.bool_)
    parts = {one: overlap(target, one) for one in sorted(available)}
    held = {one: _slices(part, target) for one, part in parts.items() if part is not None}
    chosen: list[Segment] = []
    while missing.any():
        best = max(held, key=lambda one: int(np.count_nonzero(missing[held[one]])), default=None)
        if best is None or not missing[held[best]].any() or len(chosen) == SOURCES_MAX:
            return None
        missing[held[best]] = False
        chosen.append(best)
    return tuple(sorted(chosen))


def refusal(source: ChunkLayout, target: ChunkLayout) -> str | None:
    """Why bytes of `source` cannot become bytes of `target`, or None if they can."""
    for field in ("dtype", "encoding", "content_bytes", "entry_tokens"):
        found, wanted = getattr(source, field), getattr(target, field)
        if found != wanted:
            return f"{field}={found!r}: the reader has {wanted!r}"
    if source.block_tokens == target.block_tokens:
        return None
    planes = planes_of(source.encoding, source.dtype, source.content_bytes)
    if planes is None:
        return (
            f"block_tokens={source.block_tokens}: how encoding {source.encoding} packs the tokens "
            f"of a block is not known, and the reader's blocks have {target.block_tokens}"
        )
    for plane in planes:
        for tokens in (source.block_tokens, target.block_tokens):
            if tokens % plane.group_tokens:
                return (
                    f"block_tokens={tokens}: encoding {source.encoding} packs "
                    f"{plane.group_tokens} tokens together"
                )
    return None


def copy_overlap(
    source: ChunkLayout, payload: Bytes, target: ChunkLayout, into: Bytes, num_tokens: int
) -> int:
    """Copy the overlap of two segments from a source's payload to a target's; returns the bytes.

    Payloads are in C order `[blocks, layers, heads, tokens, content]` and have `num_tokens` tokens
    each, a whole number of blocks of either size. Raises `LayoutError` if they do not match.
    Releases the GIL while bytes move.
    """
    reason = refusal(source, target)
    if reason is not None:
        raise LayoutError(reason)
    for name, layout, array in (("payload", source, payload), ("into", target, into)):
        if num_tokens < 1 or num_tokens % layout.block_tokens:
            raise LayoutError(
                f"num_tokens={num_tokens}: is no whole number of blocks of {layout.block_tokens}"
            )
        size_bytes = num_tokens // layout.block_tokens * layout.block_payload_bytes
        if array.size != size_bytes:
            raise LayoutError(
                f"{name} has {array.size} bytes: {num_tokens} tokens of segment "
                f"{layout.segment.name} have {size_bytes}"
            )
    part = overlap(target.segment, source.segment)
    if part is None:
        return 0
    taken = _blocks(source, payload)[:, *_slices(part, source.segment)]
    given = _blocks(target, into)[:, *_slices(part, target.segment)]
    if source.block_tokens == target.block_tokens:
        np.copyto(given, taken)
        return given.size
    planes = planes_of(source.encoding, source.dtype, source.content_bytes)
    assert planes is not None, "not refused"
    start = 0
    for plane in planes:
        # The start of a plane grows with the block size, like everything in it.
        _regroup(
            _plane(taken, plane, start, source.block_tokens),
            _plane(given, plane, start, target.block_tokens),
        )
        start += plane.token_bytes
    return given.size


def overlap(one: Segment, other: Segment) -> Segment | None:
    """The layers and heads that both hold; None without any."""
    first_layer = max(one.first_layer, other.first_layer)
    first_head = max(one.first_head, other.first_head)
    layers = min(one.first_layer + one.num_layers, other.first_layer + other.num_layers)
    heads = min(one.first_head + one.num_heads, other.first_head + other.num_heads)
    if layers <= first_layer or heads <= first_head:
        return None
    return Segment(first_layer, layers - first_layer, first_head, heads - first_head)


def _slices(part: Segment, within: Segment) -> tuple[slice, slice]:
    layer, head = part.first_layer - within.first_layer, part.first_head - within.first_head
    return slice(layer, layer + part.num_layers), slice(head, head + part.num_heads)


def _blocks(layout: ChunkLayout, payload: Bytes) -> Bytes:
    """`[blocks, layers, heads, bytes of one block and head]`."""
    segment = layout.segment
    return payload.reshape(
        -1, segment.num_layers, segment.num_heads, layout.block_entries * layout.content_bytes
    )


def _plane(view: Bytes, plane: Plane, start: int, block_tokens: int) -> Bytes:
    """`[blocks, layers, heads, rows, groups, unit bytes]` of one plane, as a view.

    `start` is the bytes of a token in the preceding planes.
    """
    part = view[..., start * block_tokens : (start + plane.token_bytes) * block_tokens]
    groups = block_tokens // plane.group_tokens
    return part.reshape(*part.shape[:3], plane.rows, groups, plane.unit_bytes)


def _regroup(taken: Bytes, given: Bytes) -> None:
    """Copy between planes of the same tokens in blocks of two sizes.

    Both are split into runs of groups whose length is the greatest common divisor.
    """
    run = math.gcd(taken.shape[4], given.shape[4])
    source, target = _runs(taken, run), _runs(given, run)
    for number in range(source.shape[0] * source.shape[4]):
        from_block, from_run = divmod(number, source.shape[4])
        to_block, to_run = divmod(number, target.shape[4])
        np.copyto(target[to_block, ..., to_run, :], source[from_block, ..., from_run, :])


def _runs(plane: Bytes, run: int) -> Bytes:
    """`[blocks, layers, heads, rows, runs, bytes]` with `run` groups in each, as a view."""
    *outer, groups, unit_bytes = plane.shape
    return plane.reshape(*outer, groups // run, run * unit_bytes)


class SegmentSources:
    """What the bits of a realm's masks stand for, and which segments a mask provides.

    Bit `r` of a mask below the world size is the segment of rank `r`; a higher bit is a segment of
    another parallel layout of the model that the catalog named. A rank's own segment is read if the
    store has it; else it is made from others that cover it.

    Invariants: the meaning of a bit never changes; answers depend on the mask alone, so at most
    `ANSWERS_MAX` of them are cached.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._own: list[Segment | None] = [None] * world_size
        self._foreign: list[Segment] = []
        self._full = (1 << world_size) - 1
        self._sources: dict[int, tuple[tuple[int, ...], ...]] = {}
        """By mask, the bits to read for each rank."""

    @property
    def known_mask(self) -> int:
        """All bits with a meaning."""
        return (1 << (self.world_size + len(self._foreign))) - 1

    def register(self, rank: int, segment: Segment) -> None:
        """Set the segment of a rank."""
        self._own[rank] = segment
        self._sources.clear()

    def register_foreign(self, segments: Sequence[Segment]) -> None:
        """Set the segments of other layouts, by bit from `world_size` on; the list only grows."""
        if len(segments) > len(self._foreign):
            self._foreign.extend(segments[len(self._foreign) : FOREIGN_MAX])
            self._sources.clear()

    def obtainable(self, mask: int) -> int:
        """Ranks whose segment the segments in `mask` provide, as bits."""
        own = mask & self._full
        if own == mask or own == self._full:
            return own
        return sum(1 << rank for rank, found in enumerate(self._answer(mask)) if found)

    def covers(self, mask: int) -> bool:
        """Whether `mask` provides the segments of all ranks."""
        return bool(mask) and self.obtainable(mask) == self._full

    def sources(self, mask: int, rank: int) -> tuple[int, ...]:
        """Bits of the segments to read for a rank: its own, or others; empty: not possible."""
        return (rank,) if mask >> rank & 1 else self._answer(mask)[rank]

    def _answer(self, mask: int) -> tuple[tuple[int, ...], ...]:
        known = self._sources.get(mask)
        if known is None:
            if len(self._sources) >= ANSWERS_MAX:
                self._sources.clear()
            bits: dict[Segment, int] = {}
            for bit, segment in enumerate((*self._own, *self._foreign)):
                if segment is not None and mask >> bit & 1:
                    bits.setdefault(segment, bit)
            known = self._sources[mask] = tuple(
                (rank,) if mask >> rank & 1 else _cover(target, bits)
                for rank, target in enumerate(self._own)
            )
        return known


def _cover(target: Segment | None, bits: dict[Segment, int]) -> tuple[int, ...]:
    found = None if target is None else cover(target, bits)
    return () if found is None else tuple(bits[segment] for segment in found)
