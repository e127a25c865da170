"""How long transfers of KV take and how large they are, by kind and model.

Owns the distributions. Does not own what is transferred (`copies.py`, `executor.py`), nor the names
under which they are exported (`observe/metrics.py`).

Invariant: its memory is bounded. Models beyond `MODELS_MAX` count as `OTHER_MODELS`.
"""

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Final

from sidecar.sessions.model_names import ModelLabels
from sidecar.sessions.namespaces import RealmLayout

SECONDS: Final = tuple(
    count * unit for unit in (0.001, 0.01, 0.1, 1.0, 10.0) for count in (1, 2, 5)
)
BYTES: Final = tuple(float(1 << exponent) for exponent in range(14, 35, 2))
"""16 KiB to 16 GiB."""


class Kind(StrEnum):
    """A kind of transfer."""

    LOAD = "load"
    """Host memory to an engine: the chunks of a prompt, of one rank and KV cache group."""
    STORE = "store"
    """An engine to host memory, the same; long ones in parts."""
    READ = "read"
    """The object store to host memory: one rank's part of a chunk."""
    WRITE = "write"
    """Host memory to the object store, the same."""


class Distribution:
    """Counts values by the smallest bound that is not below them, and adds them up."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds, and how many values are not above them, as Prometheus has them."""
        return list(zip((*map(str, self._bounds), "+Inf"), accumulate(self._counts), strict=True))


class TransferTimes:
    """All distributions of a sidecar."""

    def __init__(self) -> None:
        self._labels = ModelLabels()
        self.seconds: dict[tuple[str, str], Distribution] = {}
        """By kind and model."""
        self.num_bytes: dict[tuple[str, str], Distribution] = {}
        self.lookups: dict[str, Distribution] = {}
        """Seconds from a lookup to its answer, by model."""

    def ended(self, kind: Kind, realm: RealmLayout, seconds: float, num_bytes: int) -> None:
        """Count a transfer that succeeded."""
        name = (kind.value, self._labels.of(realm.model_name))
        if name not in self.seconds:
            self.seconds[name] = Distribution(SECONDS)
            self.num_bytes[name] = Distribution(BYTES)
        self.seconds[name].add(seconds)
        self.num_bytes[name].add(num_bytes)

    def answered(self, realm: RealmLayout, seconds: float) -> None:
        """Count a lookup that was answered."""
        name = self._labels.of(realm.model_name)
        if name not in self.lookups:
            self.lookups[name] = Distribution(SECONDS)
        self.lookups[name].add(seconds)
