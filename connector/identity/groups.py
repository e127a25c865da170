"""KV cache groups: what of its past each still reads, and so what a hit needs of each.

vLLM puts layers that attend alike into groups with block tables of their own. Behind N cached
tokens a full-attention layer reads all of them, a sliding window its tail, chunked local attention
its current chunk, and a recurrent layer (Mamba, linear attention, short convolutions) the state
that it had after exactly N tokens, which is what the block that ends there holds. vLLM gives what
is never read again no block. A hit of N tokens therefore counts only where every group has the
blocks that it still reads, all of them and no others.

Owns that rule, the chunk size that fits a group, and the search for the longest hit. Pure: knows
neither vLLM nor the index.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Attention:
    """How far back a layer reads: a window or a chunk, in tokens; with neither, everything.

    Or nothing of the past but its own last state.
    """

    window: int = 0
    """Tokens that a query reads, its own included."""
    local: int = 0
    """Tokens of one chunk; a query reads those of its chunk up to its own."""
    recurrent: bool = False
    """A block holds the state behind its last token, not something of each of its tokens."""

    @property
    def full(self) -> bool:
        """Whether all tokens before a query are read."""
        return not self.window and not self.local and not self.recurrent

    def unread(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many leading tokens of `num_tokens` nothing behind them reads any more.

        As `get_num_skipped_tokens` of vLLM's managers of each kind.
        """
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
    """One group: tokens per engine block and per full chunk, and how far back its layers read."""

    block_tokens: int
    chunk_tokens: int
    attention: Attention = FULL

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a full chunk."""
        return self.chunk_tokens // self.block_tokens

    def first_block(self, num_tokens: int) -> int:
        """The first block that is still read behind `num_tokens`."""
        return int(self.first_blocks(np.array(num_tokens)))

    def first_blocks(self, num_tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`first_block` of each."""
        return self.attention.unread(num_tokens) // self.block_tokens


@dataclass(frozen=True, slots=True)
class CachedGroup:
    """A group as keys are made for it."""

    namespace_digest: bytes
    geometry: Geometry


def chunk_tokens_of(chunk_tokens: int, block_tokens: int, attention: Attention) -> int:
    """Tokens of a group's chunk, where those of a full-attention group are `chunk_tokens`.

    When a step completes a chunk, its first block may be unread already, and then it is gone. Not
    where the chunk is no longer than the window, or lies within one local chunk. Of recurrent
    layers every state is a chunk: a hit needs one of them.
    """
    if attention.full:
        return chunk_tokens
    if attention.recurrent:
        return block_tokens
    for parts in range(1, chunk_tokens // block_tokens + 1):
        tokens, rest = divmod(chunk_tokens, parts)
        if rest or tokens % block_tokens:
            continue
        fits = tokens <= attention.window or (attention.local and attention.local % tokens == 0)
        if fits:
            return tokens
    return block_tokens


def whole_blocks(num_tokens: int, block_sizes: Iterable[int]) -> int:
    """So many tokens or a few more, a whole number of blocks in every group.

    vLLM makes blocks of recurrent models as large as a state: 528 tokens, say.
    """
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
    """The longest prefix, up to `end_tokens`, of which every group has what it still reads.

    Args:
        geometries: the groups.
        held: of each group, whether its blocks from the one at `local_tokens` on can be loaded;
            what lies behind the end of it cannot.
        local_tokens: what the engine holds itself, in all groups; a multiple of their blocks.
        end_tokens: a multiple of their blocks.

    Returns: `local_tokens` where nothing beyond it can be had.
    """
    step = lcm(*(geometry.block_tokens for geometry in geometries))
    ends = np.arange(local_tokens + step, end_tokens + 1, step, dtype=np.int64)
    possible = np.ones(len(ends), dtype=np.bool_)
    for geometry, loadable in zip(geometries, held, strict=True):
        first = local_tokens // geometry.block_tokens
        last = end_tokens // geometry.block_tokens - first
        missing = np.ones(last, dtype=np.int64)
        missing[: len(loadable)] -= loadable[:last]
        # lacking[i]: how many of the first i blocks cannot be loaded.
        lacking = np.concatenate(([0], np.cumsum(missing)))
        read_from = np.maximum(geometry.first_blocks(ends) - first, 0)
        read_to = ends // geometry.block_tokens - first
        possible &= lacking[read_to] == lacking[np.minimum(read_from, read_to)]
    found = np.flatnonzero(possible)
    return int(ends[found[-1]]) if len(found) else local_tokens
