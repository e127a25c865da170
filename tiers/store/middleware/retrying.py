"""Trying again what failed for a while."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

import anyio

from tiers.errors import TierUnavailable
from tiers.store.middleware.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.client import Bytes, Seen
    from tiers.store.middleware.wrapper import Verb
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")


class Retrying(Wrapper):
    """Tries again what failed with a retryable `TierUnavailable`, after a growing random pause.

    The pause before attempt n + 1 is uniform in [0, min(pause_seconds_max, pause_seconds * 2**n)]
    ("full jitter": https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), so
    that clients which failed together do not come back together. `probe` is not retried: it
    reports what is true now. `close` is not either.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        attempts_max: int = 4,
        pause_seconds: float = 0.1,
        pause_seconds_max: float = 2.0,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        super().__init__(inner)
        if attempts_max < 1:
            raise ValueError(f"attempts_max={attempts_max}: must be at least 1")
        if pause_seconds < 0 or pause_seconds_max < 0:
            raise ValueError(
                f"pause_seconds={pause_seconds}, pause_seconds_max={pause_seconds_max}: must not "
                "be negative"
            )
        self._attempts_max = attempts_max
        self._pause_seconds = pause_seconds
        self._pause_seconds_max = pause_seconds_max
        self._rng = rng or random.Random()  # noqa: S311 - spreads pauses, guards nothing
        self._sleep = sleep
        self.retried: dict[str, int] = {}
        """Attempts that failed and were followed by another, by cause."""

    @property
    def retries(self) -> int:
        """How often something was tried again."""
        return sum(self.retried.values())

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        tries = 0

        def once() -> Awaitable[int]:
            nonlocal tries
            tries += 1
            if tries > 1 and seen is not None:
                seen(0, 0, 0)
            return self._inner.read(name, into, seen=seen)

        return await self._around("read", name, once)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:  # noqa: ARG002
        attempts_max = 1 if verb in {"probe", "close"} else self._attempts_max
        for attempt in range(attempts_max - 1):
            try:
                return await call()
            except TierUnavailable as error:
                if not error.retryable:
                    raise
                self.retried[error.cause] = self.retried.get(error.cause, 0) + 1
            # Growth stops long before 2**attempt could overflow a float.
            pause = min(self._pause_seconds_max, self._pause_seconds * 2.0 ** min(attempt, 62))
            await self._sleep(self._rng.uniform(0.0, pause))
        return await call()
