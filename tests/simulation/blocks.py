"""The engine's own cache: requests, blocks, and vLLM's block pool as small as it goes.

Mirrored of vLLM 0.32 `v1/core/block_pool.py`: reference counts, the prefix cache, the order in
which blocks are given out again.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.clock import Violation
from tests.simulation.content import (
    BLOCK_TOKENS,
    TokenDigests,
)

WISHES: tuple[dict[str, Any], ...] = (
    {"ttl_seconds": 0.3},
    {"ttl_seconds": 1.5},
    {"pin_seconds": 0.5},
    {"pin_seconds": 10, "ttl_seconds": 2},
    {"write": "host"},
    {"read": "host", "pin_seconds": 3},
)
"""What one request in three asks for, by its name: nothing else is drawn because of it."""


@dataclass(eq=False, slots=True)
class Block:
    block_id: int
    ref_cnt: int = 0
    digest: bytes = b""
    """Of the tokens up to its end, while the prefix cache may find it."""
    is_null: bool = False


class BlockPool:
    """Blocks with reference counts, and the engine's own prefix cache."""

    hash_block_size = BLOCK_TOKENS

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[bytes, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get_cached_block(self, digest: bytes, groups: list[int]) -> list[Block] | None:
        block = self._cached.get(digest)
        return None if block is None else [block]

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterator[Block] | Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt < 0:
                raise Violation("a block is freed once", f"block {block.block_id}")
            if block.ref_cnt == 0:
                self._free[block.block_id] = None

    def allocate(self, count: int) -> list[Block]:
        taken: list[Block] = []
        for _ in range(count):
            block = self.blocks[self._free.popitem(last=False)[0]]
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def cache(self, block: Block, digest: bytes) -> None:
        if not block.digest and digest not in self._cached:
            block.digest = digest
            self._cached[digest] = block

    def _forget(self, block: Block) -> None:
        if block.digest:
            del self._cached[block.digest]
            block.digest = b""

    def reset(self) -> None:
        for block in self.blocks:
            self._forget(block)


@dataclass(eq=False, slots=True)
class Request:
    """One request, with the names that vLLM's has."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None
    digests: TokenDigests
    all_token_ids: list[int] = field(default_factory=list[int])
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    blocks: list[Block] = field(default_factory=list[Block])
    loading: bool = False
    local_tokens: int = 0
    loaded: bool = False
    """It has its KV from elsewhere, or failed to get it: no further lookup."""
    finished: bool = False
    prompt_embeds: None = None
    resumable: bool = False
    lora_request: None = None
    mm_features: tuple[()] = ()
    skip_reading_prefix_cache: bool = False

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        number = zlib.crc32(self.request_id.encode()) % (3 * len(WISHES))
        return {"kvlake": WISHES[number]} if number < len(WISHES) else None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)
        self.hash_blocks()

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def hash_blocks(self) -> None:
        """Extend `block_hashes` to all whole blocks."""
        salt = (self.cache_salt or "").encode()
        for index in range(len(self.block_hashes), self.num_tokens // BLOCK_TOKENS):
            before = self.block_hashes[-1] if self.block_hashes else salt
            tokens = self.all_token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            self.block_hashes.append(hashlib.sha256(before + str(tokens).encode()).digest())
