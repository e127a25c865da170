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
from types import SimpleNamespace
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


BlockName = tuple[int, bytes]
"""KV cache group, and a digest of the tokens up to the block's end."""


@dataclass(eq=False, slots=True)
class Block:
    block_id: int
    ref_cnt: int = 0
    name: BlockName | None = None
    """Under which the prefix cache may find it."""
    is_null: bool = False


class BlockPool:
    """Blocks with reference counts, and the engine's own prefix cache.

    Where `has_null`, its first block stands in tables for those that were given back.
    """

    hash_block_size = BLOCK_TOKENS

    def __init__(self, num_blocks: int, *, has_null: bool = False) -> None:
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null = self.blocks[0]
        self.null.is_null = has_null
        self.num_usable = num_blocks - has_null
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(has_null, num_blocks))
        self.cached_block_hash_to_block: dict[BlockName, Block] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get_cached_block(self, digest: bytes, groups: list[int]) -> list[Block] | None:
        found = [self.cached_block_hash_to_block.get((group, digest)) for group in groups]
        blocks = [block for block in found if block is not None]
        return blocks if len(blocks) == len(found) else None

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                del self._free[block.block_id]
            block.ref_cnt += 1

    def free_blocks(self, blocks: Iterator[Block] | Sequence[Block]) -> None:
        for block in blocks:
            if block.is_null:
                continue
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

    def cache(self, block: Block, group: int, digest: bytes) -> None:
        name = (group, digest)
        if block.name is None and not block.is_null and name not in self.cached_block_hash_to_block:
            block.name = name
            self.cached_block_hash_to_block[name] = block

    def _forget(self, block: Block) -> None:
        if block.name is not None:
            del self.cached_block_hash_to_block[block.name]
            block.name = None

    def reset(self) -> None:
        for block in self.blocks:
            self._forget(block)
        # As vLLM does: who compares it learns of the reset.
        self.cached_block_hash_to_block = {}


@dataclass(eq=False, slots=True)
class Request:
    """One request, with the names that vLLM's has."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    cache_salt: str | None
    digests: list[TokenDigests]
    """Per KV cache group."""
    all_token_ids: list[int] = field(default_factory=list[int])
    block_hashes: list[bytes] = field(default_factory=list[bytes])
    num_computed_tokens: int = 0
    tables: list[list[Block]] = field(default_factory=list[list[Block]])
    """Its blocks in each KV cache group."""
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
    num_preemptions: int = 0
    prefill_stats: Any = field(
        default_factory=lambda: SimpleNamespace(num_external_cached_tokens=0)
    )
    """Never taken, so that nothing is counted."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        number = zlib.crc32(self.request_id.encode()) % (3 * len(WISHES))
        return {"kvlake": WISHES[number]} if number < len(WISHES) else None

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt)
        self.hash_blocks()

    @property
    def blocks(self) -> list[Block]:
        """All of its blocks, one group after the other."""
        return [block for table in self.tables for block in table]

    def block_ids(self) -> list[list[int]]:
        """Its block tables, as vLLM tells of them."""
        return [[block.block_id for block in table] for table in self.tables]

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
