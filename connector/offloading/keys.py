"""Keys of the chunks of vLLM's own offloading, and KV events under the names that vLLM gives them.

vLLM names a chunk by its block hash, which covers tokens, cache salt, adapter and media. The key is
a hash of that name and the namespace. It is not the key that `KVLakeConnector` makes of the same
tokens, which vLLM does not show a tier: the two share a sidecar, but no chunks.

Owns the namespace of an engine's rows, their keys, and for vLLM's publisher the way back: which
chunks were published as stored, and which are held but have no name yet: those of other engines,
and of an earlier process of this one, until a request here looks them up. Does not own what the
tiers hold (`connector/events.py`).

Invariants:

* A chunk is published as removed exactly if it was published as stored, under the same name.
* A chunk that is held is published once, as soon as its name is known.
* What is kept of events is a part of what `TierEvents` keeps, which is bounded.
"""

import hashlib
import os
from collections.abc import Iterable
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey
from vllm.v1.kv_offload.config import OffloadingConfig

from connector.events import TierEvent
from connector.identity.namespace import canonical_json, digest_of
from sidecar.protocol import EVENT_NAME_BYTES, TIERS_OWNER, StoredEvent

NAMES_KEPT_MAX: Final = 65_536
_KEY_DOMAIN: Final = b"kvlake/offloading/1\0"


class ChunkKeys:
    """The keys of one engine's chunks. If it `remembers`, it knows `NAMES_KEPT_MAX` names."""

    def __init__(self, *, remembers: bool) -> None:
        self.namespace = self.digest = b""
        """Empty until `identify`. Until then keys are of no use."""
        self._remembers = remembers
        self._generation = bytes(4)
        """The part of keys that is random after a reset, behind its length."""
        self._known: dict[bytes, OffloadKey] = {}
        """VLLM's names by the start of their keys."""
        self._published: dict[tuple[bytes, str], OffloadKey] = {}
        """By the start of their keys and by tier."""
        self.unnamed: dict[bytes, set[str]] = {}
        """The tiers that hold them, by the start of their keys."""
        self._events: list[OffloadingEvent] = []

    def identify(self, namespace: bytes) -> None:
        """Set the namespace, once, on any thread. No request may use keys from before."""
        self.namespace, self.digest = namespace, digest_of(namespace)

    @property
    def owner(self) -> str:
        """The owner of these chunks in events."""
        return f"{TIERS_OWNER}{self.digest.hex()[:16]}"

    def key_of(self, name: OffloadKey) -> bytes:
        """The key of a chunk. If the chunk is held and had no name, this publishes it."""
        key = hashlib.sha256(_KEY_DOMAIN + self.digest + self._generation + name).digest()
        if self._remembers and self.digest:
            start = key[:EVENT_NAME_BYTES]
            self._known.pop(start, None)
            self._known[start] = name
            if len(self._known) > NAMES_KEPT_MAX:
                del self._known[next(iter(self._known))]
            for tier in sorted(self.unnamed.pop(start, ())):
                self._publish_stored(start, tier, name)
        return key

    def forget(self) -> None:
        """Begin a new generation of keys: nothing from before is found. Publish all as removed."""
        self._generation = (16).to_bytes(4, "little") + os.urandom(16)
        for (_, tier), name in self._published.items():
            self._publish(name, tier, removed=True)
        for forgotten in (self._known, self._published, self.unnamed):
            forgotten.clear()

    def take(self, events: Iterable[TierEvent]) -> list[OffloadingEvent]:
        """What to publish: what was named since the last call, then these events."""
        for event in events:
            start, tier = event.key[:EVENT_NAME_BYTES], event.tier
            published = self._published.get((start, tier))
            if not isinstance(event, StoredEvent):
                if published is not None:
                    del self._published[start, tier]
                    self._publish(published, tier, removed=True)
                elif start in self.unnamed:
                    self.unnamed[start].discard(tier)
                    if not self.unnamed[start]:
                        del self.unnamed[start]
            # Else the tiers know more of it now, which is not published here.
            elif published is None:
                if (name := self._known.get(start)) is None:
                    self.unnamed.setdefault(start, set()).add(tier)
                else:
                    self._publish_stored(start, tier, name)
        taken, self._events = self._events, []
        return taken

    def _publish_stored(self, start: bytes, tier: str, name: OffloadKey) -> None:
        self._published[start, tier] = name
        self._publish(name, tier, removed=False)

    def _publish(self, name: OffloadKey, tier: str, *, removed: bool) -> None:
        host = tier == "host"
        self._events.append(
            OffloadingEvent(
                keys=[name],
                medium=Medium.CPU if host else Medium.STORAGE,
                removed=removed,
                locality=Locality.LOCAL if host else Locality.REMOTE,
                ownership=self.owner,
                # vLLM then keeps what it knows of the chunk's blocks until it is removed.
                removal_expected=not removed,
            )
        )


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
