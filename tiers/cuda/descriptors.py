"""Descriptors of a copy: which bytes of a worker's memory are which bytes of a payload.

Owns the arithmetic between block ids and the arrays that a batch copy takes: the runs of each
block, runs that follow on each other joined, long ones cut to what pacing allows, and those cut in
two that would straddle two registrations of the pool. Nothing here calls CUDA.

Invariant: the descriptors of a copy are disjoint and together are exactly its payload, so they may
be carried out in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    from tiers.copy import Runs

    Addresses = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """`sizes[i]` bytes at `device[i]` and at `host[i]` belong to each other."""

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)


def describe(
    runs: Runs, block_ids: npt.NDArray[np.int64], device_base: int, host_base: int
) -> Descriptors:
    """Descriptors of a copy between `block_ids` at `device_base` and a payload at `host_base`."""
    starts = (
        block_ids[:, np.newaxis] * runs.block_step_bytes + (runs.base_bytes + runs.starts_bytes)
    ).ravel()
    # Runs stand in the payload's order, so those that follow on in memory do so in both.
    first = np.concatenate(
        ([0], np.flatnonzero(starts[1:] != starts[:-1] + runs.size_bytes) + 1)
    ).astype(np.int64)
    counts = np.diff(np.append(first, len(starts)))
    return Descriptors(
        device=(device_base + starts[first]).astype(np.uint64),
        host=(host_base + first * runs.size_bytes).astype(np.uint64),
        sizes=(counts * runs.size_bytes).astype(np.uint64),
    )


def cut(found: Descriptors, bytes_max: int) -> Descriptors:
    """The same copy with no descriptor over `bytes_max`."""
    counts = -(-found.sizes.astype(np.int64) // bytes_max)
    if len(counts) == 0 or counts.max() == 1:
        return found
    index = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (number * bytes_max).astype(np.uint64)
    return Descriptors(
        found.device[index] + offsets,
        found.host[index] + offsets,
        np.minimum(found.sizes[index] - offsets, np.uint64(bytes_max)),
    )


def split_at_grid(found: Descriptors, origin: int, grid_bytes: int) -> Descriptors:
    """The same copy with no host range across a multiple of `grid_bytes` from `origin`.

    No descriptor may be larger than `grid_bytes`: it crosses at most one such border.
    """
    room = np.uint64(grid_bytes) - (found.host - np.uint64(origin)) % np.uint64(grid_bytes)
    crossing = found.sizes > room
    if not crossing.any():
        return found
    heads = np.minimum(found.sizes, room)
    return Descriptors(
        np.concatenate((found.device, found.device[crossing] + heads[crossing])),
        np.concatenate((found.host, found.host[crossing] + heads[crossing])),
        np.concatenate((heads, found.sizes[crossing] - heads[crossing])),
    )
