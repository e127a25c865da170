"""What the bits of a mask of the store stand for, and what a mask can give each rank.

Owns, for one realm, the segment of each of its ranks, the segments of other cuts that the catalog
named, and the answer to: from what the store holds of a chunk, which ranks' segments can be had,
and from which objects? Does not own masks (`stored_table.py`) nor reading (`data/executor.py`).

A model is cut into segments by tensor and pipeline parallelism. Bit `r` of a mask below the world
size is the segment of rank `r`; a bit above is a segment of somebody else's cut. A rank's own
segment is taken where the store has it; else it is assembled from others that overlap it.

Invariants: pure; a bit never changes what it stands for; answers depend on the mask only, so they
are remembered, at most `ANSWERS_MAX` of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tiers.kv.reshard import cover

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tiers.kv.layout import Segment

FOREIGN_MAX: Final = 32
"""Segments of other cuts that a realm knows: those of 1, 2, 4, 8 and 16 ranks are 31."""

ANSWERS_MAX: Final = 4096


class Cuts:
    """The segments of one realm, by bit."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._own: list[Segment | None] = [None] * world_size
        self._foreign: list[Segment] = []
        self._full = (1 << world_size) - 1
        self._sources: dict[int, tuple[tuple[int, ...], ...]] = {}

    @property
    def known_mask(self) -> int:
        """Bits that stand for something."""
        return (1 << (self.world_size + len(self._foreign))) - 1

    def learn(self, rank: int, segment: Segment) -> None:
        """A rank's segment is known."""
        self._own[rank] = segment
        self._sources.clear()

    def learn_foreign(self, segments: Sequence[Segment]) -> None:
        """The segments of other cuts, by bit from `world_size` on; it only ever grows."""
        if len(segments) > len(self._foreign):
            self._foreign.extend(segments[len(self._foreign) : FOREIGN_MAX])
            self._sources.clear()

    def obtainable(self, mask: int) -> int:
        """Ranks whose segment can be had from the segments in `mask`, as bits."""
        own = mask & self._full
        if own == mask or own == self._full:
            return own
        return sum(1 << rank for rank, found in enumerate(self._answer(mask)) if found)

    def sources(self, mask: int, rank: int) -> tuple[int, ...]:
        """Bits of the segments to read for a rank's: itself, or what covers it; empty: none do."""
        return (rank,) if mask >> rank & 1 else self._answer(mask)[rank]

    def _answer(self, mask: int) -> tuple[tuple[int, ...], ...]:
        known = self._sources.get(mask)
        if known is None:
            if len(self._sources) >= ANSWERS_MAX:
                self._sources.clear()
            known = self._sources[mask] = tuple(
                self._cover(mask, rank) for rank in range(self.world_size)
            )
        return known

    def _cover(self, mask: int, rank: int) -> tuple[int, ...]:
        if mask >> rank & 1:
            return (rank,)
        target = self._own[rank]
        if target is None:
            return ()
        bits: dict[Segment, int] = {}
        for bit, segment in enumerate((*self._own, *self._foreign)):
            if segment is not None and mask >> bit & 1:
                bits.setdefault(segment, bit)
        found = cover(target, bits)
        return () if found is None else tuple(bits[segment] for segment in found)
