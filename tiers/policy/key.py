"""How policies name a chunk, and why it leaves them."""

import enum
from typing import TypeAlias

CacheKey: TypeAlias = tuple[int, bytes]
"""Number of the realm, and key of the chunk: a hash of at least 4 bytes."""


class Left(enum.Enum):
    """Why a key is removed."""

    EVICTED = "evicted"
    """To make room."""
    PINNED = "pinned"
    """It is still cached, but must not be evicted."""
    GONE = "gone"
    """It expired or was damaged, or nobody can ask for it any more."""
