"""Block tables: what of its blocks a request has in each KV cache group of its engine.

Mirrored of vLLM 0.32 `v1/core/single_type_kv_cache_manager.py` and the coordinator above it, as
small as it goes: a group that reads a window gives back what no token to come reads, and has the
pool's null block in its place; the engine's own hit ends where every group has what it still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tests.simulation.content import BLOCK_TOKENS

if TYPE_CHECKING:
    from tests.simulation.blocks import Block, BlockPool, Request


class Tables:
    """The tables of one engine's requests, which it keeps in `Request.tables`.

    Args:
        windows: tokens that each group reads, its own included; 0: all. The first group's is 0.
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int]) -> None:
        self._pool = pool
        self._windows = windows

    def empty(self) -> list[list[Block]]:
        """Those of a request without blocks."""
        return [[] for _ in self._windows]

    def cached(self, request: Request) -> list[list[Block]]:
        """What the longest hit in the engine's own cache has; the last token is left out."""
        run: list[Block] = []
        for digest in request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
            found = self._pool.get_cached_block(digest, [0])
            if found is None:
                break
            run += found
        for count in range(len(run), 0, -1):
            tables = [run[:count]]
            for group, window in enumerate(self._windows[1:], 1):
                first = _first_read(window, count * BLOCK_TOKENS)
                table = [self._pool.null] * first
                for digest in request.block_hashes[first:count]:
                    table += self._pool.get_cached_block(digest, [group]) or ()
                tables.append(table)
            if all(len(table) == count for table in tables):
                return tables
        return self.empty()

    def grow(self, request: Request, computed_tokens: int, num_tokens: int) -> list[Block] | None:
        """Blocks for `num_tokens`, of which `computed_tokens` are or will be there: the new ones.

        What nothing behind those reads is given back first, also where there are too few then.
        """
        end = -(-num_tokens // BLOCK_TOKENS)
        missing = 0
        for table, window in zip(request.tables, self._windows, strict=True):
            first = _first_read(window, computed_tokens)
            self._give_back_unread(table, first)
            missing += max(0, end - max(len(table), first))
        if missing > self._pool.num_free:
            return None
        fresh: list[Block] = []
        for table, window in zip(request.tables, self._windows, strict=True):
            table += [self._pool.null] * (_first_read(window, computed_tokens) - len(table))
            taken = self._pool.allocate(max(0, end - len(table)))
            table += taken
            fresh += taken
        return fresh

    def _give_back_unread(self, table: list[Block], first: int) -> None:
        unread = table[:first]
        table[:first] = [self._pool.null] * len(unread)
        self._pool.free_blocks(reversed(unread))

    def give_back(self, request: Request) -> None:
        """The request has no blocks any more."""
        for table in request.tables:
            self._pool.free_blocks(reversed(table))
        request.tables = self.empty()

    def cache(self, request: Request) -> None:
        """The engine's own cache may find what is computed."""
        whole = request.num_computed_tokens // BLOCK_TOKENS
        for group, table in enumerate(request.tables):
            for block, digest in zip(table[:whole], request.block_hashes, strict=False):
                self._pool.cache(block, group, digest)


def _first_read(window: int, num_tokens: int) -> int:
    """The first block that a token behind `num_tokens` reads."""
    return max(0, num_tokens - window + 1) // BLOCK_TOKENS if window else 0
