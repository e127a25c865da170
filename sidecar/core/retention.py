"""Retention of chunks: until when they are kept, and whether they may go to the object store.

Owns the rule, the tag of a slot (it returns with the slot after a restart), and the order of
expiry. Does not own removal (`host_tier.py`) or writes (`writes.py`).

Times are on the engine's clock, which starts with the machine. A pool is not taken over after a
reboot, so the time in a tag is valid wherever it is read. Pure.
"""

import enum
import heapq
import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Final, Generic, NamedTuple, TypeVar

from sidecar.protocol import TENANT_BYTES

T = TypeVar("T")

_TAG: Final = struct.Struct(f"<{TENANT_BYTES}sQ")
"""Tenant, then from the lowest bit on: the flag `stays`, milliseconds (0 for never), and uses (4
bits), which the pool counts."""
_MS_BITS: Final = 59
_MS_MAX: Final = (1 << _MS_BITS) - 1
USES_MAX: Final = 15
_NO_TENANT: Final = bytes(TENANT_BYTES)
_STALE_MAX: Final = 1024


class Retention(NamedTuple):
    """When a chunk expires (`math.inf`: never), and whether it stays on this node."""

    expires_at: float = math.inf
    stays: bool = False

    def stricter(self, other: "Retention") -> "Retention":
        """What satisfies both."""
        if self == other:
            # Mostly; a record for each chunk would be one more that Python's collector looks at.
            return self
        return Retention(min(self.expires_at, other.expires_at), self.stays or other.stays)


FOR_EVER: Final = Retention()


class Gone(enum.Enum):
    """Why no tier has a chunk any more."""

    __hash__ = object.__hash__  # That of Enum is Python code, and slow.

    EVICTED = "evicted"
    """It was evicted to make room, found none, or left the object store."""
    EXPIRED = "expired"
    QUOTA = "quota"
    """It was evicted, or not stored, because its tenant was at its limit."""


def slot_tag(tenant: bytes, retention: Retention) -> bytes:
    """The tag of a slot: its tenant and retention. All zeros: no tenant, for ever."""
    ms = 0
    if retention.expires_at < math.inf:
        # Rounded down, but never to 0, which means never.
        ms = min(max(int(retention.expires_at * 1000), 1), _MS_MAX)
    return _TAG.pack(tenant or _NO_TENANT, ms << 1 | retention.stays)


def read_tag(tag: bytes) -> tuple[bytes, Retention, int]:
    """Tenant, retention and uses of a slot with this tag."""
    tenant, word = _TAG.unpack(tag)
    ms = word >> 1 & _MS_MAX
    retention = Retention(ms / 1000 if ms else math.inf, stays=bool(word & 1))
    return (b"" if tenant == _NO_TENANT else tenant), retention, word >> 1 + _MS_BITS


class Expiries(Generic[T]):
    """What expires, soonest first. An entry that is not `valid` any more does not count.

    Invariant: such entries are at most as many as valid ones, and a constant.
    """

    def __init__(self, valid: Callable[[T, float], bool]) -> None:
        self._valid = valid
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._sweep_at = _STALE_MAX

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, expires_at: float, what: T) -> None:
        """Add an entry; earlier entries of the same thing may stay."""
        if len(self._heap) > self._sweep_at:
            self._heap = [entry for entry in self._heap if self._valid(entry[2], entry[0])]
            heapq.heapify(self._heap)
            self._sweep_at = 2 * len(self._heap) + _STALE_MAX
        # After the sweep: a chunk gets its slot, and is valid, only after this.
        heapq.heappush(self._heap, (expires_at, next(self._numbers), what))

    def due(self, now: float) -> Iterator[T]:
        """Remove and yield what is due."""
        while self._heap and self._heap[0][0] <= now:
            expires_at, _, what = heapq.heappop(self._heap)
            if self._valid(what, expires_at):
                yield what
