"""How long transfers of KV take and how large they are, by kind and model.

Owns the distributions. Does not own what is transferred (`copies.py`, `executor.py`), nor the names
under which they are exported (`observe/metrics.py`).

Invariant: its memory is bounded.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate
from typing import Final, NamedTuple

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
    """Host memory to an engine: the chunks of a prompt, of one rank and KV cache group, or the part
    of them that one thread copied."""
    STORE = "store"
    """An engine to host memory, the same."""
    READ = "read"
    """The object store to host memory: one rank's part of a chunk."""
    WRITE = "write"
    """Host memory to the object store, the same."""


_CAUSES: Final = {
    Kind.LOAD: "a request needs them",
    Kind.STORE: "a request computed them",
    Kind.READ: "a request looked it up",
    Kind.WRITE: "it is to be written",
}
"""Why each kind of transfer happens, if nothing more is known."""


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


class EndedTransfer(NamedTuple):
    """A transfer that succeeded."""

    number: int
    """Counts from 1."""
    kind: Kind
    model: str
    began: float
    """Seconds since 1970."""
    seconds: float
    num_bytes: int
    about: str
    """What was transferred, for whom."""
    cause: str
    """Why."""


class TransferTimes:
    """All distributions of a sidecar, and its last `kept_max` transfers one by one."""

    def __init__(self, kept_max: int) -> None:
        self.recent: deque[EndedTransfer] = deque(maxlen=kept_max)
        self._last_number = 0
        self._labels = ModelLabels()
        self.seconds: dict[tuple[str, ...], Distribution] = {}
        """By kind and model."""
        self.num_bytes: dict[tuple[str, ...], Distribution] = {}
        self.lookups: dict[tuple[str, ...], Distribution] = {}
        """Seconds from a lookup to its answer, by model."""

    def ended(
        self,
        kind: Kind,
        realm: RealmLayout,
        seconds: float,
        num_bytes: int,
        about: str,
        cause: str = "",
    ) -> None:
        """Count a transfer that succeeded just now. `cause`: why, unless its kind says so."""
        name = (kind.value, self._labels.of(realm.model_name))
        if name not in self.seconds:
            self.seconds[name] = Distribution(SECONDS)
            self.num_bytes[name] = Distribution(BYTES)
        self.seconds[name].add(seconds)
        self.num_bytes[name].add(num_bytes)
        self._last_number += 1
        began, cause = time.time() - seconds, cause or _CAUSES[kind]
        self.recent.append(
            EndedTransfer(self._last_number, kind, name[1], began, seconds, num_bytes, about, cause)
        )

    def answered(self, realm: RealmLayout, seconds: float) -> None:
        """Count a lookup that was answered."""
        name = (self._labels.of(realm.model_name),)
        if name not in self.lookups:
            self.lookups[name] = Distribution(SECONDS)
        self.lookups[name].add(seconds)
