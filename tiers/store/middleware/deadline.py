"""Deadlines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

import anyio

from tiers.errors import TierExpired
from tiers.store.middleware.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiers.store.middleware.wrapper import Verb
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")

DELETED_TOGETHER_MAX: Final = 100
"""Names that are deleted within one deadline; more are deleted in several steps."""


class Deadline(Wrapper):
    """Ends a verb that takes too long with a retryable `TierExpired`.

    Each `deleted_together_max` names of a deletion have a deadline of their own. A listing has one:
    long listings are requested in parts. The error is raised after the deadline if a worker thread
    still touches the caller's memory.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        seconds_max: float,
        deleted_together_max: int = DELETED_TOGETHER_MAX,
    ) -> None:
        super().__init__(inner)
        self._seconds_max = seconds_max
        self._deleted_together_max = deleted_together_max

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        step = self._deleted_together_max
        for first in range(0, len(names), step):
            await super().delete(names[first : first + step])

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        with anyio.move_on_after(self._seconds_max):
            return await call()
        # Reached only if this scope was cancelled, and no outer one; a TimeoutError of the inner
        # tier passes through.
        target = f"{self.url}/{name}" if name else self.url
        raise TierExpired(
            f"{verb} {target}: not done after {self._seconds_max:g} s; check the network to the "
            "store, or raise store.deadline_seconds_max",
            retryable=True,
        )
