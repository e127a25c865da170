"""The object store: a bucket that several clusters share, and everything that can be wrong with it.

Owns the objects, who damaged or removed them, and how a request fares: how long it takes, in how
many pieces its bytes move, and whether it fails, before or after it was carried out. Implements
`tiers.store.object_tier.ObjectTier`; the real wrappers (deadline, retries, limits, counters) are
around it.

Invariant: an object is replaced as a whole; what a writer's memory holds when its last piece is
taken is not what decides, but what each piece held when it was taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import numpy.typing as npt

from tests.simulation.clock import EPOCH_SECONDS, Violation, World
from tiers.catalog.names import parse_name
from tiers.errors import (
    ChunkMissing,
    ImageTruncated,
    ObjectExists,
    TierFull,
    TierUnavailable,
)
from tiers.store.client import Found, Listing, Seen
from tiers.store.object_tier import Abilities

if TYPE_CHECKING:
    from tests.simulation.process import SidecarProcess

PIECES = 3

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Bucket:
    """What is stored, and the mood of the service. Outlives every sidecar."""

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    modified: dict[str, float] = field(default_factory=dict[str, float])
    tainted: set[str] = field(default_factory=set[str])
    """Names whose object was damaged at some time."""
    down: bool = False
    full: bool = False
    seconds_max: float = 0.02
    failure_rate: float = 0.0
    damage_rate: float = 0.0

    def put(self, name: str, image: bytes, now: float) -> None:
        """Keep an object, in the place of another of its name."""
        self.objects[name] = image
        self.modified[name] = now


class FaultyObjects:
    """One sidecar's way to the bucket."""

    url = "sim://bucket"

    def __init__(self, world: World, bucket: Bucket, process: SidecarProcess) -> None:
        self._world = world
        self.bucket = bucket
        self._process = process

    async def probe(self) -> Abilities:
        """See `ObjectTier.probe`."""
        await self._begin("probe")
        return Abilities(creates=True)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """See `ObjectTier.write`."""
        await self._begin("write")
        if self.bucket.full:
            self._world.saw("store: full")
            raise TierFull("no space is left in the bucket")
        taken = bytearray()
        step = -(-len(image) // PIECES)
        for start in range(0, len(image), step):
            taken += image[start : start + step].tobytes()
            await self._pass_time()
        if create and name in self.bucket.objects:
            raise ObjectExists(f"{name} is there")
        if parse_name(name) is not None:
            try:
                self._process.checks.object_written(self._process, name, bytes(taken))
            except Violation as error:
                # The sidecar would take it for a store that fails, and go on.
                self._world.broken = self._world.broken or error
                raise
        self.bucket.put(name, bytes(taken), EPOCH_SECONDS + self._world.now)
        self._answer("write")

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`. It says nothing of pieces."""
        await self._begin("read")
        found = self.bucket.objects.get(name)
        if found is None:
            self._world.saw("store: object missing")
            raise ChunkMissing(f"{name} is not there")
        if self._world.random.random() < self.bucket.damage_rate:
            self._world.saw("store: read damaged")
            self.bucket.tainted.add(name)
            found = damaged(self._world, found)
            if self._world.random.random() < 0.5:
                # For good; else only on its way to this reader, who looks a second time.
                self.bucket.objects[name] = found
        if not 0 < len(found) <= len(into):
            raise ImageTruncated(f"{name} has {len(found)} bytes")
        step = -(-len(found) // PIECES)
        for start in range(0, len(found), step):
            piece = found[start : start + step]
            into[start : start + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
            await self._pass_time()
        self._answer("read")
        return len(found)

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        """See `ObjectTier.list`. A listing is as old as its beginning."""
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        found: dict[str, Found] = {}
        for name, image in self.bucket.objects.items():
            if not name.startswith(folder) or name <= start_after:
                continue
            below, slash, _ = name[len(folder) :].partition("/")
            if deep or not slash:
                found[name] = Found(name, len(image), self.bucket.modified.get(name, 0.0))
            else:
                name = f"{folder}{below}/"
                found[name] = Found(name, 0, 0.0)
        await self._begin("list")
        self._answer("list")
        return [found[name] for name in sorted(found)][:names_max]

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        await self._begin("delete")
        for name in names:
            self.bucket.objects.pop(name, None)

    async def quarantine(self, name: str) -> None:
        """See `ObjectTier.quarantine`."""
        await self._begin("quarantine")
        image = self.bucket.objects.pop(name, None)
        if image is not None:
            self._world.saw("store: object quarantined")
            self.bucket.objects[f"quarantine/{name}"] = image

    async def close(self) -> None:
        """See `ObjectTier.close`."""

    def spoilt(self, name: str) -> None:
        """Its writer's memory was damaged while it was written."""
        self.bucket.tainted.add(name)

    async def _pass_time(self) -> None:
        await anyio.sleep(self._world.random.random() * self.bucket.seconds_max)

    async def _begin(self, verb: str) -> None:
        await self._pass_time()
        if self.bucket.down or self._world.random.random() < self.bucket.failure_rate:
            self._world.saw(f"store: {verb} failed")
            raise TierUnavailable(f"{verb}: the service is away", retryable=not self.bucket.down)

    def _answer(self, verb: str) -> None:
        if self._world.random.random() < self.bucket.failure_rate / 2:
            self._world.saw(f"store: answer to {verb} lost")
            raise TierUnavailable(f"{verb}: the answer was lost", retryable=True)


def damaged(world: World, image: bytes) -> bytes:
    """The same object with a bit flipped, or cut short."""
    spoilt: Any = bytearray(image)
    if world.random.random() < 0.3:
        del spoilt[world.random.randrange(1, len(spoilt)) :]
    else:
        spoilt[world.random.randrange(len(spoilt))] ^= 1 << world.random.randrange(8)
    return bytes(spoilt)
