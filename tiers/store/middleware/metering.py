"""Counting calls, bytes, seconds and failures of each verb."""

# ruff: noqa: ARG002 - a wrapper takes the verb and the name, and some need neither

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, TypeVar

from tiers.errors import TierError
from tiers.store.middleware.wrapper import VERBS, Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from tiers.store.client import Bytes, Seen
    from tiers.store.middleware.billing import Billed
    from tiers.store.middleware.retrying import Retrying
    from tiers.store.middleware.wrapper import Verb
    from tiers.store.object_tier import ObjectTier, UrlObjects

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class VerbCounts:
    """What one verb did since the start. `num_bytes` counts payloads of calls that succeeded."""

    calls: int
    succeeded: int
    num_bytes: int
    seconds: float
    inflight: int
    failures: Mapping[str, int]
    """Calls that raised, by cause (`TierError.cause`, or the name of a bug's exception)."""


@dataclasses.dataclass(slots=True)
class _Tally:
    calls: int = 0
    succeeded: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = dataclasses.field(default_factory=dict[str, int])


class Metered(Wrapper):
    """Counts calls, bytes, seconds and failures of each verb; changes nothing.

    It sees what its caller sees. What `retrying` inside it made good is in `retried`.
    """

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
        """What the store charges for, where that is counted."""
        self._retrying = retrying
        self._objects = objects
        self._clock = clock
        self._tallies: dict[Verb, _Tally] = {verb: _Tally() for verb in VERBS}

    def retried(self) -> dict[str, int]:
        """Attempts that failed and were followed by another, by cause."""
        return {} if self._retrying is None else dict(self._retrying.retried)

    @property
    def entries_skipped(self) -> int:
        """Entries of a folder that listings left out."""
        return 0 if self._objects is None else self._objects.entries_skipped

    def snapshot(self) -> dict[Verb, VerbCounts]:
        """The counts of every verb at this moment."""
        return {
            verb: VerbCounts(
                calls=tally.calls,
                succeeded=tally.succeeded,
                num_bytes=tally.num_bytes,
                seconds=tally.seconds,
                inflight=tally.calls - tally.succeeded - sum(tally.failures.values()),
                failures=dict(tally.failures),
            )
            for verb, tally in self._tallies.items()
        }

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        """See `ObjectTier.write`."""
        await super().write(name, image, create=create)
        self._tallies["write"].num_bytes += image.nbytes

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`."""
        num_bytes = await super().read(name, into, seen=seen)
        self._tallies["read"].num_bytes += num_bytes
        return num_bytes

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        tally = self._tallies[verb]
        tally.calls += 1
        start = self._clock()
        try:
            result = await call()
        except BaseException as error:
            cause = _cause(error)
            tally.failures[cause] = tally.failures.get(cause, 0) + 1
            raise
        else:
            tally.succeeded += 1
            return result
        finally:
            tally.seconds += self._clock() - start


def _cause(error: BaseException) -> str:
    if isinstance(error, TierError):
        return error.cause
    return type(error).__name__ if isinstance(error, Exception) else "cancelled"
