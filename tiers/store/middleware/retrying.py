"""Retries."""

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
        self._attempts_max = attempts_max
        self._pause_seconds = pause_seconds
        self._pause_seconds_max = pause_seconds_max
        self._rng = rng or random.Random()  # noqa: S311 - spreads pauses, guards nothing
        self._sleep = sleep
        self.retried: dict[str, int] = {}
        """Attempts that failed and were followed by another, by cause."""

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        attempts = 0

        def attempt() -> Awaitable[int]:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and seen is not None:
                seen(0, 0, 0)
            return self._inner.read(name, into, seen=seen)

        return await self._around("read", name, attempt)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:  # noqa: ARG002
        attempts_max = 1 if verb in {"probe", "close"} else self._attempts_max
        for attempt in range(attempts_max - 1):
            try:
                return await call()
            except TierUnavailable as error:
                if not error.retryable:
                    raise
                self.retried[error.cause] = self.retried.get(error.cause, 0) + 1
            # 2**attempt must not overflow a float.
            pause = min(self._pause_seconds_max, self._pause_seconds * 2.0 ** min(attempt, 62))
            await self._sleep(self._rng.uniform(0.0, pause))
        return await call()
