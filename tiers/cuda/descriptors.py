"""Descriptors of a copy: pairs of ranges in a worker's memory and in a payload.

Owns the arithmetic from block ids to the arrays of a batch copy: the runs of each block, adjacent
runs joined, long ones cut for pacing, and those that cross two registrations of the pool cut in
two. Runs of a block at a constant distance also form planes; one 2D copy moves a plane.

Invariant: the descriptors of a copy are disjoint and together are exactly its payload, so they may
be copied in any order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from tiers.kv.copy import Runs

Addresses = npt.NDArray[np.int64]
"""Signed, as block ids and numpy's indices are: every address is below 2**63."""

PLANE_ROWS_MIN: Final = 8
"""With fewer rows a 2D copy does not save enough calls."""


@dataclass(frozen=True, slots=True)
class Descriptors:
    """`rows[i]` runs from `device[i]` on, `pitch_bytes` apart, and from `host[i]` on, dense.

    Rows of one byte at a distance of one byte, the default, are a range of `rows[i]` bytes.
    """

    device: Addresses
    host: Addresses
    rows: Addresses
    width_bytes: int = 1
    pitch_bytes: int = 1

    @property
    def flat(self) -> bool:
        """Whether these are ranges, and not planes."""
        return self.pitch_bytes == 1

    def pieces(self) -> "Descriptors":
        """The same copy as ranges, run by run."""
        index, number = _numbered(self.rows)
        return Descriptors(
            self.device[index] + number * self.pitch_bytes,
            self.host[index] + number * self.width_bytes,
            np.full(len(index), self.width_bytes),
        )


def _numbered(counts: Addresses) -> tuple[Addresses, Addresses]:
    """For entries that become `counts` parts each: the entry of each part, its number there."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)


def describe(
    runs: Runs, block_ids: npt.NDArray[np.int64], device_base: int, host_base: int
) -> Descriptors:
    """The ranges of a copy between `block_ids` at `device_base` and a payload at `host_base`."""
    base = device_base + runs.base_bytes
    starts = (block_ids[:, np.newaxis] * runs.block_step_bytes + (base + runs.starts_bytes)).ravel()
    # Runs are in the payload's order, so runs adjacent in memory are adjacent in both.
    begins = np.empty(len(starts) + 1, dtype=np.bool_)
    begins[0] = begins[-1] = True
    np.not_equal(starts[1:], starts[:-1] + runs.size_bytes, out=begins[1:-1])
    # The last edge is the end of the last range.
    edges = begins.nonzero()[0]
    host = host_base + edges * runs.size_bytes
    return Descriptors(starts[edges[:-1]], host[:-1], rows=host[1:] - host[:-1])


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """The planes of one block: `rows` runs each, `pitch_bytes` from one to the next."""

    rows: int
    pitch_bytes: int

    @classmethod
    def of(cls, runs: Runs) -> "PlaneShape | None":
        """The planes that the runs of a block form; None if there are none worth a call."""
        starts = runs.starts_bytes
        if len(starts) < PLANE_ROWS_MIN:
            return None
        steps = np.diff(starts)
        other = np.flatnonzero(steps != steps[0])
        rows = int(other[0]) + 1 if len(other) else len(starts)
        if rows < PLANE_ROWS_MIN or len(starts) % rows or steps[0] < runs.size_bytes:
            return None
        regular = (np.diff(starts.reshape(-1, rows), axis=1) == steps[0]).all()
        return cls(rows, int(steps[0])) if regular else None


def describe_planes(
    runs: Runs,
    shape: PlaneShape,
    block_ids: npt.NDArray[np.int64],
    device_base: int,
    host_base: int,
) -> Descriptors:
    """The planes of a copy between `block_ids` at `device_base` and a payload at `host_base`."""
    first = runs.starts_bytes[:: shape.rows]
    starts = (block_ids[:, np.newaxis] * runs.block_step_bytes + (runs.base_bytes + first)).ravel()
    plane_bytes = shape.rows * runs.size_bytes
    return Descriptors(
        device=device_base + starts,
        host=host_base + np.arange(len(starts)) * plane_bytes,
        rows=np.full(len(starts), shape.rows),
        width_bytes=runs.size_bytes,
        pitch_bytes=shape.pitch_bytes,
    )


def cut(found: Descriptors, bytes_max: int) -> Descriptors:
    """The same copy with no range or plane over `bytes_max`, which is at least one row."""
    rows_max = bytes_max // found.width_bytes
    if (found.rows <= rows_max).all():
        return found
    index, number = _numbered(-(-found.rows // rows_max))
    first = number * rows_max
    return replace(
        found,
        device=found.device[index] + first * found.pitch_bytes,
        host=found.host[index] + first * found.width_bytes,
        rows=np.minimum(found.rows[index] - first, rows_max),
    )


def batches(
    found: Descriptors, bytes_max: int, count_max: int
) -> Iterator[tuple[Descriptors, int]]:
    """The same copy in parts, each with its bytes: up to `bytes_max`, and `count_max` descriptors.

    `bytes_max` is at least one row. Ranges and planes over it are cut.
    """
    size_bytes = int(found.rows.sum()) * found.width_bytes
    if size_bytes <= bytes_max and len(found.rows) <= count_max:
        yield found, size_bytes
        return
    found = cut(found, bytes_max)
    ends = np.cumsum(found.rows) * found.width_bytes
    first, done_bytes = 0, 0
    while first < len(ends):
        fitting = int(np.searchsorted(ends, done_bytes + bytes_max, side="right"))
        last = min(fitting, first + count_max)
        part = slice(first, last)
        device, host, rows = found.device[part], found.host[part], found.rows[part]
        end_bytes = int(ends[last - 1])
        yield replace(found, device=device, host=host, rows=rows), end_bytes - done_bytes
        first, done_bytes = last, end_bytes


def split_at_grid(found: Descriptors, origin: int, grid_bytes: int) -> Descriptors:
    """The same ranges with none on the host across a multiple of `grid_bytes` from `origin`.

    None may exceed `grid_bytes`, so it crosses at most one border.
    """
    room = grid_bytes - (found.host - origin) % grid_bytes
    crossing = found.rows > room
    heads = np.minimum(found.rows, room)
    return Descriptors(
        np.concatenate((found.device, found.device[crossing] + heads[crossing])),
        np.concatenate((found.host, found.host[crossing] + heads[crossing])),
        np.concatenate((heads, found.rows[crossing] - heads[crossing])),
    )
