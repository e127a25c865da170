"""The base class of wrappers of an object tier: all verbs go through one method.

Invariants: a wrapper passes on every verb and error that it does not handle; it never runs two
attempts of a call at a time, so the caller's memory has one user; it returns only after the inner
call has ended.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, Literal, TypeVar, get_args

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiers.store.client import Bytes, Listing, Seen
    from tiers.store.object_tier import Abilities, ObjectTier

T = TypeVar("T")
Verb = Literal["probe", "write", "read", "list", "delete", "quarantine", "close"]
VERBS: Final[tuple[Verb, ...]] = get_args(Verb)


class Wrapper(abc.ABC):
    """Routes every verb through `_around`."""

    def __init__(self, inner: ObjectTier) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        """The inner tier's URL."""
        return self._inner.url

    @abc.abstractmethod
    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`, one attempt of `verb` on `name` ("" if it has none)."""

    async def probe(self) -> Abilities:
        """See `ObjectTier.probe`."""
        return await self._around("probe", "", self._inner.probe)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """See `ObjectTier.write`."""
        await self._around("write", name, lambda: self._inner.write(name, image, create=create))

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        return await self._around("read", name, lambda: self._inner.read(name, into, seen=seen))

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        """See `ObjectTier.list`."""
        return await self._around(
            "list",
            prefix,
            lambda: self._inner.list(
                prefix, start_after=start_after, deep=deep, names_max=names_max
            ),
        )

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        first = names[0] if names else ""
        await self._around("delete", first, lambda: self._inner.delete(names))

    async def quarantine(self, name: str) -> None:
        """See `ObjectTier.quarantine`."""
        await self._around("quarantine", name, lambda: self._inner.quarantine(name))

    async def close(self) -> None:
        """See `ObjectTier.close`."""
        await self._around("close", "", self._inner.close)
