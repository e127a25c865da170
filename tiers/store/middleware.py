"""Wrappers of an object tier: counters, deadlines, retries and limits.

Each class is an `ObjectTier` around an `ObjectTier` and does one thing. The caller chooses the
order, which matters: a `Deadline` around `Retrying` bounds all attempts together, and one inside it
bounds each attempt; with `ConcurrencyLimited` inside, either includes the wait for a turn;
`Metered` counts what its caller sees, and `Billed`, right around the store, what is charged for.

Invariants: a wrapper passes on every verb and error that it does not handle; it never runs two
attempts of a call at a time, so the caller's memory has one user; it returns only after the inner
call has ended.
"""

# ruff: noqa: ARG002 - not every wrapper needs the verb and the name

import abc
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeVar, get_args

import anyio

from tiers.errors import TierError, TierExpired, TierUnavailable
from tiers.store.client import Bytes, Listing, Seen
from tiers.store.object_tier import Abilities, ObjectTier, UrlObjects

T = TypeVar("T")
Verb = Literal["probe", "write", "read", "list", "delete", "quarantine", "close"]
VERBS: Final[tuple[Verb, ...]] = get_args(Verb)
DELETED_TOGETHER_MAX: Final = 100
"""Names that are deleted within one deadline; more are deleted in several steps."""
Operation = Literal["list", "get", "put", "delete"]
OPERATIONS: Final[tuple[Operation, ...]] = get_args(Operation)
PAGE_NAMES: Final = 1000
_REQUESTS: Final[Mapping[Verb, tuple[Operation, ...]]] = {
    "probe": ("put", "get", "put", "list", "delete"),
    "write": ("put",),
    "read": ("get",),
    "list": ("list",),
    "delete": (),
    "quarantine": ("put", "delete"),
    "close": (),
}


@dataclasses.dataclass(eq=False)
class Wrapper(abc.ABC):
    """Routes every verb through `_around`."""

    _inner: ObjectTier

    @property
    def url(self) -> str:
        """The inner tier's URL."""
        return self._inner.url

    @abc.abstractmethod
    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Run `call`, one attempt of `verb` on `name` ("" if it has none)."""

    async def probe(self) -> Abilities:
        return await self._around("probe", "", self._inner.probe)

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        await self._around("write", name, lambda: self._inner.write(name, image, create=create))

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        return await self._around("read", name, lambda: self._inner.read(name, into, seen=seen))

    async def list(
        self, prefix: str, *, start_after: str = "", deep: bool = True, names_max: int | None = None
    ) -> Listing:
        call = partial(
            self._inner.list, prefix, start_after=start_after, deep=deep, names_max=names_max
        )
        return await self._around("list", prefix, call)

    async def delete(self, names: Sequence[str]) -> None:
        first = names[0] if names else ""
        await self._around("delete", first, lambda: self._inner.delete(names))

    async def quarantine(self, name: str) -> None:
        await self._around("quarantine", name, lambda: self._inner.quarantine(name))

    async def close(self) -> None:
        await self._around("close", "", self._inner.close)


@dataclasses.dataclass(eq=False, kw_only=True)
class Deadline(Wrapper):
    """Ends a verb that takes too long with a retryable `TierExpired`.

    Each `deleted_together_max` names of a deletion have a deadline of their own. The error comes
    after the deadline if a worker thread still touches the caller's memory.
    """

    seconds_max: float
    deleted_together_max: int = DELETED_TOGETHER_MAX

    async def delete(self, names: Sequence[str]) -> None:
        step = self.deleted_together_max
        for first in range(0, len(names), step):
            await super().delete(names[first : first + step])

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        with anyio.move_on_after(self.seconds_max):
            return await call()
        # Reached only if this scope was cancelled, and no outer one; a TimeoutError of the inner
        # tier passes through.
        target = f"{self.url}/{name}" if name else self.url
        raise TierExpired(
            f"{verb} {target}: not done after {self.seconds_max:g} s; check the network to the "
            "store, or raise store.deadline_seconds_max",
            retryable=True,
        )


@dataclasses.dataclass(eq=False, kw_only=True)
class Retrying(Wrapper):
    """Tries again what failed with a retryable `TierUnavailable`, after a growing random pause.

    The pause before attempt n + 1 is uniform in [0, min(pause_seconds_max, pause_seconds * 2**n)]
    ("full jitter": https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), so
    that clients which failed together do not come back together. `probe` is not retried: it
    reports what is true now. `close` is not either.
    """

    attempts_max: int = 4
    pause_seconds: float = 0.1
    pause_seconds_max: float = 2.0
    # Spreads pauses, guards nothing. The lambda lets tests replace `random` in this module.
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random())  # noqa: PLW0108, S311
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    retried: Counter[str] = dataclasses.field(default_factory=Counter[str], init=False)
    """Attempts that failed and were followed by another, by cause."""

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        attempts = 0

        def attempt() -> Awaitable[int]:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and seen is not None:
                seen(0, 0, 0)
            return self._inner.read(name, into, seen=seen)

        return await self._around("read", name, attempt)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        attempts_max = 1 if verb in {"probe", "close"} else self.attempts_max
        for attempt in range(attempts_max - 1):
            try:
                return await call()
            except TierUnavailable as error:
                if not error.retryable:
                    raise
                self.retried[error.cause] += 1
            # 2**attempt must not overflow a float.
            pause = min(self.pause_seconds_max, self.pause_seconds * 2.0 ** min(attempt, 62))
            await self.sleep(self.rng.uniform(0.0, pause))
        return await call()


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


@dataclasses.dataclass(eq=False, kw_only=True)
class RateLimited(Wrapper):
    """Bounds the requests that begin in a second, evenly spread; others wait, in order.

    A verb is one request, a deletion one for every `names_per_removal` names; `close` sends none.
    A deletion waits for one turn after the other, so that other calls come in between.
    """

    requests_per_second_max: float
    names_per_removal: int = 1
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    _next: float = dataclasses.field(default=0.0, init=False)

    async def delete(self, names: Sequence[str]) -> None:
        # `_around` takes the turn of the last request.
        for _ in range((len(names) - 1) // self.names_per_removal):
            await self._take_turn()
        await super().delete(names)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb != "close":
            await self._take_turn()
        return await call()

    async def _take_turn(self) -> None:
        # A call that is cancelled while it waits has used its turn.
        now = self.clock()
        turn = max(now, self._next)
        self._next = turn + 1.0 / self.requests_per_second_max
        if turn > now:
            await self.sleep(turn - now)


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


@dataclasses.dataclass(eq=False, kw_only=True)
class Metered(Wrapper):
    """Counts what its caller sees. Other parts of `inner` are given to show their counts, too."""

    retried: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])
    """`Retrying.retried`."""
    billed: "Billed"
    """What the store charges for."""
    objects: UrlObjects | None = None
    clock: Callable[[], float] = time.perf_counter
    counts: dict[Verb, VerbCounts] = dataclasses.field(
        default_factory=lambda: {verb: VerbCounts() for verb in VERBS}, init=False
    )

    @property
    def entries_skipped(self) -> int:
        """Entries of a folder that listings omitted."""
        return 0 if self.objects is None else self.objects.entries_skipped

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        await super().write(name, image, create=create)
        self.counts["write"].num_bytes += image.nbytes

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        counts = self.counts[verb]
        counts.calls += 1
        counts.inflight += 1
        start = self.clock()
        try:
            result = await call()
        except BaseException as error:
            cause = type(error).__name__ if isinstance(error, Exception) else "cancelled"
            cause = error.cause if isinstance(error, TierError) else cause
            counts.failures[cause] = counts.failures.get(cause, 0) + 1
            raise
        finally:
            counts.inflight -= 1
            counts.seconds += self.clock() - start
        counts.succeeded += 1
        # Only a read returns a size.
        counts.num_bytes += result if isinstance(result, int) else 0
        return result


@dataclasses.dataclass(eq=False)
class Billed(Wrapper):
    """Counts every request that reaches the store, and its bytes, by operation.

    A verb counts as the requests that S3 needs for it: a listing is one for each 1000 names, a
    deletion one for each 1000 objects, a move a copy and a deletion. A request that failed counts
    too: most stores charge for it.
    """

    requests: Counter[Operation] = dataclasses.field(default_factory=Counter[Operation], init=False)
    num_bytes: Counter[Operation] = dataclasses.field(
        default_factory=Counter[Operation], init=False
    )

    async def write(self, name: str, image: Bytes, *, create: bool = False) -> None:
        self.num_bytes["put"] += image.nbytes
        await super().write(name, image, create=create)

    async def delete(self, names: Sequence[str]) -> None:
        self.requests["delete"] += -(-len(names) // PAGE_NAMES)
        await super().delete(names)

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        self.requests.update(_REQUESTS[verb])
        result = await call()
        # Only a read returns a size, and only a listing a list.
        if isinstance(result, int):
            self.num_bytes["get"] += result
        elif isinstance(result, list):
            self.requests["list"] += max(0, len(result) - 1) // PAGE_NAMES
        return result
