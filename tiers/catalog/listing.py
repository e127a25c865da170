"""A catalog that finds out what the store holds by listing a namespace.

Owns the translation of a listing to keys and segments. Does not own names (`names.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from tiers.catalog.names import namespace_prefix, parse_name

if TYPE_CHECKING:
    from tiers.objects import ObjectTier

KEYS_MAX_DEFAULT: Final = 4_000_000

_log = logging.getLogger(__name__)


class ListingCatalog:
    """Knows what the store holds by listing it.

    Args:
        tier: where the objects are.
        keys_max: how many keys of a namespace are kept; of more, the others are misses.
    """

    def __init__(self, tier: ObjectTier, *, keys_max: int = KEYS_MAX_DEFAULT) -> None:
        if keys_max < 1:
            raise ValueError(f"keys_max={keys_max}: must be at least 1")
        self._tier = tier
        self._keys_max = keys_max

    async def refresh(self, namespace_digest: bytes) -> dict[bytes, frozenset[str]]:
        """The names of the segments that the store holds, by key. Raises `TierUnavailable`."""
        prefix = namespace_prefix(namespace_digest)
        found: dict[bytes, set[str]] = {}
        left_out = 0
        for name, size_bytes, _ in await self._tier.list(prefix):
            parts = parse_name(name)
            # The prefix is the listing's business, but a tier that answers too much must not mix
            # two namespaces. An empty object is a write that never was.
            if parts is None or size_bytes == 0 or not name.startswith(f"{prefix}/"):
                continue
            if parts.key not in found and len(found) >= self._keys_max:
                left_out += 1
                continue
            found.setdefault(parts.key, set()).add(parts.segment.name)
        if left_out:
            _log.warning(
                "%s/%s holds more than keys_max=%d keys: %d objects are not used; delete old ones",
                self._tier.url,
                prefix,
                self._keys_max,
                left_out,
            )
        return {key: frozenset(segments) for key, segments in found.items()}
