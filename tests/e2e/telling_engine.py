"""The connector, in an engine that says which blocks its own cache holds; loaded in its process.

`TellingConnector` is loaded in place of `KVLakeConnector`, and is as that. vLLM's engine core looks
up by name what it is asked (`Engine.core`) and answers between two steps; here it gets one more
method.
"""

from __future__ import annotations

from typing import Any

from connector.vllm import KVLakeConnector
from tests.e2e.telling import CACHED_BLOCKS, shown


class TellingConnector(KVLakeConnector):
    """Lets the engine be asked; else the connector as it is."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # Not at import: vLLM looks at the class of a connector while it is imported itself.
        from vllm.v1.engine.core import EngineCore

        setattr(EngineCore, CACHED_BLOCKS, cached_blocks)


def cached_blocks(core: Any) -> list[tuple[int, int | str, int]]:
    """Group, hash and number of copies of each block that a request could hit."""
    from vllm.v1.core import kv_cache_utils

    pool = core.scheduler.kv_cache_manager.block_pool
    return [
        (
            kv_cache_utils.get_group_id(key),
            shown(kv_cache_utils.maybe_convert_block_hash(kv_cache_utils.get_block_hash(key))),
            len(blocks) if isinstance(blocks, dict) else 1,
        )
        for key, blocks in pool.cached_block_hash_to_block._cache.items()  # noqa: SLF001 (of vLLM)
    ]
