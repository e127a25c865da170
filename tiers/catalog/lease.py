"""The lease: which of several processes compacts and collects, acquired with a conditional PUT.

Owns the objects `v1/lease/<generation>`, of which the newest counts, and what is in them. Does not
own the safety of two compactions at once: a manifest is only ever created (`manifest.py`).

Acquiring, renewing and releasing each create the next generation, so of two processes that try at
once one succeeds. Clocks are not compared: another's lease has expired when one generation was
there for as long as it says, by the clock of the process that waits.

Invariants: the holder has created the newest generation; a holder that lost the lease finds out
when it renews; a few earlier generations stay, so that a late process does not create an old one
again.
"""

import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from tiers.catalog.names import LEASE_FOLDER, NUMBER_MAX, lease_name, parse_lease
from tiers.errors import ChunkCorrupt, ChunkMissing, ObjectExists, TierUnavailable
from tiers.store.object_tier import ObjectTier

LEASE_BYTES_MAX: Final = 4096
LEASE_SECONDS_MAX: Final = 600.0
LEASES_KEPT: Final = 4
HOLDER_CHARACTERS_MAX: Final = 128


class _Record(msgspec.Struct, frozen=True):
    holder: str
    """Empty: it was released."""
    seconds: float
    """How long it holds without being renewed."""
    token: str = ""
    """Identifies the process that made it."""


_UNKNOWN: Final = _Record("somebody", LEASE_SECONDS_MAX)


class CatalogLease:
    """One process's view of a store's lease, which holds for `seconds` without being renewed.

    `tier` must be able to create without replacing. Other processes show the name `holder`.
    """

    def __init__(
        self,
        tier: ObjectTier,
        holder: str,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._holder = holder[:HOLDER_CHARACTERS_MAX]
        self._seconds = min(seconds, LEASE_SECONDS_MAX)
        self._clock = clock
        self._token = secrets.token_hex(8)
        self.generation = -1
        """The generation that this process created; -1 while it does not hold the lease."""
        self._renewed = 0.0
        # Another's generation, since when it was seen, and its record.
        self._seen = -1
        self._seen_since = 0.0
        self.other = _UNKNOWN
        self.store_seconds = 0.0
        """When it was last acquired or renewed, by the store's clock."""

    @property
    def held(self) -> bool:
        """Whether it was acquired, renewed in time, and as far as is known not lost."""
        return self.generation >= 0 and self._clock() - self._renewed < self._seconds

    async def poll(self) -> int:
        """The newest generation, -1 for none. It grows with each acquire, renew and release.

        Another's lease expires after its time since the first poll that found it.
        """
        newest, now = max(await self._generations(), default=-1), self._clock()
        if newest >= 0 and newest != self._seen:
            self.other = await self._read(newest)
            self._seen, self._seen_since = newest, now
        return newest

    @property
    def expires_in(self) -> float | None:
        """Seconds until the lease that was found expires, unless renewed. None: it is free."""
        other = self.other
        # Released, or made by an attempt of this process that seemed to have failed.
        free = not other.holder or (other.token == self._token and not self.held)
        if self._seen < 0 or free:
            return None
        seconds = min(other.seconds, LEASE_SECONDS_MAX)
        return max(0.0, self._seen_since + seconds - self._clock())

    async def acquire(self) -> bool:
        """Try to get it. Raises the tier's errors."""
        newest = await self.poll()
        if newest >= 0 and self.expires_in:
            return False
        return await self._create(newest + 1, self._holder)

    async def renew(self, *, now: bool = False) -> bool:
        """Keep it, if a third of its time has passed. False: it was lost. Raises tier errors.

        `now`: whatever time has passed, so that `store_seconds` is the present. A lease that has
        expired is kept if nobody took it: a request may have lasted longer.
        """
        if self.generation < 0:
            return False
        if not now and self._clock() - self._renewed < self._seconds / 3:
            return True
        return await self._create(self.generation + 1, self._holder)

    async def release(self) -> None:
        """Free it for the next process. Raises the tier's errors."""
        if self.held:
            await self._create(self.generation + 1, "")
            self.generation = -1

    async def _create(self, generation: int, holder: str, *, again: bool = True) -> bool:
        if generation > NUMBER_MAX:
            raise TierUnavailable(
                f"{lease_name(NUMBER_MAX)} has the highest possible number, and no sidecar made "
                "it: nothing is compacted or collected; delete it",
                retryable=False,
            )
        body = msgspec.json.encode(_Record(holder, self._seconds, self._token))
        began = self._clock()
        self.generation = -1
        try:
            image = np.frombuffer(body, dtype=np.uint8)
            await self._tier.write(lease_name(generation), image, create=True)
        except ObjectExists:
            # Another's, or this process's own whose answer was lost. Then the next one is free.
            if again and (await self._read(generation)).token == self._token:
                return await self._create(generation + 1, holder, again=False)
            return False
        found = await self._generations()
        if generation not in found or max(found) > generation:
            return False
        self.generation, self._renewed = generation, began
        self.store_seconds = found[generation]
        old = sorted(found)[:-LEASES_KEPT]
        await self._tier.delete([lease_name(one) for one in old])
        return True

    async def _generations(self) -> dict[int, float]:
        """Generations that are there, and when each was created by the store's clock."""
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
        except (
            *(ChunkMissing, ChunkCorrupt),
            *(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
        ):
            # Whatever it is, it has expired after the longest time.
            return _UNKNOWN
        return record if record.seconds > 0 else _UNKNOWN
