"""Which part of the uses host memory of another size would serve, estimated from uses as they pass.

For LRU, by the average eviction time (Hu et al., "Kinetic Modeling of Data Eviction in Cache",
USENIX ATC 2016): an unused key moves towards eviction with every use that finds its key behind it.
So a cache of c keys evicts after T uses, where c is the integral from 0 to T of the part of uses
whose key is used again later than t. It needs the times between uses of a key, no order of keys.

Prompts share their beginnings, so that few keys have much of all uses, and whether a plain sample
has them decides what it finds. So keys with `HOT_USES` are counted one by one, and of the others
those whose hash is below a threshold.

Invariants: at most `keys_max` keys of each kind are remembered; a use takes constant time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import log2
from typing import Final

HOT_USES: Final = 4
SPAN: Final = 4
"""Sizes up to this many times the capacity are estimated."""
HALF_LIFE: Final = 32
HALF_LIFE_MIN: Final = 1 << 16
BINS_PER_OCTAVE: Final = 8
OCTAVES: Final = 40
_HASH_BYTES: Final = 4
_HASHES: Final = 1 << 8 * _HASH_BYTES


class _Reuses:
    """Times between two uses of a key, and uses that had none, in uses of any key."""

    __slots__ = ("bins", "total")

    def __init__(self) -> None:
        self.bins = [0.0] * (BINS_PER_OCTAVE * OCTAVES)
        self.total = 0.0

    def add(self, since: int) -> None:
        # Below 0 where one use names a key twice.
        self.bins[int(BINS_PER_OCTAVE * log2(1 + max(0, since)))] += 1.0

    def halve(self) -> None:
        self.bins = [each / 2 for each in self.bins]
        self.total /= 2


class HitCurve:
    """Hit ratio by size, for a cache of `capacity` keys. Keys are hashes of at least 4 bytes.

    It remembers the last `keys_max` keys that are used often, and as many of the others.
    After `half_life` uses, a use counts half; by default after `HALF_LIFE` times the capacity.
    """

    def __init__(self, capacity: int, keys_max: int, half_life: int = 0) -> None:
        self._keys_max = keys_max
        self._given_half_life = half_life
        self._hot = OrderedDict[bytes, int]()
        self._sampled = OrderedDict[bytes, int]()
        self._hot_reuses, self._other_reuses = _Reuses(), _Reuses()
        self._others = 0.0
        """Uses of keys that are not hot, sampled or not."""
        self._now = 0
        self._halved = 0
        self.resize(capacity)

    def resize(self, capacity: int) -> None:
        """Set the capacity, in keys: the sample has about as many as are of interest."""
        self._threshold = int(_HASHES * min(1.0, self._keys_max / (SPAN * max(1, capacity))))
        self._half_life = self._given_half_life or max(HALF_LIFE_MIN, HALF_LIFE * capacity)

    @property
    def uses(self) -> int:
        """How many there were."""
        return self._now

    def use(self, keys: Sequence[bytes], earlier: Sequence[int]) -> None:
        """Note a use of a chain, head first, whose keys had `earlier` uses before."""
        hot, sampled, began = self._hot, self._sampled, self._now
        for last, key, uses in zip(
            range(began + 1, began + 1 + len(keys)), reversed(keys), reversed(earlier), strict=True
        ):
            # The head is used last, so that its tail goes before it.
            if (before := hot.pop(key, None)) is not None:
                self._hot_reuses.total += 1
                self._hot_reuses.add(began - before)
                hot[key] = last
                continue
            self._others += 1
            if int.from_bytes(key[:_HASH_BYTES], "big") < self._threshold:
                self._other_reuses.total += 1
                if (before := sampled.pop(key, None)) is not None:
                    self._other_reuses.add(began - before)
                if uses < HOT_USES:
                    sampled[key] = last
            if uses >= HOT_USES:
                hot[key] = last
        self._now += len(keys)
        while len(hot) > self._keys_max:
            hot.popitem(last=False)
        while len(sampled) > self._keys_max:
            sampled.popitem(last=False)
        if self._now - self._halved > self._half_life:
            self._halved = self._now
            self._others /= 2
            self._hot_reuses.halve()
            self._other_reuses.halve()

    def ratios(self, sizes: Sequence[float]) -> list[float] | None:
        """The hit ratio of each size (in keys, ascending); None before the first uses."""
        total = self._hot_reuses.total + self._others
        if not total or not self._other_reuses.total:
            return None
        scale = self._others / self._other_reuses.total
        found: list[float] = []
        unused, held = 1.0, 0.0
        for number, (hot, other) in enumerate(
            zip(self._hot_reuses.bins, self._other_reuses.bins, strict=True)
        ):
            width = 2 ** (number / BINS_PER_OCTAVE) * (2 ** (1 / BINS_PER_OCTAVE) - 1)
            after = unused - (hot + other * scale) / total
            holds = (unused + after) / 2 * width
            while len(found) < len(sizes) and sizes[len(found)] <= held + holds:
                part = (sizes[len(found)] - held) / holds if holds > 0 else 1.0
                found.append(1 - (unused + (after - unused) * part))
            unused, held = after, held + holds
        return found + [1 - unused] * (len(sizes) - len(found))

    def __iter__(self) -> Iterator[bytes]:
        """The remembered keys."""
        yield from self._hot
        yield from self._sampled
