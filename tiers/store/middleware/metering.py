"""Counters of calls, bytes, seconds and failures, by verb."""

# ruff: noqa: ARG002 - not every wrapper needs the verb and the name

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, TypeVar

from tiers.errors import TierError
from tiers.store.middleware.wrapper import VERBS, Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.client import Bytes, Seen
    from tiers.store.middleware.billing import Billed
    from tiers.store.middleware.retrying import Retrying
    from tiers.store.middleware.wrapper import Verb
    from tiers.store.object_tier import ObjectTier, UrlObjects

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class VerbCounts:
    """Counts of one verb since the start. `num_bytes` counts payloads of calls that succeeded."""

    calls: int = 0
    succeeded: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    inflight: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    """Calls that raised, by cause (`TierError.cause`, or the type of another exception)."""


class Metered(Wrapper):
    """Counts what its caller sees; changes nothing. Retries below it are in `retried`."""

    def __init__(
        self,
        inner: ObjectTier,
        *,
        retrying: Retrying | None = None,
        billed: Billed | None = None,
        objects: UrlObjects | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self.billed = billed
        """What the store charges for, if that is counted."""
        self._retrying = retrying
        self._objects = objects
        self._clock = clock
        self._counts: dict[Verb, VerbCounts] = {verb: VerbCounts() for verb in VERBS}

    def retried(self) -> dict[str, int]:
        """Attempts that failed and were followed by another, by cause."""
        return {} if self._retrying is None else dict(self._retrying.retried)

    @property
    def entries_skipped(self) -> int:
        """Entries of a folder that listings omitted."""
        return 0 if self._objects is None else self._objects.entries_skipped

    def snapshot(self) -> dict[Verb, VerbCounts]:
        """The counts of every verb at this moment."""
        return {
            verb: dataclasses.replace(counts, failures=dict(counts.failures))
            for verb, counts in self._counts.items()
        }

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """See `ObjectTier.write`."""
        await super().write(name, image, create=create)
        self._counts["write"].num_bytes += image.nbytes

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        num_bytes = await super().read(name, into, seen=seen)
        self._counts["read"].num_bytes += num_bytes
        return num_bytes

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        counts = self._counts[verb]
        counts.calls += 1
        counts.inflight += 1
        start = self._clock()
        try:
            result = await call()
        except BaseException as error:
            cause = _cause(error)
            counts.failures[cause] = counts.failures.get(cause, 0) + 1
            raise
        else:
            counts.succeeded += 1
            return result
        finally:
            counts.inflight -= 1
            counts.seconds += self._clock() - start


def _cause(error: BaseException) -> str:
    if isinstance(error, TierError):
        return error.cause
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
