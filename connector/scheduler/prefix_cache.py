"""vLLM's own prefix cache: which blocks it has, and which of them must not be stored.

vLLM tells cached blocks apart by tokens, salt, and the name and path of an adapter. It may go on
from KV of earlier weights, or of earlier files of an adapter, which our keys do not describe.

Owns the knowledge of such stale blocks. It ends with vLLM's next reset of its cache, which makes a
new map of cached blocks: the identity of that map stands for the generation of the cache.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from connector.identity.mamba import State

logger = logging.getLogger("vllm.kvlake")

_Name: TypeAlias = tuple[str, str]


class PrefixCache:
    """The prefix cache in vLLM's block pool."""

    def __init__(self, block_pool: Any) -> None:
        self._block_pool = block_pool
        self._planned: Any = None
        """The generation in the last step."""
        self._stale: dict[_Name | None, Any] = {}
        """A generation that has blocks of other files under this name and path, or, for None, from
        before a reset of the connector."""
        self._adapters: dict[_Name, str] = {}
        """The last identity of each adapter."""

    @property
    def generation(self) -> Any:
        """VLLM's map of cached blocks, another object after each reset."""
        return self._block_pool.cached_block_hash_to_block

    def step(self) -> None:
        """Note that a step is planned, and forget what vLLM's last reset of its cache ended."""
        generation = self._planned = self.generation
        for name in [name for name, of in self._stale.items() if of is not generation]:
            del self._stale[name]

    def connector_reset(self) -> None:
        """Treat all blocks as stale, unless vLLM has reset its own cache as well."""
        if self.generation is self._planned:
            self._stale[None] = self.generation

    def stale(self, lora: Any) -> bool:
        """Whether a request with this adapter may share stale blocks."""
        names = (None,) if lora is None else (None, _name_of(lora))
        return any(self._stale.get(name) is self.generation for name in names)

    def distrust_adapter(self, lora: Any) -> None:
        """Treat the blocks under an adapter's name as stale: they may be of other files."""
        if lora is not None:
            self._stale[_name_of(lora)] = self.generation

    def register_adapter(self, lora: Any, identity: str) -> None:
        """Note which adapter a new request has, and compare it with the last one of its name."""
        if lora is None:
            return
        name = _name_of(lora)
        if self._adapters.setdefault(name, identity) != identity:
            self._adapters[name] = identity
            # Requests with the earlier files may still begin with what this one computes.
            self.distrust_adapter(lora)
            logger.warning(
                "kvlake: adapter %s in %s has other files than before, and vLLM's own prefix cache "
                "does not tell them apart: prompts that it holds a part of are not cached until it "
                "is reset; use a new path for new weights",
                *name,
            )

    def blocks_at(self, request: Any, end_tokens: int, groups: Sequence[int]) -> Sequence[Any]:
        """The cached block of each group that ends at `end_tokens`; empty if a group lacks it."""
        # Hashes may be of smaller blocks: a block has the hash of its last part.
        last = end_tokens // self._block_pool.hash_block_size - 1
        hashes = request.block_hashes
        if not 0 <= last < len(hashes):
            return ()
        blocks: Sequence[Any] | None = self._block_pool.get_cached_block(hashes[last], list(groups))
        return blocks or ()

    def states_at(self, request: Any, end_tokens: int, groups: Sequence[int]) -> list[State]:
        """States of recurrent layers that vLLM has cached for these groups at `end_tokens`.

        A cached block is not written again. To keep it, take a reference at once.
        """
        blocks = self.blocks_at(request, end_tokens, groups) if groups else ()
        return [
            (group, block.block_id, end_tokens)
            for group, block in zip(groups, blocks, strict=bool(blocks))
        ]


def _name_of(lora: Any) -> _Name:
    """Name and path of an adapter, by which vLLM's prefix cache tells adapters apart."""
    return lora.lora_name, lora.lora_path
