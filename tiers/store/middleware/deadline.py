"""Ending a verb that takes too long."""

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
"""Names of one removal that have a deadline together; more are removed in turns."""


class Deadline(Wrapper):
    """Ends a verb that takes too long with a retryable `TierExpired`.

    A removal has no bound on its names, so every `deleted_together_max` of them have a deadline of
    their own. A listing has one, and whoever lists very many names asks for them in parts.

    The error comes after the deadline where a worker thread still touches the caller's memory:
    it waits for the thread, never the other way round.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        seconds_max: float,
        deleted_together_max: int = DELETED_TOGETHER_MAX,
    ) -> None:
        super().__init__(inner)
        if seconds_max <= 0:
            raise ValueError(f"seconds_max={seconds_max}: must be more than 0")
        if deleted_together_max < 1:
            raise ValueError(f"deleted_together_max={deleted_together_max}: must be at least 1")
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
        # Reached only where this scope, and no outer one, was cancelled: a TimeoutError of the
        # inner tier's own is not mistaken for it.
        target = f"{self.url}/{name}" if name else self.url
        raise TierExpired(
            f"{verb} {target}: not done after {self._seconds_max:g} s; check the network to the "
            "store, or raise store.deadline_seconds_max",
            retryable=True,
        )
