"""Whose blocks are, in vLLM's KV events: the names that connector and sidecar must give alike.

Owns the names of the tiers' owners. Those of engines are the sidecar's alone
(`events/engine_mirror.py`).
"""

from __future__ import annotations

from typing import Final

TIERS_OWNER: Final = "kvlake/"
"""What these names begin with. Such events in an engine's own stream come from the connector: the
sidecar tells of the tiers itself."""
HITS_OWNER: Final = "kvlake/hits"
"""By an event of this owner the connector says that vLLM tells of hits, from this batch on."""


def tiers_owner(namespace_digest: bytes, topology: str) -> str:
    """Whose the tiers' chunks are that engines of one namespace and topology share."""
    return f"{TIERS_OWNER}{namespace_digest.hex()[:16]}/{topology}"
