"""A second look at an object that arrived damaged, before everybody loses it.

Owns reading it again and comparing what came. Does not own reading it first (`executor.py`,
`reshard.py`), nor what follows: an object that is damaged is set aside for all clusters, and one
that only arrived so here is a fault of this node or of the way to it.

Invariants: the second read has memory of its own, so that a slot in failing memory accuses nobody;
at most `LOOKS_MAX` look at a time; an object is damaged only if the same bytes came twice and are
wrong both times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import anyio
import numpy as np

from sidecar.data.reshard import SLACK_BYTES, damaged, fingerprint
from tiers.errors import ChunkCorrupt, ImageTruncated
from tiers.store.client import run_to_end

if TYPE_CHECKING:
    import numpy.typing as npt

    from sidecar.data.reshard import SourceError
    from sidecar.sessions.namespaces import RankLayout
    from tiers.store.object_tier import ObjectTier

LOOKS_MAX: Final = 2


class Rereader:
    """Reads what arrived damaged once more."""

    def __init__(self, store: ObjectTier, verifying: anyio.CapacityLimiter) -> None:
        self._store = store
        self._verifying = verifying
        self._limiter = anyio.CapacityLimiter(LOOKS_MAX)

    async def confirms(self, error: SourceError, name: str, holder: RankLayout, key: bytes) -> bool:
        """Whether the object itself is damaged. Raises what keeps the second read from coming."""
        async with self._limiter:
            buffer = np.empty(holder.templates.slot_bytes + SLACK_BYTES, dtype=np.uint8)
            try:
                image = buffer[: await self._store.read(name, buffer)]
            except ImageTruncated:
                return not error.came
            return await run_to_end(lambda: _same(error, image, holder, key), self._verifying)


def _same(error: SourceError, image: npt.NDArray[np.uint8], holder: RankLayout, key: bytes) -> bool:
    if fingerprint(image) != error.came:
        return False
    if not damaged(error.__cause__):
        return True
    # It may have been right in memory, and wrong only where it was hashed.
    try:
        source = holder.as_stored(image)
        source.templates.for_image_bytes(len(image)).verify(image, key)
    except ChunkCorrupt:
        return True
    return False
