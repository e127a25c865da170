"""A double: an object tier that fails, is late or damages bytes, by a seed."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, TypeVar

import anyio

from tiers.errors import ChunkMissing, TierUnavailable
from tiers.store.middleware import Wrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tiers.store.client import Bytes, Seen
    from tiers.store.middleware import Verb
    from tiers.store.object_tier import ObjectTier

T = TypeVar("T")


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
        return random.Random(f"{self._seed}/{verb}/{name}/{draw}")

    def _hit(self, fault: str, dice: random.Random) -> bool:
        rate: float = getattr(self._rates, fault)
        hit = dice.random() < rate
        if hit:
            self.injected[fault] = self.injected.get(fault, 0) + 1
        return hit
