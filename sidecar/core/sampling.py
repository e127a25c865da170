"""Which chunks are compared with their checksum, where that need not be every one.

Owns the choice: an even part of all, and without exception those that this process has not seen to
be right, or has a reason to doubt (`Segment.verified`). Does not own comparing (`data/copies.py`,
`data/executor.py`), nor what follows from it.

Invariants: pure, and no chance in it; of n of one rank that are asked about, n times the part are
chosen, give or take one, and those that are not `verified`. By rank, because ranks take turns: an
even part of all would be the same rank's every time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sidecar.core.directory import Segment

_HAIR: Final = 1e-6
"""By so much, and less, sums of tenths fall short of one."""


class Sampling:
    """One of these for each way that bytes leave host memory. `part` is 0 to 1."""

    def __init__(self, part: float) -> None:
        self._part = part
        self._due: dict[int, float] = {}
        """By rank: what is due to it so far."""

    def chooses(self, segment: Segment) -> bool:
        """Whether this segment, which leaves now, is to be compared."""
        due = self._due.get(segment.rank, 0.0) + self._part
        chosen = due > 1 - _HAIR
        self._due[segment.rank] = due - chosen
        return chosen or not segment.verified
