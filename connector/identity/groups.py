"""KV cache groups: which blocks each still reads, and so what a hit needs of each.

vLLM puts layers that attend alike into groups with their own block tables. Behind N cached tokens a
full-attention layer reads all of them, a sliding window its tail, chunked local attention its
current chunk, and a recurrent layer (Mamba, linear attention, short convolutions) the state after
exactly N tokens, which is in the block that ends there. vLLM allocates no block for what is never
read again. So a hit of N tokens needs from every group the blocks that it still reads, and no
others. Pure: knows neither vLLM nor the index.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

State: TypeAlias = tuple[int, int, int]
"""A state of recurrent layers: KV cache group, block id, number of tokens before it."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How far back a layer reads: everything by default."""

    window: int = 0
    """Tokens that a query reads, including its own; 0: no window."""
    local: int = 0
    """Tokens of an attention chunk, which a query reads up to its own; 0: no chunks."""
    recurrent: bool = False
    """It reads its last state only. A block holds the state after its last token."""

    @property
    def full(self) -> bool:
        """Whether all tokens before a query are read."""
        return not self.window and not self.local and not self.recurrent

    def unread(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many of the first tokens are not read again, as vLLM's `get_num_skipped_tokens`."""
        if self.window:
            return np.maximum(num_tokens - self.window + 1, 0)
        if self.local:
            return num_tokens // self.local * self.local
        if self.recurrent:
            return np.maximum(num_tokens - 1, 0)
        return np.zeros_like(num_tokens)


FULL: Final = Attention()
RECURRENT: Final = Attention(recurrent=True)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Tokens per engine block and per full chunk of a group, and how far back its layers read."""

    block_tokens: int
    chunk_tokens: int
    attention: Attention = FULL

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a full chunk."""
        return self.chunk_tokens // self.block_tokens

    def first_block(self, num_tokens: int) -> int:
        """The first block that is still read after `num_tokens`."""
        return int(self.first_blocks(np.array(num_tokens)))

    def first_blocks(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`first_block` of each."""
        return self.attention.unread(num_tokens) // self.block_tokens


@dataclass(slots=True)
class CachedGroup:
    """A group as keys need it."""

    namespace_digest: bytes
    """Empty until the weights are identified (`reading.py`). Changes once, from another thread."""
    geometry: Geometry


def chunk_tokens_of(chunk_tokens: int, block_tokens: int, attention: Attention) -> int:
    """Tokens of a group's chunk, if those of a full-attention group are `chunk_tokens`.

    A chunk must not be longer than the window or lie in two attention chunks, or vLLM may free its
    first block before its last one is computed. Each state of recurrent layers is a chunk, because
    a hit needs one of them.
    """
    if attention.full:
        return chunk_tokens
    if attention.recurrent:
        return block_tokens
    for tokens in range(chunk_tokens, block_tokens, -block_tokens):
        fits = tokens <= attention.window or (attention.local and attention.local % tokens == 0)
        if fits and chunk_tokens % tokens == 0:
            return tokens
    return block_tokens


def whole_blocks(num_tokens: int, block_sizes: Iterable[int]) -> int:
    """`num_tokens` rounded up to whole blocks in every group; some have hundreds of tokens."""
    step = lcm(*block_sizes)
    return -(-num_tokens // step) * step


def aligned(geometries: Sequence[Geometry], num_tokens: int) -> int:
    """The longest prefix of `num_tokens` that ends at a block's end in every group."""
    step = lcm(*(geometry.block_tokens for geometry in geometries))
    return num_tokens // step * step


def longest_hit(
    geometries: Sequence[Geometry],
    held: Sequence[npt.NDArray[np.bool_]],
    local_tokens: int,
    end_tokens: int,
) -> int:
    """The longest prefix, up to `end_tokens`, for which every group has what it still reads.

    The engine itself holds `local_tokens` in all groups; they are returned if nothing beyond can be
    loaded. Both are multiples of all blocks. `held` says for each group whether its blocks from the
    one at `local_tokens` on can be loaded; those beyond its end cannot.
    """
    step = lcm(*(geometry.block_tokens for geometry in geometries))
    ends = np.arange(local_tokens + step, end_tokens + 1, step, dtype=np.int64)
    possible = np.ones(len(ends), dtype=np.bool_)
    for geometry, loadable in zip(geometries, held, strict=True):
        first = local_tokens // geometry.block_tokens
        last = end_tokens // geometry.block_tokens - first
        missing = np.ones(last, dtype=np.int64)
        missing[: len(loadable)] -= loadable[:last]
        # lacking[i] is how many of the first i blocks cannot be loaded.
        lacking = np.concatenate(([0], np.cumsum(missing)))
        read_from = np.maximum(geometry.first_blocks(ends) - first, 0)
        read_to = ends // geometry.block_tokens - first
        possible &= lacking[read_to] == lacking[np.minimum(read_from, read_to)]
    found = np.flatnonzero(possible)
    return int(ends[found[-1]]) if len(found) else local_tokens
