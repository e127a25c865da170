"""Keys of the chunks of vLLM's own offloading.

vLLM names a chunk by its block hash, which covers tokens, cache salt, adapter and media. The key is
a hash of that name and the namespace. It is not the key that `KVLakeConnector` makes of the same
tokens, which vLLM does not show a tier: the two share a sidecar, but no chunks.

Owns the namespace of an engine's rows, their keys, and the way back from a key for events.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)

from connector.identity.namespace import canonical_json, digest_of
from sidecar.protocol import EVENT_NAME_BYTES, TIERS_OWNER

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.config import OffloadingConfig

NAMES_KEPT_MAX: Final = 65_536
_KEY_DOMAIN: Final = b"kvlake/offloading/1\0"


class ChunkKeys:
    """The keys of one engine's chunks. If it `remembers`, it knows `NAMES_KEPT_MAX` names."""

    def __init__(self, namespace: bytes, *, remembers: bool) -> None:
        self.digest = digest_of(namespace)
        self._remembers = remembers
        self._generation = b""
        self._known: dict[bytes, OffloadKey] = {}

    @property
    def owner(self) -> str:
        """The owner of these chunks in events."""
        return f"{TIERS_OWNER}{self.digest.hex()[:16]}"

    def key_of(self, name: OffloadKey) -> bytes:
        """The key of a chunk."""
        hasher = hashlib.sha256(_KEY_DOMAIN)
        hasher.update(self.digest)
        hasher.update(len(self._generation).to_bytes(4, "little") + self._generation)
        hasher.update(name)
        key = hasher.digest()
        if self._remembers:
            start = key[:EVENT_NAME_BYTES]
            self._known.pop(start, None)
            self._known[start] = name
            if len(self._known) > NAMES_KEPT_MAX:
                del self._known[next(iter(self._known))]
        return key

    def name_of(self, start: bytes) -> OffloadKey | None:
        """The name that vLLM gives the chunk whose key begins so, if it is known."""
        return self._known.get(start)

    def forget(self) -> None:
        """Begin a new generation of keys: nothing from before is found."""
        self._generation = os.urandom(16)
        self._known.clear()


def row_namespace_of(config: OffloadingConfig, identity: Any, row_bytes: int) -> bytes:
    """The namespace of an engine's rows: `identity`, and everything that vLLM tells a tier."""
    parallel = config.parallel
    layout = str(config.kv_cache_layout)
    ranks = [parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    portable = config.canonical_layout and parallel.is_parallelism_agnostic
    description = {
        "format": 1,
        "interface": "vllm offloading",
        "identity": identity,
        "model": config.model.name if isinstance(identity, str) else "",
        "kv_dtype": config.model.dtype,
        "layout": layout,
        "canonical": canonical_format_id(layout) if config.canonical_layout else "",
        "row_bytes": row_bytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [
            {
                "block_tokens": group.tokens_per_block,
                "layers": len(group.layer_names),
                "names": hashlib.sha256("\0".join(group.layer_names).encode()).hexdigest(),
            }
            for group in config.groups
        ],
        # Portable pages are shared by engines with any number of ranks.
        "cut": [] if portable else ranks,
        "replicated": config.replicated_layout,
    }
    return canonical_json(description)
