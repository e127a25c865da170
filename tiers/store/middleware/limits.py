"""How many calls run side by side, and how many begin in a second."""

# ruff: noqa: ARG002 - a wrapper takes the verb and the name, and some need neither

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import anyio

from tiers.store.middleware.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tiers.store.middleware.wrapper import Verb
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")


class Limited(Wrapper):
    """Bounds how many calls run side by side; others wait their turn, in order.

    Reads and listings, for which a prompt may be waiting, have their own turns, so that a backlog
    of writes never holds them up. `probe` and `close` take none.
    """

    def __init__(self, inner: ObjectTier, *, writes_max: int, reads_max: int) -> None:
        super().__init__(inner)
        for field, value in (("writes_max", writes_max), ("reads_max", reads_max)):
            if value < 1:
                raise ValueError(f"{field}={value}: must be at least 1")
        self._writes = anyio.Semaphore(writes_max)
        self._reads = anyio.Semaphore(reads_max)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb in {"probe", "close"}:
            return await call()
        async with self._reads if verb in {"read", "list"} else self._writes:
            return await call()


class Paced(Wrapper):
    """Lets at most so many requests begin in a second, evenly; others wait, in order.

    A verb is one request, a removal one for every `names_per_removal` names; `close` sends none.
    A removal waits for one turn after the other, so that others come between.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        requests_per_second_max: float,
        names_per_removal: int = 1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        super().__init__(inner)
        if requests_per_second_max <= 0:
            raise ValueError(
                f"requests_per_second_max={requests_per_second_max}: must be more than 0"
            )
        self._pause_seconds = 1.0 / requests_per_second_max
        self._names_per_removal = names_per_removal
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        # The last one's turn is taken below, as any verb's.
        for _ in range((len(names) - 1) // self._names_per_removal):
            await self._take_turn()
        await super().delete(names)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb != "close":
            await self._take_turn()
        return await call()

    async def _take_turn(self) -> None:
        # A turn that was taken is used up, also by a call that is cancelled while it waits.
        now = self._clock()
        turn = max(now, self._next)
        self._next = turn + self._pause_seconds
        if turn > now:
            await self._sleep(turn - now)
