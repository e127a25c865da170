"""The lease: which of several sidecars compacts and collects, taken with a conditional PUT.

Owns the objects `v1/lease/<generation>`, of which the newest one counts, and what is in them.
Does not own what its holder does, nor the safety of that: the lease spares work, and a manifest,
which is only ever created, is what keeps two compactors apart (`manifest.py`).

Taking, renewing and giving back each create the next generation, so of two that try at once one
succeeds. Nobody compares clocks: a lease that another holds is over when the same generation was
there for the time that it names, by the clock of who waits for it.

Invariants: whoever holds it has created the newest generation; a holder that was taken over finds
out when it renews; of earlier generations a few stay, so that one who is late does not create an
old one again.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from tiers.catalog.names import LEASE_FOLDER, NUMBER_MAX, lease_name, parse_lease
from tiers.errors import ChunkCorrupt, ChunkMissing, ObjectExists, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiers.store.object_tier import ObjectTier

LEASE_BYTES_MAX: Final = 4096
LEASE_SECONDS_MAX: Final = 600.0
KEPT: Final = 4
HOLDER_CHARACTERS_MAX: Final = 128


class _Record(msgspec.Struct, frozen=True):
    holder: str
    """Empty: it was given back."""
    seconds: float
    """How long it holds without being renewed."""
    token: str = ""
    """Of the contender that made it."""


_UNKNOWN: Final = _Record("somebody", LEASE_SECONDS_MAX)


class CatalogLease:
    """One contender's view of a store's lease.

    Args:
        tier: the store; it must be able to create without replacing.
        holder: who to name as the holder, for people.
        seconds: how long it holds without being renewed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tier: ObjectTier,
        holder: str,
        *,
        seconds: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._tier = tier
        self._holder = holder[:HOLDER_CHARACTERS_MAX]
        self._seconds = min(seconds, LEASE_SECONDS_MAX)
        self._clock = clock or time.monotonic
        self._token = secrets.token_hex(8)
        self.mine = -1
        self._renewed = 0.0
        # The generation of another, since when it is there, and what it says.
        self._seen = -1
        self._seen_since = 0.0
        self._other = _UNKNOWN
        self.store_seconds = 0.0
        """The time when it was last taken or renewed, by the store's clock."""

    @property
    def held(self) -> bool:
        """Whether it was taken, is not lost as far as is known, and was renewed in time."""
        return self.mine >= 0 and self._clock() - self._renewed < self._seconds

    @property
    def other(self) -> str:
        """Who holds it instead."""
        return self._other.holder

    async def look(self) -> int:
        """The newest generation, -1 for none: it moves whenever anybody takes the lease.

        Another's is over when its time has passed since the first look that found it.
        """
        newest = max(await self._generations(), default=-1)
        if newest >= 0:
            await self._notice(newest)
        return newest

    @property
    def over_in(self) -> float | None:
        """Seconds until the lease that was found is over, unless renewed. None: it is free."""
        if self._seen < 0 or self._is_free:
            return None
        return max(0.0, self._seen_since + self._other_seconds - self._clock())

    async def take(self) -> bool:
        """Try to take it. Raises the tier's errors."""
        found = await self._generations()
        newest = max(found, default=-1)
        if newest >= 0:
            await self._notice(newest)
            if self.over_in:
                return False
        return await self._create(newest + 1, self._holder)

    async def renew(self, *, at_once: bool = False) -> bool:
        """Keep it, if a third of its time has passed. False: it was lost. Raises tier errors.

        Args:
            at_once: whatever time has passed; then `store_seconds` is now.
        """
        if not self.held:
            return False
        if not at_once and self._clock() - self._renewed < self._seconds / 3:
            return True
        return await self._create(self.mine + 1, self._holder)

    async def give_back(self) -> None:
        """Let the next one have it at once. Raises the tier's errors."""
        if self.held:
            await self._create(self.mine + 1, "")
            self.mine = -1

    async def _notice(self, newest: int) -> None:
        now = self._clock()
        if newest != self._seen:
            self._other = await self._read(newest)
            self._seen, self._seen_since = newest, now

    @property
    def _is_free(self) -> bool:
        # Given back, or made by a try of our own that seemed to have failed.
        other = self._other
        return not other.holder or (other.token == self._token and not self.held)

    @property
    def _other_seconds(self) -> float:
        return min(self._other.seconds, LEASE_SECONDS_MAX)

    async def _create(self, generation: int, holder: str, *, again: bool = True) -> bool:
        if generation > NUMBER_MAX:
            raise TierUnavailable(
                f"{lease_name(NUMBER_MAX)} has the last number of all, and no sidecar made it: "
                "nothing is compacted or collected; delete it",
                retryable=False,
            )
        body = msgspec.json.encode(_Record(holder, self._seconds, self._token))
        began = self._clock()
        self.mine = -1
        try:
            image = np.frombuffer(body, dtype=np.uint8)
            await self._tier.write(lease_name(generation), image, create=True)
        except ObjectExists:
            # Another's, or our own whose answer was lost: then the next one is free.
            if again and (await self._read(generation)).token == self._token:
                return await self._create(generation + 1, holder, again=False)
            return False
        found = await self._generations()
        if generation not in found or max(found) > generation:
            return False
        self.mine, self._renewed = generation, began
        self.store_seconds = found[generation]
        old = sorted(found)[:-KEPT]
        await self._tier.delete([lease_name(one) for one in old])
        return True

    async def _generations(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for entry in await self._tier.list(LEASE_FOLDER):
            generation = parse_lease(entry.name)
            if generation is not None:
                found[generation] = entry.modified_seconds
        return found

    async def _read(self, generation: int) -> _Record:
        into = np.empty(LEASE_BYTES_MAX, dtype=np.uint8)
        try:
            size_bytes = await self._tier.read(lease_name(generation), into)
            record = msgspec.json.decode(into[:size_bytes].tobytes(), type=_Record)
        except (ChunkMissing, ChunkCorrupt, msgspec.DecodeError, UnicodeDecodeError):
            # Whatever it is, it is over when its longest time has passed.
            return _UNKNOWN
        return record if record.seconds > 0 else _UNKNOWN
