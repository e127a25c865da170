"""The CPU copy engine: a worker's blocks to one payload (gather) and back (scatter).

Owns the plan: how the coordinates of a `KVLayout` fall into the fewest equal runs that are
contiguous both in the worker's memory and in the payload. Does not own memory, threads or fences.

`visit` sees the payload piece by piece, in order, around its copy, so that a hash reads a piece
while it is in the core's cache.

Invariants: block ids are checked before the first byte moves, so a refused copy changed nothing;
the GIL is not held while bytes move; nothing is allocated in proportion to the payload except the
page table, an eighth of it at most.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from tiers.errors import LayoutError
from tiers.kv.layout import Bytes, KVLayout

BlockIds = npt.NDArray[np.int64]
Visit = Callable[[memoryview], object]

PIECE_BYTES_MAX: Final = 256 * 1024
"""Source and target of a piece fit a second-level cache; smaller pieces need more calls."""
PAGE_BYTES_MIN: Final = 64
"""Below a cache line the page table (8 bytes a page) costs as much as the copy itself."""


def ignore(piece: memoryview) -> None:
    """A `Visit` that does nothing."""
    del piece


class Transfer(Protocol):
    """One copy between a worker's memory and a payload."""

    def finish(self, visit: Visit) -> None:
        """Carry it out or wait for it. `visit` sees all of the payload, in order, meanwhile."""

    def settle(self) -> None:
        """Return once nothing of it can still run, also after an error. Never raises."""


class Region(Protocol):
    """A worker's KV memory, on the host or a GPU. Copy threads may share it.

    Copies raise `LayoutError`, having begun nothing, for a wrong size or block id.
    """

    def gather(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """A copy of blocks to `payload`, a part of the pool."""
        ...

    def scatter(self, block_ids: BlockIds, payload: Bytes) -> Transfer:
        """A copy of `payload`, a part of the pool, to blocks."""
        ...


class CopyPlan:
    """Copies blocks of one worker. Immutable: threads may share it."""

    def __init__(self, kv: KVLayout) -> None:
        self._kv = kv
        run = Runs(kv)
        self._plan = _PagePlan(kv, run) if run.page_bytes >= PAGE_BYTES_MIN else _StridedPlan(kv)

    def gather(
        self, memory: Bytes, block_ids: BlockIds, payload: Bytes, *, visit: Visit = ignore
    ) -> None:
        """Copy `block_ids` of `memory` (the whole exported allocation) into `payload`.

        `payload` is in C order `[blocks, layers, heads, tokens, content]`. Raises `LayoutError`,
        having written nothing, for a wrong size or block id.
        """
        self._check(memory, block_ids, payload)
        if len(block_ids):
            self._plan.gather(memory, block_ids, payload, visit)

    def scatter(
        self, memory: Bytes, block_ids: BlockIds, payload: Bytes, *, visit: Visit = ignore
    ) -> None:
        """Copy `payload` to `block_ids` of `memory`: the reverse of `gather`."""
        self._check(memory, block_ids, payload)
        if len(block_ids):
            self._plan.scatter(memory, block_ids, payload, visit)

    def _check(self, memory: Bytes, block_ids: BlockIds, payload: Bytes) -> None:
        if memory.size != self._kv.size_bytes:
            raise LayoutError(f"memory has {memory.size} bytes: must have {self._kv.size_bytes}")
        check_copy(self._kv, block_ids, payload)


def check_copy(kv: KVLayout, block_ids: BlockIds, payload: Bytes) -> None:
    """Raise `LayoutError` unless `block_ids` are blocks of `kv` and `payload` has their size."""
    size_bytes = len(block_ids) * kv.block_payload_bytes
    if payload.size != size_bytes:
        raise LayoutError(
            f"payload has {payload.size} bytes: {len(block_ids)} blocks of this layout need "
            f"exactly {size_bytes}"
        )
    # Without its sign, a negative number is larger than any block id.
    if len(block_ids) and block_ids.astype(np.uint64).max() >= kv.num_blocks:
        raise LayoutError(
            f"block_ids run from {block_ids.min()} to {block_ids.max()}: must be between 0 and "
            f"{kv.num_blocks - 1}, the blocks that the worker exported"
        )


class Runs:
    """The longest runs that are contiguous on both sides, and the grid they lie on.

    A run starts as the content of one coordinate. Each axis that continues it without a gap, in
    the payload's order (token, head, layer), makes it longer. The remaining axes give the offset
    of each run of block 0, in payload order.
    """

    def __init__(self, kv: KVLayout) -> None:
        layers, heads, tokens = kv.segment.num_layers, kv.segment.num_heads, kv.block_entries
        offsets = np.array(kv.layer_offsets_bytes, dtype=np.int64).reshape(layers, 1, 1)
        size_bytes = kv.content_bytes
        if tokens == 1 or kv.token_stride_bytes == size_bytes:
            size_bytes *= tokens
            tokens = 1
        if tokens == 1 and (heads == 1 or kv.head_stride_bytes == size_bytes):
            size_bytes *= heads
            heads = 1
        if heads == 1 and tokens == 1 and bool((np.diff(offsets[:, 0, 0]) == size_bytes).all()):
            size_bytes *= layers
            offsets = offsets[:1]
        steps = np.arange(heads, dtype=np.int64)[:, np.newaxis] * kv.head_stride_bytes
        steps = steps + np.arange(tokens, dtype=np.int64) * kv.token_stride_bytes
        starts = (offsets + steps).ravel()
        self.size_bytes: int = size_bytes
        self.base_bytes: int = int(starts.min())
        self.starts_bytes: npt.NDArray[np.int64] = starts - self.base_bytes
        # With a single block the stride is not used and may have any value.
        self.block_step_bytes: int = kv.block_stride_bytes if kv.num_blocks > 1 else 0
        self.page_bytes: int = math.gcd(
            size_bytes, self.block_step_bytes, int(np.gcd.reduce(self.starts_bytes))
        )


class _PagePlan:
    """Memory as a table of equal pages, on which every run lies, as in all of vLLM's layouts.

    A block is a constant pattern of page numbers. A copy is a numpy call over a page table (`take`
    to gather, `S[index] = D` to scatter), at 95% of the speed of a C loop.
    """

    def __init__(self, kv: KVLayout, run: Runs) -> None:
        page = run.page_bytes
        self._base_bytes = run.base_bytes
        self._page_bytes = page
        self._pages = (kv.size_bytes - run.base_bytes) // page
        self._block_pages = run.block_step_bytes // page
        within = np.arange(run.size_bytes // page, dtype=np.int64)
        self._pattern = (run.starts_bytes[:, np.newaxis] // page + within).ravel()

    def gather(self, memory: Bytes, block_ids: BlockIds, payload: Bytes, visit: Visit) -> None:
        source, target = self._tables(memory, payload)
        for rows, pages, piece in self._pieces(block_ids, payload, visit):
            # In its default mode take() buffers `out`, to leave it unchanged on a bad index. The
            # ids were checked, so nothing is clipped.
            np.take(source, pages, axis=0, out=target[rows], mode="clip")
            visit(piece)

    def scatter(self, memory: Bytes, block_ids: BlockIds, payload: Bytes, visit: Visit) -> None:
        target, source = self._tables(memory, payload)
        for rows, pages, piece in self._pieces(block_ids, payload, visit):
            target[pages] = source[rows]
            visit(piece)

    def _pieces(
        self, block_ids: BlockIds, payload: Bytes, visit: Visit
    ) -> Iterator[tuple[slice, npt.NDArray[np.int64], memoryview]]:
        """Rows of the payload's table, their pages, and their bytes in the payload."""
        pages = (block_ids[:, np.newaxis] * self._block_pages + self._pattern).ravel()
        page = self._page_bytes
        step = len(pages) if visit is ignore else max(1, PIECE_BYTES_MAX // page)
        for first in range(0, len(pages), step):
            rows = slice(first, first + step)
            yield rows, pages[rows], payload.data[first * page : (first + step) * page]

    def _tables(self, memory: Bytes, payload: Bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Memory and payload as `[pages, words]` views. Never a copy."""
        grid = memory[self._base_bytes : self._base_bytes + self._pages * self._page_bytes]
        # With unaligned words take() copies its whole source first, so use bytes then.
        measure = self._page_bytes | grid.ctypes.data | payload.ctypes.data
        word = np.dtype(np.uint64 if measure % 8 == 0 else np.uint8)
        shape = (-1, self._page_bytes // word.itemsize)
        return grid.view(word).reshape(shape), payload.view(word).reshape(shape)


class _StridedPlan:
    """For runs at offsets without a usable common divisor, such as odd scale bytes per head.

    One strided copy for each layer and run of adjacent block ids.
    """

    def __init__(self, kv: KVLayout) -> None:
        self._kv = kv

    def gather(self, memory: Bytes, block_ids: BlockIds, payload: Bytes, visit: Visit) -> None:
        for block, part in self._pairs(memory, block_ids, payload):
            np.copyto(part, block)
        visit(payload.data)

    def scatter(self, memory: Bytes, block_ids: BlockIds, payload: Bytes, visit: Visit) -> None:
        visit(payload.data)
        for block, part in self._pairs(memory, block_ids, payload):
            np.copyto(block, part)

    def _pairs(
        self, memory: Bytes, block_ids: BlockIds, payload: Bytes
    ) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """`[blocks, heads, tokens, words]` views: in memory, in the payload."""
        kv = self._kv
        strides = (kv.block_stride_bytes, kv.head_stride_bytes, kv.token_stride_bytes)
        word_bytes = math.gcd(
            8, kv.content_bytes, memory.ctypes.data, payload.ctypes.data, *strides,
            *kv.layer_offsets_bytes,
        )  # fmt: skip
        word = np.dtype(f"u{word_bytes}")
        layers, heads, tokens = kv.segment.num_layers, kv.segment.num_heads, kv.block_entries
        words = kv.content_bytes // word_bytes
        slot = payload.view(word).reshape(len(block_ids), layers, heads, tokens, words)
        breaks = np.flatnonzero(np.diff(block_ids) != 1) + 1
        edges = [0, *breaks.tolist(), len(block_ids)]
        for layer in range(layers):
            # Through `buffer=`, numpy itself refuses a view that leaves the allocation.
            cache = np.ndarray(
                (kv.num_blocks, heads, tokens, words),
                dtype=word,
                buffer=memory.data,
                offset=kv.layer_offsets_bytes[layer],
                strides=(*strides, word_bytes),
            )
            for first, last in itertools.pairwise(edges):
                block = int(block_ids[first])
                yield cache[block : block + last - first], slot[first:last, layer]
