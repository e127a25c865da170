"""What every wrapper of an object tier is: all verbs go through one method.

Does not own what a verb does, nor the meaning of its errors.

Invariants: a wrapper passes on every verb and every error that is not its own business; it never
runs two attempts of one call at a time, so the caller's memory has one user; and it returns only
after the inner call has ended.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiers.store.client import Bytes, Listing, Seen
    from tiers.store.object_tier import Abilities, ObjectTier

T = TypeVar("T")
Verb = Literal["probe", "write", "read", "list", "delete", "quarantine", "close"]
VERBS: Final[tuple[Verb, ...]] = (
    "probe",
    "write",
    "read",
    "list",
    "delete",
    "quarantine",
    "close",
)


class Wrapper(abc.ABC):
    """Routes every verb through one method, so that a wrapper is that method."""

    def __init__(self, inner: ObjectTier) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        """The inner tier's URL."""
        return self._inner.url

    @abc.abstractmethod
    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`, which is one attempt of `verb` on `name` ("" where there is none)."""

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
