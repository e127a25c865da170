"""What the object store holds, and how its objects are named.

Owns the name of a segment's object, `v1/<namespace>/<kk>/<key>/<segment>.arrow`, and a catalog
that finds out what is there by listing a namespace. This is the one place to replace when a
listing gets too slow: who uses it sees keys and segment names, never object names.

Does not own I/O (the tier does it), or whether an object is any good: a name is a claim, and the
image behind it is verified when it is read.

Invariants: `parse_name(object_name(...))` gives back what went in, and nothing but such a name
parses, so foreign objects in the bucket, quarantined ones and those of later formats are ignored.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Final, NamedTuple

from tiers.errors import LayoutError
from tiers.layout import Segment

if TYPE_CHECKING:
    from tiers.objects import ObjectTier

FORMAT: Final = "v1"
DIGEST_BYTES: Final = 32
KEY_BYTES: Final = 32
NAMESPACE_CHARACTERS: Final = 16
KEYS_MAX_DEFAULT: Final = 4_000_000
_NAME = re.compile(
    rf"{FORMAT}/([0-9a-f]{{{NAMESPACE_CHARACTERS}}})/([0-9a-f]{{2}})/([0-9a-f]{{{2 * KEY_BYTES}}})"
    r"/([0-9.-]{1,64})\.arrow"
)

_log = logging.getLogger(__name__)


class ObjectName(NamedTuple):
    """The parts of an object's name."""

    namespace: str
    """The first 16 hexadecimal digits of the namespace's digest. Images hold all of it."""
    key: bytes
    segment: Segment


def namespace_prefix(namespace_digest: bytes) -> str:
    """The folder of a namespace's objects. Raises `ValueError` unless given 32 bytes."""
    if len(namespace_digest) != DIGEST_BYTES:
        raise ValueError(
            f"namespace_digest: must have {DIGEST_BYTES} bytes, got {len(namespace_digest)}"
        )
    return f"{FORMAT}/{namespace_digest.hex()[:NAMESPACE_CHARACTERS]}"


def object_name(namespace_digest: bytes, key: bytes, segment: Segment) -> str:
    """The name of one segment of chunk `key`. Raises `ValueError` for a key not of 32 bytes."""
    if len(key) != KEY_BYTES:
        raise ValueError(f"key: must have {KEY_BYTES} bytes, got {len(key)}")
    # The two digits spread a namespace over 256 folders; S3 partitions its index by prefix too.
    digits = key.hex()
    return f"{namespace_prefix(namespace_digest)}/{digits[:2]}/{digits}/{segment.name}.arrow"


def parse_name(name: str) -> ObjectName | None:
    """The parts of `name`, or None where `object_name` cannot have made it."""
    match = _NAME.fullmatch(name)
    if match is None or not match[3].startswith(match[2]):
        return None
    try:
        segment = Segment.parse(match[4])
    except LayoutError:
        return None
    return ObjectName(match[1], bytes.fromhex(match[3]), segment)


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
