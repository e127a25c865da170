"""A store as some S3 servers are: a condition on a PUT is taken, and ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tiers.store.middleware import Verb, Wrapper
from tiers.store.object_tier import Abilities

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.client import Bytes

T = TypeVar("T")


class Replacing(Wrapper):
    """Replaces what it was told to create only."""

    async def probe(self) -> Abilities:
        await self._inner.probe()
        return Abilities(creates=False)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        await self._inner.write(name, image, create=False)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        return await call()
