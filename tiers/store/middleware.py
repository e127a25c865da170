"""Shared behaviour of object tiers: retrying, deadlines, limits, counters, injected faults.

Each class is an `ObjectTier` around an `ObjectTier` and does one thing; whoever stacks them chooses
the order, and the order has a meaning: a `Deadline` around `Retrying` bounds all attempts together
and one inside it each attempt; `Limited` inside either makes waiting for a turn count; `Metered`
sees what its own caller sees.

Does not own what a verb does, nor the meaning of its errors.

Invariants: a wrapper passes on every verb and every error that is not its own business; it never
runs two attempts of one call at a time, so the caller's memory has one user; and it returns only
after the inner call has ended.
"""

# ruff: noqa: ARG002 - every wrapper is told the verb and the name, and some need neither

from __future__ import annotations

import abc
import dataclasses
import random
import time
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import anyio

from tiers.errors import ChunkMissing, TierError, TierExpired, TierUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tiers.store.billing import Billed
    from tiers.store.client import Bytes, Listing, Seen
    from tiers.store.object_tier import Abilities, ObjectTier, UrlObjects

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

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
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


@dataclasses.dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each fault happens, as probabilities between 0 and 1."""

    unavailable: float = 0.0
    """The call fails and nothing was done."""
    answer_lost: float = 0.0
    """The call fails although it was carried out."""
    missing: float = 0.0
    """A read finds nothing."""
    corrupt: float = 0.0
    """A read succeeds with one bit changed."""
    truncated: float = 0.0
    """A read succeeds with some of its last bytes missing."""
    stall: float = 0.0
    """The call waits `stall_seconds` first."""
    stall_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("unavailable", "answer_lost", "missing", "corrupt", "truncated", "stall"):
            rate: float = getattr(self, field)
            if not 0.0 <= rate <= 1.0:
                raise ValueError(f"{field}={rate}: must be between 0 and 1")


class Faulty(Wrapper):
    """Injects faults drawn from a seed, for tests.

    A draw depends on the seed, the verb, the name and how often that pair was called, and not on
    the order of other calls: a seed replays its failure however tasks interleave. `close` is
    spared.
    """

    def __init__(
        self,
        inner: ObjectTier,
        *,
        seed: int,
        rates: FaultRates,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        super().__init__(inner)
        self._seed = seed
        self._rates = rates
        self._sleep = sleep
        self._draws: dict[tuple[str, str], int] = {}
        self.injected: dict[str, int] = {}

    async def read(self, name: str, into: Bytes, *, seen: Seen | None = None) -> int:
        """See `ObjectTier.read`; the bytes may be damaged, so nobody is told of them before."""
        size_bytes = await super().read(name, into)
        dice = self._dice("damage", name)
        if self._hit("corrupt", dice):
            into[dice.randrange(size_bytes)] ^= 1 << dice.randrange(8)
        if self._hit("truncated", dice):
            return dice.randrange(size_bytes)
        return size_bytes

    async def _around(self, verb: Verb, name: str, call: Callable[[], Awaitable[T]]) -> T:
        if verb == "close":
            return await call()
        dice = self._dice(verb, name)
        if self._hit("stall", dice):
            await self._sleep(self._rates.stall_seconds)
        if self._hit("unavailable", dice):
            raise self._fault(verb, name, "did nothing")
        if self._hit("missing", dice) and verb == "read":
            raise ChunkMissing(f"read {self.url}/{name}: injected by seed {self._seed}")
        result = await call()
        if self._hit("answer_lost", dice):
            raise self._fault(verb, name, "was carried out, its answer lost")
        return result

    def _fault(self, verb: Verb, name: str, what: str) -> TierUnavailable:
        return TierUnavailable(
            f"{verb} {self.url}/{name}: {what}; injected by seed {self._seed}", retryable=True
        )

    def _dice(self, verb: str, name: str) -> random.Random:
        draw = self._draws.get((verb, name), 0)
        self._draws[verb, name] = draw + 1
        # A string seed is hashed with sha512, so it is the same in every process.
        return random.Random(f"{self._seed}/{verb}/{name}/{draw}")  # noqa: S311 - replayable on purpose

    def _hit(self, fault: str, dice: random.Random) -> bool:
        rate: float = getattr(self._rates, fault)
        hit = dice.random() < rate
        if hit:
            self.injected[fault] = self.injected.get(fault, 0) + 1
        return hit
