"""After how long chunks of each kind are used again, and what keeping them is worth.

Owns a sample of the keys that requests use, cached or not, so that it does not depend on what a
policy evicts. Ages are counted in uses of chunks, not in seconds.

Invariants: at most `SAMPLED_MAX` keys are remembered for a cache of up to 380,000, and one of 23
beyond; a use takes constant time.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from tiers.policy.key import CacheKey

USES: Final = 3
"""Kinds by earlier uses: none, one, more."""
KINDS: Final = 15
"""Five of new tokens, times three of uses: kind % USES is the number of earlier uses."""
AGES: Final = 48
"""Ages, two for each power of two."""
SAMPLED_MIN: Final = 2_048
SAMPLED_MAX: Final = 16_384
SAMPLED_SPAN: Final = 11
"""The sample goes back as far as this many times the keys that are cached."""
FADING: Final = 0.9
"""How much the statistics weigh after they were used once more."""
KIND_WEIGHT: Final = 40.0
"""Chunks of a kind that say as much as all with as many uses do."""
USES_WEIGHT: Final = 8.0
"""Chunks with as many uses that say as much as all do."""
PAUSE_SPANS: Final = 8
"""Uses for which the order is LRU, in keys that are cached; twice as many each time."""
KIND_BITS: Final = 4
KIND_MASK: Final = (1 << KIND_BITS) - 1
COMPACTED_MAX: Final = 32_768
_TIME_SHIFT: Final = KIND_BITS + 8
_SAMPLED_BITS_MIN: Final = 3
_SAMPLED_BITS_MAX: Final = 8
_WIDTHS: Final = np.diff(np.array([2 ** (age / 2) - 1 for age in range(AGES + 1)]))


def age_of(uses: int) -> int:
    """The age of a chunk after `uses` uses of others: two for each power of two."""
    number = uses + 1
    octave = number.bit_length() - 1
    age = 2 * octave + (number * number >> 2 * octave + 1)
    return age if age < AGES else AGES - 1


AGE_ENDS: Final = (
    *(math.isqrt((1 << age + 1) - 1) for age in range(AGES - 1)),
    1 << 62,
)
"""The last use of each age, counted from 1."""


def without_gaps(words: dict[int, int]) -> dict[int, int]:
    """The same without the room that removed keys left, unless that would take long."""
    if len(words) > COMPACTED_MAX:
        return words
    # A copy would have the same room.
    return dict(zip(words, words.values(), strict=True))


class ReuseSample:
    """When keys of each kind are used again, and the hits that an LRU would have."""

    def __init__(self) -> None:
        self._bits = _SAMPLED_BITS_MIN
        self.mask = (1 << self._bits) - 1
        """A key whose first byte has none of these bits is sampled."""
        self._young: dict[int, int] = {}
        """Hash of a key to the time of its last use, its first byte, and its kind."""
        self._old: dict[int, int] = {}
        """The same of keys that were used before those."""
        self._again = [[0.0] * AGES for _ in range(KINDS)]
        self._given_up = np.zeros((KINDS, AGES))
        self._lru = OrderedDict[int, int]()
        """Hash of a key to its first byte."""
        self._debt = 0
        """Hits that an LRU had more."""
        self._lru_until = 0
        self._pause_spans = PAUSE_SPANS

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def use(self, key: CacheKey, kind: int, now: int, *, cached: bool) -> None:
        """Note the use of a key that is sampled, and has this kind from now on."""
        name, byte = hash(key), key[1][0]
        word = self._young.pop(name, -1)
        if word < 0:
            word = self._old.pop(name, -1)
        if word >= 0:
            self._again[word & KIND_MASK][age_of(now - (word >> _TIME_SHIFT))] += 1.0
        self._young[name] = now << _TIME_SHIFT | byte << KIND_BITS | kind
        self._debt += (name in self._lru) - cached
        self._lru[name] = byte
        self._lru.move_to_end(name)

    def trim(self, now: int, capacity: int) -> None:
        """Give up the older half of the keys if there are too many; decide on LRU."""
        span = SAMPLED_SPAN * capacity
        while span >> self._bits > SAMPLED_MAX and self._bits < _SAMPLED_BITS_MAX:
            self._thin()
        size = max(SAMPLED_MIN, span >> self._bits)
        if 2 * len(self._young) > size:
            self._given_up += _by_age(self._old, now)
            self._old, self._young = without_gaps(self._young), {}
        size = max(1, capacity >> self._bits)
        while len(self._lru) > size:
            self._lru.popitem(last=False)
        self._debt = max(-size, self._debt)
        # A pause of an empty cache would take no time, and still double the next one.
        if capacity and self._debt > size and now >= self._lru_until:
            self._lru_until = now + self._pause_spans * capacity
            self._pause_spans *= 2
            self._debt = 0

    def _thin(self) -> None:
        self._bits += 1
        self.mask = (1 << self._bits) - 1
        for names in (self._young, self._old):
            for name in [name for name, word in names.items() if word >> KIND_BITS & self.mask]:
                del names[name]
        for name in [name for name, byte in self._lru.items() if byte & self.mask]:
            del self._lru[name]
        self._debt //= 2

    def prefers_lru(self, now: int) -> bool:
        """Whether an LRU had more hits not long ago."""
        return now < self._lru_until

    def worth(self, now: int) -> list[list[float]]:
        """Uses for each use of others that a chunk is kept, by kind and age."""
        again = np.array(self._again)
        censored = self._given_up + _by_age(self._young, now) + _by_age(self._old, now)
        # As many as reached each age, and half of those that left it without an end.
        risked = np.cumsum((again + censored)[:, ::-1], axis=1)[:, ::-1] - censored / 2
        self._given_up *= FADING
        self._again = (FADING * again).tolist()
        worth: list[list[float]] = _index(_chances(again, risked)).tolist()
        return worth


def _by_age(words: Mapping[int, int], now: int) -> npt.NDArray[np.float64]:
    """How many keys there are of each kind and age."""
    values = np.fromiter(words.values(), np.int64, len(words))
    ages = np.minimum(2 * np.log2(1 + now - (values >> _TIME_SHIFT)), AGES - 1).astype(np.int64)
    counts = np.bincount((values & KIND_MASK) * AGES + ages, minlength=KINDS * AGES)
    return counts.reshape(KINDS, AGES).astype(np.float64)


def _chances(
    again: npt.NDArray[np.float64], risked: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """The chance to be used at each age, if not before. Rare kinds lean on all like them."""
    overall = again.sum(axis=0) / np.maximum(risked.sum(axis=0), 1.0)
    chances = np.empty_like(again)
    for uses in range(USES):
        own, of = again[uses::USES], risked[uses::USES]
        alike = (own.sum(axis=0) + USES_WEIGHT * overall) / (of.sum(axis=0) + USES_WEIGHT)
        chances[uses::USES] = (own + KIND_WEIGHT * alike) / (of + KIND_WEIGHT)
    return np.minimum(chances, 1.0)


def _index(chances: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The Gittins index of each kind and age: the best ratio of uses to time of any stop."""
    none = np.zeros((KINDS, 1))
    left = np.hstack([none + 1, np.cumprod(1 - chances, axis=1)])
    spent = np.hstack([none, np.cumsum((left[:, :-1] + left[:, 1:]) / 2 * _WIDTHS, axis=1)])
    uses = left[:, :-1, None] - left[:, None, :]
    time = spent[:, None, :] - spent[:, :-1, None]
    ratios = np.divide(uses, time, out=np.zeros_like(uses), where=time > 0)
    index: npt.NDArray[np.float64] = ratios.max(axis=2)
    return index
