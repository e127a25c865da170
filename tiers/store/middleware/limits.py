"""Limits of concurrent calls, and of requests per second."""

# ruff: noqa: ARG002 - not every wrapper needs the verb and the name

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


class ConcurrencyLimited(Wrapper):
    """Bounds concurrent calls; others wait, in order.

    Reads and listings, for which a prompt may be waiting, have their own limit, so that a backlog
    of writes never delays them. `probe` and `close` have none.
    """

    def __init__(self, inner: ObjectTier, *, writes_max: int, reads_max: int) -> None:
        super().__init__(inner)
        self._writes = anyio.Semaphore(writes_max)
        self._reads = anyio.Semaphore(reads_max)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb in {"probe", "close"}:
            return await call()
        async with self._reads if verb in {"read", "list"} else self._writes:
            return await call()


class RateLimited(Wrapper):
    """Bounds the requests that begin in a second, evenly spread; others wait, in order.

    A verb is one request, a deletion one for every `names_per_removal` names; `close` sends none.
    A deletion waits for one turn after the other, so that other calls come in between.
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
        self._pause_seconds = 1.0 / requests_per_second_max
        self._names_per_removal = names_per_removal
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    async def delete(self, names: Sequence[str]) -> None:
        """See `ObjectTier.delete`."""
        # `_around` takes the turn of the last request.
        for _ in range((len(names) - 1) // self._names_per_removal):
            await self._take_turn()
        await super().delete(names)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb != "close":
            await self._take_turn()
        return await call()

    async def _take_turn(self) -> None:
        # A call that is cancelled while it waits has used its turn.
        now = self._clock()
        turn = max(now, self._next)
        self._next = turn + self._pause_seconds
        if turn > now:
            await self._sleep(turn - now)
