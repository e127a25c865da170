"""A store in memory whose clock is the test's, and that can stop a caller at any of its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio.lowlevel
import numpy as np

from tiers.errors import ChunkMissing, ImageTruncated, ObjectExists, TierExpired
from tiers.store.client import Found, Listing
from tiers.store.object_tier import Abilities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiers.store.client import Bytes, Seen

START_SECONDS = 1_700_000_000.0


class Killed(Exception):
    """The process that asked was killed."""


class Bucket:
    """The objects, and the store's clock."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, float]] = {}
        self.now = START_SECONDS
        self.before_delete: Callable[[Sequence[str]], None] = lambda names: None
        self.late: Callable[[str, Listing], bool] = lambda prefix, listing: False
        """Whether a listing of `prefix`, with this answer, is not done in time."""

    @property
    def micros(self) -> int:
        """Now, as rows tell it."""
        return int(self.now * 1e6)

    def names(self, folder: str) -> list[str]:
        return sorted(name for name in self.objects if name.startswith(f"{folder}/"))


class View:
    """One process's way to a bucket.

    Args:
        steps: how many requests it lives for; the one after raises `Killed`, before or after the
            request was carried out, as `after` says.
    """

    url = "test://bucket"

    def __init__(self, bucket: Bucket, *, steps: int = 1 << 30, after: bool = False) -> None:
        self.bucket = bucket
        self.steps = steps
        self.after = after
        self.calls = 0

    async def _turn(self) -> bool:
        """Let others go on; whether this request is the last."""
        await anyio.lowlevel.checkpoint()
        self.calls += 1
        if self.calls > self.steps + self.after:
            raise Killed
        if self.calls > self.steps and not self.after:
            raise Killed
        return self.calls == self.steps + 1

    async def probe(self) -> Abilities:
        return Abilities(creates=True)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        last = await self._turn()
        if create and name in self.bucket.objects:
            raise ObjectExists(name)
        self.bucket.objects[name] = (image.tobytes(), self.bucket.now)
        if last:
            raise Killed

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        last = await self._turn()
        if name not in self.bucket.objects:
            raise ChunkMissing(name)
        body = self.bucket.objects[name][0]
        if not 0 < len(body) <= len(into):
            raise ImageTruncated(name)
        into[: len(body)] = np.frombuffer(body, dtype=np.uint8)
        if last:
            raise Killed
        return len(body)

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        last = await self._turn()
        folder = f"{prefix.rstrip('/')}/" if prefix else ""
        found: dict[str, Found] = {}
        for name, (body, modified) in self.bucket.objects.items():
            if not name.startswith(folder) or name <= start_after:
                continue
            below, slash, _ = name[len(folder) :].partition("/")
            if deep or not slash:
                found[name] = Found(name, len(body), modified)
            else:
                found[f"{folder}{below}/"] = Found(f"{folder}{below}/", 0, 0.0)
        if last:
            raise Killed
        listing = [found[name] for name in sorted(found)][:names_max]
        if self.bucket.late(prefix, listing):
            raise TierExpired("not done in time", retryable=True)
        return listing

    async def delete(self, names: Sequence[str]) -> None:
        last = await self._turn()
        self.bucket.before_delete(names)
        for name in names:
            self.bucket.objects.pop(name, None)
        if last:
            raise Killed

    async def quarantine(self, name: str) -> None:
        await self._turn()
        self.bucket.objects.pop(name, None)

    async def close(self) -> None:
        return
